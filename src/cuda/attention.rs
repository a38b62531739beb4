//! Attention over cached keys and values in blocks: one new token for each of several sequences, or many rows of one.

use std::marker::PhantomData;
use std::sync::Arc;

use super::driver::{DeviceBuffer, Gpu, Kernel, Launch, int};
use super::heads::{
    CachedPages, HeadOptions, Heads, PAGE, Pages, RowArgument, RowHeads, rotates_whole,
};
use super::linear::{HALF_SM_ROWS, Layout};
use super::units::Unit;
use crate::base::Result;
use crate::base::error::{bail, err};
use crate::base::memory::Tag;
use crate::tensor::{AttentionShape, KvType};

/// Query heads that one CTA of the decode kernel serves.
const BLOCK_HEADS: usize = 8;
/// The widest heads that kernels take by whole pages; wider ones are taken by half pages.
const WHOLE_PAGE_DIM: usize = 256;
/// Positions for which another split pays off, while there are few splits.
const SPLIT: usize = 128;
/// The most splits that count as few.
const FEW_SPLITS: usize = 8;
/// Positions for which another split pays off beyond [`FEW_SPLITS`].
const LONG_SPLIT: usize = 512;
/// Upper limit of splits per sequence: one for each lane of the warp that combines them.
const MOST_SPLITS: usize = 32;
/// Least pages of a split of [`SplitKv::Fixed`]: few enough that a single sequence keeps a device busy, and enough that partial results are a few
/// percent of what a split reads.
const SPLIT_PAGES: usize = 4;
/// The longest sequence, in positions, that a two-CTA cluster serves on devices with clusters.
const CLUSTER_POSITIONS: usize = 512;

/// A kernel that is compiled for several sizes of heads.
struct HeadKernel<A> {
    unit: Unit,
    dim: usize,
    ring: Option<Ring>,
    name: &'static str,
    arguments: PhantomData<fn(A)>,
}

impl<A> Clone for HeadKernel<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for HeadKernel<A> {}

impl<A> Kernel for HeadKernel<A> {
    type Arguments = A;
    type Unit = Unit;

    fn unit(self) -> Unit {
        self.unit
    }

    fn name(self) -> &'static str {
        self.name
    }
}

/// Declares the kernels with one parameter type: for each unit and ring, the sizes of heads, and what comes in the name before and after
/// them.
macro_rules! head_kernels {
    ($all:ident($arguments:ty): $($unit:ident, $ring:expr, $start:literal [$($dim:literal)+] $end:literal;)+) => {
        const $all: &[HeadKernel<$arguments>] = &[$($(HeadKernel {
            unit: Unit::$unit,
            dim: $dim,
            ring: $ring,
            name: concat!($start, $dim, $end),
            arguments: PhantomData,
        },)+)+];
    };
}

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
head_kernels! { STORE_HEADS(StoreArguments):
    RopeStore, None, "rope_store_heads_" [32 64 128] "";
    RopeStoreF8, None, "rope_store_heads_" [32 64 128] "_f8";
    RopeStoreGeneral, None, "rope_store_heads_" [192 256 512] "";
    RopeStoreGeneral, None, "rope_store_heads_" [32 64 80 96 128 192 256] "_general";
}
head_kernels! { STORE_VALUES(StoreArguments):
    RopeStore, None, "rope_store_values_" [32 64 128] "";
    RopeStoreF8, None, "rope_store_values_" [32 64 128] "_f8";
    RopeStoreGeneral, None, "rope_store_values_" [80 96 192 256 512] "";
}
head_kernels! { STORE_ROWS(StoreRowsArguments):
    RopeStore, None, "rope_store_rows_" [32 64 128] "";
    RopeStoreF8, None, "rope_store_rows_" [32 64 128] "_f8";
    RopeStoreGeneral, None, "rope_store_rows_" [192 256] "";
    RopeStoreGeneral, None, "rope_store_rows_" [32 64 80 96 128 192 256] "_general";
}
head_kernels! { ROWS(PrefillArguments):
    AttentionRows, None, "attention_rows_" [80 96 128 192 256 512] "";
    AttentionRowsF8, None, "attention_rows_" [128] "_f8";
}
head_kernels! { ROWS_HALF(PrefillArguments):
    AttentionRows, None, "attention_rows_" [32 64 80 96 128] "_half";
    AttentionRowsF8, None, "attention_rows_" [32 64 128] "_f8_half";
}
head_kernels! { PREFILL(PrefillArguments):
    AttentionPrefill, None, "attention_prefill_" [32 64 128] "";
    AttentionPrefillF8, None, "attention_prefill_" [32 64 128] "_f8";
    AttentionPrefillWide, None, "attention_prefill_" [80 96 192 256] "";
    AttentionPrefillWidest, None, "attention_prefill_" [512] "";
}

/// The kernels of this file, and the bytes of their arguments.
pub(super) fn arguments() -> impl Iterator<Item = (&'static str, usize)> {
    fn sizes<A: 'static>(
        kernels: &'static [HeadKernel<A>],
    ) -> impl Iterator<Item = (&'static str, usize)> {
        kernels.iter().map(|kernel| (kernel.name, size_of::<A>()))
    }
    sizes(DECODE)
        .chain(sizes(DECODE_FIXED))
        .chain(sizes(STORE_HEADS))
        .chain(sizes(STORE_VALUES))
        .chain(sizes(STORE_ROWS))
        .chain(sizes(ROWS))
        .chain(sizes(ROWS_HALF))
        .chain(sizes(PREFILL))
}

/// The one of these kernels that `is` accepts.
fn one<A>(
    kernels: &[HeadKernel<A>],
    dim: usize,
    is: impl Fn(&HeadKernel<A>) -> bool,
) -> Result<HeadKernel<A>> {
    let found = kernels
        .iter()
        .find(|kernel| kernel.dim == dim && is(kernel));
    found
        .copied()
        .ok_or_else(|| err!(Internal, "no attention kernel for heads of {dim} elements"))
}

#[repr(C)]
struct DecodeArguments {
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

/// CTAs of the decode kernel per sequence without split-KV.
fn blocks(heads: usize, kv_heads: usize) -> usize {
    kv_heads * (heads / kv_heads).div_ceil(BLOCK_HEADS)
}

/// Positions of a page that the kernels take at a time, for heads of `dim` elements.
const fn stage_positions(dim: usize) -> usize {
    if dim > WHOLE_PAGE_DIM { PAGE / 2 } else { PAGE }
}

/// Bytes of a stage: one head's keys and values, and their scales.
const fn stage_bytes(dim: usize, kv: KvType) -> usize {
    2 * stage_positions(dim) * kv.vector_bytes(dim)
}

/// Shared memory of a CTA: the stages of its ring, and the state of the new token.
const fn decode_shared(ring: Ring, dim: usize, kv: KvType) -> usize {
    let stages = match kv {
        // Twice as many pages take about as many bytes.
        KvType::F8 => 2 * ring.pages(),
        KvType::F16 | KvType::F32 => ring.pages(),
    };
    stages * stage_bytes(dim, kv) + (BLOCK_HEADS + 2) * dim * 2 + 128
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

/// Warps of a CTA of a prompt; kernels with fixed splits have half of them where two CTAs fit a multiprocessor.
const PROMPT_WARPS: usize = 8;

/// Rows that one CTA of a prompt serves, for heads of `dim` elements, of which a warp has at most 256, or 128 with fixed splits.
const fn block_rows(dim: usize, fixed: bool, warps: usize) -> usize {
    let sharers = dim.div_ceil(if fixed { 128 } else { WHOLE_PAGE_DIM });
    warps / sharers * 16
}

/// A variant of the decode kernel, chosen by the number of CTAs without split-KV. Pages are those of f16; of keys and values in 8 bits a ring
/// has twice as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ring {
    /// For few CTAs: a ring of four pages, two of which are processed at a time.
    Four,
    /// For more CTAs: a ring of two pages, which leaves shared memory to CTAs of other kernels. Half pages of the widest heads.
    Two,
    /// For so many CTAs that several share a multiprocessor: a single page, or half page. Also for wide heads, for which a longer ring
    /// does not fit.
    One,
    /// `Two` with the two CTAs of a sequence in a cluster.
    Cluster,
    /// For few CTAs with few positions each, of heads for which a ring of four does not fit: a ring of two pages, both of which are
    /// processed at a time.
    Pair,
}

/// The units with fixed splits that take the place of a decode unit and of a prefill unit, for the same heads.
pub const fn fixed_attention_units(decode: Unit) -> [Unit; 2] {
    match decode {
        Unit::AttentionDecode => [Unit::AttentionDecodeFixed, Unit::AttentionRows],
        Unit::AttentionDecodeF8 => [Unit::AttentionDecodeFixedF8, Unit::AttentionRowsF8],
        _ => [Unit::AttentionDecodeFixedGeneral, Unit::AttentionRows],
    }
}

impl Ring {
    fn of(gpu: &Gpu, blocks: usize, dim: usize) -> Ring {
        let fits = |ring: Ring, dim| decode_shared(ring, dim, KvType::F16) <= gpu.shared_limit();
        let ring = if blocks > gpu.multiprocessors() || !fits(Ring::Four, 128) {
            Ring::One
        } else if 2 * blocks > gpu.multiprocessors() {
            Ring::Two
        } else {
            Ring::Four
        };
        // The ring must be shorter for wider heads to fit.
        let shorter = [ring, Ring::Two, Ring::One];
        let fitting = shorter
            .into_iter()
            .find(|&f| f.pages() <= ring.pages() && fits(f, dim));
        fitting.unwrap_or(Ring::One)
    }

    /// The variant of a unit for `blocks` CTAs in each of so many splits.
    fn of_unit(gpu: &Gpu, unit: Unit, blocks: usize, dim: usize, splits: usize) -> Ring {
        let is_few = 2 * blocks <= gpu.multiprocessors();
        match Ring::of(gpu, blocks, dim) {
            // A single split of so few CTAs is short: see [`SplitKv::of`].
            Ring::Two if unit == Unit::AttentionDecodeWide && is_few && splits == 1 => Ring::Pair,
            ring => ring,
        }
    }

    /// The variant that takes one page at a time: kernels with fixed splits have no others.
    const fn one_at_a_time(self) -> Ring {
        match self {
            Ring::One => Ring::One,
            Ring::Four | Ring::Two | Ring::Cluster | Ring::Pair => Ring::Two,
        }
    }

    /// CTAs that share a multiprocessor.
    const fn together(self) -> usize {
        match self {
            Ring::Four | Ring::Two | Ring::Cluster | Ring::Pair => 1,
            Ring::One => 4,
        }
    }

    /// Pages of the ring.
    const fn pages(self) -> usize {
        match self {
            Ring::Four => 4,
            Ring::Two | Ring::Cluster | Ring::Pair => 2,
            Ring::One => 1,
        }
    }

    const fn threads(self) -> u32 {
        match self {
            Ring::Four | Ring::Pair => 256,
            Ring::Two | Ring::One | Ring::Cluster => 128,
        }
    }
}

/// Split-KV: how the cached positions of each sequence are divided among CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitKv {
    /// 1 to 32 splits. Several splits exchange partial results through the workspace in global memory.
    Splits(usize),
    /// Two halves, one for each CTA of a two-CTA cluster.
    Cluster,
    /// Splits whose number follows from the positions that each sequence sees, at most this many: see [`SplitKv::fixed`].
    Fixed(usize),
}

impl SplitKv {
    /// Chooses the split that keeps the device busy with `sequences` sequences of up to `positions` positions each. `unit` decodes their
    /// heads.
    pub fn of(
        gpu: &Gpu,
        heads: usize,
        kv_heads: usize,
        dim: usize,
        unit: Unit,
        sequences: usize,
        positions: usize,
    ) -> SplitKv {
        let blocks = blocks(heads, kv_heads) * sequences;
        let ring = Ring::of(gpu, blocks, dim);
        // A GEMM of more than HALF_SM_ROWS rows leaves no shared memory for a long ring, so the ring could only be filled after it ends.
        // With fewer rows clusters are slower.
        if ring == Ring::Four
            && gpu.arch() == (9, 0)
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
        let busy = ring.together() * gpu.multiprocessors() / blocks;
        let splits = useful.min(busy).clamp(1, MOST_SPLITS);
        // One CTA reads a few positions sooner than several CTAs combine their results.
        let short = if splits < 4 { 512 } else { 320 } / width;
        SplitKv::Splits(if positions <= short { 1 } else { splits })
    }

    /// Splits of four pages, or longer ones where there would be more than 32, for sequences that see up to `positions` positions. The bits
    /// of a sequence's attention then depend on that sequence alone.
    pub fn fixed(positions: usize) -> SplitKv {
        SplitKv::Fixed(fixed_splits(positions))
    }

    const fn splits(self) -> usize {
        match self {
            SplitKv::Splits(splits) | SplitKv::Fixed(splits) => splits,
            SplitKv::Cluster => 2,
        }
    }
}

/// The most splits of [`SplitKv::fixed`] for such sequences.
fn fixed_splits(positions: usize) -> usize {
    // A window may begin inside a split.
    let splits = positions.div_ceil(PAGE * SPLIT_PAGES) + 1;
    splits.next_power_of_two().min(MOST_SPLITS)
}

/// Split-KV workspace: partial results, and counters of the CTAs that have arrived.
#[derive(Debug)]
pub struct SplitKvWorkspace {
    partial: DeviceBuffer,
    arrived: DeviceBuffer,
}

impl SplitKvWorkspace {
    /// Floats of partial results of a sequence, and CTAs that attend to it, for heads of this shape.
    pub fn sizes(heads: usize, kv_heads: usize, dim: usize) -> (usize, usize) {
        let blocks = blocks(heads, kv_heads);
        (blocks * MOST_SPLITS * BLOCK_HEADS * (dim + 2), blocks)
    }

    /// Bytes of partial results, and of counters, of `sequences` sequences with [`SplitKvWorkspace::sizes`].
    const fn bytes((floats, blocks): (usize, usize), sequences: usize) -> [usize; 2] {
        [sequences * floats * 4, sequences * blocks * 4]
    }

    /// Bytes of a workspace for `sequences` sequences with [`SplitKvWorkspace::sizes`].
    pub fn bytes_of(sizes: (usize, usize), sequences: usize) -> usize {
        Self::bytes(sizes, sequences).iter().sum()
    }

    /// Allocates a workspace for `sequences` sequences with [`SplitKvWorkspace::sizes`].
    pub fn new(
        gpu: &Arc<Gpu>,
        sizes: (usize, usize),
        sequences: usize,
    ) -> Result<SplitKvWorkspace> {
        let [partial, arrived] = Self::bytes(sizes, sequences);
        Ok(SplitKvWorkspace {
            partial: DeviceBuffer::uninit(gpu, Tag::DeviceScratch, partial)?,
            arrived: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, arrived)?,
        })
    }
}

/// Decode attention: one new token for each of `sequences` sequences, whose keys and values it also stores, if the layer has any. Reads
/// f32 `qkv` `[sequences, row dim]`, with the heads of [`Heads::row`], and writes f16 `out` `[sequences, heads dim]` in the given layout.
/// `positions` (i32) holds the position of each token; blocks must exist up to there. The split changes the result by rounding only.
pub fn decode(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    qkv: &DeviceBuffer,
    positions: &DeviceBuffer,
    sequences: usize,
    division: SplitKv,
    workspace: &SplitKvWorkspace,
    out: &DeviceBuffer,
    layout: Layout,
) -> Result<()> {
    let rows = DecodedRows {
        qkv,
        positions,
        count: sequences,
        stored: false,
    };
    decode_by(gpu, heads, cache, rows, division, workspace, out, layout)
}

/// Like [`decode`], with a row in the place of each sequence: several rows may be consecutive tokens of one sequence, whose blocks the table
/// then lists for each of them. [`store_rows`] must have stored the keys and values of all rows.
pub fn decode_stored(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    qkv: &DeviceBuffer,
    positions: &DeviceBuffer,
    rows: usize,
    division: SplitKv,
    workspace: &SplitKvWorkspace,
    out: &DeviceBuffer,
    layout: Layout,
) -> Result<()> {
    let rows = DecodedRows {
        qkv,
        positions,
        count: rows,
        stored: true,
    };
    decode_by(gpu, heads, cache, rows, division, workspace, out, layout)
}

/// The rows of [`decode`].
#[derive(Clone, Copy)]
struct DecodedRows<'a> {
    qkv: &'a DeviceBuffer,
    positions: &'a DeviceBuffer,
    count: usize,
    /// Whether their keys and values are stored already.
    stored: bool,
}

fn decode_by(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    rows: DecodedRows<'_>,
    division: SplitKv,
    workspace: &SplitKvWorkspace,
    out: &DeviceBuffer,
    layout: Layout,
) -> Result<()> {
    let DecodedRows {
        qkv,
        positions,
        count: sequences,
        stored,
    } = rows;
    heads.check_cache(cache)?;
    let width = heads.row_width();
    let group = heads.shape.heads / heads.shape.kv_heads;
    let blocks = blocks(heads.shape.heads, heads.shape.kv_heads);
    let splits = division.splits();
    if qkv.bytes() < sequences * width * 4
        || positions.bytes() < sequences * 4
        || out.bytes() < layout.elements(sequences, heads.shape.heads * heads.shape.dim) * 2
        || workspace.arrived.bytes() < sequences * blocks * 4
        || !(1..=MOST_SPLITS).contains(&splits)
    {
        bail!(
            Internal,
            "buffers of the decode kernel are too small for {sequences} sequences in {splits} splits"
        );
    }
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
        group: group as i32,
        scale: heads.scale_log2(),
        cap: heads.cap_log2(),
        window: heads.window()?,
        fragment_major: i32::from(layout == Layout::FragmentMajor),
        stored: i32::from(stored),
        split_pages: match division {
            SplitKv::Fixed(_) => SPLIT_PAGES as i32,
            SplitKv::Splits(_) | SplitKv::Cluster => 0,
        },
    };
    let kv = cache.shape.kind;
    let [unit, ..] = heads.units(kv);
    // The variant, CTAs of a cluster, and shared memory beside the ring.
    let (ring, cluster, beside) = match division {
        SplitKv::Splits(_) => {
            let (all, dim) = (blocks * sequences, heads.shape.dim);
            (Ring::of_unit(gpu, unit, all, dim, splits), 1, 0)
        }
        SplitKv::Fixed(_) => {
            let (all, dim) = (blocks * sequences, heads.shape.dim);
            let ring = Ring::of(gpu, all, dim).one_at_a_time();
            (ring, 1, page_exchange(kv))
        }
        SplitKv::Cluster if gpu.arch().0 < 9 => {
            bail!(Internal, "two-CTA clusters are for Hopper and later")
        }
        SplitKv::Cluster => (
            Ring::Cluster,
            splits,
            splits * BLOCK_HEADS * (heads.shape.dim + 2) * 4,
        ),
    };
    let launch = Launch {
        shared: (decode_shared(ring, heads.shape.dim, kv) + beside) as u32,
        cluster: cluster as u32,
        ..Launch::new(
            [blocks as u32, sequences as u32, splits as u32],
            ring.threads(),
        )
    };
    let (kernels, unit) = match division {
        SplitKv::Fixed(_) => (DECODE_FIXED, fixed_attention_units(unit)[0]),
        SplitKv::Splits(_) | SplitKv::Cluster => (DECODE, unit),
    };
    let kernel = one(kernels, heads.shape.dim, |k| {
        k.unit == unit && k.ring == Some(ring)
    })?;
    // SAFETY: sizes were checked; the caller vouches for blocks and positions.
    unsafe { launch.of(kernel).run(gpu, &arguments) }
}

#[repr(C)]
struct StoreArguments {
    qkv: u64,
    q_norm: u64,
    k_norm: u64,
    q: u64,
    head: HeadOptions,
    row: RowArgument,
    pages: Pages,
    heads: i32,
    rows: i32,
    first_position: i32,
    scale: f32,
}

/// Normalizes and rotates `rows` rows of one sequence from `first_position` on. Queries of f32 `qkv`, whose rows [`Heads::row`] describes,
/// go to f16 `q` `[rows, heads, dim]`, keys and values to the cache.
pub fn store(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    qkv: &DeviceBuffer,
    at: usize,
    rows: usize,
    first_position: usize,
    q: &DeviceBuffer,
) -> Result<()> {
    heads.check_cache(cache)?;
    let width = heads.row_width();
    if qkv.bytes() < (at + rows) * width * 4
        || q.bytes() < (at + rows) * heads.shape.heads * heads.shape.dim * 2
    {
        bail!(
            Internal,
            "buffers of the rotation are too small for {rows} rows"
        );
    }
    let (q_norm, k_norm) = heads.norms();
    let kv = cache.shape.kind;
    let [.., store] = heads.units(kv);
    let arguments = StoreArguments {
        qkv: qkv.address() + (at * width * 4) as u64,
        q_norm,
        k_norm,
        q: q.address() + (at * heads.shape.heads * heads.shape.dim * 2) as u64,
        head: heads.options()?,
        row: heads.row_argument(),
        pages: cache.argument(1, at..at + rows)?,
        heads: heads.shape.heads as i32,
        rows: int("rows", rows)?,
        first_position: int("the position", first_position)?,
        scale: heads.scale_log2(),
    };
    let own = heads.own_kv_heads();
    let by_head = Launch::new(
        [rows as u32, (heads.shape.heads + own).div_ceil(4) as u32, 1],
        128,
    );
    let groups = (first_position + rows).div_ceil(8) - first_position / 8;
    let by_value = Launch::new([groups as u32, own as u32, 1], heads.shape.dim as u32);
    let is_whole = rotates_whole(heads.shape.dim, heads.rotary_dim);
    let rotate = one(STORE_HEADS, heads.shape.dim, |k| {
        k.unit == store && k.name.ends_with("_general") != is_whole
    })?;
    // Values do not rotate: partial rotations have no kernel of their own.
    let values = one(STORE_VALUES, heads.shape.dim, |k| {
        (k.unit == Unit::RopeStoreF8) == (kv == KvType::F8)
    })?;
    // SAFETY: sizes were checked; the caller vouches for blocks.
    unsafe {
        by_head.of(rotate).run(gpu, &arguments)?;
        match own {
            0 => Ok(()),
            _ => by_value.of(values).run(gpu, &arguments),
        }
    }
}

#[repr(C)]
struct StoreRowsArguments {
    qkv: u64,
    k_norm: u64,
    positions: u64,
    head: HeadOptions,
    pages: Pages,
    heads: i32,
    before: i32,
}

/// Normalizes and rotates the keys of `rows` rows of f32 `qkv` `[rows, (heads + 2 kv_heads) dim]`, and stores keys and values in the cache.
/// The block table has a row for each. `positions` (i32) holds their positions; with `before`, the rows lie one position before these, and
/// at the first at least. Blocks must exist at these positions.
pub fn store_rows(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    qkv: &DeviceBuffer,
    positions: &DeviceBuffer,
    rows: usize,
    before: bool,
) -> Result<()> {
    heads.check_cache(cache)?;
    if heads.row != RowHeads::QueriesKeysValues || heads.value_norm {
        bail!(
            Unsupported,
            "several rows of a sequence at once in attention with {:?}, values normalized: {}; only rows of queries, keys and values as they are can be stored so",
            heads.row,
            heads.value_norm
        );
    }
    let AttentionShape {
        heads: q_heads,
        kv_heads,
        dim,
        ..
    } = heads.shape;
    let width = (q_heads + 2 * kv_heads) * dim;
    qkv.holds("rows of queries, keys and values", &[rows, width, 4])?;
    positions.holds("positions", &[rows, 4])?;
    let kv = cache.shape.kind;
    let [.., store] = heads.units(kv);
    let arguments = StoreRowsArguments {
        qkv: qkv.address(),
        k_norm: heads.norms().1,
        positions: positions.address(),
        head: heads.options()?,
        pages: cache.argument(rows, 0..rows)?,
        heads: int("query heads", q_heads)?,
        before: i32::from(before),
    };
    let grid = [rows as u32, (2 * kv_heads).div_ceil(4) as u32, 1];
    let is_whole = rotates_whole(dim, heads.rotary_dim);
    let kernel = one(STORE_ROWS, dim, |k| {
        k.unit == store && k.name.ends_with("_general") != is_whole
    })?;
    // SAFETY: sizes were checked; the caller vouches for blocks and positions.
    unsafe { Launch::new(grid, 128).of(kernel).run(gpu, &arguments) }
}

#[repr(C)]
struct PrefillArguments {
    q: u64,
    sinks: u64,
    out: u64,
    pages: Pages,
    heads: i32,
    rows: i32,
    first_position: i32,
    window: i32,
    cap: f32,
    split_pages: i32,
}

/// Shared memory of a CTA of a prompt: pages of its sequence, of which wide heads leave room for one, or half of one, and with fixed splits
/// the queries of other heads.
const fn prompt_shared(dim: usize, kv: KvType, fixed: bool, warps: usize) -> usize {
    match dim > 128 {
        true => stage_bytes(dim, kv),
        false if fixed => 2 * stage_bytes(dim, kv) + block_rows(dim, true, warps) * (dim + 8) * 2,
        false => 2 * stage_bytes(dim, kv),
    }
}

/// The kernel of rows with fixed splits, and its warps.
fn rows_kernel(
    gpu: &Gpu,
    unit: Unit,
    dim: usize,
    kv: KvType,
) -> Result<(HeadKernel<PrefillArguments>, usize)> {
    /// Shared memory that the device takes for each CTA.
    const RESERVED: usize = 1 << 10;
    let warps = PROMPT_WARPS / 2;
    let twice = 2 * (prompt_shared(dim, kv, true, warps) + RESERVED);
    let whole = one(ROWS, dim, |k| k.unit == unit);
    match one(ROWS_HALF, dim, |k| k.unit == unit) {
        Ok(half) if whole.is_err() || twice <= gpu.shared_limit() + RESERVED => Ok((half, warps)),
        _ => Ok((whole?, PROMPT_WARPS)),
    }
}

/// Prefill attention: `rows` rows of one sequence, from row `at` of `q` and `out` on. [`store`] writes `q`; `out` is f16 `[rows, heads
/// dim]`.
pub fn prefill(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    q: &DeviceBuffer,
    at: usize,
    rows: usize,
    first_position: usize,
    out: &DeviceBuffer,
) -> Result<()> {
    let rows = PromptRows {
        at,
        rows,
        first_position,
        fixed: false,
    };
    prefill_by(gpu, heads, cache, q, rows, out)
}

/// Like [`prefill`]; each row has the bits that [`decode`] with [`SplitKv::fixed`] gives it as a single token.
pub fn attend_rows(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    q: &DeviceBuffer,
    at: usize,
    rows: usize,
    first_position: usize,
    out: &DeviceBuffer,
) -> Result<()> {
    let rows = PromptRows {
        at,
        rows,
        first_position,
        fixed: true,
    };
    prefill_by(gpu, heads, cache, q, rows, out)
}

/// The rows of [`prefill`].
#[derive(Clone, Copy)]
struct PromptRows {
    at: usize,
    rows: usize,
    first_position: usize,
    /// Whether sums go by fixed splits.
    fixed: bool,
}

fn prefill_by(
    gpu: &Gpu,
    heads: &Heads<'_>,
    cache: &CachedPages<'_>,
    q: &DeviceBuffer,
    rows: PromptRows,
    out: &DeviceBuffer,
) -> Result<()> {
    heads.check_cache(cache)?;
    let PromptRows {
        at,
        rows,
        first_position,
        fixed,
    } = rows;
    let (kv, dim) = (cache.shape.kind, heads.shape.dim);
    let row = heads.shape.heads * dim * 2;
    if q.bytes() < (at + rows) * row || out.bytes() < (at + rows) * row {
        bail!(
            Internal,
            "buffers of prefill attention are too small for {rows} rows"
        );
    }
    let arguments = PrefillArguments {
        q: q.address() + (at * row) as u64,
        sinks: heads.sinks()?,
        out: out.address() + (at * row) as u64,
        pages: cache.argument(1, at..at + rows)?,
        heads: heads.shape.heads as i32,
        rows: int("rows", rows)?,
        first_position: int("the position", first_position)?,
        window: heads.window()?,
        cap: heads.cap_log2(),
        split_pages: SPLIT_PAGES as i32,
    };
    let [decode, prefill, _] = heads.units(kv);
    let (kernel, warps) = match fixed {
        true => rows_kernel(gpu, fixed_attention_units(decode)[1], dim, kv)?,
        false => (one(PREFILL, dim, |k| k.unit == prefill)?, PROMPT_WARPS),
    };
    let of_cta = block_rows(dim, fixed, warps);
    // With fixed splits CTAs begin at multiples of their rows.
    let before = if fixed { first_position % of_cta } else { 0 };
    let grid = [
        heads.shape.heads as u32,
        (before + rows).div_ceil(of_cta) as u32,
        1,
    ];
    let launch = Launch {
        shared: prompt_shared(dim, kv, fixed, warps) as u32,
        ..Launch::new(grid, (warps * 32) as u32)
    };
    // SAFETY: sizes were checked; the caller vouches for blocks.
    unsafe { launch.of(kernel).run(gpu, &arguments) }
}
