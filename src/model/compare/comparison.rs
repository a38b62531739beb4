//! Parts and results of a comparison.

use super::predictions::TokenComparison;

/// Parts of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measures {
    /// Predictions of the two models as they are: [`Comparison::tokens`].
    pub tokens: bool,
    /// [`Comparison::stream_errors`] and [`Comparison::block_errors`].
    pub streams: bool,
    /// [`Comparison::block_divergences`] and [`Comparison::tables_divergence`], which take half as many forward passes as there are
    /// blocks.
    pub blocks: bool,
}

/// Differences of a model from its reference. Parts that were not asked for are empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Comparison {
    /// Each predicted token, in the order of the text.
    pub tokens: Vec<TokenComparison>,
    /// For each block, the relative error of the residual stream after it when both models run by themselves: root mean square of the
    /// difference over that of the reference's stream.
    pub stream_errors: Vec<f64>,
    /// For each block, that error when the blocks of both models are given the reference's stream: what the block adds by itself.
    pub block_errors: Vec<f64>,
    /// For each block, the mean KL(reference || mixture) in nats a token, where the mixture is the reference with this block of the
    /// examined model.
    pub block_divergences: Vec<f64>,
    /// That mean for the mixture that has embedding and head of the examined model, and all blocks and the last norm of the reference.
    pub tables_divergence: Option<f64>,
}
