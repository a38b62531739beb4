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
use std::ops::RangeInclusive;

kernels! {
    /// The GEMM, by the rows of activations of a CTA.
    pub(super) enum Int8Product(ProductArguments) {
        LinearInt8 {
            Rows8 = "linear_int8_product_8",
            Rows16 = "linear_int8_product_16",
            Rows32 = "linear_int8_product_32",
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
/// Most rows of the own kernel, which reads the weight once for each 32 rows, all but the first time from the L2 cache. From some 300 rows on,
/// an f16 copy for cuBLASLt moves fewer bytes.
pub(super) const PRODUCT_ROWS: usize = 256;
/// Weight rows of a warp that multiplies, and how many of those a CTA may have.
const WARP_ROWS: usize = 16;
const CTA_WARPS: RangeInclusive<usize> = 4..=7;
/// Elements of K in a step, and steps in a warp's ring, as in the kernel.
const STEP: usize = 256;
const STAGES: usize = 3;
/// Shared memory for a row of activations: four turns of 64 elements and 16 bytes.
const STAGED: usize = 4 * (2 * 64 + 16);
/// Most rows of activations of a CTA. With 64, a multiprocessor has half the warps, which wait for each other.
const MOST_TOKENS: usize = 32;
/// Most CTAs that share K.
const MOST_SPLIT_K: usize = 8;
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
    /// The launch for `m` rows: of the sizes of a CTA and the divisions of K, the one with the least to read for the multiprocessor that reads
    /// most, of those that leave room for another CTA there, such as one of the next kernel, if any do.
    pub(super) fn planned(
        hardware: &Hardware,
        matrices: &[MatrixShape],
        m: usize,
    ) -> Planned<Int8Product> {
        let (kernel, tokens) = match m {
            ..=8 => (Int8Product::Rows8, 8),
            9..=16 => (Int8Product::Rows16, 16),
            _ => (Int8Product::Rows32, MOST_TOKENS),
        };
        let (rows, steps) = (m.div_ceil(tokens), matrices[0].cols.div_ceil(STEP));
        let most_split_k = match hardware.has_clusters() {
            true => steps.clamp(1, MOST_SPLIT_K),
            false => 1,
        };
        let shared_for =
            |tokens: usize, warps: usize| tokens * STAGED + warps * STAGES * WARP_ROWS * STEP;
        // Deterministic plans divide K alike for any number of rows.
        let (of_tokens, of_rows) = match hardware.deterministic {
            true => (MOST_TOKENS, 1),
            false => (tokens, rows),
        };
        let tiles = |warps: usize| -> usize {
            let each = |w: &MatrixShape| w.rows.div_ceil(warps * WARP_ROWS);
            matrices.iter().map(each).sum()
        };
        // A warp reads its rows of weights, and the CTA its activations, which come from the L2 cache twice as fast. The exchange of sums takes
        // as long as some rows of a step.
        let cost = |&(warps, split_k): &(usize, usize)| {
            let ctas = tiles(warps) * of_rows * split_k;
            let exchange = if split_k > 1 { 2 * WARP_ROWS } else { 0 };
            let step = warps * WARP_ROWS + of_tokens;
            ctas.div_ceil(hardware.multiprocessors) * (steps.div_ceil(split_k) * step + exchange)
        };
        let best = |room: usize| {
            let fit = CTA_WARPS.filter(|&warps| shared_for(of_tokens, warps) <= room);
            let sizes =
                fit.flat_map(|warps| (1..=most_split_k).map(move |split_k| (warps, split_k)));
            sizes.min_by_key(cost)
        };
        let (warps, split_k) = best(hardware.shared_limit / 2)
            .or_else(|| best(hardware.shared_limit))
            .unwrap_or((*CTA_WARPS.start(), 1));
        let grid = [tiles(warps) as u32, rows as u32, split_k as u32];
        let launch = Launch {
            shared: shared_for(tokens, warps) as u32,
            cluster: split_k as u32,
            ..Launch::new(grid, 32 * (warps as u32 + 1))
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

#[cfg(test)]
mod tests {
    use super::super::hardware::WideClusters;
    use super::*;
    use crate::tensor::WeightType;

    #[test]
    fn deterministic_plans_divide_k_alike_for_any_number_of_rows() {
        for (multiprocessors, shared_limit) in [(132, 227 << 10), (48, 99 << 10)] {
            let hardware = Hardware {
                arch: (9, 0),
                multiprocessors,
                shared_limit,
                cublas: true,
                deterministic: false,
                clusters: WideClusters::unconstrained(multiprocessors),
            };
            for (rows, cols) in [(12_352, 2560), (2048, 4096), (2560, 9728), (248_320, 2560)] {
                let matrix = MatrixShape {
                    storage: WeightType::Int8,
                    rows,
                    cols,
                };
                let split_k = |hardware: &Hardware, m: usize| {
                    let planned = Int8Product::planned(hardware, &[matrix], m);
                    assert!(planned.launch.shared as usize <= shared_limit, "{m} rows");
                    planned.launch.grid[2]
                };
                let hardware = hardware.deterministic();
                let one = split_k(&hardware, 1);
                for m in 2..=PRODUCT_ROWS {
                    assert_eq!(split_k(&hardware, m), one, "{m} rows of [{rows}, {cols}]");
                }
            }
        }
    }
}
