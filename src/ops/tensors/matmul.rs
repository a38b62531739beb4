//! Products of tensors: with a prepared weight, and of two NVFP4 tensors (W4A4).

use std::sync::Arc;

use super::chunks::{by_chunks, part, split};
use super::quantize::decode_rows;
use super::types::{
    Nvfp4Tensor, check_result, float_input, host_result, new_result, one_place, row_major,
};
use super::w4a4::{Operand, in_place, on_gpu};
use super::weight::weight;
use crate::base::error::{Result, bail};
use crate::base::memory::{Buffer, Tag};
use crate::base::size::product;
use crate::cuda::Gpu;
use crate::ops::linear::{Activations, Linear, linear as multiply, of_tensor};
use crate::ops::{Device, Slice, SliceMut, Workspace};
use crate::tensor::{DType, Tensor};

/// The values of `a` in host memory.
fn values_of(device: &Device, a: &Nvfp4Tensor) -> Result<Buffer<f32>> {
    let (rows, cols) = a.dims()?;
    let read = a.reader()?;
    let mut values = Buffer::zeroed(Tag::Scratch, product("values", &[rows, cols])?)?;
    let parts = split(&mut values, cols, cols);
    by_chunks(device, rows, cols, |i, range| {
        decode_rows(&read, a.global, range, &mut part(&parts, i))
    })?;
    drop(parts);
    Ok(values)
}

/// `x` `[.., K]` times `weight` `[N, K]` transposed: `[.., N]` in a floating `dtype`. The result is where `x` is, in host memory or in the
/// memory of the weight's GPU.
pub fn linear(
    device: &Device,
    x: &Tensor,
    weight: &Linear,
    activations: Activations,
    dtype: DType,
    workspace: &mut Workspace,
) -> Result<Tensor> {
    let (rows, cols) = float_input(x, "the input")?;
    if cols != weight.cols() {
        bail!(
            InvalidArgument,
            "the input of shape {:?} has K = {cols} and the weight [{}, {}] has K = {}; they must be equal",
            x.shape().sizes(),
            weight.rows(),
            weight.cols(),
            weight.cols()
        );
    }
    if let Some(ordinal) = x.place().cuda() {
        return match device {
            Device::Cuda(gpu) if gpu.ordinal() == ordinal => {
                of_tensor(gpu, x, weight, activations, dtype)
            }
            Device::Cuda(_) | Device::Cpu(_) => bail!(
                InvalidArgument,
                "the input is in {} and the weight is for {}; copy the input to the host or to that device, or prepare the weight for the input's",
                x.place(),
                device.name()
            ),
        };
    }
    let values = x.to_f32()?;
    let mut out = Buffer::zeroed(Tag::Scratch, product("output", &[rows, weight.rows()])?)?;
    multiply(
        device,
        Slice::Host(&values),
        rows,
        &mut [(weight, SliceMut::Host(&mut out))],
        activations,
        workspace,
    )?;
    Tensor::from_f32(&out, &x.shape().with_last(weight.rows()), dtype)
}

/// Copies an operand in host memory to a GPU.
fn upload(gpu: &Arc<Gpu>, x: &Nvfp4Tensor) -> Result<Operand<'static>> {
    Operand::upload(
        gpu,
        &row_major(&x.codes)?,
        &row_major(&x.scales)?,
        x.layout,
        x.dims()?,
        x.global,
    )
}

/// The shape of the W4A4 product of `a` and `b`, after every check on both.
pub fn product_sizes(a: &Nvfp4Tensor, b: &Nvfp4Tensor) -> Result<[usize; 2]> {
    let ((m, k), (n, k_b)) = (a.dims()?, b.dims()?);
    if k != k_b {
        bail!(
            InvalidArgument,
            "scaled_mm of [{m}, {k}] and [{n}, {k_b}]: K must be equal"
        );
    }
    one_place(&[
        ("the codes of a", &a.codes),
        ("the scales of a", &a.scales),
        ("the codes of b", &b.codes),
        ("the scales of b", &b.scales),
    ])?;
    Ok([m, n])
}

/// The W4A4 product: `a` `[M, K]` times `b` `[N, K]` transposed, both NVFP4, as `[M, N]` in a floating `dtype`. Exact on the decoded values
/// except for the order of summation in f32 and the rounding to `dtype`. The result is where the operands are.
pub fn scaled_mm(
    device: &Device,
    a: &Nvfp4Tensor,
    b: &Nvfp4Tensor,
    dtype: DType,
    workspace: &mut Workspace,
) -> Result<Tensor> {
    let sizes = product_sizes(a, b)?;
    let mut out = match a.cuda()? {
        Some(_) => new_result(device, &sizes, dtype)?,
        None => Tensor::zeros(&sizes, dtype)?,
    };
    scaled_mm_into(device, a, b, &mut out, workspace)?;
    Ok(out)
}

/// The W4A4 product into the caller's tensor, of a floating type, in the same memory as the operands. After an error its contents are
/// unspecified.
pub fn scaled_mm_into(
    device: &Device,
    a: &Nvfp4Tensor,
    b: &Nvfp4Tensor,
    out: &mut Tensor,
    workspace: &mut Workspace,
) -> Result<()> {
    let [m, n] = product_sizes(a, b)?;
    let dtype = out.dtype();
    check_result("products", out, &[m, n], dtype)?;
    if !dtype.is_float() {
        bail!(
            InvalidArgument,
            "products come as float16, float32, float64 or bfloat16, not {}",
            dtype.name()
        );
    }
    one_place(&[("the codes of a", &a.codes), ("the result", out)])?;
    if m == 0 || n == 0 {
        return Ok(());
    }
    if let Device::Cuda(gpu) = device {
        if a.cuda()?.is_some() {
            return in_place(gpu, a, b, out);
        }
        let (a, b) = (upload(gpu, a)?, upload(gpu, b)?);
        // Types that a GPU product cannot store are converted here.
        let made = match dtype {
            DType::F16 | DType::BF16 => dtype,
            _ => DType::F32,
        };
        let product = on_gpu(gpu, &a, &b, made)?;
        let out = host_result("products", out)?;
        if made == dtype {
            return product.read(0, out);
        }
        let mut values = Buffer::<f32>::zeroed(Tag::Scratch, m * n)?;
        product.read(0, &mut values)?;
        return dtype.from_f32(&values, out);
    }
    let weight = weight(device, b)?;
    let values = values_of(device, a)?;
    let out = host_result("products", out)?;
    let mut products = Buffer::<f32>::zeroed(Tag::Scratch, m * n)?;
    multiply(
        device,
        Slice::Host(&values),
        m,
        &mut [(&weight, SliceMut::Host(&mut products))],
        Activations::Exact,
        workspace,
    )?;
    dtype.from_f32(&products, out)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, random};
    use super::super::{dense_weight, dequantize, quantize};
    use super::*;
    use crate::format::nvfp4::QuantizeOptions;
    use crate::format::swizzle::ScaleLayout;

    #[test]
    fn products_agree_with_f64() {
        let (m, n, k) = (3, 20, 64);
        let d = device();
        let mut ws = Workspace::new();
        let options = QuantizeOptions::default();
        let a = quantize(
            &d,
            &random(&[m, k], 3, DType::F16),
            &options,
            ScaleLayout::Linear,
        )
        .unwrap();
        let b = quantize(
            &d,
            &random(&[n, k], 4, DType::F32),
            &options,
            ScaleLayout::Swizzled,
        )
        .unwrap();
        let (da, db) = (
            dequantize(&d, &a, DType::F32).unwrap().to_f32().unwrap(),
            dequantize(&d, &b, DType::F32).unwrap().to_f32().unwrap(),
        );
        let exact = |i: usize, j: usize| -> f64 {
            (0..k)
                .map(|c| f64::from(da[i * k + c]) * f64::from(db[j * k + c]))
                .sum()
        };
        let out = scaled_mm(&d, &a, &b, DType::F32, &mut ws).unwrap();
        assert_eq!(out.shape().sizes(), [m, n]);
        let out = out.to_f32().unwrap();
        let (mut error, mut norm) = (0.0, 0.0);
        for i in 0..m {
            for j in 0..n {
                error += (f64::from(out[i * n + j]) - exact(i, j)).powi(2);
                norm += exact(i, j).powi(2);
            }
        }
        // The design's bound for f32 accumulation.
        assert!(error.sqrt() <= 1e-6 * norm.sqrt(), "{error} {norm}");

        let dense = dequantize(&d, &b, DType::F32).unwrap();
        let x = dequantize(&d, &a, DType::F32).unwrap();
        let w = dense_weight(&d, &dense).unwrap();
        let again = linear(&d, &x, &w, Activations::Exact, DType::F32, &mut ws).unwrap();
        for (p, q) in again.to_f32().unwrap().iter().zip(&out[..]) {
            assert!((p - q).abs() <= 1e-5, "{p} {q}");
        }
    }
}
