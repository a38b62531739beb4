// The bits of NVFP4: e2m1 codes, two per byte with the even index low, and an e4m3 scale per 16. Mirrors src/format.
//
// Decoding moves bits: in the low bits of the exponent and the top of the mantissa of an f16, an e2m1 magnitude reads as the value times
// 2^-14, subnormals included, and an e4m3 scale as the scale times 2^-8. A code times a scale has at most six significant bits and stays
// between 2^-10 and 2688, so the f16 product is exact.
#pragma once
#include "common/ptx.cuh"

constexpr int BLOCK = 16;

constexpr u32 SIGNS = 0x80008000u;
constexpr u32 MAGNITUDES = 0x0e000e00u;
constexpr u32 TWO_8 = 0x5c005c00u;   // 2^8, twice
constexpr u32 TWO_14 = 0x74007400u;  // 2^14, twice
static_assert((15 + 8) << 10 == 0x5c00 && (15 + 14) << 10 == 0x7400, "the exponent field of f16 starts at bit 10 with a bias of 15");

// Sets the sign bit of each byte that is not a valid block scale because it is NaN or has a sign. Mirrors is_block_scale().
__device__ __forceinline__ u32 not_block_scales(u32 bytes) {
    constexpr u32 SIGN_BITS = 0x80808080u;
    // Adding one to the magnitude of NaN, the largest, carries into the sign.
    u32 next = (bytes & ~SIGN_BITS) + 0x01010101u;
    return (bytes | next) & SIGN_BITS;
}

// Undoes the powers of two of decode_pairs() and scale_pair(): 2^-14 of the codes, and 2^-8 2^14 of the scales.
constexpr float WEIGHT_FACTOR = 256.0f;  // 2^8

// The eight codes of a word as four pairs of f16, times 2^-14; pair j holds elements j and j + 4.
__device__ __forceinline__ void decode_pairs(u32 codes, u32 (&pairs)[4]) {
    pairs[0] = ((codes << 12) & SIGNS) | ((codes << 9) & MAGNITUDES);
    pairs[1] = ((codes << 8) & SIGNS) | ((codes << 5) & MAGNITUDES);
    pairs[2] = ((codes << 4) & SIGNS) | ((codes << 1) & MAGNITUDES);
    pairs[3] = (codes & SIGNS) | ((codes >> 3) & MAGNITUDES);
}

// Two scales (bytes 0 and 1 of `bytes`) as f16, times 2^6: exact, and below the largest f16.
__device__ __forceinline__ u32 scale_pair(u32 bytes) { return mul_f16(__byte_perm(bytes, 0, 0x4140) << 7, TWO_14); }
// scale_pair() for bytes 0 and 2.
__device__ __forceinline__ u32 scale_pair_apart(u32 bytes) { return mul_f16((bytes & 0x00ff00ff) << 7, TWO_14); }
__device__ __forceinline__ u32 both_low(u32 pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 pair) { return __byte_perm(pair, 0, 0x3232); }

// Eight codes as four pairs times their scale, which both halves of `scale` hold in the form of scale_pair(): the values times 2^-8.
__device__ __forceinline__ void decode_scaled(u32 codes, u32 scale, u32 (&pairs)[4]) {
    decode_pairs(codes, pairs);
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = mul_f16(pairs[j], scale);
}

// An e4m3 scale as a float. The sign of a scale is never set.
__device__ __forceinline__ float scale_to_float(u8 byte) {
    // As above, with the exponent of an f32.
    return __uint_as_float((u32)byte << 20) * __uint_as_float((127u + 120u) << 23);
}
// An e2m1 code as a float.
__device__ __forceinline__ float code_to_float(u32 code) {
    return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * __uint_as_float((127u + 126u) << 23);
}
// The value of a code and its scales. Mirrors decode(): f32 holds code times scale exactly, so only the product with the global scale
// rounds.
__device__ __forceinline__ float decode_value(float code, float scale, float global) { return code * scale * global; }
