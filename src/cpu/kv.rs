//! Cached keys and values of one layer, in pages of sixteen positions: for each key/value head, keys `[dim][16]` (so that a vector lane is
//! a position), then values `[16][dim]`. Pages are allocated as positions are written, and shared with clones until either side writes.

use std::sync::Arc;

use half::f16;

use crate::base::error::{Result, bail};
use crate::base::memory::{Buffer, Tag};
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

/// The KV cache of one layer.
#[derive(Clone, Debug)]
pub struct KvLayer {
    heads: usize,
    dim: usize,
    kind: KvType,
    pages: Vec<Arc<Buffer<u8>>>,
}

impl KvLayer {
    /// An empty cache for `heads` key/value heads of `dim`, a multiple of 16.
    pub fn new(heads: usize, dim: usize, kind: KvType) -> Result<Self> {
        if heads == 0 || dim == 0 || !dim.is_multiple_of(16) {
            bail!(
                Unsupported,
                "a KV cache of {heads} heads of {dim}: heads must be positive and head_dim a positive multiple of 16"
            );
        }
        product("KV page", &[heads, 2, PAGE, dim, kind.size()])?;
        Ok(KvLayer {
            heads,
            dim,
            kind,
            pages: Vec::new(),
        })
    }

    /// Bytes of one page over all heads.
    pub fn page_bytes(&self) -> usize {
        self.heads * 2 * PAGE * self.dim * self.kind.size()
    }

    /// Bytes of the pages in this cache, shared or not.
    pub fn bytes(&self) -> usize {
        self.pages.len() * self.page_bytes()
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

    /// Number of positions that pages exist for.
    pub fn allocated(&self) -> usize {
        self.pages.len() * PAGE
    }

    /// Allocates pages for positions `0..len`, and unshares those from `first` on, so that writing cannot fail.
    pub fn reserve(&mut self, first: usize, len: usize) -> Result<()> {
        while self.pages.len() * PAGE < len {
            self.pages
                .push(Arc::new(Buffer::zeroed(Tag::KvCache, self.page_bytes())?));
        }
        for page in self
            .pages
            .iter_mut()
            .take(len.div_ceil(PAGE))
            .skip(first / PAGE)
        {
            if Arc::get_mut(page).is_none() {
                *page = Arc::new(Buffer::from_slice(Tag::KvCache, page)?);
            }
        }
        Ok(())
    }

    /// Frees the pages past position `len`.
    pub fn truncate(&mut self, len: usize) {
        self.pages.truncate(len.div_ceil(PAGE));
    }

    /// Writes keys and values, each `[m, heads, dim]`, at positions `first..first + m`.
    pub fn write(&mut self, first: usize, keys: &[f32], values: &[f32]) -> Result<()> {
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
        let m = keys.len() / row;
        self.reserve(first, first + m)?;
        for (i, (keys, values)) in keys
            .chunks_exact(row)
            .zip(values.chunks_exact(row))
            .enumerate()
        {
            let position = first + i;
            let page = Arc::get_mut(&mut self.pages[position / PAGE])
                .expect("reserve made the page this cache's own");
            match self.kind {
                KvType::F16 => put(cast(page), position % PAGE, self.dim, keys, values, |x| {
                    f16::from_f32(x).to_bits()
                }),
                KvType::F32 => put(
                    cast(page),
                    position % PAGE,
                    self.dim,
                    keys,
                    values,
                    f32::to_bits,
                ),
            }
        }
        Ok(())
    }

    /// The bytes, over all heads, of the page that begins at position `PAGE * index`.
    pub fn page(&self, index: usize) -> &[u8] {
        &self.pages[index]
    }

    /// Replaces the content of an existing page by that of [`KvLayer::page`].
    pub fn set_page(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.page_bytes() {
            bail!(
                InvalidArgument,
                "a KV page has {} bytes, not {}",
                self.page_bytes(),
                bytes.len()
            );
        }
        self.reserve(index * PAGE, (index + 1) * PAGE)?;
        Arc::get_mut(&mut self.pages[index])
            .expect("reserve made the page this cache's own")
            .copy_from_slice(bytes);
        Ok(())
    }
}

fn cast<T>(page: &mut Buffer<u8>) -> &mut [T] {
    let len = page.len() / size_of::<T>();
    // SAFETY: the buffer is 64-byte aligned, holds `len` whole elements, and T is u16 or u32, valid for any bytes.
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
