//! The skinny GEMM: products of up to 16 rows of activations with NVFP4 weights, with fused epilogues and norms.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::fused_norm::{FusedNorm, NormArgument};
use super::input::Input;
use super::limits::{HALF_SM_ROWS, SKINNY_ROWS};
use super::matrix::{Biased, CHUNK_K, MatrixArgument, matrix_arguments};
use super::output::{GROUP_ROWS, Layout, Output};
use super::residual::ResidualArgument;
use super::tile::{Tile, WARPS};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, int};
use crate::cuda::units::Unit;

/// Argument sizes of this file's kernels, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[("skinny_", size_of::<SkinnyArguments>())];

#[repr(C)]
struct SkinnyArguments {
    x: u64,
    out: u64,
    matrix: [MatrixArgument; 3],
    tiles: [i32; 2],
    cluster_tiles: i32,
    larger_clusters: i32,
    k_range: [KRange; MOST_SPLIT_K],
    chunks: i32,
    m: i32,
    k: i32,
    out_stride: i32,
    out_scale: f32,
    activation: i32,
    norm: NormArgument,
    residual: ResidualArgument,
}

/// The K range of a CTA: its first step, the number of steps, and 2^32 divided by that number, rounded up.
#[repr(C)]
struct KRange {
    first: i32,
    steps: i32,
    inverse: u32,
}

/// The most CTAs that split K.
const MOST_SPLIT_K: usize = 2;
/// Accumulators of a warp per row of activations.
const ACCUMULATORS: usize = 16;
/// The most row-major activation rows for which CTAs may form clusters.
const CLUSTER_ROWS: usize = 8;
/// Numbers of activation rows that may be fragment-major: more than [`Tile::Deep`] serves.
const FRAGMENT_MAJOR_ROWS: RangeInclusive<usize> = HALF_SM_ROWS + 1..=SKINNY_ROWS;
/// The most bytes of shared memory for accumulators.
const ACCUMULATOR_BYTES: usize = 48 << 10;
/// Bytes of shared memory after the activations: barriers, and the factors of a norm.
const BARRIER_BYTES: usize = 128 + WARPS * 4;

/// Launch plan of the skinny GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The kind of tile.
    pub tile: Tile,
    /// Number of CTA clusters, which divide the tiles evenly.
    pub clusters: usize,
    /// CTAs per cluster, each with a range of K.
    pub split_k: usize,
    /// Activation rows per launch.
    pub rows: usize,
    /// Shared memory that a CTA needs for that many rows.
    pub shared: usize,
}

impl Plan {
    /// Plans `m` rows in the given layout and matrices of `features` output features and K = `k`, for a device with this many
    /// multiprocessors and this many bytes of shared memory per CTA. `None` if a single row does not fit, or, for fragment-major rows, if
    /// not all rows fit.
    ///
    /// The plan has as many CTAs as multiprocessors, or a multiple of that if the accumulators of a CTA's tiles would need too much memory.
    /// It takes all rows at once, or as many as fit. `has_clusters` says whether the device has thread block clusters (Hopper and later).
    /// Two CTAs that split K balance a small number of tiles better, but combining their accumulators costs as much as a step of each warp.
    pub fn choose(
        m: usize,
        k: usize,
        features: &[usize],
        output: Output,
        layout: Layout,
        has_clusters: bool,
        multiprocessors: usize,
        shared: usize,
    ) -> Option<Plan> {
        let fragment_major = layout == Layout::FragmentMajor;
        if fragment_major && !FRAGMENT_MAJOR_ROWS.contains(&m) {
            return None;
        }
        let tile = Tile::of(output, m);
        let tiles = tile.counts(features).into_iter().max()?;
        let steps = k.div_ceil(tile.step());
        let mut rows = m.min(SKINNY_ROWS);
        loop {
            let most_tiles = (ACCUMULATOR_BYTES / (rows * ACCUMULATORS * 4))
                .saturating_sub(WARPS)
                .max(1);
            let waves = tiles.div_ceil(multiprocessors).div_ceil(most_tiles);
            let plan = |clusters: usize, split_k: usize| {
                let each = tiles.div_ceil(clusters);
                let held = match layout {
                    Layout::FragmentMajor => rows.next_multiple_of(GROUP_ROWS),
                    Layout::RowMajor => rows,
                };
                let x = held * steps.div_ceil(split_k) * tile.step() * 2;
                let accumulators = rows * (each + WARPS) * ACCUMULATORS * 4;
                // A CTA of a cluster receives as many accumulators as it has outputs.
                let received = match split_k {
                    1 => 0,
                    _ => (each * tile.room(rows)).div_ceil(split_k) * tile.features() * 4,
                };
                Plan {
                    tile,
                    clusters,
                    split_k,
                    rows,
                    shared: tile.rings(rows) + x + BARRIER_BYTES + received + accumulators,
                }
            };
            let alone = plan(tiles.min(multiprocessors * waves), 1);
            let paired = plan(tiles.min((multiprocessors / 2).max(1)), 2);
            let steps_of =
                |plan: &Plan| tiles.div_ceil(plan.clusters) * steps.div_ceil(plan.split_k);
            let pays = has_clusters
                && tile != Tile::GateUp
                && (rows <= CLUSTER_ROWS || fragment_major)
                && steps_of(&paired) + WARPS < steps_of(&alone);
            let best = if pays { paired } else { alone };
            if best.shared <= shared {
                return Some(best);
            }
            if rows == 1 || fragment_major {
                return None;
            }
            rows = rows.div_ceil(2);
        }
    }
}

/// The skinny GEMM with a given plan. `next` is the norm after the addition to `out`, if it is fused into this GEMM.
pub fn skinny_gemm(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    plan: Plan,
    next: Option<&FusedNorm<'_>>,
) -> Result<()> {
    let k = matrices[0].0.cols;
    // The kernels count outputs and activations in 32 bits.
    int("outputs of a product", plan.rows * stride)?;
    int("activations", plan.rows * k)?;
    let mut matrix = matrix_arguments(matrices)?;
    let (x, norm) = match (&input, next) {
        (Input::Plain(x, factor) | Input::FragmentMajor(x, factor), next) => {
            matrix.iter_mut().for_each(|w| w.global *= factor);
            (Some(*x), next)
        }
        (Input::FusedNorm(norm, _), None) => (Some(norm.rows()), Some(norm)),
        (Input::Residual(_), None) => (None, None),
        (Input::FusedNorm(..) | Input::Residual(_), Some(_)) => {
            bail!(
                Internal,
                "a product between two norms that are fused into it"
            )
        }
    };
    let misplaced = match next {
        Some(_) => output != Output::Add,
        None => norm.is_some() && matches!(output, Output::Add | Output::F16),
    };
    if norm.is_some() && (misplaced || plan.rows < m) {
        bail!(
            Internal,
            "no kernel fuses a norm into {output:?} of {m} rows, {} at a time",
            plan.rows
        );
    }
    let residual = match input {
        Input::Residual(row) => row.argument(m, k, output)?,
        _ => ResidualArgument::default(),
    };
    let features: Vec<usize> = matrices.iter().map(|(w, _)| w.rows).collect();
    let counts = plan.tile.counts(&features);
    let tiles = counts[counts.len() - 1];
    let up_to = |i: usize| int("tiles", *counts.get(i).unwrap_or(&tiles));
    let steps = k.div_ceil(plan.tile.step());
    let k_range = |i: usize| {
        let first = steps * i / plan.split_k;
        let count = steps * (i + 1) / plan.split_k - first;
        // Steps of a CTA times steps of a tile are far below 2^32, since a row fits shared memory. The kernel itself handles division by 1.
        KRange {
            first: first as i32,
            steps: count as i32,
            inverse: (u32::MAX / count.max(1) as u32).wrapping_add(1),
        }
    };
    let kind = match output {
        Output::F32 => "f32",
        Output::F16 => "f16",
        Output::Add => "add",
        Output::Glu(_) | Output::GluFragmentMajor(_) => "glu",
    };
    if output.applied().is_some() && output.layout() != input.layout() {
        bail!(
            Internal,
            "the skinny GEMM stores the result of a gated activation in the layout of its input"
        );
    }
    let glu = output.applied().unwrap_or_default();
    for first in (0..m).step_by(plan.rows) {
        let rows = plan.rows.min(m - first);
        let how = match (&input, input.layout()) {
            (Input::Residual(_), _) => "_residual",
            (_, Layout::RowMajor) => "",
            (_, Layout::FragmentMajor) => "_fragments",
        };
        let name = format!("skinny_{kind}{how}_{}", plan.tile.room(rows));
        let arguments = SkinnyArguments {
            x: x.map_or(0, |x| x.address() + (first * k * 2) as u64),
            out: out.address() + (first * stride * output.bytes()) as u64,
            matrix,
            tiles: [up_to(0)?, up_to(1)?],
            cluster_tiles: (tiles / plan.clusters) as i32,
            larger_clusters: (tiles % plan.clusters) as i32,
            k_range: [k_range(0), k_range(plan.split_k - 1)],
            chunks: k.div_ceil(CHUNK_K) as i32,
            m: rows as i32,
            k: int("K", k)?,
            out_stride: int("the stride of a product", stride)?,
            out_scale: glu.factor(),
            activation: glu.activation as i32,
            norm: norm.map_or(Ok(NormArgument::default()), |norm| norm.argument(m))?,
            residual,
        };
        let launch = Launch {
            // At most two CTAs share a multiprocessor: one of this kernel and one of the next, which fills its rings while the first
            // computes. With room for three, CTAs of the next kernel would gather where CTAs of this one have ended, and leave other
            // multiprocessors idle. With more activation rows there is no room for a CTA of the next kernel; then two CTAs of this kernel
            // would gather in the same way.
            shared: plan
                .shared
                .max(gpu.shared_limit() / if rows <= 4 { 3 } else { 2 } + 1024)
                as u32,
            cluster: plan.split_k as u32,
            ..Launch::new(
                [plan.clusters as u32, 1, plan.split_k as u32],
                (32 * WARPS) as u32,
            )
        };
        // SAFETY: the struct is the kernel's; sizes were checked, and buffers outlive work on their stream.
        unsafe { launch.run(gpu, Unit::LinearSkinny, &name, &arguments)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::output::Glu;
    use super::*;

    #[test]
    fn plans_fit_the_device_and_keep_it_busy() {
        let shapes: [(usize, &[usize], Output); 6] = [
            (2560, &[4096, 1024, 1024], Output::F32),
            (4096, &[2560], Output::Add),
            (2560, &[9728, 9728], Output::Glu(Glu::default())),
            (9728, &[2560], Output::Add),
            (2560, &[151_936], Output::F32),
            (576, &[576, 192, 192], Output::F32),
        ];
        for (k, features, output) in shapes {
            for (m, divisible) in (1..=SKINNY_ROWS).flat_map(|m| [(m, false), (m, true)]) {
                let plan = |layout| {
                    Plan::choose(m, k, features, output, layout, divisible, 132, 227 << 10)
                };
                let fragment_major = plan(Layout::FragmentMajor);
                // 16 rows of 9,728 elements fit a cluster of two CTAs.
                let fits = m <= 8 || k < 9728 || divisible;
                assert_eq!(
                    fragment_major.is_some(),
                    FRAGMENT_MAJOR_ROWS.contains(&m) && fits,
                    "{m} of {k}"
                );
                let plan = plan(Layout::RowMajor).unwrap();
                if let Some(fragment_major) = fragment_major {
                    assert!(
                        fragment_major.shared >= plan.shared && fragment_major.shared <= 227 << 10
                    );
                    assert_eq!(fragment_major.rows, m);
                }
                assert!(plan.shared <= 227 << 10, "{plan:?}");
                assert!(plan.rows >= 1 && plan.rows <= m, "{plan:?}");
                assert!(
                    plan.clusters.is_multiple_of(132 / plan.split_k)
                        || plan.clusters < 132 / plan.split_k,
                    "{plan:?}"
                );
                assert!(plan.tile != Tile::Deep || m <= 4, "{plan:?}");
                // An uneven distribution, three tiles of 9,728 elements for some CTAs and two for others, or two and one, makes splitting K
                // worthwhile.
                let uneven = k == 9728 && plan.rows <= CLUSTER_ROWS;
                assert_eq!(plan.split_k == 2, divisible && uneven, "{plan:?}");
            }
        }
        // GB10: 48 multiprocessors and 99 KB.
        let at_most_99_kb = |k| {
            Plan::choose(
                1,
                k,
                &[2560],
                Output::Add,
                Layout::RowMajor,
                true,
                48,
                99 << 10,
            )
        };
        assert!(at_most_99_kb(9728).is_some());
        assert!(at_most_99_kb(1 << 20).is_none());
        // Gate and up of one row, which has the longest rings, for the widest common models.
        let swiglu = Output::Glu(Glu::default());
        let widest = [28_672, 28_672];
        assert!(
            Plan::choose(
                1,
                8192,
                &widest,
                swiglu,
                Layout::RowMajor,
                true,
                48,
                99 << 10
            )
            .is_some()
        );
    }
}
