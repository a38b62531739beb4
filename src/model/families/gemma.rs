//! Gemma 2 and 3: norms before and after each half of a block, stored as offsets from one; GeGLU. Gemma 2 caps scores and logits, and has a
//! window in every other layer. Gemma 3 has, for each layer with full attention, five layers with a window and their own rotation.

use half::bf16;
use serde_json::{Value, json};

use super::decoder::{Decoder, WINDOWED};
use super::family::Family;
use crate::base::Result;
use crate::base::error::bail;
use crate::model::keys::Keys;
use crate::model::rope;
use crate::model::spec::{NormNames, NormPlacement, QkNorm, Spec};

pub(super) const GEMMA2: Family = Family {
    model_type: "gemma2",
    class: "Gemma2ForCausalLM",
    defaults: gemma2_defaults,
    renamed: &[],
    read: gemma2,
};

pub(super) const GEMMA3: Family = Family {
    model_type: "gemma3",
    class: "Gemma3ForCausalLM",
    defaults: gemma3_defaults,
    renamed: &[],
    read: gemma3,
};

fn gemma2_defaults() -> Value {
    json!({
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "rope_parameters": null,
        "attention_bias": false, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": null,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "use_bidirectional_attention": null
    })
}

fn gemma3_defaults() -> Value {
    json!({
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "rope_parameters": null,
        "attention_bias": false, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": null,
        "final_logit_softcapping": null, "attn_logit_softcapping": null, "use_bidirectional_attention": false
    })
}

/// The rotation's base for layers with full attention, and for layers with a window.
const THETA: (f64, f64) = (1e6, 1e4);

fn gemma2(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read(keys)?;
    read(&mut decoder, keys)?;
    let window = keys.window("sliding_window")?;
    let types = decoder.read_layer_types(keys, WINDOWED)?;
    Ok(decoder.finish_windowed(window, |layer| match &types {
        Some(types) => types[layer],
        None => layer.is_multiple_of(2),
    }))
}

fn gemma3(keys: &Keys<'_>) -> Result<Spec> {
    let mut decoder = Decoder::read_with(keys, |head_dim, max_positions| {
        let head_dims = (head_dim, head_dim);
        let (full, windowed) = rope::read_by_layer_type(keys, head_dims, max_positions, THETA)?;
        Ok(vec![full, windowed])
    })?;
    read(&mut decoder, keys)?;
    decoder.block.attention.qk_norm = QkNorm::Heads;
    let pattern = keys.size("sliding_window_pattern")?;
    let pattern = pattern
        .or(keys.size("_sliding_window_pattern")?)
        .unwrap_or(6);
    let types = decoder.read_layer_types(keys, WINDOWED)?;
    let window = keys.window("sliding_window")?;
    Ok(decoder.finish_windowed(window, |layer| match &types {
        Some(types) => types[layer],
        None => !(layer + 1).is_multiple_of(pattern),
    }))
}

/// Reads what both have.
fn read(decoder: &mut Decoder, keys: &Keys<'_>) -> Result<()> {
    if keys.flag("use_bidirectional_attention")? == Some(true) {
        bail!(
            Unsupported,
            "config: 'use_bidirectional_attention' is true: the model embeds whole texts; only models that predict the next token can be run"
        );
    }
    decoder.refuse_experts(keys)?;
    decoder.read_attention_bias(keys)?;
    decoder.spec.norm_plus_one = true;
    decoder.spec.norm_names = NormNames::PRE_AND_POST;
    decoder.spec.embedding_scale = embedding_scale(keys, decoder.spec.hidden_size)?;
    decoder.block.norms = NormPlacement {
        pre: true,
        post: true,
    };
    decoder.block.attention.scale = match keys.number("query_pre_attn_scalar")? {
        Some(n) if n > 0.0 && n.is_finite() => n.powf(-0.5) as f32,
        n => bail!(
            CorruptFile,
            "config: 'query_pre_attn_scalar' is {}; expected a positive number",
            n.unwrap_or_default()
        ),
    };
    Ok(())
}

/// The square root of an embedding's width, in the type in which the model was trained.
pub(super) fn embedding_scale(keys: &Keys<'_>, width: usize) -> Result<f32> {
    let scale = (width as f64).sqrt() as f32;
    let dtype = keys.text("dtype")?.or(keys.text("torch_dtype")?);
    Ok(match dtype {
        Some("bfloat16") => bf16::from_f32(scale).to_f32(),
        _ => scale,
    })
}
