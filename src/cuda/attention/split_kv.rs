//! Split-KV: the division of a sequence's cached positions among CTAs, and the memory in which these combine their results.

use std::sync::Arc;

use super::ring::BLOCK_HEADS;
use crate::base::Result;
use crate::base::memory::Tag;
use crate::cuda::driver::{DeviceBuffer, Gpu};
use crate::cuda::heads::PAGE;

/// Upper limit of splits per sequence: one for each lane of the warp that combines them.
pub(super) const MOST_SPLITS: usize = 32;
/// Least pages of a split of [`SplitKv::Fixed`]: few enough that a single sequence keeps a device busy, and enough that partial results are a few
/// percent of what a split reads.
pub(super) const SPLIT_PAGES: usize = 4;

/// Split-KV: how the cached positions of each sequence are divided among CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitKv {
    /// 1 to 32 splits. Several splits exchange partial results through the workspace in global memory.
    Splits(usize),
    /// Two halves, one for each CTA of a two-CTA cluster.
    Cluster,
    /// Splits whose number follows from the positions that each sequence sees, at most this many: see [`SplitKv::fixed`].
    Fixed(usize),
}

impl SplitKv {
    /// Splits of four pages, or longer ones where there would be more than 32, for sequences that see up to `positions` positions. The bits
    /// of a sequence's attention then depend on that sequence alone.
    pub fn fixed(positions: usize) -> SplitKv {
        // A window may begin inside a split.
        let splits = positions.div_ceil(PAGE * SPLIT_PAGES) + 1;
        SplitKv::Fixed(splits.next_power_of_two().min(MOST_SPLITS))
    }

    pub(super) const fn splits(self) -> usize {
        match self {
            SplitKv::Splits(splits) | SplitKv::Fixed(splits) => splits,
            SplitKv::Cluster => 2,
        }
    }
}

/// CTAs of the decode kernel per sequence without split-KV.
pub(super) fn blocks(heads: usize, kv_heads: usize) -> usize {
    kv_heads * (heads / kv_heads).div_ceil(BLOCK_HEADS)
}

/// Split-KV workspace: partial results, and counters of the CTAs that have arrived.
#[derive(Debug)]
pub struct SplitKvWorkspace {
    pub(super) partial: DeviceBuffer,
    pub(super) arrived: DeviceBuffer,
}

impl SplitKvWorkspace {
    /// Floats of partial results of a sequence, and CTAs that attend to it, for heads of this shape.
    pub fn sizes(heads: usize, kv_heads: usize, dim: usize) -> (usize, usize) {
        let blocks = blocks(heads, kv_heads);
        (blocks * MOST_SPLITS * BLOCK_HEADS * (dim + 2), blocks)
    }

    /// Bytes of partial results, and of counters, of `sequences` sequences with [`SplitKvWorkspace::sizes`].
    const fn bytes((floats, blocks): (usize, usize), sequences: usize) -> [usize; 2] {
        [sequences * floats * 4, sequences * blocks * 4]
    }

    /// Bytes of a workspace for `sequences` sequences with [`SplitKvWorkspace::sizes`].
    pub fn bytes_of(sizes: (usize, usize), sequences: usize) -> usize {
        Self::bytes(sizes, sequences).iter().sum()
    }

    /// Allocates a workspace for `sequences` sequences with [`SplitKvWorkspace::sizes`].
    pub fn new(
        gpu: &Arc<Gpu>,
        sizes: (usize, usize),
        sequences: usize,
    ) -> Result<SplitKvWorkspace> {
        let [partial, arrived] = Self::bytes(sizes, sequences);
        Ok(SplitKvWorkspace {
            partial: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, partial)?,
            arrived: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, arrived)?,
        })
    }
}
