//! Vectors in 8 bits, as caches hold keys and values: an e4m3 code for each element, and one f32 scale that maps the largest magnitude to
//! 448. A value is its code times the scale, so the error of an element is at most 1/16 of it, or 2^-10 of the scale where that is more.

use super::e4m3;

/// The scale of a vector: its largest magnitude over 448. It is 0 for a vector of zeros, and for one whose scale would be subnormal, far
/// below any key or value that matters. It is NaN if an element is not finite.
pub fn scale_of(vector: &[f32]) -> f32 {
    if vector.iter().any(|x| !x.is_finite()) {
        return f32::NAN;
    }
    let scale = vector.iter().fold(0f32, |most, x| most.max(x.abs())) / e4m3::MAX;
    match scale < f32::MIN_POSITIVE {
        true => 0.0,
        false => scale,
    }
}

/// The code of an element of a vector with this scale: the f32 quotient, rounded to nearest even. It is 0 under a scale of 0 or NaN, so that
/// no code is NaN.
#[inline(always)]
pub fn encode(value: f32, scale: f32) -> u8 {
    match scale > 0.0 {
        true => e4m3::encode(value / scale),
        false => 0,
    }
}

/// The value of a code, rounded once.
#[inline(always)]
pub fn decode(code: u8, scale: f32) -> f32 {
    e4m3::decode(code) * scale
}

/// Whether a vector of finite values may have this scale.
pub fn is_scale(scale: f32) -> bool {
    (0.0..=f32::MAX / e4m3::MAX).contains(&scale)
}

/// Whether a code is not a number.
pub fn is_nan(code: u8) -> bool {
    code & 0x7f > e4m3::MAX_BYTE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random;

    /// Vectors of `count` elements whose magnitudes span `spread` powers of two, around 2^`middle`.
    fn vector(seed: u64, count: u64, middle: i32, spread: f32) -> Vec<f32> {
        let element = |i| {
            let power = (random::uniform(seed, 2 * i) - 0.5) * spread + middle as f32;
            (random::uniform(seed, 2 * i + 1) - 0.5) * power.exp2()
        };
        (0..count).map(element).collect()
    }

    #[test]
    fn a_code_is_the_nearest_one_to_the_quotient() {
        for (seed, middle) in [(1, 0), (2, -60), (3, 60), (4, -105), (5, 114)] {
            for spread in [0.0, 8.0, 24.0] {
                let vector = vector(seed, 256, middle, spread);
                let scale = scale_of(&vector);
                let amax = vector.iter().fold(0f32, |most, x| most.max(x.abs()));
                assert_eq!(scale, amax / 448.0);
                for &x in &vector {
                    let code = encode(x, scale);
                    let quotient = f64::from(x / scale);
                    let far = |code: u8| (f64::from(e4m3::decode(code)) - quotient).abs();
                    let nearest = (0..=255u8)
                        .filter(|&code| !is_nan(code))
                        .min_by(|&a, &b| far(a).total_cmp(&far(b)).then((a & 1).cmp(&(b & 1))));
                    assert_eq!(far(code), far(nearest.unwrap()), "{x:e} under {scale:e}");
                    let is_tie = [code.wrapping_sub(1), code.wrapping_add(1)]
                        .into_iter()
                        .any(|other| !is_nan(other) && far(other) == far(code));
                    assert!(!is_tie || code.is_multiple_of(2), "{x:e} under {scale:e}");
                }
            }
        }
    }

    #[test]
    fn the_largest_magnitude_has_the_largest_code_and_errors_are_bounded() {
        for seed in 0..200 {
            let vector = vector(seed, 128, (seed % 40) as i32 * 5 - 100, 12.0);
            let scale = scale_of(&vector);
            let mut largest = 0;
            for &x in &vector {
                let code = encode(x, scale);
                largest = largest.max(code & 0x7f);
                let error = (f64::from(decode(code, scale)) - f64::from(x)).abs();
                let bound = (f64::from(x.abs()) / 16.0).max(f64::from(scale) / 1024.0);
                // The quotient, the scale and the product are rounded to f32.
                assert!(error <= bound * (1.0 + 1e-5), "{x:e} under {scale:e}");
            }
            assert_eq!(largest, e4m3::MAX_BYTE);
        }
    }

    #[test]
    fn vectors_at_the_ends_of_f32() {
        let scale = scale_of(&[f32::MAX, -1.0]);
        assert_eq!(decode(encode(f32::MAX, scale), scale), 448.0 * scale);
        assert!(is_scale(scale) && (448.0 * scale).is_finite());
        for small in [0.0, 1e-45, 447.9 * f32::MIN_POSITIVE] {
            assert_eq!(scale_of(&[small, -small]), 0.0);
            assert_eq!(encode(small, 0.0), 0);
        }
        let least = 448.0 * f32::MIN_POSITIVE;
        assert_eq!(scale_of(&[least]), f32::MIN_POSITIVE);
        assert_eq!(encode(-least, f32::MIN_POSITIVE), 0x80 | e4m3::MAX_BYTE);
    }

    #[test]
    fn a_vector_that_is_not_finite_has_no_scale() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scale = scale_of(&[1.0, bad, 2.0]);
            assert!(scale.is_nan() && !is_scale(scale));
            assert_eq!(encode(bad, scale), 0);
            assert!(decode(0, scale).is_nan());
        }
        for bad in [-1.0, f32::INFINITY, f32::MAX] {
            assert!(!is_scale(bad), "{bad:e}");
        }
        assert!(is_scale(0.0) && is_scale(1.0));
        let nan: Vec<u8> = (0..=255).filter(|&code| is_nan(code)).collect();
        assert_eq!(nan, [0x7f, 0xff]);
    }
}
