//! The norms before and after an addition to the residual stream, fused into the prologue of the GEMM that takes the row. Every CTA
//! computes the whole row for itself.

use super::output::Output;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::DeviceBuffer;

/// The longest row: each thread of a CTA has eight elements.
pub(super) const WIDTH: usize = 4096;

/// One row `norm(x + norm(y) * post) * weight`; also stores the new residual stream, `x + norm(y) * post`.
#[derive(Clone, Copy)]
pub struct ResidualRow<'a> {
    /// The addend before its norm, f32 `[width]`.
    pub y: &'a DeviceBuffer,
    /// Weight of the addend's norm, f32 `[width]`.
    pub post: &'a DeviceBuffer,
    /// The residual stream before, f32 `[width]`.
    pub x: &'a DeviceBuffer,
    /// Weight of the norm of the sum, f32 `[width]`.
    pub weight: &'a DeviceBuffer,
    /// The residual stream after, f32 `[width]`. Not `x`, which other CTAs still read.
    pub sum: &'a DeviceBuffer,
    /// Added to the mean squares.
    pub eps: f32,
}

/// [`ResidualRow`] as an argument of the skinny GEMM.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ResidualArgument {
    y: u64,
    post: u64,
    x: u64,
    weight: u64,
    sum: u64,
    eps: f32,
}

impl ResidualRow<'_> {
    pub(super) fn argument(&self, m: usize, k: usize, output: Output) -> Result<ResidualArgument> {
        if m != 1 || k > WIDTH || !matches!(output, Output::F32 | Output::Glu(_)) {
            bail!(
                Internal,
                "{m} rows of {k} that are made on the way to {output:?}; it is one of up to {WIDTH}"
            );
        }
        if self.sum.address() == self.x.address() {
            bail!(
                Internal,
                "a residual stream that is read and written at once"
            );
        }
        for array in [self.y, self.post, self.x, self.weight, self.sum] {
            array.holds("a row of the residual stream", &[k, 4])?;
        }
        Ok(ResidualArgument {
            y: self.y.address(),
            post: self.post.address(),
            x: self.x.address(),
            weight: self.weight.address(),
            sum: self.sum.address(),
            eps: self.eps,
        })
    }
}
