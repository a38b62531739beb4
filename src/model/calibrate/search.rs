//! The codes and scales of a matrix, by the second moments of its inputs: what several searches find, and how good it is by moments of other
//! text.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::format::nvfp4::{BLOCK, Levels, Nvfp4, QuantizeOptions, global_scale};
use crate::ops::calibrated::{FoundCodes, FullMoments, MatrixRows, SearchBy};

/// Rows of a matrix by which searches are compared, and global scales.
const SAMPLE: usize = 192;
const SAMPLE_OF_GLOBAL: usize = 64;
/// Global scales that are tried, as powers of two above the usual one: it puts the largest weight on the largest scale, and which scales
/// there are below moves with it. A whole power would give the same ones again.
const GLOBALS: [f32; 4] = [0.0, 0.25, 0.5, 0.75];

/// How the codes of a matrix were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// The scale of each block by the error of its weights.
    Sweep,
    /// The scale of each block by the error of its product, and then each block beside the others.
    Descent,
    /// Blocks in turn, each making up for the errors before it, and then each beside the others.
    Feedback,
}

impl Choice {
    /// Passes over all blocks, after the search, in which each becomes the best beside the others.
    const fn passes(self) -> usize {
        match self {
            Choice::Sweep => 0,
            Choice::Descent => 4,
            Choice::Feedback => 2,
        }
    }
}

/// Searches by moments.
pub(super) struct Search {
    cols: usize,
    moments: FullMoments,
    options: QuantizeOptions,
}

/// Codes of a matrix that one search has found.
pub(super) struct Candidate {
    pub(super) matrix: Nvfp4,
    pub(super) choice: Choice,
    /// Its relative error by text that the search has not seen.
    pub(super) error: f64,
}

/// Candidates for a matrix.
pub(super) struct Found {
    /// Descent first, then feedback; or one search alone.
    pub(super) candidates: Vec<Candidate>,
    /// Relative error of a sweep, by text that no search has seen.
    pub(super) error_of_sweep: f64,
}

impl Search {
    pub(super) fn new(moments: FullMoments, cols: usize, options: QuantizeOptions) -> Search {
        Search {
            cols,
            moments,
            options,
        }
    }

    /// The global scale that is best for matrices with this largest magnitude, by a sample of their rows.
    pub(super) fn best_global(&self, matrices: &[Vec<f32>], largest: f32) -> Result<f32> {
        let usual = global_scale(largest, &self.options);
        if self.options.levels != Levels::Two {
            return Ok(usual);
        }
        let samples: Vec<MatrixRows<'_>> = matrices
            .iter()
            .map(|weights| self.sample(weights, SAMPLE_OF_GLOBAL))
            .collect::<Result<_>>()?;
        let mut best = (f64::INFINITY, usual);
        for power in GLOBALS {
            let global = usual * power.exp2();
            let mut error = 0.0;
            for weights in &samples {
                let found = self.quantized(self.best_choice(), 0, weights, global)?;
                error += self.moments.error(weights, Some(&found))?;
            }
            if error < best.0 {
                best = (error, global);
            }
        }
        Ok(best.1)
    }

    /// Codes and scales for `weights` `[rows, cols]` under a global scale, by each search that is better than a sweep by a sample of the rows;
    /// by a sweep if none is.
    pub(super) fn candidates(&self, weights: &[f32], global: f32) -> Result<Found> {
        let rows = self.moments.rows(weights)?;
        let sampled = self.sampled(weights, SAMPLE);
        let sample = self.sample(weights, SAMPLE)?;
        let whole = self.moments.error(&sample, None)?;
        let relative = |found: &FoundCodes| -> Result<f64> {
            let error = self.moments.error(&sample, Some(found))?;
            Ok((error.max(0.0) / whole.max(f64::MIN_POSITIVE)).sqrt())
        };
        let error_of_sweep = relative(&self.quantized(Choice::Sweep, 0, &sample, global)?)?;
        let mut candidates = Vec::new();
        for choice in [Choice::Descent, Choice::Feedback] {
            if choice == Choice::Feedback && !self.moments.has_factor() {
                continue;
            }
            let found = self.quantized(choice, choice.passes(), &rows, global)?;
            let matrix = found.read()?;
            let error = relative(&self.moments.place(select(&matrix, &sampled))?)?;
            if error < error_of_sweep {
                candidates.push(Candidate {
                    matrix,
                    choice,
                    error,
                });
            }
        }
        if candidates.is_empty() {
            candidates.push(Candidate {
                matrix: self.quantized(Choice::Sweep, 0, &rows, global)?.read()?,
                choice: Choice::Sweep,
                error: error_of_sweep,
            });
        }
        Ok(Found {
            candidates,
            error_of_sweep,
        })
    }

    /// The search that is usually best.
    fn best_choice(&self) -> Choice {
        match self.moments.has_factor() {
            true => Choice::Feedback,
            false => Choice::Descent,
        }
    }

    /// The numbers of so many rows of a matrix, evenly chosen; of all where that is nearly as many.
    fn sampled(&self, weights: &[f32], rows: usize) -> Vec<usize> {
        let all = weights.len() / self.cols;
        match all <= rows + rows / 2 {
            true => (0..all).collect(),
            false => (0..rows).map(|i| i * all / rows).collect(),
        }
    }

    /// The rows with those numbers.
    fn sample(&self, weights: &[f32], rows: usize) -> Result<MatrixRows<'static>> {
        let numbers = self.sampled(weights, rows).into_iter();
        let row = |i: usize| &weights[i * self.cols..][..self.cols];
        let some: Vec<f32> = numbers.flat_map(row).copied().collect();
        self.moments.rows(some)
    }

    /// The codes and scales that one search finds, with so many passes of descent.
    fn quantized(
        &self,
        choice: Choice,
        passes: usize,
        rows: &MatrixRows<'_>,
        global: f32,
    ) -> Result<FoundCodes> {
        let by = match choice {
            Choice::Sweep => SearchBy::Weights(&self.options),
            Choice::Descent => SearchBy::Blocks,
            Choice::Feedback => SearchBy::Turns,
        };
        let mut found = self.moments.search(by, rows, global)?;
        if passes > 0 && choice != Choice::Sweep {
            self.moments.descend(rows, passes, &mut found)?;
        }
        Ok(found)
    }
}

/// Some rows of a matrix.
fn select(matrix: &Nvfp4, rows: &[usize]) -> Nvfp4 {
    let of = |values: &[u8], width: usize| -> Vec<u8> {
        let row = |i: &usize| &values[i * width..][..width];
        rows.iter().flat_map(row).copied().collect()
    };
    Nvfp4 {
        rows: rows.len(),
        cols: matrix.cols,
        codes: of(&matrix.codes, matrix.cols / 2),
        scales: of(&matrix.scales, matrix.cols / BLOCK),
        global: matrix.global,
    }
}
