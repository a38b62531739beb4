//! Second moments of a GEMM's inputs, and their factors, for [`super::calibrated`].

use super::Cpu;
use super::training::by_parts;
use crate::base::Result;
use crate::format::calibrated::{BlockFactor, by_energy};
use crate::format::input_moments::BlockMoments;
use crate::format::nvfp4::BLOCK;
use crate::tensor::product::{GemmForm, Sizes};

/// Columns of a panel of the factorization.
const PANEL: usize = 64;

/// Second moments of a GEMM's inputs, as the search reads them.
#[derive(Debug)]
pub struct Moments {
    pub(super) all: Panels,
    /// Diagonal blocks, and their factors.
    pub(super) blocks: Vec<BlockMoments>,
    pub(super) factors: Vec<BlockFactor>,
}

/// The factor of second moments whose blocks of 16 are reordered.
#[derive(Debug)]
pub struct Factor {
    /// The blocks in their order of rounding.
    pub(super) order: Vec<usize>,
    pub(super) all: Panels,
    /// Diagonal blocks of the factor.
    pub(super) blocks: Vec<BlockFactor>,
}

/// A matrix `[cols, cols]` in panels of `width` columns: `[cols / width][cols][width]`.
#[derive(Debug)]
pub(super) struct Panels {
    pub(super) cols: usize,
    pub(super) width: usize,
    values: Vec<f32>,
}

impl Panels {
    fn new(cols: usize, width: usize, at: impl Fn(usize, usize) -> f32) -> Panels {
        let mut values = Vec::with_capacity(cols * cols);
        for first in (0..cols).step_by(width) {
            for row in 0..cols {
                values.extend((first..first + width).map(|col| at(row, col)));
            }
        }
        Panels {
            cols,
            width,
            values,
        }
    }

    /// Rows from `row` on, in the panel that begins with column `col`.
    pub(super) fn rows(&self, row: usize, col: usize) -> &[f32] {
        let panel = col / self.width * self.cols * self.width;
        &self.values[panel + row * self.width..panel + self.cols * self.width]
    }

    pub(super) fn at(&self, row: usize, col: usize) -> f32 {
        self.rows(row, col)[col % self.width]
    }

    /// The diagonal blocks.
    fn diagonal(&self) -> Vec<BlockMoments> {
        let of = |block: usize| {
            let first = block * BLOCK;
            std::array::from_fn(|i| self.at(first + i / BLOCK, first + i % BLOCK))
        };
        (0..self.cols / BLOCK).map(of).collect()
    }
}

impl Moments {
    /// The moments of each block of a row.
    pub fn blocks(&self) -> &[BlockMoments] {
        &self.blocks
    }
}

impl Cpu {
    /// Takes damped moments `[cols, cols]`, which are positive definite.
    pub fn moments(&self, moments: &[f32], cols: usize) -> Moments {
        let all = Panels::new(cols, self.table.moment_columns, |row, col| {
            moments[row * cols + col]
        });
        let blocks = all.diagonal();
        Moments {
            factors: blocks.iter().map(BlockFactor::of).collect(),
            blocks,
            all,
        }
    }

    /// Factorizes `[cols, cols]` moments, with the blocks of 16 inputs ordered by falling energy. `None` if they are not positive definite.
    pub fn factor(&self, moments: &[f32], cols: usize) -> Result<Option<Factor>> {
        let energy = |block: usize| -> f32 {
            let at = |i: usize| moments[(block * BLOCK + i) * (cols + 1)];
            (0..BLOCK).map(at).sum()
        };
        let order = by_energy(&(0..cols / BLOCK).map(energy).collect::<Vec<_>>());
        // The lower triangular factor of the matrix in reversed order, from its last row and column on.
        let at = |i: usize| {
            let i = cols - 1 - i;
            order[i / BLOCK] * BLOCK + i % BLOCK
        };
        let of = |row: usize, col: usize| moments[at(row) * cols + at(col)];
        let Some(lower) = self.cholesky(cols, &of)? else {
            return Ok(None);
        };
        let element = |row: usize, col: usize| {
            let (row, col) = (cols - 1 - row, cols - 1 - col);
            let width = PANEL.min(cols - col / PANEL * PANEL);
            match row >= col {
                true => lower[col / PANEL][(row - col / PANEL * PANEL) * width + col % PANEL],
                false => 0.0,
            }
        };
        let all = Panels::new(cols, self.table.moment_columns, element);
        let blocks = all.diagonal().into_iter().map(BlockFactor::new);
        Ok(Some(Factor {
            order,
            blocks: blocks.collect(),
            all,
        }))
    }

    /// The lower triangular factor `L` of a symmetric matrix, `A = L L^T`, in panels of [`PANEL`] columns that begin with their first row.
    /// `None` if the matrix is not positive definite.
    fn cholesky(
        &self,
        n: usize,
        of: &dyn Fn(usize, usize) -> f32,
    ) -> Result<Option<Vec<Vec<f32>>>> {
        let mut done: Vec<Vec<f32>> = Vec::new();
        for first in (0..n).step_by(PANEL) {
            let (width, rows) = (PANEL.min(n - first), n - first);
            // The matrix minus the products of earlier panels, negated because products are added.
            let mut left: Vec<f32> = (0..rows * width)
                .map(|i| -of(first + i / width, first + i % width))
                .collect();
            for (panel, before) in done.iter().enumerate() {
                let from = (first - panel * PANEL) * PANEL;
                let (a, sizes) = (&before[from..], Sizes::mnk(rows, width, PANEL));
                self.matmul(GemmForm::NT, sizes, a, &a[..width * PANEL], &mut left, true)?;
            }
            for j in 0..width {
                let known: f64 = (0..j).map(|k| f64::from(left[j * width + k]).powi(2)).sum();
                let square = -f64::from(left[j * width + j]) - known;
                if square.is_nan() || square <= 0.0 {
                    return Ok(None);
                }
                left[j * width + j] = square.sqrt() as f32;
                let (above, below) = left.split_at_mut((j + 1) * width);
                let own = &above[j * width..][..width];
                let inverse = 1.0 / own[j];
                let rest = below.chunks_exact_mut(width);
                rest.take(width - j - 1).for_each(|row| {
                    let known: f32 = (0..j).map(|k| row[k] * own[k]).sum();
                    row[j] = (-row[j] - known) * inverse;
                });
            }
            let (top, below) = left.split_at_mut(width * width);
            let top = &*top;
            by_parts(self.pool(), below, width, |_, row| {
                for j in 0..width {
                    let own = &top[j * width..][..width];
                    let known: f32 = (0..j).map(|k| row[k] * own[k]).sum();
                    row[j] = (-row[j] - known) / own[j];
                }
            });
            done.push(left);
        }
        Ok(Some(done))
    }
}
