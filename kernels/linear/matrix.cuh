// A weight as an operand of the product kernels.
#pragma once
#include "common/types.cuh"

constexpr int MATRICES = 3;  // at most, with the same input

struct Matrix {
    const u8* chunks;   // see format/packed.cuh
    const float* bias;  // [rows] or null
    float global;
    int rows;
};

// An output feature of a sum over K. Written out, so that the compiler rounds it alike in every kernel.
__device__ __forceinline__ float scaled_sum(float sum, float scale, const float* bias, int row) {
    sum = __fmul_rn(sum, scale);
    return bias ? __fadd_rn(sum, bias[row]) : sum;
}
