// Log-probabilities of given tokens by rows of logits: the counterpart of src/ops/likelihood.rs. A block takes a row and reads it twice.
#include "common/ptx.cuh"
#include "sample/choice.cuh"

struct Likelihood {
    float log_probability;
    int choice;             // the argmax of the row, as encode_choice says
};

struct Arguments {
    const float* logits;    // [rows, vocabulary]
    const int* tokens;      // [rows]
    Likelihood* found;      // [rows]
    int vocabulary;
};

constexpr int THREADS = 1024;
static_assert(THREADS == WARP * WARP, "one warp combines the results of all warps");

struct Best {
    float value;
    int token;

    __device__ __forceinline__ void take(Best other) {
        if (other.value > value || (other.value == value && other.token < token)) *this = other;
    }
};

// The best of a warp, in every lane.
__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) best.take({__shfl_xor_sync(ALL_LANES, best.value, d), __shfl_xor_sync(ALL_LANES, best.token, d)});
    return best;
}

__device__ __forceinline__ double sum_of_warp(double x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}

// Exponentials are f32, and their sum f64 in a fixed order: a log-probability has an absolute error of at most 1e-6, and the rounding of f32.
// Grid: (rows)
extern "C" __global__ void __launch_bounds__(THREADS, 1) likelihood(const __grid_constant__ Arguments a) {
    __shared__ Best bests[WARP];
    __shared__ double sums[WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x, warp = threadIdx.x / WARP;
    const float* logits = a.logits + (size_t)row * a.vocabulary;
    Best best = {-INFINITY, 0x7fffffff};
#pragma unroll 4
    for (int i = threadIdx.x; i < a.vocabulary; i += THREADS) {
        float x = logits[i];
        // NaN and plus infinity win, so that the first of them is reported to the host.
        best.take({x < INFINITY ? x : INFINITY, i});
    }
    best = best_of_warp(best);
    if (lane_id() == 0) bests[warp] = best;
    __syncthreads();
    best = best_of_warp(bests[lane_id()]);
    double sum = 0;
    if (fabsf(best.value) < INFINITY) {
#pragma unroll 4
        for (int i = threadIdx.x; i < a.vocabulary; i += THREADS) sum += (double)expf(logits[i] - best.value);
    }
    sum = sum_of_warp(sum);
    if (lane_id() == 0) sums[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = sum_of_warp(sums[lane_id()]);
    if (threadIdx.x > 0) return;
    float own = logits[a.tokens[row]];
    a.found[row] = {(float)((double)own - (double)best.value - log(sum)), encode_choice(best.value, best.token)};
}
