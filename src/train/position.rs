//! The inputs of a run, and its position in them. A checkpoint stores checksums by which a resumed run recognizes its data.

use std::collections::BTreeMap;
use std::hash::Hasher;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use twox_hash::XxHash3_64;

use super::data::{DataFile, Place, Windows};
use super::evaluation::EvaluationSet;
use super::judge::Judge;
use crate::base::Result;
use crate::base::error::{bail, err};

/// Input data of a run.
pub struct Inputs {
    /// The windows.
    pub windows: Windows,
    /// Evaluation sets; may be empty. The first one decides which evaluation is best.
    pub evaluation: Vec<EvaluationSet>,
    /// Source files, for messages.
    pub files: Vec<DataFile>,
    /// Seed of the order of windows.
    pub seed: u64,
}

impl Inputs {
    /// Refuses data other than what the checkpoint with position `at` was trained on, in steps of `accumulate` batches of `batch` windows.
    pub fn check(&self, steps: (usize, usize), at: &Value) -> Result<()> {
        Known::new(self, steps).check(&Position::read(at)?.data)
    }
}

/// Identity of a run's data, for checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Known {
    windows: usize,
    tokens: usize,
    /// XXH3 of all tokens, lengths and labels.
    checksum: String,
    evaluation: String,
    batch: usize,
    accumulate: usize,
    seed: u64,
    /// XXH3 of the files, by file name without folder.
    files: BTreeMap<String, String>,
}

/// Position of a run in its data, as checkpoints store it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Position {
    pub(super) place: Place,
    /// Tokens and seconds so far.
    pub(super) tokens: u64,
    pub(super) seconds: f64,
    pub(super) data: Known,
    /// Judgement of the losses so far.
    #[serde(default)]
    pub(super) judge: Judge,
}

impl Position {
    /// Parses the position in a checkpoint.
    pub(super) fn read(value: &Value) -> Result<Position> {
        Position::deserialize(value).map_err(|e| {
            err!(
                CorruptFile,
                "the place in the data that the checkpoint holds: {e}"
            )
        })
    }
}

impl Known {
    /// The identity of `inputs`, in steps of `accumulate` batches of `batch` windows.
    pub(super) fn new(inputs: &Inputs, (batch, accumulate): (usize, usize)) -> Known {
        let name = |file: &DataFile| {
            let name = file.path.file_name().unwrap_or_default();
            name.to_string_lossy().into_owned()
        };
        let files = inputs.files.iter();
        Known {
            windows: inputs.windows.len(),
            tokens: inputs.windows.tokens(),
            checksum: checksum(&inputs.windows),
            evaluation: checksum_of_sets(&inputs.evaluation),
            batch,
            accumulate,
            seed: inputs.seed,
            files: files.map(|f| (name(f), f.checksum.clone())).collect(),
        }
    }

    /// Fails unless the saved data is the same.
    pub(super) fn check(&self, saved: &Known) -> Result<()> {
        let mut differing = Vec::new();
        for (name, sum) in &saved.files {
            match self.files.get(name) {
                None => differing.push(format!("{name} is not among the data")),
                Some(own) if own != sum => differing.push(format!("{name} has another content")),
                Some(_) => {}
            }
        }
        let added = self.files.keys().filter(|n| !saved.files.contains_key(*n));
        differing.extend(added.map(|name| format!("{name} was not among the data")));
        for (what, own, saved) in [
            ("windows", self.windows as u64, saved.windows as u64),
            ("tokens", self.tokens as u64, saved.tokens as u64),
            ("windows in a batch", self.batch as u64, saved.batch as u64),
            (
                "batches in a step",
                self.accumulate as u64,
                saved.accumulate as u64,
            ),
            ("as the seed", self.seed, saved.seed),
        ] {
            if own != saved {
                differing.push(format!("{own} {what} instead of {saved}"));
            }
        }
        if differing.is_empty() && self.checksum != saved.checksum {
            differing.push("the tokens, the labels or their weights are others".to_owned());
        }
        if differing.is_empty() && self.evaluation != saved.evaluation {
            differing.push("the evaluation's tokens or labels are others".to_owned());
        }
        if !differing.is_empty() {
            bail!(
                InvalidArgument,
                "the checkpoint was trained on other data: {}; resume with the data and options that it began with, or begin anew",
                differing.join(", ")
            );
        }
        Ok(())
    }
}

fn checksum(windows: &Windows) -> String {
    let mut sum = XxHash3_64::new();
    for window in windows.all() {
        window
            .documents
            .iter()
            .for_each(|&n| sum.write_u64(n as u64));
        window.tokens.iter().for_each(|&t| sum.write_u32(t));
        window.labels.iter().for_each(|&l| sum.write_i32(l));
        // Weights are hashed only if present, so that the checksum equals that of windows without weights.
        let weights = window.weights.iter();
        weights.for_each(|&w| sum.write_u32(w.to_bits()));
    }
    format!("{:016x}", sum.finish())
}

/// Checksum of the windows of all sets. For a single set it is that of its windows, whatever its name.
fn checksum_of_sets(sets: &[EvaluationSet]) -> String {
    match sets {
        [] => checksum(&Windows::default()),
        [one] => checksum(&one.windows),
        several => {
            let mut sum = XxHash3_64::new();
            for set in several {
                sum.write(set.name.as_bytes());
                sum.write(checksum(&set.windows).as_bytes());
            }
            format!("{:016x}", sum.finish())
        }
    }
}
