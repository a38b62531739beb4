//! Elementwise operations: activations with and without a gate, sums, scaling and soft caps.

use super::{Device, Slice, SliceMut};
use crate::base::error::{Result, bail};
use crate::cuda;

/// Activation function of an MLP.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// `x / (1 + e^-x)`, of SwiGLU (Shazeer, 2020).
    #[default]
    Silu,
    /// The tanh form of GELU, `x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2` (Hendrycks and Gimpel, 2016), of GeGLU.
    GeluTanh,
    /// `max(x, 0)^2` (So et al., 2021, "Primer"), of MLPs without a gate.
    ReluSquared,
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
    /// The kernels' name of this function. Fails for one that no kernel of a GPU has.
    pub(crate) fn on_gpu(self) -> Result<cuda::Activation> {
        match self {
            Activation::Silu => Ok(cuda::Activation::Silu),
            Activation::GeluTanh => Ok(cuda::Activation::GeluTanh),
            Activation::ReluSquared => {
                bail!(Unsupported, "a squared ReLU as the activation of a gate")
            }
            Activation::ClampedSwiglu { .. } => bail!(
                Unsupported,
                "a clamped SwiGLU outside of experts, for which there is no kernel on a GPU"
            ),
        }
    }

    /// The kernels' name of a gated linear unit of this function, between the projections of experts and on the unfused path.
    pub(crate) fn unit_on_gpu(self) -> Result<cuda::GatedUnit> {
        match self {
            Activation::ClampedSwiglu { alpha, limit } => {
                Ok(cuda::GatedUnit::Clamped { alpha, limit })
            }
            other => Ok(cuda::GatedUnit::Plain(other.on_gpu()?)),
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
        (Device::Cpu(_), Activation::ReluSquared) => {
            bail!(Unsupported, "a squared ReLU as the activation of a gate")
        }
        (Device::Cpu(cpu), Activation::ClampedSwiglu { alpha, limit }) => {
            cpu.clamped_swiglu(gate.host()?, up.host()?, alpha, limit)
        }
        (Device::Cuda(_), _) => cuda::glu_f32(activation.unit_on_gpu()?, gate.cuda()?, up.cuda()?),
    }
}

/// `x = act(x)`, element by element, for MLPs without a gate.
pub fn activate(device: &Device, activation: Activation, x: SliceMut<'_>) -> Result<()> {
    match (device, activation) {
        (Device::Cpu(_), Activation::ReluSquared) => {
            let square = |x: &mut f32| *x = x.max(0.0) * x.max(0.0);
            x.host()?.iter_mut().for_each(square);
            Ok(())
        }
        (Device::Cuda(_), Activation::ReluSquared) => cuda::relu_squared_f32(x.cuda()?),
        _ => bail!(
            Unsupported,
            "{activation:?} without a gate; known is a squared ReLU"
        ),
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
