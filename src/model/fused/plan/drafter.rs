//! Plans of the drafter: its block for the rows that it guesses from, and the keys and values of rows whose next token is known.

use super::{Applied, BlockShape, Kernel, MixerShape, Norm, Normed, PlannedKernel, Rows, plan};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{GemmPlan, Hardware, InputForm, Layout, MatrixShape, Output};
use crate::model::order::Half;

/// The layout of the input of the drafter's projection.
pub(in crate::model::fused) const INPUTS: Layout = Layout::RowMajor;

/// Keys and values of rows in the drafter's block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::model::fused) enum Followed {
    /// Rows of which each has a row of the block table, at the positions before theirs.
    Single,
    /// Consecutive rows of sequences.
    Consecutive,
}

/// The kernels that guess a token after each of `rows` rows, one of each sequence: the drafter's inputs, its block, which is the last of
/// `blocks`, logits, and hidden rows, from which the next tokens are guessed. `fc` is the projection of the inputs.
pub(in crate::model::fused) fn draft(
    blocks: &[BlockShape],
    fc: MatrixShape,
    head: MatrixShape,
    rows: usize,
    hardware: &Hardware,
) -> Result<Vec<PlannedKernel>> {
    let own = last(blocks)..blocks.len();
    let mut steps = inputs(blocks, fc, rows, hardware)?;
    steps.extend(plan(blocks, own, head, rows, Rows::Step, hardware)?);
    steps.push(PlannedKernel {
        block: blocks.len(),
        kernel: Kernel::Hidden,
    });
    Ok(steps)
}

/// The kernels that store keys and values of the drafter's block for rows from which nothing is guessed: a block alone has no other use for
/// them.
pub(in crate::model::fused) fn follow(
    blocks: &[BlockShape],
    fc: MatrixShape,
    rows: usize,
    followed: Followed,
    hardware: &Hardware,
) -> Result<Vec<PlannedKernel>> {
    let block = last(blocks);
    let MixerShape::Attention { qkv, .. } = &blocks[block].mixer else {
        bail!(Internal, "block {block} of a drafter has no attention");
    };
    let input = Normed {
        norm: Norm::Mixer(block),
        layout: blocks[block].layout(Half::Mixer, hardware, rows),
        applied: Applied::Before,
    };
    let mut steps = inputs(blocks, fc, rows, hardware)?;
    let kernels = [
        Kernel::Normalize {
            norm: input.norm,
            layout: input.layout,
        },
        Kernel::Qkv {
            input,
            gemm: GemmPlan::choose(hardware, rows, qkv, Output::F32, input.form())?,
        },
        match followed {
            Followed::Single => Kernel::StoreRows { before: true },
            Followed::Consecutive => Kernel::StoreKv,
        },
    ];
    steps.extend(kernels.map(|kernel| PlannedKernel { block, kernel }));
    Ok(steps)
}

/// The index of the drafter's block.
fn last(blocks: &[BlockShape]) -> usize {
    blocks.len() - 1
}

fn inputs(
    blocks: &[BlockShape],
    fc: MatrixShape,
    rows: usize,
    hardware: &Hardware,
) -> Result<Vec<PlannedKernel>> {
    let form = InputForm::Plain(INPUTS);
    let gemm = GemmPlan::choose(hardware, rows, &[fc], Output::F32, form)?;
    let kernels = [Kernel::DrafterInputs, Kernel::ProjectDrafterInputs { gemm }];
    let of_block = |kernel| PlannedKernel {
        block: last(blocks),
        kernel,
    };
    Ok(kernels.map(of_block).into())
}
