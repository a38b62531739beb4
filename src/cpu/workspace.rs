//! Reusable scratch memory. One workspace serves one caller at a time, and grows to the largest call so far.

use crate::base::error::Result;
use crate::base::memory::{Buffer, Plain, Tag};

/// Scratch for the operations of [`super::Cpu`].
#[derive(Debug)]
pub struct Workspace {
    pub(super) tiles: Buffer<f32>,
    pub(super) panels: Buffer<f32>,
    pub(super) codes: Buffer<i8>,
    pub(super) scales: Buffer<f32>,
    pub(super) offsets: Buffer<i32>,
    pub(super) scores: Buffer<f32>,
}

impl Workspace {
    /// An empty workspace.
    pub fn new() -> Self {
        Workspace {
            tiles: empty(),
            panels: empty(),
            codes: empty(),
            scales: empty(),
            offsets: empty(),
            scores: empty(),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.tiles.bytes()
            + self.panels.bytes()
            + self.codes.bytes()
            + self.scales.bytes()
            + self.offsets.bytes()
            + self.scores.bytes()
    }
}

impl Default for Workspace {
    fn default() -> Self {
        Self::new()
    }
}

fn empty<T: Plain>() -> Buffer<T> {
    Buffer::zeroed(Tag::Scratch, 0).expect("an empty buffer allocates nothing")
}

/// Grows `buffer` to at least `len`, without keeping its content.
pub(super) fn grow<T: Plain>(buffer: &mut Buffer<T>, len: usize) -> Result<()> {
    if buffer.len() < len {
        *buffer = empty();
        *buffer = Buffer::zeroed(Tag::Scratch, len)?;
    }
    Ok(())
}
