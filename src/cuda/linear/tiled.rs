//! Kernels of tiles: products of some tens of rows with NVFP4 weights.

use super::matrix::{CHUNK_BYTES, CHUNK_K, CHUNK_ROWS};
use super::{
    Biased, LinearScratch, MLP_SCALE, MatrixArgument, Output, SMALL, Storage, TILED,
    matrix_arguments,
};
use crate::base::Result;
use crate::cuda::gpu::{Gpu, int};
use crate::cuda::launch::Launch;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::nvrtc::Unit;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("linear_tiled", size_of::<TiledArguments>()),
    ("linear_wide", size_of::<TiledArguments>()),
];

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
    out_scale: f32,
}

/// A kernel of tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileKernel {
    /// `linear/tiled.cu`, for every architecture.
    Tiled,
    /// `linear/wide.cu`, for Hopper.
    Wide,
}

impl TileKernel {
    /// The one that serves products of `m` rows. An H200 took the tiled one's 26.9 us for gate and up of 32 rows and the wide one's 21,
    /// but 118 and 131 for the head; of 64 rows the wide one was faster everywhere.
    pub fn serving(arch: (i32, i32), m: usize) -> TileKernel {
        match arch {
            (9, 0) if m > 32 => TileKernel::Wide,
            _ => TileKernel::Tiled,
        }
    }

    /// All for an architecture.
    pub fn all(arch: (i32, i32)) -> &'static [TileKernel] {
        match arch {
            (9, 0) => &[TileKernel::Tiled, TileKernel::Wide],
            _ => &[TileKernel::Tiled],
        }
    }

    /// Whether it applies SwiGLU to what it makes of two matrices.
    pub(super) const fn has_swiglu(self) -> bool {
        matches!(self, TileKernel::Wide)
    }

    /// Output features of a block.
    const fn features(self) -> usize {
        match self {
            TileKernel::Tiled => 64,
            TileKernel::Wide => 192,
        }
    }

    /// Rows of activations of a block at most.
    const fn most_rows(self) -> usize {
        match self {
            TileKernel::Tiled => 64,
            TileKernel::Wide => 128,
        }
    }

    /// Threads of a block: a warp to 16 features.
    const fn threads(self) -> usize {
        self.features() * 2
    }

    /// Blocks that a multiprocessor should have.
    const fn blocks(self) -> usize {
        match self {
            TileKernel::Tiled => 2,
            TileKernel::Wide => 1,
        }
    }

    /// Chunks of K that are worth a block of its own.
    const fn part_chunks(self) -> usize {
        match self {
            TileKernel::Tiled => 6,
            TileKernel::Wide => 3,
        }
    }

    /// Stages of shared memory for weights, and for activations.
    const fn stages(self) -> (usize, usize) {
        match self {
            TileKernel::Tiled => (3, 3),
            TileKernel::Wide => (4, 3),
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

    /// Bytes of the sums of parts that products of up to `m` rows have, by whichever kernel serves them.
    pub(super) fn room(arch: (i32, i32), m: usize, multiprocessors: usize) -> usize {
        let kernels = Self::all(arch).iter();
        kernels
            .map(|kernel| kernel.partial_bytes(m, multiprocessors))
            .max()
            .unwrap_or(0)
    }

    /// Bytes of the sums of parts, of as many blocks as share tiles at most, for up to `m` rows.
    pub fn partial_bytes(self, m: usize, multiprocessors: usize) -> usize {
        self.blocks() * multiprocessors * m.min(self.most_rows()) * self.features() * 4
    }
}

/// How a kernel of tiles is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiling {
    kernel: TileKernel,
    /// Rows of activations of a block.
    columns: usize,
    /// Blocks along features, along rows, and along K.
    grid: [usize; 3],
}

impl Tiling {
    /// For `m` rows and matrices of `features` output features and K = `k`; K is divided only if `divide`.
    fn choose(
        kernel: TileKernel,
        m: usize,
        k: usize,
        features: &[usize],
        multiprocessors: usize,
        divide: bool,
    ) -> Tiling {
        let columns = m.next_power_of_two().clamp(8, kernel.most_rows());
        let tiles: usize = features.iter().map(|n| n.div_ceil(kernel.features())).sum();
        let blocks = tiles * m.div_ceil(columns);
        let parts = if divide {
            (kernel.blocks() * multiprocessors / blocks)
                .min(k.div_ceil(CHUNK_K) / kernel.part_chunks())
                .max(1)
        } else {
            1
        };
        Tiling {
            kernel,
            columns,
            grid: [tiles, m.div_ceil(columns), parts],
        }
    }

    /// Shared memory of a block.
    const fn shared(self) -> usize {
        let (weights, activations) = self.kernel.stages();
        weights * self.kernel.features() / CHUNK_ROWS * CHUNK_BYTES
            + activations * self.columns * CHUNK_K * 2
    }
}

/// Whether a kernel of tiles applies SwiGLU to products of `m` rows with these matrices.
pub(super) fn has_swiglu(gpu: &Gpu, m: usize, matrices: &[Biased<'_>]) -> bool {
    (SMALL + 1..=TILED).contains(&m)
        && matrices.iter().all(|(w, _)| w.storage == Storage::Nvfp4)
        && TileKernel::serving(gpu.arch(), m).has_swiglu()
}

/// A kernel of tiles: f16 `x` that was divided by `factor`, and NVFP4 weights. [`super::linear`] checks sizes and chooses.
pub fn tiled(
    gpu: &Gpu,
    kernel: TileKernel,
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
    let (features, kind, output): (Vec<usize>, _, _) = match output {
        // A block has half as many features of each matrix.
        Output::Swiglu if kernel.has_swiglu() => (vec![2 * matrices[0].0.rows], "_swiglu", 0),
        _ => (
            matrices.iter().map(|(w, _)| w.rows).collect(),
            "",
            output.plain()?,
        ),
    };
    let all: usize = features.iter().sum();
    let room = scratch.partial();
    // SwiGLU takes whole sums.
    let divide = kind.is_empty() && room.bytes() >= kernel.partial_bytes(m, gpu.multiprocessors());
    let tiling = Tiling::choose(kernel, m, k, &features, gpu.multiprocessors(), divide);
    let parts = tiling.grid[2];
    if parts > 1 {
        room.holds("parts of a product", &[parts, m, all, 4])?;
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
        parts: parts as i32,
        out_scale: 1.0 / MLP_SCALE,
    };
    let launch = Launch {
        grid: tiling.grid.map(|n| n as u32),
        block: [kernel.threads() as u32, 1, 1],
        shared: tiling.shared() as u32,
    };
    let name = format!("{}{kind}_{}", kernel.name(), tiling.columns);
    let sum = Launch::new([all.div_ceil(256) as u32, m as u32, 1], 256);
    // SAFETY: the struct is the kernels'; sizes were checked here and by `linear`.
    unsafe {
        launch.run(gpu, kernel.unit(), &name, &arguments)?;
        if parts > 1 {
            sum.run(gpu, Unit::LinearTiled, "linear_tiled_sum", &arguments)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_tiles_fit_the_scratch() {
        for kernel in [TileKernel::Tiled, TileKernel::Wide] {
            for multiprocessors in [1, 48, 132] {
                for features in [&[64][..], &[4096, 1024, 1024], &[2560], &[151_936]] {
                    for m in [5, 17, 32, 64, 100, 1000] {
                        let choose = |divide| {
                            Tiling::choose(kernel, m, 9728, features, multiprocessors, divide)
                        };
                        let tiling = choose(true);
                        let [tiles, rows, parts] = tiling.grid;
                        assert!(rows * tiling.columns >= m);
                        assert!(tiling.columns <= kernel.most_rows());
                        let sums = parts * m * features.iter().sum::<usize>() * 4;
                        let room = kernel.partial_bytes(m, multiprocessors);
                        assert!(parts == 1 || sums <= room, "{tiling:?}");
                        // GB10 has 99 KB, Hopper 227.
                        let most = match kernel {
                            TileKernel::Tiled => 99 << 10,
                            TileKernel::Wide => 227 << 10,
                        };
                        assert!(tiling.shared() <= most, "{tiling:?}");
                        assert_eq!(choose(false).grid, [tiles, rows, 1]);
                    }
                }
            }
        }
    }
}
