//! Nemotron-H in GGUF, dense and with experts. Numbers of key heads and widths of MLPs by block say which of its kinds a block is.

use serde_json::{Map, Value, json};

use super::common::{EXPERTS_PER_TOKEN, PLAIN, by_block, required, same_in, sigmoid_scoring};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{GgufFamily, GgufForm, GgufKind, GgufMetadata};

const KV_HEADS: &str = "attention.head_count_kv";
const WIDTHS: &str = "feed_forward_length";

pub(super) const NEMOTRON_H: GgufFamily = GgufFamily {
    architecture: "nemotron_h",
    model_type: "nemotron_h",
    class: "NemotronHForCausalLM",
    activation: ("mlp_hidden_act", "relu2"),
    globals: &[
        ("token_embd", "model.embeddings"),
        ("output_norm", "model.norm_f"),
        ("output", "lm_head"),
    ],
    per_layer: &[&[
        ("attn_norm", "norm"),
        ("attn_q", "mixer.q_proj"),
        ("attn_k", "mixer.k_proj"),
        ("attn_v", "mixer.v_proj"),
        ("attn_output", "mixer.o_proj"),
        ("ssm_in", "mixer.in_proj"),
        ("ssm_conv1d", "mixer.conv1d"),
        ("ssm_a", "mixer.A_log"),
        ("ssm_d", "mixer.D"),
        ("ssm_dt.bias", "mixer.dt_bias"),
        ("ssm_norm", "mixer.norm"),
        ("ssm_out", "mixer.out_proj"),
        ("ffn_up", "mixer.up_proj"),
        ("ffn_down", "mixer.down_proj"),
        ("ffn_gate_inp", "mixer.gate"),
        ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
        ("ffn_up_exps", "mixer.experts.up_proj"),
        ("ffn_down_exps", "mixer.experts.down_proj"),
        ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
        ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
    ]],
    forms: &[
        ("ssm_a", GgufForm::NegatedExp),
        ("ssm_a", GgufForm::Vector),
        ("ssm_d", GgufForm::Vector),
        ("ssm_norm", GgufForm::Vector),
        ("ssm_conv1d", GgufForm::Filters),
    ],
    keys: &[
        (
            "layer_norm_epsilon",
            "attention.layer_norm_rms_epsilon",
            GgufKind::Float,
        ),
        ("mamba_num_heads", "ssm.time_step_rank", GgufKind::Integer),
        ("n_groups", "ssm.group_count", GgufKind::Integer),
        ("ssm_state_size", "ssm.state_size", GgufKind::Integer),
        ("conv_kernel", "ssm.conv_kernel", GgufKind::Integer),
        ("n_routed_experts", "expert_count", GgufKind::Integer),
        ("n_shared_experts", "expert_shared_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
        (
            "moe_intermediate_size",
            "expert_feed_forward_length",
            GgufKind::Integer,
        ),
        (
            "moe_shared_expert_intermediate_size",
            "expert_shared_feed_forward_length",
            GgufKind::Integer,
        ),
        ("moe_latent_size", "moe_latent_size", GgufKind::Integer),
    ],
    by_block: &[KV_HEADS, WIDTHS],
    config,
    ..PLAIN
};

pub(super) const NEMOTRON_H_MOE: GgufFamily = GgufFamily {
    architecture: "nemotron_h_moe",
    ..NEMOTRON_H
};

fn config(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let (kv_heads, widths) = (by_block(metadata, KV_HEADS)?, by_block(metadata, WIDTHS)?);
    let pattern = pattern(metadata, &kv_heads, &widths)?;
    config.insert("hybrid_override_pattern".into(), json!(pattern));
    let heads = same_in(metadata, KV_HEADS, &kv_heads, |block| kv_heads[block] > 0)?;
    config.insert("num_key_value_heads".into(), json!(heads));
    // A model without dense MLPs has no width of theirs.
    match same_in(metadata, WIDTHS, &widths, |block| widths[block] > 0)? {
        Some(width) => config.insert("intermediate_size".into(), json!(width)),
        None => config.remove("intermediate_size"),
    };
    if pattern.contains('M') {
        recurrent(metadata, config)?;
    }
    if pattern.contains('E') {
        sigmoid_scoring(metadata, config)?;
    }
    for (key, bias) in [
        ("use_bias", ".ssm_in.bias"),
        ("use_conv_bias", ".ssm_conv1d.bias"),
        ("mlp_bias", ".ffn_up.bias"),
    ] {
        config.insert(key.into(), json!(metadata.any_ends_with(bias)));
    }
    // Attention is without positions, but converters write those of other families.
    for key in ["rope_theta", "rope_scaling", "partial_rotary_factor"] {
        config.remove(key);
    }
    Ok(())
}

/// A letter for each block: Mamba-2 (M), attention (*), an MLP (-) or experts (E).
fn pattern(metadata: &GgufMetadata<'_>, kv_heads: &[u64], widths: &[u64]) -> Result<String> {
    let routed = metadata.blocks_with("ffn_gate_inp.weight");
    let kinds = kv_heads.iter().zip(widths).enumerate();
    let letter = |(block, heads_and_width): (usize, (&u64, &u64))| match heads_and_width {
        (0, 0) => Ok('M'),
        (_, 0) => Ok('*'),
        (0, _) if routed.contains(&block) => Ok('E'),
        (0, _) => Ok('-'),
        (heads, width) => bail!(
            CorruptFile,
            "block {block} has {heads} key heads ('{}') and an MLP of width {width} ('{}'); expected one of them, or none for Mamba-2",
            metadata.key(KV_HEADS),
            metadata.key(WIDTHS)
        ),
    };
    kinds.map(letter).collect()
}

/// The width of a Mamba-2 head.
fn recurrent(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let [heads, width] = ["ssm.time_step_rank", "ssm.inner_size"];
    let sizes = (required(metadata, heads)?, required(metadata, width)?);
    if !sizes.1.is_multiple_of(sizes.0) {
        bail!(
            CorruptFile,
            "'{}' is {}, which {} heads ('{}') do not divide",
            metadata.key(width),
            sizes.1,
            sizes.0,
            metadata.key(heads)
        );
    }
    config.insert("mamba_head_dim".into(), json!(sizes.1 / sizes.0));
    Ok(())
}
