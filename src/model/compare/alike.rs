//! Whether two models have the same shape, so that the blocks of one fit the streams of the other.

use crate::base::Result;
use crate::base::error::bail;
use crate::model::Spec;
use crate::model::spec::BlockSpec;

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
    let attention = &block.attention;
    [
        ("query heads", attention.heads),
        ("key/value heads", attention.kv_heads),
        ("head size", attention.head_dim),
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
