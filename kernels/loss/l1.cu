// The mean absolute difference of hidden states, up to a factor, and its gradient.
#include "common/reduce.cuh"
#include "common/values.cuh"

struct Arguments {
    const uint4* h;         // bf16
    const uint4* target;    // bf16
    uint4* d;               // bf16: weight * sign(h - target); may be h or target
    float* partial;         // [BLOCKS]
    u64 pieces;             // of eight elements
    float weight;
};

struct TotalArguments {
    const float* partial;   // [BLOCKS]
    float* total;           // weight * the sum of |h - target|
    float weight;
};

constexpr int THREADS = 256, BLOCKS = 512;

// Grid: (BLOCKS)
extern "C" __global__ void __launch_bounds__(THREADS) l1_gradient(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float sum = 0;
#pragma unroll 2
    for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < a.pieces; i += BLOCKS * THREADS) {
        float h[PIECE], target[PIECE];
        load_bf16(a.h + i, h);
        load_bf16(a.target + i, target);
#pragma unroll
        for (int e = 0; e < PIECE; e++) {
            float difference = h[e] - target[e];
            sum += fabsf(difference);
            h[e] = difference > 0 ? a.weight : difference < 0 ? -a.weight : 0;
        }
        store_bf16(a.d + i, h);
    }
    sum = block_sum(sum, warp_sums, THREADS / WARP);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = sum;
}

// Grid: (1)
extern "C" __global__ void __launch_bounds__(BLOCKS) l1_total(const __grid_constant__ TotalArguments a) {
    __shared__ double sums[BLOCKS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    sums[threadIdx.x] = a.partial[threadIdx.x];
    __syncthreads();
    for (int half = BLOCKS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *a.total = (float)(a.weight * sums[0]);
}
