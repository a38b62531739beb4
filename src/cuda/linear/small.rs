//! The fused kernel: products of up to 16 rows with NVFP4 weights, with what becomes of them after, and a norm around them.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::deferred::{DeferredNorm, NormArgument};
use super::input::Input;
use super::limits::{FEW, SMALL};
use super::matrix::{Biased, CHUNK_K, MatrixArgument, matrix_arguments};
use super::output::{GROUP_ROWS, Layout, Output};
use super::residual::ResidualArgument;
use super::tile::{Tile, WARPS};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, int};
use crate::cuda::units::Unit;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[("linear_", size_of::<SmallArguments>())];

#[repr(C)]
struct SmallArguments {
    x: u64,
    out: u64,
    matrix: [MatrixArgument; 3],
    tiles: [i32; 2],
    each: i32,
    more: i32,
    part: [PartArgument; PARTS],
    chunks: i32,
    m: i32,
    k: i32,
    out_stride: i32,
    out_scale: f32,
    activation: i32,
    norm: NormArgument,
    residual: ResidualArgument,
}

/// A part of K: its first step, how many there are, and 2^32 divided by them, rounded up.
#[repr(C)]
struct PartArgument {
    first: i32,
    steps: i32,
    inverse: u32,
}

/// Parts of K at most.
const PARTS: usize = 2;
/// Sums that a warp has of a tile, for each row of activations.
const SUMS: usize = 16;
/// Rows of activations that kernels of which blocks may form clusters take at most, unless they are ordered.
const DIVISIBLE: usize = 8;
/// Rows of activations that may be ordered: more than tiles of two halves of K are for.
const ORDERED: RangeInclusive<usize> = FEW + 1..=SMALL;
/// What the sums of a block's warps may take.
const SUMS_BYTES: usize = 48 << 10;
/// What follows activations in shared memory: barriers, and factors of a norm.
const BEHIND: usize = 128 + WARPS * 4;

/// How the fused kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// What a tile is.
    pub tile: Tile,
    /// Clusters of blocks, which divide the tiles evenly.
    pub clusters: usize,
    /// Blocks of a cluster, which have a part of K each.
    pub parts: usize,
    /// Rows of activations in one launch.
    pub rows: usize,
    /// Shared memory that a block needs for that many rows.
    pub shared: usize,
}

impl Plan {
    /// The plan for `m` rows that lie like this and matrices of `features` output features and K = `k`, on a device with this many
    /// multiprocessors and this much shared memory; `None` where a single row does not fit, or of ordered rows not all of them.
    ///
    /// As many blocks as multiprocessors, or several times as many where the sums of a block's tiles would need much memory;
    /// all rows at once, or as many as fit. `divisible` says that two blocks may share tiles, as those of Hopper and later do:
    /// pairs divide few tiles more evenly, but cost as much as a step of each warp.
    pub fn choose(
        m: usize,
        k: usize,
        features: &[usize],
        output: Output,
        layout: Layout,
        divisible: bool,
        multiprocessors: usize,
        shared: usize,
    ) -> Option<Plan> {
        let ordered = layout == Layout::Ordered;
        if ordered && !ORDERED.contains(&m) {
            return None;
        }
        let tile = Tile::of(output, m);
        let tiles = tile.counts(features).into_iter().max()?;
        let steps = k.div_ceil(tile.step());
        let mut rows = m.min(SMALL);
        loop {
            let most_tiles = (SUMS_BYTES / (rows * SUMS * 4))
                .saturating_sub(WARPS)
                .max(1);
            let waves = tiles.div_ceil(multiprocessors).div_ceil(most_tiles);
            let plan = |clusters: usize, parts: usize| {
                let each = tiles.div_ceil(clusters);
                let held = match layout {
                    Layout::Ordered => rows.next_multiple_of(GROUP_ROWS),
                    Layout::Rows => rows,
                };
                let x = held * steps.div_ceil(parts) * tile.step() * 2;
                let sums = rows * (each + WARPS) * SUMS * 4;
                // From each other, blocks of a pair get as many sums as they have outputs.
                let sent = match parts {
                    1 => 0,
                    _ => (each * tile.room(rows)).div_ceil(parts) * tile.features() * 4,
                };
                Plan {
                    tile,
                    clusters,
                    parts,
                    rows,
                    shared: tile.rings(rows) + x + BEHIND + sent + sums,
                }
            };
            let alone = plan(tiles.min(multiprocessors * waves), 1);
            let paired = plan(tiles.min((multiprocessors / 2).max(1)), 2);
            let steps_of = |plan: &Plan| tiles.div_ceil(plan.clusters) * steps.div_ceil(plan.parts);
            let pays = divisible
                && tile != Tile::Pair
                && (rows <= DIVISIBLE || ordered)
                && steps_of(&paired) + WARPS < steps_of(&alone);
            let best = if pays { paired } else { alone };
            if best.shared <= shared {
                return Some(best);
            }
            if rows == 1 || ordered {
                return None;
            }
            rows = rows.div_ceil(2);
        }
    }
}

/// The fused kernel with a plan of the caller's. `next` is the norm that follows what is added to `out`, where that is deferred.
pub fn small(
    gpu: &Arc<Gpu>,
    input: Input<'_>,
    m: usize,
    matrices: &[Biased<'_>],
    output: Output,
    out: &DeviceBuffer,
    stride: usize,
    plan: Plan,
    next: Option<&DeferredNorm<'_>>,
) -> Result<()> {
    let k = matrices[0].0.cols;
    // The kernels count outputs, and activations, in 32 bits.
    int("outputs of a product", plan.rows * stride)?;
    int("activations", plan.rows * k)?;
    let mut matrix = matrix_arguments(matrices)?;
    let (x, norm) = match (&input, next) {
        (Input::Plain(x, factor) | Input::Ordered(x, factor), next) => {
            matrix.iter_mut().for_each(|w| w.global *= factor);
            (Some(*x), next)
        }
        (Input::Deferred(norm, _), None) => (Some(norm.rows()), Some(norm)),
        (Input::Residual(_), None) => (None, None),
        (Input::Deferred(..) | Input::Residual(_), Some(_)) => {
            bail!(Internal, "a product between two norms that are deferred")
        }
    };
    let misplaced = match next {
        Some(_) => output != Output::Add,
        None => norm.is_some() && matches!(output, Output::Add | Output::F16),
    };
    if norm.is_some() && (misplaced || plan.rows < m) {
        bail!(
            Internal,
            "no kernel defers a norm for {output:?} of {m} rows, {} at a time",
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
    let part = |i: usize| {
        let first = steps * i / plan.parts;
        let count = steps * (i + 1) / plan.parts - first;
        // Steps of a block times those of a tile are far from 2^32, since a row fits shared memory; the kernel divides by 1 itself.
        PartArgument {
            first: first as i32,
            steps: count as i32,
            inverse: (u32::MAX / count.max(1) as u32).wrapping_add(1),
        }
    };
    let kind = match output {
        Output::F32 => "f32",
        Output::F16 => "f16",
        Output::Add => "add",
        Output::Glu(_) | Output::GluOrdered(_) => "glu",
    };
    if output.applied().is_some() && output.layout() != input.layout() {
        bail!(
            Internal,
            "the fused kernel leaves what a gated activation makes in the layout of its input"
        );
    }
    let glu = output.applied().unwrap_or_default();
    for first in (0..m).step_by(plan.rows) {
        let rows = plan.rows.min(m - first);
        let how = match (&input, input.layout()) {
            (Input::Residual(_), _) => "_residual",
            (_, Layout::Rows) => "",
            (_, Layout::Ordered) => "_ordered",
        };
        let name = format!("linear_{kind}{how}_{}", plan.tile.room(rows));
        let arguments = SmallArguments {
            x: x.map_or(0, |x| x.address() + (first * k * 2) as u64),
            out: out.address() + (first * stride * output.bytes()) as u64,
            matrix,
            tiles: [up_to(0)?, up_to(1)?],
            each: (tiles / plan.clusters) as i32,
            more: (tiles % plan.clusters) as i32,
            part: [part(0), part(plan.parts - 1)],
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
            // A multiprocessor holds two blocks at most, of which one is the next kernel's, which fills its rings while the
            // other computes. Were there room for three, blocks that start early would crowd where an earlier kernel's have
            // ended, and leave other multiprocessors without any. Activations of more rows leave no room for the next
            // kernel's, and then two would crowd, too.
            shared: plan
                .shared
                .max(gpu.shared_limit() / if rows <= 4 { 3 } else { 2 } + 1024)
                as u32,
            cluster: plan.parts as u32,
            ..Launch::new(
                [plan.clusters as u32, 1, plan.parts as u32],
                (32 * WARPS) as u32,
            )
        };
        // SAFETY: the struct is the kernel's; sizes were checked, and buffers outlive work on their stream.
        unsafe { launch.run(gpu, Unit::LinearSmall, &name, &arguments)? };
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
            for (m, divisible) in (1..=SMALL).flat_map(|m| [(m, false), (m, true)]) {
                let plan = |layout| {
                    Plan::choose(m, k, features, output, layout, divisible, 132, 227 << 10)
                };
                let ordered = plan(Layout::Ordered);
                // 16 rows of 9,728 elements fit a pair of blocks.
                let fits = m <= 8 || k < 9728 || divisible;
                assert_eq!(
                    ordered.is_some(),
                    ORDERED.contains(&m) && fits,
                    "{m} of {k}"
                );
                let plan = plan(Layout::Rows).unwrap();
                if let Some(ordered) = ordered {
                    assert!(ordered.shared >= plan.shared && ordered.shared <= 227 << 10);
                    assert_eq!(ordered.rows, m);
                }
                assert!(plan.shared <= 227 << 10, "{plan:?}");
                assert!(plan.rows >= 1 && plan.rows <= m, "{plan:?}");
                assert!(
                    plan.clusters.is_multiple_of(132 / plan.parts)
                        || plan.clusters < 132 / plan.parts,
                    "{plan:?}"
                );
                assert!(plan.tile != Tile::Split || m <= 4, "{plan:?}");
                // Three tiles of 9,728 elements for some blocks and two for others, or one and two, are worth dividing.
                let uneven = k == 9728 && plan.rows <= DIVISIBLE;
                assert_eq!(plan.parts == 2, divisible && uneven, "{plan:?}");
            }
        }
        // GB10: 48 multiprocessors and 99 KB.
        let at_most_99_kb =
            |k| Plan::choose(1, k, &[2560], Output::Add, Layout::Rows, true, 48, 99 << 10);
        assert!(at_most_99_kb(9728).is_some());
        assert!(at_most_99_kb(1 << 20).is_none());
        // Gate and up of one row, whose rings are the longest, of the widest models that are common.
        let swiglu = Output::Glu(Glu::default());
        let widest = [28_672, 28_672];
        assert!(Plan::choose(1, 8192, &widest, swiglu, Layout::Rows, true, 48, 99 << 10).is_some());
    }
}
