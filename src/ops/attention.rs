//! Causal grouped-query attention over a cached layer.

use super::{Device, Workspace};
use crate::base::error::Result;

pub use crate::cpu::{KvLayer, KvType, PAGE};

/// Attention of queries `[m, heads, head_dim]` over a layer's cache: softmax(q k^T * scale) v in f32. Query row `i` stands at
/// position `first_position + i` and sees positions up to its own, whose keys and values must be written already.
pub fn attention(
    device: &Device,
    q: &[f32],
    heads: usize,
    kv: &KvLayer,
    first_position: usize,
    scale: f32,
    out: &mut [f32],
    workspace: &mut Workspace,
) -> Result<()> {
    device
        .host()?
        .attention(q, heads, kv, first_position, scale, out, workspace)
}
