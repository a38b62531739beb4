//! NVFP4: E2M1 codes in blocks of 16 along a row, one E4M3 scale per block, one f32 multiplier per tensor. A value is
//! `e2m1(code) * e4m3(scale) * global`.
//!
//! Shapes: values `[rows, cols]` with `cols` a multiple of 16; codes `[rows, cols / 2]`, the even index in the LOW nibble;
//! scales `[rows, cols / 16]`, row-major. Blocks depend on the tensor only through `global`, so rows quantized in ranges give
//! the bytes of the whole.

use super::{Rounding, e2m1, e4m3, random};
use crate::base::error::{Error, Result, bail, err};
use crate::base::size;

/// Values that share a scale.
pub const BLOCK: usize = 16;

/// How the scale of a block is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// The block's largest magnitude lands on 6.
    #[default]
    Amax,
    /// Of the scales that put the largest magnitude on 6 and on 4, the one with the smaller squared error; 6 on a tie. The
    /// global scale leaves room for the larger scale: it maps the tensor's amax to 6 x 256.
    FourOverSix,
    /// Of all 126 positive scales, the one with the smallest squared error; the smallest scale on a tie.
    Sweep,
}

/// Whether there is a scale for the whole tensor above the blocks' scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Levels {
    /// A global scale that maps the tensor's amax to the largest representable value.
    #[default]
    Two,
    /// No global scale: it is 1, and blocks outside the range of E4M3 lose accuracy.
    Single,
    /// No global scale, and the rule of the legacy host's reference: the block scale is clamped to [2^-16, 448] before the
    /// cast to E4M3, where it may become 0, and 1e-12 is added to it before the division. Takes [`Recipe::Amax`] only.
    Legacy,
}

/// What to do with NaN and infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NonFinite {
    /// An error that names the first index.
    #[default]
    Error,
    /// NaN counts as zero and an infinity as the largest magnitude that the global scale can represent. Neither takes part
    /// in the tensor's amax.
    Saturate,
}

/// How to quantize. The default is two-level, amax, to nearest even, NaN and infinity refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// Whether there is a global scale.
    pub levels: Levels,
    /// How block scales are chosen.
    pub recipe: Recipe,
    /// How quotients become codes. The choice of a scale always compares roundings to nearest.
    pub rounding: Rounding,
    /// What to do with NaN and infinity.
    pub nonfinite: NonFinite,
    /// The stream of random bits for [`Rounding::Stochastic`]; the position in it is the value's index in the tensor.
    pub seed: u64,
}

impl QuantizeOptions {
    /// Refuses combinations that have no meaning.
    pub fn check(&self) -> Result<()> {
        if self.levels == Levels::Legacy && self.recipe != Recipe::Amax {
            bail!(
                InvalidArgument,
                "the legacy rule fixes the block scale; it takes the amax recipe, not {:?}",
                self.recipe
            );
        }
        Ok(())
    }

    /// The block scale that the tensor's amax is mapped to.
    fn largest_scale(&self) -> f32 {
        match self.recipe {
            // 256 x 1.5 = 384 is an E4M3 value, so the block that holds the amax has both of its candidates.
            Recipe::FourOverSix => 256.0,
            Recipe::Amax | Recipe::Sweep => e4m3::MAX,
        }
    }
}

/// A matrix in NVFP4.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4 {
    /// Rows.
    pub rows: usize,
    /// Values per row, a multiple of 16.
    pub cols: usize,
    /// `[rows, cols / 2]`, the even index in the low nibble.
    pub codes: Vec<u8>,
    /// E4M3, `[rows, cols / 16]`, row-major.
    pub scales: Vec<u8>,
    /// The multiplier of every value.
    pub global: f32,
}

impl Nvfp4 {
    /// The values, row-major.
    pub fn dequantize(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; size::product("NVFP4 values", &[self.rows, self.cols])?];
        dequantize(&self.codes, &self.scales, self.global, &mut out)?;
        Ok(out)
    }
}

/// The bits of a magnitude order as the magnitudes do, with infinity and then NaN above all; as signed integers their
/// maximum is vector code on the plainest x86-64.
#[inline(always)]
fn magnitude_bits(value: f32) -> i32 {
    (value.to_bits() & 0x7fff_ffff) as i32
}

const INFINITY_BITS: i32 = 0x7f80_0000;

#[inline(always)]
fn largest_magnitude_bits(x: &[f32]) -> i32 {
    x.iter().fold(0, |m, &v| m.max(magnitude_bits(v)))
}

fn nonfinite_error(x: &[f32], first_index: usize, cols: Option<usize>) -> Error {
    let at = x.iter().position(|v| !v.is_finite()).unwrap_or(0);
    let index = first_index + at;
    let place = match cols {
        Some(cols) => format!(" (row {}, column {})", index / cols, index % cols),
        None => String::new(),
    };
    err!(
        InvalidArgument,
        "the value at index {index}{place} is {}; NVFP4 holds finite values only: clean the input, or quantize with saturation",
        x[at]
    )
}

/// The largest magnitude of `x`. `first_index` is where `x` starts in its tensor, for the error that names an index.
pub fn amax(x: &[f32], first_index: usize, nonfinite: NonFinite) -> Result<f32> {
    let bits = largest_magnitude_bits(x);
    if bits < INFINITY_BITS {
        return Ok(f32::from_bits(bits as u32));
    }
    match nonfinite {
        NonFinite::Error => Err(nonfinite_error(x, first_index, None)),
        NonFinite::Saturate => Ok(x
            .iter()
            .filter(|v| v.is_finite())
            .fold(0.0, |m, v| v.abs().max(m))),
    }
}

/// The global scale for a tensor whose largest magnitude is `amax`: 1 for a single level and for a tensor of zeros, else
/// `amax / (6 * 448)` (`6 * 256` for four-over-six). Below 2^-126 a quotient would lose bits as a subnormal number, or be
/// zero; it becomes 2^-126, and the block scales are smaller instead.
pub fn global_scale(amax: f32, options: &QuantizeOptions) -> f32 {
    match options.levels {
        Levels::Two if amax > 0.0 => {
            (amax / (e2m1::MAX * options.largest_scale())).max(f32::MIN_POSITIVE)
        }
        Levels::Two | Levels::Single | Levels::Legacy => 1.0,
    }
}

/// Quantizes the row-major matrix `x` of `rows` by `cols`.
pub fn quantize(x: &[f32], rows: usize, cols: usize, options: &QuantizeOptions) -> Result<Nvfp4> {
    let values = size::product("NVFP4 values", &[rows, cols])?;
    if x.len() != values {
        bail!(
            InvalidArgument,
            "a matrix of {rows} by {cols} has {values} values, not {}",
            x.len()
        );
    }
    let global = match options.levels {
        Levels::Two => global_scale(amax(x, 0, options.nonfinite)?, options),
        Levels::Single | Levels::Legacy => 1.0,
    };
    let mut out = Nvfp4 {
        rows,
        cols,
        codes: vec![0; values / 2],
        scales: vec![0; values / BLOCK],
        global,
    };
    quantize_rows(x, cols, 0, global, options, &mut out.codes, &mut out.scales)?;
    Ok(out)
}

/// Quantizes whole rows, of which the first is row `first_row` of its tensor, with the tensor's `global` scale (see
/// [`global_scale`]). Each range of rows gives the bytes that [`quantize`] gives for the whole.
pub fn quantize_rows(
    x: &[f32],
    cols: usize,
    first_row: usize,
    global: f32,
    options: &QuantizeOptions,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<()> {
    options.check()?;
    if cols == 0 || !cols.is_multiple_of(BLOCK) {
        bail!(
            InvalidArgument,
            "K = {cols} is not a positive multiple of {BLOCK}"
        );
    }
    if !x.len().is_multiple_of(cols) {
        bail!(
            InvalidArgument,
            "{} values are not whole rows of {cols}",
            x.len()
        );
    }
    check_lengths(codes.len(), scales.len(), x.len())?;
    if !(global > 0.0 && global.is_finite()) {
        bail!(
            InvalidArgument,
            "the global scale is {global}; it must be positive and finite"
        );
    }
    if options.levels != Levels::Two && global != 1.0 {
        bail!(
            InvalidArgument,
            "the global scale is {global}; without a second level it must be 1"
        );
    }
    let first_index = size::product("the first row's index", &[first_row, cols])?;

    let limit = e2m1::MAX * options.largest_scale() * global;
    let (blocks, _) = x.as_chunks::<BLOCK>();
    let (codes, _) = codes.as_chunks_mut::<{ BLOCK / 2 }>();
    for (b, ((values, codes), scale)) in blocks.iter().zip(codes).zip(scales).enumerate() {
        let index = first_index + b * BLOCK;
        let mut bits = largest_magnitude_bits(values);
        let mut values = *values;
        if bits >= INFINITY_BITS {
            match options.nonfinite {
                NonFinite::Error => return Err(nonfinite_error(&values, index, Some(cols))),
                NonFinite::Saturate => {
                    values = values.map(|v| saturated(v, limit));
                    bits = largest_magnitude_bits(&values);
                }
            }
        }
        let amax = f32::from_bits(bits as u32);
        let (byte, packed) = quantize_block(&values, amax, global, index, options);
        *scale = byte;
        *codes = packed;
    }
    Ok(())
}

fn saturated(value: f32, limit: f32) -> f32 {
    if value.is_nan() {
        0.0
    } else if value.is_infinite() {
        limit.copysign(value)
    } else {
        value
    }
}

/// Expands codes and row-major scales: `e2m1(code) * (e4m3(scale) * global)`, each product rounded to f32. A NaN scale byte
/// gives NaN.
pub fn dequantize(codes: &[u8], scales: &[u8], global: f32, out: &mut [f32]) -> Result<()> {
    if !out.len().is_multiple_of(BLOCK) {
        bail!(
            InvalidArgument,
            "{} values are not whole blocks of {BLOCK}",
            out.len()
        );
    }
    check_lengths(codes.len(), scales.len(), out.len())?;
    let (blocks, _) = out.as_chunks_mut::<BLOCK>();
    let (codes, _) = codes.as_chunks::<{ BLOCK / 2 }>();
    for ((values, codes), &scale) in blocks.iter_mut().zip(codes).zip(scales) {
        let step = e4m3::decode(scale) * global;
        let table = e2m1::VALUES.map(|v| v * step);
        for (j, &pair) in codes.iter().enumerate() {
            values[2 * j] = table[usize::from(pair & 15)];
            values[2 * j + 1] = table[usize::from(pair >> 4)];
        }
    }
    Ok(())
}

fn check_lengths(codes: usize, scales: usize, values: usize) -> Result<()> {
    if codes != values / 2 || scales != values / BLOCK {
        bail!(
            InvalidArgument,
            "{values} NVFP4 values take {} code bytes and {} scales, not {codes} and {scales}",
            values / 2,
            values / BLOCK
        );
    }
    Ok(())
}

/// Two codes to a byte, the even index in the low nibble. Bits above a code's lowest four are ignored.
pub fn pack(codes: &[u8]) -> Result<Vec<u8>> {
    let (pairs, rest) = codes.as_chunks::<2>();
    if !rest.is_empty() {
        bail!(
            InvalidArgument,
            "{} codes do not fill whole bytes; the number must be even",
            codes.len()
        );
    }
    Ok(pairs.iter().map(|[a, b]| a & 15 | b << 4).collect())
}

/// One code to a byte; undoes [`pack`].
pub fn unpack(packed: &[u8]) -> Vec<u8> {
    packed.iter().flat_map(|&p| [p & 15, p >> 4]).collect()
}

type Values = [f32; BLOCK];
type Packed = [u8; BLOCK / 2];

/// The scale byte and codes of one finite block whose largest magnitude is `amax` and whose first value has `index`.
fn quantize_block(
    x: &Values,
    amax: f32,
    global: f32,
    index: usize,
    options: &QuantizeOptions,
) -> (u8, Packed) {
    if options.levels == Levels::Legacy {
        return legacy_block(x, amax, index, options);
    }
    if amax == 0.0 {
        return (0, [0; BLOCK / 2]);
    }
    let scale = match options.recipe {
        Recipe::Amax => nearest_scale(amax / e2m1::MAX / global),
        Recipe::FourOverSix => four_over_six(x, amax, global),
        Recipe::Sweep => sweep(x, amax, global),
    };
    let step = e4m3::decode(scale) * global;
    let packed = encode_block(&x.map(|v| v / step), index, options);
    // A scale of 0 says "all zero" and nothing else does, whatever the signs were.
    if u64::from_le_bytes(packed) & 0x7777_7777_7777_7777 == 0 {
        return (0, [0; BLOCK / 2]);
    }
    (scale, packed)
}

/// The nearest scale byte that is not 0: underflow must not wipe out a block that has values above half a step.
fn nearest_scale(scale: f32) -> u8 {
    e4m3::encode(scale).max(1)
}

/// The legacy host's rule. Its scale may be 0 beside codes that are not.
fn legacy_block(x: &Values, amax: f32, index: usize, options: &QuantizeOptions) -> (u8, Packed) {
    const FLOOR: f32 = 1.0 / 65536.0;
    let scale = e4m3::encode((amax / e2m1::MAX).clamp(FLOOR, e4m3::MAX));
    let divisor = e4m3::decode(scale) + 1e-12;
    // The reference takes the sign from a comparison with zero, so a negative zero has none. Adding zero has that effect.
    let quotients = x.map(|v| v / divisor + 0.0);
    (scale, encode_block(&quotients, index, options))
}

#[inline(always)]
fn encode_block(quotients: &Values, index: usize, options: &QuantizeOptions) -> Packed {
    let signed = |magnitude: fn(f32) -> u32| {
        let codes = quotients.map(|q| magnitude(q.abs()) | e2m1::sign(q));
        pack_block(&codes)
    };
    match options.rounding {
        Rounding::NearestEven => signed(e2m1::nearest_even),
        Rounding::HalfAway => signed(e2m1::half_away),
        Rounding::Stochastic => {
            let mut codes = [0; BLOCK];
            for (i, (code, &q)) in codes.iter_mut().zip(quotients).enumerate() {
                let random = (random::bits(options.seed, (index + i) as u64) >> 32) as u32;
                *code = e2m1::stochastic(q.abs(), random) | e2m1::sign(q);
            }
            pack_block(&codes)
        }
    }
}

#[inline(always)]
fn pack_block(codes: &[u32; BLOCK]) -> Packed {
    let mut packed = [0; BLOCK / 2];
    for (j, byte) in packed.iter_mut().enumerate() {
        *byte = (codes[2 * j] | codes[2 * j + 1] << 4) as u8;
    }
    packed
}

fn four_over_six(x: &Values, amax: f32, global: f32) -> u8 {
    let six = nearest_scale(amax / 6.0 / global);
    let four = nearest_scale(amax / 4.0 / global);
    if squared_error(x, four, global) < squared_error(x, six, global) {
        four
    } else {
        six
    }
}

/// The best of all 126 scales, found among the few that can be it.
fn sweep(x: &Values, amax: f32, global: f32) -> u8 {
    let start = nearest_scale(amax / e2m1::MAX / global);
    let mut best = start;
    let mut least = squared_error(x, start, global);
    let reach = |scale: u8| f64::from(e2m1::MAX) * exact_step(scale, global);

    // Downwards the largest value is clipped ever harder; once that alone costs more than the best, the rest is worse. Going
    // down, an equal error is taken, since the smaller scale wins a tie.
    for scale in (1..start).rev() {
        let clipped = f64::from(amax) - reach(scale);
        if clipped > 0.0 && clipped * clipped > least {
            break;
        }
        let error = squared_error(x, scale, global);
        if error <= least {
            (best, least) = (scale, error);
        }
    }

    // Upwards, a scale that is twice another one which clips nothing has only values the other has, so it cannot be better.
    // Eight bytes up is twice, for normal numbers: from twice the first such scale on nothing is left to try.
    const FIRST_NORMAL: u8 = 8;
    let unclipped = (start..e4m3::MAX_BYTE)
        .find(|&scale| reach(scale) >= f64::from(amax))
        .unwrap_or(e4m3::MAX_BYTE);
    let end = e4m3::MAX_BYTE.min(unclipped.max(FIRST_NORMAL) + 7);
    for scale in start + 1..=end {
        let error = squared_error(x, scale, global);
        if error < least {
            (best, least) = (scale, error);
        }
    }
    best
}

/// Scale times global scale without rounding: 4 bits by 24.
fn exact_step(scale: u8, global: f32) -> f64 {
    f64::from(e4m3::decode(scale)) * f64::from(global)
}

/// The squared error of the block under a scale, rounded to nearest. In f64, so that neither the largest nor the smallest f32
/// values overflow or vanish when squared; summed pairwise in a fixed order.
#[inline(always)]
fn squared_error(x: &Values, scale: u8, global: f32) -> f64 {
    let step = e4m3::decode(scale) * global;
    let exact = exact_step(scale, global);
    let mut squares = [0f64; BLOCK];
    for (square, &v) in squares.iter_mut().zip(x) {
        let code = e2m1::nearest_even(v.abs() / step);
        let difference = f64::from(v.abs()) - f64::from(magnitude(code)) * exact;
        *square = difference * difference;
    }
    let mut width = BLOCK / 2;
    while width > 0 {
        for i in 0..width {
            squares[i] += squares[i + width];
        }
        width /= 2;
    }
    squares[0]
}

/// The magnitude of a code below 8, without a table so that loops over it become vector code: twice the magnitude is the
/// code itself up to 4, then 6, 8 and 12.
#[inline(always)]
fn magnitude(code: u32) -> f32 {
    let doubled = code + u32::from(code > 4) + u32::from(code > 5) + 3 * u32::from(code > 6);
    doubled as i32 as f32 * 0.5
}
