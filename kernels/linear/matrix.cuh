// A weight as products take it.
#pragma once
#include "common/types.cuh"

constexpr int MATRICES = 3;  // that share their input, at most

struct Matrix {
    const u8* chunks;   // see format/packed.cuh
    const float* bias;  // [rows] or null
    float global;
    int rows;
};
