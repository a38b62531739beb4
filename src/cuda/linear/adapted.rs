//! Plans of GEMMs that add the products of their rows' adapters.

use super::adapted_rows::{AdapterDivision, SharingTurn};
use super::choose::{GemmKernels, GemmPlan};
use super::hardware::Hardware;
use super::matrix::MatrixShape;

impl GemmPlan {
    /// This GEMM by a kernel that applies the adapters of its rows, if there is one. Launches of the skinny GEMM take turns.
    pub fn for_adapted_rows(
        &self,
        hardware: &Hardware,
        division: AdapterDivision,
        turn: Option<SharingTurn>,
    ) -> Option<GemmPlan> {
        let matrices: Vec<MatrixShape> = self.matrices.iter().flatten().copied().collect();
        let kernels = match &self.kernels {
            GemmKernels::Skinny(_) => {
                let plan = self.skinny_at_once()?;
                let plan = plan.for_adapted_rows(hardware, &matrices, division, turn?)?;
                GemmKernels::Skinny(plan)
            }
            GemmKernels::Tiled(tiling) => {
                let tiling = tiling.for_adapted_rows(hardware, &matrices, division)?;
                GemmKernels::Tiled(tiling)
            }
            GemmKernels::Parts(_) => return None,
        };
        Some(GemmPlan { kernels, ..*self })
    }

    /// Whether it is a plan by [`GemmPlan::for_adapted_rows`].
    pub fn is_for_adapted_rows(&self) -> bool {
        match &self.kernels {
            GemmKernels::Skinny(plan) => plan.adapted.is_some(),
            GemmKernels::Tiled(tiling) => tiling.adapted.is_some(),
            GemmKernels::Parts(_) => false,
        }
    }
}
