//! Causal grouped-query attention of rows in which documents follow each other; probabilities are never stored (Dao, arXiv 2307.08691).

use super::super::{Array, Device, Mixed, Slice, SliceMut};
use super::only_on_the_cpu;
use crate::base::Result;
use crate::base::error::bail;
use crate::cpu::training::DocumentRows;

pub use crate::cpu::training::PackedAttention;

/// Where the document of each row lies, in the memory of a device.
#[derive(Debug)]
pub struct Documents {
    starts: Array<u32>,
    ends: Array<u32>,
}

impl Documents {
    /// Documents of these lengths, one after another; none is empty.
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
        let array = |values: &[u32]| {
            let mut array = Array::scratch(device, values.len())?;
            array
                .first_mut(values.len())?
                .copy_from(Slice::Host(values))?;
            Ok(array)
        };
        Ok(Documents {
            starts: array(&starts)?,
            ends: array(&ends)?,
        })
    }

    /// Rows of all documents.
    pub fn rows(&self) -> usize {
        self.starts.len()
    }

    fn host(&self) -> Result<DocumentRows<'_>> {
        Ok(DocumentRows {
            starts: self.starts.all().host()?,
            ends: self.ends.all().host()?,
        })
    }
}

/// Attention of `qkv`, whose heads are normalized and rotated, to `out` `[T, heads * dim]`; `lse` becomes the natural logarithms of the
/// sums of exponentials of each row and head.
pub fn attention(
    device: &Device,
    options: &PackedAttention,
    documents: &Documents,
    qkv: Slice<'_, Mixed>,
    out: SliceMut<'_, Mixed>,
    lse: SliceMut<'_>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let (out, lse) = (out.host()?, lse.host()?);
            cpu.packed_attention(options, documents.host()?, qkv.host()?, out, lse)
        }
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}

/// The backward pass of [`attention`]: makes `dqkv` the gradients of `qkv` from those of the results, `dout`.
pub fn attention_backward(
    device: &Device,
    options: &PackedAttention,
    documents: &Documents,
    (qkv, out, lse): (Slice<'_, Mixed>, Slice<'_, Mixed>, Slice<'_>),
    dout: Slice<'_, Mixed>,
    dqkv: SliceMut<'_, Mixed>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let forward = (qkv.host()?, out.host()?, lse.host()?);
            let (dout, dqkv) = (dout.host()?, dqkv.host()?);
            cpu.packed_attention_backward(options, documents.host()?, forward, dout, dqkv)
        }
        Device::Cuda(_) => only_on_the_cpu(device),
    }
}
