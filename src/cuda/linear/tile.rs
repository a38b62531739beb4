//! The tiles of the skinny GEMM.

use super::matrix::{CHUNK_BYTES, CHUNK_K};
use super::output::Output;

/// Warps of a block.
pub(super) const WARPS: usize = 16;

/// What the 16 rows of a tile are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 16 output features.
    Tall,
    /// 8 output features of each of two matrices.
    GateUp,
    /// 8 output features over two chunks of K; for up to four rows of activations.
    Deep,
}

impl Tile {
    /// The tile for `m` rows of activations.
    pub(super) fn of(output: Output, m: usize) -> Tile {
        match output {
            Output::Glu(_) | Output::GluFragmentMajor(_) => Tile::GateUp,
            _ if m <= 4 => Tile::Deep,
            _ => Tile::Tall,
        }
    }

    /// Elements of K that a warp takes at a time.
    pub(super) const fn step(self) -> usize {
        match self {
            Tile::Tall | Tile::GateUp => CHUNK_K,
            Tile::Deep => 2 * CHUNK_K,
        }
    }

    /// Output features of a tile, of each matrix.
    pub(super) const fn features(self) -> usize {
        match self {
            Tile::Tall => 16,
            Tile::GateUp | Tile::Deep => 8,
        }
    }

    /// Rows that the kernel for `rows` of them has room for, by which it is named.
    pub(super) const fn room(self, rows: usize) -> usize {
        match self {
            Tile::Deep | Tile::GateUp if rows == 1 => 1,
            Tile::Deep => 4,
            Tile::Tall | Tile::GateUp if rows <= 8 => 8,
            Tile::Tall | Tile::GateUp => 16,
        }
    }

    /// What the rings of a block's warps take, of stages of two chunks.
    pub(super) const fn rings(self, rows: usize) -> usize {
        let stages = match (self, self.room(rows)) {
            (Tile::GateUp, 1) => 4,
            _ => 3,
        };
        WARPS * stages * 2 * CHUNK_BYTES
    }

    /// How many tiles these matrices are up to each of them.
    pub(super) fn counts(self, features: &[usize]) -> Vec<usize> {
        let count = |n: &usize| n.div_ceil(self.features());
        match self {
            Tile::GateUp => vec![count(&features[0])],
            Tile::Tall | Tile::Deep => features
                .iter()
                .scan(0, |sum, n| {
                    *sum += count(n);
                    Some(*sum)
                })
                .collect(),
        }
    }
}
