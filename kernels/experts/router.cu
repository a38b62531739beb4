// The logits of a router with f32 weights and the choice of experts, for few rows, in one launch: y[row, n] = sum over k of x[row, k] w[n, k].
// A warp takes an expert, or the gate of the shared expert, and up to TOKENS rows. The last block to finish chooses and sorts
// (experts/choice.cuh).
#include "experts/choice.cuh"

struct Arguments {
    const u16* x;           // f16 [rows, k]
    const float* router;    // [experts, k]
    const float* bias;      // [experts] or null
    const float* gate;      // [k], whose product follows the logits of a row; or null
    u32* arrived;           // zero before and after
    Routing routing;
    int k;                  // a multiple of 8
};

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int PIECE = 8;    // elements of a row that a lane loads at once

struct Weights {
    float4 low, high;
};

// The first AHEAD pieces of a weight are loaded before the kernel waits for earlier ones, which write no weights. Grid: (ceil((experts + 1) /
// WARPS), ceil(rows / TOKENS)).
template <int TOKENS, int AHEAD>
__device__ __forceinline__ void run(const Arguments& a) {
    __shared__ FewPairs few;
    __shared__ int is_last;
    const Routing& r = a.routing;
    int feature = blockIdx.x * WARPS + threadIdx.x / WARP, first = blockIdx.y * TOKENS, lane = lane_id();
    bool is_gate = feature == r.experts, has = feature < r.experts || (is_gate && a.gate);
    const float* weight = is_gate ? a.gate : a.router + (size_t)feature * a.k;
    auto load = [&](int i) {
        const float4* from = (const float4*)(weight + i);
        return Weights{from[0], from[1]};
    };
    Weights ahead[AHEAD];
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
        int i = PIECE * (lane + WARP * u);
        if (has && i < a.k) ahead[u] = load(i);
    }
    float bias = has && !is_gate && a.bias ? a.bias[feature] : 0;
    wait_for_earlier_kernels();
    let_later_kernels_start();

    float sums[TOKENS] = {};
    auto multiply = [&](const Weights& w, int i) {
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            if (TOKENS > 1 && first + m >= r.rows) continue;
            uint4 x = *(const uint4*)(a.x + (size_t)(first + m) * a.k + i);
            float sum = sums[m];
            sum += w.low.x * f16_low(x.x), sum += w.low.y * f16_high(x.x), sum += w.low.z * f16_low(x.y), sum += w.low.w * f16_high(x.y);
            sum += w.high.x * f16_low(x.z), sum += w.high.y * f16_high(x.z), sum += w.high.z * f16_low(x.w), sum += w.high.w * f16_high(x.w);
            sums[m] = sum;
        }
    };
    if (has) {
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            int i = PIECE * (lane + WARP * u);
            if (i < a.k) multiply(ahead[u], i);
        }
#pragma unroll 1
        for (int i = PIECE * (lane + WARP * AHEAD); i < a.k; i += PIECE * WARP) multiply(load(i), i);
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            float sum = warp_sum(sums[m]);
            if (lane == 0 && first + m < r.rows) r.logits[(size_t)(first + m) * r.stride + feature] = sum + bias;
        }
    }

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomic_add_release_acquire(a.arrived, 1) == gridDim.x * gridDim.y - 1;
        if (is_last) *a.arrived = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    route_few(r, few);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_router_1(const __grid_constant__ Arguments a) { run<1, 8>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_router(const __grid_constant__ Arguments a) { run<8, 2>(a); }
