//! The codes and scales of a matrix, by the second moments of its inputs: the best of what several searches find, by moments of other text.

use serde::{Deserialize, Serialize};

use super::gathered::InputMoments;
use crate::base::Result;
use crate::cpu::Cpu;
use crate::cpu::moments::{Factor, Moments};
use crate::cpu::training::Rows;
use crate::format::input_moments;
use crate::format::nvfp4::{self, BLOCK, Levels, Nvfp4, QuantizeOptions, global_scale};

/// Passes over all blocks in which each becomes the best beside the others.
const PASSES: usize = 2;
/// Rows of a matrix by which a search is chosen, and a global scale.
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

/// A search by moments.
pub(super) struct Search<'a> {
    host: &'a Cpu,
    cols: usize,
    moments: Moments,
    /// None where the moments are not positive definite after all.
    factor: Option<Factor>,
    kept: Vec<f32>,
    options: QuantizeOptions,
}

/// The result of a search.
pub(super) struct Found {
    pub(super) matrix: Nvfp4,
    pub(super) choice: Choice,
    /// Relative errors of a sweep and of the chosen codes, by text that the search has not seen.
    pub(super) errors: [f64; 2],
}

impl<'a> Search<'a> {
    pub(super) fn new(
        host: &'a Cpu,
        inputs: InputMoments,
        options: QuantizeOptions,
    ) -> Result<Search<'a>> {
        let InputMoments { cols, seen, kept } = inputs;
        Ok(Search {
            host,
            cols,
            moments: host.moments(&seen, cols),
            factor: host.factor(&seen, cols)?,
            kept,
            options,
        })
    }

    /// The global scale that is best for matrices with this largest magnitude, by a sample of their rows.
    pub(super) fn best_global(&self, matrices: &[Vec<f32>], largest: f32) -> Result<f32> {
        let usual = global_scale(largest, &self.options);
        if self.options.levels != Levels::Two {
            return Ok(usual);
        }
        let samples: Vec<_> = matrices
            .iter()
            .map(|weights| self.sample(weights, SAMPLE_OF_GLOBAL))
            .collect();
        let mut best = (f64::INFINITY, usual);
        for power in GLOBALS {
            let global = usual * power.exp2();
            let mut error = 0.0;
            for weights in &samples {
                let matrix = self.quantized(self.best_choice(), 0, weights, global)?;
                error += self.error(weights, &matrix)?;
            }
            if error < best.0 {
                best = (error, global);
            }
        }
        Ok(best.1)
    }

    /// The best codes and scales for `weights` `[rows, cols]` under a global scale. Which search finds them, a sample of the rows says.
    pub(super) fn best(&self, weights: &[f32], global: f32) -> Result<Found> {
        let sample = self.sample(weights, SAMPLE);
        let zeros = self.empty(&sample, global);
        let whole = self.error(&sample, &zeros)?;
        let (mut best, mut of_sweep) = (None::<(f64, Choice, Nvfp4)>, 0.0);
        for choice in [Choice::Sweep, Choice::Descent, Choice::Feedback] {
            if choice == Choice::Feedback && self.factor.is_none() {
                continue;
            }
            let matrix = self.quantized(choice, PASSES, &sample, global)?;
            let error = self.error(&sample, &matrix)?;
            if choice == Choice::Sweep {
                of_sweep = error;
            }
            if best.as_ref().is_none_or(|(least, ..)| error < *least) {
                best = Some((error, choice, matrix));
            }
        }
        let (error, choice, mut matrix) = best.expect("a sweep was tried");
        if matrix.codes.len() * 2 < weights.len() {
            matrix = self.quantized(choice, PASSES, weights, global)?;
        }
        let relative = |error: f64| (error.max(0.0) / whole.max(f64::MIN_POSITIVE)).sqrt();
        Ok(Found {
            matrix,
            choice,
            errors: [relative(of_sweep), relative(error)],
        })
    }

    /// The search that is usually best.
    fn best_choice(&self) -> Choice {
        match self.factor {
            Some(_) => Choice::Feedback,
            None => Choice::Descent,
        }
    }

    /// So many rows of a matrix, evenly chosen; all of them where that is nearly as many.
    fn sample(&self, weights: &[f32], rows: usize) -> Vec<f32> {
        let all = weights.len() / self.cols;
        if all <= rows + rows / 2 {
            return weights.to_vec();
        }
        let row = |i: usize| &weights[i * all / rows * self.cols..][..self.cols];
        (0..rows).flat_map(row).copied().collect()
    }

    /// Zeros.
    fn empty(&self, weights: &[f32], global: f32) -> Nvfp4 {
        Nvfp4 {
            rows: weights.len() / self.cols,
            cols: self.cols,
            codes: vec![0; weights.len() / 2],
            scales: vec![0; weights.len() / BLOCK],
            global,
        }
    }

    /// The codes and scales that one search finds, with so many passes of descent.
    fn quantized(
        &self,
        choice: Choice,
        passes: usize,
        weights: &[f32],
        global: f32,
    ) -> Result<Nvfp4> {
        let (host, cols) = (self.host, self.cols);
        let mut matrix = self.empty(weights, global);
        let row_of = |row: usize| &weights[row * cols..][..cols];
        match (choice, &self.factor) {
            (Choice::Sweep, _) => {
                host.by_code_rows(cols, rows_of(&mut matrix), |row, codes, scales| {
                    let options = &self.options;
                    nvfp4::quantize_rows(row_of(row), cols, row, global, options, codes, scales)
                })?;
                return Ok(matrix);
            }
            (Choice::Feedback, Some(factor)) => {
                host.round_in_turn(weights, global, factor, rows_of(&mut matrix))?;
            }
            _ => host.by_code_rows(cols, rows_of(&mut matrix), |row, codes, scales| {
                let blocks = self.moments.blocks();
                input_moments::quantize_rows(row_of(row), global, blocks, codes, scales);
                Ok(())
            })?,
        }
        if passes > 0 {
            host.descend(weights, global, &self.moments, passes, rows_of(&mut matrix))?;
        }
        Ok(matrix)
    }

    /// The error of products for text that the search does not see.
    fn error(&self, weights: &[f32], matrix: &Nvfp4) -> Result<f64> {
        let of = (&matrix.codes[..], &matrix.scales[..], matrix.global);
        self.host.product_error(weights, &self.kept, self.cols, of)
    }
}

fn rows_of(matrix: &mut Nvfp4) -> Rows<'_> {
    Rows {
        codes: &mut matrix.codes,
        scales: &mut matrix.scales,
    }
}
