//! Weight matrices on the device. NVFP4 weights are packed into the chunk order of their kernels.

use std::ops::Range;
use std::sync::Arc;

use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::{Bytes, Tag};
use crate::base::size::product;
use crate::cuda::driver::{DeviceBuffer, DeviceSlice, Gpu, Launch, STAGING, Staging, int};
use crate::cuda::kernel::kernels;
use crate::cuda::operand::Operand;
use crate::format::int8;
use crate::format::nvfp4::{self, BLOCK};
use crate::format::swizzle::ScaleLayout;
use crate::tensor::WeightType;

kernels! {
    /// Packs rows into chunks.
    enum Pack(PackArguments) {
        LinearPack { Rows = "linear_pack" }
    }
}

/// A weight `[rows, cols]` on a device. Immutable.
#[derive(Debug)]
pub struct Matrix {
    pub(super) storage: WeightType,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Rows of values; for NVFP4, chunks of codes and scales; for int8, rows of codes and then the f32 scale of each row.
    values: Arc<DeviceBuffer>,
    pub(super) global: f32,
}

/// Rows, K elements and bytes of a chunk of an NVFP4 weight, as in `kernels/format/packed.cuh`.
pub(in crate::cuda) const CHUNK_ROWS: usize = 8;
pub(in crate::cuda) const CHUNK_K: usize = 128;
pub(in crate::cuda) const CHUNK_BYTES: usize = CHUNK_ROWS * (CHUNK_K / 2 + CHUNK_K / BLOCK);
/// Threads of a CTA of the kernels that take a 32-bit word of codes per thread.
const WORD_THREADS: usize = 256;

#[repr(C)]
struct PackArguments {
    codes: u64,
    scales: u64,
    chunks: u64,
    first_row: i32,
    rows: i32,
    k: i32,
    swizzled: i32,
}

/// A launch with one thread per 32-bit word of codes.
pub(super) fn by_words(rows: usize, k: usize) -> Launch {
    let words = k.div_ceil(CHUNK_K) * CHUNK_ROWS * CHUNK_K / 8;
    let grid = [
        words.div_ceil(WORD_THREADS) as u32,
        rows.div_ceil(CHUNK_ROWS) as u32,
        1,
    ];
    Launch::new(grid, WORD_THREADS as u32)
}

/// Reads the codes and the block scales of a range of rows.
pub type ReadNvfp4<'a> = dyn FnMut(Range<usize>, &mut [u8], &mut [u8]) -> Result<()> + 'a;
/// Reads the bytes of a range of rows.
pub type ReadBytes<'a> = dyn FnMut(Range<usize>, &mut [u8]) -> Result<()> + 'a;

/// Reads the codes and the row scales of a range of rows.
pub(super) type ReadInt8<'a> = dyn FnMut(Range<usize>, &mut [u8], &mut [f32]) -> Result<()> + 'a;

/// Rows of a weight per upload: as many chunk rows as a staging buffer holds, at least one.
fn rows_at_a_time(row_bytes: usize) -> usize {
    (STAGING / row_bytes / CHUNK_ROWS).max(1) * CHUNK_ROWS
}

fn check_size(rows: usize, cols: usize) -> Result<()> {
    if rows == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
        bail!(
            InvalidArgument,
            "a weight of [{rows}, {cols}]: rows must be positive and K a positive multiple of {BLOCK}"
        );
    }
    Ok(())
}

/// Bytes of one chunk row, which is [`CHUNK_ROWS`] rows of the weight.
fn chunk_row(cols: usize) -> usize {
    cols.div_ceil(CHUNK_K) * CHUNK_BYTES
}

/// Byte offset of the chunk that row `first` begins.
pub(super) fn chunk_offset(first: usize, cols: usize) -> u64 {
    (first / CHUNK_ROWS * chunk_row(cols)) as u64
}

/// Memory for a weight.
fn room(gpu: &Arc<Gpu>, rows: usize, cols: usize, storage: WeightType) -> Result<DeviceBuffer> {
    let bytes = Matrix::bytes_of(rows, cols, storage)?;
    DeviceBuffer::uninit(gpu, Tag::DeviceWeights, bytes)
}

/// Rows per launch of the packing kernel, whose chunk rows are a grid's second dimension.
const PACKED_ROWS: usize = CHUNK_ROWS * 65_535;

/// Enqueues packing of `n` rows of `w` from `first` on, to the address `chunks`.
///
/// # Safety
/// `w` must have the rows, and there must be room for their chunks.
unsafe fn pack(w: &Operand<'_>, first: usize, n: usize, chunks: u64) -> Result<()> {
    let arguments = PackArguments {
        codes: w.codes.address(),
        scales: w.scales.address(),
        chunks,
        first_row: int("rows", first)?,
        rows: int("rows", n)?,
        k: int("K", w.k)?,
        swizzled: (w.layout == ScaleLayout::Swizzled).into(),
    };
    // SAFETY: the caller's promise.
    unsafe { by_words(n, w.k).of(Pack::Rows).run(w.gpu(), &arguments) }
}

/// Enqueues packing of the codes and row-major scales of a whole matrix to `chunks`.
///
/// # Safety
/// All three must have room for the rows.
pub(in crate::cuda) unsafe fn pack_rows(
    codes: DeviceSlice<'_>,
    scales: DeviceSlice<'_>,
    rows: usize,
    cols: usize,
    chunks: DeviceSlice<'_>,
) -> Result<()> {
    for first in (0..rows).step_by(PACKED_ROWS) {
        let n = PACKED_ROWS.min(rows - first);
        let arguments = PackArguments {
            codes: codes.address(),
            scales: scales.address(),
            chunks: chunks.address() + chunk_offset(first, cols),
            first_row: int("rows", first)?,
            rows: int("rows", n)?,
            k: int("K", cols)?,
            swizzled: 0,
        };
        // SAFETY: the caller's promise.
        unsafe {
            by_words(n, cols)
                .of(Pack::Rows)
                .run(codes.gpu(), &arguments)?
        };
    }
    Ok(())
}

impl Matrix {
    /// Bytes on the device of a weight of this shape.
    pub fn bytes_of(rows: usize, cols: usize, storage: WeightType) -> Result<usize> {
        check_size(rows, cols)?;
        match (storage, storage.element_bytes()) {
            (_, Some(element)) => product("a weight", &[rows, cols, element]),
            (WeightType::Int8, None) => product("an int8 weight", &[rows, cols + 4]),
            (_, None) => product(
                "an NVFP4 weight",
                &[rows.div_ceil(CHUNK_ROWS), chunk_row(cols)],
            ),
        }
    }

    /// Bytes of working memory of the upload of a weight of this shape: two staging buffers and, for NVFP4, the rows that are packed.
    pub fn upload_bytes_of(rows: usize, cols: usize, storage: WeightType) -> Bytes {
        let row = match (storage, storage.element_bytes()) {
            (_, Some(element)) => cols * element,
            (WeightType::Int8, None) => cols + 4,
            (_, None) => cols / 2 + cols / BLOCK,
        };
        let piece = rows_at_a_time(row).min(rows) * row;
        Bytes {
            host: 2 * piece.max(STAGING) as u64,
            device: match storage {
                WeightType::Nvfp4 => piece as u64,
                _ => 0,
            },
        }
    }

    /// Packs a matrix on the device into an NVFP4 weight. The caller has checked its scales, see [`crate::cuda::wait_for_scales`]. Enqueues
    /// a copy.
    pub fn from_operand(w: &Operand<'_>) -> Result<Matrix> {
        let (gpu, rows, cols) = (w.gpu(), w.rows, w.k);
        let values = room(gpu, rows, cols, WeightType::Nvfp4)?;
        for first in (0..rows).step_by(PACKED_ROWS) {
            let n = PACKED_ROWS.min(rows - first);
            let chunks = values.address() + chunk_offset(first, cols);
            // SAFETY: the matrix has the rows, and there is room for their chunks.
            unsafe { pack(w, first, n, chunks)? };
        }
        Ok(Matrix {
            storage: WeightType::Nvfp4,
            rows,
            cols,
            values: Arc::new(values),
            global: w.global,
        })
    }

    /// A dense weight with these values, `[rows, cols]` on the device.
    pub fn from_values(
        rows: usize,
        cols: usize,
        storage: WeightType,
        values: DeviceBuffer,
    ) -> Result<Matrix> {
        if storage.element_bytes().is_none() {
            bail!(Internal, "a matrix in {} has scales", storage.name());
        }
        Self::shared(rows, cols, storage, 1.0, Arc::new(values))
    }

    /// A weight over shared memory: values `[rows, cols]`, or the chunks of an NVFP4 weight. They must not change while this is in use.
    pub fn shared(
        rows: usize,
        cols: usize,
        storage: WeightType,
        global: f32,
        values: Arc<DeviceBuffer>,
    ) -> Result<Matrix> {
        values.holds("a weight", &[Self::bytes_of(rows, cols, storage)?])?;
        Ok(Matrix {
            storage,
            rows,
            cols,
            values,
            global,
        })
    }

    /// Uploads an NVFP4 weight; `read` gives codes and scales of ranges of rows.
    pub fn nvfp4(
        gpu: &Arc<Gpu>,
        rows: usize,
        cols: usize,
        global: f32,
        read: &mut ReadNvfp4,
    ) -> Result<Matrix> {
        nvfp4::check_global_scale(global)?;
        let (code_row, scale_row) = (cols / 2, cols / BLOCK);
        let values = room(gpu, rows, cols, WeightType::Nvfp4)?;
        let step = rows_at_a_time(code_row + scale_row).min(rows);
        let codes = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, step * code_row)?;
        let scales = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, step * scale_row)?;
        let mut staging = Staging::of(gpu, step * (code_row + scale_row));
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let (code_bytes, both) = (n * code_row, n * (code_row + scale_row));
            let (some_codes, some_scales) = staging.next()?[..both].split_at_mut(code_bytes);
            read(first..first + n, some_codes, some_scales)?;
            nvfp4::check_block_scales(some_scales, first, scale_row)?;
            let copies = [
                (0..code_bytes, codes.address()),
                (code_bytes..both, scales.address()),
            ];
            // SAFETY: both buffers have room for `n` rows.
            unsafe { staging.send(&copies)? };
            let some = Operand::new(&codes, &scales, ScaleLayout::Linear, n, cols, global)?;
            let chunks = values.address() + chunk_offset(first, cols);
            // SAFETY: all three have room for `n` rows.
            unsafe { pack(&some, 0, n, chunks)? };
        }
        staging.finish()?;
        Ok(Matrix {
            storage: WeightType::Nvfp4,
            rows,
            cols,
            values: Arc::new(values),
            global,
        })
    }

    /// Uploads a dense weight; `read` gives the bytes of ranges of rows.
    pub fn dense(
        gpu: &Arc<Gpu>,
        rows: usize,
        cols: usize,
        storage: WeightType,
        read: &mut ReadBytes,
    ) -> Result<Matrix> {
        let Some(element) = storage.element_bytes() else {
            bail!(Internal, "a matrix in {} has scales", storage.name());
        };
        let row = cols * element;
        let values = room(gpu, rows, cols, storage)?;
        let step = rows_at_a_time(row).min(rows);
        let mut staging = Staging::of(gpu, step * row);
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            read(first..first + n, &mut staging.next()?[..n * row])?;
            let to = values.address() + (first * row) as u64;
            // SAFETY: the matrix has the rows.
            unsafe { staging.send(&[(0..n * row, to)])? };
        }
        staging.finish()?;
        Ok(Matrix {
            storage,
            rows,
            cols,
            values: Arc::new(values),
            global: 1.0,
        })
    }

    /// Uploads a weight of int8 rows; `read` gives codes and scales of ranges of rows.
    pub fn int8(gpu: &Arc<Gpu>, rows: usize, cols: usize, read: &mut ReadInt8) -> Result<Matrix> {
        let values = room(gpu, rows, cols, WeightType::Int8)?;
        let scales_at = values.address() + (rows * cols) as u64;
        let step = rows_at_a_time(cols + 4).min(rows);
        let mut scales = vec![0f32; step];
        let mut staging = Staging::of(gpu, step * (cols + 4));
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let (codes, both) = (n * cols, n * (cols + 4));
            let (some_codes, some_scales) = staging.next()?[..both].split_at_mut(codes);
            read(first..first + n, some_codes, &mut scales[..n])?;
            int8::check_row_scales(&scales[..n], first)?;
            for (bytes, scale) in some_scales.chunks_exact_mut(4).zip(&scales) {
                bytes.copy_from_slice(&scale.to_ne_bytes());
            }
            let copies = [
                (0..codes, values.address() + (first * cols) as u64),
                (codes..both, scales_at + (first * 4) as u64),
            ];
            // SAFETY: the matrix has the rows and their scales.
            unsafe { staging.send(&copies)? };
        }
        staging.finish()?;
        Ok(Matrix {
            storage: WeightType::Int8,
            rows,
            cols,
            values: Arc::new(values),
            global: 1.0,
        })
    }

    /// The form in which it is stored.
    pub fn storage(&self) -> WeightType {
        self.storage
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The shape that the choice of kernels depends on.
    pub fn shape(&self) -> MatrixShape {
        MatrixShape {
            storage: self.storage,
            rows: self.rows,
            cols: self.cols,
        }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }

    /// The device that it belongs to.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.values.gpu()
    }

    /// The global scale of an NVFP4 weight.
    pub fn global(&self) -> f32 {
        self.global
    }

    /// Its device memory.
    pub fn values(&self) -> DeviceSlice<'_> {
        (&*self.values).into()
    }

    /// Its device memory, shared.
    pub(in crate::cuda) fn shared_values(&self) -> Arc<DeviceBuffer> {
        self.values.clone()
    }

    /// Device address of the row scales of int8 rows; null for other weights.
    pub(in crate::cuda) fn scales_address(&self) -> u64 {
        match self.storage {
            WeightType::Int8 => self.address() + (self.rows * self.cols) as u64,
            _ => 0,
        }
    }

    /// Device address of the values.
    pub(in crate::cuda) fn address(&self) -> u64 {
        self.values.address()
    }
}

/// Properties of a weight that the choice of kernels depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// The form in which it is stored.
    pub storage: WeightType,
    /// Output features.
    pub rows: usize,
    /// Input features, K.
    pub cols: usize,
}

/// A weight as a kernel argument.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(in crate::cuda) struct MatrixArgument {
    chunks: u64,
    bias: u64,
    pub(super) global: f32,
    rows: i32,
}

impl MatrixArgument {
    /// A weight and its bias, as the words of an entry in a table of weights.
    pub(in crate::cuda) fn words((w, bias): Biased<'_>) -> Result<[u64; 3]> {
        if let Some(bias) = bias {
            bias.holds("a bias", &[w.rows, 4])?;
        }
        let rows = int("output features", w.rows)? as u32;
        Ok([
            w.address(),
            bias.map_or(0, DeviceBuffer::address),
            u64::from(rows) << 32 | u64::from(w.global.to_bits()),
        ])
    }
}

/// Weights and their biases as arguments; [`GemmPlan`](super::GemmPlan) checks sizes.
pub(super) fn matrix_arguments(matrices: &[Biased<'_>]) -> Result<[MatrixArgument; 3]> {
    let mut all = [MatrixArgument::default(); 3];
    for (argument, (w, bias)) in all.iter_mut().zip(matrices) {
        *argument = MatrixArgument {
            chunks: w.address(),
            bias: bias.map_or(0, DeviceBuffer::address),
            global: w.global,
            rows: int("output features", w.rows)?,
        };
    }
    Ok(all)
}

/// A weight and its bias, f32 `[rows]`.
pub type Biased<'a> = (&'a Matrix, Option<&'a DeviceBuffer>);
