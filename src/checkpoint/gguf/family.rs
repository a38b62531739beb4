//! What a GGUF architecture says in the words of Hugging Face, as plain data: its tensor names, its metadata keys and how its
//! rows and norms are stored. The floors above know the families of models and give them to the reader.

use serde_json::{Map, Value as Json};

use super::header::{Pairs, Unread, shortest};
use crate::base::error::bail;
use crate::base::{Result, memory};
use crate::checkpoint::source::Source;
use crate::checkpoint::tensors::{self, Raw};

/// A GGUF architecture that is translated to the words of Hugging Face. Names are without a suffix such as `.weight`, keys
/// without the architecture in front.
#[derive(Clone, Copy, Debug)]
pub struct GgufFamily {
    /// `general.architecture`, "qwen3moe".
    pub architecture: &'static str,
    /// `model_type` of `config.json`, "qwen3_moe".
    pub model_type: &'static str,
    /// The entry of `architectures` in `config.json`, "Qwen3MoeForCausalLM".
    pub class: &'static str,
    /// Key and value of the activation in `config.json`: ("hidden_act", "silu").
    pub activation: (&'static str, &'static str),
    /// Tensors outside the blocks, GGUF name before logical name: ("token_embd", "model.embed_tokens").
    pub globals: &'static [(&'static str, &'static str)],
    /// Tensors within `blk.N` and `model.layers.N`: ("attn_qkv", "self_attn.qkv_proj").
    pub per_layer: &'static [(&'static str, &'static str)],
    /// GGUF names within `blk.N` whose rows lie interleaved within each head, so that rows that rotate together are neighbours,
    /// and the key that counts the heads: ("attn_q", "attention.head_count").
    pub interleaved: &'static [(&'static str, &'static str)],
    /// GGUF names, within `blk.N` and outside, of norms that are stored with 1 added to each weight.
    pub one_plus: &'static [&'static str],
    /// GGUF names within `blk.N` of matrices of one row, which are stored as vectors.
    pub one_row: &'static [&'static str],
    /// Metadata that goes into `config.json` as it is, beside what all architectures have: (key of `config.json`, GGUF key, kind).
    pub keys: &'static [(&'static str, &'static str, GgufKind)],
    /// Adds to `config.json` what no table can say.
    pub config: fn(&GgufMetadata<'_>, &mut Map<String, Json>) -> Result<()>,
}

/// What kind of value a metadata key has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufKind {
    /// A whole number, zero or above.
    Integer,
    /// A number.
    Float,
    /// True or false.
    Boolean,
    /// Text.
    Text,
}

/// The metadata of a GGUF file. Keys are those of its architecture, without the architecture in front:
/// "attention.head_count".
#[derive(Clone, Copy)]
pub struct GgufMetadata<'a> {
    pub(super) architecture: &'a str,
    pub(super) pairs: &'a Pairs,
    pub(super) raws: &'a [Raw],
    pub(super) unreadable: &'a [Unread],
    pub(super) sources: &'a [Source],
}

/// More values than any vector has that belongs into a config.
const MOST_VALUES: usize = 1 << 16;

impl GgufMetadata<'_> {
    /// The key as the file has it.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A whole number; a list of numbers that are all the same counts as one.
    pub fn integer(&self, key: &str) -> Result<Option<u64>> {
        self.pairs.integer(&self.key(key))
    }

    /// A number, with the fewest digits that are the stored one.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        Ok(self.pairs.float(&self.key(key))?.map(shortest))
    }

    /// A truth value.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.pairs.boolean(&self.key(key))
    }

    /// Text.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.pairs.text(&self.key(key))
    }

    /// A list of whole numbers or truth values, the latter as 0 and 1; `None` also for a single value.
    pub fn integers(&self, key: &str) -> Option<&[i64]> {
        self.pairs.integers(&self.key(key))
    }

    /// The values of the vector `name`, a tensor such as "rope_factors_long.weight".
    pub fn vector(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let Some(raw) = self.raws.iter().find(|r| r.key == name) else {
            return Ok(None);
        };
        let elements = raw.elements();
        if raw.shape.len() != 1 || elements > MOST_VALUES || raw.encoding.element_bytes().is_none()
        {
            bail!(
                CorruptFile,
                "'{name}' is {} of shape {:?}; expected a vector of at most {MOST_VALUES} plain numbers",
                raw.encoding,
                raw.shape
            );
        }
        let mut values = memory::zeros(elements)?;
        let mut staging = Vec::new();
        let bytes = self.sources[raw.span.source].slice(raw.span.range.clone(), &mut staging)?;
        tensors::decode(raw.encoding, bytes, &mut values);
        Ok(Some(values))
    }

    /// The value of `key` for a config.
    pub(super) fn json(&self, key: &str, kind: GgufKind) -> Result<Option<Json>> {
        Ok(match kind {
            GgufKind::Integer => self.integer(key)?.map(Json::from),
            GgufKind::Float => self.float(key)?.map(Json::from),
            GgufKind::Boolean => self.boolean(key)?.map(Json::from),
            GgufKind::Text => self.text(key)?.map(Json::from),
        })
    }
}
