//! Qwen2 and Qwen3 in GGUF.

use serde_json::{Map, Value, json};

use super::common::{
    ATTENTION, EXPERTS, EXPERTS_PER_TOKEN, NORMS, PLAIN, SHARED_EXPERT, SLIDING_WINDOW, experts,
    required,
};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufForm, GgufKind, GgufMetadata};

pub(super) const QWEN2: GgufFamily = GgufFamily {
    architecture: "qwen2",
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    ..PLAIN
};

pub(super) const QWEN3: GgufFamily = GgufFamily {
    architecture: "qwen3",
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    ..PLAIN
};

/// The text models of Qwen2-VL and Qwen2.5-VL, of Qwen3-VL, and of its mixtures; a file of its own holds what reads pictures.
pub(super) const QWEN2_VL: GgufFamily = GgufFamily {
    architecture: "qwen2vl",
    ..QWEN2
};

pub(super) const QWEN3_VL: GgufFamily = GgufFamily {
    architecture: "qwen3vl",
    ..QWEN3
};

pub(super) const QWEN3_VL_MOE: GgufFamily = GgufFamily {
    architecture: "qwen3vlmoe",
    ..QWEN3_MOE
};

pub(super) const QWEN3_MOE: GgufFamily = GgufFamily {
    architecture: "qwen3moe",
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    per_layer: &[NORMS, ATTENTION, EXPERTS],
    keys: &[
        SLIDING_WINDOW,
        ("num_experts", "expert_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
    ],
    config: qwen3_moe,
    ..PLAIN
};

pub(super) const QWEN2_MOE: GgufFamily = GgufFamily {
    architecture: "qwen2moe",
    model_type: "qwen2_moe",
    class: "Qwen2MoeForCausalLM",
    per_layer: &[NORMS, ATTENTION, EXPERTS, SHARED_EXPERT],
    forms: &[("ffn_gate_inp_shexp", GgufForm::OneRow)],
    keys: &[
        ("num_experts", "expert_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
    ],
    config: qwen2_moe,
    ..PLAIN
};

fn qwen2_moe(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    experts(metadata, config)?;
    // Without the key, the shared expert is as wide as a dense MLP.
    let width = match metadata.integer("expert_shared_feed_forward_length")? {
        Some(width) => width,
        None => required(metadata, "feed_forward_length")?,
    };
    config.insert("shared_expert_intermediate_size".into(), json!(width));
    config.insert("norm_topk_prob".into(), json!(false));
    Ok(())
}

fn qwen3_moe(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    experts(metadata, config)?;
    config.insert("norm_topk_prob".into(), json!(true));
    Ok(())
}
