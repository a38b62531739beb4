//! Prepares weights on a GPU from tensors in its own memory, without a copy through the host. Checks them like weights from the host.

use std::sync::Arc;

use super::types::Nvfp4Tensor;
use super::w4a4::Operand;
use crate::base::error::Result;
use crate::base::memory::{Buffer, Tag};
use crate::base::size::product;
use crate::cuda::{self, DeviceBuffer, Gpu, Matrix};
use crate::format::swizzle::ScaleLayout;
use crate::ops::linear::{Linear, check_finite};
use crate::ops::transfer::in_stream_order_and_wait;
use crate::tensor::{DType, Tensor, WeightType};

/// Prepares the NVFP4 weight `w` `[N, K]`, stored as its codes.
pub(super) fn nvfp4(gpu: &Arc<Gpu>, w: &Nvfp4Tensor) -> Result<Linear> {
    in_stream_order_and_wait(gpu, || {
        let operand = Operand::of(gpu, w)?;
        let operand = operand.on_device()?;
        cuda::wait_for_scales(gpu, &operand)?;
        Ok(Linear::on_gpu(Matrix::from_operand(&operand)?))
    })
}

/// Prepares the NVFP4 weight `w` `[N, K]`, decoded to values of `dtype`.
pub(super) fn decoded(gpu: &Arc<Gpu>, w: &Nvfp4Tensor, dtype: DType) -> Result<Linear> {
    let (rows, cols) = w.dims()?;
    in_stream_order_and_wait(gpu, || {
        let bytes = product("a weight", &[rows, cols, dtype.bytes()])?;
        let values = DeviceBuffer::uninit(gpu, Tag::DeviceWeights, bytes)?;
        let swizzled = w.layout == ScaleLayout::Swizzled;
        let operand = Operand::of(gpu, w)?;
        cuda::wait_for_scales(gpu, &operand.on_device()?)?;
        cuda::dequantize(gpu, &w.codes, &w.scales, swizzled, w.global, dtype, &values)?;
        of_values((rows, cols), dtype, values)
    })
}

/// Prepares the dense weight `w` `[N, K]`, stored in its own type.
pub(super) fn dense(gpu: &Arc<Gpu>, w: &Tensor) -> Result<Linear> {
    WeightType::dense(w.dtype())?;
    in_stream_order_and_wait(gpu, || {
        let values = cuda::contiguous(gpu, Tag::DeviceWeights, w)?;
        of_values(w.shape().matrix(), w.dtype(), values)
    })
}

/// A weight from values already in GPU memory. Fails unless they are finite.
fn of_values((rows, cols): (usize, usize), dtype: DType, values: DeviceBuffer) -> Result<Linear> {
    let matrix = Matrix::from_values(rows, cols, WeightType::dense(dtype)?, values)?;
    if !cuda::is_finite(matrix.values(), (rows, cols), dtype)? {
        find_infinite(&matrix, dtype)?;
    }
    Ok(Linear::on_gpu(matrix))
}

/// Fails with an error that names the first value that is not finite.
fn find_infinite(matrix: &Matrix, dtype: DType) -> Result<()> {
    /// Values checked at a time.
    const AT_ONCE: usize = 1 << 20;
    let (rows, cols, element) = (matrix.rows(), matrix.cols(), dtype.bytes());
    let step = (AT_ONCE / cols).max(1);
    let mut bytes = Buffer::<u8>::zeroed(Tag::Scratch, step.min(rows) * cols * element)?;
    let mut values = Buffer::<f32>::zeroed(Tag::Scratch, step.min(rows) * cols)?;
    for first in (0..rows).step_by(step) {
        let count = step.min(rows - first) * cols;
        let (bytes, values) = (&mut bytes[..count * element], &mut values[..count]);
        matrix.values().read(first * cols * element, bytes)?;
        dtype.to_f32(bytes, values)?;
        check_finite(values, first, cols, dtype)?;
    }
    Ok(())
}
