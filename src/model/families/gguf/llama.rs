//! Llama and Mistral in GGUF.

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

/// Mistral files have the architecture llama; a window identifies them.
fn mistral(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    if window(metadata)?.is_some() {
        config.insert("model_type".into(), json!("mistral"));
        config.insert("architectures".into(), json!(["MistralForCausalLM"]));
    }
    Ok(())
}
