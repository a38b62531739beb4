// Logits of a head and their gradients, four at a time if a row's length is a multiple of four, else one.
#pragma once
#include "common/values.cuh"

// Below every logit, and finite, so that the difference of two of them is a number.
constexpr float LOWEST = -3.4028235e38f;

__device__ __forceinline__ float capped(float logit, float cap) { return cap > 0 ? cap * tanhf(logit / cap) : logit; }

template <int COUNT>
__device__ __forceinline__ void load_logits(const float* from, float cap, float (&x)[COUNT]) {
    if constexpr (COUNT == 4) {
        float4 v = *(const float4*)from;
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
        x[0] = *from;
    }
#pragma unroll
    for (int e = 0; e < COUNT; e++) x[e] = capped(x[e], cap);
}

template <int COUNT>
__device__ __forceinline__ void store_gradients(u16* to, const float (&x)[COUNT]) {
    if constexpr (COUNT == 4) {
        *(uint2*)to = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
    } else {
        *to = (u16)pack_bf16(x[0], 0);
    }
}
