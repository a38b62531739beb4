//! Plans of the drafter: its block for the rows that it guesses from, and the keys and values of rows whose next token is known.

use super::{Applied, Kernel, MixerShape, ModelShape, Norm, Normed, PlannedKernel, Rows, plan};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{DecodePlan, GemmPlan, Hardware, InputForm, Layout, Output};
use crate::model::adapter::Adapts;
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
/// the model's, logits, and hidden rows, from which the next tokens are guessed.
pub(in crate::model::fused) fn draft(
    model: &ModelShape,
    rows: usize,
    decodes: &[DecodePlan],
    hardware: &Hardware,
) -> Result<Vec<PlannedKernel>> {
    let all = model.blocks.len();
    let mut steps = inputs(model, rows, hardware)?;
    steps.extend(plan(
        model,
        model.own_blocks().end..all,
        rows,
        Rows::Step,
        Adapts::NOTHING,
        decodes,
        hardware,
    )?);
    steps.push(PlannedKernel {
        block: all,
        kernel: Kernel::Hidden,
    });
    Ok(steps)
}

/// The kernels that store keys and values of the drafter's block for rows from which nothing is guessed: a block alone has no other use for
/// them.
pub(in crate::model::fused) fn follow(
    model: &ModelShape,
    rows: usize,
    followed: Followed,
    hardware: &Hardware,
) -> Result<Vec<PlannedKernel>> {
    let block = model.own_blocks().end;
    let shape = model.blocks.get(block);
    let Some((shape, MixerShape::Attention { qkv, normed, .. })) = shape.map(|s| (s, &s.mixer))
    else {
        bail!(Internal, "block {block} is no drafter's with attention");
    };
    let input = Normed {
        norm: Norm::Mixer(block),
        layout: shape.layout(Half::Mixer, hardware, rows),
        applied: Applied::Before,
    };
    let mut steps = inputs(model, rows, hardware)?;
    let kernels = [
        Some(Kernel::Normalize {
            norm: input.norm,
            layout: input.layout,
        }),
        Some(Kernel::Qkv {
            input,
            gemm: GemmPlan::choose(hardware, rows, qkv, Output::F32, input.form())?,
        }),
        normed.then_some(Kernel::NormProjections),
        Some(match followed {
            Followed::Single => Kernel::StoreRows { before: true },
            Followed::Consecutive => Kernel::StoreKv,
        }),
    ];
    let kernels = kernels.into_iter().flatten();
    steps.extend(kernels.map(|kernel| PlannedKernel { block, kernel }));
    Ok(steps)
}

/// The kernels that make the input of the drafter's block.
fn inputs(model: &ModelShape, rows: usize, hardware: &Hardware) -> Result<Vec<PlannedKernel>> {
    let Some(fc) = model.drafter_fc else {
        bail!(Internal, "the model has no drafter");
    };
    let form = InputForm::Plain(INPUTS);
    let gemm = GemmPlan::choose(hardware, rows, &[fc], Output::F32, form)?;
    let kernels = [Kernel::DrafterInputs, Kernel::ProjectDrafterInputs { gemm }];
    let of_block = |kernel| PlannedKernel {
        block: model.own_blocks().end,
        kernel,
    };
    Ok(kernels.map(of_block).into())
}
