//! Row norms of a weight, which bound its products by the Cauchy-Schwarz inequality.

use super::driver::{DeviceSlice, Launch, int};
use super::kernel::kernels;
use super::linear::Matrix;
use crate::base::Result;
use crate::tensor::WeightType;

kernels! {
    /// The norms of rows.
    enum RowNorms(RowNormArguments) {
        LinearRowNorms { Rows = "linear_row_norms" }
    }
}

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

/// Enqueues `out[r] = sqrt(sum over k of (matrix[r, k] * columns[k])^2)`, f32 `[rows]`. `columns` are f32 `[cols]`, or ones if `None`. Sums
/// are f32, with a relative error of about 1e-6.
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
    // SAFETY: sizes were checked.
    unsafe { launch.of(RowNorms::Rows).run(matrix.gpu(), &arguments) }
}
