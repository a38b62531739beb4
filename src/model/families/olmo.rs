//! Blocks with norms after each half, and none before: OLMo 2, which also normalizes all heads of queries and of keys together; OLMo 3, with
//! windows in most layers; and EXAONE 4, whose layers without a window do not rotate beside those with one.

use serde_json::{Value, json};

use super::decoder::{Decoder, WINDOWED};
use super::family::Family;
use crate::base::Result;
use crate::model::keys::Keys;
use crate::model::rope;
use crate::model::spec::{NormNames, NormPlacement, QkNorm, Spec};

pub(super) const OLMO2: Family = Family {
    model_type: "olmo2",
    class: "Olmo2ForCausalLM",
    defaults: olmo2_defaults,
    renamed: &[],
    read: olmo2,
};

pub(super) const OLMO3: Family = Family {
    model_type: "olmo3",
    class: "Olmo3ForCausalLM",
    defaults: olmo3_defaults,
    renamed: &[],
    read: olmo3,
};

pub(super) const EXAONE4: Family = Family {
    model_type: "exaone4",
    class: "Exaone4ForCausalLM",
    defaults: exaone4_defaults,
    renamed: &[],
    read: exaone4,
};

/// The base of OLMo 3's rotations, if the config has none.
const BASE: f64 = 5e5;
/// One layer of so many has full attention, if the config does not say.
const INTERVAL: usize = 4;

fn olmo2_defaults() -> Value {
    json!({
        "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": null, "hidden_act": "silu", "max_position_embeddings": 2048,
        "tie_word_embeddings": false, "rope_parameters": null, "attention_bias": false, "rms_norm_eps": 1e-5
    })
}

fn olmo3_defaults() -> Value {
    let mut all = olmo2_defaults();
    all["sliding_window"] = json!(4096);
    all["layer_types"] = Value::Null;
    all
}

fn exaone4_defaults() -> Value {
    json!({
        "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "rope_parameters": null, "sliding_window": 4096,
        "sliding_window_pattern": 4, "layer_types": null
    })
}

fn olmo2(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    read(&mut decoder, keys, QkNorm::Projections)?;
    decoder.read_attention_bias(keys)?;
    Ok(decoder.finish(|_, _| {}))
}

fn olmo3(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read_with(keys, |head_dim, max_positions| {
        let (head_dims, bases) = ((head_dim, head_dim), (BASE, BASE));
        let (full, windowed) = rope::read_by_layer_type(keys, head_dims, max_positions, bases)?;
        Ok(vec![full, windowed])
    })?;
    read(&mut decoder, keys, QkNorm::Projections)?;
    decoder.read_attention_bias(keys)?;
    let window = keys.window("sliding_window")?;
    let windowed = windowed_layers(&decoder, keys, || Ok(INTERVAL))?;
    Ok(decoder.finish_windowed(window, |layer| windowed[layer]))
}

fn exaone4(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    read(&mut decoder, keys, QkNorm::Heads)?;
    let Some(window) = keys.window("sliding_window")? else {
        return Ok(decoder.finish(|_, _| {}));
    };
    let windowed = windowed_layers(&decoder, keys, || interval(keys))?;
    let window = decoder.effective_window(Some(window));
    Ok(decoder.finish(|layer, block| {
        block.attention.window = window.filter(|_| windowed[layer]);
        block.attention.rope = block.attention.rope.filter(|_| windowed[layer]);
    }))
}

/// Reads what all have.
fn read(decoder: &mut Decoder, keys: &Keys<'_>, qk_norm: QkNorm) -> Result<()> {
    decoder.refuse_experts(keys)?;
    decoder.spec.norm_names = NormNames::PRE_AND_POST;
    decoder.block.norms = NormPlacement {
        pre: false,
        post: true,
    };
    decoder.block.attention.qk_norm = qk_norm;
    Ok(())
}

/// One layer of so many has full attention, as the pattern of EXAONE 4 says, a number or in early configs a text.
fn interval(keys: &Keys<'_>) -> Result<usize> {
    const PATTERN: &str = "sliding_window_pattern";
    match keys.get(PATTERN) {
        Some(Value::String(text)) if text == "LLLG" => Ok(INTERVAL),
        _ => Ok(keys.size(PATTERN)?.unwrap_or(INTERVAL)),
    }
}

/// The layers with a window: all but every one of `interval`, unless the config names them.
fn windowed_layers(
    decoder: &Decoder,
    keys: &Keys<'_>,
    interval: impl FnOnce() -> Result<usize>,
) -> Result<Vec<bool>> {
    if let Some(types) = decoder.read_layer_types(keys, WINDOWED)? {
        return Ok(types);
    }
    let interval = interval()?;
    let windowed = (1..=decoder.layers).map(|layer| !layer.is_multiple_of(interval));
    Ok(windowed.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    #[test]
    fn a_pattern_says_which_layers_have_the_window() {
        let full = |changes: Value| -> Result<Vec<usize>> {
            let mut config =
                json!({"model_type": "exaone4", "num_hidden_layers": 8, "sliding_window": 64});
            for (key, value) in changes.as_object().unwrap() {
                config[key] = value.clone();
            }
            let spec = families::read(&config)?;
            let is_full = |layer: &usize| spec.blocks[*layer].attention().unwrap().window.is_none();
            Ok((0..8).filter(is_full).collect())
        };
        for pattern in [json!(4), json!("LLLG"), Value::Null] {
            let layers = full(json!({"sliding_window_pattern": pattern}));
            assert_eq!(layers.unwrap(), [3, 7], "{pattern}");
        }
        let third = full(json!({"sliding_window_pattern": 3})).unwrap();
        assert_eq!(third, [2, 5]);
        let e = full(json!({"sliding_window_pattern": "LG"})).unwrap_err();
        assert!(
            e.message().contains("'sliding_window_pattern' is \"LG\""),
            "{e}"
        );
        // A list of layers goes before any pattern.
        let types = ["full_attention"; 8];
        let listed = full(json!({"sliding_window_pattern": "LG", "layer_types": types})).unwrap();
        assert_eq!(listed.len(), 8);
    }
}
