//! Predictions of the two models: the divergence of each row, and each model's most likely tokens.

use std::ops::Range;

use crate::base::Result;
use crate::ops::training::divergence::{Divergence, Mixture, TeacherLogits};
use crate::ops::training::loss::{Chunk, Targets};
use crate::ops::{Array, Device};

/// Predictions kept of each model for each token.
pub const LIKELY: usize = 3;

/// Predictions of one token by both models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenComparison {
    /// Index of its window.
    pub window: usize,
    /// Position of the last token that the models have read before this prediction.
    pub position: usize,
    /// The token that follows.
    pub token: u32,
    /// KL(reference || examined) of their predictions, in nats.
    pub divergence: f64,
    /// The negative log-likelihood of the token by the examined model and by the reference, in nats.
    pub losses: [f64; 2],
    /// The most likely tokens with their probabilities, by the examined model and by the reference.
    pub likely: [[(u32, f32); LIKELY]; 2],
}

impl TokenComparison {
    /// Whether both models have the same most likely token.
    pub fn same_top(&self) -> bool {
        self.likely[0][0].0 == self.likely[1][0].0
    }
}

/// The largest logits of a row, in descending order; the first of equal ones comes first.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Largest([(u32, f32); LIKELY]);

impl Largest {
    const NONE: Largest = Largest([(0, f32::NEG_INFINITY); LIKELY]);

    /// Accumulates the logits of the tokens from `first` on.
    fn add(&mut self, first: usize, logits: &[f32]) {
        for (i, &logit) in logits.iter().enumerate() {
            if logit > self.0[LIKELY - 1].1 {
                let place = self.0.iter().position(|(_, l)| logit > *l).unwrap_or(0);
                self.0[place..].rotate_right(1);
                self.0[place] = ((first + i) as u32, logit);
            }
        }
    }
}

fn capped(cap: Option<f32>, logit: f32) -> f64 {
    f64::from(cap.map_or(logit, |cap| cap * (logit / cap).tanh()))
}

/// One model's part of predictions.
#[derive(Debug)]
struct Side {
    cap: Option<f32>,
    largest: Vec<Largest>,
    /// The logit of each row's label.
    of_label: Vec<f32>,
}

impl Side {
    fn new(cap: Option<f32>, rows: usize) -> Side {
        Side {
            cap,
            largest: vec![Largest::NONE; rows],
            of_label: vec![0.0; rows],
        }
    }

    fn add(&mut self, tokens: &Range<usize>, logits: &[f32], labels: &[i32]) {
        let rows = logits.chunks_exact(tokens.len()).zip(labels);
        let own = self.largest.iter_mut().zip(&mut self.of_label);
        for ((logits, &label), (largest, of_label)) in rows.zip(own) {
            largest.add(tokens.start, logits);
            if let Ok(label) = usize::try_from(label)
                && tokens.contains(&label)
            {
                *of_label = logits[label - tokens.start];
            }
        }
    }

    fn loss(&self, row: usize, lse: f64) -> f64 {
        lse - capped(self.cap, self.of_label[row])
    }

    fn likely(&self, row: usize, lse: f64) -> [(u32, f32); LIKELY] {
        self.largest[row]
            .0
            .map(|(token, logit)| (token, (capped(self.cap, logit) - lse).exp() as f32))
    }
}

/// Predictions of both models for the rows of a batch, accumulated over chunks of their logits.
#[derive(Debug)]
pub(super) struct Predictions {
    divergence: Divergence,
    sides: [Side; 2],
    host: Vec<f32>,
}

impl Predictions {
    /// Predictions of `rows` rows before the first chunk, for heads with these soft caps.
    pub(super) fn new(device: &Device, rows: usize, caps: [Option<f32>; 2]) -> Result<Predictions> {
        Ok(Predictions {
            divergence: Divergence::new(device, rows, Mixture::default())?,
            sides: caps.map(|cap| Side::new(cap, rows)),
            host: Vec::new(),
        })
    }

    /// Accumulates a chunk's logits `[rows, tokens]` of both models.
    pub(super) fn add(
        &mut self,
        device: &Device,
        labels: &Labels,
        tokens: &Range<usize>,
        logits: [&Array; 2],
    ) -> Result<()> {
        let caps = [self.sides[0].cap, self.sides[1].cap];
        labels.add(&mut self.divergence, device, tokens, logits, caps)?;
        let len = labels.rows.len() * tokens.len();
        self.host.resize(len, 0.0);
        for (side, logits) in self.sides.iter_mut().zip(logits) {
            logits.first(len)?.read(&mut self.host)?;
            side.add(tokens, &self.host, &labels.rows);
        }
        Ok(())
    }

    /// After the last chunk: the predictions for each row with a label. `place` gives a row's window and position.
    pub(super) fn finish(
        self,
        labels: &Labels,
        place: impl Fn(usize) -> (usize, usize),
    ) -> Result<Vec<TokenComparison>> {
        let found = self.divergence.rows()?;
        let rows = found.iter().zip(&labels.rows).enumerate();
        let compared = rows.filter_map(|(row, (found, &label))| {
            let token = u32::try_from(label).ok()?;
            let (window, position) = place(row);
            let [examined, reference] = &self.sides;
            Some(TokenComparison {
                window,
                position,
                token,
                divergence: found.divergence,
                losses: [
                    examined.loss(row, found.student),
                    reference.loss(row, found.teacher),
                ],
                likely: [
                    examined.likely(row, found.student),
                    reference.likely(row, found.teacher),
                ],
            })
        });
        Ok(compared.collect())
    }
}

/// The tokens that follow the rows of a batch; negative after the last row of a window.
#[derive(Debug)]
pub(super) struct Labels {
    rows: Vec<i32>,
    targets: Targets,
}

impl Labels {
    /// Labels of consecutive windows.
    pub(super) fn new(device: &Device, windows: &[&[u32]]) -> Result<Labels> {
        let labels = windows
            .iter()
            .flat_map(|window| window[1..].iter().map(|&token| token as i32).chain([-1]));
        let rows: Vec<i32> = labels.collect();
        let targets = Targets::new(device, &rows, &vec![1.0; rows.len()])?;
        Ok(Labels { rows, targets })
    }

    /// Accumulates a chunk's logits of an examined model and of its reference.
    pub(super) fn add(
        &self,
        divergence: &mut Divergence,
        device: &Device,
        tokens: &Range<usize>,
        [examined, reference]: [&Array; 2],
        caps: [Option<f32>; 2],
    ) -> Result<()> {
        let len = self.rows.len() * tokens.len();
        let chunk = Chunk {
            first: tokens.start,
            width: tokens.len(),
            cap: caps[0],
        };
        let expected = TeacherLogits {
            values: reference.first(len)?,
            cap: caps[1],
        };
        divergence.add(device, &self.targets, chunk, examined.first(len)?, expected)
    }

    /// After the last chunk: the sum of divergences over the rows with a label.
    pub(super) fn sum(&self, divergence: &Divergence) -> Result<f64> {
        let rows = divergence.rows()?;
        let labelled = rows
            .iter()
            .zip(&self.rows)
            .filter(|(_, label)| **label >= 0);
        Ok(labelled.map(|(row, _)| row.divergence).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_equal_logits_comes_first() {
        let mut largest = Largest::NONE;
        largest.add(0, &[1.0, 3.0, 3.0]);
        largest.add(3, &[2.0, 3.0, 5.0, f32::NAN]);
        assert_eq!(largest.0, [(5, 5.0), (1, 3.0), (2, 3.0)]);
    }

    /// Compares with p = (1/2, 1/4, 1/4) of the reference and q = (1/4, 1/4, 1/2) of the examined model, in two chunks.
    #[test]
    fn predictions_by_hand() {
        let device = Device::cpu(Some(1)).unwrap();
        let window = [0u32, 2];
        let labels = Labels::new(&device, &[&window]).unwrap();
        assert_eq!(labels.rows, [2, -1]);
        let of = |values: &[f32]| {
            let mut array = Array::scratch(&device, values.len()).unwrap();
            let from = crate::ops::Slice::Host(values);
            array.all_mut().copy_from(from).unwrap();
            array
        };
        let (zero, ln2) = (0.0, 2f32.ln());
        let mut found = Predictions::new(&device, 2, [None, None]).unwrap();
        // Rows are [tokens 0 and 1], then [token 2]; the second row has no label.
        let examined = of(&[zero, zero, zero, zero]);
        let reference = of(&[ln2, zero, zero, zero]);
        found
            .add(&device, &labels, &(0..2), [&examined, &reference])
            .unwrap();
        let (examined, reference) = (of(&[ln2, zero]), of(&[zero, zero]));
        found
            .add(&device, &labels, &(2..3), [&examined, &reference])
            .unwrap();
        let tokens = found.finish(&labels, |row| (7, row)).unwrap();
        let [token] = tokens[..] else {
            panic!("{tokens:?}");
        };
        assert_eq!((token.window, token.position, token.token), (7, 0, 2));
        // 1/2 ln 2 + 1/4 ln 1 + 1/4 ln 1/2.
        assert!((token.divergence - 0.25 * 2f64.ln()).abs() < 1e-6);
        assert!((token.losses[0] - 2f64.ln()).abs() < 1e-6);
        assert!((token.losses[1] - 4f64.ln()).abs() < 1e-6);
        assert!(!token.same_top());
        let [of_examined, of_reference] = token.likely;
        assert_eq!(of_examined.map(|(t, _)| t), [2, 0, 1]);
        assert_eq!(of_reference.map(|(t, _)| t), [0, 1, 2]);
        assert!((of_examined[0].1 - 0.5).abs() < 1e-6);
        assert!((of_reference[2].1 - 0.25).abs() < 1e-6);
    }
}
