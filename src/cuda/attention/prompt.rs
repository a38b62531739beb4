//! Attention of many rows of one sequence, and the storing of keys and values beside single tokens.

use std::marker::PhantomData;

use super::decode::fixed_attention_units;
use super::head_kernel::{HeadKernel, head_kernels, one, sizes};
use super::ring::{WHOLE_PAGE_DIM, stage_bytes};
use super::split_kv::SPLIT_PAGES;
use crate::base::Result;
use crate::base::error::bail;
use crate::cuda::driver::{DeviceBuffer, Gpu, Launch, int};
use crate::cuda::heads::{
    CachedPages, HeadOptions, Heads, Pages, RowArgument, RowHeads, rotates_whole,
};
use crate::cuda::units::Unit;
use crate::tensor::{AttentionShape, KvType};

head_kernels! { STORE_HEADS(StoreArguments):
    RopeStore, None, "rope_store_heads_" [32 64 128] "";
    RopeStoreF8, None, "rope_store_heads_" [32 64 128] "_f8";
    RopeStoreGeneral, None, "rope_store_heads_" [192 256 512] "";
}
head_kernels! { STORE_PARTLY_ROTATED_HEADS(StoreArguments):
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
}
head_kernels! { STORE_PARTLY_ROTATED_ROWS(StoreRowsArguments):
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
    sizes(STORE_HEADS)
        .chain(sizes(STORE_PARTLY_ROTATED_HEADS))
        .chain(sizes(STORE_VALUES))
        .chain(sizes(STORE_ROWS))
        .chain(sizes(STORE_PARTLY_ROTATED_ROWS))
        .chain(sizes(ROWS))
        .chain(sizes(ROWS_HALF))
        .chain(sizes(PREFILL))
}

/// Warps of a CTA of a prompt; kernels with fixed splits have half of them where two CTAs fit a multiprocessor.
const PROMPT_WARPS: usize = 8;

/// Rows that one CTA of a prompt serves, for heads of `dim` elements, of which a warp has at most 256, or 128 with fixed splits.
const fn block_rows(dim: usize, fixed: bool, warps: usize) -> usize {
    let sharers = dim.div_ceil(if fixed { 128 } else { WHOLE_PAGE_DIM });
    warps / sharers * 16
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
    let rotating = match rotates_whole(heads.shape.dim, heads.rotary_dim) {
        true => STORE_HEADS,
        false => STORE_PARTLY_ROTATED_HEADS,
    };
    let rotate = one(rotating, heads.shape.dim, |k| k.unit == store)?;
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
    let rotating = match rotates_whole(dim, heads.rotary_dim) {
        true => STORE_ROWS,
        false => STORE_PARTLY_ROTATED_ROWS,
    };
    let kernel = one(rotating, dim, |k| k.unit == store)?;
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

/// The rows of [`prefill`]: some of one sequence, which follow each other.
#[derive(Clone, Copy)]
pub struct PromptRows {
    /// The first of them in the buffers.
    pub at: usize,
    /// Their number.
    pub rows: usize,
    /// The position of the first.
    pub first_position: usize,
    /// Whether each row has the bits that [`decode`](crate::cuda::decode) with [`SplitKv::fixed`](crate::cuda::SplitKv::fixed) gives it as a
    /// single token.
    pub fixed: bool,
}

/// Prefill attention: [`store`] writes `q`, f16 `[rows, heads, dim]`; `out` is f16 `[rows, heads dim]`.
pub fn prefill(
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
