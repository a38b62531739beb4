//! Qwen2, whose queries, keys and values have biases; Qwen3, which normalizes the heads of queries and keys instead; and Qwen3 with a
//! mixture of experts.

use super::decoder::{Decoder, expert_layers, experts};
use super::{Family, Keys};
use crate::base::Result;
use crate::model::spec::{MlpSpec, Spec};

pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    read: qwen2,
};

pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    read: qwen3,
};

pub(super) const QWEN3_MOE: Family = Family {
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    read: qwen3_moe,
};

fn qwen2(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.block.attention.qkv_bias = true;
    finish(decoder, keys)
}

fn qwen3(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.qk_norm = true;
    finish(decoder, keys)
}

fn qwen3_moe(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.qk_norm = true;
    let (experts, has_experts) = (experts(keys)?, expert_layers(keys)?);
    let mut spec = finish(decoder, keys)?;
    for (layer, block) in spec.blocks.iter_mut().enumerate() {
        if has_experts(layer) {
            block.mlp = MlpSpec::Experts(experts);
        }
    }
    Ok(spec)
}

/// Layers from `max_window_layers` on see only a window, if `use_sliding_window` says so; `layer_types` has precedence.
fn finish(decoder: Decoder, keys: &Keys<'_>) -> Result<Spec> {
    let used = keys.flag("use_sliding_window")? == Some(true);
    let window = keys.size("sliding_window")?.filter(|_| used);
    let first = keys.count("max_window_layers")?.unwrap_or(decoder.layers);
    let types = decoder.read_layer_types(keys)?;
    Ok(decoder.finish_windowed(window, |layer| match &types {
        Some(windowed) => windowed[layer],
        None => layer >= first,
    }))
}
