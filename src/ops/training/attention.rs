//! Causal grouped-query attention over packed documents; probabilities are never stored (Dao, arXiv 2307.08691).

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::{scratch, upload};
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::training::DocumentRows;
use crate::cuda::training as cuda;
use crate::tensor::AttentionShape;

/// The bounds of each row's document, in the memory of a device.
#[derive(Debug)]
pub struct Documents {
    starts: Array<u32>,
    ends: Array<u32>,
}

impl Documents {
    /// Consecutive documents of these lengths, none empty.
    pub fn new(device: &Device, lengths: &[usize]) -> Result<Documents> {
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        for &length in lengths {
            let start = starts.len();
            if length == 0 || start + length > u32::MAX as usize {
                bail!(
                    InvalidArgument,
                    "a document of {length} tokens after {start}; there must be 1 to 2^32 in all"
                );
            }
            starts.resize(start + length, start as u32);
            ends.resize(start + length, (start + length) as u32);
        }
        Ok(Documents {
            starts: upload(device, &starts)?,
            ends: upload(device, &ends)?,
        })
    }

    /// Total rows of all documents.
    pub fn rows(&self) -> usize {
        self.starts.len()
    }

    /// The bounds in host memory.
    pub(super) fn host(&self) -> Result<DocumentRows<'_>> {
        Ok(DocumentRows {
            starts: self.starts.all().host()?,
            ends: self.ends.all().host()?,
        })
    }
}

fn on_gpu<'a>(shape: &AttentionShape, documents: &'a Documents) -> Result<cuda::Attention<'a>> {
    Ok(cuda::Attention {
        shape: *shape,
        starts: documents.starts.all().cuda()?,
        ends: documents.ends.all().cuda()?,
    })
}

/// Attention of `qkv`, whose heads are normalized and rotated, to `out` `[T, heads * dim]`. `lse` receives the log-sum-exp (natural
/// logarithm) of each row and head.
pub fn attention(
    device: &Device,
    shape: &AttentionShape,
    documents: &Documents,
    qkv: Slice<'_, Mixed>,
    out: SliceMut<'_, Mixed>,
    lse: SliceMut<'_>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let (out, lse) = (out.host()?, lse.host()?);
            cpu.packed_attention(shape, documents.host()?, qkv.host()?, out, lse)
        }
        Device::Cuda(_) => {
            let options = on_gpu(shape, documents)?;
            cuda::attention_forward(&options, qkv.cuda()?, out.cuda()?, lse.cuda()?)
        }
    }
}

/// Backward of [`attention`]: computes `dqkv`, the gradient of `qkv`, from `dout`, the gradient of the output.
pub fn attention_backward(
    device: &Device,
    shape: &AttentionShape,
    documents: &Documents,
    (qkv, out, lse): (Slice<'_, Mixed>, Slice<'_, Mixed>, Slice<'_>),
    dout: Slice<'_, Mixed>,
    dqkv: SliceMut<'_, Mixed>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let forward = (qkv.host()?, out.host()?, lse.host()?);
            let (dout, dqkv) = (dout.host()?, dqkv.host()?);
            cpu.packed_attention_backward(shape, documents.host()?, forward, dout, dqkv)
        }
        Device::Cuda(_) => {
            let mut delta = scratch(device, lse.len())?;
            let forward = [qkv.cuda()?, out.cuda()?, lse.cuda()?];
            let (delta, options) = (delta.all_mut().cuda()?, on_gpu(shape, documents)?);
            cuda::attention_backward(&options, forward, dout.cuda()?, delta, dqkv.cuda()?)
        }
    }
}
