//! The plain kernel for GEMMs with dense weights and row-major int8 codes.

use super::limits::MATRICES;
use super::matrix::{Biased, MatrixShape};
use super::output::Output;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use crate::cuda::kernel::kernels;
use crate::tensor::WeightType;

kernels! {
    /// The plain kernel.
    pub(super) enum DenseKernel(DenseArguments) {
        LinearDense {
            Rows = "linear_dense",
            Row = "linear_dense_1",
            Int8Row = "linear_dense_int8_1",
        }
    }
}

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
}

impl DenseKernel {
    /// The launch for `m` rows, for int8 a single one, with matrices of one type.
    pub(super) fn planned(matrices: &[MatrixShape], m: usize) -> Planned<DenseKernel> {
        let rows: usize = matrices.iter().map(|w| w.rows).sum();
        let storage = matrices.first().map_or(WeightType::F32, |w| w.storage);
        let (kernel, tokens) = match (storage, m) {
            (WeightType::Int8, _) => (DenseKernel::Int8Row, 1),
            (_, 1) => (DenseKernel::Row, 1),
            _ => (DenseKernel::Rows, 8),
        };
        let grid = [rows.div_ceil(8) as u32, m.div_ceil(tokens) as u32, 1];
        Launch::new(grid, 256).of(kernel)
    }
}

/// `m` rows of f16 `x`, divided by `factor`, times up to [`MATRICES`] matrices of one type, whose output features follow each other;
/// [`GemmPlan`](super::GemmPlan) checks sizes.
pub(super) fn dense(
    gpu: &Gpu,
    planned: Planned<DenseKernel>,
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
    };
    // SAFETY: sizes were checked with the plan.
    unsafe { planned.run(gpu, &arguments) }
}
