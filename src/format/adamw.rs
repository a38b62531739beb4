//! A step of AdamW (Loshchilov and Hutter, arXiv 1711.05101) on a block of 16 weights in the form they are stored in: what kernels of
//! every device do, to the same bits. Weights and moments are read, updated in f32, and rounded once.
//!
//! A weight's block scale stands still while the largest weight of the block stays within [`KEPT`] times it: a grid that moved with every
//! step would round every weight anew, and the errors would add up. Moments' scales are made anew, as an average forgets.
//!
//! The global scales of moments belong to groups of [`GROUP_ROWS`] rows and are powers of two that follow from what a step can reach at
//! most, so that a group is updated in one pass over its memory, whatever else belongs to the tensor.

use serde::{Deserialize, Serialize};

use super::moment::{self, dither};
use super::nvfp4::{self, BLOCK};
use super::random::{bits, bits32};
use super::residual::{self, Bits};
use super::{Rounding, e2m1, e4m3};
use crate::base::error::{Result, bail};

/// Rows that share the global scales of their moments.
pub const GROUP_ROWS: usize = 8;
/// The largest weight of a block, divided by its scale, for which the scale is kept.
pub const KEPT: [f32; 2] = [5.2, 6.6];
/// What the second code of [`WeightForm::TwoTerm`] is divided by: the largest remainder is one scale, and the largest code six.
const SECOND_TERM: f32 = e2m1::MAX;

/// How a weight is stored between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightForm {
    /// An NVFP4 code and a residual in local steps, rounded stochastically: see [`residual`].
    Residual(Bits),
    /// Two E2M1 codes: the nearest to the weight, and the remainder's, in sixths of the scale, rounded stochastically.
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

/// How a first moment is stored.
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

/// How the square root of a second moment is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecondForm {
    /// Integers from 1 to 15, rounded stochastically.
    #[default]
    Uint4,
    /// The positive values of NVFP4, rounded stochastically and never zero.
    Nvfp4,
    /// Integers from 1 to 127, rounded stochastically.
    Int8,
    /// float32; not a root.
    F32,
}

/// Bytes that a field takes for a block of 16: its codes, and whether a block scale goes with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldBytes {
    /// Bytes of codes.
    pub codes: usize,
    /// Whether each block has a scale and each group of rows, or tensor, a global one.
    pub scaled: bool,
}

impl FieldBytes {
    const fn new(bits: usize, scaled: bool) -> FieldBytes {
        FieldBytes {
            codes: BLOCK * bits / 8,
            scaled,
        }
    }

    /// Bytes of a block, its scale included.
    pub const fn of_block(self) -> usize {
        self.codes + self.scaled as usize
    }
}

impl WeightForm {
    /// The codes that are delivered, or the whole weight.
    pub const fn codes(self) -> FieldBytes {
        match self {
            WeightForm::Residual(_) | WeightForm::TwoTerm | WeightForm::OneTerm => {
                FieldBytes::new(4, true)
            }
            WeightForm::Bf16 => FieldBytes::new(16, false),
            WeightForm::F32 => FieldBytes::new(32, false),
        }
    }

    /// What is kept beside the codes.
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
    /// Its field.
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
    /// Its field.
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

/// The form of a matrix and its moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Forms {
    /// The weight.
    pub weight: WeightForm,
    /// The first moment.
    pub first: FirstForm,
    /// The second moment.
    pub second: SecondForm,
    /// Makes block scales of weights anew in each step, which rounds every weight anew; a baseline.
    pub fresh_scales: bool,
}

impl Forms {
    /// Bytes of a block of 16 weights with its moments.
    pub const fn block_bytes(&self) -> usize {
        let weight = self.weight.codes().of_block() + self.weight.rest().of_block();
        weight + self.first.field().of_block() + self.second.field().of_block()
    }
}

/// The settings of a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hyperparameters {
    /// The learning rate.
    pub rate: f64,
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// The decoupled weight decay.
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
    /// Refuses settings that make no sense.
    pub fn check(&self) -> Result<()> {
        let Hyperparameters {
            rate,
            beta1,
            beta2,
            eps,
            decay,
        } = *self;
        if !(rate > 0.0 && rate.is_finite()) {
            bail!(
                InvalidArgument,
                "a learning rate of {rate}; it must be positive"
            );
        }
        if !((0.0..1.0).contains(&beta1) && (0.0..1.0).contains(&beta2)) {
            bail!(
                InvalidArgument,
                "betas of {beta1} and {beta2}; they must be at least 0 and less than 1"
            );
        }
        if !(eps > 0.0 && eps.is_finite() && decay >= 0.0 && rate * decay < 1.0) {
            bail!(
                InvalidArgument,
                "eps {eps} and weight decay {decay}; eps must be positive, and the decay at least 0 and less than 1 / rate"
            );
        }
        Ok(())
    }
}

/// The numbers of a step, as kernels take them.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Coefficients {
    /// Multiplies gradients: clipping, and the inverse of what a loss was scaled by.
    pub factor: f32,
    /// The decay of the first moment, and its complement.
    pub beta1: f32,
    /// `1 - beta1`.
    pub rest1: f32,
    /// The decay of the second moment.
    pub beta2: f32,
    /// `1 - beta2`.
    pub rest2: f32,
    /// What the root of the second moment is multiplied by to correct its bias: `1 / sqrt(1 - beta2^t)`.
    pub correction: f32,
    /// Added to the corrected root.
    pub eps: f32,
    /// What weights are multiplied by: `1 - rate * decay`.
    pub keep: f32,
    /// The rate with the first moment's bias corrected: `rate / (1 - beta1^t)`.
    pub rate: f32,
}

impl Coefficients {
    /// Those of step `step`, counted from 1, with gradients multiplied by `factor`.
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
}

/// A step of a parameter in float32, with its moments: the update of [`step`] without rounding.
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
    let denominator = c.correction.mul_add(second.sqrt(), c.eps);
    *weight = (-c.rate).mul_add(*first / denominator, c.keep * *weight);
}

/// The streams of random bits of a tensor in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Keys {
    /// Of weights and second moments.
    pub rounding: u64,
    /// Of the first moment's rounding, which is its dither if it is dithered.
    pub first: u64,
    /// Of the dither that the first moment was stored with.
    pub previous: u64,
}

impl Keys {
    /// Those of tensor `tensor` in its step `step`, counted from 1; its last step was the one before.
    pub fn new(seed: u64, tensor: u64, step: u64) -> Keys {
        let stream = bits(seed, tensor);
        Keys {
            rounding: bits(stream, 2 * step),
            first: bits(stream, 2 * step + 1),
            previous: bits(stream, 2 * step - 1),
        }
    }
}

/// The dither of element `index`: one draw of 32 bits serves four elements.
#[inline(always)]
fn dither_of(key: u64, index: u32) -> f32 {
    dither((bits32(key, index / 4) >> (8 * (index % 4))) as u8)
}

/// The smallest power of two `2^p` such that `reach < 2^(p + bits)`; of what is not a normal number, that of the smallest one.
#[inline(always)]
pub fn power_for(reach: f32, bits: i32) -> f32 {
    let exponent = (reach.to_bits() >> 23 & 0xff) as i32 - 127;
    f32::from_bits(((exponent.clamp(-100, 127) + 1 - bits + 127).max(1) as u32) << 23)
}

/// Bits above the global scale that a group's largest first moment has: its largest block scale lies between 128 and 448.
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

/// The global scales of a group's moments after a step: from the largest gradient, times the step's factor, and the largest block
/// scales with their global scales before.
pub fn moment_globals(
    forms: &Forms,
    c: &Coefficients,
    largest: f32,
    (first_scale, first_global): (u8, f32),
    (second_scale, second_global): (u8, f32),
) -> (f32, f32) {
    // Half a code more than the largest: what dither leaves.
    let m = (forms.first.max() + 0.5) * e4m3::decode(first_scale) * first_global;
    let s = forms.second.max() * e4m3::decode(second_scale) * second_global;
    let first = c.beta1.mul_add(m, c.rest1 * largest);
    let second = (c.beta2 * s).mul_add(s, c.rest2 * largest * largest).sqrt();
    (
        power_for(first, first_bits(forms.first)),
        power_for(second, second_bits(forms.second)),
    )
}

/// Codes of a block in a field, and the block's scale.
#[derive(Debug)]
pub struct Field<'a> {
    /// As many bytes as [`FieldBytes::codes`] says; 4-bit codes with the first of each two in the low half.
    pub codes: &'a mut [u8],
    /// Of a scaled field.
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

/// The values of a block of weights: of the codes alone, which is what is delivered, or of all that is stored.
pub fn decode_weights(
    form: WeightForm,
    codes: &[u8],
    rest: &[u8],
    scale: u8,
    global: f32,
    whole: bool,
) -> [f32; BLOCK] {
    let unit = e4m3::decode(scale) * global;
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
            residual::decode(nibble(codes, i), residual, bits) * unit
        }
        WeightForm::TwoTerm if whole => {
            let second = e2m1::decode(nibble(rest, i)) * (1.0 / SECOND_TERM);
            (e2m1::decode(nibble(codes, i)) + second) * unit
        }
        // In the order of products that holds for any global scale; powers of two make no difference.
        WeightForm::Residual(_) | WeightForm::TwoTerm | WeightForm::OneTerm => {
            nvfp4::decode(nibble(codes, i), scale, global)
        }
    })
}

/// Stores a block of weights. Rounds stochastically by 16 bits a weight in `draws`, or to nearest without. A scale is kept if `keeps`
/// and the block's largest weight allows it; saturates where the largest scale does not reach.
pub fn encode_weights(
    form: WeightForm,
    values: &[f32; BLOCK],
    global: f32,
    keeps: bool,
    draws: Option<&[u16; BLOCK]>,
    codes: Field<'_>,
    rest: &mut [u8],
) {
    let rounding = match draws {
        Some(_) => Rounding::Stochastic,
        None => Rounding::NearestEven,
    };
    let draw = |i: usize| draws.map_or(0, |draws| draws[i]);
    let scale = match form {
        WeightForm::F32 => return put_floats(codes.codes, values),
        WeightForm::Bf16 => {
            for (i, bytes) in codes.codes.chunks_exact_mut(2).enumerate() {
                let bits = values[i].to_bits();
                let rounded = match draws {
                    // What carries out of the lower half goes to the next bfloat16.
                    Some(draws) => bits.wrapping_add(u32::from(draws[i])) >> 16,
                    None => u32::from(half::bf16::from_f32(values[i]).to_bits()),
                };
                bytes.copy_from_slice(&(rounded as u16).to_le_bytes());
            }
            return;
        }
        _ => codes.scale.expect("an NVFP4 code has a block scale"),
    };
    let amax = moment::amax(values);
    let unit = e4m3::decode(*scale) * global;
    if !(keeps && amax >= KEPT[0] * unit && amax <= KEPT[1] * unit) {
        // Never zero where a weight is not.
        let exact = amax / (e2m1::MAX * global);
        *scale = match e4m3::encode(exact) {
            0 if amax > 0.0 => 1,
            byte => byte,
        };
    }
    let unit = e4m3::decode(*scale) * global;
    let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
    let mut firsts = [0; BLOCK];
    let mut seconds = [0u8; BLOCK];
    for i in 0..BLOCK {
        let q = values[i] * inverse;
        (firsts[i], seconds[i]) = match form {
            WeightForm::Residual(bits) => {
                let (code, residual) = residual::encode(q, bits, rounding, draw(i));
                (code, residual as u8)
            }
            WeightForm::TwoTerm => {
                let code = e2m1::encode(q, Rounding::NearestEven, 0);
                let remainder = (q - e2m1::decode(code)) * SECOND_TERM;
                (code, encode_e2m1(remainder, rounding, draw(i)))
            }
            _ => (encode_e2m1(q, rounding, draw(i)), 0),
        };
    }
    put_nibbles(codes.codes, firsts);
    match form {
        WeightForm::Residual(Bits::Eight) => rest.copy_from_slice(&seconds),
        WeightForm::Residual(Bits::Four) | WeightForm::TwoTerm => {
            put_nibbles(rest, seconds.map(|v| v & 15));
        }
        _ => {}
    }
}

/// An E2M1 code, rounded by 16 random bits.
#[inline(always)]
fn encode_e2m1(value: f32, rounding: Rounding, draw: u16) -> u8 {
    e2m1::encode(value, rounding, u32::from(draw) << 16 | 1 << 15)
}

/// The first moments of a block.
fn decode_first(
    form: FirstForm,
    field: &Field<'_>,
    global: f32,
    key: u64,
    index: u32,
) -> [f32; BLOCK] {
    let unit = field
        .scale
        .as_ref()
        .map_or(0.0, |s| e4m3::decode(**s) * global);
    std::array::from_fn(|i| match form {
        FirstForm::F32 => float(field.codes, i),
        FirstForm::Int8 => f32::from(field.codes[i] as i8) * unit,
        FirstForm::Nvfp4 => e2m1::decode(nibble(field.codes, i)) * unit,
        FirstForm::Int4 => {
            let dither = dither_of(key, index + i as u32);
            moment::decode_first(nibble(field.codes, i), dither) * unit
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
    *scale = moment::scale(moment::amax(values), form.max(), global);
    let unit = e4m3::decode(*scale) * global;
    let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
    let codes: [u8; BLOCK] = std::array::from_fn(|i| {
        let (q, index) = (values[i] * inverse, index + i as u32);
        match form {
            FirstForm::Int4 => moment::encode_first(q, dither_of(key, index)),
            FirstForm::Nvfp4 => encode_e2m1(q, Rounding::Stochastic, bits32(key, index) as u16),
            FirstForm::Int8 | FirstForm::F32 => {
                let threshold = (f32::from(bits32(key, index) as u16) + 0.5) * (1.0 / 65536.0);
                let low = q.floor();
                let rounded = low + f32::from(u8::from(threshold < q - low));
                rounded.clamp(-moment::WIDE_MAX, moment::WIDE_MAX) as i8 as u8
            }
        }
    });
    match form {
        FirstForm::Int8 => field.codes.copy_from_slice(&codes),
        _ => put_nibbles(field.codes, codes),
    }
}

/// The roots of second moments of a block.
fn decode_second(form: SecondForm, field: &Field<'_>, global: f32) -> [f32; BLOCK] {
    let unit = field
        .scale
        .as_ref()
        .map_or(0.0, |s| e4m3::decode(**s) * global);
    std::array::from_fn(|i| match form {
        SecondForm::F32 => float(field.codes, i).sqrt(),
        SecondForm::Int8 => f32::from(field.codes[i]) * unit,
        SecondForm::Nvfp4 => e2m1::decode(nibble(field.codes, i) & 7) * unit,
        SecondForm::Uint4 => moment::decode_second(nibble(field.codes, i)) * unit,
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
    *scale = moment::scale(moment::amax(roots), form.max(), global);
    let unit = e4m3::decode(*scale) * global;
    let inverse = if unit > 0.0 { 1.0 / unit } else { 0.0 };
    let codes: [u8; BLOCK] = std::array::from_fn(|i| {
        let q = roots[i] * inverse;
        match form {
            SecondForm::Uint4 => moment::encode_second(q, draws[i]),
            SecondForm::Nvfp4 => encode_e2m1(q, Rounding::Stochastic, draws[i]).max(1),
            SecondForm::Int8 | SecondForm::F32 => {
                let (low, threshold) = (q.floor(), (f32::from(draws[i]) + 0.5) * (1.0 / 65536.0));
                let rounded = low + f32::from(u8::from(threshold < q - low));
                rounded.clamp(1.0, moment::WIDE_MAX) as u8
            }
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
    /// The weight's codes.
    pub codes: Field<'a>,
    /// What is kept beside them.
    pub rest: &'a mut [u8],
    /// First moments.
    pub first: Field<'a>,
    /// Second moments.
    pub second: Field<'a>,
}

/// The global scales of a block before a step and after.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Globals {
    /// The weight's.
    pub weight: f32,
    /// The first moment's, before and after.
    pub first: [f32; 2],
    /// The second moment's, before and after.
    pub second: [f32; 2],
}

/// How many weights a step has changed: whose codes, or scale, became others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// With all that is stored.
    pub stored: u64,
    /// With the codes that are delivered alone.
    pub delivered: u64,
}

/// What is stored of a block of weights, to see what changes.
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
                // Both zeros are one.
                _ => match nibble(codes, i) {
                    8 => 0,
                    code => u32::from(code),
                },
            }),
            rest: std::array::from_fn(|i| match form.rest().codes {
                0 => 0,
                BLOCK => rest[i],
                _ => nibble(rest, i),
            }),
        }
    }

    fn changes(&self, now: &Stored) -> Changes {
        let mut changes = Changes::default();
        for i in 0..BLOCK {
            let delivered = self.scale != now.scale || self.codes[i] != now.codes[i];
            changes.delivered += u64::from(delivered);
            changes.stored += u64::from(delivered || self.rest[i] != now.rest[i]);
        }
        changes
    }
}

/// A step of the block whose first element is number `index` of its tensor, with these gradients.
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
    let scale = codes.scale.as_ref().map_or(0, |s| **s);
    let old = decode_weights(forms.weight, codes.codes, rest, scale, globals.weight, true);
    let before = Stored::new(forms.weight, codes.codes, rest, scale);
    let mut m = decode_first(forms.first, &first, globals.first[0], keys.previous, index);
    let mut roots = decode_second(forms.second, &second, globals.second[0]);
    let draws: [u32; BLOCK] = std::array::from_fn(|i| bits32(keys.rounding, index + i as u32));
    let (mut w, mut squares) = (old, [0.0; BLOCK]);
    for i in 0..BLOCK {
        let g = gradients[i] * c.factor;
        m[i] = c.rest1.mul_add(g, c.beta1 * m[i]);
        squares[i] = (c.beta2 * roots[i]).mul_add(roots[i], c.rest2 * g * g);
        roots[i] = squares[i].sqrt();
        let denominator = c.correction.mul_add(roots[i], c.eps);
        w[i] = (-c.rate).mul_add(m[i] / denominator, c.keep * w[i]);
    }
    encode_first(forms.first, &m, globals.first[1], keys.first, index, first);
    match forms.second {
        SecondForm::F32 => put_floats(second.codes, &squares),
        form => {
            let draws = draws.map(|d| (d >> 16) as u16);
            encode_second(form, &roots, globals.second[1], &draws, second);
        }
    }
    let draws = draws.map(|d| d as u16);
    let field = Field {
        codes: codes.codes,
        scale: codes.scale.as_deref_mut(),
    };
    let keeps = !forms.fresh_scales;
    encode_weights(
        forms.weight,
        &w,
        globals.weight,
        keeps,
        Some(&draws),
        field,
        rest,
    );
    let scale = codes.scale.as_ref().map_or(0, |s| **s);
    before.changes(&Stored::new(forms.weight, codes.codes, rest, scale))
}
