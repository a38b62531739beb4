//! Norms of the rows of a weight: what its products are at most, by the inequality of Cauchy and Schwarz.

use super::driver::{DeviceSlice, Launch, int};
use super::linear::Matrix;
use super::units::Unit;
use crate::base::Result;
use crate::tensor::WeightType;

/// What the kernel of this file is passed, by its name.
pub(super) const ARGUMENTS: &[(&str, usize)] =
    &[("linear_row_norms", size_of::<RowNormArguments>())];

const THREADS: u32 = 256;

#[repr(C)]
struct RowNormArguments {
    matrix: u64,
    scales: u64,
    columns: u64,
    out: u64,
    global: f32,
    kind: i32,
    k: i32,
}

/// `out[r] = sqrt(sum over k of (matrix[r, k] * columns[k])^2)`, f32 `[rows]`; `columns` are f32 `[cols]`, or ones. Sums of f32, exact to
/// about 1e-6 of themselves. Enqueued.
pub fn row_norms(
    matrix: &Matrix,
    columns: Option<DeviceSlice<'_>>,
    out: DeviceSlice<'_>,
) -> Result<()> {
    if let Some(columns) = columns {
        columns.holds("weights of columns", &[matrix.cols(), 4])?;
    }
    out.holds("norms of rows", &[matrix.rows(), 4])?;
    let arguments = RowNormArguments {
        matrix: matrix.values().address(),
        scales: matrix.scales_address(),
        columns: columns.map_or(0, |c| c.address()),
        out: out.address(),
        global: matrix.global(),
        kind: match matrix.storage() {
            WeightType::F32 => 0,
            WeightType::F16 => 1,
            WeightType::BF16 => 2,
            WeightType::Nvfp4 => 3,
            WeightType::Int8 => 4,
        },
        k: int("the width of a weight", matrix.cols())?,
    };
    let rows = int("the rows of a weight", matrix.rows())?;
    let launch = Launch::new([rows as u32, 1, 1], THREADS);
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe {
        launch.run(
            matrix.gpu(),
            Unit::LinearRowNorms,
            "linear_row_norms",
            &arguments,
        )
    }
}
