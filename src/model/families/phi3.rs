//! Phi-3 and Phi-4: Llama with fused projections, and optionally with rotation of only a part of each head.

use serde_json::{Map, Value, json};

use super::decoder::Decoder;
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const PHI3: Family = Family {
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    defaults,
    renamed: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": null, "hidden_act": "silu", "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "rope_parameters": null, "sliding_window": null
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_longrope(keys);
    let keys = &Keys(&config);
    let decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    let window = keys.window("sliding_window")?;
    Ok(decoder.finish_windowed(window, |_| true))
}

/// The config with early Phi-3's `yarn` scaling under its current name.
fn with_longrope(keys: &Keys<'_>) -> Map<String, Value> {
    let mut config = keys.0.clone();
    for scaling in ["rope_scaling", "rope_parameters"] {
        for kind in ["rope_type", "type"] {
            if let Some(kind) = config.get_mut(scaling).and_then(|s| s.get_mut(kind))
                && kind == "yarn"
            {
                *kind = json!("longrope");
            }
        }
    }
    config
}
