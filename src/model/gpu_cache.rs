//! The KV cache on a GPU, in pages of 64 positions over all layers. Pages are allocated as the sequence grows, and a clone shares them
//! until either side writes. For files they are converted to the CPU cache's pages and back, so that a session can move between devices.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::spec::{BlockSpec, Spec};
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::cuda::{self, DeviceBuffer, Gpu, PageTable};
use crate::format::nvfp4::BLOCK;
use crate::ops::attention::{CachedLayer, PAGE as FILE_PAGE};

/// Bytes of an element: f16.
const ELEMENT: usize = 2;

/// The pages of one sequence.
#[derive(Debug)]
pub(super) struct GpuCache {
    gpu: Arc<Gpu>,
    layers: usize,
    kv_heads: usize,
    dim: usize,
    pages: Vec<Arc<DeviceBuffer>>,
    /// Changes whenever an address in `pages` may have changed, and never repeats.
    version: u64,
}

fn new_version() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Clone for GpuCache {
    fn clone(&self) -> Self {
        GpuCache {
            gpu: self.gpu.clone(),
            pages: self.pages.clone(),
            version: new_version(),
            ..*self
        }
    }
}

impl GpuCache {
    /// An empty cache of a model whose blocks have keys and values of one shape.
    pub(super) fn new(gpu: &Arc<Gpu>, spec: &Spec) -> Result<GpuCache> {
        let shape = |b: &BlockSpec| (b.attention.kv_heads, b.attention.head_dim);
        let (kv_heads, dim) = spec.blocks.first().map_or((1, BLOCK), shape);
        if let Some(i) = spec.blocks.iter().position(|b| shape(b) != (kv_heads, dim)) {
            let other = shape(&spec.blocks[i]);
            bail!(
                Unsupported,
                "block {i} has {} key/value heads of {}, and block 0 {kv_heads} of {dim}; on a GPU all are alike",
                other.0,
                other.1
            );
        }
        Ok(GpuCache {
            gpu: gpu.clone(),
            layers: spec.blocks.len(),
            kv_heads,
            dim,
            pages: Vec::new(),
            version: new_version(),
        })
    }

    /// Bytes of one layer in a page.
    fn layer_bytes(&self) -> usize {
        2 * self.kv_heads * cuda::PAGE * self.dim * ELEMENT
    }

    fn page_bytes(&self) -> usize {
        self.layers * self.layer_bytes()
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * self.page_bytes()
    }

    pub(super) fn layers(&self) -> usize {
        self.layers
    }

    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Positions with allocated pages.
    pub(super) fn allocated(&self) -> usize {
        self.pages.len() * cuda::PAGE
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().map(|p| p.address())
    }

    /// Calls `work` with a layer as operations take it, including the addresses of its pages on the device.
    pub(super) fn with_layer(
        &self,
        layer: usize,
        work: impl FnOnce(CachedLayer<'_>) -> Result<()>,
    ) -> Result<()> {
        let addresses: Vec<u64> = self.addresses().collect();
        let table = DeviceBuffer::from_slice(&self.gpu, Tag::DeviceScratch, &addresses)?;
        work(CachedLayer::Cuda {
            pages: PageTable {
                table: &table,
                stride: addresses.len(),
                sequence: 0,
                layer,
                unfit: None,
            },
            kv_heads: self.kv_heads,
            dim: self.dim,
        })
    }

    /// Allocates pages for positions `0..len`, and copies shared pages from position `first` on.
    pub(super) fn reserve(&mut self, first: usize, len: usize) -> Result<()> {
        let bytes = self.page_bytes();
        for index in first / cuda::PAGE..len.div_ceil(cuda::PAGE) {
            match self.pages.get_mut(index) {
                None => {
                    // Kernels multiply positions that are not written yet by zero, so they must not hold NaN.
                    let page = DeviceBuffer::zeroed(&self.gpu, Tag::DeviceKvCache, bytes)?;
                    self.pages.push(Arc::new(page));
                    self.version = new_version();
                }
                Some(page) if Arc::strong_count(page) > 1 => {
                    let mut own = DeviceBuffer::uninit(&self.gpu, Tag::DeviceKvCache, bytes)?;
                    own.copy_from(0, page, 0, bytes)?;
                    *page = Arc::new(own);
                    self.version = new_version();
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Frees pages past position `len`.
    pub(super) fn truncate(&mut self, len: usize) {
        let pages = len.div_ceil(cuda::PAGE);
        if pages < self.pages.len() {
            self.pages.truncate(pages);
            self.version = new_version();
        }
    }

    /// Zeroes the positions from `len` on in the page of position `len`. A failed pass may have left values there that are not finite, and
    /// kernels multiply positions past a sequence's end by zero.
    pub(super) fn clear_from(&mut self, len: usize) -> Result<()> {
        let (index, held) = (len / cuda::PAGE, len % cuda::PAGE);
        let Some(page) = self.pages.get_mut(index).and_then(Arc::get_mut) else {
            return Ok(());
        };
        let (heads, dim) = (self.kv_heads, self.dim);
        let mut layer = vec![0u8; 2 * heads * cuda::PAGE * dim * ELEMENT];
        let bytes = layer.len();
        for index in 0..self.layers {
            page.read(index * bytes, &mut layer)?;
            let (keys, values) = layer.split_at_mut(bytes / 2);
            for head in keys.chunks_exact_mut(cuda::PAGE * dim * ELEMENT) {
                head[held * dim * ELEMENT..].fill(0);
            }
            for element in values.chunks_exact_mut(cuda::PAGE * ELEMENT) {
                element[held * ELEMENT..].fill(0);
            }
            page.write(index * bytes, &layer)?;
        }
        Ok(())
    }

    /// Bytes of one layer in a page of a file.
    pub(super) fn file_page_bytes(&self) -> usize {
        2 * self.kv_heads * FILE_PAGE * self.dim * ELEMENT
    }

    /// Calls `each` with the pages of all layers in the layout of the CPU's cache, `count` for each layer.
    pub(super) fn for_each_file_page(
        &self,
        count: usize,
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let (mut layer_page, mut file_page) = (
            vec![0u8; self.layer_bytes()],
            vec![0u8; self.file_page_bytes()],
        );
        for layer in 0..self.layers {
            for index in 0..count {
                let (page, part) = (
                    index * FILE_PAGE / cuda::PAGE,
                    index * FILE_PAGE % cuda::PAGE,
                );
                if part == 0 {
                    self.pages[page].read(layer * self.layer_bytes(), &mut layer_page)?;
                }
                self.exchange(part, |device, file| {
                    file_page[file..file + ELEMENT]
                        .copy_from_slice(&layer_page[device..device + ELEMENT])
                });
                each(&file_page)?;
            }
        }
        Ok(())
    }

    /// Fills an empty cache from pages in the order of [`GpuCache::for_each_file_page`].
    pub(super) fn read_file_pages(
        &mut self,
        count: usize,
        mut next: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        if !self.pages.is_empty() {
            bail!(
                Internal,
                "a cache with {} pages is filled anew",
                self.pages.len()
            );
        }
        self.reserve(0, count * FILE_PAGE)?;
        let mut file_page = vec![0u8; self.file_page_bytes()];
        for layer in 0..self.layers {
            let mut layer_page = vec![0u8; self.layer_bytes()];
            for index in 0..count {
                let (page, part) = (
                    index * FILE_PAGE / cuda::PAGE,
                    index * FILE_PAGE % cuda::PAGE,
                );
                next(&mut file_page)?;
                self.exchange(part, |device, file| {
                    layer_page[device..device + ELEMENT]
                        .copy_from_slice(&file_page[file..file + ELEMENT])
                });
                if part + FILE_PAGE == cuda::PAGE || index + 1 == count {
                    let at = layer * self.layer_bytes();
                    let Some(page) = Arc::get_mut(&mut self.pages[page]) else {
                        bail!(Internal, "a page just made is shared");
                    };
                    page.write(at, &layer_page)?;
                    layer_page.fill(0);
                }
            }
        }
        Ok(())
    }

    /// Calls `each` with the byte offsets, in a layer's page and in a file's page, of every element of the 16 positions from `part` on. The
    /// GPU layout is `[head][64][dim]` for keys and `[head][dim][64]` for values; the file's is `[dim][16]` and `[16][dim]` for each head.
    fn exchange(&self, part: usize, mut each: impl FnMut(usize, usize)) {
        let (dim, page) = (self.dim, cuda::PAGE);
        for head in 0..self.kv_heads {
            for p in 0..FILE_PAGE {
                for d in 0..dim {
                    let key = (head * page + part + p) * dim + d;
                    let value = ((self.kv_heads + head) * dim + d) * page + part + p;
                    let file = head * 2 * dim * FILE_PAGE;
                    each(key * ELEMENT, (file + d * FILE_PAGE + p) * ELEMENT);
                    each(
                        value * ELEMENT,
                        (file + (FILE_PAGE + p) * dim + d) * ELEMENT,
                    );
                }
            }
        }
    }
}
