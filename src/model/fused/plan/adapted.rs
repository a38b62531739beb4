//! Plans of rows with adapters, where the kernels of rows without them apply these themselves: as many launches, in the same order.

use std::ops::Range;

use super::{Kernel, PlannedKernel, Rows, Then, output_of, plan};
use crate::base::Result;
use crate::cuda::{AdapterDivision, DecodePlan, GemmPlan, Hardware, SharingTurn};
use crate::model::adapter::{AdaptedPart, Adapts};
use crate::model::fused::shapes::ModelShape;

/// The kernels of [`plan`] for rows that are divided among adapters so. `None` if a kernel of the plan without adapters cannot apply them, or
/// if bits of a row may not depend on the others.
pub(in crate::model::fused) fn of_rows(
    model: &ModelShape,
    own: Range<usize>,
    rows: usize,
    kind: Rows,
    (adapts, division): (Adapts, AdapterDivision),
    decodes: &[DecodePlan],
    hardware: &Hardware,
) -> Result<Option<Vec<PlannedKernel>>> {
    if hardware.deterministic {
        return Ok(None);
    }
    let mut steps = plan(model, own, rows, kind, Adapts::NOTHING, decodes, hardware)?;
    let parts = steps
        .iter_mut()
        .filter_map(|step| adaptable(&mut step.kernel));
    let changed: Vec<_> = parts.filter(|(part, _)| adapts.change(*part)).collect();
    let count = changed.len();
    for (index, (_, gemm)) in changed.into_iter().enumerate() {
        // CTAs of the skinny GEMM wait for each other, which prompts that run beside steps may keep from running.
        let turn = match kind {
            Rows::Step => SharingTurn::of(index, count),
            _ => None,
        };
        let adapted = gemm.and_then(|gemm| {
            let adapted = gemm.for_adapted_rows(hardware, division, turn)?;
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
            then: Then::Add | Then::AddAndNorm(_),
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
