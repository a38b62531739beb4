//! The AVX2 level (with FMA and F16C): sixteen lanes are two 256-bit registers.

use std::arch::x86_64::*;

use super::simd::{SIGNED_E4M3, Simd, doubled_codes, value_bytes};

pub(super) struct Avx2;

type V = [__m256; 2];

/// A 16-byte table in both halves of a register, for byte shuffles.
#[inline(always)]
unsafe fn table(bytes: &[u8; 16]) -> __m256i {
    // SAFETY: AVX2 by the trait's contract; the reference is readable for 16 bytes.
    unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast())) }
}

// Halves of the trait's operations. They are plain functions rather than closures and iterators, because only always-inlined code is
// compiled with the level's features.

#[inline(always)]
unsafe fn scale_by_power(a: __m256, n: __m256) -> __m256 {
    // SAFETY: AVX2 by the trait's contract; registers only.
    unsafe {
        let n = _mm256_slli_epi32::<23>(_mm256_cvtps_epi32(n));
        _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n))
    }
}

#[inline(always)]
unsafe fn widen_bf16(p: *const u16) -> __m256 {
    // SAFETY: AVX2 by the trait's contract, as are the 8 elements at `p`.
    unsafe {
        let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
    }
}

/// A byte's exponent and mantissa, moved to f32's place, gives the value over 2^120; also for subnormals.
#[inline(always)]
unsafe fn widen_e4m3(p: *const u8) -> __m256 {
    // SAFETY: AVX2 by the trait's contract, as are the 8 bytes at `p`.
    unsafe {
        let rebias = _mm256_set1_ps(f32::from_bits((127 + 120) << 23));
        let bits = _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()));
        _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<20>(bits)), rebias)
    }
}

#[inline(always)]
unsafe fn widen_signed_e4m3(p: *const u8) -> __m256 {
    // SAFETY: AVX2 by the trait's contract, as are the 8 bytes at `p`.
    unsafe {
        let rebias = _mm256_set1_ps(f32::from_bits((127 + 120) << 23));
        let bits = _mm256_slli_epi32::<20>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())));
        let bits = _mm256_and_si256(bits, _mm256_set1_epi32(SIGNED_E4M3 as i32));
        _mm256_mul_ps(_mm256_castsi256_ps(bits), rebias)
    }
}

#[inline(always)]
unsafe fn nibbles(p: *const u8, last: bool) -> __m256i {
    // SAFETY: AVX2 by the trait's contract, as are the 32 bytes at `p`.
    unsafe {
        let codes = _mm256_loadu_si256(p.cast());
        _mm256_and_si256(
            if last {
                _mm256_srli_epi16::<4>(codes)
            } else {
                codes
            },
            _mm256_set1_epi8(15),
        )
    }
}

#[inline(always)]
unsafe fn decode(n: __m256i) -> [__m256; 4] {
    // SAFETY: AVX2 by the trait's contract; registers only.
    unsafe {
        let high = _mm256_shuffle_epi8(table(&value_bytes(24)), n);
        let low = _mm256_shuffle_epi8(table(&value_bytes(16)), n);
        // The even k of one row in the low half of its lane, the odd k in the high half.
        let (k01, k23) = (
            _mm256_unpacklo_epi8(low, high),
            _mm256_unpackhi_epi8(low, high),
        );
        let odd = _mm256_set1_epi32(0xffff_0000_u32 as i32);
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(k01)),
            _mm256_castsi256_ps(_mm256_and_si256(k01, odd)),
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(k23)),
            _mm256_castsi256_ps(_mm256_and_si256(k23, odd)),
        ]
    }
}

/// Eight rows of a block of the panel times `x`.
#[inline(always)]
unsafe fn dot(codes: *const u8, x: *const i8, offset: i32) -> __m256 {
    // SAFETY: AVX2 by the trait's contract, as are the bytes at `codes` and `x`.
    unsafe {
        let mut pairs = _mm256_setzero_si256();
        for q in 0..4 {
            let x = _mm256_set1_epi32(x.add(4 * q).cast::<i32>().read_unaligned());
            let codes = _mm256_loadu_si256(codes.add(64 * q).cast());
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(codes, x));
        }
        finish_dot(pairs, offset)
    }
}

/// Converts the 16-bit sums of pairs of k to the accumulators of rows.
#[inline(always)]
unsafe fn finish_dot(pairs: __m256i, offset: i32) -> __m256 {
    // SAFETY: AVX2 by the trait's contract; registers only.
    unsafe {
        let sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        _mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(offset)))
    }
}

/// The codes of eight rows of a half unit, as [`Simd::store_codes`] writes them.
#[inline(always)]
unsafe fn codes_to_store(n: __m256i) -> __m256i {
    // SAFETY: AVX2 by the trait's contract; registers only.
    unsafe {
        let codes = _mm256_shuffle_epi8(table(&doubled_codes(Avx2::CODE_OFFSET)), n);
        let order = table(&[0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]);
        _mm256_shuffle_epi8(codes, order)
    }
}

/// [`dot`] on the packed form with `T` tokens; `units` points to the eight rows' half of the first unit.
#[inline(always)]
unsafe fn block_dots<const T: usize>(
    units: *const u8,
    x: *const i8,
    offsets: *const i32,
    row: usize,
) -> [__m256; T] {
    // SAFETY: AVX2 by the trait's contract, as are the bytes at `units`, `x` and `offsets`.
    unsafe {
        let mut pairs = [_mm256_setzero_si256(); T];
        for q in 0..4 {
            let codes = codes_to_store(nibbles(units.add(q / 2 * 64), q % 2 == 1));
            for t in 0..T {
                let x = x.add(t * row * 16 + 4 * q).cast::<i32>();
                let products = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(x.read_unaligned()));
                pairs[t] = _mm256_add_epi16(pairs[t], products);
            }
        }
        let mut dots = [_mm256_setzero_ps(); T];
        for t in 0..T {
            dots[t] = finish_dot(pairs[t], *offsets.add(t * row));
        }
        dots
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
    // 4 accumulators, 4 sums of pairs and 2 codes; more tokens would not stay in registers.
    const INT8_TILE: usize = 2;
    // 8 accumulators and 8 registers of decoded weights; 6 tokens would spill. In int8, 8 sums of pairs.
    const SKINNY_TOKENS: [usize; 2] = [4, 8];
    // Four chains; more would leave no registers for decoding.
    const SKINNY_SUMS: usize = 2;
    const PANEL_TOKENS: [usize; 2] = [13, 33];
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
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub(a: V, b: V) -> V {
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: V, b: V) -> V {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn div(a: V, b: V) -> V {
        unsafe { [_mm256_div_ps(a[0], b[0]), _mm256_div_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn max(a: V, b: V) -> V {
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn min(a: V, b: V) -> V {
        unsafe { [_mm256_min_ps(a[0], b[0]), _mm256_min_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn abs(a: V) -> V {
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            [_mm256_andnot_ps(sign, a[0]), _mm256_andnot_ps(sign, a[1])]
        }
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
        const MODE: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        unsafe { [_mm256_round_ps::<MODE>(a[0]), _mm256_round_ps::<MODE>(a[1])] }
    }
    #[inline(always)]
    unsafe fn select_less(a: V, b: V, yes: V, no: V) -> V {
        std::array::from_fn(|i| unsafe {
            _mm256_blendv_ps(no[i], yes[i], _mm256_cmp_ps::<_CMP_LT_OQ>(a[i], b[i]))
        })
    }
    #[inline(always)]
    unsafe fn power_below(a: V) -> V {
        unsafe {
            let exponent = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f80_0000));
            [_mm256_and_ps(a[0], exponent), _mm256_and_ps(a[1], exponent)]
        }
    }
    #[inline(always)]
    unsafe fn scale_by_power(a: V, n: V) -> V {
        unsafe { [scale_by_power(a[0], n[0]), scale_by_power(a[1], n[1])] }
    }
    #[inline(always)]
    unsafe fn sum(a: V) -> f32 {
        unsafe {
            let a = _mm256_add_ps(a[0], a[1]);
            let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }
    }
    #[inline(always)]
    unsafe fn largest(a: V) -> f32 {
        unsafe {
            let a = _mm256_max_ps(a[0], a[1]);
            let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
            _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
        }
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
        unsafe { [widen_bf16(p), widen_bf16(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> V {
        unsafe {
            let eight =
                |p: *const i8| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())));
            [eight(p), eight(p.add(8))]
        }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> V {
        unsafe { [widen_e4m3(p), widen_e4m3(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_signed_e4m3(p: *const u8) -> V {
        unsafe { [widen_signed_e4m3(p), widen_signed_e4m3(p.add(8))] }
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
        unsafe { [nibbles(p, last), nibbles(p.add(32), last)] }
    }
    #[inline(always)]
    unsafe fn decode(n: [__m256i; 2]) -> [V; 4] {
        unsafe {
            let (a, b) = (decode(n[0]), decode(n[1]));
            [[a[0], b[0]], [a[1], b[1]], [a[2], b[2]], [a[3], b[3]]]
        }
    }
    #[inline(always)]
    unsafe fn store_codes(p: *mut u8, n: [__m256i; 2]) {
        unsafe {
            for (i, n) in n.into_iter().enumerate() {
                _mm256_storeu_si256(p.add(32 * i).cast(), codes_to_store(n));
            }
        }
    }
    #[inline(always)]
    unsafe fn dot(codes: *const u8, x: *const i8, offset: i32) -> V {
        unsafe { [dot(codes, x, offset), dot(codes.add(32), x, offset)] }
    }
    #[inline(always)]
    unsafe fn block_dots<const T: usize>(
        units: *const u8,
        x: *const i8,
        offsets: *const i32,
        row: usize,
    ) -> [V; T] {
        unsafe {
            let low = block_dots::<T>(units, x, offsets, row);
            let high = block_dots::<T>(units.add(32), x, offsets, row);
            let mut dots = [Self::splat(0.0); T];
            for t in 0..T {
                dots[t] = [low[t], high[t]];
            }
            dots
        }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}
