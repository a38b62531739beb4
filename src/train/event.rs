//! Events of a run for its observer, and its result.

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
        /// Its row in the table of losses.
        #[serde(flatten)]
        row: &'a Row,
        /// Whether parameters were updated.
        outcome: Outcome,
        /// Steps in all.
        steps: u64,
        /// Epochs up to now.
        epoch: f64,
        /// Bytes in use by the library's account.
        memory: u64,
    },
    /// The model was evaluated with a set.
    Evaluation {
        /// After this step; 0 before the first.
        step: u64,
        /// The name of the set.
        set: &'a str,
        /// The loss of what is delivered.
        delivered: f64,
        /// The loss of all that is stored.
        stored: f64,
        /// The divergence from a teacher of what is delivered; none without a teacher.
        #[serde(skip_serializing_if = "Option::is_none")]
        divergence_delivered: Option<f64>,
        /// The divergence of all that is stored.
        #[serde(skip_serializing_if = "Option::is_none")]
        divergence_stored: Option<f64>,
    },
    /// A prompt was continued.
    Sample {
        /// After this step; 0 before the first.
        step: u64,
        /// The prompt.
        prompt: &'a str,
        /// The continuation.
        answer: &'a str,
    },
    /// A checkpoint was written.
    Checkpoint {
        /// After this step.
        step: u64,
        /// Where.
        #[serde(serialize_with = "as_text")]
        path: &'a Path,
    },
    /// Block scales were chosen anew.
    Scales {
        /// Before this step.
        step: u64,
        /// The losses without and with the new scales.
        #[serde(flatten)]
        choice: ScaleChoice,
    },
    /// Something should be looked at.
    Warning {
        /// After this step.
        step: u64,
        /// The message, which says what to do.
        message: &'a str,
    },
}

/// A listener to a run.
pub trait Observer {
    /// Is told what happens, on the run's thread.
    fn hear(&mut self, event: &Event<'_>);

    /// Is told how many tokens of a step are done, now and then within long ones.
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
    /// Evaluations were not the best for as many times as [`run::Options::patience`](super::run::Options::patience) says.
    EarlyStopped,
    /// It was stopped, and can be resumed.
    Stopped,
    /// Losses have risen above those of a model that knows nothing, or are no numbers.
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
    /// The best evaluation, whose checkpoint is there if [`run::Options::keep_best`](super::run::Options::keep_best) asked for it.
    pub best: Option<Best>,
    /// Reports that could not be written, pictures of the observer included. The first one is a [warning](Event::Warning) when it fails.
    pub failed_reports: u64,
    pub(super) judge: Judge,
}

impl Ended {
    /// The loss of the first set before the first step and at the end, as delivered, if it has become worse; with a teacher, the loss against
    /// it at temperature 1. `delivered` is of what was delivered, where that is not the last evaluation.
    pub fn worse(&self, delivered: Option<Score>) -> Option<(f64, f64)> {
        self.judge.worse(delivered)
    }

    /// The loss and the divergence of the first set before the first step, and after the last evaluation, as delivered.
    pub fn scores(&self) -> (Option<Score>, Option<Score>) {
        let of = |losses: Option<Losses>| losses.map(|l| l.score());
        (of(self.judge.start), of(self.judge.last))
    }
}
