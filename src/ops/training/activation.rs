//! Gated linear units over the output of a fused gate-up GEMM, `[T, 2 width]`.

use super::super::activation::Activation;
use super::super::{Device, Mixed, Slice, SliceMut};
use crate::base::error::err;
use crate::base::{Error, Result};
use crate::cpu::Cpu;
use crate::cuda::training as cuda;

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
        (Device::Cpu(_), Activation::ClampedSwiglu { .. }) => Err(without_backward()),
        (Device::Cuda(_), _) => {
            let (gate_up, dy) = (gate_up.cuda()?, dy.cuda()?);
            cuda::glu_backward(activation.on_gpu()?, gate_up, width, dy, gate_up, Some(dy))
        }
    }
}

fn without_backward() -> Error {
    err!(Unsupported, "clamped SwiGLU has no backward pass")
}
