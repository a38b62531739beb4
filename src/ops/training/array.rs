//! Sums, factors and conversions of arrays.

use super::super::{Device, Mixed, Slice, SliceMut, activation};
use super::scratch;
use crate::base::Result;
use crate::cuda::training as cuda;

/// `x += y`.
pub fn add(device: &Device, x: SliceMut<'_, Mixed>, y: Slice<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => {
            activation::add(device, SliceMut::Host(x.host()?), Slice::Host(y.host()?))
        }
        Device::Cuda(_) => cuda::add(x.cuda()?, y.cuda()?),
    }
}

/// `sum += x`.
pub fn accumulate(device: &Device, sum: SliceMut<'_>, x: Slice<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => activation::add(device, sum, Slice::Host(x.host()?)),
        Device::Cuda(_) => {
            let mut wide = scratch(device, x.len())?;
            cuda::bf16_to_f32(x.cuda()?, wide.all_mut().cuda()?)?;
            activation::add(device, sum, wide.all())
        }
    }
}

/// `x *= factor`.
pub fn scale(device: &Device, x: SliceMut<'_, Mixed>, factor: f32) -> Result<()> {
    match device {
        Device::Cpu(_) => activation::scale(device, SliceMut::Host(x.host()?), factor),
        Device::Cuda(_) => cuda::scale(x.cuda()?, factor),
    }
}

/// `x = 0`.
pub fn clear(device: &Device, x: SliceMut<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => activation::fill(device, SliceMut::Host(x.host()?), 0.0),
        Device::Cuda(_) => cuda::fill(x.cuda()?, 0.0),
    }
}

/// Rounds f32 to `out`.
pub fn convert(device: &Device, x: Slice<'_>, out: SliceMut<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => SliceMut::<f32>::Host(out.host()?).copy_from(x),
        Device::Cuda(_) => cuda::f32_to_bf16(x.cuda()?, out.cuda()?),
    }
}
