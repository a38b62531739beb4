//! The residual stream before each block, kept for activation recompute in the backward pass.

use crate::base::Result;
use crate::ops::{Array, Device, Mixed, Slice};

/// The inputs of all blocks, and the output of the last one.
#[derive(Debug)]
pub(super) struct Streams {
    /// Streams that stay on the device: all, or only the last one with offload.
    kept: Vec<Array<Mixed>>,
    /// The first block that the backward pass reaches.
    first: usize,
    /// The inputs of blocks in host memory, with offload.
    away: Vec<Array<Mixed>>,
    /// With offload, on the device: a block's input and output, alternating.
    near: [Array<Mixed>; 2],
}

impl Streams {
    /// Streams of a model with `blocks` blocks.
    pub(super) fn new(blocks: usize, offloads: bool) -> Streams {
        let empty = |count| (0..count).map(|_| Array::empty()).collect();
        Streams {
            kept: empty(if offloads { 1 } else { blocks + 1 }),
            first: 0,
            away: empty(Self::away(blocks, offloads)),
            near: [Array::empty(), Array::empty()],
        }
    }

    /// Number of streams in host memory.
    pub(super) fn away(blocks: usize, offloads: bool) -> usize {
        if offloads { blocks } else { 0 }
    }

    /// Number of streams on the device if the backward pass ends at block `first`.
    pub(super) fn kept(blocks: usize, offloads: bool, first: usize) -> usize {
        let shared = first.saturating_sub(1);
        if offloads { 3 } else { blocks + 1 - shared }
    }

    /// Sets the first block that the backward pass reaches, and frees the memory of all but two of the inputs before it.
    pub(super) fn begin_at(&mut self, first: usize) {
        self.first = first;
        if !self.offloads() {
            self.kept[..first.saturating_sub(1)].fill_with(Array::empty);
        }
    }

    /// Index of the stream that holds the input of a block: its own, or alternately one of two if the backward pass does not reach the
    /// block.
    fn place(&self, index: usize) -> usize {
        match index < self.first {
            true => self.first - (self.first - index) % 2,
            false => index,
        }
    }

    fn offloads(&self) -> bool {
        !self.away.is_empty()
    }

    /// The input of block `index`, or the output of the last block, on the device.
    pub(super) fn at(&self, index: usize) -> &Array<Mixed> {
        match self.offloads() {
            false => &self.kept[self.place(index)],
            true if index == self.away.len() => &self.kept[0],
            true => &self.near[index % 2],
        }
    }

    fn at_mut(&mut self, index: usize) -> &mut Array<Mixed> {
        match self.offloads() {
            false => {
                let place = self.place(index);
                &mut self.kept[place]
            }
            true if index == self.away.len() => &mut self.kept[0],
            true => &mut self.near[index % 2],
        }
    }

    /// Takes the stream of [`Streams::at`] for writing; [`Streams::put`] returns it.
    pub(super) fn take(&mut self, index: usize) -> Array<Mixed> {
        std::mem::replace(self.at_mut(index), Array::empty())
    }

    pub(super) fn put(&mut self, index: usize, stream: Array<Mixed>) {
        *self.at_mut(index) = stream;
    }

    /// After block `index` has run forward: offloads its input, of `len` elements, until the backward pass.
    pub(super) fn keep(&mut self, device: &Device, index: usize, len: usize) -> Result<()> {
        if !self.offloads() {
            return Ok(());
        }
        let (away, near) = (&mut self.away[index], &self.near[index % 2]);
        away.grow_offloaded(device, len)?;
        away.first_mut(len)?.copy_from(near.first(len)?)
    }

    /// Before block `index` is recomputed: copies its input back to the device.
    pub(super) fn fetch(&mut self, index: usize, len: usize) -> Result<()> {
        if !self.offloads() {
            return Ok(());
        }
        let from: Slice<'_, Mixed> = self.away[index].first(len)?;
        self.near[index % 2].first_mut(len)?.copy_from(from)
    }
}
