//! OLMo 2 and 3, and EXAONE 4, in GGUF.

use serde_json::{Map, Value, json};

use super::common::{ATTENTION, MLP, Names, PLAIN, layer_types, window, windowed_blocks};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufMetadata};

const NORMS_AFTER_HALVES: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// One layer of so many has full attention, if a file with a window does not say.
const INTERVAL: u64 = 4;

pub(super) const OLMO2: GgufFamily = GgufFamily {
    architecture: "olmo2",
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    per_layer: &[ATTENTION, MLP, NORMS_AFTER_HALVES],
    keys: &[],
    config: olmo,
    ..PLAIN
};

pub(super) const EXAONE4: GgufFamily = GgufFamily {
    architecture: "exaone4",
    model_type: "exaone4",
    class: "Exaone4ForCausalLM",
    config: windows,
    ..OLMO2
};

/// OLMo 3 files have the architecture of OLMo 2; a window identifies them.
fn olmo(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    if window(metadata)?.is_some() {
        config.insert("model_type".into(), json!("olmo3"));
        config.insert("architectures".into(), json!(["Olmo3ForCausalLM"]));
        windows(metadata, config)?;
    }
    Ok(())
}

/// The window, and the layers that have it.
fn windows(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    config.insert("sliding_window".into(), json!(window(metadata)?));
    let windowed = windowed_blocks(metadata, INTERVAL)?;
    config.insert("layer_types".into(), layer_types(&windowed));
    Ok(())
}
