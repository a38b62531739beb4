//! Products with weights: W4A16 for NVFP4, dense for the others, and W4A8 by option.

use super::{Device, Workspace};
use crate::base::error::Result;
use crate::cpu::{Kind, Packed, ReadDense, ReadNvfp4};

/// How activations enter a product with an NVFP4 weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// As they are, in f32 (W4A16).
    #[default]
    Exact,
    /// Rounded to 8 bits with one scale for each 32 along K (W4A8). Faster for prefill, and not exact.
    Int8,
}

/// The types a dense weight may be held in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenseType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
}

/// A weight `[out features, in features]` prepared for a device. Immutable; shared freely between threads.
#[derive(Debug)]
pub struct Linear {
    weight: Weight,
}

#[derive(Debug)]
enum Weight {
    Cpu(Packed),
}

impl Linear {
    /// Prepares an NVFP4 weight whose codes and block scales `read` gives a range of rows at a time.
    pub fn nvfp4(
        device: &Device,
        rows: usize,
        cols: usize,
        global: f32,
        read: &mut ReadNvfp4,
    ) -> Result<Linear> {
        match device {
            Device::Cpu(_) => Ok(Linear {
                weight: Weight::Cpu(Packed::nvfp4(rows, cols, global, read)?),
            }),
        }
    }

    /// Prepares a dense weight whose values `read` gives a range of rows at a time.
    pub fn dense(
        device: &Device,
        rows: usize,
        cols: usize,
        dtype: DenseType,
        read: &mut ReadDense,
    ) -> Result<Linear> {
        let kind = match dtype {
            DenseType::F32 => Kind::F32,
            DenseType::F16 => Kind::F16,
            DenseType::BF16 => Kind::Bf16,
        };
        match device {
            Device::Cpu(_) => Ok(Linear {
                weight: Weight::Cpu(Packed::dense(rows, cols, kind, read)?),
            }),
        }
    }

    fn packed(&self) -> &Packed {
        match &self.weight {
            Weight::Cpu(packed) => packed,
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.packed().rows()
    }

    /// Input features, K.
    pub fn cols(&self) -> usize {
        self.packed().cols()
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> usize {
        self.packed().bytes()
    }

    /// How the values are held.
    pub fn kind(&self) -> Kind {
        self.packed().kind()
    }

    /// The exact values of one row, for an embedding look-up: `out` takes `cols` floats.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        self.packed().row(row, out)
    }
}

/// `x` `[m, K]` times each weight `[N, K]` transposed, into its output `[m, N]`, f32 accumulate. Weights that share an input
/// (q, k, v; gate, up) go together and share one pass. Each output row has the same bits whatever `m` is.
pub fn linear(
    device: &Device,
    x: &[f32],
    m: usize,
    outputs: &mut [(&Linear, &mut [f32])],
    activations: Activations,
    workspace: &mut Workspace,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let mut outputs: Vec<(&Packed, &mut [f32])> = outputs
                .iter_mut()
                .map(|(w, y)| (w.packed(), &mut **y))
                .collect();
            cpu.linear(
                x,
                m,
                &mut outputs,
                activations == Activations::Int8,
                workspace,
            )
        }
    }
}
