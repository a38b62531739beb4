// Products of rows with the columns of S that a warp keeps in registers. A lane has two columns of every eighth piece of four rows, so that
// it uses each q and k that it loads twice, and that three shuffles sum a column.
#pragma once
#include "recurrent/recurrence.cuh"

constexpr int SLICES = 8, WARP_COLUMNS = WARP / SLICES * 2;

// The lane's part of x^T S.
template <int N>
__device__ __forceinline__ float2 multiply(const float (&x)[N], const float2 (&s)[N]) {
    float2 even = make_float2(0, 0), odd = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        even.x += x[i] * s[i].x, even.y += x[i] * s[i].y;
        odd.x += x[i + 1] * s[i + 1].x, odd.y += x[i + 1] * s[i + 1].y;
    }
    return make_float2(even.x + odd.x, even.y + odd.y);
}

// Sums over slices: in each lane both columns, or one of the two, by the parity of the slice.
__device__ __forceinline__ float2 sum_slices(float2 x) {
#pragma unroll
    for (int d = WARP / SLICES; d < WARP; d *= 2) {
        x.x += __shfl_xor_sync(ALL_LANES, x.x, d);
        x.y += __shfl_xor_sync(ALL_LANES, x.y, d);
    }
    return x;
}
__device__ __forceinline__ float sum_slices_of_one(float2 x, bool second) {
    float sum = second ? x.y : x.x;
    sum += __shfl_xor_sync(ALL_LANES, second ? x.x : x.y, WARP / SLICES);
#pragma unroll
    for (int d = 2 * WARP / SLICES; d < WARP; d *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    return sum;
}
