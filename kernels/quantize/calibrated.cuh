// Calibrated quantization of a block of 16 weights, which calibrated.cu does for each row. Mirrors src/cpu/generic/calibrated.rs operation
// by operation: products and sums are fused where they are there, and nowhere else.
#pragma once
#include "format/encode.cuh"

constexpr u32 BELOW = 12;   // scales that are tried below the one that puts the largest magnitude on 6
constexpr int TRIED = 19;   // scales that are tried

typedef float Values[BLOCK];
typedef float Matrix[BLOCK][BLOCK];

// The upper triangular factor R of the moments of a block, M = R R^T, and the reciprocals of its diagonal. In shared memory.
struct BlockFactor {
    Matrix r;
    Values inverses;
};

// Four floats at a time, from an address that is aligned to 16 bytes.
__device__ __forceinline__ void load(const float* from, Values& x) {
#pragma unroll
    for (int i = 0; i < BLOCK; i += 4) {
        float4 v = *(const float4*)(from + i);
        x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
}
__device__ __forceinline__ void store(float* to, const Values& x) {
#pragma unroll
    for (int i = 0; i < BLOCK; i += 4) *(float4*)(to + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
}

__device__ __forceinline__ void clear(Values& x) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) x[i] = 0;
}

// sums += x times a row of 16 columns.
__device__ __forceinline__ void add_row(Values& sums, const float* row, float x) {
#pragma unroll
    for (int i = 0; i < BLOCK; i += 4) {
        float4 v = *(const float4*)(row + i);
        sums[i] = __fmaf_rn(v.x, x, sums[i]);
        sums[i + 1] = __fmaf_rn(v.y, x, sums[i + 1]);
        sums[i + 2] = __fmaf_rn(v.z, x, sums[i + 2]);
        sums[i + 3] = __fmaf_rn(v.w, x, sums[i + 3]);
    }
}

// The nearest E2M1 value, ties to even codes: numbers below 2 round to multiples of 1/2, those below 4 to multiples of 1, and others to
// multiples of 2. Adding and subtracting 1.5 x 2^22 times the power of two has that effect.
__device__ __forceinline__ float nearest_value(float x) {
    x = fminf(fmaxf(x, -E2M1_MAX), E2M1_MAX);
    float power = __uint_as_float(__float_as_uint(fmaxf(fabsf(x), 1.0f)) & 0x7f800000u);
    float shift = __fmul_rn(power, 1.5f * (1 << 22));
    return __fsub_rn(__fadd_rn(x, shift), shift);
}

// The first candidate scale for a block with this largest magnitude.
__device__ __forceinline__ u32 first_tried(const Values& x, float global) {
    float amax = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) amax = fmaxf(amax, fabsf(x[i]));
    u32 middle = encode_scale_above_zero(amax / E2M1_MAX / global);
    return middle > BELOW ? middle - BELOW : 1;
}
__device__ __forceinline__ u32 tried(u32 first, int offset) { return min(first + offset, E4M3_MAX_BYTE); }

// Rounds weights one after another, each to the value that best compensates for the errors before it; `before` holds the sums of those.
// Returns the values, and the sum of the squares of the block's (R^T e)_i.
__device__ __forceinline__ float in_turn(const Values& weights, const Values& before, float step, const BlockFactor& f, Values& values) {
    float inverse = 1.0f / step, cost = 0;
    Values sums;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) sums[i] = before[i];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        if (i == BLOCK / 2) __syncwarp();
        float wanted = __fmaf_rn(sums[i], f.inverses[i], weights[i]);
        values[i] = __fmul_rn(nearest_value(__fmul_rn(wanted, inverse)), step);
        float error = weights[i] - values[i];
#pragma unroll
        for (int j = i + 1; j < BLOCK; j++) sums[j] = __fmaf_rn(f.r[i][j], error, sums[j]);
        float left = __fmul_rn(f.r[i][i], wanted - values[i]);
        cost = __fmaf_rn(left, left, cost);
    }
    return cost;
}

// e^T M e of errors, by the factor of M.
__device__ __forceinline__ float cost_of(const Values& errors, const BlockFactor& f) {
    Values sums;
    clear(sums);
    float cost = 0;
#pragma unroll
    for (int j = 0; j < BLOCK; j++) {
#pragma unroll
        for (int i = j; i < BLOCK; i++) sums[i] = __fmaf_rn(f.r[j][i], errors[j], sums[i]);
        cost = __fmaf_rn(sums[j], sums[j], cost);
    }
    return cost;
}

// The scale under which the weights, shifted by the errors before them, are nearest to codes, weighted by the squared diagonal of R; and
// the values that compensate for all errors before them, also within the block.
__device__ __forceinline__ u32 round_in_turn(const Values& weights, const Values& sums, float global, const BlockFactor& f, Values& values) {
    Values wanted;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) wanted[i] = __fmaf_rn(sums[i], f.inverses[i], weights[i]);
    u32 first = first_tried(wanted, global);
    int best = 0;
    float least = INFINITY;
#pragma unroll 1
    for (int offset = 0; offset < TRIED; offset++) {
        forget_memory();
        float step = scale_to_float(tried(first, offset)) * global, inverse = 1.0f / step, cost = 0;
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            float value = __fmul_rn(nearest_value(__fmul_rn(wanted[i], inverse)), step);
            float left = __fmul_rn(f.r[i][i], wanted[i] - value);
            cost = __fmaf_rn(left, left, cost);
        }
        if (cost < least) best = offset, least = cost;
    }
    u32 scale = tried(first, best);
    in_turn(weights, sums, scale_to_float(scale) * global, f, values);
    return scale;
}

// The best block while the others stay fixed: `gradient` is M e of its row, `moments` the block's part of M. Returns whether anything is
// better than the present values, which it then replaces, and the change of the error. All lanes of a warp call it and in_turn(): they wait
// for each other at points where registers could not hold what is loaded for the next step.
__device__ __forceinline__ bool round_beside(const Values& weights, const Values& gradient, float global, const Matrix& moments, const BlockFactor& f,
                                             u32& scale, Values& held, Values& change) {
    // Without a grid, the best error is -M^-1 g, where g are the gradients from the other blocks: two triangular systems.
    Values errors, others, target;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) errors[i] = weights[i] - held[i];
    clear(others);
#pragma unroll
    for (int j = 0; j < BLOCK; j++) add_row(others, moments[j], errors[j]);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) others[i] = gradient[i] - others[i];
    __syncwarp();
    Values y;
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; i--) {
        float sum = others[i];
#pragma unroll
        for (int j = i + 1; j < BLOCK; j++) sum = __fmaf_rn(f.r[i][j], y[j], sum);
        y[i] = __fmul_rn(sum, -f.inverses[i]);
    }
    __syncwarp();
    Values sums;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) sums[i] = -y[i];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float ideal = __fmul_rn(sums[i], -f.inverses[i]);
        target[i] = weights[i] - ideal;
        errors[i] = target[i] - held[i];
#pragma unroll
        for (int j = i + 1; j < BLOCK; j++) sums[j] = __fmaf_rn(f.r[i][j], ideal, sums[j]);
    }
    __syncwarp();
    clear(sums);
    int best = -1;
    float least = cost_of(errors, f);
    __syncwarp();
    u32 first = first_tried(target, global);
    Values values;
#pragma unroll 1
    for (int offset = 0; offset < TRIED; offset++) {
        forget_memory();
        float cost = in_turn(target, sums, scale_to_float(tried(first, offset)) * global, f, values);
        if (cost < least) best = offset, least = cost;
    }
    __syncwarp();
    bool is_better = best >= 0;
    u32 found = tried(first, max(best, 0));
    in_turn(target, sums, scale_to_float(found) * global, f, values);
    if (is_better) scale = found;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        if (!is_better) values[i] = held[i];
        change[i] = held[i] - values[i];
        held[i] = values[i];
    }
    return is_better;
}

// Stores the codes of values under a scale. A block of zeros, and no other, has the scale 0.
__device__ __forceinline__ void put(u8* codes, u8* scales, size_t block, const Values& values, u32 scale, float global) {
    float inverse = scale ? 1.0f / (scale_to_float(scale) * global) : 0;
    u32 words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float q = values[i] * inverse;
        words[i / 8] |= (nearest_even(fabsf(q)) | (q < 0 ? 8 : 0)) << i % 8 * 4;
    }
    bool empty = ((words[0] | words[1]) & 0x77777777u) == 0;
    ((uint2*)codes)[block] = empty ? make_uint2(0, 0) : make_uint2(words[0], words[1]);
    scales[block] = empty ? 0 : scale;
}

// Reads the values that put() has stored, and their scale.
__device__ __forceinline__ u32 get(const u8* codes, const u8* scales, size_t block, float global, Values& values) {
    uint2 words = ((const uint2*)codes)[block];
    u32 scale = scales[block];
    float step = scale_to_float(scale) * global;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) values[i] = code_to_float((i < 8 ? words.x : words.y) >> i % 8 * 4 & 15) * step;
    return scale;
}
