//! Prepares weights for products from tensors: NVFP4 and NF4 for the chosen backend, and dense ones.

use super::nf4::Nf4Tensor;
use super::prepare;
use super::quantize::decode_rows;
use super::types::{Nvfp4Tensor, float_input};
use crate::base::error::{Result, bail};
use crate::base::size::product;
use crate::ops::Device;
use crate::ops::backend::Backend;
use crate::ops::linear::Linear;
use crate::tensor::{DType, Tensor};

/// Prepares the NVFP4 weight `w` `[N, K]` for products on `device`. `w` is in host memory, or in the memory of that GPU.
pub fn weight(device: &Device, w: &Nvfp4Tensor) -> Result<Linear> {
    let (rows, cols) = w.dims()?;
    if let (Device::Cuda(gpu), Some(_)) = (device, w.cuda()?) {
        return prepare::nvfp4(gpu, w);
    }
    let read = w.reader()?;
    Linear::nvfp4(device, rows, cols, w.global, &mut |range, codes, scales| {
        read(range, codes, scales)
    })
}

/// Prepares the NVFP4 weight `w` `[N, K]` for `backend`; a backend that decodes it stores the values as `dense`.
pub fn weight_for(
    device: &Device,
    w: &Nvfp4Tensor,
    backend: Backend,
    dense: DType,
) -> Result<Linear> {
    match backend {
        Backend::Nvfp4Kernel => weight(device, w),
        Backend::DequantMatmul => {
            let (rows, cols) = w.dims()?;
            if let (Device::Cuda(gpu), Some(_)) = (device, w.cuda()?) {
                return prepare::decoded(gpu, w, dense);
            }
            let read = w.reader()?;
            Linear::dense(device, rows, cols, dense, &mut |range, values| {
                decode_rows(&read, w.global, range, values)
            })
        }
        Backend::Nf4Kernel => bail!(InvalidArgument, "{} is not for NVFP4", backend.name()),
    }
}

/// Prepares the NF4 weight `w` `[rows, cols]` for `backend`; a backend that decodes it stores the values as `dense`.
pub fn nf4_weight_for(
    device: &Device,
    w: &Nf4Tensor,
    (rows, cols): (usize, usize),
    backend: Backend,
    dense: DType,
) -> Result<Linear> {
    match backend {
        Backend::DequantMatmul => {
            let parts = w.read(product("weight", &[rows, cols])?)?;
            Linear::dense(device, rows, cols, dense, &mut |range, values| {
                parts.expand(range.start * cols, values)
            })
        }
        Backend::Nf4Kernel | Backend::Nvfp4Kernel => bail!(
            Unsupported,
            "{} cannot multiply with NF4 on {}",
            backend.name(),
            device.name()
        ),
    }
}

/// Prepares the dense weight `w` `[N, K]`, stored in its own type (float64 as float32). `w` is in host memory, or in the memory of that
/// GPU.
pub fn dense_weight(device: &Device, w: &Tensor) -> Result<Linear> {
    let (rows, cols) = float_input(w, "the weight")?;
    if let (Device::Cuda(gpu), Some(_)) = (device, w.place().cuda()) {
        return prepare::dense(gpu, w);
    }
    let dtype = match w.dtype() {
        DType::F64 => DType::F32,
        dtype => dtype,
    };
    Linear::dense(device, rows, cols, dtype, &mut |range, values| {
        w.rows_f32(range, values)
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{device, random};
    use super::super::{dequantize, dequantize_nf4, quantize, quantize_nf4};
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use crate::format::nvfp4::QuantizeOptions;
    use crate::format::swizzle::ScaleLayout;

    #[test]
    fn a_decoded_weight_has_the_values_of_its_format() {
        let (n, k) = (300, 48);
        let d = device();
        let x = random(&[n, k], 7, DType::F32);
        let options = QuantizeOptions::default();
        let q = quantize(&d, &x, &options, ScaleLayout::Swizzled).unwrap();
        let (codes, absmax) = quantize_nf4(&x, 64).unwrap();
        let nf4 = Nf4Tensor {
            codes,
            absmax,
            map: None,
            block: 64,
        };
        let dense = Backend::DequantMatmul;
        for (weight, wanted) in [
            (
                weight_for(&d, &q, dense, DType::F32).unwrap(),
                dequantize(&d, &q, DType::F32).unwrap(),
            ),
            (
                nf4_weight_for(&d, &nf4, (n, k), dense, DType::F32).unwrap(),
                dequantize_nf4(&nf4, &[n, k], DType::F32).unwrap(),
            ),
        ] {
            let wanted = wanted.to_f32().unwrap();
            let mut row = vec![0.0; k];
            for (r, wanted) in wanted.chunks_exact(k).enumerate() {
                weight.row(r, &mut row).unwrap();
                assert_eq!(row, wanted, "row {r}");
            }
        }
        let kernel = weight_for(&d, &q, Backend::Nvfp4Kernel, DType::F32).unwrap();
        assert_eq!(kernel.kind().name(), "nvfp4");
        expect_kind(
            weight_for(&d, &q, Backend::Nf4Kernel, DType::F32),
            ErrorKind::InvalidArgument,
            "nf4-kernel is not for NVFP4",
        );
        let kernel = nf4_weight_for(&d, &nf4, (n, k), Backend::Nf4Kernel, DType::F32);
        assert_eq!(kernel.unwrap_err().kind(), ErrorKind::Unsupported);
        let short = nf4_weight_for(&d, &nf4, (n - 1, k), dense, DType::F32);
        expect_kind(short, ErrorKind::InvalidArgument, "not 7200 and 225");
    }
}
