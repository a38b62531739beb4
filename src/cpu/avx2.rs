//! The AVX2 level (with FMA and F16C): sixteen lanes are two 256-bit registers.

use std::arch::x86_64::*;

use super::simd::{Simd, doubled_codes, value_bytes};

pub(super) struct Avx2;

type V = [__m256; 2];

/// A 16-byte table in both halves of a register, as byte shuffles want it.
#[inline(always)]
unsafe fn table(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: AVX2 by the trait's contract; the reference is readable for 16 bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

#[inline(always)]
fn both(a: V, b: V, f: impl Fn(__m256, __m256) -> __m256) -> V {
    [f(a[0], b[0]), f(a[1], b[1])]
}

/// Sums or maxima along the trait's tree, the first step being done.
#[inline(always)]
unsafe fn fold(a: __m256, f: impl Fn(__m128, __m128) -> __m128) -> f32 {
    // SAFETY: AVX2 by the trait's contract; registers only.
    unsafe {
        let a = f(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = f(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(f(a, _mm_shuffle_ps::<1>(a, a)))
    }
}

// SAFETY: every intrinsic used belongs to AVX2, FMA or F16C, which `Level::Avx2` requires; pointers are the trait's.
#[allow(
    clippy::undocumented_unsafe_blocks,
    reason = "one obligation for all: the trait's own, stated above"
)]
unsafe impl Simd for Avx2 {
    type V = V;
    type N = [__m256i; 2];

    // 12 accumulators, 2 weights, 1 activation: 15 of 16 registers.
    const TILE: usize = 6;
    // Makes codes unsigned for vpmaddubsw; 4 * 2 * 24 * 127 still fits in 16 bits.
    const CODE_OFFSET: i32 = 12;

    #[inline(always)]
    unsafe fn splat(x: f32) -> V {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> V {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: V) {
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn add(a: V, b: V) -> V {
        both(a, b, |a, b| unsafe { _mm256_add_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        both(a, b, |a, b| unsafe { _mm256_sub_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        both(a, b, |a, b| unsafe { _mm256_mul_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        both(a, b, |a, b| unsafe { _mm256_div_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        both(a, b, |a, b| unsafe { _mm256_max_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        both(a, b, |a, b| unsafe { _mm256_min_ps(a, b) })
    }
    #[inline(always)]
    unsafe fn abs(a: V) -> V {
        let sign = unsafe { _mm256_set1_ps(-0.0) };
        a.map(|a| unsafe { _mm256_andnot_ps(sign, a) })
    }
    #[inline(always)]
    unsafe fn fma(a: V, b: V, c: V) -> V {
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn round(a: V) -> V {
        a.map(|a| unsafe {
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a)
        })
    }
    #[inline(always)]
    unsafe fn scale_by_power(a: V, n: V) -> V {
        both(a, n, |a, n| unsafe {
            let n = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n))
        })
    }
    #[inline(always)]
    unsafe fn sum(a: V) -> f32 {
        unsafe { fold(_mm256_add_ps(a[0], a[1]), |a, b| _mm_add_ps(a, b)) }
    }
    #[inline(always)]
    unsafe fn largest(a: V) -> f32 {
        unsafe { fold(_mm256_max_ps(a[0], a[1]), |a, b| _mm_max_ps(a, b)) }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u16) -> V {
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(p.add(8).cast())),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u16) -> V {
        unsafe {
            [p, p.add(8)].map(|p| {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            })
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        unsafe {
            // The byte's exponent and mantissa, moved under f32's, read as the value over 2^120; subnormals too.
            let rebias = _mm256_set1_ps(f32::from_bits((127 + 120) << 23));
            [p, p.add(8)].map(|p| {
                let bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
                _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<20>(bits)), rebias)
            })
        }
    }
    #[inline(always)]
    unsafe fn store_i8(p: *mut i8, v: V) {
        unsafe {
            let words = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packs_epi16(
                _mm256_castsi256_si128(words),
                _mm256_extracti128_si256::<1>(words),
            );
            _mm_storeu_si128(p.cast(), bytes);
        }
    }

    #[inline(always)]
    unsafe fn nibbles(p: *const u8, last: bool) -> [__m256i; 2] {
        unsafe {
            let low = _mm256_set1_epi8(15);
            [p, p.add(32)].map(|p| {
                let codes = _mm256_loadu_si256(p.cast());
                _mm256_and_si256(
                    if last {
                        _mm256_srli_epi16::<4>(codes)
                    } else {
                        codes
                    },
                    low,
                )
            })
        }
    }
    #[inline(always)]
    unsafe fn decode(n: [__m256i; 2]) -> [V; 4] {
        unsafe {
            let (high, low) = (table(&value_bytes(24)), table(&value_bytes(16)));
            let odd = _mm256_set1_epi32(0xffff_0000_u32 as i32);
            let halves = n.map(|n| {
                let (high, low) = (_mm256_shuffle_epi8(high, n), _mm256_shuffle_epi8(low, n));
                // One row's even k in the low half of its lane, the odd k in the high half.
                let (k01, k23) = (
                    _mm256_unpacklo_epi8(low, high),
                    _mm256_unpackhi_epi8(low, high),
                );
                [
                    _mm256_slli_epi32::<16>(k01),
                    _mm256_and_si256(k01, odd),
                    _mm256_slli_epi32::<16>(k23),
                    _mm256_and_si256(k23, odd),
                ]
                .map(|bits| _mm256_castsi256_ps(bits))
            });
            std::array::from_fn(|k| [halves[0][k], halves[1][k]])
        }
    }
    #[inline(always)]
    unsafe fn store_codes(p: *mut u8, n: [__m256i; 2]) {
        unsafe {
            let codes = table(&doubled_codes(Self::CODE_OFFSET));
            let order = table(&[0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
            for (i, n) in n.into_iter().enumerate() {
                let bytes = _mm256_shuffle_epi8(_mm256_shuffle_epi8(codes, n), order);
                _mm256_storeu_si256(p.add(32 * i).cast(), bytes);
            }
        }
    }
    #[inline(always)]
    unsafe fn dot(codes: *const u8, x: *const i8, offset: i32) -> V {
        unsafe {
            let x: [__m256i; 4] = std::array::from_fn(|q| {
                _mm256_set1_epi32(x.add(4 * q).cast::<i32>().read_unaligned())
            });
            let (ones, offset) = (_mm256_set1_epi16(1), _mm256_set1_epi32(offset));
            [codes, codes.add(32)].map(|codes| {
                let pairs: [__m256i; 4] = std::array::from_fn(|q| {
                    _mm256_maddubs_epi16(_mm256_loadu_si256(codes.add(64 * q).cast()), x[q])
                });
                let pairs = _mm256_add_epi16(
                    _mm256_add_epi16(pairs[0], pairs[1]),
                    _mm256_add_epi16(pairs[2], pairs[3]),
                );
                _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_madd_epi16(pairs, ones), offset))
            })
        }
    }
}
