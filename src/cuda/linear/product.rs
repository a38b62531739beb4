//! Launches planned GEMMs: several matrices at once.

use std::sync::Arc;

use super::adapted_rows::AdaptedRows;
use super::choose::{GemmKernels, GemmPart, GemmPlan, PartKernel, shapes};
use super::dense::dense;
use super::fused_norm::FusedNorm;
use super::hardware::Hardware;
use super::input::Input;
use super::int8;
use super::many::LinearScratch;
use super::matrix::Biased;
use super::output::{Layout, Output};
use super::skinny::skinny_gemm;
use super::tf32;
use super::tiles::TileKernel;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::cuda::convert;
use crate::cuda::driver::{DeviceBuffer, Gpu};

/// GEMM of `m` rows with up to four matrices that share their input. Their output features follow each other in the rows of `out`,
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
    let hardware = scratch.hardware(gpu)?;
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

/// Features of a row of outputs: those of one matrix where an activation makes one of two.
pub(super) fn output_features(matrices: &[Biased<'_>], output: Output) -> usize {
    match output.applied().is_some() {
        true => matrices[0].0.rows,
        false => matrices.iter().map(|(w, _)| w.rows).sum(),
    }
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
        let to = (out, stride);
        self.enqueue_for(gpu, input, matrices, output, to, scratch, (None, None))
    }

    /// As [`GemmPlan::enqueue`], or with `norm` as [`GemmPlan::enqueue_before_norm`], for a plan by [`GemmPlan::for_adapted_rows`]: adds the
    /// products of the rows' adapters.
    pub fn enqueue_for_adapted_rows(
        &self,
        gpu: &Arc<Gpu>,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        to: (&DeviceBuffer, usize),
        scratch: &LinearScratch,
        norm: Option<&FusedNorm<'_>>,
        adapters: &AdaptedRows<'_>,
    ) -> Result<()> {
        let with = (norm, Some(adapters));
        self.enqueue_for(gpu, input, matrices, output, to, scratch, with)
    }

    fn enqueue_for(
        &self,
        gpu: &Arc<Gpu>,
        input: Input<'_>,
        matrices: &[Biased<'_>],
        output: Output,
        (out, stride): (&DeviceBuffer, usize),
        scratch: &LinearScratch,
        (norm, adapters): (Option<&FusedNorm<'_>>, Option<&AdaptedRows<'_>>),
    ) -> Result<()> {
        self.check(input, matrices, output)?;
        if let Some(norm) = norm {
            self.fusing(norm, matrices[0].0.shape())?;
        }
        let m = self.m;
        if m == 0 {
            return Ok(());
        }
        let features = output_features(matrices, output);
        if stride < features {
            bail!(Internal, "rows of {features} features {stride} apart");
        }
        let elements = match output {
            Output::GluFragmentMajor(_) => Layout::FragmentMajor.elements(m, features),
            _ => (m - 1) * stride + features,
        };
        out.holds("a product", &[elements, output.bytes()])?;
        match &self.kernels {
            GemmKernels::Skinny(plan) => skinny_gemm(
                gpu, input, m, matrices, output, out, stride, plan, norm, adapters,
            ),
            GemmKernels::Tiled(tiling) => {
                let room = scratch.room();
                tiling.enqueue(gpu, input, m, matrices, output, out, stride, room, adapters)
            }
            GemmKernels::Parts(parts) => {
                let Input::Plain(x, factor) = input else {
                    bail!(Internal, "kernels of any type take row-major input");
                };
                let (mut at, mut matrices) = (out.address(), matrices);
                for part in parts.iter().flatten() {
                    let (of_part, rest) = matrices.split_at(part.count);
                    part.enqueue(gpu, x, factor, m, of_part, output, at, stride, scratch)?;
                    let features: usize = of_part.iter().map(|(w, _)| w.rows).sum();
                    at += (features * output.bytes()) as u64;
                    matrices = rest;
                }
                Ok(())
            }
        }
    }

    /// Refuses operands that were not planned, and biases and an input that are too small.
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
        for (w, bias) in matrices {
            if let Some(bias) = bias {
                bias.holds("a bias", &[w.rows, 4])?;
            }
        }
        input.holds(self.m, matrices[0].0.cols)
    }
}

impl GemmPart {
    /// Enqueues the part for its matrices, to the address `out`.
    fn enqueue(
        &self,
        gpu: &Arc<Gpu>,
        x: &DeviceBuffer,
        factor: f32,
        m: usize,
        matrices: &[Biased<'_>],
        output: Output,
        out: u64,
        stride: usize,
        scratch: &LinearScratch,
    ) -> Result<()> {
        match (self.kernel, matrices) {
            (PartKernel::Dense(planned), _) => {
                let planned = (planned, self.beside);
                dense(gpu, planned, matrices, x, factor, m, output, out, stride)
            }
            (PartKernel::Int8(planned), _) => {
                int8::product(gpu, planned, matrices, x, factor, m, output, out, stride)
            }
            (PartKernel::Tf32(planned), _) => {
                tf32::product(gpu, planned, matrices, x, factor, m, output, out, stride)
            }
            (PartKernel::CuBlas, &[(w, bias)]) => {
                scratch.product(gpu, w, x, factor, m, output, out, stride)?;
                let Some(bias) = bias else { return Ok(()) };
                convert::add_bias_at(gpu, out, output == Output::F16, m, w.rows, stride, bias)
            }
            (PartKernel::CuBlas, _) => bail!(Internal, "cuBLASLt takes one matrix at a time"),
        }
    }
}
