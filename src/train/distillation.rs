//! Settings of learning from a teacher, and the comparison of both.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;
use crate::ops::training::divergence::Mixture;

/// The loss against a teacher: `(1 - label_share) temperature² KL(teacher || student) + label_share` times the
/// cross-entropy of labels, at each token that has a label.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Distillation {
    /// The teacher's [`fingerprint`](super::fingerprint); none before there is one.
    pub teacher: Option<String>,
    /// Divides the logits of both models.
    pub temperature: f64,
    /// The share of the labels' cross-entropy in the loss.
    pub label_share: f64,
}

impl Default for Distillation {
    fn default() -> Self {
        Distillation {
            teacher: None,
            temperature: 1.0,
            label_share: 0.0,
        }
    }
}

impl Distillation {
    pub(super) fn check(&self) -> Result<()> {
        if !(self.temperature > 0.0 && self.temperature.is_finite()) {
            bail!(
                InvalidArgument,
                "a temperature of {} of the teacher's predictions; it must be positive",
                self.temperature
            );
        }
        if !(0.0..1.0).contains(&self.label_share) {
            bail!(
                InvalidArgument,
                "a share of {} of labels in the loss beside a teacher; it must be at least 0, and below 1, which would leave nothing of the \
                 teacher",
                self.label_share
            );
        }
        Ok(())
    }

    /// The loss of a model that predicts each of all tokens alike, whose cross-entropy is `labels`: the highest that it may be.
    pub(super) fn uniform(&self, labels: f64) -> f64 {
        let divergence = self.temperature * self.temperature * labels;
        (1.0 - self.label_share) * divergence + self.label_share * labels
    }

    pub(super) fn mixture(&self) -> Mixture {
        Mixture {
            temperature: self.temperature as f32,
            label_share: self.label_share as f32,
        }
    }
}

/// A model's predictions, against labels and against a teacher's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Comparison {
    /// The mean cross-entropy of labels, in nats.
    pub loss: f64,
    /// The mean divergence from the teacher's predictions, in nats.
    pub divergence: f64,
}
