//! AdamW (Loshchilov and Hutter, arXiv 1711.05101) on blocks of 16 weights in their stored form: the specification that kernels on every
//! device match bit by bit. A step reads weights and moments, updates them in f32, and rounds once.
//!
//! A weight's block scale stays while the largest weight of the block is within a [`Band`] of it: a grid that moved in every step would
//! round every weight again, and the errors would add up. Scales of moments are recomputed in every step, because an exponential average
//! forgets errors.
//!
//! The global scales of moments belong to groups of [`GROUP_ROWS`] rows. They are powers of two derived from an upper bound of the step, so
//! that a group is updated in one pass over its memory, independent of the rest of the tensor.

use serde::{Deserialize, Serialize};

use super::input_moments::{BlockMoments, best_scale};
use super::moment::{self, dither};
use super::nvfp4::BLOCK;
use super::random::{bits, bits16, words};
use super::residual::{self, Bits, DRAW_BITS};
use super::{Rounding, e2m1, e4m3};
use crate::base::error::{Result, bail};

/// Rows that share the global scales of their moments.
pub const GROUP_ROWS: usize = 8;
/// Divisor of the second code of [`WeightForm::TwoTerm`]: the largest remainder is one scale, and the largest code is six.
const SECOND_TERM: f32 = e2m1::MAX;

/// Stored form of a weight between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightForm {
    /// An NVFP4 code and a residual in local steps, rounded stochastically: see [`residual`].
    Residual(Bits),
    /// Two E2M1 codes: the nearest to the weight, and that of the remainder in sixths of the scale, rounded stochastically.
    TwoTerm,
    /// One NVFP4 code, rounded stochastically.
    OneTerm,
    /// bfloat16, rounded stochastically.
    Bf16,
    /// float32.
    F32,
}

impl Default for WeightForm {
    fn default() -> Self {
        WeightForm::Residual(Bits::Four)
    }
}

/// Stored form of a first moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FirstForm {
    /// Integers from -7 to 7 with subtractive dither.
    #[default]
    Int4,
    /// NVFP4, rounded stochastically.
    Nvfp4,
    /// Integers from -127 to 127, rounded stochastically.
    Int8,
    /// float32.
    F32,
}

/// Stored form of the square root of a second moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecondForm {
    /// Integers from 1 to 15, rounded stochastically.
    #[default]
    Uint4,
    /// The positive values of NVFP4, rounded stochastically, never zero.
    Nvfp4,
    /// Integers from 1 to 127, rounded stochastically.
    Int8,
    /// float32, of the second moment itself.
    F32,
}

/// Bytes of a field for a block of 16: its codes, and whether it has a block scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldBytes {
    /// Bytes of codes.
    pub codes: usize,
    /// Whether each block has a scale, and each group of rows or tensor a global scale.
    pub scaled: bool,
}

impl FieldBytes {
    const fn new(bits: usize, scaled: bool) -> FieldBytes {
        FieldBytes {
            codes: BLOCK * bits / 8,
            scaled,
        }
    }

    /// Bytes per block, its scale included.
    pub const fn of_block(self) -> usize {
        self.codes + self.scaled as usize
    }
}

impl WeightForm {
    /// The field of the delivered codes, or of the whole weight.
    pub const fn codes(self) -> FieldBytes {
        match self {
            WeightForm::Residual(_) | WeightForm::TwoTerm | WeightForm::OneTerm => {
                FieldBytes::new(4, true)
            }
            WeightForm::Bf16 => FieldBytes::new(16, false),
            WeightForm::F32 => FieldBytes::new(32, false),
        }
    }

    /// The field of the residual beside the codes.
    pub const fn rest(self) -> FieldBytes {
        match self {
            WeightForm::Residual(Bits::Eight) => FieldBytes::new(8, false),
            WeightForm::Residual(Bits::Four) | WeightForm::TwoTerm => FieldBytes::new(4, false),
            WeightForm::OneTerm | WeightForm::Bf16 | WeightForm::F32 => FieldBytes::new(0, false),
        }
    }

    /// Whether the codes are NVFP4.
    pub const fn is_packed(self) -> bool {
        self.codes().scaled
    }
}

impl FirstForm {
    /// The field of this moment.
    pub const fn field(self) -> FieldBytes {
        match self {
            FirstForm::Int4 | FirstForm::Nvfp4 => FieldBytes::new(4, true),
            FirstForm::Int8 => FieldBytes::new(8, true),
            FirstForm::F32 => FieldBytes::new(32, false),
        }
    }

    /// The largest code.
    const fn max(self) -> f32 {
        match self {
            FirstForm::Int4 => moment::FIRST_MAX,
            FirstForm::Nvfp4 => e2m1::MAX,
            FirstForm::Int8 | FirstForm::F32 => moment::WIDE_MAX,
        }
    }
}

impl SecondForm {
    /// The field of this moment.
    pub const fn field(self) -> FieldBytes {
        match self {
            SecondForm::Uint4 | SecondForm::Nvfp4 => FieldBytes::new(4, true),
            SecondForm::Int8 => FieldBytes::new(8, true),
            SecondForm::F32 => FieldBytes::new(32, false),
        }
    }

    /// The largest code.
    const fn max(self) -> f32 {
        match self {
            SecondForm::Uint4 => moment::SECOND_MAX,
            SecondForm::Nvfp4 => e2m1::MAX,
            SecondForm::Int8 | SecondForm::F32 => moment::WIDE_MAX,
        }
    }
}

/// Rule for keeping the scale of a block of weights in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeepScale {
    /// Keep it while the block's largest weight is near the end of the grid. For weights that move far, as from random values.
    #[default]
    Near,
    /// Keep it while the grid holds the block's largest weight, however small that is. For weights that begin on a grid chosen for them,
    /// whose scale may clip the largest.
    Held,
    /// Never keep it: every step rounds every weight again. A baseline.
    Never,
}

impl KeepScale {
    /// The band within which a matrix of this form keeps its scales.
    pub fn band(self, form: WeightForm) -> Band {
        // A block that has shrunk this far has a grid four times as coarse as possible.
        const FALLEN: f32 = 1.3;
        let (least, most, spread) = match (self, form) {
            (KeepScale::Near, _) => (5.2, 6.6, 0.0),
            (KeepScale::Held, WeightForm::Residual(bits)) => {
                let last = residual::largest(bits);
                (FALLEN, last, residual::OUTERMOST / bits.steps() as f32)
            }
            (KeepScale::Held, _) => (FALLEN, 6.6, 0.0),
            (KeepScale::Never, _) => (f32::INFINITY, 0.0, 0.0),
        };
        Band {
            least,
            most,
            spread,
        }
    }
}

/// Bounds of a block's largest weight, in units of the block scale, within which a step keeps the scale. If the largest weight exceeds
/// `most` by a share of `spread`, the scale changes with that probability: as often as stochastic rounding would carry the weight to the
/// next point of a grid that ends at `most`. So no weight stays at the end of the grid against its updates.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Band {
    /// Lower bound.
    pub least: f32,
    /// Upper bound below which the scale is always kept.
    pub most: f32,
    /// Width of the range above `most` in which the scale is kept with falling probability.
    pub spread: f32,
}

impl Band {
    /// Whether a block whose largest weight is `amax` keeps its scale, by the [`DRAW_BITS`] random bits `draw`.
    #[inline(always)]
    fn keeps(&self, amax: f32, draw: u32) -> bool {
        let share = (draw + 1) as f32 * (1.0 / (1 << DRAW_BITS) as f32);
        amax >= self.least && amax <= share.mul_add(self.spread, self.most)
    }

    /// Moves a weight beyond the end of the grid to the point to which stochastic rounding would have carried it, before its block gets
    /// another scale.
    #[inline(always)]
    fn leave(&self, weight: f32) -> f32 {
        match weight.abs() > self.most {
            true => weight.abs().max(self.most + self.spread).copysign(weight),
            false => weight,
        }
    }
}

/// Largest weight, in units of the largest block scale, that a block has room for. The excess over 6 is what a smaller scale may leave by
/// rounding.
pub const ROOM: f32 = 6.6;

/// Stored forms of a matrix and its moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Forms {
    /// The weight.
    pub weight: WeightForm,
    /// The first moment.
    pub first: FirstForm,
    /// The second moment.
    pub second: SecondForm,
    /// Rule for keeping block scales of weights.
    pub keep_scale: KeepScale,
}

impl Forms {
    /// Bytes of a block of 16 weights, moments included.
    pub const fn block_bytes(&self) -> usize {
        let weight = self.weight.codes().of_block() + self.weight.rest().of_block();
        weight + self.first.field().of_block() + self.second.field().of_block()
    }
}

/// AdamW's hyperparameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hyperparameters {
    /// The learning rate.
    pub rate: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub decay: f64,
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Hyperparameters {
            rate: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: 0.1,
        }
    }
}

impl Hyperparameters {
    /// Refuses invalid settings.
    pub fn check(&self) -> Result<()> {
        let Hyperparameters {
            rate,
            beta1,
            beta2,
            eps,
            decay,
        } = *self;
        if !(rate >= 0.0 && rate.is_finite()) {
            bail!(
                InvalidArgument,
                "a learning rate of {rate}; it must be finite and at least 0"
            );
        }
        if !((0.0..1.0).contains(&beta1) && (0.0..1.0).contains(&beta2)) {
            bail!(
                InvalidArgument,
                "betas of {beta1} and {beta2}; they must be at least 0 and less than 1"
            );
        }
        let held = decay >= 0.0 && decay.is_finite() && rate * decay < 1.0;
        if !(eps > 0.0 && eps.is_finite() && held) {
            bail!(
                InvalidArgument,
                "a learning rate of {rate}, eps {eps} and weight decay {decay}; eps must be positive, and the decay at least 0 and less than 1 / rate"
            );
        }
        Ok(())
    }
}

/// Coefficients of a step, as kernels take them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Coefficients {
    /// Factor of the gradients: clipping, and the inverse of the loss scale.
    pub factor: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// `1 - beta1`.
    pub rest1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub rest2: f32,
    /// Bias correction of the second moment's square root: `1 / sqrt(1 - beta2^t)`.
    pub correction: f32,
    /// Added to the corrected root.
    pub eps: f32,
    /// Factor of the weights: `1 - rate * decay`.
    pub keep: f32,
    /// The rate with bias correction of the first moment: `rate / (1 - beta1^t)`.
    pub rate: f32,
}

impl Coefficients {
    /// Coefficients of step `step`, counted from 1, with gradients multiplied by `factor`.
    pub fn new(settings: &Hyperparameters, step: u64, factor: f32) -> Coefficients {
        let bias = |beta: f64| 1.0 - beta.powf(step as f64);
        Coefficients {
            factor,
            beta1: settings.beta1 as f32,
            rest1: (1.0 - settings.beta1) as f32,
            beta2: settings.beta2 as f32,
            rest2: (1.0 - settings.beta2) as f32,
            correction: (1.0 / bias(settings.beta2).sqrt()) as f32,
            eps: settings.eps as f32,
            keep: (1.0 - settings.rate * settings.decay) as f32,
            rate: (settings.rate / bias(settings.beta1)) as f32,
        }
    }

    /// Whether weights stay as they are.
    #[inline(always)]
    pub fn is_still(&self) -> bool {
        self.rate == 0.0 && self.keep == 1.0
    }
}

/// A step of a float32 parameter with its moments: the update of [`step`] without rounding.
#[inline(always)]
pub fn step_f32(
    c: &Coefficients,
    gradient: f32,
    weight: &mut f32,
    first: &mut f32,
    second: &mut f32,
) {
    let g = gradient * c.factor;
    *first = c.rest1.mul_add(g, c.beta1 * *first);
    *second = (c.rest2 * g).mul_add(g, c.beta2 * *second);
    if !c.is_still() {
        let denominator = c.correction.mul_add(second.sqrt(), c.eps);
        *weight = (-c.rate).mul_add(*first / denominator, c.keep * *weight);
    }
}

/// Keys of a tensor's random streams in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Keys {
    /// Rounding of weights and second moments.
    pub rounding: u64,
    /// Rounding of the first moment; also its dither, in a dithered form.
    pub first: u64,
    /// Dither of the first moment in the previous step, with which it was stored.
    pub previous: u64,
}

impl Keys {
    /// Keys of tensor `tensor` in its step `step`, counted from 1. Its previous step has number `step - 1`.
    pub fn new(seed: u64, tensor: u64, step: u64) -> Keys {
        let stream = bits(seed, tensor);
        Keys {
            rounding: bits(stream, 2 * step),
            first: bits(stream, 2 * step + 1),
            previous: bits(stream, 2 * step - 1),
        }
    }
}

/// Dither of element `index`. Eight elements share one draw.
#[inline(always)]
fn dither_draw(key: u64, index: u32) -> u8 {
    (words(key, index / 8)[(index / 4 % 2) as usize] >> (8 * (index % 4))) as u8
}

/// Random bits of a weight ([`DRAW_BITS`]) and of its second moment (16). Four elements share one draw. Neighbours share a word, from which
/// each weight takes one end and its second moment the other. The bits that two of them have in common decide one rounding in thousands.
#[inline(always)]
fn rounding_draws(key: u64, index: u32) -> (u32, u16) {
    let word = words(key, index / 4)[(index / 2 % 2) as usize];
    match index % 2 {
        0 => (word >> (32 - DRAW_BITS), word as u16),
        _ => (word & ((1 << DRAW_BITS) - 1), (word >> 16) as u16),
    }
}

/// Reciprocal of a block scale; for zero, that of the smallest scale.
#[inline(always)]
fn inverse(scale: u8) -> f32 {
    1.0 / e4m3::decode(scale.max(1))
}

/// The exponent of the smallest power of two `2^p` with `reach < 2^(p + bits)`. Values of `reach` below 2^-80 count as 2^-80, so that
/// reciprocals of scales, in the steps that moments are rounded in, stay finite.
#[inline(always)]
pub fn power_for(reach: f32, bits: i32) -> f32 {
    let exponent = (reach.to_bits() >> 23 & 0xff) as i32 - 127;
    f32::from_bits(((exponent.clamp(-80, 127) + 1 - bits + 127).max(1) as u32) << 23)
}

/// Bits of a group's largest first moment above the global scale: its largest block scale lies between 128 and 448.
fn first_bits(form: FirstForm) -> i32 {
    match form {
        FirstForm::Int4 | FirstForm::Nvfp4 => 11,
        FirstForm::Int8 | FirstForm::F32 => 15,
    }
}

fn second_bits(form: SecondForm) -> i32 {
    match form {
        SecondForm::Uint4 => 12,
        SecondForm::Nvfp4 => 11,
        SecondForm::Int8 | SecondForm::F32 => 15,
    }
}

/// Global scales of a group's moments after a step, from the largest gradient times the step's factor, and from the largest block scales
/// with their previous global scales.
pub fn moment_globals(
    forms: &Forms,
    c: &Coefficients,
    largest: f32,
    (first_scale, first_global): (u8, f32),
    (second_scale, second_global): (u8, f32),
) -> (f32, f32) {
    // Half a code more than the largest, because of the dither.
    let m = (forms.first.max() + 0.5) * e4m3::decode(first_scale) * first_global;
    let s = forms.second.max() * e4m3::decode(second_scale) * second_global;
    let first = c.beta1.mul_add(m, c.rest1 * largest);
    let second = (c.beta2 * s).mul_add(s, c.rest2 * largest * largest).sqrt();
    (
        power_for(first, first_bits(forms.first)),
        power_for(second, second_bits(forms.second)),
    )
}

/// Codes of a block in a field, with the block's scale.
#[derive(Debug)]
pub struct Field<'a> {
    /// [`FieldBytes::codes`] bytes. Of two 4-bit codes in a byte, the first is in the low half.
    pub codes: &'a mut [u8],
    /// Block scale of a scaled field.
    pub scale: Option<&'a mut u8>,
}

#[inline(always)]
fn nibble(codes: &[u8], i: usize) -> u8 {
    codes[i / 2] >> (4 * (i % 2)) & 15
}

fn put_nibbles(codes: &mut [u8], values: [u8; BLOCK]) {
    for (i, byte) in codes.iter_mut().enumerate() {
        *byte = values[2 * i] | values[2 * i + 1] << 4;
    }
}

fn float(codes: &[u8], i: usize) -> f32 {
    f32::from_le_bytes([0, 1, 2, 3].map(|b| codes[4 * i + b]))
}

fn put_floats(codes: &mut [u8], values: &[f32; BLOCK]) {
    for (bytes, value) in codes.chunks_exact_mut(4).zip(values) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

/// Values of a block of weights: the delivered ones, by the codes alone, or the full stored ones.
pub fn decode_weights(
    form: WeightForm,
    codes: &[u8],
    rest: &[u8],
    scale: u8,
    global: f32,
    whole: bool,
) -> [f32; BLOCK] {
    let quotients = decode_quotients(form, codes, rest, whole);
    match form.is_packed() {
        // In the order of [`nvfp4::decode`](super::nvfp4::decode): f32 holds the first product exactly.
        true => quotients.map(|q| q * e4m3::decode(scale) * global),
        false => quotients,
    }
}

/// Values of a block of weights, divided by their scales.
fn decode_quotients(form: WeightForm, codes: &[u8], rest: &[u8], whole: bool) -> [f32; BLOCK] {
    std::array::from_fn(|i| match form {
        WeightForm::F32 => float(codes, i),
        WeightForm::Bf16 => {
            f32::from_bits(u32::from(u16::from_le_bytes([codes[2 * i], codes[2 * i + 1]])) << 16)
        }
        WeightForm::Residual(bits) if whole => {
            let residual = match bits {
                Bits::Four => (nibble(rest, i) << 4) as i8 >> 4,
                Bits::Eight => rest[i] as i8,
            };
            residual::decode(nibble(codes, i), residual, bits)
        }
        WeightForm::TwoTerm if whole => {
            let second = e2m1::decode(nibble(rest, i)) * (1.0 / SECOND_TERM);
            e2m1::decode(nibble(codes, i)) + second
        }
        WeightForm::Residual(_) | WeightForm::TwoTerm | WeightForm::OneTerm => {
            e2m1::decode(nibble(codes, i))
        }
    })
}

/// Encodes a block of weights, rounded to nearest. Saturates at the largest scale.
pub fn encode_weights(
    form: WeightForm,
    values: &[f32; BLOCK],
    global: f32,
    codes: Field<'_>,
    rest: &mut [u8],
) {
    match form.is_packed() {
        true => {
            let quotients = values.map(|v| v / global);
            encode_quotients(form, &quotients, 1.0, None, None, codes, rest);
        }
        false => {
            encode_quotients(form, values, 1.0, None, None, codes, rest);
        }
    }
}

/// Encodes a block of weights around given codes: scale and codes stay, and the residuals become the nearest to `values` that these allow.
pub fn encode_rest(
    form: WeightForm,
    values: &[f32; BLOCK],
    global: f32,
    codes: &[u8],
    scale: u8,
    rest: &mut [u8],
) {
    let unit = e4m3::decode(scale) * global;
    // A weight under a scale of zero is zero whatever its residual.
    let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
    let beside: [u8; BLOCK] = std::array::from_fn(|i| {
        let (code, q) = (nibble(codes, i), values[i] * inverse);
        match form {
            WeightForm::Residual(bits) => residual::beside(code, q, bits) as u8,
            WeightForm::TwoTerm => {
                let remainder = (q - e2m1::decode(code)) * SECOND_TERM;
                encode_e2m1(remainder, Rounding::NearestEven, 0)
            }
            _ => 0,
        }
    });
    put_rest(form, beside, rest);
}

/// Gives a block of NVFP4 weights the scale that is best for its product with inputs of these second moments. The weights keep their values
/// as closely as the new grid allows. Returns whether the scale changed.
pub fn choose_scale(
    form: WeightForm,
    global: f32,
    moments: &BlockMoments,
    codes: Field<'_>,
    rest: &mut [u8],
) -> bool {
    /// A band that keeps any scale.
    const ANY: Band = Band {
        least: 0.0,
        most: f32::INFINITY,
        spread: 0.0,
    };
    let scale = codes.scale.expect("an NVFP4 code has a block scale");
    let weights = decode_weights(form, codes.codes, rest, *scale, global, true);
    let best = best_scale(&weights, Some(*scale), global, moments);
    if best == *scale {
        return false;
    }
    *scale = best;
    let unit = e4m3::decode(best) * global;
    let quotients = weights.map(|w| w / unit);
    let field = Field {
        codes: codes.codes,
        scale: Some(scale),
    };
    encode_quotients(form, &quotients, 1.0, Some(&ANY), None, field, rest);
    true
}

fn put_rest(form: WeightForm, beside: [u8; BLOCK], rest: &mut [u8]) {
    match form {
        WeightForm::Residual(Bits::Eight) => rest.copy_from_slice(&beside),
        WeightForm::Residual(Bits::Four) | WeightForm::TwoTerm => {
            put_nibbles(rest, beside.map(|v| v & 15));
        }
        _ => {}
    }
}

/// Encodes a block of weights that are divided by the global scale and the block scale `from`. Rounds stochastically by [`DRAW_BITS`] bits
/// per weight from `draws`, or to nearest if there are none. Keeps `from`, which is then the stored scale, if `band` allows it for the
/// block's largest weight. Returns whether the block lacks room: its largest weight is clipped by the largest block scale.
fn encode_quotients(
    form: WeightForm,
    quotients: &[f32; BLOCK],
    from: f32,
    band: Option<&Band>,
    draws: Option<&[u32; BLOCK]>,
    codes: Field<'_>,
    rest: &mut [u8],
) -> bool {
    let rounding = match draws {
        Some(_) => Rounding::Stochastic,
        None => Rounding::NearestEven,
    };
    let draw = |i: usize| draws.map_or(0, |draws| draws[i]);
    let draw16 = |i: usize| (draw(i) >> (DRAW_BITS - 16)) as u16;
    let scale = match form {
        WeightForm::F32 => {
            put_floats(codes.codes, quotients);
            return false;
        }
        WeightForm::Bf16 => {
            for (i, bytes) in codes.codes.chunks_exact_mut(2).enumerate() {
                let bits = quotients[i].to_bits();
                let rounded = match draws {
                    // A carry out of the lower half goes to the next bfloat16.
                    Some(_) => bits.wrapping_add(u32::from(draw16(i))) >> 16,
                    None => u32::from(half::bf16::from_f32(quotients[i]).to_bits()),
                };
                bytes.copy_from_slice(&(rounded as u16).to_le_bytes());
            }
            return false;
        }
        _ => codes.scale.expect("an NVFP4 code has a block scale"),
    };
    let mut amax = moment::amax(quotients);
    let mut quotients = *quotients;
    let (mut ratio, mut is_clipped) = (1.0, false);
    // The exclusive or of two draws is independent of how either weight is rounded.
    let chance = draw(0) ^ draw(BLOCK / 2);
    if !band.is_some_and(|band| band.keeps(amax, chance)) {
        if let Some(band) = band {
            quotients = quotients.map(|q| band.leave(q));
            amax = band.leave(amax);
        }
        // Never zero if a weight is not zero.
        *scale = match e4m3::encode(amax * from * (1.0 / e2m1::MAX)) {
            0 if amax > 0.0 => 1,
            byte => byte,
        };
        ratio = from * inverse(*scale);
        is_clipped = *scale == e4m3::MAX_BYTE && amax * ratio > ROOM;
    }
    let mut firsts = [0; BLOCK];
    let mut seconds = [0u8; BLOCK];
    for i in 0..BLOCK {
        let q = quotients[i] * ratio;
        (firsts[i], seconds[i]) = match form {
            WeightForm::Residual(bits) => {
                let (code, residual) = residual::encode(q, bits, rounding, draw(i));
                (code, residual as u8)
            }
            WeightForm::TwoTerm => {
                let code = e2m1::encode(q, Rounding::NearestEven, 0);
                let remainder = (q - e2m1::decode(code)) * SECOND_TERM;
                (code, encode_e2m1(remainder, rounding, draw16(i)))
            }
            _ => (encode_e2m1(q, rounding, draw16(i)), 0),
        };
    }
    put_nibbles(codes.codes, firsts);
    put_rest(form, seconds, rest);
    is_clipped
}

/// An E2M1 code, rounded by 16 random bits.
#[inline(always)]
fn encode_e2m1(value: f32, rounding: Rounding, draw: u16) -> u8 {
    e2m1::encode(value, rounding, u32::from(draw) << 16 | 1 << 15)
}

/// Product of a field's scales; 1 if it has none.
fn unit_of(field: &Field<'_>, global: f32) -> f32 {
    field
        .scale
        .as_ref()
        .map_or(1.0, |s| e4m3::decode(**s) * global)
}

/// First moments of a block, divided by their scales.
fn decode_first(form: FirstForm, field: &Field<'_>, key: u64, index: u32) -> [f32; BLOCK] {
    std::array::from_fn(|i| match form {
        FirstForm::F32 => float(field.codes, i),
        FirstForm::Int8 => f32::from(field.codes[i] as i8),
        FirstForm::Nvfp4 => e2m1::decode(nibble(field.codes, i)),
        FirstForm::Int4 => {
            let dither = dither(dither_draw(key, index + i as u32));
            moment::decode_first(nibble(field.codes, i), dither)
        }
    })
}

fn encode_first(
    form: FirstForm,
    values: &[f32; BLOCK],
    global: f32,
    key: u64,
    index: u32,
    field: Field<'_>,
) {
    let Some(scale) = field.scale else {
        return put_floats(field.codes, values);
    };
    *scale = moment::scale(moment::amax(values), 1.0 / (form.max() * global));
    let inverse = inverse(*scale) / global;
    let codes: [u8; BLOCK] = std::array::from_fn(|i| {
        let (value, index) = (values[i], index + i as u32);
        match form {
            FirstForm::Int4 => moment::encode_first(value, inverse, dither_draw(key, index)),
            FirstForm::Nvfp4 => {
                encode_e2m1(value * inverse, Rounding::Stochastic, bits16(key, index))
            }
            FirstForm::Int8 | FirstForm::F32 => {
                let rounded = round_stochastic(value * inverse, bits16(key, index));
                rounded.clamp(-moment::WIDE_MAX, moment::WIDE_MAX) as i8 as u8
            }
        }
    });
    match form {
        FirstForm::Int8 => field.codes.copy_from_slice(&codes),
        _ => put_nibbles(field.codes, codes),
    }
}

/// One of the two integers next to a value: the upper one with the probability of the distance to the lower one.
fn round_stochastic(value: f32, draw: u16) -> f32 {
    let (low, threshold) = (value.floor(), (f32::from(draw) + 0.5) * (1.0 / 65536.0));
    low + f32::from(u8::from(threshold < value - low))
}

/// Square roots of second moments of a block, divided by their scales.
fn decode_second(form: SecondForm, field: &Field<'_>) -> [f32; BLOCK] {
    std::array::from_fn(|i| match form {
        SecondForm::F32 => float(field.codes, i).sqrt(),
        SecondForm::Int8 => f32::from(field.codes[i]),
        SecondForm::Nvfp4 => e2m1::decode(nibble(field.codes, i) & 7),
        SecondForm::Uint4 => moment::decode_second(nibble(field.codes, i)),
    })
}

fn encode_second(
    form: SecondForm,
    roots: &[f32; BLOCK],
    global: f32,
    draws: &[u16; BLOCK],
    field: Field<'_>,
) {
    let scale = field.scale.expect("a root has a block scale");
    *scale = moment::scale(moment::amax(roots), 1.0 / (form.max() * global));
    let inverse = inverse(*scale) / global;
    let codes: [u8; BLOCK] = std::array::from_fn(|i| match form {
        SecondForm::Uint4 => moment::encode_second(roots[i], inverse, draws[i]),
        SecondForm::Nvfp4 => encode_e2m1(roots[i] * inverse, Rounding::Stochastic, draws[i]).max(1),
        SecondForm::Int8 | SecondForm::F32 => {
            let rounded = round_stochastic(roots[i] * inverse, draws[i]);
            rounded.clamp(1.0, moment::WIDE_MAX) as u8
        }
    });
    match form {
        SecondForm::Int8 => field.codes.copy_from_slice(&codes),
        _ => put_nibbles(field.codes, codes),
    }
}

/// A block of a matrix with its moments.
#[derive(Debug)]
pub struct Block<'a> {
    /// Codes of the weights.
    pub codes: Field<'a>,
    /// Residuals beside the codes.
    pub rest: &'a mut [u8],
    /// First moments.
    pub first: Field<'a>,
    /// Second moments.
    pub second: Field<'a>,
}

/// Global scales of a block, before and after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Globals {
    /// Global scale of the weights.
    pub weight: f32,
    /// Global scale of the first moments, before and after.
    pub first: [f32; 2],
    /// Global scale of the second moments, before and after.
    pub second: [f32; 2],
}

/// Number of weights that a step has changed: their code or scale differs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Counted by everything stored.
    pub stored: u64,
    /// Counted by the delivered codes alone.
    pub delivered: u64,
    /// Blocks whose largest weight exceeds the reach of the largest block scale.
    pub clipped: u64,
}

impl std::ops::AddAssign for Changes {
    fn add_assign(&mut self, other: Changes) {
        self.stored += other.stored;
        self.delivered += other.delivered;
        self.clipped += other.clipped;
    }
}

/// Stored data of a block of weights before a step, to find what changes.
struct Stored {
    scale: u8,
    codes: [u32; BLOCK],
    rest: [u8; BLOCK],
}

impl Stored {
    fn new(form: WeightForm, codes: &[u8], rest: &[u8], scale: u8) -> Stored {
        Stored {
            scale,
            codes: std::array::from_fn(|i| match form {
                WeightForm::F32 => float(codes, i).to_bits(),
                WeightForm::Bf16 => u32::from(u16::from_le_bytes([codes[2 * i], codes[2 * i + 1]])),
                _ => u32::from(nibble(codes, i)),
            }),
            rest: std::array::from_fn(|i| match form.rest().codes {
                0 => 0,
                BLOCK => rest[i],
                _ => nibble(rest, i),
            }),
        }
    }

    fn changes(&self, now: &Stored, form: WeightForm) -> Changes {
        let mut changes = Changes::default();
        for i in 0..BLOCK {
            let (old, new) = (self.codes[i], now.codes[i]);
            // Both zeros are equal, except that with a nonzero residual their sign is the weight's.
            let zeros = form.is_packed() && (old | new) & 7 == 0;
            let signed = matches!(form, WeightForm::Residual(_)) && now.rest[i] != 0;
            let delivered = self.scale != now.scale || (old != new && !zeros);
            let stored = self.rest[i] != now.rest[i] || (signed && old != new);
            changes.delivered += u64::from(delivered);
            changes.stored += u64::from(delivered || stored);
        }
        changes
    }
}

/// Steps the block whose first element has index `index` in its tensor. A step that cannot move weights, with a rate of zero and no decay,
/// leaves their stored form as it is, and updates the moments.
pub fn step(
    forms: &Forms,
    c: &Coefficients,
    keys: &Keys,
    globals: &Globals,
    index: u32,
    gradients: &[f32; BLOCK],
    block: Block<'_>,
) -> Changes {
    let Block {
        mut codes,
        rest,
        first,
        second,
    } = block;
    let packed = forms.weight.is_packed();
    let scale = codes.scale.as_ref().map_or(0, |s| **s);
    let before = Stored::new(forms.weight, codes.codes, rest, scale);
    let m = decode_first(forms.first, &first, keys.previous, index);
    let r = decode_second(forms.second, &second);
    // Values common to all elements; the weight is updated in units of its scale.
    let beta1 = c.beta1 * unit_of(&first, globals.first[0]);
    let rest1 = c.rest1 * c.factor;
    let beta2 = c.beta2.sqrt() * unit_of(&second, globals.second[0]);
    let rest2 = c.rest2.sqrt() * c.factor;
    let (from, rate, keep) = match packed {
        true => {
            let keep = if scale == 0 { 0.0 } else { c.keep };
            let rate = -c.rate / globals.weight * inverse(scale);
            (e4m3::decode(scale.max(1)), rate, keep)
        }
        false => (1.0, -c.rate, c.keep),
    };
    let mut w = decode_quotients(forms.weight, codes.codes, rest, true);
    let (mut firsts, mut roots, mut squares) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
    for i in 0..BLOCK {
        let g = gradients[i];
        firsts[i] = m[i].mul_add(beta1, rest1 * g);
        let (old, new) = (r[i] * beta2, rest2 * g);
        let square = old.mul_add(old, new * new);
        // GPUs take square roots only of normal numbers and zero.
        squares[i] = if square < f32::MIN_POSITIVE {
            0.0
        } else {
            square
        };
        roots[i] = squares[i].sqrt();
        let denominator = c.correction.mul_add(roots[i], c.eps);
        w[i] = rate.mul_add(firsts[i] / denominator, keep * w[i]);
    }
    let (first_now, second_now) = (globals.first[1], globals.second[1]);
    encode_first(forms.first, &firsts, first_now, keys.first, index, first);
    let draws: [_; BLOCK] =
        std::array::from_fn(|i| rounding_draws(keys.rounding, index + i as u32));
    match forms.second {
        SecondForm::F32 => put_floats(second.codes, &squares),
        form => encode_second(form, &roots, second_now, &draws.map(|d| d.1), second),
    }
    let field = Field {
        codes: codes.codes,
        scale: codes.scale.as_deref_mut(),
    };
    if c.is_still() {
        return Changes::default();
    }
    let band = forms.keep_scale.band(forms.weight);
    let band = (scale != 0).then_some(&band);
    let draws = draws.map(|d| d.0);
    let is_clipped = encode_quotients(forms.weight, &w, from, band, Some(&draws), field, rest);
    let scale = codes.scale.as_ref().map_or(0, |s| **s);
    let now = Stored::new(forms.weight, codes.codes, rest, scale);
    let mut changes = before.changes(&now, forms.weight);
    changes.clipped = u64::from(is_clipped);
    changes
}
