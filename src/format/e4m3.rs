//! E4M3 ("fn"), the 8-bit block scale of NVFP4 and the code of keys and values in 8 bits: one sign bit, four exponent bits (bias 7), three mantissa bits. No infinity;
//! 0x7f and 0xff are NaN, so the largest finite value is 448. The smallest normal is 2^-6, subnormals step by 2^-9.

/// The largest finite value.
pub const MAX: f32 = 448.0;

/// The byte of [`MAX`].
pub const MAX_BYTE: u8 = 0x7e;

/// The smallest positive value, 2^-9; its byte is 1.
pub const MIN_POSITIVE: f32 = 1.0 / 512.0;

/// The value of each byte.
pub const DECODE: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = value_of(byte as u8);
        byte += 1;
    }
    table
};

const fn value_of(byte: u8) -> f32 {
    let sign = (byte as u32 >> 7) << 31;
    let exponent = (byte as u32 >> 3) & 15;
    let mantissa = byte as u32 & 7;
    if exponent == 15 && mantissa == 7 {
        f32::from_bits(sign | 0x7fc0_0000)
    } else if exponent == 0 {
        let magnitude = mantissa as f32 * MIN_POSITIVE;
        f32::from_bits(sign | magnitude.to_bits())
    } else {
        // f32's bias is 127, so the exponent moves by 120.
        f32::from_bits(sign | (exponent + 120) << 23 | mantissa << 20)
    }
}

/// The value of a byte; NaN for 0x7f and 0xff.
#[inline(always)]
pub const fn decode(byte: u8) -> f32 {
    DECODE[byte as usize]
}

/// Byte of the smallest E4M3 value not below `value`, which is not negative. Saturates at 448; NaN gives a NaN byte.
#[inline]
pub fn encode_up(value: f32) -> u8 {
    let nearest = encode(value);
    // This also holds if a value below the smallest positive one was rounded to zero.
    match decode(nearest) < value && nearest < MAX_BYTE {
        true => nearest + 1,
        false => nearest,
    }
}

/// Byte of the E4M3 value nearest to `value`, ties to even, saturating at ±448 (infinities too). NaN gives a NaN byte.
#[inline]
pub fn encode(value: f32) -> u8 {
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7f;
    }
    // After saturation no value can round up into the NaN byte: 448 itself is exact.
    let magnitude = magnitude.min(MAX);
    let byte = if magnitude < 1.0 / 64.0 {
        // At 2^14 an f32 steps by 2^-9, so the addition rounds to a multiple of the subnormal step.
        const SHIFT: f32 = 16384.0;
        (magnitude + SHIFT).to_bits() - SHIFT.to_bits()
    } else {
        let bits = magnitude.to_bits();
        // Drops twenty mantissa bits. Adding just under half of their unit, or exactly half if the last kept bit is odd, carries exactly
        // when rounding to even rounds up.
        let rounded = bits + 0x7_ffff + ((bits >> 20) & 1);
        (rounded >> 20) - (120 << 3)
    };
    sign | byte as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_up_is_the_least_value_that_is_no_smaller() {
        for byte in 0..MAX_BYTE {
            let (low, high) = (decode(byte), decode(byte + 1));
            assert_eq!(encode_up(low), byte);
            for value in [low.next_up(), 0.5 * (low + high), high.next_down()] {
                assert_eq!(encode_up(value), byte + 1, "{value}");
            }
        }
        assert_eq!(encode_up(1e9), MAX_BYTE);
        assert_eq!(encode_up(f32::NAN) & 0x7f, 0x7f);
    }

    #[test]
    fn bytes_survive_a_round_trip() {
        for byte in 0..=255u8 {
            assert_eq!(encode(decode(byte)), byte, "{byte:#04x}");
        }
    }

    #[test]
    fn f32_midpoints_round_to_even_and_their_neighbours_do_not() {
        for low in 0..MAX_BYTE {
            let high = low + 1;
            let middle = (decode(low) + decode(high)) / 2.0;
            let even = if low.is_multiple_of(2) { low } else { high };
            assert_eq!(encode(middle), even, "{middle}");
            assert_eq!(encode(middle.next_down()), low, "below {middle}");
            assert_eq!(encode(middle.next_up()), high, "above {middle}");
            assert_eq!(encode(-middle), even | 0x80);
        }
    }

    #[test]
    fn saturates() {
        for big in [MAX.next_up(), 464.0, 480.0, 1e30, f32::INFINITY] {
            assert_eq!(encode(big), MAX_BYTE);
            assert_eq!(encode(-big), MAX_BYTE | 0x80);
        }
        assert_eq!(encode(f32::NAN) & 0x7f, 0x7f);
    }
}
