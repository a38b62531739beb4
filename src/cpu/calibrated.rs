//! Calibrated NVFP4 quantization on the CPU: codes and scales that minimize the error of a GEMM, see [`crate::format::calibrated`].

use std::sync::{Mutex, PoisonError};

use super::Cpu;
use super::moments::{Factor, Moments, Panels};
use super::table::{Blocks, LANES, Rounded};
use super::training::{Rows, by_parts_of_two};
use crate::base::error::bail;
use crate::base::{Error, Result};
use crate::format::nvfp4::{BLOCK, dequantize};
use crate::format::{Rounding, e2m1, e4m3};
use crate::tensor::product::{GemmForm, Sizes};

/// Quantization blocks per group. A group propagates its errors to the blocks behind it in one GEMM.
const TOGETHER: usize = 8;
/// Upper limit of rows that share a panel of moments, in units of [`LANES`].
const STACKED: usize = 4;

/// Sixteen rows of a matrix during quantization.
struct Strip {
    /// `[cols][16]`; zeros beyond the last row.
    weights: Vec<f32>,
    /// Number of valid rows.
    rows: usize,
}

impl Strip {
    fn new(weights: &[f32], cols: usize, rows: usize) -> Strip {
        let mut strip = Strip {
            weights: vec![0.0; cols * LANES],
            rows,
        };
        for (row, weights) in weights.chunks_exact(cols).take(rows).enumerate() {
            for (col, weight) in weights.iter().enumerate() {
                strip.weights[col * LANES + row] = *weight;
            }
        }
        strip
    }
}

impl Cpu {
    /// Calls `each` with strips of `[rows, cols]` weights, codes and scales, on the threads of the pool. Strips that read the same moments
    /// are processed one after another.
    fn by_strips(
        &self,
        weights: &[f32],
        cols: usize,
        out: Rows<'_>,
        each: impl Fn(&[Strip], &mut [u8], &mut [u8]) + Sync,
    ) -> Result<()> {
        check(weights.len(), cols, &out)?;
        let strips = (weights.len() / cols).div_ceil(LANES);
        let height = LANES * (strips / (2 * self.pool().threads())).clamp(1, STACKED);
        let lengths = (height * cols / 2, height * cols / BLOCK);
        by_parts_of_two(
            self.pool(),
            (out.codes, out.scales),
            lengths,
            |part, codes, scales| {
                let rows = scales.len() * BLOCK / cols;
                let weights = &weights[part * height * cols..][..rows * cols];
                let of = |weights: &[f32]| Strip::new(weights, cols, weights.len() / cols);
                let strips: Vec<Strip> = weights.chunks(LANES * cols).map(of).collect();
                each(&strips, codes, scales);
            },
        );
        Ok(())
    }

    /// Calls `quantize` with the index, codes and scales of each row of `cols` weights, on the threads of the pool. Returns the error of
    /// the first row that has one.
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

    /// Adds to `sums` `[cols][16]` the product of errors `[depth, 16]` of inputs from `row` on with the columns `cols` of `panels`.
    fn add_errors(
        &self,
        panels: &Panels,
        row: usize,
        cols: std::ops::Range<usize>,
        errors: &[f32],
        sums: &mut [f32],
    ) {
        let depth = errors.len() / LANES;
        for col in cols.step_by(panels.width) {
            let a = &panels.rows(row, col)[..depth * panels.width];
            let out = &mut sums[col * LANES..][..panels.width * LANES];
            // SAFETY: the level is present, and the lengths are what the kernel reads and writes.
            unsafe {
                (self.table.moment_product)(depth, a.as_ptr(), errors.as_ptr(), out.as_mut_ptr());
            }
        }
    }

    /// Quantizes `weights` `[rows, cols]` under a global scale, block after block in the order of `factor`. Each weight takes the code that
    /// compensates for the errors before it in its row.
    pub fn round_in_turn(
        &self,
        weights: &[f32],
        global: f32,
        factor: &Factor,
        out: Rows<'_>,
    ) -> Result<()> {
        let (blocks, cols) = (factor.order.len(), factor.all.cols);
        self.by_strips(weights, cols, out, |strips, codes, scales| {
            let mut sums = vec![0f32; strips.len() * cols * LANES];
            let mut errors = vec![0f32; strips.len() * TOGETHER * BLOCK * LANES];
            let mut rounded = Rounded::ZERO;
            for first in (0..blocks).step_by(TOGETHER) {
                let last = (first + TOGETHER).min(blocks);
                let depth = (last - first) * BLOCK * LANES;
                for (number, strip) in strips.iter().enumerate() {
                    let sums = &mut sums[number * cols * LANES..][..cols * LANES];
                    let errors = &mut errors[number * depth..][..depth];
                    for turn in first..last {
                        let weights = block(&strip.weights, factor.order[turn]);
                        let of_block = &factor.blocks[turn];
                        // SAFETY: the level is present.
                        unsafe {
                            let before = block(sums, turn);
                            (self.table.round_in_turn)(
                                weights,
                                before,
                                global,
                                of_block,
                                &mut rounded,
                            );
                        }
                        let at = number * LANES * blocks + factor.order[turn];
                        put(&rounded, global, strip.rows, (at, blocks), codes, scales);
                        let own =
                            (turn - first) * BLOCK * LANES..(turn + 1 - first) * BLOCK * LANES;
                        let own = &mut errors[own];
                        let pairs = weights
                            .as_flattened()
                            .iter()
                            .zip(rounded.values.as_flattened());
                        own.iter_mut().zip(pairs).for_each(|(e, (w, q))| *e = w - q);
                        let later = (turn + 1) * BLOCK..last * BLOCK;
                        self.add_errors(&factor.all, turn * BLOCK, later, own, sums);
                    }
                }
                for col in (last * BLOCK..cols).step_by(factor.all.width) {
                    for number in 0..strips.len() {
                        let sums = &mut sums[number * cols * LANES..][..cols * LANES];
                        let errors = &errors[number * depth..][..depth];
                        let own = col..col + factor.all.width;
                        self.add_errors(&factor.all, first * BLOCK, own, errors, sums);
                    }
                }
            }
        })
    }

    /// Block coordinate descent on a quantized matrix: in each pass, each block takes the scale and codes with the least error while all
    /// other blocks stay fixed.
    pub fn descend(
        &self,
        weights: &[f32],
        global: f32,
        moments: &Moments,
        passes: usize,
        out: Rows<'_>,
    ) -> Result<()> {
        let (cols, blocks) = (moments.all.cols, moments.blocks.len());
        self.by_strips(weights, cols, out, |strips, codes, scales| {
            let size = cols * LANES;
            let mut held = Vec::with_capacity(strips.len() * blocks);
            let mut errors = vec![0f32; strips.len() * size];
            for (number, strip) in strips.iter().enumerate() {
                for index in 0..blocks {
                    let at = (number * LANES * blocks + index, blocks);
                    let rounded = get(global, strip.rows, at, codes, scales);
                    let weights = block(&strip.weights, index).as_flattened();
                    let pairs = weights.iter().zip(rounded.values.as_flattened());
                    let own = &mut errors[number * size + index * BLOCK * LANES..];
                    own.iter_mut().zip(pairs).for_each(|(e, (w, q))| *e = w - q);
                    held.push(rounded);
                }
            }
            // M e for each strip.
            let mut gradients = vec![0f32; strips.len() * size];
            let add = |rows: usize,
                       cols: std::ops::Range<usize>,
                       errors: &[f32],
                       to: &mut [f32]| {
                let depth = errors.len() / strips.len();
                for col in cols.step_by(moments.all.width) {
                    for (errors, to) in errors.chunks_exact(depth).zip(to.chunks_exact_mut(size)) {
                        let own = col..col + moments.all.width;
                        self.add_errors(&moments.all, rows, own, errors, to);
                    }
                }
            };
            add(0, 0..cols, &errors, &mut gradients);
            let mut changes = vec![[[0f32; LANES]; BLOCK]; strips.len() * TOGETHER];
            for first in (0..passes).flat_map(|_| (0..blocks).step_by(TOGETHER)) {
                let last = (first + TOGETHER).min(blocks);
                let changes = &mut changes[..(last - first) * strips.len()];
                changes.as_flattened_mut().fill([0.0; LANES]);
                let mut has_changed = false;
                for (number, strip) in strips.iter().enumerate() {
                    let gradients = &mut gradients[number * size..][..size];
                    for index in first..last {
                        let change = &mut changes[number * (last - first) + index - first];
                        let of_block = (&moments.blocks[index], &moments.factors[index]);
                        let weights = block(&strip.weights, index);
                        let held = &mut held[number * blocks + index];
                        // SAFETY: the level is present.
                        let changes = unsafe {
                            let before = block(gradients, index);
                            (self.table.round_beside)(
                                weights, before, global, of_block, held, change,
                            )
                        };
                        if changes {
                            has_changed = true;
                            let near = first * BLOCK..last * BLOCK;
                            let change = change.as_flattened();
                            self.add_errors(&moments.all, index * BLOCK, near, change, gradients);
                        }
                    }
                }
                if has_changed {
                    let changes = changes.as_flattened().as_flattened();
                    add(first * BLOCK, 0..first * BLOCK, changes, &mut gradients);
                    add(first * BLOCK, last * BLOCK..cols, changes, &mut gradients);
                }
            }
            for (index, rounded) in held.iter().enumerate() {
                let (number, index) = (index / blocks, index % blocks);
                let at = (number * LANES * blocks + index, blocks);
                put(rounded, global, strips[number].rows, at, codes, scales);
            }
        })
    }

    /// The sum over rows of `e^T M e`, with `e` the error of quantized weights and M the `[cols, cols]` moments.
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
        let sizes = Sizes::mnk(rows, cols, cols);
        self.matmul(GemmForm::NN, sizes, &errors, moments, &mut products, false)?;
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

/// A block of `[cols][16]` values.
fn block(values: &[f32], index: usize) -> &Blocks {
    let (lanes, _) = values[index * BLOCK * LANES..].as_chunks::<LANES>();
    lanes.first_chunk().expect("rows are whole blocks")
}

/// Writes `rows` blocks; the first goes to block `at`, and each following one `blocks` further.
fn put(
    rounded: &Rounded,
    global: f32,
    rows: usize,
    (at, blocks): (usize, usize),
    codes: &mut [u8],
    scales: &mut [u8],
) {
    for row in 0..rows {
        let at = at + row * blocks;
        let scale = rounded.scales[row];
        scales[at] = scale;
        let inverse = match scale {
            0 => 0.0,
            scale => 1.0 / (e4m3::decode(scale) * global),
        };
        let code = |i: usize| {
            let value = rounded.values[i][row] * inverse;
            e2m1::encode(value, Rounding::NearestEven, 0)
        };
        let to = &mut codes[at * BLOCK / 2..][..BLOCK / 2];
        for (i, byte) in to.iter_mut().enumerate() {
            *byte = code(2 * i) | code(2 * i + 1) << 4;
        }
    }
}

/// Reads what [`put`] writes.
fn get(
    global: f32,
    rows: usize,
    (at, blocks): (usize, usize),
    codes: &[u8],
    scales: &[u8],
) -> Rounded {
    let mut rounded = Rounded::ZERO;
    for row in 0..rows {
        let at = at + row * blocks;
        rounded.scales[row] = scales[at];
        let step = e4m3::decode(scales[at]) * global;
        let from = &codes[at * BLOCK / 2..][..BLOCK / 2];
        for (i, values) in rounded.values.iter_mut().enumerate() {
            values[row] = e2m1::decode(from[i / 2] >> (i % 2 * 4) & 15) * step;
        }
    }
    rounded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Level;
    use crate::format::nvfp4::{QuantizeOptions, Recipe, amax, global_scale, quantize_rows};
    use crate::format::random::uniform;

    fn draws(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64)
            .map(|i| 2.0 * uniform(seed, i) - 1.0)
            .collect()
    }

    /// Second moments of correlated inputs, some of which are much larger than others.
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
                    let r = |row, col| f64::from(factor.all.at(row, col));
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

    /// Codes by each search under one global scale: a sweep; rounding in turn; rounding in turn, then descent; a sweep, then descent.
    fn searched(
        threads: usize,
        rows: usize,
        cols: usize,
        weights: &[f32],
        m: &[f32],
    ) -> Vec<(Vec<u8>, Vec<u8>, f32)> {
        searched_on(&Cpu::new(Some(threads)).unwrap(), rows, cols, weights, m)
    }

    fn searched_on(
        host: &Cpu,
        rows: usize,
        cols: usize,
        weights: &[f32],
        m: &[f32],
    ) -> Vec<(Vec<u8>, Vec<u8>, f32)> {
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
        let of_blocks = host.moments(m, cols);
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

    /// Each search has a smaller error than the one before, and the bits do not depend on the number of threads.
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

    /// Every level finds the same codes from the same moments.
    #[test]
    fn levels_do_not_matter() {
        let (rows, cols) = (19, 48);
        let (weights, m) = (draws(6, rows * cols), moments(cols, 0.01));
        let of_level = |level| {
            let host = Cpu::with_level(level, Some(1)).unwrap();
            searched_on(&host, rows, cols, &weights, &m)
        };
        let expected = of_level(Level::Scalar);
        for level in Level::ALL.into_iter().filter(|level| level.is_present()) {
            assert!(of_level(level) == expected, "{level:?}");
        }
    }

    /// For uncorrelated inputs, the error of the product is that of the weights.
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
