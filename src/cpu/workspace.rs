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

    /// Grows each part to at least its size, without keeping its content.
    pub(super) fn fit(&mut self, sizes: &WorkspaceSizes) -> Result<()> {
        grow(&mut self.tiles, sizes.tiles)?;
        grow(&mut self.panels, sizes.panels)?;
        grow(&mut self.codes, sizes.codes)?;
        grow(&mut self.scales, sizes.scales)?;
        grow(&mut self.offsets, sizes.offsets)?;
        grow(&mut self.scores, sizes.scores)
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

/// Elements of the parts of a workspace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkspaceSizes {
    pub(super) tiles: usize,
    pub(super) panels: usize,
    pub(super) codes: usize,
    pub(super) scales: usize,
    pub(super) offsets: usize,
    pub(super) scores: usize,
}

impl WorkspaceSizes {
    /// The sizes of a workspace that serves both.
    pub fn max(self, other: WorkspaceSizes) -> WorkspaceSizes {
        WorkspaceSizes {
            tiles: self.tiles.max(other.tiles),
            panels: self.panels.max(other.panels),
            codes: self.codes.max(other.codes),
            scales: self.scales.max(other.scales),
            offsets: self.offsets.max(other.offsets),
            scores: self.scores.max(other.scores),
        }
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> usize {
        let words = self.tiles + self.panels + self.scales + self.offsets + self.scores;
        words * size_of::<f32>() + self.codes
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
fn grow<T: Plain>(buffer: &mut Buffer<T>, len: usize) -> Result<()> {
    if buffer.len() < len {
        *buffer = empty();
        *buffer = Buffer::zeroed(Tag::Scratch, len)?;
    }
    Ok(())
}
