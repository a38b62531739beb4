//! Granite: Llama with multipliers of embeddings, scores and residuals, and a divisor of logits.

use serde_json::{Value, json};

use super::decoder::{Decoder, factor};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const GRANITE: Family = Family {
    model_type: "granite",
    class: "GraniteForCausalLM",
    defaults,
    renamed: &[],
    read,
};

fn defaults() -> Value {
    json!({
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": null, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_parameters": null, "attention_bias": false,
        "mlp_bias": false, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        "attention_multiplier": 1.0
    })
}

/// The largest factor of embeddings in the residual stream, and the least is its inverse: f32 holds the sum of the squares of a row with it,
/// with room for wide rows and for embeddings up to 100.
const MOST_STREAM_SCALE: f32 = 1e15;

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.scale = factor(keys, "attention_multiplier")?;
    let spec = &mut decoder.spec;
    spec.embedding_scale = factor(keys, "embedding_multiplier")?;
    spec.residual_scale = factor(keys, "residual_multiplier")?;
    // All norms are norms of the residual stream, whose mean square is divided by the square.
    spec.norm_eps /= spec.residual_scale.powi(2);
    let range = MOST_STREAM_SCALE.recip()..=MOST_STREAM_SCALE;
    if !range.contains(&spec.stream_scale()) || !spec.norm_eps.is_finite() {
        bail!(
            CorruptFile,
            "config: 'residual_multiplier' is {:?} and 'embedding_multiplier' {:?}; norms of the residual stream would leave f32; expected numbers such as 0.2 and 12",
            spec.residual_scale,
            spec.embedding_scale
        );
    }
    // A divisor.
    spec.logit_scale = 1.0 / factor(keys, "logits_scaling")?;
    Ok(decoder.finish(|_, _| {}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{families, fused, training};

    fn with(changes: Value) -> Result<Spec> {
        let mut config = json!({"model_type": "granite"});
        for (key, value) in changes.as_object().unwrap() {
            config[key] = value.clone();
        }
        families::read(&config)
    }

    #[test]
    fn factors_are_those_of_the_config() {
        let spec = with(json!({
            "embedding_multiplier": 12, "logits_scaling": 16.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625
        }));
        let spec = spec.unwrap();
        assert_eq!((spec.embedding_scale, spec.residual_scale), (12.0, 0.22));
        assert_eq!(spec.logit_scale, 0.0625);
        assert_eq!(spec.blocks[0].attention().unwrap().scale, 0.015625);
        // Halves of blocks add what they compute to a residual stream that is divided by the multiplier.
        let norm_eps = f64::from(spec.norm_eps) * 0.22f64.powi(2);
        assert!((norm_eps / 1e-6 - 1.0).abs() < 1e-6, "{norm_eps}");
        assert_eq!(spec.stream_scale(), 12.0 / 0.22f32);
        assert_eq!(fused::unsupported(&spec), None);
        let refusal = training::untrainable(&spec).unwrap();
        assert!(refusal.contains("a residual multiplier"), "{refusal}");
        let e = with(json!({"logits_scaling": 0})).unwrap_err();
        assert!(e.message().contains("'logits_scaling' is 0"), "{e}");
    }

    #[test]
    fn residual_multipliers_that_leave_f32_are_refused() {
        for (residual, embedding) in [(1e-6, 1.0), (1e-4, 1e10), (1e10, 1e-4), (1e-15, 1e-10)] {
            let changes =
                json!({"residual_multiplier": residual, "embedding_multiplier": embedding});
            assert!(with(changes).unwrap().norm_eps.is_finite(), "{residual}");
        }
        // The square of the third is 0 in f32, and the quotient of both is not too large.
        for (residual, embedding) in [(1e-20, 1.0), (1e30, 1.0), (1e-25, 1e-20), (0.2, 1e20)] {
            let changes =
                json!({"residual_multiplier": residual, "embedding_multiplier": embedding});
            let e = with(changes).unwrap_err();
            let named = format!(
                "'residual_multiplier' is {residual:?} and 'embedding_multiplier' {embedding:?};"
            );
            assert!(e.message().contains(&named), "{e}");
            assert!(e.message().contains("0.2 and 12"), "{e}");
        }
    }
}
