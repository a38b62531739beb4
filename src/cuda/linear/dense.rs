//! The plain kernels for GEMMs with dense weights, and for up to four rows with int8 rows.

use super::hardware::Hardware;
use super::limits::MATRICES;
use super::matrix::{Biased, MatrixShape};
use super::output::Output;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use crate::cuda::kernel::kernels;
use crate::tensor::WeightType;

kernels! {
    /// The plain kernel, and those of a single row, for output features one by one or in pairs.
    pub(super) enum DenseKernel(DenseArguments) {
        LinearDense { Rows = "linear_dense" }
        LinearRow {
            F32Row = "linear_row_f32",
            F32RowPair = "linear_row_f32_pair",
            F16Row = "linear_row_f16",
            F16RowPair = "linear_row_f16_pair",
            Bf16Row = "linear_row_bf16",
            Bf16RowPair = "linear_row_bf16_pair",
        }
        LinearInt8Row {
            Int8Row4Stages = "linear_int8_row_1_4",
            Int8Row2Stages = "linear_int8_row_1_2",
            Int8Rows4Stages = "linear_int8_row_4_4",
            Int8Rows3Stages = "linear_int8_row_4_3",
            Int8Rows2Stages = "linear_int8_row_4_2",
        }
    }
}

const WARPS: usize = 8;
/// CTAs of a multiprocessor, for a single row.
const ROW_CTAS: usize = 2;
/// Most rows that the kernel of int8 rows takes at once.
const INT8_ROWS: usize = 4;
/// Features of a tile, elements of K in a step and warps of a CTA, as in `kernels/linear/int8_row.cu`.
const TILE_FEATURES: usize = 8;
const TILE_STEP: usize = 256;
const TILE_WARPS: usize = 16;

/// A matrix of one launch with others.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct DenseMatrix {
    weight: u64,
    scales: u64,
    bias: u64,
    rows: u64,
}

impl DenseMatrix {
    /// The arguments of up to [`MATRICES`] matrices.
    pub(super) fn all(matrices: &[Biased<'_>]) -> [DenseMatrix; MATRICES] {
        std::array::from_fn(|i| match matrices.get(i) {
            None => DenseMatrix::default(),
            Some((w, bias)) => DenseMatrix {
                weight: w.address(),
                scales: w.scales_address(),
                bias: bias.map_or(0, DeviceBuffer::address),
                rows: w.rows as u64,
            },
        })
    }
}

#[repr(C)]
pub(super) struct DenseArguments {
    x: u64,
    matrices: [DenseMatrix; MATRICES],
    out: u64,
    factor: f32,
    kind: i32,
    output: i32,
    m: i32,
    k: i32,
    out_stride: i32,
    beside: i32,
}

impl DenseKernel {
    /// The launch for `m` rows with matrices of one type; `None` if no kernel takes them.
    pub(super) fn planned(
        hardware: &Hardware,
        matrices: &[MatrixShape],
        m: usize,
    ) -> Option<Planned<DenseKernel>> {
        let features: usize = matrices.iter().map(|w| w.rows).sum();
        let first = matrices.first()?;
        // The kernels of floating-point rows add in the same order; that of int8 rows does not add as the tensor cores do.
        let is_alike = !hardware.deterministic || first.storage != WeightType::Int8;
        let few = match (first.storage, m) {
            (WeightType::Int8, 1..=INT8_ROWS) if is_alike => Self::int8_rows(hardware, matrices, m),
            (WeightType::F32 | WeightType::F16 | WeightType::BF16, 1) => {
                Self::row(hardware, first, features)
            }
            _ => None,
        };
        few.or_else(|| {
            let grid = [features.div_ceil(WARPS) as u32, m.div_ceil(8) as u32, 1];
            let launch = Launch::new(grid, 256).of(DenseKernel::Rows);
            (first.storage != WeightType::Int8).then_some(launch)
        })
    }

    /// The launch for up to [`INT8_ROWS`] rows times int8 rows, which have to fit shared memory: with as many stages as leave room for a CTA
    /// of another kernel on the multiprocessor, if any do.
    fn int8_rows(
        hardware: &Hardware,
        matrices: &[MatrixShape],
        m: usize,
    ) -> Option<Planned<DenseKernel>> {
        use DenseKernel::*;
        let counts = matrices.iter().map(|w| w.rows.div_ceil(TILE_FEATURES));
        let tiles: usize = counts.sum();
        let ctas = tiles.min(hardware.beside_norm(m, tiles));
        let held = if m == 1 { 1 } else { INT8_ROWS };
        let x = m * matrices[0].cols.next_multiple_of(TILE_STEP) * 2;
        let sums = (tiles.div_ceil(ctas.max(1)) + TILE_WARPS) * TILE_FEATURES * held * 4;
        let beside = hardware.least_shared(1);
        let kernels: &[(usize, DenseKernel)] = match m {
            1 => &[(4, Int8Row4Stages), (2, Int8Row2Stages)],
            _ => &[
                (4, Int8Rows4Stages),
                (3, Int8Rows3Stages),
                (2, Int8Rows2Stages),
            ],
        };
        let with_shared = |&(stages, kernel): &(usize, DenseKernel)| {
            let ring = TILE_WARPS * stages * TILE_FEATURES * TILE_STEP;
            ((ring + x + sums).max(beside), kernel)
        };
        let mut all = kernels.iter().map(with_shared);
        let fits = |&(shared, _): &(usize, DenseKernel)| shared + beside <= hardware.shared_limit;
        let (shared, kernel) = all.clone().find(fits).or_else(|| all.next_back())?;
        let launch = Launch {
            shared: u32::try_from(shared).ok()?,
            ..Launch::new([ctas as u32, 1, 1], 32 * TILE_WARPS as u32)
        };
        (shared <= hardware.shared_limit).then(|| launch.of(kernel))
    }

    /// The launch for one row times floating-point weights, which has to fit shared memory.
    fn row(
        hardware: &Hardware,
        matrix: &MatrixShape,
        features: usize,
    ) -> Option<Planned<DenseKernel>> {
        let most = ROW_CTAS * hardware.multiprocessors;
        // Pairs share what is read of the row. With fewer features they would leave warps without work.
        let in_pairs = features > most * WARPS;
        let (kernels, step) = match matrix.storage {
            WeightType::F32 => ([DenseKernel::F32Row, DenseKernel::F32RowPair], 256),
            WeightType::F16 => ([DenseKernel::F16Row, DenseKernel::F16RowPair], 256),
            WeightType::BF16 => ([DenseKernel::Bf16Row, DenseKernel::Bf16RowPair], 256),
            WeightType::Int8 | WeightType::Nvfp4 => return None,
        };
        let shared = matrix.cols.next_multiple_of(step) * 4;
        let of_cta = WARPS * (1 + usize::from(in_pairs));
        let launch = Launch {
            shared: u32::try_from(shared).ok()?,
            ..Launch::new([features.div_ceil(of_cta).min(most) as u32, 1, 1], 256)
        };
        (shared <= hardware.shared_limit).then(|| launch.of(kernels[usize::from(in_pairs)]))
    }
}

/// `m` rows of f16 `x`, divided by `factor`, times up to [`MATRICES`] matrices of one type, whose output features follow each other;
/// [`GemmPlan`](super::GemmPlan) checks sizes, and says whether the kernel runs beside the one before.
pub(super) fn dense(
    gpu: &Gpu,
    (planned, beside): (Planned<DenseKernel>, bool),
    matrices: &[Biased<'_>],
    x: &DeviceBuffer,
    factor: f32,
    m: usize,
    output: Output,
    out: u64,
    stride: usize,
) -> Result<()> {
    let (w, _) = matrices[0];
    let arguments = DenseArguments {
        x: x.address(),
        matrices: DenseMatrix::all(matrices),
        out,
        factor,
        kind: match w.storage {
            WeightType::F32 => 0,
            WeightType::F16 => 1,
            WeightType::BF16 => 2,
            WeightType::Int8 => 3,
            WeightType::Nvfp4 => bail!(Internal, "the dense kernel was given an NVFP4 weight"),
        },
        output: output.plain()?,
        m: int("rows", m)?,
        k: int("K", w.cols)?,
        out_stride: int("the stride of a product", stride)?,
        beside: beside.into(),
    };
    // SAFETY: sizes were checked with the plan.
    unsafe { planned.run(gpu, &arguments) }
}
