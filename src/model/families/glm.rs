//! GLM-4: norms before and after each half of a block, and interleaved RoPE. GLM-4.5 and later: dense layers first, then mixtures with a
//! shared expert whose experts are scored by sigmoids. In both, half of each head rotates. Solar Open is GLM-4.5 with whole heads that rotate and
//! without dense layers.

use serde_json::{Value, json};

use super::decoder::{
    Decoder, EXPERT_WIDTH, ROTARY_PART, THETA, WIDTH, experts, sigmoid_scoring, with_numbers,
};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::{Keys, LARGEST};
use crate::model::spec::{
    DenseMlpSpec, ExpertsSpec, MlpSpec, NormNames, QkNorm, SharedExpertSpec, Spec,
};

pub(super) const GLM4: Family = Family {
    model_type: "glm4",
    class: "Glm4ForCausalLM",
    defaults: glm4_defaults,
    renamed: &[],
    read: glm4,
};

pub(super) const GLM4_MOE: Family = Family {
    model_type: "glm4_moe",
    class: "Glm4MoeForCausalLM",
    defaults: glm4_moe_defaults,
    renamed: &[
        ("n_routed_experts", "num_local_experts"),
        ("num_nextn_predict_layers", "num_mtp_layers"),
    ],
    read: glm4_moe,
};

pub(super) const SOLAR_OPEN: Family = Family {
    model_type: "solar_open",
    class: "SolarOpenForCausalLM",
    defaults: solar_open_defaults,
    renamed: &[("n_routed_experts", "num_local_experts")],
    read: solar_open,
};

/// The base of Solar Open's rotation, if the config has none.
const SOLAR_BASE: f64 = 1e6;
/// The part of a head that rotates, if the config does not say.
const PARTIAL_ROTARY: f64 = 0.5;

/// The names of the shared expert in files.
const NAMES: &[(&str, &str)] = &[("mlp.shared_expert.", "mlp.shared_experts.")];

fn glm4_defaults() -> Value {
    json!({
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1.5625e-7, "tie_word_embeddings": false, "rope_parameters": null,
        "attention_bias": true
    })
}

fn glm4_moe_defaults() -> Value {
    json!({
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 10_944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_parameters": null, "attention_bias": false,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_local_experts": 128,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": true,
        "use_qk_norm": false, "num_mtp_layers": 1
    })
}

fn solar_open_defaults() -> Value {
    json!({
        "vocab_size": 196_608, "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_parameters": null, "attention_bias": false,
        "moe_intermediate_size": 1280, "num_experts_per_tok": 8, "n_shared_experts": 1, "num_local_experts": 128,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": true
    })
}

fn glm4(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_numbers(keys, &[(ROTARY_PART, PARTIAL_ROTARY)])?;
    let mut decoder = Decoder::read(&Keys(&config))?;
    decoder.refuse_experts(keys)?;
    decoder.spec.norm_names = NormNames::GLM4;
    decoder.block.norms.post = true;
    let attention = &mut decoder.block.attention;
    attention.qkv_bias = keys.flag("attention_bias")? == Some(true);
    attention.interleaved = true;
    Ok(decoder.finish(|_, _| {}))
}

fn glm4_moe(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_numbers(keys, &[(ROTARY_PART, PARTIAL_ROTARY)])?;
    let mut decoder = Decoder::read(&Keys(&config))?;
    decoder.block.attention.qkv_bias = keys.flag("attention_bias")? == Some(true);
    if keys.flag("use_qk_norm")? == Some(true) {
        decoder.block.attention.qk_norm = QkNorm::Heads;
    }
    decoder.spec.renamed = NAMES;
    decoder.spec.unread_layers = keys.count("num_mtp_layers")?.unwrap_or(0);
    let experts = mixture(keys)?;
    let dense = keys.count("first_k_dense_replace")?.unwrap_or(0);
    Ok(decoder.finish(|layer, block| {
        if layer >= dense {
            block.mlp = MlpSpec::Experts(experts);
        }
    }))
}

fn solar_open(keys: &Keys<'_>) -> Result<Spec> {
    let mut config = with_numbers(keys, &[(THETA, SOLAR_BASE)])?;
    if let Some(width) = keys.get(EXPERT_WIDTH) {
        // There is no dense layer.
        config.insert(WIDTH.to_owned(), width.clone());
    }
    let mut decoder = Decoder::read(&Keys(&config))?;
    decoder.block.attention.qkv_bias = keys.flag("attention_bias")? == Some(true);
    decoder.block.mlp = MlpSpec::Experts(mixture(keys)?);
    decoder.spec.renamed = NAMES;
    Ok(decoder.finish(|_, _| {}))
}

/// The experts of a mixture, with the shared one, which is as wide as `n_shared_experts` of them.
fn mixture(keys: &Keys<'_>) -> Result<ExpertsSpec> {
    let experts = experts(keys, "num_local_experts", EXPERT_WIDTH)?;
    let (shared, width) = (
        keys.required_size("n_shared_experts")?,
        experts.expert.intermediate_size,
    );
    if (shared * width) as u64 > LARGEST {
        bail!(
            CorruptFile,
            "config: n_shared_experts is {shared}; as many experts of {width} are too wide"
        );
    }
    let mlp = DenseMlpSpec {
        intermediate_size: shared * width,
        ..experts.expert
    };
    Ok(ExpertsSpec {
        scoring: sigmoid_scoring(keys, (experts.count, experts.per_token))?,
        shared: Some(SharedExpertSpec { mlp, gated: false }),
        ..experts
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;
    use crate::model::spec::{Scoring, SigmoidScoring};
    use crate::model::tensors;

    fn with(changes: Value) -> Result<Spec> {
        let mut config = json!({
            "model_type": "glm4_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "n_routed_experts": 8, "moe_intermediate_size": 48
        });
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        families::read(&config)
    }

    #[test]
    fn dense_layers_come_before_mixtures() {
        let spec = with(json!({"first_k_dense_replace": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5})).unwrap();
        let experts: Vec<usize> = spec.blocks.iter().map(|b| b.mlp.experts()).collect();
        assert_eq!((experts, spec.unread_layers), (vec![0, 0, 8], 1));
        let mixture = spec.blocks[2].mlp.mixture().unwrap();
        let shared = mixture.shared.unwrap();
        assert_eq!((shared.mlp.intermediate_size, shared.gated), (96, false));
        let scoring = SigmoidScoring {
            groups: 1,
            top_groups: 1,
            scale: 2.5,
        };
        assert_eq!(mixture.scoring, Scoring::Sigmoid(scoring));
        assert_eq!(spec.ropes[0].table.rotary_dim(), 16);
    }

    /// The patterns of one head describe all.
    #[test]
    fn rows_of_many_heads_take_no_more_memory() {
        let size_of = |heads: usize| {
            let spec = families::read(&json!({"model_type": "glm4", "num_attention_heads": heads}))
                .unwrap();
            let all = tensors::of_block(&spec, 0);
            let queries = all.iter().find(|t| t.name.ends_with("q_proj.weight"));
            let rows = &queries.unwrap().within[0].rows;
            assert_eq!(rows.count(), heads * 128);
            format!("{rows:?}").len()
        };
        assert!(size_of(4096) < 2 * size_of(4));
    }

    #[test]
    fn refusals_name_what_is_wrong() {
        for (changes, expected) in [
            (json!({"n_group": 3}), "8 of 8 experts in 1 of 3 groups"),
            (json!({"num_experts_per_tok": 9}), "9 experts"),
            (json!({"n_shared_experts": 0}), "'n_shared_experts' is 0"),
            (
                json!({"n_shared_experts": 1 << 27}),
                "as many experts of 48 are too wide",
            ),
            (
                json!({"routed_scaling_factor": 0}),
                "'routed_scaling_factor' is 0",
            ),
        ] {
            let e = with(changes).unwrap_err();
            assert!(e.message().contains(expected), "{expected}: {e}");
        }
    }
}
