//! Mistral: Llama, optionally with a window in every layer. Ministral has windows in the layers that its config names; Mixtral has experts; and
//! queries of Ministral 3 grow with their position.

use serde_json::{Map, Value, json};

use super::decoder::{Decoder, THETA, WIDTH, WINDOWED, experts, with_numbers};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::rope::{self, RopeSet};
use crate::model::spec::{ExpertNames, ExpertsSpec, MlpSpec, QueryGrowth, Spec};

pub(super) const MISTRAL: Family = Family {
    model_type: "mistral",
    class: "MistralForCausalLM",
    defaults,
    renamed: &[],
    read,
};

pub(super) const MINISTRAL: Family = Family {
    model_type: "ministral",
    class: "MinistralForCausalLM",
    defaults: ministral_defaults,
    renamed: &[],
    read: ministral,
};

pub(super) const MIXTRAL: Family = Family {
    model_type: "mixtral",
    class: "MixtralForCausalLM",
    defaults: mixtral_defaults,
    renamed: &[("num_local_experts", "num_experts")],
    read: mixtral,
};

pub(super) const MINISTRAL3: Family = Family {
    model_type: "ministral3",
    class: "Ministral3ForCausalLM",
    defaults: ministral3_defaults,
    renamed: &[],
    read: ministral3,
};

/// The base of Mixtral's rotation, if the config has none.
const MIXTRAL_BASE: f64 = 1e6;
/// Names in files of Mixtral.
const MIXTRAL_NAMES: &[(&str, &str)] = &[("mlp.", "block_sparse_moe.")];

fn defaults() -> Value {
    json!({
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": null, "hidden_act": "silu",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_parameters": null,
        "sliding_window": 4096
    })
}

fn ministral_defaults() -> Value {
    let mut all = defaults();
    all["layer_types"] = Value::Null;
    all
}

fn mixtral_defaults() -> Value {
    let mut all = defaults();
    for (key, value) in [
        ("rms_norm_eps", json!(1e-5)),
        ("sliding_window", Value::Null),
        ("num_experts_per_tok", json!(2)),
        ("num_experts", json!(8)),
    ] {
        all[key] = value;
    }
    all
}

fn ministral3_defaults() -> Value {
    json!({
        "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_parameters": null,
        "sliding_window": null
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    let window = keys.window("sliding_window")?;
    Ok(decoder.finish_windowed(window, |_| true))
}

fn ministral(keys: &Keys<'_>) -> Result<Spec> {
    let decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    let window = keys.window("sliding_window")?;
    let types = decoder.read_layer_types(keys, WINDOWED)?;
    Ok(decoder.finish_windowed(window, |layer| {
        types.as_ref().is_none_or(|types| types[layer])
    }))
}

fn mixtral(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_numbers(keys, &[(THETA, MIXTRAL_BASE)])?;
    let keys = &Keys(&config);
    let mut decoder = Decoder::read(keys)?;
    decoder.spec.renamed = MIXTRAL_NAMES;
    decoder.block.mlp = MlpSpec::Experts(ExpertsSpec {
        normalized: true,
        names: ExpertNames::Mixtral,
        ..experts(keys, "num_experts", WIDTH)?
    });
    let window = keys.window("sliding_window")?;
    Ok(decoder.finish_windowed(window, |_| true))
}

fn ministral3(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_rotation(keys)?;
    let keys = &Keys(&config);
    let mut spec = read(keys)?;
    let growth = growth(keys)?;
    for table in spec.ropes.iter_mut().flat_map(RopeSet::tables_mut) {
        table.growth = growth;
    }
    Ok(spec)
}

/// The config with the rotation that the class of transformers has by default.
fn with_rotation(keys: &Keys<'_>) -> Result<Map<String, Value>> {
    let mut config = keys.0.clone();
    if rope::parameters(keys)?.is_none() {
        let yarn = json!({
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1
        });
        config.insert("rope_parameters".to_owned(), yarn);
    }
    Ok(config)
}

/// How queries grow, from the parameters of the rotation. A rate of 0 is none.
fn growth(keys: &Keys<'_>) -> Result<Option<QueryGrowth>> {
    const RATE: &str = "llama_4_scaling_beta";
    const POSITIONS: &str = "original_max_position_embeddings";
    let Some(parameters) = rope::parameters(keys)? else {
        return Ok(None);
    };
    let Some(given) = parameters.number(RATE)?.filter(|&rate| rate != 0.0) else {
        return Ok(None);
    };
    let rate = given as f32;
    if !(rate >= 0.0 && rate.is_finite()) {
        bail!(
            CorruptFile,
            "config: '{RATE}' is {given}; expected a number from 0 on"
        );
    }
    let positions = match keys.size(POSITIONS)?.or(parameters.size(POSITIONS)?) {
        Some(positions) => positions,
        // As in transformers.
        None if rope::kind(&parameters)? == Some("yarn") => {
            keys.required_size("max_position_embeddings")?
        }
        None => bail!(
            CorruptFile,
            "config: '{RATE}' is {given}, and there is no '{POSITIONS}' from which on queries grow"
        ),
    };
    Ok(Some(QueryGrowth { rate, positions }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    fn with(parameters: Value) -> Result<Spec> {
        families::read(&json!({"model_type": "ministral3", "rope_parameters": parameters}))
    }

    fn growing(rate: Value) -> Value {
        json!({
            "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "llama_4_scaling_beta": rate
        })
    }

    #[test]
    fn queries_grow_as_the_config_says() {
        for (parameters, expected) in [
            (Value::Null, Some((0.1, 16_384))),
            (growing(json!(0.25)), Some((0.25, 4096))),
            (json!({"rope_type": "default"}), None),
            // As in Devstral 2.
            (growing(json!(0)), None),
            (
                json!({"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.5}),
                Some((0.5, 262_144)),
            ),
        ] {
            let growth = with(parameters.clone()).unwrap().ropes[0].table.growth;
            let got = growth.map(|growth| (growth.rate, growth.positions));
            assert_eq!(got, expected, "{parameters}");
        }
        for (parameters, expected) in [
            (growing(json!(-1)), "'llama_4_scaling_beta' is -1"),
            // Infinite in single precision.
            (growing(json!(1e300)), "expected a number from 0 on"),
            (
                json!({"rope_type": "default", "llama_4_scaling_beta": 0.1}),
                "there is no 'original_max_position_embeddings'",
            ),
        ] {
            let e = with(parameters).unwrap_err();
            assert!(e.message().contains(expected), "{expected}: {e}");
        }
    }

    /// As for every family, `rope_scaling` without keys is none.
    #[test]
    fn empty_scaling_is_none() {
        let rate = |mut config: Value| {
            config["model_type"] = json!("ministral3");
            config["rope_scaling"] = json!({});
            let growth = families::read(&config).unwrap().ropes[0].table.growth;
            growth.map(|growth| growth.rate)
        };
        assert_eq!(rate(json!({})), Some(0.1));
        let own = json!({"rope_parameters": growing(json!(0.25))});
        assert_eq!(rate(own), Some(0.25));
    }

    #[test]
    fn queries_grow_in_long_contexts_too() {
        let factors = vec![1.0; 64];
        let spec = with(json!({
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096
        }));
        let mut spec = spec.unwrap();
        for capacity in [4096, 4097] {
            assert!(spec.ropes[0].table(capacity).growth.is_some(), "{capacity}");
        }
        spec = spec.without_growth();
        assert_eq!(spec.max_positions, 4096);
        assert!(
            spec.ropes[0]
                .tables_mut()
                .all(|table| table.growth.is_none())
        );
    }

    #[test]
    fn without_growth_there_are_fewer_positions() {
        let spec = with(growing(json!(0.1))).unwrap();
        assert!(spec.check_context(4097).is_ok());
        let even = spec.without_growth();
        assert_eq!(
            (even.max_positions, even.ropes[0].table.growth),
            (4096, None)
        );
        assert!(even.check_context(4096).is_ok() && even.check_context(4097).is_err());
        let plain = with(json!({"rope_type": "default"})).unwrap();
        assert_eq!(plain.clone().without_growth(), plain);
    }
}
