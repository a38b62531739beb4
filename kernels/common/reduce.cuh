// Sums and maxima over the lanes of a warp, in a fixed order.
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
