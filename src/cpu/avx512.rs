//! The AVX-512 level (F, BW, VL, VNNI): sixteen lanes are one 512-bit register.

use std::arch::x86_64::*;

use super::simd::{SIGNED_E4M3, Simd, doubled_codes, value_bytes};

pub(super) struct Avx512;

/// A 16-byte table in all four quarters of a register, for byte shuffles.
#[inline(always)]
unsafe fn table(bytes: &[u8; 16]) -> __m512i {
    // SAFETY: AVX-512 by the trait's contract; the reference is readable for 16 bytes.
    unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

#[inline(always)]
unsafe fn upper(a: __m512) -> __m256 {
    // SAFETY: AVX-512 by the trait's contract; registers only.
    unsafe { _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(a))) }
}

/// The codes of a half unit as [`Simd::store_codes`] writes them.
#[inline(always)]
unsafe fn codes_to_store(n: __m512i) -> __m512i {
    // SAFETY: AVX-512 by the trait's contract; registers only.
    unsafe {
        let codes = _mm512_shuffle_epi8(table(&doubled_codes(Avx512::CODE_OFFSET)), n);
        let order = table(&[0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
        _mm512_shuffle_epi8(codes, order)
    }
}

// SAFETY: every intrinsic used belongs to the features `Level::Avx512` requires; pointers are the trait's.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one obligation for all: the trait's own, stated above"
)]
unsafe impl Simd for Avx512 {
    type V = __m512;
    type N = __m512i;

    // Wide enough that the two FMA pipes, not the one weight load, are the limit; 24 of 32 registers with the main
    // accumulators.
    const TILE: usize = 12;
    const INT8_TILE: usize = 4;
    // 16 accumulators, 4 decoded weights and the tables that decode them, of 32 registers.
    const SKINNY_TOKENS: [usize; 2] = [8, 8];
    const SKINNY_SUMS: usize = 8;
    const PANEL_TOKENS: [usize; 2] = [33, 33];
    // Makes codes unsigned for vpdpbusd.
    const CODE_OFFSET: i32 = 12;

    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(a: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn select_less(a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    unsafe fn power_below(a: __m512) -> __m512 {
        unsafe {
            let exponent = _mm512_set1_epi32(0x7f80_0000);
            _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), exponent))
        }
    }
    #[inline(always)]
    unsafe fn round(a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
    }
    #[inline(always)]
    unsafe fn scale_by_power(a: __m512, n: __m512) -> __m512 {
        unsafe {
            let n = _mm512_slli_epi32::<23>(_mm512_cvtps_epi32(n));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), n))
        }
    }
    #[inline(always)]
    unsafe fn sum(a: __m512) -> f32 {
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), upper(a));
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }
    }
    #[inline(always)]
    unsafe fn largest(a: __m512) -> f32 {
        unsafe {
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), upper(a));
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> __m512 {
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        unsafe {
            // A byte's exponent and mantissa, moved to f32's place, gives the value over 2^120; also for subnormals.
            let rebias = _mm512_set1_ps(f32::from_bits((127 + 120) << 23));
            let bits = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
            _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32::<20>(bits)), rebias)
        }
    }
    #[inline(always)]
    unsafe fn load_signed_e4m3(p: *const u8) -> __m512 {
        unsafe {
            // As above, without the copies of the sign in between.
            let rebias = _mm512_set1_ps(f32::from_bits((127 + 120) << 23));
            let bits = _mm512_slli_epi32::<20>(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())));
            let bits = _mm512_and_si512(bits, _mm512_set1_epi32(SIGNED_E4M3 as i32));
            _mm512_mul_ps(_mm512_castsi512_ps(bits), rebias)
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: __m512) {
        unsafe { _mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v))) }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8, last: bool) -> __m512i {
        unsafe {
            let codes = _mm512_loadu_si512(p.cast());
            let codes = if last {
                _mm512_srli_epi16::<4>(codes)
            } else {
                codes
            };
            _mm512_and_si512(codes, _mm512_set1_epi8(15))
        }
    }
    #[inline(always)]
    unsafe fn decode(n: __m512i) -> [__m512; 4] {
        unsafe {
            let high = _mm512_shuffle_epi8(table(&value_bytes(24)), n);
            let low = _mm512_shuffle_epi8(table(&value_bytes(16)), n);
            // The even k of one row in the low half of its lane, the odd k in the high half.
            let (k01, k23) = (
                _mm512_unpacklo_epi8(low, high),
                _mm512_unpackhi_epi8(low, high),
            );
            let odd = _mm512_set1_epi32(0xffff_0000_u32 as i32);
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(k01)),
                _mm512_castsi512_ps(_mm512_and_si512(k01, odd)),
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(k23)),
                _mm512_castsi512_ps(_mm512_and_si512(k23, odd)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store_codes(p: *mut u8, n: __m512i) {
        unsafe { _mm512_storeu_si512(p.cast(), codes_to_store(n)) }
    }
    #[inline(always)]
    unsafe fn dot(codes: *const u8, x: *const i8, offset: i32) -> __m512 {
        unsafe {
            let mut sum = _mm512_set1_epi32(-offset);
            for q in 0..4 {
                let x = _mm512_set1_epi32(x.add(4 * q).cast::<i32>().read_unaligned());
                sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(codes.add(64 * q).cast()), x);
            }
            _mm512_cvtepi32_ps(sum)
        }
    }
    #[inline(always)]
    unsafe fn block_dots<const T: usize>(
        units: *const u8,
        x: *const i8,
        offsets: *const i32,
        row: usize,
    ) -> [__m512; T] {
        unsafe {
            let mut sums = [_mm512_setzero_si512(); T];
            for t in 0..T {
                sums[t] = _mm512_set1_epi32(-*offsets.add(t * row));
            }
            for q in 0..4 {
                let codes = codes_to_store(Self::nibbles(units.add(q / 2 * 64), q % 2 == 1));
                for t in 0..T {
                    let x = x.add(t * row * 16 + 4 * q).cast::<i32>();
                    let x = _mm512_set1_epi32(x.read_unaligned());
                    sums[t] = _mm512_dpbusd_epi32(sums[t], codes, x);
                }
            }
            let mut dots = [Self::splat(0.0); T];
            for t in 0..T {
                dots[t] = _mm512_cvtepi32_ps(sums[t]);
            }
            dots
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
