//! RMSNorm in the prologue of the skinny GEMM of deterministic plans: every CTA normalizes all rows, with the bits of the separate kernel.
//! With more rows than a few that kernel costs less.

use super::limits::HALF_SM_ROWS;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::DeviceBuffer;

/// The longest row: a thread has a piece of each.
pub(super) const WIDTH: usize = 4096;

/// Rows before their norm.
#[derive(Clone, Copy)]
pub struct NormalizedRows<'a> {
    /// f32 `[m, width]`.
    pub x: &'a DeviceBuffer,
    /// f32 `[width]`.
    pub weight: &'a DeviceBuffer,
    /// Added to the mean square.
    pub eps: f32,
}

/// [`NormalizedRows`] as an argument of the skinny GEMM.
#[repr(C)]
#[derive(Default)]
pub(super) struct NormalizedArgument {
    x: u64,
    weight: u64,
    eps: f32,
}

impl NormalizedRows<'_> {
    pub(super) fn argument(&self, m: usize, k: usize) -> Result<NormalizedArgument> {
        if m > HALF_SM_ROWS || k > WIDTH {
            bail!(
                Internal,
                "{m} rows of {k} that a product normalizes; it takes up to {HALF_SM_ROWS} of up to {WIDTH}"
            );
        }
        self.x.holds("rows", &[m, k, 4])?;
        self.weight.holds("a norm", &[k, 4])?;
        Ok(NormalizedArgument {
            x: self.x.address(),
            weight: self.weight.address(),
            eps: self.eps,
        })
    }
}
