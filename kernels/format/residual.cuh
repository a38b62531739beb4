// E2M1 codes with a residual in local steps. Mirrors src/format/residual.rs bit for bit.
//
// Counted in steps from zero, magnitudes form a float with 2 exponent bits, subnormals included: shifted to the place of an f32's exponent
// and mantissa, such an index is the magnitude times 2^-126.
#pragma once
#include "common/ptx.cuh"
#include "format/packed.cuh"

template <int BITS>
struct Residual {
    static constexpr int STEPS = 1 << BITS, SHIFT = 22 - BITS;
    // The outermost point of the grid.
    static constexpr float LAST = 8 - 2.0f * (STEPS / 2 + 1) / STEPS;

    // The value of a code and a residual.
    static __device__ __forceinline__ float value(u32 code, int residual) {
        u32 index = abs((int)(code & 7) * STEPS + residual);
        return __uint_as_float((code & 8) << 28 | index << SHIFT) * __uint_as_float((126u + 127) << 23);
    }
    // The index of a value, plus half a gap, rounded stochastically by 18 bits, from bit SHIFT on, with the value's sign. The value may be
    // at most LAST.
    static __device__ __forceinline__ u32 encode(float value, u32 draw) {
        return __float_as_uint(value * __uint_as_float(1u << 23)) + (draw >> (18 - SHIFT)) + (u32)(STEPS / 2 << SHIFT);
    }
};

// Residuals of 4 bits, in pairs of f16 like the codes in format/packed.cuh: below a magnitude's code is its residual plus 8.
constexpr u32 INDICES = SIGNS | 0x0fe00fe0u, HALF_GAPS = 0x01000100u;

// The low halves of two words in one word, and their high halves. For results of encode(), the high halves hold everything.
__device__ __forceinline__ u32 low_halves(u32 low, u32 high) { return __byte_perm(low, high, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 low, u32 high) { return __byte_perm(low, high, 0x7632); }
// The pair of indices from two such halves.
__device__ __forceinline__ u32 pair_of_indices(u32 halves) { return ((halves & SIGNS) | (halves << 3 & ~SIGNS)) & INDICES; }
// The values of a pair as f16, times 2^-14.
__device__ __forceinline__ u32 values_of_pair(u32 pair) { return pair - HALF_GAPS; }

// Joins residuals of four elements of two blocks, in two's complement, one block in each half with the first element lowest, with their
// codes' pairs; and the inverse.
__device__ __forceinline__ void join_residuals(u32 residuals, u32 (&pairs)[4]) {
    residuals ^= 0x88888888u;
    pairs[0] |= residuals << 5 & 0x01e001e0u;
    pairs[1] |= residuals << 1 & 0x01e001e0u;
    pairs[2] |= residuals >> 3 & 0x01e001e0u;
    pairs[3] |= residuals >> 7 & 0x01e001e0u;
}
__device__ __forceinline__ u32 residuals_of_pairs(const u32 (&pairs)[4]) {
    u32 residuals = (pairs[0] >> 5 & 0x000f000fu) | (pairs[1] >> 1 & 0x00f000f0u);
    residuals |= pairs[2] << 3 & 0x0f000f00u;
    residuals |= pairs[3] << 7 & 0xf000f000u;
    return residuals ^ 0x88888888u;
}
