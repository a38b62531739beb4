// Sums and maxima over the lanes of a warp, or over the warps of a block, in a fixed order.
#pragma once
#include "common/types.cuh"

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}
__device__ __forceinline__ int warp_sum(int x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, d));
    return x;
}

// The sum over a block of `warps` warps, in each of its threads. All threads call it; the memory may be reused at once.
__device__ __forceinline__ float block_sum(float x, float* warp_sums, int warps) {
    x = warp_sum(x);
    if (lane_id() == 0) warp_sums[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < warps; i++) x += warp_sums[i];
    __syncthreads();
    return x;
}
__device__ __forceinline__ float block_max(float x, float* warp_maxima, int warps) {
    x = warp_max(x);
    if (lane_id() == 0) warp_maxima[threadIdx.x / WARP] = x;
    __syncthreads();
    x = warp_maxima[0];
    for (int i = 1; i < warps; i++) x = fmaxf(x, warp_maxima[i]);
    __syncthreads();
    return x;
}
