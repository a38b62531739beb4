//! The shape of grouped-query attention: what every kernel of it takes, on every device.

/// Heads of a layer, and how scores are made of them. A query's row and a row of queries, keys and values have the heads one after the
/// other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Multiplies the product of query and key.
    pub scale: f32,
    /// Sliding window: positions that a query sees, its own included. `None` for all up to its own.
    pub window: Option<usize>,
    /// Soft cap of the scores: `cap * tanh(score / cap)`.
    pub score_cap: Option<f32>,
}

impl AttentionShape {
    /// Width of a row of queries, keys and values.
    pub fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.dim
    }

    /// Width of a row of queries, and of results.
    pub fn q_width(&self) -> usize {
        self.heads * self.dim
    }

    /// Query heads for each key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}
