//! Function tables of the levels, instantiated from the generic bodies: one static table per level, chosen once at run time.

use super::generic::{attention, calibrated, delta, linear, matmul, pointwise, sample};
use super::level::Level;
use super::simd::Simd;
use crate::format::calibrated::BlockFactor;
use crate::format::input_moments::BlockMoments;
use crate::tensor::WeightType;

pub(super) use attention::{Query, Scores};
pub(super) use calibrated::{Blocks, LANES, Rounded};
pub(super) use delta::{ConvolvedChannels, MOST_TAPS, StateColumns};
pub(super) use linear::INT8_SCALE_BLOCKS;

/// [`linear::skinny`], with the number of tokens first, from 1 to [`Table::skinny_tokens`].
pub(super) type Skinny =
    unsafe fn(usize, *const u8, usize, usize, usize, *const f32, f32, *mut f32, usize);
/// [`linear::unpack`].
pub(super) type Unpack = unsafe fn(*const u8, usize, *mut f32, *mut f32);
/// [`linear::tile`], with the tile's width first, one of [`Table::tiles`].
pub(super) type Tile = unsafe fn(usize, *const f32, *const f32, usize, *const f32, f32, *mut f32);
/// [`linear::quantize_row`].
pub(super) type QuantizeRow = unsafe fn(*const f32, usize, *mut i8, *mut f32, *mut i32);
/// [`linear::skinny_int8`], with the number of tokens first, from 1 to [`Table::skinny_tokens`].
pub(super) type SkinnyInt8 = unsafe fn(
    usize,
    *const u8,
    usize,
    usize,
    usize,
    *const i8,
    *const f32,
    *const i32,
    f32,
    *mut f32,
    usize,
);
/// [`linear::unpack_int8`].
pub(super) type UnpackInt8 = unsafe fn(*const u8, usize, *mut u8, *mut f32);
/// [`linear::tile_int8`], with the number of tokens first, from 1 to [`Table::int8_tile`].
pub(super) type TileInt8 = unsafe fn(
    usize,
    *const u8,
    *const f32,
    usize,
    *const i8,
    *const f32,
    *const i32,
    f32,
    *mut f32,
);
/// [`attention::attend`]: up to [`ATTENTION_QUERIES`] queries, then page addresses, a head's byte offset in a page, dim, and the
/// transformation of scores.
pub(super) type Attend = unsafe fn(&[Query], &[*const u8], usize, usize, Scores);
/// [`pointwise::rms_norm`].
pub(super) type RmsNorm = unsafe fn(*const f32, *const f32, f32, usize, *mut f32);
/// [`pointwise::glu`].
pub(super) type Glu = unsafe fn(*mut f32, *const f32, usize);
/// [`pointwise::clamped_swiglu`].
pub(super) type ClampedSwiglu = unsafe fn(*mut f32, *const f32, usize, f32, f32);
/// [`pointwise::soft_cap`].
pub(super) type SoftCap = unsafe fn(*mut f32, f32, usize);
/// [`delta::convolve`].
pub(super) type Convolve = unsafe fn(ConvolvedChannels);
/// [`delta::delta_rule`], [`delta::mamba_scan`].
pub(super) type Recurrence = unsafe fn(StateColumns);
/// [`sample::weigh`].
pub(super) type Weigh = unsafe fn(*const f32, usize, f32, f32, *mut f32, *mut f32);
/// [`matmul::panel_product`] with [`Table::widest`] rows.
pub(super) type PanelProduct = unsafe fn(usize, *const f32, *const f32, *mut f32, usize);
/// [`calibrated::round_in_turn`].
pub(super) type RoundInTurn = unsafe fn(&Blocks, &Blocks, f32, &BlockFactor, &mut Rounded);
/// See [`calibrated::round_beside`].
pub(super) type RoundBeside = unsafe fn(
    &Blocks,
    &Blocks,
    f32,
    (&BlockMoments, &BlockFactor),
    &mut Rounded,
    &mut Blocks,
) -> bool;
/// [`matmul::panel_product`] with [`Table::moment_columns`] rows, which are adjacent in the result.
pub(super) type MomentProduct = unsafe fn(usize, *const f32, *const f32, *mut f32);
/// [`pointwise::sum`].
pub(super) type Sum = unsafe fn(*const f32, usize, usize) -> f32;

/// Queries processed together, so that a key or value is read and converted once for all.
pub(super) const ATTENTION_QUERIES: usize = 4;

/// The widest int8 tile of any level.
pub(super) const MOST_INT8_TILE: usize = 4;

/// Upper limit of tokens for which some level prefers several passes of a skinny GEMM to a panel.
pub(super) const MOST_SKINNY: usize = 32;

/// Every instantiated tile width; a level uses those up to its own.
const WIDTHS: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];

/// The kernels of one level.
///
/// # Safety
/// Every function may be called only where the table's level is present; further obligations are those of its body.
pub(super) struct Table {
    pub level: Level,
    /// Tokens of the widest tile, and rows of a panel product.
    pub widest: usize,
    /// Tokens per pass of a skinny GEMM, exact and int8.
    pub skinny_tokens: [usize; 2],
    /// Number of tokens from which a panel is faster, exact and int8; at most [`MOST_SKINNY`] + 1.
    pub panel_tokens: [usize; 2],
    skinny: [Skinny; 5],
    unpack: [Unpack; 5],
    pub tile: Tile,
    pub quantize_row: QuantizeRow,
    pub skinny_int8: SkinnyInt8,
    pub unpack_int8: UnpackInt8,
    /// Tokens per int8 tile, at most [`MOST_INT8_TILE`].
    pub int8_tile: usize,
    pub tile_int8: TileInt8,
    pub attend_f16: Attend,
    pub attend_f32: Attend,
    pub attend_f8: Attend,
    pub rms_norm: RmsNorm,
    pub swiglu: Glu,
    pub geglu: Glu,
    pub sigmoid_gate: Glu,
    pub clamped_swiglu: ClampedSwiglu,
    pub soft_cap: SoftCap,
    pub convolve: Convolve,
    pub delta_rule: Recurrence,
    pub mamba_scan: Recurrence,
    pub weigh: Weigh,
    pub panel_product: PanelProduct,
    pub round_in_turn: RoundInTurn,
    pub round_beside: RoundBeside,
    /// Columns of second moments per [`Table::moment_product`].
    pub moment_columns: usize,
    pub moment_product: MomentProduct,
    pub sum: Sum,
}

impl Table {
    /// The table of `level`, which must be present.
    pub(super) fn of(level: Level) -> &'static Table {
        debug_assert!(level.is_present());
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => &avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => &avx512::TABLE,
            #[cfg(target_arch = "aarch64")]
            Level::Neon => &neon::TABLE,
            _ => &scalar::TABLE,
        }
    }

    pub(super) fn skinny(&self, kind: WeightType) -> Skinny {
        self.skinny[kind as usize]
    }

    pub(super) fn unpack(&self, kind: WeightType) -> Unpack {
        self.unpack[kind as usize]
    }

    /// The narrowest instantiated tile that holds `tokens`, or the level's widest.
    pub(super) fn width(&self, tokens: usize) -> usize {
        WIDTHS
            .into_iter()
            .find(|&w| w >= tokens && w <= self.widest)
            .unwrap_or(self.widest)
    }
}

/// The function for a number of tokens. A level has none beyond `$most`; those arms repeat its last one.
macro_rules! of_tokens {
    ($tokens:expr, $most:expr, $function:ident $(, $weights:ident)?) => {
        of_tokens!(@ $tokens, $most, $function, ($($weights)?), [1 2 3 4 5 6 7 8])
    };
    (@ $tokens:expr, $most:expr, $function:ident, $weights:tt, [$($n:literal)*]) => {
        match $tokens {
            $($n => of_tokens!(@@ $n, $most, $function, $weights),)*
            tokens => unreachable!("a skinny product of {tokens} tokens"),
        }
    };
    (@@ $n:literal, $most:expr, $function:ident, ($($weights:ident)?)) => {
        $function::<$($weights,)? { if $n < $most { $n } else { $most } }>
    };
}

/// Instantiates the table of one level: each function is a body of `generic` compiled with the level's target features, under that body's
/// obligations.
macro_rules! stamp {
    ($module:ident, $level:ident, $shell:path, $(#[$features:meta])?) => {
        mod $module {
            #![allow(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc, reason = "forwards: the body's own")]
            use super::*;
            use $shell as Shell;

            $(#[$features])?
            unsafe fn skinny_of<W: linear::Source<Shell>, const T: usize>(
                data: *const u8, stride: usize, groups: usize, blocks: usize, x: *const f32, global: f32, out: *mut f32,
                row: usize,
            ) {
                unsafe { linear::skinny::<Shell, W, T>(data, stride, groups, blocks, x, global, out, row) }
            }

            unsafe fn skinny<W: linear::Source<Shell>>(
                tokens: usize, data: *const u8, stride: usize, groups: usize, blocks: usize, x: *const f32, global: f32,
                out: *mut f32, row: usize,
            ) {
                let skinny = of_tokens!(tokens, <Shell as Simd>::SKINNY_TOKENS[0], skinny_of, W);
                unsafe { skinny(data, stride, groups, blocks, x, global, out, row) }
            }

            $(#[$features])?
            unsafe fn unpack<W: linear::Source<Shell>>(
                group: *const u8, blocks: usize, panel: *mut f32, scales: *mut f32,
            ) {
                unsafe { linear::unpack::<Shell, W>(group, blocks, panel, scales) }
            }

            $(#[$features])?
            unsafe fn tile_of<const T: usize>(
                panel: *const f32, scales: *const f32, blocks: usize, x: *const f32, global: f32, out: *mut f32,
            ) {
                unsafe { linear::tile::<Shell, T>(panel, scales, blocks, x, global, out) }
            }

            unsafe fn tile(
                width: usize, panel: *const f32, scales: *const f32, blocks: usize, x: *const f32, global: f32,
                out: *mut f32,
            ) {
                let tile = match width {
                    1 => tile_of::<1>,
                    2 => tile_of::<2>,
                    3 => tile_of::<3>,
                    4 => tile_of::<4>,
                    6 => tile_of::<6>,
                    8 => tile_of::<8>,
                    12 => tile_of::<12>,
                    _ => unreachable!("width {width} is not among {WIDTHS:?}"),
                };
                unsafe { tile(panel, scales, blocks, x, global, out) }
            }

            $(#[$features])?
            unsafe fn quantize_row(x: *const f32, blocks: usize, codes: *mut i8, scales: *mut f32, offsets: *mut i32) {
                unsafe { linear::quantize_row::<Shell>(x, blocks, codes, scales, offsets) }
            }

            $(#[$features])?
            unsafe fn skinny_int8_of<const T: usize>(
                data: *const u8, stride: usize, groups: usize, blocks: usize, codes: *const i8, scales: *const f32,
                offsets: *const i32, half_global: f32, out: *mut f32, row: usize,
            ) {
                unsafe {
                    linear::skinny_int8::<Shell, T>(
                        data, stride, groups, blocks, codes, scales, offsets, half_global, out, row,
                    )
                }
            }

            unsafe fn skinny_int8(
                tokens: usize, data: *const u8, stride: usize, groups: usize, blocks: usize, codes: *const i8,
                scales: *const f32, offsets: *const i32, half_global: f32, out: *mut f32, row: usize,
            ) {
                let skinny = of_tokens!(tokens, <Shell as Simd>::SKINNY_TOKENS[1], skinny_int8_of);
                unsafe { skinny(data, stride, groups, blocks, codes, scales, offsets, half_global, out, row) }
            }

            $(#[$features])?
            unsafe fn unpack_int8(group: *const u8, blocks: usize, panel: *mut u8, scales: *mut f32) {
                unsafe { linear::unpack_int8::<Shell>(group, blocks, panel, scales) }
            }

            $(#[$features])?
            unsafe fn tile_int8(
                tokens: usize, panel: *const u8, panel_scales: *const f32, blocks: usize, codes: *const i8,
                scales: *const f32, offsets: *const i32, half_global: f32, out: *mut f32,
            ) {
                unsafe {
                    match tokens {
                        <Shell as Simd>::INT8_TILE => linear::tile_int8::<Shell, { <Shell as Simd>::INT8_TILE }>(
                            panel, panel_scales, blocks, codes, scales, offsets, half_global, out,
                        ),
                        _ => {
                            let scale_row = blocks.div_ceil(INT8_SCALE_BLOCKS);
                            for t in 0..tokens {
                                linear::tile_int8::<Shell, 1>(
                                    panel, panel_scales, blocks, codes.add(t * blocks * 16), scales.add(t * scale_row),
                                    offsets.add(t * blocks), half_global, out.add(t * 16),
                                );
                            }
                        }
                    }
                }
            }

            $(#[$features])?
            unsafe fn attend<E: attention::Element<Shell>>(
                queries: &[Query], pages: &[*const u8], head: usize, dim: usize, scores: Scores,
            ) {
                unsafe {
                    let page = |i: usize| pages[i].add(head).cast::<E>();
                    if let Ok(all) = <[Query; ATTENTION_QUERIES]>::try_from(queries) {
                        return attention::attend::<Shell, E, ATTENTION_QUERIES>(all, page, dim, scores);
                    }
                    for part in queries.chunks(2) {
                        match *part {
                            [a, b] => attention::attend::<Shell, E, 2>([a, b], page, dim, scores),
                            _ => attention::attend::<Shell, E, 1>([part[0]], page, dim, scores),
                        }
                    }
                }
            }

            $(#[$features])?
            unsafe fn rms_norm(x: *const f32, weight: *const f32, eps: f32, n: usize, out: *mut f32) {
                unsafe { pointwise::rms_norm::<Shell>(x, weight, eps, n, out) }
            }

            $(#[$features])?
            unsafe fn glu<A: pointwise::Activation<Shell>>(gate: *mut f32, up: *const f32, n: usize) {
                unsafe { pointwise::glu::<Shell, A>(gate, up, n) }
            }

            $(#[$features])?
            unsafe fn clamped_swiglu(gate: *mut f32, up: *const f32, n: usize, alpha: f32, limit: f32) {
                unsafe { pointwise::clamped_swiglu::<Shell>(gate, up, n, alpha, limit) }
            }

            $(#[$features])?
            unsafe fn soft_cap(x: *mut f32, cap: f32, n: usize) {
                unsafe { pointwise::soft_cap::<Shell>(x, cap, n) }
            }

            $(#[$features])?
            unsafe fn convolve(channels: ConvolvedChannels) {
                unsafe { delta::convolve::<Shell>(channels) }
            }

            $(#[$features])?
            unsafe fn delta_rule(columns: StateColumns) {
                unsafe { delta::delta_rule::<Shell>(columns) }
            }

            $(#[$features])?
            unsafe fn mamba_scan(columns: StateColumns) {
                unsafe { delta::mamba_scan::<Shell>(columns) }
            }

            $(#[$features])?
            unsafe fn weigh(x: *const f32, n: usize, largest: f32, scale: f32, logs: *mut f32, weights: *mut f32) {
                unsafe { sample::weigh::<Shell>(x, n, largest, scale, logs, weights) }
            }

            $(#[$features])?
            unsafe fn panel_product(k: usize, a: *const f32, b: *const f32, c: *mut f32, stride: usize) {
                unsafe { matmul::panel_product::<Shell, { <Shell as Simd>::TILE }>(k, a, b, c, stride) }
            }

            $(#[$features])?
            unsafe fn round_in_turn(
                weights: &Blocks, sums: &Blocks, global: f32, factor: &BlockFactor, out: &mut Rounded,
            ) {
                unsafe { calibrated::round_in_turn::<Shell>(weights, sums, global, factor, out) }
            }

            $(#[$features])?
            unsafe fn round_beside(
                weights: &Blocks, gradients: &Blocks, global: f32, of_block: (&BlockMoments, &BlockFactor),
                held: &mut Rounded, changes: &mut Blocks,
            ) -> bool {
                unsafe { calibrated::round_beside::<Shell>(weights, gradients, global, of_block, held, changes) }
            }

            /// A divisor of a block, small enough for the level's registers.
            const MOMENT_COLUMNS: usize = if <Shell as Simd>::TILE > 8 { 8 } else { 4 };

            $(#[$features])?
            unsafe fn moment_product(k: usize, a: *const f32, b: *const f32, c: *mut f32) {
                unsafe { matmul::panel_product::<Shell, MOMENT_COLUMNS>(k, a, b, c, LANES) }
            }

            $(#[$features])?
            unsafe fn sum(x: *const f32, n: usize, ahead: usize) -> f32 {
                unsafe { pointwise::sum::<Shell>(x, n, ahead) }
            }

            pub(super) static TABLE: Table = Table {
                level: Level::$level,
                widest: <Shell as Simd>::TILE,
                skinny_tokens: <Shell as Simd>::SKINNY_TOKENS,
                panel_tokens: {
                    let [exact, int8] = <Shell as Simd>::PANEL_TOKENS;
                    assert!(exact <= MOST_SKINNY + 1 && int8 <= MOST_SKINNY + 1);
                    [exact, int8]
                },
                skinny: [
                    skinny::<linear::Nvfp4>, skinny::<linear::F32>, skinny::<linear::F16>, skinny::<linear::Bf16>,
                    skinny::<linear::Int8>,
                ],
                unpack: [
                    unpack::<linear::Nvfp4>, unpack::<linear::F32>, unpack::<linear::F16>, unpack::<linear::Bf16>,
                    unpack::<linear::Int8>,
                ],
                tile,
                quantize_row,
                skinny_int8,
                unpack_int8,
                int8_tile: {
                    assert!(<Shell as Simd>::INT8_TILE <= MOST_INT8_TILE);
                    <Shell as Simd>::INT8_TILE
                },
                tile_int8,
                attend_f16: attend::<u16>,
                attend_f32: attend::<f32>,
                attend_f8: attend::<u8>,
                rms_norm,
                swiglu: glu::<pointwise::Silu>,
                geglu: glu::<pointwise::GeluTanh>,
                sigmoid_gate: glu::<pointwise::Sigmoid>,
                clamped_swiglu,
                soft_cap,
                convolve,
                delta_rule,
                mamba_scan,
                weigh,
                panel_product,
                round_in_turn,
                round_beside,
                moment_columns: MOMENT_COLUMNS,
                moment_product,
                sum,
            };
        }
    };
}

stamp!(scalar, Scalar, crate::cpu::scalar::Scalar,);
#[cfg(target_arch = "x86_64")]
stamp!(avx2, Avx2, crate::cpu::avx2::Avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
stamp!(
    avx512,
    Avx512,
    crate::cpu::avx512::Avx512,
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
);
#[cfg(target_arch = "aarch64")]
stamp!(neon, Neon, crate::cpu::neon::Neon,);
