//! The shape of a recurrent layer, and the size of its state.

use super::{DeltaShape, MambaShape};

/// The shape of a recurrent layer of either kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecurrentShape {
    /// A gated delta net.
    GatedDelta(DeltaShape),
    /// Mamba-2.
    Mamba2(MambaShape),
}

impl RecurrentShape {
    /// Elements of the matrices of all heads.
    pub fn matrix_floats(&self) -> usize {
        match self {
            RecurrentShape::GatedDelta(shape) => shape.matrix_floats(),
            RecurrentShape::Mamba2(shape) => shape.matrix_floats(),
        }
    }

    /// Elements of the state after a token, f32: the matrices, then the last inputs of the convolution.
    pub fn state_floats(&self) -> usize {
        match self {
            RecurrentShape::GatedDelta(shape) => shape.state_floats(),
            RecurrentShape::Mamba2(shape) => shape.state_floats(),
        }
    }
}
