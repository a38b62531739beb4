//! Gated linear units and biases on bf16 rows, forward and backward.

use super::super::driver::{DeviceSlice, Launch, int};
use super::super::linear::Activation;
use super::array::{PartialSums, add_partial_sums};
use super::sizes::{PIECE, expect_bf16, expect_f32, expect_room, f32_elements, rows};
use crate::base::Result;
use crate::cuda::kernel::kernels;

kernels! {
    /// The gated linear unit.
    enum Glu(GluArguments) {
        ActivationTraining {
            Forward = "train_glu",
            Backward = "train_glu_backward",
        }
    }

    /// Biases.
    enum Bias(BiasArguments) {
        ActivationTraining {
            Add = "train_add_bias",
            Sums = "train_column_sums",
        }
    }
}

const THREADS: u32 = 256;
/// Column sums: pieces of a row per CTA, rows at a time, and the upper limit of CTAs along rows.
const COLUMN_PIECES: usize = 32;
const COLUMN_ROWS: usize = 8;
const MOST_ROW_BLOCKS: usize = 64;

/// A launch with a thread for each piece of `rows` rows.
fn pieces_of_rows(rows: usize, width: usize) -> Result<Launch> {
    let blocks = (width / PIECE).div_ceil(THREADS as usize) as u32;
    let rows = int("rows", rows)? as u32;
    Ok(Launch::new([rows, blocks, 1], THREADS))
}

#[repr(C)]
struct GluArguments {
    gate_up: u64,
    dy: u64,
    d_gate_up: u64,
    y: u64,
    width: i32,
    activation: i32,
}

/// `y = act(gate) * up`: bf16 `gate_up` `[T, 2 width]`, each row gate then up, to bf16 `y` `[T, width]`. `width` is a multiple of 16.
pub fn glu_forward(
    activation: Activation,
    gate_up: DeviceSlice<'_>,
    width: usize,
    y: DeviceSlice<'_>,
) -> Result<()> {
    let rows = rows("a gated unit", y, width)?;
    expect_bf16("gate and up", gate_up, &[rows, 2, width])?;
    let arguments = GluArguments {
        gate_up: gate_up.address(),
        dy: 0,
        d_gate_up: 0,
        y: y.address(),
        width: int("the width of a gated unit", width)?,
        activation: activation as i32,
    };
    let launch = pieces_of_rows(rows, width)?;
    // SAFETY: sizes were checked.
    unsafe { launch.of(Glu::Forward).run(y.gpu(), &arguments) }
}

/// The backward pass of [`glu_forward`], from `dy` `[T, width]`, the gradients of its results. `d_gate_up` `[T, 2 width]`, which may be
/// `gate_up`, becomes `dy * up * act'(gate)` and `dy * act(gate)`. `y`, which may be `dy`, becomes the recomputed results.
pub fn glu_backward(
    activation: Activation,
    gate_up: DeviceSlice<'_>,
    width: usize,
    dy: DeviceSlice<'_>,
    d_gate_up: DeviceSlice<'_>,
    y: Option<DeviceSlice<'_>>,
) -> Result<()> {
    let rows = rows("gradients of a gated unit", dy, width)?;
    expect_bf16("gate and up", gate_up, &[rows, 2, width])?;
    expect_bf16("gradients of gate and up", d_gate_up, &[rows, 2, width])?;
    if let Some(y) = y {
        expect_bf16("a gated unit", y, &[rows, width])?;
    }
    let arguments = GluArguments {
        gate_up: gate_up.address(),
        dy: dy.address(),
        d_gate_up: d_gate_up.address(),
        y: y.map_or(0, |y| y.address()),
        width: int("the width of a gated unit", width)?,
        activation: activation as i32,
    };
    let launch = pieces_of_rows(rows, width)?;
    // SAFETY: sizes were checked.
    unsafe { launch.of(Glu::Backward).run(dy.gpu(), &arguments) }
}

#[repr(C)]
struct BiasArguments {
    x: u64,
    bias: u64,
    partial: u64,
    rows: i32,
    width: i32,
}

/// `x += bias` for bf16 rows `x` `[T, W]` and f32 `bias` `[W]`. W is a multiple of 16.
pub fn add_bias_rows(x: DeviceSlice<'_>, bias: DeviceSlice<'_>) -> Result<()> {
    let width = f32_elements(bias);
    let rows = rows("rows with a bias", x, width)?;
    expect_f32("a bias", bias, &[width])?;
    let arguments = BiasArguments {
        x: x.address(),
        bias: bias.address(),
        partial: 0,
        rows: int("rows", rows)?,
        width: int("the width of a bias", width)?,
    };
    let launch = pieces_of_rows(rows, width)?;
    // SAFETY: sizes were checked.
    unsafe { launch.of(Bias::Add).run(x.gpu(), &arguments) }
}

fn row_blocks(rows: usize) -> usize {
    rows.div_ceil(COLUMN_ROWS).min(MOST_ROW_BLOCKS)
}

/// f32 elements of the partial sums of [`column_sums`].
pub fn column_sums_partial(rows: usize, width: usize) -> usize {
    row_blocks(rows) * width
}

/// `out += sum of rows`: the gradient of a bias, f32 `out` `[W]`, from bf16 rows `x` `[T, W]`. `partial` has room for
/// [`column_sums_partial`] elements. W is a multiple of 16.
pub fn column_sums(
    x: DeviceSlice<'_>,
    partial: DeviceSlice<'_>,
    out: DeviceSlice<'_>,
) -> Result<()> {
    let width = f32_elements(out);
    let rows = rows("rows that are added up", x, width)?;
    let blocks = row_blocks(rows);
    expect_room("partial sums of columns", partial, &[blocks, width])?;
    let arguments = BiasArguments {
        x: x.address(),
        bias: 0,
        partial: partial.address(),
        rows: int("rows", rows)?,
        width: int("the width of a sum", width)?,
    };
    let columns = (width / PIECE).div_ceil(COLUMN_PIECES) as u32;
    let launch = Launch::new([columns, blocks as u32, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe {
        launch.of(Bias::Sums).run(x.gpu(), &arguments)?;
    }
    let partial = PartialSums {
        partial,
        parts: blocks,
        stride: width,
        first: 0,
    };
    add_partial_sums(&partial, out, width)
}
