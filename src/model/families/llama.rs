//! Llama: the baseline block, from which the other families differ. SmolLM3 has layers without rotation, Seed-OSS biases of its own, and
//! ERNIE 4.5 interleaved RoPE.

use serde_json::{Value, json};

use super::decoder::{Decoder, THETA, WINDOWED, with_numbers};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::spec::Spec;

pub(super) const LLAMA: Family = Family {
    model_type: "llama",
    class: "LlamaForCausalLM",
    defaults,
    renamed: &[],
    read,
};

pub(super) const SMOLLM3: Family = Family {
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    defaults: smollm3_defaults,
    renamed: &[],
    read: smollm3,
};

pub(super) const SEED_OSS: Family = Family {
    model_type: "seed_oss",
    class: "SeedOssForCausalLM",
    defaults: seed_oss_defaults,
    renamed: &[],
    read: seed_oss,
};

pub(super) const ERNIE4_5: Family = Family {
    model_type: "ernie4_5",
    class: "Ernie4_5ForCausalLM",
    defaults: ernie4_5_defaults,
    renamed: &[],
    read: ernie4_5,
};

/// The bases of the rotation of SmolLM3 and of ERNIE 4.5, if the config has none.
const SMOLLM3_BASE: f64 = 2e6;
const ERNIE_BASE: f64 = 5e5;
/// One layer of so many does not rotate, if the config does not say.
const INTERVAL: usize = 4;

fn defaults() -> Value {
    json!({
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": null, "head_dim": null, "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_parameters": null,
        "attention_bias": false, "mlp_bias": false
    })
}

fn smollm3_defaults() -> Value {
    json!({
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6, "rope_parameters": null, "use_sliding_window": false, "sliding_window": null,
        "no_rope_layers": null, "no_rope_layer_interval": 4, "layer_types": null, "attention_bias": false, "mlp_bias": false,
        "tie_word_embeddings": true
    })
}

fn seed_oss_defaults() -> Value {
    json!({
        "vocab_size": 155_136, "hidden_size": 4096, "intermediate_size": 27_648, "num_hidden_layers": 64,
        "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 524_288, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_parameters": null,
        "attention_bias": true, "attention_out_bias": false, "mlp_bias": false
    })
}

fn ernie4_5_defaults() -> Value {
    json!({
        "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "rope_parameters": null,
        "use_bias": false
    })
}

fn read(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    Ok(decoder.finish(|_, _| {}))
}

fn smollm3(keys: &Keys<'_>) -> Result<Spec> {
    let config = with_numbers(keys, &[(THETA, SMOLLM3_BASE)])?;
    let keys = &Keys(&config);
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    let rotates = rotating_layers(keys, decoder.layers)?;
    let types = decoder.read_layer_types(keys, WINDOWED)?;
    let is_used = keys.flag("use_sliding_window")? == Some(true);
    let window = keys.window("sliding_window")?.filter(|_| is_used);
    let window = decoder.effective_window(window);
    Ok(decoder.finish(|layer, block| {
        let rotates = rotates[layer];
        let is_windowed = types.as_ref().map_or(!rotates, |types| types[layer]);
        block.attention.rope = block.attention.rope.filter(|_| rotates);
        block.attention.window = window.filter(|_| is_windowed);
    }))
}

/// The layers whose queries and keys rotate: those with a 1 in `no_rope_layers`, whatever its name.
fn rotating_layers(keys: &Keys<'_>, layers: usize) -> Result<Vec<bool>> {
    let Some(list) = keys.counts("no_rope_layers")? else {
        let interval = keys.size("no_rope_layer_interval")?.unwrap_or(INTERVAL);
        let rotates = (1..=layers).map(|layer| !layer.is_multiple_of(interval));
        return Ok(rotates.collect());
    };
    if list.len() != layers {
        bail!(
            CorruptFile,
            "config: 'no_rope_layers' names {} layers; num_hidden_layers is {layers}",
            list.len()
        );
    }
    Ok(list.iter().map(|&rotates| rotates != 0).collect())
}

fn seed_oss(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.block.attention.qkv_bias = keys.flag("attention_bias")? == Some(true);
    decoder.block.attention.o_bias = keys.flag("attention_out_bias")? == Some(true);
    Ok(decoder.finish(|_, _| {}))
}

fn ernie4_5(keys: &Keys<'_>) -> Result<Spec> {
    let mut config = with_numbers(keys, &[(THETA, ERNIE_BASE)])?;
    // One key for the biases of attention and of the MLP.
    for bias in ["attention_bias", "mlp_bias"] {
        config.insert(
            bias.to_owned(),
            (keys.flag("use_bias")? == Some(true)).into(),
        );
    }
    let keys = &Keys(&config);
    let mut decoder = Decoder::read(keys)?;
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.block.attention.interleaved = true;
    Ok(decoder.finish(|_, _| {}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::families;

    #[test]
    fn some_layers_do_not_rotate() {
        let rotates = |changes: Value| -> Result<Vec<bool>> {
            let mut config = json!({"model_type": "smollm3", "num_hidden_layers": 5});
            for (key, value) in changes.as_object().unwrap() {
                config[key] = value.clone();
            }
            let spec = families::read(&config)?;
            let attentions = spec.blocks.iter().filter_map(|block| block.attention());
            Ok(attentions
                .map(|attention| attention.rope.is_some())
                .collect())
        };
        let every_fourth = [true, true, true, false, true];
        assert_eq!(rotates(json!({})).unwrap(), every_fourth);
        let every_other = rotates(json!({"no_rope_layer_interval": 2}));
        assert_eq!(every_other.unwrap(), [true, false, true, false, true]);
        let listed = rotates(json!({"no_rope_layers": [0, 0, 1, 1, 0]}));
        assert_eq!(listed.unwrap(), [false, false, true, true, false]);
        let e = rotates(json!({"no_rope_layers": [1]})).unwrap_err();
        let expected = "'no_rope_layers' names 1 layers; num_hidden_layers is 5";
        assert!(e.message().contains(expected), "{e}");
    }
}
