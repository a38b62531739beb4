//! Qwen2, whose queries, keys and values have biases; Qwen3, which normalizes the heads of queries and keys instead; and both with a
//! mixture of experts, which Qwen2 has beside an expert of every token.

use super::decoder::{Decoder, expert_layers, experts, intermediate_size};
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::{ExpertsSpec, GatedMlpSpec, MlpSpec, SharedExpertSpec, Spec};

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

pub(super) const QWEN2_MOE: Family = Family {
    model_type: "qwen2_moe",
    class: "Qwen2MoeForCausalLM",
    read: qwen2_moe,
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

fn qwen2_moe(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.block.attention.qkv_bias = true;
    let experts = experts(keys)?;
    let shared = GatedMlpSpec {
        intermediate_size: intermediate_size(keys, "shared_expert_intermediate_size")?,
        ..experts.expert
    };
    let experts = ExpertsSpec {
        shared: Some(SharedExpertSpec {
            mlp: shared,
            gated: true,
        }),
        ..experts
    };
    with_experts(finish(decoder, keys)?, keys, experts)
}

fn qwen3_moe(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.qk_norm = true;
    let experts = experts(keys)?;
    with_experts(finish(decoder, keys)?, keys, experts)
}

/// The model with these experts in the layers that the config gives them.
fn with_experts(mut spec: Spec, keys: &Keys<'_>, experts: ExpertsSpec) -> Result<Spec> {
    let has_experts = expert_layers(keys)?;
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
