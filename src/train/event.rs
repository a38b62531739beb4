//! Events of a run for its observer, and the result of a run.

use std::path::Path;

use serde::Serialize;

use super::curve::Curve;
use super::data::as_text;
use super::judge::{Best, Judge};
use super::row::{Losses, Row, Score};
use super::scales::ScaleChoice;
use super::trainer::Outcome;
use crate::base::Result;
use crate::base::call::Progress;

/// An event of a run.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event<'a> {
    /// A step was taken.
    Step {
        /// Its row in the loss table.
        #[serde(flatten)]
        row: &'a Row,
        /// Whether parameters were updated.
        outcome: Outcome,
        /// Total number of steps.
        steps: u64,
        /// Epochs completed so far, as a fraction.
        epoch: f64,
        /// Bytes in use, as accounted by the library.
        memory: u64,
    },
    /// The model was evaluated on a set.
    Evaluation {
        /// Number of steps before it; 0 before the first step.
        step: u64,
        /// Name of the set.
        set: &'a str,
        /// Loss by the delivered weights.
        delivered: f64,
        /// Loss by the stored weights.
        stored: f64,
        /// Divergence from the teacher by the delivered weights; `None` without a teacher.
        #[serde(skip_serializing_if = "Option::is_none")]
        divergence_delivered: Option<f64>,
        /// Divergence from the teacher by the stored weights.
        #[serde(skip_serializing_if = "Option::is_none")]
        divergence_stored: Option<f64>,
    },
    /// A prompt was continued.
    Sample {
        /// Number of steps before it; 0 before the first step.
        step: u64,
        /// The prompt.
        prompt: &'a str,
        /// The continuation.
        answer: &'a str,
    },
    /// A checkpoint was written.
    Checkpoint {
        /// Number of steps before it.
        step: u64,
        /// Its directory.
        #[serde(serialize_with = "as_text")]
        path: &'a Path,
    },
    /// Block scales were chosen again.
    Scales {
        /// The next step.
        step: u64,
        /// Losses with the old and the new scales.
        #[serde(flatten)]
        choice: ScaleChoice,
    },
    /// Something needs the user's attention.
    Warning {
        /// Number of steps before it.
        step: u64,
        /// The message, which says what to do.
        message: &'a str,
    },
}

/// A listener to a run.
pub trait Observer {
    /// Receives an event, on the run's thread.
    fn hear(&mut self, event: &Event<'_>);

    /// Receives the progress within a long step, in tokens, from time to time.
    fn within_step(&mut self, _step: u64, _progress: Progress) {}

    /// Draws the table of losses after each evaluation and at the end. A picture that cannot be written counts as a failed report, see
    /// [`Ended::failed_reports`]. Draws nothing by default.
    fn draw(&mut self, _curve: &Curve) -> Result<()> {
        Ok(())
    }
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// All steps were taken.
    Finished,
    /// [`run::Options::patience`](super::run::Options::patience) evaluations in a row did not improve on the best.
    EarlyStopped,
    /// It was stopped, and can be resumed.
    Stopped,
    /// Losses rose above those of an untrained model, or are not finite.
    Diverged,
}

/// Result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// How it ended.
    pub ending: Ending,
    /// Why training has diverged.
    pub reason: Option<String>,
    /// The step of the last checkpoint, if there is one.
    pub saved: Option<u64>,
    /// The best evaluation. Its checkpoint exists if [`run::Options::keep_best`](super::run::Options::keep_best) is set.
    pub best: Option<Best>,
    /// Reports that could not be written, pictures of the observer included. The first one is a [warning](Event::Warning) when it fails.
    pub failed_reports: u64,
    pub(super) judge: Judge,
}

impl Ended {
    /// The loss of the first set by the delivered weights, before the first step and at the end, if it has become worse. With a teacher,
    /// the loss against it at temperature 1. `delivered` is the score of the delivered file, if that is not the last evaluation.
    pub fn worse(&self, delivered: Option<Score>) -> Option<(f64, f64)> {
        self.judge.worse(delivered)
    }

    /// Scores of the first set by the delivered weights, before the first step and at the last evaluation.
    pub fn scores(&self) -> (Option<Score>, Option<Score>) {
        let of = |losses: Option<Losses>| losses.map(|l| l.score());
        (of(self.judge.start), of(self.judge.last))
    }
}
