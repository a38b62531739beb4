//! Gemma 3 in GGUF.

use serde_json::{Map, Value, json};

use super::common::{ATTENTION, MLP, PLAIN, required, window};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{GgufFamily, GgufForm, GgufKind, GgufMetadata};

/// Larger than the number of blocks of any model, and small enough to list them.
const MOST_LAYERS: u64 = 4096;

pub(super) const GEMMA3: GgufFamily = GgufFamily {
    architecture: "gemma3",
    model_type: "gemma3_text",
    class: "Gemma3ForCausalLM",
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    per_layer: &[
        ATTENTION,
        MLP,
        &[
            ("attn_norm", "input_layernorm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
    ],
    forms: &[
        ("output_norm", GgufForm::OnePlus),
        ("attn_norm", GgufForm::OnePlus),
        ("attn_q_norm", GgufForm::OnePlus),
        ("attn_k_norm", GgufForm::OnePlus),
        ("post_attention_norm", GgufForm::OnePlus),
        ("ffn_norm", GgufForm::OnePlus),
        ("post_ffw_norm", GgufForm::OnePlus),
    ],
    keys: &[(
        "final_logit_softcapping",
        "final_logit_softcapping",
        GgufKind::Float,
    )],
    config: gemma3,
    ..PLAIN
};

fn gemma3(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let layers = required(metadata, "block_count")?;
    if layers > MOST_LAYERS {
        bail!(
            CorruptFile,
            "'{}' is {layers}; expected at most {MOST_LAYERS}",
            metadata.key("block_count")
        );
    }
    const PATTERN: &str = "attention.sliding_window_pattern";
    let window = window(metadata)?;
    // For llama.cpp a cap of 0 means no cap.
    if config
        .get("final_logit_softcapping")
        .and_then(Value::as_f64)
        == Some(0.0)
    {
        config.remove("final_logit_softcapping");
    }
    let sliding: Vec<bool> = match (window, metadata.integers(PATTERN)) {
        // The converter omits the window if no layer has one.
        (None, _) => vec![false; layers as usize],
        (Some(_), Some(pattern)) if pattern.len() as u64 == layers => {
            pattern.iter().map(|&layer| layer != 0).collect()
        }
        (Some(_), Some(pattern)) => bail!(
            CorruptFile,
            "'{}' has {} elements for {layers} layers",
            metadata.key(PATTERN),
            pattern.len()
        ),
        (Some(_), None) => {
            // The last layer of each period has full attention.
            let period = match metadata.integer(PATTERN)? {
                None => 6,
                Some(_) => required(metadata, PATTERN)?,
            };
            (1..=layers).map(|n| n % period != 0).collect()
        }
    };
    let layer_types: Vec<&str> = sliding
        .iter()
        .map(|&sliding| match sliding {
            true => "sliding_attention",
            false => "full_attention",
        })
        .collect();
    config.insert("layer_types".into(), json!(layer_types));
    if let Some(window) = window {
        config.insert("sliding_window".into(), json!(window));
        // Scaling applies only to the layers with full attention, which use `rope_theta`.
        let theta = metadata.float("rope.freq_base_swa")?.unwrap_or(10000.0);
        config.insert("rope_local_base_freq".into(), json!(theta));
    }
    // All sizes except the one with 62 layers scale scores by the width of a head.
    let scalar = match metadata.integer("attention.key_length")? {
        Some(head_dim) if layers != 62 => head_dim,
        _ => required(metadata, "embedding_length")? / required(metadata, "attention.head_count")?,
    };
    config.insert("query_pre_attn_scalar".into(), json!(scalar));
    Ok(())
}
