//! int8 rows: the form of tables, the embedding and the head, which 4 bits would harm and 16 bits would make large. A value is its code, a
//! byte in two's complement, times the f32 scale of its row, as in ModelOpt (`W8A16`) and compressed-tensors (`int-quantized`, one scale
//! per channel).

use crate::base::Result;
use crate::base::error::bail;

/// Largest magnitude of a code from quantization. Other writers also produce -128, which decodes normally.
pub const LARGEST: f32 = 127.0;

/// The largest scale: -128 times it is finite.
pub const LARGEST_SCALE: f32 = f32::MAX / 128.0;

/// The value of a code under the scale of its row: the exact product, rounded once.
#[inline(always)]
pub const fn decode(code: u8, scale: f32) -> f32 {
    code as i8 as f32 * scale
}

/// The code of a finite value under the scale of its row: the f32 quotient, rounded to nearest even.
#[inline(always)]
pub fn encode(value: f32, scale: f32) -> u8 {
    (value / scale).round_ties_even().clamp(-LARGEST, LARGEST) as i8 as u8
}

/// The scale of a row whose largest magnitude is `amax`, which maps it to code 127. A row of zeros gets 1, as in ModelOpt; so does a row
/// whose scale would underflow to zero, far below any weight that matters.
pub fn row_scale(amax: f32) -> f32 {
    match (amax / LARGEST).min(LARGEST_SCALE) {
        0.0 => 1.0,
        scale => scale,
    }
}

/// Quantizes whole rows of `cols` values, each independently: see [`row_scale`] and [`encode`]. NaN and infinity are errors that name row
/// and column; `first_row` is the index of the first row in its matrix.
pub fn quantize_rows(
    values: &[f32],
    cols: usize,
    first_row: usize,
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<()> {
    check_sizes(values.len(), cols, codes.len(), scales.len())?;
    let rows = values
        .chunks_exact(cols)
        .zip(codes.chunks_exact_mut(cols))
        .zip(scales);
    for (i, ((values, codes), scale)) in rows.enumerate() {
        if let Some(k) = values.iter().position(|v| !v.is_finite()) {
            bail!(
                InvalidArgument,
                "element [{}, {k}] is {}, which int8 with a scale a row cannot hold; weights must be finite",
                first_row + i,
                values[k]
            );
        }
        *scale = row_scale(values.iter().fold(0f32, |most, v| most.max(v.abs())));
        for (code, value) in codes.iter_mut().zip(values) {
            *code = encode(*value, *scale);
        }
    }
    Ok(())
}

/// Writes the values of whole rows of `cols` codes to `out`.
pub fn dequantize_rows(codes: &[u8], scales: &[f32], cols: usize, out: &mut [f32]) -> Result<()> {
    check_sizes(out.len(), cols, codes.len(), scales.len())?;
    let rows = codes.chunks_exact(cols).zip(out.chunks_exact_mut(cols));
    for ((codes, out), &scale) in rows.zip(scales) {
        for (out, &code) in out.iter_mut().zip(codes) {
            *out = decode(code, scale);
        }
    }
    Ok(())
}

/// Fails if a row scale, from row `first_row` on, is not above 0 and at most [`LARGEST_SCALE`].
pub fn check_row_scales(scales: &[f32], first_row: usize) -> Result<()> {
    let is_scale = |scale: f32| scale > 0.0 && scale <= LARGEST_SCALE;
    match scales.iter().position(|&scale| !is_scale(scale)) {
        None => Ok(()),
        Some(i) => bail!(
            InvalidArgument,
            "the scale of row {} is {:?}; scales of int8 rows are above 0 and at most {LARGEST_SCALE:e}",
            first_row + i,
            scales[i]
        ),
    }
}

fn check_sizes(values: usize, cols: usize, codes: usize, scales: usize) -> Result<()> {
    if cols == 0 || !values.is_multiple_of(cols) || codes != values || scales != values / cols {
        bail!(
            InvalidArgument,
            "{values} values in rows of {cols} with {codes} codes and {scales} scales; each value has a code and each row a scale"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use crate::format::random;

    fn quantized(values: &[f32], cols: usize) -> (Vec<u8>, Vec<f32>) {
        let mut codes = vec![0; values.len()];
        let mut scales = vec![0.0; values.len() / cols];
        quantize_rows(values, cols, 0, &mut codes, &mut scales).unwrap();
        (codes, scales)
    }

    #[test]
    fn a_row_is_rounded_to_nearest_even_under_its_own_scale() {
        let (codes, scales) = quantized(&[127.0, -127.0, 0.5, 1.5, -2.5, 3.4999, 0.0, -0.4], 8);
        assert_eq!(scales, [1.0]);
        let codes: Vec<i8> = codes.iter().map(|&c| c as i8).collect();
        assert_eq!(codes, [127, -127, 0, 2, -2, 3, 0, 0]);
        let (codes, scales) = quantized(&[0.0, 0.0, 254.0, -2.0], 2);
        assert_eq!(scales, [1.0, 2.0]);
        assert_eq!(codes, [0, 0, 127, (-1i8) as u8]);
    }

    #[test]
    fn an_error_is_at_most_half_a_step_and_a_second_rounding_changes_nothing() {
        let cols = 96;
        let values: Vec<f32> = (0..cols as u64 * 20)
            .map(|i| (random::uniform(1, i) - 0.5) * 10f32.powi((i / 96) as i32 * 3 - 30))
            .collect();
        let (codes, scales) = quantized(&values, cols);
        let mut held = vec![0.0; values.len()];
        dequantize_rows(&codes, &scales, cols, &mut held).unwrap();
        for (i, (value, held)) in values.iter().zip(&held).enumerate() {
            // Half a step, plus the rounding of quotient and product.
            let bound = scales[i / cols] * 0.5001;
            assert!((value - held).abs() <= bound, "{value:e} became {held:e}");
        }
        let (again, _) = quantized(&held, cols);
        assert_eq!(again, codes);
        check_row_scales(&scales, 0).unwrap();
    }

    #[test]
    fn rows_at_the_ends_of_f32_stay_finite() {
        let rows = [f32::MAX, f32::MIN_POSITIVE, 1e-44, 1e-45, 0.0, -f32::MAX];
        let values: Vec<f32> = rows.iter().flat_map(|&v| [v, -v]).collect();
        let (codes, scales) = quantized(&values, 2);
        check_row_scales(&scales, 0).unwrap();
        let mut held = vec![0.0; values.len()];
        dequantize_rows(&codes, &scales, 2, &mut held).unwrap();
        assert!(held.iter().all(|v| v.is_finite()));
        assert_eq!(held[0], 127.0 * LARGEST_SCALE);
        assert_eq!(scales[3..5], [1.0, 1.0]);
    }

    #[test]
    fn a_code_of_another_writer_may_be_minus_128() {
        assert_eq!(decode(0x80, 0.5), -64.0);
        assert_eq!(decode(0xff, 3.0), -3.0);
    }

    #[test]
    fn what_is_no_value_and_what_is_no_scale_are_named() {
        let mut out = ([0; 4], [0.0; 2]);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let values = [1.0, 2.0, 3.0, bad];
            expect_kind(
                quantize_rows(&values, 2, 6, &mut out.0, &mut out.1),
                ErrorKind::InvalidArgument,
                "element [7, 1] is",
            );
        }
        for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, f32::MAX] {
            expect_kind(
                check_row_scales(&[1.0, bad], 3),
                ErrorKind::InvalidArgument,
                "the scale of row 4 is",
            );
        }
        expect_kind(
            quantize_rows(&[1.0; 4], 3, 0, &mut out.0, &mut out.1),
            ErrorKind::InvalidArgument,
            "4 values in rows of 3",
        );
        expect_kind(
            dequantize_rows(&out.0, &[1.0], 2, &mut [0.0; 4]),
            ErrorKind::InvalidArgument,
            "1 scales",
        );
    }
}
