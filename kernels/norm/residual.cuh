// A row of the residual stream that a block of threads has in registers: how it is stored and, where it is known what comes next, normalized.
#pragma once
#include "common/reduce.cuh"
#include "format/fragment_major.cuh"
#include "norm/piece.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int HELD = 2;     // pieces that a thread keeps, which is all of a row of 8,192

__device__ __forceinline__ float block_sum(float sum, float* sums) {
    sum = warp_sum(sum);
    if (lane_id() == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sums[i];
    return sum;
}

__device__ __forceinline__ float4 scaled(float4 v, float factor) { return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor); }
__device__ __forceinline__ float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The norm that follows, if there is one.
struct NextNorm {
    const float* weight;    // [width]; or null
    u16* normed;            // f16 [rows, width], row-major or fragment-major
    int width;              // a multiple of 4, and of 16 if fragment-major
    float eps;
    int fragment_major;

    // A thread's pieces of the weight.
    __device__ __forceinline__ void load(Piece (&w)[HELD]) const {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            if (weight) w[j] = Piece(weight, threadIdx.x + j * THREADS, width);
        }
    }

    // Stores a thread's pieces `r` of a row to `x`, and their norm. All threads of the block call this, with room for WARPS sums.
    __device__ __forceinline__ void put(int row, float* x, const Piece (&r)[HELD], const Piece (&w)[HELD], float* sums) const {
        int groups = ceil_div(gridDim.x, GROUP_ROWS), count = fragment_major ? padded_k(width) / 8 : ceil_div(width, 2 * BLOCK) * 4;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int k = first_element(threadIdx.x + j * THREADS);
            if (k < width) *(float4*)(x + k) = r[j].first;
            if (k + BLOCK < width) *(float4*)(x + k + BLOCK) = r[j].second;
            sum += r[j].squares();
        }
        if (!weight) return;
        float factor = rsqrtf(block_sum(sum, sums) / width + eps);
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            int i = threadIdx.x + j * THREADS, k = first_element(i);
            if (i >= count) continue;
            float4 first = apply_norm(r[j].first, factor, w[j].first), second = apply_norm(r[j].second, factor, w[j].second);
            if (fragment_major) {
                store_fragments(normed, groups, row, k, first, second);
            } else {
                u16* to = normed + (size_t)row * width + k;
                if (k < width) *(uint2*)to = make_uint2(pack_f16(first.x, first.y), pack_f16(first.z, first.w));
                if (k + BLOCK < width) *(uint2*)(to + BLOCK) = make_uint2(pack_f16(second.x, second.y), pack_f16(second.z, second.w));
            }
        }
    }
};
