//! Chooses the kernel of a GEMM from its rows, its matrices and the device.

use super::hardware::Hardware;
use super::limits::{FUSED_BYTES, HALF_SM_ROWS, SKINNY_ROWS};
use super::matrix::{Biased, MatrixShape};
use super::output::{Glu, Layout, Output};
use super::skinny::Plan;
use super::tiled::{self, TileKernel};
use crate::tensor::WeightType;

impl Layout {
    /// The layout that GEMMs of `m` rows with NVFP4 weights take without a conversion.
    pub fn taken(hardware: &Hardware, m: usize) -> Layout {
        match hardware.arch {
            (9, 0) if m > HALF_SM_ROWS && hardware.tiles_serve(m) => Layout::FragmentMajor,
            _ => Layout::RowMajor,
        }
    }
}

pub(super) fn shapes(matrices: &[Biased<'_>]) -> Vec<MatrixShape> {
    matrices.iter().map(|(w, _)| w.shape()).collect()
}

pub(super) fn are_nvfp4(matrices: &[MatrixShape]) -> bool {
    matrices.iter().all(|w| w.storage == WeightType::Nvfp4)
}

/// The plan of the skinny GEMM for `m` rows in the given layout, if that kernel is the best choice.
pub(super) fn fused_plan(
    hardware: &Hardware,
    m: usize,
    matrices: &[MatrixShape],
    output: Output,
    layout: Layout,
) -> Option<Plan> {
    let takes = m <= SKINNY_ROWS
        && are_nvfp4(matrices)
        && (layout == Layout::FragmentMajor
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
    let pays = m <= HALF_SM_ROWS
        || output.applied().is_some()
        || match layout {
            Layout::FragmentMajor => plan.clusters * plan.split_k <= hardware.multiprocessors,
            Layout::RowMajor => plan.rows == m && m * k * 2 <= FUSED_BYTES * plan.split_k,
        };
    pays.then_some(plan)
}

/// Whether one kernel serves `m` rows of two matrices and applies a gated activation in its epilogue.
pub fn has_glu(hardware: &Hardware, m: usize, matrices: &[MatrixShape], layout: Layout) -> bool {
    fused_plan(hardware, m, matrices, layout.glu(Glu::default()), layout).is_some()
        || tiled::has_glu(hardware, m, matrices, layout)
}
