//! Weight matrices on the device, and products with them: one fused kernel for up to [`SMALL`] rows and NVFP4 weights, a
//! library for many rows over a bounded f16 copy of one weight at a time, and plain kernels for the rest.

use std::ops::Range;
use std::sync::Arc;

use super::blas::Element;
use super::gpu::{Gpu, int};
use super::launch::Launch;
use super::memory::DeviceBuffer;
use super::nvrtc::Unit;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::format::e4m3;
use crate::format::nvfp4::BLOCK;

/// What activations between gate and down are divided by: they are the largest of a model, and f16 ends at 65504.
pub const MLP_SCALE: f32 = 16.0;
/// Rows of activations that the fused kernel takes at once.
pub const SMALL: usize = 16;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("linear_", size_of::<SmallArguments>()),
    ("linear_dense", size_of::<DenseArguments>()),
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
    /// Codes and block scales in the order of the file, and a multiplier.
    Nvfp4,
}

/// A weight `[rows, cols]` on a device. Immutable.
#[derive(Debug)]
pub struct Matrix {
    storage: Storage,
    rows: usize,
    cols: usize,
    /// Values, or codes.
    values: DeviceBuffer,
    scales: Option<DeviceBuffer>,
    global: f32,
}

/// Gives the codes and the block scales of a range of rows.
pub type ReadNvfp4<'a> = dyn FnMut(Range<usize>, &mut [u8], &mut [u8]) -> Result<()> + 'a;
/// Gives the bytes of a range of rows.
pub type ReadBytes<'a> = dyn FnMut(Range<usize>, &mut [u8]) -> Result<()> + 'a;

/// Rows of a weight that are brought to the device at a time.
fn rows_at_a_time(row_bytes: usize) -> usize {
    ((4 << 20) / row_bytes.max(1)).max(1)
}

impl Matrix {
    /// An NVFP4 weight; `read` gives codes and scales of ranges of rows.
    pub fn nvfp4(
        gpu: &Arc<Gpu>,
        rows: usize,
        cols: usize,
        global: f32,
        read: &mut ReadNvfp4,
    ) -> Result<Matrix> {
        if rows == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "a weight of [{rows}, {cols}]: rows must be positive and K a positive multiple of {BLOCK}"
            );
        }
        if !global.is_finite() {
            bail!(
                CorruptFile,
                "the global scale is {global}; it must be finite"
            );
        }
        let (code_row, scale_row) = (cols / 2, cols / BLOCK);
        let mut codes = DeviceBuffer::uninit(
            gpu,
            Tag::DeviceWeights,
            product("codes", &[rows, code_row])?,
        )?;
        let mut scales = DeviceBuffer::uninit(
            gpu,
            Tag::DeviceWeights,
            product("scales", &[rows, scale_row])?,
        )?;
        let step = rows_at_a_time(code_row);
        let mut some_scales = vec![0; step.min(rows) * scale_row];
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let some_scales = &mut some_scales[..n * scale_row];
            let mut some_codes = vec![0; n * code_row];
            read(first..first + n, &mut some_codes, some_scales)?;
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
            codes.write(first * code_row, &some_codes)?;
            scales.write(first * scale_row, some_scales)?;
        }
        Ok(Matrix {
            storage: Storage::Nvfp4,
            rows,
            cols,
            values: codes,
            scales: Some(scales),
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
        let element = match storage {
            Storage::F32 => 4,
            Storage::F16 | Storage::BF16 => 2,
            Storage::Nvfp4 => bail!(Internal, "an NVFP4 matrix has scales"),
        };
        if rows == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "a weight of [{rows}, {cols}]: rows must be positive and K a positive multiple of {BLOCK}"
            );
        }
        let row = cols * element;
        let mut values =
            DeviceBuffer::uninit(gpu, Tag::DeviceWeights, product("weight", &[rows, row])?)?;
        let step = rows_at_a_time(row);
        for first in (0..rows).step_by(step) {
            let n = step.min(rows - first);
            let mut bytes = vec![0; n * row];
            read(first..first + n, &mut bytes)?;
            values.write(first * row, &bytes)?;
        }
        Ok(Matrix {
            storage,
            rows,
            cols,
            values,
            scales: None,
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
        self.values.bytes() + self.scales.as_ref().map_or(0, DeviceBuffer::bytes)
    }

    /// Its device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.values.gpu()
    }

    /// The multiplier of an NVFP4 weight.
    pub fn global(&self) -> f32 {
        self.global
    }

    /// Addresses of values and scales, for kernels.
    pub(super) fn addresses(&self) -> (u64, u64) {
        (
            self.values.address(),
            self.scales.as_ref().map_or(0, DeviceBuffer::address),
        )
    }

    /// The stored bytes of a row: values or codes, and scales.
    pub fn read_row(&self, row: usize) -> Result<(Vec<u8>, Vec<u8>)> {
        if row >= self.rows {
            bail!(InvalidArgument, "row {row} of a matrix of {}", self.rows);
        }
        let part = |buffer: &DeviceBuffer| {
            let mut bytes = vec![0u8; buffer.bytes() / self.rows];
            buffer.read(row * bytes.len(), &mut bytes)?;
            Ok(bytes)
        };
        Ok((
            part(&self.values)?,
            self.scales.as_ref().map_or(Ok(Vec::new()), part)?,
        ))
    }
}

/// What enters a product.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// f16 `[m, k]`, and the factor that they were divided by to keep them small.
    Plain(&'a DeviceBuffer, f32),
    /// f32 `[m, k]`, to be normalised by RMSNorm with this weight and epsilon on the way in.
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
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MatrixArgument {
    codes: u64,
    scales: u64,
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

/// Elements of K that a warp of the fused kernel takes at a time.
const STEP: usize = 256;
/// What a warp keeps in shared memory: codes and scales of 48 rows.
const WARP_BYTES: usize = 48 * (STEP / 2 + STEP / BLOCK);
/// Sums of a warp's tile, for eight rows of activations.
const SUMS: usize = 16 * 8;
/// Warps with tiles of their own, or shares of one, that keep a multiprocessor busy.
const BUSY: usize = 9;
/// Warps that the fused kernel was compiled for.
const MOST_WARPS: usize = 16;

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
    fn of(output: Output, m: usize, k: usize) -> Tile {
        match output {
            Output::Swiglu => Tile::Pair,
            _ if m <= 4 && k.is_multiple_of(STEP) => Tile::Split,
            _ => Tile::Rows,
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
    /// Warps that divide K among them.
    pub split: usize,
    /// Groups of such warps in a block; each takes tiles of its own.
    pub groups: usize,
    /// Blocks.
    pub blocks: usize,
    /// Rows of activations in one launch.
    pub rows: usize,
}

impl Plan {
    /// The plan for `m` rows and matrices of `features` output features and K = `k`, on a device with this many
    /// multiprocessors and this much shared memory; `None` where a single row does not fit.
    ///
    /// Warps share K no further than keeps a multiprocessor busy, since each share costs a sum. Then as many groups to a
    /// multiprocessor as leave the fewest idle in the last round, more of them where that is equal; but fewer, if all rows
    /// of activations fit beside them only then.
    pub fn choose(
        m: usize,
        k: usize,
        features: &[usize],
        output: Output,
        multiprocessors: usize,
        shared: usize,
    ) -> Option<Plan> {
        let tile = Tile::of(output, m, k);
        let tiles: usize = match tile {
            Tile::Pair => features[0].div_ceil(tile.features()),
            _ => features.iter().map(|n| n.div_ceil(tile.features())).sum(),
        };
        let steps = k.div_ceil(STEP);
        let mut split = 1;
        while split < 8 && tiles * split < BUSY * multiprocessors && 2 * split <= steps {
            split *= 2;
        }
        let mut best: Option<(f64, Plan)> = None;
        for groups in 1..=MOST_WARPS / split {
            let slots = multiprocessors * groups;
            let used = tiles as f64 / (tiles.div_ceil(slots) * slots) as f64;
            let blocks = multiprocessors.min(tiles);
            let mut plan = Plan {
                tile,
                split,
                groups,
                blocks,
                rows: m.min(SMALL),
            };
            while plan.rows > 1 && plan.shared(k) > shared {
                plan.rows = plan.rows.div_ceil(2);
            }
            if plan.shared(k) > shared {
                continue;
            }
            // A few more warps hide more latency than a few idle slots cost.
            let score = used / m.div_ceil(plan.rows) as f64 + 0.01 * (groups * split) as f64;
            if best.is_none_or(|(s, _)| score > s) {
                best = Some((score, plan));
            }
        }
        best.map(|(_, plan)| plan)
    }

    /// Shared memory of a block.
    fn shared(&self, k: usize) -> usize {
        let warps = self.split * self.groups;
        let x = self.rows * k.next_multiple_of(STEP) * 2;
        // Where K is ragged, one kernel serves all numbers of rows.
        let columns = if k.is_multiple_of(STEP) {
            self.rows.div_ceil(8)
        } else {
            SMALL / 8
        };
        warps * WARP_BYTES + x + 2 * warps * columns * SUMS * 4 + warps * 4
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
        Input::Normed(x, weight, _) => {
            x.holds("activations", &[m, k, 4])?;
            weight.holds("a norm", &[k, 4])?;
        }
    }
    let all_nvfp4 = matrices.iter().all(|(w, _)| w.storage == Storage::Nvfp4);
    let fused =
        all_nvfp4 && (m <= SMALL || (gpu.blas().is_none() && !matches!(input, Input::Normed(..))));
    if fused && let Some(plan) = plan(gpu, m, matrices, output) {
        return small(gpu, input, m, matrices, output, out, stride, plan);
    }
    let Input::Plain(x, factor) = input else {
        bail!(Internal, "only the fused kernel normalises on the way in");
    };
    if output == Output::Swiglu {
        bail!(Internal, "only the fused kernel applies SwiGLU");
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
    let mut matrix = [MatrixArgument::default(); 3];
    for (argument, (w, bias)) in matrix.iter_mut().zip(matrices) {
        if let Some(bias) = bias {
            bias.holds("a bias", &[w.rows, 4])?;
        }
        let (codes, scales) = w.addresses();
        *argument = MatrixArgument {
            codes,
            scales,
            bias: bias.map_or(0, DeviceBuffer::address),
            global: w.global,
            rows: int("output features", w.rows)?,
        };
    }
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
        let tail = match (plan.tile, k.is_multiple_of(STEP), rows > 8) {
            (Tile::Split, ..) => "4",
            (_, false, _) => "ragged",
            (_, true, false) => "8",
            (_, true, true) => "16",
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
            block: [32, plan.split as u32, plan.groups as u32],
            // More than half of a multiprocessor's, so that it holds one block: blocks of the next kernel start early where
            // one has ended, and two of them on one multiprocessor would leave another idle.
            shared: Plan { rows, ..plan }
                .shared(k)
                .max(gpu.shared_limit() / 2 + 2048) as u32,
        };
        // SAFETY: the struct is the kernel's; sizes were checked, and buffers outlive work on their stream.
        unsafe {
            launch.run(
                gpu,
                Unit::LinearSmall,
                &format!("linear_{prefix}{kind}_{tail}"),
                &arguments,
            )?
        };
    }
    Ok(())
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
        weight: w.values.address(),
        bias: bias.map_or(0, DeviceBuffer::address),
        out,
        factor,
        kind: match w.storage {
            Storage::F32 => 0,
            Storage::F16 => 1,
            Storage::BF16 => 2,
            Storage::Nvfp4 => bail!(Internal, "the dense kernel was given an NVFP4 weight"),
        },
        output: match output {
            Output::F32 => 0,
            Output::F16 => 1,
            Output::Add => 2,
            Output::Swiglu => bail!(Internal, "only the fused kernel applies SwiGLU"),
        },
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

/// Memory for large products: an f16 copy of one weight, or of some of its rows, and the library's workspace.
#[derive(Debug)]
pub struct LinearScratch {
    copy: DeviceBuffer,
    workspace: DeviceBuffer,
}

#[repr(C)]
struct DequantizeArguments {
    codes: u64,
    scales: u64,
    out: u64,
    blocks: u64,
}

impl LinearScratch {
    /// Room for a copy of `bytes`; nothing for small products only.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<LinearScratch> {
        let workspace = if bytes > 0 && gpu.blas().is_some() {
            WORKSPACE
        } else {
            0
        };
        Ok(LinearScratch {
            copy: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?,
            workspace: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, workspace)?,
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
            Storage::Nvfp4
                if gpu.blas().is_none() || is_fused(gpu, m, &[(w, None)], Output::F32) =>
            {
                0
            }
            Storage::Nvfp4 => row * w.rows.min((COPY / row).max(1)),
        };
        Self::new(gpu, bytes)
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
                w.values.address(),
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
        let (codes, scales) = w.addresses();
        let step = (self.copy.bytes() / (2 * w.cols)).min(w.rows);
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
                codes: codes + (first * w.cols / 2) as u64,
                scales: scales + (first * w.cols / BLOCK) as u64,
                out: self.copy.address(),
                blocks: (rows * w.cols / BLOCK) as u64,
            };
            let launch = Launch::new([arguments.blocks.div_ceil(256) as u32, 1, 1], 256);
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
                assert!(plan.shared(k) <= 227 << 10, "{plan:?}");
                assert!(
                    plan.split * plan.groups <= MOST_WARPS && plan.rows >= 1 && plan.rows <= m,
                    "{plan:?}"
                );
                assert!(plan.tile != Tile::Split || m <= 4, "{plan:?}");
            }
        }
        // GB10: 48 multiprocessors and 99 KB.
        assert!(Plan::choose(1, 9728, &[2560], Output::Add, 48, 99 << 10).is_some());
        assert!(Plan::choose(1, 1 << 20, &[2560], Output::Add, 48, 99 << 10).is_none());
    }
}
