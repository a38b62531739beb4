//! Weight matrices on the device, and products with them: one fused kernel for up to [`SMALL`] rows and NVFP4 weights, a
//! library for many rows over a bounded bf16 copy of one weight at a time, and plain kernels for the rest.

use std::sync::Arc;

use super::compile::Unit;
use super::gpu::{Gpu, int};
use super::launch::Launch;
use super::memory::DeviceBuffer;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;
use crate::base::size::product;
use crate::format::e4m3;
use crate::format::nvfp4::BLOCK;

/// Rows of activations that the fused kernel takes at once.
pub const SMALL: usize = 16;

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
        read: &mut dyn FnMut(std::ops::Range<usize>, &mut [u8], &mut [u8]) -> Result<()>,
    ) -> Result<Matrix> {
        if rows == 0 || cols == 0 || !cols.is_multiple_of(BLOCK) {
            bail!(
                InvalidArgument,
                "a weight of [{rows}, {cols}]: rows must be positive and K a positive multiple of {BLOCK}"
            );
        }
        if !global.is_finite() {
            bail!(CorruptFile, "the global scale is {global}; it must be finite");
        }
        let (code_row, scale_row) = (cols / 2, cols / BLOCK);
        let mut codes = DeviceBuffer::uninit(gpu, Tag::DeviceWeights, product("codes", &[rows, code_row])?)?;
        let mut scales = DeviceBuffer::uninit(gpu, Tag::DeviceWeights, product("scales", &[rows, scale_row])?)?;
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
        read: &mut dyn FnMut(std::ops::Range<usize>, &mut [u8]) -> Result<()>,
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
        let mut values = DeviceBuffer::uninit(gpu, Tag::DeviceWeights, product("weight", &[rows, row])?)?;
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
        (self.values.address(), self.scales.as_ref().map_or(0, DeviceBuffer::address))
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
        Ok((part(&self.values)?, self.scales.as_ref().map_or(Ok(Vec::new()), part)?))
    }
}

/// What enters a product.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// bf16 `[m, k]`.
    Plain(&'a DeviceBuffer),
    /// f32 `[m, k]`, to be normalised by RMSNorm with this weight and epsilon on the way in.
    Normed(&'a DeviceBuffer, &'a DeviceBuffer, f32),
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// Stored as f32.
    F32,
    /// Stored as bf16.
    Bf16,
    /// Added to f32.
    Add,
    /// silu of the first matrix's times the second's, as bf16.
    Swiglu,
}

impl Output {
    const fn bytes(self) -> usize {
        match self {
            Output::F32 | Output::Add => 4,
            Output::Bf16 | Output::Swiglu => 2,
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
}

/// Output features of a tile of the fused kernel.
const TILE: usize = 8;
/// Elements of K that a warp takes at a time.
const CHUNK: usize = 128;
/// Chunks that a warp keeps in shared memory, and the bytes of each.
const STAGES: usize = 8;
const STAGE_BYTES: usize = TILE * CHUNK / 2 + TILE * CHUNK / BLOCK;
/// Threads that the fused kernel was compiled for.
const MOST_WARPS: usize = 24;

/// How the fused kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
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
    /// The plan for `m` rows, `tiles` tiles of output features (of `matrices` matrices at a time) and K = `k` on a device
    /// with this many multiprocessors and this much shared memory; `None` where a single row does not fit.
    ///
    /// Warps share K in runs of at least four chunks. Then as many groups to a multiprocessor as leave the fewest idle in
    /// the last round, more of them where that is equal.
    pub fn choose(m: usize, k: usize, tiles: usize, matrices: usize, multiprocessors: usize, shared: usize) -> Option<Plan> {
        let chunks = k.div_ceil(CHUNK);
        let split = match chunks {
            0..8 => 1,
            8..16 => 2,
            16..48 => 4,
            _ => 8,
        };
        let mut best: Option<(f64, Plan)> = None;
        for groups in 1..=MOST_WARPS / split {
            let slots = multiprocessors * groups;
            let rounds = tiles.div_ceil(slots);
            let used = tiles as f64 / (rounds * slots) as f64;
            let blocks = multiprocessors.min(tiles.div_ceil(groups));
            let mut plan = Plan { split, groups, blocks, rows: m.min(SMALL) };
            while plan.rows > 1 && plan.shared(k, matrices) > shared {
                plan.rows = plan.rows.div_ceil(2);
            }
            if plan.shared(k, matrices) > shared {
                continue;
            }
            // A few more warps hide more latency than a few idle slots cost.
            let score = used + 0.01 * (groups * split) as f64;
            if best.is_none_or(|(s, _)| score > s) {
                best = Some((score, plan));
            }
        }
        best.map(|(_, plan)| plan)
    }

    /// Shared memory of a block.
    fn shared(&self, k: usize, matrices: usize) -> usize {
        let warps = self.split * self.groups;
        let x = self.rows * k.div_ceil(CHUNK) * CHUNK * 2;
        let partial = 2 * warps * matrices * SMALL * TILE * 4;
        warps * STAGES * STAGE_BYTES + x + partial + self.rows * warps * 4
    }
}

fn holds(buffer: &DeviceBuffer, what: &str, sizes: &[usize]) -> Result<()> {
    let wanted = product(what, sizes)?;
    if buffer.bytes() < wanted {
        bail!(Internal, "{what} takes {wanted} bytes, and its buffer has {}", buffer.bytes());
    }
    Ok(())
}

/// A weight and its bias, f32 `[rows]`.
pub type Biased<'a> = (&'a Matrix, Option<&'a DeviceBuffer>);

/// Products of `m` rows with up to three matrices that share their input; their features follow each other in the rows of
/// `out`, `stride` elements apart. Scratch memory holds a bf16 copy of one weight where that is needed.
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
        bail!(Internal, "{} matrices of different K in one product", matrices.len());
    }
    if output == Output::Swiglu && (matrices.len() != 2 || matrices[1].0.rows != first.rows) {
        bail!(Internal, "SwiGLU takes two matrices of one shape");
    }
    if m == 0 {
        return Ok(());
    }
    holds(out, "a product", &[m - 1, stride, output.bytes()])?;
    match input {
        Input::Plain(x) => holds(x, "activations", &[m, k, 2])?,
        Input::Normed(x, weight, _) => {
            holds(x, "activations", &[m, k, 4])?;
            holds(weight, "a norm", &[k, 4])?;
        }
    }
    let all_nvfp4 = matrices.iter().all(|(w, _)| w.storage == Storage::Nvfp4);
    let fused = all_nvfp4 && (m <= SMALL || (gpu.blas().is_none() && !matches!(input, Input::Normed(..))));
    if fused && let Some(plan) = plan(gpu, m, matrices, output) {
        return small(gpu, input, m, matrices, output, out, stride, plan);
    }
    let Input::Plain(x) = input else {
        bail!(Internal, "only the fused kernel normalises on the way in");
    };
    if output == Output::Swiglu {
        bail!(Internal, "only the fused kernel applies SwiGLU");
    }
    let mut column = 0;
    for (w, bias) in matrices {
        let at = out.address() + (column * output.bytes()) as u64;
        if w.storage == Storage::Nvfp4 || w.storage == Storage::BF16 {
            scratch.product(gpu, w, x, m, output, at, stride)?;
            if let Some(bias) = bias {
                super::elementwise::add_bias_at(gpu, at, output == Output::Bf16, m, w.rows, stride, bias)?;
            }
        } else {
            dense(gpu, w, *bias, x, m, output, at, stride)?;
        }
        column += w.rows;
    }
    Ok(())
}

/// Whether the fused kernel serves `m` rows of these matrices.
pub fn is_fused(gpu: &Gpu, m: usize, matrices: &[Biased<'_>], output: Output) -> bool {
    m <= SMALL && matrices.iter().all(|(w, _)| w.storage == Storage::Nvfp4) && plan(gpu, m, matrices, output).is_some()
}

fn plan(gpu: &Gpu, m: usize, matrices: &[Biased<'_>], output: Output) -> Option<Plan> {
    let k = matrices[0].0.cols;
    let (tiles, together) = match output {
        Output::Swiglu => (matrices[0].0.rows.div_ceil(TILE), 2),
        _ => (matrices.iter().map(|(w, _)| w.rows.div_ceil(TILE)).sum(), 1),
    };
    Plan::choose(m, k, tiles, together, gpu.multiprocessors(), gpu.shared_limit())
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
            holds(bias, "a bias", &[w.rows, 4])?;
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
        Input::Plain(x) => (x.address(), 0, 0.0, 2, ""),
        Input::Normed(x, weight, eps) => (x.address(), weight.address(), eps, 4, "normed_"),
    };
    let kind = match output {
        Output::F32 => "f32",
        Output::Bf16 => "bf16",
        Output::Add => "add",
        Output::Swiglu => "swiglu",
    };
    for first in (0..m).step_by(plan.rows) {
        let rows = plan.rows.min(m - first);
        let tail = match (k.is_multiple_of(CHUNK), rows > 8) {
            (false, _) => "ragged",
            (true, false) => "8",
            (true, true) => "16",
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
        };
        let launch = Launch {
            grid: [plan.blocks as u32, 1, 1],
            block: [32, plan.split as u32, plan.groups as u32],
            shared: Plan { rows, ..plan }.shared(k, if output == Output::Swiglu { 2 } else { 1 }) as u32,
        };
        // SAFETY: the struct is the kernel's; sizes were checked, and buffers outlive work on their stream.
        unsafe { launch.run(gpu, Unit::LinearSmall, &format!("linear_{prefix}{kind}_{tail}"), &arguments)? };
    }
    Ok(())
}

#[repr(C)]
struct DenseArguments {
    x: u64,
    weight: u64,
    bias: u64,
    out: u64,
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
        kind: match w.storage {
            Storage::F32 => 0,
            Storage::F16 => 1,
            Storage::BF16 => 2,
            Storage::Nvfp4 => bail!(Internal, "the dense kernel was given an NVFP4 weight"),
        },
        output: match output {
            Output::F32 => 0,
            Output::Bf16 => 1,
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
const WORKSPACE: usize = 32 << 20;

/// Memory for large products: a bf16 copy of one weight, or of some of its rows, and the library's workspace.
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
    global: f32,
    blocks: u64,
}

impl LinearScratch {
    /// Room for a copy of `bytes`; nothing for small products only.
    pub fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<LinearScratch> {
        let workspace = if bytes > 0 && gpu.blas().is_some() { WORKSPACE } else { 0 };
        Ok(LinearScratch {
            copy: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, bytes)?,
            workspace: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, workspace)?,
        })
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.copy.bytes() + self.workspace.bytes()
    }

    fn product(&self, gpu: &Arc<Gpu>, w: &Matrix, x: &DeviceBuffer, m: usize, output: Output, out: u64, stride: usize) -> Result<()> {
        let Some(blas) = gpu.blas().filter(|_| self.workspace.bytes() > 0) else {
            if w.storage == Storage::Nvfp4 {
                bail!(Internal, "a weight with K = {} fits no kernel of this device", w.cols);
            }
            return dense(gpu, w, None, x, m, output, out, stride);
        };
        if w.storage == Storage::BF16 {
            return blas.product(gpu, w.values.address(), w.rows, w.cols, 1.0, x.address(), m, output, out, stride, &self.workspace);
        }
        let (codes, scales) = w.addresses();
        let step = (self.copy.bytes() / (2 * w.cols)).min(w.rows);
        if step == 0 {
            bail!(Internal, "scratch of {} bytes for rows of {}", self.copy.bytes(), 2 * w.cols);
        }
        for first in (0..w.rows).step_by(step) {
            let rows = step.min(w.rows - first);
            let arguments = DequantizeArguments {
                codes: codes + (first * w.cols / 2) as u64,
                scales: scales + (first * w.cols / BLOCK) as u64,
                out: self.copy.address(),
                global: w.global,
                blocks: (rows * w.cols / BLOCK) as u64,
            };
            let launch = Launch::new([arguments.blocks.div_ceil(256) as u32, 1, 1], 256);
            // SAFETY: the struct is the kernel's; the copy has room for `rows` rows.
            unsafe { launch.run(gpu, Unit::Dequantize, "dequantize_folded", &arguments)? };
            let at = out + (first * output.bytes()) as u64;
            blas.product(gpu, self.copy.address(), rows, w.cols, w.global, x.address(), m, output, at, stride, &self.workspace)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_fit_the_device_and_keep_it_busy() {
        let hopper = |m, k, tiles, matrices| Plan::choose(m, k, tiles, matrices, 132, 227 << 10).unwrap();
        for (k, tiles, matrices) in [(2560, 768, 1), (4096, 320, 1), (2560, 1216, 2), (9728, 320, 1), (2560, 18992, 1), (576, 120, 1)] {
            for m in 1..=SMALL {
                let plan = hopper(m, k, tiles, matrices);
                assert!(plan.shared(k, matrices) <= 227 << 10, "{plan:?}");
                assert!(plan.split * plan.groups <= MOST_WARPS && plan.rows >= 1 && plan.rows <= m, "{plan:?}");
                let rounds = tiles.div_ceil(plan.blocks * plan.groups);
                assert!(rounds * plan.blocks * plan.groups >= tiles, "{plan:?}");
            }
        }
        // GB10: 48 multiprocessors and 99 KB.
        assert!(Plan::choose(1, 9728, 320, 1, 48, 99 << 10).is_some());
        assert!(Plan::choose(1, 1 << 20, 320, 1, 48, 99 << 10).is_none());
    }
}
