// Where the norm at the end of a recurrent layer stores its rows: f32, f16, or f16 in the order of fragments.
#pragma once
#include "common/ptx.cuh"
#include "format/fragment_major.cuh"

enum Output { ROWS_F32, ROWS_F16, FRAGMENTS };

constexpr float F16_MAX = 65504;

// Whether f16 cannot hold one of four values. NaN is none that it can.
__device__ __forceinline__ bool overflows(float4 v) {
    return !(fabsf(v.x) <= F16_MAX && fabsf(v.y) <= F16_MAX && fabsf(v.z) <= F16_MAX && fabsf(v.w) <= F16_MAX);
}

struct Target {
    void* y;                // [rows, width]
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where the row has a value that f16 cannot hold; null: not checked
    int width;
    int layer;

    // Stores elements k on and k + BLOCK on of a row; those beyond the width are zeros. A block stores a part of row blockIdx.x.
    template <Output OUTPUT>
    __device__ __forceinline__ void store(int k, float4 first, float4 second) const {
        int row = blockIdx.x;
        if (OUTPUT != ROWS_F32 && overflow && (overflows(first) || overflows(second))) atomicCAS(overflow + row, 0, layer + 1);
        if (OUTPUT == FRAGMENTS) {
            if (k < padded_k(width)) store_fragments((u16*)y, ceil_div(gridDim.x, GROUP_ROWS), row, k, first, second);
            return;
        }
        auto store_four = [&](int k, float4 v) {
            size_t at = (size_t)row * width + k;
            if (k >= width) return;
            if (OUTPUT == ROWS_F32) *(float4*)((float*)y + at) = v;
            else *(uint2*)((u16*)y + at) = make_uint2(pack_f16(v.x, v.y), pack_f16(v.z, v.w));
        };
        store_four(k, first);
        store_four(k + BLOCK, second);
    }
    // Stores zeros in the rest of the padding, from a piece on; this is thread `thread` of `threads` that do.
    template <Output OUTPUT>
    __device__ __forceinline__ void pad(int piece, int thread, int threads) const {
        float4 zero = make_float4(0, 0, 0, 0);
        if (OUTPUT != FRAGMENTS) return;
        for (int i = piece + thread; i < padded_k(width) / 8; i += threads) store<OUTPUT>(first_element(i), zero, zero);
    }
};
