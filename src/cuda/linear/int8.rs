//! Launchers around cuBLASLt for many rows with an int8 weight: codes to f16 before, scales of the weight's rows after.

use super::matrix::Matrix;
use crate::base::Result;
use crate::cuda::driver::{Gpu, Launch, int};
use crate::cuda::units::Unit;

/// Argument structs of this file's kernels, by name.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("linear_int8_to_f16", size_of::<HalvesArguments>()),
    ("linear_int8_scale", size_of::<ScaleArguments>()),
];

const THREADS: u32 = 256;
/// Codes that a thread of the conversion takes.
const CODES: usize = 16;

#[repr(C)]
struct HalvesArguments {
    codes: u64,
    out: u64,
    pieces: u64,
}

#[repr(C)]
struct ScaleArguments {
    y: u64,
    scales: u64,
    width: i32,
    stride: i32,
}

/// Enqueues the codes of `rows` rows of `w` from `first` on, as f16, to the address `out`.
///
/// # Safety
/// `w` must be int8 and have the rows, and there must be room for them.
pub(super) unsafe fn to_halves(
    gpu: &Gpu,
    w: &Matrix,
    first: usize,
    rows: usize,
    out: u64,
) -> Result<()> {
    let pieces = rows * w.cols / CODES;
    let arguments = HalvesArguments {
        codes: w.address() + (first * w.cols) as u64,
        out,
        pieces: pieces as u64,
    };
    let grid = [
        int("a weight", pieces.div_ceil(THREADS as usize))? as u32,
        1,
        1,
    ];
    // SAFETY: the struct is the kernel's; the rest is the caller's promise.
    unsafe {
        Launch::new(grid, THREADS).run(gpu, Unit::LinearInt8, "linear_int8_to_f16", &arguments)
    }
}

/// Multiplies products of `m` rows with `rows` rows of `w` from `first` on, f32 at the address `y` and `stride` apart, by the scales of the
/// latter.
///
/// # Safety
/// `w` must be int8 and have the rows, and `y` must hold the products.
pub(super) unsafe fn scale_products(
    gpu: &Gpu,
    w: &Matrix,
    first: usize,
    rows: usize,
    y: u64,
    m: usize,
    stride: usize,
) -> Result<()> {
    let arguments = ScaleArguments {
        y,
        scales: w.scales_address() + (first * 4) as u64,
        width: int("output features", rows)?,
        stride: int("the stride of a product", stride)?,
    };
    let grid = [(rows as u32).div_ceil(THREADS), m as u32, 1];
    // SAFETY: the struct is the kernel's; the rest is the caller's promise.
    unsafe {
        Launch::new(grid, THREADS).run(gpu, Unit::LinearInt8, "linear_int8_scale", &arguments)
    }
}
