//! GEMMs with a fused RMSNorm: the shapes that they serve, and the GEMM that adds to the residual stream before the norm.

use std::sync::Arc;

use super::choose::fused_plan;
use super::fused_norm::{FusedNorm, MULTIPLE};
use super::hardware::Hardware;
use super::input::Input;
use super::limits::HALF_SM_ROWS;
use super::matrix::{Biased, MatrixShape};
use super::output::{Layout, Output};
use super::residual::{ResidualRow, WIDTH};
use super::skinny::skinny_gemm;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::Gpu;

impl FusedNorm<'_> {
    /// Whether the norm can be fused into the GEMMs around it, each in one launch, for `m` rows in the given layout. `makes` is the matrix
    /// of the GEMM that adds to the rows; `takes` are the matrices that consume them.
    pub fn serves(
        hardware: &Hardware,
        m: usize,
        layout: Layout,
        makes: MatrixShape,
        takes: &[MatrixShape],
        output: Output,
    ) -> bool {
        let at_once = |matrices: &[_], output| {
            fused_plan(hardware, m, matrices, output, layout).is_some_and(|plan| plan.rows == m)
        };
        (m <= HALF_SM_ROWS || layout == Layout::FragmentMajor)
            && makes.rows.is_multiple_of(MULTIPLE)
            && output != Output::F16
            && at_once(&[makes], Output::Add)
            && at_once(takes, output)
    }
}

impl ResidualRow<'_> {
    /// Whether a GEMM of `m` rows with these matrices can compute its row in its prologue.
    pub fn serves(hardware: &Hardware, m: usize, takes: &[MatrixShape], output: Output) -> bool {
        m == 1
            && takes.iter().all(|w| w.cols <= WIDTH)
            && matches!(output, Output::F32 | Output::Glu(_))
            && fused_plan(hardware, m, takes, output, Layout::RowMajor).is_some()
    }
}

/// Adds a product of `m` rows to the rows of a norm, and stores the input for products with [`Input::FusedNorm`]. Serves the shapes that
/// [`FusedNorm::serves`] allows.
pub fn linear_add_norm(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrix: Biased<'_>,
    norm: &FusedNorm<'_>,
) -> Result<()> {
    let width = norm.width();
    if matrix.0.rows() != width {
        bail!(
            Internal,
            "a product of {} features added to rows of {width}",
            matrix.0.rows()
        );
    }
    input.holds(m, matrix.0.cols())?;
    let (hardware, shape) = (Hardware::of(gpu), matrix.0.shape());
    let Some(plan) = fused_plan(&hardware, m, &[shape], Output::Add, input.layout()) else {
        bail!(
            Internal,
            "no kernel fuses a norm into a product of {m} rows"
        );
    };
    skinny_gemm(
        gpu,
        input,
        m,
        &[matrix],
        Output::Add,
        norm.x,
        width,
        plan,
        Some(norm),
    )
}
