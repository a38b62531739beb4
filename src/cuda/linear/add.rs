//! The GEMM that adds to the residual stream before a fused RMSNorm.

use std::sync::Arc;

use super::choose::{GemmPlan, takes_norm};
use super::fused_norm::{FusedNorm, MULTIPLE};
use super::hardware::Hardware;
use super::input::{Input, InputForm};
use super::matrix::{Biased, MatrixShape};
use super::output::{Layout, Output};
use super::skinny::{SkinnyPlan, skinny_gemm};
use crate::base::Result;
use crate::base::error::err;
use crate::cuda::driver::Gpu;

impl GemmPlan {
    /// The plan of a GEMM of `m` rows that adds to the residual stream and stores the input for GEMMs with [`Input::FusedNorm`]. `None` if
    /// the norm cannot be fused into it, and for deterministic plans, whose norms have the bits of a separate kernel.
    pub fn before_norm(
        hardware: &Hardware,
        m: usize,
        matrix: MatrixShape,
        layout: Layout,
    ) -> Option<GemmPlan> {
        if hardware.deterministic {
            return None;
        }
        let form = InputForm::Plain(layout);
        let plan = GemmPlan::find(hardware, m, &[matrix], Output::Add, form)?;
        let fuses = takes_norm(m, layout) && matrix.rows.is_multiple_of(MULTIPLE);
        (fuses && plan.skinny_at_once().is_some()).then_some(plan)
    }

    /// The kernel that fuses `norm` into this GEMM with a matrix; an error if there is none, or if rows of the norm have another width.
    pub(super) fn fusing(&self, norm: &FusedNorm<'_>, matrix: MatrixShape) -> Result<&SkinnyPlan> {
        norm.takes(matrix)?;
        self.skinny_at_once()
            .ok_or_else(|| err!(Internal, "no kernel fuses a norm into {self:?}"))
    }

    /// Enqueues a GEMM planned by [`GemmPlan::before_norm`]. It adds to the rows of the norm.
    pub fn enqueue_before_norm(
        &self,
        gpu: &Arc<Gpu>,
        input: Input<'_>,
        matrix: Biased<'_>,
        norm: &FusedNorm<'_>,
    ) -> Result<()> {
        let plan = self.fusing(norm, matrix.0.shape())?;
        let (matrices, width) = ([matrix], norm.width());
        self.check(input, &matrices, Output::Add)?;
        let (add, next) = (Output::Add, Some(norm));
        skinny_gemm(
            gpu, input, self.m, &matrices, add, norm.x, width, plan, next, None,
        )
    }
}

/// As [`GemmPlan::enqueue_before_norm`]. Plans it anew: for callers without a plan.
pub fn linear_add_norm(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrix: Biased<'_>,
    norm: &FusedNorm<'_>,
) -> Result<()> {
    norm.takes(matrix.0.shape())?;
    let (hardware, layout) = (Hardware::of(gpu)?, input.layout());
    let plan = GemmPlan::before_norm(&hardware, m, matrix.0.shape(), layout)
        .ok_or_else(|| err!(Internal, "no kernel fuses a norm into {m} rows of these"))?;
    plan.enqueue_before_norm(gpu, input, matrix, norm)
}
