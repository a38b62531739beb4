//! Softmax weights as integers, whose sums do not depend on the order of summation.

use crate::cpu::simd::Simd;

/// The weight of the largest logit is 2 to this power. Smaller weights lose their fraction below 1; the sum of eight million weights still
/// fits in 64 bits.
pub(in crate::cpu) const WEIGHT_BITS: i32 = 40;

/// The Taylor series of 2^x around 0, from x^7 down. Its remainder on |x| <= 1/2 is below half an ulp.
const SERIES: [f32; 7] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    0.240_226_5,
    std::f32::consts::LN_2,
];

/// For `n` logits, a multiple of 16: computes their logarithms to base 2 relative to the largest, `(x - largest) * scale`, and 2 to that
/// power times 2^[`WEIGHT_BITS`], whose integer part is the weight. `kernels/sample/draw.cu` computes the same bits.
///
/// # Safety
/// As for [`Simd`], with `n` elements behind each pointer.
#[inline(always)]
pub(in crate::cpu) unsafe fn weigh<S: Simd>(
    x: *const f32,
    n: usize,
    largest: f32,
    scale: f32,
    logs: *mut f32,
    weights: *mut f32,
) {
    // SAFETY: forwarded.
    unsafe {
        for i in (0..n).step_by(16) {
            let log = S::mul(
                S::sub(S::load(x.add(i)), S::splat(largest)),
                S::splat(scale),
            );
            S::store(logs.add(i), log);
            // Anything smaller also has weight 0, but would underflow a float.
            let log = S::max(log, S::splat(-(WEIGHT_BITS as f32) - 2.0));
            let n = S::round(log);
            let r = S::sub(log, n);
            let mut sum = S::splat(SERIES[0]);
            for c in &SERIES[1..] {
                sum = S::fma(sum, r, S::splat(*c));
            }
            let power = S::fma(sum, r, S::splat(1.0));
            let n = S::add(n, S::splat(WEIGHT_BITS as f32));
            S::store(weights.add(i), S::scale_by_power(power, n));
        }
    }
}
