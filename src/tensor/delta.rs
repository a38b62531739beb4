//! The shape of a gated delta net: what every kernel of it takes, on every device.

/// Heads of a gated delta net (Yang et al. 2024, "Gated Delta Networks"). Value head `h` uses key head `h / (value_heads / key_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys; divides `value_heads`.
    pub key_heads: usize,
    /// Heads of values.
    pub value_heads: usize,
    /// Elements of a query, and of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Positions that the convolution of queries, keys and values sees, its own included.
    pub taps: usize,
}

impl DeltaShape {
    /// Elements of a row of queries, and of keys.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Elements of a row of values.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Elements of a row of queries, keys and values, in this order: the channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Elements of the matrices, `[value_heads, key_dim, value_dim]`.
    pub fn matrix_floats(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// Elements of the state after a token, f32: the matrices, and the inputs of the convolution at the last `taps - 1` positions, oldest
    /// first, `[taps - 1, channels]`.
    pub fn state_floats(&self) -> usize {
        self.matrix_floats() + (self.taps - 1) * self.channels()
    }
}
