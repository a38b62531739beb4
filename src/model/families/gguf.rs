//! The families in GGUF: architectures, tensor names, metadata keys and storage of values, as written by llama.cpp's converter.

use serde_json::{Map, Value, json};

use crate::base::Result;
use crate::base::error::{bail, err};
use crate::checkpoint::{GgufFamily, GgufKind, GgufMetadata};

/// Larger than the number of blocks of any model, and small enough to list them.
const MOST_LAYERS: u64 = 4096;

const GLOBALS: &[(&str, &str)] = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

const DENSE: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

const SILU: (&str, &str) = ("hidden_act", "silu");

const SLIDING_WINDOW: (&str, &str, GgufKind) = (
    "sliding_window",
    "attention.sliding_window",
    GgufKind::Integer,
);

const EXPERTS_PER_TOKEN: (&str, &str, GgufKind) = (
    "num_experts_per_tok",
    "expert_used_count",
    GgufKind::Integer,
);

/// Names and keys common to most families.
const PLAIN: GgufFamily = GgufFamily {
    architecture: "",
    model_type: "",
    class: "",
    activation: SILU,
    globals: GLOBALS,
    per_layer: DENSE,
    interleaved: &[],
    one_plus: &[],
    one_row: &[],
    keys: &[SLIDING_WINDOW],
    config: |_, _| Ok(()),
};

pub(super) const FAMILIES: &[GgufFamily] = &[
    GgufFamily {
        architecture: "llama",
        model_type: "llama",
        class: "LlamaForCausalLM",
        interleaved: &[
            ("attn_q", "attention.head_count"),
            ("attn_k", "attention.head_count_kv"),
        ],
        keys: &[
            SLIDING_WINDOW,
            ("num_local_experts", "expert_count", GgufKind::Integer),
            EXPERTS_PER_TOKEN,
        ],
        config: mistral,
        ..PLAIN
    },
    GgufFamily {
        architecture: "qwen2",
        model_type: "qwen2",
        class: "Qwen2ForCausalLM",
        ..PLAIN
    },
    GgufFamily {
        architecture: "qwen3",
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        ..PLAIN
    },
    GgufFamily {
        architecture: "qwen3moe",
        model_type: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        per_layer: &[
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("attn_q_norm", "self_attn.q_norm"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate_inp", "mlp.gate"),
            ("ffn_gate_exps", "mlp.experts.gate_proj"),
            ("ffn_up_exps", "mlp.experts.up_proj"),
            ("ffn_down_exps", "mlp.experts.down_proj"),
        ],
        keys: &[
            SLIDING_WINDOW,
            ("num_experts", "expert_count", GgufKind::Integer),
            EXPERTS_PER_TOKEN,
        ],
        config: qwen3_moe,
        ..PLAIN
    },
    GgufFamily {
        architecture: "qwen2moe",
        model_type: "qwen2_moe",
        class: "Qwen2MoeForCausalLM",
        per_layer: &[
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate_inp", "mlp.gate"),
            ("ffn_gate_exps", "mlp.experts.gate_proj"),
            ("ffn_up_exps", "mlp.experts.up_proj"),
            ("ffn_down_exps", "mlp.experts.down_proj"),
            ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ],
        one_row: &["ffn_gate_inp_shexp"],
        keys: &[
            ("num_experts", "expert_count", GgufKind::Integer),
            EXPERTS_PER_TOKEN,
        ],
        config: qwen2_moe,
        ..PLAIN
    },
    GgufFamily {
        architecture: "gemma3",
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        per_layer: &[
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("attn_q_norm", "self_attn.q_norm"),
            ("attn_k_norm", "self_attn.k_norm"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
        one_plus: &[
            "output_norm",
            "attn_norm",
            "attn_q_norm",
            "attn_k_norm",
            "post_attention_norm",
            "ffn_norm",
            "post_ffw_norm",
        ],
        keys: &[(
            "final_logit_softcapping",
            "final_logit_softcapping",
            GgufKind::Float,
        )],
        config: gemma3,
        ..PLAIN
    },
    GgufFamily {
        architecture: "phi3",
        model_type: "phi3",
        class: "Phi3ForCausalLM",
        per_layer: &[
            ("attn_norm", "input_layernorm"),
            ("attn_qkv", "self_attn.qkv_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_up", "mlp.gate_up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ],
        keys: &[],
        config: phi3,
        ..PLAIN
    },
];

/// The size at `key`, which a config requires.
fn required(metadata: &GgufMetadata<'_>, key: &str) -> Result<u64> {
    match metadata.integer(key)? {
        Some(n) if n > 0 => Ok(n),
        Some(n) => bail!(
            CorruptFile,
            "'{}' is {n}; expected at least 1",
            metadata.key(key)
        ),
        None => Err(err!(CorruptFile, "it has no {}", metadata.key(key))),
    }
}

/// Positions of attention windows; some converters write 0 for none.
fn window(metadata: &GgufMetadata<'_>) -> Result<Option<u64>> {
    Ok(metadata
        .integer("attention.sliding_window")?
        .filter(|&window| window > 0))
}

/// Mistral files have the architecture llama; a window identifies them.
fn mistral(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    if window(metadata)?.is_some() {
        config.insert("model_type".into(), json!("mistral"));
        config.insert("architectures".into(), json!(["MistralForCausalLM"]));
    }
    Ok(())
}

fn qwen2_moe(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    experts(metadata, config)?;
    // Without the key, the shared expert is as wide as a dense MLP.
    let width = match metadata.integer("expert_shared_feed_forward_length")? {
        Some(width) => width,
        None => required(metadata, "feed_forward_length")?,
    };
    config.insert("shared_expert_intermediate_size".into(), json!(width));
    config.insert("norm_topk_prob".into(), json!(false));
    Ok(())
}

fn qwen3_moe(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    experts(metadata, config)?;
    config.insert("norm_topk_prob".into(), json!(true));
    Ok(())
}

/// The width of an expert, and the counts of experts, which are null if the file lacks them.
fn experts(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    for key in ["num_experts", "num_experts_per_tok"] {
        config.entry(key).or_insert(Value::Null);
    }
    // Without the key, the experts of a token are together as wide as a dense MLP.
    let width = match metadata.integer("expert_feed_forward_length")? {
        Some(width) => width,
        None => {
            required(metadata, "feed_forward_length")? / required(metadata, "expert_used_count")?
        }
    };
    config.insert("moe_intermediate_size".into(), json!(width));
    Ok(())
}

fn gemma3(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let layers = required(metadata, "block_count")?;
    if layers > MOST_LAYERS {
        bail!(
            CorruptFile,
            "'{}' is {layers}; expected at most {MOST_LAYERS}",
            metadata.key("block_count")
        );
    }
    const PATTERN: &str = "attention.sliding_window_pattern";
    let window = window(metadata)?;
    // For llama.cpp a cap of 0 means no cap.
    if config
        .get("final_logit_softcapping")
        .and_then(Value::as_f64)
        == Some(0.0)
    {
        config.remove("final_logit_softcapping");
    }
    let sliding: Vec<bool> = match (window, metadata.integers(PATTERN)) {
        // The converter omits the window if no layer has one.
        (None, _) => vec![false; layers as usize],
        (Some(_), Some(pattern)) if pattern.len() as u64 == layers => {
            pattern.iter().map(|&layer| layer != 0).collect()
        }
        (Some(_), Some(pattern)) => bail!(
            CorruptFile,
            "'{}' has {} elements for {layers} layers",
            metadata.key(PATTERN),
            pattern.len()
        ),
        (Some(_), None) => {
            // The last layer of each period has full attention.
            let period = match metadata.integer(PATTERN)? {
                None => 6,
                Some(_) => required(metadata, PATTERN)?,
            };
            (1..=layers).map(|n| n % period != 0).collect()
        }
    };
    let layer_types: Vec<&str> = sliding
        .iter()
        .map(|&sliding| match sliding {
            true => "sliding_attention",
            false => "full_attention",
        })
        .collect();
    config.insert("layer_types".into(), json!(layer_types));
    if let Some(window) = window {
        config.insert("sliding_window".into(), json!(window));
        // Scaling applies only to the layers with full attention, which use `rope_theta`.
        let theta = metadata.float("rope.freq_base_swa")?.unwrap_or(10000.0);
        config.insert("rope_local_base_freq".into(), json!(theta));
    }
    // All sizes except the one with 62 layers scale scores by the width of a head.
    let scalar = match metadata.integer("attention.key_length")? {
        Some(head_dim) if layers != 62 => head_dim,
        _ => required(metadata, "embedding_length")? / required(metadata, "attention.head_count")?,
    };
    config.insert("query_pre_attn_scalar".into(), json!(scalar));
    Ok(())
}

fn phi3(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    if let Some(window) = window(metadata)? {
        config.insert("sliding_window".into(), json!(window));
    }
    let original = metadata.integer("rope.scaling.original_context_length")?;
    config.insert("original_max_position_embeddings".into(), json!(original));
    const NAMES: [&str; 2] = ["rope_factors_short.weight", "rope_factors_long.weight"];
    let (short, long) = match NAMES.map(|name| metadata.vector(name)) {
        [Ok(None), Ok(None)] => return Ok(()),
        [Ok(Some(short)), Ok(Some(long))] => (short, long),
        [Err(e), _] | [_, Err(e)] => return Err(e),
        [short, _] => {
            let (there, missing) = match short {
                Ok(Some(_)) => (NAMES[0], NAMES[1]),
                _ => (NAMES[1], NAMES[0]),
            };
            bail!(CorruptFile, "'{there}': there is no '{missing}' beside it");
        }
    };
    let mut scaling = Map::new();
    scaling.insert("rope_type".into(), json!("longrope"));
    scaling.insert("short_factor".into(), json!(short));
    scaling.insert("long_factor".into(), json!(long));
    if let Some(factor) = metadata.float("rope.scaling.attn_factor")? {
        scaling.insert("attention_factor".into(), json!(factor));
    }
    if let Some(original) = original {
        scaling.insert("original_max_position_embeddings".into(), json!(original));
    }
    config.insert("rope_scaling".into(), Value::Object(scaling));
    Ok(())
}
