//! The input of a GEMM.

use super::fused_norm::FusedNorm;
use super::normalized::NormalizedRows;
use super::output::Layout;
use super::residual::ResidualRow;
use crate::base::Result;
use crate::cuda::driver::DeviceBuffer;

/// The input of a GEMM.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// f16 `[m, k]`, and the factor by which they were divided to fit f16.
    Plain(&'a DeviceBuffer, f32),
    /// As `Plain`, but in [`Layout::FragmentMajor`]: for the wide kernel, and for the skinny GEMM of 5 to 16 rows.
    FragmentMajor(&'a DeviceBuffer, f32),
    /// Rows in this layout whose RMSNorm is fused into the epilogue, as [`linear_add_norm`](super::linear_add_norm) stored them. For the
    /// skinny GEMM only.
    FusedNorm(FusedNorm<'a>, Layout),
    /// One row that the prologue of the GEMM computes. For the skinny GEMM only.
    Residual(ResidualRow<'a>),
    /// Up to four rows that every CTA of the GEMM normalizes on the way to shared memory. For the skinny GEMM of deterministic plans only.
    Normalized(NormalizedRows<'a>),
}

/// The form of an [`Input`], which the choice of a kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputForm {
    /// Activations in memory: [`Input::Plain`] or [`Input::FragmentMajor`].
    Plain(Layout),
    /// [`Input::FusedNorm`].
    FusedNorm(Layout),
    /// [`Input::Residual`].
    Residual,
    /// [`Input::Normalized`].
    Normalized,
}

impl InputForm {
    /// The layout of the activations.
    pub const fn layout(self) -> Layout {
        match self {
            InputForm::Plain(layout) | InputForm::FusedNorm(layout) => layout,
            InputForm::Residual | InputForm::Normalized => Layout::RowMajor,
        }
    }
}

impl Input<'_> {
    /// Its form.
    pub const fn form(self) -> InputForm {
        match self {
            Input::Plain(..) => InputForm::Plain(Layout::RowMajor),
            Input::FragmentMajor(..) => InputForm::Plain(Layout::FragmentMajor),
            Input::FusedNorm(_, layout) => InputForm::FusedNorm(layout),
            Input::Residual(_) => InputForm::Residual,
            Input::Normalized(_) => InputForm::Normalized,
        }
    }

    /// The layout of the activations.
    pub const fn layout(self) -> Layout {
        self.form().layout()
    }

    /// Refuses memory that is too small for `m` rows of `k`.
    pub(super) fn holds(self, m: usize, k: usize) -> Result<()> {
        let x = match &self {
            Input::Plain(x, _) | Input::FragmentMajor(x, _) => x,
            Input::FusedNorm(norm, _) => norm.rows(),
            // The skinny GEMM checks its operands.
            Input::Residual(_) | Input::Normalized(_) => return Ok(()),
        };
        x.holds("activations", &[self.layout().elements(m, k), 2])
    }
}

impl Layout {
    /// Activations in this layout, and the factor by which they were divided, as the input of a GEMM.
    pub const fn input(self, x: &DeviceBuffer, factor: f32) -> Input<'_> {
        match self {
            Layout::RowMajor => Input::Plain(x, factor),
            Layout::FragmentMajor => Input::FragmentMajor(x, factor),
        }
    }
}
