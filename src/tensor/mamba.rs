//! The shape of Mamba-2: what every kernel of it takes, on every device.

/// Heads of Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs"). Head `h` uses group `h / (heads / groups)` of B and C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MambaShape {
    /// Heads of x.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Groups of B and C; divides `heads`.
    pub groups: usize,
    /// Elements of B, and of C, of a group.
    pub state_size: usize,
    /// Positions that the convolution of x, B and C sees, its own included.
    pub taps: usize,
}

impl MambaShape {
    /// Elements of a row of x.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements of a row of B, and of C.
    pub fn group_width(&self) -> usize {
        self.groups * self.state_size
    }

    /// Elements of a row of x, B and C, in this order: the channels of the convolution.
    pub fn channels(&self) -> usize {
        self.width() + 2 * self.group_width()
    }

    /// Elements of the matrices, `[heads, state_size, head_dim]`.
    pub fn matrix_floats(&self) -> usize {
        self.heads * self.state_size * self.head_dim
    }

    /// Elements of the state after a token, f32: the matrices, and the inputs of the convolution at the last `taps - 1` positions, oldest
    /// first, `[taps - 1, channels]`.
    pub fn state_floats(&self) -> usize {
        self.matrix_floats() + (self.taps - 1) * self.channels()
    }
}
