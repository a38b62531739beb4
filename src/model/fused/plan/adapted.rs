//! The plan of a single row with an adapter, where the kernels of a row without one apply it themselves: as many launches, in the same order.

use std::ops::Range;

use super::{Kernel, Norm, PlannedKernel, Rows, Then, plan};
use crate::base::Result;
use crate::cuda::{Hardware, Layout};
use crate::model::adapter::Adapts;
use crate::model::fused::shapes::ModelShape;
use crate::model::order::Half;

/// The kernels that take a row with an adapter through the blocks `own`, with its logits at the end, where `heads` says how many heads a
/// block's attention has. `None` if a kernel of the plan without adapters cannot apply one.
pub(in crate::model::fused) fn of_row(
    model: &ModelShape,
    own: Range<usize>,
    heads: impl Fn(usize) -> Option<usize>,
    hardware: &Hardware,
) -> Result<Option<Vec<PlannedKernel>>> {
    let mut steps = plan(model, own, 1, Rows::Step, Adapts::NOTHING, hardware)?;
    // The parts in which the last kernel left the products of its row with A factors.
    let mut parts = None;
    for (i, step) in steps.iter_mut().enumerate() {
        let adapted = match &mut step.kernel {
            Kernel::Normalize {
                norm: Norm::Mixer(_),
                ..
            } if i == 0 => continue,
            Kernel::Head { .. } => continue,
            Kernel::Decode {
                layout: Layout::RowMajor,
            } => {
                step.kernel = Kernel::DecodeAdapted;
                parts = heads(step.block);
                parts.map(|_| ())
            }
            Kernel::Qkv { gemm, .. }
            | Kernel::GateUp {
                fused: true, gemm, ..
            }
            | Kernel::Project {
                half: Half::Mixer | Half::Mlp,
                layout: Layout::RowMajor,
                then: Then::AddAndNorm(Norm::Mixer(_) | Norm::Mlp(_) | Norm::Head),
                gemm,
            } => gemm.adapted(hardware, parts).map(|adapted| {
                parts = adapted.adapted_parts();
                *gemm = adapted;
            }),
            _ => None,
        };
        if adapted.is_none() {
            return Ok(None);
        }
    }
    Ok(Some(steps))
}
