//! Quantize, dequantize and the W4A4 product on host memory; and quantize, dequantize and the order of scales on tensors in
//! the memory of a GPU.

use std::sync::Arc;

use super::linear::{Activations, Linear, linear};
use super::tensors::Nvfp4Tensor;
use super::transfer::{in_order, in_order_and_wait};
use super::{Device, Slice, SliceMut, Workspace, scaled_mm};
use crate::base::error::{Result, bail};
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::cuda::{self, DeviceBuffer, DeviceSlice, Gpu};
use crate::format::nvfp4::{self, BLOCK, Levels, Nvfp4, QuantizeOptions};
use crate::format::swizzle::{self, ScaleLayout};
use crate::tensor::{DType, Tensor};

/// Quantizes `x` `[rows, cols]`; see [`nvfp4::quantize`].
pub fn quantize(x: &[f32], rows: usize, cols: usize, options: &QuantizeOptions) -> Result<Nvfp4> {
    nvfp4::quantize(x, rows, cols, options)
}

/// The values of `a`, `[rows, cols]`.
pub fn dequantize(a: &Nvfp4) -> Result<Vec<f32>> {
    a.dequantize()
}

/// `a` `[M, K]` times `b` `[N, K]` transposed, both NVFP4, into `out` `[M, N]`: the exact product of the decoded values but
/// for the order of summation in f32.
pub fn scaled_mm(
    device: &Device,
    a: &Nvfp4,
    b: &Nvfp4,
    out: &mut [f32],
    workspace: &mut Workspace,
) -> Result<()> {
    if a.cols != b.cols
        || a.cols == 0
        || !a.cols.is_multiple_of(BLOCK)
        || out.len() != product("output", &[a.rows, b.rows])?
    {
        bail!(
            InvalidArgument,
            "scaled_mm of [{}, {}] and [{}, {}] into {} elements: K must be equal and a positive multiple of {BLOCK}, the output M * N",
            a.rows,
            a.cols,
            b.rows,
            b.cols,
            out.len()
        );
    }
    if out.is_empty() {
        return Ok(());
    }
    if let Device::Cuda(gpu) = device {
        let operand = |x: &Nvfp4| {
            scaled_mm::Operand::upload(
                gpu,
                &x.codes,
                &x.scales,
                ScaleLayout::Linear,
                (x.rows, x.cols),
                x.global,
            )
        };
        return scaled_mm::on_gpu(gpu, &operand(a)?, &operand(b)?, DType::F32)?.read(0, out);
    }
    let (row_codes, row_scales) = (b.cols / 2, b.cols / BLOCK);
    let weight = Linear::nvfp4(
        device,
        b.rows,
        b.cols,
        b.global,
        &mut |rows, codes, scales| {
            codes.copy_from_slice(&b.codes[rows.start * row_codes..rows.end * row_codes]);
            scales.copy_from_slice(&b.scales[rows.start * row_scales..rows.end * row_scales]);
            Ok(())
        },
    )?;
    linear(
        device,
        Slice::Host(&dequantize(a)?),
        a.rows,
        &mut [(&weight, SliceMut::Host(out))],
        Activations::Exact,
        workspace,
    )
}

fn buffer(gpu: &Arc<Gpu>, sizes: &[usize]) -> Result<DeviceBuffer> {
    DeviceBuffer::uninit(gpu, Tag::DeviceTensor, product("a tensor", sizes)?)
}

/// Quantizes `x` `[.., K]` in the memory of `gpu`; see [`super::tensors::quantize_into`], which has checked the results' sizes.
pub(super) fn quantize_on(
    gpu: &Arc<Gpu>,
    x: &Tensor,
    options: &QuantizeOptions,
    layout: ScaleLayout,
    codes: &mut Tensor,
    scales: &mut Tensor,
) -> Result<f32> {
    let swizzled = layout == ScaleLayout::Swizzled;
    let work = || {
        let (codes, scales) = (
            DeviceSlice::result(gpu, codes)?,
            DeviceSlice::result(gpu, scales)?,
        );
        cuda::quantize(gpu, x, options, None, swizzled, codes, scales)
    };
    match options.levels {
        // The global scale is waited for.
        Levels::Two => in_order_and_wait(gpu, work),
        Levels::Single | Levels::Legacy => in_order(gpu, work),
    }
}

/// The values of `a`, in the memory of `gpu`; see [`super::tensors::dequantize`]. With `check`, waits until its scales have been
/// looked at.
pub(super) fn dequantize_on(
    gpu: &Arc<Gpu>,
    a: &Nvfp4Tensor,
    dtype: DType,
    check: bool,
) -> Result<Tensor> {
    let (rows, cols) = a.dims()?;
    in_order(gpu, || {
        let out = buffer(gpu, &[rows, cols, dtype.bytes()])?;
        let swizzled = a.layout == ScaleLayout::Swizzled;
        let decode = || cuda::dequantize(gpu, &a.codes, &a.scales, swizzled, a.global, dtype, &out);
        match check {
            true => {
                let operand = scaled_mm::Operand::of(gpu, a)?;
                cuda::check_scales_of(gpu, "dequantize", &operand.on_device()?)?;
                decode()?;
            }
            false => decode()?,
        }
        cuda::tensor(out, &a.codes.shape().with_last(cols), dtype)
    })
}

/// Row-major scales in the memory of `gpu` in swizzled order.
pub(super) fn swizzle_on(gpu: &Arc<Gpu>, scales: &Tensor) -> Result<Tensor> {
    let (rows, blocks) = scales.shape().matrix();
    let len = swizzle::len(rows, blocks)?;
    in_order(gpu, || {
        let out = buffer(gpu, &[len])?;
        cuda::swizzle(gpu, scales, &out)?;
        cuda::tensor(out, &[len], DType::F8E4M3)
    })
}

/// Swizzled scales in the memory of `gpu` in row-major order.
pub(super) fn unswizzle_on(
    gpu: &Arc<Gpu>,
    scales: &Tensor,
    rows: usize,
    blocks: usize,
) -> Result<Tensor> {
    in_order(gpu, || {
        let out = buffer(gpu, &[rows, blocks])?;
        cuda::unswizzle(gpu, scales, rows, blocks, &out)?;
        cuda::tensor(out, &[rows, blocks], DType::F8E4M3)
    })
}
