//! The end of a mixture of experts: the weighted sum of a row's experts, which is added to the residual stream.

use super::driver::{DeviceBuffer, Gpu, Launch, Planned};
use super::elementwise::{NextArgument, NextNorm, NextRows, RESIDUAL_THREADS};
use super::experts::ExpertScratch;
use super::kernel::kernels;
use super::linear::{CHUNK_K, Layout};
use super::routing::Routing;
use crate::base::Result;
use crate::format::nvfp4::BLOCK;

/// Threads of a warp.
const WARP: usize = 32;

kernels! {
    /// Sums the experts of a row, by one CTA or by a cluster.
    enum Sum(SumArguments) {
        ExpertsSum {
            Row = "experts_sum",
            Cluster = "experts_sum_cluster",
        }
    }

    /// Sums the experts of a row beside a dense MLP.
    enum SumBeside(SumBesideArguments) {
        ExpertsSumBeside { Rows = "experts_sum_beside" }
    }
}

/// The output of the shared expert, which serves all rows.
#[derive(Clone, Copy)]
pub struct SharedExpert<'a> {
    /// f32 `[rows, hidden]`.
    pub made: &'a DeviceBuffer,
    /// Whether it is multiplied by the sigmoid of the gate whose logit is beside those of the experts
    /// ([`router_logits`](super::router::router_logits)).
    pub gated: bool,
}

#[repr(C)]
struct SumArguments {
    outputs: u64,
    places: u64,
    weights: u64,
    shared: u64,
    gate: u64,
    x: u64,
    next: NextArgument,
    per_token: i32,
    gate_stride: i32,
}

/// Elements of a piece of a row, which a thread takes.
const PIECE: usize = 8;
/// Most threads of a CTA that sums part of a row, and most such CTAs in a cluster.
const PART_THREADS: usize = 128;
const MOST_PARTS: usize = 8;
/// CTAs for each multiprocessor up to which a row is divided into more parts.
const PARTS_TOGETHER: usize = 2;
/// Shared memory of a CTA that sums experts: a sum of squares for each of its warps, at most 32.
const SUMS_BYTES: u32 = 32 * 4;

/// The launch that sums the experts of `rows` rows of `pieces` pieces each.
fn summing(gpu: &Gpu, rows: usize, pieces: usize) -> Planned<Sum> {
    let divided = |parts: usize| pieces.div_ceil(parts).next_multiple_of(WARP);
    let (kernel, threads, parts) = match gpu.arch().0 >= 9 {
        true => {
            let busy = PARTS_TOGETHER * gpu.multiprocessors() / rows.max(1);
            let parts = busy.clamp(pieces.div_ceil(PART_THREADS), MOST_PARTS);
            let threads = divided(parts);
            (Sum::Cluster, threads, pieces.div_ceil(threads))
        }
        false => (Sum::Row, divided(1), 1),
    };
    let launch = Launch {
        shared: SUMS_BYTES,
        cluster: parts as u32,
        ..Launch::new([rows as u32, 1, parts as u32], threads as u32)
    };
    launch.of(kernel)
}

/// Adds the weighted outputs of the experts, and the output of the shared expert, to f32 rows `x` `[rows, hidden]`. Then normalizes the
/// rows if a norm follows. Follows [`experts_down`](super::experts::experts_down) directly: the kernel reads all other operands before that one has
/// ended.
pub fn sum_experts(
    gpu: &Gpu,
    routing: &Routing,
    shared: Option<SharedExpert<'_>>,
    eps: f32,
    rows: usize,
    hidden: usize,
    x: &DeviceBuffer,
    next: Option<NextNorm<'_>>,
    scratch: &ExpertScratch,
) -> Result<()> {
    scratch.check(routing, rows)?;
    x.holds("rows", &[rows, hidden, 4])?;
    let pairs = rows * routing.per_token;
    scratch
        .made
        .holds("products of experts", &[pairs, hidden, 4])?;
    if let Some(shared) = shared {
        shared.made.holds("rows", &[rows, hidden, 4])?;
    }
    let gate = scratch.logits.address() + (routing.experts * 4) as u64;
    let arguments = SumArguments {
        outputs: scratch.made.address(),
        places: scratch.places.address(),
        weights: scratch.weights.address(),
        shared: shared.map_or(0, |s| s.made.address()),
        gate: if shared.is_some_and(|s| s.gated) {
            gate
        } else {
            0
        },
        x: x.address(),
        next: NextArgument::new(next.map(NextRows::Normalized), rows, hidden, eps)?,
        per_token: routing.per_token as i32,
        gate_stride: (routing.experts + 1) as i32,
    };
    // The padding of normalized rows is stored too.
    let padded = match next.map(|next| next.layout) {
        Some(Layout::FragmentMajor) => hidden.next_multiple_of(CHUNK_K),
        Some(Layout::RowMajor) | None => hidden.next_multiple_of(2 * BLOCK),
    };
    // SAFETY: sizes were checked.
    unsafe { summing(gpu, rows, padded / PIECE).run(gpu, &arguments) }
}

/// The end of a mixture beside a dense MLP: the output of the MLP, and the weights of the norms, f32 `[hidden]`.
#[derive(Clone, Copy)]
pub struct BesideExperts<'a> {
    /// The output of the dense MLP, f32 `[rows, hidden]`.
    pub dense: &'a DeviceBuffer,
    /// The norm of the experts' sum.
    pub experts_norm: &'a DeviceBuffer,
    /// The norm of the dense MLP's output.
    pub dense_norm: &'a DeviceBuffer,
    /// The norm of both together.
    pub post_norm: &'a DeviceBuffer,
    /// The factor of the residual stream after the addition, one f32; 1 if `None`.
    pub scale: Option<&'a DeviceBuffer>,
}

#[repr(C)]
struct SumBesideArguments {
    outputs: u64,
    places: u64,
    weights: u64,
    dense: u64,
    experts_norm: u64,
    dense_norm: u64,
    post_norm: u64,
    scale: u64,
    x: u64,
    next: NextArgument,
    per_token: i32,
}

/// `x = (x + norm(norm(weighted sum of experts) + norm(dense))) * scale` for f32 rows `x` `[rows, hidden]`. Then normalizes the rows if a
/// norm follows.
pub fn sum_experts_beside(
    gpu: &Gpu,
    routing: &Routing,
    beside: BesideExperts<'_>,
    eps: f32,
    rows: usize,
    hidden: usize,
    x: &DeviceBuffer,
    next: Option<NextNorm<'_>>,
    scratch: &ExpertScratch,
) -> Result<()> {
    scratch.check(routing, rows)?;
    x.holds("rows", &[rows, hidden, 4])?;
    beside.dense.holds("rows", &[rows, hidden, 4])?;
    let pairs = rows * routing.per_token;
    scratch
        .made
        .holds("products of experts", &[pairs, hidden, 4])?;
    for norm in [beside.experts_norm, beside.dense_norm, beside.post_norm] {
        norm.holds("a norm", &[hidden, 4])?;
    }
    if let Some(scale) = beside.scale {
        scale.holds("the factor of a residual stream", &[4])?;
    }
    let arguments = SumBesideArguments {
        outputs: scratch.made.address(),
        places: scratch.places.address(),
        weights: scratch.weights.address(),
        dense: beside.dense.address(),
        experts_norm: beside.experts_norm.address(),
        dense_norm: beside.dense_norm.address(),
        post_norm: beside.post_norm.address(),
        scale: beside.scale.map_or(0, DeviceBuffer::address),
        x: x.address(),
        next: NextArgument::new(next.map(NextRows::Normalized), rows, hidden, eps)?,
        per_token: routing.per_token as i32,
    };
    let launch = Launch::new([rows as u32, 1, 1], RESIDUAL_THREADS);
    // SAFETY: sizes were checked.
    unsafe { launch.of(SumBeside::Rows).run(gpu, &arguments) }
}
