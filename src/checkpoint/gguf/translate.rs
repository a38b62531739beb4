//! Translates GGUF names and metadata to Hugging Face terms: tensor names, `config.json` keys, the vocabulary. Differences between
//! architectures are data of a [`GgufFamily`]; decodes nothing.

use serde_json::{Map, Value as Json, json};

use super::family::{GgufFamily, GgufForm, GgufKind, GgufMetadata, GgufValueHeads};
use super::header::Pairs;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::checkpoint::order::Order;
use crate::checkpoint::tensors::{Function, Raw, StoredForm};
use crate::checkpoint::{POOLING_FILE, RareEntries, Vocabulary};

/// Entries of `config.json` for every architecture, as in [`GgufFamily::keys`].
const COMMON: [(&str, &str, GgufKind); 6] = [
    ("hidden_size", "embedding_length", GgufKind::Integer),
    (
        "intermediate_size",
        "feed_forward_length",
        GgufKind::Integer,
    ),
    ("num_hidden_layers", "block_count", GgufKind::Integer),
    ("num_attention_heads", HEADS, GgufKind::Integer),
    (
        "max_position_embeddings",
        "context_length",
        GgufKind::Integer,
    ),
    (
        "rms_norm_eps",
        "attention.layer_norm_rms_epsilon",
        GgufKind::Float,
    ),
];

const HEADS: &str = "attention.head_count";
const KV_HEADS: &str = "attention.head_count_kv";

/// Blocks of the drafter, which follow the others.
const DRAFTER_BLOCKS: &str = "nextn_predict_layers";

/// A tensor of a family.
struct Found<'k> {
    /// Its GGUF name in the table that has it.
    stem: &'static str,
    /// The suffix of that name in the file, as in "weight"; `None` if the table has the whole name.
    suffix: Option<&'k str>,
    /// The logical name.
    name: String,
}

/// Finds a GGUF name, whole or without its suffix.
fn lookup<'k>(table: &'static [(&'static str, &'static str)], key: &'k str) -> Option<Found<'k>> {
    let find = |key: &str| table.iter().find(|(stem, _)| *stem == key);
    if let Some(&(stem, name)) = find(key) {
        return Some(Found {
            stem,
            suffix: None,
            name: name.to_owned(),
        });
    }
    let (before, suffix @ ("weight" | "bias" | "input_scale" | "scale")) = key.rsplit_once('.')?
    else {
        return None;
    };
    find(before).map(|&(stem, name)| Found {
        stem,
        suffix: Some(suffix),
        name: format!("{name}.{suffix}"),
    })
}

/// A file's metadata, and the family of its architecture.
pub(super) struct Translation<'a> {
    metadata: GgufMetadata<'a>,
    /// `None` for an unknown architecture, whose names stay as they are.
    family: Option<&'a GgufFamily>,
}

impl<'a> Translation<'a> {
    pub(super) fn new(metadata: GgufMetadata<'a>, families: &'a [GgufFamily]) -> Result<Self> {
        let translation = Translation {
            metadata,
            family: families
                .iter()
                .find(|f| f.architecture == metadata.architecture),
        };
        let heads = translation.heads(HEADS)?;
        translation.heads(KV_HEADS)?;
        if translation.family.is_some() && heads.is_none() {
            bail!(CorruptFile, "it has no {}", metadata.key(HEADS));
        }
        Ok(translation)
    }

    /// Whether `key` may have a number for each block, which the family translates.
    fn is_by_block(&self, key: &str) -> bool {
        self.family.is_some_and(|f| f.by_block.contains(&key))
    }

    /// Number of attention heads by `key`, or else the number of query heads. `None` if each block may have its own.
    fn heads(&self, key: &str) -> Result<Option<usize>> {
        if self.is_by_block(key) {
            return Ok(None);
        }
        match self.metadata.integer(key)? {
            Some(n) if !(1..=65536).contains(&n) => {
                bail!(CorruptFile, "'{}' is {n}", self.metadata.key(key))
            }
            Some(n) => Ok(Some(n as usize)),
            None if key == HEADS => Ok(None),
            None => self.heads(HEADS),
        }
    }

    /// The files of sentence-transformers that say what `pooling_type` does; none if the file names no pooling, or that of a reranker.
    /// llama.cpp normalizes pooled embeddings.
    pub(super) fn embedding(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let mode = match self.metadata.integer("pooling_type")? {
            Some(1) => "mean_tokens",
            Some(2) => "cls_token",
            Some(3) => "lasttoken",
            _ => return Ok(Vec::new()),
        };
        let mut pooling = Map::new();
        if let Some(width) = self.metadata.integer("embedding_length")? {
            pooling.insert("word_embedding_dimension".to_owned(), width.into());
        }
        for each in ["cls_token", "mean_tokens", "lasttoken"] {
            pooling.insert(format!("pooling_mode_{each}"), (each == mode).into());
        }
        let module = |(index, (path, name)): (usize, (&str, &str))| {
            json!({
                "idx": index, "name": index.to_string(), "path": path,
                "type": format!("sentence_transformers.models.{name}"),
            })
        };
        let modules = [
            ("", "Transformer"),
            ("1_Pooling", "Pooling"),
            ("2_Normalize", "Normalize"),
        ];
        let modules: Json = modules.into_iter().enumerate().map(module).collect();
        let files = [("modules.json", modules), (POOLING_FILE, pooling.into())];
        let file = |(name, content): (&str, Json)| {
            let text = serde_json::to_vec_pretty(&content);
            let text = text.map_err(|e| err!(Internal, "writing {name}: {e}"))?;
            Ok((name.to_owned(), text))
        };
        files.into_iter().map(file).collect()
    }

    /// Blocks of the file, without those of a drafter.
    fn blocks(&self) -> Result<Option<u64>> {
        let drafter = self.metadata.integer(DRAFTER_BLOCKS)?.unwrap_or(0);
        let all = self.metadata.integer("block_count")?;
        Ok(all.map(|all| all.saturating_sub(drafter)))
    }

    /// A tensor that the family knows; `None` for others.
    fn find<'k>(&self, key: &'k str) -> Result<Option<Found<'k>>> {
        let Some(family) = self.family else {
            return Ok(None);
        };
        if let Some(found) = lookup(family.globals, key) {
            return Ok(Some(found));
        }
        let block = key.strip_prefix("blk.").and_then(|key| key.split_once('.'));
        let Some((number, within)) =
            block.and_then(|(number, within)| Some((number.parse::<u32>().ok()?, within)))
        else {
            return Ok(None);
        };
        let number = u64::from(number);
        let of_drafter = match self.blocks()? {
            Some(blocks) if number >= blocks => Some(number - blocks),
            _ => None,
        };
        if of_drafter.is_some()
            && let Some(found) = lookup(family.drafter, within)
        {
            return Ok(Some(found));
        }
        let found = family
            .per_layer
            .iter()
            .find_map(|table| lookup(table, within));
        Ok(found.map(|found| Found {
            name: match of_drafter {
                Some(block) => format!("mtp.layers.{block}.{}", found.name),
                None => format!("model.layers.{number}.{}", found.name),
            },
            ..found
        }))
    }

    /// The forms of a tensor's values; those of a matrix are not those of its bias or its scale.
    fn forms_of(&self, found: &Found<'_>) -> impl Iterator<Item = GgufForm> {
        let forms = self.family.map_or(&[][..], |family| family.forms);
        let (stem, suffix) = (found.stem, found.suffix);
        let forms = forms.iter().filter(move |(name, _)| *name == stem);
        forms
            .map(|(_, form)| *form)
            .filter(move |form| match (form, suffix) {
                (GgufForm::Interleaved(_), suffix) => suffix != Some("input_scale"),
                (_, suffix) => matches!(suffix, None | Some("weight")),
            })
    }

    /// Whether a tensor has a name of its own, which does not follow from that of another with another suffix.
    pub(super) fn is_named_whole(&self, key: &str) -> Result<bool> {
        Ok(self.find(key)?.is_some_and(|found| found.suffix.is_none()))
    }

    /// Whether the config has the values of a tensor, which is then no entry.
    pub(super) fn is_in_config(&self, key: &str) -> bool {
        self.family.is_some_and(|f| f.in_config.contains(&key))
    }

    /// The logical name of a tensor, without regard to its form.
    pub(super) fn plain_name(&self, key: &str) -> Result<String> {
        Ok(match self.find(key)? {
            Some(found) => found.name,
            None => key.to_owned(),
        })
    }

    /// The logical name of a tensor, its logical shape, and the form of its values.
    pub(super) fn entry(&self, raw: &Raw) -> Result<(String, Vec<usize>, StoredForm)> {
        let (mut shape, mut form) = (raw.shape.clone(), StoredForm::AS_STORED);
        let Some(found) = self.find(&raw.key)? else {
            return Ok((raw.key.clone(), shape, form));
        };
        for stored in self.forms_of(&found) {
            match stored {
                GgufForm::OnePlus => form.function = Function::OnePlus,
                GgufForm::NegatedExp => form.function = Function::NegatedExp,
                GgufForm::Interleaved(key) => form.rows = self.interleaved(raw, key)?,
                GgufForm::OneRow if shape.len() == 1 => shape.insert(0, 1),
                GgufForm::Filters if shape.len() == 2 => shape.insert(1, 1),
                GgufForm::Vector => shape = vec![raw.elements()],
                GgufForm::OneRow | GgufForm::Filters => {}
            }
        }
        let value_heads = self.family.map_or(&[][..], |family| family.value_heads);
        if let Some((_, part)) = value_heads.iter().find(|(stem, _)| *stem == found.stem)
            && found.suffix != Some("input_scale")
        {
            let order = self.value_heads(raw, *part)?;
            match part {
                GgufValueHeads::Columns => form.columns = order,
                _ => form.rows = order,
            }
        }
        Ok((found.name, shape, form))
    }

    /// The order of the rows of a tensor with as many attention heads as `key` says.
    fn interleaved(&self, raw: &Raw, key: &str) -> Result<Order> {
        let Some(heads) = self.heads(key)? else {
            return Ok(Order::Same);
        };
        if raw.shape.len() > 2 || !raw.shape[0].is_multiple_of(2 * heads) {
            bail!(
                CorruptFile,
                "'{}' of shape {:?} does not divide into {heads} heads of even width",
                raw.key,
                raw.shape
            );
        }
        Ok(Order::Interleaved { heads })
    }

    /// The order of the value heads of a tensor.
    fn value_heads(&self, raw: &Raw, part: GgufValueHeads) -> Result<Order> {
        let size = |key: &str| match self.metadata.integer(key)? {
            Some(n @ 1..=65536) => Ok(n as usize),
            n => bail!(
                CorruptFile,
                "'{}' is {}; expected 1 to 65536",
                self.metadata.key(key),
                n.map_or("missing".to_owned(), |n| n.to_string())
            ),
        };
        let (groups, heads) = (size("ssm.group_count")?, size("ssm.time_step_rank")?);
        let width = size("ssm.inner_size")?;
        if !width.is_multiple_of(heads) {
            bail!(
                CorruptFile,
                "'{}' is {width}, which {heads} value heads ('{}') do not divide",
                self.metadata.key("ssm.inner_size"),
                self.metadata.key("ssm.time_step_rank")
            );
        }
        let (first, width) = match part {
            GgufValueHeads::Each => (0, 1),
            GgufValueHeads::Rows | GgufValueHeads::Columns => (0, width / heads),
            GgufValueHeads::RowsAfterKeys => (2 * groups * size("ssm.state_size")?, width / heads),
        };
        let all = match part {
            GgufValueHeads::Columns => raw.shape[raw.shape.len() - 1],
            _ => raw.shape[0],
        };
        if !heads.is_multiple_of(groups) || all != first + heads * width {
            bail!(
                CorruptFile,
                "'{}' of shape {:?} does not have {heads} value heads of {width} for {groups} key heads{}",
                raw.key,
                raw.shape,
                match first {
                    0 => String::new(),
                    first => format!(" after {first} rows of queries and keys"),
                }
            );
        }
        Ok(Order::Tiled {
            first,
            width,
            groups,
        })
    }

    /// The metadata with the keys of `config.json`. Missing values are left out rather than guessed, unless GGUF defines a default. A size
    /// that every model has is null if the file lacks it, because transformers' defaults are not GGUF's.
    pub(super) fn config(&self) -> Result<Json> {
        let metadata = &self.metadata;
        let mut config = Map::new();
        let model_type = match self.family {
            Some(family) => {
                config.insert("architectures".into(), json!([family.class]));
                let (key, activation) = family.activation;
                config.insert(key.into(), json!(activation));
                family.model_type
            }
            None => metadata.architecture,
        };
        config.insert("model_type".into(), json!(model_type));
        let own = self.family.map_or(&[][..], |f| f.keys);
        let keys = COMMON.iter().chain(own);
        for &(key, gguf, kind) in keys.filter(|(_, gguf, _)| !self.is_by_block(gguf)) {
            if let Some(value) = metadata.json(gguf, kind)? {
                config.insert(key.into(), value);
            }
        }
        if let Some(blocks) = self.blocks()? {
            config.insert("num_hidden_layers".into(), json!(blocks));
        }
        if self.family.is_some() {
            for key in COMMON.map(|(key, ..)| key).iter().chain(&["vocab_size"]) {
                config.entry(*key).or_insert(Json::Null);
            }
        }
        let heads = self.heads(HEADS)?;
        if heads.is_some() {
            config.insert("num_key_value_heads".into(), json!(self.heads(KV_HEADS)?));
        }
        let hidden = metadata.integer("embedding_length")?;
        let head_dim = metadata
            .integer("attention.key_length")?
            .or(hidden.map(|h| h / heads.unwrap_or(1) as u64));
        if let Some(head_dim) = head_dim {
            config.insert("head_dim".into(), json!(head_dim));
            let rotated = metadata.integer("rope.dimension_count")?;
            if let Some(rotated) = rotated.filter(|&r| r != head_dim && head_dim > 0) {
                let factor = rotated as f64 / head_dim as f64;
                config.insert("partial_rotary_factor".into(), json!(factor));
            }
        }
        let theta = metadata.float("rope.freq_base")?;
        config.insert("rope_theta".into(), json!(theta.unwrap_or(10000.0)));
        if let Some(scaling) = self.rope_scaling()? {
            config.insert("rope_scaling".into(), scaling);
        }
        if let Some(shape) = metadata.shape("token_embd.weight") {
            config.insert("vocab_size".into(), json!(shape[0]));
        }
        let tied = metadata.shape("output.weight").is_none();
        config.insert("tie_word_embeddings".into(), json!(tied));
        let biases = [".attn_q.bias", ".attn_qkv.bias"];
        let attention_bias = biases.iter().any(|bias| metadata.any_ends_with(bias));
        config.insert("attention_bias".into(), json!(attention_bias));
        for name in ["bos", "eos"] {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let ids = metadata.pairs.integers(&key);
            if let Some(ids) = ids.filter(|_| name == "eos") {
                let ids: Vec<_> = ids.iter().filter(|&&id| id >= 0).collect();
                config.insert("eos_token_id".into(), json!(ids));
            } else if let Some(id) = metadata.pairs.integer(&key)? {
                config.insert(format!("{name}_token_id"), json!(id));
            }
        }
        if let Some(family) = self.family {
            (family.config)(metadata, &mut config)?;
        }
        Ok(Json::Object(config))
    }

    fn rope_scaling(&self) -> Result<Option<Json>> {
        let metadata = &self.metadata;
        let kind = metadata.text("rope.scaling.type")?;
        let old_linear = metadata.float("rope.scale_linear")?;
        // Some converters write 0 for "no factor".
        let factor = metadata.float("rope.scaling.factor")?.or(old_linear);
        let factor = factor.filter(|&factor| factor != 0.0);
        let kind = match (kind, factor) {
            (None | Some("none"), None) | (Some("none"), _) => return Ok(None),
            (None, Some(_)) => "linear",
            (Some(kind), _) => kind,
        };
        let mut scaling = Map::new();
        scaling.insert("rope_type".into(), json!(kind));
        scaling.insert("factor".into(), json!(factor.unwrap_or(1.0)));
        for (name, gguf, kind) in [
            ("attention_factor", "attn_factor", GgufKind::Float),
            ("beta_fast", "yarn_beta_fast", GgufKind::Float),
            ("beta_slow", "yarn_beta_slow", GgufKind::Float),
            (
                "original_max_position_embeddings",
                "original_context_length",
                GgufKind::Integer,
            ),
        ] {
            if let Some(value) = metadata.json(&format!("rope.scaling.{gguf}"), kind)? {
                scaling.insert(name.into(), value);
            }
        }
        Ok(Some(Json::Object(scaling)))
    }
}

/// The vocabulary, if the file has one; it is moved out of `pairs`.
pub(super) fn vocabulary(pairs: &mut Pairs) -> Result<Option<Vocabulary>> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let Some(tokens) = pairs.take_texts(&key("tokens"))? else {
        return Ok(None);
    };
    let merges = pairs.take_texts(&key("merges"))?.unwrap_or_default();
    let token_types = pairs.take_integers(&key("token_type"))?.unwrap_or_default();
    let scores = pairs.take_floats(&key("scores"))?.unwrap_or_default();
    for (name, len) in [("token_type", token_types.len()), ("scores", scores.len())] {
        if len != 0 && len != tokens.len() {
            bail!(
                CorruptFile,
                "'tokenizer.ggml.{name}' has {len} elements for {} tokens",
                tokens.len()
            );
        }
    }
    let text = |key: &str| Ok(pairs.text(key)?.map(str::to_owned));
    let other_ends = other_ends(pairs, tokens.len());
    let id = |name: &str| -> Result<Option<u32>> {
        let key = key(&format!("{name}_token_id"));
        match pairs.integer(&key)? {
            // Some converters write an id of all ones for "none".
            None | Some(0xffff_ffff) => Ok(None),
            Some(id) if id < tokens.len() as u64 => Ok(Some(id as u32)),
            Some(id) if UNUSED_TOKENS.contains(&name) => {
                tracing::warn!(
                    "'{key}' is {id}, but there are {} tokens; it is ignored, as generations do not use it",
                    tokens.len()
                );
                Ok(None)
            }
            Some(id) => bail!(
                CorruptFile,
                "'{key}' is {id}, but there are {} tokens",
                tokens.len()
            ),
        }
    };
    Ok(Some(Vocabulary {
        model: text(&key("model"))?
            .ok_or_else(|| err!(CorruptFile, "it has tokens but no tokenizer.ggml.model"))?,
        pre: text(&key("pre"))?,
        token_types: token_types.iter().map(|&t| t as i32).collect(),
        merges,
        scores,
        bos: id("bos")?,
        eos: match pairs.integers(&key("eos_token_id")) {
            Some(_) => other_ends.first().copied(),
            None => id("eos")?,
        },
        unk: id("unknown")?,
        pad: id("padding")?,
        add_bos: pairs.boolean(&key("add_bos_token"))?,
        add_eos: pairs.boolean(&key("add_eos_token"))?,
        add_space_prefix: pairs.boolean(&key("add_space_prefix"))?,
        chat_template: text("tokenizer.chat_template")?,
        rare: Box::new(RareEntries {
            ends: id("eot")?.into_iter().chain(other_ends).collect(),
            separator: id("seperator")?,
            classification: id("cls")?,
            mask: id("mask")?,
            tool_template: text("tokenizer.chat_template.tool_use")?,
        }),
        sampling: Box::new(sampling(pairs)?),
        tokens,
    }))
}

/// Tokens whose id is only reported, as GGUF spells their names.
const UNUSED_TOKENS: [&str; 4] = ["padding", "seperator", "cls", "mask"];

/// End tokens of a file beyond one for sequences and one for turns: lists as written by Ollama, and the end of a message that calls a tool.
/// Ids without a token are left out.
fn other_ends(pairs: &Pairs, tokens: usize) -> Vec<u32> {
    let lists = ["eos_token_id", "eos_token_ids"].map(|name| format!("tokenizer.ggml.{name}"));
    let listed = lists.iter().filter_map(|key| pairs.integers(key)).flatten();
    let message = pairs.integer("tokenizer.ggml.eom_token_id").ok().flatten();
    let ids = listed
        .filter_map(|&id| u64::try_from(id).ok())
        .chain(message);
    ids.filter(|&id| id < tokens as u64)
        .map(|id| id as u32)
        .collect()
}

/// The file's sampling settings, with the keys of `generation_config.json`.
fn sampling(pairs: &Pairs) -> Result<serde_json::Map<String, Json>> {
    let mut sampling = serde_json::Map::new();
    for (key, name) in [
        ("temperature", "temp"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ] {
        if let Some(value) = pairs.float(&format!("general.sampling.{name}"))? {
            sampling.insert(key.to_owned(), value.into());
        }
    }
    if let Some(value) = pairs.integer("general.sampling.top_k")? {
        sampling.insert("top_k".to_owned(), value.into());
    }
    Ok(sampling)
}
