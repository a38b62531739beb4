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

/// Larger than the number of blocks of any model, and small enough to list them.
const MOST_BLOCKS: u64 = 4096;

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

/// Norms before each half of a block, the second by its name in transformers.
pub(super) const BLOCK_NORMS: Names = &[
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
];

/// Norms before and after each half of a block.
pub(super) const NORMS_AROUND_HALVES: Names = &[
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
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

pub(super) const LOGIT_CAP: (&str, &str, GgufKind) = (
    "final_logit_softcapping",
    "final_logit_softcapping",
    GgufKind::Float,
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
    in_config: &[],
    forms: &[],
    value_heads: &[],
    keys: &[SLIDING_WINDOW],
    by_block: &[],
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

/// The number of blocks in the file, with those of a drafter.
pub(super) fn blocks(metadata: &GgufMetadata<'_>) -> Result<usize> {
    let blocks = required(metadata, "block_count")?;
    if blocks > MOST_BLOCKS {
        bail!(
            CorruptFile,
            "'{}' is {blocks}; expected at most {MOST_BLOCKS}",
            metadata.key("block_count")
        );
    }
    Ok(blocks as usize)
}

/// The number of blocks without those of a drafter.
fn own_blocks(metadata: &GgufMetadata<'_>) -> Result<usize> {
    let drafter = metadata.integer("nextn_predict_layers")?.unwrap_or(0);
    Ok(blocks(metadata)?.saturating_sub(drafter.min(MOST_BLOCKS) as usize))
}

/// The number that `key` has for each block, without those of a drafter, which a list may leave out. A single number applies to all blocks.
pub(super) fn by_block(metadata: &GgufMetadata<'_>, key: &str) -> Result<Vec<u64>> {
    let (blocks, own) = (blocks(metadata)?, own_blocks(metadata)?);
    let Some(list) = metadata.integers(key) else {
        return Ok(vec![required(metadata, key)?; own]);
    };
    if ![blocks, own].contains(&list.len()) {
        bail!(
            CorruptFile,
            "'{}' has {} elements for {blocks} layers",
            metadata.key(key),
            list.len()
        );
    }
    let numbers = list.iter().take(own).enumerate();
    let number = |(block, &n): (usize, &i64)| {
        u64::try_from(n).map_err(|_| {
            err!(
                CorruptFile,
                "'{}' is {n} for block {block}; expected at least 0",
                metadata.key(key)
            )
        })
    };
    numbers.map(number).collect()
}

/// Whether each block has the window of a file: as a list of blocks says, or all but every last of a period, `default` if the file does not
/// say.
pub(super) fn windowed_blocks(metadata: &GgufMetadata<'_>, default: u64) -> Result<Vec<bool>> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    let own = own_blocks(metadata)?;
    // Converters omit the window if no layer has one.
    if window(metadata)?.is_none() {
        return Ok(vec![false; own]);
    }
    if metadata.integers(PATTERN).is_some() {
        let pattern = by_block(metadata, PATTERN)?;
        return Ok(pattern.iter().map(|&n| n != 0).collect());
    }
    let period = match metadata.integer(PATTERN)? {
        None => default,
        Some(_) => required(metadata, PATTERN)?,
    };
    Ok((1..=own as u64)
        .map(|n| !n.is_multiple_of(period))
        .collect())
}

/// The one number that `key` has for all blocks that `chosen` names. `None` if it names none.
pub(super) fn same_in(
    metadata: &GgufMetadata<'_>,
    key: &str,
    numbers: &[u64],
    chosen: impl Fn(usize) -> bool,
) -> Result<Option<u64>> {
    let mut all = (0..numbers.len()).filter(|&block| chosen(block));
    let Some(first) = all.next() else {
        return Ok(None);
    };
    match all.find(|&block| numbers[block] != numbers[first]) {
        None => Ok(Some(numbers[first])),
        Some(block) => bail!(
            Unsupported,
            "'{}' is {} for block {first} and {} for block {block}; blocks of one kind must be alike",
            metadata.key(key),
            numbers[first],
            numbers[block]
        ),
    }
}

/// `layer_types` of a config, by whether each layer has a window.
pub(super) fn layer_types(windowed: &[bool]) -> Value {
    let kind = |&windowed: &bool| match windowed {
        true => "sliding_attention",
        false => "full_attention",
    };
    windowed.iter().map(kind).collect()
}

/// Removes a cap of logits of 0, with which llama.cpp means none.
pub(super) fn remove_zero_cap(config: &mut Map<String, Value>) {
    const CAP: &str = "final_logit_softcapping";
    if config.get(CAP).and_then(Value::as_f64) == Some(0.0) {
        config.remove(CAP);
    }
}

/// Positions of attention windows; some converters write 0 for none.
pub(super) fn window(metadata: &GgufMetadata<'_>) -> Result<Option<u64>> {
    Ok(metadata
        .integer("attention.sliding_window")?
        .filter(|&window| window > 0))
}

/// How experts are chosen that sigmoids score. llama.cpp takes 0 groups for one, and a scale of 0 for none.
pub(super) fn sigmoid_scoring(
    metadata: &GgufMetadata<'_>,
    config: &mut Map<String, Value>,
) -> Result<()> {
    for (key, gguf) in [
        ("n_group", "expert_group_count"),
        ("topk_group", "expert_group_used_count"),
    ] {
        let count = metadata.integer(gguf)?.unwrap_or(0).max(1);
        config.insert(key.into(), json!(count));
    }
    let scale = metadata
        .float("expert_weights_scale")?
        .filter(|&s| s != 0.0);
    config.insert("routed_scaling_factor".into(), json!(scale.unwrap_or(1.0)));
    let normalized = metadata.boolean("expert_weights_norm")?.unwrap_or(false);
    config.insert("norm_topk_prob".into(), json!(normalized));
    Ok(())
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
