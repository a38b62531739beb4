//! GEMMs that add the products of their rows' adapters. Those of a single row also multiply their outputs by the A factors of the projections
//! that take them.

use std::sync::Arc;

use super::choose::{GemmKernels, GemmPlan};
use super::fused_norm::FusedNorm;
use super::hardware::Hardware;
use super::input::Input;
use super::matrix::{Biased, MatrixShape};
use super::output::Output;
use super::product::output_features;
use super::skinny::skinny_gemm;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::adapted_rows::AdapterDivision;
use crate::cuda::driver::{DeviceBuffer, Gpu};
use crate::cuda::row_adapter::AdaptedGemm;

impl GemmPlan {
    /// This GEMM of a single row by the kernel that applies its adapter, if there is one. The preceding kernel stores the products with A factors
    /// in `parts` parts. With `None` the GEMM computes them itself.
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

    /// This GEMM by a kernel that applies the adapters of its rows, if there is one.
    pub fn for_adapted_rows(
        &self,
        hardware: &Hardware,
        division: AdapterDivision,
    ) -> Option<GemmPlan> {
        let GemmKernels::Tiled(tiling) = &self.kernels else {
            return None;
        };
        let matrices: Vec<MatrixShape> = self.matrices.iter().flatten().copied().collect();
        let tiling = tiling.for_adapted_rows(hardware, &matrices, division)?;
        Some(GemmPlan {
            kernels: GemmKernels::Tiled(tiling),
            ..*self
        })
    }

    /// Whether it is a plan by [`GemmPlan::for_adapted_rows`].
    pub fn is_for_adapted_rows(&self) -> bool {
        matches!(&self.kernels, GemmKernels::Tiled(tiling) if tiling.adapted.is_some())
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
        let features = output_features(matrices, output);
        out.holds("a product", &[features.max(stride), output.bytes()])?;
        let adapter = Some(adapter);
        skinny_gemm(
            gpu, input, 1, matrices, output, out, stride, plan, norm, adapter,
        )
    }
}
