// Values of a tensor's type, loaded 16 bytes at a time, and rows of bf16 by pieces of eight.
#pragma once
#include "common/ptx.cuh"

enum Type { F32, F16, BF16 };

// N values from an address that is aligned to 16 bytes, as floats.
template <Type T, int N>
__device__ __forceinline__ void load_values(const uint4* from, float (&x)[N]) {
    constexpr int WORDS = T == F32 ? N : N / 2;
    static_assert(WORDS % 4 == 0, "whole pieces of 16 bytes");
    u32 words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS / 4; i++) {
        uint4 v = from[i];
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (T == F32) x[i] = __uint_as_float(words[i % WORDS]);
        if (T == F16) x[i] = f16_to_float((u16)(words[i / 2] >> i % 2 * 16));
        if (T == BF16) x[i] = bf16_to_float((u16)(words[i / 2] >> i % 2 * 16));
    }
}

// Elements of 16 bytes of bf16.
constexpr int PIECE = 8;

__device__ __forceinline__ void load_bf16(const uint4* from, float (&x)[PIECE]) { load_values<BF16, PIECE>(from, x); }

__device__ __forceinline__ void store_bf16(uint4* to, const float (&x)[PIECE]) {
    *to = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}

// Eight floats from an address that is aligned to 16 bytes.
__device__ __forceinline__ void load_f32(const float* from, float (&x)[PIECE]) { load_values<F32, PIECE>((const uint4*)from, x); }
