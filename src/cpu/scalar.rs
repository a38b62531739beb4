//! The portable level: plain Rust over arrays of sixteen lanes. The other levels are compared with it bit by bit.

use half::{bf16, f16};

use super::simd::Simd;
use crate::format::{e2m1, e4m3};

pub(super) struct Scalar;

fn zip(a: [f32; 16], b: [f32; 16], f: impl Fn(f32, f32) -> f32) -> [f32; 16] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

fn fold(mut a: [f32; 16], f: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            a[i] = f(a[i], a[i + width]);
        }
    }
    a[0]
}

/// Position of (row, k) of a half unit in the packed layout: quarters of four rows, in which pairs of k alternate with rows.
const fn byte_of(row: usize, k: usize) -> usize {
    (row / 4) * 16 + (k / 2) * 8 + (row % 4) * 2 + k % 2
}

// SAFETY: portable code; the pointer obligations are the trait's.
unsafe impl Simd for Scalar {
    type V = [f32; 16];
    type N = [u8; 64];

    const TILE: usize = 4;
    const INT8_TILE: usize = 4;
    const SKINNY_TOKENS: [usize; 2] = [4, 4];
    const SKINNY_SUMS: usize = 1;
    const PANEL_TOKENS: [usize; 2] = [5, 5];
    const CODE_OFFSET: i32 = 0;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 16] {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 16] {
        // SAFETY: the caller gives 16 readable elements.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: [f32; 16]) {
        // SAFETY: the caller gives 16 writable elements.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn max(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(a: [f32; 16]) -> [f32; 16] {
        a.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn select_less(a: [f32; 16], b: [f32; 16], yes: [f32; 16], no: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    unsafe fn power_below(a: [f32; 16]) -> [f32; 16] {
        a.map(|a| f32::from_bits(a.to_bits() & 0x7f80_0000))
    }
    #[inline(always)]
    unsafe fn round(a: [f32; 16]) -> [f32; 16] {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn scale_by_power(a: [f32; 16], n: [f32; 16]) -> [f32; 16] {
        zip(a, n, |a, n| {
            f32::from_bits(a.to_bits().wrapping_add_signed((n as i32) << 23))
        })
    }
    #[inline(always)]
    unsafe fn sum(a: [f32; 16]) -> f32 {
        fold(a, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn largest(a: [f32; 16]) -> f32 {
        fold(a, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> [f32; 16] {
        // SAFETY: the caller gives 16 readable elements.
        unsafe { p.cast::<[u16; 16]>().read_unaligned() }.map(|b| f16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> [f32; 16] {
        // SAFETY: the caller gives 16 readable elements.
        unsafe { p.cast::<[u16; 16]>().read_unaligned() }.map(|b| bf16::from_bits(b).to_f32())
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> [f32; 16] {
        // SAFETY: the caller gives 16 readable bytes.
        unsafe { p.cast::<[i8; 16]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> [f32; 16] {
        // SAFETY: the caller gives 16 readable bytes.
        unsafe { p.cast::<[u8; 16]>().read_unaligned() }.map(e4m3::decode)
    }
    #[inline(always)]
    unsafe fn load_signed_e4m3(p: *const u8) -> [f32; 16] {
        // SAFETY: forwarded.
        unsafe { Self::load_e4m3(p) }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: [f32; 16]) {
        // SAFETY: the caller gives 16 writable bytes.
        unsafe { p.cast::<[i8; 16]>().write_unaligned(v.map(|x| x as i8)) }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8, last: bool) -> [u8; 64] {
        // SAFETY: the caller gives 64 readable bytes.
        let bytes = unsafe { p.cast::<[u8; 64]>().read_unaligned() };
        bytes.map(|b| if last { b >> 4 } else { b & 15 })
    }
    #[inline(always)]
    unsafe fn decode(n: [u8; 64]) -> [[f32; 16]; 4] {
        std::array::from_fn(|k| std::array::from_fn(|row| e2m1::decode(n[byte_of(row, k)])))
    }
    #[inline(always)]
    unsafe fn store_codes(p: *mut u8, n: [u8; 64]) {
        let codes: [u8; 64] =
            std::array::from_fn(|i| (e2m1::decode(n[byte_of(i / 4, i % 4)]) * 2.0) as i8 as u8);
        // SAFETY: the caller gives 64 writable bytes.
        unsafe { p.cast::<[u8; 64]>().write_unaligned(codes) }
    }
    #[inline(always)]
    unsafe fn dot(codes: *const u8, x: *const i8, _offset: i32) -> [f32; 16] {
        std::array::from_fn(|row| {
            let mut sum = 0i32;
            for k in 0..16 {
                // SAFETY: the caller gives 256 bytes of codes and 16 of x.
                let (code, x) =
                    unsafe { (*codes.add((k / 4) * 64 + row * 4 + k % 4) as i8, *x.add(k)) };
                sum += i32::from(code) * i32::from(x);
            }
            sum as f32
        })
    }
}
