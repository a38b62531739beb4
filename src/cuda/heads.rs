//! Heads of attention as the fused kernels take them: their shape, what happens to them before attention, and the cached pages that they
//! attend to.

use std::ops::Range;

use super::driver::{DeviceBuffer, int};
use super::units::Unit;
use crate::base::Result;
use crate::base::error::bail;
use crate::tensor::{AttentionShape, KvType};

/// Positions of a page.
pub const PAGE: usize = 64;
/// Elements of the widest heads.
const WIDEST: usize = 512;

/// The heads of a row of projections, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowHeads {
    /// Queries, keys and values.
    QueriesKeysValues,
    /// Queries and keys, which before norm and rotation are the values too.
    KeysAsValues,
    /// Queries alone: an earlier layer has stored keys and values in the cache.
    Queries,
}

/// Head shape of a layer, and what happens to queries, keys and values before attention.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    /// Heads of 32, 64, 80, 96, 128, 192, 256 or 512 elements, and their scores.
    pub shape: AttentionShape,
    /// The heads of a row of projections.
    pub row: RowHeads,
    /// Whether each head of values is normalized, by an RMSNorm without a weight.
    pub value_norm: bool,
    /// RMSNorm of each query head, f32 `[dim]`.
    pub q_norm: Option<&'a DeviceBuffer>,
    /// RMSNorm of each key head.
    pub k_norm: Option<&'a DeviceBuffer>,
    /// A logit of each query head that takes part in the softmax of every row and has no value, f32 `[heads]`.
    pub sinks: Option<&'a DeviceBuffer>,
    /// Rotary frequencies, f32 `[rotary_dim / 2]`; none if no element rotates.
    pub frequencies: Option<&'a DeviceBuffer>,
    /// Elements of a head that rotate, from the first on; may be 0.
    pub rotary_dim: usize,
    /// Multiplies cosines and sines.
    pub attention_factor: f32,
    /// Added to the mean square in both norms.
    pub eps: f32,
    /// Whether both norms are of rotated heads.
    pub rotates_first: bool,
}

/// Head dimensions that have kernels.
const DIMS: [usize; 8] = [32, 64, 80, 96, 128, 192, 256, WIDEST];

/// Whether `dim` is one of the head dimensions that most models have.
fn is_common(dim: usize) -> bool {
    matches!(dim, 32 | 64 | 128)
}

/// Whether there are kernels for heads whose elements all rotate, each with its partner in the same lane.
pub(super) fn rotates_whole(dim: usize, rotary_dim: usize) -> bool {
    rotary_dim == dim && (is_common(dim) || matches!(dim, 192 | 256 | WIDEST))
}

/// Whether heads need kernels with limits: a window, a soft cap or sinks, a norm of values, or rows without keys or values of their own.
pub fn is_limited(
    shape: &AttentionShape,
    has_sinks: bool,
    value_norm: bool,
    row: RowHeads,
) -> bool {
    shape.window.is_some()
        || shape.score_cap.is_some()
        || has_sinks
        || value_norm
        || row != RowHeads::QueriesKeysValues
}

/// Whether there are kernels for such heads whose keys and values are cached in a type.
pub fn has_kernels(dim: usize, rotary_dim: usize, is_limited: bool, kv: KvType) -> bool {
    match kv {
        KvType::F16 => true,
        KvType::F32 => false,
        KvType::F8 => is_common(dim) && rotates_whole(dim, rotary_dim) && !is_limited,
    }
}

/// The heads that [`has_kernels`] in 8 bits, in words.
pub const F8_HEADS: &str = "32, 64 or 128 elements that all rotate, without a window, a soft cap, sinks or a norm of values";

/// The decode, prefill and store units for heads of `dim` elements, the first `rotary_dim` of which rotate; `is_limited` is that of
/// [`is_limited`]. There must be kernels for the type of the cache: see [`has_kernels`].
pub fn attention_units(dim: usize, rotary_dim: usize, is_limited: bool, kv: KvType) -> [Unit; 3] {
    if kv == KvType::F8 {
        return [
            Unit::AttentionDecodeF8,
            Unit::AttentionPrefillF8,
            Unit::RopeStoreF8,
        ];
    }
    let whole = rotates_whole(dim, rotary_dim);
    [
        match whole {
            _ if dim == WIDEST => Unit::AttentionDecodeWidest,
            true if is_common(dim) && !is_limited => Unit::AttentionDecode,
            true => Unit::AttentionDecodeLimited,
            false if (dim, rotary_dim, is_limited) == (256, 64, false) => Unit::AttentionDecodeWide,
            false => Unit::AttentionDecodeGeneral,
        },
        match is_common(dim) {
            true => Unit::AttentionPrefill,
            false if dim == WIDEST => Unit::AttentionPrefillWidest,
            false => Unit::AttentionPrefillWide,
        },
        match whole && is_common(dim) {
            true => Unit::RopeStore,
            false => Unit::RopeStoreGeneral,
        },
    ]
}

/// The heads of an attention layer, as the plan of decode steps takes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// The decode unit of [`attention_units`].
    pub unit: Unit,
    /// Element type of the cache.
    pub kv: KvType,
}

impl Heads<'_> {
    /// Fails for shapes without a kernel.
    pub fn check(&self) -> Result<()> {
        if !DIMS.contains(&self.shape.dim)
            || self.frequencies.is_some() != (self.rotary_dim > 0)
            || self.rotary_dim > self.shape.dim
            || !self.rotary_dim.is_multiple_of(2)
            || self.shape.window == Some(0)
            || self.shape.kv_heads == 0
            || !self.shape.heads.is_multiple_of(self.shape.kv_heads)
        {
            bail!(
                Unsupported,
                "attention of {} query and {} key/value heads of {}, of which {} elements rotate, on a GPU; head_dim must be one of {DIMS:?}, and the query heads a multiple of the others",
                self.shape.heads,
                self.shape.kv_heads,
                self.shape.dim,
                self.rotary_dim
            );
        }
        if self.shape.dim == WIDEST && self.rotary_dim != WIDEST {
            bail!(
                Unsupported,
                "heads of {WIDEST} elements of which {} rotate, on a GPU; its kernels rotate all {WIDEST}",
                self.rotary_dim
            );
        }
        Ok(())
    }

    /// Heads of a row of projections.
    fn row_heads(&self) -> usize {
        let of_keys = match self.row {
            RowHeads::QueriesKeysValues => 2,
            RowHeads::KeysAsValues => 1,
            RowHeads::Queries => 0,
        };
        self.shape.heads + of_keys * self.shape.kv_heads
    }

    /// Elements of a row of projections.
    pub(super) fn row_width(&self) -> usize {
        self.row_heads() * self.shape.dim
    }

    /// Key/value heads that the layer stores itself.
    pub(super) fn own_kv_heads(&self) -> usize {
        match self.row {
            RowHeads::Queries => 0,
            RowHeads::QueriesKeysValues | RowHeads::KeysAsValues => self.shape.kv_heads,
        }
    }

    pub(super) fn row_argument(&self) -> RowArgument {
        let AttentionShape {
            heads, kv_heads, ..
        } = self.shape;
        let value = match self.row {
            RowHeads::QueriesKeysValues => heads + kv_heads,
            RowHeads::KeysAsValues | RowHeads::Queries => heads,
        };
        RowArgument {
            all: self.row_heads() as i32,
            value: value as i32,
            has_keys: (self.row != RowHeads::Queries).into(),
            value_norm: self.value_norm.into(),
        }
    }

    /// Shape of the layer's pages.
    pub fn kv(&self, kind: KvType) -> KvShape {
        KvShape {
            heads: self.shape.kv_heads,
            dim: self.shape.dim,
            kind,
        }
    }

    /// Fails for a cache of other heads.
    pub(super) fn check_cache(&self, cache: &CachedPages<'_>) -> Result<()> {
        self.check()?;
        let kind = cache.shape.kind;
        if cache.shape != self.kv(kind) {
            bail!(
                Internal,
                "attention of {} heads of {} over a cache of {:?}",
                self.shape.kv_heads,
                self.shape.dim,
                cache.shape
            );
        }
        if !has_kernels(self.shape.dim, self.rotary_dim, self.is_limited(), kind) {
            bail!(
                Unsupported,
                "attention of heads of {} elements, of which {} rotate, over keys and values as {} on a GPU; its kernels take f16, and f8 for heads of {F8_HEADS}",
                self.shape.dim,
                self.rotary_dim,
                kind.name()
            );
        }
        Ok(())
    }

    pub(super) fn options(&self) -> Result<HeadOptions> {
        if let Some(frequencies) = self.frequencies {
            frequencies.holds("frequencies", &[self.rotary_dim / 2, 4])?;
        }
        Ok(HeadOptions {
            frequencies: self.frequencies.map_or(0, DeviceBuffer::address),
            attention_factor: self.attention_factor,
            eps: self.eps,
            rotary_dim: self.rotary_dim as i32,
            rotates_first: self.rotates_first.into(),
        })
    }

    fn is_limited(&self) -> bool {
        is_limited(&self.shape, self.sinks.is_some(), self.value_norm, self.row)
    }

    /// The heads as the plan of decode steps takes them, for a cache of this type.
    pub fn decode_shape(&self, kv: KvType) -> DecodeShape {
        let AttentionShape {
            heads,
            kv_heads,
            dim,
            ..
        } = self.shape;
        let [unit, ..] = self.units(kv);
        DecodeShape {
            heads,
            kv_heads,
            dim,
            unit,
            kv,
        }
    }

    /// The decode, prefill and store units for a cache of this type.
    pub(super) fn units(&self, kv: KvType) -> [Unit; 3] {
        attention_units(self.shape.dim, self.rotary_dim, self.is_limited(), kv)
    }

    pub(super) fn window(&self) -> Result<i32> {
        self.shape
            .window
            .map_or(Ok(0), |window| int("the window", window))
    }

    /// The soft cap in base 2; 0 without a cap.
    pub(super) fn cap_log2(&self) -> f32 {
        self.shape.score_cap.unwrap_or(0.0) * std::f32::consts::LOG2_E
    }

    /// The address of the sinks; 0 without any.
    pub(super) fn sinks(&self) -> Result<u64> {
        if let Some(sinks) = self.sinks {
            sinks.holds("sinks", &[self.shape.heads, 4])?;
        }
        Ok(self.sinks.map_or(0, DeviceBuffer::address))
    }

    pub(super) fn norms(&self) -> (u64, u64) {
        let address = |b: Option<&DeviceBuffer>| b.map_or(0, DeviceBuffer::address);
        (address(self.q_norm), address(self.k_norm))
    }

    /// The score scale in base 2, as the kernels take it.
    pub(super) fn scale_log2(&self) -> f32 {
        self.shape.scale * std::f32::consts::LOG2_E
    }
}

/// A page, one layer's part of a block of the cache: keys `[heads][PAGE][dim]`, then values `[heads][dim][PAGE]`, then, if the type has
/// scales, those of the keys `[heads][PAGE]` and of the values `[heads][PAGE]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Key/value heads.
    pub heads: usize,
    /// Elements of one head.
    pub dim: usize,
    /// Element type.
    pub kind: KvType,
}

impl KvShape {
    /// Bytes of a page.
    pub const fn bytes(self) -> usize {
        2 * self.heads * PAGE * self.kind.vector_bytes(self.dim)
    }
}

/// The cached keys and values of one layer: pages in the blocks of an arena, which a block table lists for each sequence.
#[derive(Clone, Copy)]
pub struct CachedPages<'a> {
    /// Address of block 0.
    pub arena: u64,
    /// Bytes of a block, over all layers of its group.
    pub block_bytes: usize,
    /// Bytes of a block before the layer.
    pub offset: usize,
    /// The layer's pages.
    pub shape: KvShape,
    /// The block table on the device: u32 block numbers `[sequences, stride]`.
    pub table: &'a DeviceBuffer,
    /// Blocks per sequence that the table has room for.
    pub stride: usize,
    /// The first sequence of the table that is meant.
    pub sequence: usize,
    /// Index of the layer in the model, for faults.
    pub layer: usize,
    /// A u32 for each row of the pass, zero at first: 1 + the first layer in which a query, key or value of the row does not fit in f16.
    pub unfit: Option<&'a DeviceBuffer>,
}

impl CachedPages<'_> {
    /// The argument of a kernel that takes `sequences` sequences, and `rows` of the rows of the pass.
    pub(super) fn argument(&self, sequences: usize, rows: Range<usize>) -> Result<Pages> {
        if let Some(unfit) = self.unfit {
            unfit.holds("rows that do not fit", &[rows.end, 4])?;
        }
        let KvShape { heads, dim, .. } = self.shape;
        let first = self.sequence * self.stride * 4;
        if self.table.bytes() < first + sequences * self.stride * 4
            || self.offset + self.shape.bytes() > self.block_bytes
        {
            bail!(
                Internal,
                "a block table of {} bytes for {sequences} sequences of {} from {} on, with {heads} heads of {dim} at byte {} of {}",
                self.table.bytes(),
                self.stride,
                self.sequence,
                self.offset,
                self.block_bytes
            );
        }
        let unfit = |unfit: &DeviceBuffer| unfit.address() + 4 * rows.start as u64;
        Ok(Pages {
            base: self.arena + self.offset as u64,
            table: self.table.address() + first as u64,
            block_bytes: self.block_bytes as u64,
            unfit: self.unfit.map_or(0, unfit),
            stride: int("blocks", self.stride)?,
            kv_heads: int("key/value heads", heads)?,
            layer: int("the layer", self.layer)? as u32,
        })
    }
}

/// [`Heads`] as an argument of kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct HeadOptions {
    frequencies: u64,
    attention_factor: f32,
    eps: f32,
    rotary_dim: i32,
    rotates_first: i32,
}

/// [`RowHeads`] as an argument of kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct RowArgument {
    all: i32,
    value: i32,
    has_keys: i32,
    value_norm: i32,
}

/// [`CachedPages`] as an argument of kernels.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Pages {
    base: u64,
    table: u64,
    block_bytes: u64,
    unfit: u64,
    stride: i32,
    kv_heads: i32,
    layer: u32,
}
