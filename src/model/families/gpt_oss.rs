//! gpt-oss: attention with sinks, and a window in every other layer; experts with biases and a clamped SwiGLU.

use serde_json::{Map, Value, json};

use super::decoder::{Decoder, THETA, WIDTH, WINDOWED, experts, with_numbers};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::spec::{Activation, DenseMlpSpec, ExpertNames, ExpertsSpec, MlpSpec, Spec};

pub(super) const GPT_OSS: Family = Family {
    model_type: "gpt_oss",
    class: "GptOssForCausalLM",
    defaults,
    renamed: &[("num_local_experts", "num_experts")],
    read,
};

/// The base of the rotation, if the config has none.
const BASE: f64 = 150_000.0;

fn defaults() -> Value {
    json!({
        "num_hidden_layers": 36, "num_experts": 128, "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
        "tie_word_embeddings": false, "hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "rope_parameters": null, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "layer_types": null,
        "attention_bias": true
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let config = completed(keys)?;
    let keys = &Keys(&config);
    let mut decoder = Decoder::read(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.sinks = true;
    let experts = experts(keys, "num_experts", WIDTH)?;
    decoder.block.mlp = MlpSpec::Experts(ExpertsSpec {
        normalized: true,
        router_bias: true,
        names: ExpertNames::GptOss,
        expert: DenseMlpSpec {
            activation: Activation::ClampedSwiglu {
                alpha: positive(keys, "swiglu_alpha")?,
                limit: positive(keys, "swiglu_limit")?,
            },
            bias: true,
            ..experts.expert
        },
        ..experts
    });
    let window = keys.window("sliding_window")?;
    let types = decoder.read_layer_types(keys, WINDOWED)?;
    Ok(decoder.finish_windowed(window, |layer| match &types {
        Some(types) => types[layer],
        None => layer.is_multiple_of(2),
    }))
}

/// The config with the defaults of its rotation.
fn completed(keys: &Keys<'_>) -> Result<Map<String, Value>> {
    let mut config = with_numbers(keys, &[(THETA, BASE)])?;
    let is_given = |name| Ok(keys.object(name)?.is_some_and(|given| !given.0.is_empty()));
    if !is_given("rope_scaling")? && !is_given("rope_parameters")? {
        let yarn = json!({
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 4096
        });
        config.insert("rope_parameters".to_owned(), yarn);
    }
    Ok(config)
}

fn positive(keys: &Keys<'_>, name: &str) -> Result<f32> {
    match keys.number(name)? {
        Some(number) if number > 0.0 && (number as f32).is_finite() => Ok(number as f32),
        Some(number) => bail!(
            CorruptFile,
            "config: '{name}' is {number}; expected a positive number"
        ),
        None => bail!(CorruptFile, "config: '{name}' is missing"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    fn with(changes: Value) -> Result<Spec> {
        let mut config = json!({
            "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "num_local_experts": 8
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        families::read(&config)
    }

    #[test]
    fn every_other_layer_has_the_window_unless_the_config_says() {
        let windows = |changes: Value| -> Vec<Option<usize>> {
            let spec = with(changes).unwrap();
            let attentions = spec.blocks.iter().filter_map(|block| block.attention());
            attentions.map(|attention| attention.window).collect()
        };
        assert_eq!(windows(json!({})), [Some(128), None, Some(128), None]);
        let types = [
            "full_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ];
        assert_eq!(
            windows(json!({"layer_types": types, "sliding_window": 16})),
            [None, None, Some(16), None]
        );
    }

    #[test]
    fn a_config_alone_gives_sinks_biases_and_the_clamp() {
        let spec = with(json!({})).unwrap();
        let attention = spec.blocks[0].attention().unwrap();
        assert!(attention.sinks && attention.qkv_bias && attention.o_bias && !spec.tied);
        let experts = spec.blocks[0].mlp.mixture().unwrap();
        assert_eq!((experts.count, experts.per_token), (8, 4));
        assert!(experts.normalized && experts.router_bias && experts.expert.bias);
        assert_eq!(experts.expert.intermediate_size, 96);
        let expected = Activation::ClampedSwiglu {
            alpha: 1.702,
            limit: 7.0,
        };
        assert_eq!(experts.expert.activation, expected);
        // YaRN by 32: 0.1 ln 32 + 1.
        let factor = spec.ropes[0].table.attention_factor;
        assert!((factor - 1.346_574).abs() < 1e-6, "{factor}");
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (changes, expected) in [
            (json!({"swiglu_limit": 0}), "'swiglu_limit' is 0"),
            (json!({"swiglu_alpha": -1.5}), "'swiglu_alpha' is -1.5"),
            (json!({"swiglu_limit": null}), "'swiglu_limit' is missing"),
            (
                json!({"num_experts_per_tok": 9}),
                "9 experts (num_experts_per_tok) of 8",
            ),
            (
                json!({"intermediate_size": 100}),
                "is 100; it must be a multiple of 16",
            ),
            (
                json!({"layer_types": ["chunked_attention", "a", "b", "c"]}),
                "known are full_attention, sliding_attention",
            ),
        ] {
            let e = with(changes).unwrap_err();
            assert!(e.message().contains(expected), "{expected}: {e}");
        }
    }
}
