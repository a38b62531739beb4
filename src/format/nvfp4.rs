//! NVFP4: E2M1 codes in blocks of 16 along a row, one E4M3 scale per block, one f32 global scale per tensor. A value is `e2m1(code) *
//! e4m3(scale) * global`. [`decode`] defines the order, [`is_block_scale`] and [`is_global_scale`] define the valid scales. Readers,
//! writers, packers and kernels use these rules and have none of their own.
//!
//! Shapes: values `[rows, cols]` with `cols` a multiple of 16; codes `[rows, cols / 2]`, the even index in the LOW nibble; scales `[rows,
//! cols / 16]`, row-major. Blocks depend on the tensor only through `global`, so quantizing ranges of rows gives the same bytes as
//! quantizing the whole.

use serde::{Deserialize, Serialize};

use super::{Rounding, e2m1, e4m3, random};
use crate::base::error::{Error, Result, bail, err};
use crate::base::size;

/// Values that share a scale.
pub const BLOCK: usize = 16;

/// Whether a byte is a valid block scale: an E4M3 number without a sign, 0x00 to 0x7e. 0x7f and 0xff are NaN. NVFP4 has no sign bit here:
/// hardware ignores it, and formats that use it for a bit of their own give the codes other values. A scale of 0 is valid with any codes;
/// the legacy rule produces it beside nonzero codes.
#[inline(always)]
pub const fn is_block_scale(byte: u8) -> bool {
    byte <= e4m3::MAX_BYTE
}

/// Whether a number is a valid global scale: finite and without a sign. Zero is valid, for a tensor of zeros, and so is a subnormal number.
#[inline(always)]
pub const fn is_global_scale(global: f32) -> bool {
    global.is_finite() && global.is_sign_positive()
}

/// Fails if a byte is not a block scale. `scales` are rows of `blocks` from row `first_row` on, row-major.
pub fn check_block_scales(scales: &[u8], first_row: usize, blocks: usize) -> Result<()> {
    // The offending byte is searched for only if there is one: `all` vectorizes.
    if scales.iter().all(|&byte| is_block_scale(byte)) {
        return Ok(());
    }
    for (i, &byte) in scales.iter().enumerate() {
        check_block_scale(byte, first_row + i / blocks, i % blocks)?;
    }
    Ok(())
}

/// Fails if the byte of block `block` in row `row` is not a block scale.
pub fn check_block_scale(byte: u8, row: usize, block: usize) -> Result<()> {
    if !is_block_scale(byte) {
        bail!(
            InvalidArgument,
            "the scale of block {block} in row {row} has the byte {byte:#04x}, which is {}; block scales are 0x00 to 0x7e",
            if byte & 0x7f > e4m3::MAX_BYTE {
                "NaN"
            } else {
                "negative"
            }
        );
    }
    Ok(())
}

/// Fails if a number is not a global scale.
pub fn check_global_scale(global: f32) -> Result<()> {
    if !is_global_scale(global) {
        bail!(
            InvalidArgument,
            "the global scale is {global:?}; it must be finite and without a sign"
        );
    }
    Ok(())
}

/// The value of a code under its scales: the exact product, rounded once. A code has two significant bits and a scale four, and their
/// product lies between 2^-10 and 2688, so f32 holds it exactly; only the product with the global scale rounds. Multiplying scale and
/// global scale first would round twice, and where that overflows a code of 0 would become NaN. GEMMs use the same order: sums of code
/// times scale times activation, times the global scale at the end.
///
/// Decodes any byte, including NaN and negative ones: see [`is_block_scale`].
#[inline(always)]
pub const fn decode(code: u8, scale: u8, global: f32) -> f32 {
    e2m1::decode(code) * e4m3::decode(scale) * global
}

/// Rule for the scale of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recipe {
    /// The block's largest magnitude lands on 6.
    #[default]
    Amax,
    /// The better one, by squared error, of the two scales that put the largest magnitude on 6 and on 4; 6 on a tie. The global scale
    /// leaves room for the larger scale: it maps the tensor's amax to 6 x 256.
    FourOverSix,
    /// The best of all 126 positive scales, by squared error; the smallest scale on a tie.
    Sweep,
}

/// Whether the tensor has a global scale in addition to block scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Levels {
    /// A global scale that maps the tensor's amax to the largest representable value.
    #[default]
    Two,
    /// No global scale: it is 1, and blocks outside the range of E4M3 lose accuracy.
    Single,
    /// No global scale, and the rule of the legacy host's reference: the block scale is clamped to [2^-16, 448] before the cast to E4M3,
    /// where it may become 0, and 1e-12 is added to it before the division. Allows only [`Recipe::Amax`].
    Legacy,
}

/// Treatment of NaN and infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NonFinite {
    /// Fail, naming the first index.
    #[default]
    Error,
    /// Count NaN as zero, and infinity as the largest magnitude that the global scale can represent. Neither affects the tensor's amax.
    Saturate,
}

/// Quantization options. The default is two-level, amax, round to nearest even, NaN and infinity refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// Levels of scales.
    pub levels: Levels,
    /// Rule for block scales.
    pub recipe: Recipe,
    /// Rounding of quotients to codes. The choice of a scale always compares roundings to nearest.
    pub rounding: Rounding,
    /// Treatment of NaN and infinity.
    pub nonfinite: NonFinite,
    /// Seed of the random stream for [`Rounding::Stochastic`]. A value's position in the stream is its index in the tensor.
    pub seed: u64,
}

impl QuantizeOptions {
    /// Refuses meaningless combinations.
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

    /// The block scale to which the tensor's amax is mapped.
    fn largest_scale(&self) -> f32 {
        match self.recipe {
            // 256 x 1.5 = 384 is an E4M3 value, so both candidates exist for the block with the amax.
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
    /// The global scale.
    pub global: f32,
}

impl Nvfp4 {
    /// The values, row-major.
    pub fn dequantize(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; size::product("NVFP4 values", &[self.rows, self.cols])?];
        check_block_scales(&self.scales, 0, self.cols / BLOCK)?;
        dequantize(&self.codes, &self.scales, self.global, &mut out)?;
        Ok(out)
    }
}

/// Bits of a magnitude, which order like the magnitudes, with infinity and then NaN at the top. As signed integers their maximum vectorizes
/// even on baseline x86-64.
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
    nonfinite(x[at], first_index + at, cols)
}

/// The error for a value that is not finite. It names the index in the tensor, and also row and column if `cols` is given.
pub fn nonfinite(value: f32, index: usize, cols: Option<usize>) -> Error {
    let place = match cols {
        Some(cols) => format!(" (row {}, column {})", index / cols, index % cols),
        None => String::new(),
    };
    err!(
        InvalidArgument,
        "the value at index {index}{place} is {value}; NVFP4 holds finite values only: clean the input, or quantize with saturation"
    )
}

/// Largest magnitude of `x`. `first_index` is the index of `x[0]` in its tensor, for error messages.
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

/// The global scale for a tensor whose largest magnitude is `amax`: 1 for a single level and for a tensor of zeros, else `amax / (6 * 448)`
/// (`6 * 256` for four-over-six). The result is at least 2^-126, because a smaller one would be subnormal and lose bits, or be zero; block
/// scales are smaller instead.
pub fn global_scale(amax: f32, options: &QuantizeOptions) -> f32 {
    match options.levels {
        Levels::Two if amax > 0.0 => (amax / largest(options)).max(f32::MIN_POSITIVE),
        Levels::Two | Levels::Single | Levels::Legacy => 1.0,
    }
}

/// The tensor's amax as a multiple of the global scale: the largest code times the largest block scale.
pub fn largest(options: &QuantizeOptions) -> f32 {
    e2m1::MAX * options.largest_scale()
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

/// Quantizes whole rows, the first of which is row `first_row` of its tensor, under the tensor's `global` scale (see [`global_scale`]).
/// Each range of rows gives the bytes that [`quantize`] gives for the whole.
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
    check_global_scale(global)?;
    if global == 0.0 {
        bail!(
            InvalidArgument,
            "the global scale is 0; values are divided by it, so it must be positive"
        );
    }
    if options.levels != Levels::Two && global != 1.0 {
        bail!(
            InvalidArgument,
            "the global scale is {global}; without a second level it must be 1"
        );
    }
    let first_index = size::product("the first row's index", &[first_row, cols])?;

    let limit = largest(options) * global;
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

/// Dequantizes codes and row-major scales: see [`decode`]. Fails if a scale is invalid; the error counts blocks from the first one given,
/// so callers that know rows check with [`check_block_scales`] first.
pub fn dequantize(codes: &[u8], scales: &[u8], global: f32, out: &mut [f32]) -> Result<()> {
    if !out.len().is_multiple_of(BLOCK) {
        bail!(
            InvalidArgument,
            "{} values are not whole blocks of {BLOCK}",
            out.len()
        );
    }
    check_lengths(codes.len(), scales.len(), out.len())?;
    check_global_scale(global)?;
    check_block_scales(scales, 0, scales.len())?;
    let (blocks, _) = out.as_chunks_mut::<BLOCK>();
    let (codes, _) = codes.as_chunks::<{ BLOCK / 2 }>();
    for ((values, codes), &scale) in blocks.iter_mut().zip(codes).zip(scales) {
        let table = std::array::from_fn::<f32, 16, _>(|code| decode(code as u8, scale, global));
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

/// Packs two codes into a byte, the even index in the low nibble. Bits above a code's lowest four are ignored.
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

/// Unpacks to one code per byte; the inverse of [`pack`].
pub fn unpack(packed: &[u8]) -> Vec<u8> {
    packed.iter().flat_map(|&p| [p & 15, p >> 4]).collect()
}

type Values = [f32; BLOCK];
type Packed = [u8; BLOCK / 2];

/// Scale byte and codes of one finite block whose largest magnitude is `amax`, and whose first value has index `index`.
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
    with_scale(x, scale, global, index, options)
}

/// Codes of a block under this scale. If all codes are zero the scale becomes 0, and only then; signs of zeros are dropped.
fn with_scale(
    x: &Values,
    scale: u8,
    global: f32,
    index: usize,
    options: &QuantizeOptions,
) -> (u8, Packed) {
    let step = e4m3::decode(scale) * global;
    let packed = encode_block(&x.map(|v| v / step), index, options);
    match u64::from_le_bytes(packed) & 0x7777_7777_7777_7777 {
        0 => (0, [0; BLOCK / 2]),
        _ => (scale, packed),
    }
}

/// Codes of a block under this scale, each the nearest to its value.
pub(super) fn encode_under(x: &Values, scale: u8, global: f32) -> (u8, Packed) {
    with_scale(x, scale, global, 0, &QuantizeOptions::default())
}

/// The nearest nonzero scale byte: underflow must not erase a block that has values above half a step.
pub(super) fn nearest_scale(scale: f32) -> u8 {
    e4m3::encode(scale).max(1)
}

/// The legacy host's rule. Its scale may be 0 beside nonzero codes.
fn legacy_block(x: &Values, amax: f32, index: usize, options: &QuantizeOptions) -> (u8, Packed) {
    const FLOOR: f32 = 1.0 / 65536.0;
    let scale = e4m3::encode((amax / e2m1::MAX).clamp(FLOOR, e4m3::MAX));
    let divisor = e4m3::decode(scale) + 1e-12;
    // The reference derives the sign from a comparison with zero, so a negative zero has none. Adding zero has that effect.
    let quotients = x.map(|v| v / divisor + 0.0);
    (scale, encode_block(&quotients, index, options))
}

#[inline(always)]
fn encode_block(quotients: &Values, index: usize, options: &QuantizeOptions) -> Packed {
    let mut codes = [0; BLOCK];
    match options.rounding {
        Rounding::NearestEven => {
            for (code, &q) in codes.iter_mut().zip(quotients) {
                *code = e2m1::nearest_even(q.abs()) | e2m1::sign(q);
            }
        }
        Rounding::HalfAway => {
            for (code, &q) in codes.iter_mut().zip(quotients) {
                *code = e2m1::half_away(q.abs()) | e2m1::sign(q);
            }
        }
        Rounding::Stochastic => {
            for (i, (code, &q)) in codes.iter_mut().zip(quotients).enumerate() {
                let random = (random::bits(options.seed, (index + i) as u64) >> 32) as u32;
                *code = e2m1::stochastic(q.abs(), random) | e2m1::sign(q);
            }
        }
    }
    pack_block(&codes)
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

/// The best of all 126 scales. Errors are estimated first; only scales whose estimates are too close to tell apart are compared exactly.
fn sweep(x: &Values, amax: f32, global: f32) -> u8 {
    // Upwards: a scale that is twice another one, if the latter clips nothing, has only values that the other has too, so it cannot be
    // better. For normal numbers, eight bytes up is twice, so the search ends at twice the first such scale.
    const FIRST_NORMAL: u8 = 8;
    let start = nearest_scale(amax / e2m1::MAX / global);
    let unclipped = (start..e4m3::MAX_BYTE)
        .find(|&s| f64::from(e2m1::MAX) * exact_step(s, global) >= f64::from(amax))
        .unwrap_or(e4m3::MAX_BYTE);
    let last = e4m3::MAX_BYTE.min(unclipped.max(FIRST_NORMAL) + 7);

    // Downwards: the largest value is clipped ever harder. Once that alone costs more than the best scale, all further ones are worse.
    let estimate = Estimate::new(x, amax, global);
    let mut errors = [0f32; e4m3::MAX_BYTE as usize + LANES];
    let mut least = f32::INFINITY;
    let mut first = last + 1;
    let limit = loop {
        first = first.saturating_sub(LANES as u8).max(1);
        let found = estimate.errors(first);
        errors[usize::from(first)..][..LANES].copy_from_slice(&found);
        for error in found {
            // Not `min`, which is slower because it handles NaN. This comparison leaves NaN out too.
            least = if error < least { error } else { least };
        }
        let limit = estimate.limit(least);
        let clipped = 1.0 - e2m1::MAX * estimate.relative_step(first - 1);
        if first == 1 || clipped > 0.0 && clipped * clipped > limit {
            break limit;
        }
    };

    // An estimate that is not finite is not conclusive.
    let is_close = |scale: &u8| {
        let error = errors[usize::from(*scale)];
        !(error > limit && error.is_finite())
    };
    let mut close = (first..=last).filter(is_close);
    let mut best = close.next().unwrap_or(unclipped);
    let Some(second) = close.next() else {
        return best;
    };
    let mut least = squared_error(x, best, global);
    for scale in std::iter::once(second).chain(close) {
        let error = squared_error(x, scale, global);
        // The smaller scale wins a tie.
        if error < least {
            (best, least) = (scale, error);
        }
    }
    best
}

/// Scales whose errors are estimated together: as many as nearly all blocks need. Loops of this length vectorize on baseline x86-64;
/// shorter ones do not.
const LANES: usize = 16;

/// Estimates the squared error of a block under any scale, in f32, in units of the block's largest magnitude.
struct Estimate {
    /// Magnitudes.
    x: Values,
    amax: f32,
    global: f32,
    /// Three times the possible error of an estimate's square root: see [`Estimate::limit`].
    slack: f32,
}

impl Estimate {
    fn new(x: &Values, amax: f32, global: f32) -> Self {
        /// Below this, the step of the smallest scale is subnormal in f32, and its rounding error has no bound.
        const SMALLEST_GLOBAL: f32 = f32::MIN_POSITIVE * 512.0;
        let mut magnitudes = [0.0; BLOCK];
        let mut squares = [0.0; BLOCK];
        for i in 0..BLOCK {
            magnitudes[i] = x[i].abs() / amax;
            squares[i] = magnitudes[i] * magnitudes[i];
        }
        let slack = match global >= SMALLEST_GLOBAL {
            true => 3.0 * (1.0 / (1 << 18) as f32) * pairwise(squares).sqrt(),
            false => f32::INFINITY,
        };
        Estimate {
            x: magnitudes,
            amax,
            global,
            slack,
        }
    }

    fn relative_step(&self, scale: u8) -> f32 {
        e4m3::decode(scale) * self.global / self.amax
    }

    /// Estimates for scales from `first` on. Beyond the largest scale, repeats its estimate.
    fn errors(&self, first: u8) -> [f32; LANES] {
        let mut steps = [0.0; LANES];
        let mut inverses = [0.0; LANES];
        for lane in 0..LANES {
            steps[lane] = self.relative_step((first + lane as u8).min(e4m3::MAX_BYTE));
            inverses[lane] = 1.0 / steps[lane];
        }
        const SHIFT: f32 = 0.75 * (1 << 23) as f32;
        let mut sums = [0.0; LANES];
        for &v in &self.x {
            for lane in 0..LANES {
                let quotient = v * inverses[lane];
                let clipped = if quotient < e2m1::MAX {
                    quotient
                } else {
                    e2m1::MAX
                };
                // Codes are half a unit apart below 2, one below 4 and two above: half the power of two that a magnitude from
                // 1 on begins with. At 1.5 x 2^23 times that gap an f32 steps by the gap, so the addition rounds to a code.
                let power = f32::from_bits(clipped.to_bits() & 0x7f80_0000);
                let shift = power * SHIFT;
                let shift = if shift > SHIFT { shift } else { SHIFT };
                let difference = quotient - ((clipped + shift) - shift);
                sums[lane] += difference * difference;
            }
        }
        for lane in 0..LANES {
            sums[lane] *= steps[lane] * steps[lane];
        }
        sums
    }

    /// The limit above which the estimate of another scale proves that its error is larger than that of a scale with the estimate `least`.
    ///
    /// With u = 2^-24, q a magnitude in steps and d its distance from its code: the estimate's q is off by 5 uq and its d by one more, and
    /// the quotient that decides the code of the exact error by 2 uq, so the two d differ by at most 10 uq. Let S be the sum of the squares
    /// of a block's magnitudes, and E an error, at most S. Then E and its estimate differ by at most 20 u sqrt(ES) + 100 u^2 S, plus 24 uE
    /// from the summation: less than k sqrt(E) + k^2 with k = 64 u sqrt(S). Two errors are told apart by 3 k between the square roots of
    /// their estimates.
    fn limit(&self, least: f32) -> f32 {
        let root = least.sqrt() + self.slack;
        root * root
    }
}

/// Pairwise sum in a fixed order.
#[inline(always)]
fn pairwise<T: Copy + std::ops::AddAssign>(mut values: [T; BLOCK]) -> T {
    let mut width = BLOCK / 2;
    while width > 0 {
        for i in 0..width {
            values[i] += values[i + width];
        }
        width /= 2;
    }
    values[0]
}

/// Exact product of scale and global scale: 4 bits by 24.
fn exact_step(scale: u8, global: f32) -> f64 {
    f64::from(e4m3::decode(scale)) * f64::from(global)
}

/// Squared error of a block under a scale, rounded to nearest. In f64, so that f32 values neither overflow nor vanish when squared; summed
/// pairwise in a fixed order.
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
    pairwise(squares)
}

/// Magnitude of a code below 8. Without a table, loops over it vectorize: twice the magnitude is the code itself up to 4, then 6, 8 and 12.
#[inline(always)]
fn magnitude(code: u32) -> f32 {
    let doubled = code + u32::from(code > 4) + u32::from(code > 5) + 3 * u32::from(code > 6);
    doubled as i32 as f32 * 0.5
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use proptest::prelude::*;

    const RECIPES: [Recipe; 3] = [Recipe::Amax, Recipe::FourOverSix, Recipe::Sweep];

    fn options(recipe: Recipe) -> QuantizeOptions {
        QuantizeOptions {
            recipe,
            ..QuantizeOptions::default()
        }
    }

    fn legacy(rounding: Rounding) -> QuantizeOptions {
        QuantizeOptions {
            levels: Levels::Legacy,
            rounding,
            ..QuantizeOptions::default()
        }
    }

    /// The expected result of [`sweep`]: the smallest scale among those with the least error.
    fn best_of_all(block: &Values, global: f32) -> u8 {
        let error = |scale| squared_error(block, scale, global);
        (1..=e4m3::MAX_BYTE)
            .min_by(|&a, &b| error(a).total_cmp(&error(b)))
            .unwrap()
    }

    /// Thousands of weight-like blocks, and blocks of few distinct values, in which errors are often equal.
    #[test]
    fn the_sweep_of_many_blocks_finds_what_all_scales_would() {
        for number in 0..4000 {
            let mut block = [0.0; BLOCK];
            for (i, value) in block.iter_mut().enumerate() {
                let bits = random::bits(number, i as u64);
                let uniform = |k: u32| f64::from((bits >> (16 * k)) as u16) / 32768.0 - 1.0;
                *value = match number % 3 {
                    0 => (bits % 17) as f32 / 8.0,
                    1 => ((0..4).map(uniform).sum::<f64>() * 0.02) as f32,
                    _ => (uniform(0) * (8.0 * uniform(1)).exp2()) as f32,
                };
            }
            let largest = amax(&block, 0, NonFinite::Error).unwrap();
            if largest == 0.0 {
                continue;
            }
            for room in [1.0, 0.3, 1e-3] {
                let global = largest / room / (e2m1::MAX * e4m3::MAX);
                let found = sweep(&block, largest, global);
                assert_eq!(found, best_of_all(&block, global), "{block:?} by {global}");
            }
        }
    }

    /// Squared error against the exactly decoded values.
    fn error(x: &[f32], q: &Nvfp4) -> f64 {
        let codes = unpack(&q.codes);
        x.iter()
            .enumerate()
            .map(|(i, &v)| {
                let scale = f64::from(e4m3::decode(q.scales[i / BLOCK])) * f64::from(q.global);
                (f64::from(v) - f64::from(e2m1::decode(codes[i])) * scale).powi(2)
            })
            .sum()
    }

    /// Values whose magnitudes spread over many powers of two, with zeros of both signs among them.
    fn value() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => (-1f32..1.0, -20i32..20).prop_map(|(m, e)| m * (e as f32).exp2()),
            4 => -1f32..1.0,
            1 => Just(0.0),
            1 => Just(-0.0),
            1 => any::<f32>().prop_filter("finite", |v| v.is_finite()),
        ]
    }

    /// One tensor of up to 5 rows of up to 4 blocks.
    fn matrix() -> impl Strategy<Value = (Vec<f32>, usize, usize)> {
        (1usize..6, 1usize..5).prop_flat_map(|(rows, blocks)| {
            let cols = blocks * BLOCK;
            prop::collection::vec(value(), rows * cols).prop_map(move |x| (x, rows, cols))
        })
    }

    /// A tensor whose values lie within a few powers of two of each other, like weights.
    fn weights() -> impl Strategy<Value = Vec<f32>> {
        prop::collection::vec(-1f32..1.0, BLOCK * 4)
    }

    fn any_options() -> impl Strategy<Value = QuantizeOptions> {
        let levels = prop_oneof![
            Just(Levels::Two),
            Just(Levels::Single),
            Just(Levels::Legacy)
        ];
        let rounding = prop_oneof![
            Just(Rounding::NearestEven),
            Just(Rounding::HalfAway),
            Just(Rounding::Stochastic)
        ];
        (levels, 0usize..3, rounding, any::<u64>()).prop_map(|(levels, recipe, rounding, seed)| {
            let recipe = match levels {
                Levels::Legacy => Recipe::Amax,
                Levels::Two | Levels::Single => RECIPES[recipe],
            };
            QuantizeOptions {
                levels,
                recipe,
                rounding,
                seed,
                ..QuantizeOptions::default()
            }
        })
    }

    #[test]
    fn packing_puts_the_even_index_low() {
        assert_eq!(pack(&[1, 2, 0xff, 0]).unwrap(), [0x21, 0x0f]);
        assert_eq!(unpack(&[0x21, 0x0f]), [1, 2, 15, 0]);
        expect_kind(
            pack(&[1]),
            ErrorKind::InvalidArgument,
            "1 codes do not fill whole bytes",
        );
    }

    #[test]
    fn a_tensor_of_zeros_has_global_one_and_zero_scales() {
        let q = quantize(&[-0.0; 32], 2, 16, &QuantizeOptions::default()).unwrap();
        assert_eq!(
            q,
            Nvfp4 {
                rows: 2,
                cols: 16,
                codes: vec![0; 16],
                scales: vec![0; 2],
                global: 1.0
            }
        );
    }

    #[test]
    fn a_block_that_underflows_keeps_its_values() {
        // The first block sets the global scale to 1; the second one's scale, 0.003 / 6, is nearest to zero.
        let mut x = [0f32; 32];
        x[0] = 2688.0;
        x[16..].fill(0.003);
        x[17] = -0.0004;
        for recipe in RECIPES {
            let q = quantize(&x, 1, 32, &options(recipe)).unwrap();
            assert_ne!(q.scales[1], 0, "{recipe:?}");
            assert!(q.dequantize().unwrap()[16] > 0.0);
        }
        // Below half of the smallest step all codes are zero. Then the scale is zero too, and the signs are dropped.
        x[16..].fill(-0.0004);
        for recipe in RECIPES {
            let q = quantize(&x, 1, 32, &options(recipe)).unwrap();
            assert_eq!(q.scales[1], 0, "{recipe:?}");
            assert_eq!(q.codes[8..], [0; 8]);
        }
    }

    #[test]
    fn the_smallest_and_largest_floats_survive() {
        for amax in [f32::from_bits(1), 1e-40, f32::MIN_POSITIVE, f32::MAX] {
            let mut x = [0f32; 16];
            x[3] = -amax;
            for recipe in RECIPES {
                let q = quantize(&x, 1, 16, &options(recipe)).unwrap();
                let back = q.dequantize().unwrap()[3];
                assert!(q.global.is_normal());
                assert!(back.is_finite());
                // 2^-149 is far below half a step of the smallest global scale; everything else keeps two digits.
                if amax > 1e-40 {
                    assert!(
                        (back / -amax - 1.0).abs() < 0.07,
                        "{recipe:?} {amax}: {back}"
                    );
                }
            }
        }
    }

    #[test]
    fn legacy_follows_the_host_where_it_differs() {
        // A block below the scale's range keeps saturated codes beside a scale of zero, as in the legacy host's reference.
        let mut x = [0f32; 16];
        x[0] = 1e-4;
        x[1] = -1e-4;
        x[2] = -0.0;
        let q = quantize(&x, 1, 16, &legacy(Rounding::NearestEven)).unwrap();
        assert_eq!(q.scales, [0]);
        assert_eq!(q.codes[..2], [0xf7, 0x00]);
        // Scale 1: ties at 0.25 and 5, one to even and one away; tiny negatives keep their sign.
        let mut x = [0f32; 16];
        (x[0], x[1], x[2], x[3]) = (6.0, 5.0, -0.25, -1e-9);
        let even = quantize(&x, 1, 16, &legacy(Rounding::NearestEven)).unwrap();
        let away = quantize(&x, 1, 16, &legacy(Rounding::HalfAway)).unwrap();
        assert_eq!(even.scales, [0x38]);
        assert_eq!(even.codes[..2], [0x67, 0x88]);
        assert_eq!(away.codes[..2], [0x77, 0x89]);
        // Values beyond the largest scale saturate.
        let q = quantize(&[1e6; 16], 1, 16, &legacy(Rounding::NearestEven)).unwrap();
        assert_eq!(q.dequantize().unwrap(), [2688.0; 16]);
    }

    #[test]
    fn nan_and_infinity_are_named_or_saturate() {
        let mut x = vec![1f32; 64];
        (x[37], x[40], x[41]) = (f32::NAN, f32::INFINITY, f32::NEG_INFINITY);
        let e = quantize(&x, 2, 32, &QuantizeOptions::default()).unwrap_err();
        assert!(e.message().contains("index 37"), "{e}");
        let (mut codes, mut scales) = ([0; 16], [0; 2]);
        let e = quantize_rows(
            &x[32..],
            32,
            1,
            1.0,
            &QuantizeOptions::default(),
            &mut codes,
            &mut scales,
        )
        .unwrap_err();
        assert!(e.message().contains("index 37 (row 1, column 5)"), "{e}");

        for levels in [Levels::Two, Levels::Single, Levels::Legacy] {
            let saturate = QuantizeOptions {
                levels,
                nonfinite: NonFinite::Saturate,
                ..QuantizeOptions::default()
            };
            let q = quantize(&x, 2, 32, &saturate).unwrap();
            let back = q.dequantize().unwrap();
            let largest = 2688.0 * q.global;
            assert_eq!(back[37], 0.0, "{levels:?}");
            assert_eq!((back[40], back[41]), (largest, -largest), "{levels:?}");
            assert!(back.iter().all(|v| v.is_finite()));
        }
    }

    #[test]
    fn arguments_that_do_not_fit_are_errors() {
        let good = QuantizeOptions::default();
        let message = |r: Result<Nvfp4>| r.unwrap_err().message().to_owned();
        assert!(message(quantize(&[0.0; 24], 1, 24, &good)).contains("K = 24"));
        assert!(message(quantize(&[], 3, 0, &good)).contains("K = 0"));
        assert!(message(quantize(&[0.0; 16], 2, 16, &good)).contains("32 values, not 16"));
        expect_kind(
            quantize(&[], usize::MAX, 16, &good),
            ErrorKind::InvalidArgument,
            "[18446744073709551615, 16] overflows",
        );
        assert_eq!(quantize(&[], 0, 16, &good).unwrap().codes.len(), 0);
        let mixed = QuantizeOptions {
            recipe: Recipe::Sweep,
            ..legacy(Rounding::NearestEven)
        };
        assert!(message(quantize(&[0.0; 16], 1, 16, &mixed)).contains("Sweep"));

        let rows = |global: f32, options: &QuantizeOptions, codes: usize, scales: usize| {
            quantize_rows(
                &[1.0; 16],
                16,
                0,
                global,
                options,
                &mut vec![0; codes],
                &mut vec![0; scales],
            )
        };
        assert!(rows(1.0, &good, 8, 1).is_ok());
        expect_kind(
            rows(1.0, &good, 7, 1),
            ErrorKind::InvalidArgument,
            "not 7 and 1",
        );
        expect_kind(
            rows(1.0, &good, 8, 2),
            ErrorKind::InvalidArgument,
            "not 8 and 2",
        );
        for global in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            expect_kind(
                rows(global, &good, 8, 1),
                ErrorKind::InvalidArgument,
                "the global scale is",
            );
        }
        expect_kind(
            rows(2.0, &legacy(Rounding::NearestEven), 8, 1),
            ErrorKind::InvalidArgument,
            "without a second level it must be 1",
        );
        expect_kind(
            dequantize(&[0; 8], &[0; 2], 1.0, &mut [0.0; 16]),
            ErrorKind::InvalidArgument,
            "not 8 and 2",
        );
        expect_kind(
            dequantize(&[0; 4], &[0; 0], 1.0, &mut [0.0; 8]),
            ErrorKind::InvalidArgument,
            "8 values are not whole blocks",
        );
    }

    #[test]
    fn stochastic_rounding_is_right_on_average() {
        // Scale 1, so the values are the quotients; each fills a row of a thousand.
        for value in [0.1f32, 0.6, 1.2, 2.25, 3.9, 4.5] {
            let mut x = vec![value; 1024 * 16];
            x.iter_mut().step_by(16).for_each(|v| *v = 6.0);
            let options = QuantizeOptions {
                levels: Levels::Single,
                rounding: Rounding::Stochastic,
                seed: 11,
                ..QuantizeOptions::default()
            };
            let back = quantize(&x, 1024, 16, &options)
                .unwrap()
                .dequantize()
                .unwrap();
            let n = 1024.0 * 15.0;
            let mean = (back.iter().map(|&v| f64::from(v)).sum::<f64>() - 6.0 * 1024.0) / n;
            // Five standard deviations: the widest gap is 2, so one value's deviation is at most 1.
            assert!(
                (mean - f64::from(value)).abs() < 5.0 / n.sqrt(),
                "{value}: {mean}"
            );
        }
    }

    proptest! {
        #[test]
        fn rows_in_ranges_give_the_bytes_of_the_whole(
            (x, rows, cols) in matrix(), options in any_options(), cut in 0usize..6,
        ) {
            let whole = quantize(&x, rows, cols, &options).unwrap();
            let cut = cut.min(rows);
            let (mut codes, mut scales) = (vec![0; x.len() / 2], vec![0; x.len() / 16]);
            for (from, to) in [(cut, rows), (0, cut)] {
                quantize_rows(
                    &x[from * cols..to * cols], cols, from, whole.global, &options,
                    &mut codes[from * cols / 2..to * cols / 2],
                    &mut scales[from * cols / 16..to * cols / 16],
                ).unwrap();
            }
            prop_assert_eq!(codes, whole.codes);
            prop_assert_eq!(scales, whole.scales);
        }

        #[test]
        fn the_first_bad_value_is_the_one_named(
            (mut x, rows, cols) in matrix(), at in any::<prop::sample::Index>(),
            bad in prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        ) {
            let at = at.index(x.len());
            x[at] = bad;
            for levels in [Levels::Two, Levels::Single, Levels::Legacy] {
                let options = QuantizeOptions { levels, ..QuantizeOptions::default() };
                let e = quantize(&x, rows, cols, &options).unwrap_err();
                let start = format!("the value at index {at} ");
                prop_assert!(e.message().starts_with(&start), "{}", e);
            }
        }

        #[test]
        fn errors_are_bounded_by_the_step((x, rows, cols) in matrix(), recipe in 0usize..2) {
            let q = quantize(&x, rows, cols, &options(RECIPES[recipe])).unwrap();
            let back = q.dequantize().unwrap();
            for (b, (v, w)) in x.chunks(BLOCK).zip(back.chunks(BLOCK)).enumerate() {
                // The widest gap is 2 steps, so rounding costs at most 1. If the scale itself was rounded down, clipping costs 6 times
                // that: 6/16 of a step for a normal scale, 6 times half the spacing for a subnormal one.
                let step = exact_step(q.scales[b], q.global);
                let clipping = 3.0 * exact_step(1, q.global);
                let bound = step.max(clipping) * (1.0 + 1e-6);
                for (a, b) in v.iter().zip(w) {
                    let error = (f64::from(*a) - f64::from(*b)).abs();
                    prop_assert!(error <= bound, "{} -> {} with a step of {}", a, b, step);
                }
            }
        }

        #[test]
        fn a_scale_of_zero_means_a_block_of_zeros(
            (x, rows, cols) in matrix(),
            options in any_options().prop_filter("native", |o| o.levels != Levels::Legacy),
        ) {
            let q = quantize(&x, rows, cols, &options).unwrap();
            for (codes, &scale) in q.codes.chunks(8).zip(&q.scales) {
                let zero = codes.iter().all(|c| c & 0x77 == 0);
                prop_assert_eq!(scale == 0, zero);
                prop_assert!(scale <= e4m3::MAX_BYTE);
            }
        }

        #[test]
        fn values_of_the_format_are_kept_exactly(
            codes in prop::collection::vec(0u8..16, 16), scale in 1u8..=e4m3::MAX_BYTE,
        ) {
            let codes = pack(&codes).unwrap();
            let mut x = [0f32; 16];
            dequantize(&codes, &[scale], 1.0, &mut x).unwrap();
            let single = QuantizeOptions {
                levels: Levels::Single, recipe: Recipe::Sweep, ..QuantizeOptions::default()
            };
            let q = quantize(&x, 1, 16, &single).unwrap();
            prop_assert_eq!(q.dequantize().unwrap(), x);
        }

        #[test]
        fn searched_scales_are_never_worse(x in weights()) {
            // Under one global scale, because four-over-six's own excludes the other recipes' largest scales.
            for global in [1.0, 1.0 / (6.0 * 256.0), 1.0 / 2688.0] {
                let [amax, four_over_six, sweep] = RECIPES.map(|recipe| {
                    let mut q = Nvfp4 {
                        rows: 1,
                        cols: x.len(),
                        codes: vec![0; x.len() / 2],
                        scales: vec![0; x.len() / BLOCK],
                        global,
                    };
                    let options = options(recipe);
                    quantize_rows(&x, q.cols, 0, global, &options, &mut q.codes, &mut q.scales)
                        .unwrap();
                    error(&x, &q)
                });
                // The sum has another order than in the recipe, so both are equal only up to rounding.
                prop_assert!(sweep <= four_over_six * (1.0 + 1e-12));
                prop_assert!(four_over_six <= amax * (1.0 + 1e-12));
            }
        }

        #[test]
        fn the_bounded_sweep_finds_what_all_scales_would(
            (x, _, _) in matrix(), global in prop_oneof![Just(1f32), 1e-6f32..1e3],
        ) {
            let block: &Values = x[..BLOCK].try_into().unwrap();
            let amax = amax(block, 0, NonFinite::Error).unwrap();
            prop_assume!(amax > 0.0);
            prop_assert_eq!(sweep(block, amax, global), best_of_all(block, global));
        }
    }
}
