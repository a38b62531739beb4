//! Cross-entropy of a head that is computed in chunks of the vocabulary. Each chunk is computed once for the loss and again for the
//! gradients of its logits, so that only one chunk's logits are held at a time.

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::scratch;
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::training::{CrossEntropy, HeadColumns};
use crate::cuda::training as cuda;

/// Labels of rows, and their weights in the loss.
#[derive(Debug)]
pub struct Targets {
    /// The label of each row; negative for a row without one.
    labels: Array<i32>,
    /// Factor of each row's loss.
    weights: Array,
}

impl Targets {
    /// Targets of rows with these labels and weights.
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

    pub(super) fn labels(&self) -> Slice<'_, i32> {
        self.labels.all()
    }

    pub(super) fn weights(&self) -> Slice<'_> {
        self.weights.all()
    }

    pub(super) fn columns(&self, chunk: Chunk) -> Result<HeadColumns<'_>> {
        Ok(HeadColumns {
            first: chunk.first,
            width: chunk.width,
            labels: self.labels.all().host()?,
            cap: chunk.cap,
        })
    }
}

/// A chunk of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// Its first token.
    pub first: usize,
    /// Number of tokens.
    pub width: usize,
    /// Soft cap of the logits: `cap * tanh(logit / cap)`.
    pub cap: Option<f32>,
}

impl Chunk {
    pub(super) fn on_gpu<'a>(&self, logits: Slice<'a>) -> Result<cuda::LogitChunk<'a>> {
        Ok(cuda::LogitChunk {
            logits: logits.cuda()?,
            first_column: self.first,
            columns: self.width,
            cap: self.cap,
        })
    }
}

/// Running state of rows on a GPU.
#[derive(Debug)]
struct OnGpu {
    largest: Array,
    sum: Array,
    target: Array,
    losses: Array,
    begun: bool,
}

/// The loss of rows, accumulated over chunks of their logits.
#[derive(Debug)]
pub struct Loss {
    /// Running state of rows on the CPU.
    rows: Vec<CrossEntropy>,
    on_gpu: Option<OnGpu>,
    /// The log-sum-exp of each row.
    lse: Array,
}

impl Loss {
    /// Bytes of working memory for `rows` rows.
    pub fn bytes(device: &Device, rows: usize) -> usize {
        let arrays = if device.is_cuda() { 5 } else { 1 };
        arrays * size_of::<f32>() * rows
    }

    /// The loss of `rows` rows, before the first chunk.
    pub fn new(device: &Device, rows: usize) -> Result<Loss> {
        let on_gpu = match device {
            Device::Cpu(_) => None,
            Device::Cuda(_) => Some(OnGpu {
                largest: Array::scratch(device, rows)?,
                sum: Array::scratch(device, rows)?,
                target: Array::scratch(device, rows)?,
                losses: Array::scratch(device, rows)?,
                begun: false,
            }),
        };
        Ok(Loss {
            rows: vec![CrossEntropy::START; if device.is_cuda() { 0 } else { rows }],
            on_gpu,
            lse: Array::scratch(device, rows)?,
        })
    }

    fn of_gpu<'a>(&'a self, targets: &'a Targets) -> Result<cuda::CrossEntropy<'a>> {
        let Some(on_gpu) = &self.on_gpu else {
            bail!(Internal, "a loss of the cpu was given to a GPU");
        };
        Ok(cuda::CrossEntropy {
            labels: targets.labels.all().cuda()?,
            weights: targets.weights.all().cuda()?,
            max: on_gpu.largest.all().cuda()?,
            sum: on_gpu.sum.all().cuda()?,
            target: on_gpu.target.all().cuda()?,
            lse: self.lse.all().cuda()?,
            losses: on_gpu.losses.all().cuda()?,
        })
    }

    /// Accumulates a chunk's logits `[T, width]`.
    pub fn add(
        &mut self,
        device: &Device,
        targets: &Targets,
        chunk: Chunk,
        logits: Slice<'_>,
    ) -> Result<()> {
        if let Device::Cpu(cpu) = device {
            return cpu.cross_entropy_chunk(
                &targets.columns(chunk)?,
                logits.host()?,
                &mut self.rows,
            );
        }
        let begun = self.on_gpu.as_ref().is_some_and(|g| g.begun);
        cuda::cross_entropy_chunk(&self.of_gpu(targets)?, &chunk.on_gpu(logits)?, !begun)?;
        if let Some(on_gpu) = &mut self.on_gpu {
            on_gpu.begun = true;
        }
        Ok(())
    }

    /// After the last chunk: the sum over rows of weight times cross-entropy. Waits for a GPU.
    pub fn finish(&mut self, device: &Device, targets: &Targets) -> Result<f64> {
        if device.is_cuda() {
            let mut total = Array::<u8>::scratch(device, size_of::<f64>())?;
            cuda::cross_entropy_finish(&self.of_gpu(targets)?, total.all_mut().cuda()?)?;
            let mut bytes = [0; size_of::<f64>()];
            total.all().read(&mut bytes)?;
            return Ok(f64::from_le_bytes(bytes));
        }
        let (labels, weights) = (targets.labels.all().host()?, targets.weights.all().host()?);
        let mut total = 0.0;
        let rows = self.rows.iter().zip(self.lse.all_mut().host()?);
        for (((row, lse), label), weight) in rows.zip(labels).zip(weights) {
            *lse = row.lse();
            if *label >= 0 {
                total += f64::from(*weight) * f64::from(*lse - row.target);
            }
        }
        Ok(total)
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
        let Device::Cpu(cpu) = device else {
            let (rows, chunk) = (self.of_gpu(targets)?, chunk.on_gpu(logits)?);
            return cuda::cross_entropy_gradient(&rows, &chunk, gradients.cuda()?);
        };
        let gradients = gradients.host()?;
        gradients.copy_from_slice(logits.host()?);
        let (lse, weights) = (self.lse.all().host()?, targets.weights.all().host()?);
        cpu.cross_entropy_gradient(&targets.columns(chunk)?, gradients, lse, weights)
    }
}

/// `weight * sum |h - target|`; writes its gradient by `h`, `weight * sign(h - target)`, to `d`. All arrays have the same size.
pub fn l1(
    device: &Device,
    h: Slice<'_, Mixed>,
    target: Slice<'_, Mixed>,
    weight: f32,
    d: SliceMut<'_, Mixed>,
) -> Result<f64> {
    if target.len() != h.len() || d.len() != h.len() {
        bail!(
            InvalidArgument,
            "{} hidden states, {} targets and {} gradients; they must be as many",
            h.len(),
            target.len(),
            d.len()
        );
    }
    let Device::Cpu(cpu) = device else {
        let mut partial = scratch(device, cuda::L1_PARTIAL)?;
        let mut total = scratch(device, 1)?;
        cuda::l1_gradient(
            h.cuda()?,
            target.cuda()?,
            weight,
            d.cuda()?,
            partial.all_mut().cuda()?,
            total.all_mut().cuda()?,
        )?;
        let mut sum = [0.0];
        total.all().read(&mut sum)?;
        return Ok(f64::from(sum[0]));
    };
    Ok(cpu.l1(h.host()?, target.host()?, weight, d.host()?))
}
