//! Rows that each have an adapter of their own, or none, for products that apply them. See `kernels/linear/wide_adapted.cu`.

use super::driver::{DeviceBuffer, int};
use crate::base::Result;

/// Ranks of factors are multiples of this.
pub(super) const RANK_STEP: usize = 16;
/// Largest rank that such products take.
const MOST_RANK: usize = 64;
/// CTAs along K with the same A factors and rows.
pub(super) const PARTS: usize = 2;

/// How the rows of a pass are divided among adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterDivision {
    /// Tiles of up to 16 rows with the same adapter.
    pub tiles: usize,
    /// The largest rank of an adapter, or more: a power of two from 16 on.
    pub rank: usize,
}

impl AdapterDivision {
    /// Whether products apply such ranks themselves.
    pub(super) fn is_served(self) -> bool {
        self.rank <= MOST_RANK
    }

    /// CTAs that multiply by A factors for `matrices` matrices.
    pub(super) fn ctas(self, matrices: usize) -> usize {
        matrices * self.tiles * (self.rank / RANK_STEP) * PARTS
    }
}

/// The rows of a product by adapter, on the device.
#[derive(Clone, Copy)]
pub struct AdaptedRows<'a> {
    /// The tiles of all rows.
    pub(super) tiles: &'a DeviceBuffer,
    /// Products with A factors, f32 `[matrices, rows, PARTS, rank]`.
    pub(super) low: &'a DeviceBuffer,
    /// A counter of CTAs, 0 between launches.
    pub(super) counter: &'a DeviceBuffer,
    pub(super) division: AdapterDivision,
    /// The number of the first matrix among the projections of the model. The others follow.
    pub(super) first: usize,
}

#[repr(C)]
pub(super) struct AdaptedRowsArgument {
    tiles: u64,
    low: u64,
    counter: u64,
    tile_count: i32,
    blocks: i32,
    rank: i32,
    first: i32,
    factor: f32,
}

impl AdaptedRows<'_> {
    /// How the rows are divided.
    pub fn division(&self) -> AdapterDivision {
        self.division
    }

    /// The argument of a product of `rows` rows, which were divided by `factor`, with `matrices` matrices. The first `blocks`
    /// CTAs of the grid's first dimension multiply by A factors.
    pub(super) fn argument(
        &self,
        (rows, matrices): (usize, usize),
        blocks: usize,
        factor: f32,
    ) -> Result<AdaptedRowsArgument> {
        let AdapterDivision { tiles, rank } = self.division;
        let low = [matrices, rows, PARTS, rank, 4];
        self.low.holds("products of A factors", &low)?;
        Ok(AdaptedRowsArgument {
            tiles: self.tiles.address(),
            low: self.low.address(),
            counter: self.counter.address(),
            tile_count: int("tiles of rows", tiles)?,
            blocks: int("CTAs", blocks)?,
            rank: int("a rank", rank)?,
            first: int("a projection", self.first)?,
            factor,
        })
    }
}
