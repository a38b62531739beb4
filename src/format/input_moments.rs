//! NVFP4 block scales that are best for a GEMM. Rounding `w` to `q` gives the product `w x` the mean squared error `(w - q)^T M (w - q)`,
//! where `M = E[x x^T]` are the second moments of the inputs. Only the 16 x 16 blocks on the diagonal of `M` are used here, one for each
//! block of a row of `w`: inputs that share a scale. All rows of a matrix have the same moments.

use std::ops::Range;

use super::e2m1;
use super::e4m3;
use super::nvfp4::{BLOCK, encode_under, nearest_scale};

/// Number of second moments of a block's inputs.
pub const MOMENTS: usize = BLOCK * BLOCK;
/// Second moments of 16 inputs, row-major; symmetric.
pub type BlockMoments = [f32; MOMENTS];

/// Damping of the diagonal of a block's moments, as a share of its mean, because unseen text has other inputs.
const DAMPING: f32 = 0.01;
/// Number of candidate scales, in steps of E4M3, below and above the one that puts the largest weight on 6.
const BELOW: u8 = 12;
const ABOVE: u8 = 6;

/// Adds the outer products of inputs to `sums`: of rows `x` `[rows, cols]`, the 16 columns from `16 * block` on.
pub fn add_products(x: &[f32], cols: usize, block: usize, sums: &mut BlockMoments) {
    for row in x.chunks_exact(cols) {
        let (inputs, _) = row[block * BLOCK..].split_at(BLOCK);
        for (sums, a) in sums.chunks_exact_mut(BLOCK).zip(inputs) {
            sums.iter_mut()
                .zip(inputs)
                .for_each(|(sum, b)| *sum += a * b);
        }
    }
}

/// Damps sums of products, so that they can be used to choose scales. A block whose inputs were all zero, or not finite, gets equal
/// moments.
pub fn damp(sums: &mut BlockMoments) {
    let diagonal = (0..BLOCK).map(|i| sums[i * BLOCK + i]);
    let mean = diagonal.sum::<f32>() / BLOCK as f32;
    let is_usable = mean > 0.0 && sums.iter().all(|v| v.is_finite());
    if !is_usable {
        sums.fill(0.0);
    }
    for i in 0..BLOCK {
        sums[i * BLOCK + i] += if is_usable { DAMPING * mean } else { 1.0 };
    }
}

/// Upper limit of candidate scales per block.
pub const TRIED: usize = (BELOW + ABOVE) as usize + 1;

/// The smallest candidate scale for a block with this largest magnitude.
pub fn first_tried(amax: f32, global: f32) -> u8 {
    let middle = nearest_scale(amax / e2m1::MAX / global);
    middle.saturating_sub(BELOW).max(1)
}

/// Candidate scales for a block with this largest magnitude.
fn window(amax: f32, global: f32) -> Range<u8> {
    let middle = nearest_scale(amax / e2m1::MAX / global);
    let last = middle.saturating_add(ABOVE).min(e4m3::MAX_BYTE);
    first_tried(amax, global)..last + 1
}

/// Product error, up to a constant factor, of the errors `e` of a block's weights.
#[inline(always)]
fn error(e: &[f32; BLOCK], moments: &BlockMoments) -> f32 {
    let mut products = [0.0; BLOCK];
    for (row, a) in moments.as_chunks::<BLOCK>().0.iter().zip(e) {
        for (sum, m) in products.iter_mut().zip(row) {
            *sum += a * m;
        }
    }
    products.iter().zip(e).map(|(p, e)| p * e).sum()
}

/// The scale of a block of finite weights that is best for its product, with each weight at its nearest code. Returns `held` unless another
/// scale is better.
pub fn best_scale(
    weights: &[f32; BLOCK],
    held: Option<u8>,
    global: f32,
    moments: &BlockMoments,
) -> u8 {
    let amax = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
    if amax == 0.0 {
        return held.unwrap_or(0);
    }
    let error_of = |scale: u8| {
        let step = e4m3::decode(scale) * global;
        let errors = weights.map(|w| {
            let magnitude = w.abs();
            let error = magnitude - e2m1::nearest_value(magnitude / step) * step;
            error * 1f32.copysign(w)
        });
        error(&errors, moments)
    };
    let tried = window(amax, global);
    let mut best = held.filter(|scale| *scale > 0).unwrap_or(tried.start);
    let mut least = error_of(best);
    for scale in tried {
        let error = error_of(scale);
        if error < least {
            (best, least) = (scale, error);
        }
    }
    best
}

/// Quantizes rows of finite weights under a nonzero global scale, with the block scales that are best for their product.
pub fn quantize_rows(
    weights: &[f32],
    global: f32,
    moments: &[BlockMoments],
    codes: &mut [u8],
    scales: &mut [u8],
) {
    let (weights, _) = weights.as_chunks::<BLOCK>();
    let (codes, _) = codes.as_chunks_mut::<{ BLOCK / 2 }>();
    let blocks = weights.iter().zip(moments.iter().cycle());
    for (((weights, moments), codes), scale) in blocks.zip(codes).zip(scales) {
        (*scale, *codes) =
            encode_under(weights, best_scale(weights, None, global, moments), global);
    }
}

#[cfg(test)]
mod tests {
    use super::super::nvfp4::{self, QuantizeOptions, Recipe};
    use super::super::random::uniform;
    use super::*;

    const COLS: usize = 4 * BLOCK;
    const ROWS: usize = 24;

    fn draws(seed: u64, len: usize) -> Vec<f32> {
        (0..len as u64)
            .map(|i| 2.0 * uniform(seed, i) - 1.0)
            .collect()
    }

    /// Correlated input rows: each is near a multiple of one direction.
    fn inputs(rows: usize) -> Vec<f32> {
        let (own, common) = (draws(1, rows * COLS), draws(2, COLS));
        let size = draws(3, rows);
        let at = |i: usize| 3.0 * size[i / COLS] * common[i % COLS] + 0.3 * own[i];
        (0..rows * COLS).map(at).collect()
    }

    fn moments(x: &[f32]) -> Vec<BlockMoments> {
        let mut all = vec![[0.0; MOMENTS]; COLS / BLOCK];
        for (block, sums) in all.iter_mut().enumerate() {
            add_products(x, COLS, block, sums);
        }
        all
    }

    /// Error of a block's product in f64, with each weight at the nearest code under `scale`.
    fn exact(weights: &[f32; BLOCK], scale: u8, global: f32, moments: &BlockMoments) -> f64 {
        let step = f64::from(e4m3::decode(scale)) * f64::from(global);
        let errors = weights.map(|w| {
            let nearest = e2m1::VALUES
                .iter()
                .map(|v| f64::from(w) - f64::from(*v) * step);
            nearest.fold(
                f64::INFINITY,
                |least, e| if e.abs() < least.abs() { e } else { least },
            )
        });
        let entry = |i: usize, j: usize| f64::from(moments[i * BLOCK + j]) * errors[i] * errors[j];
        (0..MOMENTS).map(|at| entry(at / BLOCK, at % BLOCK)).sum()
    }

    #[test]
    fn sums_are_those_of_products() {
        let x = inputs(37);
        for (block, sums) in moments(&x).iter().enumerate() {
            for (at, sum) in sums.iter().enumerate() {
                let column = |i: usize| x.iter().skip(block * BLOCK + i).step_by(COLS);
                let products = column(at / BLOCK).zip(column(at % BLOCK));
                let exact: f64 = products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                assert!((f64::from(*sum) - exact).abs() <= 1e-4, "{sum} {exact}");
            }
        }
    }

    #[test]
    fn no_scale_that_is_tried_is_better() {
        let mut moments = moments(&inputs(300));
        moments.iter_mut().for_each(damp);
        let weights = draws(7, ROWS * COLS);
        for (i, weights) in weights.as_chunks::<BLOCK>().0.iter().enumerate() {
            let (moments, global) = (&moments[i % moments.len()], 3e-3);
            let amax = weights.iter().fold(0f32, |most, w| most.max(w.abs()));
            let middle = nearest_scale(amax / e2m1::MAX / global);
            let tried = (middle - BELOW..=middle + ABOVE).chain([middle + 9]);
            let least = tried.map(|scale| exact(weights, scale, global, moments));
            let least = least.fold(f64::INFINITY, f64::min);
            let best = best_scale(weights, Some(middle + 9), global, moments);
            let found = exact(weights, best, global, moments);
            assert!(found <= least * (1.0 + 1e-4), "{found} {least}");
        }
    }

    #[test]
    fn products_are_better_than_with_the_scales_of_a_sweep() {
        let (weights, x) = (draws(5, ROWS * COLS), inputs(500));
        let options = QuantizeOptions {
            recipe: Recipe::Sweep,
            ..QuantizeOptions::default()
        };
        let swept = nvfp4::quantize(&weights, ROWS, COLS, &options).unwrap();
        let mut moments = moments(&x);
        moments.iter_mut().for_each(damp);
        let mut chosen = swept.clone();
        let (codes, scales) = (&mut chosen.codes, &mut chosen.scales);
        quantize_rows(&weights, swept.global, &moments, codes, scales);
        let error = |of: &nvfp4::Nvfp4| -> f64 {
            let values = of.dequantize().unwrap();
            let rows = weights.chunks_exact(COLS).zip(values.chunks_exact(COLS));
            let of_row = |(w, q): (&[f32], &[f32])| -> f64 {
                inputs(400)
                    .chunks_exact(COLS)
                    .map(|x| {
                        let terms = x.iter().zip(w.iter().zip(q)).map(|(x, (w, q))| x * (w - q));
                        f64::from(terms.sum::<f32>()).powi(2)
                    })
                    .sum()
            };
            rows.map(of_row).sum()
        };
        let (of_sweep, of_chosen) = (error(&swept), error(&chosen));
        assert!(of_chosen < 0.8 * of_sweep, "{of_chosen} {of_sweep}");
    }

    #[test]
    fn inputs_that_were_never_there_choose_as_a_sweep_of_squares() {
        let weights: [f32; BLOCK] = draws(9, BLOCK).try_into().unwrap();
        let choose = |mut moments: BlockMoments| {
            damp(&mut moments);
            best_scale(&weights, None, 1e-3, &moments)
        };
        let mut identity = [0.0; MOMENTS];
        (0..BLOCK).for_each(|i| identity[i * (BLOCK + 1)] = 2.0);
        let plain = choose(identity);
        assert_eq!(choose([0.0; MOMENTS]), plain);
        assert_eq!(choose([f32::NAN; MOMENTS]), plain);
        assert_eq!(best_scale(&[0.0; BLOCK], None, 1e-3, &identity), 0);
        assert_eq!(best_scale(&[0.0; BLOCK], Some(40), 1e-3, &identity), 40);
    }

    #[test]
    fn a_scale_that_is_as_good_stays() {
        // Weights on the grid of a scale that is twice another one, whose grid has them too.
        let weights: [f32; BLOCK] = std::array::from_fn(|i| [0.0, 2.0, -2.0, 1.0][i % 4]);
        let mut moments = moments(&inputs(50))[0];
        damp(&mut moments);
        for held in [0x38, 0x30] {
            assert_eq!(best_scale(&weights, Some(held), 1.0, &moments), held);
        }
    }
}
