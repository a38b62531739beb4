//! The tiles of the skinny GEMM.

use super::matrix::{CHUNK_BYTES, CHUNK_K};
use super::output::Output;

/// Warps of a block.
pub(super) const WARPS: usize = 16;

/// What the 16 rows of a tile are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 16 output features.
    Features,
    /// 8 output features of each of two matrices.
    Pair,
    /// 8 output features, in two halves of K; for up to four rows of activations.
    Split,
}

impl Tile {
    /// The tile for `m` rows of activations.
    pub(super) fn of(output: Output, m: usize) -> Tile {
        match output {
            Output::Glu(_) | Output::GluFragmentMajor(_) => Tile::Pair,
            _ if m <= 4 => Tile::Split,
            _ => Tile::Features,
        }
    }

    /// Elements of K that a warp takes at a time.
    pub(super) const fn step(self) -> usize {
        match self {
            Tile::Features | Tile::Pair => CHUNK_K,
            Tile::Split => 2 * CHUNK_K,
        }
    }

    /// Output features of a tile, of each matrix.
    pub(super) const fn features(self) -> usize {
        match self {
            Tile::Features => 16,
            Tile::Pair | Tile::Split => 8,
        }
    }

    /// Rows that the kernel for `rows` of them has room for, by which it is named.
    pub(super) const fn room(self, rows: usize) -> usize {
        match self {
            Tile::Split | Tile::Pair if rows == 1 => 1,
            Tile::Split => 4,
            Tile::Features | Tile::Pair if rows <= 8 => 8,
            Tile::Features | Tile::Pair => 16,
        }
    }

    /// What the rings of a block's warps take, of stages of two chunks.
    pub(super) const fn rings(self, rows: usize) -> usize {
        let stages = match (self, self.room(rows)) {
            (Tile::Pair, 1) => 4,
            _ => 3,
        };
        WARPS * stages * 2 * CHUNK_BYTES
    }

    /// How many tiles these matrices are up to each of them.
    pub(super) fn counts(self, features: &[usize]) -> Vec<usize> {
        let count = |n: &usize| n.div_ceil(self.features());
        match self {
            Tile::Pair => vec![count(&features[0])],
            Tile::Features | Tile::Split => features
                .iter()
                .scan(0, |sum, n| {
                    *sum += count(n);
                    Some(*sum)
                })
                .collect(),
        }
    }
}
