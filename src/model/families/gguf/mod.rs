//! The families in GGUF: architectures, tensor names, metadata keys and storage of values, as written by llama.cpp's converter.

mod common;
mod gemma;
mod gemma4;
mod glm;
mod gpt_oss;
mod granite;
mod llama;
mod minimax;
mod nemotron;
mod olmo;
mod phi3;
mod qwen;
mod qwen35;

use crate::checkpoint::GgufFamily;

/// All architectures that are translated.
pub(super) const FAMILIES: &[GgufFamily] = &[
    llama::LLAMA,
    llama::MISTRAL3,
    qwen::QWEN2,
    qwen::QWEN3,
    qwen::QWEN3_MOE,
    qwen::QWEN2_MOE,
    qwen::QWEN2_VL,
    qwen::QWEN3_VL,
    qwen::QWEN3_VL_MOE,
    gemma::GEMMA2,
    gemma::GEMMA3,
    phi3::PHI3,
    gpt_oss::GPT_OSS,
    qwen35::QWEN35,
    qwen35::QWEN35_MOE,
    qwen35::QWEN3_NEXT,
    nemotron::NEMOTRON_H,
    nemotron::NEMOTRON_H_MOE,
    gemma4::GEMMA4,
    glm::GLM4,
    glm::GLM4_MOE,
    minimax::MINIMAX_M2,
    llama::SMOLLM3,
    llama::SEED_OSS,
    llama::ERNIE4_5,
    olmo::OLMO2,
    olmo::EXAONE4,
    llama::HUNYUAN_DENSE,
    granite::GRANITE,
];
