//! Launches planned GEMMs: up to three matrices at once.

use std::sync::Arc;

use super::choose::{GemmKernels, GemmPlan, MatrixKernel, shapes};
use super::dense::dense;
use super::hardware::Hardware;
use super::input::Input;
use super::int8;
use super::many::LinearScratch;
use super::matrix::Biased;
use super::output::{Layout, Output};
use super::skinny::skinny_gemm;
use super::tiles::TileKernel;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::convert;
use crate::cuda::driver::{DeviceBuffer, Gpu};

/// GEMM of `m` rows with up to three matrices that share their input. Their output features follow each other in the rows of `out`,
/// `stride` elements apart. Where needed, scratch memory holds an f16 copy of one weight. Plans it anew: for callers without a
/// [`GemmPlan`].
pub fn linear(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    scratch: &LinearScratch,
) -> Result<()> {
    let mut hardware = Hardware::of(gpu)?;
    hardware.cublas &= scratch.has_workspace();
    let plan = GemmPlan::choose(&hardware, m, &shapes(matrices), output, input.form())?;
    plan.enqueue(gpu, input, matrices, output, out, stride, scratch)
}

/// As [`linear`], by a tiled kernel with NVFP4 weights.
pub fn tiled(
    gpu: &Arc<Gpu>,
    kernel: TileKernel,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    scratch: &LinearScratch,
) -> Result<()> {
    let (hardware, shapes, form) = (Hardware::of(gpu)?, shapes(matrices), input.form());
    let k = shapes.first().map_or(0, |w| w.cols);
    let divides = scratch.room().bytes() >= kernel.scratch(m, k, hardware.multiprocessors);
    let plan = GemmPlan::by_tiles(&hardware, kernel, m, &shapes, output, form, divides)
        .ok_or_else(|| err!(Internal, "{kernel:?} does not take such a product"))?;
    plan.enqueue(gpu, input, matrices, output, out, stride, scratch)
}

impl GemmPlan {
    /// Enqueues the GEMM. Output features of the matrices follow each other in the rows of `out`, `stride` elements apart. Where needed,
    /// scratch memory holds an f16 copy of one weight.
    pub fn enqueue(
        &self,
        gpu: &Arc<Gpu>,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        out: &DeviceBuffer,
        stride: usize,
        scratch: &LinearScratch,
    ) -> Result<()> {
        self.check(input, matrices, output)?;
        let (m, (first, _)) = (self.m, matrices[0]);
        if m == 0 {
            return Ok(());
        }
        let features: usize = match output.applied().is_some() {
            true => first.rows,
            false => matrices.iter().map(|(w, _)| w.rows).sum(),
        };
        if stride < features {
            bail!(Internal, "rows of {features} features {stride} apart");
        }
        let elements = match output {
            Output::GluFragmentMajor(_) => Layout::FragmentMajor.elements(m, features),
            _ => (m - 1) * stride + features,
        };
        out.holds("a product", &[elements, output.bytes()])?;
        match &self.kernels {
            GemmKernels::Skinny(plan) => {
                skinny_gemm(gpu, input, m, matrices, output, out, stride, plan, None)
            }
            GemmKernels::Tiled(tiling) => {
                let room = scratch.room();
                tiling.enqueue(gpu, input, m, matrices, output, out, stride, room)
            }
            GemmKernels::Dense(planned) => {
                let Input::Plain(x, factor) = input else {
                    bail!(Internal, "the plain kernel takes row-major input");
                };
                let out = out.address();
                dense(gpu, *planned, matrices, x, factor, m, output, out, stride)
            }
            GemmKernels::Each(kernels) => {
                let kernels = kernels.iter().flatten();
                enqueue_each(
                    gpu, kernels, input, m, matrices, output, out, stride, scratch,
                )
            }
        }
    }

    /// Refuses operands that were not planned, and an input that is too small.
    pub(super) fn check(
        &self,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
    ) -> Result<()> {
        let planned = self.matrices.iter().flatten().copied();
        let shapes = matrices.iter().map(|(w, _)| w.shape());
        if !planned.eq(shapes) || input.form() != self.form || !output.is_like(self.output) {
            bail!(
                Internal,
                "a product of {:?} with {} matrices to {output:?}, planned as {self:?}",
                input.form(),
                matrices.len()
            );
        }
        input.holds(self.m, matrices[0].0.cols)
    }
}

/// A GEMM with each matrix by itself.
fn enqueue_each<'a>(
    gpu: &Arc<Gpu>,
    kernels: impl Iterator<Item = &'a MatrixKernel>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    scratch: &LinearScratch,
) -> Result<()> {
    let Input::Plain(x, factor) = input else {
        bail!(Internal, "kernels of each matrix take row-major input");
    };
    let mut at = out.address();
    for (kernel, (w, bias)) in kernels.zip(matrices) {
        match *kernel {
            MatrixKernel::Dense(planned) => {
                let one = &[(*w, *bias)];
                dense(gpu, planned, one, x, factor, m, output, at, stride)?;
            }
            MatrixKernel::Int8(planned) => {
                int8::product(gpu, planned, w, *bias, x, factor, m, output, at, stride)?;
            }
            MatrixKernel::CuBlas => {
                scratch.product(gpu, w, x, factor, m, output, at, stride)?;
                if let Some(bias) = bias {
                    convert::add_bias_at(gpu, at, output == Output::F16, m, w.rows, stride, bias)?;
                }
            }
        }
        at += (w.rows * output.bytes()) as u64;
    }
    Ok(())
}
