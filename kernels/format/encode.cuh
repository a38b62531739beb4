// Encodes values as e2m1 codes and e4m3 scales. Mirrors src/format bit for bit: every operation here rounds like the CPU's, or the comment
// beside it shows why that makes no difference.
#pragma once
#include "common/ptx.cuh"
#include "format/nvfp4.cuh"

constexpr float E2M1_MAX = 6.0f;
constexpr float E4M3_MAX = 448.0f;
constexpr u32 E4M3_MAX_BYTE = 0x7e;
constexpr int THRESHOLDS = 7;

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < INFINITY; }

// The e4m3 byte nearest to a value that is neither negative nor NaN, ties to even.
__device__ __forceinline__ u32 encode_scale(float x) {
    x = fminf(x, E4M3_MAX);
    // At 2^14 an f32 steps by 2^-9, as e4m3 does below 2^-6.
    u32 subnormal = __float_as_uint(x + 16384.0f) - 0x46800000u;
    u32 bits = __float_as_uint(x);
    u32 normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    return x < 1.0f / 64.0f ? subnormal : normal;
}
// As above, but never 0.
__device__ __forceinline__ u32 encode_scale_above_zero(float x) { return max(encode_scale(x), 1u); }

// The e4m3 byte of the smallest value not below x, which is not negative; saturates.
__device__ __forceinline__ u32 encode_scale_up(float x) {
    u32 nearest = encode_scale(x);
    return nearest + (scale_to_float(nearest) < x && nearest < E4M3_MAX_BYTE);
}

// The smallest power of two 2^p such that reach < 2^(p + bits). Mirrors power_for() of src/format/adamw.rs.
__device__ __forceinline__ float power_for(float reach, int bits) {
    int exponent = (int)(__float_as_uint(reach) >> 23 & 0xff) - 127;
    return __uint_as_float((u32)max(min(max(exponent, -80), 127) + 1 - bits + 127, 1) << 23);
}

// The magnitude code of a quotient that is not negative, by rounding mode.
__device__ __forceinline__ u32 nearest_even(float q) {
    return (q > 0.25f) + (q >= 0.75f) + (q > 1.25f) + (q >= 1.75f) + (q > 2.5f) + (q >= 3.5f) + (q > 5.0f);
}
__device__ __forceinline__ u32 half_away(float q) {
    return (q >= 0.25f) + (q >= 0.75f) + (q >= 1.25f) + (q >= 1.75f) + (q >= 2.5f) + (q >= 3.5f) + (q >= 5.0f);
}
__device__ __forceinline__ u32 stochastic(float q, u32 random) {
    q = fminf(q, E2M1_MAX);
    // Codes rise by one per gap of 0.5 below 2, of 1 below 4 and of 2 above.
    u32 offset = q < 2 ? 0 : q < 4 ? 2 : 4;
    float gaps = q < 2 ? q * 2 : q < 4 ? q : q * 0.5f;
    u32 whole = (u32)gaps;
    float fraction = gaps - whole;
    float threshold = (random >> 8) * (1.0f / (1 << 24));
    return whole + offset + (threshold < fraction);
}
// The magnitude of a code without its sign.
__device__ __forceinline__ float magnitude(u32 code) { return (code + (code > 4) + (code > 5) + 3 * (code > 6)) * 0.5f; }

// The smallest values whose quotients by a step pass each threshold between codes, so that values need no division. A quotient is rounded
// to f32 before it is compared. With h half of the spacing of f32 below (or above) a threshold t, whose mantissa is even, the rounded
// quotient is at least t exactly when the exact one is at least t - h, and more than t exactly when the exact one is more than t + h. (t -
// h) or (t + h) times the step is one fused operation with directed rounding, unless the step is so small that h times the step loses bits.
struct Thresholds {
    float at[THRESHOLDS];

    static constexpr float SMALLEST_STEP = 1.0f / (1ull << 48) / (1ull << 48);

    // EXPONENT is that of `t`. POWER: `t` is a power of two, below which the spacing of f32 is half as large.
    template <int EXPONENT, bool POWER>
    static __device__ __forceinline__ float at_least(float t, float step) {
        constexpr int h = EXPONENT - 24 - POWER;
        return __fmaf_ru(t, step, -(step * __uint_as_float((127 + h) << 23)));
    }
    template <int EXPONENT, bool POWER>
    static __device__ __forceinline__ float above(float t, float step) {
        constexpr int h = EXPONENT - 24;
        return __uint_as_float(__float_as_uint(__fmaf_rd(t, step, step * __uint_as_float((127 + h) << 23))) + 1);
    }

    __device__ __forceinline__ Thresholds(float step, bool half_away) {
        at[0] = half_away ? at_least<-2, true>(0.25f, step) : above<-2, true>(0.25f, step);
        at[1] = at_least<-1, false>(0.75f, step);
        at[2] = half_away ? at_least<0, false>(1.25f, step) : above<0, false>(1.25f, step);
        at[3] = at_least<0, false>(1.75f, step);
        at[4] = half_away ? at_least<1, false>(2.5f, step) : above<1, false>(2.5f, step);
        at[5] = at_least<1, false>(3.5f, step);
        at[6] = half_away ? at_least<2, false>(5.0f, step) : above<2, false>(5.0f, step);
    }

    // The number of thresholds that a magnitude passes: its code.
    __device__ __forceinline__ u32 passed(float magnitude) const {
        u32 code = 0;
#pragma unroll
        for (int i = 0; i < THRESHOLDS; i++) code += magnitude >= at[i];
        return code;
    }
};

// Codes of eight magnitudes at once, to nearest even, from four words of two f16; word i has values i and i + 4.
//
// A code is 2 x up to 2, x + 2 up to 4 and x / 2 + 4 up to 6: three ramps, each clamped at its ends, added to 1024, where the spacing of
// f16 is one. Each addition rounds to even, and the sum before it is even where its ramp begins.
__device__ __forceinline__ u32 encode_eight(const u32 (&x)[4]) {
    constexpr u32 HALF = 0x38003800u, ONE = 0x3c003c00u, TWO = 0x40004000u, FOUR = 0x44004400u, MINUS_ONE = 0xbc00bc00u, MINUS_TWO = 0xc000c000u;
    constexpr u32 BASE = 0x64006400u;  // 1024, twice
    u32 codes = 0u - BASE * 0x1111u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 sum = fma_f16(fma_sat_f16(x[i], HALF, 0), FOUR, BASE);
        sum = fma_f16(fma_sat_f16(x[i], HALF, MINUS_ONE), TWO, sum);
        sum = fma_f16(fma_sat_f16(x[i], HALF, MINUS_TWO), ONE, sum);
        codes += sum << 4 * i;
    }
    return codes;
}
