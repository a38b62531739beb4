//! The skinny GEMM: products of up to 16 rows of activations with NVFP4 weights, with fused epilogues and norms.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use super::adapted_rows::{AdaptedRows, AdaptedSkinny, LowProductsArgument};
use super::fused_norm::{FusedNorm, NormArgument};
use super::hardware::Hardware;
use super::input::{Input, InputForm};
use super::limits::{HALF_SM_ROWS, SKINNY_ROWS};
use super::matrix::{Biased, CHUNK_BYTES, CHUNK_K, MatrixArgument, MatrixShape, matrix_arguments};
use super::normalized::{self, NormalizedArgument};
use super::output::{GROUP_ROWS, Layout, Output};
use super::residual::ResidualArgument;
use super::tile::{Tile, WARPS};
use super::tiled::ranges;
use super::tiles::TileKernel;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, Planned, int};
use crate::cuda::kernel::kernels;

kernels! {
    /// The skinny GEMM, by its epilogue, its input and the most rows that it takes.
    pub(super) enum SkinnyKernel(SkinnyArguments) {
        LinearSkinny {
            F32Rows1 = "skinny_f32_1",
            F32Rows4 = "skinny_f32_4",
            F32Rows8 = "skinny_f32_8",
            F32Rows16 = "skinny_f32_16",
            F16Rows1 = "skinny_f16_1",
            F16Rows4 = "skinny_f16_4",
            F16Rows8 = "skinny_f16_8",
            F16Rows16 = "skinny_f16_16",
            AddRows1 = "skinny_add_1",
            AddRows4 = "skinny_add_4",
            AddRows8 = "skinny_add_8",
            AddRows16 = "skinny_add_16",
            GluRows1 = "skinny_glu_1",
            GluRows8 = "skinny_glu_8",
            GluRows16 = "skinny_glu_16",
            F32Residual1 = "skinny_f32_residual_1",
            GluResidual1 = "skinny_glu_residual_1",
            F32Fragments8 = "skinny_f32_fragments_8",
            F32Fragments16 = "skinny_f32_fragments_16",
            F16Fragments8 = "skinny_f16_fragments_8",
            F16Fragments16 = "skinny_f16_fragments_16",
            AddFragments8 = "skinny_add_fragments_8",
            AddFragments16 = "skinny_add_fragments_16",
            GluFragments8 = "skinny_glu_fragments_8",
            GluFragments16 = "skinny_glu_fragments_16",
        }
        LinearSkinnyAdapted {
            AdaptedF32Rows1 = "skinny_adapted_f32_1",
            AdaptedF32Rows4 = "skinny_adapted_f32_4",
            AdaptedF32Rows8 = "skinny_adapted_f32_8",
            AdaptedF32Rows16 = "skinny_adapted_f32_16",
            AdaptedAddRows1 = "skinny_adapted_add_1",
            AdaptedAddRows4 = "skinny_adapted_add_4",
            AdaptedAddRows8 = "skinny_adapted_add_8",
            AdaptedAddRows16 = "skinny_adapted_add_16",
            AdaptedGluRows1 = "skinny_adapted_glu_1",
            AdaptedGluRows8 = "skinny_adapted_glu_8",
            AdaptedGluRows16 = "skinny_adapted_glu_16",
            AdaptedF32Fragments8 = "skinny_adapted_f32_fragments_8",
            AdaptedF32Fragments16 = "skinny_adapted_f32_fragments_16",
            AdaptedAddFragments8 = "skinny_adapted_add_fragments_8",
            AdaptedAddFragments16 = "skinny_adapted_add_fragments_16",
            AdaptedGluFragments8 = "skinny_adapted_glu_fragments_8",
            AdaptedGluFragments16 = "skinny_adapted_glu_fragments_16",
        }
        LinearSkinnyRanges {
            RangesF32Rows1 = "skinny_ranges_f32_1",
            RangesF32Rows4 = "skinny_ranges_f32_4",
            RangesF16Rows1 = "skinny_ranges_f16_1",
            RangesF16Rows4 = "skinny_ranges_f16_4",
            RangesAddRows1 = "skinny_ranges_add_1",
            RangesAddRows4 = "skinny_ranges_add_4",
            RangesGluRows1 = "skinny_ranges_glu_1",
            RangesGluRows4 = "skinny_ranges_glu_4",
            RangesF32Fragments8 = "skinny_ranges_f32_fragments_8",
            RangesF32Fragments16 = "skinny_ranges_f32_fragments_16",
            RangesF16Fragments8 = "skinny_ranges_f16_fragments_8",
            RangesF16Fragments16 = "skinny_ranges_f16_fragments_16",
            RangesAddFragments8 = "skinny_ranges_add_fragments_8",
            RangesAddFragments16 = "skinny_ranges_add_fragments_16",
            RangesGluFragments8 = "skinny_ranges_glu_fragments_8",
            RangesGluFragments16 = "skinny_ranges_glu_fragments_16",
            RangesF32Norm1 = "skinny_ranges_f32_norm_1",
            RangesF32Norm4 = "skinny_ranges_f32_norm_4",
            RangesGluNorm1 = "skinny_ranges_glu_norm_1",
            RangesGluNorm4 = "skinny_ranges_glu_norm_4",
        }
    }
}

impl SkinnyKernel {
    /// The kernel for up to `room` rows. A gated activation leaves its result in the layout of the input.
    fn of(output: Output, form: InputForm, room: usize) -> Option<SkinnyKernel> {
        use Layout::{FragmentMajor, RowMajor};
        use SkinnyKernel::*;
        // By [`Tile::room`]: 1, 4, 8 and 16.
        let by_room = match (output, form, form.layout()) {
            (Output::F32, InputForm::Residual, _) => [Some(F32Residual1), None, None, None],
            (Output::Glu(_), InputForm::Residual, _) => [Some(GluResidual1), None, None, None],
            (_, InputForm::Residual | InputForm::Normalized, _) => return None,
            (Output::F32, _, RowMajor) => [F32Rows1, F32Rows4, F32Rows8, F32Rows16].map(Some),
            (Output::F16, _, RowMajor) => [F16Rows1, F16Rows4, F16Rows8, F16Rows16].map(Some),
            (Output::Add, _, RowMajor) => [AddRows1, AddRows4, AddRows8, AddRows16].map(Some),
            (Output::Glu(_), _, RowMajor) => {
                [Some(GluRows1), None, Some(GluRows8), Some(GluRows16)]
            }
            (Output::F32, _, FragmentMajor) => {
                [None, None, Some(F32Fragments8), Some(F32Fragments16)]
            }
            (Output::F16, _, FragmentMajor) => {
                [None, None, Some(F16Fragments8), Some(F16Fragments16)]
            }
            (Output::Add, _, FragmentMajor) => {
                [None, None, Some(AddFragments8), Some(AddFragments16)]
            }
            (Output::GluFragmentMajor(_), _, FragmentMajor) => {
                [None, None, Some(GluFragments8), Some(GluFragments16)]
            }
            (Output::Glu(_), _, FragmentMajor) | (Output::GluFragmentMajor(_), _, RowMajor) => {
                return None;
            }
        };
        by_room[[1, 4, 8, 16].iter().position(|&rows| rows == room)?]
    }

    /// The kernel of deterministic plans for `rows` rows, and the rows that it has room for.
    fn in_ranges(output: Output, form: InputForm, rows: usize) -> Option<(SkinnyKernel, usize)> {
        use InputForm::{FusedNorm, Normalized, Plain, Residual};
        use Layout::{FragmentMajor, RowMajor};
        use SkinnyKernel::*;
        let rooms: &[(usize, SkinnyKernel)] = match (output, form) {
            (Output::F32, Plain(RowMajor)) => &[(1, RangesF32Rows1), (4, RangesF32Rows4)],
            (Output::F16, Plain(RowMajor)) => &[(1, RangesF16Rows1), (4, RangesF16Rows4)],
            (Output::Add, Plain(RowMajor)) => &[(1, RangesAddRows1), (4, RangesAddRows4)],
            (Output::Glu(_), Plain(RowMajor)) => &[(1, RangesGluRows1), (4, RangesGluRows4)],
            (Output::F32, Plain(FragmentMajor)) => {
                &[(8, RangesF32Fragments8), (16, RangesF32Fragments16)]
            }
            (Output::F16, Plain(FragmentMajor)) => {
                &[(8, RangesF16Fragments8), (16, RangesF16Fragments16)]
            }
            (Output::Add, Plain(FragmentMajor)) => {
                &[(8, RangesAddFragments8), (16, RangesAddFragments16)]
            }
            (Output::GluFragmentMajor(_), Plain(FragmentMajor)) => {
                &[(8, RangesGluFragments8), (16, RangesGluFragments16)]
            }
            (Output::F32, Normalized) => &[(1, RangesF32Norm1), (4, RangesF32Norm4)],
            (Output::Glu(_), Normalized) => &[(1, RangesGluNorm1), (4, RangesGluNorm4)],
            (Output::F16 | Output::Add | Output::GluFragmentMajor(_), Normalized)
            | (Output::Glu(_), Plain(FragmentMajor))
            | (Output::GluFragmentMajor(_), Plain(RowMajor))
            | (_, FusedNorm(_) | Residual) => return None,
        };
        let (room, kernel) = rooms.iter().find(|(room, _)| rows <= *room)?;
        Some((*kernel, *room))
    }
}

#[repr(C)]
pub(super) struct SkinnyArguments {
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
    beside: i32,
    norm: NormArgument,
    residual: ResidualArgument,
    ranges: i32,
    normalized: NormalizedArgument,
    low: LowProductsArgument,
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
/// Bytes of the rings of a CTA's warps in deterministic plans: three stages of two chunks.
const RANGE_RINGS: usize = WARPS * 3 * 2 * CHUNK_BYTES;

/// The launches of the skinny GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkinnyPlan {
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
    /// The ranges of K of a deterministic plan, each of them a warp's, which follow each other in a sum.
    ranges: Option<usize>,
    /// Whether it runs beside the kernel before it, which does not make its input.
    pub(super) beside: bool,
    /// For kernels that apply the adapters of their rows.
    pub(super) adapted: Option<AdaptedSkinny>,
    /// The launch for that many rows.
    pub(super) launch: Planned<SkinnyKernel>,
    /// The launch for the rows that remain, if any.
    last: Option<Planned<SkinnyKernel>>,
}

impl SkinnyPlan {
    /// Plans `m` rows and these matrices. `None` if a single row does not fit, or, for fragment-major rows, if not all rows fit; or if the
    /// GEMM lacks the epilogue.
    ///
    /// The plan has as many CTAs as multiprocessors, or a multiple of that if the accumulators of a CTA's tiles would need too much memory.
    /// It takes all rows at once, or as many as fit. Two CTAs that split K balance a small number of tiles better, but combining their
    /// accumulators costs as much as a step of each warp.
    pub fn choose(
        hardware: &Hardware,
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
    ) -> Option<SkinnyPlan> {
        let (layout, k) = (form.layout(), matrices.first()?.cols);
        let multiprocessors = hardware.multiprocessors;
        let features: Vec<usize> = matrices.iter().map(|w| w.rows).collect();
        let fragment_major = layout == Layout::FragmentMajor;
        if m == 0 || (fragment_major && !FRAGMENT_MAJOR_ROWS.contains(&m)) {
            return None;
        }
        let tile = Tile::of(output, m);
        let tiles = tile.counts(&features).into_iter().max()?;
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
                let accumulators = rows * (each + WARPS - 1) * ACCUMULATORS * 4;
                // A CTA of a cluster receives as many accumulators as it has outputs.
                let received = match split_k {
                    1 => 0,
                    _ => (each * tile.room(rows)).div_ceil(split_k) * tile.features() * 4,
                };
                let shared = tile.rings(rows) + x + BARRIER_BYTES + received + accumulators;
                (clusters, split_k, shared)
            };
            let most = match form {
                InputForm::Plain(Layout::RowMajor) if output != Output::Add && waves == 1 => {
                    hardware.beside_norm(rows, tiles)
                }
                _ => multiprocessors * waves,
            };
            let alone = plan(tiles.min(most), 1);
            let paired = plan(tiles.min((multiprocessors / 2).max(1)), 2);
            let steps_of =
                |(clusters, split_k, _)| tiles.div_ceil(clusters) * steps.div_ceil(split_k);
            let pays = hardware.has_clusters()
                && tile != Tile::GateUp
                && (rows <= CLUSTER_ROWS || fragment_major)
                && steps_of(paired) + WARPS < steps_of(alone);
            let (clusters, split_k, shared) = if pays { paired } else { alone };
            if shared <= hardware.shared_limit {
                let launch = |rows| {
                    let kernel = SkinnyKernel::of(output, form, tile.room(rows))?;
                    let shared = shared.max(hardware.least_shared(rows));
                    let launch = Launch {
                        shared: shared as u32,
                        cluster: split_k as u32,
                        ..Launch::new([clusters as u32, 1, split_k as u32], (32 * WARPS) as u32)
                    };
                    Some(launch.of(kernel))
                };
                return Some(SkinnyPlan {
                    tile,
                    clusters,
                    split_k,
                    rows,
                    shared,
                    ranges: None,
                    beside: false,
                    adapted: None,
                    launch: launch(rows)?,
                    last: match m % rows {
                        0 => None,
                        last => Some(launch(last)?),
                    },
                });
            }
            if rows == 1 || fragment_major {
                return None;
            }
            rows = rows.div_ceil(2);
        }
    }

    /// The deterministic plan for Hopper: each warp takes whole ranges of K, those of the kernel of wide tiles, so that a row has the same
    /// bits. `None` if not all rows fit, or if the GEMM lacks the epilogue.
    pub(super) fn in_ranges(
        hardware: &Hardware,
        m: usize,
        matrices: &[MatrixShape],
        output: Output,
        form: InputForm,
    ) -> Option<SkinnyPlan> {
        let (kernel, room) = SkinnyKernel::in_ranges(output, form, m)?;
        let (ranges, k) = (ranges(hardware, matrices, output).count, matrices[0].cols);
        let normalizes = matches!(form, InputForm::Normalized);
        if normalizes && k > normalized::WIDTH {
            return None;
        }
        let held = match form {
            InputForm::Plain(Layout::FragmentMajor) => room,
            _ => m,
        };
        let tile = Tile::in_ranges(output);
        let features: Vec<usize> = matrices.iter().map(|w| w.rows).collect();
        let (tiles, steps) = (*tile.counts(&features).last()?, k.div_ceil(tile.step()));
        let most_tiles = ACCUMULATOR_BYTES / (m * ranges * ACCUMULATORS * 4);
        let waves = tiles.div_ceil(hardware.multiprocessors);
        let waves = waves.div_ceil(most_tiles.max(1));
        // The clusters, their CTAs, and the steps of a CTA with the most.
        let alone = (tiles.min(hardware.multiprocessors * waves), 1);
        let paired = (
            tiles.min((hardware.multiprocessors / 2).max(1)),
            MOST_SPLIT_K,
        );
        let longest = |split_k| steps - first_step(steps, Some(ranges), split_k - 1, split_k);
        let steps_of = |(clusters, split_k)| tiles.div_ceil(clusters) * longest(split_k);
        let pays = ranges > 1 && tile != Tile::GateUp && steps_of(paired) + WARPS < steps_of(alone);
        let (clusters, split_k) = if pays { paired } else { alone };
        let (each, sums) = (tiles.div_ceil(clusters), ranges.div_ceil(split_k));
        let received = match split_k {
            1 => 0,
            _ => (each * room).div_ceil(split_k) * tile.features() * sums * 4,
        };
        let shared = RANGE_RINGS
            + held * longest(split_k) * tile.step() * 2
            + BARRIER_BYTES
            + received
            + m * each * sums * ACCUMULATORS * 4;
        let shared = shared.max(hardware.least_shared(m));
        let launch = Launch {
            shared: shared as u32,
            cluster: split_k as u32,
            ..Launch::new([clusters as u32, 1, split_k as u32], (32 * WARPS) as u32)
        };
        (shared <= hardware.shared_limit).then(|| SkinnyPlan {
            tile,
            clusters,
            split_k,
            rows: m,
            shared,
            ranges: Some(ranges),
            beside: false,
            adapted: None,
            launch: launch.of(kernel),
            last: None,
        })
    }

    /// Takes more than half of the shared memory of a multiprocessor for each CTA.
    pub(super) fn stay_alone(&mut self, hardware: &Hardware) {
        let least = hardware.alone_shared() as u32;
        for planned in [Some(&mut self.launch), self.last.as_mut()]
            .into_iter()
            .flatten()
        {
            planned.launch.shared = planned.launch.shared.max(least);
        }
    }

    /// Whether warps take whole ranges of K.
    pub(super) fn is_deterministic(&self) -> bool {
        self.ranges.is_some()
    }

    /// The order of its sums: the kernel that has the same, and the parts into which it divides K.
    pub(super) fn sums(&self) -> (String, u32) {
        match self.ranges {
            Some(ranges) => (format!("{:?}", TileKernel::Wide), ranges as u32),
            None => (format!("{:?}", self.tile), self.split_k as u32),
        }
    }
}

/// The first of `steps` steps along K of a CTA among `split_k`, which may have whole ranges.
fn first_step(steps: usize, ranges: Option<usize>, rank: usize, split_k: usize) -> usize {
    match ranges {
        Some(ranges) => steps * (ranges * rank / split_k) / ranges,
        None => steps * rank / split_k,
    }
}

/// How plans are written down that run beside the kernel before, after the kernel's own.
pub(super) fn beside_name(beside: bool) -> &'static str {
    if beside {
        ", beside the kernel before"
    } else {
        ""
    }
}

impl fmt::Display for SkinnyPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.launch)?;
        if let Some(adapted) = &self.adapted {
            write!(f, ", {adapted}")?;
        }
        if let Some(last) = &self.last {
            write!(f, ", {} rows each, {last}", self.rows)?;
        }
        f.write_str(beside_name(self.beside))
    }
}

/// The skinny GEMM with a given plan. `next` is the norm after the addition to `out`, if it is fused into this GEMM; `adapters` are those of
/// the rows, if the plan's kernel applies them.
pub(super) fn skinny_gemm(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    plan: &SkinnyPlan,
    next: Option<&FusedNorm<'_>>,
    adapters: Option<&AdaptedRows<'_>>,
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
        (Input::Residual(_) | Input::Normalized(_), None) => (None, None),
        (Input::FusedNorm(..) | Input::Residual(_) | Input::Normalized(_), Some(_)) => {
            bail!(
                Internal,
                "a product between two norms that are fused into it"
            )
        }
    };
    let factor = match &input {
        Input::Plain(_, factor) | Input::FragmentMajor(_, factor) => *factor,
        _ => 1.0,
    };
    let low = plan.low_products(adapters, matrices.len(), factor)?;
    let residual = match input {
        Input::Residual(row) => row.argument(m, k, output)?,
        _ => ResidualArgument::default(),
    };
    let normalized = || match input {
        Input::Normalized(rows) => rows.argument(m, k),
        _ => Ok(NormalizedArgument::default()),
    };
    let features: Vec<usize> = matrices.iter().map(|(w, _)| w.rows).collect();
    let counts = plan.tile.counts(&features);
    let tiles = counts[counts.len() - 1];
    let up_to = |i: usize| int("tiles", *counts.get(i).unwrap_or(&tiles));
    let steps = k.div_ceil(plan.tile.step());
    let k_range = |i: usize| {
        let first_step = |i| first_step(steps, plan.ranges, i, plan.split_k);
        let (first, count) = (first_step(i), first_step(i + 1) - first_step(i));
        // Steps of a CTA times steps of a tile are far below 2^32, since a row fits shared memory. The kernel itself handles division by 1.
        KRange {
            first: first as i32,
            steps: count as i32,
            inverse: (u32::MAX / count.max(1) as u32).wrapping_add(1),
        }
    };
    let glu = output.applied().unwrap_or_default();
    for first in (0..m).step_by(plan.rows) {
        let rows = plan.rows.min(m - first);
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
            beside: plan.beside.into(),
            norm: norm.map_or(Ok(NormArgument::default()), |norm| norm.argument(m))?,
            residual,
            ranges: plan.ranges.unwrap_or(1) as i32,
            normalized: normalized()?,
            low,
        };
        let planned = match &plan.last {
            Some(last) if rows < plan.rows => last,
            _ => &plan.launch,
        };
        // SAFETY: sizes were checked with the plan, and buffers outlive work on their stream.
        unsafe { planned.run(gpu, &arguments)? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::hardware::WideClusters;
    use super::super::output::Glu;
    use super::*;
    use crate::tensor::WeightType;

    fn hardware(has_clusters: bool, multiprocessors: usize, shared_limit: usize) -> Hardware {
        Hardware {
            arch: if has_clusters { (9, 0) } else { (8, 0) },
            multiprocessors,
            shared_limit,
            cublas: true,
            deterministic: false,
            clusters: WideClusters::unconstrained(0),
        }
    }

    fn choose(
        hardware: &Hardware,
        m: usize,
        k: usize,
        features: &[usize],
        output: Output,
        layout: Layout,
    ) -> Option<SkinnyPlan> {
        let shape = |&rows| MatrixShape {
            storage: WeightType::Nvfp4,
            rows,
            cols: k,
        };
        let matrices: Vec<MatrixShape> = features.iter().map(shape).collect();
        SkinnyPlan::choose(hardware, m, &matrices, output, InputForm::Plain(layout))
    }

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
                let hardware = hardware(divisible, 132, 227 << 10);
                let plan = |layout: Layout| {
                    let output = output.applied().map_or(output, |glu| layout.glu(glu));
                    choose(&hardware, m, k, features, output, layout)
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
        let gb10 = hardware(true, 48, 99 << 10);
        let at_most_99_kb = |k, features: &[usize], output| {
            choose(&gb10, 1, k, features, output, Layout::RowMajor).is_some()
        };
        assert!(at_most_99_kb(9728, &[2560], Output::Add));
        assert!(!at_most_99_kb(1 << 20, &[2560], Output::Add));
        // Gate and up of one row, which has the longest rings, for the widest common models.
        let swiglu = Output::Glu(Glu::default());
        assert!(at_most_99_kb(8192, &[28_672, 28_672], swiglu));
    }
}
