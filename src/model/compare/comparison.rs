//! Parts and results of a comparison.

use super::predictions::TokenComparison;

/// Parts of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measures {
    /// Predictions of the two complete models: [`Comparison::tokens`].
    pub tokens: bool,
    /// [`Comparison::stream_errors`] and [`Comparison::block_errors`].
    pub streams: bool,
    /// [`Comparison::block_divergences`] and [`Comparison::tables_divergence`], which take half as many forward passes as there are
    /// blocks.
    pub blocks: bool,
}

/// Differences of a model from its reference. Parts that were not requested are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Each predicted token, in the order of the text.
    pub tokens: Vec<TokenComparison>,
    /// For each block, the relative error of the residual stream after it, with each model running on its own stream: root mean square of
    /// the difference over the root mean square of the reference's stream.
    pub stream_errors: Vec<f64>,
    /// For each block, the relative error if the blocks of both models take the reference's stream as input: the error that the block adds
    /// itself.
    pub block_errors: Vec<f64>,
    /// For each block, the mean KL(reference || mixture) in nats a token, where the mixture is the reference with this block of the
    /// examined model.
    pub block_divergences: Vec<f64>,
    /// The mean divergence of a mixture with embedding and head of the examined model, and all blocks and the last norm of the reference.
    pub tables_divergence: Option<f64>,
}
