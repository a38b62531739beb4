//! Granite in GGUF.

use serde_json::{Map, Value, json};

use super::common::PLAIN;
use super::llama::INTERLEAVED;
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufMetadata};

pub(super) const GRANITE: GgufFamily = GgufFamily {
    architecture: "granite",
    model_type: "granite",
    class: "GraniteForCausalLM",
    forms: INTERLEAVED,
    keys: &[],
    config,
    ..PLAIN
};

/// llama.cpp takes a factor of 0 for none, and scores are then scaled by the width of a head.
fn config(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let factor = |key: &str| -> Result<Option<f64>> {
        Ok(metadata.float(key)?.filter(|&factor| factor != 0.0))
    };
    for (key, gguf) in [
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
    ] {
        config.insert(key.into(), json!(factor(gguf)?.unwrap_or(1.0)));
    }
    let dim = config.get("head_dim").and_then(Value::as_f64);
    let scale = match factor("attention.scale")? {
        Some(scale) => Some(scale),
        None => dim.map(|dim| dim.powf(-0.5)),
    };
    config.insert("attention_multiplier".into(), json!(scale));
    Ok(())
}
