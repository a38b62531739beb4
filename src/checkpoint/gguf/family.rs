//! The translation of a GGUF architecture to Hugging Face terms, as plain data: tensor names, metadata keys, and the storage of rows and
//! norms. Higher floors define the families and pass them to the reader.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json};

use super::header::{Pairs, Unread, shortest};
use crate::base::error::bail;
use crate::base::{Result, memory};
use crate::checkpoint::source::Source;
use crate::checkpoint::tensors::{self, Raw};

/// A GGUF architecture and its translation to Hugging Face terms. Names are without a suffix such as `.weight`, keys without the
/// architecture prefix.
#[derive(Clone, Copy, Debug)]
pub struct GgufFamily {
    /// `general.architecture`, for example "qwen3moe".
    pub architecture: &'static str,
    /// `model_type` of `config.json`, for example "qwen3_moe".
    pub model_type: &'static str,
    /// Entry of `architectures` in `config.json`, for example "Qwen3MoeForCausalLM".
    pub class: &'static str,
    /// Key and value of the activation in `config.json`: ("hidden_act", "silu").
    pub activation: (&'static str, &'static str),
    /// Tensors outside the blocks, as pairs of GGUF name and logical name: ("token_embd", "model.embed_tokens"). Here and below a GGUF
    /// name is without the suffix, which the logical name then gets too, or whole.
    pub globals: &'static [(&'static str, &'static str)],
    /// Tensors within `blk.N` and `model.layers.N`, in lists: ("attn_qkv", "self_attn.qkv_proj"), ("ssm_a", "linear_attn.A_log").
    pub per_layer: &'static [&'static [(&'static str, &'static str)]],
    /// Tensors of the drafter outside its block, which `blk.N` after the last block has in GGUF: ("nextn.eh_proj", "mtp.fc").
    pub drafter: &'static [(&'static str, &'static str)],
    /// Tensors outside the blocks whose values `config` translates. The checkpoint has no entries for them.
    pub in_config: &'static [&'static str],
    /// Tensors that GGUF stores in another form: (GGUF name within `blk.N` or outside, form). A tensor may have several.
    pub forms: &'static [(&'static str, GgufForm)],
    /// Tensors within `blk.N` with value heads of a gated delta net, and what of the tensor those are. The value heads of a key head follow
    /// each other in Hugging Face's files. GGUF has the first of every key head, then the second of every key head, and so on.
    pub value_heads: &'static [(&'static str, GgufValueHeads)],
    /// Metadata copied to `config.json` in addition to that of all architectures: (key of `config.json`, GGUF key, kind).
    pub keys: &'static [(&'static str, &'static str, GgufKind)],
    /// Keys that may have a number for each block, which `config` translates: "feed_forward_length".
    pub by_block: &'static [&'static str],
    /// Adds to `config.json` what the tables cannot express.
    pub config: fn(&GgufMetadata<'_>, &mut Map<String, Json>) -> Result<()>,
}

/// How GGUF stores a tensor otherwise than Hugging Face's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufForm {
    /// The two halves of the rows of each head are interleaved. With the key of the number of heads.
    Interleaved(&'static str),
    /// 1 is added to each value.
    OnePlus,
    /// A value x is stored as `-e^x`.
    NegatedExp,
    /// A matrix of one row is stored as a vector.
    OneRow,
    /// Filters `[channels, 1, taps]` are stored as `[channels, taps]`.
    Filters,
    /// A vector is stored as a matrix with the same elements in the same order.
    Vector,
}

/// The part of a tensor that belongs to value heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufValueHeads {
    /// All rows.
    Rows,
    /// The rows after those of queries and keys.
    RowsAfterKeys,
    /// A row or an element for each head.
    Each,
    /// All columns.
    Columns,
}

/// Kind of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GgufKind {
    /// A non-negative integer.
    Integer,
    /// A number.
    Float,
    /// A boolean.
    Boolean,
    /// Text.
    Text,
}

/// The metadata of a GGUF file. Keys are those of its architecture, without the architecture prefix: "attention.head_count".
#[derive(Clone, Copy)]
pub struct GgufMetadata<'a> {
    pub(super) architecture: &'a str,
    pub(super) pairs: &'a Pairs,
    pub(super) raws: &'a [Raw],
    pub(super) unreadable: &'a [Unread],
    pub(super) sources: &'a [Source],
}

/// More values than any vector in a config has.
const MOST_VALUES: usize = 1 << 16;

impl GgufMetadata<'_> {
    /// The full key in the file.
    pub fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// An integer; a list of equal numbers counts as one.
    pub fn integer(&self, key: &str) -> Result<Option<u64>> {
        self.pairs.integer(&self.key(key))
    }

    /// A number, with the fewest digits that reproduce the stored one.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        Ok(self.pairs.float(&self.key(key))?.map(shortest))
    }

    /// A boolean.
    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.pairs.boolean(&self.key(key))
    }

    /// Text.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.pairs.text(&self.key(key))
    }

    /// A list of integers or booleans, the latter as 0 and 1; `None` also for a single value.
    pub fn integers(&self, key: &str) -> Option<&[i64]> {
        self.pairs.integers(&self.key(key))
    }

    /// The shape of the tensor `name`, such as "token_embd.weight".
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.shapes().find(|(key, _)| *key == name).map(|(_, s)| s)
    }

    /// Whether the name of any tensor ends with `suffix`, such as ".attn_q.bias".
    pub fn any_ends_with(&self, suffix: &str) -> bool {
        self.shapes().any(|(key, _)| key.ends_with(suffix))
    }

    /// The blocks with the tensor `name`, such as "attn_v.weight".
    pub fn blocks_with(&self, name: &str) -> BTreeSet<usize> {
        let number = |(key, _): (&str, _)| {
            let (number, within) = str::strip_prefix(key, "blk.")?.split_once('.')?;
            number.parse().ok().filter(|_| within == name)
        };
        self.shapes().filter_map(number).collect()
    }

    /// Names and shapes of all tensors.
    fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        let raws = self.raws.iter().map(|r| (&*r.key, &*r.shape));
        let unreadable = self.unreadable.iter().map(|u| (&*u.key, &*u.shape));
        raws.chain(unreadable)
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
