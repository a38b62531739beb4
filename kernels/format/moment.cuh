// The moments of an optimizer in 4 and 8 bits. Mirrors src/format/moment.rs bit for bit.
#pragma once
#include "format/encode.cuh"
#include "format/fraction.cuh"
#include "format/random.cuh"

constexpr float FIRST_MAX = 7.0f, SECOND_MAX = 15.0f, WIDE_MAX = 127.0f;

// The scale of a block; `inverse` is 1 divided by the largest code and the global scale.
__device__ __forceinline__ u32 moment_scale(float amax, float inverse) {
    // In the exponent and the top of the mantissa of an f32, an e4m3 scale reads as the scale times 2^-120, subnormals included. Rounding
    // up values below the subnormals of f32 does not skip a scale.
    u32 bits = __float_as_uint(__fmul_ru(__fmul_rn(amax, inverse), __uint_as_float(7u << 23)));
    return min((bits + 0xfffff) >> 20, E4M3_MAX_BYTE);
}

// For first moment i of eight: the draw, byte `at` of a word, plus 7 minus its code. 2^7 plus both plus half of a draw's step is an f32
// with steps of 2^-16, so that the code is in its third byte, the draw in its second, and the half in its first.
__device__ __forceinline__ void decode_first8(u32 nibbles, uint2 draws, float* x) {
    Bytes codes = bytes_of_nibbles(nibbles ^ 0x77777777u);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        u32 word = i ? draws.y : draws.x;
        // Elements i and i + 2, then i + 1 and i + 3, with a draw and a code in each half.
        u32 pairs[2] = {__byte_perm(word, codes.even, i ? 0x7260 : 0x5240), __byte_perm(word, codes.odd, i ? 0x7361 : 0x5341)};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 bits = __byte_perm(pairs[j % 2], 0x43000080u, j / 2 ? 0x7324 : 0x7104);
            x[i + j] = 135.5f - __uint_as_float(bits);
        }
    }
}
// Eight codes of first moments; `steps` is 65536 divided by their scales. Quotients are at most 7, because scales are rounded up.
__device__ __forceinline__ u32 encode_first8(const float* values, float steps, uint2 draws) {
    float rounded[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        // 1.5 times 2^23, the dither and a half.
        u32 fraction = __byte_perm(i / 4 ? draws.y : draws.x, 0x4b400080u, 0x7604 | i % 4 << 4);
        rounded[i] = __fmaf_rn(values[i], steps, __uint_as_float(fraction));
    }
    return whole_nibbles(rounded);
}

// Decodes eight square roots of second moments, divided by their scales, times `unit`.
__device__ __forceinline__ void decode_second8(u32 nibbles, float unit, float* x) {
    Bytes codes = bytes_of_nibbles(nibbles);
#pragma unroll
    // Exact up to the final rounding to the product.
    for (int i = 0; i < 8; i++) x[i] = __fmaf_rn(from_nibble(codes, i), unit, -TWO_23 * unit);
}
// Eight codes of square roots; each draw serves two of them.
__device__ __forceinline__ u32 encode_second8(const float* roots, float steps, const u32* draws) {
    float rounded[8];
#pragma unroll
    for (int i = 0; i < 8; i++) rounded[i] = __fmaf_rn(roots[i], steps, from_half(draws[i / 2], i % 2));
    u32 codes = whole_nibbles(rounded);
    // Never zero.
    u32 any = codes | codes >> 1;
    return codes | (~(any | any >> 2) & 0x11111111u);
}

// Rounds stochastically, by a threshold between 0 and 1.
__device__ __forceinline__ float round_stochastic(float quotient, float threshold) {
    float low = floorf(quotient);
    return low + (threshold < quotient - low ? 1.0f : 0.0f);
}
