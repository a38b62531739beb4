//! The tiles of the skinny GEMM.

use super::matrix::{CHUNK_BYTES, CHUNK_K};
use super::output::Output;

/// Warps of a CTA.
pub(super) const WARPS: usize = 16;

/// Contents of the 16 rows of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 16 output features.
    Tall,
    /// 8 output features of each of two matrices.
    GateUp,
    /// 8 output features over two chunks of K. For up to four rows of activations.
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

    /// The tile of deterministic plans, whatever the rows.
    pub(super) fn in_ranges(output: Output) -> Tile {
        match output {
            Output::Glu(_) | Output::GluFragmentMajor(_) => Tile::GateUp,
            _ => Tile::Tall,
        }
    }

    /// K elements that a warp takes at a time.
    pub(super) const fn step(self) -> usize {
        match self {
            Tile::Tall | Tile::GateUp => CHUNK_K,
            Tile::Deep => 2 * CHUNK_K,
        }
    }

    /// Output features of a tile, per matrix.
    pub(super) const fn features(self) -> usize {
        match self {
            Tile::Tall => 16,
            Tile::GateUp | Tile::Deep => 8,
        }
    }

    /// Row capacity of the kernel for `rows` rows, which is part of the kernel's name.
    pub(super) const fn room(self, rows: usize) -> usize {
        match self {
            Tile::Deep | Tile::GateUp if rows == 1 => 1,
            Tile::Deep => 4,
            Tile::Tall | Tile::GateUp if rows <= 8 => 8,
            Tile::Tall | Tile::GateUp => 16,
        }
    }

    /// Bytes of the rings of a CTA's warps, whose stages hold two chunks.
    pub(super) const fn rings(self, rows: usize) -> usize {
        let stages = match (self, self.room(rows)) {
            (Tile::GateUp, 1) => 4,
            _ => 3,
        };
        WARPS * stages * 2 * CHUNK_BYTES
    }

    /// Cumulative tile counts, matrix by matrix.
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
