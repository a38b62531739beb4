//! Cross-entropy of a head that is computed in chunks of the vocabulary. All chunks are seen once for the loss, and once more for the
//! gradients of their logits, so that a chunk's logits are all that is ever held.

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::only_on_the_cpu;
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::training::{CrossEntropy, HeadColumns};

/// What rows should predict.
#[derive(Debug)]
pub struct Targets {
    /// The token that each row should predict; negative where none counts.
    labels: Array<i32>,
    /// What each row's loss is multiplied by.
    weights: Array,
}

impl Targets {
    /// Of rows with these labels and weights.
    pub fn new(device: &Device, labels: &[i32], weights: &[f32]) -> Result<Targets> {
        if labels.len() != weights.len() {
            bail!(
                InvalidArgument,
                "{} labels and {} weights",
                labels.len(),
                weights.len()
            );
        }
        let mut targets = Targets {
            labels: Array::scratch(device, labels.len())?,
            weights: Array::scratch(device, weights.len())?,
        };
        targets.labels.all_mut().copy_from(Slice::Host(labels))?;
        targets.weights.all_mut().copy_from(Slice::Host(weights))?;
        Ok(targets)
    }

    fn columns(&self, chunk: Chunk) -> Result<HeadColumns<'_>> {
        Ok(HeadColumns {
            first: chunk.first,
            width: chunk.width,
            labels: self.labels.all().host()?,
            cap: chunk.cap,
        })
    }
}

/// Some columns of a head.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// The token of the first.
    pub first: usize,
    /// How many there are.
    pub width: usize,
    /// Bounds logits softly: `cap * tanh(logit / cap)`.
    pub cap: Option<f32>,
}

/// The loss of rows, while chunks of their logits come by.
#[derive(Debug)]
pub struct Loss {
    rows: Vec<CrossEntropy>,
    /// The logarithm of each row's sum of exponentials.
    lse: Array,
}

impl Loss {
    /// Of `rows` rows, before the first chunk.
    pub fn new(device: &Device, rows: usize) -> Result<Loss> {
        Ok(Loss {
            rows: vec![CrossEntropy::START; rows],
            lse: Array::scratch(device, rows)?,
        })
    }

    /// Takes a chunk's logits `[T, width]` into account.
    pub fn add(
        &mut self,
        device: &Device,
        targets: &Targets,
        chunk: Chunk,
        logits: Slice<'_>,
    ) -> Result<()> {
        match device {
            Device::Cpu(cpu) => {
                cpu.cross_entropy_chunk(&targets.columns(chunk)?, logits.host()?, &mut self.rows)
            }
            Device::Cuda(_) => only_on_the_cpu(device),
        }
    }

    /// After the last chunk: the sum over rows of weight times cross-entropy.
    pub fn finish(&mut self, device: &Device, targets: &Targets) -> Result<f64> {
        match device {
            Device::Cpu(_) => {
                let (labels, weights) =
                    (targets.labels.all().host()?, targets.weights.all().host()?);
                let mut total = 0.0;
                for (((row, lse), label), weight) in self
                    .rows
                    .iter()
                    .zip(self.lse.all_mut().host()?)
                    .zip(labels)
                    .zip(weights)
                {
                    *lse = row.lse();
                    if *label >= 0 {
                        total += f64::from(*weight) * f64::from(*lse - row.target);
                    }
                }
                Ok(total)
            }
            Device::Cuda(_) => only_on_the_cpu(device),
        }
    }

    /// After [`Loss::finish`]: the gradients of a chunk's logits.
    pub fn gradients(
        &self,
        device: &Device,
        targets: &Targets,
        chunk: Chunk,
        logits: Slice<'_>,
        gradients: SliceMut<'_, Mixed>,
    ) -> Result<()> {
        match device {
            Device::Cpu(cpu) => {
                let gradients = gradients.host()?;
                gradients.copy_from_slice(logits.host()?);
                let (lse, weights) = (self.lse.all().host()?, targets.weights.all().host()?);
                cpu.cross_entropy_gradient(&targets.columns(chunk)?, gradients, lse, weights)
            }
            Device::Cuda(_) => only_on_the_cpu(device),
        }
    }
}
