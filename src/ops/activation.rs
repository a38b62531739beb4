//! SwiGLU and the residual sum.

use super::Device;
use crate::base::error::{Result, bail};

/// `gate = silu(gate) * up`, with `silu(x) = x / (1 + e^-x)`.
pub fn swiglu(device: &Device, gate: &mut [f32], up: &[f32]) -> Result<()> {
    device.host()?.swiglu(gate, up)
}

/// `x += y`, element by element; `y` may be one row that is added to each row of `x` (a bias).
pub fn add(x: &mut [f32], y: &[f32]) -> Result<()> {
    if y.is_empty() || !x.len().is_multiple_of(y.len()) {
        bail!(
            InvalidArgument,
            "add: {} elements are not whole rows of {}",
            x.len(),
            y.len()
        );
    }
    for row in x.chunks_exact_mut(y.len()) {
        row.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    }
    Ok(())
}
