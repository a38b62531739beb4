//! MXFP4 (OCP Microscaling Formats 1.0): E2M1 codes in blocks of 32 along a row, and one E8M0 scale for each block, a power of two. A value
//! is `e2m1(code) * 2^(scale - 127)`. The codes are NVFP4's, and the powers of two from 2^-9 to 2^8 are E4M3 values. So a matrix is NVFP4
//! without loss if one power of two, as the global scale, brings the scales of all its blocks into that range: [`ScaleExponents`] finds it,
//! and [`to_nvfp4`] converts.
//!
//! Shapes: codes `[rows, cols / 2]` with the even index in the LOW nibble, as in NVFP4; scales `[rows, cols / 32]`.

use std::ops::RangeInclusive;

use super::{e2m1, e4m3, nvfp4};

/// Values that share a scale.
pub const BLOCK: usize = 32;

/// The byte that is NaN as a scale.
pub const NAN: u8 = 255;

/// Bytes of the codes of an NVFP4 block, half a block here.
const HALF: usize = nvfp4::BLOCK / 2;

/// Exponents of the powers of two among E4M3 values.
const BLOCK_SCALES: RangeInclusive<i32> = -9..=8;

/// The exponent of a scale other than [`NAN`].
pub const fn exponent(scale: u8) -> i32 {
    scale as i32 - 127
}

/// The value of a scale.
const fn power(scale: u8) -> f32 {
    match scale {
        // 2^-127 is subnormal in f32.
        0 => f32::from_bits(1 << 22),
        NAN => f32::NAN,
        _ => f32::from_bits((scale as u32) << 23),
    }
}

/// The value of a code: exact, but infinite above the range of f32.
pub const fn decode(code: u8, scale: u8) -> f32 {
    e2m1::decode(code) * power(scale)
}

/// Decodes whole blocks.
pub fn dequantize(codes: &[u8], scales: &[u8], out: &mut [f32]) {
    let blocks = codes.as_chunks::<{ BLOCK / 2 }>().0.iter().zip(scales);
    for ((codes, &scale), out) in blocks.zip(out.chunks_exact_mut(BLOCK)) {
        for (code, out) in codes.iter().zip(out.as_chunks_mut::<2>().0) {
            *out = [decode(code & 15, scale), decode(code >> 4, scale)];
        }
    }
}

/// The exponents with which the codes of half a block have the same values, if they are changed where needed: a code of 4 under 2^e is a
/// code of 2 under 2^(e + 1). `None` for zeros, which have any exponent.
fn exponents(codes: &[u8], scale: u8) -> Option<RangeInclusive<i32>> {
    /// How far an exponent can rise, and fall, by magnitude.
    const RISE: [i32; 8] = [0, 0, 1, 0, 2, 1, 3, 2];
    const FALL: [i32; 8] = [0, 3, 2, 2, 1, 1, 0, 0];
    let magnitudes = || {
        let codes = codes.iter().flat_map(|byte| [byte & 7, byte >> 4 & 7]);
        codes.filter(|&m| m != 0).map(usize::from)
    };
    let rise = magnitudes().map(|m| RISE[m]).min()?;
    let fall = magnitudes().map(|m| FALL[m]).min()?;
    let exponent = exponent(scale);
    Some(exponent - fall..=exponent + rise)
}

/// The exponents of the scales of a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScaleExponents {
    /// The lowest and the highest exponent that some block needs: it can have no higher, and no lower one.
    needed: Option<(i32, i32)>,
}

impl ScaleExponents {
    fn add(&mut self, exponents: RangeInclusive<i32>) {
        let (low, high) = (*exponents.end(), *exponents.start());
        let (lowest, highest) = self.needed.unwrap_or((low, high));
        self.needed = Some((lowest.min(low), highest.max(high)));
    }

    /// Adds scales, whose blocks keep their codes.
    pub fn add_scales(&mut self, scales: &[u8]) {
        for &scale in scales {
            let exponent = exponent(scale);
            self.add(exponent..=exponent);
        }
    }

    /// Adds whole blocks, whose codes may change. Blocks of zeros need no exponent.
    pub fn add_blocks(&mut self, codes: &[u8], scales: &[u8]) {
        for (codes, &scale) in codes.chunks_exact(BLOCK / 2).zip(scales) {
            let halves = codes.chunks_exact(HALF);
            halves
                .filter_map(|half| exponents(half, scale))
                .for_each(|exponents| self.add(exponents));
        }
    }

    /// The exponent of the global scale: 0 if block scales alone will do; else what makes the highest of them 2^8. The error has the lowest
    /// and the highest exponent, which are too far apart.
    pub fn of_global(&self) -> Result<i32, (i32, i32)> {
        let (lowest, highest) = self.needed.unwrap_or_default();
        let (least, most) = (*BLOCK_SCALES.start(), *BLOCK_SCALES.end());
        if lowest >= least && highest <= most {
            return Ok(0);
        }
        match highest.saturating_sub(lowest) <= most - least {
            true => Ok(highest - most),
            false => Err((lowest, highest)),
        }
    }
}

/// The global scale with an exponent of [`ScaleExponents::of_global`].
pub fn global_scale(exponent: i32) -> f32 {
    2f64.powi(exponent) as f32
}

/// Converts whole blocks to NVFP4 under a global scale of `2^global`: gives the scale of each half, and changes codes where they must be.
/// Blocks of zeros get the scale 0. Fails with the index of a block that has no exact form.
pub fn to_nvfp4(
    global: i32,
    scales: &[u8],
    codes: &mut [u8],
    block_scales: &mut [u8],
) -> Result<(), usize> {
    let halves = codes.chunks_exact_mut(HALF).zip(block_scales);
    for (half, (codes, block_scale)) in halves.enumerate() {
        let scale = scales[half / 2];
        *block_scale = 0;
        if exponents(codes, scale).is_none() {
            continue;
        }
        let exponent = exponent(scale) - global;
        let held = exponent.clamp(*BLOCK_SCALES.start(), *BLOCK_SCALES.end());
        *block_scale = e4m3::encode(global_scale(held));
        if held != exponent {
            for byte in codes {
                let [low, high] = [*byte & 15, *byte >> 4].map(|c| scaled(c, exponent - held));
                *byte = low.zip(high).map(|(l, h)| l | h << 4).ok_or(half / 2)?;
            }
        }
    }
    Ok(())
}

/// The code of a code's value times `2^shift`, if there is one.
fn scaled(code: u8, shift: i32) -> Option<u8> {
    let value = f64::from(e2m1::decode(code & 7)) * 2f64.powi(shift);
    let found = (0..8).find(|&m| f64::from(e2m1::decode(m)) == value)?;
    Some(found | code & 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code, two to a byte.
    fn all_codes() -> Vec<u8> {
        (0..16u8).map(|i| i | (15 - i) << 4).collect()
    }

    /// The values in f64, by the definition of the format.
    fn values(codes: &[u8], scales: &[u8]) -> Vec<f64> {
        let value = |code: u8, block: usize| {
            f64::from(e2m1::VALUES[usize::from(code)]) * 2f64.powi(i32::from(scales[block]) - 127)
        };
        let bytes = codes.iter().enumerate();
        bytes
            .flat_map(|(i, byte)| [byte & 15, byte >> 4].map(|c| value(c, i / 16)))
            .collect()
    }

    /// The global exponent of blocks, with codes that may change, and the values of their NVFP4 form in f64.
    fn converted(codes: &[u8], scales: &[u8]) -> Result<(i32, Vec<f64>), (i32, i32)> {
        let mut found = ScaleExponents::default();
        found.add_blocks(codes, scales);
        let global = found.of_global()?;
        let (mut codes, mut block_scales) = (codes.to_vec(), vec![0xff; 2 * scales.len()]);
        to_nvfp4(global, scales, &mut codes, &mut block_scales).unwrap();
        assert!(block_scales.iter().all(|&s| nvfp4::is_block_scale(s)));
        let held = |(i, byte): (usize, &u8)| {
            let scale = f64::from(e4m3::decode(block_scales[i / 8])) * 2f64.powi(global);
            [byte & 15, byte >> 4].map(|c| f64::from(e2m1::decode(c)) * scale)
        };
        let values = codes.iter().enumerate().flat_map(held).collect();
        Ok((global, values))
    }

    #[test]
    fn every_code_under_every_scale_of_18_binades_is_nvfp4_exactly() {
        // Spans of 18 binades at the ends of the range, within NVFP4's own block scales, and across their ends.
        for (first, expected) in [
            (0, -118),
            (118, 0),
            (110, -8),
            (119, 1),
            (200, 82),
            (236, 118),
        ] {
            let scales: Vec<u8> = (first..first + 18).collect();
            let codes = all_codes().repeat(scales.len());
            let mut by_scales = ScaleExponents::default();
            by_scales.add_scales(&scales);
            assert_eq!(by_scales.of_global(), Ok(expected), "{first}");
            let (global, found) = converted(&codes, &scales).unwrap();
            assert_eq!(global, expected, "{first}");
            assert_eq!(found, values(&codes, &scales), "{first}");
            assert!(f64::from(global_scale(global)) == 2f64.powi(global));
        }
    }

    #[test]
    fn scales_too_far_apart_are_told_with_their_exponents() {
        // Codes of 0.5 and 6 have no other scale.
        let codes = [0x71; 32];
        for (scales, expected) in [([100, 118], Err((-27, -9))), ([0, 254], Err((-127, 127)))] {
            let mut found = ScaleExponents::default();
            found.add_scales(&scales);
            assert_eq!(found.of_global(), expected);
            assert_eq!(converted(&codes, &scales).map(|_| 0), expected);
        }
    }

    #[test]
    fn codes_change_where_that_alone_keeps_their_values() {
        // 4 and 6 under 2^-28 are 1 and 1.5 under 2^-26; 0.5 and 1.5 under 2^-9 are 2 and 6 under 2^-11.
        for [far, near] in [[0x76, 0x71], [0x71, 0x31]] {
            let codes = [[far; 16], [near; 16]].concat();
            let scales = [99, 118];
            let (_, found) = converted(&codes, &scales).unwrap();
            assert_eq!(found, values(&codes, &scales), "{far:#x} {near:#x}");
        }
        // Halves of a block may need different exponents, and zeros of either sign need none.
        let codes = [vec![0x71; 16], vec![0x66; 8], vec![0x80; 8], vec![0x08; 16]].concat();
        let scales = [118, 100, 3];
        let (global, found) = converted(&codes, &scales).unwrap();
        assert_eq!((global, &found), (-17, &values(&codes, &scales)));
    }

    #[test]
    fn values_are_those_of_the_format() {
        let scales: Vec<u8> = vec![0, 1, 126, 127, 128, 252];
        let codes = all_codes().repeat(scales.len());
        let mut found = vec![0.0; codes.len() * 2];
        dequantize(&codes, &scales, &mut found);
        let found: Vec<f64> = found.into_iter().map(f64::from).collect();
        assert_eq!(found, values(&codes, &scales));
        assert!(decode(1, NAN).is_nan() && decode(7, 253).is_infinite());
    }
}
