//! The GEMM of many rows with f32 weights, as routers have them, on tensor cores.

use super::dense::DenseMatrix;
use super::hardware::Hardware;
use super::limits::MATRICES;
use super::matrix::{Biased, MatrixShape};
use super::output::Output;
use crate::base::Result;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use crate::cuda::kernel::kernels;

kernels! {
    /// The GEMM.
    pub(super) enum Tf32Product(ProductArguments) {
        LinearTf32 { Rows = "linear_tf32_product" }
    }
}

const THREADS: u32 = 256;
/// Weight rows and rows of activations of a CTA, elements of K in a step, and bytes of shared memory, as in the kernel.
const BLOCK_ROWS: usize = 64;
const BLOCK_TOKENS: usize = 64;
const DEPTH: usize = 32;
const SHARED: u32 = 53_248;
/// Most CTAs that share K.
const MOST_SPLIT_K: usize = 8;
/// CTAs of a multiprocessor.
const BLOCKS: usize = 2;
/// Least steps of a CTA, so that its first copies, which nothing hides, are a small part of it.
const LEAST_STEPS: usize = 8;

#[repr(C)]
pub(super) struct ProductArguments {
    x: u64,
    matrices: [DenseMatrix; MATRICES],
    out: u64,
    factor: f32,
    output: i32,
    m: i32,
    k: i32,
    out_stride: i32,
    split_k: i32,
}

impl Tf32Product {
    /// The launch for `m` rows. Its grid has CTAs along features, along rows, and along K.
    pub(super) fn planned(
        hardware: &Hardware,
        matrices: &[MatrixShape],
        m: usize,
    ) -> Planned<Tf32Product> {
        let features: usize = matrices.iter().map(|w| w.rows.div_ceil(BLOCK_ROWS)).sum();
        let rows = m.div_ceil(BLOCK_TOKENS);
        let split_k = match hardware.has_clusters() {
            true => {
                let at_once = BLOCKS * hardware.multiprocessors;
                let most = matrices[0].cols.div_ceil(DEPTH) / LEAST_STEPS;
                (at_once / (features * rows)).clamp(1, most.clamp(1, MOST_SPLIT_K))
            }
            false => 1,
        };
        let launch = Launch {
            shared: SHARED,
            cluster: split_k as u32,
            ..Launch::new([features as u32, rows as u32, split_k as u32], THREADS)
        };
        launch.of(Tf32Product::Rows)
    }
}

/// `m` rows of f16 `x`, divided by `factor`, times up to [`MATRICES`] f32 matrices, whose output features follow each other;
/// [`GemmPlan`](super::GemmPlan) checks sizes.
pub(super) fn product(
    gpu: &Gpu,
    planned: Planned<Tf32Product>,
    matrices: &[Biased<'_>],
    x: &DeviceBuffer,
    factor: f32,
    m: usize,
    output: Output,
    out: u64,
    stride: usize,
) -> Result<()> {
    let arguments = ProductArguments {
        x: x.address(),
        matrices: DenseMatrix::all(matrices),
        out,
        factor,
        output: output.plain()?,
        m: int("rows", m)?,
        k: int("K", matrices[0].0.cols)?,
        out_stride: int("the stride of a product", stride)?,
        split_k: planned.launch.grid[2] as i32,
    };
    // SAFETY: sizes were checked with the plan.
    unsafe { planned.run(gpu, &arguments) }
}
