//! Cached keys and values of one layer, in pages of sixteen positions: for each key/value head, keys `[dim][16]` (so that a vector lane is
//! a position), then values `[16][dim]`. In 8 bits their f32 scales follow: those of the keys `[16]`, then those of the values `[16]`. The
//! memory is the caller's.

use std::ops::Range;

use half::f16;

use crate::base::error::{Result, bail};
use crate::base::size::product;
use crate::format::f8;
use crate::tensor::KvType;

/// Positions in a page.
pub const PAGE: usize = 16;

/// The pages of one layer: for each key/value head, keys `[dim][16]`, then values `[16][dim]`, then scales, if the type has any.
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
        let elements = product("KV page", &[heads, 2, PAGE, dim, kind.element_bytes()])?;
        if elements
            .checked_add(heads * 2 * PAGE * kind.scale_bytes())
            .is_none()
        {
            bail!(
                InvalidArgument,
                "a page of {heads} heads of {dim} has more bytes than addresses"
            );
        }
        Ok(KvLayout { heads, dim, kind })
    }

    /// Bytes of a head's part of a page.
    pub(super) fn head_bytes(&self) -> usize {
        2 * PAGE * self.kind.vector_bytes(self.dim)
    }

    /// Bytes of one page over all heads.
    pub fn page_bytes(&self) -> usize {
        self.heads * self.head_bytes()
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
        let heads = page.chunks_exact_mut(self.head_bytes());
        let vectors = keys
            .chunks_exact(self.dim)
            .zip(values.chunks_exact(self.dim));
        for (head, (key, value)) in heads.zip(vectors) {
            let (elements, scales) =
                head.split_at_mut(2 * PAGE * self.dim * self.kind.element_bytes());
            match self.kind {
                KvType::F16 => {
                    let to_f16 = |x| f16::from_f32(x).to_bits();
                    put(cast(elements), slot, (key, to_f16), (value, to_f16));
                }
                KvType::F32 => put(
                    cast(elements),
                    slot,
                    (key, f32::to_bits),
                    (value, f32::to_bits),
                ),
                KvType::F8 => {
                    let of_both = [f8::scale_of(key), f8::scale_of(value)];
                    let to_f8 = |scale| move |x| f8::encode(x, scale);
                    let [key_scale, value_scale] = of_both;
                    put(
                        elements,
                        slot,
                        (key, to_f8(key_scale)),
                        (value, to_f8(value_scale)),
                    );
                    for (to, scale) in cast::<f32>(scales).chunks_exact_mut(PAGE).zip(of_both) {
                        to[slot] = scale;
                    }
                }
            }
        }
        Ok(())
    }

    /// Checks a page of a file, of which the first `held` positions are in use: fails if a scale or a code there has no finite value. Zeroes
    /// the codes and scales of the positions after them.
    pub fn check_read(&self, page: &mut [u8], held: usize) -> Result<()> {
        if self.kind != KvType::F8 {
            return Ok(());
        }
        for (head, page) in page.chunks_exact_mut(self.head_bytes()).enumerate() {
            let (codes, scales) = page.split_at_mut(2 * PAGE * self.dim);
            let (keys, values) = codes.split_at_mut(PAGE * self.dim);
            // A position is a column of the keys and a row of the values.
            for row in keys.chunks_exact_mut(PAGE) {
                row[held..].fill(0);
            }
            values[held * self.dim..].fill(0);
            for scales in cast::<f32>(scales).chunks_exact_mut(PAGE) {
                scales[held..].fill(0.0);
                if let Some(i) = scales.iter().position(|&scale| !f8::is_scale(scale)) {
                    bail!(
                        CorruptFile,
                        "position {i} of a page of keys and values has the scale {:?} in head {head}; scales are 0 or positive and finite",
                        scales[i]
                    );
                }
            }
            if keys.iter().chain(&*values).any(|&code| f8::is_nan(code)) {
                bail!(
                    CorruptFile,
                    "a page of keys and values has the code of NaN in head {head}"
                );
            }
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

/// Bytes of a page as elements.
fn cast<T: Bits>(bytes: &mut [u8]) -> &mut [T] {
    let len = bytes.len() / size_of::<T>();
    assert!(bytes.as_ptr().addr().is_multiple_of(align_of::<T>()));
    // SAFETY: aligned, as was just checked; the bytes hold `len` whole elements, whose type is valid for any bytes.
    unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), len) }
}

/// Types that are valid for any bytes.
///
/// # Safety
/// Implementations have no invalid values and no padding.
unsafe trait Bits {}
// SAFETY: an integer.
unsafe impl Bits for u16 {}
// SAFETY: an integer.
unsafe impl Bits for u32 {}
// SAFETY: any bits are a number or NaN.
unsafe impl Bits for f32 {}

/// Writes a key and a value at position `slot` of a head's elements, each with its conversion.
fn put<T>(
    elements: &mut [T],
    slot: usize,
    (key, of_key): (&[f32], impl Fn(f32) -> T),
    (value, of_value): (&[f32], impl Fn(f32) -> T),
) {
    let dim = key.len();
    let (keys, values) = elements.split_at_mut(PAGE * dim);
    for (row, &x) in keys.chunks_exact_mut(PAGE).zip(key) {
        row[slot] = of_key(x);
    }
    for (to, &x) in values[slot * dim..].iter_mut().zip(value) {
        *to = of_value(x);
    }
}
