//! RMSNorm: `x / sqrt(mean(x^2) + eps) * weight` (Zhang and Sennrich, 2019), accumulated in f32.

use super::Device;
use crate::base::error::{Result, bail};

/// Normalizes each row of `x` in place; rows have `weight.len()` elements (the hidden size, or head_dim for q/k norm).
pub fn rms_norm_in_place(device: &Device, x: &mut [f32], weight: &[f32], eps: f32) -> Result<()> {
    device.host()?.rms_norm(x, weight, eps)
}

/// Normalizes each row of `x` into `out`.
pub fn rms_norm(
    device: &Device,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<()> {
    if x.len() != out.len() {
        bail!(
            InvalidArgument,
            "rms_norm: {} inputs and {} outputs must be equal in number",
            x.len(),
            out.len()
        );
    }
    out.copy_from_slice(x);
    rms_norm_in_place(device, out, weight, eps)
}
