//! The kernels of wide tiles for rows with adapters: some CTAs multiply by A factors while the others multiply by the weights.

use std::fmt;

use super::adapted_rows::{AdaptedRows, AdaptedRowsArgument, AdapterDivision, PARTS};
use super::hardware::Hardware;
use super::matrix::MatrixShape;
use super::tiles::{TileKernel, TiledArguments, Tiles};
use crate::base::Result;
use crate::cuda::driver::{Gpu, Launch, Planned};
use crate::cuda::kernel::kernels;

kernels! {
    /// The GEMM, by the activation rows of a CTA.
    enum AdaptedTile(AdaptedTileArguments) {
        LinearWideAdapted {
            Wide32 = "linear_wide_adapted_32",
            Wide64 = "linear_wide_adapted_64",
            WideGlu32 = "linear_wide_adapted_glu_32",
            WideGlu64 = "linear_wide_adapted_glu_64",
        }
    }
}

#[repr(C)]
struct AdaptedTileArguments {
    product: TiledArguments,
    rows: AdaptedRowsArgument,
}

/// Bytes in which a CTA keeps the place of an adapter's B factor, for each of its matrices.
const B_FACTOR: usize = 16;

/// A launch of wide tiles for rows with adapters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AdaptedTiling {
    division: AdapterDivision,
    /// CTAs of the grid's first dimension that multiply by A factors.
    blocks: usize,
    launch: Planned<AdaptedTile>,
}

impl AdaptedTiling {
    /// The launch of all rows at once by `along_features` CTAs of these tiles, of which up to `split_k` form a cluster, which split K; and the
    /// number of those. `None` if no kernel serves.
    pub(super) fn choose(
        hardware: &Hardware,
        tiles: Tiles,
        along_features: usize,
        split_k: usize,
        matrices: &[MatrixShape],
        division: AdapterDivision,
    ) -> Option<(AdaptedTiling, usize)> {
        if tiles.kernel != TileKernel::Wide || tiles.whole || !division.is_served() {
            return None;
        }
        let kernel = match (tiles.glu, tiles.columns) {
            (false, 32) => AdaptedTile::Wide32,
            (false, 64) => AdaptedTile::Wide64,
            (true, 32) => AdaptedTile::WideGlu32,
            (true, 64) => AdaptedTile::WideGlu64,
            _ => return None,
        };
        let ctas = division.ctas(matrices.len());
        // Clusters that multiply by A factors must not take the place of those that multiply by the weights.
        let fits = |&split_k: &usize| {
            let at_once = hardware.clusters.at_once(tiles, split_k);
            along_features + ctas.div_ceil(split_k) <= at_once
        };
        let split_k = (2..=split_k).rev().find(fits).unwrap_or(split_k);
        let blocks = ctas.div_ceil(split_k);
        let launch = tiles.planned([blocks + along_features, 1, split_k]).launch;
        let own = if tiles.glu { 2 } else { 1 };
        let low = 4 * PARTS * division.rank;
        let memory = 32 + tiles.columns * (4 + own * (B_FACTOR + low));
        let shared = launch.shared as usize + memory;
        let launch = Launch {
            shared: shared as u32,
            // One more warp serves adapters.
            block: [launch.block[0] + 32, 1, 1],
            ..launch
        };
        let adapted = AdaptedTiling {
            division,
            blocks,
            launch: launch.of(kernel),
        };
        (shared <= hardware.shared_limit).then_some((adapted, split_k))
    }

    /// Enqueues the GEMM of rows that were divided by `factor`. Sizes were checked.
    pub(super) fn enqueue(
        &self,
        gpu: &Gpu,
        product: TiledArguments,
        rows: &AdaptedRows<'_>,
        factor: f32,
    ) -> Result<()> {
        let count = (product.m as usize, product.matrices as usize);
        let arguments = AdaptedTileArguments {
            rows: rows.argument(count, self.blocks, factor)?,
            product,
        };
        // SAFETY: sizes were checked here and with the plan; tables of adapters in the pass outlive it in stream order.
        unsafe { self.launch.run(gpu, &arguments) }
    }

    /// Whether it was planned for rows that are divided so.
    pub(super) fn serves(&self, rows: &AdaptedRows<'_>) -> bool {
        self.division == rows.division
    }
}

impl fmt::Display for AdaptedTiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} for A factors", self.launch, self.blocks)
    }
}
