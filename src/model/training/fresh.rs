//! A checkpoint with random initial weights, for training from scratch.

use std::collections::HashMap;
use std::f64::consts::TAU;
use std::ops::Range;
use std::path::Path;

use crate::base::Result;
use crate::base::error::bail;
use crate::checkpoint::{Checkpoint, Encoding, Entry, Metadata, Part, describe};
use crate::format::random::{self, uniform};
use crate::model::tensors::{self, DELTA_A_LOG};
use crate::model::{Spec, families};
use crate::tensor::DType;

/// The standard deviation for a config without `initializer_range`.
const DEVIATION: f64 = 0.02;

/// Bounds of the initial rates of decay of a gated delta net.
const RATES: [f32; 2] = [0.01, 16.0];

/// A model of random weights, initialized as in transformers: matrices, tables and convolutions are normal with the standard deviation
/// `initializer_range` of the config, norms multiply by one, and biases are zero. The rates of decay of a gated delta net are uniform, and
/// what is added before them is one. A weight is a function of the seed, its tensor and its position, so that any rows can be read in any
/// order.
pub struct Fresh {
    seed: u64,
    deviation: f64,
    spec: Spec,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    metadata: Metadata,
}

impl Fresh {
    /// A model of the shape in `config.json` of `directory`, with the tokenizer in that directory.
    pub fn new(directory: &Path, seed: u64) -> Result<Fresh> {
        let metadata = describe(directory)?;
        let Some(config) = &metadata.config else {
            bail!(
                NotFound,
                "there is no config.json to say what model to begin with"
            );
        };
        let mut spec = families::read(config)?;
        spec.drafter = None;
        let deviation = match config.get("initializer_range") {
            None => DEVIATION,
            Some(value) => match value.as_f64().filter(|d| *d > 0.0) {
                Some(deviation) => deviation,
                None => bail!(
                    CorruptFile,
                    "'initializer_range' is {value}; expected a positive number"
                ),
            },
        };
        // Leaves out biases that are optional in the family.
        let entries: Vec<Entry> = tensors::whole(&spec)
            .into_iter()
            .filter(|t| t.required)
            .map(|t| Entry {
                bytes: 4 * t.shape.iter().product::<usize>() as u64,
                encoding: Encoding::Dense(DType::F32),
                shape: t.shape,
                name: t.name,
            })
            .collect();
        let names = entries.iter().enumerate();
        Ok(Fresh {
            seed,
            deviation,
            by_name: names.map(|(i, e)| (e.name.clone(), i)).collect(),
            entries,
            metadata,
            spec,
        })
    }

    /// Writes a vector's values.
    fn fill(&self, name: &str, seed: u64, out: &mut [f32]) {
        if name.ends_with(DELTA_A_LOG) {
            let [least, most] = RATES;
            for (i, value) in out.iter_mut().enumerate() {
                *value = (least + (most - least) * uniform(seed, i as u64)).ln();
            }
            return;
        }
        let is_zero = name.ends_with(".bias") || tensors::is_offset_from_one(&self.spec, name);
        out.fill(if is_zero { 0.0 } else { 1.0 });
    }

    /// Two independent normal values, by Box and Muller's method.
    fn normal(&self, seed: u64, pair: u64) -> [f32; 2] {
        let bits = random::bits(seed, pair);
        // The first is in (0, 1], because its logarithm is taken.
        let radius = ((bits >> 32) as f64 + 1.0) / (1u64 << 32) as f64;
        let angle = TAU * (bits as u32 as f64) / (1u64 << 32) as f64;
        let length = self.deviation * (-2.0 * radius.ln()).sqrt();
        [(length * angle.cos()) as f32, (length * angle.sin()) as f32]
    }
}

impl Checkpoint for Fresh {
    fn format(&self) -> &'static str {
        "random weights"
    }

    fn files(&self) -> Vec<&Path> {
        Vec::new()
    }

    fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn find(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&i| &self.entries[i])
    }

    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let Some(&index) = self.by_name.get(&entry.name) else {
            bail!(NotFound, "the model has no {}", entry.name);
        };
        let cols = entry.cols();
        if rows.end > entry.rows() || out.len() != rows.len() * cols {
            bail!(
                InvalidArgument,
                "rows {rows:?} of {}, which has {}, into {} values",
                entry.name,
                entry.rows(),
                out.len()
            );
        }
        let seed = random::bits(self.seed, index as u64);
        if entry.shape.len() == 1 {
            self.fill(&entry.name, seed, out);
            return Ok(());
        }
        let first = rows.start * cols;
        for (i, value) in out.iter_mut().enumerate() {
            let at = (first + i) as u64;
            *value = self.normal(seed, at / 2)[(at % 2) as usize];
        }
        Ok(())
    }

    fn rows_nvfp4(&self, entry: &Entry, _: Range<usize>, _: &mut [u8], _: &mut [u8]) -> Result<()> {
        bail!(InvalidArgument, "{} is not NVFP4", entry.name)
    }

    fn global_scales(&self, entry: &Entry) -> Result<&[f32]> {
        bail!(InvalidArgument, "{} is not NVFP4", entry.name)
    }

    fn plain(&self, _: &Entry) -> Option<Part<'_>> {
        None
    }

    fn parts(&self, _: &Entry) -> Result<Vec<Part<'_>>> {
        Ok(Vec::new())
    }

    fn read_part(&self, part: &Part<'_>, _: usize, _: &mut [u8]) -> Result<()> {
        bail!(NotFound, "{} is in no file", part.key)
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_normal_and_any_rows_are_those_of_the_whole() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/model/qwen3_tied");
        let read = |seed, rows: Range<usize>| {
            let fresh = Fresh::new(&directory, seed).unwrap();
            let entry = fresh.find("model.embed_tokens.weight").unwrap().clone();
            let mut out = vec![0.0; rows.len() * entry.cols()];
            fresh.rows_f32(&entry, rows, &mut out).unwrap();
            out
        };
        let all = read(1, 0..320);
        assert_eq!(all[7 * 64..9 * 64], read(1, 7..9));
        assert_ne!(all, read(2, 0..320));
        let n = all.len() as f64;
        let moment = |power| {
            all.iter()
                .map(|&v| (f64::from(v) / DEVIATION).powi(power))
                .sum::<f64>()
                / n
        };
        // Five standard errors of the moments of a normal distribution: sqrt(1/n), sqrt(2/n) and sqrt(96/n).
        assert!(moment(1).abs() < 5.0 * (1.0 / n).sqrt(), "{}", moment(1));
        assert!(
            (moment(2) - 1.0).abs() < 5.0 * (2.0 / n).sqrt(),
            "{}",
            moment(2)
        );
        assert!(
            (moment(4) - 3.0).abs() < 5.0 * (96.0 / n).sqrt(),
            "{}",
            moment(4)
        );

        let fresh = Fresh::new(&directory, 1).unwrap();
        let norm = fresh.find("model.norm.weight").unwrap().clone();
        let mut ones = vec![0.0; norm.cols()];
        fresh.rows_f32(&norm, 0..1, &mut ones).unwrap();
        assert!(ones.iter().all(|&v| v == 1.0));
    }
}
