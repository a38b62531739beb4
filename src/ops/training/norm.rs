//! RMSNorm, as in [`crate::ops::norm`], and biases, with their backward passes.

use super::super::{Device, Mixed, Slice, SliceMut};
use super::{gpu_mixed, scratch};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::training as cuda;

/// Normalizes rows of `x`, each as long as `weight`, into `out`.
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
        Device::Cuda(_) => cuda::rms_norm_forward(x.cuda()?, weight.cuda()?, eps, out.cuda()?),
    }
}

/// In place: `dx`, the gradient of the output of [`rms_norm`], becomes the gradient of `x`, plus `residual` if given. Adds to `dweight`.
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
        Device::Cuda(_) => {
            let mut partial = scratch(
                device,
                cuda::rms_norm_partial(x.len() / weight.len(), weight.len()),
            )?;
            let dx = dx.cuda()?;
            cuda::rms_norm_backward(&cuda::RmsNormBackward {
                x: x.cuda()?,
                weight: weight.cuda()?,
                eps,
                dy: dx,
                residual: gpu_mixed(residual)?,
                dx,
                partial: partial.all_mut().cuda()?,
                dweight: dweight.cuda()?,
            })
        }
    }
}

/// Adds a bias to each row of `x`.
pub fn add_bias(device: &Device, x: SliceMut<'_, Mixed>, bias: Slice<'_>) -> Result<()> {
    match device {
        Device::Cpu(_) => super::super::activation::add(device, SliceMut::Host(x.host()?), bias),
        Device::Cuda(_) => cuda::add_bias_rows(x.cuda()?, bias.cuda()?),
    }
}

/// Adds the sum of the rows of `dx` to `dbias`, the gradient of a bias.
pub fn add_bias_backward(device: &Device, dx: Slice<'_, Mixed>, dbias: SliceMut<'_>) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.column_sums(dx.host()?, dbias.host()?),
        Device::Cuda(_) => {
            let width = dbias.len();
            let mut partial = scratch(device, cuda::column_sums_partial(dx.len() / width, width))?;
            cuda::column_sums(dx.cuda()?, partial.all_mut().cuda()?, dbias.cuda()?)
        }
    }
}
