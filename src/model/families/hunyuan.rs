//! HunYuan without experts: Llama with norms of the heads of queries and keys after their rotation.

use serde_json::{Map, Value, json};

use super::decoder::{Decoder, THETA};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::rope;
use crate::model::spec::{QkNorm, Spec};

pub(super) const HUNYUAN_V1_DENSE: Family = Family {
    model_type: "hunyuan_v1_dense",
    class: "HunYuanDenseV1ForCausalLM",
    defaults,
    renamed: &[],
    read,
};

/// The names of the norms of heads in files.
const NAMES: &[(&str, &str)] = &[
    ("self_attn.q_norm.", "self_attn.query_layernorm."),
    ("self_attn.k_norm.", "self_attn.key_layernorm."),
];

/// The base of the rotation, if the config has none.
const BASE: f64 = 1e4;

fn defaults() -> Value {
    json!({
        "vocab_size": 290_943, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": null, "head_dim": null, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_parameters": null,
        "attention_bias": false
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_base(keys)?;
    let keys = &Keys(&config);
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.spec.renamed = NAMES;
    decoder.block.attention.qk_norm = QkNorm::RotatedHeads;
    Ok(decoder.finish(|_, _| {}))
}

/// The config with the base of the rotation that the `alpha` of dynamic scaling gives, whatever the length of a sequence.
fn with_base(keys: &Keys<'_>) -> Result<Map<String, Value>> {
    let mut config = keys.0.clone();
    let Some(scaling) = rope::parameters(keys)? else {
        return Ok(config);
    };
    let Some(alpha) = scaling.number("alpha")?.filter(|&alpha| alpha != 0.0) else {
        return Ok(config);
    };
    let Some(dim) = keys.size("head_dim")?.filter(|&dim| dim > 2 && alpha > 0.0) else {
        bail!(
            CorruptFile,
            "config: rope scaling has alpha {alpha}; expected a positive number, and a head_dim above 2 beside it"
        );
    };
    let base = rope::theta(keys, &scaling, (THETA, BASE))?;
    let base = base * alpha.powf(dim as f64 / (dim as f64 - 2.0));
    let stretched = json!({"rope_type": "default", "rope_theta": base});
    config.insert("rope_scaling".to_owned(), stretched);
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    #[test]
    fn alpha_stretches_the_base() {
        let second = |scaling: Value| {
            let config = json!({
                "model_type": "hunyuan_v1_dense", "head_dim": 128, "rope_theta": 1e4, "rope_scaling": scaling
            });
            Ok::<f32, crate::base::Error>(families::read(&config)?.ropes[0].table.frequencies[1])
        };
        let scaling = json!({"type": "dynamic", "alpha": 1000.0, "factor": 1.0});
        // The base of the GGUF files of the published models.
        let expected = 11_158_839.925_0f64.powf(-2.0 / 128.0);
        let got = f64::from(second(scaling).unwrap());
        assert!((got / expected - 1.0).abs() < 1e-6, "{got} and {expected}");
        let plain = second(json!({"type": "dynamic", "factor": 1.0})).unwrap();
        assert!((f64::from(plain) / 1e4f64.powf(-2.0 / 128.0) - 1.0).abs() < 1e-6);
        let e = second(json!({"type": "dynamic", "alpha": -1.0})).unwrap_err();
        assert!(e.message().contains("has alpha -1"), "{e}");
    }
}
