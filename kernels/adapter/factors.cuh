// The factors of LoRA adapters as kernels read them, and the parts of A x that the kernels of a pass of one row hand on: each block of the
// kernel that makes a row x multiplies its part of x by the A factors of the projections that take x, and the kernels that take x add up
// these parts, in their order.
#pragma once
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/values.cuh"

constexpr int RANK_STEP = 16;       // ranks are multiples of this
constexpr int MOST_RANK = 64;       // of an adapter in parts

// The factors beside a projection.
struct Factors {
    const void* a;      // [rank, k]
    const void* b;      // [outputs, rank]
    float scale;
    int rank;           // 0: the projection is not adapted
    int a_type, b_type; // Type
};

// The adapter of a row, and a row's place among the parts of A x: f32 [projections][parts][1 << shift].
struct LowOutput {
    const Factors* const* adapter;  // the factors beside all projections of the model
    float* values;                  // null: no adapted projection takes the row
    int first, count;               // projections that take the row, by their numbers in the model
    int parts;
    int shift;                      // of the largest rank, a power of two
    int copies;                     // bytes of shared memory for copies of factors
    int later, laters;              // projections whose factors a later kernel reads, which are fetched to L2: the first, and their number
};
struct LowInput {
    const float* values;            // null: the kernel multiplies its input by the A factors itself
    int first;                      // the number of its first projection
    int parts;
    float factor;                   // by which x was divided
};

__device__ __forceinline__ int bytes_of(int type) { return type == F32 ? 4 : 2; }

// A number of a factor as it is stored.
__device__ __forceinline__ u32 load_raw(const void* values, int type, size_t i) {
    return type == F32 ? ((const u32*)values)[i] : ((const u16*)values)[i];
}
__device__ __forceinline__ float value_of(u32 raw, int type) {
    return type == F32 ? __uint_as_float(raw) : type == F16 ? f16_to_float((u16)raw) : bf16_to_float((u16)raw);
}
// The sum of products of a piece of 16 bytes with floats: 4 or 8 numbers.
__device__ __forceinline__ float dot_piece(uint4 v, int type, const float4* x, float sum) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
    float4 first = x[0];
    float p[4] = {first.x, first.y, first.z, first.w};
    if (type == F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) sum = fmaf(__uint_as_float(words[i]), p[i], sum);
        return sum;
    }
    float4 second = x[1];
    float q[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(value_of(words[i / 2] >> i % 2 * 16 & 0xffff, type), p[i], sum);
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(value_of(words[2 + i / 2] >> i % 2 * 16 & 0xffff, type), q[i], sum);
    return sum;
}
// The sum of products of four numbers, which are in the first two or in all words of `v`.
__device__ __forceinline__ float dot_four(uint4 v, int type, float4 x) {
    float a[4] = {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
    if (type != F32) {
        u32 words[2] = {v.x, v.y};
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = value_of(words[i / 2] >> i % 2 * 16 & 0xffff, type);
    }
    return fmaf(a[3], x.w, fmaf(a[2], x.z, fmaf(a[1], x.y, a[0] * x.x)));
}
__device__ __forceinline__ uint4 load_four(const void* values, int type, size_t i) {
    if (type == F32) return *(const uint4*)((const float*)values + i);
    uint2 v = *(const uint2*)((const u16*)values + i);
    return make_uint4(v.x, v.y, 0, 0);
}

// The sums of RANK_STEP values over the lanes of a warp. Lanes 2 r and 2 r + 1 get that of value r.
__device__ __forceinline__ float sums_over_lanes(float (&v)[RANK_STEP]) {
    static_assert(RANK_STEP == 16 && WARP == 32, "four exchanges leave one value a lane, and a fifth adds the last two");
#pragma unroll
    for (int turn = 1; turn <= 4; turn++) {
        const int half = RANK_STEP >> turn, lane = WARP >> turn;
        bool upper = lane_id() & lane;
#pragma unroll
        for (int i = 0; i < RANK_STEP / 2; i++) {
            if (i >= half) break;
            float kept = upper ? v[i + half] : v[i], sent = upper ? v[i] : v[i + half];
            v[i] = kept + __shfl_xor_sync(ALL_LANES, sent, lane);
        }
    }
    return v[0] + __shfl_xor_sync(ALL_LANES, v[0], 1);
}
