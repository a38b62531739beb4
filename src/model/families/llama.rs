//! Llama: the baseline block, from which the other families differ.

use serde_json::{Value, json};

use super::decoder::Decoder;
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    defaults,
    renamed: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": null, "head_dim": null, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_parameters": null,
        "attention_bias": false, "mlp_bias": false
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    Ok(decoder.finish(|_, _| {}))
}
