//! Nemotron-H, of which Nemotron 3 Nano is the third generation. A block is one half alone: Mamba-2, attention without rotation, an MLP of
//! a squared ReLU, or a mixture of such MLPs.

use serde_json::{Value, json};

use super::decoder::{
    Decoder, HEAD_MULTIPLE, MOST_TAPS, MOST_WIDTH, expert_counts, intermediate_size,
    sigmoid_scoring,
};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::spec::{
    Activation, DenseMlpSpec, ExpertNames, ExpertsSpec, Mamba2Spec, MixerSpec, MlpSpec, NormNames,
    SharedExpertSpec, Spec,
};
use crate::tensor::MambaShape;

pub(super) const NEMOTRON_H: Family = Family {
    model_type: "nemotron_h",
    class: "NemotronHForCausalLM",
    defaults,
    renamed: &[
        ("layers_block_type", "layer_types"),
        ("n_routed_experts", "num_local_experts"),
    ],
    read,
};

/// Names in its files, where every kind of block is a `mixer`.
const NAMES: &[(&str, &str)] = &[
    ("model.embed_tokens.", "model.embeddings."),
    ("model.norm.", "model.norm_f."),
    ("self_attn.", "mixer."),
    ("mlp.shared_expert.", "mixer.shared_experts."),
    ("mlp.", "mixer."),
];

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayerKind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

fn defaults() -> Value {
    json!({
        "vocab_size": 131_072, "hidden_size": 4096, "layer_types": null, "tie_word_embeddings": false,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "attention_bias": false, "sliding_window": null, "intermediate_size": 21_504, "mlp_hidden_act": "relu2",
        "mlp_bias": false, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4,
        "time_step_limit": [0.0, {"__float__": "Infinity"}], "use_conv_bias": true, "num_local_experts": 8,
        "n_shared_experts": 1, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": null, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": true, "use_bias": false, "layer_norm_epsilon": 1e-5
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    refuse(keys)?;
    let kinds = kinds(keys)?;
    let mut config = keys.0.clone();
    config.insert("num_hidden_layers".to_owned(), kinds.len().into());
    if let Some(eps) = keys.get("layer_norm_epsilon") {
        config.insert("rms_norm_eps".to_owned(), eps.clone());
    }
    let mut decoder = Decoder::read_with(&Keys(&config), |_, _| Ok(Vec::new()))?;
    decoder.read_attention_bias(keys)?;
    decoder.spec.norm_names = NormNames::SINGLE;
    decoder.spec.renamed = NAMES;
    decoder.block.attention.rope = None;
    // Keys of a kind that no block has may hold anything.
    let has = |kind| kinds.contains(&kind);
    let mamba = has(LayerKind::Mamba).then(|| mamba(keys)).transpose()?;
    let mlp = DenseMlpSpec {
        intermediate_size: decoder.block.mlp.intermediate_size(),
        gated: false,
        activation: Activation::ReluSquared,
        bias: keys.flag("mlp_bias")? == Some(true),
    };
    let experts = has(LayerKind::Experts)
        .then(|| experts(keys, mlp))
        .transpose()?;
    Ok(decoder.finish(|layer, block| {
        let (mixer, mlp) = match kinds[layer] {
            LayerKind::Mamba => (mamba.clone().map(MixerSpec::Mamba2), MlpSpec::None),
            LayerKind::Attention => (None, MlpSpec::None),
            LayerKind::Mlp => (Some(MixerSpec::None), MlpSpec::Dense(mlp)),
            LayerKind::Experts => (
                Some(MixerSpec::None),
                experts.map_or(MlpSpec::None, MlpSpec::Experts),
            ),
        };
        (block.mixer, block.mlp) = (mixer, mlp);
    }))
}

/// Refuses what no model of the family that runs has.
fn refuse(keys: &Keys<'_>) -> Result<()> {
    for (key, known) in [("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")] {
        if let Some(name) = keys.text(key)?.filter(|name| *name != known) {
            bail!(Unsupported, "config: {key} is '{name}'; known is {known}");
        }
    }
    for (key, what) in [
        ("moe_latent_size", "experts of a latent width"),
        ("sliding_window", "attention with a window"),
    ] {
        if let Some(n) = keys.count(key)?.filter(|n| *n > 0) {
            bail!(
                Unsupported,
                "config: {key} is {n}, {what}; models of this family are known only without"
            );
        }
    }
    Ok(())
}

/// The blocks, from `layers_block_type` or else from `hybrid_override_pattern`, which has a letter for each.
fn kinds(keys: &Keys<'_>) -> Result<Vec<LayerKind>> {
    let (key, kinds) = match (
        keys.texts("layer_types")?,
        keys.text("hybrid_override_pattern")?,
    ) {
        (Some(types), _) => {
            let kinds: Result<Vec<LayerKind>> = types.iter().map(|name| of_name(name)).collect();
            ("layers_block_type", kinds?)
        }
        (None, Some(pattern)) => {
            let kinds: Result<Vec<LayerKind>> = pattern.chars().map(of_letter).collect();
            ("hybrid_override_pattern", kinds?)
        }
        // The default of the class of transformers.
        (None, None) => {
            let all = [
                LayerKind::Mamba,
                LayerKind::Experts,
                LayerKind::Attention,
                LayerKind::Mlp,
            ];
            ("layers_block_type", all.to_vec())
        }
    };
    if let Some(layers) = keys
        .count("num_hidden_layers")?
        .filter(|n| *n != kinds.len())
    {
        bail!(
            CorruptFile,
            "config: '{key}' has {} layers; num_hidden_layers is {layers}",
            kinds.len()
        );
    }
    if !kinds.contains(&LayerKind::Attention) {
        bail!(
            Unsupported,
            "config: '{key}' has {} layers, none of them attention; models of this family are known only with",
            kinds.len()
        );
    }
    Ok(kinds)
}

fn of_name(name: &str) -> Result<LayerKind> {
    match name {
        "linear_attention" | "mamba" => Ok(LayerKind::Mamba),
        "full_attention" | "attention" => Ok(LayerKind::Attention),
        "mlp" => Ok(LayerKind::Mlp),
        "moe" => Ok(LayerKind::Experts),
        other => bail!(
            Unsupported,
            "config: 'layers_block_type' has '{other}'; known are linear_attention, full_attention, mlp, moe"
        ),
    }
}

fn of_letter(letter: char) -> Result<LayerKind> {
    match letter {
        'M' => Ok(LayerKind::Mamba),
        '*' => Ok(LayerKind::Attention),
        '-' => Ok(LayerKind::Mlp),
        'E' => Ok(LayerKind::Experts),
        other => bail!(
            Unsupported,
            "config: 'hybrid_override_pattern' has '{other}'; known are M, *, -, E"
        ),
    }
}

fn mamba(keys: &Keys<'_>) -> Result<Mamba2Spec> {
    let shape = MambaShape {
        heads: keys.required_size("mamba_num_heads")?,
        head_dim: keys.required_size("mamba_head_dim")?,
        groups: keys.required_size("n_groups")?,
        state_size: keys.required_size("ssm_state_size")?,
        taps: keys.required_size("conv_kernel")?,
    };
    if !shape.heads.is_multiple_of(shape.groups) {
        bail!(
            CorruptFile,
            "config: mamba_num_heads {} is not a multiple of n_groups {}",
            shape.heads,
            shape.groups
        );
    }
    for (name, dim, count) in [
        ("mamba_head_dim", shape.head_dim, shape.heads),
        ("ssm_state_size", shape.state_size, shape.groups),
    ] {
        if !dim.is_multiple_of(HEAD_MULTIPLE) || dim.saturating_mul(count) > MOST_WIDTH {
            bail!(
                Unsupported,
                "config: {name} is {dim}, {count} times; it must be a multiple of {HEAD_MULTIPLE}, and at most {MOST_WIDTH} in all"
            );
        }
    }
    if !(2..=MOST_TAPS).contains(&shape.taps) {
        bail!(
            Unsupported,
            "config: conv_kernel is {}; expected 2 to {MOST_TAPS}",
            shape.taps
        );
    }
    Ok(Mamba2Spec {
        shape,
        bias: keys.flag("use_bias")? == Some(true),
        convolution_bias: keys.flag("use_conv_bias")? == Some(true),
        step_limits: step_limits(keys)?,
    })
}

/// The least and the largest time step, as the models are trained and served with. transformers 5 takes `time_step_min` for the least one
/// of prompts, and none of single tokens.
fn step_limits(keys: &Keys<'_>) -> Result<[f32; 2]> {
    let Some(value) = keys.get("time_step_limit") else {
        return Ok([0.0, f32::INFINITY]);
    };
    let number = |value: &Value| match value["__float__"].as_str() {
        Some("Infinity") => Some(f64::INFINITY),
        _ => value.as_f64(),
    };
    let limits = value.as_array().map(|limits| limits.iter().map(number));
    let limits: Option<Vec<f64>> = limits.and_then(Iterator::collect);
    match limits.as_deref() {
        Some(&[least, largest]) if 0.0 <= least && least <= largest => {
            Ok([least as f32, largest as f32])
        }
        _ => bail!(
            CorruptFile,
            "config: 'time_step_limit' is {value}; expected two ascending numbers from 0 on"
        ),
    }
}

/// The mixture, with a shared expert. `mlp` is what all MLPs of the model have in common.
fn experts(keys: &Keys<'_>, mlp: DenseMlpSpec) -> Result<ExpertsSpec> {
    let (count, per_token) = expert_counts(keys, "num_local_experts", "num_experts_per_tok")?;
    if let Some(n) = keys.count("n_shared_experts")?.filter(|n| *n != 1) {
        bail!(
            Unsupported,
            "config: n_shared_experts is {n}; models of this family are known only with 1"
        );
    }
    Ok(ExpertsSpec {
        count,
        per_token,
        normalized: keys.flag("norm_topk_prob")? == Some(true),
        scoring: sigmoid_scoring(keys, (count, per_token))?,
        router_bias: false,
        router_scaled: false,
        names: ExpertNames::Qwen,
        expert: DenseMlpSpec {
            intermediate_size: intermediate_size(keys, "moe_intermediate_size")?,
            bias: false,
            ..mlp
        },
        shared: Some(SharedExpertSpec {
            mlp: DenseMlpSpec {
                intermediate_size: intermediate_size(keys, "moe_shared_expert_intermediate_size")?,
                ..mlp
            },
            gated: false,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{families, tensors};

    fn with(changes: Value) -> Result<Spec> {
        let mut config = json!({
            "model_type": "nemotron_h", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "hybrid_override_pattern": "M*-E",
            "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 8,
            "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 80
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        families::read(&config)
    }

    /// A letter for each block.
    fn letters(spec: &Spec) -> String {
        let letter = |block: &crate::model::spec::BlockSpec| match (&block.mixer, &block.mlp) {
            (MixerSpec::Mamba2(_), MlpSpec::None) => 'M',
            (MixerSpec::Attention(_), MlpSpec::None) => '*',
            (MixerSpec::None, MlpSpec::Dense(_)) => '-',
            (MixerSpec::None, MlpSpec::Experts(_)) => 'E',
            _ => panic!("{block:?}"),
        };
        spec.blocks.iter().map(letter).collect()
    }

    #[test]
    fn blocks_are_one_half_each() {
        let spec = with(json!({})).unwrap();
        assert_eq!((letters(&spec).as_str(), spec.ropes.len()), ("M*-E", 0));
        assert_eq!(spec.blocks[1].attention().unwrap().rope, None);
        let mlp = *spec.blocks[2].mlp.of_all_rows().unwrap();
        assert_eq!(
            (mlp.gated, mlp.activation, mlp.intermediate_size),
            (false, Activation::ReluSquared, 96)
        );
        let mixture = spec.blocks[3].mlp.mixture().unwrap();
        let shared = mixture.shared.unwrap();
        assert_eq!((mixture.count, mixture.expert.intermediate_size), (8, 48));
        assert_eq!((shared.mlp.intermediate_size, shared.gated), (80, false));
        let old = json!({"layers_block_type": ["moe", "mamba", "attention", "mlp"]});
        assert_eq!(letters(&with(old).unwrap()), "EM*-");
        let new = json!({"layers_block_type": ["full_attention", "linear_attention"], "num_hidden_layers": 2});
        assert_eq!(letters(&with(new).unwrap()), "*M");
    }

    /// The shape of Nemotron 3 Nano, whose maker counts 31.6 billion parameters.
    #[test]
    fn the_tensors_of_a_published_model_have_its_parameters() {
        let spec = with(json!({
            "hidden_size": 2688, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 131_072,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
            "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
            "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856
        }))
        .unwrap();
        let stored = tensors::stored(&spec).into_iter();
        let sizes = stored.map(|(_, shape, _)| shape.iter().product::<usize>());
        assert_eq!(sizes.sum::<usize>(), 31_577_940_288);
    }

    #[test]
    fn projections_with_biases_are_stored_once() {
        let spec = with(json!({"use_bias": true})).unwrap();
        let stored = tensors::stored(&spec).into_iter();
        let names: Vec<_> = stored
            .map(|(name, ..)| name)
            .filter(|name| name.contains("in_proj"))
            .collect();
        assert_eq!(
            names,
            [
                "model.layers.0.mixer.in_proj.weight",
                "model.layers.0.mixer.in_proj.bias"
            ]
        );
    }

    #[test]
    fn time_steps_have_the_limits_of_the_config() {
        let limits = |value: Value| {
            let spec = with(json!({"time_step_limit": value}))?;
            match &spec.blocks[0].mixer {
                MixerSpec::Mamba2(mamba) => Ok(mamba.step_limits),
                other => panic!("{other:?}"),
            }
        };
        let infinite = json!([0.25, {"__float__": "Infinity"}]);
        assert_eq!(limits(infinite).unwrap(), [0.25, f32::INFINITY]);
        assert_eq!(limits(json!([0.0, 0.5])).unwrap(), [0.0, 0.5]);
        assert_eq!(limits(Value::Null).unwrap(), [0.0, f32::INFINITY]);
        for bad in [
            json!([0.5, 0.25]),
            json!([0.5]),
            json!([-1.0, 1.0]),
            json!(1),
        ] {
            let e: crate::base::Error = limits(bad.clone()).unwrap_err();
            assert!(e.message().contains("'time_step_limit' is"), "{bad}: {e}");
        }
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (changes, expected) in [
            (
                json!({"hybrid_override_pattern": "M*X"}),
                "'hybrid_override_pattern' has 'X'; known are M, *, -, E",
            ),
            (
                json!({"layers_block_type": ["conv"]}),
                "'layers_block_type' has 'conv'",
            ),
            (
                json!({"hybrid_override_pattern": "M-M-"}),
                "has 4 layers, none of them attention",
            ),
            (
                json!({"num_hidden_layers": 5}),
                "has 4 layers; num_hidden_layers is 5",
            ),
            (
                json!({"n_groups": 3}),
                "mamba_num_heads 4 is not a multiple of n_groups 3",
            ),
            (json!({"mamba_head_dim": 24}), "mamba_head_dim is 24"),
            (json!({"ssm_state_size": 8}), "ssm_state_size is 8"),
            (
                json!({"conv_kernel": 5}),
                "conv_kernel is 5; expected 2 to 4",
            ),
            (
                json!({"mlp_hidden_act": "silu"}),
                "mlp_hidden_act is 'silu'",
            ),
            (
                json!({"mamba_hidden_act": "gelu"}),
                "mamba_hidden_act is 'gelu'",
            ),
            (json!({"moe_latent_size": 32}), "moe_latent_size is 32"),
            (json!({"sliding_window": 16}), "sliding_window is 16"),
            (json!({"n_shared_experts": 2}), "n_shared_experts is 2"),
            (json!({"n_group": 3}), "2 of 8 experts in 1 of 3 groups"),
            (
                json!({"routed_scaling_factor": 0}),
                "'routed_scaling_factor' is 0",
            ),
            (
                json!({"num_experts_per_tok": 9}),
                "9 experts (num_experts_per_tok) of 8",
            ),
        ] {
            let e = with(changes).unwrap_err();
            assert!(e.message().contains(expected), "{expected}: {e}");
        }
    }
}
