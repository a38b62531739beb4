//! The NEON level: sixteen lanes are four 128-bit registers. Uses only baseline AArch64.

use std::arch::aarch64::*;

use super::simd::{SIGNED_E4M3, Simd, doubled_codes, value_bytes};

pub(super) struct Neon;

type V = [float32x4_t; 4];

#[inline(always)]
fn each(a: V, b: V, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> V {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY: every intrinsic used belongs to baseline AArch64 Advanced SIMD; pointers are the trait's.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one obligation for all: the trait's own, stated above"
)]
unsafe impl Simd for Neon {
    type V = V;
    type N = uint8x16x4_t;

    // 24 accumulators, 4 weights and an activation: 29 of 32 registers.
    const TILE: usize = 6;
    const INT8_TILE: usize = 4;
    const SKINNY_TOKENS: [usize; 2] = [4, 4];
    // A row group is four registers, four chains.
    const SKINNY_SUMS: usize = 1;
    const PANEL_TOKENS: [usize; 2] = [13, 5];
    const CODE_OFFSET: i32 = 0;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        std::array::from_fn(|i| unsafe { vld1q_f32(p.add(4 * i)) })
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        for (i, v) in v.into_iter().enumerate() {
            unsafe { vst1q_f32(p.add(4 * i), v) }
        }
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        each(a, b, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        each(a, b, |a, b| unsafe { vsubq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        each(a, b, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        each(a, b, |a, b| unsafe { vdivq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        each(a, b, |a, b| unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) })
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        each(a, b, |a, b| unsafe { vbslq_f32(vcltq_f32(a, b), a, b) })
    }
    #[inline(always)]
    unsafe fn abs(a: V) -> V {
        a.map(|a| unsafe { vabsq_f32(a) })
    }
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        std::array::from_fn(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn select_less(a: V, b: V, yes: V, no: V) -> V {
        std::array::from_fn(|i| unsafe { vbslq_f32(vcltq_f32(a[i], b[i]), yes[i], no[i]) })
    }
    #[inline(always)]
    unsafe fn power_below(a: V) -> V {
        a.map(|a| unsafe {
            let exponent = vdupq_n_u32(0x7f80_0000);
            vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), exponent))
        })
    }
    #[inline(always)]
    unsafe fn round(a: V) -> V {
        a.map(|a| unsafe { vrndnq_f32(a) })
    }
    #[inline(always)]
    unsafe fn scale_by_power(a: V, n: V) -> V {
        each(a, n, |a, n| unsafe {
            let n = vshlq_n_s32::<23>(vcvtnq_s32_f32(n));
            vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), n))
        })
    }
    #[inline(always)]
    unsafe fn sum(a: V) -> f32 {
        unsafe {
            let a = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            let a = vadd_f32(vget_low_f32(a), vget_high_f32(a));
            vget_lane_f32::<0>(a) + vget_lane_f32::<1>(a)
        }
    }
    #[inline(always)]
    unsafe fn largest(a: V) -> f32 {
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(a[0], a[2]), vmaxq_f32(a[1], a[3]))) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> V {
        // Conversions through the `half` crate: the f16 vector type is not yet part of stable Rust.
        let lanes: [f32; 16] =
            std::array::from_fn(|i| half::f16::from_bits(unsafe { *p.add(i) }).to_f32());
        unsafe { Self::load(lanes.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> V {
        std::array::from_fn(|i| unsafe {
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(p.add(4 * i))))
        })
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> V {
        unsafe {
            let bytes = vld1q_s8(p);
            let words = [vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))];
            std::array::from_fn(|i| {
                let word = words[i / 2];
                vcvtq_f32_s32(vmovl_s16(if i % 2 == 0 {
                    vget_low_s16(word)
                } else {
                    vget_high_s16(word)
                }))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        unsafe {
            // A byte's exponent and mantissa, moved to f32's place, gives the value over 2^120; also for subnormals.
            let rebias = vdupq_n_f32(f32::from_bits((127 + 120) << 23));
            let bytes = vld1q_u8(p);
            let words = [vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes))];
            std::array::from_fn(|i| {
                let word = words[i / 2];
                let bits = vmovl_u16(if i % 2 == 0 {
                    vget_low_u16(word)
                } else {
                    vget_high_u16(word)
                });
                vmulq_f32(vreinterpretq_f32_u32(vshlq_n_u32::<20>(bits)), rebias)
            })
        }
    }
    #[inline(always)]
    unsafe fn load_signed_e4m3(p: *const u8) -> V {
        unsafe {
            // As above, without the copies of the sign in between.
            let rebias = vdupq_n_f32(f32::from_bits((127 + 120) << 23));
            let bytes = vld1q_s8(p.cast());
            let words = [vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))];
            std::array::from_fn(|i| {
                let word = words[i / 2];
                let bits = vmovl_s16(if i % 2 == 0 {
                    vget_low_s16(word)
                } else {
                    vget_high_s16(word)
                });
                let bits = vreinterpretq_u32_s32(vshlq_n_s32::<20>(bits));
                let bits = vandq_u32(bits, vdupq_n_u32(SIGNED_E4M3));
                vmulq_f32(vreinterpretq_f32_u32(bits), rebias)
            })
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: V) {
        unsafe {
            let words = v.map(|v| vqmovn_s32(vcvtnq_s32_f32(v)));
            let low = vqmovn_s16(vcombine_s16(words[0], words[1]));
            let high = vqmovn_s16(vcombine_s16(words[2], words[3]));
            vst1q_s8(p, vcombine_s8(low, high));
        }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8, last: bool) -> uint8x16x4_t {
        unsafe {
            let half = |i: usize| {
                let codes = vld1q_u8(p.add(16 * i));
                if last {
                    vshrq_n_u8::<4>(codes)
                } else {
                    vandq_u8(codes, vdupq_n_u8(15))
                }
            };
            uint8x16x4_t(half(0), half(1), half(2), half(3))
        }
    }
    #[inline(always)]
    unsafe fn decode(n: uint8x16x4_t) -> [V; 4] {
        unsafe {
            let (high, low) = (
                vld1q_u8(value_bytes(24).as_ptr()),
                vld1q_u8(value_bytes(16).as_ptr()),
            );
            let odd = vdupq_n_u32(0xffff_0000);
            let quarters = [n.0, n.1, n.2, n.3].map(|n| {
                let (high, low) = (vqtbl1q_u8(high, n), vqtbl1q_u8(low, n));
                // The even k of one row in the low half of its lane, the odd k in the high half.
                let k01 = vreinterpretq_u32_u8(vzip1q_u8(low, high));
                let k23 = vreinterpretq_u32_u8(vzip2q_u8(low, high));
                [
                    vshlq_n_u32::<16>(k01),
                    vandq_u32(k01, odd),
                    vshlq_n_u32::<16>(k23),
                    vandq_u32(k23, odd),
                ]
                .map(|bits| vreinterpretq_f32_u32(bits))
            });
            std::array::from_fn(|k| std::array::from_fn(|q| quarters[q][k]))
        }
    }
    #[inline(always)]
    unsafe fn store_codes(p: *mut u8, n: uint8x16x4_t) {
        unsafe {
            let codes = vld1q_u8(doubled_codes(Self::CODE_OFFSET).as_ptr());
            let order = vld1q_u8([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15].as_ptr());
            for (i, n) in [n.0, n.1, n.2, n.3].into_iter().enumerate() {
                vst1q_u8(p.add(16 * i), vqtbl1q_u8(vqtbl1q_u8(codes, n), order));
            }
        }
    }
    #[inline(always)]
    unsafe fn dot(codes: *const u8, x: *const i8, _offset: i32) -> V {
        std::array::from_fn(|quarter| unsafe {
            let mut sum = vdupq_n_s32(0);
            for q in 0..4 {
                let codes = vreinterpretq_s8_u8(vld1q_u8(codes.add(64 * q + 16 * quarter)));
                let x =
                    vreinterpretq_s8_s32(vdupq_n_s32(x.add(4 * q).cast::<i32>().read_unaligned()));
                let pairs = vpaddq_s16(
                    vmull_s8(vget_low_s8(codes), vget_low_s8(x)),
                    vmull_s8(vget_high_s8(codes), vget_high_s8(x)),
                );
                sum = vpadalq_s16(sum, pairs);
            }
            vcvtq_f32_s32(sum)
        })
    }
}
