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
