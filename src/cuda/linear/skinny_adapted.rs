//! The skinny GEMM of rows with adapters, whose CTAs share the products with A factors. See `kernels/linear/skinny/adapter.cuh`.

use super::adapted_rows::{
    AdaptedRows, AdaptedSkinny, AdapterDivision, LowProductsArgument, SHARED_PARTS, SharingTurn,
};
use super::hardware::Hardware;
use super::limits::{HALF_SM_ROWS, NVFP4_MATRICES};
use super::matrix::MatrixShape;
use super::skinny::{SkinnyKernel, SkinnyPlan};
use super::tile::Tile;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::Launch;

/// Warps that multiply by A factors.
const SHARERS: usize = 8;
/// Elements of K that four lanes take at a time.
const UNIT: usize = 32;

impl SkinnyKernel {
    /// The kernel that also applies adapters, and the most matrices that it takes.
    fn adapted(self) -> Option<(SkinnyKernel, usize)> {
        use SkinnyKernel::*;
        let (kernel, matrices) = match self {
            F32Rows1 => (AdaptedF32Rows1, NVFP4_MATRICES),
            F32Rows4 => (AdaptedF32Rows4, NVFP4_MATRICES),
            F32Rows8 => (AdaptedF32Rows8, NVFP4_MATRICES),
            F32Rows16 => (AdaptedF32Rows16, NVFP4_MATRICES),
            F32Fragments8 => (AdaptedF32Fragments8, NVFP4_MATRICES),
            F32Fragments16 => (AdaptedF32Fragments16, NVFP4_MATRICES),
            AddRows1 => (AdaptedAddRows1, 1),
            AddRows4 => (AdaptedAddRows4, 1),
            AddRows8 => (AdaptedAddRows8, 1),
            AddRows16 => (AdaptedAddRows16, 1),
            AddFragments8 => (AdaptedAddFragments8, 1),
            AddFragments16 => (AdaptedAddFragments16, 1),
            GluRows1 => (AdaptedGluRows1, 2),
            GluRows8 => (AdaptedGluRows8, 2),
            GluRows16 => (AdaptedGluRows16, 2),
            GluFragments8 => (AdaptedGluFragments8, 2),
            GluFragments16 => (AdaptedGluFragments16, 2),
            _ => return None,
        };
        Some((kernel, matrices))
    }
}

impl SkinnyPlan {
    /// This plan with a kernel that applies the adapters of its rows. `None` if there is none, or if not all CTAs run at the same time, as
    /// those must that wait for each other.
    pub(super) fn for_adapted_rows(
        &self,
        hardware: &Hardware,
        matrices: &[MatrixShape],
        division: AdapterDivision,
        turn: SharingTurn,
    ) -> Option<SkinnyPlan> {
        let (kernel, most_matrices) = self.launch.kernel.adapted()?;
        let are_together = self.clusters * self.split_k <= hardware.multiprocessors;
        let room = self.tile.room(self.rows);
        if !are_together || !division.is_served() || division.tiles > room {
            return None;
        }
        let of_k = matrices.len() * division.tiles * division.rank;
        let parts = [4, 2, 1].into_iter().map(|each| each * self.split_k);
        let parts = parts
            .filter(|&parts| parts <= SHARED_PARTS)
            .find(|parts| of_k * parts / self.split_k <= self.clusters)
            .unwrap_or(self.split_k);
        // Sums of warps, four numbers, the adapter of each row, the factors of a rank, and for each matrix those of each adapter.
        let beside = SHARERS * room * 4 + 16 + 16 + 32 + most_matrices * room * 16;
        let own = if self.tile == Tile::GateUp { 2 } else { 1 };
        let features: Vec<usize> = matrices.iter().map(|w| w.rows).collect();
        let tiles = self.tile.counts(&features).into_iter().max()?;
        let rows_of_b = own * tiles.div_ceil(self.clusters) * self.tile.features() * division.tiles;
        // Factors have up to 4 bytes an element.
        let part = (matrices[0].cols / parts).next_multiple_of(UNIT) + UNIT;
        let wanted = (part + rows_of_b * division.rank) * 4;
        let limit = match self.rows {
            // A CTA of the next kernel runs beside one of this.
            rows if rows <= HALF_SM_ROWS => hardware.shared_limit / 2 - 1024,
            _ => hardware.shared_limit,
        };
        let needed = self.shared + beside;
        let copies = wanted.min(limit.saturating_sub(needed) / 16 * 16);
        let shared = needed + copies;
        let launch = Launch {
            // As much as without adapters at least.
            shared: (shared as u32).max(self.launch.launch.shared),
            ..self.launch.launch
        };
        let mut plan = *self;
        plan.shared = shared;
        plan.launch = launch.of(kernel);
        plan.beside = false;
        plan.adapted = Some(AdaptedSkinny {
            division,
            parts,
            copies,
            turn,
        });
        (shared <= hardware.shared_limit).then_some(plan)
    }

    /// The argument of the plan's kernel for the adapters of its rows, which were divided by `factor`; zeros without adapters.
    pub(super) fn low_products(
        &self,
        rows: Option<&AdaptedRows<'_>>,
        matrices: usize,
        factor: f32,
    ) -> Result<LowProductsArgument> {
        match (self.adapted, rows) {
            (None, None) => Ok(LowProductsArgument::default()),
            (Some(by), Some(rows)) if by.division == rows.division() => {
                rows.shared(matrices, by.turn, by.parts, factor, by.copies)
            }
            (by, rows) => bail!(
                Internal,
                "rows with adapters in {:?}, planned as {by:?}",
                rows.map(AdaptedRows::division)
            ),
        }
    }
}
