//! NVFP4 operands of training's GEMMs, as values: rounded to the format and back. Scales of runs of blocks are powers of two, so bfloat16
//! holds every result exactly, and a bfloat16 GEMM computes the product of the codes.
//!
//! Operands of weight gradients are rotated first by a Hadamard matrix over 16 tokens, with signs, which spreads outliers. The rotation is
//! orthogonal, so the product of two rotated operands equals that of the operands.

use serde::{Deserialize, Serialize};

use super::adamw::power_for;
use super::nvfp4::{self, BLOCK, Levels, NonFinite, QuantizeOptions};
use super::random::words;
use super::{Rounding, e2m1, e4m3};

/// Rule for the scale of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScaleRule {
    /// The largest magnitude lands on 6.
    #[default]
    Amax,
    /// The scale with the smaller error, of those that put the largest magnitude on 6 and on 4.
    FourOverSix,
}

impl ScaleRule {
    /// The corresponding quantization options.
    pub fn options(self) -> QuantizeOptions {
        QuantizeOptions {
            levels: Levels::Two,
            recipe: match self {
                ScaleRule::Amax => nvfp4::Recipe::Amax,
                ScaleRule::FourOverSix => nvfp4::Recipe::FourOverSix,
            },
            rounding: Rounding::NearestEven,
            nonfinite: NonFinite::Error,
            seed: 0,
        }
    }
}

/// Rounding of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandRounding {
    /// To nearest, with scales by this rule.
    Nearest(ScaleRule),
    /// Stochastically, with random bits from this stream at each value's index. Scales reach the largest magnitude, so that nothing is
    /// clipped and the expected result is the value.
    Stochastic(u64),
}

/// Global scale of blocks with magnitudes up to `amax`, which is finite.
#[inline(always)]
pub fn global_of(amax: f32) -> f32 {
    // A block scale that puts the largest magnitude on 4 is below 256.
    power_for(amax, 10)
}

/// Rounds a block of finite values to the values of an NVFP4 block. `index` is the index of the first value, and `stride` the distance
/// between indices.
pub fn round_block(
    x: &[f32; BLOCK],
    global: f32,
    rounding: OperandRounding,
    index: u32,
    stride: u32,
) -> [f32; BLOCK] {
    match rounding {
        OperandRounding::Nearest(rule) => {
            let (mut codes, mut scale) = ([0; BLOCK / 2], [0]);
            let options = rule.options();
            nvfp4::quantize_rows(x, BLOCK, 0, global, &options, &mut codes, &mut scale)
                .expect("a block of finite values and a global scale above zero");
            std::array::from_fn(|i| {
                nvfp4::decode(codes[i / 2] >> (4 * (i % 2)) & 15, scale[0], global)
            })
        }
        OperandRounding::Stochastic(key) => {
            let amax = x.iter().fold(0f32, |most, v| most.max(v.abs()));
            if amax == 0.0 {
                return [0.0; BLOCK];
            }
            let scale = e4m3::encode_up(amax / e2m1::MAX / global);
            let step = e4m3::decode(scale) * global;
            std::array::from_fn(|i| {
                let [draw, _] = words(key, index.wrapping_add(i as u32 * stride));
                let code = e2m1::encode(x[i] / step, Rounding::Stochastic, draw);
                nvfp4::decode(code, scale, global)
            })
        }
    }
}

/// Tokens that are rotated together.
pub const ROTATED: usize = 16;
/// Signs applied before the rotation, one bit per token; half are negative.
pub const SIGNS: u16 = 0b0110_1011_1000_1001;

/// Multiplies a vector of 16 by the signs and by the Hadamard matrix, and divides it by 4.
pub fn rotate(x: &[f32; ROTATED]) -> [f32; ROTATED] {
    let mut y: [f32; ROTATED] = std::array::from_fn(|i| match SIGNS >> i & 1 {
        0 => x[i],
        _ => -x[i],
    });
    let mut width = 1;
    while width < ROTATED {
        for i in 0..ROTATED {
            if i & width == 0 {
                (y[i], y[i + width]) = (y[i] + y[i + width], y[i] - y[i + width]);
            }
        }
        width *= 2;
    }
    y.map(|v| 0.25 * v)
}

/// Upper bound of magnitudes after rotation, for magnitudes up to `amax` before.
#[inline(always)]
pub fn rotated_amax(amax: f32) -> f32 {
    (4.0 * amax).min(f32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::random::{bits, uniform};

    fn block(seed: u64, size: f32) -> [f32; BLOCK] {
        std::array::from_fn(|i| size * (2.0 * uniform(seed, i as u64) - 1.0).powi(3))
    }

    #[test]
    fn values_are_those_of_the_quantizer_and_bfloat16_holds_them() {
        for seed in 0..2000u64 {
            let size = 2f32.powi(seed as i32 % 60 - 30);
            let x = block(seed, size);
            let amax = x.iter().fold(0f32, |most, v| most.max(v.abs()));
            let global = global_of(amax * if seed % 3 == 0 { 50.0 } else { 1.0 });
            for rule in [ScaleRule::Amax, ScaleRule::FourOverSix] {
                let rounded = round_block(&x, global, OperandRounding::Nearest(rule), 0, 1);
                let mut codes = [0; 8];
                let mut scales = [0];
                let options = rule.options();
                nvfp4::quantize_rows(&x, 16, 0, global, &options, &mut codes, &mut scales).unwrap();
                let mut values = [0.0; BLOCK];
                nvfp4::dequantize(&codes, &scales, global, &mut values).unwrap();
                assert_eq!(rounded, values);
            }
            for rounding in [
                OperandRounding::Nearest(ScaleRule::FourOverSix),
                OperandRounding::Stochastic(seed),
            ] {
                for v in round_block(&x, global, rounding, 3, 7) {
                    assert_eq!(half::bf16::from_f32(v).to_f32(), v);
                }
            }
        }
    }

    /// The mean of many draws equals the value within five standard deviations, taken for the worst position between two neighbours.
    #[test]
    fn stochastic_rounding_is_unbiased() {
        const DRAWS: u32 = 1 << 14;
        for seed in 0..8 {
            let x = block(seed, 3.0);
            let amax = x.iter().fold(0f32, |most, v| most.max(v.abs()));
            let global = global_of(amax);
            let rounding = OperandRounding::Stochastic(bits(seed, 1));
            let mut sums = [0f64; BLOCK];
            for draw in 0..DRAWS {
                let rounded = round_block(&x, global, rounding, draw, DRAWS);
                sums.iter_mut()
                    .zip(rounded)
                    .for_each(|(s, v)| *s += f64::from(v));
            }
            // The widest gap is a third of the largest value.
            let gap = f64::from(amax) / 3.0 * 1.07;
            let bound = 5.0 * gap / 2.0 / f64::from(DRAWS).sqrt();
            for (sum, x) in sums.iter().zip(x) {
                let mean = sum / f64::from(DRAWS);
                assert!((mean - f64::from(x)).abs() < bound, "{mean}, not {x}");
            }
        }
    }

    #[test]
    fn rotation_is_orthogonal() {
        let mut rows = [[0f64; ROTATED]; ROTATED];
        for (i, row) in rows.iter_mut().enumerate() {
            let unit = std::array::from_fn(|j| f32::from(u8::from(i == j)));
            *row = rotate(&unit).map(f64::from);
        }
        for (i, a) in rows.iter().enumerate() {
            for (j, b) in rows.iter().enumerate() {
                let product: f64 = a.iter().zip(b).map(|(a, b)| a * b).sum();
                assert_eq!(product, f64::from(u8::from(i == j)));
            }
        }
        let x = block(9, 4.0);
        let amax = x.iter().fold(0f32, |most, v| most.max(v.abs()));
        assert!(rotate(&x).iter().all(|v| v.abs() <= rotated_amax(amax)));
    }
}
