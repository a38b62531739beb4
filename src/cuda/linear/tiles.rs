//! The variants of the tiled GEMM kernels, and the launch of each.

use super::limits::WIDE;
use super::matrix::{CHUNK_BYTES, CHUNK_K, CHUNK_ROWS, MatrixArgument};
use super::output::Layout;
use crate::cuda::driver::{Launch, Planned};
use crate::cuda::kernel::kernels;

kernels! {
    /// The GEMM, by the activation rows of a CTA, and the sum of split-K.
    pub(super) enum TileVariant(TiledArguments) {
        LinearTiled {
            Tiled8 = "linear_tiled_8",
            Tiled16 = "linear_tiled_16",
            Tiled32 = "linear_tiled_32",
            Tiled64 = "linear_tiled_64",
            TiledSum = "linear_tiled_sum",
        }
        LinearWide {
            Wide8 = "linear_wide_8",
            Wide16 = "linear_wide_16",
            Wide32 = "linear_wide_32",
            Wide64 = "linear_wide_64",
            Wide128 = "linear_wide_128",
            WideGlu8 = "linear_wide_glu_8",
            WideGlu16 = "linear_wide_glu_16",
            WideGlu32 = "linear_wide_glu_32",
            WideGlu64 = "linear_wide_glu_64",
            WideGlu128 = "linear_wide_glu_128",
            WideWhole64 = "linear_wide_whole_64",
            WideWhole128 = "linear_wide_whole_128",
            WideGluWhole32 = "linear_wide_glu_whole_32",
            WideGluWhole64 = "linear_wide_glu_whole_64",
            WideGluWhole128 = "linear_wide_glu_whole_128",
        }
    }
}

/// The most CTAs of a cluster, which split K.
pub(super) const MOST_SPLIT_K: usize = 8;

#[repr(C)]
pub(super) struct TiledArguments {
    pub(super) x: u64,
    pub(super) out: u64,
    pub(super) partial: u64,
    pub(super) matrix: [MatrixArgument; 3],
    pub(super) matrices: i32,
    pub(super) m: i32,
    pub(super) k: i32,
    pub(super) out_stride: i32,
    pub(super) output: i32,
    pub(super) split_k: i32,
    pub(super) out_scale: f32,
    pub(super) activation: i32,
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

    /// The kernel of an architecture for any number of rows in either layout.
    pub(super) fn deterministic(arch: (i32, i32)) -> TileKernel {
        match arch {
            (9, 0) => TileKernel::Wide,
            _ => TileKernel::Tiled,
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
    pub(super) const fn features(self) -> usize {
        match self {
            TileKernel::Tiled => 64,
            TileKernel::Wide => 192,
        }
    }

    /// Upper limit of activation rows per CTA.
    pub(super) const fn most_rows(self) -> usize {
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
    pub(super) const fn blocks(self) -> usize {
        match self {
            TileKernel::Tiled => 2,
            TileKernel::Wide => 1,
        }
    }

    /// Chunks of K that justify a further CTA along K.
    pub(super) const fn part_chunks(self) -> usize {
        match self {
            TileKernel::Tiled => 6,
            TileKernel::Wide => 3,
        }
    }

    /// Shared memory of a CTA: stages of weights, and of activations with their barriers; and if it is `whole`, the sums of earlier ranges.
    const fn shared(self, columns: usize, whole: bool) -> usize {
        let stages = if whole && columns > 64 { 2 } else { 3 };
        let weights = stages * self.features() / CHUNK_ROWS * CHUNK_BYTES;
        let activations = columns * CHUNK_K * 2;
        let sums = if whole {
            columns * self.features() * 4
        } else {
            0
        };
        weights
            + sums
            + match self {
                TileKernel::Tiled => 3 * activations,
                TileKernel::Wide if columns <= 64 => 4 * (activations + 16),
                TileKernel::Wide => 3 * (activations + 16),
            }
    }

    /// Bytes of scratch memory for products of up to `m` rows of K = `k`: the split-K workspace for as many CTAs as can share tiles, or
    /// rows in the kernel's layout.
    pub fn scratch(self, m: usize, k: usize, multiprocessors: usize) -> usize {
        match self {
            TileKernel::Tiled => {
                self.blocks() * multiprocessors * m.min(self.most_rows()) * self.features() * 4
            }
            TileKernel::Wide => self.undivided_scratch(m, k),
        }
    }

    /// As [`TileKernel::scratch`], without the split-K workspace.
    pub(super) fn undivided_scratch(self, m: usize, k: usize) -> usize {
        match self {
            TileKernel::Tiled => 0,
            TileKernel::Wide => Layout::FragmentMajor.elements(m, k) * 2,
        }
    }
}

/// A variant of a tiled kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiles {
    pub(super) kernel: TileKernel,
    /// Whether it applies a gated activation.
    pub(super) glu: bool,
    /// Activation rows per CTA, a power of two from 8 on.
    pub(super) columns: usize,
    /// Whether each CTA takes all ranges of K, one after the other; of [`TileKernel::Wide`] with 64 or 128 rows, or 32 of a gated activation.
    pub(super) whole: bool,
}

impl Tiles {
    /// Position of `columns` among those of a kernel.
    pub(super) fn index(self) -> usize {
        (self.columns / 8).ilog2() as usize
    }

    fn variant(self) -> TileVariant {
        use TileVariant::*;
        let index = self.index();
        match (self.kernel, self.glu) {
            (_, false) if self.whole => match self.columns {
                64 => WideWhole64,
                _ => WideWhole128,
            },
            (_, true) if self.whole => match self.columns {
                32 => WideGluWhole32,
                64 => WideGluWhole64,
                _ => WideGluWhole128,
            },
            (TileKernel::Tiled, _) => [Tiled8, Tiled16, Tiled32, Tiled64][index],
            (TileKernel::Wide, false) => [Wide8, Wide16, Wide32, Wide64, Wide128][index],
            (TileKernel::Wide, true) => {
                [WideGlu8, WideGlu16, WideGlu32, WideGlu64, WideGlu128][index]
            }
        }
    }

    /// A launch of so many CTAs along features, along rows, and along K.
    pub(super) fn planned(self, grid: [usize; 3]) -> Planned<TileVariant> {
        let launch = Launch {
            shared: self.kernel.shared(self.columns, self.whole) as u32,
            cluster: match self.kernel {
                TileKernel::Tiled => 1,
                TileKernel::Wide => grid[2] as u32,
            },
            ..Launch::new(grid.map(|n| n as u32), self.kernel.threads() as u32)
        };
        launch.of(self.variant())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
