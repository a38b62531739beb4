//! Rings of pages in shared memory, through which kernels read keys and values.

use crate::cuda::heads::PAGE;
use crate::cuda::linear::Hardware;
use crate::cuda::units::Unit;
use crate::tensor::KvType;

/// Query heads that one CTA of the decode kernel serves.
pub(super) const BLOCK_HEADS: usize = 8;
/// The widest heads that kernels take by whole pages; wider ones are taken by half pages.
pub(super) const WHOLE_PAGE_DIM: usize = 256;

/// Positions of a page that the kernels take at a time, for heads of `dim` elements.
const fn stage_positions(dim: usize) -> usize {
    if dim > WHOLE_PAGE_DIM { PAGE / 2 } else { PAGE }
}

/// Bytes of a stage: one head's keys and values, and their scales.
pub(super) const fn stage_bytes(dim: usize, kv: KvType) -> usize {
    2 * stage_positions(dim) * kv.vector_bytes(dim)
}

/// A variant of the decode kernel, chosen by the number of CTAs without split-KV. Pages are those of f16; of keys and values in 8 bits a ring
/// has twice as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ring {
    /// For few CTAs: a ring of four pages, two of which are processed at a time.
    Four,
    /// For more CTAs: a ring of two pages, which leaves shared memory to CTAs of other kernels. Half pages of the widest heads.
    Two,
    /// For so many CTAs that several share a multiprocessor: a single page, or half page. Also for wide heads, for which a longer ring
    /// does not fit.
    One,
    /// `Two` with the two CTAs of a sequence in a cluster.
    Cluster,
    /// For few CTAs with few positions each, of heads for which a ring of four does not fit: a ring of two pages, both of which are
    /// processed at a time.
    Pair,
}

impl Ring {
    pub(super) fn of(hardware: &Hardware, blocks: usize, dim: usize) -> Ring {
        let Hardware {
            multiprocessors,
            shared_limit,
            ..
        } = *hardware;
        let fits = |ring: Ring, dim| ring.shared(dim, KvType::F16) <= shared_limit;
        let ring = if blocks > multiprocessors || !fits(Ring::Four, 128) {
            Ring::One
        } else if 2 * blocks > multiprocessors {
            Ring::Two
        } else {
            Ring::Four
        };
        // The ring must be shorter for wider heads to fit.
        let shorter = [ring, Ring::Two, Ring::One];
        let fitting = shorter
            .into_iter()
            .find(|&f| f.pages() <= ring.pages() && fits(f, dim));
        fitting.unwrap_or(Ring::One)
    }

    /// The variant of a unit for `blocks` CTAs in each of so many splits.
    pub(super) fn of_unit(
        hardware: &Hardware,
        unit: Unit,
        blocks: usize,
        dim: usize,
        splits: usize,
    ) -> Ring {
        let is_few = 2 * blocks <= hardware.multiprocessors;
        match Ring::of(hardware, blocks, dim) {
            // A single split of so few CTAs is short: see `DecodePlan::choose`.
            Ring::Two if unit == Unit::AttentionDecodeWide && is_few && splits == 1 => Ring::Pair,
            ring => ring,
        }
    }

    /// The variant that takes one page at a time: kernels with fixed splits have no others.
    pub(super) const fn one_at_a_time(self) -> Ring {
        match self {
            Ring::One => Ring::One,
            Ring::Four | Ring::Two | Ring::Cluster | Ring::Pair => Ring::Two,
        }
    }

    /// CTAs that share a multiprocessor.
    pub(super) const fn together(self) -> usize {
        match self {
            Ring::Four | Ring::Two | Ring::Cluster | Ring::Pair => 1,
            Ring::One => 4,
        }
    }

    /// Pages of the ring.
    const fn pages(self) -> usize {
        match self {
            Ring::Four => 4,
            Ring::Two | Ring::Cluster | Ring::Pair => 2,
            Ring::One => 1,
        }
    }

    pub(super) const fn threads(self) -> u32 {
        match self {
            Ring::Four | Ring::Pair => 256,
            Ring::Two | Ring::One | Ring::Cluster => 128,
        }
    }

    /// Shared memory of a CTA: the stages of the ring, and the state of the new token.
    pub(super) const fn shared(self, dim: usize, kv: KvType) -> usize {
        let stages = match kv {
            // Twice as many pages take about as many bytes.
            KvType::F8 => 2 * self.pages(),
            KvType::F16 | KvType::F32 => self.pages(),
        };
        stages * stage_bytes(dim, kv) + (BLOCK_HEADS + 2) * dim * 2 + 128
    }
}
