// A row of f32 in pieces as NVFP4 GEMMs take activations: four elements of each block of a pair.
#pragma once
#include "format/packed.cuh"

// Written out, so that the compiler rounds it alike in every kernel.
__device__ __forceinline__ float square_sum(float4 v) { return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, __fmul_rn(v.x, v.x)))); }

__device__ __forceinline__ float4 apply_norm(float4 v, float factor, float4 weight) {
    return make_float4(v.x * factor * weight.x, v.y * factor * weight.y, v.z * factor * weight.z, v.w * factor * weight.w);
}

// Elements past the end of the row are zeros.
struct Piece {
    float4 first, second;

    Piece() = default;
    __device__ __forceinline__ Piece(const float* row, int piece, int width)
        : first(load(row, first_element(piece), width)), second(load(row, first_element(piece) + BLOCK, width)) {}
    __device__ __forceinline__ float squares() const { return square_sum(first) + square_sum(second); }
    // Whether all elements are finite in f16.
    __device__ __forceinline__ bool fits_f16() const { return fits_f16(first) && fits_f16(second); }
    // This times a norm's factor and weight as f16, in pairs of an element of each block.
    __device__ __forceinline__ uint4 normalized_f16(float f, const Piece& weight) const {
        float4 p = first, q = second, v = weight.first, w = weight.second;
        return make_uint4(pack_f16(p.x * f * v.x, q.x * f * w.x), pack_f16(p.y * f * v.y, q.y * f * w.y), pack_f16(p.z * f * v.z, q.z * f * w.z),
                          pack_f16(p.w * f * v.w, q.w * f * w.w));
    }

private:
    static __device__ __forceinline__ bool fits_f16(float4 v) {
        constexpr float END = 65520;
        return fabsf(v.x) < END && fabsf(v.y) < END && fabsf(v.z) < END && fabsf(v.w) < END;
    }
    static __device__ __forceinline__ float4 load(const float* row, int i, int width) {
        return i < width ? *(const float4*)(row + i) : make_float4(0, 0, 0, 0);
    }
};
