//! Products with weights: W4A16 for NVFP4, dense for the others, and W4A8 by option.

use std::sync::Arc;

use super::{Device, Workspace};
use crate::base::error::{Result, bail};
use crate::cpu::{Kind, Packed, ReadDense, ReadNvfp4};
use crate::cuda::{Gpu, Matrix, Storage};
use crate::format::nvfp4;
use crate::tensor::DType;

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
    Cuda(Matrix),
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
            Device::Cuda(gpu) => Ok(Linear {
                weight: Weight::Cuda(Matrix::nvfp4(gpu, rows, cols, global, read)?),
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
            Device::Cuda(gpu) => Ok(Linear {
                weight: Weight::Cuda(dense_matrix(gpu, rows, cols, dtype, read)?),
            }),
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        match &self.weight {
            Weight::Cpu(packed) => packed.rows(),
            Weight::Cuda(matrix) => matrix.rows(),
        }
    }

    /// Input features, K.
    pub fn cols(&self) -> usize {
        match &self.weight {
            Weight::Cpu(packed) => packed.cols(),
            Weight::Cuda(matrix) => matrix.cols(),
        }
    }

    /// Bytes held on the device.
    pub fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Cpu(packed) => packed.bytes(),
            Weight::Cuda(matrix) => matrix.bytes(),
        }
    }

    /// How the values are held.
    pub fn kind(&self) -> Kind {
        match &self.weight {
            Weight::Cpu(packed) => packed.kind(),
            Weight::Cuda(matrix) => match matrix.storage() {
                Storage::Nvfp4 => Kind::Nvfp4,
                Storage::F32 => Kind::F32,
                Storage::F16 => Kind::F16,
                Storage::BF16 => Kind::Bf16,
            },
        }
    }

    /// The exact values of one row, for an embedding look-up: `out` takes `cols` floats.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match &self.weight {
            Weight::Cpu(packed) => packed.row(row, out),
            Weight::Cuda(matrix) => matrix_row(matrix, row, out),
        }
    }

    /// The matrix, of a weight on a GPU.
    pub fn matrix(&self) -> Option<&Matrix> {
        match &self.weight {
            Weight::Cpu(_) => None,
            Weight::Cuda(matrix) => Some(matrix),
        }
    }
}

/// A dense matrix on a GPU, of values rounded to nearest even where its type is narrower than the source.
fn dense_matrix(gpu: &Arc<Gpu>, rows: usize, cols: usize, dtype: DenseType, read: &mut ReadDense) -> Result<Matrix> {
    let (storage, dtype) = match dtype {
        DenseType::F32 => (Storage::F32, DType::F32),
        DenseType::F16 => (Storage::F16, DType::F16),
        DenseType::BF16 => (Storage::BF16, DType::BF16),
    };
    let mut values = Vec::new();
    Matrix::dense(gpu, rows, cols, storage, &mut |range, bytes| {
        let first = range.start * cols;
        values.resize(range.len() * cols, 0.0);
        read(range, &mut values)?;
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            bail!(CorruptFile, "the weight at row {}, column {} is {}", (first + i) / cols, (first + i) % cols, values[i]);
        }
        dtype.from_f32(&values, bytes)
    })
}

fn matrix_row(matrix: &Matrix, row: usize, out: &mut [f32]) -> Result<()> {
    if out.len() != matrix.cols() {
        bail!(InvalidArgument, "{} floats for a row of {}", out.len(), matrix.cols());
    }
    let (values, scales) = matrix.read_row(row)?;
    match matrix.storage() {
        Storage::Nvfp4 => nvfp4::dequantize(&values, &scales, matrix.global(), out),
        Storage::F32 => DType::F32.to_f32(&values, out),
        Storage::F16 => DType::F16.to_f32(&values, out),
        Storage::BF16 => DType::BF16.to_f32(&values, out),
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
    let cpu = device.host()?;
    let mut packed: Vec<(&Packed, &mut [f32])> = Vec::with_capacity(outputs.len());
    for (w, y) in outputs.iter_mut() {
        match &w.weight {
            Weight::Cpu(weight) => packed.push((weight, &mut **y)),
            Weight::Cuda(matrix) => bail!(
                InvalidArgument,
                "a weight on {:?} was given to {}; prepare it for that device",
                matrix.gpu(),
                device.name()
            ),
        }
    }
    cpu.linear(
        x,
        m,
        &mut packed,
        activations == Activations::Int8,
        workspace,
    )
}
