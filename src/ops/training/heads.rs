//! Norm and RoPE of each head of projected queries, keys and values, `[T, (heads + 2 kv_heads) * dim]`, before attention.

use super::super::rope::Angles;
use super::super::{Device, Mixed, Slice, SliceMut};
use super::{gpu, scratch};
use crate::base::Result;
use crate::cpu::training::Heads;
use crate::cuda::training as cuda;

/// Norm and RoPE settings of heads.
#[derive(Clone, Copy, Debug)]
pub struct HeadOptions<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// The weights of the norms of queries and keys, `[dim]`.
    pub norms: [Option<Slice<'a>>; 2],
    /// Epsilon, added to the mean square.
    pub eps: f32,
    /// The rotation of each row.
    pub angles: &'a Angles,
}

impl<'a> HeadOptions<'a> {
    fn on_gpu(&self) -> Result<cuda::Heads<'a>> {
        let [q, k] = self.norms;
        let (cos, sin) = self.angles.cos_sin();
        Ok(cuda::Heads {
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            norms: [gpu(q)?, gpu(k)?],
            eps: self.eps,
            cos: cos.cuda()?,
            sin: sin.cuda()?,
        })
    }

    fn host(&self) -> Result<Heads<'a>> {
        let [q, k] = self.norms;
        let (cos, sin) = self.angles.cos_sin();
        Ok(Heads {
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            norms: [
                q.map(Slice::host).transpose()?,
                k.map(Slice::host).transpose()?,
            ],
            eps: self.eps,
            cos: cos.host()?,
            sin: sin.host()?,
        })
    }
}

/// Normalizes and rotates the heads of `qkv` into `out`; values are copied unchanged.
pub fn heads(
    device: &Device,
    options: &HeadOptions<'_>,
    qkv: Slice<'_, Mixed>,
    out: SliceMut<'_, Mixed>,
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => cpu.heads(&options.host()?, qkv.host()?, out.host()?),
        Device::Cuda(_) => cuda::heads_forward(&options.on_gpu()?, qkv.cuda()?, out.cuda()?),
    }
}

/// In place: `dqkv`, the gradient of the output of [`heads`], becomes the gradient of `qkv`. Adds to the gradients of the norms.
pub fn heads_backward(
    device: &Device,
    options: &HeadOptions<'_>,
    qkv: Slice<'_, Mixed>,
    dqkv: SliceMut<'_, Mixed>,
    dnorms: [Option<SliceMut<'_>>; 2],
) -> Result<()> {
    match device {
        Device::Cpu(cpu) => {
            let [q, k] = dnorms;
            let dnorms = [
                q.map(SliceMut::host).transpose()?,
                k.map(SliceMut::host).transpose()?,
            ];
            cpu.heads_backward(&options.host()?, qkv.host()?, dqkv.host()?, dnorms)
        }
        Device::Cuda(_) => {
            let rows = qkv.len() / ((options.heads + 2 * options.kv_heads) * options.dim);
            let mut partial = scratch(device, cuda::heads_partial(rows, options.dim))?;
            let [q, k] = dnorms;
            let dnorms = [
                q.map(SliceMut::cuda).transpose()?,
                k.map(SliceMut::cuda).transpose()?,
            ];
            let dqkv = dqkv.cuda()?;
            let partial = partial.all_mut().cuda()?;
            cuda::heads_backward(&options.on_gpu()?, qkv.cuda()?, dqkv, dqkv, partial, dnorms)
        }
    }
}
