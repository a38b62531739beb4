//! OLMo 2 and 3, and EXAONE 4, in GGUF.

use serde_json::{Map, Value, json};

use super::common::{ATTENTION, MLP, Names, PLAIN, blocks, by_block, layer_types, window};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufMetadata};

const NORMS_AFTER_HALVES: Names = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];

/// One layer of so many has full attention, if a file with a window does not say.
const INTERVAL: usize = 4;

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
    config: exaone4,
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

fn exaone4(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    windows(metadata, config)
}

/// The window, and the layers that have it.
fn windows(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let window = window(metadata)?;
    config.insert("sliding_window".into(), json!(window));
    let windowed: Vec<bool> = match (window, metadata.integers(PATTERN)) {
        (None, _) => vec![false; blocks(metadata)?],
        (Some(_), Some(_)) => by_block(metadata, PATTERN)?
            .iter()
            .map(|&n| n != 0)
            .collect(),
        (Some(_), None) => (1..=blocks(metadata)?)
            .map(|layer| !layer.is_multiple_of(INTERVAL))
            .collect(),
    };
    config.insert("layer_types".into(), layer_types(&windowed));
    Ok(())
}
