//! The moments of an optimizer in 4 bits: codes in blocks of 16 with an E4M3 scale each and one f32 for the tensor, as NVFP4 has them.
//!
//! The first moment is a signed integer, -7 to 7, times the scales, with subtractive dither: a pseudo-random fraction is added before
//! rounding and subtracted when the code is read, so that the error is uniform and independent of the value (Roberts, 1962), and what an
//! exponential average forgets slowly is not lost to rounding.
//!
//! The second moment is held as its square root, which halves the range of exponents: an unsigned integer, 1 to 15, times the scales,
//! rounded stochastically so that steps far below the distance of codes are kept on average. There is no code for zero, by which a step
//! would be divided; a block is zero only as a whole, by its scale.
//!
//! Scales are rounded up, so that nothing is clipped.

use super::{e4m3, nvfp4::BLOCK};

/// The largest code of a first moment.
pub const FIRST_MAX: f32 = 7.0;
/// The largest code of the square root of a second moment.
pub const SECOND_MAX: f32 = 15.0;

/// The largest code of a first or second moment in 8 bits.
pub const WIDE_MAX: f32 = 127.0;

/// The scale of a block whose largest magnitude is `amax`; `inverse` is 1 divided by the largest code and the global scale.
#[inline]
pub fn scale(amax: f32, inverse: f32) -> u8 {
    e4m3::encode_up(amax * inverse)
}

/// Steps of a code that quotients are counted in before they are rounded to one.
const STEPS: f32 = 65536.0;
/// An f32 of 2^23 and more steps by one.
const TWO_23: f32 = 8_388_608.0;

/// The dither of a draw of 8 bits, in [-1/2, 1/2): a multiple of 2^-8 plus half of one, so that its mean is zero.
#[inline(always)]
pub const fn dither(draw: u8) -> f32 {
    (draw as f32 + 0.5) * (1.0 / 256.0) - 0.5
}

/// The code, four bits in two's complement, of a first moment: `inverse` is that of its scales, and `draw` that of its dither. The nearest
/// to the quotient plus the dither.
#[inline(always)]
pub fn encode_first(value: f32, inverse: f32, draw: u8) -> u8 {
    // The dither plus a half, in steps, above a number under which there is room for negative codes.
    let fraction = 1.5 * TWO_23 + (f32::from(draw) * 256.0 + 128.0);
    (value.mul_add(inverse * STEPS, fraction).to_bits() >> 16) as u8 & 15
}

/// A first moment divided by its scales.
#[inline(always)]
pub const fn decode_first(code: u8, dither: f32) -> f32 {
    ((code << 4) as i8 >> 4) as f32 - dither
}

/// The code, 1 to 15, of the square root of a second moment, rounded down after a draw of 16 bits has been added as a fraction: to the
/// upper neighbour as often as the distance from the lower one says. `inverse` is that of its scales.
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
                // Under scales of 1/4.
                let code = encode_first(value * 0.25, 4.0, draw);
                let error = decode_first(code, dither(draw)) - value;
                sum += f64::from(error);
                largest = largest.max(error.abs());
            }
            // The error is uniform in half a code either way: five standard deviations of its mean.
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
