//! RMSNorm, as in [`crate::ops::norm`], with its backward pass; sums and additions of rows.

use super::super::{Device, Mixed, Slice, SliceMut};
use super::only_on_the_cpu;
use crate::base::Result;
use crate::base::error::bail;

/// Normalizes rows of `x`, as long as `weight`, to `out`.
pub fn rms_norm(
    device: &Device,
    x: Slice<'_, Mixed>,
    weight: Slice<'_>,
    eps: f32,
    out: SliceMut<'_, Mixed>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let (x, out) = (x.host()?, out.host()?);
            if x.len() != out.len() {
                bail!(Internal, "a norm of {} elements to {}", x.len(), out.len());
            }
            out.copy_from_slice(x);
            cpu.rms_norm(out, weight.host()?, eps)
        }
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// Makes `dx`, which holds the gradients of the results of [`rms_norm`], those of `x`, plus `residual` if there is one; adds to
/// `dweight`.
pub fn rms_norm_backward(
    device: &Device,
    x: Slice<'_, Mixed>,
    weight: Slice<'_>,
    eps: f32,
    dx: SliceMut<'_, Mixed>,
    residual: Option<Slice<'_, Mixed>>,
    dweight: SliceMut<'_>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let residual = residual.map(Slice::host).transpose()?;
            let (weight, dweight) = (weight.host()?, dweight.host()?);
            cpu.rms_norm_backward(x.host()?, weight, eps, dx.host()?, residual, dweight)
        }
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// `x += y`; `y` may be one row, which is added to each.
pub fn add(device: &Device, x: SliceMut<'_, Mixed>, y: Slice<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => {
            super::super::activation::add(device, SliceMut::Host(x.host()?), Slice::Host(y.host()?))
        }
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// Adds a bias to each row of `x`.
pub fn add_bias(device: &Device, x: SliceMut<'_, Mixed>, bias: Slice<'_>) -> Result<()> {
    match device {
        Device::Cpu(_) => super::super::activation::add(device, SliceMut::Host(x.host()?), bias),
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// Adds the sum of the rows of `dx` to `dbias`, the gradient of a bias.
pub fn add_bias_backward(device: &Device, dx: Slice<'_, Mixed>, dbias: SliceMut<'_>) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.column_sums(dx.host()?, dbias.host()?),
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// `x *= factor`.
pub fn scale(device: &Device, x: SliceMut<'_, Mixed>, factor: f32) -> Result<()> {
    match device {
        Device::Cpu(_) => {
            x.host()?.iter_mut().for_each(|x| *x *= factor);
            Ok(())
        }
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// `x = 0`.
pub fn clear(device: &Device, x: SliceMut<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => {
            x.host()?.fill(0.0);
            Ok(())
        }
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// Rounds f32 to `out`.
pub fn convert(device: &Device, x: Slice<'_>, out: SliceMut<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => SliceMut::<f32>::Host(out.host()?).copy_from(x),
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// `sum += x`.
pub fn accumulate(device: &Device, sum: SliceMut<'_>, x: Slice<'_, Mixed>) -> Result<()> {
    match device {
        Device::Cpu(_) => super::super::activation::add(device, sum, Slice::Host(x.host()?)),
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}
