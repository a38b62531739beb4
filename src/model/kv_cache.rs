//! The keys and values of one sequence, owned by the session that runs it. Memory is allocated in pages of sixteen positions as the
//! sequence grows; a clone shares its pages until either side writes. Knows shapes, not weights.

use super::gpu_cache::GpuCache;
use super::spec::Spec;
use crate::base::error::bail;
use crate::base::{Result, memory};
use crate::ops::attention::{self, AttentionOptions, CachedLayer, KvLayer, KvType, PAGE};
use crate::ops::{Device, Slice, SliceMut, Workspace};

/// Memory of the keys and values.
#[derive(Clone, Debug)]
enum Store {
    Host(Vec<KvLayer>),
    Gpu(GpuCache),
}

/// The cache of one sequence over all layers.
#[derive(Clone, Debug)]
pub struct KvCache {
    store: Store,
    kind: KvType,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// An empty cache with room for `capacity` positions of a model of this shape on its device. Nothing is allocated yet.
    /// A GPU keeps f16.
    pub fn new(device: &Device, spec: &Spec, capacity: usize, kind: KvType) -> Result<Self> {
        if capacity == 0 || capacity > spec.max_positions {
            bail!(
                InvalidArgument,
                "a context of {capacity} positions; the model was made for 1 to {}",
                spec.max_positions
            );
        }
        let store = match device {
            Device::Cpu(_) => Store::Host(
                spec.blocks
                    .iter()
                    .map(|b| KvLayer::new(b.attention.kv_heads, b.attention.head_dim, kind))
                    .collect::<Result<_>>()?,
            ),
            Device::Cuda(gpu) if kind == KvType::F16 => Store::Gpu(GpuCache::new(gpu, spec)?),
            Device::Cuda(_) => bail!(
                Unsupported,
                "keys and values as {} on {}; a GPU keeps them as f16",
                kind.name(),
                device.name()
            ),
        };
        Ok(KvCache {
            store,
            kind,
            len: 0,
            capacity,
        })
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Further positions for which there is room.
    pub fn room(&self) -> usize {
        self.capacity - self.len
    }

    /// Whether it holds no position.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of positions for which there is room in total.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Element type of keys and values.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Bytes of the pages in use, including pages shared with clones.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Host(layers) => layers.iter().map(KvLayer::bytes).sum(),
            Store::Gpu(cache) => cache.bytes(),
        }
    }

    /// Drops the positions from `len` on and frees their pages.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            bail!(
                InvalidArgument,
                "cannot cut {} positions to {len}, which is more",
                self.len
            );
        }
        self.len = len;
        self.free_unused();
        Ok(())
    }

    /// Frees pages past the held positions, which were reserved for tokens that did not run.
    fn free_unused(&mut self) {
        match &mut self.store {
            Store::Host(layers) => layers.iter_mut().for_each(|l| l.truncate(self.len)),
            Store::Gpu(cache) => cache.truncate(self.len),
        }
    }

    /// Releases the positions that [`KvCache::reserve`] made room for, after a failed pass.
    pub(super) fn give_up(&mut self) -> Result<()> {
        self.free_unused();
        match &mut self.store {
            Store::Host(_) => Ok(()),
            Store::Gpu(cache) => cache.clear_from(self.len),
        }
    }

    /// Allocates room for `count` further positions in every layer, so that a lack of memory shows before any work is done.
    pub(super) fn reserve(&mut self, count: usize) -> Result<()> {
        if count > self.capacity - self.len {
            bail!(
                ContextFull,
                "{count} tokens do not fit: {} of {} positions are in use",
                self.len,
                self.capacity
            );
        }
        let (first, len) = (self.len, self.len + count);
        match &mut self.store {
            Store::Host(layers) => layers.iter_mut().try_for_each(|l| l.reserve(first, len)),
            Store::Gpu(cache) => cache.reserve(first, len),
        }
    }

    /// Writes keys and values, each `[m, kv_heads, head_dim]`, of layer `index` at positions `first..first + m`. There must be room for
    /// them.
    pub(super) fn store(
        &mut self,
        device: &Device,
        index: usize,
        first: usize,
        keys: Slice<'_>,
        values: Slice<'_>,
    ) -> Result<()> {
        self.with_layer(index, |layer| {
            attention::store(device, layer, first, keys, values)
        })
    }

    /// Attention of queries `[m, heads, head_dim]` from position `first` on over layer `index`.
    pub(super) fn attend(
        &mut self,
        device: &Device,
        index: usize,
        q: Slice<'_>,
        options: &AttentionOptions,
        first: usize,
        out: SliceMut<'_>,
        workspace: &mut Workspace,
    ) -> Result<()> {
        self.with_layer(index, |layer| {
            attention::attention(device, q, options, layer, first, out, workspace)
        })
    }

    fn with_layer(
        &mut self,
        index: usize,
        work: impl FnOnce(CachedLayer<'_>) -> Result<()>,
    ) -> Result<()> {
        match &mut self.store {
            Store::Host(layers) => work(CachedLayer::Host(&mut layers[index])),
            Store::Gpu(cache) => cache.with_layer(index, work),
        }
    }

    /// The pages on a GPU.
    pub(super) fn gpu(&self) -> Result<&GpuCache> {
        match &self.store {
            Store::Gpu(cache) => Ok(cache),
            Store::Host(_) => bail!(
                InvalidArgument,
                "the cache is in host memory, and its model is on a GPU"
            ),
        }
    }

    /// Records that every layer now holds `count` further positions.
    pub(super) fn advance(&mut self, count: usize) {
        self.len += count;
    }

    /// Calls `each` with the pages of all layers, layer by layer, in the order that [`KvCache::read_pages`] expects.
    pub fn for_each_page(&self, mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        match &self.store {
            Store::Host(layers) => {
                for layer in layers {
                    (0..self.pages()).try_for_each(|i| each(layer.page(i)))?;
                }
                Ok(())
            }
            Store::Gpu(cache) => cache.for_each_file_page(self.pages(), each),
        }
    }

    /// Pages of each layer.
    fn pages(&self) -> usize {
        self.len.div_ceil(PAGE)
    }

    /// Bytes that [`KvCache::for_each_page`] gives for `len` positions; `None` if the number overflows.
    pub fn page_bytes(&self, len: usize) -> Option<u64> {
        let pages = len.div_ceil(PAGE) as u64;
        let of_all_layers: usize = match &self.store {
            Store::Host(layers) => layers.iter().map(KvLayer::page_bytes).sum(),
            Store::Gpu(cache) => cache.layers() * cache.file_page_bytes(),
        };
        (of_all_layers as u64).checked_mul(pages)
    }

    /// Fills an empty cache with `len` positions; `next` gives the pages in the order of [`KvCache::for_each_page`].
    pub fn read_pages(
        &mut self,
        len: usize,
        mut next: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if self.len != 0 || len > self.capacity {
            bail!(
                InvalidArgument,
                "{len} positions into a cache that holds {} of {}; it must be empty and large enough",
                self.len,
                self.capacity
            );
        }
        let pages = len.div_ceil(PAGE);
        match &mut self.store {
            Store::Host(layers) => {
                for layer in layers {
                    let mut bytes = memory::zeros(layer.page_bytes())?;
                    for i in 0..pages {
                        next(&mut bytes)?;
                        layer.set_page(i, &bytes)?;
                    }
                }
            }
            Store::Gpu(cache) => cache.read_file_pages(pages, next)?,
        }
        self.len = len;
        Ok(())
    }
}
