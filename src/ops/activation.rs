//! Elementwise operations: gated activations, sums, scaling and soft caps.

use super::{Device, Slice, SliceMut};
use crate::base::error::{Result, bail};
use crate::cuda;

/// Activation of a gated linear unit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `x / (1 + e^-x)`, of SwiGLU (Shazeer, 2020).
    #[default]
    Silu,
    /// The tanh form of GELU, `x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2` (Hendrycks and Gimpel, 2016), of GeGLU.
    GeluTanh,
    /// SwiGLU of clamped inputs, with one added to `up`: `(up + 1) g sigmoid(alpha g)`, `g = min(gate, limit)` and `up` clamped to
    /// `-limit..=limit` (gpt-oss).
    ClampedSwiglu {
        /// Factor of the sigmoid's argument.
        alpha: f32,
        /// Limit of `gate` above, and of the magnitude of `up`.
        limit: f32,
    },
}

impl Activation {
    /// The kernels' name of this function; an error for one without kernels.
    pub(crate) fn on_gpu(self) -> Result<cuda::Activation> {
        match self {
            Activation::Silu => Ok(cuda::Activation::Silu),
            Activation::GeluTanh => Ok(cuda::Activation::GeluTanh),
            Activation::ClampedSwiglu { .. } => bail!(
                Unsupported,
                "clamped SwiGLU does not run on a GPU; load the model on the CPU"
            ),
        }
    }
}

/// `gate = act(gate) * up`, or what else the activation makes of both, element by element.
pub fn glu(
    device: &Device,
    activation: Activation,
    gate: SliceMut<'_>,
    up: Slice<'_>,
) -> Result<()> {
    match (device, activation) {
        (Device::Cpu(cpu), Activation::Silu) => cpu.swiglu(gate.host()?, up.host()?),
        (Device::Cpu(cpu), Activation::GeluTanh) => cpu.geglu(gate.host()?, up.host()?),
        (Device::Cpu(cpu), Activation::ClampedSwiglu { alpha, limit }) => {
            cpu.clamped_swiglu(gate.host()?, up.host()?, alpha, limit)
        }
        (Device::Cuda(_), _) => cuda::glu_f32(activation.on_gpu()?, gate.cuda()?, up.cuda()?),
    }
}

/// `gate = sigmoid(gate) * x`, element by element.
pub fn sigmoid_gate(device: &Device, gate: SliceMut<'_>, x: Slice<'_>) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.sigmoid_gate(gate.host()?, x.host()?),
        Device::Cuda(_) => bail!(
            Unsupported,
            "gated attention does not run on {}; load the model on the CPU",
            device.name()
        ),
    }
}

/// `x += y`, element by element; `y` may be one row that is added to each row of `x` (a bias).
pub fn add(device: &Device, x: SliceMut<'_>, y: Slice<'_>) -> Result<()> {
    if y.is_empty() || !x.len().is_multiple_of(y.len()) {
        bail!(
            InvalidArgument,
            "add: {} elements are not whole rows of {}",
            x.len(),
            y.len()
        );
    }
    if device.is_cuda() {
        return cuda::add(x.cuda()?, y.cuda()?);
    }
    let y = y.host()?;
    for row in x.host()?.chunks_exact_mut(y.len()) {
        row.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    }
    Ok(())
}

/// `x *= factor`.
pub fn scale(device: &Device, x: SliceMut<'_>, factor: f32) -> Result<()> {
    match device {
        Device::Cpu(_) => x.host()?.iter_mut().for_each(|x| *x *= factor),
        Device::Cuda(_) => cuda::scale(x.cuda()?, factor)?,
    }
    Ok(())
}

/// `x = value`.
pub fn fill(device: &Device, x: SliceMut<'_>, value: f32) -> Result<()> {
    match device {
        Device::Cpu(_) => x.host()?.fill(value),
        Device::Cuda(_) => cuda::fill(x.cuda()?, value)?,
    }
    Ok(())
}

/// `x = cap * tanh(x / cap)`.
pub fn soft_cap(device: &Device, x: SliceMut<'_>, cap: f32) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.soft_cap(x.host()?, cap),
        Device::Cuda(_) => cuda::cap_f32(x.cuda()?, cap),
    }
}
