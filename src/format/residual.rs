//! Weights that an optimizer updates: an E2M1 code and a residual that is counted in steps of the code's own neighbourhood.
//!
//! The 15 values of E2M1 are levels -7 to 7, and each gap between neighbours is cut into `2^bits` equal steps. A weight is the level
//! nearest to it and a signed residual of `bits` bits: the number of steps above (of the gap above the level) or below (of the gap below).
//! So the grid is fine where values are dense, needs no scale of its own, and a residual that leaves its range carries into the code. Beyond
//! the outermost levels the grid goes on with steps of the outermost gap, for half of it.
//!
//! The code alone is the weight rounded to the nearest level, which is what is delivered.

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
    /// Steps of a gap.
    pub const fn steps(self) -> i32 {
        match self {
            Bits::Four => 16,
            Bits::Eight => 256,
        }
    }

    /// The outermost point that has a code on either side, in steps.
    const fn last(self) -> i32 {
        7 * self.steps() + self.steps() / 2 - 1
    }

    /// A draw as a fraction, with as many bits as an f32 has beside [`Bits::last`].
    const fn fraction(self, draw: u16) -> f32 {
        match self {
            Bits::Four => (draw as f32 + 0.5) * (1.0 / 65536.0),
            Bits::Eight => ((draw >> 4) as f32 + 0.5) * (1.0 / 4096.0),
        }
    }
}

/// The magnitude of a level, which may be one beyond the outermost: 8 stands for 8.
const fn magnitude(level: u32) -> f32 {
    match level {
        8 => 8.0,
        level => e2m1::decode(level as u8),
    }
}

/// The level of an E2M1 code, -7 to 7. Both zeros are level 0.
const fn level(code: u8) -> i32 {
    let magnitude = (code & 7) as i32;
    if code & 8 != 0 { -magnitude } else { magnitude }
}

/// The value of a code with its residual, exactly: at most 6 + 7 bits.
pub const fn decode(code: u8, residual: i8, bits: Bits) -> f32 {
    point(level(code) * bits.steps() + residual as i32, bits)
}

/// The value of a point of the grid, counted in steps from zero.
const fn point(index: i32, bits: Bits) -> f32 {
    let (whole, part) = (
        index.unsigned_abs() / bits.steps() as u32,
        index.unsigned_abs() % bits.steps() as u32,
    );
    let low = magnitude(whole);
    let value = match part {
        0 => low,
        _ => low + (magnitude(whole + 1) - low) * part as f32 / bits.steps() as f32,
    };
    if index < 0 { -value } else { value }
}

/// The code and the residual for `value`, in units of the block's scale. Saturates at the ends of the grid; a NaN becomes zero.
/// `draw`, 16 random bits, is read by [`Rounding::Stochastic`] only, which adds it as a fraction to the magnitude and rounds down: what
/// lies on the grid stays there, and what does not goes to one of its neighbours.
#[inline(always)]
pub fn encode(value: f32, bits: Bits, rounding: Rounding, draw: u16) -> (u8, i8) {
    let steps = bits.steps();
    let x = if value.is_nan() { 0.0 } else { value.abs() };
    // Where the value lies between levels, in gaps from zero.
    let gaps = if x < 2.0 {
        2.0 * x
    } else if x < 4.0 {
        x + 2.0
    } else {
        (0.5 * x + 4.0).min(8.0)
    };
    let exact = (gaps * steps as f32).min(bits.last() as f32);
    let index = match rounding {
        Rounding::NearestEven => exact.round_ties_even(),
        Rounding::HalfAway => (exact + 0.5).floor(),
        Rounding::Stochastic => (exact + bits.fraction(draw)).floor(),
    } as i32;
    split(if value < 0.0 { -index } else { index }, bits)
}

/// The code and the residual of a point of the grid.
const fn split(index: i32, bits: Bits) -> (u8, i8) {
    let steps = bits.steps();
    let level = (index + steps / 2).div_euclid(steps);
    let code = match level {
        0.. => level as u8,
        _ => 8 | -level as u8,
    };
    (code, (index - level * steps) as i8)
}

#[cfg(test)]
mod tests {
    use super::super::random;
    use super::*;

    fn indices(bits: Bits) -> std::ops::Range<i32> {
        -bits.last()..bits.last() + 1
    }

    #[test]
    fn points_rise_and_are_their_own_encoding() {
        for bits in [Bits::Four, Bits::Eight] {
            let mut previous = f32::NEG_INFINITY;
            for index in indices(bits) {
                let (code, residual) = split(index, bits);
                let value = decode(code, residual, bits);
                assert!(value > previous, "{bits:?} {index}");
                previous = value;
                for rounding in [
                    Rounding::NearestEven,
                    Rounding::HalfAway,
                    Rounding::Stochastic,
                ] {
                    assert_eq!(encode(value, bits, rounding, u16::MAX), (code, residual));
                    assert_eq!(encode(value, bits, rounding, 0), (code, residual));
                }
            }
        }
    }

    #[test]
    fn the_code_alone_is_the_nearest_level() {
        for bits in [Bits::Four, Bits::Eight] {
            for index in indices(bits) {
                let (code, residual) = split(index, bits);
                let value = decode(code, residual, bits);
                let nearest = e2m1::decode(e2m1::encode(value, Rounding::NearestEven, 0));
                let own = e2m1::decode(code);
                assert!(
                    (own - value).abs() <= (nearest - value).abs(),
                    "{bits:?}: {value} has the code of {own}"
                );
            }
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
                    let draw = random::bits(seed, i) as u16;
                    let (code, residual) = encode(value, Bits::Four, Rounding::Stochastic, draw);
                    f64::from(decode(code, residual, Bits::Four))
                })
                .sum();
            // Five standard deviations of a draw between two points, which are at most 1/8 apart.
            let bound = 5.0 * 0.5 * 0.125 / (N as f64).sqrt();
            assert!((sum / N as f64 - f64::from(value)).abs() < bound, "{value}");
        }
    }

    #[test]
    fn values_beyond_the_grid_saturate() {
        for bits in [Bits::Four, Bits::Eight] {
            let ends = [indices(bits).start, indices(bits).end - 1];
            let [low, high] = ends.map(|index| split(index, bits));
            assert_eq!(encode(f32::INFINITY, bits, Rounding::NearestEven, 0), high);
            assert_eq!(encode(-1e30, bits, Rounding::Stochastic, 7), low);
            assert_eq!((high.0, low.0), (7, 15));
            assert_eq!(encode(f32::NAN, bits, Rounding::NearestEven, 0), (0, 0));
        }
    }
}
