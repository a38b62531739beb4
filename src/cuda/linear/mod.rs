//! Weight matrices on the device, and products with them. For NVFP4 weights one fused kernel serves up to [`SMALL`] rows, or up to
//! [`WIDE`] on Hopper if they are not ordered; one of tiles up to [`TILED`], and a library more than that, over a bounded f16 copy of
//! one weight at a time; without the library the one of tiles serves all. Plain kernels do the rest.

mod deferred;
mod dense;
mod many;
mod matrix;
mod residual;
mod small;
mod tiled;

use std::sync::Arc;

use super::elementwise;

use super::driver::{DeviceBuffer, Gpu, int};
use crate::base::Result;
use crate::base::error::bail;
use crate::tensor::WeightType;

pub use deferred::{DeferredNorm, NormScratch, linear_add};
pub use many::LinearScratch;
pub(super) use many::WORKSPACE;
pub(super) use matrix::{CHUNK_BYTES, CHUNK_K, CHUNK_ROWS};
pub use matrix::{Matrix, ReadBytes, ReadNvfp4};
pub use residual::ResidualRow;
pub use small::{Plan, Tile, small};
pub use tiled::{TileKernel, tiled};

/// What is made of gate and up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glu {
    /// The function of the gate.
    pub activation: Activation,
    /// What the result is divided by, a power of two: it is the largest of a model's activations, and f16 ends at 65504.
    pub divisor: u32,
}

impl Default for Glu {
    /// SwiGLU, with room for what models have.
    fn default() -> Self {
        Glu {
            activation: Activation::Silu,
            divisor: 16,
        }
    }
}

impl Glu {
    /// What kernels multiply the result by.
    pub(super) fn factor(self) -> f32 {
        1.0 / self.divisor as f32
    }
}

/// The function in a gated linear unit, by the number that kernels know it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu = 0,
    /// The tanh form of GELU.
    GeluTanh = 1,
}

/// Rows of activations that the fused kernel takes at once.
pub const SMALL: usize = 16;
/// Rows of activations beyond which Hopper's kernel of wide tiles serves, unless they are ordered: of 16 rows a layer of Qwen3-4B took
/// 56.9 us by it and 60.4 by the others, of 8 rows 52.5 and 43.2. Of ordered rows the fused kernel takes all that it has room for: the
/// four products of a layer take 34.7 us of 16 rows by it, each measured by itself, and 41.6 by the wide one.
const WIDE: usize = 8;
/// Rows of activations that [`Layout::Ordered`] keeps together.
const GROUP_ROWS: usize = 8;
/// Rows of activations that need no scratch memory, and products of which leave half of a multiprocessor's shared memory to other
/// kernels.
pub(super) const FEW: usize = 4;
/// Bytes of a block's activations, row after row, beyond which the fused kernel gives way to the tiled one. On an H200, 8 rows of
/// 9,728 took blocks that hold all of them 11.1 us and the tiled kernel 9.6, but a layer is 0.5 us faster where pairs of blocks divide
/// them.
const FUSED_BYTES: usize = 128 << 10;
/// Rows of activations that the tiled kernel takes where there is the library, too. It was measured against the library's way for
/// a step of 64 rows only, in earlier forms, and was faster: 8,440 and 8,912 tokens a second of Qwen3-4B to 8,064.
pub const TILED: usize = 128;

/// What the kernels of these files are passed, by the start of their names.
pub(super) const ARGUMENTS: &[&[(&str, usize)]] = &[
    dense::ARGUMENTS,
    many::ARGUMENTS,
    matrix::ARGUMENTS,
    small::ARGUMENTS,
    tiled::ARGUMENTS,
];

/// What enters a product.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// f16 `[m, k]`, and the factor that they were divided by to keep them small.
    Plain(&'a DeviceBuffer, f32),
    /// The same as [`Layout::Ordered`], for the wide kernel, or for the fused one of 5 to 16 rows.
    Ordered(&'a DeviceBuffer, f32),
    /// What a kernel has left of rows in this layout for their norm, see [`linear_add`]; for the fused kernel only.
    Deferred(DeferredNorm<'a>, Layout),
    /// One row that is made on the way, see [`ResidualRow::serves`]; for the fused kernel only.
    Residual(ResidualRow<'a>),
}

impl Input<'_> {
    /// How the activations lie.
    pub const fn layout(self) -> Layout {
        match self {
            Input::Plain(..) | Input::Residual(_) => Layout::Rows,
            Input::Ordered(..) => Layout::Ordered,
            Input::Deferred(_, layout) => layout,
        }
    }

    /// Refuses memory that is too small for `m` rows of `k`.
    fn holds(self, m: usize, k: usize) -> Result<()> {
        let x = match &self {
            Input::Plain(x, _) | Input::Ordered(x, _) => x,
            Input::Deferred(norm, _) => norm.rows(),
            // The fused kernel checks what it is made of.
            Input::Residual(_) => return Ok(()),
        };
        x.holds("activations", &[self.layout().elements(m, k), 2])
    }
}

/// How f16 activations `[m, k]` lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row after row.
    Rows,
    /// In the order in which tensor cores take them, which `kernels/format/ordered.cuh` has.
    Ordered,
}

impl Layout {
    /// The one that products of `m` rows with NVFP4 weights take without another kernel before.
    pub fn taken(hardware: &Hardware, m: usize) -> Layout {
        match hardware.arch {
            (9, 0) if m > FEW && tiles_serve(hardware, m) => Layout::Ordered,
            _ => Layout::Rows,
        }
    }

    /// Elements of memory.
    pub const fn elements(self, m: usize, k: usize) -> usize {
        match self {
            Layout::Rows => m * k,
            Layout::Ordered => m.next_multiple_of(GROUP_ROWS) * k.next_multiple_of(CHUNK_K),
        }
    }

    /// Such activations, and the factor that they were divided by, as they enter a product.
    pub const fn input(self, x: &DeviceBuffer, factor: f32) -> Input<'_> {
        match self {
            Layout::Rows => Input::Plain(x, factor),
            Layout::Ordered => Input::Ordered(x, factor),
        }
    }

    /// What applies a gated activation and leaves its result like this.
    pub const fn glu(self, glu: Glu) -> Output {
        match self {
            Layout::Rows => Output::Glu(glu),
            Layout::Ordered => Output::GluOrdered(glu),
        }
    }
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
    /// The activation of the first matrix's times the second's, as f16, divided.
    Glu(Glu),
    /// The same as [`Layout::Ordered`], of ordered activations or by the wide kernel.
    GluOrdered(Glu),
}

impl Output {
    const fn bytes(self) -> usize {
        match self {
            Output::F32 | Output::Add => 4,
            Output::F16 | Output::Glu(_) | Output::GluOrdered(_) => 2,
        }
    }

    /// How it lies.
    const fn layout(self) -> Layout {
        match self {
            Output::GluOrdered(_) => Layout::Ordered,
            Output::F32 | Output::F16 | Output::Add | Output::Glu(_) => Layout::Rows,
        }
    }

    /// The gated activation that it applies, if it does.
    const fn applied(self) -> Option<Glu> {
        match self {
            Output::Glu(glu) | Output::GluOrdered(glu) => Some(glu),
            Output::F32 | Output::F16 | Output::Add => None,
        }
    }

    /// The number by which kernels that apply nothing know it.
    fn plain(self) -> Result<i32> {
        match self {
            Output::F32 => Ok(0),
            Output::F16 => Ok(1),
            Output::Add => Ok(2),
            Output::Glu(_) | Output::GluOrdered(_) => {
                bail!(Internal, "only fused kernels apply gated activations")
            }
        }
    }
}

/// A weight as kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MatrixArgument {
    chunks: u64,
    bias: u64,
    global: f32,
    rows: i32,
}

impl MatrixArgument {
    /// A weight without a bias, as the words of a table of them.
    pub(super) fn words(w: &Matrix) -> Result<[u64; 3]> {
        let rows = int("output features", w.rows)? as u32;
        Ok([
            w.address(),
            0,
            u64::from(rows) << 32 | u64::from(w.global.to_bits()),
        ])
    }
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
    if output.applied().is_some() && (matrices.len() != 2 || matrices[1].0.rows != first.rows) {
        bail!(
            Internal,
            "a gated activation takes two matrices of one shape"
        );
    }
    if m == 0 {
        return Ok(());
    }
    let features: usize = match output.applied().is_some() {
        true => first.rows,
        false => matrices.iter().map(|(w, _)| w.rows).sum(),
    };
    if stride < features {
        bail!(Internal, "rows of {features} features {stride} apart");
    }
    let elements = match output {
        Output::GluOrdered(_) => Layout::Ordered.elements(m, features),
        _ => (m - 1) * stride + features,
    };
    out.holds("a product", &[elements, output.bytes()])?;
    input.holds(m, k)?;
    let layout = input.layout();
    let (hardware, shapes) = (Hardware::of(gpu), shapes(matrices));
    if let Some(plan) = fused_plan(&hardware, m, &shapes, output, layout) {
        return small(gpu, input, m, matrices, output, out, stride, plan, None);
    }
    if output.applied().is_some() && !tiled::has_glu(&hardware, m, &shapes, output.layout()) {
        bail!(
            Internal,
            "no kernel applies a gated activation to {m} rows of these"
        );
    }
    if are_nvfp4(&shapes) && tiles_serve(&hardware, m) {
        let kernel = TileKernel::serving(gpu.arch(), m, layout);
        return tiled(
            gpu, kernel, input, m, matrices, output, out, stride, scratch,
        );
    }
    let Input::Plain(x, factor) = input else {
        bail!(Internal, "no kernel for {m} rows of these takes such input");
    };
    let mut column = 0;
    for (w, bias) in matrices {
        let at = out.address() + (column * output.bytes()) as u64;
        if w.storage == WeightType::Nvfp4 || (m > SMALL && w.storage != WeightType::F32) {
            scratch.product(gpu, w, x, factor, m, output, at, stride)?;
            if let Some(bias) = bias {
                elementwise::add_bias_at(gpu, at, output == Output::F16, m, w.rows, stride, bias)?;
            }
        } else {
            dense::dense(gpu, w, *bias, x, factor, m, output, at, stride)?;
        }
        column += w.rows;
    }
    Ok(())
}

/// What the choice of kernels depends on of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hardware {
    /// Compute capability, major and minor.
    pub arch: (i32, i32),
    /// How many multiprocessors there are.
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block may have.
    pub shared_limit: usize,
    /// Whether cuBLASLt was found.
    pub cublas: bool,
}

impl Hardware {
    /// That of a device.
    pub fn of(gpu: &Gpu) -> Hardware {
        Hardware {
            arch: gpu.arch(),
            multiprocessors: gpu.multiprocessors(),
            shared_limit: gpu.shared_limit(),
            cublas: gpu.blas().is_some(),
        }
    }

    /// Whether two blocks may share the tiles of a product.
    pub fn has_clusters(&self) -> bool {
        self.arch.0 >= 9
    }
}

/// What the choice of kernels depends on of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixShape {
    /// How it is held.
    pub storage: WeightType,
    /// Output features.
    pub rows: usize,
    /// Input features, K.
    pub cols: usize,
}

fn shapes(matrices: &[Biased<'_>]) -> Vec<MatrixShape> {
    matrices.iter().map(|(w, _)| w.shape()).collect()
}

/// Whether a kernel of tiles, and not the library, serves `m` rows that are too many for the fused one.
fn tiles_serve(hardware: &Hardware, m: usize) -> bool {
    m <= TILED || !hardware.cublas
}

fn are_nvfp4(matrices: &[MatrixShape]) -> bool {
    matrices.iter().all(|w| w.storage == WeightType::Nvfp4)
}

/// How the fused kernel serves `m` rows that lie like this, if it is the one for them.
fn fused_plan(
    hardware: &Hardware,
    m: usize,
    matrices: &[MatrixShape],
    output: Output,
    layout: Layout,
) -> Option<Plan> {
    let takes = m <= SMALL
        && are_nvfp4(matrices)
        && (layout == Layout::Ordered
            || TileKernel::serving(hardware.arch, m, layout) == TileKernel::Tiled);
    if !takes {
        return None;
    }
    let k = matrices[0].cols;
    let features: Vec<usize> = matrices.iter().map(|w| w.rows).collect();
    let plan = Plan::choose(
        m,
        k,
        &features,
        output,
        layout,
        hardware.has_clusters(),
        hardware.multiprocessors,
        hardware.shared_limit,
    )?;
    let pays = m <= FEW
        || output.applied().is_some()
        || match layout {
            Layout::Ordered => plan.clusters * plan.parts <= hardware.multiprocessors,
            Layout::Rows => plan.rows == m && m * k * 2 <= FUSED_BYTES * plan.parts,
        };
    pays.then_some(plan)
}

/// Whether one kernel serves `m` rows of two matrices, and applies a gated activation after.
pub fn has_glu(hardware: &Hardware, m: usize, matrices: &[MatrixShape], layout: Layout) -> bool {
    fused_plan(hardware, m, matrices, layout.glu(Glu::default()), layout).is_some()
        || tiled::has_glu(hardware, m, matrices, layout)
}
