//! The shape of a gated-delta-net layer, a linear attention with a recurrent state: what every kernel of it takes, on every device.

/// Heads of a layer, and its convolution. A row has the query heads, the key heads and the value heads one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Query heads, and as many key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`: value head h uses key head `h / (value_heads / key_heads)`.
    pub value_heads: usize,
    /// Elements of a query or key head.
    pub key_dim: usize,
    /// Elements of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution of each channel, the row's own included.
    pub taps: usize,
}

impl DeltaShape {
    /// Width of a row of queries, keys and values: the channels of the convolution.
    pub fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_width()
    }

    /// Width of a row of values, of gates and of results.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Floats of the matrices S of a state, `[value_heads, key_dim, value_dim]`.
    pub fn matrix_floats(&self) -> usize {
        self.value_width() * self.key_dim
    }

    /// Floats of a sequence's state: the matrices, then the convolution's inputs of the last `taps - 1` positions, the oldest first.
    pub fn state_floats(&self) -> usize {
        self.matrix_floats() + (self.taps - 1) * self.channels()
    }
}
