//! The codes and scales of a matrix, by the second moments of its inputs: the best of what several searches find, by moments of other text.

use serde::Serialize;

use crate::base::Result;
use crate::cpu::Cpu;
use crate::cpu::calibrated::{Factor, Moments};
use crate::cpu::training::Rows;
use crate::format::input_moments;
use crate::format::nvfp4::{self, BLOCK, Nvfp4, QuantizeOptions};

/// Damping of the diagonal of the moments, as a share of its mean: `DAMPING + FEW * inputs / rows`, as few rows of text say little.
const DAMPING: f32 = 0.01;
const FEW: f32 = 0.05;
/// Passes over all blocks in which each becomes the best beside the others.
const PASSES: usize = 2;

/// How the codes of a matrix were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// The scale of each block by the error of its weights.
    Sweep,
    /// The scale of each block by the error of its product, and then each block beside the others.
    Descent,
    /// Blocks in turn, each making up for the errors before it, and then each beside the others.
    Feedback,
}

/// Makes sums of products of `rows` rows of `cols` inputs positive definite.
pub(super) fn fit(sums: &mut [f32], cols: usize, rows: usize) {
    let mean = (0..cols)
        .map(|i| f64::from(sums[i * (cols + 1)]))
        .sum::<f64>()
        / cols as f64;
    let share = DAMPING + FEW * cols as f32 / rows.max(1) as f32;
    let more = match mean > 0.0 {
        true => mean as f32 * share,
        false => 1.0,
    };
    (0..cols).for_each(|i| sums[i * (cols + 1)] += more);
}

/// A search by moments `[cols, cols]`.
pub(super) struct Search<'a> {
    host: &'a Cpu,
    cols: usize,
    moments: Moments,
    factor: Option<Factor>,
    kept: &'a [f32],
}

/// The result of a search.
pub(super) struct Found {
    pub(super) matrix: Nvfp4,
    pub(super) choice: Choice,
    /// Relative errors of a sweep and of the chosen codes, by text that the search has not seen.
    pub(super) errors: [f64; 2],
}

impl<'a> Search<'a> {
    /// By moments of the text that is seen, which [`fit`] has made fit, and of the text that is kept.
    pub(super) fn new(
        host: &'a Cpu,
        seen: &[f32],
        kept: &'a [f32],
        cols: usize,
    ) -> Result<Search<'a>> {
        Ok(Search {
            host,
            cols,
            moments: Moments::new(seen, cols),
            factor: host.factor(seen, cols)?,
            kept,
        })
    }

    /// The best codes and scales for `weights` `[rows, cols]` under a global scale.
    pub(super) fn best(
        &self,
        weights: &[f32],
        rows: usize,
        global: f32,
        options: &QuantizeOptions,
    ) -> Result<Found> {
        let cols = self.cols;
        let empty = || Nvfp4 {
            rows,
            cols,
            codes: vec![0; weights.len() / 2],
            scales: vec![0; weights.len() / BLOCK],
            global,
        };
        let row_of = |row: usize| &weights[row * cols..][..cols];
        let mut swept = empty();
        self.host
            .by_code_rows(cols, rows_of(&mut swept), |row, codes, scales| {
                nvfp4::quantize_rows(row_of(row), cols, row, global, options, codes, scales)
            })?;
        let mut tried = vec![(Choice::Sweep, swept)];
        let (mut descended, blocks) = (empty(), self.moments.blocks());
        self.host
            .by_code_rows(cols, rows_of(&mut descended), |row, codes, scales| {
                input_moments::quantize_rows(row_of(row), global, blocks, codes, scales);
                Ok(())
            })?;
        let descend = |matrix: &mut Nvfp4| {
            self.host
                .descend(weights, global, &self.moments, PASSES, rows_of(matrix))
        };
        descend(&mut descended)?;
        tried.push((Choice::Descent, descended));
        if let Some(factor) = &self.factor {
            let mut fed = empty();
            self.host
                .round_in_turn(weights, global, factor, rows_of(&mut fed))?;
            descend(&mut fed)?;
            tried.push((Choice::Feedback, fed));
        }
        let zeros = vec![0; weights.len() / BLOCK];
        let codes = vec![0; weights.len() / 2];
        let whole = self
            .host
            .product_error(weights, self.kept, cols, (&codes, &zeros, 1.0))?;
        let (mut best, mut of_sweep) = (None::<(f64, Choice, Nvfp4)>, 0.0);
        for (choice, matrix) in tried {
            let of = (&matrix.codes[..], &matrix.scales[..], global);
            let error = self.host.product_error(weights, self.kept, cols, of)?;
            if choice == Choice::Sweep {
                of_sweep = error;
            }
            if best.as_ref().is_none_or(|(least, ..)| error < *least) {
                best = Some((error, choice, matrix));
            }
        }
        let (error, choice, matrix) = best.expect("a sweep was tried");
        let relative = |error: f64| (error.max(0.0) / whole.max(f64::MIN_POSITIVE)).sqrt();
        Ok(Found {
            matrix,
            choice,
            errors: [relative(of_sweep), relative(error)],
        })
    }
}

fn rows_of(matrix: &mut Nvfp4) -> Rows<'_> {
    Rows {
        codes: &mut matrix.codes,
        scales: &mut matrix.scales,
    }
}
