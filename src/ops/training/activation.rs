//! Gated linear units over the output of a fused gate-up GEMM, `[T, 2 width]`, and the sigmoid gate of attention.

use super::super::activation::Activation;
use super::super::{Device, Mixed, Slice, SliceMut};
use crate::base::error::{Error, Result, bail, err};
use crate::cpu::Cpu;
use crate::cuda::training as cuda;

/// The refusal of an activation that no gated unit has.
const NOT_GATED: &str = "a squared ReLU as the activation of a gate";

/// `act(gate) * up` of rows `[gate, up]`, each half `width` wide, to `y` `[T, width]`.
pub fn glu(
    device: &Device,
    activation: Activation,
    gate_up: Slice<'_, Mixed>,
    width: usize,
    y: SliceMut<'_, Mixed>,
) -> Result<()> {
    match (device, activation) {
        (Device::Cpu(cpu), Activation::Silu) => {
            cpu.glu_rows(Cpu::SILU, gate_up.host()?, width, y.host()?)
        }
        (Device::Cpu(cpu), Activation::GeluTanh) => {
            cpu.glu_rows(Cpu::GELU_TANH, gate_up.host()?, width, y.host()?)
        }
        (Device::Cpu(_), Activation::ReluSquared) => bail!(Unsupported, "{NOT_GATED}"),
        (Device::Cpu(_), Activation::ClampedSwiglu { .. }) => Err(without_backward()),
        (Device::Cuda(_), _) => {
            cuda::glu_forward(activation.on_gpu()?, gate_up.cuda()?, width, y.cuda()?)
        }
    }
}

/// In place: `gate_up` becomes its gradient, and `dy`, the gradient of the output of [`glu`], becomes the recomputed output, which the
/// weight gradient of the next GEMM needs.
pub fn glu_backward(
    device: &Device,
    activation: Activation,
    gate_up: SliceMut<'_, Mixed>,
    width: usize,
    dy: SliceMut<'_, Mixed>,
) -> Result<()> {
    match (device, activation) {
        (Device::Cpu(cpu), Activation::Silu) => {
            cpu.glu_rows_backward(Cpu::SILU, gate_up.host()?, width, dy.host()?)
        }
        (Device::Cpu(cpu), Activation::GeluTanh) => {
            cpu.glu_rows_backward(Cpu::GELU_TANH, gate_up.host()?, width, dy.host()?)
        }
        (Device::Cpu(_), Activation::ReluSquared) => bail!(Unsupported, "{NOT_GATED}"),
        (Device::Cpu(_), Activation::ClampedSwiglu { .. }) => Err(without_backward()),
        (Device::Cuda(_), _) => {
            let (gate_up, dy) = (gate_up.cuda()?, dy.cuda()?);
            cuda::glu_backward(activation.on_gpu()?, gate_up, width, dy, gate_up, Some(dy))
        }
    }
}

/// `sigmoid(gate) * x` of each element to `y`.
pub fn sigmoid_gate(
    device: &Device,
    gate: Slice<'_, Mixed>,
    x: Slice<'_, Mixed>,
    mut y: SliceMut<'_, Mixed>,
) -> Result<()> {
    y.reborrow().copy_from(gate)?;
    let (y, x) = (SliceMut::Host(y.host()?), Slice::Host(x.host()?));
    super::super::activation::sigmoid_gate(device, y, x)
}

/// In place: `dy`, the gradient of the output of [`sigmoid_gate`], becomes the gradient of `x`, and `gate` its own gradient.
pub fn sigmoid_gate_backward(
    device: &Device,
    gate: SliceMut<'_, Mixed>,
    x: Slice<'_, Mixed>,
    dy: SliceMut<'_, Mixed>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.sigmoid_gate_backward(gate.host()?, x.host()?, dy.host()?),
        Device::Cuda(_) => bail!(
            Unsupported,
            "gated attention is not trained on {}; train on the CPU",
            device.name()
        ),
    }
}

fn without_backward() -> Error {
    err!(Unsupported, "clamped SwiGLU has no backward pass")
}
