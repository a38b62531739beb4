//! The tiled GEMM kernels, for tens of rows with NVFP4 weights.

use super::hardware::Hardware;
use super::input::Input;
use super::limits::{TILED, WIDE};
use super::matrix::{
    Biased, CHUNK_BYTES, CHUNK_K, CHUNK_ROWS, MatrixArgument, MatrixShape, matrix_arguments,
};
use super::output::{Layout, Output};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, int};
use crate::cuda::units::Unit;
use crate::tensor::WeightType;

/// Argument sizes of this file's kernels, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("linear_tiled", size_of::<TiledArguments>()),
    ("linear_wide", size_of::<TiledArguments>()),
    ("linear_to_fragments", size_of::<ToFragmentsArguments>()),
];

/// Output code of kernels with a gated activation, which selects the layout of the result.
const STORE_ROWS: i32 = 0;
const STORE_ORDERED: i32 = 3;
/// The most CTAs of a cluster, which split K.
const MOST_SPLIT_K: usize = 8;

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
    split_k: i32,
    out_scale: f32,
    activation: i32,
}

#[repr(C)]
struct ToFragmentsArguments {
    x: u64,
    y: u64,
    k: i32,
}

/// A tiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileKernel {
    /// `linear/tiled.cu`, for every architecture.
    Tiled,
    /// `linear/wide.cu`, for Hopper.
    Wide,
}

impl TileKernel {
    /// The kernel for products of `m` rows in the given layout.
    pub fn serving(arch: (i32, i32), m: usize, layout: Layout) -> TileKernel {
        match (layout, arch) {
            (Layout::FragmentMajor, _) => TileKernel::Wide,
            (Layout::RowMajor, (9, 0)) if m > WIDE => TileKernel::Wide,
            (Layout::RowMajor, _) => TileKernel::Tiled,
        }
    }

    /// All kernels of an architecture.
    pub fn all(arch: (i32, i32)) -> &'static [TileKernel] {
        match arch {
            (9, 0) => &[TileKernel::Tiled, TileKernel::Wide],
            _ => &[TileKernel::Tiled],
        }
    }

    /// Whether it can apply a gated activation to products with two matrices.
    pub(super) const fn has_glu(self) -> bool {
        matches!(self, TileKernel::Wide)
    }

    /// Output features per CTA.
    const fn features(self) -> usize {
        match self {
            TileKernel::Tiled => 64,
            TileKernel::Wide => 192,
        }
    }

    /// Upper limit of activation rows per CTA.
    const fn most_rows(self) -> usize {
        match self {
            TileKernel::Tiled => 64,
            TileKernel::Wide => 128,
        }
    }

    /// Threads of a CTA: one warp per 16 features, and one that loads activations.
    const fn threads(self) -> usize {
        match self {
            TileKernel::Tiled => self.features() * 2,
            TileKernel::Wide => self.features() * 2 + 32,
        }
    }

    /// CTAs that a multiprocessor should have.
    const fn blocks(self) -> usize {
        match self {
            TileKernel::Tiled => 2,
            TileKernel::Wide => 1,
        }
    }

    /// Chunks of K that justify a further CTA along K.
    const fn part_chunks(self) -> usize {
        match self {
            TileKernel::Tiled => 6,
            TileKernel::Wide => 3,
        }
    }

    /// Shared memory of a CTA: stages of weights, and of activations with their barriers.
    const fn shared(self, columns: usize) -> usize {
        let weights = 3 * self.features() / CHUNK_ROWS * CHUNK_BYTES;
        let activations = columns * CHUNK_K * 2;
        weights
            + match self {
                TileKernel::Tiled => 3 * activations,
                TileKernel::Wide if columns <= 64 => 4 * (activations + 16),
                TileKernel::Wide => 3 * (activations + 16),
            }
    }

    const fn unit(self) -> Unit {
        match self {
            TileKernel::Tiled => Unit::LinearTiled,
            TileKernel::Wide => Unit::LinearWide,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            TileKernel::Tiled => "linear_tiled",
            TileKernel::Wide => "linear_wide",
        }
    }

    /// Bytes of scratch memory for products of up to `m` rows of K = `k`: the split-K workspace for as many CTAs as can share tiles, or
    /// rows in the kernel's layout.
    pub fn scratch(self, m: usize, k: usize, multiprocessors: usize) -> usize {
        match self {
            TileKernel::Tiled => {
                self.blocks() * multiprocessors * m.min(self.most_rows()) * self.features() * 4
            }
            TileKernel::Wide => Layout::FragmentMajor.elements(m, k) * 2,
        }
    }
}

/// Launch shape of a tiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiling {
    kernel: TileKernel,
    /// Activation rows per CTA.
    columns: usize,
    /// CTAs along features, along rows, and along K.
    grid: [usize; 3],
}

impl Tiling {
    /// The shape for `m` rows and matrices of `features` output features, without split-K.
    fn new(kernel: TileKernel, m: usize, features: &[usize]) -> Tiling {
        let columns = m.next_power_of_two().clamp(8, kernel.most_rows());
        let tiles = features.iter().map(|n| n.div_ceil(kernel.features())).sum();
        Tiling {
            kernel,
            columns,
            grid: [tiles, m.div_ceil(columns), 1],
        }
    }

    /// Splits K = `k` so that as many CTAs as possible run, all at once. `at_once` returns how many clusters of a given size the device
    /// runs at the same time; it is called only if there is a choice.
    fn divided(
        mut self,
        k: usize,
        multiprocessors: usize,
        at_once: impl Fn(Tiling) -> Result<usize>,
    ) -> Result<Tiling> {
        let blocks = self.grid[0] * self.grid[1];
        let most = k.div_ceil(CHUNK_K) / self.kernel.part_chunks();
        if self.kernel == TileKernel::Tiled {
            let split_k = self.kernel.blocks() * multiprocessors / blocks;
            self.grid[2] = split_k.min(most).max(1);
            return Ok(self);
        }
        for split_k in (2..=most.min(MOST_SPLIT_K)).rev() {
            self.grid[2] = split_k;
            if blocks <= at_once(self)? {
                return Ok(self);
            }
        }
        self.grid[2] = 1;
        Ok(self)
    }

    fn launch(self) -> Launch {
        Launch {
            shared: self.kernel.shared(self.columns) as u32,
            cluster: match self.kernel {
                TileKernel::Tiled => 1,
                TileKernel::Wide => self.grid[2] as u32,
            },
            ..Launch::new(self.grid.map(|n| n as u32), self.kernel.threads() as u32)
        }
    }
}

/// Whether a tiled kernel applies a gated activation to products of `m` rows in this layout with these matrices.
pub(super) fn has_glu(
    hardware: &Hardware,
    m: usize,
    matrices: &[MatrixShape],
    layout: Layout,
) -> bool {
    m <= TILED
        && matrices.iter().all(|w| w.storage == WeightType::Nvfp4)
        && TileKernel::serving(hardware.arch, m, layout).has_glu()
}

/// Enqueues the conversion of f16 rows `x` `[m, k]` to [`Layout::FragmentMajor`] in `y`.
fn order(gpu: &Gpu, x: &DeviceBuffer, m: usize, k: usize, y: &DeviceBuffer) -> Result<()> {
    y.holds(
        "fragment-major rows",
        &[Layout::FragmentMajor.elements(m, k), 2],
    )?;
    let arguments = ToFragmentsArguments {
        x: x.address(),
        y: y.address(),
        k: int("K", k)?,
    };
    let threads = k.next_multiple_of(CHUNK_K) / 8;
    let launch = Launch::new([m as u32, threads.div_ceil(256) as u32, 1], 256);
    // SAFETY: the struct is the kernel's; `linear` checked the size of `x`.
    unsafe { launch.run(gpu, Unit::LinearRows, "linear_to_fragments", &arguments) }
}

/// A GEMM by a tiled kernel with NVFP4 weights; `scratch` has the size of [`TileKernel::scratch`]. [`super::linear`] checks sizes and
/// chooses.
pub(super) fn tiled(
    gpu: &Gpu,
    kernel: TileKernel,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    room: &DeviceBuffer,
) -> Result<()> {
    let k = matrices[0].0.cols;
    let (x, factor) = match (kernel, input) {
        (TileKernel::Tiled, Input::Plain(x, factor)) => (x, factor),
        (TileKernel::Wide, Input::FragmentMajor(x, factor)) => (x, factor),
        (TileKernel::Wide, Input::Plain(x, factor)) => {
            order(gpu, x, m, k, room)?;
            (room, factor)
        }
        _ => bail!(Internal, "{kernel:?} does not take such input"),
    };
    let glu = output.applied().unwrap_or_default();
    let (features, kind, output): (Vec<usize>, _, _) = match output {
        // A CTA has half as many features of each matrix. A fragment-major result is padded with zeros.
        Output::Glu(_) if kernel.has_glu() => (vec![2 * matrices[0].0.rows], "_glu", STORE_ROWS),
        Output::GluFragmentMajor(_) if kernel.has_glu() => {
            let filled = matrices[0].0.rows.next_multiple_of(CHUNK_K);
            (vec![2 * filled], "_glu", STORE_ORDERED)
        }
        _ => (
            matrices.iter().map(|(w, _)| w.rows).collect(),
            "",
            output.plain()?,
        ),
    };
    let tiling = Tiling::new(kernel, m, &features);
    let name = format!("{}{kind}_{}", kernel.name(), tiling.columns);
    let divides =
        kernel == TileKernel::Wide || room.bytes() >= kernel.scratch(m, k, gpu.multiprocessors());
    let tiling = match divides {
        true => tiling.divided(k, gpu.multiprocessors(), |tiling| {
            tiling.launch().clusters_at_once(gpu, kernel.unit(), &name)
        })?,
        false => tiling,
    };
    let (split_k, all) = (tiling.grid[2], features.iter().sum::<usize>());
    let sums = kernel == TileKernel::Tiled && split_k > 1;
    if sums {
        room.holds("the split-K workspace of a product", &[split_k, m, all, 4])?;
    }
    let mut matrix = matrix_arguments(matrices)?;
    matrix.iter_mut().for_each(|w| w.global *= factor);
    let arguments = TiledArguments {
        x: x.address(),
        out: out.address(),
        partial: room.address(),
        matrix,
        matrices: matrices.len() as i32,
        m: int("rows", m)?,
        k: int("K", k)?,
        out_stride: int("the stride of a product", stride)?,
        output,
        split_k: split_k as i32,
        out_scale: glu.factor(),
        activation: glu.activation as i32,
    };
    let sum = Launch::new([all.div_ceil(256) as u32, m as u32, 1], 256);
    // SAFETY: the struct is the kernels'; sizes were checked here and by `linear`.
    unsafe {
        tiling.launch().run(gpu, kernel.unit(), &name, &arguments)?;
        if sums {
            sum.run(gpu, Unit::LinearTiled, "linear_tiled_sum", &arguments)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of clusters if any multiprocessors could form one.
    fn clusters(multiprocessors: usize) -> impl Fn(Tiling) -> Result<usize> {
        move |tiling| Ok(multiprocessors / tiling.grid[2])
    }

    #[test]
    fn fragment_major_rows_are_for_the_wide_kernel() {
        use Layout::{FragmentMajor, RowMajor};
        for m in [5, 8, 9, 128] {
            assert_eq!(
                TileKernel::serving((9, 0), m, FragmentMajor),
                TileKernel::Wide
            );
            assert_eq!(TileKernel::serving((12, 1), m, RowMajor), TileKernel::Tiled);
        }
        assert_eq!(
            TileKernel::serving((9, 0), WIDE, RowMajor),
            TileKernel::Tiled
        );
        assert_eq!(
            TileKernel::serving((9, 0), WIDE + 1, RowMajor),
            TileKernel::Wide
        );
    }

    #[test]
    fn accumulators_of_split_k_fit_the_scratch() {
        for kernel in [TileKernel::Tiled, TileKernel::Wide] {
            for multiprocessors in [1, 48, 132] {
                for features in [&[64][..], &[4096, 1024, 1024], &[2560], &[151_936]] {
                    for m in [5, 17, 32, 64, 100, 1000] {
                        let whole = Tiling::new(kernel, m, features);
                        let tiling = whole
                            .divided(9728, multiprocessors, clusters(multiprocessors))
                            .unwrap();
                        let [tiles, rows, split_k] = tiling.grid;
                        assert_eq!(whole.grid, [tiles, rows, 1]);
                        assert!(rows * tiling.columns >= m);
                        assert!(tiling.columns <= kernel.most_rows());
                        let blocks = kernel.blocks() * multiprocessors;
                        assert!(
                            split_k == 1 || tiles * rows * split_k <= blocks,
                            "{tiling:?}"
                        );
                        // GB10 has 99 KB, Hopper 227.
                        let most = match kernel {
                            TileKernel::Tiled => {
                                let sums = split_k * m * features.iter().sum::<usize>() * 4;
                                let room = kernel.scratch(m, 9728, multiprocessors);
                                assert!(split_k == 1 || sums <= room, "{tiling:?}");
                                99 << 10
                            }
                            TileKernel::Wide => {
                                assert!(split_k <= MOST_SPLIT_K);
                                227 << 10
                            }
                        };
                        assert!(tiling.launch().shared <= most, "{tiling:?}");
                    }
                }
            }
        }
    }
}
