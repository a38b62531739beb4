//! Second moments of the inputs of GEMMs, for calibration.

use super::super::driver::{DeviceSlice, Launch, int};
use super::sizes::{expect_f32, rows};
use crate::base::Result;
use crate::cuda::kernel::kernels;
use crate::format::nvfp4::BLOCK;

kernels! {
    /// Adds second moments.
    enum InputMoments(MomentArguments) {
        InputMoments { Blocks = "train_input_moments" }
    }
}

const THREADS: u32 = (BLOCK * BLOCK) as u32;

#[repr(C)]
struct MomentArguments {
    x: u64,
    sums: u64,
    rows: i32,
    cols: i32,
}

/// Adds the outer products of bf16 inputs `x` `[rows, cols]` to f32 `sums` `[cols / 16, 16, 16]`. Sums are f32, in an order that depends
/// only on the number of rows.
pub fn add_input_moments(x: DeviceSlice<'_>, cols: usize, sums: DeviceSlice<'_>) -> Result<()> {
    let rows = rows("inputs", x, cols)?;
    expect_f32("sums of products of inputs", sums, &[cols, BLOCK])?;
    let arguments = MomentArguments {
        x: x.address(),
        sums: sums.address(),
        rows: int("inputs", rows)?,
        cols: int("the width of inputs", cols)?,
    };
    let blocks = int("the width of inputs", cols / BLOCK)? as u32;
    let launch = Launch::new([blocks, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(InputMoments::Blocks).run(x.gpu(), &arguments) }
}
