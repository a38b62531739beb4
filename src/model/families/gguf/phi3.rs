//! Phi-3 in GGUF.

use serde_json::{Map, Value, json};

use super::common::{NORMS, PLAIN, window};
use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{GgufFamily, GgufMetadata};

pub(super) const PHI3: GgufFamily = GgufFamily {
    architecture: "phi3",
    model_type: "phi3",
    class: "Phi3ForCausalLM",
    per_layer: &[
        NORMS,
        &[
            ("attn_qkv", "self_attn.qkv_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_up", "mlp.gate_up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ],
    ],
    keys: &[],
    config: phi3,
    ..PLAIN
};

fn phi3(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    if let Some(window) = window(metadata)? {
        config.insert("sliding_window".into(), json!(window));
    }
    let original = metadata.integer("rope.scaling.original_context_length")?;
    config.insert("original_max_position_embeddings".into(), json!(original));
    const NAMES: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
    let (short, long) = match NAMES.map(|name| metadata.vector(name)) {
        [Ok(None), Ok(None)] => return Ok(()),
        [Ok(Some(short)), Ok(Some(long))] => (short, long),
        [Err(e), _] | [_, Err(e)] => return Err(e),
        [short, _] => {
            let (there, missing) = match short {
                Ok(Some(_)) => (NAMES[0], NAMES[1]),
                _ => (NAMES[1], NAMES[0]),
            };
            bail!(CorruptFile, "'{there}': there is no '{missing}' beside it");
        }
    };
    let mut scaling = Map::new();
    scaling.insert("rope_type".into(), json!("longrope"));
    scaling.insert("short_factor".into(), json!(short));
    scaling.insert("long_factor".into(), json!(long));
    if let Some(factor) = metadata.float("rope.scaling.attn_factor")? {
        scaling.insert("attention_factor".into(), json!(factor));
    }
    if let Some(original) = original {
        scaling.insert("original_max_position_embeddings".into(), json!(original));
    }
    config.insert("rope_scaling".into(), Value::Object(scaling));
    Ok(())
}
