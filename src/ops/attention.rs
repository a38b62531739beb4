//! Causal grouped-query attention over a cached layer.

use super::{Device, Slice, SliceMut, Workspace};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::{self, PageTable, ReferenceAttention};

pub use crate::cpu::{AttentionOptions, KvLayer, KvType, PAGE};

/// The cached keys and values of one layer of one sequence.
pub enum CachedLayer<'a> {
    /// In host memory.
    Host(&'a mut KvLayer),
    /// On a GPU, in f16.
    Cuda {
        /// The pages of the sequence.
        pages: PageTable<'a>,
        /// Key/value heads.
        kv_heads: usize,
        /// Elements of one head.
        dim: usize,
    },
}

fn misplaced<T>(device: &Device) -> Result<T> {
    bail!(
        InvalidArgument,
        "keys and values are cached elsewhere than on {}, where their model is",
        device.name()
    )
}

/// Writes keys and values, each `[m, kv_heads, head_dim]`, at positions `first..first + m`. There must be room for them.
pub fn store(
    device: &Device,
    cache: CachedLayer<'_>,
    first: usize,
    keys: Slice<'_>,
    values: Slice<'_>,
) -> Result<()> {
    match (device, cache) {
        (Device::Cpu(_), CachedLayer::Host(layer)) => {
            layer.write(first, keys.host()?, values.host()?)
        }
        (
            Device::Cuda(_),
            CachedLayer::Cuda {
                pages,
                kv_heads,
                dim,
            },
        ) => {
            let rows = keys.len() / (kv_heads * dim);
            let (keys, values) = (keys.cuda()?, values.cuda()?);
            cuda::store_kv(kv_heads, dim, &pages, keys, values, rows, first)
        }
        _ => misplaced(device),
    }
}

/// Attention of queries `[m, heads, head_dim]` over a layer's cache: softmax(q k^T * scale) v in f32, as `options` specify. Query row `i`
/// is at position `first_position + i` and attends to positions up to its own, whose keys and values must already be written.
pub fn attention(
    device: &Device,
    q: Slice<'_>,
    options: &AttentionOptions,
    cache: CachedLayer<'_>,
    first_position: usize,
    out: SliceMut<'_>,
    workspace: &mut Workspace,
) -> Result<()> {
    match (device, cache) {
        (Device::Cpu(cpu), CachedLayer::Host(layer)) => {
            let (q, out) = (q.host()?, out.host()?);
            cpu.attention(q, options, layer, first_position, out, workspace)
        }
        (
            Device::Cuda(_),
            CachedLayer::Cuda {
                pages,
                kv_heads,
                dim,
            },
        ) => {
            let rows = q.len() / (options.heads * dim);
            let options = ReferenceAttention {
                heads: options.heads,
                kv_heads,
                dim,
                scale: options.scale,
                window: options.window,
                score_cap: options.score_cap,
            };
            let (q, out) = (q.cuda()?, out.cuda()?);
            cuda::attention_reference(&options, &pages, q, rows, first_position, out)
        }
        _ => misplaced(device),
    }
}
