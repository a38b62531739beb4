// A row of f32 in the pieces in which what takes pairs of blocks has it: four elements of each block of a pair.
#pragma once
#include "format/packed.cuh"

__device__ __forceinline__ float square_sum(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// Past the end of the row stand zeros.
struct Fours {
    float4 first, second;

    Fours() = default;
    __device__ __forceinline__ Fours(const float* row, int piece, int width)
        : first(load(row, first_element(piece), width)), second(load(row, first_element(piece) + BLOCK, width)) {}
    __device__ __forceinline__ float squares() const { return square_sum(first) + square_sum(second); }

private:
    static __device__ __forceinline__ float4 load(const float* row, int i, int width) {
        return i < width ? *(const float4*)(row + i) : make_float4(0, 0, 0, 0);
    }
};

__device__ __forceinline__ float4 normalised(float4 v, float factor, float4 weight) {
    return make_float4(v.x * factor * weight.x, v.y * factor * weight.y, v.z * factor * weight.z, v.w * factor * weight.w);
}
