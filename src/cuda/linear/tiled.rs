//! The tiled kernel: products of some tens of rows with NVFP4 weights.

use super::matrix::{CHUNK_BYTES, CHUNK_K, CHUNK_ROWS};
use super::{Biased, LinearScratch, MatrixArgument, Output, matrix_arguments};
use crate::base::Result;
use crate::cuda::gpu::{Gpu, int};
use crate::cuda::launch::Launch;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::nvrtc::Unit;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[("linear_tiled", size_of::<TiledArguments>())];

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

/// Bytes of the sums of parts, of as many blocks as share tiles at most.
pub(super) fn partial_bytes(multiprocessors: usize) -> usize {
    TILE_BLOCKS * multiprocessors * TILE_ROWS * TILE_FEATURES * 4
}

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

#[cfg(test)]
mod tests {
    use super::*;

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
