//! Small kernels around the products: embedding, norm, activation, bias.

use std::sync::Arc;

use super::gpu::{Gpu, int};
use super::launch::Launch;
use super::linear::{Layout, MLP_SCALE, Storage};
use super::memory::DeviceBuffer;
use super::nvrtc::Unit;
use crate::base::Result;
use crate::base::error::bail;
use crate::format::nvfp4::BLOCK;

const THREADS: u32 = 256;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("embed", size_of::<EmbedArguments>()),
    ("rms_norm", size_of::<NormArguments>()),
    ("swiglu", size_of::<SwigluArguments>()),
    ("add_bias", size_of::<BiasArguments>()),
    ("f16_to_bf16", size_of::<ConvertArguments>()),
    ("bf16_to_f16", size_of::<RowsArguments>()),
];

fn blocks(elements: usize) -> u32 {
    (elements as u32).div_ceil(THREADS)
}

#[repr(C)]
struct EmbedArguments {
    tokens: u64,
    table: u64,
    out: u64,
    global: f32,
    kind: i32,
    width: i32,
}

/// A table of rows of `width` values.
pub(super) struct TableArgument {
    pub(super) address: u64,
    pub(super) global: f32,
    pub(super) storage: Storage,
    pub(super) width: usize,
}

/// See `table`.
pub(super) fn embed(
    gpu: &Gpu,
    table: &TableArgument,
    tokens: &DeviceBuffer,
    rows: usize,
    out: &DeviceBuffer,
) -> Result<()> {
    let width = table.width;
    tokens.holds("tokens", &[rows * 4])?;
    out.holds("embeddings", &[rows * width * 4])?;
    let arguments = EmbedArguments {
        tokens: tokens.address(),
        table: table.address,
        out: out.address(),
        global: table.global,
        kind: match table.storage {
            Storage::F32 => 0,
            Storage::F16 => 1,
            Storage::BF16 => 2,
            Storage::Nvfp4 => 3,
        },
        width: int("the hidden size", width)?,
    };
    let launch = Launch::new([blocks(width), rows as u32, 1], THREADS);
    // SAFETY: the struct is the kernel's; sizes were checked; tokens are the caller's word, checked before they are written.
    unsafe { launch.run(gpu, Unit::Embed, "embed", &arguments) }
}

#[repr(C)]
struct NormArguments {
    x: u64,
    weight: u64,
    y: u64,
    factors: u64,
    width: i32,
    eps: f32,
}

/// RMSNorm of f32 rows of `width` from byte `at` of `x` on, to f16 `y` in this layout; and what each was multiplied by to `factors`,
/// f32 `[rows]`.
pub fn rms_norm(
    gpu: &Gpu,
    x: &DeviceBuffer,
    at: usize,
    weight: &DeviceBuffer,
    eps: f32,
    rows: usize,
    width: usize,
    y: &DeviceBuffer,
    layout: Layout,
    factors: Option<&DeviceBuffer>,
) -> Result<()> {
    if let Some(factors) = factors {
        factors.holds("factors", &[rows, 4])?;
    }
    x.holds("rows", &[at + rows * width * 4])?;
    weight.holds("a norm", &[width * 4])?;
    y.holds("normalised rows", &[layout.elements(rows, width), 2])?;
    let (name, multiple) = match layout {
        Layout::Rows => ("rms_norm", 4),
        Layout::Ordered => ("rms_norm_ordered", BLOCK),
    };
    if !width.is_multiple_of(multiple) {
        bail!(
            Unsupported,
            "rows of {width}; the norm takes multiples of {multiple}"
        );
    }
    let arguments = NormArguments {
        x: x.address() + at as u64,
        weight: weight.address(),
        y: y.address(),
        factors: factors.map_or(0, DeviceBuffer::address),
        width: int("the hidden size", width)?,
        eps,
    };
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe { Launch::new([rows as u32, 1, 1], THREADS).run(gpu, Unit::RmsNorm, name, &arguments) }
}

#[repr(C)]
struct SwigluArguments {
    gate_up: u64,
    y: u64,
    width: i32,
    scale: f32,
}

/// silu(gate) * up: f16 `[rows, 2 width]` to f16 `[rows, width]`, divided by [`MLP_SCALE`].
pub fn swiglu(
    gpu: &Arc<Gpu>,
    gate_up: &DeviceBuffer,
    rows: usize,
    width: usize,
    y: &DeviceBuffer,
) -> Result<()> {
    gate_up.holds("gate and up", &[rows * width * 4])?;
    y.holds("activations", &[rows * width * 2])?;
    if !width.is_multiple_of(8) {
        bail!(Unsupported, "rows of {width}; SwiGLU takes multiples of 8");
    }
    let arguments = SwigluArguments {
        gate_up: gate_up.address(),
        y: y.address(),
        width: int("the intermediate size", width)?,
        scale: 1.0 / MLP_SCALE,
    };
    let launch = Launch::new([blocks(width / 8), rows as u32, 1], THREADS);
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe { launch.run(gpu, Unit::Swiglu, "swiglu", &arguments) }
}

#[repr(C)]
struct BiasArguments {
    y: u64,
    bias: u64,
    width: i32,
    stride: i32,
    is_f16: i32,
}

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
    // SAFETY: the struct is the kernel's; the caller checked the rows.
    unsafe { launch.run(gpu, Unit::Swiglu, "add_bias", &arguments) }
}

#[repr(C)]
struct ConvertArguments {
    x: u64,
    y: u64,
    pairs: u64,
}

/// Rounds `count` f16, an even number, to bf16.
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
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe {
        Launch::new([blocks(count / 2), 1, 1], THREADS).run(
            gpu,
            Unit::Swiglu,
            "f16_to_bf16",
            &arguments,
        )
    }
}

#[repr(C)]
struct RowsArguments {
    y: u64,
    width: i32,
    stride: i32,
}

/// Makes f16 of the bf16 in `rows` rows of `width` at the address `y`, `stride` apart.
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
    // SAFETY: the struct is the kernel's; the caller checked the rows.
    unsafe { launch.run(gpu, Unit::Swiglu, "bf16_to_f16", &arguments) }
}
