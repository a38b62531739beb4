//! The rows between a model and its drafter: hidden rows, and the input of the drafter's projection.

use super::driver::{DeviceBuffer, DeviceSlice, Gpu, Launch, Pinned, int};
use super::kernel::kernels;
use crate::base::Result;
use crate::base::error::bail;

kernels! {
    /// Hidden rows.
    enum Hidden(HiddenArguments) {
        DrafterRows { Rows = "drafter_hidden" }
    }

    /// Inputs of the drafter's projection.
    enum Inputs(InputArguments) {
        DrafterRows { Rows = "drafter_inputs" }
    }
}

const THREADS: u32 = 256;

#[repr(C)]
struct HiddenArguments {
    x: u64,
    weight: u64,
    hidden: u64,
    copies: u64,
    positions: u64,
    width: i32,
    steps: i32,
    eps: f32,
}

/// Copies of hidden rows in page-locked memory, f32 `[steps, rows, width]`: each at the row's position modulo the steps.
#[derive(Clone, Copy)]
pub struct HiddenCopies<'a> {
    /// The copies, which the host reads.
    pub rows: &'a Pinned,
    /// The number of steps.
    pub steps: usize,
    /// The position of each row, i32 `[rows]`.
    pub positions: &'a DeviceBuffer,
}

/// Writes the RMSNorm of `rows` f32 rows of `width` of the residual stream `x` to f32 `hidden` `[rows, width]`, and to `copies`.
pub fn drafter_hidden(
    gpu: &Gpu,
    x: &DeviceBuffer,
    (weight, eps): (&DeviceBuffer, f32),
    rows: usize,
    width: usize,
    hidden: DeviceSlice<'_>,
    copies: Option<HiddenCopies<'_>>,
) -> Result<()> {
    x.holds("rows", &[rows, width, 4])?;
    weight.holds("a norm", &[width, 4])?;
    hidden.holds("hidden rows", &[rows, width, 4])?;
    if let Some(copies) = copies {
        copies.positions.holds("positions", &[rows, 4])?;
        if copies.steps == 0 || copies.rows.bytes() / 4 / width.max(1) < copies.steps * rows {
            bail!(
                Internal,
                "{} bytes for {} copies of {rows} hidden rows of {width}",
                copies.rows.bytes(),
                copies.steps
            );
        }
    }
    let arguments = HiddenArguments {
        x: x.address(),
        weight: weight.address(),
        hidden: hidden.address(),
        copies: copies.map_or(0, |copies| copies.rows.address()),
        positions: copies.map_or(0, |copies| copies.positions.address()),
        width: int("the hidden size", width)?,
        steps: int("steps", copies.map_or(0, |copies| copies.steps))?,
        eps,
    };
    let launch = Launch::new([rows as u32, 1, 1], THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(Hidden::Rows).run(gpu, &arguments) }
}

#[repr(C)]
struct InputArguments {
    embeddings: u64,
    hidden: u64,
    sources: u64,
    embedding_norm: u64,
    hidden_norm: u64,
    y: u64,
    width: i32,
    eps: f32,
}

/// Writes to f16 `y` `[rows, 2 width]` the RMSNorm of each row of f32 `embeddings` `[rows, width]` beside that of a row of f32 `hidden`,
/// whose number `sources` (i32 `[rows]`) gives. `norms` are the weights of both norms, f32 `[width]`, that of embeddings first.
pub fn drafter_inputs(
    gpu: &Gpu,
    embeddings: &DeviceBuffer,
    (hidden, sources): (&DeviceBuffer, DeviceSlice<'_>),
    (norms, eps): ([&DeviceBuffer; 2], f32),
    rows: usize,
    width: usize,
    y: &DeviceBuffer,
) -> Result<()> {
    embeddings.holds("embeddings", &[rows, width, 4])?;
    sources.holds("numbers of hidden rows", &[rows, 4])?;
    for norm in norms {
        norm.holds("a norm", &[width, 4])?;
    }
    y.holds("inputs of a drafter", &[rows, 2 * width, 2])?;
    let arguments = InputArguments {
        embeddings: embeddings.address(),
        hidden: hidden.address(),
        sources: sources.address(),
        embedding_norm: norms[0].address(),
        hidden_norm: norms[1].address(),
        y: y.address(),
        width: int("the hidden size", width)?,
        eps,
    };
    let launch = Launch::new([rows as u32, 2, 1], THREADS);
    // SAFETY: sizes were checked; the caller vouches for the numbers of hidden rows.
    unsafe { launch.of(Inputs::Rows).run(gpu, &arguments) }
}
