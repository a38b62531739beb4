//! Plain f32 GEMMs, in the three forms of training.

use super::rows::by_parts;
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;
use crate::tensor::product::{GemmForm, Sizes};

/// Columns of a panel, the lanes of a vector.
const COLUMNS: usize = 16;
/// Extent of k that is packed at a time: a panel with this many rows stays in the L1 cache.
const DEPTH: usize = 256;
/// Upper limit of rows of `a` per part of the work: large, because each part packs all of `b` for itself.
const ROWS: usize = 384;

/// The region of a product that is computed.
#[derive(Clone, Copy)]
enum Region {
    All,
    /// The diagonal and everything above it.
    Above,
}

impl Cpu {
    /// The product of `a` and `b` in the given `form`, stored in or added to `out` `[m, n]`. Every sum runs along k in parts of 256,
    /// independent of the level and the threads.
    pub fn matmul(
        &self,
        form: GemmForm,
        Sizes { m, n, k }: Sizes,
        a: &[f32],
        b: &[f32],
        out: &mut [f32],
        add: bool,
    ) -> Result<()> {
        if a.len() != m * k || b.len() != n * k || out.len() != m * n {
            bail!(
                Internal,
                "a product {form:?} of [{m}, {n}] over {k}: operands of {} and {} elements, and a result of {}",
                a.len(),
                b.len(),
                out.len()
            );
        }
        if !add {
            out.fill(0.0);
        }
        self.add_product(form, Sizes { m, n, k }, (a, b), out, Region::All);
        Ok(())
    }

    /// Adds the Gram matrix of the columns of `x` `[rows, cols]`, `x^T x`, to `out` `[cols, cols]`: the elements on the diagonal and above,
    /// and some below.
    pub fn gram(&self, x: &[f32], cols: usize, out: &mut [f32]) -> Result<()> {
        let sizes = Sizes::mnk(cols, cols, x.len() / cols);
        if x.len() != sizes.k * cols || out.len() != cols * cols {
            bail!(
                Internal,
                "the Gram matrix of {cols} columns: an operand of {} elements, and a result of {}",
                x.len(),
                out.len()
            );
        }
        self.add_product(GemmForm::TN, sizes, (x, x), out, Region::Above);
        Ok(())
    }

    /// Adds a product of operands with checked sizes.
    fn add_product(
        &self,
        form: GemmForm,
        Sizes { m, n, k }: Sizes,
        (a, b): (&[f32], &[f32]),
        out: &mut [f32],
        region: Region,
    ) {
        let height = self.table.widest;
        // Parts of a triangle have unequal work, so there are more of them.
        let shares = match region {
            Region::All => 1,
            Region::Above => 4,
        };
        let rows = m
            .div_ceil(shares * self.pool().threads())
            .clamp(1, ROWS)
            .next_multiple_of(height);
        let a_at = |i: usize, p: usize| match form {
            GemmForm::TN => a[p * m + i],
            GemmForm::NT | GemmForm::NN => a[i * k + p],
        };
        // Threads take runs of rows, and each packs what it multiplies.
        by_parts(self.pool(), out, rows * n, |part, out| {
            let first = part * rows;
            let count = out.len() / n;
            let tiles = count.div_ceil(height);
            let (mut left, mut right) = (vec![0.0; tiles * height * DEPTH], [0.0; DEPTH * COLUMNS]);
            let mut edge = vec![0.0; height * COLUMNS];
            for start in (0..k).step_by(DEPTH) {
                let depth = DEPTH.min(k - start);
                for tile in 0..tiles {
                    let to = &mut left[tile * height * DEPTH..][..height * depth];
                    for (p, to) in to.chunks_exact_mut(height).enumerate() {
                        for (r, to) in to.iter_mut().enumerate() {
                            let i = tile * height + r;
                            *to = if i < count {
                                a_at(first + i, start + p)
                            } else {
                                0.0
                            };
                        }
                    }
                }
                let left_out = match region {
                    Region::All => 0,
                    Region::Above => first / COLUMNS * COLUMNS,
                };
                for column in (left_out..n).step_by(COLUMNS) {
                    let width = COLUMNS.min(n - column);
                    pack_right(form, b, (n, k), (start, depth), (column, width), &mut right);
                    for tile in 0..tiles {
                        let a = left[tile * height * DEPTH..].as_ptr();
                        let whole = tile * height + height <= count && width == COLUMNS;
                        let at = tile * height * n + column;
                        if whole {
                            // SAFETY: the level is present; the panels hold `depth` rows, and the tile lies in `out`.
                            unsafe {
                                (self.table.panel_product)(
                                    depth,
                                    a,
                                    right.as_ptr(),
                                    out[at..].as_mut_ptr(),
                                    n,
                                );
                            }
                            continue;
                        }
                        let inside = height.min(count - tile * height);
                        edge.fill(0.0);
                        for r in 0..inside {
                            edge[r * COLUMNS..][..width]
                                .copy_from_slice(&out[at + r * n..][..width]);
                        }
                        // SAFETY: as above, with a tile of its own.
                        unsafe {
                            (self.table.panel_product)(
                                depth,
                                a,
                                right.as_ptr(),
                                edge.as_mut_ptr(),
                                COLUMNS,
                            );
                        }
                        for r in 0..inside {
                            out[at + r * n..][..width]
                                .copy_from_slice(&edge[r * COLUMNS..][..width]);
                        }
                    }
                }
            }
        });
    }
}

/// Packs columns `column..column + width` of the right operand, `depth` of k from `start` on, as `[depth, 16]` with zeros beyond `width`.
fn pack_right(
    form: GemmForm,
    b: &[f32],
    (n, k): (usize, usize),
    (start, depth): (usize, usize),
    (column, width): (usize, usize),
    to: &mut [f32],
) {
    let rows = to.chunks_exact_mut(COLUMNS).take(depth).enumerate();
    match form {
        GemmForm::NT => {
            for (p, to) in rows {
                for (j, to) in to.iter_mut().enumerate() {
                    *to = if j < width {
                        b[(column + j) * k + start + p]
                    } else {
                        0.0
                    };
                }
            }
        }
        GemmForm::NN | GemmForm::TN => {
            for (p, to) in rows {
                let (values, padding) = to.split_at_mut(width);
                values.copy_from_slice(&b[(start + p) * n + column..][..width]);
                padding.fill(0.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random::uniform;

    /// On the diagonal and above, a Gram matrix has the bits of the whole product.
    #[test]
    fn a_gram_matrix_is_half_a_product() {
        for (threads, rows, cols) in [(1, 3, 1), (2, 300, 49), (3, 17, 130)] {
            let host = Cpu::new(Some(threads)).unwrap();
            let draw = |i: u64| uniform(7, i) - 0.5;
            let x: Vec<f32> = (0..(rows * cols) as u64).map(draw).collect();
            let start: Vec<f32> = (0..(cols * cols) as u64).map(draw).collect();
            let (mut whole, mut half) = (start.clone(), start);
            let sizes = Sizes::mnk(cols, cols, rows);
            host.matmul(GemmForm::TN, sizes, &x, &x, &mut whole, true)
                .unwrap();
            host.gram(&x, cols, &mut half).unwrap();
            for row in 0..cols {
                let above = row * cols + row..(row + 1) * cols;
                assert_eq!(half[above.clone()], whole[above], "{cols}: {row}");
            }
        }
    }
}
