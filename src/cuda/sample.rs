//! The likeliest token on the device, so that the host reads one number.

use std::sync::Arc;

use super::gpu::{Gpu, int};
use super::launch::Launch;
use super::memory::{DeviceBuffer, Pinned};
use super::nvrtc::Unit;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;

/// Blocks that share a row of logits.
const BLOCKS: usize = 64;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[("argmax", size_of::<Arguments>())];

#[repr(C)]
struct Arguments {
    logits: u64,
    best_value: u64,
    best_token: u64,
    arrived: u64,
    tokens: u64,
    positions: u64,
    history: u64,
    vocabulary: i32,
    history_steps: i32,
}

/// Memory in which blocks compare what they found.
#[derive(Debug)]
pub struct Best {
    values: DeviceBuffer,
    tokens: DeviceBuffer,
    arrived: DeviceBuffer,
    rows: usize,
}

impl Best {
    /// Room for `rows` rows.
    pub fn new(gpu: &Arc<Gpu>, rows: usize) -> Result<Best> {
        Ok(Best {
            values: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows * BLOCKS * 4)?,
            tokens: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, rows * BLOCKS * 4)?,
            arrived: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, rows * 4)?,
            rows,
        })
    }
}

/// Writes the likeliest token (i32) of each of `rows` rows of f32 logits to `tokens`. With `next`, moves `positions` (i32) on
/// by one and notes the token in `history` (i32 `[steps, rows]`, where the host reads it) at the new position modulo the
/// steps.
pub fn argmax(
    gpu: &Gpu,
    logits: &DeviceBuffer,
    rows: usize,
    vocabulary: usize,
    best: &Best,
    tokens: &DeviceBuffer,
    next: Option<(&DeviceBuffer, &Pinned)>,
) -> Result<()> {
    let steps = next.map_or(0, |(_, history)| history.bytes().len() / 4 / rows.max(1));
    if rows > best.rows
        || logits.bytes() < rows * vocabulary * 4
        || tokens.bytes() < rows * 4
        || (next.is_some() && steps == 0)
    {
        bail!(
            Internal,
            "buffers of the sampler are too small for {rows} rows"
        );
    }
    let arguments = Arguments {
        logits: logits.address(),
        best_value: best.values.address(),
        best_token: best.tokens.address(),
        arrived: best.arrived.address(),
        tokens: tokens.address(),
        positions: next.map_or(0, |(positions, _)| positions.address()),
        history: next.map_or(0, |(_, history)| history.address()),
        vocabulary: int("the vocabulary", vocabulary)?,
        history_steps: int("steps", steps)?,
    };
    // SAFETY: the struct is the kernel's; sizes were checked.
    unsafe {
        Launch::new([BLOCKS as u32, rows as u32, 1], 256).run(
            gpu,
            Unit::Argmax,
            "argmax",
            &arguments,
        )
    }
}
