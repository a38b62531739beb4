//! The norms before and after an addition to the residual stream, fused into the prologue of the product that takes the row: every block
//! makes the whole row for itself.

use super::output::Output;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::DeviceBuffer;

/// The most elements of a row: each thread of a block has eight.
pub(super) const WIDTH: usize = 4096;

/// One row `norm(x + norm(y) * post) * weight`, and where `x + norm(y) * post` goes.
#[derive(Clone, Copy)]
pub struct ResidualRow<'a> {
    /// What is added, f32 `[width]`.
    pub y: &'a DeviceBuffer,
    /// The norm of what is added, f32 `[width]`.
    pub post: &'a DeviceBuffer,
    /// The residual stream, f32 `[width]`.
    pub x: &'a DeviceBuffer,
    /// The norm of the sum, f32 `[width]`.
    pub weight: &'a DeviceBuffer,
    /// The residual stream after, f32 `[width]`; not `x`, which other blocks still read.
    pub sum: &'a DeviceBuffer,
    /// Added to the mean squares.
    pub eps: f32,
}

/// The same as an argument of the skinny GEMM.
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
