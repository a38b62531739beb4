//! GEMMs of a single row that add the products of the row's adapter, and multiply their outputs by the A factors of the projections that take
//! them.

use std::sync::Arc;

use super::choose::{GemmKernels, GemmPlan};
use super::fused_norm::FusedNorm;
use super::hardware::Hardware;
use super::input::Input;
use super::matrix::Biased;
use super::output::Output;
use super::skinny::{SkinnyPlan, skinny_gemm};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu};
use crate::cuda::row_adapter::{AdaptedInput, LowInput, LowOutput, RowAdapter, RowProjections};

/// The adapter of a GEMM of a single row.
#[derive(Clone, Copy)]
pub struct AdaptedGemm<'a> {
    /// The row's adapter.
    pub adapter: RowAdapter<'a>,
    /// The number of the GEMM's first projection. The others follow.
    pub first: usize,
    /// The projections that take the outputs, if there are any that may be adapted.
    pub next: Option<RowProjections>,
    /// Projections of later kernels, whose entries of the table are fetched.
    pub later: Option<RowProjections>,
}

impl AdaptedGemm<'_> {
    /// Arguments of a plan's kernel with this input and epilogue.
    pub(super) fn arguments(
        &self,
        plan: &SkinnyPlan,
        input: Input<'_>,
        output: Output,
    ) -> Result<(LowInput, LowOutput)> {
        let Some(row) = plan.adapted else {
            bail!(
                Internal,
                "a product of a row with an adapter, planned as {plan}"
            );
        };
        let (takes, makes) = match output {
            Output::Add => (AdaptedInput::Inner, AdaptedInput::Residual),
            _ => (AdaptedInput::Residual, AdaptedInput::Inner),
        };
        let factor = match input {
            Input::Plain(_, factor) => factor,
            _ => 1.0,
        };
        let low = self.adapter.input(takes, self.first, row.parts, factor)?;
        let next = self
            .adapter
            .output(makes, self.next, plan.ctas(), row.copies, self.later)?;
        Ok((low, next))
    }
}

impl GemmPlan {
    /// The same GEMM of a single row by the kernel that applies the row's adapter. The preceding kernel stores the row's products with A factors
    /// in `parts` parts; with `None` the GEMM computes them itself. `None` if there is no such kernel.
    pub fn adapted(&self, hardware: &Hardware, parts: Option<usize>) -> Option<GemmPlan> {
        let plan = self.skinny_at_once()?;
        let features: Vec<usize> = self.matrices.iter().flatten().map(|w| w.rows).collect();
        let plan = plan.adapted(hardware, &features, parts)?;
        Some(GemmPlan {
            kernels: GemmKernels::Skinny(plan),
            ..*self
        })
    }

    /// The parts in which the kernel of [`GemmPlan::adapted`] leaves the products of its outputs with A factors.
    pub fn adapted_parts(&self) -> Option<usize> {
        let plan = self.skinny_at_once()?;
        plan.adapted.map(|_| plan.ctas())
    }

    /// Enqueues a GEMM planned by [`GemmPlan::adapted`], as [`GemmPlan::enqueue`], or with `norm` as [`GemmPlan::enqueue_before_norm`].
    pub fn enqueue_adapted(
        &self,
        gpu: &Arc<Gpu>,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        (out, stride): (&DeviceBuffer, usize),
        norm: Option<&FusedNorm<'_>>,
        adapter: &AdaptedGemm<'_>,
    ) -> Result<()> {
        self.check(input, matrices, output)?;
        let Some(plan) = self.skinny_at_once() else {
            bail!(Internal, "no kernel applies an adapter in {self:?}");
        };
        if let Some(norm) = norm {
            norm.takes(matrices[0].0.shape())?;
        }
        let features = match output.applied().is_some() {
            true => matrices[0].0.rows,
            false => matrices.iter().map(|(w, _)| w.rows).sum(),
        };
        out.holds("a product", &[features.max(stride), output.bytes()])?;
        let adapter = Some(adapter);
        skinny_gemm(
            gpu, input, 1, matrices, output, out, stride, plan, norm, adapter,
        )
    }
}
