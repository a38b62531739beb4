//! From a `config.json` (or GGUF metadata in the same words) to a [`Spec`], checked before any weight is touched. One file a family;
//! what families share is in `decoder`.

mod decoder;
mod family;
mod gemma3;
mod gguf;
mod llama;
mod mistral;
mod phi3;
mod qwen;

use std::path::Path;

use serde_json::Value;

use super::keys::Keys;
use super::spec::Spec;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::checkpoint::{self, Checkpoint, GgufFamily};

pub use family::Family;

/// Every family that can be run.
pub const FAMILIES: &[Family] = &[
    llama::LLAMA,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN2_MOE,
    qwen::QWEN3_MOE,
    mistral::MISTRAL,
    phi3::PHI3,
    gemma3::GEMMA3,
];

/// The families that GGUF files are translated for.
pub fn gguf() -> &'static [GgufFamily] {
    gguf::FAMILIES
}

/// Opens the checkpoint at `path`, as [`checkpoint::open`] does, with GGUF files in the words of Hugging Face.
pub fn open(path: &Path) -> Result<Box<dyn Checkpoint>> {
    checkpoint::open(path, gguf())
}

/// Opens a file that is already in memory, as [`checkpoint::open_bytes`] does, with GGUF files in the words of Hugging Face.
pub fn open_bytes(name: &str, bytes: Vec<u8>) -> Result<Box<dyn Checkpoint>> {
    checkpoint::open_bytes(name, bytes, gguf())
}

/// Reads and checks a config. Keys that do not bear on inference are ignored. A model that also takes images is read as the text model
/// in it, which its `text_config` describes.
pub fn read(config: &Value) -> Result<Spec> {
    let Value::Object(map) = config else {
        bail!(CorruptFile, "config: expected a JSON object");
    };
    let outer = Keys(map);
    match outer.object("text_config")? {
        None => family(&outer)?.read(&outer),
        Some(text) => {
            let mut spec = family(&text)?.read(&text)?;
            if let Some(tied) = outer.flag("tie_word_embeddings")?
                && text.flag("tie_word_embeddings")?.is_none()
            {
                spec.tied = tied;
            }
            if spec.eos.is_empty() || !outer.ids("eos_token_id")?.is_empty() {
                spec.eos = outer.ids("eos_token_id")?;
            }
            Ok(spec)
        }
    }
}

fn family(keys: &Keys<'_>) -> Result<&'static Family> {
    let class = keys
        .texts("architectures")?
        .and_then(|classes| classes.first().copied());
    // A text model within a larger one says so: `gemma3_text`.
    let name = keys.text("model_type")?;
    let plain = name.map(|name| name.strip_suffix("_text").unwrap_or(name));
    let found = match (plain, class) {
        (Some(name), _) => FAMILIES.iter().find(|f| f.model_type == name),
        (None, Some(class)) => FAMILIES.iter().find(|f| f.class == class),
        (None, None) => bail!(
            CorruptFile,
            "config: neither 'model_type' nor 'architectures' says what the model is"
        ),
    };
    found.ok_or_else(|| {
        let known: Vec<_> = FAMILIES.iter().map(|f| f.model_type).collect();
        err!(
            Unsupported,
            "unknown architecture '{}'; known are {}",
            name.or(class).unwrap_or_default(),
            known.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn base() -> Value {
        json!({
            "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "eos_token_id": [3, 4]
        })
    }

    fn with(key: &str, value: Value) -> Result<Spec> {
        let mut config = base();
        config[key] = value;
        read(&config)
    }

    #[test]
    fn families_are_data() {
        let c = read(&base()).unwrap();
        let attention = &c.blocks[0].attention;
        assert!(attention.qk_norm && !attention.qkv_bias && !c.tied);
        assert_eq!((c.eos, c.blocks.len()), (vec![3, 4], 2));
        let c = with("model_type", json!("qwen2")).unwrap();
        let attention = &c.blocks[0].attention;
        assert!(!attention.qk_norm && attention.qkv_bias && !attention.o_bias);
        let mut config = base();
        config["model_type"] = Value::Null;
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config["attention_bias"] = json!(true);
        let c = read(&config).unwrap();
        let attention = &c.blocks[0].attention;
        assert!(c.family == "llama" && attention.qkv_bias && attention.o_bias);
    }

    /// As a model that takes images is published: what is left out are the defaults of transformers.
    #[test]
    fn the_text_model_within_another_is_read() {
        let outer = json!({
            "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}
            },
            "vision_config": {"hidden_size": 1152}
        });
        let spec = read(&outer).unwrap();
        assert_eq!(
            (spec.family, spec.vocab_size, spec.blocks.len()),
            ("gemma3", 262_208, 34)
        );
        assert_eq!((spec.eos, spec.tied), (vec![1, 106], true));
        let (near, far) = (&spec.blocks[4].attention, &spec.blocks[5].attention);
        assert_eq!((near.heads, near.kv_heads, near.head_dim), (8, 4, 256));
        assert_eq!((near.window, far.window), (Some(1024), None));
        assert_eq!((near.rope, far.rope, near.scale), (1, 0, 1.0 / 16.0));
        assert_eq!(spec.ropes[0].table.frequencies[0], 0.125);
        assert_eq!(spec.ropes[1].table.frequencies[0], 1.0);
        assert_eq!(spec.embedding_scale, 2560f32.sqrt());
    }

    #[test]
    fn some_layers_have_experts() {
        let mut config = base();
        for (key, value) in [
            ("model_type", json!("qwen3_moe")),
            ("num_hidden_layers", json!(6)),
            ("num_experts", json!(8)),
            ("num_experts_per_tok", json!(2)),
            ("moe_intermediate_size", json!(48)),
            ("decoder_sparse_step", json!(2)),
            ("mlp_only_layers", json!([3])),
        ] {
            config[key] = value;
        }
        let spec = read(&config).unwrap();
        let experts: Vec<usize> = spec.blocks.iter().map(|b| b.mlp.experts()).collect();
        assert_eq!(experts, [0, 8, 0, 0, 0, 8]);
        config["num_experts_per_tok"] = json!(9);
        let e = read(&config).unwrap_err();
        assert!(
            e.message().contains("9 experts (num_experts_per_tok) of 8"),
            "{e}"
        );
        config["num_experts_per_tok"] = Value::Null;
        let e = read(&config).unwrap_err();
        assert!(
            e.message().contains("'num_experts_per_tok' is missing"),
            "{e}"
        );
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (key, value, expected) in [
            (
                "model_type",
                json!("mamba"),
                "'mamba'; known are llama, qwen2, qwen3, qwen2_moe, qwen3_moe, mistral, phi3, gemma3",
            ),
            ("hidden_act", json!("gelu"), "'gelu'"),
            ("hidden_size", json!(72), "hidden_size is 72"),
            ("hidden_size", json!(-64), "'hidden_size' is -64"),
            ("hidden_size", Value::Null, "'hidden_size' is missing"),
            ("num_key_value_heads", json!(3), "num_key_value_heads 3"),
            ("num_hidden_layers", json!(1e30), "'num_hidden_layers'"),
            ("rms_norm_eps", json!(0), "rms_norm_eps is 0"),
            (
                "num_experts",
                json!(8),
                "num_experts is 8, a mixture of experts",
            ),
            (
                "final_logit_softcapping",
                json!(0),
                "'final_logit_softcapping' is 0",
            ),
            ("sliding_window", json!(0), "'sliding_window' is 0"),
            (
                "layer_types",
                json!(["chunked_attention", "full_attention"]),
                "'chunked_attention'",
            ),
            ("layer_types", json!(["full_attention"]), "names 1 layers"),
            ("eos_token_id", json!("x"), "'eos_token_id'"),
            ("tie_word_embeddings", json!(1), "'tie_word_embeddings'"),
        ] {
            let e = with(key, value).unwrap_err();
            assert!(e.message().contains(expected), "{key}: {e}");
        }
    }

    #[test]
    fn windows_are_those_that_are_reached() {
        let windows = |config: &Value| {
            let spec = read(config).unwrap();
            spec.blocks
                .iter()
                .map(|b| b.attention.window)
                .collect::<Vec<_>>()
        };
        let mut config = base();
        config["use_sliding_window"] = json!(true);
        config["sliding_window"] = json!(64);
        assert_eq!(windows(&config), [None, None]);
        config["max_window_layers"] = json!(1);
        assert_eq!(windows(&config), [None, Some(64)]);
        config["layer_types"] = json!(["sliding_attention", "full_attention"]);
        assert_eq!(windows(&config), [Some(64), None]);
        config["sliding_window"] = json!(128);
        assert_eq!(windows(&config), [None, None]);
        config["sliding_window"] = json!(64);
        config["use_sliding_window"] = json!(false);
        assert_eq!(windows(&config), [None, None]);
        let mut config = base();
        config["model_type"] = json!("mistral");
        config["max_position_embeddings"] = json!(8192);
        assert_eq!(windows(&config), [Some(4096), Some(4096)]);
        config["sliding_window"] = Value::Null;
        assert_eq!(windows(&config), [None, None]);
    }
}
