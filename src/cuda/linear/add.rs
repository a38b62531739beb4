//! Products around a norm that has no kernel of its own: those that leave it to the products after them, and what those serve.

use std::sync::Arc;

use super::choose::fused_plan;
use super::deferred::{DeferredNorm, MULTIPLE};
use super::hardware::Hardware;
use super::input::Input;
use super::limits::FEW;
use super::matrix::{Biased, MatrixShape};
use super::output::{Layout, Output};
use super::residual::{ResidualRow, WIDTH};
use super::small::small;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::Gpu;

impl DeferredNorm<'_> {
    /// Whether products of `m` rows that lie like this can defer the norm between them, each in one launch: `makes` adds to the rows,
    /// `takes` are what become of them.
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
        (m <= FEW || layout == Layout::Ordered)
            && makes.rows.is_multiple_of(MULTIPLE)
            && output != Output::F16
            && at_once(&[makes], Output::Add)
            && at_once(takes, output)
    }
}

impl ResidualRow<'_> {
    /// Whether products of `m` rows with these matrices can make their row.
    pub fn serves(hardware: &Hardware, m: usize, takes: &[MatrixShape], output: Output) -> bool {
        m == 1
            && takes.iter().all(|w| w.cols <= WIDTH)
            && matches!(output, Output::F32 | Output::Glu(_))
            && fused_plan(hardware, m, takes, output, Layout::Rows).is_some()
    }
}

/// Adds a product of `m` rows to the rows of a norm, and leaves what products with [`Input::Deferred`] take of them. Both are for
/// what [`DeferredNorm::serves`].
pub fn linear_add(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrix: Biased<'_>,
    norm: &DeferredNorm<'_>,
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
        bail!(Internal, "no kernel that defers a norm serves {m} rows");
    };
    small(
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
