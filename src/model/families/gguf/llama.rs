//! Llama, Mistral, Mixtral, Ministral 3, SmolLM3, Seed-OSS, ERNIE 4.5 and HunYuan in GGUF.

use serde_json::{Map, Value, json};

use super::common::{
    ATTENTION, BLOCK_NORMS, EXPERTS_PER_TOKEN, MLP, NORMS, PLAIN, SLIDING_WINDOW, window,
};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufForm, GgufKind, GgufMetadata};

/// The rows of queries and keys as the converter orders them.
pub(super) const INTERLEAVED: &[(&str, GgufForm)] = &[
    ("attn_q", GgufForm::Interleaved("attention.head_count")),
    ("attn_k", GgufForm::Interleaved("attention.head_count_kv")),
];

pub(super) const LLAMA: GgufFamily = GgufFamily {
    architecture: "llama",
    model_type: "llama",
    class: "LlamaForCausalLM",
    per_layer: &[
        NORMS,
        ATTENTION,
        MLP,
        &[
            ("ffn_gate_inp", "block_sparse_moe.gate"),
            ("ffn_gate_exps", "block_sparse_moe.experts.gate_proj"),
            ("ffn_up_exps", "block_sparse_moe.experts.up_proj"),
            ("ffn_down_exps", "block_sparse_moe.experts.down_proj"),
        ],
    ],
    forms: INTERLEAVED,
    keys: &[
        SLIDING_WINDOW,
        ("num_local_experts", "expert_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
    ],
    config: mistral,
    ..PLAIN
};

pub(super) const MISTRAL3: GgufFamily = GgufFamily {
    architecture: "mistral3",
    model_type: "ministral3",
    class: "Ministral3ForCausalLM",
    config: ministral3,
    ..LLAMA
};

pub(super) const SMOLLM3: GgufFamily = GgufFamily {
    architecture: "smollm3",
    model_type: "smollm3",
    class: "SmolLM3ForCausalLM",
    forms: INTERLEAVED,
    keys: &[],
    ..PLAIN
};

pub(super) const SEED_OSS: GgufFamily = GgufFamily {
    architecture: "seed_oss",
    model_type: "seed_oss",
    class: "SeedOssForCausalLM",
    per_layer: &[BLOCK_NORMS, ATTENTION, MLP],
    keys: &[],
    ..PLAIN
};

pub(super) const ERNIE4_5: GgufFamily = GgufFamily {
    architecture: "ernie4_5",
    model_type: "ernie4_5",
    class: "Ernie4_5ForCausalLM",
    keys: &[],
    config: ernie4_5,
    ..PLAIN
};

pub(super) const HUNYUAN_DENSE: GgufFamily = GgufFamily {
    architecture: "hunyuan-dense",
    model_type: "hunyuan_v1_dense",
    class: "HunYuanDenseV1ForCausalLM",
    per_layer: &[
        NORMS,
        &[
            ("attn_q_norm", "self_attn.query_layernorm"),
            ("attn_k_norm", "self_attn.key_layernorm"),
        ],
        ATTENTION,
        MLP,
    ],
    keys: &[],
    ..PLAIN
};

fn ernie4_5(_: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let bias = config.get("attention_bias").cloned();
    config.insert("use_bias".into(), bias.unwrap_or_default());
    Ok(())
}

/// Strengths of YaRN and the rate of queries are parameters of the rotation. A file without scaling has none.
fn ministral3(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let scaling = config
        .entry("rope_scaling")
        .or_insert(json!({"rope_type": "default"}));
    let strength = metadata.float("rope.scaling.yarn_log_multiplier")?;
    for (key, value) in [
        ("mscale", strength),
        ("mscale_all_dim", strength),
        (
            "llama_4_scaling_beta",
            metadata.float("attention.temperature_scale")?,
        ),
    ] {
        if let Some(value) = value {
            scaling[key] = json!(value);
        }
    }
    config.entry("sliding_window").or_insert(Value::Null);
    Ok(())
}

/// Files of Mistral and Mixtral have the architecture llama; a window and experts identify them.
fn mistral(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let experts = metadata.integer("expert_count")?.unwrap_or(0);
    let (model_type, class) = match (experts > 1, window(metadata)?) {
        (true, _) => ("mixtral", "MixtralForCausalLM"),
        (false, Some(_)) => ("mistral", "MistralForCausalLM"),
        (false, None) => return Ok(()),
    };
    config.insert("model_type".into(), json!(model_type));
    config.insert("architectures".into(), json!([class]));
    Ok(())
}
