//! Rows that each have an adapter of their own, or none, for products that apply them. See `kernels/linear/skinny/adapter.cuh` and
//! `kernels/linear/wide_adapted.cu`.

use std::fmt;

use super::limits::{NVFP4_MATRICES, SKINNY_ROWS};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, int};

/// Ranks of factors are multiples of this.
pub(in crate::cuda) const RANK_STEP: usize = 16;
/// Largest rank that such products take.
const MOST_RANK: usize = 64;
/// CTAs of wide tiles along K with the same A factors and rows.
pub(in crate::cuda) const PARTS: usize = 2;
/// Most parts along K whose products the CTAs of the skinny GEMM share.
pub(super) const SHARED_PARTS: usize = 4;
/// Areas in which launches of the skinny GEMM share products.
const AREAS: usize = 3;

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
    pub(in crate::cuda) tiles: &'a DeviceBuffer,
    /// Products with A factors, f32 `[matrices, rows, PARTS, rank]`.
    pub(in crate::cuda) low: &'a DeviceBuffer,
    /// A counter of CTAs, 0 between launches.
    pub(in crate::cuda) counter: &'a DeviceBuffer,
    /// Products with A factors that CTAs of the skinny GEMM share: see [`shared_bytes`].
    pub(in crate::cuda) shared: &'a DeviceBuffer,
    pub(in crate::cuda) division: AdapterDivision,
    /// The number of the first matrix among the projections of the model. The others follow.
    pub(in crate::cuda) first: usize,
    /// The projections of the product with adapters that follows, whose factors the skinny GEMM fetches.
    pub(in crate::cuda) next: NextProjections,
}

/// Projections with the same input.
#[derive(Clone, Copy, Debug, Default)]
pub struct NextProjections {
    /// The number of the first in an [`AdapterTable`](crate::cuda::AdapterTable). The others follow.
    pub first: usize,
    /// Elements of an input row.
    pub k: usize,
    /// Output features of each; none beyond the last.
    pub features: [usize; NVFP4_MATRICES],
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct NextFactorsArgument {
    first: i32,
    matrices: i32,
    k: i32,
    features: [i32; NVFP4_MATRICES],
}

impl NextProjections {
    fn argument(&self) -> Result<NextFactorsArgument> {
        let mut features = [0; NVFP4_MATRICES];
        for (to, &n) in features.iter_mut().zip(&self.features) {
            *to = int("output features", n)?;
        }
        Ok(NextFactorsArgument {
            first: int("a projection", self.first)?,
            matrices: self.features.iter().filter(|&&n| n > 0).count() as i32,
            k: int("K", self.k)?,
            features,
        })
    }
}

/// The areas of a launch of the skinny GEMM: its own, and that of the launch before it, whose numbers become pending again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharingTurn {
    own: usize,
    taken: usize,
}

impl SharingTurn {
    /// The turn of launch number `index` among the `count` of a pass. Passes follow each other: the last launch of each has an area that no other
    /// has. `None` for one that is alone.
    pub fn of(index: usize, count: usize) -> Option<SharingTurn> {
        let area = |index| {
            if index + 1 == count {
                AREAS - 1
            } else {
                index % (AREAS - 1)
            }
        };
        (count > 1).then(|| SharingTurn {
            own: area(index),
            taken: area(index.checked_sub(1).unwrap_or(count - 1)),
        })
    }
}

/// How a launch of the skinny GEMM applies the adapters of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AdaptedSkinny {
    pub(super) division: AdapterDivision,
    /// Parts of K whose products are shared.
    pub(super) parts: usize,
    /// Bytes of shared memory for copies of factors.
    pub(super) copies: usize,
    pub(super) turn: SharingTurn,
}

impl fmt::Display for AdaptedSkinny {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "A x in {} parts", self.parts)
    }
}

/// Bytes of an area, for ranks up to `rank`, a power of two.
const fn area_bytes(rank: usize) -> usize {
    NVFP4_MATRICES * SKINNY_ROWS * SHARED_PARTS * rank * 4
}

/// Bytes of the products that CTAs share, for ranks up to `rank`. All bits are ones at first: the numbers are pending.
pub(in crate::cuda) fn shared_bytes(rank: usize) -> usize {
    AREAS * area_bytes(rank.next_power_of_two().min(MOST_RANK))
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct LowProductsArgument {
    tiles: u64,
    values: u64,
    taken: u64,
    taken_pieces: i32,
    adapters: i32,
    matrices: i32,
    rank_shift: i32,
    part_shift: i32,
    first: i32,
    factor: f32,
    copies: i32,
    next: NextFactorsArgument,
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

    /// The argument of the skinny GEMM of rows that were divided by `factor` with `matrices` matrices, for K in `parts` parts and `copies` bytes of
    /// shared memory for factors.
    pub(super) fn shared(
        &self,
        matrices: usize,
        turn: SharingTurn,
        parts: usize,
        factor: f32,
        copies: usize,
    ) -> Result<LowProductsArgument> {
        let AdapterDivision { tiles, rank } = self.division;
        let bytes = self.shared.bytes() / AREAS;
        let fits = parts <= SHARED_PARTS && bytes >= area_bytes(rank);
        let are_powers = parts.is_power_of_two() && rank.is_power_of_two();
        if matrices > NVFP4_MATRICES || !fits || !are_powers {
            bail!(
                Internal,
                "{bytes} bytes for products of {matrices} A factors of rank {rank} in {parts} parts"
            );
        }
        let area = |number: usize| self.shared.address() + (number * bytes) as u64;
        Ok(LowProductsArgument {
            tiles: self.tiles.address(),
            values: area(turn.own),
            taken: area(turn.taken),
            taken_pieces: int("pieces of an area", bytes / 16)?,
            adapters: int("tiles of rows", tiles)?,
            matrices: matrices as i32,
            rank_shift: rank.trailing_zeros() as i32,
            part_shift: parts.trailing_zeros() as i32,
            first: int("a projection", self.first)?,
            factor,
            copies: int("bytes for factors", copies)?,
            next: self.next.argument()?,
        })
    }

    /// The argument of wide tiles for a product of `rows` rows, which were divided by `factor`, with `matrices` matrices. The first `blocks`
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
