//! RMSNorm without a kernel of its own: the fused kernel that makes rows leaves what the norm of them takes, and the ones that take
//! them apply its factor at their end. `kernels/norm/deferred.cuh` has how.

use std::sync::Arc;

use super::limits::SMALL;
use super::output::{Layout, Output};
use super::tile::Tile;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::cuda::driver::{DeviceBuffer, Gpu, int};

/// Rows are multiples of this many elements: sums of squares, one for each tile, are read four at a time.
pub(super) const MULTIPLE: usize = 64;

/// What passes between products around a norm, of up to [`SMALL`] rows.
pub struct NormScratch {
    width: usize,
    rows: DeviceBuffer,
    squares: DeviceBuffer,
    factors: [DeviceBuffer; 2],
}

impl NormScratch {
    /// For rows of `width`.
    pub fn new(gpu: &Arc<Gpu>, width: usize) -> Result<NormScratch> {
        let scratch = |elements: usize, bytes: usize| {
            DeviceBuffer::uninit(gpu, Tag::DeviceScratch, elements * bytes)
        };
        let squares = SMALL * width.div_ceil(Tile::Split.features());
        Ok(NormScratch {
            width,
            rows: scratch(Layout::Ordered.elements(SMALL, width), 2)?,
            squares: scratch(squares, 4)?,
            factors: [scratch(SMALL, 4)?, scratch(SMALL, 4)?],
        })
    }

    /// Where a norm that another kernel applies leaves the factor of each row, f32, for the deferred norm after it.
    pub fn factors(&self, turn: usize) -> &DeviceBuffer {
        &self.factors[turn % 2]
    }
}

/// A norm that products apply. Every norm of rows has its turn, and one that is deferred takes up where the one before has left off.
#[derive(Clone, Copy)]
pub struct DeferredNorm<'a> {
    /// The same for all norms of the rows.
    pub scratch: &'a NormScratch,
    /// Odd or even, in turns.
    pub turn: usize,
    /// The rows themselves, f32 `[m, width]`.
    pub x: &'a DeviceBuffer,
    /// f32 `[width]`.
    pub weight: &'a DeviceBuffer,
    /// Added to the mean square.
    pub eps: f32,
}

/// What the fused kernel knows of a norm: that of its result, or of its input.
#[repr(C)]
#[derive(Default)]
pub(super) struct NormArgument {
    weight: u64,
    squares: u64,
    before: u64,
    tiles: i32,
    rows: u64,
    factors: u64,
    x: u64,
    eps: f32,
}

impl DeferredNorm<'_> {
    /// Elements of a row.
    pub(super) fn width(&self) -> usize {
        self.scratch.width
    }

    /// The rows as the fused kernel takes them.
    pub(super) fn rows(&self) -> &DeviceBuffer {
        &self.scratch.rows
    }

    pub(super) fn argument(&self, m: usize) -> Result<NormArgument> {
        let width = self.scratch.width;
        self.x.holds("rows", &[m, width, 4])?;
        self.weight.holds("a norm", &[width, 4])?;
        if m > SMALL || !width.is_multiple_of(MULTIPLE) {
            bail!(
                Internal,
                "a deferred norm of {m} rows of {width}; it takes up to {SMALL} rows of a multiple of {MULTIPLE}"
            );
        }
        Ok(NormArgument {
            weight: self.weight.address(),
            squares: self.scratch.squares.address(),
            before: self.scratch.factors(self.turn + 1).address(),
            tiles: int("tiles", width / Tile::of(Output::Add, m).features())?,
            rows: self.scratch.rows.address(),
            factors: self.scratch.factors(self.turn).address(),
            x: self.x.address(),
            eps: self.eps,
        })
    }
}
