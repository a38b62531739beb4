//! Rounds the operands of training's GEMMs to NVFP4 or int8: see [`crate::format::operand`].

use super::super::driver::{DeviceSlice, Launch, int};
use super::sizes::{PIECE, check_width, expect_bf16, expect_room, pieces};
use crate::base::Result;
use crate::cuda::kernel::kernels;
use crate::format::operand::{OperandRounding, ROTATED, ScaleRule};

kernels! {
    /// Rounds rows.
    enum RoundRows(RowsArguments) {
        OperandTraining { Rows = "train_operand_rows" }
    }

    /// The maxima of columns.
    enum Maxima(MaximaArguments) {
        OperandTraining { Pieces = "train_operand_maxima" }
    }

    /// Rounds columns.
    enum RoundColumns(ColumnsArguments) {
        OperandTraining { Groups = "train_operand_columns" }
    }
}

const THREADS: u32 = 256;
/// f32 elements of scratch for [`round_columns`].
pub const OPERAND_MAXIMA: usize = 256;

#[repr(C)]
struct RowsArguments {
    x: u64,
    y: u64,
    key: u64,
    blocks: i32,
    rule: i32,
}

#[repr(C)]
struct MaximaArguments {
    x: u64,
    maxima: u64,
    pieces: u64,
}

#[repr(C)]
struct ColumnsArguments {
    x: u64,
    y: u64,
    maxima: u64,
    key: u64,
    rows: i32,
    pairs: i32,
    rule: i32,
}

/// The kernels' number of a rounding rule, and the key of its random bits.
fn rule_of(rounding: Option<OperandRounding>) -> (i32, u64) {
    match rounding {
        Some(OperandRounding::Nearest(ScaleRule::Amax)) => (0, 0),
        Some(OperandRounding::Nearest(ScaleRule::FourOverSix)) => (1, 0),
        Some(OperandRounding::Stochastic(key)) => (2, key),
        None => (3, 0),
    }
}

/// The kernels' number of int8 rows.
const INT8: i32 = 4;

/// Rounds bf16 `x` `[rows, width]` in blocks along rows, with one global scale per row, to `y` of the same size, which may be `x`. A row
/// with a value that is not finite becomes NaN.
pub fn round_rows(
    x: DeviceSlice<'_>,
    width: usize,
    rounding: OperandRounding,
    y: DeviceSlice<'_>,
) -> Result<()> {
    by_rows(x, width, rule_of(Some(rounding)), y)
}

/// Rounds the rows of bf16 `x` `[rows, width]` to int8 in place, each with its own scale. A row with a value that is not finite becomes
/// NaN.
pub fn round_int8_rows(x: DeviceSlice<'_>, width: usize) -> Result<()> {
    by_rows(x, width, (INT8, 0), x)
}

fn by_rows(
    x: DeviceSlice<'_>,
    width: usize,
    (rule, key): (i32, u64),
    y: DeviceSlice<'_>,
) -> Result<()> {
    check_width("an operand", width)?;
    let rows = pieces("an operand", x)? * PIECE / width;
    expect_bf16("an operand", x, &[rows, width])?;
    expect_bf16("a rounded operand", y, &[rows, width])?;
    let arguments = RowsArguments {
        x: x.address(),
        y: y.address(),
        key,
        blocks: int("blocks of a row", width / 16)?,
        rule,
    };
    let launch = Launch::new([int("rows", rows)? as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(RoundRows::Rows).run(x.gpu(), &arguments) }
}

/// Rotates bf16 `x` `[rows, width]` in groups of 16 rows, and writes it to `y`, whose number of rows is padded to a multiple of 16. If
/// `rounding` is given, also rounds it in blocks of those 16, with one global scale. Everything becomes NaN if any value is not finite.
/// `maxima` has room for [`OPERAND_MAXIMA`] elements.
pub fn round_columns(
    x: DeviceSlice<'_>,
    width: usize,
    rounding: Option<OperandRounding>,
    maxima: DeviceSlice<'_>,
    y: DeviceSlice<'_>,
) -> Result<()> {
    check_width("an operand", width)?;
    let pieces = pieces("an operand", x)?;
    let rows = pieces * PIECE / width;
    let groups = rows.div_ceil(ROTATED);
    expect_bf16("an operand", x, &[rows, width])?;
    expect_bf16("a rotated operand", y, &[groups * ROTATED, width])?;
    expect_room("maxima of an operand", maxima, &[OPERAND_MAXIMA])?;
    let arguments = MaximaArguments {
        x: x.address(),
        maxima: maxima.address(),
        pieces: pieces as u64,
    };
    let launch = Launch::new([OPERAND_MAXIMA as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe {
        launch.of(Maxima::Pieces).run(x.gpu(), &arguments)?;
    }
    let (rule, key) = rule_of(rounding);
    let arguments = ColumnsArguments {
        x: x.address(),
        y: y.address(),
        maxima: maxima.address(),
        key,
        rows: int("rows", rows)?,
        pairs: int("pairs of a row", width / 2)?,
        rule,
    };
    let blocks = (width / 2).div_ceil(THREADS as usize) as u32;
    let launch = Launch::new([blocks, int("groups of rows", groups)? as u32, 1], THREADS);
    // SAFETY: as above.
    unsafe { launch.of(RoundColumns::Groups).run(x.gpu(), &arguments) }
}
