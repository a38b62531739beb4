//! Operations of training on plain arrays: sums, conversions, scaling, fills and column copies.

use std::ops::Range;

use super::super::driver::{DeviceSlice, Launch, int};
use super::sizes::{PIECE, WIDTH, bf16_elements, check_width, expect_bf16, expect_f32, pieces};
use crate::base::Result;
use crate::cuda::kernel::kernels;

kernels! {
    /// Adds partial sums.
    enum AddPartialSums(SumArguments) {
        ArrayTraining { Elements = "train_add_partial_sums" }
    }

    /// Operations on each element.
    enum Each(ArrayArguments) {
        ArrayTraining {
            Add = "train_add",
            Scale = "train_scale",
            Fill = "train_fill",
            ToBf16 = "train_to_bf16",
            ToF32 = "train_to_f32",
        }
    }

    /// Copies a range of columns, or adds it.
    enum Columns(ColumnArguments) {
        ArrayTraining {
            Copy = "train_columns_copy",
            Add = "train_columns_add",
        }
    }
}

const THREADS: u32 = 256;
/// Columns and threads of a CTA that adds up partial sums.
const SUM_COLUMNS: u32 = 32;
const SUM_THREADS: u32 = 512;

#[repr(C)]
struct SumArguments {
    partial: u64,
    sum: u64,
    parts: i32,
    stride: i32,
    width: i32,
}

/// Partial sums `[parts, stride]`; the `width` columns from `first` on count.
pub(super) struct PartialSums<'a> {
    pub(super) partial: DeviceSlice<'a>,
    pub(super) parts: usize,
    pub(super) stride: usize,
    pub(super) first: usize,
}

/// Adds the column sums of `partial` to `sum` `[width]`. The caller has checked the sizes.
pub(super) fn add_partial_sums(
    partial: &PartialSums<'_>,
    sum: DeviceSlice<'_>,
    width: usize,
) -> Result<()> {
    expect_f32("sums", sum, &[width])?;
    let arguments = SumArguments {
        partial: partial.partial.address() + (partial.first * size_of::<f32>()) as u64,
        sum: sum.address(),
        parts: int("partial sums", partial.parts)?,
        stride: int("the width of partial sums", partial.stride)?,
        width: int("the width of sums", width)?,
    };
    let blocks = (width as u32).div_ceil(SUM_COLUMNS);
    let launch = Launch::new([blocks, 1, 1], SUM_THREADS);
    // SAFETY: sizes were checked, here and by the caller.
    unsafe {
        launch
            .of(AddPartialSums::Elements)
            .run(sum.gpu(), &arguments)
    }
}

#[repr(C)]
struct ArrayArguments {
    x: u64,
    y: u64,
    pieces: u64,
    value: f32,
}

/// Runs a kernel over `pieces` pieces of arrays, which must hold as many.
fn each(
    kernel: Each,
    x: DeviceSlice<'_>,
    y: Option<DeviceSlice<'_>>,
    pieces: usize,
    value: f32,
) -> Result<()> {
    let arguments = ArrayArguments {
        x: x.address(),
        y: y.map_or(0, |y| y.address()),
        pieces: pieces as u64,
        value,
    };
    let blocks = int("blocks", pieces.div_ceil(THREADS as usize))?;
    let launch = Launch::new([blocks as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked by the caller.
    unsafe { launch.of(kernel).run(x.gpu(), &arguments) }
}

/// `x += y` in bf16; their sizes are multiples of 8.
pub fn add(x: DeviceSlice<'_>, y: DeviceSlice<'_>) -> Result<()> {
    let pieces = pieces("a sum", x)?;
    expect_bf16("an addend", y, &[pieces, PIECE])?;
    each(Each::Add, x, Some(y), pieces, 0.0)
}

/// `x *= factor` in bf16; its size is a multiple of 8.
pub fn scale(x: DeviceSlice<'_>, factor: f32) -> Result<()> {
    each(Each::Scale, x, None, pieces("a product", x)?, factor)
}

/// `x = value` in bf16; its size is a multiple of 8.
pub fn fill(x: DeviceSlice<'_>, value: f32) -> Result<()> {
    each(Each::Fill, x, None, pieces("an array", x)?, value)
}

/// bf16 `y` = f32 `x`, rounded to the nearest, ties to even; their size is a multiple of 8.
pub fn f32_to_bf16(x: DeviceSlice<'_>, y: DeviceSlice<'_>) -> Result<()> {
    let pieces = pieces("a conversion's result", y)?;
    expect_f32("what is converted", x, &[bf16_elements(y)])?;
    each(Each::ToBf16, y, Some(x), pieces, 0.0)
}

/// f32 `y` = bf16 `x`; their size is a multiple of 8.
pub fn bf16_to_f32(x: DeviceSlice<'_>, y: DeviceSlice<'_>) -> Result<()> {
    let pieces = pieces("what is converted", x)?;
    expect_f32("a conversion's result", y, &[bf16_elements(x)])?;
    each(Each::ToF32, y, Some(x), pieces, 0.0)
}

#[repr(C)]
struct ColumnArguments {
    all: u64,
    part: u64,
    pieces: u64,
    width: i32,
    columns: i32,
    first: i32,
}

/// Runs a kernel on a range of columns of bf16 `all` `[rows, width]` and on `part` `[rows, columns]`.
fn columns_of(
    kernel: Columns,
    all: DeviceSlice<'_>,
    width: usize,
    columns: Range<usize>,
    part: DeviceSlice<'_>,
) -> Result<()> {
    check_width("columns", columns.len())?;
    check_width("the columns before them", columns.start.max(WIDTH))?;
    check_width("rows with columns", width)?;
    let rows = bf16_elements(part) / columns.len();
    expect_bf16("rows with columns", all, &[rows, width])?;
    expect_bf16("columns", part, &[rows, columns.len()])?;
    let pieces = rows * columns.len() / PIECE;
    let arguments = ColumnArguments {
        all: all.address(),
        part: part.address(),
        pieces: pieces as u64,
        width: int("pieces of a row", width / PIECE)?,
        columns: int("pieces of columns", columns.len() / PIECE)?,
        first: int("pieces before columns", columns.start / PIECE)?,
    };
    let blocks = int("blocks", pieces.div_ceil(THREADS as usize))?;
    let launch = Launch::new([blocks as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(kernel).run(all.gpu(), &arguments) }
}

/// Copies a range of columns of `all` `[rows, width]` to bf16 `part` `[rows, columns]`. All column counts are multiples of 16.
pub fn copy_columns(
    all: DeviceSlice<'_>,
    width: usize,
    columns: Range<usize>,
    part: DeviceSlice<'_>,
) -> Result<()> {
    columns_of(Columns::Copy, all, width, columns, part)
}

/// Adds bf16 `part` `[rows, columns]` to a range of columns of `all` `[rows, width]`. All column counts are multiples of 16.
pub fn add_columns(
    all: DeviceSlice<'_>,
    width: usize,
    columns: Range<usize>,
    part: DeviceSlice<'_>,
) -> Result<()> {
    columns_of(Columns::Add, all, width, columns, part)
}
