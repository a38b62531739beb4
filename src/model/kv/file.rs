//! Pages of session files: sixteen positions of one layer, in the layout of the CPU's cache. A GPU's pages are converted, so that a session
//! can move between devices. Also the removal of what a failed pass wrote.

use std::ops::Range;

use super::arena::KvArena;
use super::{HOST_PAGE, KvCache, KvTables, NULL_BLOCK, PagesOf};
use crate::base::{Result, memory};
use crate::cuda;

/// Bytes of an element on a GPU: f16.
const ELEMENT: usize = 2;

impl KvCache {
    /// Bytes that [`KvCache::read_pages`] gives for `len` positions, of which group `i` keeps those from `kept_from[i]` on; `None` if the
    /// number overflows.
    pub fn page_bytes(&self, of: PagesOf, len: usize, kept_from: &[usize]) -> Option<u64> {
        self.cached_layers(of)
            .try_fold(0u64, |sum, (arena, group, _)| {
                let first = kept_from.get(group)? / HOST_PAGE;
                let pages = len.div_ceil(HOST_PAGE).saturating_sub(first) as u64;
                let of_layer = pages.checked_mul(arena.layout().page_bytes() as u64)?;
                sum.checked_add(of_layer)
            })
    }

    /// Calls `each` with the pages of a sequence of `len` positions, layer by layer.
    pub fn read_pages(
        &self,
        of: PagesOf,
        tables: &KvTables,
        len: usize,
        mut each: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let pages = len.div_ceil(HOST_PAGE);
        for (arena, group, index) in self.cached_layers(of) {
            let mut reader = PageReader::new(arena, index)?;
            let each_block = arena.block_positions() / HOST_PAGE;
            for page in 0..pages {
                match tables.blocks(group)[page / each_block] {
                    NULL_BLOCK => {}
                    block => reader.read(block, page % each_block, &mut each)?,
                }
            }
        }
        Ok(())
    }

    /// Fills the blocks of a sequence of `len` positions; `next` gives the pages in the order of [`KvCache::read_pages`].
    pub fn write_pages(
        &self,
        of: PagesOf,
        tables: &KvTables,
        len: usize,
        mut next: impl FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let pages = len.div_ceil(HOST_PAGE);
        for (arena, group, index) in self.cached_layers(of) {
            let each_block = arena.block_positions() / HOST_PAGE;
            let mut page = memory::zeros(arena.layout().page_bytes())?;
            let blocks = tables.blocks(group).iter().enumerate();
            for (i, &block) in blocks.filter(|(_, block)| **block != NULL_BLOCK) {
                let first = i * each_block;
                let count = each_block.min(pages.saturating_sub(first));
                if arena.gpu().is_none() {
                    next(&mut page)?;
                    let held = HOST_PAGE.min(len.saturating_sub(i * HOST_PAGE));
                    arena.layout().check_read(&mut page, held)?;
                    arena.with_page_mut(index, block, |to| {
                        to.copy_from_slice(&page);
                        Ok(())
                    })?;
                    continue;
                }
                let mut whole = memory::zeros(arena.page_bytes())?;
                for part in 0..count {
                    next(&mut page)?;
                    exchange(arena, part, |device, file| {
                        whole[device..device + ELEMENT].copy_from_slice(&page[file..file + ELEMENT])
                    });
                }
                arena.page_on_gpu(index, block)?.write(0, &whole)?;
            }
        }
        Ok(())
    }

    /// Zeroes the positions from `held` on of a block on a GPU. A failed pass may have left values there that are not finite, and kernels
    /// multiply positions past a sequence's end by zero.
    pub fn clear_from(&self, group: usize, block: u32, held: usize) -> Result<()> {
        self.clear(group, block, held..cuda::PAGE)
    }

    /// Zeroes some positions of a block on a GPU.
    pub(in crate::model) fn clear(
        &self,
        group: usize,
        block: u32,
        positions: Range<usize>,
    ) -> Result<()> {
        let arena = &self.arenas[group];
        if arena.gpu().is_none() {
            return Ok(());
        }
        let dim = arena.layout().dim();
        let mut bytes = memory::zeros::<u8>(arena.page_bytes())?;
        for layer in 0..arena.layers() {
            let page = arena.page_on_gpu(layer, block)?;
            page.read(0, &mut bytes)?;
            let (keys, values) = bytes.split_at_mut(page.bytes() / 2);
            for head in keys.chunks_exact_mut(cuda::PAGE * dim * ELEMENT) {
                head[positions.start * dim * ELEMENT..positions.end * dim * ELEMENT].fill(0);
            }
            for element in values.chunks_exact_mut(cuda::PAGE * ELEMENT) {
                element[positions.start * ELEMENT..positions.end * ELEMENT].fill(0);
            }
            page.write(0, &bytes)?;
        }
        Ok(())
    }
}

/// Reads the pages of one layer.
struct PageReader<'a> {
    arena: &'a KvArena,
    layer: usize,
    /// On a GPU: the page that was read last, and its block.
    page: Vec<u8>,
    block: u32,
    file_page: Vec<u8>,
}

impl<'a> PageReader<'a> {
    fn new(arena: &'a KvArena, layer: usize) -> Result<Self> {
        let on_gpu = |bytes| if arena.gpu().is_some() { bytes } else { 0 };
        Ok(PageReader {
            arena,
            layer,
            page: memory::zeros(on_gpu(arena.page_bytes()))?,
            block: NULL_BLOCK,
            file_page: memory::zeros(on_gpu(arena.layout().page_bytes()))?,
        })
    }

    /// Calls `each` with the sixteen positions of a block that are its part `part`.
    fn read(
        &mut self,
        block: u32,
        part: usize,
        each: &mut impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let PageReader {
            arena,
            layer,
            page,
            file_page,
            ..
        } = self;
        if arena.gpu().is_none() {
            // Copied, because `each` may take long and the arena is locked.
            page.clear();
            arena.with_page_mut(*layer, block, |bytes| {
                page.extend_from_slice(bytes);
                Ok(())
            })?;
            return each(page);
        }
        if self.block != block {
            arena.page_on_gpu(*layer, block)?.read(0, page)?;
            self.block = block;
        }
        exchange(arena, part, |device, file| {
            file_page[file..file + ELEMENT].copy_from_slice(&page[device..device + ELEMENT])
        });
        each(file_page)
    }
}

/// Calls `each` with the byte offsets, in a GPU's page and in a file's page, of every element of sixteen positions. The GPU's layout is
/// `[head][64][dim]` for keys and `[head][dim][64]` for values; the file's is `[dim][16]` and `[16][dim]` for each head.
fn exchange(arena: &KvArena, part: usize, mut each: impl FnMut(usize, usize)) {
    let (heads, dim, page) = (arena.layout().heads(), arena.layout().dim(), cuda::PAGE);
    let first = part * HOST_PAGE;
    for head in 0..heads {
        for p in 0..HOST_PAGE {
            for d in 0..dim {
                let key = (head * page + first + p) * dim + d;
                let value = ((heads + head) * dim + d) * page + first + p;
                let file = head * 2 * dim * HOST_PAGE;
                each(key * ELEMENT, (file + d * HOST_PAGE + p) * ELEMENT);
                let file_value = file + (HOST_PAGE + p) * dim + d;
                each(value * ELEMENT, file_value * ELEMENT);
            }
        }
    }
}
