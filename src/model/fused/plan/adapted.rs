//! Plans of rows with adapters, where the kernels of rows without them apply these themselves: as many launches, in the same order.

use std::ops::Range;

use super::{Kernel, Norm, PlannedKernel, Rows, Then, output_of, plan};
use crate::base::Result;
use crate::cuda::{AdapterDivision, GemmPlan, Hardware, Layout};
use crate::model::adapter::{AdaptedPart, Adapts};
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

/// The kernels of [`plan`] for rows that are divided among adapters so. `None` if a kernel of the plan without adapters cannot apply them, or
/// if bits of a row may not depend on the others.
pub(in crate::model::fused) fn of_rows(
    model: &ModelShape,
    own: Range<usize>,
    rows: usize,
    kind: Rows,
    (adapts, division): (Adapts, AdapterDivision),
    hardware: &Hardware,
) -> Result<Option<Vec<PlannedKernel>>> {
    if hardware.deterministic {
        return Ok(None);
    }
    let mut steps = plan(model, own, rows, kind, Adapts::NOTHING, hardware)?;
    for step in &mut steps {
        let Some((part, gemm)) = adaptable(&mut step.kernel) else {
            continue;
        };
        if !adapts.change(part) {
            continue;
        }
        let adapted = gemm.and_then(|gemm| {
            let adapted = gemm.for_adapted_rows(hardware, division)?;
            *gemm = adapted;
            Some(())
        });
        if adapted.is_none() {
            return Ok(None);
        }
    }
    Ok(Some(steps))
}

/// The part that a kernel multiplies by the weights of, and its GEMM, if its result may be adapted.
fn adaptable(kernel: &mut Kernel) -> Option<(AdaptedPart, Option<&mut GemmPlan>)> {
    match kernel {
        Kernel::Qkv { gemm, .. } => Some((AdaptedPart::MixerInputs, Some(gemm))),
        Kernel::GateUp {
            fused: true, gemm, ..
        } => Some((AdaptedPart::MlpInputs, Some(gemm))),
        Kernel::Project {
            half,
            then: Then::Add,
            gemm,
            ..
        } => Some((output_of(*half), Some(gemm))),
        Kernel::Project { half, .. } => Some((output_of(*half), None)),
        Kernel::GateUp { .. } | Kernel::Up { .. } => Some((AdaptedPart::MlpInputs, None)),
        Kernel::HeadGate { .. } => Some((AdaptedPart::HeadGate, None)),
        Kernel::DeltaInputs { .. } => Some((AdaptedPart::DeltaInputsAndGates, None)),
        Kernel::DeltaGates { .. } => Some((AdaptedPart::DeltaGates, None)),
        Kernel::MambaInputs { .. } => Some((AdaptedPart::MixerInputs, None)),
        _ => None,
    }
}
