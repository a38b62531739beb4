//! Llama, Mistral and Ministral 3 in GGUF.

use serde_json::{Map, Value, json};

use super::common::{EXPERTS_PER_TOKEN, PLAIN, SLIDING_WINDOW, window};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufForm, GgufKind, GgufMetadata};

pub(super) const LLAMA: GgufFamily = GgufFamily {
    architecture: "llama",
    model_type: "llama",
    class: "LlamaForCausalLM",
    forms: &[
        ("attn_q", GgufForm::Interleaved("attention.head_count")),
        ("attn_k", GgufForm::Interleaved("attention.head_count_kv")),
    ],
    keys: &[
        SLIDING_WINDOW,
        ("num_local_experts", "expert_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
    ],
    config: mistral,
    ..PLAIN
};

pub(super) const MISTRAL3: GgufFamily = GgufFamily {
    architecture: "mistral3",
    model_type: "ministral3",
    class: "Ministral3ForCausalLM",
    config: ministral3,
    ..LLAMA
};

/// Strengths of YaRN and the rate of queries are parameters of the rotation. A file without scaling has none.
fn ministral3(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let scaling = config
        .entry("rope_scaling")
        .or_insert(json!({"rope_type": "default"}));
    let strength = metadata.float("rope.scaling.yarn_log_multiplier")?;
    for (key, value) in [
        ("mscale", strength),
        ("mscale_all_dim", strength),
        (
            "llama_4_scaling_beta",
            metadata.float("attention.temperature_scale")?,
        ),
    ] {
        if let Some(value) = value {
            scaling[key] = json!(value);
        }
    }
    config.entry("sliding_window").or_insert(Value::Null);
    Ok(())
}

/// Mistral files have the architecture llama; a window identifies them.
fn mistral(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    if window(metadata)?.is_some() {
        config.insert("model_type".into(), json!("mistral"));
        config.insert("architectures".into(), json!(["MistralForCausalLM"]));
    }
    Ok(())
}
