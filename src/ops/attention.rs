//! Causal grouped-query attention over a cached layer.

use super::{Device, Slice, SliceMut, Workspace};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{self, CachedPages};
use crate::tensor::AttentionShape;

pub use crate::cpu::{KvLayout, KvPages, PAGE};
pub use crate::tensor::KvType;

/// The cached keys and values of one layer of one sequence, to read.
pub enum CachedLayer<'a> {
    /// In host memory.
    Host(KvPages<'a>),
    /// On a GPU.
    Cuda(CachedPages<'a>),
}

/// Attention of queries `[m, heads, head_dim]` over a layer's cache: softmax(q k^T * scale) v in f32, as `shape` specifies. Query row `i`
/// is at position `first_position + i` and attends to positions up to its own, whose keys and values must already be written. `sinks`
/// `[heads]` takes part in the softmax of each row and has no value.
pub fn attention(
    device: &Device,
    q: Slice<'_>,
    shape: &AttentionShape,
    sinks: Option<Slice<'_>>,
    cache: &CachedLayer<'_>,
    first_position: usize,
    out: SliceMut<'_>,
    workspace: &mut Workspace,
) -> Result<()> {
    match (device, cache) {
        (Device::Cpu(cpu), CachedLayer::Host(pages)) => {
            let (q, out) = (q.host()?, out.host()?);
            let sinks = sinks.map(Slice::host).transpose()?;
            cpu.attention(q, shape, sinks, pages, first_position, out, workspace)
        }
        (Device::Cuda(_), CachedLayer::Cuda(blocks)) => {
            let rows = q.len() / shape.q_width();
            let (q, out) = (q.cuda()?, out.cuda()?);
            let sinks = sinks.map(Slice::cuda).transpose()?;
            cuda::attention_reference(shape, sinks, blocks, q, rows, first_position, out)
        }
        _ => bail!(
            InvalidArgument,
            "keys and values are cached elsewhere than on {}, where their model is",
            device.name()
        ),
    }
}
