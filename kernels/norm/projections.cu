// RMSNorms of a row of projections in place: one over all of its queries, and one over all of its keys, each by a block.
#include "norm/residual.cuh"

struct Arguments {
    float* x;                   // [rows, stride]: queries, keys, and values, which stay as they are
    const float* weights[2];    // [width] of queries and of keys
    int widths[2];              // multiples of 4
    int stride;                 // a multiple of 4
    float eps;
};

constexpr int STEP = 4 * THREADS;

// Grid: (rows, 2)
extern "C" __global__ void __launch_bounds__(THREADS) norm_projections(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[WARPS];
    bool is_key = blockIdx.y == 1;
    int width = a.widths[is_key];
    const float* weight = a.weights[is_key];
    float* x = a.x + (size_t)blockIdx.x * a.stride + (is_key ? a.widths[0] : 0);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float sum = 0;
    for (int i = 4 * threadIdx.x; i < width; i += STEP) sum += square_sum(*(const float4*)(x + i));
    sum = block_sum(sum, warp_sums);
    float factor = rsqrtf(sum / width + a.eps);
    for (int i = 4 * threadIdx.x; i < width; i += STEP) {
        float4* at = (float4*)(x + i);
        *at = apply_norm(*at, factor, *(const float4*)(weight + i));
    }
}
