//! GGUF names and metadata in the words of Hugging Face: tensor names, `config.json` keys, the vocabulary. Knows which
//! architectures store rotated rows interleaved; decodes nothing.

use serde_json::{Map, Value as Json, json};

use super::Pairs;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::checkpoint::Vocabulary;
use crate::checkpoint::tensors::Raw;

/// The architectures whose names and metadata are translated, and the class that Hugging Face loads them with.
const ARCHITECTURES: [(&str, &str); 3] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
];

/// Tensor names outside the layers.
const GLOBAL: [(&str, &str); 3] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Tensor names within `blk.N` and `model.layers.N`.
const PER_LAYER: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// What the header says about the model, as far as names and row orders depend on it.
pub(super) struct Translation {
    architecture: String,
    known: bool,
    heads: usize,
    kv_heads: usize,
    vocab_size: Option<usize>,
    tied: bool,
    attention_bias: bool,
}

impl Translation {
    pub(super) fn new(pairs: &Pairs, raws: &[Raw]) -> Result<Self> {
        let architecture = pairs
            .text("general.architecture")?
            .ok_or_else(|| err!(CorruptFile, "it has no general.architecture",))?
            .to_owned();
        let known = ARCHITECTURES.iter().any(|(a, _)| *a == architecture);
        let count = |key: &str| -> Result<Option<usize>> {
            let key = format!("{architecture}.attention.{key}");
            match pairs.integer(&key)? {
                Some(n) if !(1..=65536).contains(&n) => {
                    bail!(CorruptFile, "'{key}' is {n}")
                }
                n => Ok(n.map(|n| n as usize)),
            }
        };
        let heads = count("head_count")?;
        let kv_heads = count("head_count_kv")?.or(heads);
        if known && heads.is_none() {
            bail!(CorruptFile, "it has no {architecture}.attention.head_count",);
        }
        let find = |key: &str| raws.iter().find(|r| r.key == key);
        Ok(Translation {
            known,
            heads: heads.unwrap_or(1),
            kv_heads: kv_heads.unwrap_or(1),
            vocab_size: find("token_embd.weight").map(|r| r.shape[0]),
            tied: find("output.weight").is_none(),
            attention_bias: raws.iter().any(|r| r.key.ends_with(".attn_q.bias")),
            architecture,
        })
    }

    /// The Hugging Face name of a tensor, and the number of heads whose rows lie interleaved in it.
    pub(super) fn name(&self, raw: &Raw) -> Result<(String, Option<usize>)> {
        let key = raw.key.as_str();
        let plain = Ok((key.to_owned(), None));
        if !self.known {
            return plain;
        }
        let Some((stem, suffix @ ("weight" | "bias" | "input_scale"))) = key.rsplit_once('.')
        else {
            return plain;
        };
        let lookup = |table: &'static [(&str, &str)], stem: &str| {
            table.iter().find(|(g, _)| *g == stem).map(|(_, h)| *h)
        };
        if let Some(name) = lookup(&GLOBAL, stem) {
            return Ok((format!("{name}.{suffix}"), None));
        }
        let layer = stem.strip_prefix("blk.").and_then(|s| s.split_once('.'));
        let Some((layer, stem)) = layer.filter(|(n, _)| n.parse::<u32>().is_ok()) else {
            return plain;
        };
        let Some(name) = lookup(&PER_LAYER, stem) else {
            return plain;
        };
        let heads = match stem {
            "attn_q" => Some(self.heads),
            "attn_k" => Some(self.kv_heads),
            _ => None,
        };
        let heads = heads.filter(|_| self.architecture == "llama" && suffix != "input_scale");
        if let Some(heads) = heads
            && (raw.shape.len() > 2 || !raw.shape[0].is_multiple_of(2 * heads))
        {
            bail!(
                CorruptFile,
                "'{key}' of shape {:?} does not divide into {heads} heads of even width",
                raw.shape
            );
        }
        Ok((format!("model.layers.{layer}.{name}.{suffix}"), heads))
    }

    /// The metadata with the keys of `config.json`. What the file does not say is left out rather than guessed, except where
    /// GGUF defines a default.
    pub(super) fn config(&self, pairs: &Pairs) -> Result<Json> {
        let a = &self.architecture;
        let mut config = Map::new();
        if let Some((_, class)) = ARCHITECTURES.iter().find(|(name, _)| name == a) {
            config.insert("architectures".into(), json!([class]));
        }
        config.insert("model_type".into(), json!(a));
        let whole = [
            ("hidden_size", "embedding_length"),
            ("intermediate_size", "feed_forward_length"),
            ("num_hidden_layers", "block_count"),
            ("num_attention_heads", "attention.head_count"),
            ("max_position_embeddings", "context_length"),
            ("num_local_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("sliding_window", "attention.sliding_window"),
        ];
        for (key, gguf) in whole {
            if let Some(n) = pairs.integer(&format!("{a}.{gguf}"))? {
                config.insert(key.into(), json!(n));
            }
        }
        if config.contains_key("num_attention_heads") {
            config.insert("num_key_value_heads".into(), json!(self.kv_heads));
        }
        let hidden = pairs.integer(&format!("{a}.embedding_length"))?;
        let head_dim = pairs
            .integer(&format!("{a}.attention.key_length"))?
            .or(hidden.map(|h| h / self.heads as u64));
        if let Some(head_dim) = head_dim {
            config.insert("head_dim".into(), json!(head_dim));
            let rotated = pairs.integer(&format!("{a}.rope.dimension_count"))?;
            if let Some(rotated) = rotated.filter(|&r| r != head_dim && head_dim > 0) {
                let factor = rotated as f64 / head_dim as f64;
                config.insert("partial_rotary_factor".into(), json!(factor));
            }
        }
        let theta = pairs.float(&format!("{a}.rope.freq_base"))?;
        config.insert("rope_theta".into(), json!(theta.unwrap_or(10000.0)));
        if let Some(scaling) = self.rope_scaling(pairs)? {
            config.insert("rope_scaling".into(), scaling);
        }
        if let Some(eps) = pairs.float(&format!("{a}.attention.layer_norm_rms_epsilon"))? {
            config.insert("rms_norm_eps".into(), json!(shortest(eps)));
        }
        if let Some(vocab_size) = self.vocab_size {
            config.insert("vocab_size".into(), json!(vocab_size));
        }
        config.insert("hidden_act".into(), json!("silu"));
        config.insert("tie_word_embeddings".into(), json!(self.tied));
        config.insert("attention_bias".into(), json!(self.attention_bias));
        for name in ["bos", "eos"] {
            if let Some(id) = pairs.integer(&format!("tokenizer.ggml.{name}_token_id"))? {
                config.insert(format!("{name}_token_id"), json!(id));
            }
        }
        Ok(Json::Object(config))
    }

    fn rope_scaling(&self, pairs: &Pairs) -> Result<Option<Json>> {
        let key = |name: &str| format!("{}.rope.scaling.{name}", self.architecture);
        let kind = pairs.text(&key("type"))?;
        let old_linear = pairs.float(&format!("{}.rope.scale_linear", self.architecture))?;
        let factor = pairs.float(&key("factor"))?.or(old_linear);
        let kind = match (kind, factor) {
            (None | Some("none"), None) | (Some("none"), _) => return Ok(None),
            (None, Some(_)) => "linear",
            (Some(kind), _) => kind,
        };
        let mut scaling = Map::new();
        scaling.insert("rope_type".into(), json!(kind));
        scaling.insert("factor".into(), json!(shortest(factor.unwrap_or(1.0))));
        let optional = [
            ("attention_factor", "attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ];
        for (name, gguf) in optional {
            if let Some(value) = pairs.float(&key(gguf))? {
                scaling.insert(name.into(), json!(shortest(value)));
            }
        }
        if let Some(length) = pairs.integer(&key("original_context_length"))? {
            scaling.insert("original_max_position_embeddings".into(), json!(length));
        }
        Ok(Some(Json::Object(scaling)))
    }
}

/// The double with the fewest digits that is the same f32: 1e-6 stored as an f32 reads 1e-6 again.
fn shortest(value: f64) -> f64 {
    let single = value as f32;
    if f64::from(single) == value {
        single.to_string().parse().unwrap_or(value)
    } else {
        value
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
    let id = |name: &str| -> Result<Option<u32>> {
        let key = key(&format!("{name}_token_id"));
        match pairs.integer(&key)? {
            // Some converters write an all-ones id for "none".
            None | Some(0xffff_ffff) => Ok(None),
            Some(id) if id < tokens.len() as u64 => Ok(Some(id as u32)),
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
        eos: id("eos")?,
        eot: id("eot")?,
        unk: id("unknown")?,
        pad: id("padding")?,
        add_bos: pairs.boolean(&key("add_bos_token"))?,
        add_eos: pairs.boolean(&key("add_eos_token"))?,
        add_space_prefix: pairs.boolean(&key("add_space_prefix"))?,
        chat_template: text("tokenizer.chat_template")?,
        sampling: Box::new(sampling(pairs)?),
        tokens,
    }))
}

/// What the file says about choosing tokens, with the keys of `generation_config.json`.
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
