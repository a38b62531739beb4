//! Gemma 2 and 3 in GGUF.

use serde_json::{Map, Value, json};

use super::common::{
    ATTENTION, LOGIT_CAP, MLP, NORMS_AROUND_HALVES, PLAIN, SLIDING_WINDOW, blocks, layer_types,
    remove_zero_cap, required, window, windowed_blocks,
};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufForm, GgufKind, GgufMetadata};

/// One layer of so many of Gemma 3 has full attention, if a file with a window does not say.
const INTERVAL: u64 = 6;

pub(super) const GEMMA2: GgufFamily = GgufFamily {
    architecture: "gemma2",
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    keys: &[
        SLIDING_WINDOW,
        LOGIT_CAP,
        (
            "attn_logit_softcapping",
            "attn_logit_softcapping",
            GgufKind::Float,
        ),
    ],
    config: gemma2,
    ..GEMMA3
};

pub(super) const GEMMA3: GgufFamily = GgufFamily {
    architecture: "gemma3",
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    per_layer: &[ATTENTION, MLP, NORMS_AROUND_HALVES],
    forms: &[
        ("output_norm", GgufForm::OnePlus),
        ("attn_norm", GgufForm::OnePlus),
        ("attn_q_norm", GgufForm::OnePlus),
        ("attn_k_norm", GgufForm::OnePlus),
        ("post_attention_norm", GgufForm::OnePlus),
        ("ffn_norm", GgufForm::OnePlus),
        ("post_ffw_norm", GgufForm::OnePlus),
    ],
    keys: &[LOGIT_CAP],
    config: gemma3,
    ..PLAIN
};

fn gemma2(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    // 0 is none, and a missing cap that of the class.
    for cap in ["final_logit_softcapping", "attn_logit_softcapping"] {
        if config.get(cap).and_then(Value::as_f64) == Some(0.0) {
            config.insert(cap.into(), Value::Null);
        }
    }
    let scalar = query_scalar(metadata, 46)?;
    config.insert("query_pre_attn_scalar".into(), json!(scalar));
    Ok(())
}

fn gemma3(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    remove_zero_cap(config);
    let windowed = windowed_blocks(metadata, INTERVAL)?;
    config.insert("layer_types".into(), layer_types(&windowed));
    if let Some(window) = window(metadata)? {
        config.insert("sliding_window".into(), json!(window));
        // Scaling applies only to the layers with full attention, which use `rope_theta`.
        let theta = metadata.float("rope.freq_base_swa")?.unwrap_or(10000.0);
        config.insert("rope_local_base_freq".into(), json!(theta));
    }
    let scalar = query_scalar(metadata, 62)?;
    config.insert("query_pre_attn_scalar".into(), json!(scalar));
    Ok(())
}

/// All sizes except the one with `other` layers scale scores by the width of a head.
fn query_scalar(metadata: &GgufMetadata<'_>, other: usize) -> Result<u64> {
    match metadata.integer("attention.key_length")? {
        Some(head_dim) if blocks(metadata)? != other => Ok(head_dim),
        _ => {
            let heads = required(metadata, "attention.head_count")?;
            Ok(required(metadata, "embedding_length")? / heads)
        }
    }
}
