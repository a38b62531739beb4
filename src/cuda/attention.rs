//! Attention over cached keys and values in pages: one new token for each of several sequences, or many rows of one.

use std::ops::Range;
use std::sync::Arc;

use super::driver::{DeviceBuffer, Gpu, Launch, int};
use super::linear::{HALF_SM_ROWS, Layout};
use super::units::Unit;
use crate::base::Result;
use crate::base::error::bail;
use crate::base::memory::Tag;

/// Positions in a page of the cache.
pub const PAGE: usize = 64;
/// Query heads of a block of the decode kernel.
const BLOCK_HEADS: usize = 8;
/// Rows of a block of the prefill kernel.
const BLOCK_ROWS: usize = 128;
/// Positions of a sequence that are worth a split, while there are few splits.
const SPLIT: usize = 128;
/// The most splits that count as few.
const FEW_SPLITS: usize = 8;
/// Positions that are worth a split beyond that.
const LONG_SPLIT: usize = 512;
/// The most splits of a sequence: one for each lane of the warp that combines them.
const MOST_SPLITS: usize = 32;
/// The most positions of a sequence that a two-CTA cluster serves, on devices with clusters.
const CLUSTER_POSITIONS: usize = 512;

/// What the kernels of this file are passed, by the start of their names.
pub(super) const ARGUMENTS: &[(&str, usize)] = &[
    ("attention_decode_", size_of::<DecodeArguments>()),
    ("rope_store_", size_of::<StoreArguments>()),
    ("attention_prefill_", size_of::<PrefillArguments>()),
];

/// The heads of a layer and what happens to them before attention.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of one head: 32, 64, 80, 96, 128, 192 or 256.
    pub dim: usize,
    /// RMSNorm of each query head, f32 `[dim]`.
    pub q_norm: Option<&'a DeviceBuffer>,
    /// RMSNorm of each key head.
    pub k_norm: Option<&'a DeviceBuffer>,
    /// Rotary frequencies, f32 `[rotary_dim / 2]`.
    pub frequencies: &'a DeviceBuffer,
    /// Elements of a head that rotate, from the first on.
    pub rotary_dim: usize,
    /// Multiplies cosines and sines.
    pub attention_factor: f32,
    /// Of the norms.
    pub eps: f32,
    /// Of the scores.
    pub scale: f32,
    /// Positions that a token sees, its own included; all if `None`.
    pub window: Option<usize>,
    /// Bounds scores softly: `cap * tanh(score / cap)`.
    pub score_cap: Option<f32>,
}

/// The sizes of heads that there are kernels for.
const DIMS: [usize; 7] = [32, 64, 80, 96, 128, 192, 256];

/// Whether these are the sizes of heads that most models have.
fn is_common(dim: usize) -> bool {
    matches!(dim, 32 | 64 | 128)
}

/// Whether kernels serve these heads all elements of which rotate, with their partners in the same lane.
fn rotates_whole(dim: usize, rotary_dim: usize) -> bool {
    rotary_dim == dim && (is_common(dim) || matches!(dim, 192 | 256))
}

/// The kernels for heads of `dim` elements of which `rotary_dim` rotate, whose scores are limited by a window or a cap or not: those that
/// decode, those for prompts, and those that store.
pub fn attention_units(dim: usize, rotary_dim: usize, is_limited: bool) -> [Unit; 3] {
    let whole = rotates_whole(dim, rotary_dim);
    [
        match whole {
            true if is_common(dim) && !is_limited => Unit::AttentionDecode,
            true => Unit::AttentionDecodeLimited,
            false => Unit::AttentionDecodeGeneral,
        },
        match is_common(dim) {
            true => Unit::AttentionPrefill,
            false => Unit::AttentionPrefillWide,
        },
        match whole && is_common(dim) {
            true => Unit::RopeStore,
            false => Unit::RopeStoreGeneral,
        },
    ]
}

impl Heads<'_> {
    /// Fails for shapes without a kernel.
    pub fn check(&self) -> Result<()> {
        if !DIMS.contains(&self.dim)
            || self.rotary_dim == 0
            || self.rotary_dim > self.dim
            || !self.rotary_dim.is_multiple_of(2)
            || self.window == Some(0)
            || self.kv_heads == 0
            || !self.heads.is_multiple_of(self.kv_heads)
        {
            bail!(
                Unsupported,
                "attention of {} query and {} key/value heads of {}, of which {} elements rotate, on a GPU; head_dim must be one of {DIMS:?}, and the query heads a multiple of the others",
                self.heads,
                self.kv_heads,
                self.dim,
                self.rotary_dim
            );
        }
        Ok(())
    }

    /// Bytes of one layer in a page.
    pub fn page_bytes(&self) -> usize {
        layer_bytes(self.kv_heads, self.dim)
    }

    fn options(&self) -> Result<HeadOptions> {
        self.frequencies
            .holds("frequencies", &[self.rotary_dim / 2, 4])?;
        Ok(HeadOptions {
            frequencies: self.frequencies.address(),
            attention_factor: self.attention_factor,
            eps: self.eps,
            rotary_dim: self.rotary_dim as i32,
        })
    }

    fn units(&self) -> [Unit; 3] {
        let is_limited = self.window.is_some() || self.score_cap.is_some();
        attention_units(self.dim, self.rotary_dim, is_limited)
    }

    fn window(&self) -> Result<i32> {
        self.window
            .map_or(Ok(0), |window| int("the window", window))
    }

    /// The soft cap of scores in powers of two; 0 without one.
    fn cap_log2(&self) -> f32 {
        self.score_cap.unwrap_or(0.0) * std::f32::consts::LOG2_E
    }

    fn norms(&self) -> (u64, u64) {
        let address = |b: Option<&DeviceBuffer>| b.map_or(0, DeviceBuffer::address);
        (address(self.q_norm), address(self.k_norm))
    }

    /// The kernels take powers of two.
    fn scale_log2(&self) -> f32 {
        self.scale * std::f32::consts::LOG2_E
    }
}

/// Bytes of one layer in a page.
fn layer_bytes(kv_heads: usize, dim: usize) -> usize {
    2 * kv_heads * PAGE * dim * 2
}

/// Where the pages of sequences are: u64 addresses `[sequences, stride]` on the device.
#[derive(Clone, Copy)]
pub struct PageTable<'a> {
    /// The addresses.
    pub table: &'a DeviceBuffer,
    /// Pages that a sequence has room for.
    pub stride: usize,
    /// The first sequence of the table that is meant.
    pub sequence: usize,
    /// The layer.
    pub layer: usize,
    /// A u32 for each row of the pass, zero at first: 1 + the first layer in which a query, key or value of the row does not fit in f16.
    pub unfit: Option<&'a DeviceBuffer>,
}

impl PageTable<'_> {
    /// The argument of a kernel that takes `sequences` sequences, and `rows` of the rows of the pass.
    pub(super) fn argument(
        &self,
        kv_heads: usize,
        dim: usize,
        sequences: usize,
        rows: Range<usize>,
    ) -> Result<Pages> {
        if let Some(unfit) = self.unfit {
            unfit.holds("rows that do not fit", &[rows.end, 4])?;
        }
        let first = self.sequence * self.stride * 8;
        if self.table.bytes() < first + sequences * self.stride * 8 {
            bail!(
                Internal,
                "a page table of {} bytes for {sequences} sequences of {} from {} on",
                self.table.bytes(),
                self.stride,
                self.sequence
            );
        }
        let unfit = |unfit: &DeviceBuffer| unfit.address() + 4 * rows.start as u64;
        Ok(Pages {
            table: self.table.address() + first as u64,
            stride: int("pages", self.stride)?,
            kv_heads: int("key/value heads", kv_heads)?,
            layer_offset: (self.layer * layer_bytes(kv_heads, dim)) as u64,
            unfit: self.unfit.map_or(0, unfit),
            layer: int("the layer", self.layer)? as u32,
        })
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct HeadOptions {
    frequencies: u64,
    attention_factor: f32,
    eps: f32,
    rotary_dim: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Pages {
    table: u64,
    stride: i32,
    kv_heads: i32,
    layer_offset: u64,
    unfit: u64,
    layer: u32,
}

#[repr(C)]
struct DecodeArguments {
    qkv: u64,
    q_norm: u64,
    k_norm: u64,
    positions: u64,
    out: u64,
    partial: u64,
    arrived: u64,
    head: HeadOptions,
    pages: Pages,
    group: i32,
    scale: f32,
    cap: f32,
    window: i32,
    fragment_major: i32,
}

/// Blocks of the decode kernel for a sequence without split-KV.
fn blocks(heads: usize, kv_heads: usize) -> usize {
    kv_heads * (heads / kv_heads).div_ceil(BLOCK_HEADS)
}

/// Shared memory of a block: pages of keys and of values of a head, and what there is of the new token.
const fn decode_shared(stages: usize, dim: usize) -> usize {
    (stages * 2 * PAGE + BLOCK_HEADS + 2) * dim * 2 + 128
}

/// A variant of the decode kernel, which depends on the number of blocks without split-KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// With few blocks: a ring of four pages, two of which are processed at a time.
    Ring4,
    /// With more: a ring of two pages, which leaves shared memory to blocks of other kernels.
    Ring2,
    /// With so many that several share a multiprocessor: a single page. Also for the widest heads, for which a longer ring does not fit.
    Ring1,
    /// `Ring2` with the two blocks of a sequence in a cluster.
    Cluster,
}

impl Form {
    fn of(gpu: &Gpu, blocks: usize, dim: usize) -> Form {
        let fits = |form: Form, dim| decode_shared(form.pages(), dim) <= gpu.shared_limit();
        let form = if blocks > gpu.multiprocessors() || !fits(Form::Ring4, 128) {
            Form::Ring1
        } else if 2 * blocks > gpu.multiprocessors() {
            Form::Ring2
        } else {
            Form::Ring4
        };
        // Wider heads leave room for a shorter ring.
        let shorter = [form, Form::Ring2, Form::Ring1];
        let fitting = shorter
            .into_iter()
            .find(|&f| f.pages() <= form.pages() && fits(f, dim));
        fitting.unwrap_or(Form::Ring1)
    }

    /// Blocks that share a multiprocessor.
    const fn together(self) -> usize {
        match self {
            Form::Ring4 | Form::Ring2 | Form::Cluster => 1,
            Form::Ring1 => 4,
        }
    }

    /// Pages of the ring.
    const fn pages(self) -> usize {
        match self {
            Form::Ring4 => 4,
            Form::Ring2 | Form::Cluster => 2,
            Form::Ring1 => 1,
        }
    }

    const fn threads(self) -> u32 {
        match self {
            Form::Ring4 => 256,
            Form::Ring2 | Form::Ring1 | Form::Cluster => 128,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Form::Ring4 => "ring4",
            Form::Ring2 => "ring2",
            Form::Ring1 => "ring1",
            Form::Cluster => "cluster",
        }
    }
}

/// Split-KV: how the cached positions of each sequence are divided among blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitKv {
    /// Into 1 to 32 splits, whose partial results pass through the workspace in global memory if there are several.
    Splits(usize),
    /// Into two halves, one for each block of a two-CTA cluster; for Hopper and later.
    Cluster,
}

impl SplitKv {
    /// The split that keeps the device busy with `sequences` sequences of up to `positions` positions each, for heads that the kernels
    /// of `unit` decode.
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
        let form = Form::of(gpu, blocks, dim);
        // Products of more rows than HALF_SM_ROWS leave no shared memory for a long ring, so that the ring could only be filled after
        // them. With fewer rows clusters are slower.
        if form == Form::Ring4
            && gpu.arch() == (9, 0)
            && sequences > HALF_SM_ROWS
            && unit == Unit::AttentionDecode
            && positions <= CLUSTER_POSITIONS
        {
            return SplitKv::Cluster;
        }
        let splits_of = |length: usize| positions.div_ceil(length).next_power_of_two();
        // Wider heads have as much to read of fewer positions.
        let width = dim.div_ceil(128);
        let few = splits_of(SPLIT / width).min(FEW_SPLITS * width);
        let useful = few.max(splits_of(LONG_SPLIT / width));
        let busy = form.together() * gpu.multiprocessors() / blocks;
        let splits = useful.min(busy).clamp(1, MOST_SPLITS);
        // Few positions are read sooner by one block than combined by several.
        let short = if splits < 4 { 512 } else { 320 } / width;
        SplitKv::Splits(if positions <= short { 1 } else { splits })
    }

    const fn splits(self) -> usize {
        match self {
            SplitKv::Splits(splits) => splits,
            SplitKv::Cluster => 2,
        }
    }
}

/// The workspace of split-KV: partial results, and counters of the blocks that have arrived.
#[derive(Debug)]
pub struct SplitKvWorkspace {
    partial: DeviceBuffer,
    arrived: DeviceBuffer,
}

impl SplitKvWorkspace {
    /// Room for `sequences` sequences.
    pub fn new(
        gpu: &Arc<Gpu>,
        heads: usize,
        kv_heads: usize,
        dim: usize,
        sequences: usize,
    ) -> Result<SplitKvWorkspace> {
        let blocks = blocks(heads, kv_heads) * sequences;
        Ok(SplitKvWorkspace {
            partial: DeviceBuffer::uninit(
                gpu,
                Tag::DeviceScratch,
                blocks * MOST_SPLITS * BLOCK_HEADS * (dim + 2) * 4,
            )?,
            arrived: DeviceBuffer::zeroed(gpu, Tag::DeviceScratch, blocks * 4)?,
        })
    }
}

/// Attention of one new token for each of `sequences` sequences, whose keys and values it stores: from f32 `qkv`
/// `[sequences, (heads + 2 kv_heads) dim]` to f16 `out` `[sequences, heads dim]` in this layout. `positions` (i32) say where the
/// tokens stand; pages must exist up to there. The split changes the result by rounding only.
pub fn decode(
    gpu: &Gpu,
    heads: &Heads<'_>,
    pages: &PageTable<'_>,
    qkv: &DeviceBuffer,
    positions: &DeviceBuffer,
    sequences: usize,
    division: SplitKv,
    workspace: &SplitKvWorkspace,
    out: &DeviceBuffer,
    layout: Layout,
) -> Result<()> {
    heads.check()?;
    let width = (heads.heads + 2 * heads.kv_heads) * heads.dim;
    let group = heads.heads / heads.kv_heads;
    let blocks = blocks(heads.heads, heads.kv_heads);
    let splits = division.splits();
    if qkv.bytes() < sequences * width * 4
        || positions.bytes() < sequences * 4
        || out.bytes() < layout.elements(sequences, heads.heads * heads.dim) * 2
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
        positions: positions.address(),
        out: out.address(),
        partial: workspace.partial.address(),
        arrived: workspace.arrived.address(),
        head: heads.options()?,
        pages: pages.argument(heads.kv_heads, heads.dim, sequences, 0..sequences)?,
        group: group as i32,
        scale: heads.scale_log2(),
        cap: heads.cap_log2(),
        window: heads.window()?,
        fragment_major: i32::from(layout == Layout::FragmentMajor),
    };
    let (form, cluster, received) = match division {
        SplitKv::Splits(_) => (Form::of(gpu, blocks * sequences, heads.dim), 1, 0),
        SplitKv::Cluster if gpu.arch().0 < 9 => {
            bail!(Internal, "two-CTA clusters are for Hopper and later")
        }
        SplitKv::Cluster => (
            Form::Cluster,
            splits,
            splits * BLOCK_HEADS * (heads.dim + 2) * 4,
        ),
    };
    let launch = Launch {
        shared: (decode_shared(form.pages(), heads.dim) + received) as u32,
        cluster: cluster as u32,
        ..Launch::new(
            [blocks as u32, sequences as u32, splits as u32],
            form.threads(),
        )
    };
    let [unit, ..] = heads.units();
    let suffix = match unit {
        Unit::AttentionDecodeLimited => "_limited",
        Unit::AttentionDecodeGeneral => "_general",
        _ => "",
    };
    let name = format!("attention_decode_{}{suffix}_{}", heads.dim, form.name());
    // SAFETY: the struct is the kernel's; sizes were checked; pages and positions are the caller's word.
    unsafe { launch.run(gpu, unit, &name, &arguments) }
}

#[repr(C)]
struct StoreArguments {
    qkv: u64,
    q_norm: u64,
    k_norm: u64,
    q: u64,
    head: HeadOptions,
    pages: Pages,
    heads: i32,
    rows: i32,
    first_position: i32,
    scale: f32,
}

/// Norm and rotation of `rows` rows of one sequence from `first_position` on: f32 `qkv` to f16 `q` `[rows, heads, dim]`, keys
/// and values to the cache.
pub fn store(
    gpu: &Gpu,
    heads: &Heads<'_>,
    pages: &PageTable<'_>,
    qkv: &DeviceBuffer,
    at: usize,
    rows: usize,
    first_position: usize,
    q: &DeviceBuffer,
) -> Result<()> {
    heads.check()?;
    let width = (heads.heads + 2 * heads.kv_heads) * heads.dim;
    if qkv.bytes() < (at + rows) * width * 4
        || q.bytes() < (at + rows) * heads.heads * heads.dim * 2
    {
        bail!(
            Internal,
            "buffers of the rotation are too small for {rows} rows"
        );
    }
    let (q_norm, k_norm) = heads.norms();
    let [.., store] = heads.units();
    let suffix = match rotates_whole(heads.dim, heads.rotary_dim) {
        true => "",
        false => "_general",
    };
    let arguments = StoreArguments {
        qkv: qkv.address() + (at * width * 4) as u64,
        q_norm,
        k_norm,
        q: q.address() + (at * heads.heads * heads.dim * 2) as u64,
        head: heads.options()?,
        pages: pages.argument(heads.kv_heads, heads.dim, 1, at..at + rows)?,
        heads: heads.heads as i32,
        rows: int("rows", rows)?,
        first_position: int("the position", first_position)?,
        scale: heads.scale_log2(),
    };
    let by_head = Launch::new(
        [
            rows as u32,
            (heads.heads + heads.kv_heads).div_ceil(4) as u32,
            1,
        ],
        128,
    );
    let groups = (first_position + rows).div_ceil(8) - first_position / 8;
    let by_value = Launch::new([groups as u32, heads.kv_heads as u32, 1], heads.dim as u32);
    // SAFETY: the struct is both kernels'; sizes were checked; pages are the caller's word.
    unsafe {
        by_head.run(
            gpu,
            store,
            &format!("rope_store_heads_{}{suffix}", heads.dim),
            &arguments,
        )?;
        by_value.run(
            gpu,
            match is_common(heads.dim) {
                true => Unit::RopeStore,
                false => Unit::RopeStoreGeneral,
            },
            &format!("rope_store_values_{}", heads.dim),
            &arguments,
        )
    }
}

#[repr(C)]
struct PrefillArguments {
    q: u64,
    out: u64,
    pages: Pages,
    heads: i32,
    rows: i32,
    first_position: i32,
    window: i32,
    cap: f32,
}

/// Attention of `rows` rows of one sequence, from row `at` of `q` and `out` on; see [`store`] for `q`. `out` is f16
/// `[rows, heads dim]`.
pub fn prefill(
    gpu: &Gpu,
    heads: &Heads<'_>,
    pages: &PageTable<'_>,
    q: &DeviceBuffer,
    at: usize,
    rows: usize,
    first_position: usize,
    out: &DeviceBuffer,
) -> Result<()> {
    heads.check()?;
    let row = heads.heads * heads.dim * 2;
    if q.bytes() < (at + rows) * row || out.bytes() < (at + rows) * row {
        bail!(
            Internal,
            "buffers of attention are too small for {rows} rows"
        );
    }
    let arguments = PrefillArguments {
        q: q.address() + (at * row) as u64,
        out: out.address() + (at * row) as u64,
        pages: pages.argument(heads.kv_heads, heads.dim, 1, at..at + rows)?,
        heads: heads.heads as i32,
        rows: int("rows", rows)?,
        first_position: int("the position", first_position)?,
        window: heads.window()?,
        cap: heads.cap_log2(),
    };
    let grid = [heads.heads as u32, rows.div_ceil(BLOCK_ROWS) as u32, 1];
    // Of wide heads one page at a time.
    let stages = if heads.dim > 128 { 1 } else { 2 };
    let launch = Launch {
        shared: (stages * 2 * PAGE * heads.dim * 2) as u32,
        ..Launch::new(grid, 256)
    };
    // SAFETY: the struct is the kernel's; sizes were checked; pages are the caller's word.
    unsafe {
        launch.run(
            gpu,
            heads.units()[1],
            &format!("attention_prefill_{}", heads.dim),
            &arguments,
        )
    }
}
