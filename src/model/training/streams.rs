//! The residual stream as it enters blocks, which the backward pass begins again from.

use crate::base::Result;
use crate::ops::{Array, Device, Mixed, Slice};

/// The inputs of blocks, and the last one's results.
#[derive(Debug)]
pub(super) struct Streams {
    /// Those that stay on the device: all, or the last one alone.
    kept: Vec<Array<Mixed>>,
    /// The first block that the backward pass reaches.
    first: usize,
    /// The inputs of blocks in the host's memory, where those are offloaded.
    away: Vec<Array<Mixed>>,
    /// Then, on the device: the input of a block and its results, in turns.
    near: [Array<Mixed>; 2],
}

impl Streams {
    /// Of so many blocks.
    pub(super) fn new(blocks: usize, offloads: bool) -> Streams {
        let empty = |count| (0..count).map(|_| Array::empty()).collect();
        Streams {
            kept: empty(if offloads { 1 } else { blocks + 1 }),
            first: 0,
            away: empty(Self::away(blocks, offloads)),
            near: [Array::empty(), Array::empty()],
        }
    }

    /// How many are in the host's memory.
    pub(super) fn away(blocks: usize, offloads: bool) -> usize {
        if offloads { blocks } else { 0 }
    }

    /// How many are on the device, where the backward pass reaches as far as block `first`.
    pub(super) fn kept(blocks: usize, offloads: bool, first: usize) -> usize {
        let shared = first.saturating_sub(1);
        if offloads { 3 } else { blocks + 1 - shared }
    }

    /// Chooses the first block that the backward pass reaches, and gives back the memory of inputs before it but for two.
    pub(super) fn begin_at(&mut self, first: usize) {
        self.first = first;
        if !self.offloads() {
            self.kept[..first.saturating_sub(1)].fill_with(Array::empty);
        }
    }

    /// Where the input of a block is kept: in its own place, or in one of two in turns if the backward pass does not reach it.
    fn place(&self, index: usize) -> usize {
        match index < self.first {
            true => self.first - (self.first - index) % 2,
            false => index,
        }
    }

    fn offloads(&self) -> bool {
        !self.away.is_empty()
    }

    /// What enters block `index`, or leaves the last one, on the device.
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

    /// The same, to be written; [`Streams::put`] takes it back.
    pub(super) fn take(&mut self, index: usize) -> Array<Mixed> {
        std::mem::replace(self.at_mut(index), Array::empty())
    }

    pub(super) fn put(&mut self, index: usize, stream: Array<Mixed>) {
        *self.at_mut(index) = stream;
    }

    /// When block `index` has run forward: its input, of `len` elements, goes to where it stays for the backward pass.
    pub(super) fn keep(&mut self, device: &Device, index: usize, len: usize) -> Result<()> {
        if !self.offloads() {
            return Ok(());
        }
        let (away, near) = (&mut self.away[index], &self.near[index % 2]);
        away.grow_offloaded(device, len)?;
        away.first_mut(len)?.copy_from(near.first(len)?)
    }

    /// Before block `index` runs again: its input comes back.
    pub(super) fn fetch(&mut self, index: usize, len: usize) -> Result<()> {
        if !self.offloads() {
            return Ok(());
        }
        let from: Slice<'_, Mixed> = self.away[index].first(len)?;
        self.near[index % 2].first_mut(len)?.copy_from(from)
    }
}
