// int8 rows: codes in two's complement, and one f32 scale per row. Mirrors src/format/int8.rs.
#pragma once
#include "common/ptx.cuh"

constexpr int INT8_CODES = 16;  // that are loaded at once

// The value of one code, without the row's scale, which the caller applies.
__device__ __forceinline__ float int8_code(const void* codes, size_t at) { return (float)((const signed char*)codes)[at]; }

// Four codes, exactly. A code plus 128 is put into the low bits of 2^23, since conversions of bytes run at half the rate.
__device__ __forceinline__ void int8_codes(u32 word, float* v) {
    u32 biased = word ^ 0x80808080u;
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = __uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7650u | j)) - (8388608.0f + 128.0f);
}

// Four codes as pairs of f16, exactly: a code plus 128 is put into the low bits of 1024.
__device__ __forceinline__ void int8_pairs(u32 word, u32& low, u32& high) {
    constexpr u32 ONES = 0x3c003c00u, OFFSETS = 0xe480e480u;  // 1, and -(1024 + 128)
    u32 biased = word ^ 0x80808080u;
    low = fma_f16(__byte_perm(biased, 0x64646464u, 0x4140u), ONES, OFFSETS);
    high = fma_f16(__byte_perm(biased, 0x64646464u, 0x4342u), ONES, OFFSETS);
}
