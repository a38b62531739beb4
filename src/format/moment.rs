//! Optimizer moments in 4 bits: codes in blocks of 16 with one E4M3 scale each and one f32 per tensor, as in NVFP4.
//!
//! The first moment is a signed integer, -7 to 7, times the scales, with subtractive dither: a pseudo-random fraction is added before
//! rounding and subtracted when the code is read. The error is then uniform and independent of the value (Roberts, 1962), and small
//! contributions to the exponential average survive rounding.
//!
//! The second moment is stored as its square root, which halves the range of exponents: an unsigned integer, 1 to 15, times the scales.
//! Stochastic rounding keeps steps far below the distance of codes on average. No code is zero, because a step divides by it; only a whole
//! block can be zero, by its scale.
//!
//! Scales are rounded up, so nothing is clipped.

use super::{e4m3, nvfp4::BLOCK};

/// The largest code of a first moment.
pub const FIRST_MAX: f32 = 7.0;
/// The largest code of the square root of a second moment.
pub const SECOND_MAX: f32 = 15.0;

/// The largest code of a first or second moment in 8 bits.
pub const WIDE_MAX: f32 = 127.0;

/// The scale of a block whose largest magnitude is `amax`. `inverse` is 1 divided by the largest code and the global scale.
#[inline]
pub fn scale(amax: f32, inverse: f32) -> u8 {
    e4m3::encode_up(amax * inverse)
}

/// Fractional steps of a code, in which quotients are counted before rounding.
const STEPS: f32 = 65536.0;
/// From 2^23 on, an f32 has steps of one.
const TWO_23: f32 = 8_388_608.0;

/// The dither for a draw of 8 bits, in [-1/2, 1/2): a multiple of 2^-8 plus half of one, so that its mean is zero.
#[inline(always)]
pub const fn dither(draw: u8) -> f32 {
    (draw as f32 + 0.5) * (1.0 / 256.0) - 0.5
}

/// Code of a first moment, four bits in two's complement: the integer nearest to the quotient plus the dither. `inverse` is the reciprocal
/// of its scales, and `draw` the random bits of its dither.
#[inline(always)]
pub fn encode_first(value: f32, inverse: f32, draw: u8) -> u8 {
    // The dither plus a half, in steps, on top of a number that leaves room for negative codes below.
    let fraction = 1.5 * TWO_23 + (f32::from(draw) * 256.0 + 128.0);
    (value.mul_add(inverse * STEPS, fraction).to_bits() >> 16) as u8 & 15
}

/// A first moment divided by its scales.
#[inline(always)]
pub const fn decode_first(code: u8, dither: f32) -> f32 {
    ((code << 4) as i8 >> 4) as f32 - dither
}

/// Code of the square root of a second moment, 1 to 15, rounded stochastically: a draw of 16 bits is added as a fraction before rounding
/// down. `inverse` is the reciprocal of its scales.
#[inline(always)]
pub fn encode_second(root: f32, inverse: f32, draw: u16) -> u8 {
    let steps = root.mul_add(inverse * STEPS, TWO_23 + f32::from(draw));
    ((steps.to_bits() >> 16) as u8 & 15).max(1)
}

/// The square root of a second moment divided by its scales.
#[inline(always)]
pub const fn decode_second(code: u8) -> f32 {
    (code & 15) as f32
}

/// The largest magnitude of a block.
#[inline]
pub fn amax(block: &[f32; BLOCK]) -> f32 {
    block.iter().fold(0.0, |max, v| v.abs().max(max))
}

#[cfg(test)]
mod tests {
    use super::super::random::{bits, bits16};
    use super::*;

    #[test]
    fn first_moments_are_read_without_bias() {
        const N: u32 = 1 << 16;
        for (seed, value) in [
            (1, 0.0),
            (2, 0.003),
            (3, -0.4),
            (4, 3.5),
            (5, -6.97),
            (6, 7.0),
        ] {
            let key = bits(seed, 0);
            let (mut sum, mut largest) = (0.0, 0f32);
            for i in 0..N {
                let draw = (bits16(key, i) >> 8) as u8;
                // Under scales with product 1/4.
                let code = encode_first(value * 0.25, 4.0, draw);
                let error = decode_first(code, dither(draw)) - value;
                sum += f64::from(error);
                largest = largest.max(error.abs());
            }
            // The error is uniform over half a code in both directions: five standard deviations of its mean.
            let bound = 5.0 * (1.0 / 12f64).sqrt() / f64::from(N).sqrt();
            assert!((sum / f64::from(N)).abs() < bound, "{value}: {sum}");
            assert!(largest <= 0.5 + 1e-6, "{value}: {largest}");
        }
    }

    #[test]
    fn second_moments_are_never_zero_and_right_on_average() {
        const N: u32 = 1 << 16;
        for (seed, value) in [(1, 1.0), (2, 1.0005), (3, 7.4), (4, 14.9995), (5, 15.0)] {
            let key = bits(seed, 0);
            let sum: f64 = (0..N)
                .map(|i| decode_second(encode_second(value * 4.0, 0.25, bits16(key, i))))
                .map(f64::from)
                .sum();
            let bound = 5.0 * 0.5 / f64::from(N).sqrt();
            assert!(
                (sum / f64::from(N) - f64::from(value)).abs() < bound,
                "{value}"
            );
        }
        for draw in [0, 1, u16::MAX] {
            assert_eq!(encode_second(0.0, 1.0, draw), 1);
            assert_eq!(encode_second(0.3, 1.0, draw), 1);
            assert_eq!(encode_second(15.0, 1.0, draw), 15);
        }
    }

    #[test]
    fn scales_clip_nothing() {
        for global in [1.0, 2f32.powi(-30), 0.37] {
            for i in 0..1000 {
                let amax = global * 1.013f32.powi(i) * 1e-2;
                let byte = scale(amax, 1.0 / (SECOND_MAX * global));
                let reach = SECOND_MAX * e4m3::decode(byte) * global;
                assert!(
                    reach >= amax * (1.0 - 1e-6) || byte == e4m3::MAX_BYTE,
                    "{amax}"
                );
            }
            assert_eq!(scale(0.0, 1.0 / (FIRST_MAX * global)), 0);
        }
    }
}
