//! E2M1, the 4-bit element of NVFP4: one sign bit, two exponent bits (bias 1), one mantissa bit, neither infinity nor NaN.
//! Codes 0 to 7 are the magnitudes in rising order; bit 3 is the sign, and code 8 is a negative zero.

use super::Rounding;

/// Largest magnitude.
pub const MAX: f32 = 6.0;

/// Value of each code.
pub const VALUES: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Value of a code. Bits above the lowest four are ignored.
pub const fn decode(code: u8) -> f32 {
    VALUES[(code & 15) as usize]
}

/// The code for `value`, saturating at ±6. The sign bit is that of the value, so a negative value that rounds to zero becomes code 8. NaN
/// has no code and becomes a zero: callers check for it first. Only [`Rounding::Stochastic`] reads `random`.
pub fn encode(value: f32, rounding: Rounding, random: u32) -> u8 {
    let magnitude = match rounding {
        Rounding::NearestEven => nearest_even(value.abs()),
        Rounding::HalfAway => half_away(value.abs()),
        Rounding::Stochastic => stochastic(value.abs(), random),
    };
    magnitude as u8 | sign(value) as u8
}

/// Sign bit of a code, in place.
#[inline(always)]
pub(super) fn sign(value: f32) -> u32 {
    (value.to_bits() >> 28) & 8
}

// Both roundings to nearest count the thresholds that a magnitude exceeds. Without branches and tables, a loop over them vectorizes on any
// machine.

/// Magnitude code of a non-negative value; a tie goes to the even code.
#[inline(always)]
pub(super) fn nearest_even(magnitude: f32) -> u32 {
    u32::from(magnitude > 0.25)
        + u32::from(magnitude >= 0.75)
        + u32::from(magnitude > 1.25)
        + u32::from(magnitude >= 1.75)
        + u32::from(magnitude > 2.5)
        + u32::from(magnitude >= 3.5)
        + u32::from(magnitude > 5.0)
}

/// The E2M1 value nearest to a non-negative value: that of its [`nearest_even`] code, without a table.
#[inline(always)]
pub(super) fn nearest_value(magnitude: f32) -> f32 {
    let step = |height: f32, is_passed: bool| if is_passed { height } else { 0.0 };
    step(0.5, magnitude > 0.25)
        + step(0.5, magnitude >= 0.75)
        + step(0.5, magnitude > 1.25)
        + step(0.5, magnitude >= 1.75)
        + step(1.0, magnitude > 2.5)
        + step(1.0, magnitude >= 3.5)
        + step(2.0, magnitude > 5.0)
}

/// Magnitude code of a non-negative value; a tie goes to the larger one.
#[inline(always)]
pub(super) fn half_away(magnitude: f32) -> u32 {
    u32::from(magnitude >= 0.25)
        + u32::from(magnitude >= 0.75)
        + u32::from(magnitude >= 1.25)
        + u32::from(magnitude >= 1.75)
        + u32::from(magnitude >= 2.5)
        + u32::from(magnitude >= 3.5)
        + u32::from(magnitude >= 5.0)
}

/// Magnitude code of a non-negative value. It is the upper neighbour if the top 24 random bits, read as a fraction, are below the value's
/// distance from the lower neighbour in units of the gap.
#[inline(always)]
pub(super) fn stochastic(magnitude: f32, random: u32) -> u32 {
    let magnitude = magnitude.min(MAX);
    // Codes rise by one per gap: 0.5 below 2, 1 below 4 and 2 above.
    let (gaps, offset) = if magnitude < 2.0 {
        (magnitude * 2.0, 0)
    } else if magnitude < 4.0 {
        (magnitude, 2)
    } else {
        (magnitude * 0.5, 4)
    };
    let whole = gaps as u32;
    let fraction = gaps - whole as f32;
    let threshold = (random >> 8) as f32 * (1.0 / (1 << 24) as f32);
    whole + offset + u32::from(threshold < fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_survives_every_rounding() {
        for code in 0..16u8 {
            for rounding in [
                Rounding::NearestEven,
                Rounding::HalfAway,
                Rounding::Stochastic,
            ] {
                for random in [0, 1 << 8, u32::MAX] {
                    assert_eq!(encode(decode(code), rounding, random), code, "{rounding:?}");
                }
            }
        }
    }

    #[test]
    fn ties_and_their_neighbours() {
        let ties = [0.25f32, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
        for (i, tie) in ties.into_iter().enumerate() {
            let (low, high) = (i as u8, i as u8 + 1);
            let even = if low.is_multiple_of(2) { low } else { high };
            for rounding in [Rounding::NearestEven, Rounding::HalfAway] {
                assert_eq!(encode(tie.next_down(), rounding, 0), low);
                assert_eq!(encode(tie.next_up(), rounding, 0), high);
            }
            assert_eq!(encode(tie, Rounding::NearestEven, 0), even);
            assert_eq!(encode(-tie, Rounding::NearestEven, 0), even | 8);
            assert_eq!(encode(tie, Rounding::HalfAway, 0), high);
            assert_eq!(encode(-tie, Rounding::HalfAway, 0), high | 8);
        }
    }

    #[test]
    fn saturation_and_nan() {
        for rounding in [
            Rounding::NearestEven,
            Rounding::HalfAway,
            Rounding::Stochastic,
        ] {
            for big in [6.0f32.next_up(), 1e30, f32::INFINITY] {
                assert_eq!(encode(big, rounding, 0), 7);
                assert_eq!(encode(-big, rounding, 0), 15);
            }
        }
        assert_eq!(decode(encode(f32::NAN, Rounding::NearestEven, 0)), 0.0);
    }

    #[test]
    fn stochastic_rounding_picks_the_upper_neighbour_in_proportion() {
        for (value, low) in [(0.125f32, 0u8), (1.1, 2), (2.75, 4), (5.5, 6)] {
            let fraction = (value - decode(low)) / (decode(low + 1) - decode(low));
            // The fraction as a threshold for the random bits: smaller ones round up, others down.
            let edge = ((fraction * (1 << 24) as f32).ceil() as u32) << 8;
            assert_eq!(
                encode(value, Rounding::Stochastic, edge - 256),
                low + 1,
                "{value}"
            );
            assert_eq!(encode(value, Rounding::Stochastic, edge), low, "{value}");
        }
    }
}
