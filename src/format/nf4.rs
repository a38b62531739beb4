//! NF4 in the layout of bitsandbytes: 16 values that split a normal distribution into equal parts, one f32 `absmax` per
//! block. Blocks run over the flattened tensor, not per row, and the last may be short. Two codes to a byte, the first in the
//! HIGH nibble (NVFP4 puts it in the low one).

use crate::base::error::{Result, bail};

/// The default block size of bitsandbytes.
pub const DEFAULT_BLOCK: usize = 64;

/// The value of each code: quantiles of the normal distribution, normalised to [-1, 1], with an exact zero at code 7.
pub const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

const ZERO_CODE: u8 = 7;

/// The code whose value is nearest to `value` in [-1, 1]; a tie goes to the smaller value.
pub fn encode(value: f32) -> u8 {
    let mut code = 0;
    for pair in VALUES.windows(2) {
        // Half of the sum is the rounded midpoint: halving is exact.
        code += u8::from(value > (pair[0] + pair[1]) * 0.5);
    }
    code
}

/// A tensor in NF4: packed codes and one `absmax` per block.
#[derive(Clone, Debug, PartialEq)]
pub struct Nf4 {
    /// Two codes to a byte, high nibble first; the unused nibble of an odd length is 0.
    pub codes: Vec<u8>,
    /// The largest magnitude of each block.
    pub absmax: Vec<f32>,
}

/// Bit position of a code in its byte.
const fn shift(index: usize) -> usize {
    4 * (1 - index % 2)
}

fn check_block(block: usize) -> Result<()> {
    if block == 0 {
        bail!(InvalidArgument, "the NF4 block size is 0; 64 is usual");
    }
    Ok(())
}

/// Quantizes the flattened tensor `x` in blocks of `block` values. NaN and infinity are errors that name the first index.
pub fn quantize(x: &[f32], block: usize) -> Result<Nf4> {
    check_block(block)?;
    if let Some(i) = x.iter().position(|v| !v.is_finite()) {
        bail!(
            InvalidArgument,
            "the value at index {i} is {}; NF4 holds finite values only",
            x[i]
        );
    }
    let mut codes = vec![0u8; x.len().div_ceil(2)];
    let mut absmax = Vec::with_capacity(x.len().div_ceil(block));
    for (b, values) in x.chunks(block).enumerate() {
        let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
        absmax.push(largest);
        for (i, &v) in values.iter().enumerate() {
            let code = if largest == 0.0 {
                ZERO_CODE
            } else {
                encode(v / largest)
            };
            let at = b * block + i;
            codes[at / 2] |= code << shift(at);
        }
    }
    Ok(Nf4 { codes, absmax })
}

/// Dequantizes NF4 into `out`: `map[code] * absmax[i / block]`. `map` is the checkpoint's own `quant_map`, or [`VALUES`].
pub fn dequantize(
    codes: &[u8],
    absmax: &[f32],
    map: &[f32; 16],
    block: usize,
    out: &mut [f32],
) -> Result<()> {
    check(out.len(), codes, absmax, block)?;
    dequantize_from(0, codes, absmax, map, block, out)
}

/// Fails unless codes and scales have the right sizes for `n` values in blocks of `block`.
pub fn check(n: usize, codes: &[u8], absmax: &[f32], block: usize) -> Result<()> {
    check_block(block)?;
    if codes.len() != n.div_ceil(2) || absmax.len() != n.div_ceil(block) {
        bail!(
            InvalidArgument,
            "{n} NF4 values in blocks of {block} take {} code bytes and {} absmax values, not {} and {}",
            n.div_ceil(2),
            n.div_ceil(block),
            codes.len(),
            absmax.len()
        );
    }
    Ok(())
}

/// Dequantizes the values from index `first` on into `out`. `codes` and `absmax` are those of the whole tensor.
pub fn dequantize_from(
    first: usize,
    codes: &[u8],
    absmax: &[f32],
    map: &[f32; 16],
    block: usize,
    out: &mut [f32],
) -> Result<()> {
    check_block(block)?;
    let held = codes.len().saturating_mul(2);
    let end = first.saturating_add(out.len());
    if end > held || end.div_ceil(block) > absmax.len() {
        bail!(
            InvalidArgument,
            "NF4 values {first}..{end} are not among the {held} that {} code bytes and {} absmax values in blocks of {block} hold",
            codes.len(),
            absmax.len()
        );
    }
    let (mut at, mut rest) = (first, out);
    while !rest.is_empty() {
        let scale = absmax[at / block];
        let (now, later) = rest.split_at_mut((block - at % block).min(rest.len()));
        for (i, value) in (at..).zip(&mut *now) {
            let code = codes[i / 2] >> shift(i) & 15;
            *value = map[usize::from(code)] * scale;
        }
        at += now.len();
        rest = later;
    }
    Ok(())
}

/// Dequantizes the doubly quantized `absmax` of bitsandbytes: `map[code] * nested_absmax[i / block] + offset`.
pub fn dequantize_absmax(
    codes: &[u8],
    nested_absmax: &[f32],
    map: &[f32; 256],
    block: usize,
    offset: f32,
) -> Result<Vec<f32>> {
    check_block(block)?;
    if nested_absmax.len() != codes.len().div_ceil(block) {
        bail!(
            InvalidArgument,
            "{} nested absmax codes in blocks of {block} take {} nested absmax values, not {}",
            codes.len(),
            codes.len().div_ceil(block),
            nested_absmax.len()
        );
    }
    Ok(codes
        .chunks(block)
        .zip(nested_absmax)
        .flat_map(|(codes, &scale)| {
            codes
                .iter()
                .map(move |&c| map[usize::from(c)] * scale + offset)
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use proptest::prelude::*;

    #[test]
    fn every_code_survives_a_round_trip() {
        for (code, value) in VALUES.into_iter().enumerate() {
            assert_eq!(usize::from(encode(value)), code);
        }
    }

    #[test]
    fn a_zero_block_is_exact_and_bad_input_is_named() {
        let q = quantize(&[0.0; 5], 4).unwrap();
        assert_eq!(
            (q.codes.as_slice(), q.absmax.as_slice()),
            (&[0x77, 0x77, 0x70][..], &[0.0, 0.0][..])
        );
        let e = quantize(&[1.0, 2.0, f32::NAN], 64).unwrap_err();
        assert!(e.message().contains("index 2"), "{e}");
        expect_kind(
            quantize(&[1.0], 0),
            ErrorKind::InvalidArgument,
            "block size is 0",
        );
        expect_kind(
            dequantize(&[0; 2], &[1.0], &VALUES, 64, &mut [0.0; 5]),
            ErrorKind::InvalidArgument,
            "not 2 and 1",
        );
        expect_kind(
            dequantize_absmax(&[0; 257], &[1.0], &[0.0; 256], 256, 0.0),
            ErrorKind::InvalidArgument,
            "take 2 nested absmax values, not 1",
        );
    }

    #[test]
    fn nested_absmax_uses_its_own_blocks_and_offset() {
        let mut map = [0.0; 256];
        (map[3], map[200]) = (0.5, -1.0);
        let got = dequantize_absmax(&[3, 200, 3], &[2.0, 10.0], &map, 2, 0.25).unwrap();
        assert_eq!(got, [1.25, -1.75, 5.25]);
    }

    #[test]
    fn any_run_of_values_expands_as_in_the_whole() {
        let x: Vec<f32> = (0..37).map(|i| (i * 7 % 11) as f32 - 5.0).collect();
        let q = quantize(&x, 5).unwrap();
        let mut whole = [0.0; 37];
        dequantize(&q.codes, &q.absmax, &VALUES, 5, &mut whole).unwrap();
        let part = |first: usize, n: usize| {
            let mut out = vec![0.0; n];
            dequantize_from(first, &q.codes, &q.absmax, &VALUES, 5, &mut out).map(|()| out)
        };
        for (first, n) in [(0, 37), (3, 9), (4, 1), (36, 1), (37, 0)] {
            assert_eq!(part(first, n).unwrap(), whole[first..first + n]);
        }
        expect_kind(
            part(30, 9),
            ErrorKind::InvalidArgument,
            "values 30..39 are not among the 38",
        );
        expect_kind(
            part(usize::MAX, 2),
            ErrorKind::InvalidArgument,
            "are not among the 38",
        );
    }

    proptest! {
        #[test]
        fn error_is_at_most_half_the_widest_gap(
            x in prop::collection::vec(-100f32..100.0, 1..300), block in 1usize..100,
        ) {
            let q = quantize(&x, block).unwrap();
            let mut back = vec![0.0; x.len()];
            dequantize(&q.codes, &q.absmax, &VALUES, block, &mut back).unwrap();
            for (i, (a, b)) in x.iter().zip(&back).enumerate() {
                // The widest gap, between -1 and its neighbour, is 0.3038.
                prop_assert!((a - b).abs() <= 0.152 * q.absmax[i / block], "{i}: {a} -> {b}");
            }
        }
    }
}
