//! Cached keys and values of one layer, in pages of sixteen positions: for each key/value head, keys `[dim][16]` (so that a vector lane is
//! a position), then values `[16][dim]`. The memory is the caller's.

use std::ops::Range;

use half::f16;

use crate::base::error::{Result, bail};
use crate::base::size::product;

/// Positions in a page.
pub const PAGE: usize = 16;

/// Element type of cached keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// IEEE half precision, rounded to nearest even.
    #[default]
    F16,
    /// IEEE single precision, unrounded.
    F32,
}

impl KvType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }

    /// Lower-case name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F16 => "f16",
            KvType::F32 => "f32",
        }
    }
}

/// The pages of one layer: for each key/value head, keys `[dim][16]`, then values `[16][dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    heads: usize,
    dim: usize,
    kind: KvType,
}

impl KvLayout {
    /// Pages of `heads` key/value heads of `dim`, a multiple of 16.
    pub fn new(heads: usize, dim: usize, kind: KvType) -> Result<Self> {
        if heads == 0 || dim == 0 || !dim.is_multiple_of(16) {
            bail!(
                Unsupported,
                "a KV cache of {heads} heads of {dim}: heads must be positive and head_dim a positive multiple of 16"
            );
        }
        product("KV page", &[heads, 2, PAGE, dim, kind.size()])?;
        Ok(KvLayout { heads, dim, kind })
    }

    /// Bytes of one page over all heads.
    pub fn page_bytes(&self) -> usize {
        self.heads * 2 * PAGE * self.dim * self.kind.size()
    }

    /// Key/value heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Elements of one head's key or value.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Element type.
    pub fn kind(&self) -> KvType {
        self.kind
    }

    /// Rows of keys and values, each `[rows, heads, dim]`, that belong together; fails unless both are whole rows.
    pub fn rows<'a>(
        &self,
        keys: &'a [f32],
        values: &'a [f32],
    ) -> Result<impl ExactSizeIterator<Item = (&'a [f32], &'a [f32])>> {
        let row = self.heads * self.dim;
        if keys.len() != values.len() || !keys.len().is_multiple_of(row) {
            bail!(
                InvalidArgument,
                "{} keys and {} values for {} heads of {}: both must be whole rows of {row}",
                keys.len(),
                values.len(),
                self.heads,
                self.dim
            );
        }
        Ok(keys.chunks_exact(row).zip(values.chunks_exact(row)))
    }

    /// Writes a row of keys and one of values, each `[heads, dim]`, at position `slot` of a page, which is aligned to four bytes.
    pub fn write(&self, page: &mut [u8], slot: usize, keys: &[f32], values: &[f32]) -> Result<()> {
        if page.len() != self.page_bytes()
            || slot >= PAGE
            || !page.as_ptr().addr().is_multiple_of(4)
        {
            bail!(
                Internal,
                "position {slot} of a KV page of {} bytes; it has {}",
                page.len(),
                self.page_bytes()
            );
        }
        match self.kind {
            KvType::F16 => put(cast(page), slot, self.dim, keys, values, |x| {
                f16::from_f32(x).to_bits()
            }),
            KvType::F32 => put(cast(page), slot, self.dim, keys, values, f32::to_bits),
        }
        Ok(())
    }
}

/// The pages of one layer of one sequence, to read.
#[derive(Clone, Debug)]
pub struct KvPages<'a> {
    layout: KvLayout,
    pages: Vec<&'a [u8]>,
}

impl<'a> KvPages<'a> {
    /// `pages[i]` has the positions from 16 `i` on, aligned to four bytes; it is empty where positions are no longer kept.
    pub fn new(layout: KvLayout, pages: Vec<&'a [u8]>) -> Result<Self> {
        let bytes = layout.page_bytes();
        let is_page =
            |p: &[u8]| p.len() == bytes && p.as_ptr().addr().is_multiple_of(size_of::<f32>());
        if let Some(page) = pages.iter().find(|p| !p.is_empty() && !is_page(p)) {
            let (len, at) = (page.len(), page.as_ptr());
            bail!(
                Internal,
                "a KV page of {len} bytes at {at:?}; it has {bytes}, aligned to four"
            );
        }
        Ok(KvPages { layout, pages })
    }

    /// Shape and element type.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// The pages that have all of these positions.
    pub(super) fn covering(&self, positions: Range<usize>) -> Result<&[&'a [u8]]> {
        let needed = positions.start / PAGE..positions.end.div_ceil(PAGE);
        let kept = self.pages.get(needed.clone()).unwrap_or(&[]);
        if kept.len() < needed.len() || kept.iter().any(|page| page.is_empty()) {
            bail!(
                InvalidArgument,
                "attention over positions {positions:?}; the cache holds {}",
                self.pages.len() * PAGE
            );
        }
        Ok(&self.pages[..needed.end])
    }
}

fn cast<T>(page: &mut [u8]) -> &mut [T] {
    let len = page.len() / size_of::<T>();
    // SAFETY: the page is aligned to four bytes, holds `len` whole elements, and T is u16 or u32, valid for any bytes.
    unsafe { std::slice::from_raw_parts_mut(page.as_mut_ptr().cast(), len) }
}

fn put<T>(
    page: &mut [T],
    slot: usize,
    dim: usize,
    keys: &[f32],
    values: &[f32],
    encode: impl Fn(f32) -> T,
) {
    for (head, page) in page.chunks_exact_mut(2 * PAGE * dim).enumerate() {
        let (page_keys, page_values) = page.split_at_mut(PAGE * dim);
        for (d, &x) in keys[head * dim..][..dim].iter().enumerate() {
            page_keys[d * PAGE + slot] = encode(x);
        }
        for (out, &x) in page_values[slot * dim..]
            .iter_mut()
            .zip(&values[head * dim..][..dim])
        {
            *out = encode(x);
        }
    }
}
