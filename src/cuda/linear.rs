//! Weight matrices on the device, and products with them. For NVFP4 weights one fused kernel serves up to [`SMALL`] rows, a tiled
//! one up to [`TILED`], and a library more than that, over a bounded f16 copy of one weight at a time; without the library the
//! tiled one serves all. Plain kernels do the rest.

use std::ops::Range;
use std::sync::Arc;

use super::blas::Element;
use super::gpu::{Gpu, int};
use super::launch::Launch;
use super::memory::{DeviceBuffer, DeviceSlice};
use super::nvrtc::Unit;
use super::operand::Operand;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::format::e4m3;
use crate::format::nvfp4::BLOCK;
use crate::format::swizzle::ScaleLayout;

/// What activations between gate and down are divided by: they are the largest of a model, and f16 ends at 65504.
pub const MLP_SCALE: f32 = 16.0;
/// Rows of activations that the fused kernel takes at once.
pub const SMALL: usize = 16;
/// Rows of activations that need no scratch memory.
const FEW: usize = 4;
/// Bytes of activations beyond which the fused kernel, whose blocks each hold all of them, gives way to the tiled one: 8 rows of
/// 9,728 took it 12.3 us on an H200, and the tiled one 10.6.
const FUSED_BYTES: usize = 128 << 10;
/// Rows of activations that the tiled kernel takes where there is the library, too. It was measured against the library's way for
/// a step of 64 rows only, in earlier forms, and was faster: 8,440 and 8,912 tokens a second of Qwen3-4B to 8,064.
pub const TILED: usize = 128;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("linear_", size_of::<SmallArguments>()),
    ("linear_dense", size_of::<DenseArguments>()),
    ("linear_pack", size_of::<PackArguments>()),
    ("linear_tiled", size_of::<TiledArguments>()),
    ("dequantize_folded", size_of::<DequantizeArguments>()),
];

/// How a matrix is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// Codes and block scales in an order of the kernels' own, and a multiplier.
    Nvfp4,
}

impl Storage {
    /// Bytes of a value, of storage that is values one after the other.
    pub(super) const fn element_bytes(self) -> Option<usize> {
        match self {
            Storage::F32 => Some(4),
            Storage::F16 | Storage::BF16 => Some(2),
            Storage::Nvfp4 => None,
        }
    }
}

/// A weight `[rows, cols]` on a device. Immutable.
#[derive(Debug)]
pub struct Matrix {
    storage: Storage,
    rows: usize,
    cols: usize,
    /// Rows of values; of NVFP4, chunks of codes and scales.
    values: DeviceBuffer,
    global: f32,
}

/// Rows and elements of K of a chunk of an NVFP4 weight, and its bytes, as `kernels/format/packed.cuh` has them.
const CHUNK_ROWS: usize = 8;
const CHUNK_K: usize = 128;
const CHUNK_BYTES: usize = CHUNK_ROWS * (CHUNK_K / 2 + CHUNK_K / BLOCK);
/// Threads of a block of the kernels that take a 32-bit word of codes each.
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

/// A launch of a thread to each 32-bit word of codes of so many rows.
fn by_words(rows: usize, k: usize) -> Launch {
    let words = k.div_ceil(CHUNK_K) * CHUNK_ROWS * CHUNK_K / 8;
    let grid = [
        words.div_ceil(WORD_THREADS) as u32,
        rows.div_ceil(CHUNK_ROWS) as u32,
        1,
    ];
    Launch::new(grid, WORD_THREADS as u32)
}

/// Gives the codes and the block scales of a range of rows.
pub type ReadNvfp4<'a> = dyn FnMut(Range<usize>, &mut [u8], &mut [u8]) -> Result<()> + 'a;
/// Gives the bytes of a range of rows.
pub type ReadBytes<'a> = dyn FnMut(Range<usize>, &mut [u8]) -> Result<()> + 'a;

/// Rows of a weight that are brought to the device at a time.
fn rows_at_a_time(row_bytes: usize) -> usize {
    ((4 << 20) / row_bytes.max(1)).max(1)
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

/// Bytes of the chunks of [`CHUNK_ROWS`] rows.
fn chunk_row(cols: usize) -> usize {
    cols.div_ceil(CHUNK_K) * CHUNK_BYTES
}

/// Memory for the chunks of an NVFP4 weight.
fn chunks(gpu: &Arc<Gpu>, rows: usize, cols: usize) -> Result<DeviceBuffer> {
    check_size(rows, cols)?;
    let bytes = product(
        "an NVFP4 weight",
        &[rows.div_ceil(CHUNK_ROWS), chunk_row(cols)],
    )?;
    DeviceBuffer::uninit(gpu, Tag::DeviceWeights, bytes)
}

/// Rows of a launch of the kernel that packs, whose chunks are a grid's second dimension.
const PACKED_ROWS: usize = CHUNK_ROWS * 65_535;

impl Matrix {
    /// The NVFP4 weight with the codes and scales of a matrix on the device, whose scales the caller has checked or will: see
    /// [`super::ScaleCheck`]. Enqueues a copy.
    pub fn from_operand(w: &Operand<'_>) -> Result<Matrix> {
        let (gpu, rows, cols) = (w.gpu(), w.rows, w.k);
        let values = chunks(gpu, rows, cols)?;
        for first in (0..rows).step_by(PACKED_ROWS) {
            let n = PACKED_ROWS.min(rows - first);
            let arguments = PackArguments {
                codes: w.codes.address(),
                scales: w.scales.address(),
                chunks: values.address() + (first / CHUNK_ROWS * chunk_row(cols)) as u64,
                first_row: int("rows", first)?,
                rows: n as i32,
                k: int("K", cols)?,
                swizzled: (w.layout == ScaleLayout::Swizzled).into(),
            };
            // SAFETY: the struct is the kernel's; the matrix has the rows, and there is room for their chunks.
            unsafe { by_words(n, cols).run(gpu, Unit::LinearPack, "linear_pack", &arguments)? };
        }
        Ok(Matrix {
            storage: Storage::Nvfp4,
            rows,
            cols,
            values,
            global: w.global,
        })
    }

    /// The dense weight with these values, `[rows, cols]` on the device.
    pub fn from_values(
        rows: usize,
        cols: usize,
        storage: Storage,
        values: DeviceBuffer,
    ) -> Result<Matrix> {
        let Some(element) = storage.element_bytes() else {
            bail!(Internal, "an NVFP4 matrix has scales");
        };
        check_size(rows, cols)?;
        values.holds("a weight", &[rows, cols, element])?;
        Ok(Matrix {
            storage,
            rows,
            cols,
            values,
            global: 1.0,
        })
    }

    /// An NVFP4 weight; `read` gives codes and scales of ranges of rows.
    pub fn nvfp4(
        gpu: &Arc<Gpu>,
        rows: usize,
        cols: usize,
        global: f32,
        read: &mut ReadNvfp4,
    ) -> Result<Matrix> {
        check_size(rows, cols)?;
        if !global.is_finite() {
            bail!(
                CorruptFile,
                "the global scale is {global}; it must be finite"
            );
        }
        let (code_row, scale_row) = (cols / 2, cols / BLOCK);
        let values = chunks(gpu, rows, cols)?;
        let step = rows_at_a_time(code_row).next_multiple_of(CHUNK_ROWS);
        let mut codes = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, step.min(rows) * code_row)?;
        let mut scales = DeviceBuffer::uninit(gpu, Tag::DeviceScratch, step.min(rows) * scale_row)?;
        let mut some_codes = vec![0; step.min(rows) * code_row];
        let mut some_scales = vec![0; step.min(rows) * scale_row];
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let some_codes = &mut some_codes[..n * code_row];
            let some_scales = &mut some_scales[..n * scale_row];
            read(first..first + n, some_codes, some_scales)?;
            // Past the largest scale come NaN and the negative ones.
            if let Some(i) = some_scales.iter().position(|&s| s > e4m3::MAX_BYTE) {
                bail!(
                    CorruptFile,
                    "the scale of block {} in row {} has the byte {:#04x}, which is NaN or negative",
                    i % scale_row,
                    first + i / scale_row,
                    some_scales[i]
                );
            }
            codes.write(0, some_codes)?;
            scales.write(0, some_scales)?;
            let arguments = PackArguments {
                codes: codes.address(),
                scales: scales.address(),
                chunks: values.address() + (first / CHUNK_ROWS * chunk_row(cols)) as u64,
                first_row: 0,
                rows: int("rows", n)?,
                k: int("K", cols)?,
                swizzled: 0,
            };
            // SAFETY: the struct is the kernel's; all three have room for `n` rows.
            unsafe { by_words(n, cols).run(gpu, Unit::LinearPack, "linear_pack", &arguments)? };
        }
        Ok(Matrix {
            storage: Storage::Nvfp4,
            rows,
            cols,
            values,
            global,
        })
    }

    /// A dense weight; `read` gives the bytes of ranges of rows.
    pub fn dense(
        gpu: &Arc<Gpu>,
        rows: usize,
        cols: usize,
        storage: Storage,
        read: &mut ReadBytes,
    ) -> Result<Matrix> {
        let Some(element) = storage.element_bytes() else {
            bail!(Internal, "an NVFP4 matrix has scales");
        };
        check_size(rows, cols)?;
        let row = cols * element;
        let mut values =
            DeviceBuffer::uninit(gpu, Tag::DeviceWeights, product("weight", &[rows, row])?)?;
        let step = rows_at_a_time(row);
        let mut bytes = vec![0; step.min(rows) * row];
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let bytes = &mut bytes[..n * row];
            read(first..first + n, bytes)?;
            values.write(first * row, bytes)?;
        }
        Ok(Matrix {
            storage,
            rows,
            cols,
            values,
            global: 1.0,
        })
    }

    /// How it is held.
    pub fn storage(&self) -> Storage {
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

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }

    /// Its device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.values.gpu()
    }

    /// The multiplier of an NVFP4 weight.
    pub fn global(&self) -> f32 {
        self.global
    }

    /// What it holds on the device.
    pub fn values(&self) -> DeviceSlice<'_> {
        (&self.values).into()
    }

    /// Where the values are, for kernels.
    pub(super) fn address(&self) -> u64 {
        self.values.address()
    }
}

/// What enters a product.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// f16 `[m, k]`, and the factor that they were divided by to keep them small.
    Plain(&'a DeviceBuffer, f32),
    /// f32 `[k]` of one row, to be normalised by RMSNorm with this weight and epsilon on the way in; for the fused kernel only.
    Normed(&'a DeviceBuffer, &'a DeviceBuffer, f32),
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Stored as f32.
    F32,
    /// Stored as f16.
    F16,
    /// Added to f32.
    Add,
    /// silu of the first matrix's times the second's, as f16, divided by [`MLP_SCALE`].
    Swiglu,
}

impl Output {
    const fn bytes(self) -> usize {
        match self {
            Output::F32 | Output::Add => 4,
            Output::F16 | Output::Swiglu => 2,
        }
    }

    /// The number by which kernels that apply nothing know it.
    fn plain(self) -> Result<i32> {
        match self {
            Output::F32 => Ok(0),
            Output::F16 => Ok(1),
            Output::Add => Ok(2),
            Output::Swiglu => bail!(Internal, "only the fused kernel applies SwiGLU"),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MatrixArgument {
    chunks: u64,
    bias: u64,
    global: f32,
    rows: i32,
}

#[repr(C)]
struct SmallArguments {
    x: u64,
    norm_weight: u64,
    out: u64,
    matrix: [MatrixArgument; 3],
    matrices: i32,
    m: i32,
    k: i32,
    out_stride: i32,
    eps: f32,
    out_scale: f32,
}

/// Warps of a block of the fused kernel.
const WARPS: usize = 16;
/// What each of them keeps in shared memory: three stages of two chunks.
const RING_BYTES: usize = 3 * 2 * CHUNK_BYTES;
/// Sums that a warp has of a tile, for each row of activations.
const SUMS: usize = 16;
/// What the sums of a block's warps may take.
const SUMS_BYTES: usize = 48 << 10;

/// What the sixteen rows of a tile of the fused kernel are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// Sixteen output features.
    Rows,
    /// Eight output features of each of two matrices.
    Pair,
    /// Eight output features, in two halves of K; for up to four rows of activations.
    Split,
}

impl Tile {
    /// The tile for `m` rows of activations.
    fn of(output: Output, m: usize) -> Tile {
        match output {
            Output::Swiglu => Tile::Pair,
            _ if m <= 4 => Tile::Split,
            _ => Tile::Rows,
        }
    }

    /// Elements of K that a warp takes at a time.
    const fn step(self) -> usize {
        match self {
            Tile::Rows | Tile::Pair => CHUNK_K,
            Tile::Split => 2 * CHUNK_K,
        }
    }

    /// Output features of a tile, of each matrix.
    const fn features(self) -> usize {
        match self {
            Tile::Rows => 16,
            Tile::Pair | Tile::Split => 8,
        }
    }
}

/// How the fused kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What a tile is.
    pub tile: Tile,
    /// Blocks, which divide the tiles evenly.
    pub blocks: usize,
    /// Rows of activations in one launch.
    pub rows: usize,
    /// Shared memory that a block needs for that many rows.
    pub shared: usize,
}

impl Plan {
    /// The plan for `m` rows and matrices of `features` output features and K = `k`, on a device with this many
    /// multiprocessors and this much shared memory; `None` where a single row does not fit.
    ///
    /// As many blocks as multiprocessors, or several times as many where the sums of a block's tiles would need much memory;
    /// all rows at once, or as many as fit.
    pub fn choose(
        m: usize,
        k: usize,
        features: &[usize],
        output: Output,
        multiprocessors: usize,
        shared: usize,
    ) -> Option<Plan> {
        let tile = Tile::of(output, m);
        let tiles: usize = match tile {
            Tile::Pair => features[0].div_ceil(tile.features()),
            _ => features.iter().map(|n| n.div_ceil(tile.features())).sum(),
        };
        let mut rows = m.min(SMALL);
        loop {
            let most_tiles = (SUMS_BYTES / (rows * SUMS * 4))
                .saturating_sub(WARPS)
                .max(1);
            let waves = tiles.div_ceil(multiprocessors).div_ceil(most_tiles);
            let blocks = tiles.min(multiprocessors * waves);
            let each = tiles.div_ceil(blocks);
            let x = rows * k.next_multiple_of(tile.step()) * 2;
            let sums = rows * ((each + WARPS) * SUMS + each * tile.features()) * 4;
            let needed = WARPS * (RING_BYTES + 4) + x + sums;
            if needed <= shared {
                return Some(Plan {
                    tile,
                    blocks,
                    rows,
                    shared: needed,
                });
            }
            if rows == 1 {
                return None;
            }
            rows = rows.div_ceil(2);
        }
    }
}

/// A weight and its bias, f32 `[rows]`.
pub type Biased<'a> = (&'a Matrix, Option<&'a DeviceBuffer>);

/// Products of `m` rows with up to three matrices that share their input; their features follow each other in the rows of
/// `out`, `stride` elements apart. Scratch memory holds an f16 copy of one weight where that is needed.
pub fn linear(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    scratch: &LinearScratch,
) -> Result<()> {
    let Some((first, _)) = matrices.first() else {
        bail!(Internal, "a product without a matrix");
    };
    let k = first.cols;
    if matrices.len() > 3 || matrices.iter().any(|(w, _)| w.cols != k) {
        bail!(
            Internal,
            "{} matrices of different K in one product",
            matrices.len()
        );
    }
    if output == Output::Swiglu && (matrices.len() != 2 || matrices[1].0.rows != first.rows) {
        bail!(Internal, "SwiGLU takes two matrices of one shape");
    }
    if m == 0 {
        return Ok(());
    }
    let features: usize = match output {
        Output::Swiglu => first.rows,
        _ => matrices.iter().map(|(w, _)| w.rows).sum(),
    };
    if stride < features {
        bail!(Internal, "rows of {features} features {stride} apart");
    }
    out.holds("a product", &[(m - 1) * stride + features, output.bytes()])?;
    match input {
        Input::Plain(x, _) => x.holds("activations", &[m, k, 2])?,
        Input::Normed(..) if m != 1 => {
            bail!(
                Internal,
                "{m} rows to be normalised on the way in; the fused kernel does it for one"
            )
        }
        Input::Normed(x, weight, _) => {
            x.holds("activations", &[k, 4])?;
            weight.holds("a norm", &[k, 4])?;
        }
    }
    let all_nvfp4 = matrices.iter().all(|(w, _)| w.storage == Storage::Nvfp4);
    if all_nvfp4
        && m <= SMALL
        && let Some(plan) = plan(gpu, m, matrices, output)
        && (m <= FEW || output == Output::Swiglu || plan.rows == m && m * k * 2 <= FUSED_BYTES)
    {
        return small(gpu, input, m, matrices, output, out, stride, plan);
    }
    let Input::Plain(x, factor) = input else {
        bail!(Internal, "only the fused kernel normalises on the way in");
    };
    if output == Output::Swiglu {
        bail!(Internal, "only the fused kernel applies SwiGLU");
    }
    if all_nvfp4 && (m <= TILED || gpu.blas().is_none()) {
        return tiled(gpu, x, factor, m, matrices, output, out, stride, scratch);
    }
    let mut column = 0;
    for (w, bias) in matrices {
        let at = out.address() + (column * output.bytes()) as u64;
        if w.storage == Storage::Nvfp4 || (m > SMALL && w.storage != Storage::F32) {
            scratch.product(gpu, w, x, factor, m, output, at, stride)?;
            if let Some(bias) = bias {
                super::elementwise::add_bias_at(
                    gpu,
                    at,
                    output == Output::F16,
                    m,
                    w.rows,
                    stride,
                    bias,
                )?;
            }
        } else {
            dense(gpu, w, *bias, x, factor, m, output, at, stride)?;
        }
        column += w.rows;
    }
    Ok(())
}

/// Whether the fused kernel serves `m` rows of these matrices.
pub fn is_fused(gpu: &Gpu, m: usize, matrices: &[Biased<'_>], output: Output) -> bool {
    m <= SMALL
        && matrices.iter().all(|(w, _)| w.storage == Storage::Nvfp4)
        && plan(gpu, m, matrices, output).is_some()
}

fn plan(gpu: &Gpu, m: usize, matrices: &[Biased<'_>], output: Output) -> Option<Plan> {
    let k = matrices[0].0.cols;
    let features: Vec<usize> = matrices.iter().map(|(w, _)| w.rows).collect();
    Plan::choose(
        m,
        k,
        &features,
        output,
        gpu.multiprocessors(),
        gpu.shared_limit(),
    )
}

/// The fused kernel with a plan of the caller's.
pub fn small(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    plan: Plan,
) -> Result<()> {
    let k = matrices[0].0.cols;
    let mut matrix = matrix_arguments(matrices)?;
    let (x, norm_weight, eps, x_bytes, prefix) = match input {
        Input::Plain(x, factor) => {
            matrix.iter_mut().for_each(|w| w.global *= factor);
            (x.address(), 0, 0.0, 2, "")
        }
        Input::Normed(x, weight, eps) => (x.address(), weight.address(), eps, 4, "normed_"),
    };
    let kind = match output {
        Output::F32 => "f32",
        Output::F16 => "f16",
        Output::Add => "add",
        Output::Swiglu => "swiglu",
    };
    for first in (0..m).step_by(plan.rows) {
        let rows = plan.rows.min(m - first);
        let tail = match (prefix, plan.tile) {
            ("normed_", _) => "",
            (_, Tile::Split) => "_4",
            (_, Tile::Rows | Tile::Pair) if rows <= 8 => "_8",
            (_, Tile::Rows | Tile::Pair) => "_16",
        };
        let arguments = SmallArguments {
            x: x + (first * k * x_bytes) as u64,
            norm_weight,
            out: out.address() + (first * stride * output.bytes()) as u64,
            matrix,
            matrices: matrices.len() as i32,
            m: rows as i32,
            k: int("K", k)?,
            out_stride: int("the stride of a product", stride)?,
            eps,
            out_scale: 1.0 / MLP_SCALE,
        };
        let launch = Launch {
            grid: [plan.blocks as u32, 1, 1],
            block: [(32 * WARPS) as u32, 1, 1],
            // A multiprocessor holds two blocks at most, of which one is the next kernel's, which fills its rings while the
            // other computes. Were there room for three, blocks that start early would crowd where an earlier kernel's have
            // ended, and leave other multiprocessors without any.
            shared: plan.shared.max(gpu.shared_limit() / 3 + 1024) as u32,
        };
        // SAFETY: the struct is the kernel's; sizes were checked, and buffers outlive work on their stream.
        unsafe {
            launch.run(
                gpu,
                Unit::LinearSmall,
                &format!("linear_{prefix}{kind}{tail}"),
                &arguments,
            )?
        };
    }
    Ok(())
}

#[repr(C)]
struct TiledArguments {
    x: u64,
    out: u64,
    partial: u64,
    matrix: [MatrixArgument; 3],
    matrices: i32,
    m: i32,
    k: i32,
    out_stride: i32,
    output: i32,
    parts: i32,
}

/// Output features of a block of the tiled kernel.
const TILE_FEATURES: usize = 64;
/// Rows of activations of a block of it at most.
const TILE_ROWS: usize = 64;
/// Blocks of it that a multiprocessor should have.
const TILE_BLOCKS: usize = 2;
/// Chunks of K that are worth a block of its own.
const PART_CHUNKS: usize = 6;

/// How the tiled kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiling {
    /// Rows of activations of a block.
    columns: usize,
    /// Blocks along features, along rows, and along K.
    grid: [usize; 3],
}

impl Tiling {
    /// For `m` rows and matrices of `features` output features and K = `k`; K is divided only if `divide`.
    fn choose(
        m: usize,
        k: usize,
        features: &[usize],
        multiprocessors: usize,
        divide: bool,
    ) -> Tiling {
        let columns = m.next_power_of_two().clamp(8, TILE_ROWS);
        let tiles: usize = features.iter().map(|n| n.div_ceil(TILE_FEATURES)).sum();
        let blocks = tiles * m.div_ceil(columns);
        let parts = if divide {
            (TILE_BLOCKS * multiprocessors / blocks)
                .min(k.div_ceil(CHUNK_K) / PART_CHUNKS)
                .max(1)
        } else {
            1
        };
        Tiling {
            columns,
            grid: [tiles, m.div_ceil(columns), parts],
        }
    }

    /// Shared memory of a block: three stages of a chunk of K.
    const fn shared(self) -> usize {
        3 * (TILE_FEATURES / CHUNK_ROWS * CHUNK_BYTES + self.columns * CHUNK_K * 2)
    }
}

/// The tiled kernel: f16 `x` that was divided by `factor`, and NVFP4 weights. [`linear`] checks sizes and chooses.
pub fn tiled(
    gpu: &Gpu,
    x: &DeviceBuffer,
    factor: f32,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    scratch: &LinearScratch,
) -> Result<()> {
    let k = matrices[0].0.cols;
    let features: Vec<usize> = matrices.iter().map(|(w, _)| w.rows).collect();
    let divide = scratch.partial.bytes() > 0;
    let tiling = Tiling::choose(m, k, &features, gpu.multiprocessors(), divide);
    let parts = tiling.grid[2];
    let all: usize = features.iter().sum();
    if parts > 1 {
        scratch
            .partial
            .holds("parts of a product", &[parts, m, all, 4])?;
    }
    let mut matrix = matrix_arguments(matrices)?;
    matrix.iter_mut().for_each(|w| w.global *= factor);
    let arguments = TiledArguments {
        x: x.address(),
        out: out.address(),
        partial: scratch.partial.address(),
        matrix,
        matrices: matrices.len() as i32,
        m: int("rows", m)?,
        k: int("K", k)?,
        out_stride: int("the stride of a product", stride)?,
        output: output.plain()?,
        parts: parts as i32,
    };
    let launch = Launch {
        grid: tiling.grid.map(|n| n as u32),
        block: [128, 1, 1],
        shared: tiling.shared() as u32,
    };
    let name = format!("linear_tiled_{}", tiling.columns);
    let sum = Launch::new([all.div_ceil(256) as u32, m as u32, 1], 256);
    // SAFETY: the struct is the kernels'; sizes were checked here and by `linear`.
    unsafe {
        launch.run(gpu, Unit::LinearTiled, &name, &arguments)?;
        if parts > 1 {
            sum.run(gpu, Unit::LinearTiled, "linear_tiled_sum", &arguments)?;
        }
    }
    Ok(())
}

fn matrix_arguments(matrices: &[Biased<'_>]) -> Result<[MatrixArgument; 3]> {
    let mut all = [MatrixArgument::default(); 3];
    for (argument, (w, bias)) in all.iter_mut().zip(matrices) {
        if let Some(bias) = bias {
            bias.holds("a bias", &[w.rows, 4])?;
        }
        *argument = MatrixArgument {
            chunks: w.address(),
            bias: bias.map_or(0, DeviceBuffer::address),
            global: w.global,
            rows: int("output features", w.rows)?,
        };
    }
    Ok(all)
}

#[repr(C)]
struct DenseArguments {
    x: u64,
    weight: u64,
    bias: u64,
    out: u64,
    factor: f32,
    kind: i32,
    output: i32,
    m: i32,
    rows: i32,
    k: i32,
    out_stride: i32,
}

fn dense(
    gpu: &Gpu,
    w: &Matrix,
    bias: Option<&DeviceBuffer>,
    x: &DeviceBuffer,
    factor: f32,
    m: usize,
    output: Output,
    out: u64,
    stride: usize,
) -> Result<()> {
    let arguments = DenseArguments {
        x: x.address(),
        weight: w.address(),
        bias: bias.map_or(0, DeviceBuffer::address),
        out,
        factor,
        kind: match w.storage {
            Storage::F32 => 0,
            Storage::F16 => 1,
            Storage::BF16 => 2,
            Storage::Nvfp4 => bail!(Internal, "the dense kernel was given an NVFP4 weight"),
        },
        output: output.plain()?,
        m: int("rows", m)?,
        rows: int("output features", w.rows)?,
        k: int("K", w.cols)?,
        out_stride: int("the stride of a product", stride)?,
    };
    let launch = Launch::new([w.rows.div_ceil(8) as u32, m.div_ceil(8) as u32, 1], 256);
    // SAFETY: the struct is the kernel's; sizes were checked by `linear`.
    unsafe { launch.run(gpu, Unit::LinearDense, "linear_dense", &arguments) }
}

/// Bytes that the library for large products may use beside its operands.
pub(super) const WORKSPACE: usize = 32 << 20;
/// Bytes of a weight's f16 copy, of as many rows as that is, in a product by itself.
const COPY: usize = 64 << 20;

/// Memory for products of many rows: an f16 copy of one weight, or of some of its rows, the library's workspace,
/// and sums of parts.
#[derive(Debug)]
pub struct LinearScratch {
    copy: DeviceBuffer,
    workspace: DeviceBuffer,
    /// Sums of the tiled kernel's blocks that share a tile.
    partial: DeviceBuffer,
}

#[repr(C)]
struct DequantizeArguments {
    chunks: u64,
    out: u64,
    rows: i32,
    k: i32,
}

impl LinearScratch {
    /// What is good for products of up to `rows` rows, with room for a copy of `bytes`; the library needs some.
    pub fn new(gpu: &Arc<Gpu>, rows: usize, bytes: usize) -> Result<LinearScratch> {
        let workspace = if bytes > 0 && gpu.blas().is_some() {
            WORKSPACE
        } else {
            0
        };
        let tiles = if rows > FEW {
            TILE_BLOCKS * gpu.multiprocessors()
        } else {
            0
        };
        Ok(LinearScratch {
            copy: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?,
            workspace: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, workspace)?,
            partial: DeviceBuffer::uninit(
                gpu,
                Tag::DeviceScratch,
                tiles * TILE_ROWS * TILE_FEATURES * 4,
            )?,
        })
    }

    /// Room for a product of `m` rows with `w` alone.
    pub fn for_product(gpu: &Arc<Gpu>, w: &Matrix, m: usize) -> Result<LinearScratch> {
        let row = 2 * w.cols;
        let bytes = match w.storage {
            Storage::F32 => 0,
            // Activations of the weight's type.
            Storage::F16 | Storage::BF16 if m > SMALL => product("activations", &[m, row])?,
            Storage::F16 | Storage::BF16 => 0,
            Storage::Nvfp4 if gpu.blas().is_none() || m <= TILED => 0,
            Storage::Nvfp4 => row * w.rows.min(COPY / row).max(1).next_multiple_of(CHUNK_ROWS),
        };
        Self::new(gpu, m, bytes)
    }

    fn product(
        &self,
        gpu: &Arc<Gpu>,
        w: &Matrix,
        x: &DeviceBuffer,
        factor: f32,
        m: usize,
        output: Output,
        out: u64,
        stride: usize,
    ) -> Result<()> {
        let Some(blas) = gpu.blas().filter(|_| self.workspace.bytes() > 0) else {
            if w.storage == Storage::Nvfp4 {
                bail!(
                    Unsupported,
                    "a weight with K = {} fits no kernel of this device, and there is no cuBLASLt",
                    w.cols
                );
            }
            return dense(gpu, w, None, x, factor, m, output, out, stride);
        };
        if matches!(w.storage, Storage::BF16 | Storage::F16) {
            // The library multiplies operands of one type.
            let (kind, x) = match w.storage {
                Storage::F16 => (Element::F16, x.address()),
                _ => {
                    super::elementwise::f16_to_bf16(gpu, x, m * w.cols, &self.copy)?;
                    (Element::Bf16, self.copy.address())
                }
            };
            return blas.product(
                gpu,
                kind,
                w.address(),
                w.rows,
                w.cols,
                factor,
                x,
                m,
                output,
                out,
                stride,
                &self.workspace,
            );
        }
        let step = self.copy.bytes() / (2 * w.cols) / CHUNK_ROWS * CHUNK_ROWS;
        if step == 0 {
            bail!(
                Internal,
                "scratch of {} bytes for rows of {}",
                self.copy.bytes(),
                2 * w.cols
            );
        }
        for first in (0..w.rows).step_by(step) {
            let rows = step.min(w.rows - first);
            let arguments = DequantizeArguments {
                chunks: w.address()
                    + (first / CHUNK_ROWS * w.cols.div_ceil(CHUNK_K) * CHUNK_BYTES) as u64,
                out: self.copy.address(),
                rows: int("rows", rows)?,
                k: int("K", w.cols)?,
            };
            let launch = by_words(rows, w.cols);
            // SAFETY: the struct is the kernel's; the copy has room for `rows` rows.
            unsafe { launch.run(gpu, Unit::Dequantize, "dequantize_folded", &arguments)? };
            let at = out + (first * output.bytes()) as u64;
            blas.product(
                gpu,
                Element::F16,
                self.copy.address(),
                rows,
                w.cols,
                w.global * factor,
                x.address(),
                m,
                output,
                at,
                stride,
                &self.workspace,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_fit_the_device_and_keep_it_busy() {
        let shapes: [(usize, &[usize], Output); 6] = [
            (2560, &[4096, 1024, 1024], Output::F32),
            (4096, &[2560], Output::Add),
            (2560, &[9728, 9728], Output::Swiglu),
            (9728, &[2560], Output::Add),
            (2560, &[151_936], Output::F32),
            (576, &[576, 192, 192], Output::F32),
        ];
        for (k, features, output) in shapes {
            for m in 1..=SMALL {
                let plan = Plan::choose(m, k, features, output, 132, 227 << 10).unwrap();
                assert!(plan.shared <= 227 << 10, "{plan:?}");
                assert!(plan.rows >= 1 && plan.rows <= m, "{plan:?}");
                assert!(
                    plan.blocks.is_multiple_of(132) || plan.blocks < 132,
                    "{plan:?}"
                );
                assert!(plan.tile != Tile::Split || m <= 4, "{plan:?}");
            }
        }
        // GB10: 48 multiprocessors and 99 KB.
        assert!(Plan::choose(1, 9728, &[2560], Output::Add, 48, 99 << 10).is_some());
        assert!(Plan::choose(1, 1 << 20, &[2560], Output::Add, 48, 99 << 10).is_none());
    }

    #[test]
    fn parts_of_tiles_fit_the_scratch() {
        for multiprocessors in [1, 48, 132] {
            for features in [&[64][..], &[4096, 1024, 1024], &[2560], &[151_936]] {
                for m in [17, 32, 64, 100, 1000] {
                    let tiling = Tiling::choose(m, 9728, features, multiprocessors, true);
                    let [tiles, rows, parts] = tiling.grid;
                    assert!(rows * tiling.columns >= m && tiling.columns <= TILE_ROWS);
                    let most = TILE_BLOCKS * multiprocessors;
                    assert!(parts == 1 || tiles * rows * parts <= most, "{tiling:?}");
                    assert!(tiling.shared() <= 99 << 10, "{tiling:?}");
                    let whole = Tiling::choose(m, 9728, features, multiprocessors, false);
                    assert_eq!(whole.grid, [tiles, rows, 1]);
                }
            }
        }
    }
}
