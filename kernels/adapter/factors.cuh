// The factors of LoRA adapters as kernels read them.
#pragma once
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/values.cuh"

constexpr int RANK_STEP = 16;       // ranks are multiples of this

// The factors beside a projection.
struct Factors {
    const void* a;      // [rank, k]
    const void* b;      // [outputs, rank]
    float scale;
    int rank;           // 0: the projection is not adapted
    int a_type, b_type; // Type
};

__device__ __forceinline__ int bytes_of(int type) { return type == F32 ? 4 : 2; }

// A number of a factor, from the bits that are stored.
__device__ __forceinline__ float value_of(u32 raw, int type) {
    return type == F32 ? __uint_as_float(raw) : type == F16 ? f16_to_float((u16)raw) : bf16_to_float((u16)raw);
}
// Four numbers of a factor, which are in the first two or in all words of `v`.
template <Type T>
__device__ __forceinline__ void unpack(uint4 v, float (&x)[4]) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = value_of(T == F32 ? words[i] : words[i / 2] >> i % 2 * 16 & 0xffff, T);
}
__device__ __forceinline__ void unpack(uint4 v, int type, float (&x)[4]) {
    if (type == F32) unpack<F32>(v, x);
    if (type == F16) unpack<F16>(v, x);
    if (type == BF16) unpack<BF16>(v, x);
}
// The sum of products of such numbers with others.
__device__ __forceinline__ float dot_four(uint4 v, int type, float4 x) {
    float a[4];
    unpack(v, type, a);
    return fmaf(a[3], x.w, fmaf(a[2], x.z, fmaf(a[1], x.y, a[0] * x.x)));
}
__device__ __forceinline__ uint4 load_four(const void* values, int type, size_t i) {
    if (type == F32) return *(const uint4*)((const float*)values + i);
    uint2 v = *(const uint2*)((const u16*)values + i);
    return make_uint4(v.x, v.y, 0, 0);
}
