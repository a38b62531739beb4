//! A row of the loss table.

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};

/// Columns that every table has.
const COLUMNS: usize = 11;

/// Mean cross-entropy of an evaluation, and with a teacher the mean divergence from its predictions, both in nats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Losses {
    /// By the delivered weights.
    pub delivered: f64,
    /// By the stored weights, residuals included.
    pub stored: f64,
    /// The divergence by the delivered weights; none without a teacher.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub divergence_delivered: Option<f64>,
    /// The divergence by the stored weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub divergence_stored: Option<f64>,
}

impl Losses {
    /// The means by the delivered weights.
    pub fn score(&self) -> Score {
        Score {
            loss: self.delivered,
            divergence: self.divergence_delivered,
        }
    }
}

/// Means of an evaluation by one form of the weights, in nats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The cross-entropy.
    pub loss: f64,
    /// Divergence from a teacher's predictions; `None` without a teacher.
    pub divergence: Option<f64>,
}

/// A step in the loss table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// The step, from 1; 0 for the evaluation before the first, whose row has only evaluations.
    pub step: u64,
    /// Tokens of all steps so far.
    pub tokens: u64,
    /// Mean cross-entropy of the step's targets, in nats.
    pub loss: f64,
    /// Mean cross-entropy of the first evaluation set after the step, by the delivered weights.
    pub eval_loss_delivered: Option<f64>,
    /// Mean cross-entropy of the first evaluation set, by the stored weights.
    pub eval_loss_stored: Option<f64>,
    /// The learning rate.
    pub rate: f64,
    /// Norm of the gradients before clipping.
    pub gradient_norm: f64,
    /// Share of trained weights whose stored code changed.
    pub changed: f64,
    /// Share of trained weights whose delivered code changed.
    pub changed_delivered: f64,
    /// Tokens of the step divided by its seconds.
    pub tokens_per_second: f64,
    /// Seconds of all steps so far, without evaluations, samples and checkpoints.
    pub seconds: f64,
    /// Mean divergence from a teacher's predictions on the first evaluation set, by the delivered weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_divergence_delivered: Option<f64>,
    /// Mean divergence by the stored weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_divergence_stored: Option<f64>,
    /// Losses of the other evaluation sets.
    #[serde(skip)]
    pub more: Vec<Option<Losses>>,
}

/// Additional columns of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// Evaluation sets after the first, each with two columns for its losses.
    pub(super) more: usize,
    /// Whether two columns for the divergence of each set follow, from the first set on.
    pub(super) divergence: bool,
}

impl Columns {
    fn count(self) -> usize {
        let divergences = if self.divergence { self.more + 1 } else { 0 };
        COLUMNS + 2 * (self.more + divergences)
    }
}

impl Row {
    /// The row of step 0, which has only the evaluations before the first step.
    pub(super) fn start(losses: &[Losses]) -> Row {
        let mut row = Row {
            step: 0,
            tokens: 0,
            loss: f64::NAN,
            eval_loss_delivered: None,
            eval_loss_stored: None,
            rate: f64::NAN,
            gradient_norm: f64::NAN,
            changed: f64::NAN,
            changed_delivered: f64::NAN,
            tokens_per_second: f64::NAN,
            seconds: 0.0,
            eval_divergence_delivered: None,
            eval_divergence_stored: None,
            more: Vec::new(),
        };
        row.evaluated(losses);
        row
    }

    /// Enters the losses of all evaluation sets.
    pub(super) fn evaluated(&mut self, losses: &[Losses]) {
        self.eval_loss_delivered = losses.first().map(|l| l.delivered);
        self.eval_loss_stored = losses.first().map(|l| l.stored);
        self.eval_divergence_delivered = losses.first().and_then(|l| l.divergence_delivered);
        self.eval_divergence_stored = losses.first().and_then(|l| l.divergence_stored);
        self.more = losses.iter().skip(1).map(|&l| Some(l)).collect();
    }

    /// The losses of the first evaluation set.
    pub(super) fn first_losses(&self) -> Option<Losses> {
        Some(Losses {
            delivered: self.eval_loss_delivered?,
            stored: self.eval_loss_stored?,
            divergence_delivered: self.eval_divergence_delivered,
            divergence_stored: self.eval_divergence_stored,
        })
    }

    /// Its line in the table.
    pub(super) fn line(&self, columns: Columns) -> String {
        let optional = |value: Option<f64>| value.map_or(String::new(), |v| v.to_string());
        // A step has numbers, even if NaN; row 0 has none.
        let number = |value: f64| match self.step {
            0 => String::new(),
            _ => value.to_string(),
        };
        let speed = match self.step {
            0 => String::new(),
            _ => format!("{:.1}", self.tokens_per_second),
        };
        let mut line = format!(
            "{},{},{},{},{},{},{},{},{},{speed},{:.3}",
            self.step,
            self.tokens,
            number(self.loss),
            optional(self.eval_loss_delivered),
            optional(self.eval_loss_stored),
            number(self.rate),
            number(self.gradient_norm),
            number(self.changed),
            number(self.changed_delivered),
            self.seconds
        );
        let mut add = |delivered, stored| {
            let _ = write!(line, ",{},{}", optional(delivered), optional(stored));
        };
        let others = (0..columns.more).map(|i| self.more.get(i).copied().flatten());
        for losses in others.clone() {
            add(losses.map(|l| l.delivered), losses.map(|l| l.stored));
        }
        if columns.divergence {
            for losses in std::iter::once(self.first_losses()).chain(others) {
                let divergence = |of: fn(&Losses) -> Option<f64>| losses.as_ref().and_then(of);
                add(
                    divergence(|l| l.divergence_delivered),
                    divergence(|l| l.divergence_stored),
                );
            }
        }
        line
    }

    /// Parses a line; `None` if it is not a row or was cut off.
    pub(super) fn parse(line: &str, columns: Columns) -> Option<Row> {
        let more = columns.more;
        let fields: Vec<&str> = line.split(',').collect();
        let optional = |i: usize| match fields[i] {
            "" => Some(None),
            field => field.parse::<f64>().ok().map(Some),
        };
        let number = |i: usize| match fields[0] {
            "0" => Some(optional(i)?.unwrap_or(f64::NAN)),
            _ => fields[i].parse::<f64>().ok(),
        };
        if fields.len() != columns.count() {
            return None;
        }
        // Delivered and stored divergence of a set.
        let divergence = |set: usize| -> Option<[Option<f64>; 2]> {
            if !columns.divergence {
                return Some([None; 2]);
            }
            let delivered = COLUMNS + 2 * (more + set);
            Some([optional(delivered)?, optional(delivered + 1)?])
        };
        let others = (0..more).map(|set| {
            let (delivered, stored) = (COLUMNS + 2 * set, COLUMNS + 2 * set + 1);
            let losses = optional(delivered)?.zip(optional(stored)?);
            let [divergence_delivered, divergence_stored] = divergence(set + 1)?;
            Some(losses.map(|(delivered, stored)| Losses {
                delivered,
                stored,
                divergence_delivered,
                divergence_stored,
            }))
        });
        let others = others.collect::<Option<Vec<_>>>()?;
        let has_more = others.iter().any(Option::is_some);
        let [eval_divergence_delivered, eval_divergence_stored] = divergence(0)?;
        Some(Row {
            more: if has_more { others } else { Vec::new() },
            step: fields[0].parse().ok()?,
            tokens: fields[1].parse().ok()?,
            loss: number(2)?,
            eval_loss_delivered: optional(3)?,
            eval_loss_stored: optional(4)?,
            rate: number(5)?,
            gradient_norm: number(6)?,
            changed: number(7)?,
            changed_delivered: number(8)?,
            tokens_per_second: number(9)?,
            seconds: number(10)?,
            eval_divergence_delivered,
            eval_divergence_stored,
        })
    }
}

/// A row for tests, with an evaluation at every second step.
#[cfg(test)]
pub(super) fn example(step: u64) -> Row {
    Row {
        step,
        tokens: 100 * step,
        loss: 3.0 / step as f64,
        eval_loss_delivered: step.is_multiple_of(2).then_some(2.5),
        eval_loss_stored: None,
        rate: 1e-5,
        gradient_norm: 0.125,
        changed: 0.03,
        changed_delivered: 0.001,
        tokens_per_second: 1234.5,
        seconds: 0.5 * step as f64,
        eval_divergence_delivered: None,
        eval_divergence_stored: None,
        more: Vec::new(),
    }
}
