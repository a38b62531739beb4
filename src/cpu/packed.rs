//! Weights packed for the CPU kernels, once at load time. Sixteen rows form a group, and groups follow each other, so that a vector lane is
//! a row and no sum crosses lanes.
//!
//! An NVFP4 group is a run of chunks of four blocks (64 k): the codes of each block, then the block scales, `[4][16]`. A
//! block's codes are two units of 8 k by 16 rows in 64 bytes. Within a unit, each four rows have 16 bytes: eight for
//! k 0, 1 (low nibbles) and 4, 5 (high nibbles), row by row, then eight for k 2, 3 and 6, 7. A dense group is `[k][16]`. An int8
//! group is the f32 scales of its rows, `[16]`, and then the codes, `[k][16]`. Rows past the last are zeros, as are blocks past
//! the last of a chunk.

use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::base::error::{Result, bail, err};
use crate::base::mapping::Mapping;
use crate::base::memory::{Buffer, Plain, Tag};
use crate::base::size::product;
use crate::format::int8;
use crate::format::nvfp4::{self, BLOCK};
use crate::tensor::WeightType;

use half::{bf16, f16};

/// Rows in a group.
pub(super) const GROUP: usize = 16;
/// Bytes of a unit: 8 k by 16 rows.
pub(super) const UNIT_BYTES: usize = 64;
/// Blocks in a chunk, so that its scales fill a cache line.
pub(super) const CHUNK_BLOCKS: usize = 4;
/// Bytes of a chunk: a multiple of a cache line.
pub(super) const NVFP4_CHUNK_BYTES: usize = CHUNK_BLOCKS * (2 * UNIT_BYTES + GROUP);
/// Bytes of the row scales of an int8 group.
pub(super) const INT8_SCALE_BYTES: usize = GROUP * 4;
const _: () =
    assert!(NVFP4_CHUNK_BYTES.is_multiple_of(64) && BLOCK == 16 && CHUNK_BLOCKS * GROUP == 64);

/// Rows read from the source at a time.
const READ_ROWS: usize = 16 * GROUP;

/// A weight of shape `[rows, cols]`, packed. Immutable.
#[derive(Debug)]
pub struct Packed {
    rows: usize,
    cols: usize,
    kind: WeightType,
    global: f32,
    data: Data,
}

/// The bytes of a packed weight, at an address that is a multiple of [`Packed::ALIGN`].
#[derive(Debug)]
enum Data {
    Owned(Buffer<u8>),
    /// A range of a mapped file.
    Mapped(Arc<Mapping>, Range<usize>),
}

impl Deref for Data {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Data::Owned(buffer) => buffer,
            Data::Mapped(mapping, range) => &mapping[range.clone()],
        }
    }
}

/// A weight that is being packed.
struct Packing {
    rows: usize,
    cols: usize,
    kind: WeightType,
    global: f32,
    data: Buffer<u8>,
}

/// Reads e2m1 codes `[rows, cols / 2]` and e4m3 block scales `[rows, cols / 16]` of a range of rows.
pub type ReadNvfp4<'a> = dyn FnMut(Range<usize>, &mut [u8], &mut [u8]) -> Result<()> + 'a;
/// Reads the values `[rows, cols]` of a range of rows.
pub type ReadDense<'a> = dyn FnMut(Range<usize>, &mut [f32]) -> Result<()> + 'a;

/// Reads int8 codes `[rows, cols]` and the scales `[rows]` of a range of rows.
pub type ReadInt8<'a> = dyn FnMut(Range<usize>, &mut [u8], &mut [f32]) -> Result<()> + 'a;

/// The 8 codes of one row and unit, low nibble first, as the unit's four bytes: k and k + 4 share a byte.
const fn to_unit(codes: u32) -> u32 {
    const fn spread(nibbles: u32) -> u32 {
        let bytes = (nibbles | nibbles << 8) & 0x00ff_00ff;
        (bytes | bytes << 4) & 0x0f0f_0f0f
    }
    spread(codes & 0xffff) | spread(codes >> 16) << 4
}

/// The inverse of [`to_unit`].
const fn from_unit(bytes: u32) -> u32 {
    const fn gather(bytes: u32) -> u32 {
        let pairs = (bytes | bytes >> 4) & 0x00ff_00ff;
        (pairs | pairs >> 8) & 0xffff
    }
    gather(bytes & 0x0f0f_0f0f) | gather(bytes >> 4 & 0x0f0f_0f0f) << 16
}

/// Positions of a row's two byte pairs in a unit.
const fn unit_offsets(row: usize) -> (usize, usize) {
    let first = row / 4 * 16 + row % 4 * 2;
    (first, first + 8)
}

impl Packed {
    /// Number of the layout, the same on every instruction-set level. Another layout gets another number, because packed weights are kept in
    /// files.
    pub const LAYOUT: u32 = 1;
    /// Alignment of the packed bytes: a cache line and the widest vector register.
    pub const ALIGN: usize = Buffer::<u8>::ALIGN;
    /// Packing any multiple of this number of rows by themselves gives the bytes that these rows have in the whole weight.
    pub const ROW_MULTIPLE: usize = GROUP;

    fn check(rows: usize, cols: usize) -> Result<()> {
        if rows == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "a weight of shape [{rows}, {cols}] cannot be packed: rows must be positive and K a positive multiple of {BLOCK}"
            );
        }
        Ok(())
    }

    fn group_bytes(kind: WeightType, cols: usize) -> Result<usize> {
        match kind {
            WeightType::Nvfp4 => product(
                "packed weight",
                &[(cols / BLOCK).div_ceil(CHUNK_BLOCKS), NVFP4_CHUNK_BYTES],
            ),
            WeightType::F32 => product("packed weight", &[cols, GROUP, 4]),
            WeightType::F16 | WeightType::BF16 => product("packed weight", &[cols, GROUP, 2]),
            // A multiple of a cache line, because K is a multiple of 16.
            WeightType::Int8 => Ok(product("packed weight", &[cols, GROUP])? + INT8_SCALE_BYTES),
        }
    }

    /// Bytes of a weight of this shape, once packed.
    pub fn bytes_of(rows: usize, cols: usize, kind: WeightType) -> Result<usize> {
        Self::check(rows, cols)?;
        product(
            "packed weight",
            &[rows.div_ceil(GROUP), Self::group_bytes(kind, cols)?],
        )
    }

    /// Bytes of the rows that packing a weight of this shape reads at a time.
    pub fn read_bytes_of(rows: usize, cols: usize, kind: WeightType) -> usize {
        let row = match kind {
            WeightType::Nvfp4 => cols / 2 + cols / BLOCK,
            WeightType::Int8 => cols + size_of::<f32>(),
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => cols * size_of::<f32>(),
        };
        READ_ROWS.min(rows) * row
    }

    /// A weight that was packed before, in `range` of a mapped file. Fails if `range` is not in the file, not aligned to [`Packed::ALIGN`] or not
    /// of the size of such a weight, or if the global scale is invalid. Reads no codes and no other scales: any bytes are safe to compute with,
    /// and invalid scales give wrong numbers.
    pub fn mapped(
        (rows, cols): (usize, usize),
        kind: WeightType,
        global: f32,
        mapping: Arc<Mapping>,
        range: Range<usize>,
    ) -> Result<Packed> {
        let bytes = Self::bytes_of(rows, cols, kind)?;
        if range.len() != bytes || mapping.get(range.clone()).is_none() {
            bail!(
                InvalidArgument,
                "a packed {} weight of shape [{rows}, {cols}] has {bytes} bytes, not those from {} to {} of a file of {}",
                kind.name(),
                range.start,
                range.end,
                mapping.len()
            );
        }
        if !range.start.is_multiple_of(Self::ALIGN) {
            bail!(
                InvalidArgument,
                "a packed weight at offset {} is not aligned to {} bytes",
                range.start,
                Self::ALIGN
            );
        }
        nvfp4::check_global_scale(global)?;
        Ok(Packed {
            rows,
            cols,
            kind,
            global,
            data: Data::Mapped(mapping, range),
        })
    }

    /// Packs an NVFP4 weight, read a few rows at a time. Fails if a block scale or the global scale is invalid.
    pub fn nvfp4(rows: usize, cols: usize, global: f32, read: &mut ReadNvfp4) -> Result<Packed> {
        nvfp4::check_global_scale(global)?;
        let mut packed = Packing::new(rows, cols, WeightType::Nvfp4, global)?;
        let (row_codes, blocks) = (cols / 2, cols / BLOCK);
        let batch = READ_ROWS.min(rows);
        let mut codes = Buffer::<u8>::zeroed(Tag::Scratch, batch * row_codes)?;
        let mut scales = Buffer::<u8>::zeroed(Tag::Scratch, batch * blocks)?;
        for first in (0..rows).step_by(batch) {
            let n = batch.min(rows - first);
            let (codes, scales) = (&mut codes[..n * row_codes], &mut scales[..n * blocks]);
            read(first..first + n, codes, scales)?;
            nvfp4::check_block_scales(scales, first, blocks)?;
            for i in 0..n {
                let row = first + i;
                packed.put_nvfp4(
                    row,
                    &codes[i * row_codes..][..row_codes],
                    &scales[i * blocks..][..blocks],
                );
            }
        }
        Ok(packed.finish())
    }

    /// Packs an int8 weight, read a few rows at a time. Fails if a row scale is invalid.
    pub fn int8(rows: usize, cols: usize, read: &mut ReadInt8) -> Result<Packed> {
        let mut packed = Packing::new(rows, cols, WeightType::Int8, 1.0)?;
        let batch = READ_ROWS.min(rows);
        let mut codes = Buffer::<u8>::zeroed(Tag::Scratch, batch * cols)?;
        let mut scales = Buffer::<f32>::zeroed(Tag::Scratch, batch)?;
        for first in (0..rows).step_by(batch) {
            let n = batch.min(rows - first);
            let (codes, scales) = (&mut codes[..n * cols], &mut scales[..n]);
            read(first..first + n, codes, scales)?;
            int8::check_row_scales(scales, first)?;
            for (i, (codes, scale)) in codes.chunks_exact(cols).zip(&*scales).enumerate() {
                packed.put_int8(first + i, codes, *scale);
            }
        }
        Ok(packed.finish())
    }

    fn int8_row(&self, row: usize, out: &mut [f32]) {
        let group = &self.data[row / GROUP * self.group_stride()..][..self.group_stride()];
        let (scales, values) = group.split_at(INT8_SCALE_BYTES);
        let mut scale = [0; 4];
        scale.copy_from_slice(&scales[row % GROUP * 4..][..4]);
        let scale = f32::from_ne_bytes(scale);
        for (out, &code) in out
            .iter_mut()
            .zip(values[row % GROUP..].iter().step_by(GROUP))
        {
            *out = int8::decode(code, scale);
        }
    }

    /// Packs a dense weight, read a few rows at a time, and rounded to nearest even if `kind` is narrower than the source. NaN, infinity
    /// and values that `kind` cannot represent are errors that name their index.
    pub fn dense(
        rows: usize,
        cols: usize,
        kind: WeightType,
        read: &mut ReadDense,
    ) -> Result<Packed> {
        let mut packed = Packing::new(rows, cols, kind, 1.0)?;
        let batch = READ_ROWS.min(rows);
        let mut values = Buffer::<f32>::zeroed(Tag::Scratch, batch * cols)?;
        for first in (0..rows).step_by(batch) {
            let n = batch.min(rows - first);
            let values = &mut values[..n * cols];
            read(first..first + n, values)?;
            for (i, values) in values.chunks_exact(cols).enumerate() {
                let put = match kind {
                    WeightType::F32 => packed.put(first + i, values, f32::to_bits, |b| {
                        f32::from_bits(b).is_finite()
                    }),
                    WeightType::F16 => packed.put(
                        first + i,
                        values,
                        |x| f16::from_f32(x).to_bits(),
                        |b| f16::from_bits(b).is_finite(),
                    ),
                    WeightType::BF16 => packed.put(
                        first + i,
                        values,
                        |x| bf16::from_f32(x).to_bits(),
                        |b| bf16::from_bits(b).is_finite(),
                    ),
                    WeightType::Nvfp4 | WeightType::Int8 => bail!(
                        InvalidArgument,
                        "{} is not a dense kind; pack codes and scales instead",
                        kind.name()
                    ),
                };
                put.map_err(|k| {
                    err!(
                        InvalidArgument,
                        "element [{}, {k}] is {}, which {} cannot hold; weights must be finite",
                        first + i,
                        values[k],
                        kind.name()
                    )
                })?;
            }
        }
        Ok(packed.finish())
    }

    fn elements<T: Plain>(&self) -> &[T] {
        // SAFETY: the data is aligned to 64 bytes, and any bytes are a valid Plain integer.
        unsafe {
            std::slice::from_raw_parts(self.data.as_ptr().cast(), self.data.len() / size_of::<T>())
        }
    }

    /// The exact values of one row: `out` takes `cols` floats.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        if row >= self.rows || out.len() != self.cols {
            bail!(
                InvalidArgument,
                "row {row} into {} floats: the weight has {} rows of {}",
                out.len(),
                self.rows,
                self.cols
            );
        }
        let first = row / GROUP * self.cols * GROUP + row % GROUP;
        match self.kind {
            WeightType::F32 => out
                .iter_mut()
                .zip(self.elements::<u32>()[first..].iter().step_by(GROUP))
                .for_each(|(o, &b)| *o = f32::from_bits(b)),
            WeightType::F16 => out
                .iter_mut()
                .zip(self.elements::<u16>()[first..].iter().step_by(GROUP))
                .for_each(|(o, &b)| *o = f16::from_bits(b).to_f32()),
            WeightType::BF16 => out
                .iter_mut()
                .zip(self.elements::<u16>()[first..].iter().step_by(GROUP))
                .for_each(|(o, &b)| *o = bf16::from_bits(b).to_f32()),
            WeightType::Nvfp4 => self.nvfp4_row(row, out),
            WeightType::Int8 => self.int8_row(row, out),
        }
        Ok(())
    }

    fn nvfp4_row(&self, row: usize, out: &mut [f32]) {
        let stride = self.data.len() / self.rows.div_ceil(GROUP);
        let group = &self.data[row / GROUP * stride..][..stride];
        let (low, high) = unit_offsets(row % GROUP);
        for (block, out) in out.chunks_exact_mut(BLOCK).enumerate() {
            let chunk = &group[block / CHUNK_BLOCKS * NVFP4_CHUNK_BYTES..][..NVFP4_CHUNK_BYTES];
            let within = block % CHUNK_BLOCKS;
            let scale = chunk[CHUNK_BLOCKS * 2 * UNIT_BYTES + within * GROUP + row % GROUP];
            for (i, out) in out.chunks_exact_mut(8).enumerate() {
                let unit = &chunk[(within * 2 + i) * UNIT_BYTES..][..UNIT_BYTES];
                let codes = from_unit(u32::from_le_bytes([
                    unit[low],
                    unit[low + 1],
                    unit[high],
                    unit[high + 1],
                ]));
                for (k, out) in out.iter_mut().enumerate() {
                    *out = nvfp4::decode((codes >> (4 * k) & 15) as u8, scale, self.global);
                }
            }
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features, K.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Storage type.
    pub fn kind(&self) -> WeightType {
        self.kind
    }

    /// The global scale; 1 for weights without one.
    pub fn global(&self) -> f32 {
        self.global
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Whether these bytes are those of a mapped file.
    pub fn is_mapped(&self) -> bool {
        matches!(self.data, Data::Mapped(..))
    }

    /// The packed bytes.
    pub fn stored(&self) -> &[u8] {
        &self.data
    }

    pub(super) fn blocks(&self) -> usize {
        self.cols / BLOCK
    }

    pub(super) fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP)
    }

    pub(super) fn group_stride(&self) -> usize {
        self.data.len() / self.groups()
    }

    pub(super) fn data(&self) -> &[u8] {
        &self.data
    }
}

impl Packing {
    fn new(rows: usize, cols: usize, kind: WeightType, global: f32) -> Result<Packing> {
        let bytes = Packed::bytes_of(rows, cols, kind)?;
        Ok(Packing {
            rows,
            cols,
            kind,
            global,
            data: Buffer::zeroed(Tag::Weights, bytes)?,
        })
    }

    fn finish(self) -> Packed {
        Packed {
            rows: self.rows,
            cols: self.cols,
            kind: self.kind,
            global: self.global,
            data: Data::Owned(self.data),
        }
    }

    fn group_stride(&self) -> usize {
        self.data.len() / self.rows.div_ceil(GROUP)
    }

    fn put_nvfp4(&mut self, row: usize, codes: &[u8], scales: &[u8]) {
        let stride = self.group_stride();
        let group = &mut self.data[row / GROUP * stride..][..stride];
        let (low, high) = unit_offsets(row % GROUP);
        for (block, (codes, &scale)) in codes.chunks_exact(BLOCK / 2).zip(scales).enumerate() {
            let chunk = &mut group[block / CHUNK_BLOCKS * NVFP4_CHUNK_BYTES..][..NVFP4_CHUNK_BYTES];
            let within = block % CHUNK_BLOCKS;
            for (i, codes) in codes.chunks_exact(4).enumerate() {
                let bytes = to_unit(u32::from_le_bytes([codes[0], codes[1], codes[2], codes[3]]))
                    .to_le_bytes();
                let unit = &mut chunk[(within * 2 + i) * UNIT_BYTES..][..UNIT_BYTES];
                unit[low..low + 2].copy_from_slice(&bytes[..2]);
                unit[high..high + 2].copy_from_slice(&bytes[2..]);
            }
            chunk[CHUNK_BLOCKS * 2 * UNIT_BYTES + within * GROUP + row % GROUP] = scale;
        }
    }

    fn put_int8(&mut self, row: usize, codes: &[u8], scale: f32) {
        let stride = self.group_stride();
        let group = &mut self.data[row / GROUP * stride..][..stride];
        let (scales, values) = group.split_at_mut(INT8_SCALE_BYTES);
        scales[row % GROUP * 4..][..4].copy_from_slice(&scale.to_ne_bytes());
        for (to, &code) in values[row % GROUP..].iter_mut().step_by(GROUP).zip(codes) {
            *to = code;
        }
    }

    fn put<T: Plain>(
        &mut self,
        row: usize,
        values: &[f32],
        encode: impl Fn(f32) -> T,
        is_finite: impl Fn(T) -> bool,
    ) -> std::result::Result<(), usize> {
        let group = row / GROUP * self.cols * GROUP;
        let elements = self.elements_mut::<T>();
        for (k, &x) in values.iter().enumerate() {
            let bits = encode(x);
            if !is_finite(bits) {
                return Err(k);
            }
            elements[group + k * GROUP + row % GROUP] = bits;
        }
        Ok(())
    }

    fn elements_mut<T: Plain>(&mut self) -> &mut [T] {
        let len = self.data.len() / size_of::<T>();
        // SAFETY: the buffer is 64-byte aligned, holds `len` whole elements, and any bytes are a valid Plain integer.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_mut_ptr().cast(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::ErrorKind;
    use crate::base::error::expect_kind;
    use crate::format::{e2m1, e4m3};

    #[test]
    fn units_round_trip() {
        for codes in [0, 0x7654_3210, 0xfedc_ba98, 0x1234_5678, u32::MAX] {
            assert_eq!(from_unit(to_unit(codes)), codes);
        }
        assert_eq!(to_unit(0x7654_3210).to_le_bytes(), [0x40, 0x51, 0x62, 0x73]);
    }

    #[test]
    fn rows_come_back_exactly() {
        let (rows, cols) = (37, 80);
        let code = |r: usize, k: usize| ((r * 7 + k * 3) % 16) as u8;
        let scale = |r: usize, b: usize| (0x20 + (r * 5 + b) % 64) as u8;
        let packed = Packed::nvfp4(rows, cols, 0.5, &mut |range, codes, scales| {
            for (i, r) in range.enumerate() {
                for j in 0..cols / 2 {
                    codes[i * cols / 2 + j] = code(r, 2 * j) | code(r, 2 * j + 1) << 4;
                }
                for b in 0..cols / 16 {
                    scales[i * cols / 16 + b] = scale(r, b);
                }
            }
            Ok(())
        })
        .unwrap();
        let mut out = vec![0.0; cols];
        for r in 0..rows {
            packed.row(r, &mut out).unwrap();
            for k in 0..cols {
                assert_eq!(
                    out[k],
                    e2m1::decode(code(r, k)) * e4m3::decode(scale(r, k / 16)) * 0.5
                );
            }
        }
    }

    #[test]
    fn int8_rows_come_back_exactly() {
        let (rows, cols) = (37, 80);
        let code = |r: usize, k: usize| ((r * 7 + k * 3) % 256) as u8;
        let scale = |r: usize| 0.1 + r as f32;
        let packed = Packed::int8(rows, cols, &mut |range, codes, scales| {
            for (i, r) in range.enumerate() {
                scales[i] = scale(r);
                for k in 0..cols {
                    codes[i * cols + k] = code(r, k);
                }
            }
            Ok(())
        })
        .unwrap();
        // One byte per value; 16 rows and their scales per group.
        assert_eq!(packed.bytes(), 3 * 16 * (cols + 4));
        let mut out = vec![0.0; cols];
        for r in 0..rows {
            packed.row(r, &mut out).unwrap();
            for k in 0..cols {
                assert_eq!(out[k], f32::from(code(r, k) as i8) * scale(r));
            }
        }
    }

    #[test]
    fn bad_weights_are_named() {
        expect_kind(
            Packed::int8(20, 32, &mut |_, _, scales| {
                scales.fill(1.0);
                scales[17] = f32::NAN;
                Ok(())
            }),
            ErrorKind::InvalidArgument,
            "the scale of row 17 is NaN",
        );
        let e = Packed::nvfp4(20, 32, 1.0, &mut |_, _, scales| {
            scales[35] = 0x7f;
            Ok(())
        })
        .unwrap_err();
        assert!(e.message().contains("block 1 in row 17"), "{e}");
        let e = Packed::dense(3, 16, WeightType::F16, &mut |_, values| {
            values[40] = 1e6;
            Ok(())
        })
        .unwrap_err();
        assert!(e.message().contains("[2, 8]"), "{e}");
        expect_kind(
            Packed::dense(3, 20, WeightType::F32, &mut |_, _| Ok(())),
            ErrorKind::InvalidArgument,
            "shape [3, 20]",
        );
    }

    /// Bytes of a file are the weight that was packed into them, if they are where such a weight can be.
    #[test]
    fn a_mapped_weight_is_the_packed_one() {
        let (rows, cols) = (37, 80);
        let packed = Packed::nvfp4(rows, cols, 0.5, &mut |range, codes, scales| {
            let bytes = codes.iter_mut().enumerate();
            bytes.for_each(|(i, byte)| *byte = (range.start * 40 + i * 7) as u8);
            scales.fill(0x38);
            Ok(())
        })
        .unwrap();
        let name = format!("nvfp4-packed-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let front = Packed::ALIGN;
        let content = [&vec![0xff; front], packed.stored(), &[0xff; 3]].concat();
        std::fs::write(&path, &content).unwrap();
        let mapping = Arc::new(Mapping::open(&path).unwrap());
        std::fs::remove_file(&path).unwrap();
        let range = front..front + packed.bytes();
        let mapped = |rows, global, range| {
            let kind = WeightType::Nvfp4;
            Packed::mapped((rows, cols), kind, global, mapping.clone(), range)
        };
        let same = mapped(rows, 0.5, range.clone()).unwrap();
        assert!(same.is_mapped() && !packed.is_mapped());
        assert_eq!(same.stored(), packed.stored());
        let (mut a, mut b) = (vec![0.0; cols], vec![0.0; cols]);
        for row in 0..rows {
            packed.row(row, &mut a).unwrap();
            same.row(row, &mut b).unwrap();
            assert_eq!(a, b);
        }
        let invalid = ErrorKind::InvalidArgument;
        let shifted = front + 1..front + 1 + packed.bytes();
        expect_kind(mapped(rows, 0.5, shifted), invalid, "not aligned");
        let past = 2 * front..2 * front + packed.bytes();
        expect_kind(mapped(rows, 0.5, past), invalid, "bytes, not those from");
        let short = front..front + packed.bytes() - 64;
        expect_kind(mapped(rows, 0.5, short), invalid, "bytes, not those from");
        expect_kind(mapped(16, 0.5, range.clone()), invalid, "shape [16, 80]");
        let huge = mapped(usize::MAX - 15, 0.5, range.clone());
        assert!(huge.is_err());
        let not_finite = mapped(rows, f32::NAN, range);
        assert!(not_finite.unwrap_err().message().contains("NaN"));
    }
}
