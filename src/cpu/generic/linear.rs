//! Products of packed weights with activations: a skinny GEMM for few tokens, which decodes the packed form in registers, and a tiled GEMM,
//! which first unpacks sixteen rows into a panel.
//!
//! Both compute each output in the same order: a chain of fused multiply-adds over the sixteen k of a block, then that partial sum times
//! the block scale, fused onto the accumulator. A token therefore gives the same bits alone or in a batch.

use crate::cpu::packed::{CHUNK_BLOCKS, INT8_SCALE_BYTES, NVFP4_CHUNK_BYTES, UNIT_BYTES};
use crate::cpu::simd::Simd;

/// A packed form of row groups.
///
/// # Safety
/// As for [`Simd`]; `group` must point to a whole row group of that kind with more than `block` blocks.
pub(in crate::cpu) unsafe trait Source<S: Simd> {
    /// Bytes of a block, scales included.
    const BLOCK_BYTES: usize;

    /// The values of k `4 * quarter ..` of a block, one vector of 16 rows each.
    unsafe fn four(group: *const u8, block: usize, quarter: usize) -> [S::V; 4];
    /// The block scale of each of the 16 rows.
    unsafe fn scale(group: *const u8, block: usize) -> S::V;
}

pub(in crate::cpu) struct Nvfp4;
pub(in crate::cpu) struct F32;
pub(in crate::cpu) struct F16;
pub(in crate::cpu) struct Bf16;
pub(in crate::cpu) struct Int8;

/// The start of a block's codes, and of its scales.
#[inline(always)]
unsafe fn nvfp4_block(group: *const u8, block: usize) -> (*const u8, *const u8) {
    // SAFETY: within the row group, by the trait's contract.
    unsafe {
        let chunk = group.add(block / CHUNK_BLOCKS * NVFP4_CHUNK_BYTES);
        let within = block % CHUNK_BLOCKS;
        (
            chunk.add(within * 2 * UNIT_BYTES),
            chunk.add(CHUNK_BLOCKS * 2 * UNIT_BYTES + within * 16),
        )
    }
}

// SAFETY: reads within the group, as the layout in `packed` lays it out.
unsafe impl<S: Simd> Source<S> for Nvfp4 {
    const BLOCK_BYTES: usize = NVFP4_CHUNK_BYTES / CHUNK_BLOCKS;

    #[inline(always)]
    unsafe fn four(group: *const u8, block: usize, quarter: usize) -> [S::V; 4] {
        // SAFETY: as above.
        unsafe {
            let (codes, _) = nvfp4_block(group, block);
            S::decode(S::nibbles(
                codes.add(quarter / 2 * UNIT_BYTES),
                quarter % 2 == 1,
            ))
        }
    }
    #[inline(always)]
    unsafe fn scale(group: *const u8, block: usize) -> S::V {
        // SAFETY: as above. Packing rejects negative and NaN scales; a mapped file may have them, and the result is then some number.
        unsafe { S::load_e4m3(nvfp4_block(group, block).1) }
    }
}

macro_rules! dense_source {
    ($name:ident, $element:ty, $load:ident) => {
        // SAFETY: reads within the group: 16 elements for each k.
        unsafe impl<S: Simd> Source<S> for $name {
            const BLOCK_BYTES: usize = 256 * size_of::<$element>();

            #[inline(always)]
            unsafe fn four(group: *const u8, block: usize, quarter: usize) -> [S::V; 4] {
                // SAFETY: as above.
                unsafe {
                    let p = group
                        .cast::<$element>()
                        .add((block * 16 + quarter * 4) * 16);
                    [
                        S::$load(p),
                        S::$load(p.add(16)),
                        S::$load(p.add(32)),
                        S::$load(p.add(48)),
                    ]
                }
            }
            #[inline(always)]
            unsafe fn scale(_group: *const u8, _block: usize) -> S::V {
                // SAFETY: registers only.
                unsafe { S::splat(1.0) }
            }
        }
    };
}
dense_source!(F32, f32, load);
dense_source!(F16, u16, load_f16);
dense_source!(Bf16, u16, load_bf16);

// SAFETY: reads within the group: 16 scales, then 16 codes for each k.
unsafe impl<S: Simd> Source<S> for Int8 {
    const BLOCK_BYTES: usize = 256;

    #[inline(always)]
    unsafe fn four(group: *const u8, block: usize, quarter: usize) -> [S::V; 4] {
        // SAFETY: as above.
        unsafe {
            let p = group
                .add(INT8_SCALE_BYTES + (block * 16 + quarter * 4) * 16)
                .cast::<i8>();
            [
                S::load_i8(p),
                S::load_i8(p.add(16)),
                S::load_i8(p.add(32)),
                S::load_i8(p.add(48)),
            ]
        }
    }
    /// The scale of a row serves as that of each of its blocks, so that sums have the order of the other forms.
    #[inline(always)]
    unsafe fn scale(group: *const u8, _block: usize) -> S::V {
        // SAFETY: as above.
        unsafe { S::load(group.cast()) }
    }
}

/// `T` tokens times `groups` row groups, `stride` bytes apart from `data`; `x` is `[16 * blocks][T]`. The 16 outputs of token
/// `t` and group `g` go to `t * row + 16 * g` of `out`.
///
/// # Safety
/// As for [`Source`], with that much in `x` and room in `out`.
#[inline(always)]
pub(in crate::cpu) unsafe fn skinny<S: Simd, W: Source<S>, const T: usize>(
    data: *const u8,
    stride: usize,
    groups: usize,
    blocks: usize,
    x: *const f32,
    global: f32,
    out: *mut f32,
    row: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        let mut g = 0;
        while g < groups {
            let (data, out, left) = (data.add(g * stride), out.add(g * 16), groups - g);
            if const { S::SKINNY_SUMS / T >= 4 } && left >= 4 {
                skinny_groups::<S, W, T, 4>(data, stride, blocks, x, global, out, row);
                g += 4;
            } else if const { S::SKINNY_SUMS / T >= 2 } && left >= 2 {
                skinny_groups::<S, W, T, 2>(data, stride, blocks, x, global, out, row);
                g += 2;
            } else {
                skinny_groups::<S, W, T, 1>(data, stride, blocks, x, global, out, row);
                g += 1;
            }
        }
    }
}

/// Prefetch distance of a skinny GEMM, in bytes of each row group: as much as arrives during the latency of memory. The hardware's own
/// prefetching is not enough beside this much computation.
const PREFETCH_BYTES: usize = 4096;

/// Prefetches what a skinny GEMM will read from each of `G` row groups some blocks after `block`, or from the `G` groups after those.
#[inline(always)]
unsafe fn prefetch<S: Simd, W: Source<S>, const G: usize>(
    data: *const u8,
    stride: usize,
    block: usize,
    blocks: usize,
) {
    let ahead = block + PREFETCH_BYTES / W::BLOCK_BYTES;
    // Wrapping, because this may be beyond the weight's end.
    let first = if ahead < blocks {
        data.wrapping_add(ahead * W::BLOCK_BYTES)
    } else {
        data.wrapping_add(G * stride + (ahead - blocks) * W::BLOCK_BYTES)
    };
    for g in 0..G {
        for line in (0..W::BLOCK_BYTES).step_by(64) {
            // SAFETY: any address may be prefetched.
            unsafe { S::prefetch(first.wrapping_add(g * stride + line)) };
        }
    }
}

/// Adds four k of a block, from `4 * Q` on, to the partial sums of `G` row groups and `T` tokens.
#[inline(always)]
unsafe fn skinny_four<S: Simd, W: Source<S>, const T: usize, const G: usize, const Q: usize>(
    data: *const u8,
    stride: usize,
    block: usize,
    x: *const f32,
    part: &mut [[S::V; T]; G],
) {
    // SAFETY: forwarded.
    unsafe {
        for g in 0..G {
            let w = W::four(data.add(g * stride), block, Q);
            for k in 0..4 {
                for t in 0..T {
                    let x = S::splat(*x.add((4 * Q + k) * T + t));
                    part[g][t] = S::fma(w[k], x, part[g][t]);
                }
            }
        }
    }
}

/// Processes `G` row groups at once, so that `G * T` independent chains hide the latency of a multiply-add.
#[inline(always)]
unsafe fn skinny_groups<S: Simd, W: Source<S>, const T: usize, const G: usize>(
    data: *const u8,
    stride: usize,
    blocks: usize,
    x: *const f32,
    global: f32,
    out: *mut f32,
    row: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        let zero = S::splat(0.0);
        let mut sum = [[zero; T]; G];
        for block in 0..blocks {
            prefetch::<S, W, G>(data, stride, block, blocks);
            let x = x.add(block * 16 * T);
            let mut part = [[zero; T]; G];
            // Unrolled by hand: the compiler would keep a loop, with a branch on the quarter inside.
            skinny_four::<S, W, T, G, 0>(data, stride, block, x, &mut part);
            skinny_four::<S, W, T, G, 1>(data, stride, block, x, &mut part);
            skinny_four::<S, W, T, G, 2>(data, stride, block, x, &mut part);
            skinny_four::<S, W, T, G, 3>(data, stride, block, x, &mut part);
            for g in 0..G {
                let scale = W::scale(data.add(g * stride), block);
                for t in 0..T {
                    sum[g][t] = S::fma(part[g][t], scale, sum[g][t]);
                }
            }
        }
        let global = S::splat(global);
        for g in 0..G {
            for t in 0..T {
                S::store(out.add(t * row + g * 16), S::mul(sum[g][t], global));
            }
        }
    }
}

/// Unpacks one row group: `panel` takes `[16 * blocks][16]` unscaled values, `scales` takes `[blocks][16]`.
///
/// # Safety
/// As for [`Source`], with that much room in `panel` and `scales`.
#[inline(always)]
pub(in crate::cpu) unsafe fn unpack<S: Simd, W: Source<S>>(
    group: *const u8,
    blocks: usize,
    panel: *mut f32,
    scales: *mut f32,
) {
    // SAFETY: forwarded.
    unsafe {
        for block in 0..blocks {
            for quarter in 0..4 {
                let w = W::four(group, block, quarter);
                for k in 0..4 {
                    S::store(panel.add((block * 16 + quarter * 4 + k) * 16), w[k]);
                }
            }
            S::store(scales.add(block * 16), W::scale(group, block));
        }
    }
}

/// A panel times a tile of `T` tokens, `x` being `[16 * blocks][T]`; `out` takes `[T][16]`.
///
/// # Safety
/// As for [`unpack`], with that much in `x` and room in `out`.
#[inline(always)]
pub(in crate::cpu) unsafe fn tile<S: Simd, const T: usize>(
    panel: *const f32,
    scales: *const f32,
    blocks: usize,
    x: *const f32,
    global: f32,
    out: *mut f32,
) {
    // SAFETY: forwarded.
    unsafe {
        let zero = S::splat(0.0);
        let mut sum = [zero; T];
        for block in 0..blocks {
            let mut part = [zero; T];
            for k in block * 16..block * 16 + 16 {
                let w = S::load(panel.add(k * 16));
                for t in 0..T {
                    part[t] = S::fma(w, S::splat(*x.add(k * T + t)), part[t]);
                }
            }
            let scale = S::load(scales.add(block * 16));
            for t in 0..T {
                sum[t] = S::fma(part[t], scale, sum[t]);
            }
        }
        let global = S::splat(global);
        for t in 0..T {
            S::store(out.add(t * 16), S::mul(sum[t], global));
        }
    }
}

/// Blocks that share one activation scale in the int8 form.
pub(in crate::cpu) const INT8_SCALE_BLOCKS: usize = 2;

/// One activation row as int8: `codes` takes `16 * blocks`, `scales` one for each [`INT8_SCALE_BLOCKS`] blocks, and
/// `offsets` for each block `CODE_OFFSET` times the sum of its codes.
///
/// # Safety
/// As for [`Simd`], with that much in `x` and room in the outputs.
#[inline(always)]
pub(in crate::cpu) unsafe fn quantize_row<S: Simd>(
    x: *const f32,
    blocks: usize,
    codes: *mut i8,
    scales: *mut f32,
    offsets: *mut i32,
) {
    // SAFETY: forwarded.
    unsafe {
        let mut first = 0;
        while first < blocks {
            let end = blocks.min(first + INT8_SCALE_BLOCKS);
            let mut amax = S::splat(0.0);
            for block in first..end {
                amax = S::max(S::abs(S::load(x.add(block * 16))), amax);
            }
            let amax = S::largest(amax);
            *scales.add(first / INT8_SCALE_BLOCKS) = amax / 127.0;
            let inverse = S::splat(if amax > 0.0 { 127.0 / amax } else { 0.0 });
            for block in first..end {
                let rounded = S::round(S::mul(S::load(x.add(block * 16)), inverse));
                let rounded = S::max(S::min(rounded, S::splat(127.0)), S::splat(-127.0));
                S::store_i8(codes.add(block * 16), rounded);
                // At most 16 * 127: exact in f32 in any order.
                *offsets.add(block) = S::CODE_OFFSET * S::sum(rounded) as i32;
            }
            first = end;
        }
    }
}

/// Unpacks one NVFP4 row group for [`tile_int8`]: `panel` takes `[blocks][256]` bytes, `scales` `[blocks][16]`.
///
/// # Safety
/// As for [`unpack`].
#[inline(always)]
pub(in crate::cpu) unsafe fn unpack_int8<S: Simd>(
    group: *const u8,
    blocks: usize,
    panel: *mut u8,
    scales: *mut f32,
) {
    // SAFETY: forwarded.
    unsafe {
        for block in 0..blocks {
            let (codes, _) = nvfp4_block(group, block);
            for quarter in 0..4 {
                let half = S::nibbles(codes.add(quarter / 2 * UNIT_BYTES), quarter % 2 == 1);
                S::store_codes(panel.add(block * 256 + quarter * 64), half);
            }
            S::store(
                scales.add(block * 16),
                <Nvfp4 as Source<S>>::scale(group, block),
            );
        }
    }
}

/// An int8 panel times `T` quantized tokens; token `t` is at `t` times the row lengths of `codes`, `scales` and
/// `offsets` as [`quantize_row`] fills them. `out` takes `[T][16]`.
///
/// # Safety
/// As for [`unpack_int8`], with that much in the inputs and room in `out`.
#[inline(always)]
pub(in crate::cpu) unsafe fn tile_int8<S: Simd, const T: usize>(
    panel: *const u8,
    panel_scales: *const f32,
    blocks: usize,
    codes: *const i8,
    scales: *const f32,
    offsets: *const i32,
    half_global: f32,
    out: *mut f32,
) {
    // SAFETY: forwarded.
    unsafe {
        let scale_row = blocks.div_ceil(INT8_SCALE_BLOCKS);
        let mut sum = [S::splat(0.0); T];
        for block in 0..blocks {
            let scale = S::load(panel_scales.add(block * 16));
            for t in 0..T {
                let row = t * blocks + block;
                let dot = S::dot(
                    panel.add(block * 256),
                    codes.add(row * 16),
                    *offsets.add(row),
                );
                let x = S::splat(*scales.add(t * scale_row + block / INT8_SCALE_BLOCKS));
                sum[t] = S::fma(dot, S::mul(scale, x), sum[t]);
            }
        }
        let half_global = S::splat(half_global);
        for t in 0..T {
            S::store(out.add(t * 16), S::mul(sum[t], half_global));
        }
    }
}

/// `T` quantized tokens, laid out as for [`tile_int8`], times `groups` NVFP4 row groups, `stride` bytes apart from `data`; outputs
/// go where [`skinny`] puts them. The bits are those of [`tile_int8`].
///
/// # Safety
/// As for [`skinny`], with that much in the inputs.
#[inline(always)]
pub(in crate::cpu) unsafe fn skinny_int8<S: Simd, const T: usize>(
    data: *const u8,
    stride: usize,
    groups: usize,
    blocks: usize,
    codes: *const i8,
    scales: *const f32,
    offsets: *const i32,
    half_global: f32,
    out: *mut f32,
    row: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        let scale_row = blocks.div_ceil(INT8_SCALE_BLOCKS);
        let half_global = S::splat(half_global);
        for g in 0..groups {
            let group = data.add(g * stride);
            let mut sum = [S::splat(0.0); T];
            for block in 0..blocks {
                prefetch::<S, Nvfp4, 1>(group, stride, block, blocks);
                let (units, _) = nvfp4_block(group, block);
                let scale = <Nvfp4 as Source<S>>::scale(group, block);
                let dots =
                    S::block_dots::<T>(units, codes.add(block * 16), offsets.add(block), blocks);
                for t in 0..T {
                    let x = S::splat(*scales.add(t * scale_row + block / INT8_SCALE_BLOCKS));
                    sum[t] = S::fma(dots[t], S::mul(scale, x), sum[t]);
                }
            }
            for t in 0..T {
                S::store(out.add(t * row + g * 16), S::mul(sum[t], half_global));
            }
        }
    }
}
