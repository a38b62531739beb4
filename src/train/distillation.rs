//! Settings of distillation from a teacher, and the comparison of both models.

use serde::{Deserialize, Serialize};

use crate::base::Result;
use crate::base::error::bail;
use crate::ops::training::divergence::Mixture;

/// The distillation loss at each token with a label: `(1 - label_share) temperature² KL(teacher || student) + label_share` times the
/// cross-entropy of the label.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Distillation {
    /// The teacher's [`fingerprint`](super::fingerprint); `None` before a teacher is set.
    pub teacher: Option<String>,
    /// Divides the logits of both models.
    pub temperature: f64,
    /// Share of the labels' cross-entropy in the loss.
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

    /// The loss of a model that predicts uniformly, whose cross-entropy is `labels`: an upper bound for a model that has not diverged.
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

/// A model's mean losses, by labels and by a teacher.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Mean cross-entropy of labels, in nats.
    pub loss: f64,
    /// Mean divergence from the teacher's predictions, in nats.
    pub divergence: f64,
}
