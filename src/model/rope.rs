//! Rotary frequencies from a config: plain, linear, dynamic, llama3, yarn, longrope and proportional scaling, of whole heads or of their
//! first elements.
//! Follows the single-precision steps of transformers, so that both take cosines of the same angles. Knows nothing of how the rotation is
//! applied.

use std::f64::consts::PI;

use super::keys::Keys;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::ops::rope::RopeTable;

/// The known scalings, as error messages list them.
const KNOWN: &str = "default, linear, dynamic, llama3, yarn, longrope, proportional";
/// The scaling whose frequencies are powers by the whole head, of which only the first are not zero.
const PROPORTIONAL: &str = "proportional";

/// The base for a config without one.
const THETA: f64 = 1e4;

/// Larger than any frequency, which is 1 before scaling; times a position it is still finite.
const HIGHEST: f32 = 1e20;

/// Rotation of queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSet {
    /// Frequencies of short contexts, or of all contexts without `long`.
    pub table: RopeTable,
    /// Frequencies of long contexts, if they differ (longrope).
    pub long: Option<Box<LongRope>>,
}

/// Frequencies of sequences with room for more positions than the model was first trained for.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Largest capacity for which the short frequencies apply.
    pub original_positions: usize,
    /// The frequencies.
    pub table: RopeTable,
}

impl RopeSet {
    /// The frequencies of a sequence with room for `capacity` positions. All of its positions use the same ones, because cached keys keep
    /// their rotation.
    pub fn table(&self, capacity: usize) -> &RopeTable {
        match &self.long {
            Some(long) if self.is_long(capacity) => &long.table,
            _ => &self.table,
        }
    }

    /// Whether a sequence with room for `capacity` positions uses the frequencies of long contexts.
    pub fn is_long(&self, capacity: usize) -> bool {
        let long = self.long.as_ref();
        long.is_some_and(|long| capacity > long.original_positions)
    }

    /// Both tables.
    pub(super) fn tables_mut(&mut self) -> impl Iterator<Item = &mut RopeTable> {
        let long = self.long.iter_mut().map(|long| &mut long.table);
        std::iter::once(&mut self.table).chain(long)
    }

    /// Divides each frequency by the factor that a GGUF file stores for it instead of a scaling's parameters.
    pub(super) fn divide(&mut self, factors: &[f32]) -> Result<()> {
        if let Some(bad) = factors.iter().find(|f| !(f.is_finite() && **f > 0.0)) {
            bail!(
                CorruptFile,
                "rope_freqs.weight holds {bad}; expected positive numbers"
            );
        }
        for (frequency, factor) in self.table.frequencies.iter_mut().zip(factors) {
            *frequency /= factor;
        }
        check(&self.table)
    }
}

/// The rotation that `config` describes for all layers, with the old keys (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`).
pub(super) fn read(config: &Keys<'_>, head_dim: usize, max_positions: usize) -> Result<RopeSet> {
    let (empty, scaling) = (Default::default(), parameters(config)?);
    let scaling = scaling.unwrap_or(Keys(&empty));
    if let Some((layer_type, _)) = by_layer_type(&scaling) {
        bail!(
            Unsupported,
            "config: rope parameters per layer type ('{layer_type}'); models of this family are known with one set for all layers"
        );
    }
    let base = ("rope_theta", THETA);
    set(config, &scaling, base, head_dim, max_positions)
}

/// The rotations of layers with full attention and of layers with a window. `rope_parameters` has a set for each type; with the old keys,
/// scaling applies to full attention, and `rope_local_base_freq` is the base for a window. `head_dims` are the sizes of a head of both types,
/// and `thetas` the default bases.
pub(super) fn read_by_layer_type(
    config: &Keys<'_>,
    head_dims: (usize, usize),
    max_positions: usize,
    thetas: (f64, f64),
) -> Result<(RopeSet, RopeSet)> {
    let empty = Default::default();
    let scaling = parameters(config)?.unwrap_or(Keys(&empty));
    let full = |scaling: &Keys<'_>| {
        let base = ("rope_theta", thetas.0);
        set(config, scaling, base, head_dims.0, max_positions)
    };
    let sliding = |scaling: &Keys<'_>| {
        let base = ("rope_local_base_freq", thetas.1);
        set(config, scaling, base, head_dims.1, max_positions)
    };
    if by_layer_type(&scaling).is_none() {
        return Ok((full(&scaling)?, sliding(&Keys(&empty))?));
    }
    // A type without parameters is rotated without scaling.
    let own = |layer_type: &str| -> Result<Keys<'_>> {
        Ok(scaling.object(layer_type)?.unwrap_or(Keys(&empty)))
    };
    Ok((
        full(&own("full_attention")?)?,
        sliding(&own("sliding_attention")?)?,
    ))
}

/// The parameters with the new keys or the old. If a config has both, the old ones win, as in transformers.
pub(super) fn parameters<'a>(config: &Keys<'a>) -> Result<Option<Keys<'a>>> {
    match config.object("rope_scaling")? {
        Some(scaling) if !scaling.0.is_empty() => Ok(Some(scaling)),
        _ => config.object("rope_parameters"),
    }
}

fn by_layer_type<'a>(scaling: &Keys<'a>) -> Option<(&'a String, &'a serde_json::Value)> {
    scaling.0.iter().find(|(_, v)| v.is_object())
}

/// The base of a rotation: `rope_theta` of `scaling`, or the key `base` of the config, or the default.
pub(super) fn theta(
    config: &Keys<'_>,
    scaling: &Keys<'_>,
    (base, default): (&str, f64),
) -> Result<f64> {
    let theta = match scaling.number("rope_theta")? {
        Some(theta) => theta,
        None => config.number(base)?.unwrap_or(default),
    };
    positive(base, theta)
}

/// One rotation, with the base of [`theta`].
fn set(
    config: &Keys<'_>,
    scaling: &Keys<'_>,
    (base, default): (&str, f64),
    head_dim: usize,
    max_positions: usize,
) -> Result<RopeSet> {
    let theta = theta(config, scaling, (base, default))?;
    let part = match scaling.number("partial_rotary_factor")? {
        Some(part) => Some(part),
        None => config.number("partial_rotary_factor")?,
    };
    let rotated = (head_dim as f64 * part.unwrap_or(1.0)) as usize;
    // The pairs of proportional scaling that do not turn are pairs still, with the frequency 0.
    let rotary_dim = match kind(scaling)? {
        Some(PROPORTIONAL) => head_dim,
        _ => rotated,
    };
    if part.is_some_and(|p| !(p > 0.0 && p <= 1.0))
        || rotary_dim == 0
        || !rotary_dim.is_multiple_of(2)
    {
        bail!(
            Unsupported,
            "config: partial_rotary_factor is {}, {rotary_dim} of {head_dim} elements of a head; an even number must rotate",
            part.unwrap_or(1.0)
        );
    }
    let rope = Rope {
        config,
        scaling,
        theta,
        rotary_dim,
        pairs: rotated / 2,
        max_positions,
    };
    let set = rope.scaled()?;
    check(&set.table)?;
    if let Some(long) = &set.long {
        check(&long.table)?;
    }
    Ok(set)
}

/// The scaling that parameters name, with the new key or the old.
pub(super) fn kind<'a>(scaling: &Keys<'a>) -> Result<Option<&'a str>> {
    match scaling.text("rope_type")? {
        Some(kind) => Ok(Some(kind)),
        None => scaling.text("type"),
    }
}

/// Fails on frequencies that would turn every logit into NaN.
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

/// The inputs of a rotation's frequencies.
struct Rope<'a> {
    config: &'a Keys<'a>,
    scaling: &'a Keys<'a>,
    theta: f64,
    /// Elements of a head that form pairs.
    rotary_dim: usize,
    /// Pairs that turn: fewer than there are in proportional scaling alone.
    pairs: usize,
    max_positions: usize,
}

impl Rope<'_> {
    /// The powers of the base, with exponents `2 i / rotary_dim` for pair `i`.
    fn powers(&self) -> impl Iterator<Item = f32> {
        let (theta, dim) = (self.theta as f32, self.rotary_dim);
        (0..dim / 2).map(move |i| theta.powf((2 * i) as f32 / dim as f32))
    }

    fn scaled(&self) -> Result<RopeSet> {
        let plain: Vec<f32> = self.powers().map(|power| 1.0 / power).collect();
        let one = |frequencies, attention_factor: f64| RopeSet {
            table: RopeTable {
                frequencies,
                attention_factor: attention_factor as f32,
                growth: None,
            },
            long: None,
        };
        match self.kind()? {
            // Dynamic scaling changes the frequencies only past the model's maximum position. Axes for time, height and width (mrope) have
            // the same position in a text.
            None | Some("default" | "none" | "dynamic" | "mrope") => Ok(one(plain, 1.0)),
            Some("linear") => {
                let factor = self.required("factor")? as f32;
                Ok(one(plain.iter().map(|f| f / factor).collect(), 1.0))
            }
            Some("llama3") => {
                let low = self.required("low_freq_factor")?;
                let high = self.required("high_freq_factor")?;
                if low >= high {
                    bail!(
                        CorruptFile,
                        "config: low_freq_factor {low} is not below high_freq_factor {high}"
                    );
                }
                let factor = self.required("factor")?;
                let scaled = llama3(&plain, factor, low, high, self.original_positions()?);
                Ok(one(scaled, 1.0))
            }
            Some("yarn") => {
                let (frequencies, attention_factor) = self.yarn()?;
                Ok(one(frequencies, attention_factor))
            }
            Some("longrope" | "su") => self.longrope(),
            Some(PROPORTIONAL) => {
                let factor = self.optional("factor")?.unwrap_or(1.0) as f32;
                let turning = plain.iter().map(|f| f / factor).take(self.pairs);
                let still = std::iter::repeat_n(0.0, plain.len() - self.pairs);
                Ok(one(turning.chain(still).collect(), 1.0))
            }
            Some(kind) => bail!(
                Unsupported,
                "config: rope scaling '{kind}' is not known; known are {KNOWN}"
            ),
        }
    }

    fn kind(&self) -> Result<Option<&str>> {
        kind(self.scaling)
    }

    fn required(&self, name: &str) -> Result<f64> {
        let value = self.scaling.number(name)?.ok_or_else(|| {
            err!(
                CorruptFile,
                "config: rope scaling '{}' has no '{name}'",
                self.kind().ok().flatten().unwrap_or_default()
            )
        })?;
        positive(name, value)
    }

    fn optional(&self, name: &str) -> Result<Option<f64>> {
        let value = self.scaling.number(name)?;
        value.map(|x| positive(name, x)).transpose()
    }

    /// Positions that the model was trained for before scaling.
    fn original_positions(&self) -> Result<f64> {
        const NAME: &str = "original_max_position_embeddings";
        let value = match self.config.number(NAME)? {
            Some(n) => Some(n),
            None => self.scaling.number(NAME)?,
        };
        match value {
            Some(n) => positive(NAME, n),
            None => Ok(self.max_positions as f64),
        }
    }

    /// Frequencies and attention factor (Peng et al., 2023).
    fn yarn(&self) -> Result<(Vec<f32>, f64)> {
        let factor = match self.scaling.number("factor")? {
            Some(f) => positive("factor", f)?,
            None => self.max_positions as f64 / self.original_positions()?,
        };
        let beta_fast = self.optional("beta_fast")?.unwrap_or(32.0);
        let beta_slow = self.optional("beta_slow")?.unwrap_or(1.0);
        // 0 stands for none, as transformers reads it.
        let strength = |name| match self.scaling.number(name)? {
            Some(0.0) => Ok(None),
            _ => self.optional(name),
        };
        let m = (strength("mscale")?, strength("mscale_all_dim")?);
        let attention_factor = match (self.optional("attention_factor")?, m) {
            (Some(given), _) => given,
            (None, (Some(m), Some(all))) => mscale(factor, m) / mscale(factor, all),
            (None, _) => mscale(factor, 1.0),
        };
        let dim = self.rotary_dim as f64;
        let correction = |rotations: f64| -> Result<f64> {
            let original = self.original_positions()?;
            Ok(dim * (original / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln()))
        };
        let (mut low, mut high) = (correction(beta_fast)?, correction(beta_slow)?);
        if self.scaling.flag("truncate")?.unwrap_or(true) {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        // A ramp over the dimensions from extrapolation to interpolation.
        let high = if low == high { high + 0.001 } else { high };
        let frequency = |(i, power): (usize, f32)| {
            let (kept, stretched) = (1.0 / power, 1.0 / (factor as f32 * power));
            let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            stretched * ramp + kept * (1.0 - ramp)
        };
        let frequencies = self.powers().enumerate().map(frequency).collect();
        Ok((frequencies, attention_factor))
    }

    /// Two sets of factors, for short contexts and for long ones (Ding et al., 2024).
    fn longrope(&self) -> Result<RopeSet> {
        let original = self.original_positions()?;
        let has_original = self
            .config
            .get("original_max_position_embeddings")
            .is_some();
        let factor = match self.optional("factor")? {
            Some(factor) if !has_original => factor,
            _ => self.max_positions as f64 / original,
        };
        let attention_factor = match self.optional("attention_factor")? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        let divided = |name: &str| -> Result<RopeTable> {
            let factors = self.scaling.numbers(name)?.unwrap_or_default();
            if factors.len() != self.rotary_dim / 2 {
                bail!(
                    CorruptFile,
                    "config: rope scaling 'longrope' has {} numbers in '{name}'; expected {}, one for each pair",
                    factors.len(),
                    self.rotary_dim / 2
                );
            }
            let mut frequencies = Vec::with_capacity(factors.len());
            for (&factor, power) in factors.iter().zip(self.powers()) {
                frequencies.push(1.0 / (positive(name, factor)? as f32 * power));
            }
            Ok(RopeTable {
                frequencies,
                attention_factor: attention_factor as f32,
                growth: None,
            })
        };
        Ok(RopeSet {
            table: divided("short_factor")?,
            long: Some(Box::new(LongRope {
                original_positions: original as usize,
                table: divided("long_factor")?,
            })),
        })
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

fn mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * mscale * factor.ln() + 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use serde_json::{Value, json};

    fn of(config: Value) -> Result<RopeTable> {
        Ok(read(&Keys(config.as_object().unwrap()), 32, 1024)?.table)
    }

    #[test]
    fn old_and_new_words_agree() {
        let old_words = json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}});
        let old = of(old_words.clone());
        let new = of(
            json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
        );
        assert_eq!(old.unwrap(), new.unwrap());
        // If a config has both kinds of keys, transformers uses the old ones.
        let both = of(json!({
            "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}
        }));
        assert_eq!(both.unwrap(), of(old_words).unwrap());
        let plain = of(json!({"rope_scaling": null})).unwrap();
        assert_eq!(plain.frequencies[0], 1.0);
        assert!((plain.frequencies[8] - 0.01).abs() < 1e-8);
    }

    #[test]
    fn a_strength_of_yarn_that_is_0_is_none() {
        let factor = |more: Value| {
            let mut scaling = json!({"rope_type": "yarn", "factor": 4.0});
            scaling
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            of(json!({"rope_scaling": scaling}))
                .unwrap()
                .attention_factor
        };
        let plain = factor(json!({}));
        assert_eq!(factor(json!({"mscale": 0.7, "mscale_all_dim": 0})), plain);
        assert_eq!(factor(json!({"mscale": 0.0, "mscale_all_dim": 1.0})), plain);
        assert_ne!(factor(json!({"mscale": 0.7, "mscale_all_dim": 1.0})), plain);
    }

    /// The exponents are those of the whole head: 2 i / 32, and 8 of its 32 elements turn.
    #[test]
    fn proportional_scaling_turns_the_first_pairs_of_a_head() {
        let table = of(json!({"rope_parameters": {
            "rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "factor": 2.0
        }}));
        let table = table.unwrap();
        assert_eq!((table.rotary_dim(), table.attention_factor), (32, 1.0));
        let expected = [0.5, 0.5 * 1e4f32.powf(-1.0 / 16.0)];
        for (got, want) in table.frequencies.iter().zip(expected) {
            assert!((got - want).abs() < 1e-7, "{got} and {want}");
        }
        assert!(table.frequencies[3] > 0.0);
        assert_eq!(table.frequencies[4..], [0.0; 12]);
    }

    #[test]
    fn refusals() {
        for (config, expected) in [
            (
                json!({"rope_scaling": {"rope_type": "telepathy"}}),
                "'telepathy'",
            ),
            (
                json!({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}),
                "1 numbers in 'short_factor'; expected 16",
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
                json!({"partial_rotary_factor": 1.5}),
                "partial_rotary_factor is 1.5",
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
        let mut t = read(&Keys(&Default::default()), 32, 1024).unwrap();
        let before = t.table.frequencies.clone();
        t.divide(&[2.0; 16]).unwrap();
        assert!(
            t.table
                .frequencies
                .iter()
                .zip(&before)
                .all(|(a, b)| a * 2.0 == *b)
        );
        expect_kind(
            t.divide(&[0.0; 16]),
            ErrorKind::CorruptFile,
            "rope_freqs.weight holds 0",
        );
        expect_kind(
            t.divide(&[1e-40; 16]),
            ErrorKind::CorruptFile,
            "a frequency of inf",
        );
    }
}
