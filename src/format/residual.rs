//! Weights under training: an E2M1 code, and a residual counted in steps of the gaps around that code.
//!
//! The 8 magnitudes of E2M1 are levels 0 to 7, and each gap between neighbours is cut into `2^bits` equal steps. A weight is the level
//! nearest to its magnitude, and a signed residual of `bits` bits: the number of steps by which it lies further from zero, or closer. So
//! the grid is fine where values are dense, needs no scale of its own, and a residual that leaves its range carries into the code. Beyond
//! the outermost level the grid continues with steps of the outermost gap, for half of it. A weight nearer to zero than to any other level
//! has a code of 0 or -0 for its sign, and a residual that is not negative.
//!
//! Counted in steps from zero, magnitudes form a float with 2 exponent bits and `bits + 1` mantissa bits, subnormals included. Shifted to
//! the place of an f32's exponent and mantissa, such an index is the magnitude times 2^-126. Decoding and encoding use this.
//!
//! The code alone is the weight rounded to the nearest level, which is its delivered value.

use serde::{Deserialize, Serialize};

use super::{Rounding, e2m1};

/// Bits of a residual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bits {
    /// 4 bits: 16 steps to a gap, residuals -8 to 7.
    #[default]
    Four,
    /// 8 bits: 256 steps to a gap, residuals -128 to 127.
    Eight,
}

impl Bits {
    /// Steps per gap.
    pub const fn steps(self) -> i32 {
        match self {
            Bits::Four => 16,
            Bits::Eight => 256,
        }
    }

    /// The outermost point, in steps.
    const fn last(self) -> u32 {
        (7 * self.steps() + self.steps() / 2 - 1) as u32
    }

    /// Bit position of an index in an f32.
    const fn shift(self) -> u32 {
        match self {
            Bits::Four => 23 - 5,
            Bits::Eight => 23 - 9,
        }
    }
}

/// Random bits per weight for rounding.
pub const DRAW_BITS: u32 = 18;
/// 2^126, and its inverse. f32 products with them are exact unless they become subnormal.
const UP: f32 = f32::from_bits((126 + 127) << 23);
const DOWN: f32 = f32::from_bits(1 << 23);

/// The gap below the outermost level, with which the grid continues.
pub const OUTERMOST: f32 = 2.0;

/// The outermost point of the grid.
pub const fn largest(bits: Bits) -> f32 {
    let beyond = bits.last() as i32 - 7 * bits.steps();
    e2m1::MAX + beyond as f32 * (OUTERMOST / bits.steps() as f32)
}

/// The residual that brings `code` nearest to `value`, in units of the block's scale. NaN counts as zero. A code that is not the nearest
/// gets a residual at the end of its range, and a code of the other sign that of zero.
pub fn beside(code: u8, value: f32, bits: Bits) -> i8 {
    let half = bits.steps() / 2;
    let magnitude = if code & 8 != 0 { -value } else { value };
    let index = match magnitude > 0.0 {
        true => {
            let (level, residual) = encode(magnitude, bits, Rounding::NearestEven, 0);
            i32::from(level) * bits.steps() + i32::from(residual)
        }
        false => 0,
    };
    let level = i32::from(code & 7);
    let least = if level == 0 { 0 } else { -half };
    (index - level * bits.steps()).clamp(least, half - 1) as i8
}

/// The exact value of a code with its residual, of at most 6 or 10 bits.
pub const fn decode(code: u8, residual: i8, bits: Bits) -> f32 {
    let index = (code & 7) as i32 * bits.steps() + residual as i32;
    let magnitude = f32::from_bits(index.unsigned_abs() << bits.shift()) * UP;
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// Encodes `value`, in units of the block's scale, as a code and a residual. Saturates at the ends of the grid; NaN becomes zero. Only
/// [`Rounding::Stochastic`] reads `draw`, [`DRAW_BITS`] random bits: it adds them as a fraction to the magnitude and rounds down. Values on
/// the grid stay, others go to one of their neighbours. The fraction has as many bits as a draw with 4-bit residuals, so that the mean is
/// right.
/// as a draw, so that the mean is right.
#[inline(always)]
pub fn encode(value: f32, bits: Bits, rounding: Rounding, draw: u32) -> (u8, i8) {
    let shift = bits.shift();
    let value = if value.is_nan() { 0.0 } else { value };
    // At most infinity, which still allows the addition of a step.
    let exact = (value.abs() * DOWN).to_bits();
    let half = 1 << (shift - 1);
    let rounded = match rounding {
        Rounding::NearestEven => exact + half - 1 + (exact >> shift & 1),
        Rounding::HalfAway => exact + half,
        Rounding::Stochastic => exact + (draw >> (DRAW_BITS - shift)),
    };
    let (code, residual) = split((rounded >> shift).min(bits.last()), bits);
    (code | u8::from(value.is_sign_negative()) << 3, residual)
}

/// Code and residual of a magnitude in steps.
const fn split(index: u32, bits: Bits) -> (u8, i8) {
    let level = (index as i32 + bits.steps() / 2) / bits.steps();
    (level as u8, (index as i32 - level * bits.steps()) as i8)
}

#[cfg(test)]
mod tests {
    use super::super::{e2m1, random};
    use super::*;

    /// Every point of the grid, in rising order, with its code and residual.
    fn points(bits: Bits) -> impl Iterator<Item = (f32, (u8, i8))> {
        let last = bits.last() as i32;
        (-last..=last).map(move |index| {
            let (code, residual) = split(index.unsigned_abs(), bits);
            let code = code | u8::from(index < 0) << 3;
            (decode(code, residual, bits), (code, residual))
        })
    }

    /// Levels match E2M1, and gaps are cut evenly.
    #[test]
    fn the_grid_is_that_of_e2m1_in_steps() {
        for bits in [Bits::Four, Bits::Eight] {
            let level = |i: i32| match i {
                8 => 8.0,
                i => e2m1::decode(i as u8),
            };
            for (value, (code, residual)) in points(bits) {
                let index = i32::from(code & 7) * bits.steps() + i32::from(residual);
                let (whole, part) = (index / bits.steps(), index % bits.steps());
                let gap = level(whole + 1) - level(whole);
                let magnitude = level(whole) + gap * part as f32 / bits.steps() as f32;
                let sign = if code & 8 != 0 { -1.0 } else { 1.0 };
                assert_eq!(value, sign * magnitude);
            }
        }
    }

    #[test]
    fn points_rise_and_are_their_own_encoding() {
        for bits in [Bits::Four, Bits::Eight] {
            let mut previous = f32::NEG_INFINITY;
            for (value, stored) in points(bits) {
                assert!(value > previous, "{bits:?} {stored:?}");
                previous = value;
                for rounding in [
                    Rounding::NearestEven,
                    Rounding::HalfAway,
                    Rounding::Stochastic,
                ] {
                    assert_eq!(encode(value, bits, rounding, (1 << DRAW_BITS) - 1), stored);
                    assert_eq!(encode(value, bits, rounding, 0), stored);
                }
            }
        }
    }

    #[test]
    fn the_code_alone_is_the_nearest_level() {
        for bits in [Bits::Four, Bits::Eight] {
            for (value, (code, _)) in points(bits) {
                let nearest = e2m1::decode(e2m1::encode(value, Rounding::NearestEven, 0));
                let own = e2m1::decode(code);
                assert!(
                    (own - value).abs() <= (nearest - value).abs(),
                    "{bits:?}: {value} has the code of {own}"
                );
            }
        }
    }

    /// The mean over all draws equals the value exactly.
    #[test]
    fn all_draws_together_are_exact() {
        for value in [0.0131f32, 0.2499, -1.77, 1.9999, 3.999, -5.03, 6.51] {
            let sum: f64 = (0..1 << DRAW_BITS)
                .map(|draw| {
                    let (code, residual) = encode(value, Bits::Four, Rounding::Stochastic, draw);
                    f64::from(decode(code, residual, Bits::Four))
                })
                .sum();
            let mean = sum / f64::from(1 << DRAW_BITS);
            assert!(
                (mean - f64::from(value)).abs() <= 2f64.powi(-24),
                "{value}: {mean}"
            );
        }
    }

    #[test]
    fn stochastic_rounding_is_unbiased() {
        const N: u64 = 1 << 16;
        for (seed, value) in [
            (1, 0.013),
            (2, 0.249),
            (3, -1.77),
            (4, 3.999),
            (5, -5.03),
            (6, 6.51),
        ] {
            let sum: f64 = (0..N)
                .map(|i| {
                    let draw = (random::bits(seed, i) >> (64 - DRAW_BITS)) as u32;
                    let (code, residual) = encode(value, Bits::Four, Rounding::Stochastic, draw);
                    f64::from(decode(code, residual, Bits::Four))
                })
                .sum();
            // Five standard deviations of a draw between two points, which are at most 1/8 apart.
            let bound = 5.0 * 0.5 * 0.125 / (N as f64).sqrt();
            assert!((sum / N as f64 - f64::from(value)).abs() < bound, "{value}");
        }
    }

    /// For the nearest code, the residual equals that of encoding.
    #[test]
    fn residuals_are_found_beside_codes() {
        for bits in [Bits::Four, Bits::Eight] {
            for (value, (code, residual)) in points(bits) {
                // A zero without a residual may have either sign.
                assert_eq!(beside(code, value, bits), residual, "{bits:?} {value}");
            }
            for value in [0.013f32, -0.2499, 1.9, -5.03, 6.51, 1e9, -1e-9] {
                let (code, residual) = encode(value, bits, Rounding::NearestEven, 0);
                assert_eq!(beside(code, value, bits), residual, "{bits:?} {value}");
                let ends = [beside(7, value, bits), beside(15, value, bits)];
                let (low, high) = ((-bits.steps() / 2) as i8, (bits.steps() / 2 - 1) as i8);
                assert!(ends.iter().all(|r| (low..=high).contains(r)));
                assert!(ends.contains(&low));
            }
            assert_eq!(beside(0, -3.0, bits), 0);
            assert_eq!(beside(3, f32::NAN, bits), (-bits.steps() / 2) as i8);
            let last = points(bits).last().unwrap().0;
            assert_eq!(largest(bits), last);
        }
    }

    #[test]
    fn values_beyond_the_grid_saturate() {
        for bits in [Bits::Four, Bits::Eight] {
            let ends = [points(bits).next(), points(bits).last()];
            let [low, high] = ends.map(|end| end.unwrap().1);
            assert_eq!(encode(f32::INFINITY, bits, Rounding::NearestEven, 0), high);
            assert_eq!(encode(-1e30, bits, Rounding::Stochastic, 7), low);
            assert_eq!((high.0, low.0), (7, 15));
            assert_eq!(encode(f32::NAN, bits, Rounding::NearestEven, 0), (0, 0));
        }
    }
}
