//! MiniMax-M2: norms over all heads of queries and of keys together, a part of each head that rotates, and experts scored by sigmoids.

use serde_json::{Value, json};

use super::decoder::{Decoder, ROTARY_PART, THETA, WIDTH, experts, with_numbers};
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::spec::{
    ExpertNames, ExpertsSpec, MlpSpec, QkNorm, Scoring, SigmoidScoring, Spec,
};

pub(super) const MINIMAX_M2: Family = Family {
    model_type: "minimax_m2",
    class: "MiniMaxM2ForCausalLM",
    defaults,
    renamed: &[("num_local_experts", "num_experts")],
    read,
};

/// The base of the rotation, if the config has none.
const BASE: f64 = 5e6;

/// Names in its files.
const NAMES: &[(&str, &str)] = &[
    (
        "mlp.gate.e_score_correction_bias",
        "block_sparse_moe.e_score_correction_bias",
    ),
    ("mlp.", "block_sparse_moe."),
];

fn defaults() -> Value {
    json!({
        "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 196_608, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "num_experts_per_tok": 8,
        "num_experts": 256, "rope_parameters": null
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let mut numbers = vec![(THETA, BASE)];
    // Published files give the part of a head that rotates in elements.
    if let (Some(rotated), Some(dim)) = (keys.size("rotary_dim")?, keys.size("head_dim")?) {
        numbers.push((ROTARY_PART, rotated as f64 / dim as f64));
    }
    let config = with_numbers(keys, &numbers)?;
    let keys = &Keys(&config);
    let mut decoder = Decoder::read(keys)?;
    decoder.spec.renamed = NAMES;
    // Files that have modules which draft hold them as further layers.
    decoder.spec.unread_layers = keys.count("num_mtp_modules")?.unwrap_or(0);
    decoder.block.attention.qk_norm = QkNorm::Projections;
    let experts = experts(keys, "num_experts", WIDTH)?;
    let scoring = SigmoidScoring {
        groups: 1,
        top_groups: 1,
        scale: 1.0,
    };
    decoder.block.mlp = MlpSpec::Experts(ExpertsSpec {
        normalized: true,
        scoring: Scoring::Sigmoid(scoring),
        names: ExpertNames::Mixtral,
        ..experts
    });
    Ok(decoder.finish(|_, _| {}))
}
