//! Searches the codes and scales of a matrix by the second moments of its inputs, and evaluates the results by the moments of other text.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::format::nvfp4::{BLOCK, Levels, Nvfp4, QuantizeOptions, global_scale};
use crate::ops::calibrated::{FoundCodes, FullMoments, MatrixRows, SearchBy};

/// Number of sampled rows for comparing searches, and for comparing global scales.
const SAMPLE: usize = 192;
const SAMPLE_OF_GLOBAL: usize = 64;
/// Candidate global scales, as powers of two above the usual one. The usual one maps the largest weight to the largest block scale; other
/// exponents shift the grid of the smaller block scales. A whole power would give the same grid again.
const GLOBALS: [f32; 4] = [0.0, 0.25, 0.5, 0.75];

/// The search that found the codes of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// Chooses the scale of each block by the error of its weights.
    Sweep,
    /// Chooses the scale of each block by the error of its product, then refines each block given the others.
    Descent,
    /// Processes blocks in order, each compensating the errors of those before it, then refines each block given the others.
    Feedback,
}

impl Choice {
    /// Number of refinement passes over all blocks after the search.
    const fn passes(self) -> usize {
        match self {
            Choice::Sweep => 0,
            Choice::Descent => 4,
            Choice::Feedback => 2,
        }
    }
}

/// Searches by given moments.
pub(super) struct Search {
    cols: usize,
    moments: FullMoments,
    options: QuantizeOptions,
}

/// Codes of a matrix found by one search.
pub(super) struct Candidate {
    pub(super) matrix: Nvfp4,
    pub(super) choice: Choice,
    /// Its relative error on text kept from the search.
    pub(super) error: f64,
}

/// Candidates for a matrix.
pub(super) struct Found {
    /// Descent first, then feedback; or a single search.
    pub(super) candidates: Vec<Candidate>,
    /// Relative error of a sweep, on text kept from the search.
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

    /// The best global scale for matrices with this largest magnitude, by a sample of their rows.
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

    /// Codes and scales for `weights` `[rows, cols]` under a global scale, from each search that beats a sweep on a sample of the rows;
    /// from a sweep if none does.
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

    /// Indices of about `rows` evenly chosen rows of a matrix; all rows if it has few more.
    fn sampled(&self, weights: &[f32], rows: usize) -> Vec<usize> {
        let all = weights.len() / self.cols;
        match all <= rows + rows / 2 {
            true => (0..all).collect(),
            false => (0..rows).map(|i| i * all / rows).collect(),
        }
    }

    /// The sampled rows.
    fn sample(&self, weights: &[f32], rows: usize) -> Result<MatrixRows<'static>> {
        let numbers = self.sampled(weights, rows).into_iter();
        let row = |i: usize| &weights[i * self.cols..][..self.cols];
        let some: Vec<f32> = numbers.flat_map(row).copied().collect();
        self.moments.rows(some)
    }

    /// Codes and scales from one search, with the given number of descent passes.
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

/// Selects rows of a matrix.
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
