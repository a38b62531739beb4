//! What becomes of a product, and how activations lie.

use super::matrix::CHUNK_K;
use crate::base::Result;
use crate::base::error::bail;

/// Rows of activations that [`Layout::Ordered`] keeps together.
pub(super) const GROUP_ROWS: usize = 8;

/// What is made of gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glu {
    /// The function of the gate.
    pub activation: Activation,
    /// What the result is divided by, a power of two: it is the largest of a model's activations, and f16 ends at 65504.
    pub divisor: u32,
}

impl Default for Glu {
    /// SwiGLU, with room for what models have.
    fn default() -> Self {
        Glu {
            activation: Activation::Silu,
            divisor: 16,
        }
    }
}

impl Glu {
    /// What kernels multiply the result by.
    pub(in crate::cuda) fn factor(self) -> f32 {
        1.0 / self.divisor as f32
    }
}

/// The function in a gated linear unit, by the number that kernels know it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu = 0,
    /// The tanh form of GELU.
    GeluTanh = 1,
}

/// How f16 activations `[m, k]` lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row after row.
    Rows,
    /// In the order in which tensor cores take them, which `kernels/format/ordered.cuh` has.
    Ordered,
}

impl Layout {
    /// Elements of memory.
    pub const fn elements(self, m: usize, k: usize) -> usize {
        match self {
            Layout::Rows => m * k,
            Layout::Ordered => m.next_multiple_of(GROUP_ROWS) * k.next_multiple_of(CHUNK_K),
        }
    }

    /// What applies a gated activation and leaves its result like this.
    pub const fn glu(self, glu: Glu) -> Output {
        match self {
            Layout::Rows => Output::Glu(glu),
            Layout::Ordered => Output::GluOrdered(glu),
        }
    }
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Stored as f32.
    F32,
    /// Stored as f16.
    F16,
    /// Added to f32.
    Add,
    /// The activation of the first matrix's times the second's, as f16, divided.
    Glu(Glu),
    /// The same as [`Layout::Ordered`], of ordered activations or by the wide kernel.
    GluOrdered(Glu),
}

impl Output {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Output::F32 | Output::Add => 4,
            Output::F16 | Output::Glu(_) | Output::GluOrdered(_) => 2,
        }
    }

    /// How it lies.
    pub(super) const fn layout(self) -> Layout {
        match self {
            Output::GluOrdered(_) => Layout::Ordered,
            Output::F32 | Output::F16 | Output::Add | Output::Glu(_) => Layout::Rows,
        }
    }

    /// The gated activation that it applies, if it does.
    pub(super) const fn applied(self) -> Option<Glu> {
        match self {
            Output::Glu(glu) | Output::GluOrdered(glu) => Some(glu),
            Output::F32 | Output::F16 | Output::Add => None,
        }
    }

    /// The number by which kernels that apply nothing know it.
    pub(super) fn plain(self) -> Result<i32> {
        match self {
            Output::F32 => Ok(0),
            Output::F16 => Ok(1),
            Output::Add => Ok(2),
            Output::Glu(_) | Output::GluOrdered(_) => {
                bail!(Internal, "only fused kernels apply gated activations")
            }
        }
    }
}
