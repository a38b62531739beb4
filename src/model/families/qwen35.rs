//! Qwen3.5, whose later versions have the same kinds of blocks, and Qwen3-Next: gated delta nets in most layers and gated attention in the
//! others, with a dense MLP or a mixture of experts that has a shared one.

use serde_json::{Value, json};

use super::decoder::{
    Decoder, EXPERT_WIDTH, HEAD_MULTIPLE, MOST_TAPS, MOST_WIDTH, ROTARY_PART, expert_layers,
    experts, intermediate_size, with_numbers,
};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::spec::{
    DeltaProjections, DenseMlpSpec, DrafterSpec, ExpertsSpec, GatedDeltaSpec, MixerSpec, MlpSpec,
    QkNorm, SharedExpertSpec, Spec,
};
use crate::tensor::DeltaShape;

pub(super) const QWEN3_5: Family = Family {
    model_type: "qwen3_5",
    class: "Qwen3_5ForCausalLM",
    defaults: qwen3_5_defaults,
    renamed: &[],
    read: qwen3_5,
};

pub(super) const QWEN3_5_MOE: Family = Family {
    model_type: "qwen3_5_moe",
    class: "Qwen3_5MoeForCausalLM",
    defaults: qwen3_5_moe_defaults,
    renamed: &[],
    read: qwen3_5_moe,
};

pub(super) const QWEN3_NEXT: Family = Family {
    model_type: "qwen3_next",
    class: "Qwen3NextForCausalLM",
    defaults: qwen3_next_defaults,
    renamed: &[],
    read: qwen3_next,
};

/// A layer with a gated delta net, in `layer_types`.
const RECURRENT: &str = "linear_attention";
/// The part of a head that rotates, if the config does not say.
const PARTIAL_ROTARY: f64 = 0.25;
/// Layers of the drafter, if the config does not say: published files of Qwen3-Next have it, and no key for it.
const DRAFTER_LAYERS: usize = 1;
/// One layer of so many has attention, if the config does not say.
const INTERVAL: usize = 4;

/// Defaults common to all three, extended by those of one.
fn defaults(own: Value) -> Value {
    let mut all = json!({
        "num_attention_heads": 16, "hidden_act": "silu", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "rope_parameters": null, "attention_bias": false, "head_dim": 256,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "layer_types": null
    });
    if let (Value::Object(all), Value::Object(mut own)) = (&mut all, own) {
        all.append(&mut own);
    }
    all
}

fn qwen3_5_defaults() -> Value {
    defaults(json!({
        "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32, "num_key_value_heads": 4
    }))
}

fn qwen3_5_moe_defaults() -> Value {
    defaults(json!({
        "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8
    }))
}

fn qwen3_next_defaults() -> Value {
    defaults(json!({
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": true,
        "mlp_only_layers": null
    }))
}

fn qwen3_5(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_numbers(keys, &[(ROTARY_PART, PARTIAL_ROTARY)])?;
    let decoder = Decoder::read(&Keys(&config))?;
    decoder.refuse_experts(keys)?;
    finish(decoder, keys, DeltaProjections::ByRole, |_| None)
}

/// Always divides the weights of chosen experts by their sum, and has experts in every layer.
fn qwen3_5_moe(keys: &Keys<'_>) -> Result<Spec> {
    let mut config = with_numbers(keys, &[(ROTARY_PART, PARTIAL_ROTARY)])?;
    if let Some(width) = keys.get("moe_intermediate_size") {
        // There is no dense layer.
        config.insert("intermediate_size".to_owned(), width.clone());
    }
    let decoder = Decoder::read(&Keys(&config))?;
    let experts = ExpertsSpec {
        normalized: true,
        ..shared_experts(keys)?
    };
    finish(decoder, keys, DeltaProjections::ByRole, |_| Some(experts))
}

fn qwen3_next(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_numbers(keys, &[(ROTARY_PART, PARTIAL_ROTARY)])?;
    let decoder = Decoder::read(&Keys(&config))?;
    let (experts, has_experts) = (shared_experts(keys)?, expert_layers(keys)?);
    finish(decoder, keys, DeltaProjections::ByHead, |layer| {
        has_experts(layer).then_some(experts)
    })
}

fn shared_experts(keys: &Keys<'_>) -> Result<ExpertsSpec> {
    let experts = experts(keys, "num_experts", EXPERT_WIDTH)?;
    let mlp = DenseMlpSpec {
        intermediate_size: intermediate_size(keys, "shared_expert_intermediate_size")?,
        ..experts.expert
    };
    Ok(ExpertsSpec {
        shared: Some(SharedExpertSpec { mlp, gated: true }),
        ..experts
    })
}

/// The finished spec, with the experts that `experts` gives a layer.
fn finish(
    mut decoder: Decoder,
    keys: &Keys<'_>,
    projections: DeltaProjections,
    experts: impl Fn(usize) -> Option<ExpertsSpec>,
) -> Result<Spec> {
    decoder.read_attention_bias(keys)?;
    decoder.spec.norm_plus_one = true;
    decoder.block.attention.qk_norm = QkNorm::Heads;
    decoder.block.attention.gated = keys.flag("attn_output_gate")?.unwrap_or(true);
    let delta = GatedDeltaSpec {
        shape: delta_shape(keys)?,
        projections,
    };
    let types = decoder.read_layer_types(keys, RECURRENT)?;
    let interval = keys.size("full_attention_interval")?.unwrap_or(INTERVAL);
    decoder.spec.drafter = drafter(&decoder, keys, experts(decoder.layers - 1))?;
    Ok(decoder.finish(|layer, block| {
        let is_recurrent = match &types {
            Some(recurrent) => recurrent[layer],
            None => !(layer + 1).is_multiple_of(interval),
        };
        block.mixer = is_recurrent.then(|| MixerSpec::GatedDelta(delta.clone()));
        if let Some(experts) = experts(layer) {
            block.mlp = MlpSpec::Experts(experts);
        }
    }))
}

/// The drafter, if the config has one: a block with attention, and the MLP or the mixture of the last block.
fn drafter(
    decoder: &Decoder,
    keys: &Keys<'_>,
    experts: Option<ExpertsSpec>,
) -> Result<Option<DrafterSpec>> {
    let layers = keys.count("mtp_num_hidden_layers")?;
    let layers = layers.unwrap_or(DRAFTER_LAYERS);
    let own_embeddings = keys.flag("mtp_use_dedicated_embeddings")? == Some(true);
    let mut block = decoder.block.clone();
    if let Some(experts) = experts {
        block.mlp = MlpSpec::Experts(experts);
    }
    Ok((layers > 0).then(|| DrafterSpec {
        block: block.finish(),
        layers,
        own_embeddings,
    }))
}

fn delta_shape(keys: &Keys<'_>) -> Result<DeltaShape> {
    let shape = DeltaShape {
        key_heads: keys.required_size("linear_num_key_heads")?,
        value_heads: keys.required_size("linear_num_value_heads")?,
        key_dim: keys.required_size("linear_key_head_dim")?,
        value_dim: keys.required_size("linear_value_head_dim")?,
        taps: keys.required_size("linear_conv_kernel_dim")?,
    };
    if !shape.value_heads.is_multiple_of(shape.key_heads) {
        bail!(
            CorruptFile,
            "config: linear_num_value_heads {} is not a multiple of linear_num_key_heads {}",
            shape.value_heads,
            shape.key_heads
        );
    }
    for (name, dim, heads) in [
        ("linear_key_head_dim", shape.key_dim, shape.key_heads),
        ("linear_value_head_dim", shape.value_dim, shape.value_heads),
    ] {
        if !dim.is_multiple_of(HEAD_MULTIPLE) || dim.saturating_mul(heads) > MOST_WIDTH {
            bail!(
                Unsupported,
                "config: {name} is {dim}, for {heads} heads; it must be a multiple of {HEAD_MULTIPLE}, and at most {MOST_WIDTH} in all heads"
            );
        }
    }
    if !(2..=MOST_TAPS).contains(&shape.taps) {
        bail!(
            Unsupported,
            "config: linear_conv_kernel_dim is {}; expected 2 to {MOST_TAPS}",
            shape.taps
        );
    }
    Ok(shape)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    fn with(key: &str, value: Value) -> Result<Spec> {
        let mut config = json!({
            "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
            "linear_value_head_dim": 32
        });
        config[key] = value;
        families::read(&config)
    }

    #[test]
    fn one_layer_in_four_has_attention() {
        let spec = with("tie_word_embeddings", json!(true)).unwrap();
        let attends = |spec: &Spec| -> Vec<bool> {
            let blocks = spec.blocks.iter();
            blocks.map(|block| block.attention().is_some()).collect()
        };
        assert_eq!(attends(&spec), [false, false, false, true]);
        let gated = spec.blocks[3].attention().unwrap();
        assert!(gated.gated && gated.qk_norm == QkNorm::Heads);
        assert_eq!(spec.ropes[gated.rope.unwrap()].table.rotary_dim(), 8);
        let spec = with("full_attention_interval", json!(2)).unwrap();
        assert_eq!(attends(&spec), [false, true, false, true]);
        let types = json!([
            "full_attention",
            "linear_attention",
            "full_attention",
            "full_attention"
        ]);
        let spec = with("layer_types", types).unwrap();
        assert_eq!(attends(&spec), [true, false, true, true]);
        let spec = with("attn_output_gate", json!(false)).unwrap();
        assert!(!spec.blocks[3].attention().unwrap().gated);
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (key, value, expected) in [
            (
                "linear_num_value_heads",
                json!(3),
                "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2",
            ),
            (
                "linear_key_head_dim",
                json!(24),
                "linear_key_head_dim is 24",
            ),
            (
                "linear_value_head_dim",
                json!(1 << 20),
                "linear_value_head_dim is 1048576",
            ),
            (
                "linear_conv_kernel_dim",
                json!(8),
                "linear_conv_kernel_dim is 8",
            ),
            (
                "layer_types",
                json!([
                    "mamba",
                    "full_attention",
                    "full_attention",
                    "full_attention"
                ]),
                "'layer_types' has 'mamba'; known are full_attention, linear_attention",
            ),
            (
                "num_experts",
                json!(8),
                "num_experts is 8, a mixture of experts",
            ),
        ] {
            let e = with(key, value).unwrap_err();
            assert!(e.message().contains(expected), "{key}: {e}");
        }
    }
}
