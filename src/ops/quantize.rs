//! Quantize, dequantize and the W4A4 product of matrices in host memory. [`super::tensors`] has the same operations for tensors of any
//! type, stride and device.

use super::linear::{Activations, Linear, linear};
use super::tensors::w4a4;
use super::{Device, Slice, SliceMut, Workspace};
use crate::base::error::{Result, bail};
use crate::base::size::product;
use crate::format::nvfp4::{self, BLOCK, Nvfp4, QuantizeOptions};
use crate::format::swizzle::ScaleLayout;
use crate::tensor::DType;

/// Quantizes `x` `[rows, cols]`; see [`nvfp4::quantize`].
pub fn quantize(x: &[f32], rows: usize, cols: usize, options: &QuantizeOptions) -> Result<Nvfp4> {
    nvfp4::quantize(x, rows, cols, options)
}

/// The values of `a`, `[rows, cols]`.
pub fn dequantize(a: &Nvfp4) -> Result<Vec<f32>> {
    a.dequantize()
}

/// `a` `[M, K]` times `b` `[N, K]` transposed, both NVFP4, into `out` `[M, N]`: the exact product of the decoded values, except for the
/// order of summation in f32.
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
            w4a4::Operand::upload(
                gpu,
                &x.codes,
                &x.scales,
                ScaleLayout::Linear,
                (x.rows, x.cols),
                x.global,
            )
        };
        return w4a4::on_gpu(gpu, &operand(a)?, &operand(b)?, DType::F32)?.read(0, out);
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
