//! RMSNorm of bf16 rows, forward and backward.

use super::super::driver::{DeviceSlice, Launch, int};
use super::array::{PartialSums, add_partial_sums};
use super::sizes::{PIECE, expect_bf16, expect_f32, expect_room, f32_elements, rows};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::kernel::kernels;

kernels! {
    /// The norm.
    enum Norm(NormArguments) {
        NormTraining { Rows = "train_norm" }
    }

    /// Its backward pass.
    enum NormBackward(BackwardArguments) {
        NormTraining { Rows = "train_norm_backward" }
    }
}

/// Upper limit of elements of a row: a CTA has one thread per eight elements.
const MOST_WIDTH: usize = 8192;
/// Upper limit of CTAs that share the rows of a backward pass.
const MOST_BLOCKS: usize = 512;
const WARP: u32 = 32;

/// Threads of a CTA, in whole warps. Refuses rows that are too wide.
fn threads(width: usize) -> Result<u32> {
    if width > MOST_WIDTH {
        bail!(
            Unsupported,
            "training a norm of rows of {width} elements on a GPU, which takes up to {MOST_WIDTH}"
        );
    }
    Ok(((width / PIECE) as u32).next_multiple_of(WARP))
}

#[repr(C)]
struct NormArguments {
    x: u64,
    weight: u64,
    y: u64,
    width: i32,
    eps: f32,
}

/// `y = x / sqrt(mean(x^2) + eps) * weight`, row by row, for bf16 `x` and `y` `[T, W]` and f32 `weight` `[W]`. `y` may be `x`. W is a
/// multiple of 16 up to 8192.
pub fn rms_norm_forward(
    x: DeviceSlice<'_>,
    weight: DeviceSlice<'_>,
    eps: f32,
    y: DeviceSlice<'_>,
) -> Result<()> {
    let width = f32_elements(weight);
    let rows = rows("a norm", x, width)?;
    expect_f32("a norm's weight", weight, &[width])?;
    expect_bf16("normalized rows", y, &[rows, width])?;
    let arguments = NormArguments {
        x: x.address(),
        weight: weight.address(),
        y: y.address(),
        width: int("the width of a norm", width)?,
        eps,
    };
    let launch = Launch::new([int("rows", rows)? as u32, 1, 1], threads(width)?);
    // SAFETY: sizes were checked.
    unsafe { launch.of(Norm::Rows).run(x.gpu(), &arguments) }
}

fn blocks(rows: usize) -> usize {
    rows.min(MOST_BLOCKS)
}

/// Elements of [`RmsNormBackward::partial`] for rows `[T, W]`.
pub fn rms_norm_partial(rows: usize, width: usize) -> usize {
    blocks(rows) * width
}

/// Operands of [`rms_norm_backward`]: rows are bf16 `[T, W]`, the rest is f32. W is a multiple of 16 up to 8192.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward<'a> {
    /// The rows before the norm.
    pub x: DeviceSlice<'a>,
    /// The norm's weight, `[W]`.
    pub weight: DeviceSlice<'a>,
    /// Added to the mean square.
    pub eps: f32,
    /// Gradients of the normalized rows.
    pub dy: DeviceSlice<'a>,
    /// Gradients that reach `x` around the norm.
    pub residual: Option<DeviceSlice<'a>>,
    /// Gradients of `x`. May be the memory of `dy`, `residual` or `x`.
    pub dx: DeviceSlice<'a>,
    /// Room for [`rms_norm_partial`] elements.
    pub partial: DeviceSlice<'a>,
    /// The gradient of the weight, `[W]`, which is accumulated.
    pub dweight: DeviceSlice<'a>,
}

#[repr(C)]
struct BackwardArguments {
    x: u64,
    weight: u64,
    dy: u64,
    residual: u64,
    dx: u64,
    partial: u64,
    rows: i32,
    width: i32,
    eps: f32,
}

/// The backward pass of [`rms_norm_forward`]: with `r = 1 / sqrt(mean(x^2) + eps)` and `g = dy * weight`,
/// `dx = residual + r (g - x r^2 mean(g x))`, and `dweight += sum of dy * x * r` over the rows.
pub fn rms_norm_backward(norm: &RmsNormBackward<'_>) -> Result<()> {
    let width = f32_elements(norm.weight);
    let rows = rows("a norm", norm.x, width)?;
    let blocks = blocks(rows);
    expect_f32("a norm's weight", norm.weight, &[width])?;
    expect_bf16("gradients of normalized rows", norm.dy, &[rows, width])?;
    expect_bf16("gradients of rows", norm.dx, &[rows, width])?;
    if let Some(residual) = norm.residual {
        expect_bf16("gradients past a norm", residual, &[rows, width])?;
    }
    expect_room("partial sums of a norm", norm.partial, &[blocks, width])?;
    expect_f32("the gradient of a norm's weight", norm.dweight, &[width])?;
    let arguments = BackwardArguments {
        x: norm.x.address(),
        weight: norm.weight.address(),
        dy: norm.dy.address(),
        residual: norm.residual.map_or(0, |r| r.address()),
        dx: norm.dx.address(),
        partial: norm.partial.address(),
        rows: int("rows", rows)?,
        width: int("the width of a norm", width)?,
        eps: norm.eps,
    };
    let launch = Launch::new([blocks as u32, 1, 1], threads(width)?);
    // SAFETY: sizes were checked.
    unsafe {
        launch
            .of(NormBackward::Rows)
            .run(norm.x.gpu(), &arguments)?;
    }
    let partial = PartialSums {
        partial: norm.partial,
        parts: blocks,
        stride: width,
        first: 0,
    };
    add_partial_sums(&partial, norm.dweight, width)
}
