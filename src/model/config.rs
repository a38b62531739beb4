//! What a model is made of, read from a Hugging Face `config.json` (or GGUF metadata in the same words) and checked before
//! any weight is touched. Architectures are rows of a table, not copies of code. Knows no files and no devices.

use serde_json::{Map, Value};

use super::rope;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::format::nvfp4::BLOCK;
use crate::ops::rope::RopeTable;

/// What sets one family of decoders apart from the others that share this block.
#[derive(Debug, PartialEq, Eq)]
pub struct Architecture {
    /// `model_type` in `config.json`, and `general.architecture` in GGUF.
    pub name: &'static str,
    /// The entry of `architectures` in `config.json`.
    pub class: &'static str,
    /// Queries and keys are normalized per head before they are rotated.
    pub qk_norm: bool,
    /// The query, key and value projections always have a bias.
    pub qkv_bias: bool,
    /// `attention_bias` in the config gives all four attention projections a bias.
    pub attention_bias: bool,
    /// `use_sliding_window` in the config restricts some layers to a window.
    pub sliding_window: bool,
}

/// Every architecture that can be loaded.
pub const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "llama",
        class: "LlamaForCausalLM",
        qk_norm: false,
        qkv_bias: false,
        attention_bias: true,
        sliding_window: false,
    },
    Architecture {
        name: "qwen2",
        class: "Qwen2ForCausalLM",
        qk_norm: false,
        qkv_bias: true,
        attention_bias: false,
        sliding_window: true,
    },
    Architecture {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        qk_norm: true,
        qkv_bias: false,
        attention_bias: true,
        sliding_window: true,
    },
];

/// A model's shape and constants. Every size is positive and every product of sizes that a weight needs fits in memory terms.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family.
    pub architecture: &'static Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Decoder blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions the model was made for.
    pub max_positions: usize,
    /// Added to the mean square in every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary frequencies after scaling.
    pub rope: RopeTable,
    /// The head is the embedding.
    pub tied: bool,
    /// The attention projections that must have a bias: query, key and value together, and the output.
    pub qkv_bias: bool,
    /// See `qkv_bias`.
    pub o_bias: bool,
    /// The three MLP projections must have a bias.
    pub mlp_bias: bool,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
    /// The token that begins a text, where the config names one.
    pub bos: Option<u32>,
}

/// More blocks than any model has, and few enough that listing the tensors they lack stays cheap.
const MOST_LAYERS: usize = 4096;
/// Sizes past this are a mistake or an attack, and their products would overflow.
const LARGEST: u64 = 1 << 28;

impl Config {
    /// Bytes that one cached position takes in f16.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (2 * self.layers * self.kv_heads * self.head_dim * size_of::<half::f16>()) as u64
    }

    /// Reads and checks a config. Keys that do not bear on inference are ignored.
    pub fn from_json(config: &Value) -> Result<Config> {
        let Value::Object(map) = config else {
            bail!(CorruptFile, "config: expected a JSON object");
        };
        let keys = Keys(map);
        let architecture = architecture(&keys)?;
        let size = |name: &str| -> Result<usize> {
            keys.size(name)?
                .ok_or_else(|| err!(CorruptFile, "config: '{name}' is missing"))
        };
        let hidden_size = size("hidden_size")?;
        let heads = size("num_attention_heads")?;
        let kv_heads = keys.size("num_key_value_heads")?.unwrap_or(heads);
        let head_dim = match keys.size("head_dim")? {
            Some(d) => d,
            None if hidden_size % heads == 0 => hidden_size / heads,
            None => bail!(
                CorruptFile,
                "config: hidden_size {hidden_size} is not a multiple of num_attention_heads {heads}, and there is no head_dim"
            ),
        };
        if heads % kv_heads != 0 {
            bail!(
                CorruptFile,
                "config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            );
        }
        let intermediate_size = size("intermediate_size")?;
        let attention = heads
            .checked_mul(head_dim)
            .filter(|&n| n as u64 <= LARGEST)
            .ok_or_else(|| {
                err!(
                    CorruptFile,
                    "config: {heads} heads of {head_dim} are too wide"
                )
            })?;
        for (name, k) in [
            ("hidden_size", hidden_size),
            ("intermediate_size", intermediate_size),
            ("head_dim", head_dim),
            ("num_attention_heads * head_dim", attention),
        ] {
            if k % BLOCK != 0 {
                bail!(
                    Unsupported,
                    "config: {name} is {k}; it must be a multiple of {BLOCK}"
                );
            }
        }
        let max_positions = keys.size("max_position_embeddings")?.unwrap_or(2048);
        let rms_norm_eps = keys
            .number("rms_norm_eps")?
            .ok_or_else(|| err!(CorruptFile, "config: 'rms_norm_eps' is missing"))?;
        if !(rms_norm_eps > 0.0 && rms_norm_eps < 1.0) {
            bail!(
                CorruptFile,
                "config: rms_norm_eps is {rms_norm_eps}; it must lie between 0 and 1"
            );
        }
        if let Some(act) = keys.text("hidden_act")?
            && !matches!(act, "silu" | "swish")
        {
            bail!(
                Unsupported,
                "config: hidden_act is '{act}'; only 'silu' is known"
            );
        }
        if keys.size("num_local_experts")?.is_some_and(|n| n > 1)
            || keys.size("num_experts")?.is_some_and(|n| n > 1)
        {
            bail!(
                Unsupported,
                "config: a mixture of experts; only dense {} models are known",
                architecture.name
            );
        }
        let layers = size("num_hidden_layers")?;
        if layers > MOST_LAYERS {
            bail!(
                CorruptFile,
                "config: num_hidden_layers is {layers}; expected at most {MOST_LAYERS}"
            );
        }
        check_window(&keys, architecture, max_positions)?;
        let attention_bias = keys.flag("attention_bias")? == Some(true);
        let all_biased = attention_bias && architecture.attention_bias;
        Ok(Config {
            architecture,
            hidden_size,
            intermediate_size,
            layers,
            heads,
            kv_heads,
            head_dim,
            vocab_size: size("vocab_size")?,
            max_positions,
            rms_norm_eps: rms_norm_eps as f32,
            rope: rope::table(&keys, head_dim, max_positions)?,
            tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            qkv_bias: architecture.qkv_bias || all_biased,
            o_bias: all_biased,
            mlp_bias: keys.flag("mlp_bias")? == Some(true),
            eos: keys.ids("eos_token_id")?,
            bos: keys.ids("bos_token_id")?.first().copied(),
        })
    }
}

fn known() -> String {
    let names: Vec<_> = ARCHITECTURES.iter().map(|a| a.name).collect();
    names.join(", ")
}

fn architecture(keys: &Keys<'_>) -> Result<&'static Architecture> {
    let class = match keys.0.get("architectures") {
        Some(Value::Array(classes)) => classes.first().and_then(Value::as_str),
        _ => None,
    };
    let name = keys.text("model_type")?;
    let found = match (name, class) {
        (Some(name), _) => ARCHITECTURES.iter().find(|a| a.name == name),
        (None, Some(class)) => ARCHITECTURES.iter().find(|a| a.class == class),
        (None, None) => bail!(
            CorruptFile,
            "config: neither 'model_type' nor 'architectures' says what the model is"
        ),
    };
    found.ok_or_else(|| {
        err!(
            Unsupported,
            "unknown architecture '{}'; known are {}",
            name.or(class).unwrap_or_default(),
            known()
        )
    })
}

/// Refuses layers that see only a window of the positions the model was made for.
fn check_window(keys: &Keys<'_>, architecture: &Architecture, max_positions: usize) -> Result<()> {
    let layered = match keys.0.get("layer_types") {
        Some(Value::Array(types)) => types.iter().any(|t| t != "full_attention"),
        _ => false,
    };
    let used = architecture.sliding_window && keys.flag("use_sliding_window")? == Some(true);
    let window = keys.size("sliding_window")?;
    if (layered || used) && window.is_none_or(|w| w < max_positions) {
        bail!(
            Unsupported,
            "config: sliding-window attention (window {}, {max_positions} positions); only full attention is known",
            window.map_or("unknown".to_owned(), |w| w.to_string())
        );
    }
    Ok(())
}

/// A JSON object whose values are checked as they are read; null counts as absent.
pub(super) struct Keys<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Keys<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    pub(super) fn size(&self, name: &str) -> Result<Option<usize>> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if (1..=LARGEST).contains(&n) => Ok(Some(n as usize)),
                _ => bail!(
                    CorruptFile,
                    "config: '{name}' is {v}; expected a whole number from 1 to {LARGEST}"
                ),
            },
        }
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>> {
        match self.get(name) {
            None => Ok(None),
            Some(v) => match v.as_f64() {
                Some(x) => Ok(Some(x)),
                None => bail!(CorruptFile, "config: '{name}' is {v}; expected a number"),
            },
        }
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(v) => bail!(CorruptFile, "config: '{name}' is {v}; expected a text"),
        }
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => bail!(
                CorruptFile,
                "config: '{name}' is {v}; expected true or false"
            ),
        }
    }

    pub(super) fn object(&self, name: &str) -> Result<Option<Keys<'a>>> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys(map))),
            Some(v) => bail!(CorruptFile, "config: '{name}' is {v}; expected an object"),
        }
    }

    /// A token id or a list of them.
    fn ids(&self, name: &str) -> Result<Vec<u32>> {
        match self.get(name) {
            None => Ok(Vec::new()),
            Some(value) => token_ids(value).ok_or_else(|| {
                err!(
                    CorruptFile,
                    "config: '{name}' is {value}; expected token ids"
                )
            }),
        }
    }
}

/// The token ids in `value`: one, or a list.
pub(super) fn token_ids(value: &Value) -> Option<Vec<u32>> {
    let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
    match value {
        Value::Array(list) => list.iter().map(id).collect(),
        one => Some(vec![id(one)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use serde_json::json;

    fn base() -> Value {
        json!({
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": [3, 4]
        })
    }

    fn with(key: &str, value: Value) -> Result<Config> {
        let mut config = base();
        config[key] = value;
        Config::from_json(&config)
    }

    #[test]
    fn architectures_are_data() {
        let c = Config::from_json(&base()).unwrap();
        assert!(c.architecture.qk_norm && !c.qkv_bias && !c.tied);
        assert_eq!(c.eos, [3, 4]);
        let c = with("model_type", json!("qwen2")).unwrap();
        assert!(!c.architecture.qk_norm && c.qkv_bias && !c.o_bias);
        let mut config = base();
        config["model_type"] = Value::Null;
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config["attention_bias"] = json!(true);
        let c = Config::from_json(&config).unwrap();
        assert!(c.architecture.name == "llama" && c.qkv_bias && c.o_bias);
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (key, value, expected) in [
            (
                "model_type",
                json!("mamba"),
                "'mamba'; known are llama, qwen2, qwen3",
            ),
            ("hidden_act", json!("gelu"), "'gelu'"),
            ("hidden_size", json!(72), "hidden_size is 72"),
            ("hidden_size", json!(-64), "'hidden_size' is -64"),
            ("hidden_size", Value::Null, "'hidden_size' is missing"),
            ("num_key_value_heads", json!(3), "num_key_value_heads 3"),
            ("num_hidden_layers", json!(1e30), "'num_hidden_layers'"),
            ("rms_norm_eps", json!(0), "rms_norm_eps is 0"),
            ("num_experts", json!(8), "mixture of experts"),
            ("eos_token_id", json!("x"), "'eos_token_id'"),
            ("tie_word_embeddings", json!(1), "'tie_word_embeddings'"),
        ] {
            let e = with(key, value).unwrap_err();
            assert!(e.message().contains(expected), "{key}: {e}");
        }
    }

    #[test]
    fn a_window_that_is_never_reached_is_no_window() {
        let mut config = base();
        config["use_sliding_window"] = json!(true);
        config["sliding_window"] = json!(64);
        let e = Config::from_json(&config).unwrap_err();
        assert!(e.message().contains("window 64, 128 positions"), "{e}");
        config["sliding_window"] = json!(128);
        assert!(Config::from_json(&config).is_ok());
        config["sliding_window"] = json!(64);
        config["use_sliding_window"] = json!(false);
        assert!(Config::from_json(&config).is_ok());
        config["layer_types"] = json!(["full_attention", "sliding_attention"]);
        expect_kind(
            Config::from_json(&config),
            ErrorKind::Unsupported,
            "sliding-window attention",
        );
    }
}
