//! Gemma 4 in GGUF: per-layer embeddings, heads of two widths, keys as values, keys and values of earlier layers, experts beside MLPs.

use serde_json::{Map, Value, json};

use super::common::{
    ATTENTION, LOGIT_CAP, MLP, NORMS_AROUND_HALVES, PLAIN, by_block, layer_types, remove_zero_cap,
    required, same_in, window,
};
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::checkpoint::{GgufFamily, GgufMetadata};

const KV_HEADS: &str = "attention.head_count_kv";
const WIDTHS: &str = "feed_forward_length";
const SHARED: &str = "attention.shared_kv_layers";
const HEAD_DIM: &str = "attention.key_length";
/// The divisors of the frequencies of layers with full attention.
const FREQUENCIES: &str = "rope_freqs.weight";
/// A divisor that leaves no rotation: the converter writes 1e30 for pairs that do not turn.
const NO_ROTATION: f32 = 1e20;

pub(super) const GEMMA4: GgufFamily = GgufFamily {
    architecture: "gemma4",
    model_type: "gemma4_text",
    class: "Gemma4ForCausalLM",
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    globals: &[
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("output", "lm_head"),
        ("per_layer_token_embd", "model.embed_tokens_per_layer"),
        ("per_layer_model_proj", "model.per_layer_model_projection"),
        ("per_layer_proj_norm", "model.per_layer_projection_norm"),
    ],
    per_layer: &[
        ATTENTION,
        MLP,
        NORMS_AROUND_HALVES,
        &[
            ("layer_output_scale.weight", "layer_scalar"),
            ("inp_gate", "per_layer_input_gate"),
            ("proj", "per_layer_projection"),
            ("post_norm", "post_per_layer_input_norm"),
        ],
        &[
            ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
            ("ffn_gate_inp", "router.proj"),
            ("ffn_gate_inp.scale", "router.scale"),
            ("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
            ("ffn_gate_exps", "experts.gate_proj"),
            ("ffn_up_exps", "experts.up_proj"),
            ("ffn_down_exps", "experts.down_proj"),
            // The factors of experts, with the global scales of experts in NVFP4 multiplied into them.
            ("ffn_down_exps.scale", "router.per_expert_scale"),
        ],
    ],
    in_config: &[FREQUENCIES],
    keys: &[LOGIT_CAP],
    by_block: &[KV_HEADS, WIDTHS],
    config,
    ..PLAIN
};

fn config(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    remove_zero_cap(config);
    let windowed = windowed(metadata)?;
    config.insert("layer_types".into(), layer_types(&windowed));
    if windowed.contains(&true) {
        let Some(window) = window(metadata)? else {
            bail!(
                CorruptFile,
                "'{}' is 0 or missing, but layers have a window",
                metadata.key("attention.sliding_window")
            );
        };
        config.insert("sliding_window".into(), json!(window));
    }
    heads(metadata, config, &windowed)?;
    rotations(metadata, config)?;
    let shared = metadata.integer(SHARED)?.unwrap_or(0);
    config.insert("num_kv_shared_layers".into(), json!(shared));
    let own = windowed.len().saturating_sub(shared as usize);
    let has_one_projection = keys_are_values(metadata, &windowed[..own])?;
    config.insert("attention_k_eq_v".into(), json!(has_one_projection));
    mlp_widths(metadata, config, own)?;
    let width = metadata.integer("embedding_length_per_layer_input")?;
    config.insert(
        "hidden_size_per_layer_input".into(),
        json!(width.unwrap_or(0)),
    );
    if let Some(shape) = metadata.shape("per_layer_token_embd.weight") {
        config.insert("vocab_size_per_layer_input".into(), json!(shape[0]));
    }
    let experts = metadata.integer("expert_count")?.unwrap_or(0);
    config.insert("enable_moe_block".into(), json!(experts > 0));
    if experts > 0 {
        for (key, value) in [
            ("num_experts", experts),
            ("top_k_experts", required(metadata, "expert_used_count")?),
            (
                "moe_intermediate_size",
                required(metadata, "expert_feed_forward_length")?,
            ),
        ] {
            config.insert(key.into(), json!(value));
        }
    }
    Ok(())
}

/// Whether each layer has a window.
fn windowed(metadata: &GgufMetadata<'_>) -> Result<Vec<bool>> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    if metadata.integers(PATTERN).is_none() {
        bail!(
            CorruptFile,
            "'{}' is no list; expected a truth value for each block",
            metadata.key(PATTERN)
        );
    }
    let windowed = by_block(metadata, PATTERN)?;
    Ok(windowed.iter().map(|&windowed| windowed != 0).collect())
}

/// The heads of layers with a window, and of those with full attention.
fn heads(
    metadata: &GgufMetadata<'_>,
    config: &mut Map<String, Value>,
    windowed: &[bool],
) -> Result<()> {
    let kv_heads = by_block(metadata, KV_HEADS)?;
    let full = same_in(metadata, KV_HEADS, &kv_heads, |block| !windowed[block])?;
    let near = same_in(metadata, KV_HEADS, &kv_heads, |block| windowed[block])?;
    for (key, value) in [
        ("num_key_value_heads", near.or(full)),
        ("num_global_key_value_heads", full),
        (
            "head_dim",
            Some(required(metadata, "attention.key_length_swa")?),
        ),
        ("global_head_dim", Some(required(metadata, HEAD_DIM)?)),
    ] {
        config.insert(key.into(), json!(value));
    }
    Ok(())
}

/// The rotations of both types of layers, each by parameters of its own.
fn rotations(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    for key in ["rope_theta", "partial_rotary_factor"] {
        config.remove(key);
    }
    if let Some(scaling) = config.remove("rope_scaling") {
        bail!(
            Unsupported,
            "it has rope scaling, {scaling}; Gemma 4 is known only without"
        );
    }
    let theta = |key: &str| {
        let theta = metadata.float(key)?;
        theta.ok_or_else(|| err!(CorruptFile, "it has no {}", metadata.key(key)))
    };
    let near_dim = required(metadata, "attention.key_length_swa")?;
    let rotated = metadata.integer("rope.dimension_count_swa")?;
    let near_part = rotated.unwrap_or(near_dim) as f64 / near_dim as f64;
    let full = json!({
        "rope_type": "proportional", "rope_theta": theta("rope.freq_base")?,
        "partial_rotary_factor": turning_part(metadata)?
    });
    let near = json!({
        "rope_type": "default", "rope_theta": theta("rope.freq_base_swa")?, "partial_rotary_factor": near_part
    });
    let both = json!({"full_attention": full, "sliding_attention": near});
    config.insert("rope_parameters".into(), both);
    Ok(())
}

/// The part of the pairs of a head of full attention that turns: those whose frequencies have the divisor 1.
fn turning_part(metadata: &GgufMetadata<'_>) -> Result<f64> {
    let head_dim = required(metadata, HEAD_DIM)?;
    let rotated = metadata.integer("rope.dimension_count")?;
    if let Some(rotated) = rotated.filter(|&rotated| rotated != head_dim) {
        bail!(
            CorruptFile,
            "'{}' is {rotated}; expected {head_dim}, the width of a head, of which '{FREQUENCIES}' says what turns",
            metadata.key("rope.dimension_count")
        );
    }
    let Some(divisors) = metadata.vector(FREQUENCIES)? else {
        bail!(CorruptFile, "it has no {FREQUENCIES}");
    };
    if divisors.len() as u64 != head_dim / 2 {
        bail!(
            CorruptFile,
            "'{FREQUENCIES}' has {} elements; expected {}, half the width of a head ('{}')",
            divisors.len(),
            head_dim / 2,
            metadata.key(HEAD_DIM)
        );
    }
    let turning = divisors.iter().take_while(|&&divisor| divisor == 1.0);
    let turning = turning.count();
    let mut still = divisors[turning..].iter();
    if let Some(bad) = still.find(|d| d.is_nan() || **d < NO_ROTATION) {
        bail!(
            Unsupported,
            "'{FREQUENCIES}' has {bad} after {turning} ones; expected at least {NO_ROTATION:e}, for pairs that do not turn"
        );
    }
    Ok((2 * turning) as f64 / head_dim as f64)
}

/// Whether layers with full attention, of those with keys of their own, take keys for values: they have no projection of values then.
fn keys_are_values(metadata: &GgufMetadata<'_>, windowed: &[bool]) -> Result<bool> {
    let with_values = metadata.blocks_with("attn_v.weight");
    let has_values = |block: usize| with_values.contains(&block);
    let mut full = (0..windowed.len()).filter(|&block| !windowed[block]);
    let Some(first) = full.next() else {
        return Ok(false);
    };
    match full.find(|&block| has_values(block) != has_values(first)) {
        None => Ok(!has_values(first)),
        Some(other) => {
            let (with, without) = match has_values(first) {
                true => (first, other),
                false => (other, first),
            };
            bail!(
                CorruptFile,
                "'blk.{with}.attn_v.weight': there is none for block {without}, which has full attention too"
            )
        }
    }
}

/// The width of MLPs. Those of layers with the keys and values of others, from `own` on, may have twice the width.
fn mlp_widths(
    metadata: &GgufMetadata<'_>,
    config: &mut Map<String, Value>,
    own: usize,
) -> Result<()> {
    let widths = by_block(metadata, WIDTHS)?;
    let usual = same_in(metadata, WIDTHS, &widths, |block| block < own)?;
    let later = same_in(metadata, WIDTHS, &widths, |block| block >= own)?;
    let Some(usual) = usual.or(later) else {
        return Ok(());
    };
    let is_double = match later {
        Some(later) if later == usual.saturating_mul(2) => true,
        Some(later) if later != usual => bail!(
            CorruptFile,
            "'{}' is {later} for block {own}; expected {usual}, as before it, or twice as much",
            metadata.key(WIDTHS)
        ),
        _ => false,
    };
    config.insert("intermediate_size".into(), json!(usual));
    config.insert("use_double_wide_mlp".into(), json!(is_double));
    Ok(())
}
