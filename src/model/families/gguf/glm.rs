//! GLM-4, and GLM-4.5 and later, in GGUF.

use serde_json::{Map, Value, json};

use super::common::{
    ATTENTION, BLOCK_NORMS, EXPERTS, EXPERTS_PER_TOKEN, MLP, PLAIN, experts, sigmoid_scoring,
};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{GgufFamily, GgufKind, GgufMetadata};

pub(super) const GLM4: GgufFamily = GgufFamily {
    architecture: "glm4",
    model_type: "glm4",
    class: "Glm4ForCausalLM",
    per_layer: &[
        ATTENTION,
        &[
            ("attn_norm", "input_layernorm"),
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ],
    ],
    keys: &[],
    config: glm4,
    ..PLAIN
};

pub(super) const GLM4_MOE: GgufFamily = GgufFamily {
    architecture: "glm4moe",
    model_type: "glm4_moe",
    class: "Glm4MoeForCausalLM",
    per_layer: &[
        BLOCK_NORMS,
        ATTENTION,
        MLP,
        EXPERTS,
        &[
            ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
            ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
            ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
        ],
    ],
    keys: &[
        ("n_routed_experts", "expert_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
        ("n_shared_experts", "expert_shared_count", GgufKind::Integer),
        (
            "first_k_dense_replace",
            "leading_dense_block_count",
            GgufKind::Integer,
        ),
    ],
    config: glm4_moe,
    ..PLAIN
};

/// Refuses files of vision models, in which the converter has reordered the rows of queries and keys.
fn glm4(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    const SECTIONS: &str = "rope.dimension_sections";
    let sections = metadata.integers(SECTIONS).unwrap_or_default();
    if sections.iter().any(|&size| size != 0) {
        bail!(
            Unsupported,
            "'{}' is {sections:?}: files of vision models order the rows of queries and keys otherwise; only files of text models can be read",
            metadata.key(SECTIONS)
        );
    }
    rotary_part(config);
    Ok(())
}

fn glm4_moe(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    experts(metadata, config)?;
    sigmoid_scoring(metadata, config)?;
    let normalizes_heads = metadata.any_ends_with(".attn_q_norm.weight");
    config.insert("use_qk_norm".into(), json!(normalizes_heads));
    // A file without dense layers may lack their number and their width.
    config.entry("first_k_dense_replace").or_insert(json!(0));
    if config["intermediate_size"].is_null() {
        config["intermediate_size"] = config["moe_intermediate_size"].clone();
    }
    // Blocks that draft have other names here.
    config.insert("num_nextn_predict_layers".into(), json!(0));
    rotary_part(config);
    Ok(())
}

/// A file whose heads rotate whole does not say so.
fn rotary_part(config: &mut Map<String, Value>) {
    config.entry("partial_rotary_factor").or_insert(json!(1.0));
}
