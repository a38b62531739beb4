//! Launchers for rows on their way to an expert of a mixture, and its results on their way back, forward and backward.

use super::super::driver::{DeviceSlice, Launch, int};
use super::sizes::{PIECE, check_width, expect_bf16, expect_f32, expect_words, f32_elements};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::kernel::kernels;

kernels! {
    /// Copies and adds rows of an expert.
    enum Move(RowsArguments) {
        ExpertRows {
            Take = "expert_take",
            TakeBackward = "expert_take_backward",
            Add = "expert_add",
            AddF32 = "expert_add_f32",
            AddBackward = "expert_add_backward",
        }
    }
}

const THREADS: u32 = 128;
/// Bytes that a thread copies.
const COPIED: usize = 16;

/// The rows of a batch that go to an expert. The caller vouches for their indices: each is a row of the batch, and no two are equal.
#[derive(Clone, Copy, Debug)]
pub struct RowsOfExpert<'a> {
    /// Row indices, u32 `[n]`.
    pub rows: DeviceSlice<'a>,
    /// The weight of each in the sum of its row, f32 `[n]`.
    pub weights: DeviceSlice<'a>,
}

#[repr(C)]
#[derive(Default)]
struct RowsArguments {
    rows: u64,
    weights: u64,
    x: u64,
    dsum: u64,
    taken: u64,
    sum: u64,
    dweights: u64,
    pieces: i32,
}

impl RowsOfExpert<'_> {
    fn count(&self) -> usize {
        f32_elements(self.rows)
    }

    fn launch(&self, kernel: Move, pieces: usize, columns: bool, a: RowsArguments) -> Result<()> {
        expect_words("weights of an expert", self.weights, &[self.count()])?;
        let weights = self.weights.address();
        launch(
            kernel,
            self.rows,
            pieces,
            columns,
            RowsArguments { weights, ..a },
        )
    }

    fn add(
        &self,
        kernel: Move,
        x: DeviceSlice<'_>,
        width: usize,
        sum: DeviceSlice<'_>,
    ) -> Result<()> {
        if width == 0 || !f32_elements(sum).is_multiple_of(width) {
            bail!(
                Internal,
                "a sum of experts of {} elements in rows of {width}",
                f32_elements(sum)
            );
        }
        check_width("results of an expert", width)?;
        let a = RowsArguments {
            x: x.address(),
            sum: sum.address(),
            ..RowsArguments::default()
        };
        self.launch(kernel, width / PIECE, true, a)
    }
}

/// Makes row i of `taken` row `rows[i]` of `x`, which go to an expert. Rows have `row_bytes`, a multiple of 16.
pub fn take_rows(
    x: DeviceSlice<'_>,
    rows: &RowsOfExpert<'_>,
    row_bytes: usize,
    taken: DeviceSlice<'_>,
) -> Result<()> {
    gather_rows(x, rows.rows, row_bytes, taken)
}

/// Makes row i of `taken` row `rows[i]` of `x`. Rows have `row_bytes`, a multiple of 16. The caller vouches for the indices, u32.
pub fn gather_rows(
    x: DeviceSlice<'_>,
    rows: DeviceSlice<'_>,
    row_bytes: usize,
    taken: DeviceSlice<'_>,
) -> Result<()> {
    let count = f32_elements(rows);
    let fits = row_bytes > 0 && row_bytes.is_multiple_of(COPIED) && x.bytes() >= row_bytes;
    if !fits || taken.bytes() != count * row_bytes {
        bail!(
            Internal,
            "{count} rows of {row_bytes} bytes, of {}, to {}",
            x.bytes(),
            taken.bytes()
        );
    }
    let a = RowsArguments {
        x: x.address(),
        taken: taken.address(),
        ..RowsArguments::default()
    };
    launch(Move::Take, rows, row_bytes / COPIED, true, a)
}

/// Launches a kernel for these rows with `a`, whose addresses were checked; `columns` says whether the grid divides rows of so many pieces.
fn launch(
    kernel: Move,
    rows: DeviceSlice<'_>,
    pieces: usize,
    columns: bool,
    a: RowsArguments,
) -> Result<()> {
    let columns = match columns {
        true => pieces.div_ceil(THREADS as usize),
        false => 1,
    };
    let count = int("rows of an expert", f32_elements(rows))?;
    let arguments = RowsArguments {
        rows: rows.address(),
        pieces: int("the width of rows", pieces)?,
        ..a
    };
    let launch = Launch::new([count as u32, columns as u32, 1], THREADS);
    // SAFETY: sizes were checked; the caller vouches for the rows.
    unsafe { launch.of(kernel).run(rows.gpu(), &arguments) }
}

/// Adds `weights[i]` times row i of bf16 `x` `[n, width]` to row `rows[i]` of f32 `sum` `[T, width]`. `width` is a multiple of 16.
pub fn add_rows(
    x: DeviceSlice<'_>,
    rows: &RowsOfExpert<'_>,
    width: usize,
    sum: DeviceSlice<'_>,
) -> Result<()> {
    expect_bf16("results of an expert", x, &[rows.count(), width])?;
    rows.add(Move::Add, x, width, sum)
}

/// As [`add_rows`], of f32 `x`.
pub fn add_rows_f32(
    x: DeviceSlice<'_>,
    rows: &RowsOfExpert<'_>,
    width: usize,
    sum: DeviceSlice<'_>,
) -> Result<()> {
    expect_f32("results of an expert", x, &[rows.count(), width])?;
    rows.add(Move::AddF32, x, width, sum)
}

/// As [`add_rows`], with weights of one: the backward pass of [`take_rows`].
pub fn add_rows_unweighted(
    x: DeviceSlice<'_>,
    rows: &RowsOfExpert<'_>,
    width: usize,
    sum: DeviceSlice<'_>,
) -> Result<()> {
    expect_bf16("gradients of an expert's rows", x, &[rows.count(), width])?;
    rows.add(Move::TakeBackward, x, width, sum)
}

/// The backward pass of [`add_rows`]: from bf16 `x` `[n, width]` and the gradients `dsum` `[T, width]` of the sum makes bf16 `dx` `[n, width]` the
/// gradients of `x`, and f32 `dweights` `[n]` those of the weights.
pub fn add_rows_backward(
    (x, dsum): (DeviceSlice<'_>, DeviceSlice<'_>),
    rows: &RowsOfExpert<'_>,
    width: usize,
    dx: DeviceSlice<'_>,
    dweights: DeviceSlice<'_>,
) -> Result<()> {
    let count = rows.count();
    super::sizes::rows("gradients of a sum of experts", dsum, width)?;
    expect_bf16("results of an expert", x, &[count, width])?;
    expect_bf16("gradients of an expert's results", dx, &[count, width])?;
    expect_words("gradients of an expert's weights", dweights, &[count])?;
    let a = RowsArguments {
        x: x.address(),
        dsum: dsum.address(),
        taken: dx.address(),
        dweights: dweights.address(),
        ..RowsArguments::default()
    };
    rows.launch(Move::AddBackward, width / PIECE, false, a)
}
