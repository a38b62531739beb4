//! Mistral: Llama, optionally with a window in every layer.

use serde_json::{Value, json};

use super::decoder::Decoder;
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    defaults,
    renamed: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": null, "hidden_act": "silu",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_parameters": null,
        "sliding_window": 4096
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    let window = keys.window("sliding_window")?;
    Ok(decoder.finish_windowed(window, |_| true))
}
