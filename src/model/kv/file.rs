//! Pages of files of sessions and of prefixes: sixteen positions of one layer, in the layout of the CPU's cache. A GPU's pages are converted,
//! so that a file can move between devices. Also the removal of what a failed pass wrote.

use std::ops::Range;

use super::arena::KvArena;
use super::{HOST_PAGE, KvCache, KvLayout, KvTables, NULL_BLOCK, PagesOf};
use crate::base::{Result, memory};
use crate::cuda;

impl KvCache {
    /// The group of each layer, and the bytes of its pages, in the order of [`KvCache::read_pages`].
    pub fn page_sizes(&self, of: PagesOf) -> impl Iterator<Item = (usize, usize)> {
        let layers = self.cached_layers(of);
        layers.map(|(arena, group, _)| (group, arena.layout().page_bytes()))
    }

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
                    // SAFETY: a block of the tables of its only user, and no other reference lives.
                    unsafe { arena.page_to_write(index, block) }?.copy_from_slice(&page);
                    continue;
                }
                let mut whole = memory::zeros(arena.page_bytes())?;
                for part in 0..count {
                    next(&mut page)?;
                    let held = HOST_PAGE.min(len - (first + part) * HOST_PAGE);
                    arena.layout().check_read(&mut page, held)?;
                    exchange(arena.layout(), part, |device, file| {
                        whole[device].copy_from_slice(&page[file]);
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
        let mut bytes = memory::zeros::<u8>(arena.page_bytes())?;
        for layer in 0..arena.layers() {
            let page = arena.page_on_gpu(layer, block)?;
            page.read(0, &mut bytes)?;
            for head in 0..arena.layout().heads() {
                for position in positions.clone() {
                    let ranges = PositionBytes::on_gpu(arena.layout(), head, position).ranges();
                    ranges.for_each(|range| bytes[range].fill(0));
                }
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
            // SAFETY: a block of the tables whose pages are read.
            return each(unsafe { arena.page_to_read(*layer, block) }?);
        }
        if self.block != block {
            arena.page_on_gpu(*layer, block)?.read(0, page)?;
            self.block = block;
        }
        exchange(arena.layout(), part, |device, file| {
            file_page[file].copy_from_slice(&page[device]);
        });
        each(file_page)
    }
}

/// The bytes of a position of a head in a page, in the order of the elements of its key, those of its value, and their scales, if the type
/// has any.
#[derive(Clone, Copy)]
struct PositionBytes {
    /// Bytes of an element, and of a scale.
    element: usize,
    scale: usize,
    dim: usize,
    /// Where the key, the value and their scales begin, and from one element of key and value to the next.
    starts: [usize; 4],
    steps: [usize; 2],
}

impl PositionBytes {
    /// On a GPU: keys `[heads][64][dim]`, values `[heads][dim][64]`, and the scales of both `[2][heads][64]`.
    fn on_gpu(layout: KvLayout, head: usize, position: usize) -> PositionBytes {
        let page = cuda::PAGE;
        let (heads, dim) = (layout.heads(), layout.dim());
        let (element, scale) = (layout.kind().element_bytes(), layout.kind().scale_bytes());
        let all = heads * page * dim * element;
        let of_head = head * page;
        PositionBytes {
            element,
            scale,
            dim,
            starts: [
                (of_head + position) * dim * element,
                all + (of_head * dim + position) * element,
                2 * all + (of_head + position) * scale,
                2 * all + ((heads + head) * page + position) * scale,
            ],
            steps: [element, page * element],
        }
    }

    /// In a file, and in host memory: for each head keys `[dim][16]`, values `[16][dim]`, and the scales of both `[2][16]`.
    fn in_file(layout: KvLayout, head: usize, position: usize) -> PositionBytes {
        let page = HOST_PAGE;
        let (heads, dim) = (layout.heads(), layout.dim());
        let (element, scale) = (layout.kind().element_bytes(), layout.kind().scale_bytes());
        let of_head = head * layout.page_bytes() / heads;
        let scales = of_head + 2 * page * dim * element;
        PositionBytes {
            element,
            scale,
            dim,
            starts: [
                of_head + position * element,
                of_head + (page + position) * dim * element,
                scales + position * scale,
                scales + (page + position) * scale,
            ],
            steps: [page * element, element],
        }
    }

    fn ranges(self) -> impl Iterator<Item = Range<usize>> {
        let [key, value, key_scale, value_scale] = self.starts;
        let elements = [key, value].into_iter().zip(self.steps);
        let elements = elements.flat_map(move |(start, step)| {
            let at = (0..self.dim).map(move |i| start + i * step);
            at.map(move |at| at..at + self.element)
        });
        let scales = [key_scale, value_scale].map(|at| at..at + self.scale);
        elements.chain(scales)
    }
}

/// Calls `each` with the bytes, in a GPU's page and in a file's page, of every element and scale of sixteen positions.
fn exchange(layout: KvLayout, part: usize, mut each: impl FnMut(Range<usize>, Range<usize>)) {
    for head in 0..layout.heads() {
        for position in 0..HOST_PAGE {
            let on_gpu = PositionBytes::on_gpu(layout, head, part * HOST_PAGE + position);
            let in_file = PositionBytes::in_file(layout, head, position);
            for (on_gpu, in_file) in on_gpu.ranges().zip(in_file.ranges()) {
                each(on_gpu, in_file);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::KvType;

    /// How often the ranges of all positions contain each byte of a page.
    fn counts(bytes: usize, positions: impl Iterator<Item = PositionBytes>) -> Vec<u8> {
        let mut counts = vec![0; bytes];
        for range in positions.flat_map(PositionBytes::ranges) {
            counts[range].iter_mut().for_each(|count| *count += 1);
        }
        counts
    }

    #[test]
    fn each_byte_of_a_page_belongs_to_one_position() {
        for kind in KvType::ALL {
            let layout = KvLayout::new(3, 48, kind).unwrap();
            let all = |positions: usize| {
                (0..3).flat_map(move |head| (0..positions).map(move |p| (head, p)))
            };
            let in_file = all(HOST_PAGE).map(|(h, p)| PositionBytes::in_file(layout, h, p));
            let page = layout.page_bytes();
            assert_eq!(counts(page, in_file), vec![1; page], "{kind:?}");
            let on_gpu = all(cuda::PAGE).map(|(h, p)| PositionBytes::on_gpu(layout, h, p));
            let page = page / HOST_PAGE * cuda::PAGE;
            assert_eq!(counts(page, on_gpu), vec![1; page], "{kind:?}");
        }
    }

    /// The ranges of a file's page against the CPU's own cache.
    #[test]
    fn a_position_of_a_file_has_the_elements_that_were_written() {
        for kind in KvType::ALL {
            let layout = KvLayout::new(2, 32, kind).unwrap();
            let row = |sign: f32| {
                (0..64)
                    .map(move |i| sign * (i + 1) as f32)
                    .collect::<Vec<_>>()
            };
            let mut page = memory::zeros::<u8>(layout.page_bytes()).unwrap();
            layout.write(&mut page, 5, &row(1.0), &row(-1.0)).unwrap();
            let held = |head, position| {
                let ranges = PositionBytes::in_file(layout, head, position).ranges();
                ranges
                    .flat_map(|range| page[range].to_vec())
                    .collect::<Vec<u8>>()
            };
            for head in 0..2 {
                let zero = vec![0; 2 * kind.vector_bytes(32)];
                assert_eq!(held(head, 4), zero, "{kind:?}");
                let written = held(head, 5);
                let (elements, scales) = written.split_at(64 * kind.element_bytes());
                let (key, value) = elements.split_at(elements.len() / 2);
                // The sign is the last bit of each element.
                let negated: Vec<u8> = key
                    .chunks_exact(kind.element_bytes())
                    .flat_map(|element| {
                        let mut element = element.to_vec();
                        *element.last_mut().unwrap() ^= 0x80;
                        element
                    })
                    .collect();
                assert!(key.iter().any(|&byte| byte != 0));
                assert_eq!(value, negated, "{kind:?}");
                let (of_key, of_value) = scales.split_at(scales.len() / 2);
                assert_eq!(of_key, of_value);
                if kind == KvType::F8 {
                    let largest = 32.0 * (head as f32 + 1.0);
                    assert_eq!(of_key, (largest / 448.0).to_ne_bytes());
                }
            }
        }
    }
}
