//! Rotary frequencies from a config: plain, linear, llama3 and yarn scaling, in the single-precision steps of transformers
//! so that both take cosines of the same angles. Knows nothing of how the rotation is applied.

use std::f64::consts::PI;

use super::config::Keys;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::ops::rope::RopeTable;

/// The scalings that are known, as errors list them.
const KNOWN: &str = "default, linear, llama3, yarn";

/// More than any frequency, which is 1 before scaling; times a position it is still a number.
const HIGHEST: f32 = 1e20;

/// The table that `config` describes, in the old words (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`).
pub(super) fn table(config: &Keys<'_>, head_dim: usize, max_positions: usize) -> Result<RopeTable> {
    let table = scaled(config, head_dim, max_positions)?;
    check(&table)?;
    Ok(table)
}

/// Refuses what would turn every logit into NaN.
fn check(table: &RopeTable) -> Result<()> {
    let bad = table
        .frequencies
        .iter()
        .find(|f| !f.is_finite() || f.abs() > HIGHEST);
    if let Some(bad) = bad {
        bail!(
            CorruptFile,
            "config: rope_theta and rope scaling give a frequency of {bad}, which is no rotation"
        );
    }
    if !table.attention_factor.is_finite() {
        bail!(
            CorruptFile,
            "config: rope scaling gives an attention factor of {}",
            table.attention_factor
        );
    }
    Ok(())
}

fn scaled(config: &Keys<'_>, head_dim: usize, max_positions: usize) -> Result<RopeTable> {
    let scaling = match config.object("rope_parameters")? {
        Some(parameters) => Some(parameters),
        None => config.object("rope_scaling")?,
    };
    let empty = serde_json::Map::new();
    let scaling = scaling.unwrap_or(Keys(&empty));
    if let Some((layer_type, _)) = scaling.0.iter().find(|(_, v)| v.is_object()) {
        bail!(
            Unsupported,
            "config: rope parameters per layer type ('{layer_type}'); only one set for all layers is known"
        );
    }
    let either = |name: &str| -> Result<Option<f64>> {
        match scaling.number(name)? {
            Some(x) => Ok(Some(x)),
            None => config.number(name),
        }
    };
    let theta = positive("rope_theta", either("rope_theta")?.unwrap_or(10000.0))?;
    if let Some(part) = either("partial_rotary_factor")?.filter(|&p| p != 1.0) {
        bail!(
            Unsupported,
            "config: partial_rotary_factor is {part}; only whole heads are rotated (1)"
        );
    }
    let plain: Vec<f32> = (0..head_dim / 2)
        .map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / head_dim as f32))
        .collect();
    let unscaled = |frequencies| RopeTable {
        frequencies,
        attention_factor: 1.0,
    };
    let kind = match scaling.text("rope_type")? {
        Some(kind) => Some(kind),
        None => scaling.text("type")?,
    };
    let required = |name: &str| -> Result<f64> {
        let value = scaling.number(name)?.ok_or_else(|| {
            err!(
                CorruptFile,
                "config: rope scaling '{}' has no '{name}'",
                kind.unwrap_or_default()
            )
        })?;
        positive(name, value)
    };
    let original = || -> Result<f64> {
        let outer = config.number("original_max_position_embeddings")?;
        match outer.or(scaling.number("original_max_position_embeddings")?) {
            Some(n) => positive("original_max_position_embeddings", n),
            None => Ok(max_positions as f64),
        }
    };
    match kind {
        None | Some("default" | "none") => Ok(unscaled(plain)),
        Some("linear") => {
            let factor = required("factor")? as f32;
            Ok(unscaled(plain.iter().map(|f| f / factor).collect()))
        }
        Some("llama3") => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if low >= high {
                bail!(
                    CorruptFile,
                    "config: low_freq_factor {low} is not below high_freq_factor {high}"
                );
            }
            let scaled = llama3(&plain, required("factor")?, low, high, original()?);
            Ok(unscaled(scaled))
        }
        Some("yarn") => {
            let factor = match scaling.number("factor")? {
                Some(f) => positive("factor", f)?,
                None => max_positions as f64 / original()?,
            };
            let optional = |name: &str| -> Result<Option<f64>> {
                scaling.number(name)?.map(|x| positive(name, x)).transpose()
            };
            let beta_fast = optional("beta_fast")?.unwrap_or(32.0);
            let beta_slow = optional("beta_slow")?.unwrap_or(1.0);
            let m = (optional("mscale")?, optional("mscale_all_dim")?);
            let attention_factor = match (optional("attention_factor")?, m) {
                (Some(given), _) => given,
                (None, (Some(m), Some(all))) => mscale(factor, m) / mscale(factor, all),
                (None, _) => mscale(factor, 1.0),
            };
            let truncate = scaling.flag("truncate")?.unwrap_or(true);
            let correction = |rotations: f64| -> Result<f64> {
                let dim = head_dim as f64 * (original()? / (rotations * 2.0 * PI)).ln()
                    / (2.0 * theta.ln());
                Ok(dim)
            };
            let (mut low, mut high) = (correction(beta_fast)?, correction(beta_slow)?);
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
            let frequencies = yarn(theta, head_dim, factor, low, high);
            Ok(RopeTable {
                frequencies,
                attention_factor: attention_factor as f32,
            })
        }
        Some(kind) => bail!(
            Unsupported,
            "config: rope scaling '{kind}' is not known; known are {KNOWN}"
        ),
    }
}

fn positive(name: &str, value: f64) -> Result<f64> {
    if value.is_finite() && value > 0.0 {
        return Ok(value);
    }
    bail!(
        CorruptFile,
        "config: '{name}' is {value}; expected a positive number"
    )
}

/// Long wavelengths are stretched, short ones kept, and those between blended (Llama 3.1).
fn llama3(plain: &[f32], factor: f64, low: f64, high: f64, original: f64) -> Vec<f32> {
    let (low_length, high_length) = ((original / low) as f32, (original / high) as f32);
    let factor = factor as f32;
    plain
        .iter()
        .map(|&f| {
            let length = (2.0 * PI) as f32 / f;
            if length > low_length {
                f / factor
            } else if length < high_length {
                f
            } else {
                let smooth = (original as f32 / length - low as f32) / (high - low) as f32;
                (1.0 - smooth) * f / factor + smooth * f
            }
        })
        .collect()
}

/// A ramp over the dimensions from extrapolation to interpolation (Peng et al., 2023).
fn yarn(theta: f64, head_dim: usize, factor: f64, low: f64, high: f64) -> Vec<f32> {
    let high = if low == high { high + 0.001 } else { high };
    (0..head_dim / 2)
        .map(|i| {
            let power = (theta as f32).powf((2 * i) as f32 / head_dim as f32);
            let (kept, stretched) = (1.0 / power, 1.0 / (factor as f32 * power));
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            stretched * ramp + kept * (1.0 - ramp)
        })
        .collect()
}

fn mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * mscale * factor.ln() + 1.0
    }
}

/// Divides each frequency by the factor that a GGUF file stores for it in place of a scaling's parameters.
pub(super) fn divide(table: &mut RopeTable, factors: &[f32]) -> Result<()> {
    if let Some(bad) = factors.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
        bail!(
            CorruptFile,
            "rope_freqs.weight holds {bad}; expected positive numbers"
        );
    }
    for (frequency, factor) in table.frequencies.iter_mut().zip(factors) {
        *frequency /= factor;
    }
    check(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use serde_json::{Value, json};

    fn of(config: Value) -> Result<RopeTable> {
        table(&Keys(config.as_object().unwrap()), 32, 1024)
    }

    #[test]
    fn old_and_new_words_agree() {
        let old = of(json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}}));
        let new = of(
            json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
        );
        assert_eq!(old.unwrap(), new.unwrap());
        let plain = of(json!({"rope_scaling": null})).unwrap();
        assert_eq!(plain.frequencies[0], 1.0);
        assert!((plain.frequencies[8] - 0.01).abs() < 1e-8);
    }

    #[test]
    fn refusals() {
        for (config, expected) in [
            (
                json!({"rope_scaling": {"rope_type": "longrope"}}),
                "'longrope'",
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear"}}),
                "no 'factor'",
            ),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
                "'factor' is 0",
            ),
            (
                json!({"partial_rotary_factor": 0.5}),
                "partial_rotary_factor is 0.5",
            ),
            (json!({"rope_theta": -1}), "'rope_theta' is -1"),
            (json!({"rope_theta": 1e-60}), "a frequency of inf"),
            (
                json!({"rope_scaling": {"rope_type": "linear", "factor": 1e-30}}),
                "a frequency of 1",
            ),
            (
                json!({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 4}}),
                "a frequency of NaN",
            ),
            (
                json!({"rope_scaling": {"rope_type": "yarn", "factor": 4, "attention_factor": 1e60}}),
                "an attention factor of inf",
            ),
            (
                json!({"rope_parameters": {"full_attention": {}}}),
                "full_attention",
            ),
        ] {
            let e = of(config).unwrap_err();
            assert!(e.message().contains(expected), "{e}");
        }
    }

    #[test]
    fn stored_factors_divide() {
        let mut t = of(json!({})).unwrap();
        let before = t.frequencies.clone();
        divide(&mut t, &[2.0; 16]).unwrap();
        assert!(
            t.frequencies
                .iter()
                .zip(&before)
                .all(|(a, b)| a * 2.0 == *b)
        );
        expect_kind(
            divide(&mut t, &[0.0; 16]),
            ErrorKind::CorruptFile,
            "rope_freqs.weight holds 0",
        );
        expect_kind(
            divide(&mut t, &[1e-40; 16]),
            ErrorKind::CorruptFile,
            "a frequency of inf",
        );
    }
}
