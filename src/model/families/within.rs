//! Text models within larger models of text, images and sound: finds the part of a config that describes them, and the keys they take from
//! the rest.

use serde_json::{Map, Value};

use crate::base::Result;
use crate::model::keys::Keys;

/// Keys of a text model's config within a larger one. transformers writes the first; published models with their own code have the others.
pub(super) const TEXT: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// A larger model by its `model_type`, with two defaults: the `model_type` of its text model, and whether transformers ties embedding and
/// head.
pub(super) struct Outer {
    pub(super) model_type: &'static str,
    pub(super) text: &'static str,
    pub(super) tied: bool,
}

const fn outer(model_type: &'static str, text: &'static str, tied: bool) -> Outer {
    Outer {
        model_type,
        text,
        tied,
    }
}

/// The larger models of transformers whose text model may belong to a known family.
pub(super) const OUTER: &[Outer] = &[
    outer("audioflamingo3", "qwen2", false),
    outer("deepseek_vl", "llama", true),
    outer("deepseek_vl_hybrid", "llama", true),
    outer("exaone4_5", "exaone4", false),
    outer("fast_vlm", "qwen2", false),
    outer("fun_asr_nano", "qwen3", true),
    outer("gemma3", "gemma3_text", true),
    outer("gemma4", "gemma4_text", true),
    outer("gemma4_assistant", "gemma4_text", true),
    outer("glmasr", "llama", true),
    outer("got_ocr2", "qwen2", true),
    outer("granite_speech", "granite", true),
    outer("granite_speech_plus", "granite", true),
    outer("idefics2", "mistral", false),
    outer("idefics3", "llama", false),
    outer("internvl", "qwen2", true),
    outer("janus", "llama", true),
    outer("jev", "qwen3_5_text", false),
    outer("lighton_ocr", "qwen3", true),
    outer("llava", "llama", false),
    outer("llava_next", "llama", false),
    outer("llava_next_video", "llama", false),
    outer("llava_onevision", "qwen2", false),
    outer("minicpm_ocr", "qwen3_5_text", true),
    outer("minicpmv4_6", "qwen3_5_text", false),
    outer("minicpmv4_7", "qwen3_5_text", false),
    outer("mistral3", "mistral", true),
    outer("moss_transcribe_diarize", "qwen3", true),
    outer("musicflamingo", "qwen2", false),
    outer("nemo_speechlm", "nemotron_h", false),
    outer("nemotron_h_omni", "nemotron_h", false),
    outer("omniasr", "llama", false),
    outer("ovis2", "qwen2", true),
    outer("perception_lm", "llama", false),
    outer("pp_chart2table", "qwen2", true),
    outer("qianfan_ocr", "qwen3", false),
    outer("qwen2_audio", "qwen2", false),
    outer("qwen3_5", "qwen3_5_text", false),
    outer("qwen3_5_moe", "qwen3_5_moe_text", false),
    outer("qwen3_asr", "qwen3", true),
    outer("shieldgemma2", "gemma3_text", false),
    outer("smolvlm", "llama", false),
    outer("vibevoice", "qwen2", false),
    outer("vibevoice_asr", "qwen2", false),
    outer("video_llama_3", "qwen2", false),
    outer("video_llava", "llama", false),
    outer("vipllava", "llama", false),
    outer("voxtral", "llama", false),
];

/// Text models of Qwen's vision models, and the families of which they are where no pictures are read: positions of a text are the same on all
/// axes of their rotary embedding.
pub(super) const ALIKE: [(&str, &str); 3] = [
    ("qwen2_vl", "qwen2"),
    ("qwen2_5_vl", "qwen2"),
    ("qwen3_vl", "qwen3"),
];

/// The family of a text model with this `model_type`.
pub(super) fn family_of(name: &str) -> &str {
    let alike = ALIKE.iter().find(|(own, _)| *own == name);
    alike.map_or(name, |(_, family)| family)
}

fn outer_of(keys: &Keys<'_>) -> Result<Option<&'static Outer>> {
    let name = keys.text("model_type")?;
    Ok(OUTER.iter().find(|outer| Some(outer.model_type) == name))
}

/// The config of the inner text model, completed with its `model_type` and the type of its values, which the outer config determines.
/// `None` for the config of a text model alone.
pub(super) fn text_config(outer: &Keys<'_>) -> Result<Option<Map<String, Value>>> {
    let mut found = None;
    for name in TEXT {
        found = found.or(outer.object(name)?);
    }
    let Some(text) = found else {
        return Ok(None);
    };
    let mut text = text.0.clone();
    if let Some(known) = outer_of(outer)?
        && text.get("model_type").is_none_or(Value::is_null)
    {
        text.insert("model_type".to_owned(), known.text.into());
    }
    if let Some(dtype) = outer.get("dtype").or(outer.get("torch_dtype")) {
        text.insert("dtype".to_owned(), dtype.clone());
    }
    Ok(Some(text))
}

/// Whether a larger model ties embedding and head.
pub(super) fn is_tied(outer: &Keys<'_>) -> Result<bool> {
    match outer.flag("tie_word_embeddings")? {
        Some(tied) => Ok(tied),
        None => Ok(outer_of(outer)?.is_some_and(|outer| outer.tied)),
    }
}
