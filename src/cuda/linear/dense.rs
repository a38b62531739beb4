//! The plain kernel for GEMMs with dense weights and row-major int8 codes.

use super::int8;
use super::matrix::Matrix;
use super::output::Output;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, int};
use crate::cuda::units::Unit;
use crate::tensor::WeightType;

/// Argument size of this file's kernel, by its name.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[("linear_dense", size_of::<DenseArguments>())];

#[repr(C)]
struct DenseArguments {
    x: u64,
    weight: u64,
    scales: u64,
    bias: u64,
    out: u64,
    factor: f32,
    kind: i32,
    output: i32,
    m: i32,
    rows: i32,
    k: i32,
    out_stride: i32,
}

/// `m` rows of f16 `x`, divided by `factor`, times `w`; [`super::linear`] checks sizes.
pub(super) fn dense(
    gpu: &Gpu,
    w: &Matrix,
    bias: Option<&DeviceBuffer>,
    x: &DeviceBuffer,
    factor: f32,
    m: usize,
    output: Output,
    out: u64,
    stride: usize,
) -> Result<()> {
    if w.storage == WeightType::Int8 && m > 1 {
        return int8::product(gpu, w, bias, x, factor, m, output, out, stride);
    }
    let arguments = DenseArguments {
        x: x.address(),
        weight: w.address(),
        scales: w.scales_address(),
        bias: bias.map_or(0, DeviceBuffer::address),
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
        rows: int("output features", w.rows)?,
        k: int("K", w.cols)?,
        out_stride: int("the stride of a product", stride)?,
    };
    let (name, tokens) = match (w.storage, m) {
        (WeightType::Int8, _) => ("linear_dense_int8_1", 1),
        (_, 1) => ("linear_dense_1", 1),
        _ => ("linear_dense", 8),
    };
    let grid = [w.rows.div_ceil(8) as u32, m.div_ceil(tokens) as u32, 1];
    // SAFETY: the struct is the kernel's; sizes were checked by `linear`.
    unsafe { Launch::new(grid, 256).run(gpu, Unit::LinearDense, name, &arguments) }
}
