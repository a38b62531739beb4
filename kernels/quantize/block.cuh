// The quantization of a block of 16 values to NVFP4: common parts of quantize.cu, search.cu and training.cu.
#pragma once
#include "common/note.cuh"
#include "common/values.cuh"
#include "format/encode.cuh"
#include "format/swizzle.cuh"

enum Rounding { NEAREST_EVEN, HALF_AWAY, STOCHASTIC };
enum Recipe { AMAX, FOUR_OVER_SIX, SWEEP };

// The kinds of invalid values in a note.
enum NonFinite { IS_NAN, IS_INFINITE, IS_MINUS_INFINITE };

struct Arguments {
    const u8* input;        // rows of 16 row_blocks values, the first of each aligned to 16 bytes
    u8* codes;              // [rows, 8 row_blocks]
    u8* scales;             // [rows, row_blocks], or swizzled
    const u32* amax;        // the tensor's largest magnitude, from which the global scale is computed; null: `global` is given
    u32* report;            // in host memory: gets a copy of *amax; or null
    Note note;              // of the first value that is not finite; null if such values saturate, or if *amax reports them
    u64 stride;             // bytes from row to row
    u64 seed;               // of stochastic rounding
    u32 blocks;             // of all rows
    u32 row_blocks;
    float global;           // where `amax` is null; 1 for a single level
    float largest;          // the block scale times code that represents the amax
    int legacy;             // whether scales follow the rule of the legacy host
    int saturate;           // NaN becomes 0 and infinity the largest magnitude; otherwise results for them are meaningless
    int swizzled;
    int rounding;
    int recipe;
};

constexpr int THREADS = 256;
constexpr float LEGACY_FLOOR = 1.0f / 65536.0f;
constexpr float LEGACY_ADDEND = 1e-12f;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// The positions where a thread's block is read and written.
struct Block {
    u32 index;
    u32 row, column;        // column in blocks
    const uint4* input;

    __device__ __forceinline__ Block(const Arguments& a, int value_bytes) {
        index = blockIdx.x * THREADS + threadIdx.x;
        u64 row_bytes = (u64)a.row_blocks * BLOCK * value_bytes;
        // Without gaps between rows the block's number suffices, without a division.
        if (a.stride == row_bytes && !a.swizzled) {
            row = 0;
            column = index;
        } else {
            row = index / a.row_blocks;
            column = index % a.row_blocks;
        }
        input = (const uint4*)(a.input + row * a.stride + (u64)column * BLOCK * value_bytes);
    }
    // The scale is 0 exactly when all values are zero, except under the rule of the legacy host.
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
    float largest = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) largest = max_float(largest, fabsf(x[i]));
    return largest;
}

// Reports the first value of a block that is not finite, saturates all of these, and returns the new largest magnitude.
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

// Bit 3 of a code. The legacy host derives the sign from a comparison of the quotient with zero, so negative zeros have none, and neither
// have values so small that their quotient rounds to zero, which it does when twice the magnitude is at most the step times 2^-149.
__device__ __forceinline__ u32 sign(float x, bool legacy, float step) {
    bool negative = legacy ? x + x < -__fmul_rd(step, __uint_as_float(1)) : signbit(x);
    return negative ? 8 : 0;
}

// The codes of a block for a step, by thresholds if f32 is precise enough for them, or else by division.
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

// The scale that maps the largest magnitude to 6; `sixth` is a sixth of that magnitude.
__device__ __forceinline__ u32 scale_of(const Arguments& a, float sixth, float global) {
    return a.legacy ? encode_scale(fmaxf(sixth, LEGACY_FLOOR)) : encode_scale_above_zero(sixth / global);
}

// The squared error of a block for a scale, rounding to nearest, summed pairwise in the same order as on the CPU. Only exact operations may
// be fused.
__device__ __forceinline__ double squared_error(const float (&x)[BLOCK], u32 scale, float global) {
    float step = step_of(scale, global);
    double exact = (double)scale_to_float(scale) * (double)global;
    double squares[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        double difference = (double)fabsf(x[i]) - (double)magnitude(nearest_even(fabsf(x[i]) / step)) * exact;
        squares[i] = __dmul_rn(difference, difference);
    }
#pragma unroll
    for (int width = BLOCK / 2; width > 0; width /= 2)
#pragma unroll
        for (int i = 0; i < width; i++) squares[i] = __dadd_rn(squares[i], squares[i + width]);
    return squares[0];
}

__device__ __forceinline__ u32 four_over_six(const float (&x)[BLOCK], float amax, float global) {
    u32 six = encode_scale_above_zero(amax / 6.0f / global), four = encode_scale_above_zero(amax / 4.0f / global);
    return squared_error(x, four, global) < squared_error(x, six, global) ? four : six;
}
