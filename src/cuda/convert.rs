//! Type conversions and the bias addition around GEMMs by cuBLASLt.

use super::driver::{DeviceBuffer, Gpu, Launch, int};
use super::kernel::kernels;
use crate::base::Result;

const THREADS: u32 = 256;

kernels! {
    /// Adds a bias to rows.
    enum AddBias(BiasArguments) {
        Glu { Rows = "add_bias" }
    }

    /// Rounds values.
    enum F16ToBf16(ConvertArguments) {
        Glu { Values = "f16_to_bf16" }
    }

    /// Converts rows in place.
    enum Bf16ToF16(RowsArguments) {
        Glu { Rows = "bf16_to_f16" }
    }
}

fn blocks(elements: usize) -> u32 {
    (elements as u32).div_ceil(THREADS)
}

#[repr(C)]
struct BiasArguments {
    y: u64,
    bias: u64,
    width: i32,
    stride: i32,
    is_f16: i32,
}

/// Adds `bias`, f32 `[width]`, to `rows` rows of `width` f16 or f32 at the address `y`, `stride` apart.
pub(super) fn add_bias_at(
    gpu: &Gpu,
    y: u64,
    is_f16: bool,
    rows: usize,
    width: usize,
    stride: usize,
    bias: &DeviceBuffer,
) -> Result<()> {
    bias.holds("a bias", &[width * 4])?;
    let arguments = BiasArguments {
        y,
        bias: bias.address(),
        width: int("the width", width)?,
        stride: int("the stride", stride)?,
        is_f16: i32::from(is_f16),
    };
    let launch = Launch::new([blocks(width), rows as u32, 1], THREADS);
    // SAFETY: the caller checked the rows.
    unsafe { launch.of(AddBias::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct ConvertArguments {
    x: u64,
    y: u64,
    pairs: u64,
}

/// Rounds `count` f16 values to bf16; `count` is even.
pub(super) fn f16_to_bf16(
    gpu: &Gpu,
    x: &DeviceBuffer,
    count: usize,
    y: &DeviceBuffer,
) -> Result<()> {
    x.holds("activations", &[2 * count])?;
    y.holds("activations", &[2 * count])?;
    let arguments = ConvertArguments {
        x: x.address(),
        y: y.address(),
        pairs: (count / 2) as u64,
    };
    // SAFETY: sizes were checked.
    unsafe {
        Launch::new([blocks(count / 2), 1, 1], THREADS)
            .of(F16ToBf16::Values)
            .run(gpu, &arguments)
    }
}

#[repr(C)]
struct RowsArguments {
    y: u64,
    width: i32,
    stride: i32,
}

/// Converts `rows` rows of `width` bf16 values at the address `y`, `stride` apart, to f16 in place.
pub(super) fn bf16_to_f16_at(
    gpu: &Gpu,
    y: u64,
    rows: usize,
    width: usize,
    stride: usize,
) -> Result<()> {
    let arguments = RowsArguments {
        y,
        width: int("the width", width)?,
        stride: int("the stride", stride)?,
    };
    let launch = Launch::new([blocks(width), rows as u32, 1], THREADS);
    // SAFETY: the caller checked the rows.
    unsafe { launch.of(Bf16ToF16::Rows).run(gpu, &arguments) }
}
