//! Decode attention: one new token for each of several sequences, by a kernel that a plan chooses.

use std::fmt;
use std::marker::PhantomData;

use super::head_kernel::{HeadKernel, head_kernels, one, sizes};
use super::ring::{BLOCK_HEADS, Ring};
use super::split_kv::{MOST_SPLITS, SPLIT_PAGES, SplitKv, SplitKvWorkspace, blocks};
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, Planned};
use crate::cuda::heads::{CachedPages, DecodeShape, HeadOptions, Heads, PAGE, Pages, RowArgument};
use crate::cuda::linear::{HALF_SM_ROWS, Hardware, Layout};
use crate::cuda::units::Unit;
use crate::tensor::KvType;

/// Positions for which another split pays off, while there are few splits.
const SPLIT: usize = 128;
/// The most splits that count as few.
const FEW_SPLITS: usize = 8;
/// Positions for which another split pays off beyond [`FEW_SPLITS`].
const LONG_SPLIT: usize = 512;
/// The longest sequence, in positions, that a two-CTA cluster serves on devices with clusters.
const CLUSTER_POSITIONS: usize = 512;

head_kernels! { DECODE(DecodeArguments):
    AttentionDecode, Some(Ring::Four), "attention_decode_" [32 64 128] "_ring4";
    AttentionDecode, Some(Ring::Two), "attention_decode_" [32 64 128] "_ring2";
    AttentionDecode, Some(Ring::One), "attention_decode_" [32 64 128] "_ring1";
    AttentionDecode, Some(Ring::Cluster), "attention_decode_" [32 64 128] "_cluster";
    AttentionDecodeF8, Some(Ring::Four), "attention_decode_" [32 64 128] "_f8_ring8";
    AttentionDecodeF8, Some(Ring::Two), "attention_decode_" [32 64 128] "_f8_ring4";
    AttentionDecodeF8, Some(Ring::One), "attention_decode_" [32 64 128] "_f8_ring2";
    AttentionDecodeF8, Some(Ring::Cluster), "attention_decode_" [32 64 128] "_f8_cluster";
    AttentionDecodeLimited, Some(Ring::Four), "attention_decode_" [32 64 128 192 256] "_limited_ring4";
    AttentionDecodeLimited, Some(Ring::Two), "attention_decode_" [32 64 128 192 256] "_limited_ring2";
    AttentionDecodeLimited, Some(Ring::One), "attention_decode_" [32 64 128 192 256] "_limited_ring1";
    AttentionDecodeWide, Some(Ring::Pair), "attention_decode_" [256] "_rotary64_pair";
    AttentionDecodeWide, Some(Ring::Two), "attention_decode_" [256] "_rotary64_ring2";
    AttentionDecodeWide, Some(Ring::One), "attention_decode_" [256] "_rotary64_ring1";
    AttentionDecodeWidest, Some(Ring::Two), "attention_decode_" [512] "_limited_ring2";
    AttentionDecodeWidest, Some(Ring::One), "attention_decode_" [512] "_limited_ring1";
    AttentionDecodeGeneral, Some(Ring::Four), "attention_decode_" [32 64 80 96 128 192 256] "_general_ring4";
    AttentionDecodeGeneral, Some(Ring::Two), "attention_decode_" [32 64 80 96 128 192 256] "_general_ring2";
    AttentionDecodeGeneral, Some(Ring::One), "attention_decode_" [32 64 80 96 128 192 256] "_general_ring1";
}
head_kernels! { DECODE_FIXED(DecodeArguments):
    AttentionDecodeFixed, Some(Ring::Two), "attention_decode_" [32 64 128] "_fixed_ring2";
    AttentionDecodeFixed, Some(Ring::One), "attention_decode_" [32 64 128] "_fixed_ring1";
    AttentionDecodeFixedF8, Some(Ring::Two), "attention_decode_" [32 64 128] "_f8_fixed_ring2";
    AttentionDecodeFixedF8, Some(Ring::One), "attention_decode_" [32 64 128] "_f8_fixed_ring1";
    AttentionDecodeFixedGeneral, Some(Ring::Two), "attention_decode_" [32 64 80 96 128 192 256 512] "_general_fixed_ring2";
    AttentionDecodeFixedGeneral, Some(Ring::One), "attention_decode_" [32 64 80 96 128 192 256 512] "_general_fixed_ring1";
}
/// The kernels of this file, and the bytes of their arguments.
pub(super) fn arguments() -> impl Iterator<Item = (&'static str, usize)> {
    sizes(DECODE).chain(sizes(DECODE_FIXED))
}

/// The units with fixed splits that take the place of a decode unit and of a prefill unit, for the same heads.
pub const fn fixed_attention_units(decode: Unit) -> [Unit; 2] {
    match decode {
        Unit::AttentionDecode => [Unit::AttentionDecodeFixed, Unit::AttentionRows],
        Unit::AttentionDecodeF8 => [Unit::AttentionDecodeFixedF8, Unit::AttentionRowsF8],
        _ => [Unit::AttentionDecodeFixedGeneral, Unit::AttentionRows],
    }
}

#[repr(C)]
pub(super) struct DecodeArguments {
    qkv: u64,
    q_norm: u64,
    k_norm: u64,
    sinks: u64,
    positions: u64,
    out: u64,
    partial: u64,
    arrived: u64,
    head: HeadOptions,
    row: RowArgument,
    pages: Pages,
    group: i32,
    scale: f32,
    cap: f32,
    window: i32,
    fragment_major: i32,
    stored: i32,
    split_pages: i32,
}

/// Shared memory in which the warps of a CTA with fixed splits exchange the scores and probabilities of a page.
const fn page_exchange(kv: KvType) -> usize {
    let probabilities = PAGE * BLOCK_HEADS * 2;
    let copies = match kv {
        // With the scales of values, and without.
        KvType::F8 => 2,
        KvType::F16 | KvType::F32 => 1,
    };
    PAGE / 16 * BLOCK_HEADS * 4 + copies * probabilities
}

/// How the decode kernel attends: the kernel, its launch, and the division of the cached positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DecodePlan {
    planned: Planned<HeadKernel<DecodeArguments>>,
    division: SplitKv,
}

impl fmt::Display for DecodePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.planned.fmt(f)
    }
}

impl DecodePlan {
    /// Keeps the device busy with `sequences` sequences that see up to `positions` positions each.
    pub fn choose(
        hardware: &Hardware,
        shape: DecodeShape,
        sequences: usize,
        positions: usize,
    ) -> Result<DecodePlan> {
        let division = match hardware.deterministic {
            true => SplitKv::fixed(positions),
            false => division(hardware, shape, sequences, positions),
        };
        DecodePlan::divided(hardware, shape, sequences, division)
    }

    /// Divides the positions of each of `sequences` sequences in a given way.
    pub fn divided(
        hardware: &Hardware,
        shape: DecodeShape,
        sequences: usize,
        division: SplitKv,
    ) -> Result<DecodePlan> {
        let DecodeShape { dim, kv, .. } = shape;
        let (each, splits) = (blocks(shape.heads, shape.kv_heads), division.splits());
        if !(1..=MOST_SPLITS).contains(&splits) {
            bail!(
                Internal,
                "attention in {splits} splits; there are 1 to {MOST_SPLITS}"
            );
        }
        let all = each * sequences;
        // The variant, CTAs of a cluster, and shared memory beside the ring.
        let (ring, cluster, beside) = match division {
            SplitKv::Splits(_) => {
                let ring = Ring::of_unit(hardware, shape.unit, all, dim, splits);
                (ring, 1, 0)
            }
            SplitKv::Fixed(_) => {
                let ring = Ring::of(hardware, all, dim).one_at_a_time();
                (ring, 1, page_exchange(kv))
            }
            SplitKv::Cluster if !hardware.has_clusters() => {
                bail!(Internal, "two-CTA clusters are for Hopper and later")
            }
            SplitKv::Cluster => {
                let exchanged = splits * BLOCK_HEADS * (dim + 2) * 4;
                (Ring::Cluster, splits, exchanged)
            }
        };
        let (kernels, unit) = match division {
            SplitKv::Fixed(_) => (DECODE_FIXED, fixed_attention_units(shape.unit)[0]),
            SplitKv::Splits(_) | SplitKv::Cluster => (DECODE, shape.unit),
        };
        let kernel = one(kernels, dim, |k| k.unit == unit && k.ring == Some(ring))?;
        let launch = Launch {
            shared: (ring.shared(dim, kv) + beside) as u32,
            cluster: cluster as u32,
            ..Launch::new(
                [each as u32, sequences as u32, splits as u32],
                ring.threads(),
            )
        };
        Ok(DecodePlan {
            planned: launch.of(kernel),
            division,
        })
    }

    /// The number of sequences, each with one row.
    fn sequences(&self) -> usize {
        self.planned.launch.grid[1] as usize
    }

    /// Fails for other heads than those that it was made for.
    fn check(&self, heads: &Heads<'_>, kv: KvType) -> Result<()> {
        let Planned { kernel, launch } = self.planned;
        let [unit, ..] = heads.units(kv);
        let unit = match self.division {
            SplitKv::Fixed(_) => fixed_attention_units(unit)[0],
            SplitKv::Splits(_) | SplitKv::Cluster => unit,
        };
        let blocks = blocks(heads.shape.heads, heads.shape.kv_heads);
        if (kernel.unit, kernel.dim) != (unit, heads.shape.dim) || launch.grid[0] as usize != blocks
        {
            bail!(
                Internal,
                "attention planned as {self}, of {} query and {} key/value heads of {}",
                heads.shape.heads,
                heads.shape.kv_heads,
                heads.shape.dim
            );
        }
        Ok(())
    }
}

/// The division that keeps the device busy with `sequences` sequences that see up to `positions` positions each.
fn division(
    hardware: &Hardware,
    shape: DecodeShape,
    sequences: usize,
    positions: usize,
) -> SplitKv {
    let DecodeShape { dim, unit, .. } = shape;
    let blocks = blocks(shape.heads, shape.kv_heads) * sequences;
    let ring = Ring::of(hardware, blocks, dim);
    // A GEMM of more than HALF_SM_ROWS rows leaves no shared memory for a long ring, so the ring could only be filled after it ends.
    // With fewer rows clusters are slower.
    if ring == Ring::Four
        && hardware.arch == (9, 0)
        && sequences > HALF_SM_ROWS
        && matches!(unit, Unit::AttentionDecode | Unit::AttentionDecodeF8)
        && positions <= CLUSTER_POSITIONS
    {
        return SplitKv::Cluster;
    }
    let splits_of = |length: usize| positions.div_ceil(length).next_power_of_two();
    // A position of a wide head is as much to read as several positions of a narrow one.
    let width = dim.div_ceil(128);
    let few = splits_of(SPLIT / width).min(FEW_SPLITS * width);
    let useful = few.max(splits_of(LONG_SPLIT / width));
    let busy = ring.together() * hardware.multiprocessors / blocks;
    let splits = useful.min(busy).clamp(1, MOST_SPLITS);
    // One CTA reads a few positions sooner than several CTAs combine their results.
    let short = if splits < 4 { 512 } else { 320 } / width;
    SplitKv::Splits(if positions <= short { 1 } else { splits })
}

/// The rows of [`decode`], one for each sequence of a plan.
#[derive(Clone, Copy)]
pub struct DecodedRows<'a> {
    /// f32 `[sequences, row dim]`, with the heads of [`Heads::row`].
    pub qkv: &'a DeviceBuffer,
    /// The position of each token, i32 `[sequences]`; blocks must exist up to there.
    pub positions: &'a DeviceBuffer,
    /// Whether [`store_rows`](crate::cuda::store_rows) has stored the keys and values of all rows. Several may then be consecutive tokens of one
    /// sequence, whose blocks the table lists for each of them.
    pub stored: bool,
}

/// Decode attention: one new token for each sequence of `plan`, whose keys and values it also stores, if the layer has any and they are not
/// stored. Writes f16 `out` `[sequences, heads dim]` in the given layout. The division changes the result by rounding only.
pub fn decode(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    rows: DecodedRows<'_>,
    plan: &DecodePlan,
    workspace: &SplitKvWorkspace,
    out: &DeviceBuffer,
    layout: Layout,
) -> Result<()> {
    let DecodedRows {
        qkv,
        positions,
        stored,
    } = rows;
    heads.check_cache(cache)?;
    plan.check(heads, cache.shape.kind)?;
    let (sequences, shape) = (plan.sequences(), &heads.shape);
    let blocks = blocks(shape.heads, shape.kv_heads);
    qkv.holds("rows of heads", &[sequences, heads.row_width(), 4])?;
    positions.holds("positions", &[sequences, 4])?;
    let elements = layout.elements(sequences, shape.heads * shape.dim);
    out.holds("the output of attention", &[elements, 2])?;
    workspace
        .arrived
        .holds("counters of splits", &[sequences, blocks, 4])?;
    let (q_norm, k_norm) = heads.norms();
    let arguments = DecodeArguments {
        qkv: qkv.address(),
        q_norm,
        k_norm,
        sinks: heads.sinks()?,
        positions: positions.address(),
        out: out.address(),
        partial: workspace.partial.address(),
        arrived: workspace.arrived.address(),
        head: heads.options()?,
        row: heads.row_argument(),
        pages: cache.argument(sequences, 0..sequences)?,
        group: (shape.heads / shape.kv_heads) as i32,
        scale: heads.scale_log2(),
        cap: heads.cap_log2(),
        window: heads.window()?,
        fragment_major: i32::from(layout == Layout::FragmentMajor),
        stored: i32::from(stored),
        split_pages: match plan.division {
            SplitKv::Fixed(_) => SPLIT_PAGES as i32,
            SplitKv::Splits(_) | SplitKv::Cluster => 0,
        },
    };
    // SAFETY: sizes were checked; the caller vouches for blocks and positions.
    unsafe { plan.planned.run(gpu, &arguments) }
}
