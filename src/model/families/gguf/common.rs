//! Names and keys that architectures share.

use serde_json::{Map, Value, json};

use crate::base::Result;
use crate::base::error::{bail, err};
use crate::checkpoint::{GgufFamily, GgufKind, GgufMetadata};

pub(super) const GLOBALS: &[(&str, &str)] = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Tensor names, as in [`GgufFamily::per_layer`].
pub(super) type Names = &'static [(&'static str, &'static str)];

pub(super) const NORMS: Names = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
];

pub(super) const ATTENTION: Names = &[
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
];

pub(super) const MLP: Names = &[
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

pub(super) const EXPERTS: Names = &[
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
];

pub(super) const SHARED_EXPERT: Names = &[
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

pub(super) const SILU: (&str, &str) = ("hidden_act", "silu");

pub(super) const SLIDING_WINDOW: (&str, &str, GgufKind) = (
    "sliding_window",
    "attention.sliding_window",
    GgufKind::Integer,
);

pub(super) const EXPERTS_PER_TOKEN: (&str, &str, GgufKind) = (
    "num_experts_per_tok",
    "expert_used_count",
    GgufKind::Integer,
);

/// Names and keys common to most families.
pub(super) const PLAIN: GgufFamily = GgufFamily {
    architecture: "",
    model_type: "",
    class: "",
    activation: SILU,
    globals: GLOBALS,
    per_layer: &[NORMS, ATTENTION, MLP],
    drafter: &[],
    forms: &[],
    value_heads: &[],
    keys: &[SLIDING_WINDOW],
    config: |_, _| Ok(()),
};

/// The size at `key`, which a config requires.
pub(super) fn required(metadata: &GgufMetadata<'_>, key: &str) -> Result<u64> {
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
pub(super) fn window(metadata: &GgufMetadata<'_>) -> Result<Option<u64>> {
    Ok(metadata
        .integer("attention.sliding_window")?
        .filter(|&window| window > 0))
}

/// The width of an expert, and the counts of experts, which are null if the file lacks them.
pub(super) fn experts(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
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
