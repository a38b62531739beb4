// A block of 16 values on its way to NVFP4: what all kernels of this folder that quantize share.
#pragma once
#include "common/note.cuh"
#include "common/values.cuh"
#include "format/encode.cuh"
#include "format/swizzle.cuh"

enum Rounding { NEAREST_EVEN, HALF_AWAY, STOCHASTIC };
enum Recipe { AMAX, FOUR_OVER_SIX, SWEEP };

// What a note says of a value.
enum NonFinite { IS_NAN, IS_INFINITE, IS_MINUS_INFINITE };

struct Arguments {
    const u8* input;        // rows of 16 row_blocks values, the first of each aligned to 16 bytes
    u8* codes;              // [rows, 8 row_blocks]
    u8* scales;             // [rows, row_blocks], or swizzled
    const u32* amax;        // the tensor's largest magnitude, which the global scale follows from; NULL: `global` is given
    u32* report;            // in memory of the host: a copy of *amax; NULL if there is none
    Note note;              // of the first value that is not finite; of none if those saturate, or if *amax tells of them
    u64 stride;             // bytes from row to row
    u64 seed;               // of stochastic rounding
    u32 blocks;             // of all rows
    u32 row_blocks;
    float global;           // where `amax` is NULL; 1 for a single level
    float largest;          // block scale times code that the amax becomes
    int legacy;             // the rule of the legacy host for scales
    int saturate;           // NaN becomes 0 and infinity the largest magnitude; otherwise the results are of no use
    int swizzled;
    int rounding;
    int recipe;
};

constexpr int THREADS = 256;
constexpr float LEGACY_FLOOR = 1.0f / 65536.0f;
constexpr float LEGACY_ADDEND = 1e-12f;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// A thread's block: where it is read and written.
struct Block {
    u32 index;
    u32 row, column;        // of blocks
    const uint4* input;

    __device__ __forceinline__ Block(const Arguments& a, int value_bytes) {
        index = blockIdx.x * THREADS + threadIdx.x;
        u64 row_bytes = (u64)a.row_blocks * BLOCK * value_bytes;
        // The division is for those who need it.
        if (a.stride == row_bytes && !a.swizzled) {
            row = 0;
            column = index;
        } else {
            row = index / a.row_blocks;
            column = index % a.row_blocks;
        }
        input = (const uint4*)(a.input + row * a.stride + (u64)column * BLOCK * value_bytes);
    }
    // A scale of 0 says that all values are zero, and nothing else does, unless the rule is the legacy host's.
    __device__ __forceinline__ void write(const Arguments& a, uint2 codes, u32 scale) const {
        if (!a.legacy && ((codes.x | codes.y) & 0x77777777u) == 0) {
            codes = make_uint2(0, 0);
            scale = 0;
        }
        ((uint2*)a.codes)[index] = codes;
        u64 at = index;
        if (a.swizzled)
            at = scale_row(true, row, a.row_blocks) + (u64)(column / SCALES_IN_WORD) * scale_word_stride(true) + column % SCALES_IN_WORD;
        a.scales[at] = scale;
    }
};

__device__ __forceinline__ float global_scale(const Arguments& a) {
    if (!a.amax) return a.global;
    u32 bits = *a.amax;
    if (a.report && blockIdx.x == 0 && threadIdx.x == 0) *a.report = bits;
    return bits ? fmaxf(__uint_as_float(bits) / a.largest, SMALLEST_NORMAL) : 1;
}

__device__ __forceinline__ float largest_magnitude(const float (&x)[BLOCK]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) most = max_float(most, fabsf(x[i]));
    return most;
}

// Deals with a block whose largest magnitude is not finite; gives the new one.
__device__ __forceinline__ float saturated(const Arguments& a, u32 block, float (&x)[BLOCK], float global) {
    if (a.note.first) {
        u32 at = 0, what = IS_NAN;
#pragma unroll
        for (int i = BLOCK - 1; i >= 0; i--) {
            if (!is_finite(x[i])) at = i, what = isnan(x[i]) ? IS_NAN : signbit(x[i]) ? IS_MINUS_INFINITE : IS_INFINITE;
        }
        take_note(a.note, (u64)block * BLOCK + at, what);
    }
    float limit = a.largest * global;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        if (isnan(x[i])) x[i] = 0;
        if (!is_finite(x[i])) x[i] = copysignf(limit, x[i]);
    }
    return largest_magnitude(x);
}

// Bit 3 of a code. The legacy host takes the sign from a comparison of the quotient with zero: a negative zero has none, nor a
// value so small that its quotient is one, which is when twice its magnitude is at most the step times 2^-149.
__device__ __forceinline__ u32 sign(float x, bool legacy, float step) {
    bool negative = legacy ? x + x < -__fmul_rd(step, __uint_as_float(1)) : signbit(x);
    return negative ? 8 : 0;
}

// The codes of a block under a step, by thresholds where f32 is fine enough for them, or else by division.
__device__ __forceinline__ uint2 encode(const Arguments& a, const float (&x)[BLOCK], float step) {
    u32 codes[2] = {0, 0};
    bool away = a.rounding == HALF_AWAY;
    if (step >= Thresholds::SMALLEST_STEP) {
        Thresholds thresholds(step, away);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) codes[i / 8] |= (thresholds.passed(fabsf(x[i])) | sign(x[i], a.legacy, step)) << i % 8 * 4;
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            float q = fabsf(x[i]) / step;
            codes[i / 8] |= ((away ? half_away(q) : nearest_even(q)) | sign(x[i], a.legacy, step)) << i % 8 * 4;
        }
    }
    return make_uint2(codes[0], codes[1]);
}

__device__ __forceinline__ float step_of(u32 scale, float global) { return scale_to_float(scale) * global; }
__device__ __forceinline__ float step_of(const Arguments& a, u32 scale, float global) {
    return a.legacy ? scale_to_float(scale) + LEGACY_ADDEND : step_of(scale, global);
}

// The scale that puts the largest magnitude on 6: `sixth` is a sixth of it.
__device__ __forceinline__ u32 scale_of(const Arguments& a, float sixth, float global) {
    return a.legacy ? encode_scale(fmaxf(sixth, LEGACY_FLOOR)) : encode_scale_above_zero(sixth / global);
}
