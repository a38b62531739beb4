//! Calibrated quantization of blocks of 16 weights, see [`crate::format::calibrated`]. Sixteen rows of a matrix, one per lane, are rounded
//! side by side; they share only the moments of their inputs.

use crate::cpu::simd::Simd;
use crate::format::calibrated::BlockFactor;
use crate::format::e2m1;
use crate::format::e4m3;
use crate::format::input_moments::{BlockMoments, TRIED, first_tried};
use crate::format::nvfp4::BLOCK;

/// Rows that are rounded side by side.
pub(in crate::cpu) const LANES: usize = 16;
/// The weights of one block in sixteen rows: `[input][row]`.
pub(in crate::cpu) type Blocks = [[f32; LANES]; BLOCK];

/// Blocks of sixteen rows in NVFP4.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::cpu) struct Rounded {
    /// E4M3.
    pub(in crate::cpu) scales: [u8; LANES],
    /// The values of the codes.
    pub(in crate::cpu) values: Blocks,
}

impl Rounded {
    /// Zeros.
    pub(in crate::cpu) const ZERO: Rounded = Rounded {
        scales: [0; LANES],
        values: [[0.0; LANES]; BLOCK],
    };
}

/// The nearest E2M1 value, ties to even codes: numbers below 2 round to multiples of 1/2, those below 4 to multiples of 1, and others to
/// multiples of 2. Adding and subtracting 1.5 x 2^22 times the power of two has that effect.
#[inline(always)]
unsafe fn nearest<S: Simd>(x: S::V) -> S::V {
    // SAFETY: forwarded.
    unsafe {
        let x = S::min(S::max(x, S::splat(-e2m1::MAX)), S::splat(e2m1::MAX));
        let power = S::power_below(S::max(S::abs(x), S::splat(1.0)));
        let shift = S::mul(power, S::splat(1.5 * (1 << 22) as f32));
        S::sub(S::add(x, shift), shift)
    }
}

/// The first candidate scale of each row, from the largest magnitudes to be rounded.
struct Window([u8; LANES]);

impl Window {
    #[inline(always)]
    unsafe fn new<S: Simd>(rounded: &[S::V; BLOCK], global: f32) -> Window {
        // SAFETY: forwarded.
        unsafe {
            let mut largest = S::splat(0.0);
            for x in rounded {
                largest = S::max(largest, S::abs(*x));
            }
            let mut amax = [0f32; LANES];
            S::store(amax.as_mut_ptr(), largest);
            Window(amax.map(|amax| first_tried(amax, global)))
        }
    }

    #[inline(always)]
    fn scales(&self, offset: [u8; LANES]) -> [u8; LANES] {
        std::array::from_fn(|row| (self.0[row] + offset[row]).min(e4m3::MAX_BYTE))
    }

    /// The values of the candidate scales that are evaluated together.
    #[inline(always)]
    unsafe fn steps<S: Simd>(&self, offset: usize, global: f32) -> S::V {
        let scales = self.scales([offset as u8; LANES]);
        // SAFETY: forwarded; no scale has a sign, or is NaN.
        unsafe { S::mul(S::load_e4m3(scales.as_ptr()), S::splat(global)) }
    }

    /// The scale at each lane's offset in `best`; the first one for a negative offset.
    #[inline(always)]
    unsafe fn best<S: Simd>(&self, best: S::V) -> [u8; LANES] {
        let mut offsets = [0f32; LANES];
        // SAFETY: forwarded.
        unsafe { S::store(offsets.as_mut_ptr(), best) };
        self.scales(offsets.map(|offset| offset as u8))
    }
}

#[inline(always)]
unsafe fn load<S: Simd>(blocks: &Blocks) -> [S::V; BLOCK] {
    // SAFETY: forwarded; a row of a block has as many elements as a vector.
    unsafe { std::array::from_fn(|i| S::load(blocks[i].as_ptr())) }
}

/// Rounds weights one after another, each to the value that best compensates for the errors before it. `sums` holds the `s_i` from before
/// the block. Returns the values, and the sums of the squares of the block's `(R^T e)_i`.
#[inline(always)]
unsafe fn in_turn<S: Simd>(
    weights: &[S::V; BLOCK],
    sums: &[S::V; BLOCK],
    steps: S::V,
    factor: &BlockFactor,
) -> ([S::V; BLOCK], S::V) {
    // SAFETY: forwarded.
    unsafe {
        let zero = S::splat(0.0);
        let inverses = S::div(S::splat(1.0), steps);
        let (mut values, mut errors, mut cost) = ([zero; BLOCK], [zero; BLOCK], zero);
        for i in 0..BLOCK {
            let mut sum = sums[i];
            for j in 0..i {
                sum = S::fma(S::splat(factor.r[j * BLOCK + i]), errors[j], sum);
            }
            let wanted = S::fma(sum, S::splat(factor.inverses[i]), weights[i]);
            values[i] = S::mul(nearest::<S>(S::mul(wanted, inverses)), steps);
            errors[i] = S::sub(weights[i], values[i]);
            let left = S::mul(
                S::splat(factor.r[i * (BLOCK + 1)]),
                S::sub(wanted, values[i]),
            );
            cost = S::fma(left, left, cost);
        }
        (values, cost)
    }
}

/// `e^T M e` of errors, by the factor of M.
#[inline(always)]
unsafe fn cost<S: Simd>(errors: &[S::V; BLOCK], factor: &BlockFactor) -> S::V {
    // SAFETY: forwarded.
    unsafe {
        let mut cost = S::splat(0.0);
        for i in 0..BLOCK {
            let mut sum = S::splat(0.0);
            for j in 0..=i {
                sum = S::fma(S::splat(factor.r[j * BLOCK + i]), errors[j], sum);
            }
            cost = S::fma(sum, sum, cost);
        }
        cost
    }
}

/// Stores values under their scales. A block of zeros, and no other, has the scale 0.
#[inline(always)]
unsafe fn store<S: Simd>(values: &[S::V; BLOCK], scales: [u8; LANES], to: &mut Rounded) {
    let mut largest = [0f32; LANES];
    // SAFETY: forwarded.
    unsafe {
        let mut most = S::splat(0.0);
        for (value, to) in values.iter().zip(&mut to.values) {
            most = S::max(most, S::abs(*value));
            S::store(to.as_mut_ptr(), *value);
        }
        S::store(largest.as_mut_ptr(), most);
    }
    to.scales = std::array::from_fn(|row| if largest[row] > 0.0 { scales[row] } else { 0 });
}

/// Rounds the next blocks. The scale is the one under which the weights, shifted by the errors before them, are nearest to codes, weighted
/// by the squared diagonal of R; the codes then compensate for all errors before them, also within the block.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(in crate::cpu) unsafe fn round_in_turn<S: Simd>(
    weights: &Blocks,
    sums: &Blocks,
    global: f32,
    factor: &BlockFactor,
    out: &mut Rounded,
) {
    // SAFETY: forwarded.
    unsafe {
        let (weights, sums) = (load::<S>(weights), load::<S>(sums));
        let mut wanted = weights;
        for i in 0..BLOCK {
            wanted[i] = S::fma(sums[i], S::splat(factor.inverses[i]), weights[i]);
        }
        let window = Window::new::<S>(&wanted, global);
        let (mut best, mut least) = (S::splat(0.0), S::splat(f32::INFINITY));
        for offset in 0..TRIED {
            let steps = window.steps::<S>(offset, global);
            let inverses = S::div(S::splat(1.0), steps);
            let mut cost = S::splat(0.0);
            for i in 0..BLOCK {
                let value = S::mul(nearest::<S>(S::mul(wanted[i], inverses)), steps);
                let own = S::splat(factor.r[i * (BLOCK + 1)]);
                let left = S::mul(own, S::sub(wanted[i], value));
                cost = S::fma(left, left, cost);
            }
            best = S::select_less(cost, least, S::splat(offset as f32), best);
            least = S::min(cost, least);
        }
        let scales = window.best::<S>(best);
        let steps = S::mul(S::load_e4m3(scales.as_ptr()), S::splat(global));
        let (values, _) = in_turn::<S>(&weights, &sums, steps, factor);
        store::<S>(&values, scales, out);
    }
}

/// Optimizes blocks while the others stay fixed: `gradients` are `M e` of their rows, `moments` the block's part of M, and `factor` its
/// factor. Keeps the present state unless another one is better. Returns whether anything has changed, and in `changes` the change of the
/// errors.
///
/// # Safety
/// As for [`Simd`].
#[inline(always)]
pub(in crate::cpu) unsafe fn round_beside<S: Simd>(
    weights: &Blocks,
    gradients: &Blocks,
    global: f32,
    (moments, factor): (&BlockMoments, &BlockFactor),
    held: &mut Rounded,
    changes: &mut Blocks,
) -> bool {
    // SAFETY: forwarded.
    unsafe {
        let (weights, before) = (load::<S>(weights), load::<S>(&held.values));
        let zero = S::splat(0.0);
        let zeros = [zero; BLOCK];
        // Without a grid, the best error is -M^-1 g, where g are the gradients from the other blocks: two triangular systems.
        let (mut errors, mut others) = (zeros, zeros);
        for i in 0..BLOCK {
            errors[i] = S::sub(weights[i], before[i]);
        }
        for i in 0..BLOCK {
            let mut own = zero;
            for j in 0..BLOCK {
                own = S::fma(S::splat(moments[i * BLOCK + j]), errors[j], own);
            }
            others[i] = S::sub(S::load(gradients[i].as_ptr()), own);
        }
        let (mut y, mut ideal, mut target) = (zeros, zeros, zeros);
        for i in (0..BLOCK).rev() {
            let mut sum = others[i];
            for j in i + 1..BLOCK {
                sum = S::fma(S::splat(factor.r[i * BLOCK + j]), y[j], sum);
            }
            y[i] = S::mul(sum, S::splat(-factor.inverses[i]));
        }
        for i in 0..BLOCK {
            let mut sum = S::sub(zero, y[i]);
            for j in 0..i {
                sum = S::fma(S::splat(factor.r[j * BLOCK + i]), ideal[j], sum);
            }
            ideal[i] = S::mul(sum, S::splat(-factor.inverses[i]));
            target[i] = S::sub(weights[i], ideal[i]);
            errors[i] = S::sub(target[i], before[i]);
        }
        let (mut best, mut least) = (S::splat(-1.0), cost::<S>(&errors, factor));
        let window = Window::new::<S>(&target, global);
        for offset in 0..TRIED {
            let steps = window.steps::<S>(offset, global);
            let (_, cost) = in_turn::<S>(&target, &zeros, steps, factor);
            best = S::select_less(cost, least, S::splat(offset as f32), best);
            least = S::min(cost, least);
        }
        if S::largest(best) < 0.0 {
            return false;
        }
        let mut scales = window.best::<S>(best);
        let steps = S::mul(S::load_e4m3(scales.as_ptr()), S::splat(global));
        let (mut values, _) = in_turn::<S>(&target, &zeros, steps, factor);
        let mut offsets = [0f32; LANES];
        S::store(offsets.as_mut_ptr(), best);
        for (row, offset) in offsets.into_iter().enumerate() {
            if offset < 0.0 {
                scales[row] = held.scales[row];
            }
        }
        for i in 0..BLOCK {
            values[i] = S::select_less(best, zero, before[i], values[i]);
            S::store(changes[i].as_mut_ptr(), S::sub(before[i], values[i]));
        }
        store::<S>(&values, scales, held);
        true
    }
}
