//! What enters a product.

use super::deferred::DeferredNorm;
use super::output::Layout;
use super::residual::ResidualRow;
use crate::base::Result;
use crate::cuda::driver::DeviceBuffer;

/// What enters a product.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// f16 `[m, k]`, and the factor that they were divided by to keep them small.
    Plain(&'a DeviceBuffer, f32),
    /// The same as [`Layout::Ordered`], for the wide kernel, or for the fused one of 5 to 16 rows.
    Ordered(&'a DeviceBuffer, f32),
    /// What a kernel has left of rows in this layout for their norm, see [`linear_add`](super::linear_add); for the fused kernel only.
    Deferred(DeferredNorm<'a>, Layout),
    /// One row that is made on the way, see [`ResidualRow::serves`]; for the fused kernel only.
    Residual(ResidualRow<'a>),
}

impl Input<'_> {
    /// How the activations lie.
    pub const fn layout(self) -> Layout {
        match self {
            Input::Plain(..) | Input::Residual(_) => Layout::Rows,
            Input::Ordered(..) => Layout::Ordered,
            Input::Deferred(_, layout) => layout,
        }
    }

    /// Refuses memory that is too small for `m` rows of `k`.
    pub(super) fn holds(self, m: usize, k: usize) -> Result<()> {
        let x = match &self {
            Input::Plain(x, _) | Input::Ordered(x, _) => x,
            Input::Deferred(norm, _) => norm.rows(),
            // The fused kernel checks what it is made of.
            Input::Residual(_) => return Ok(()),
        };
        x.holds("activations", &[self.layout().elements(m, k), 2])
    }
}

impl Layout {
    /// Such activations, and the factor that they were divided by, as they enter a product.
    pub const fn input(self, x: &DeviceBuffer, factor: f32) -> Input<'_> {
        match self {
            Layout::Rows => Input::Plain(x, factor),
            Layout::Ordered => Input::Ordered(x, factor),
        }
    }
}
