//! Qwen2, with biases of queries, keys and values; Qwen3, which normalizes the heads of queries and keys instead; and the
//! mixture-of-experts models of both. Qwen2's mixture also has a shared expert.

use serde_json::{Value, json};

use super::decoder::{Decoder, EXPERT_WIDTH, WINDOWED, expert_layers, experts, intermediate_size};
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::{DenseMlpSpec, ExpertsSpec, MlpSpec, QkNorm, SharedExpertSpec, Spec};

pub(super) const QWEN2: Family = Family {
    model_type: "qwen2",
    class: "Qwen2ForCausalLM",
    defaults: qwen2_defaults,
    renamed: &[],
    read: qwen2,
};

pub(super) const QWEN3: Family = Family {
    model_type: "qwen3",
    class: "Qwen3ForCausalLM",
    defaults: qwen3_defaults,
    renamed: &[],
    read: qwen3,
};

pub(super) const QWEN2_MOE: Family = Family {
    model_type: "qwen2_moe",
    class: "Qwen2MoeForCausalLM",
    defaults: qwen2_moe_defaults,
    renamed: &[],
    read: qwen2_moe,
};

pub(super) const QWEN3_MOE: Family = Family {
    model_type: "qwen3_moe",
    class: "Qwen3MoeForCausalLM",
    defaults: qwen3_moe_defaults,
    renamed: EXPERTS,
    read: qwen3_moe,
};

/// The key for the number of experts since transformers 5.
const EXPERTS: &[(&str, &str)] = &[("num_local_experts", "num_experts")];

/// Defaults common to all four, extended by those of one.
fn defaults(own: Value) -> Value {
    let mut all = json!({
        "vocab_size": 151_936, "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_parameters": null, "use_sliding_window": false,
        "sliding_window": 4096
    });
    if let (Value::Object(all), Value::Object(mut own)) = (&mut all, own) {
        all.append(&mut own);
    }
    all
}

fn qwen2_defaults() -> Value {
    defaults(json!({
        "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "max_window_layers": 28, "layer_types": null
    }))
}

fn qwen3_defaults() -> Value {
    defaults(json!({
        "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32, "num_key_value_heads": 32, "head_dim": 128,
        "max_window_layers": 28, "layer_types": null, "attention_bias": false
    }))
}

fn qwen2_moe_defaults() -> Value {
    defaults(json!({
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "max_window_layers": 28, "layer_types": null, "qkv_bias": true, "decoder_sparse_step": 1,
        "mlp_only_layers": null, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "norm_topk_prob": false
    }))
}

fn qwen3_moe_defaults() -> Value {
    defaults(json!({
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "attention_bias": false, "decoder_sparse_step": 1, "mlp_only_layers": null, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": false
    }))
}

fn qwen2(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.block.attention.qkv_bias = true;
    finish(decoder, keys, last_layers)
}

fn qwen3(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.qk_norm = QkNorm::Heads;
    finish(decoder, keys, last_layers)
}

fn qwen2_moe(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.block.attention.qkv_bias = keys.flag("qkv_bias")? == Some(true);
    let experts = experts(keys, "num_experts", EXPERT_WIDTH)?;
    let shared = DenseMlpSpec {
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
    let every_other = |layer: usize, limit: usize| layer.is_multiple_of(2) && layer < limit;
    with_experts(finish(decoder, keys, every_other)?, keys, experts)
}

fn qwen3_moe(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.qk_norm = QkNorm::Heads;
    let experts = experts(keys, "num_experts", EXPERT_WIDTH)?;
    let window = used_window(keys)?;
    with_experts(decoder.finish_windowed(window, |_| true), keys, experts)
}

/// The spec with these experts in the layers that the config selects.
fn with_experts(mut spec: Spec, keys: &Keys<'_>, experts: ExpertsSpec) -> Result<Spec> {
    let has_experts = expert_layers(keys)?;
    for (layer, block) in spec.blocks.iter_mut().enumerate() {
        if has_experts(layer) {
            block.mlp = MlpSpec::Experts(experts);
        }
    }
    Ok(spec)
}

/// The window, if `use_sliding_window` enables it.
fn used_window(keys: &Keys<'_>) -> Result<Option<usize>> {
    let used = keys.flag("use_sliding_window")? == Some(true);
    Ok(keys.window("sliding_window")?.filter(|_| used))
}

/// Whether a layer of a dense model has the window: layers from `limit` on.
fn last_layers(layer: usize, limit: usize) -> bool {
    layer >= limit
}

/// The finished spec. `layer_types` selects the layers with a window; without it, `windowed` does, given a layer and `max_window_layers`.
fn finish(decoder: Decoder, keys: &Keys<'_>, windowed: fn(usize, usize) -> bool) -> Result<Spec> {
    let window = used_window(keys)?;
    let limit = keys.count("max_window_layers")?.unwrap_or(decoder.layers);
    let types = decoder.read_layer_types(keys, WINDOWED)?;
    Ok(decoder.finish_windowed(window, |layer| match &types {
        Some(types) => types[layer],
        None => windowed(layer, limit),
    }))
}
