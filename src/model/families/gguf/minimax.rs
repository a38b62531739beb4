//! MiniMax-M2 in GGUF.

use serde_json::{Map, Value};

use super::common::{ATTENTION, EXPERTS_PER_TOKEN, NORMS, PLAIN, required};
use crate::base::Result;
use crate::checkpoint::{GgufFamily, GgufKind, GgufMetadata};

pub(super) const MINIMAX_M2: GgufFamily = GgufFamily {
    architecture: "minimax-m2",
    model_type: "minimax_m2",
    class: "MiniMaxM2ForCausalLM",
    per_layer: &[
        NORMS,
        ATTENTION,
        &[
            ("ffn_gate_inp", "block_sparse_moe.gate"),
            (
                "exp_probs_b.bias",
                "block_sparse_moe.e_score_correction_bias",
            ),
            ("ffn_gate_exps", "block_sparse_moe.experts.gate_proj"),
            ("ffn_up_exps", "block_sparse_moe.experts.up_proj"),
            ("ffn_down_exps", "block_sparse_moe.experts.down_proj"),
        ],
    ],
    keys: &[
        ("num_local_experts", "expert_count", GgufKind::Integer),
        EXPERTS_PER_TOKEN,
    ],
    config,
    ..PLAIN
};

fn config(metadata: &GgufMetadata<'_>, config: &mut Map<String, Value>) -> Result<()> {
    let width = required(metadata, "expert_feed_forward_length")?;
    config.insert("intermediate_size".into(), width.into());
    Ok(())
}
