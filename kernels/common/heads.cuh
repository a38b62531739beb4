// One head of queries or keys: RMSNorm over the head if the model has it, then RoPE over all of its elements or the first rotary_dim; or RoPE
// before the norm.
#pragma once
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct HeadOptions {
    const float* frequencies;  // [rotary_dim / 2]; null if no element rotates
    float attention_factor;    // multiplies cosines and sines
    float eps;
    int rotary_dim;            // elements that rotate, or 0: element i pairs with element i + rotary_dim / 2
    int rotates_first;         // whether norms are of rotated heads
};

// The heads of a row of projections: queries, then the keys and values that the layer has itself.
struct RowHeads {
    int all;         // heads of a row
    int value;       // index of the first value: that of the first key where keys are the values too, before norm and rotation
    int has_keys;    // 0: an earlier layer has stored the keys and values
    int value_norm;  // whether values are normalized, without a weight
};

// A lane holds the elements lane + 32 j of a head, for each slot j for which there is one.
template <int D>
constexpr int SLOTS = ceil_div(D, WARP);

template <int D>
__device__ __forceinline__ bool has_slot(int j) {
    return D % WARP == 0 || lane_id() + WARP * j < D;
}

// Stands for any number of elements that rotate.
constexpr int ANY_ROTARY = 0;

// If ROTARY elements of a head rotate: whether a lane holds the partners of its elements, or each lane holds exactly one element.
template <int D, int ROTARY>
constexpr bool IN_LANE = (D == WARP && ROTARY == WARP) || ROTARY % (2 * WARP) == 0;

// An element and its partner after a rotation. The roundings are written out: the key of a position has the same bits whichever kernel
// makes it.
__device__ __forceinline__ float rotated(float own, float partner, float cosine, float sine) {
    return fmaf(own, cosine, __fmul_rn(partner, sine));
}

// The angles of a lane's elements at a position. They depend only on the position, so they may be computed before the kernel waits for its
// predecessor. ROTARY: rotary_dim, or ANY_ROTARY.
template <int D, int ROTARY>
struct Rotation {
    static_assert(ROTARY <= D && IN_LANE<D, ROTARY>, "");
    static constexpr int N = SLOTS<D>, HALF = ROTARY / 2, ANGLES = HALF <= WARP ? 1 : HALF / WARP;
    float sine[ANGLES], cosine[ANGLES];

    __device__ __forceinline__ Rotation(const HeadOptions& o, int position) {
#pragma unroll
        for (int j = 0; j < ANGLES; j++) {
            sincosf(position * o.frequencies[lane_id() % HALF + WARP * j], &sine[j], &cosine[j]);
            sine[j] *= o.attention_factor;
            cosine[j] *= o.attention_factor;
        }
    }
    __device__ __forceinline__ void apply(float (&y)[N], float scale) const {
        if (N == 1) {
            float partner = __shfl_xor_sync(ALL_LANES, y[0], HALF);
            y[0] = rotated(y[0], lane_id() < HALF ? -partner : partner, cosine[0], sine[0]) * scale;
        } else {
#pragma unroll
            for (int j = 0; j < ANGLES; j++) {
                float low = y[j], high = y[(j + ANGLES) % N];
                y[j] = rotated(low, -high, cosine[j], sine[j]) * scale;
                y[(j + ANGLES) % N] = rotated(high, low, cosine[j], sine[j]) * scale;
            }
#pragma unroll
            for (int j = 2 * ANGLES; j < N; j++) y[j] *= scale;
        }
    }
};

template <int D>
struct Rotation<D, ANY_ROTARY> {
    static constexpr int N = SLOTS<D>;
    float sine[N], cosine[N];  // the sine has the sign of the partner's term
    int partner[N];

    __device__ __forceinline__ Rotation(const HeadOptions& o, int position) {
        int half = o.rotary_dim / 2;
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = lane_id() + WARP * j;
            bool first = i < half, rotates = i < 2 * half;
            partner[j] = rotates ? first ? i + half : i - half : i;
            cosine[j] = 1, sine[j] = 0;
            if (!rotates) continue;
            sincosf(position * o.frequencies[first ? i : i - half], &sine[j], &cosine[j]);
            cosine[j] *= o.attention_factor;
            sine[j] *= first ? -o.attention_factor : o.attention_factor;
        }
    }
    __device__ __forceinline__ void apply(float (&y)[N], float scale) const {
        float other[N] = {};
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int slot = 0; slot < N; slot++) {
                float x = __shfl_sync(ALL_LANES, y[slot], partner[j] % WARP);
                if (partner[j] / WARP == slot) other[j] = x;
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++) y[j] = rotated(y[j], other[j], cosine[j], sine[j]) * scale;
    }
};

// The norm's weights of a lane's elements; ones without a norm.
template <int D>
__device__ __forceinline__ void load_norm(const float* weight, float (&w)[SLOTS<D>]) {
#pragma unroll
    for (int j = 0; j < SLOTS<D>; j++) w[j] = weight && has_slot<D>(j) ? weight[lane_id() + WARP * j] : 1;
}

// A lane's elements of the head at `x`.
template <int D>
__device__ __forceinline__ void load_head(const float* x, float (&y)[SLOTS<D>]) {
#pragma unroll
    for (int j = 0; j < SLOTS<D>; j++) y[j] = has_slot<D>(j) ? x[lane_id() + WARP * j] : 0;
}

// The factor of a head's RMSNorm.
template <int D>
__device__ __forceinline__ float norm_factor(const float (&y)[SLOTS<D>], float eps) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < SLOTS<D>; j++) sum += y[j] * y[j];
    return rsqrtf(warp_sum(sum) / D + eps);
}

template <int D>
__device__ __forceinline__ void apply_head_norm(float (&y)[SLOTS<D>], const float (&weight)[SLOTS<D>], float eps, float scale) {
    float factor = norm_factor<D>(y, eps) * scale;
#pragma unroll
    for (int j = 0; j < SLOTS<D>; j++) y[j] *= factor * weight[j];
}

template <int D, int ROTARY>
__device__ __forceinline__ void norm_and_rotate(float (&y)[SLOTS<D>], bool normed, const float (&weight)[SLOTS<D>], const HeadOptions& o,
                                                const Rotation<D, ROTARY>& r, float scale) {
    bool is_last = normed && o.rotates_first;
    if (normed && !is_last) apply_head_norm<D>(y, weight, o.eps, 1);
    r.apply(y, is_last ? 1 : scale);
    if (is_last) apply_head_norm<D>(y, weight, o.eps, scale);
}
