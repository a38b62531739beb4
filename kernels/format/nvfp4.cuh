// NVFP4 as bits: e2m1 codes, two to a byte with the even index low, and an e4m3 scale for each 16. Mirrors src/format.
//
// Decoding moves bits: placed in the exponent's low bits and the top of the mantissa of a bf16, an e2m1 magnitude reads as the
// value times 2^-126, subnormals included, and an e4m3 scale as the scale times 2^-120. A code times a scale has at most six
// significant bits, so the bf16 product is exact.
#pragma once
#include "common/ptx.cuh"

constexpr int BLOCK = 16;

constexpr u32 SIGNS = 0x80008000u;
constexpr u32 MAGNITUDES = 0x01c001c0u;
constexpr u32 TWO_119 = 0x7b007b00u;  // 2^119, twice
static_assert((127 + 119) << 7 == 0x7b00, "the exponent field of bf16 starts at bit 7 with a bias of 127");

// What is left of the powers of two in decode_pairs() after scale_pair(): -126 for the codes, -120 + 238 for the scales.
constexpr float WEIGHT_FACTOR = 256.0f;  // 2^8

// Eight codes of a word as four pairs of bf16 times 2^-126; pair j holds elements j and j + 4.
__device__ __forceinline__ void decode_pairs(u32 codes, u32 (&pairs)[4]) {
    pairs[0] = ((codes << 12) & SIGNS) | ((codes << 6) & MAGNITUDES);
    pairs[1] = ((codes << 8) & SIGNS) | ((codes << 2) & MAGNITUDES);
    pairs[2] = ((codes << 4) & SIGNS) | ((codes >> 2) & MAGNITUDES);
    pairs[3] = (codes & SIGNS) | ((codes >> 6) & MAGNITUDES);
}

// Two scales (bytes 0 and 1 of `bytes`) as bf16 times 2^118: exact, and below the largest bf16.
__device__ __forceinline__ u32 scale_pair(u32 bytes) {
    u32 pair = __byte_perm(bytes, 0, 0x4140) << 4;
    return mul_bf16(mul_bf16(pair, TWO_119), TWO_119);
}
__device__ __forceinline__ u32 both_low(u32 pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ __forceinline__ u32 both_high(u32 pair) { return __byte_perm(pair, 0, 0x3232); }

// An e4m3 scale as a float. The sign of a scale is never set.
__device__ __forceinline__ float scale_to_float(u8 byte) {
    // As an f32 with the exponent of bf16: the same move of bits, undone by 2^120.
    return __uint_as_float((u32)byte << 20) * __uint_as_float((127u + 120u) << 23);
}
// An e2m1 code as a float.
__device__ __forceinline__ float code_to_float(u32 code) {
    return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * __uint_as_float((127u + 126u) << 23);
}
