//! The one implementation of [`Checkpoint`]: sources, their stored tensors, and the logical entries formed of those. Readers of single
//! formats build it. Knows how values are decoded, not how any file describes them.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use half::f16;
use half::slice::HalfFloatSliceExt;
use once_cell::sync::OnceCell;

use super::ggml;
use super::int4::Int4;
use super::order::Order;
use super::source::{Source, Span};
use super::{Checkpoint, Encoding, Entry, Metadata, Part, Unreadable};
use crate::base::alloc::Budget;
use crate::base::error::{bail, err};
use crate::base::{Result, memory, size};
use crate::format::mxfp4::{self, ScaleExponents};
use crate::format::{e4m3, int8, nvfp4, swizzle};
use crate::tensor::DType;

/// A stored tensor. Its span has been checked to hold exactly the bytes for its encoding and shape.
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

    /// Rows and columns when seen as a matrix, as for an [`Entry`].
    pub(super) fn matrix(&self) -> (usize, usize) {
        let cols = self.shape.last().copied().unwrap_or(1);
        (self.elements() / cols, cols)
    }
}

/// Layout of the block scales of an NVFP4 entry in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scales {
    /// e4m3 bytes, row-major.
    Linear,
    /// e4m3 bytes in 128x4 tiles.
    Swizzled,
    /// Row-major binary16, as written by an old host.
    F16,
    /// Row-major binary32.
    F32,
}

/// Bytes read from a file at a time for decoding, unless a row or a head has more: few enough to stay in a core's own cache until they are
/// decoded.
const STAGING: usize = 64 << 10;

/// How the values of a stored tensor become those of its entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoredForm {
    /// The order of the rows of a matrix, and of the elements of a vector.
    pub(super) rows: Order,
    /// The order of the columns of a matrix.
    pub(super) columns: Order,
    pub(super) function: Function,
}

/// The function of an entry's values that is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    /// The values.
    Values,
    /// `x + 1`, as for norms of GGUF's gemma architectures.
    OnePlus,
    /// `-e^x`, as for the decay of recurrent heads in GGUF.
    NegatedExp,
}

impl StoredForm {
    /// The values, in order.
    pub(super) const AS_STORED: StoredForm = StoredForm {
        rows: Order::Same,
        columns: Order::Same,
        function: Function::Values,
    };
}

/// Scales of a float8 tensor. Each applies to a block of a matrix; blocks at the ends of rows and columns may be partial.
#[derive(Debug)]
pub(super) struct BlockScales {
    /// Row-major, one matrix after the other.
    pub(super) values: Vec<f32>,
    /// Rows of one matrix; a stack of experts has several.
    pub(super) matrix_rows: usize,
    /// Rows and columns of a block.
    pub(super) block: [usize; 2],
}

impl BlockScales {
    /// Applies the scales to the values of the whole row `row`.
    fn apply(&self, row: usize, values: &mut [f32]) {
        let [rows, cols] = self.block;
        let lines = self.matrix_rows.div_ceil(rows);
        let line = row / self.matrix_rows * lines + row % self.matrix_rows / rows;
        let blocks = values.len().div_ceil(cols);
        let scales = &self.values[line * blocks..][..blocks];
        for (values, scale) in values.chunks_mut(cols).zip(scales) {
            values.iter_mut().for_each(|v| *v *= scale);
        }
    }
}

/// Stored form of an entry; numbers are indices of [`Raw`] tensors.
#[derive(Debug)]
pub(super) enum Stored {
    /// One tensor, dense or in GGUF blocks.
    Plain { raw: usize, form: StoredForm },
    /// A dense stack of matrices, each stored by columns: `[matrices, columns, rows]`.
    Transposed { raw: usize },
    /// e4m3 values with one scale, or one per row, or one per block.
    ScaledF8 {
        raw: usize,
        scales: usize,
        block_scales: BlockScales,
    },
    /// int8 values with one scale, or one per row.
    Int8 {
        codes: usize,
        scales: usize,
        /// One for each row.
        row_scales: Vec<f32>,
        /// Whether codes are stored plus 128, as unsigned bytes.
        is_biased: bool,
        /// Other stored tensors that belong to it.
        also: Vec<usize>,
    },
    /// Codes and scales as two tensors.
    Nvfp4 {
        codes: usize,
        scales: usize,
        form: Scales,
        global: f32,
        /// Other stored tensors that belong to it.
        also: Vec<usize>,
    },
    /// A stack of matrices in MXFP4.
    Mxfp4 {
        at: Mxfp4At,
        /// The exponent of each matrix's global scale as NVFP4, and that scale; found when one is first asked for.
        globals: OnceCell<(Vec<i32>, Vec<f32>)>,
    },
    /// GGUF's NVFP4 blocks.
    GgufNvfp4 {
        raw: usize,
        rows: Order,
        /// [Keeps blocks](Order::keeps_blocks) of NVFP4.
        columns: Order,
        /// One for the whole tensor, or one per expert.
        globals: Vec<f32>,
        also: Option<usize>,
    },
    /// 4-bit integers of GPTQ or AWQ.
    Int4(Box<Int4>),
    /// bitsandbytes NF4.
    Nf4(Box<Nf4>),
}

/// Where MXFP4 codes and scales are.
#[derive(Clone, Copy, Debug)]
pub(super) enum Mxfp4At {
    /// In two tensors.
    Apart { codes: usize, scales: usize },
    /// In GGUF's blocks of both.
    Blocks { raw: usize },
}

impl Mxfp4At {
    /// The tensor with the scales.
    fn scales(self) -> usize {
        match self {
            Mxfp4At::Apart { scales, .. } => scales,
            Mxfp4At::Blocks { raw } => raw,
        }
    }
}

/// A bitsandbytes NF4 tensor. Blocks run over the flattened tensor.
#[derive(Debug)]
pub(super) struct Nf4 {
    pub(super) codes: usize,
    pub(super) absmax: usize,
    pub(super) block: usize,
    pub(super) table: [f32; 16],
    pub(super) nested: Option<Nested>,
    /// Other stored tensors that belong to it.
    pub(super) also: Vec<usize>,
}

/// The second level of NF4 scales: `absmax` then holds byte indices into `table`.
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
    unreadable: Vec<Unreadable>,
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
        let _names = Budget::tensors(logical.len()).set_aside()?;
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
            unreadable: Vec::new(),
            metadata,
        })
    }

    /// Adds the unreadable tensors of its files.
    pub(super) fn beside(self, unreadable: Vec<Unreadable>) -> Self {
        Tensors { unreadable, ..self }
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

    /// "file: 'entry'", the start of a message about a bad value.
    fn place(&self, raw: usize) -> String {
        let raw = &self.raws[raw];
        format!("{}: '{}'", self.sources[raw.span.source].name(), raw.key)
    }

    fn source(&self, raw: usize) -> &Source {
        &self.sources[self.raws[raw].span.source]
    }

    /// Byte range of whole `rows` of a tensor that has `all` rows of equal length.
    fn place_of(&self, raw: usize, all: usize, rows: Range<usize>) -> Range<usize> {
        let span = &self.raws[raw].span;
        let (start, stride) = (span.range.start, span.len() / all);
        start + rows.start * stride..start + rows.end * stride
    }

    /// Copies the bytes of whole rows to `out`.
    fn read_rows(&self, raw: usize, all: usize, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        self.source(raw)
            .read(self.place_of(raw, all, rows).start, out)
    }

    /// Calls `each` with the bytes of each row, and the number of rows before it.
    fn each_row(
        &self,
        raw: usize,
        all: usize,
        order: Order,
        rows: Range<usize>,
        mut each: impl FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let stride = self.raws[raw].span.len() / all;
        let most = (STAGING / stride.max(1)).max(1);
        let mut staging = Vec::new();
        let mut first = rows.start;
        while first < rows.end {
            let some = first..rows.end.min(order.run_end(first, all, most));
            let places = some.clone().map(|row| order.place(row, all));
            let low = places.clone().min().unwrap_or(first);
            let high = places.clone().max().unwrap_or(first);
            let place = self.place_of(raw, all, low..high + 1);
            let bytes = self.source(raw).slice(place, &mut staging)?;
            for (row, place) in some.clone().zip(places) {
                each(row - rows.start, &bytes[(place - low) * stride..][..stride])?;
            }
            first = some.end;
        }
        Ok(())
    }

    fn plain_f32(
        &self,
        entry: &Entry,
        raw: usize,
        form: StoredForm,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let encoding = self.raws[raw].encoding;
        let (all, cols) = (entry.rows(), entry.cols());
        // The elements of a vector are one row to the file.
        let (of_rows, within) = match entry.shape.len() {
            1 => (Order::Same, form.rows),
            _ => (form.rows, form.columns),
        };
        let mut stored = memory::zeros(if within == Order::Same { 0 } else { cols })?;
        self.each_row(raw, all, of_rows, rows.clone(), |i, bytes| {
            let out = &mut out[i * cols..][..cols];
            match within {
                Order::Same => decode(encoding, bytes, out),
                order => {
                    decode(encoding, bytes, &mut stored);
                    order.restore(&stored, out);
                }
            }
            match form.function {
                Function::Values => {}
                Function::OnePlus => out.iter_mut().for_each(|v| *v -= 1.0),
                Function::NegatedExp => {
                    if let Some(v) = out.iter().find(|v| !(v.is_finite() && **v < 0.0)) {
                        bail!(
                            CorruptFile,
                            "{}: it has {v}; expected finite numbers below 0, as -e^x is",
                            self.place(raw)
                        );
                    }
                    out.iter_mut().for_each(|v| *v = (-*v).ln());
                }
            }
            Ok(())
        })
    }

    /// Rows of a stack that is [`Stored::Transposed`]. Each stored line has one value of every row of a matrix.
    fn transposed_f32(
        &self,
        entry: &Entry,
        raw: usize,
        rows: Range<usize>,
        out: &mut [f32],
    ) -> Result<()> {
        let Raw { encoding, span, .. } = &self.raws[raw];
        let (Some(width), &[_, height, cols]) = (encoding.element_bytes(), &entry.shape[..]) else {
            bail!(Internal, "'{}' is no dense stack", entry.name);
        };
        let mut staging = Vec::new();
        let mut values = memory::zeros(rows.len().min(height))?;
        let mut first = rows.start;
        while first < rows.end {
            let end = rows.end.min((first / height + 1) * height);
            let values = &mut values[..end - first];
            for col in 0..cols {
                let line = first / height * cols + col;
                let start = span.range.start + (line * height + first % height) * width;
                let place = start..start + values.len() * width;
                decode(
                    *encoding,
                    self.source(raw).slice(place, &mut staging)?,
                    values,
                );
                let out = out[(first - rows.start) * cols + col..].iter_mut();
                out.step_by(cols).zip(&*values).for_each(|(o, v)| *o = *v);
            }
            first = end;
        }
        Ok(())
    }

    /// The row-major e4m3 scale bytes of `rows`.
    fn scale_rows(
        &self,
        entry: &Entry,
        scales: usize,
        form: Scales,
        rows: Range<usize>,
        out: &mut [u8],
    ) -> Result<()> {
        let (all, blocks) = (entry.rows(), entry.cols() / nvfp4::BLOCK);
        match form {
            Scales::Linear => self.read_rows(scales, all, rows.clone(), out)?,
            Scales::Swizzled => {
                // Rows of tiles are adjacent.
                let lines = all.div_ceil(swizzle::TILE_ROWS);
                let mut out = out.chunks_exact_mut(blocks);
                let mut staging = Vec::new();
                for line in rows.start / swizzle::TILE_ROWS..rows.end.div_ceil(swizzle::TILE_ROWS) {
                    let place = self.place_of(scales, lines, line..line + 1);
                    let bytes = self.source(scales).slice(place, &mut staging)?;
                    let first = line * swizzle::TILE_ROWS;
                    let in_line = rows.start.max(first)..rows.end.min(first + swizzle::TILE_ROWS);
                    for (row, out) in in_line.zip(&mut out) {
                        for (block, scale) in out.iter_mut().enumerate() {
                            *scale = bytes[swizzle::offset(row - first, block, blocks)];
                        }
                    }
                }
            }
            Scales::F16 | Scales::F32 => {
                let mut values = memory::zeros(blocks)?;
                self.each_row(scales, all, Order::Same, rows.clone(), |i, bytes| {
                    decode(self.raws[scales].encoding, bytes, &mut values);
                    let out = &mut out[i * blocks..][..blocks];
                    for (block, (scale, &value)) in out.iter_mut().zip(&values).enumerate() {
                        *scale = e4m3::encode(value);
                        // NaN and negative numbers are not valid scales, even if e4m3 can represent them.
                        if nvfp4::is_block_scale(*scale) && e4m3::decode(*scale) != value {
                            bail!(
                                Unsupported,
                                "{}: the scale of row {}, block {block} is {value}, which e4m3 cannot hold exactly",
                                self.place(scales),
                                rows.start + i
                            );
                        }
                    }
                    Ok(())
                })?;
            }
        }
        self.check_scales(scales, entry, rows.start, out)
    }

    /// Fails if a byte is not a block scale; `scales` are those of whole rows from `first_row` on.
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
        let (all, cols) = (entry.rows(), entry.cols());
        let blocks = cols / nvfp4::BLOCK;
        let run = (STAGING / (cols / 2)).max(1);
        let mut staging = Vec::new();
        let mut row_scales = memory::zeros::<u8>(run.min(rows.len()) * blocks)?;
        for (first, out) in rows.clone().step_by(run).zip(out.chunks_mut(run * cols)) {
            let some = first..rows.end.min(first + run);
            let row_scales = &mut row_scales[..some.len() * blocks];
            self.scale_rows(entry, scales, form, some.clone(), row_scales)?;
            let place = self.place_of(codes, all, some);
            let row_codes = self.source(codes).slice(place, &mut staging)?;
            nvfp4::dequantize(row_codes, row_scales, global, out)?;
        }
        Ok(())
    }

    /// Calls `each` with the codes and the checked scales of each row of [`Stored::GgufNvfp4`], and the number of rows before it.
    fn each_gguf_nvfp4_row(
        &self,
        entry: &Entry,
        stored: &Stored,
        of: Range<usize>,
        mut each: impl FnMut(usize, &[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let &Stored::GgufNvfp4 {
            raw, rows, columns, ..
        } = stored
        else {
            bail!(Internal, "'{}' has no blocks of GGUF's NVFP4", entry.name);
        };
        let (all, blocks) = (entry.rows(), entry.cols() / nvfp4::BLOCK);
        let (mut codes, mut scales) = (vec![[0; nvfp4::BLOCK / 2]; blocks], vec![0; blocks]);
        let (mut stored_codes, mut stored_scales) = (codes.clone(), scales.clone());
        let first = of.start;
        self.each_row(raw, all, rows, of, |i, bytes| {
            ggml::repack_nvfp4(bytes, stored_codes.as_flattened_mut(), &mut stored_scales);
            self.check_scales(raw, entry, first + i, &stored_scales)?;
            if columns == Order::Same {
                return each(i, stored_codes.as_flattened(), &stored_scales);
            }
            for block in 0..blocks {
                let at = columns.place(block * nvfp4::BLOCK, entry.cols()) / nvfp4::BLOCK;
                (codes[block], scales[block]) = (stored_codes[at], stored_scales[at]);
            }
            each(i, codes.as_flattened(), &scales)
        })
    }

    /// Fails if a scale of a row of an MXFP4 entry is NaN.
    fn check_mxfp4(&self, entry: &Entry, scales: usize, row: usize, bytes: &[u8]) -> Result<()> {
        match bytes.iter().position(|&scale| scale == mxfp4::NAN) {
            None => Ok(()),
            Some(block) => bail!(
                CorruptFile,
                "{}: the scale of expert {}, row {}, block {block} is {}, which is NaN",
                self.place(scales),
                row / entry.shape[1],
                row % entry.shape[1],
                mxfp4::NAN
            ),
        }
    }

    /// Calls `each` with the codes and the scales of each row of an MXFP4 entry, and the number of rows before it.
    fn each_mxfp4_row(
        &self,
        entry: &Entry,
        at: Mxfp4At,
        rows: Range<usize>,
        mut each: impl FnMut(usize, &[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let (all, cols) = (entry.rows(), entry.cols());
        let mut row_codes = memory::zeros::<u8>(cols / 2)?;
        let mut row_scales = memory::zeros::<u8>(cols / mxfp4::BLOCK)?;
        self.each_row(at.scales(), all, Order::Same, rows.clone(), |i, bytes| {
            let row = rows.start + i;
            let scales = match at {
                Mxfp4At::Apart { codes, .. } => {
                    self.read_rows(codes, all, row..row + 1, &mut row_codes)?;
                    bytes
                }
                Mxfp4At::Blocks { .. } => {
                    ggml::repack_mxfp4(bytes, &mut row_codes, &mut row_scales);
                    &row_scales
                }
            };
            self.check_mxfp4(entry, at.scales(), row, scales)?;
            each(i, &row_codes, scales)
        })
    }

    /// The exponents of the global scales with which the matrices of an MXFP4 entry are NVFP4 without loss, and those scales.
    fn mxfp4_globals<'a>(
        &self,
        entry: &Entry,
        at: Mxfp4At,
        globals: &'a OnceCell<(Vec<i32>, Vec<f32>)>,
    ) -> Result<&'a (Vec<i32>, Vec<f32>)> {
        globals.get_or_try_init(|| {
            let experts = 0..entry.shape[0];
            let exponents: Vec<i32> = experts
                .map(|expert| self.mxfp4_global(entry, at, expert))
                .collect::<Result<_>>()?;
            let scales = exponents.iter().map(|&e| mxfp4::global_scale(e)).collect();
            Ok((exponents, scales))
        })
    }

    /// The exponent of the global scale of one matrix. Codes in a tensor of their own are read only if they must change, because scales are
    /// too far apart.
    fn mxfp4_global(&self, entry: &Entry, at: Mxfp4At, expert: usize) -> Result<i32> {
        let (all, height, cols) = (entry.rows(), entry.shape[1], entry.cols());
        let rows = expert * height..(expert + 1) * height;
        let (mut found, mut largest) = (ScaleExponents::default(), 0);
        let mut add = |bytes: &[u8]| {
            found.add_scales(bytes);
            largest = bytes.iter().copied().fold(largest, u8::max);
        };
        match at {
            Mxfp4At::Apart { scales, .. } => {
                self.each_row(scales, all, Order::Same, rows.clone(), |i, bytes| {
                    self.check_mxfp4(entry, scales, rows.start + i, bytes)?;
                    add(bytes);
                    Ok(())
                })?;
            }
            Mxfp4At::Blocks { .. } => {
                self.each_mxfp4_row(entry, at, rows.clone(), |_, _, bytes| {
                    add(bytes);
                    Ok(())
                })?;
            }
        }
        if let Ok(exponent) = found.of_global()
            && mxfp4::decode(7, largest).is_finite()
        {
            return Ok(exponent);
        }
        let (mut found, mut values) = (ScaleExponents::default(), memory::zeros::<f32>(cols)?);
        self.each_mxfp4_row(entry, at, rows, |i, row_codes, bytes| {
            mxfp4::dequantize(row_codes, bytes, &mut values);
            if let Some(at_value) = values.iter().position(|v| v.is_infinite()) {
                let block = at_value / mxfp4::BLOCK;
                bail!(
                    CorruptFile,
                    "{}: the scale of expert {expert}, row {i}, block {block} is 2^{}, with which a value is too large for f32",
                    self.place(at.scales()),
                    mxfp4::exponent(bytes[block])
                );
            }
            found.add_blocks(row_codes, bytes);
            Ok(())
        })?;
        found.of_global().map_err(|(lowest, highest)| {
            err!(
                Unsupported,
                "{}: expert {expert} needs scales from 2^{lowest} to 2^{highest}, {} powers of two; NVFP4 holds 18 without loss",
                self.place(at.scales()),
                highest - lowest + 1
            )
        })
    }

    /// Reads the codes of `rows` of an int8 entry, and returns their scales.
    fn int8_rows<'a>(
        &self,
        entry: &Entry,
        stored: &'a Stored,
        rows: Range<usize>,
        codes: &mut [u8],
    ) -> Result<&'a [f32]> {
        let Stored::Int8 {
            codes: raw,
            row_scales,
            is_biased,
            ..
        } = stored
        else {
            return Err(err!(Internal, "'{}' is INT8 without codes", entry.name));
        };
        self.read_rows(*raw, entry.rows(), rows.clone(), codes)?;
        if *is_biased {
            codes.iter_mut().for_each(|code| *code ^= 0x80);
        }
        Ok(&row_scales[rows])
    }

    /// The values of the flattened tensor from `first` on.
    fn nf4_f32(&self, nf4: &Nf4, first: usize, out: &mut [f32]) -> Result<()> {
        let width = if nf4.nested.is_some() { 1 } else { 4 };
        let place = |raw: usize, range: Range<usize>| {
            let start = self.raws[raw].span.range.start;
            start + range.start..start + range.end
        };
        let (mut codes, mut absmax) = (Vec::new(), Vec::new());
        for (first, out) in (first..)
            .step_by(2 * STAGING)
            .zip(out.chunks_mut(2 * STAGING))
        {
            let end = first + out.len();
            let first_block = first / nf4.block;
            let codes = self
                .source(nf4.codes)
                .slice(place(nf4.codes, first / 2..end.div_ceil(2)), &mut codes)?;
            let blocks = first_block * width..end.div_ceil(nf4.block) * width;
            let absmax = self
                .source(nf4.absmax)
                .slice(place(nf4.absmax, blocks), &mut absmax)?;
            let mut index = first;
            let mut rest = out;
            while !rest.is_empty() {
                let block = index / nf4.block;
                let stored = &absmax[(block - first_block) * width..][..width];
                let scale = match &nf4.nested {
                    None => f32::from_le_bytes([stored[0], stored[1], stored[2], stored[3]]),
                    Some(n) => n.table[stored[0] as usize] * n.absmax[block / n.block] + n.offset,
                };
                let run = (nf4.block - index % nf4.block).min(rest.len());
                let (now, later) = rest.split_at_mut(run);
                for (i, value) in (index..).zip(now) {
                    let byte = codes[i / 2 - first / 2];
                    let code = if i % 2 == 0 { byte >> 4 } else { byte & 15 };
                    *value = nf4.table[code as usize] * scale;
                }
                index += run;
                rest = later;
            }
        }
        Ok(())
    }

    fn part(&self, raw: usize) -> Part<'_> {
        let raw = &self.raws[raw];
        Part {
            key: &raw.key,
            type_code: raw.type_code,
            offset: raw.span.range.start,
            shape: &raw.shape,
            bytes: raw.span.len(),
            source: raw.span.source,
        }
    }

    /// Call after reading from `stored`; see [`Source::check_unchanged`].
    fn check_unchanged(&self, stored: &Stored) -> Result<()> {
        let mut checked = None;
        for raw in Self::raws_of(stored) {
            let span = &self.raws[raw].span;
            if checked.replace(span.source) != Some(span.source) {
                self.sources[span.source].check_unchanged(span.range.start)?;
            }
        }
        Ok(())
    }

    /// The tensors that form an entry; the one with the values comes first.
    fn raws_of(stored: &Stored) -> Vec<usize> {
        match stored {
            Stored::Plain { raw, .. } | Stored::Transposed { raw } => vec![*raw],
            Stored::ScaledF8 { raw, scales, .. } => vec![*raw, *scales],
            Stored::Mxfp4 { at, .. } => match at {
                Mxfp4At::Apart { codes, scales } => vec![*codes, *scales],
                Mxfp4At::Blocks { raw } => vec![*raw],
            },
            Stored::Int8 {
                codes,
                scales,
                also,
                ..
            }
            | Stored::Nvfp4 {
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
            Stored::Int4(int4) => [int4.codes, int4.scales]
                .into_iter()
                .chain(int4.zeros)
                .chain(int4.biases)
                .chain(int4.also.iter().copied())
                .collect(),
            Stored::Nf4(nf4) => [nf4.codes, nf4.absmax]
                .into_iter()
                .chain(nf4.also.iter().copied())
                .collect(),
        }
    }
}

/// Fails unless `rows` are in `entry` and the buffer has their size.
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

/// Decodes a run of dense values or whole GGUF blocks.
pub(super) fn decode(encoding: Encoding, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
        for (o, b) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
            *o = value(*b);
        }
    }
    match encoding {
        Encoding::Dense(dtype) => match dtype {
            DType::F32 => each(bytes, out, f32::from_le_bytes),
            DType::BF16 => each(bytes, out, |b| {
                f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
            }),
            DType::F16 => f16_to_f32(bytes, out),
            DType::F64 => each(bytes, out, |b| f64::from_le_bytes(b) as f32),
            DType::U8 => each(bytes, out, |b: [u8; 1]| f32::from(b[0])),
            DType::I8 => each(bytes, out, |b| f32::from(i8::from_le_bytes(b))),
            DType::I16 => each(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
            DType::I32 => each(bytes, out, |b| i32::from_le_bytes(b) as f32),
            DType::I64 => each(bytes, out, |b| i64::from_le_bytes(b) as f32),
            DType::Bool => each(bytes, out, |b: [u8; 1]| f32::from(u8::from(b[0] != 0))),
            DType::F8E4M3 => each(bytes, out, |b: [u8; 1]| e4m3::decode(b[0])),
            DType::F4E2M1x2 => unreachable!("packed codes are bytes to a file"),
        },
        Encoding::Ggml(block_type) => ggml::decode(block_type, bytes, out),
        Encoding::Nvfp4 | Encoding::Mxfp4 | Encoding::Int8 | Encoding::Int4 | Encoding::Nf4 => {
            unreachable!("several tensors make up {encoding}")
        }
    }
}

/// Converts through an aligned buffer, so that the conversion is vectorized for any alignment of the bytes.
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

    fn unreadable(&self) -> &[Unreadable] {
        &self.unreadable
    }

    fn rows_f32(&self, entry: &Entry, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let stored = self.stored(entry)?;
        check_rows(entry, &rows, entry.cols(), out.len(), "the output")?;
        if rows.is_empty() {
            return Ok(());
        }
        match stored {
            Stored::Plain { raw, form } => self.plain_f32(entry, *raw, *form, rows, out)?,
            Stored::Transposed { raw } => self.transposed_f32(entry, *raw, rows, out)?,
            Stored::ScaledF8 {
                raw, block_scales, ..
            } => {
                self.plain_f32(entry, *raw, StoredForm::AS_STORED, rows.clone(), out)?;
                for (row, out) in rows.zip(out.chunks_exact_mut(entry.cols())) {
                    block_scales.apply(row, out);
                }
            }
            Stored::Int8 { .. } => {
                let cols = entry.cols();
                let run = (STAGING / cols).max(1);
                let mut codes = memory::zeros::<u8>(run.min(rows.len()) * cols)?;
                for (first, out) in rows.clone().step_by(run).zip(out.chunks_mut(run * cols)) {
                    let some = first..rows.end.min(first + run);
                    let codes = &mut codes[..some.len() * cols];
                    let scales = self.int8_rows(entry, stored, some, codes)?;
                    int8::dequantize_rows(codes, scales, cols, out)?;
                }
            }
            Stored::Nvfp4 {
                codes,
                scales,
                form,
                global,
                ..
            } => self.nvfp4_f32(entry, (*codes, *scales, *form, *global), rows, out)?,
            Stored::Mxfp4 { at, .. } => {
                let cols = entry.cols();
                self.each_mxfp4_row(entry, *at, rows, |i, row_codes, row_scales| {
                    mxfp4::dequantize(row_codes, row_scales, &mut out[i * cols..][..cols]);
                    Ok(())
                })?;
            }
            Stored::GgufNvfp4 { globals, .. } => {
                let (cols, share) = (entry.cols(), entry.rows() / globals.len());
                let first = rows.start;
                self.each_gguf_nvfp4_row(entry, stored, rows, |i, codes, scales| {
                    let global = globals[(first + i) / share];
                    nvfp4::dequantize(codes, scales, global, &mut out[i * cols..][..cols])
                })?;
            }
            Stored::Int4(int4) => {
                let read = |raw: usize, range: Range<usize>, to: &mut Vec<u8>| {
                    to.resize(range.len(), 0);
                    let start = self.raws[raw].span.range.start;
                    self.source(raw).read(start + range.start, to)
                };
                int4.rows_f32(rows, read, out)?;
            }
            Stored::Nf4(nf4) => self.nf4_f32(nf4, rows.start * entry.cols(), out)?,
        }
        self.check_unchanged(stored)
    }

    fn rows_nvfp4(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<()> {
        let stored = self.stored(entry)?;
        if !entry.encoding.reads_as_nvfp4() {
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
                self.read_rows(*from, all, rows.clone(), codes)?;
                self.scale_rows(entry, *from_scales, *form, rows, scales)?;
            }
            Stored::Mxfp4 { at, globals } => {
                let (exponents, _) = self.mxfp4_globals(entry, *at, globals)?;
                let first = rows.start;
                self.each_mxfp4_row(entry, *at, rows, |i, row_codes, row_scales| {
                    let row = first + i;
                    let codes = &mut codes[i * code_cols..][..code_cols];
                    let scales = &mut scales[i * scale_cols..][..scale_cols];
                    codes.copy_from_slice(row_codes);
                    let global = exponents[row / entry.shape[1]];
                    mxfp4::to_nvfp4(global, row_scales, codes, scales).map_err(|block| {
                        let place = self.place(at.scales());
                        err!(
                            Internal,
                            "{place}: row {row}, block {block} has no exact form"
                        )
                    })
                })?;
            }
            Stored::GgufNvfp4 { .. } => {
                self.each_gguf_nvfp4_row(entry, stored, rows, |i, row_codes, row_scales| {
                    codes[i * code_cols..][..code_cols].copy_from_slice(row_codes);
                    scales[i * scale_cols..][..scale_cols].copy_from_slice(row_scales);
                    Ok(())
                })?;
            }
            Stored::Plain { .. }
            | Stored::Transposed { .. }
            | Stored::ScaledF8 { .. }
            | Stored::Int8 { .. }
            | Stored::Int4(_)
            | Stored::Nf4(_) => {
                return Err(err!(Internal, "'{}' is NVFP4 without codes", entry.name));
            }
        }
        self.check_unchanged(stored)
    }

    fn rows_int8(
        &self,
        entry: &Entry,
        rows: Range<usize>,
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<()> {
        let stored = self.stored(entry)?;
        if entry.encoding != Encoding::Int8 {
            bail!(
                InvalidArgument,
                "'{}' is {}, not {}",
                entry.name,
                entry.encoding,
                Encoding::Int8
            );
        }
        check_rows(entry, &rows, entry.cols(), codes.len(), "the code buffer")?;
        check_rows(entry, &rows, 1, scales.len(), "the scale buffer")?;
        scales.copy_from_slice(self.int8_rows(entry, stored, rows, codes)?);
        self.check_unchanged(stored)
    }

    fn global_scales(&self, entry: &Entry) -> Result<&[f32]> {
        match self.stored(entry)? {
            Stored::Nvfp4 { global, .. } => Ok(std::slice::from_ref(global)),
            Stored::GgufNvfp4 { globals, .. } => Ok(globals),
            Stored::Mxfp4 { at, globals } => Ok(&self.mxfp4_globals(entry, *at, globals)?.1),
            _ => bail!(
                InvalidArgument,
                "'{}' is {}, which has no global scale",
                entry.name,
                entry.encoding
            ),
        }
    }

    fn plain(&self, entry: &Entry) -> Option<Part<'_>> {
        match self.stored(entry).ok()? {
            Stored::Plain {
                raw,
                form: StoredForm::AS_STORED,
            } => Some(self.part(*raw)),
            _ => None,
        }
    }

    fn parts(&self, entry: &Entry) -> Result<Vec<Part<'_>>> {
        let raws = Self::raws_of(self.stored(entry)?);
        Ok(raws.into_iter().map(|raw| self.part(raw)).collect())
    }

    fn read_part(&self, part: &Part<'_>, at: usize, out: &mut [u8]) -> Result<()> {
        if at.checked_add(out.len()).is_none_or(|end| end > part.bytes) {
            bail!(
                InvalidArgument,
                "'{}' has {} bytes; {} at offset {at} in it were asked for",
                part.key,
                part.bytes,
                out.len()
            );
        }
        let Some(source) = self.sources.get(part.source) else {
            bail!(NotFound, "'{}' is a part of another checkpoint", part.key);
        };
        source.read(part.offset + at, out)?;
        source.check_unchanged(part.offset + at)
    }

    fn metadata(&self) -> &Metadata {
        &self.metadata
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_runs_convert_whole() {
        let values: Vec<f16> = (0..600)
            .map(|i| f16::from_f32(i as f32 / 8.0 - 30.0))
            .collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut out = vec![0.0; values.len()];
        decode(Encoding::Dense(DType::F16), &bytes, &mut out);
        assert!(out.iter().zip(&values).all(|(o, v)| *o == v.to_f32()));
    }
}
