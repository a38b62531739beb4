// Quantizes values to NVFP4 in one pass: a thread loads a block of 16, finds its scale and stores codes and scale, without a workspace. All
// outputs have the bits of src/format.
#include "quantize/block.cuh"

// 32-bit values, under any rule that derives the scale from the largest magnitude alone.
extern "C" __global__ void __launch_bounds__(THREADS) quantize_f32(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    Block block(a, 4);
    if (block.index >= a.blocks) return;
    float x[BLOCK];
    load_values<F32>(block.input, x);
    float global = global_scale(a);
    float amax = largest_magnitude(x);
    if (!is_finite(amax)) amax = saturated(a, block.index, x, global);
    u32 scale = scale_of(a, amax / E2M1_MAX, global);
    block.write(a, encode(a, x, step_of(a, scale, global)), scale);
}

// A block of 16-bit values, two to a word.
template <Type T>
struct Pairs {
    static constexpr int WORDS = BLOCK / 2;
    static constexpr u32 MAGNITUDES = 0x7fff7fffu;
    static constexpr u32 INFINITY_BITS = T == BF16 ? 0x7f80 : 0x7c00;
    static constexpr u32 ONE = T == BF16 ? 0x3f803f80u : 0x3c003c00u;
    // A number from which on the type has a spacing of one, in both halves: 128 or 1024.
    static constexpr u32 COUNTER = T == BF16 ? 0x43004300u : 0x64006400u;

    u32 w[WORDS];

    static __device__ __forceinline__ u32 larger(u32 p, u32 q) { return T == BF16 ? max_bf16(p, q) : max_f16(p, q); }
    static __device__ __forceinline__ u32 at_least(u32 p, u32 q) { return T == BF16 ? at_least_bf16(p, q) : at_least_f16(p, q); }
    static __device__ __forceinline__ u32 fma(u32 p, u32 q, u32 r) { return T == BF16 ? fma_bf16(p, q, r) : fma_f16(p, q, r); }
    static __device__ __forceinline__ float low(u32 w) { return T == BF16 ? __uint_as_float(w << 16) : f16_low(w); }
    static __device__ __forceinline__ float high(u32 w) { return T == BF16 ? __uint_as_float(w & 0xffff0000u) : f16_high(w); }

    __device__ __forceinline__ Pairs(const uint4* from) {
        uint4 v0 = from[0], v1 = from[1];
        w[0] = v0.x, w[1] = v0.y, w[2] = v0.z, w[3] = v0.w, w[4] = v1.x, w[5] = v1.y, w[6] = v1.z, w[7] = v1.w;
    }

    // The bits of the largest magnitude; those of NaN if there is one.
    __device__ __forceinline__ u32 largest() const {
        u32 pair = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) pair = larger(pair, w[i] & MAGNITUDES);
        return larger(pair, pair >> 16) & 0xffffu;
    }

    // The largest magnitude. If it is not finite, NaN becomes 0, and infinity, which any step maps to the largest code, counts as the
    // largest value that the global scale can represent.
    __device__ __forceinline__ float amax(const Arguments& a, u32 block, float global) {
        u32 bits = largest();
        if (bits < INFINITY_BITS) return low(bits);
        if (a.note.first) {
            u32 at = 0, what = IS_NAN;
#pragma unroll
            for (int i = BLOCK - 1; i >= 0; i--) {
                u32 bits = w[i / 2] >> i % 2 * 16 & 0xffff, magnitude = bits & 0x7fff;
                if (magnitude >= INFINITY_BITS) {
                    at = i, what = magnitude > INFINITY_BITS ? IS_NAN : bits != magnitude ? IS_MINUS_INFINITE : IS_INFINITE;
                }
            }
            take_note(a.note, (u64)block * BLOCK + at, what);
        }
        Pairs finite = *this;
        bool infinite = false;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
#pragma unroll
            for (int shift = 0; shift < 32; shift += 16) {
                u32 bits = w[i] >> shift & 0x7fff;
                infinite |= bits == INFINITY_BITS;
                if (bits > INFINITY_BITS) w[i] &= ~(0xffffu << shift);
                if (bits >= INFINITY_BITS) finite.w[i] &= ~(0xffffu << shift);
            }
        }
        float largest_finite = low(finite.largest());
        return infinite ? fmaxf(largest_finite, a.largest * global) : largest_finite;
    }

    // Makes negative zeros positive for the legacy host, which has none: multiplying by one and adding a zero of the right sign changes
    // nothing else.
    __device__ __forceinline__ void legacy_zeros(const Arguments& a) {
        u32 zero = a.legacy ? 0 : 0x80008000u;
#pragma unroll
        for (int i = 0; i < WORDS; i++) w[i] = fma(w[i], ONE, zero);
    }

    // The signs of eight values, from word 4 `half` on, as signs of their codes.
    __device__ __forceinline__ u32 signs(int half) const {
        const u32* p = w + 4 * half;
        // From each two words, the top bytes of the low halves, then those of the high halves.
        u32 front = __byte_perm(p[0], p[1], 0x7351), back = __byte_perm(p[2], p[3], 0x7351);
        u32 even = __byte_perm(front, back, 0x5410), odd = __byte_perm(front, back, 0x7632);
        return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
    }

    // Codes for any step: counts the thresholds that each value passes, after rounding thresholds up to the type.
    __device__ __forceinline__ uint2 codes(const Arguments& a, float step) const {
        if (step < Thresholds::SMALLEST_STEP) {
            float x[BLOCK];
#pragma unroll
            for (int i = 0; i < WORDS; i++) x[2 * i] = low(w[i]), x[2 * i + 1] = high(w[i]);
            return encode(a, x, step);
        }
        Thresholds thresholds(step, a.rounding == HALF_AWAY);
        u32 at[THRESHOLDS];
#pragma unroll
        for (int i = 0; i < THRESHOLDS; i++) {
            u32 bits = T == BF16 ? (__float_as_uint(thresholds.at[i]) + 0xffff) >> 16 : to_f16_up(thresholds.at[i]);
            at[i] = bits * 0x10001u;
        }
        u32 codes[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 counts[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                counts[i] = COUNTER;
#pragma unroll
                for (int j = 0; j < THRESHOLDS; j++) counts[i] = fma(at_least(w[4 * half + i] & MAGNITUDES, at[j]), ONE, counts[i]);
            }
            u32 front = counts[0] + counts[1] * 256 - COUNTER * 257u, back = counts[2] + counts[3] * 256 - COUNTER * 257u;
            u32 even = __byte_perm(front, back, 0x5410), odd = __byte_perm(front, back, 0x7632);
            codes[half] = (even + odd * 16) | signs(half);
        }
        return make_uint2(codes[0], codes[1]);
    }

    // Codes to nearest even for a step that is an e4m3 value.
    //
    // Each threshold times the step has at most seven significant bits. A 16-bit value next to such a product, but not equal to it, has a
    // quotient that is further from the threshold than half of the spacing of f16, with a margin for the errors of the reciprocal and of
    // the product; so the f16 nearest to value times reciprocal lies on the same side of the threshold, or on it, as the exact quotient.
    __device__ __forceinline__ uint2 codes_single(float step) const {
        float r = reciprocal_approx(step);
        u32 codes[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32* p = w + 4 * half;
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float first = i % 2 ? high(p[i / 2]) : low(p[i / 2]), second = i % 2 ? high(p[2 + i / 2]) : low(p[2 + i / 2]);
                x[i] = pack_f16(fabsf(first) * r, fabsf(second) * r);
            }
            codes[half] = encode_eight(x) | signs(half);
        }
        return make_uint2(codes[0], codes[1]);
    }
};

// 16-bit values, under any rule that derives the scale from the largest magnitude alone.
template <Type T>
__device__ __forceinline__ void quantize(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    Block block(a, 2);
    if (block.index >= a.blocks) return;
    Pairs<T> x(block.input);
    float global = global_scale(a);
    u32 scale = scale_of(a, x.amax(a, block.index, global) / E2M1_MAX, global);
    x.legacy_zeros(a);
    block.write(a, x.codes(a, step_of(a, scale, global)), scale);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_f16(const __grid_constant__ Arguments a) { quantize<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) quantize_bf16(const __grid_constant__ Arguments a) { quantize<BF16>(a); }

// As above without a global scale, rounding to nearest even.
template <Type T>
__device__ __forceinline__ void quantize_single(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    Block block(a, 2);
    if (block.index >= a.blocks) return;
    Pairs<T> x(block.input);
    float amax = x.amax(a, block.index, 1);
    // The quotient by 6, rounded as by a division, unless it is so small that the scale is the smallest anyway.
    constexpr float SIXTH = 1.0f / 6.0f;
    float sixth = amax * SIXTH;
    sixth = __fmaf_rn(__fmaf_rn(sixth, -6.0f, amax), SIXTH, sixth);
    u32 scale = scale_of(a, sixth, 1);
    x.legacy_zeros(a);
    // Only the legacy rule gives a scale of zero, for which its step is not an e4m3 value.
    uint2 codes = scale ? x.codes_single(scale_to_float(scale)) : x.codes(a, LEGACY_ADDEND);
    block.write(a, codes, scale);
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_single_f16(const __grid_constant__ Arguments a) { quantize_single<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) quantize_single_bf16(const __grid_constant__ Arguments a) { quantize_single<BF16>(a); }
