//! gpt-oss in GGUF.

use serde_json::{Map, Value, json};

use super::common::{ATTENTION, EXPERTS_PER_TOKEN, PLAIN, SLIDING_WINDOW, required};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufKind, GgufMetadata};

pub(super) const GPT_OSS: GgufFamily = GgufFamily {
    architecture: "gpt-oss",
    model_type: "gpt_oss",
    class: "GptOssForCausalLM",
    per_layer: &[
        ATTENTION,
        &[
            ("attn_norm", "input_layernorm"),
            ("attn_sinks.weight", "self_attn.sinks"),
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_gate_inp", "mlp.router"),
            ("ffn_gate_exps", "mlp.experts.gate_proj"),
            ("ffn_up_exps", "mlp.experts.up_proj"),
            ("ffn_down_exps", "mlp.experts.down_proj"),
        ],
    ],
    keys: &[
        SLIDING_WINDOW,
        ("num_local_experts", "expert_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
    ],
    config,
    ..PLAIN
};

/// Files leave out what all sizes have alike.
fn config(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let width = required(metadata, "expert_feed_forward_length")?;
    config.insert("intermediate_size".into(), json!(width));
    config.insert("attention_bias".into(), json!(true));
    if let Some(Value::Object(scaling)) = config.get_mut("rope_scaling") {
        scaling.insert("truncate".into(), json!(false));
        for (key, value) in [("beta_fast", 32.0), ("beta_slow", 1.0)] {
            scaling.entry(key).or_insert(json!(value));
        }
    }
    Ok(())
}
