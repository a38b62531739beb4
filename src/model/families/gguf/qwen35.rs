//! Qwen3.5 and Qwen3-Next in GGUF.

use serde_json::{Map, Value, json};

use super::common::{
    ATTENTION, BLOCK_NORMS, EXPERTS, EXPERTS_PER_TOKEN, MLP, Names, PLAIN, SHARED_EXPERT, experts,
    required,
};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufForm, GgufKind, GgufMetadata, GgufValueHeads};

const DELTA: Names = &[
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];

const DRAFTER: Names = &[
    ("nextn.eh_proj", "mtp.fc"),
    ("nextn.enorm", "mtp.pre_fc_norm_embedding"),
    ("nextn.hnorm", "mtp.pre_fc_norm_hidden"),
    ("nextn.shared_head_norm", "mtp.norm"),
];

const KEYS: &[(&str, &str, GgufKind)] = &[
    (
        "linear_conv_kernel_dim",
        "ssm.conv_kernel",
        GgufKind::Integer,
    ),
    ("linear_key_head_dim", "ssm.state_size", GgufKind::Integer),
    ("linear_num_key_heads", "ssm.group_count", GgufKind::Integer),
    (
        "linear_num_value_heads",
        "ssm.time_step_rank",
        GgufKind::Integer,
    ),
    (
        "full_attention_interval",
        "full_attention_interval",
        GgufKind::Integer,
    ),
    ("num_experts", "expert_count", GgufKind::Integer),
    EXPERTS_PER_TOKEN,
];

pub(super) const QWEN35: GgufFamily = GgufFamily {
    architecture: "qwen35",
    model_type: "qwen3_5",
    class: "Qwen3_5ForCausalLM",
    per_layer: &[BLOCK_NORMS, ATTENTION, DELTA, MLP],
    drafter: DRAFTER,
    forms: &[
        ("output_norm", GgufForm::OnePlus),
        ("attn_norm", GgufForm::OnePlus),
        ("post_attention_norm", GgufForm::OnePlus),
        ("attn_q_norm", GgufForm::OnePlus),
        ("attn_k_norm", GgufForm::OnePlus),
        ("nextn.enorm", GgufForm::OnePlus),
        ("nextn.hnorm", GgufForm::OnePlus),
        ("nextn.shared_head_norm", GgufForm::OnePlus),
        ("ssm_a", GgufForm::NegatedExp),
        ("ssm_conv1d", GgufForm::Filters),
        ("ffn_gate_inp_shexp", GgufForm::OneRow),
    ],
    value_heads: &[
        ("attn_qkv", GgufValueHeads::RowsAfterKeys),
        ("attn_gate", GgufValueHeads::Rows),
        ("ssm_beta", GgufValueHeads::Each),
        ("ssm_alpha", GgufValueHeads::Each),
        ("ssm_conv1d", GgufValueHeads::RowsAfterKeys),
        ("ssm_a", GgufValueHeads::Each),
        ("ssm_dt.bias", GgufValueHeads::Each),
        ("ssm_out", GgufValueHeads::Columns),
    ],
    keys: KEYS,
    config: dense,
    ..PLAIN
};

pub(super) const QWEN35_MOE: GgufFamily = GgufFamily {
    architecture: "qwen35moe",
    model_type: "qwen3_5_moe",
    class: "Qwen3_5MoeForCausalLM",
    per_layer: &[BLOCK_NORMS, ATTENTION, DELTA, EXPERTS, SHARED_EXPERT],
    config: mixture,
    ..QWEN35
};

/// Its value heads are in order.
pub(super) const QWEN3_NEXT: GgufFamily = GgufFamily {
    architecture: "qwen3next",
    model_type: "qwen3_next",
    class: "Qwen3NextForCausalLM",
    value_heads: &[],
    ..QWEN35_MOE
};

fn dense(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    // A file whose heads do not divide is refused for its tensors.
    let heads = required(metadata, "ssm.time_step_rank")?;
    let width = required(metadata, "ssm.inner_size")? / heads;
    config.insert("linear_value_head_dim".into(), json!(width));
    let drafter = metadata.integer("nextn_predict_layers")?.unwrap_or(0);
    config.insert("mtp_num_hidden_layers".into(), json!(drafter));
    Ok(())
}

fn mixture(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    dense(metadata, config)?;
    experts(metadata, config)?;
    let shared = required(metadata, "expert_shared_feed_forward_length")?;
    config.insert("shared_expert_intermediate_size".into(), json!(shared));
    config.insert("norm_topk_prob".into(), json!(true));
    Ok(())
}
