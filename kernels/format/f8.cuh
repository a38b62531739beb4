// Elements of cached keys and values: f16, or e4m3 codes with an f32 scale for each vector, which mirror src/format/f8.rs.
#pragma once
#include "common/reduce.cuh"
#include "format/encode.cuh"

// The scale of a vector with this largest magnitude, which is infinity if an element is not finite: the scale is NaN then.
__device__ __forceinline__ float f8_scale(float amax) {
    constexpr u32 NOT_A_NUMBER = 0x7fc00000, SMALLEST_NORMAL = 0x00800000;
    float scale = amax / E4M3_MAX;
    if (!is_finite(amax)) return __uint_as_float(NOT_A_NUMBER);
    return scale < __uint_as_float(SMALLEST_NORMAL) ? 0 : scale;
}
// The magnitude of an element, infinity if it is not finite: f8_scale() takes the largest of a vector.
__device__ __forceinline__ float f8_magnitude(float x) { return is_finite(x) ? fabsf(x) : INFINITY; }

// The code of an element, to nearest even; 0 under a scale of 0 or NaN.
__device__ __forceinline__ u8 f8_code(float x, float scale) {
    if (!(scale > 0)) return 0;
    float quotient = x / scale;
    return (u8)(encode_scale(fabsf(quotient)) | (__float_as_uint(quotient) >> 24 & 0x80));
}

// The four codes of a word as two pairs of f16, exactly.
__device__ __forceinline__ void f8_pairs(u32 word, u32& low, u32& high) {
#if __CUDA_ARCH__ >= 890
    low = e4m3_to_f16((u16)word);
    high = e4m3_to_f16((u16)(word >> 16));
#else
    // In the bits of f16, with the sign apart, a code reads as its value times 2^-8.
    auto pair = [](u32 bytes) { return mul_f16((bytes & SIGNS) | (bytes >> 1 & 0x3f803f80u), TWO_8); };
    low = pair(__byte_perm(word, 0, 0x1404));
    high = pair(__byte_perm(word, 0, 0x3424));
#endif
}

// The value of an element, without the scale of its vector.
__device__ __forceinline__ float element_to_float(u16 x) { return f16_to_float(x); }
__device__ __forceinline__ float element_to_float(u8 code) {
    return __uint_as_float(__float_as_uint(scale_to_float(code & 0x7f)) | (u32)(code & 0x80) << 24);
}

// The scale of a vector, of which each lane of a warp has N elements; 1 for elements without scales.
template <typename E, int N>
__device__ __forceinline__ float vector_scale(const float (&y)[N]) {
    if (!HAS_SCALES<E>) return 1;
    float amax = 0;
#pragma unroll
    for (int j = 0; j < N; j++) amax = fmaxf(amax, f8_magnitude(y[j]));
    return f8_scale(warp_max(amax));
}

// An element as it is cached, under the scale of its vector.
template <typename E>
__device__ __forceinline__ E to_element(float x, float scale) {
    return HAS_SCALES<E> ? (E)f8_code(x, scale) : (E)to_f16(x);
}
