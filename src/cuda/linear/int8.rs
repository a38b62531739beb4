//! GEMMs with int8 weights: our own kernel, and for many rows the conversions around cuBLASLt, codes to f16 before it and row scales after
//! it.

use super::dense::DenseMatrix;
use super::hardware::Hardware;
use super::limits::MATRICES;
use super::matrix::{Biased, Matrix, MatrixShape};
use super::output::Output;
use crate::base::Result;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use crate::cuda::kernel::kernels;

kernels! {
    /// The GEMM, by the rows of activations of a CTA.
    pub(super) enum Int8Product(ProductArguments) {
        LinearInt8 {
            Rows8 = "linear_int8_product_8",
            Rows16 = "linear_int8_product_16",
            Rows32 = "linear_int8_product_32",
            Rows64 = "linear_int8_product_64",
        }
    }

    /// Converts codes.
    enum ToHalves(HalvesArguments) {
        LinearInt8 { Codes = "linear_int8_to_f16" }
    }

    /// Applies row scales.
    enum ScaleProducts(ScaleArguments) {
        LinearInt8 { Rows = "linear_int8_scale" }
    }
}

const THREADS: u32 = 256;
/// Most rows of the own kernel, which reads the weight once for each 64 rows. From some 300 rows on, an f16 copy for cuBLASLt moves fewer
/// bytes.
pub(super) const PRODUCT_ROWS: usize = 256;
/// Weight rows of a CTA, elements of K in a step, and bytes of shared memory per row of activations and besides, as in the kernel.
const BLOCK_ROWS: usize = 128;
const DEPTH: usize = 64;
const STAGED: usize = 4 * (2 * DEPTH + 16);
const PLACE: usize = 24;
/// Most CTAs that share K.
const MOST_SPLIT_K: usize = 8;
/// CTAs of a multiprocessor, which together have enough loads under way.
const BLOCKS: usize = 2;
/// Least steps of a CTA: those whose codes it loads at once.
const LEAST_STEPS: usize = 4;
/// Codes per thread of the conversion.
const CODES: usize = 16;

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

#[repr(C)]
struct HalvesArguments {
    codes: u64,
    out: u64,
    pieces: u64,
}

#[repr(C)]
struct ScaleArguments {
    y: u64,
    scales: u64,
    width: i32,
    stride: i32,
}

impl Int8Product {
    /// The launch for `m` rows. Its grid has CTAs along features, along rows, and along K.
    pub(super) fn planned(
        hardware: &Hardware,
        matrices: &[MatrixShape],
        m: usize,
    ) -> Planned<Int8Product> {
        let (kernel, tokens) = match m {
            ..=8 => (Int8Product::Rows8, 8),
            9..=16 => (Int8Product::Rows16, 16),
            17..=32 => (Int8Product::Rows32, 32),
            _ => (Int8Product::Rows64, 64),
        };
        let features: usize = matrices.iter().map(|w| w.rows.div_ceil(BLOCK_ROWS)).sum();
        let rows = m.div_ceil(tokens);
        let split_k = match hardware.has_clusters() {
            true => {
                let at_once = BLOCKS * hardware.multiprocessors;
                let most = matrices[0].cols.div_ceil(DEPTH) / LEAST_STEPS;
                let tiles = if hardware.deterministic {
                    features
                } else {
                    features * rows
                };
                (at_once / tiles).clamp(1, most.clamp(1, MOST_SPLIT_K))
            }
            false => 1,
        };
        let launch = Launch {
            shared: (tokens * STAGED + PLACE) as u32,
            cluster: split_k as u32,
            ..Launch::new([features as u32, rows as u32, split_k as u32], THREADS)
        };
        launch.of(kernel)
    }
}

/// `m` rows of f16 `x`, divided by `factor`, times up to [`MATRICES`] matrices of int8 rows, whose output features follow each other;
/// [`GemmPlan`](super::GemmPlan) checks sizes.
pub(super) fn product(
    gpu: &Gpu,
    planned: Planned<Int8Product>,
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

/// Enqueues the conversion of `rows` rows of `w` from `first` on to f16 at the address `out`.
///
/// # Safety
/// `w` must be int8 and have the rows, and there must be room for them.
pub(super) unsafe fn to_halves(
    gpu: &Gpu,
    w: &Matrix,
    first: usize,
    rows: usize,
    out: u64,
) -> Result<()> {
    let pieces = rows * w.cols / CODES;
    let arguments = HalvesArguments {
        codes: w.address() + (first * w.cols) as u64,
        out,
        pieces: pieces as u64,
    };
    let grid = [
        int("a weight", pieces.div_ceil(THREADS as usize))? as u32,
        1,
        1,
    ];
    let planned = Launch::new(grid, THREADS).of(ToHalves::Codes);
    // SAFETY: the caller's promise.
    unsafe { planned.run(gpu, &arguments) }
}

/// Enqueues the scaling of a product by the row scales of `rows` rows of `w` from `first` on. The product has `m` rows of f32 at the
/// address `y`, `stride` apart.
///
/// # Safety
/// `w` must be int8 and have the rows, and `y` must hold the products.
pub(super) unsafe fn scale_products(
    gpu: &Gpu,
    w: &Matrix,
    first: usize,
    rows: usize,
    y: u64,
    m: usize,
    stride: usize,
) -> Result<()> {
    let arguments = ScaleArguments {
        y,
        scales: w.scales_address() + (first * 4) as u64,
        width: int("output features", rows)?,
        stride: int("the stride of a product", stride)?,
    };
    let grid = [(rows as u32).div_ceil(THREADS), m as u32, 1];
    let planned = Launch::new(grid, THREADS).of(ScaleProducts::Rows);
    // SAFETY: the caller's promise.
    unsafe { planned.run(gpu, &arguments) }
}
