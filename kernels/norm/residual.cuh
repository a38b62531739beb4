// Stores a row of the residual stream from the registers of a block of threads. Stores the input of the next part too if that can be fused: the
// RMSNorm of the row, or the row as f16.
#pragma once
#include "common/reduce.cuh"
#include "format/fragment_major.cuh"
#include "norm/piece.cuh"

constexpr int THREADS = 512;
constexpr int WARPS = THREADS / WARP;
constexpr int THREAD_PIECES = 2;    // in registers: enough for rows of 8,192

// The sum over the threads of a block. `warp_sums` is shared memory for WARPS floats.
__device__ __forceinline__ float block_sum(float sum, float* warp_sums) {
    sum = warp_sum(sum);
    if (lane_id() == 0) warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += warp_sums[i];
    return sum;
}

__device__ __forceinline__ float4 scaled(float4 v, float factor) { return make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor); }
__device__ __forceinline__ float4 add(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// The norm that follows.
struct NextNorm {
    const float* weight;    // [width]; null if no norm follows
    u16* normed;            // f16 [rows, width], row-major or fragment-major: the norm, or without one the rows as they are; null for neither
    float* factors;         // [rows]: 1 / sqrt(mean(x^2) + eps); or null
    int width;              // a multiple of 4, and of 16 if fragment-major
    float eps;
    int fragment_major;
    int layer;              // of the part that takes rows without a norm
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where f16 cannot hold a row without a norm

    // A thread's pieces of the weight.
    __device__ __forceinline__ void load(Piece (&w)[THREAD_PIECES]) const {
#pragma unroll
        for (int j = 0; j < THREAD_PIECES; j++) {
            if (weight) {
                w[j] = Piece(weight, threadIdx.x + j * THREADS, width);
            } else {
                w[j].first = w[j].second = make_float4(1, 1, 1, 1);
            }
        }
    }

    // Pieces of a normalized row, with its padding.
    __device__ __forceinline__ int pieces() const { return fragment_major ? padded_k(width) / 8 : ceil_div(width, 2 * BLOCK) * 4; }

    // Stores piece i of a row to the residual stream.
    __device__ __forceinline__ void store_residual(float* x, int i, const Piece& r) const {
        int k = first_element(i);
        if (k < width) *(float4*)(x + k) = r.first;
        if (k + BLOCK < width) *(float4*)(x + k + BLOCK) = r.second;
    }
    // Stores the norm of piece i of row `row`, and with the first piece the factor. The first dimension of the grid is the rows.
    __device__ __forceinline__ void store_norm(int row, int i, const Piece& r, float factor, const Piece& w) const {
        int k = first_element(i);
        if (factors && i == 0) factors[row] = factor;
        if (i >= pieces()) return;
        float4 first = apply_norm(r.first, factor, w.first), second = apply_norm(r.second, factor, w.second);
        store_activations(normed, fragment_major, ceil_div(gridDim.x, GROUP_ROWS), width, row, k, first, second);
    }

    // Stores a thread's pieces `r` of a row to `x`, and their norm, or themselves, to `normed`. All threads of the block call this.
    // `warp_sums` is shared memory for WARPS floats.
    __device__ __forceinline__ void store(int row, float* x, const Piece (&r)[THREAD_PIECES], const Piece (&w)[THREAD_PIECES],
                                          float* warp_sums) const {
        float sum = 0;
        bool fits = true;
#pragma unroll
        for (int j = 0; j < THREAD_PIECES; j++) {
            store_residual(x, threadIdx.x + j * THREADS, r[j]);
            sum += r[j].squares();
            fits &= r[j].fits_f16();
        }
        if (!normed) return;
        float factor = weight ? rsqrtf(block_sum(sum, warp_sums) / width + eps) : 1;
        if (!weight && !fits) atomicCAS(overflow + row, 0, layer + 1);
#pragma unroll
        for (int j = 0; j < THREAD_PIECES; j++) store_norm(row, threadIdx.x + j * THREADS, r[j], factor, w[j]);
    }
};
