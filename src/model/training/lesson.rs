//! A teacher's predictions, as the pass of a student takes them.

use std::fmt::Debug;
use std::ops::Range;

use crate::base::Result;
use crate::ops::training::divergence::{Mixture, TeacherLogits};

/// Predictions for the tokens of a batch.
pub(super) trait Predictions: Debug {
    /// Makes them ready, before the first chunk.
    fn begin(&mut self) -> Result<()>;

    /// The logits of these tokens of the vocabulary.
    fn logits(&mut self, tokens: &Range<usize>) -> Result<TeacherLogits<'_>>;
}

/// A teacher with a batch of tokens, and the mixture of its loss.
#[derive(Debug)]
pub struct Lesson<'a> {
    pub(super) predictions: Box<dyn Predictions + 'a>,
    pub(super) mixture: Mixture,
}
