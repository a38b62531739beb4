//! Whether two models have the same shape, so that the blocks of one fit the streams of the other.

use crate::base::Result;
use crate::base::error::bail;
use crate::model::Spec;
use crate::model::spec::{BlockSpec, MixerSpec};

/// Fails for models of different shapes; the error names what differs, with both values.
pub(super) fn check(examined: &Spec, reference: &Spec) -> Result<()> {
    let sizes = |spec: &Spec| {
        [
            ("vocabulary size", spec.vocab_size),
            ("hidden size", spec.hidden_size),
            ("number of blocks", spec.blocks.len()),
        ]
    };
    same("the models", &sizes(examined), &sizes(reference))?;
    let blocks = examined.blocks.iter().zip(&reference.blocks).enumerate();
    for (i, (a, b)) in blocks {
        let whose = format!("block {i} of the models");
        same(&whose, &block_sizes(a), &block_sizes(b))?;
    }
    Ok(())
}

fn block_sizes(block: &BlockSpec) -> [(&'static str, usize); 5] {
    // Heads of a gated delta net are counted by its values, and those of Mamba-2 by x and by B.
    let (heads, kv_heads, dim) = match &block.mixer {
        MixerSpec::Attention(a) => (a.heads, a.kv_heads, a.head_dim),
        MixerSpec::GatedDelta(d) => (d.shape.value_heads, d.shape.key_heads, d.shape.value_dim),
        MixerSpec::Mamba2(m) => (m.shape.heads, m.shape.groups, m.shape.head_dim),
        MixerSpec::None => (0, 0, 0),
    };
    [
        ("query heads", heads),
        ("key/value heads", kv_heads),
        ("head size", dim),
        ("MLP width", block.mlp.intermediate_size()),
        ("number of experts", block.mlp.experts()),
    ]
}

fn same(whose: &str, a: &[(&str, usize)], b: &[(&str, usize)]) -> Result<()> {
    let mut both = a.iter().zip(b);
    if let Some(((name, a), (_, b))) = both.find(|(a, b)| a.1 != b.1) {
        bail!(
            InvalidArgument,
            "{whose} differ in {name}: {a} and {b}; only models of the same shape and vocabulary can be compared"
        );
    }
    Ok(())
}
