//! Codes and block scales of NVFP4 that are best for a product, by all second moments of its inputs. The error of a row's product is
//! `e^T M e` with `e = w - q` and `M = E[x x^T]`: see [`super::input_moments`] for what follows of the blocks on its diagonal alone.
//!
//! With `M = R R^T`, R upper triangular, the error is the sum of the squares of `(R^T e)_i = R_ii e_i + sum_{j<i} R_ji e_j`. So a weight that
//! is rounded after others can make up for their errors: it goes to the code nearest to `w_i + s_i / R_ii`, where `s_i` is that sum (Babai's
//! nearest plane, which is GPTQ: Frantar et al., arXiv 2210.17323; Chen et al., arXiv 2507.18553). Here blocks of 16 take turns, each with
//! the scale that is best when its turn comes.

use super::input_moments::{BlockMoments, MOMENTS, window};
use super::nvfp4::BLOCK;
use super::{e2m1, e4m3};

/// The upper triangular factor of [`BlockMoments`], row-major: `M = R R^T`. Zeros where `M` is not positive definite, which cannot be where
/// it was damped.
pub fn factor_block(moments: &BlockMoments) -> BlockMoments {
    let mut r = [0f32; MOMENTS];
    for i in (0..BLOCK).rev() {
        for j in (0..=i).rev() {
            let dot =
                (i + 1..BLOCK).map(|k| f64::from(r[i * BLOCK + k]) * f64::from(r[j * BLOCK + k]));
            let rest = f64::from(moments[j * BLOCK + i]) - dot.sum::<f64>();
            r[j * BLOCK + i] = match i == j {
                true if rest > 0.0 => rest.sqrt() as f32,
                true => return [0.0; MOMENTS],
                false => (rest / f64::from(r[i * BLOCK + i])) as f32,
            };
        }
    }
    r
}

/// A block under one scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rounded {
    /// E4M3.
    pub scale: u8,
    /// A code for each weight.
    pub codes: [u8; BLOCK],
    /// The values of the codes.
    pub values: [f32; BLOCK],
}

impl Rounded {
    /// Zeros.
    pub const ZERO: Rounded = Rounded {
        scale: 0,
        codes: [0; BLOCK],
        values: [0.0; BLOCK],
    };
}

/// Rounds the weights of a block one after another, each to the code of `scale` that makes most of the errors before it: `sums` are the `s_i`
/// from before the block, and `r` is the block's part of R. Gives the codes and the sum of the squares of the block's `(R^T e)_i`.
fn in_turn(
    weights: &[f32; BLOCK],
    sums: &[f32; BLOCK],
    scale: u8,
    global: f32,
    r: &BlockMoments,
) -> (Rounded, f32) {
    let step = e4m3::decode(scale) * global;
    let inverse = 1.0 / step;
    let mut sums = *sums;
    let mut rounded = Rounded {
        scale,
        ..Rounded::ZERO
    };
    let mut cost = 0.0;
    for i in 0..BLOCK {
        let own = &r[i * BLOCK..][..BLOCK];
        let wanted = weights[i] + sums[i] / own[i];
        let code = e2m1::encode(wanted * inverse, super::Rounding::NearestEven, 0);
        let value = e2m1::decode(code) * step;
        (rounded.codes[i], rounded.values[i]) = (code, value);
        let left = own[i] * (wanted - value);
        cost += left * left;
        let error = weights[i] - value;
        for (sum, r) in sums[i + 1..].iter_mut().zip(&own[i + 1..]) {
            *sum += r * error;
        }
    }
    (rounded, cost)
}

/// A block of zeros has the scale 0, and no other block.
fn without_empty_scale(rounded: Rounded) -> Rounded {
    match rounded.codes.iter().all(|code| code & 7 == 0) {
        true => Rounded::ZERO,
        false => rounded,
    }
}

/// The block whose turn it is: the scale for which the weights, moved by the errors before them, are nearest to codes, by the squares of the
/// diagonal of `r`; and with it the codes that make up for the
/// errors before them in the block too.
pub fn round_in_turn(
    weights: &[f32; BLOCK],
    sums: &[f32; BLOCK],
    global: f32,
    r: &BlockMoments,
) -> Rounded {
    let diagonal: [f32; BLOCK] = std::array::from_fn(|i| r[i * BLOCK + i]);
    let wanted: [f32; BLOCK] = std::array::from_fn(|i| weights[i] + sums[i] / diagonal[i]);
    let mut best = (0, f32::INFINITY);
    for scale in window(&wanted, global) {
        let step = e4m3::decode(scale) * global;
        let mut cost = 0.0;
        for (w, d) in wanted.iter().zip(&diagonal) {
            let magnitude = w.abs();
            let error = d * (magnitude - e2m1::nearest_value(magnitude / step) * step);
            cost += error * error;
        }
        if cost < best.1 {
            best = (scale, cost);
        }
    }
    match best.0 {
        0 => Rounded::ZERO,
        scale => without_empty_scale(in_turn(weights, sums, scale, global, r).0),
    }
}

/// The block that is best beside the others as they are: `gradient` is `2 M e` of its row without the block itself, halved. `moments` is the
/// block's part of M, and `r` its factor. `held` is given back unless another is better.
pub fn round_beside(
    weights: &[f32; BLOCK],
    held: &Rounded,
    gradient: &[f32; BLOCK],
    global: f32,
    (moments, r): (&BlockMoments, &BlockMoments),
) -> Rounded {
    let cost_of = |rounded: &Rounded| {
        let e: [f32; BLOCK] = std::array::from_fn(|i| weights[i] - rounded.values[i]);
        let mut cost = 0.0;
        for (i, row) in moments.as_chunks::<BLOCK>().0.iter().enumerate() {
            let mut product = 0.0;
            for (m, e) in row.iter().zip(&e) {
                product += m * e;
            }
            cost += e[i] * (product + 2.0 * gradient[i]);
        }
        cost
    };
    // Without a grid the best error is -M^-1 g: two triangular systems.
    let mut y = [0f32; BLOCK];
    for i in (0..BLOCK).rev() {
        let own = &r[i * BLOCK..][..BLOCK];
        let known: f32 = (i + 1..BLOCK).map(|k| own[k] * y[k]).sum();
        y[i] = (-gradient[i] - known) / own[i];
    }
    let mut ideal = [0f32; BLOCK];
    for i in 0..BLOCK {
        let known: f32 = (0..i).map(|k| r[k * BLOCK + i] * ideal[k]).sum();
        ideal[i] = (y[i] - known) / r[i * BLOCK + i];
    }
    let target: [f32; BLOCK] = std::array::from_fn(|i| weights[i] - ideal[i]);
    let (mut best, mut least) = (*held, cost_of(held));
    for scale in window(&target, global) {
        let (rounded, _) = in_turn(&target, &[0.0; BLOCK], scale, global, r);
        let rounded = without_empty_scale(rounded);
        let cost = cost_of(&rounded);
        if cost < least {
            (best, least) = (rounded, cost);
        }
    }
    best
}
