//! A teacher's predictions in the form that the pass of a student takes.

use std::fmt::Debug;
use std::ops::Range;

use crate::base::Result;
use crate::ops::training::divergence::{Mixture, TeacherLogits};

/// Predictions for the tokens of a batch.
pub(super) trait Predictions: Debug {
    /// Prepares the predictions, before the first chunk.
    fn begin(&mut self) -> Result<()>;

    /// The logits of these tokens of the vocabulary.
    fn logits(&mut self, tokens: &Range<usize>) -> Result<TeacherLogits<'_>>;
}

/// A teacher's predictions for a batch, with the weights of the loss terms.
#[derive(Debug)]
pub struct Lesson<'a> {
    pub(super) predictions: Box<dyn Predictions + 'a>,
    pub(super) mixture: Mixture,
}
