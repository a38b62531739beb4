//! Matrices in NVFP4 that are best for their products: see [`crate::format::calibrated`].

use std::sync::{Mutex, PoisonError};

use super::Cpu;
use super::training::{Rows, by_parts, by_parts_of_two};
use crate::base::error::bail;
use crate::base::{Error, Result};
use crate::format::calibrated::{Rounded, factor_block, round_beside, round_in_turn};
use crate::format::input_moments::{BlockMoments, MOMENTS};
use crate::format::nvfp4::{BLOCK, dequantize};
use crate::format::{e2m1, e4m3};
use crate::tensor::product::{Form, Sizes};

/// Columns of a panel of the factorization.
const PANEL: usize = 64;
/// Blocks whose errors reach the blocks behind them together.
const TOGETHER: usize = 8;

/// Second moments of the inputs of a product, as the search reads them.
#[derive(Debug)]
pub struct Moments {
    /// Inputs.
    cols: usize,
    /// `[cols / 16][cols][16]`: panels of 16 columns of M.
    panels: Vec<f32>,
    /// Its blocks on the diagonal, and their factors.
    blocks: Vec<BlockMoments>,
    factors: Vec<BlockMoments>,
}

/// The factor of second moments whose blocks of 16 have been put into an order.
#[derive(Debug)]
pub struct Factor {
    /// The blocks in the order in which they are rounded.
    order: Vec<usize>,
    /// `[cols / 16][cols][16]`: panels of 16 columns of R.
    panels: Vec<f32>,
    /// R's blocks on the diagonal.
    blocks: Vec<BlockMoments>,
}

/// A matrix of panels `[cols / 16][cols][16]`, element by element.
fn panels_of(cols: usize, at: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let mut panels = Vec::with_capacity(cols * cols);
    for panel in 0..cols / BLOCK {
        for row in 0..cols {
            panels.extend((0..BLOCK).map(|j| at(row, panel * BLOCK + j)));
        }
    }
    panels
}

/// The blocks on the diagonal of a matrix of panels.
fn diagonal(cols: usize, panels: &[f32]) -> Vec<BlockMoments> {
    let of = |block: usize| {
        let at = (block * cols + block * BLOCK) * BLOCK;
        std::array::from_fn(|i| panels[at + i])
    };
    (0..cols / BLOCK).map(of).collect()
}

impl Moments {
    /// Panels of damped moments `[cols, cols]`, which are positive definite.
    pub fn new(moments: &[f32], cols: usize) -> Moments {
        let panels = panels_of(cols, |row, col| moments[row * cols + col]);
        let blocks = diagonal(cols, &panels);
        Moments {
            cols,
            factors: blocks.iter().map(factor_block).collect(),
            blocks,
            panels,
        }
    }

    /// The moments of each block of a row.
    pub fn blocks(&self) -> &[BlockMoments] {
        &self.blocks
    }
}

impl Cpu {
    /// The factor of `[cols, cols]` moments, with the blocks of 16 inputs of the most energy first. None if they are not positive definite.
    pub fn factor(&self, moments: &[f32], cols: usize) -> Result<Option<Factor>> {
        let energy = |block: &usize| -> f32 {
            let at = |i: usize| moments[(block * BLOCK + i) * (cols + 1)];
            (0..BLOCK).map(at).sum()
        };
        let mut order: Vec<usize> = (0..cols / BLOCK).collect();
        order.sort_by(|a, b| energy(b).total_cmp(&energy(a)));
        // The lower triangular factor of the matrix from its last row and column on, whose order is the other way round.
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
        let panels = panels_of(cols, element);
        Ok(Some(Factor {
            order,
            blocks: diagonal(cols, &panels),
            panels,
        }))
    }

    /// The lower triangular factor `L` of a symmetric matrix, `A = L L^T`, in panels of [`PANEL`] columns from their first row on. None if
    /// it is not positive definite.
    fn cholesky(
        &self,
        n: usize,
        of: &dyn Fn(usize, usize) -> f32,
    ) -> Result<Option<Vec<Vec<f32>>>> {
        let mut done: Vec<Vec<f32>> = Vec::new();
        for first in (0..n).step_by(PANEL) {
            let (width, rows) = (PANEL.min(n - first), n - first);
            // The matrix minus the products of panels before, negated, as products are added.
            let mut left: Vec<f32> = (0..rows * width)
                .map(|i| -of(first + i / width, first + i % width))
                .collect();
            for (panel, before) in done.iter().enumerate() {
                let from = (first - panel * PANEL) * PANEL;
                let (a, sizes) = (
                    &before[from..],
                    Sizes {
                        m: rows,
                        n: width,
                        k: PANEL,
                    },
                );
                self.matmul(Form::NT, sizes, a, &a[..width * PANEL], &mut left, true)?;
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

    /// Rows of a tile: as many as the kernel of products takes.
    fn tile(&self) -> usize {
        self.table.widest
    }

    /// Calls `each` with the weights, codes and scales of a tile of rows of `[rows, cols]` weights, on the threads of the pool.
    fn by_tiles(
        &self,
        weights: &[f32],
        cols: usize,
        out: Rows<'_>,
        each: impl Fn(&[f32], &mut [u8], &mut [u8]) + Sync,
    ) -> Result<()> {
        check(weights.len(), cols, &out)?;
        let height = self.tile();
        let lengths = (height * cols / 2, height * cols / BLOCK);
        by_parts_of_two(
            self.pool(),
            (out.codes, out.scales),
            lengths,
            |tile, codes, scales| each(&weights[tile * height * cols..], codes, scales),
        );
        Ok(())
    }

    /// Calls `quantize` with the number, codes and scales of each row of `cols` weights, on the threads of the pool. The error is that of the
    /// first row that has one.
    pub fn by_code_rows(
        &self,
        cols: usize,
        out: Rows<'_>,
        quantize: impl Fn(usize, &mut [u8], &mut [u8]) -> Result<()> + Sync,
    ) -> Result<()> {
        check(out.scales.len() * BLOCK, cols, &out)?;
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        by_parts_of_two(
            self.pool(),
            (out.codes, out.scales),
            (cols / 2, cols / BLOCK),
            |row, codes, scales| {
                if let Err(e) = quantize(row, codes, scales) {
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(first, _)| row < *first) {
                        *failed = Some((row, e));
                    }
                }
            },
        );
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, e)) => Err(e),
            None => Ok(()),
        }
    }

    /// Adds `[depth, height]` `a` times `[depth, 16]` `right` to `[height, 16]` of rows of `stride` in `out`.
    fn add_product(&self, a: &[f32], right: &[f32], out: &mut [f32], stride: usize) {
        let (height, depth) = (self.tile(), right.len() / BLOCK);
        assert!(a.len() == height * depth && out.len() >= (height - 1) * stride + BLOCK);
        // SAFETY: the level is present, and the lengths are what the kernel reads and writes.
        unsafe {
            (self.table.panel_product)(depth, a.as_ptr(), right.as_ptr(), out.as_mut_ptr(), stride);
        }
    }

    /// Quantizes `weights` `[rows, cols]` under a global scale, block after block in the order of `factor`, each weight to the code that makes up
    /// for the errors of those before it in its row.
    pub fn round_in_turn(
        &self,
        weights: &[f32],
        global: f32,
        factor: &Factor,
        out: Rows<'_>,
    ) -> Result<()> {
        let blocks = factor.order.len();
        let (cols, height) = (blocks * BLOCK, self.tile());
        self.by_tiles(weights, cols, out, |weights, codes, scales| {
            let rows = scales.len() / blocks;
            let mut sums = vec![0f32; height * cols];
            // Errors as the products read them: `[TOGETHER * 16, height]`.
            let mut errors = vec![0f32; TOGETHER * BLOCK * height];
            for turn in 0..blocks {
                let (column, within) = (factor.order[turn] * BLOCK, turn % TOGETHER);
                for row in 0..rows {
                    let own: &[f32; BLOCK] = block(&weights[row * cols + column..]);
                    let before = block(&sums[row * cols + turn * BLOCK..]);
                    let rounded = round_in_turn(own, before, global, &factor.blocks[turn]);
                    put(&rounded, row * blocks + factor.order[turn], codes, scales);
                    for i in 0..BLOCK {
                        errors[(within * BLOCK + i) * height + row] = own[i] - rounded.values[i];
                    }
                }
                let last = (turn / TOGETHER + 1) * TOGETHER;
                let mut add = |from: usize, turns: std::ops::Range<usize>| {
                    let count = (turn + 1 - from) * BLOCK;
                    let a = &errors[from % TOGETHER * BLOCK * height..][..count * height];
                    for later in turns {
                        let at = (later * cols + from * BLOCK) * BLOCK;
                        let right = &factor.panels[at..][..count * BLOCK];
                        self.add_product(a, right, &mut sums[later * BLOCK..], cols);
                    }
                };
                add(turn, turn + 1..last.min(blocks));
                if turn + 1 == last {
                    add(last - TOGETHER, last..blocks);
                }
            }
        })
    }

    /// Block coordinate descent on a quantized matrix: in each pass, each block takes the scale and codes with the least error beside the others.
    pub fn descend(
        &self,
        weights: &[f32],
        global: f32,
        moments: &Moments,
        passes: usize,
        out: Rows<'_>,
    ) -> Result<()> {
        let (cols, height) = (moments.cols, self.tile());
        let blocks = cols / BLOCK;
        self.by_tiles(weights, cols, out, |weights, codes, scales| {
            let rows = scales.len() / blocks;
            let mut held = Vec::with_capacity(rows * blocks);
            let mut gradients = vec![0f32; height * cols];
            let mut errors = vec![0f32; cols * height];
            for row in 0..rows {
                for index in 0..blocks {
                    let rounded = get(row * blocks + index, codes, scales, global);
                    let own: &[f32; BLOCK] = block(&weights[row * cols + index * BLOCK..]);
                    for i in 0..BLOCK {
                        errors[(index * BLOCK + i) * height + row] = own[i] - rounded.values[i];
                    }
                    held.push(rounded);
                }
            }
            for panel in 0..blocks {
                let right = &moments.panels[panel * cols * BLOCK..][..cols * BLOCK];
                self.add_product(&errors, right, &mut gradients[panel * BLOCK..], cols);
            }
            let mut changes = vec![0f32; BLOCK * height];
            for index in (0..passes).flat_map(|_| 0..blocks) {
                let mut has_changed = false;
                changes.fill(0.0);
                let (of_block, factor) = (&moments.blocks[index], &moments.factors[index]);
                for row in 0..rows {
                    let own: &[f32; BLOCK] = block(&weights[row * cols + index * BLOCK..]);
                    let before = &mut held[row * blocks + index];
                    let e: [f32; BLOCK] = std::array::from_fn(|i| own[i] - before.values[i]);
                    let all = block(&gradients[row * cols + index * BLOCK..]);
                    let others = std::array::from_fn(|i| {
                        let row = &of_block[i * BLOCK..][..BLOCK];
                        let own: f32 = row.iter().zip(&e).map(|(m, e)| m * e).sum();
                        all[i] - own
                    });
                    let best = round_beside(own, before, &others, global, (of_block, factor));
                    if best != *before {
                        has_changed = true;
                        for i in 0..BLOCK {
                            changes[i * height + row] = before.values[i] - best.values[i];
                        }
                        *before = best;
                    }
                }
                if has_changed {
                    for panel in 0..blocks {
                        let at = (panel * cols + index * BLOCK) * BLOCK;
                        let right = &moments.panels[at..][..MOMENTS];
                        self.add_product(&changes, right, &mut gradients[panel * BLOCK..], cols);
                    }
                }
            }
            for (at, rounded) in held.iter().enumerate() {
                put(rounded, at, codes, scales);
            }
        })
    }

    /// The sum over rows of `e^T M e` with `e` the error of quantized weights, by `[cols, cols]` moments.
    pub fn product_error(
        &self,
        weights: &[f32],
        moments: &[f32],
        cols: usize,
        (codes, scales, global): (&[u8], &[u8], f32),
    ) -> Result<f64> {
        let rows = weights.len() / cols;
        let mut errors = vec![0f32; rows * cols];
        dequantize(codes, scales, global, &mut errors)?;
        errors
            .iter_mut()
            .zip(weights)
            .for_each(|(q, w)| *q = w - *q);
        let mut products = vec![0f32; rows * cols];
        let sizes = Sizes {
            m: rows,
            n: cols,
            k: cols,
        };
        self.matmul(Form::NN, sizes, &errors, moments, &mut products, false)?;
        let terms = errors.iter().zip(&products);
        Ok(terms.map(|(e, p)| f64::from(*e) * f64::from(*p)).sum())
    }
}

fn check(weights: usize, cols: usize, out: &Rows<'_>) -> Result<()> {
    let fits = out.codes.len() == weights / 2 && out.scales.len() == weights / BLOCK;
    if cols == 0 || !weights.is_multiple_of(cols) || !fits {
        bail!(
            Internal,
            "{weights} weights in rows of {cols} to {} bytes of codes and {} scales",
            out.codes.len(),
            out.scales.len()
        );
    }
    Ok(())
}

/// The first 16 of some values.
fn block(values: &[f32]) -> &[f32; BLOCK] {
    values.first_chunk().expect("rows are whole blocks")
}

fn put(rounded: &Rounded, at: usize, codes: &mut [u8], scales: &mut [u8]) {
    scales[at] = rounded.scale;
    let to = &mut codes[at * BLOCK / 2..][..BLOCK / 2];
    for (byte, pair) in to.iter_mut().zip(rounded.codes.as_chunks::<2>().0) {
        *byte = pair[0] | pair[1] << 4;
    }
}

fn get(at: usize, codes: &[u8], scales: &[u8], global: f32) -> Rounded {
    let from = &codes[at * BLOCK / 2..][..BLOCK / 2];
    let codes: [u8; BLOCK] = std::array::from_fn(|i| from[i / 2] >> (i % 2 * 4) & 15);
    let step = e4m3::decode(scales[at]) * global;
    Rounded {
        scale: scales[at],
        codes,
        values: codes.map(|code| e2m1::decode(code) * step),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::nvfp4::{QuantizeOptions, Recipe, amax, global_scale, quantize_rows};
    use crate::format::random::uniform;

    fn draws(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64)
            .map(|i| 2.0 * uniform(seed, i) - 1.0)
            .collect()
    }

    /// Second moments of inputs that depend on each other, some of which are much larger than others.
    fn moments(cols: usize, damping: f32) -> Vec<f32> {
        let rows = 2 * cols;
        let (own, mixing) = (draws(1, rows * cols), draws(2, 8 * cols));
        let mut x = vec![0f32; rows * cols];
        for row in 0..rows {
            for col in 0..cols {
                let common: f32 = (0..8)
                    .map(|c| own[row * cols + c] * mixing[c * cols + col])
                    .sum();
                let size = if col % 37 == 0 { 4.0 } else { 1.0 };
                x[row * cols + col] = size * (common + 0.5 * own[row * cols + col]);
            }
        }
        let mut m = vec![0f32; cols * cols];
        for row in x.chunks_exact(cols) {
            for (m, a) in m.chunks_exact_mut(cols).zip(row) {
                m.iter_mut().zip(row).for_each(|(m, b)| *m += a * b);
            }
        }
        let mean = (0..cols).map(|i| m[i * (cols + 1)]).sum::<f32>() / cols as f32;
        (0..cols).for_each(|i| m[i * (cols + 1)] += damping * mean);
        m
    }

    /// An element of a matrix of panels.
    fn element(panels: &[f32], cols: usize, row: usize, col: usize) -> f64 {
        f64::from(panels[(col / BLOCK * cols + row) * BLOCK + col % BLOCK])
    }

    #[test]
    fn factors_are_those_of_moments() {
        let host = Cpu::new(Some(2)).unwrap();
        for cols in [16, 48, 64, 208] {
            let m = moments(cols, 0.01);
            let factor = host.factor(&m, cols).unwrap().unwrap();
            let mut order = factor.order.clone();
            order.sort_unstable();
            assert_eq!(order, (0..cols / BLOCK).collect::<Vec<_>>());
            let at = |i: usize| factor.order[i / BLOCK] * BLOCK + i % BLOCK;
            for i in 0..cols {
                for j in 0..cols {
                    let r = |row, col| element(&factor.panels, cols, row, col);
                    let product: f64 = (0..cols).map(|k| r(i, k) * r(j, k)).sum();
                    let (want, size) = (
                        m[at(i) * cols + at(j)],
                        m[at(i) * (cols + 1)] + m[at(j) * (cols + 1)],
                    );
                    let off = (product - f64::from(want)).abs();
                    assert!(
                        off <= 1e-5 * f64::from(size),
                        "{cols}: {i}, {j}: {product} {want}"
                    );
                    assert!(j >= i || r(i, j) == 0.0, "{i}, {j}");
                }
            }
        }
        let none = host.factor(&[0.0; 256], 16).unwrap();
        assert!(none.is_none());
    }

    fn rows_of(of: &mut (Vec<u8>, Vec<u8>, f32)) -> Rows<'_> {
        Rows {
            codes: &mut of.0,
            scales: &mut of.1,
        }
    }

    /// Codes by each search, under one global scale: of a sweep, in turn, in turn and then beside the others, and beside the others from a sweep.
    fn searched(
        threads: usize,
        rows: usize,
        cols: usize,
        weights: &[f32],
        m: &[f32],
    ) -> Vec<(Vec<u8>, Vec<u8>, f32)> {
        let host = Cpu::new(Some(threads)).unwrap();
        let options = QuantizeOptions {
            recipe: Recipe::Sweep,
            ..QuantizeOptions::default()
        };
        let global = global_scale(amax(weights, 0, options.nonfinite).unwrap(), &options);
        let mut codes = vec![0; rows * cols / 2];
        let mut scales = vec![0; rows * cols / BLOCK];
        quantize_rows(weights, cols, 0, global, &options, &mut codes, &mut scales).unwrap();
        let swept = (codes, scales, global);
        let factor = host.factor(m, cols).unwrap().unwrap();
        let of_blocks = Moments::new(m, cols);
        let mut in_turn = swept.clone();
        host.round_in_turn(weights, global, &factor, rows_of(&mut in_turn))
            .unwrap();
        let mut beside = in_turn.clone();
        host.descend(weights, global, &of_blocks, 2, rows_of(&mut beside))
            .unwrap();
        let mut descended = swept.clone();
        host.descend(weights, global, &of_blocks, 2, rows_of(&mut descended))
            .unwrap();
        vec![swept, in_turn, beside, descended]
    }

    fn error(weights: &[f32], m: &[f32], cols: usize, of: &(Vec<u8>, Vec<u8>, f32)) -> f64 {
        let host = Cpu::new(Some(1)).unwrap();
        host.product_error(weights, m, cols, (&of.0, &of.1, of.2))
            .unwrap()
    }

    /// Products get better from search to search, and the bits are those of one thread.
    #[test]
    fn products_get_better() {
        let (rows, cols) = (37, 208);
        let (weights, m) = (draws(3, rows * cols), moments(cols, 0.01));
        let all = searched(2, rows, cols, &weights, &m);
        assert_eq!(all, searched(1, rows, cols, &weights, &m));
        let errors: Vec<f64> = all.iter().map(|of| error(&weights, &m, cols, of)).collect();
        let [swept, in_turn, beside, descended] = errors[..] else {
            unreachable!()
        };
        assert!(in_turn < 0.5 * swept, "{errors:?}");
        assert!(beside < in_turn, "{errors:?}");
        assert!(descended < 0.6 * swept, "{errors:?}");
    }

    /// Where inputs do not depend on each other, what is left is the error of the weights.
    #[test]
    fn inputs_alone_leave_weights_alone() {
        let (rows, cols) = (5, 64);
        let weights = draws(4, rows * cols);
        let mut m = vec![0f32; cols * cols];
        (0..cols).for_each(|i| m[i * (cols + 1)] = 1.0);
        let all = searched(1, rows, cols, &weights, &m);
        let errors: Vec<f64> = all.iter().map(|of| error(&weights, &m, cols, of)).collect();
        for of in &errors[1..] {
            assert!((of / errors[0] - 1.0).abs() < 1e-3, "{errors:?}");
        }
        let squares: f64 = weights.iter().map(|w| f64::from(*w).powi(2)).sum();
        assert!(errors[0] < 0.02 * squares);
    }

    #[test]
    fn zeros_stay_zeros() {
        let (rows, cols) = (2, 32);
        let mut weights = draws(5, rows * cols);
        weights[BLOCK..2 * BLOCK].fill(0.0);
        let m = moments(cols, 0.01);
        for (codes, scales, global) in searched(1, rows, cols, &weights, &m) {
            for (codes, scale) in codes.chunks_exact(BLOCK / 2).zip(&scales) {
                let is_empty = codes.iter().all(|c| c & 0x77 == 0);
                assert_eq!(*scale == 0, is_empty);
            }
            assert!(global > 0.0);
        }
    }
}
