// One head of queries or keys: RMSNorm over the head where the architecture has it, then the rotation of its halves.
#pragma once
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct HeadOptions {
    const float* frequencies;  // [D / 2]
    float attention_factor;    // multiplies cosines and sines
    float eps;
};

// The angles of a lane's elements at a position. Depends on nothing but the position, so it may come before a wait.
template <int D>
struct Rotation {
    static constexpr int ANGLES = D / 2 <= WARP ? 1 : D / 2 / WARP;
    float sine[ANGLES], cosine[ANGLES];

    __device__ __forceinline__ Rotation(const HeadOptions& o, int position) {
#pragma unroll
        for (int j = 0; j < ANGLES; j++) {
            sincosf(position * o.frequencies[lane_id() % (D / 2) + WARP * j], &sine[j], &cosine[j]);
            sine[j] *= o.attention_factor;
            cosine[j] *= o.attention_factor;
        }
    }
};

// A norm's weights for a lane's elements, or ones.
template <int D>
__device__ __forceinline__ void load_norm(const float* weight, float (&w)[D / WARP]) {
#pragma unroll
    for (int j = 0; j < D / WARP; j++) w[j] = weight ? weight[lane_id() + WARP * j] : 1;
}

// Head `x` of D elements, which a warp holds: lane l has elements l + 32 j.
template <int D>
__device__ __forceinline__ void load_head(const float* x, float (&y)[D / WARP]) {
#pragma unroll
    for (int j = 0; j < D / WARP; j++) y[j] = x[lane_id() + WARP * j];
}

template <int D>
__device__ __forceinline__ void norm_and_rotate(float (&y)[D / WARP], bool normed, const float (&weight)[D / WARP], float eps, const Rotation<D>& r,
                                                float scale) {
    constexpr int N = D / WARP;
    static_assert(D == 32 || D == 64 || D == 128, "a lane holds an element and its partner, or all lanes hold one");
    int lane = lane_id();
    if (normed) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < N; j++) sum += y[j] * y[j];
        float factor = rsqrtf(warp_sum(sum) / D + eps);
#pragma unroll
        for (int j = 0; j < N; j++) y[j] *= factor * weight[j];
    }
    if (N == 1) {
        float partner = __shfl_xor_sync(ALL_LANES, y[0], D / 2);
        y[0] = (y[0] * r.cosine[0] + (lane < D / 2 ? -partner : partner) * r.sine[0]) * scale;
    } else {
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            float low = y[j], high = y[(j + N / 2) % N];
            y[j] = (low * r.cosine[j] - high * r.sine[j]) * scale;
            y[(j + N / 2) % N] = (high * r.cosine[j] + low * r.sine[j]) * scale;
        }
    }
}
