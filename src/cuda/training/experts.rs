//! Gathers bf16 rows for an expert, and scatters its results back.

use super::super::driver::{DeviceSlice, Launch, int};
use super::super::units::Unit;
use super::sizes::{PIECE, expect_bf16, expect_words, f32_elements, rows as rows_of};
use crate::base::Result;
use crate::base::error::bail;

/// Argument sizes of this file's kernels, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("train_take_rows", size_of::<RowsArguments>()),
    ("train_add_rows", size_of::<RowsArguments>()),
];

const THREADS: u32 = 128;

#[repr(C)]
struct RowsArguments {
    x: u64,
    rows: u64,
    weights: u64,
    taken: u64,
    sum: u64,
    width: i32,
}

fn launch(count: usize, width: usize) -> Result<Launch> {
    let columns = (width / PIECE).div_ceil(THREADS as usize) as u32;
    Ok(Launch::new(
        [int("rows of an expert", count)? as u32, columns, 1],
        THREADS,
    ))
}

/// Gather: row i of bf16 `taken` `[n, width]` becomes row `rows[i]` of bf16 `x` `[T, width]`. `width` is a multiple of 16. The caller
/// vouches for the contents of `rows`, u32.
pub fn take_rows(
    x: DeviceSlice<'_>,
    rows: DeviceSlice<'_>,
    width: usize,
    taken: DeviceSlice<'_>,
) -> Result<()> {
    rows_of("rows that experts take", x, width)?;
    let count = f32_elements(rows);
    expect_bf16("rows of an expert", taken, &[count, width])?;
    let arguments = RowsArguments {
        x: x.address(),
        rows: rows.address(),
        weights: 0,
        taken: taken.address(),
        sum: 0,
        width: int("the width of rows", width)?,
    };
    let launch = launch(count, width)?;
    // SAFETY: the struct is the kernel's; sizes were checked; the caller vouches for the rows.
    unsafe {
        launch.run(
            x.gpu(),
            Unit::ExpertsTraining,
            "train_take_rows",
            &arguments,
        )
    }
}

/// Scatter: adds `weights[i]` times row i of bf16 `x` `[n, width]` to row `rows[i]` of f32 `sum` `[T, width]`. `width` is a multiple of 16.
/// The caller vouches for the contents of `rows`, u32, which must be distinct.
pub fn add_rows(
    x: DeviceSlice<'_>,
    (rows, weights): (DeviceSlice<'_>, DeviceSlice<'_>),
    width: usize,
    sum: DeviceSlice<'_>,
) -> Result<()> {
    let count = f32_elements(rows);
    expect_bf16("results of an expert", x, &[count, width])?;
    expect_words("weights of an expert", weights, &[count])?;
    if width == 0 || !f32_elements(sum).is_multiple_of(width) {
        bail!(
            Internal,
            "a sum of experts of {} elements in rows of {width}",
            f32_elements(sum)
        );
    }
    let arguments = RowsArguments {
        x: x.address(),
        rows: rows.address(),
        weights: weights.address(),
        taken: 0,
        sum: sum.address(),
        width: int("the width of rows", width)?,
    };
    let launch = launch(count, width)?;
    // SAFETY: the struct is the kernel's; sizes were checked; the caller vouches for the rows.
    unsafe { launch.run(x.gpu(), Unit::ExpertsTraining, "train_add_rows", &arguments) }
}
