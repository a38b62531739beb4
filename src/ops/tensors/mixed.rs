//! Converts tensors of the host program to arrays of training, and back: f32 on the CPU, bfloat16 on a GPU.

use std::sync::Arc;

use super::types::host_result;
use crate::base::error::{Result, bail};
use crate::base::memory::Tag;
use crate::cuda::{self, DeviceSlice, Gpu, training};
use crate::ops::transfer::in_stream_order;
use crate::ops::{Array, Device, Mixed, Slice};
use crate::tensor::{DType, Tensor};

/// Runs `work` with tensors of the host program; on a GPU in the order of that program's stream.
pub(in crate::ops) fn in_order<T>(device: &Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match device {
        Device::Cpu(_) => work(),
        Device::Cuda(gpu) => in_stream_order(gpu, work),
    }
}

/// The elements of a tensor on the device, row-major.
pub(in crate::ops) fn read(device: &Device, name: &str, x: &Tensor) -> Result<Array<Mixed>> {
    let len = x.shape().elements();
    match device {
        Device::Cpu(_) => {
            x.require_host().map_err(|e| e.within(name))?;
            let mut out = Array::scratch(device, len)?;
            x.rows_f32(0..x.shape().matrix().0, out.all_mut().host()?)
                .map_err(|e| e.within(name))?;
            Ok(out)
        }
        Device::Cuda(gpu) => of_gpu(gpu, name, x, len),
    }
}

fn of_gpu(gpu: &Arc<Gpu>, name: &str, x: &Tensor, len: usize) -> Result<Array<Mixed>> {
    let copy = cuda::contiguous(gpu, Tag::DeviceScratch, x).map_err(|e| e.within(name))?;
    match x.dtype() {
        DType::BF16 => Ok(Array::of_gpu(copy, len)),
        DType::F32 => {
            let mut out = Array::scratch(&Device::Cuda(gpu.clone()), len)?;
            training::f32_to_bf16((&copy).into(), out.all_mut().cuda()?)?;
            Ok(out)
        }
        other => bail!(
            Unsupported,
            "{name} is {} on a GPU; training there takes bfloat16 and float32",
            other.name()
        ),
    }
}

/// Writes elements to a contiguous floating tensor with the same number of elements.
pub(in crate::ops) fn write(
    device: &Device,
    name: &str,
    values: Slice<'_, Mixed>,
    out: &mut Tensor,
) -> Result<()> {
    if values.len() != out.shape().elements() {
        bail!(
            InvalidArgument,
            "{name} has {} elements, and goes to a tensor of shape {:?}",
            values.len(),
            out.shape().sizes()
        );
    }
    let dtype = out.dtype();
    match device {
        Device::Cpu(_) => dtype.from_f32(values.host()?, host_result(name, out)?),
        Device::Cuda(gpu) => {
            let to = DeviceSlice::result(gpu, out)?;
            match dtype {
                DType::BF16 => to.copy_from(0, &values.cuda()?, 0, to.bytes()),
                DType::F32 => training::bf16_to_f32(values.cuda()?, to),
                other => bail!(
                    Unsupported,
                    "{name} in {} on a GPU; training there gives bfloat16 and float32",
                    other.name()
                ),
            }
        }
    }
}
