//! Tensor names of a text model that is published within a multimodal model: maps them to the text model's own names, and recognizes
//! tensors of other parts. Knows nothing of contents.

/// Prefixes within larger models and of published Nemotron-H models, and the prefix in a text model of transformers that replaces each. The
/// first match applies.
const WITHIN: [(&str, &str); 14] = [
    ("language_model.backbone.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.", "model."),
    ("model.language_model.model.", "model."),
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("text_model.model.", "model."),
    ("text_model.lm_head.", "lm_head."),
    ("text_model.", "model."),
    ("llm.model.", "model."),
    ("llm.lm_head.", "lm_head."),
    ("backbone.", "model."),
];

/// Parts of larger models that read images or audio, or connect them to the text model, and the layers that draft tokens.
const BESIDE: [&str; 21] = [
    "vision_tower.",
    "vision_model.",
    "vision_embed_tokens.",
    "visual.",
    "embed_vision.",
    "multi_modal_projector.",
    "mm_projector.",
    "audio_tower.",
    "audio_model.",
    "embed_audio.",
    "patch_merger.",
    // Idefics3 and SmolVLM; video models; InternVL; Janus and DeepSeek-VL; MiniCPM.
    "connector.",
    "image_tower.",
    "video_tower.",
    "mlp1.",
    "aligner.",
    "vpm.",
    "apm.",
    "resampler.",
    "vision_encoder.",
    // Multi-token prediction.
    "mtp.",
];

/// The name of the tensor `key` in a text model.
pub fn logical(key: &str) -> String {
    for (within, alone) in WITHIN {
        if let Some(rest) = key.strip_prefix(within) {
            return format!("{alone}{rest}");
        }
    }
    key.to_owned()
}

/// Whether the entry `name` belongs to the text model rather than to the parts beside it, which read images and audio, or draft.
pub fn is_of_text_model(name: &str) -> bool {
    let name = name.strip_prefix("model.").unwrap_or(name);
    !BESIDE.iter().any(|part| name.starts_with(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_names_become_those_of_a_text_model() {
        for (published, name) in [
            (
                "language_model.model.layers.3.mlp.up_proj.weight",
                "model.layers.3.mlp.up_proj.weight",
            ),
            (
                "model.language_model.layers.0.self_attn.q_norm.weight",
                "model.layers.0.self_attn.q_norm.weight",
            ),
            (
                "model.language_model.embed_tokens.weight",
                "model.embed_tokens.weight",
            ),
            ("language_model.model.norm.weight", "model.norm.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("lm_head.weight", "lm_head.weight"),
            (
                "model.text_model.layers.2.mlp.up_proj.weight",
                "model.layers.2.mlp.up_proj.weight",
            ),
            ("text_model.model.norm.weight", "model.norm.weight"),
            ("text_model.lm_head.weight", "lm_head.weight"),
            (
                "text_model.embed_tokens.weight",
                "model.embed_tokens.weight",
            ),
            (
                "language_model.layers.0.mlp.up_proj.weight",
                "model.layers.0.mlp.up_proj.weight",
            ),
            ("model.language_model.lm_head.weight", "lm_head.weight"),
            ("norm.weight", "norm.weight"),
            (
                "backbone.layers.3.mixer.in_proj.weight",
                "model.layers.3.mixer.in_proj.weight",
            ),
            (
                "language_model.backbone.norm_f.weight",
                "model.norm_f.weight",
            ),
            ("llm.model.norm.weight", "model.norm.weight"),
            (
                "model.layers.0.input_layernorm.weight",
                "model.layers.0.input_layernorm.weight",
            ),
            (
                "model.vision_tower.encoder.layers.0.mlp.fc1.weight",
                "model.vision_tower.encoder.layers.0.mlp.fc1.weight",
            ),
        ] {
            assert_eq!(logical(published), name);
        }
    }

    #[test]
    fn parts_for_pictures_and_sound_are_not_of_the_text_model() {
        for name in [
            "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight",
            "model.vision_tower.patch_embed.weight",
            "multi_modal_projector.mm_input_projection_weight",
            "model.multi_modal_projector.linear_1.weight",
            "visual.blocks.0.mlp.gate_proj.weight",
            "model.visual.merger.mlp.0.weight",
            "audio_tower.layers.0.fc1.weight",
            "model.embed_vision.embedding.weight",
            "model.connector.modality_projection.proj.weight",
            "mlp1.0.weight",
            "mtp.layers.0.mlp.up_proj.weight",
        ] {
            assert!(!is_of_text_model(name), "{name}");
        }
        for name in [
            "model.layers.0.mlp.up_proj.weight",
            "lm_head.weight",
            "model.embed_tokens.weight",
        ] {
            assert!(is_of_text_model(name), "{name}");
        }
    }
}
