//! The layouts of activations, and the epilogues of GEMMs.

use super::matrix::CHUNK_K;
use crate::base::Result;
use crate::base::error::bail;

/// Rows of a group in [`Layout::FragmentMajor`].
pub(super) const GROUP_ROWS: usize = 8;

/// A gated linear unit: `activation(gate) * up / divisor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glu {
    /// Applied to the gate.
    pub activation: Activation,
    /// A power of two that keeps the result, the largest activation of a model, within f16, whose largest value is 65504.
    pub divisor: u32,
}

impl Default for Glu {
    /// SwiGLU, with the divisor that fits the models we know.
    fn default() -> Self {
        Glu {
            activation: Activation::Silu,
            divisor: 16,
        }
    }
}

impl Glu {
    /// The factor of the result, `1 / divisor`.
    pub(in crate::cuda) fn factor(self) -> f32 {
        1.0 / self.divisor as f32
    }
}

/// The activation of a gated linear unit. Its value is the number that kernels take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu = 0,
    /// The tanh form of GELU.
    GeluTanh = 1,
}

/// The gated linear unit of experts, and of the unfused path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GatedUnit {
    /// `act(gate) * up`.
    Plain(Activation),
    /// `(up + 1) g sigmoid(alpha g)`, `g = min(gate, limit)` and `up` clamped to `-limit..=limit` (gpt-oss).
    Clamped {
        /// Factor of the sigmoid's argument.
        alpha: f32,
        /// Limit of `gate` above, and of the magnitude of `up`.
        limit: f32,
    },
}

/// [`GatedUnit`] as an argument of kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Gating {
    activation: i32,
    alpha: f32,
    limit: f32,
}

impl GatedUnit {
    pub(in crate::cuda) fn argument(self) -> Gating {
        /// The number of the clamped unit, after those of [`Activation`].
        const CLAMPED: i32 = 2;
        let (activation, alpha, limit) = match self {
            GatedUnit::Plain(activation) => (activation as i32, 0.0, 0.0),
            GatedUnit::Clamped { alpha, limit } => (CLAMPED, alpha, limit),
        };
        Gating {
            activation,
            alpha,
            limit,
        }
    }
}

/// The layout of f16 activations `[m, k]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row after row.
    RowMajor,
    /// The order in which tensor cores take their fragments, see `kernels/format/fragment_major.cuh`. Rows are padded to a multiple of 8
    /// and K to a multiple of 128.
    FragmentMajor,
}

impl Layout {
    /// Number of elements, padding included.
    pub const fn elements(self, m: usize, k: usize) -> usize {
        match self {
            Layout::RowMajor => m * k,
            Layout::FragmentMajor => m.next_multiple_of(GROUP_ROWS) * k.next_multiple_of(CHUNK_K),
        }
    }

    /// The epilogue that applies a gated activation and stores the result in this layout.
    pub const fn glu(self, glu: Glu) -> Output {
        match self {
            Layout::RowMajor => Output::Glu(glu),
            Layout::FragmentMajor => Output::GluFragmentMajor(glu),
        }
    }
}

/// The epilogue of a GEMM: what happens to its accumulators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Stored as f32.
    F32,
    /// Stored as f16.
    F16,
    /// Added to an f32 result.
    Add,
    /// The first matrix is gate and the second up: their gated linear unit is stored as f16.
    Glu(Glu),
    /// As `Glu`, but stored in [`Layout::FragmentMajor`]. Requires activations in that layout, or the wide kernel.
    GluFragmentMajor(Glu),
}

impl Output {
    pub(super) const fn bytes(self) -> usize {
        match self {
            Output::F32 | Output::Add => 4,
            Output::F16 | Output::Glu(_) | Output::GluFragmentMajor(_) => 2,
        }
    }

    /// The gated activation that it applies, if any.
    pub(super) const fn applied(self) -> Option<Glu> {
        match self {
            Output::Glu(glu) | Output::GluFragmentMajor(glu) => Some(glu),
            Output::F32 | Output::F16 | Output::Add => None,
        }
    }

    /// Whether both are the same epilogue, perhaps of different gated activations.
    pub(super) fn is_like(self, other: Output) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
    }

    /// The number that kernels without a gated activation take.
    pub(super) fn plain(self) -> Result<i32> {
        match self {
            Output::F32 => Ok(0),
            Output::F16 => Ok(1),
            Output::Add => Ok(2),
            Output::Glu(_) | Output::GluFragmentMajor(_) => {
                bail!(Internal, "only fused kernels apply gated activations")
            }
        }
    }
}
