//! Cross-entropy over chunks of the head's columns, so that the logits of a vocabulary never exist at once: first the log-sum-exp of each
//! row, chunk by chunk (Milakov and Gimelshein, arXiv 1805.02867), then the gradients of each chunk.

use std::cmp::Ordering;

use super::rows::{by_parts, by_parts_of_two};
use crate::base::error::{Result, bail};
use crate::cpu::Cpu;

/// Columns of a chunk of logits `[T, width]`, with labels.
#[derive(Clone, Copy, Debug)]
pub struct HeadColumns<'a> {
    /// The token of the first column.
    pub first: usize,
    /// Columns.
    pub width: usize,
    /// The token that each row should predict; negative for none.
    pub labels: &'a [i32],
    /// Soft cap of the logits: `cap * tanh(logit / cap)`.
    pub cap: Option<f32>,
}

/// State of each row after some chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct CrossEntropy {
    /// The largest logit.
    pub largest: f32,
    /// The sum of `exp(logit - largest)`.
    pub sum: f32,
    /// The label's logit.
    pub target: f32,
}

impl CrossEntropy {
    /// The state before the first chunk.
    pub const START: CrossEntropy = CrossEntropy {
        largest: f32::NEG_INFINITY,
        sum: 0.0,
        target: 0.0,
    };

    /// The logarithm of the sum of exponentials.
    pub fn lse(&self) -> f32 {
        self.largest + self.sum.ln()
    }
}

/// A logit after the soft cap.
pub(super) fn capped(cap: Option<f32>, logit: f32) -> f32 {
    cap.map_or(logit, |cap| cap * (logit / cap).tanh())
}

impl HeadColumns<'_> {
    pub(super) fn check(&self, logits: usize, rows: usize) -> Result<()> {
        if self.width == 0 || logits != rows * self.width || self.labels.len() != rows {
            bail!(
                Internal,
                "a chunk of {logits} logits in rows of {}, with {} labels and {rows} rows",
                self.width,
                self.labels.len()
            );
        }
        Ok(())
    }

    fn capped(&self, logit: f32) -> f32 {
        capped(self.cap, logit)
    }

    /// The column of a row's label, if it is in this chunk.
    pub(super) fn column(&self, row: usize) -> Option<usize> {
        let label = usize::try_from(self.labels[row]).ok()?;
        label.checked_sub(self.first).filter(|&c| c < self.width)
    }
}

/// Elements whose absolute differences share one partial sum.
const L1_RUN: usize = 4096;

impl Cpu {
    /// Returns `weight * sum |h - target|`, and writes `weight * sign(h - target)` to `d`.
    pub fn l1(&self, h: &[f32], target: &[f32], weight: f32, d: &mut [f32]) -> f64 {
        let mut sums = vec![0f64; d.len().div_ceil(L1_RUN)];
        by_parts_of_two(self.pool(), (d, &mut sums), (L1_RUN, 1), |part, d, sum| {
            let first = part * L1_RUN;
            for ((d, h), target) in d.iter_mut().zip(&h[first..]).zip(&target[first..]) {
                let difference = f64::from(*h) - f64::from(*target);
                sum[0] += difference.abs();
                *d = match difference.partial_cmp(&0.0) {
                    Some(Ordering::Greater) => weight,
                    Some(Ordering::Less) => -weight,
                    _ => 0.0,
                };
            }
        });
        f64::from(weight) * sums.iter().sum::<f64>()
    }

    /// Accumulates a chunk of logits.
    pub fn cross_entropy_chunk(
        &self,
        columns: &HeadColumns<'_>,
        logits: &[f32],
        rows: &mut [CrossEntropy],
    ) -> Result<()> {
        columns.check(logits.len(), rows.len())?;
        by_parts(self.pool(), rows, 1, |i, row| {
            let (row, logits) = (&mut row[0], &logits[i * columns.width..][..columns.width]);
            let capped = || logits.iter().map(|&l| columns.capped(l));
            let largest = capped().fold(row.largest, f32::max);
            let sum: f32 = capped().map(|l| (l - largest).exp()).sum();
            row.sum = row.sum * (row.largest - largest).exp() + sum;
            row.largest = largest;
            if let Some(column) = columns.column(i) {
                row.target = columns.capped(logits[column]);
            }
        });
        Ok(())
    }

    /// Replaces a chunk of logits by their gradients, `weight (softmax - onehot)`. Rows without a label get zeros. `lse` and `weights` have
    /// one entry per row.
    pub fn cross_entropy_gradient(
        &self,
        columns: &HeadColumns<'_>,
        logits: &mut [f32],
        lse: &[f32],
        weights: &[f32],
    ) -> Result<()> {
        columns.check(logits.len(), lse.len())?;
        by_parts(self.pool(), logits, columns.width, |i, logits| {
            if columns.labels[i] < 0 {
                return logits.fill(0.0);
            }
            let target = columns.column(i);
            for (column, logit) in logits.iter_mut().enumerate() {
                let l = columns.capped(*logit);
                let slope = columns.cap.map_or(1.0, |cap| 1.0 - (l / cap) * (l / cap));
                let onehot = f32::from(u8::from(target == Some(column)));
                *logit = weights[i] * ((l - lse[i]).exp() - onehot) * slope;
            }
        });
        Ok(())
    }
}
