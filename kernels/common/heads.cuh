// One head of queries or keys: RMSNorm over the head where the architecture has it, then the rotation of its halves.
#pragma once
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct HeadOptions {
    const float* frequencies;  // [D / 2]
    float attention_factor;    // multiplies cosines and sines
    float eps;
};

// Head `x` of D elements by one warp: lane l gets elements l + 32 j.
template <int D>
__device__ __forceinline__ void norm_and_rotate(const float* x, const float* weight, const HeadOptions& o, int position, float scale, float (&y)[D / WARP]) {
    constexpr int N = D / WARP;
    static_assert(D == 32 || D == 64 || D == 128, "a lane holds an element and its partner, or all lanes hold one");
    int lane = lane_id();
#pragma unroll
    for (int j = 0; j < N; j++) y[j] = x[lane + WARP * j];
    if (weight) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; j++) sum += y[j] * y[j];
        float factor = rsqrtf(warp_sum(sum) / D + o.eps);
#pragma unroll
        for (int j = 0; j < N; j++) y[j] *= factor * weight[lane + WARP * j];
    }
    scale *= o.attention_factor;
    if (N == 1) {
        float partner = __shfl_xor_sync(ALL_LANES, y[0], D / 2);
        float sine, cosine;
        sincosf(position * o.frequencies[lane % (D / 2)], &sine, &cosine);
        y[0] = (y[0] * cosine + (lane < D / 2 ? -partner : partner) * sine) * scale;
    } else {
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            float sine, cosine, low = y[j], high = y[(j + N / 2) % N];
            sincosf(position * o.frequencies[lane + WARP * j], &sine, &cosine);
            y[j] = (low * cosine - high * sine) * scale;
            y[(j + N / 2) % N] = (high * cosine + low * sine) * scale;
        }
    }
}
