//! RMSNorm: `x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, 2019), accumulated in f32.

use super::{Array, Device, Slice, SliceMut};
use crate::base::error::{Result, bail};
use crate::cuda;

/// Normalizes each row of `x` in place; rows have `weight.len()` elements (the hidden size, or head_dim for q/k norm).
pub fn rms_norm_in_place(device: &Device, x: SliceMut<'_>, weight: &Array, eps: f32) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.rms_norm(x.host()?, weight.all().host()?, eps),
        Device::Cuda(_) => {
            let x = x.cuda()?;
            cuda::rms_norm_f32(x, weight.all().cuda()?, eps, x)
        }
    }
}

/// Normalizes each row of `x` into `out`.
pub fn rms_norm(
    device: &Device,
    x: Slice<'_>,
    weight: &Array,
    eps: f32,
    mut out: SliceMut<'_>,
) -> Result<()> {
    if x.len() != out.len() {
        bail!(
            InvalidArgument,
            "rms_norm: {} inputs and {} outputs must be equal in number",
            x.len(),
            out.len()
        );
    }
    if device.is_cuda() {
        return cuda::rms_norm_f32(x.cuda()?, weight.all().cuda()?, eps, out.cuda()?);
    }
    out.reborrow().copy_from(x)?;
    rms_norm_in_place(device, out, weight, eps)
}
