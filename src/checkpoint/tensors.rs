//! The one implementation of [`Checkpoint`]: sources, the tensors that lie in them, and the logical entries made of those.
//! Readers of single formats only build it. Knows how values are decoded, not how any file describes them.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::gguf::blocks;
use super::source::{Source, Span};
use super::{Checkpoint, Encoding, Entry, Metadata, Part};
use crate::base::error::{bail, err};
use crate::base::{Result, size};
use crate::format::{e4m3, nvfp4, swizzle};

/// A tensor as the file describes it. Its span has been checked to hold exactly the bytes that encoding and shape need.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) key: String,
    pub(super) type_code: u32,
    pub(super) encoding: Encoding,
    pub(super) shape: Vec<usize>,
    pub(super) span: Span,
}

impl Raw {
    pub(super) fn described(&self) -> (Encoding, &[usize]) {
        (self.encoding, &self.shape)
    }

    pub(super) fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How the block scales of an NVFP4 entry lie in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scales {
    /// e4m3 bytes, row-major.
    Linear,
    /// e4m3 bytes in 128x4 tiles.
    Swizzled,
    /// Row-major binary16, as an old host wrote them.
    F16,
    /// Row-major binary32.
    F32,
}

/// What an entry is made of; numbers are indices of [`Raw`] tensors.
#[derive(Debug)]
pub(super) enum Stored {
    /// One tensor, dense or in GGUF blocks. `heads` is set where the rows of each of that many attention heads lie in the
    /// interleaved order of GGUF's llama architecture.
    Plain { raw: usize, heads: Option<usize> },
    /// e4m3 values with one multiplier, or one per row.
    ScaledF8 {
        raw: usize,
        scales: usize,
        multipliers: Vec<f32>,
    },
    /// Codes and scales as two tensors.
    Nvfp4 {
        codes: usize,
        scales: usize,
        form: Scales,
        global: f32,
        /// Other tensors that belong to it.
        also: Vec<usize>,
    },
    /// GGUF's NVFP4 blocks.
    GgufNvfp4 {
        raw: usize,
        heads: Option<usize>,
        global: f32,
        also: Option<usize>,
    },
    /// bitsandbytes NF4.
    Nf4(Box<Nf4>),
}

/// A bitsandbytes NF4 tensor. Blocks run over the flattened tensor.
#[derive(Debug)]
pub(super) struct Nf4 {
    pub(super) codes: usize,
    pub(super) absmax: usize,
    pub(super) block: usize,
    pub(super) table: [f32; 16],
    pub(super) nested: Option<Nested>,
    /// Other tensors that belong to it.
    pub(super) also: Vec<usize>,
}

/// The second level of NF4 scales: `absmax` then holds bytes into `table`.
#[derive(Debug)]
pub(super) struct Nested {
    pub(super) absmax: Vec<f32>,
    pub(super) table: Box<[f32; 256]>,
    pub(super) block: usize,
    pub(super) offset: f32,
}

/// An opened checkpoint of any format.
pub(super) struct Tensors {
    format: &'static str,
    sources: Vec<Source>,
    raws: Vec<Raw>,
    entries: Vec<Entry>,
    stored: Vec<Stored>,
    index: HashMap<String, usize>,
    metadata: Metadata,
}

impl Tensors {
    pub(super) fn new(
        format: &'static str,
        sources: Vec<Source>,
        raws: Vec<Raw>,
        logical: Vec<(Entry, Stored)>,
        metadata: Metadata,
    ) -> Result<Self> {
        let mut index = HashMap::with_capacity(logical.len());
        let mut entries = Vec::with_capacity(logical.len());
        let mut stored = Vec::with_capacity(logical.len());
        for (i, (entry, form)) in logical.into_iter().enumerate() {
            if index.insert(entry.name.clone(), i).is_some() {
                let raw = Self::raws_of(&form).first().map(|&r| &raws[r]);
                bail!(
                    CorruptFile,
                    "{}: two tensors are both '{}'",
                    raw.map_or("", |r| sources[r.span.source].name()),
                    entry.name
                );
            }
            entries.push(entry);
            stored.push(form);
        }
        Ok(Tensors {
            format,
            sources,
            raws,
            entries,
            stored,
            index,
            metadata,
        })
    }

    fn stored(&self, entry: &Entry) -> Result<&Stored> {
        match self.index.get(&entry.name) {
            Some(&i) if self.entries[i] == *entry => Ok(&self.stored[i]),
            _ => bail!(
                NotFound,
                "'{}' is not an entry of {}",
                entry.name,
                self.sources.first().map_or("", Source::name)
            ),
        }
    }

    fn raw_bytes(&self, raw: usize) -> &[u8] {
        let span = &self.raws[raw].span;
        &self.sources[span.source].bytes()[span.range.clone()]
    }

    /// "file: 'entry'", the start of a message about a bad value.
    fn place(&self, raw: usize) -> String {
        let raw = &self.raws[raw];
        format!("{}: '{}'", self.sources[raw.span.source].name(), raw.key)
    }

    /// The bytes of whole `rows` of a tensor whose rows are equally long.
    fn row_bytes(&self, raw: usize, all_rows: usize, rows: Range<usize>) -> &[u8] {
        let bytes = self.raw_bytes(raw);
        let stride = bytes.len() / all_rows;
        &bytes[rows.start * stride..rows.end * stride]
    }

    fn plain_f32(
        &self,
        entry: &Entry,
        raw: usize,
        heads: Option<usize>,
        rows: Range<usize>,
        out: &mut [f32],
    ) {
        let encoding = self.raws[raw].encoding;
        let all = entry.rows();
        let Some(heads) = heads else {
            return decode(encoding, self.row_bytes(raw, all, rows), out);
        };
        let cols = entry.cols();
        if entry.shape.len() == 1 {
            let mut stored = vec![0.0; cols];
            decode(encoding, self.row_bytes(raw, 1, 0..1), &mut stored);
            for (i, value) in out.iter_mut().enumerate() {
                *value = stored[interleaved(i, cols / heads)];
            }
            return;
        }
        for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
            let from = interleaved(row, all / heads);
            decode(encoding, self.row_bytes(raw, all, from..from + 1), out);
        }
    }

    /// The e4m3 scale bytes of one row.
    fn scale_row(
        &self,
        entry: &Entry,
        scales: usize,
        form: Scales,
        row: usize,
        out: &mut [u8],
    ) -> Result<()> {
        let blocks = entry.cols() / nvfp4::BLOCK;
        let bytes = self.raw_bytes(scales);
        match form {
            Scales::Linear => out.copy_from_slice(&bytes[row * blocks..(row + 1) * blocks]),
            Scales::Swizzled => {
                for (block, scale) in out.iter_mut().enumerate() {
                    *scale = bytes[swizzle::offset(row, block, blocks)];
                }
            }
            Scales::F16 | Scales::F32 => {
                let mut values = vec![0.0; blocks];
                let width = if form == Scales::F16 { 2 } else { 4 };
                let row_bytes = &bytes[row * blocks * width..(row + 1) * blocks * width];
                decode(self.raws[scales].encoding, row_bytes, &mut values);
                for (block, (scale, &value)) in out.iter_mut().zip(&values).enumerate() {
                    *scale = e4m3::encode(value);
                    // NaN and negative numbers are no scales, whether e4m3 holds them or not.
                    if nvfp4::is_block_scale(*scale) && e4m3::decode(*scale) != value {
                        bail!(
                            Unsupported,
                            "{}: the scale of row {row}, block {block} is {value}, which e4m3 cannot hold exactly",
                            self.place(scales)
                        );
                    }
                }
            }
        }
        self.check_scales(scales, entry, row, out)
    }

    /// Refuses bytes that are no block scales, those of whole rows from `first_row` on.
    fn check_scales(
        &self,
        scales: usize,
        entry: &Entry,
        first_row: usize,
        bytes: &[u8],
    ) -> Result<()> {
        nvfp4::check_block_scales(bytes, first_row, entry.cols() / nvfp4::BLOCK)
            .map_err(|e| err!(CorruptFile, "{}: {}", self.place(scales), e.message()))
    }

    fn nvfp4_f32(
        &self,
        entry: &Entry,
        (codes, scales, form, global): (usize, usize, Scales, f32),
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let all = entry.rows();
        let cols = entry.cols();
        if form == Scales::Linear {
            let scale_bytes = self.row_bytes(scales, all, rows.clone());
            self.check_scales(scales, entry, rows.start, scale_bytes)?;
            return nvfp4::dequantize(self.row_bytes(codes, all, rows), scale_bytes, global, out);
        }
        let mut row_scales = vec![0u8; cols / nvfp4::BLOCK];
        for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
            self.scale_row(entry, scales, form, row, &mut row_scales)?;
            let row_codes = self.row_bytes(codes, all, row..row + 1);
            nvfp4::dequantize(row_codes, &row_scales, global, out)?;
        }
        Ok(())
    }

    /// Codes and scales of one row of GGUF's blocks.
    fn gguf_nvfp4_row(
        &self,
        entry: &Entry,
        raw: usize,
        heads: Option<usize>,
        row: usize,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        let all = entry.rows();
        let from = heads.map_or(row, |h| interleaved(row, all / h));
        blocks::repack_nvfp4(self.row_bytes(raw, all, from..from + 1), codes, scales);
        self.check_scales(raw, entry, row, scales)
    }

    fn nf4_f32(&self, nf4: &Nf4, first: usize, out: &mut [f32]) {
        let codes = self.raw_bytes(nf4.codes);
        let absmax = self.raw_bytes(nf4.absmax);
        let mut index = first;
        let mut rest = out;
        while !rest.is_empty() {
            let block = index / nf4.block;
            let scale = match &nf4.nested {
                None => {
                    let b = &absmax[block * 4..block * 4 + 4];
                    f32::from_le_bytes([b[0], b[1], b[2], b[3]])
                }
                Some(n) => n.table[absmax[block] as usize] * n.absmax[block / n.block] + n.offset,
            };
            let run = (nf4.block - index % nf4.block).min(rest.len());
            let (now, later) = rest.split_at_mut(run);
            for (i, value) in (index..).zip(now) {
                let byte = codes[i / 2];
                let code = if i % 2 == 0 { byte >> 4 } else { byte & 15 };
                *value = nf4.table[code as usize] * scale;
            }
            index += run;
            rest = later;
        }
    }

    /// The tensors that make up an entry, the one with the values first.
    fn raws_of(stored: &Stored) -> Vec<usize> {
        match stored {
            Stored::Plain { raw, .. } => vec![*raw],
            Stored::ScaledF8 { raw, scales, .. } => vec![*raw, *scales],
            Stored::Nvfp4 {
                codes,
                scales,
                also,
                ..
            } => [*codes, *scales]
                .into_iter()
                .chain(also.iter().copied())
                .collect(),
            Stored::GgufNvfp4 { raw, also, .. } => {
                [*raw].into_iter().chain(also.iter().copied()).collect()
            }
            Stored::Nf4(nf4) => [nf4.codes, nf4.absmax]
                .into_iter()
                .chain(nf4.also.iter().copied())
                .collect(),
        }
    }
}

/// Checks that `rows` lies in `entry` and that a buffer holds them.
fn check_rows(
    entry: &Entry,
    rows: &Range<usize>,
    per_row: usize,
    got: usize,
    what: &str,
) -> Result<()> {
    if rows.start > rows.end || rows.end > entry.rows() {
        bail!(
            InvalidArgument,
            "'{}': rows {}..{} are not within its {} rows",
            entry.name,
            rows.start,
            rows.end,
            entry.rows()
        );
    }
    let need = size::product(&entry.name, &[rows.len(), per_row])?;
    if got != need {
        bail!(
            InvalidArgument,
            "'{}': {what} for rows {}..{} takes {need} elements, not {got}",
            entry.name,
            rows.start,
            rows.end
        );
    }
    Ok(())
}

/// Where row `row` of a Hugging Face projection lies in the order GGUF's llama architecture uses: within each head of
/// `width` rows, the two halves that rotate together are interleaved.
fn interleaved(row: usize, width: usize) -> usize {
    let within = row % width;
    let half = width / 2;
    row - within + 2 * (within % half) + within / half
}

/// Decodes a run of dense values or whole GGUF blocks.
fn decode(encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
        for (o, b) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
            *o = value(*b);
        }
    }
    match encoding {
        Encoding::F32 => each(bytes, out, f32::from_le_bytes),
        Encoding::BF16 => each(bytes, out, |b| {
            f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
        }),
        Encoding::F16 => f16_to_f32(bytes, out),
        Encoding::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
        Encoding::U8 => each(bytes, out, |b: [u8; 1]| f32::from(b[0])),
        Encoding::I8 => each(bytes, out, |b| f32::from(i8::from_le_bytes(b))),
        Encoding::I16 => each(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
        Encoding::I32 => each(bytes, out, |b| i32::from_le_bytes(b) as f32),
        Encoding::I64 => each(bytes, out, |b| i64::from_le_bytes(b) as f32),
        Encoding::Bool => each(bytes, out, |b: [u8; 1]| f32::from(u8::from(b[0] != 0))),
        Encoding::F8E4M3 => each(bytes, out, |b: [u8; 1]| e4m3::decode(b[0])),
        Encoding::Ggml(block_type) => blocks::decode(block_type, bytes, out),
        Encoding::Nvfp4 | Encoding::Nf4 => unreachable!("several tensors make up {encoding}"),
    }
}

/// Converts through an aligned buffer, so that the conversion runs on whole vectors wherever the bytes lie.
fn f16_to_f32(bytes: &[u8], out: &mut [f32]) {
    const RUN: usize = 256;
    let mut aligned = [f16::ZERO; RUN];
    for (bytes, out) in bytes.chunks(2 * RUN).zip(out.chunks_mut(RUN)) {
        let aligned = &mut aligned[..out.len()];
        for (h, b) in aligned.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *h = f16::from_le_bytes(*b);
        }
        aligned.convert_to_f32_slice(out);
    }
}

impl Checkpoint for Tensors {
    fn format(&self) -> &'static str {
        self.format
    }

    fn files(&self) -> Vec<&Path> {
        self.sources.iter().filter_map(Source::path).collect()
    }

    fn entries(&self) -> &[Entry] {
        &self.entries
    }

    fn find(&self, name: &str) -> Option<&Entry> {
        self.index.get(name).map(|&i| &self.entries[i])
    }

    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let stored = self.stored(entry)?;
        check_rows(entry, &rows, entry.cols(), out.len(), "the output")?;
        if rows.is_empty() {
            return Ok(());
        }
        match stored {
            Stored::Plain { raw, heads } => self.plain_f32(entry, *raw, *heads, rows, out),
            Stored::ScaledF8 {
                raw, multipliers, ..
            } => {
                self.plain_f32(entry, *raw, None, rows.clone(), out);
                for (row, out) in rows.zip(out.chunks_exact_mut(entry.cols())) {
                    let multiplier = multipliers[row % multipliers.len()];
                    out.iter_mut().for_each(|v| *v *= multiplier);
                }
            }
            Stored::Nvfp4 {
                codes,
                scales,
                form,
                global,
                ..
            } => self.nvfp4_f32(entry, (*codes, *scales, *form, *global), rows, out)?,
            Stored::GgufNvfp4 {
                raw, heads, global, ..
            } => {
                let cols = entry.cols();
                let (mut codes, mut scales) = (vec![0; cols / 2], vec![0; cols / nvfp4::BLOCK]);
                for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                    self.gguf_nvfp4_row(entry, *raw, *heads, row, &mut codes, &mut scales)?;
                    nvfp4::dequantize(&codes, &scales, *global, out)?;
                }
            }
            Stored::Nf4(nf4) => self.nf4_f32(nf4, rows.start * entry.cols(), out),
        }
        Ok(())
    }

    fn rows_nvfp4(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        let stored = self.stored(entry)?;
        if entry.encoding != Encoding::Nvfp4 {
            bail!(
                InvalidArgument,
                "'{}' is {}, not NVFP4",
                entry.name,
                entry.encoding
            );
        }
        let (code_cols, scale_cols) = (entry.cols() / 2, entry.cols() / nvfp4::BLOCK);
        check_rows(entry, &rows, code_cols, codes.len(), "the code buffer")?;
        check_rows(entry, &rows, scale_cols, scales.len(), "the scale buffer")?;
        if rows.is_empty() {
            return Ok(());
        }
        let all = entry.rows();
        match stored {
            Stored::Nvfp4 {
                codes: from,
                scales: from_scales,
                form,
                ..
            } => {
                codes.copy_from_slice(self.row_bytes(*from, all, rows.clone()));
                if *form == Scales::Linear {
                    scales.copy_from_slice(self.row_bytes(*from_scales, all, rows.clone()));
                    return self.check_scales(*from_scales, entry, rows.start, scales);
                }
                for (row, out) in rows.zip(scales.chunks_exact_mut(scale_cols)) {
                    self.scale_row(entry, *from_scales, *form, row, out)?;
                }
            }
            Stored::GgufNvfp4 { raw, heads, .. } => {
                for ((row, codes), scales) in rows
                    .zip(codes.chunks_exact_mut(code_cols))
                    .zip(scales.chunks_exact_mut(scale_cols))
                {
                    self.gguf_nvfp4_row(entry, *raw, *heads, row, codes, scales)?;
                }
            }
            Stored::Plain { .. } | Stored::ScaledF8 { .. } | Stored::Nf4(_) => {
                return Err(err!(Internal, "'{}' is NVFP4 without codes", entry.name));
            }
        }
        Ok(())
    }

    fn global_scale(&self, entry: &Entry) -> Result<f32> {
        match self.stored(entry)? {
            Stored::Nvfp4 { global, .. } | Stored::GgufNvfp4 { global, .. } => Ok(*global),
            _ => bail!(
                InvalidArgument,
                "'{}' is {}, which has no global scale",
                entry.name,
                entry.encoding
            ),
        }
    }

    fn bytes(&self, entry: &Entry) -> Option<&[u8]> {
        match self.stored(entry).ok()? {
            Stored::Plain { raw, heads: None } => Some(self.raw_bytes(*raw)),
            _ => None,
        }
    }

    fn parts(&self, entry: &Entry) -> Result<Vec<Part<'_>>> {
        let stored = self.stored(entry)?;
        Ok(Self::raws_of(stored)
            .into_iter()
            .map(|i| Part {
                key: &self.raws[i].key,
                type_code: self.raws[i].type_code,
                offset: self.raws[i].span.range.start,
                shape: &self.raws[i].shape,
                bytes: self.raw_bytes(i),
            })
            .collect())
    }

    fn release(&self, entry: &Entry, rows: Range<usize>) {
        let Ok(stored) = self.stored(entry) else {
            return;
        };
        let all = entry.rows();
        let rows = rows.start.min(all)..rows.end.min(all);
        if rows.is_empty() {
            return;
        }
        for i in Self::raws_of(stored) {
            let span = &self.raws[i].span;
            let at = |row: usize| {
                span.range.start + (span.len() as u128 * row as u128 / all as u128) as usize
            };
            self.sources[span.source].release(at(rows.start)..at(rows.end));
        }
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interleaved_order_is_a_permutation_within_each_head() {
        // Two heads of four rows: rotation pairs (0, 2) and (1, 3) lie side by side in the file.
        let order: Vec<usize> = (0..8).map(|r| interleaved(r, 4)).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
        let mut seen: Vec<usize> = (0..3 * 64).map(|r| interleaved(r, 64)).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..3 * 64));
    }

    #[test]
    fn f16_runs_convert_whole() {
        let values: Vec<f16> = (0..600)
            .map(|i| f16::from_f32(i as f32 / 8.0 - 30.0))
            .collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut out = vec![0.0; values.len()];
        decode(Encoding::F16, &bytes, &mut out);
        assert!(out.iter().zip(&values).all(|(o, v)| *o == v.to_f32()));
    }
}
