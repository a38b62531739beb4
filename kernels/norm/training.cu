// RMSNorm of rows of bf16 for training, forward and backward. A block takes a row at a time, and a thread eight of its elements.
#include "common/reduce.cuh"
#include "common/values.cuh"

struct NormArguments {
    const uint4* x;         // bf16 [rows, width]
    const float* weight;    // [width]
    uint4* y;               // bf16 [rows, width]; may be x
    int width;              // a multiple of 16 up to MOST_WIDTH
    float eps;
};

struct NormBackwardArguments {
    const uint4* x;         // bf16 [rows, width]
    const float* weight;    // [width]
    const uint4* dy;        // bf16 [rows, width]
    const uint4* residual;  // bf16 [rows, width], added to dx; or null
    uint4* dx;              // bf16 [rows, width]; may be dy or residual
    float* partial;         // [gridDim.x, width]: of the gradient of the weight
    int rows;
    int width;              // a multiple of 16 up to MOST_WIDTH
    float eps;
};

constexpr int MOST_THREADS = 1024, MOST_WIDTH = MOST_THREADS * PIECE;
static_assert(MOST_WIDTH == 8192, "the launcher refuses wider rows");

// y = x / sqrt(mean(x^2) + eps) * weight. Grid: (rows); block: a thread for each piece of a row, in whole warps.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) train_norm(const __grid_constant__ NormArguments a) {
    __shared__ float warp_sums[MOST_THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int pieces = a.width / PIECE, warps = ceil_div(pieces, WARP), i = threadIdx.x;
    bool has = i < pieces;
    size_t at = (size_t)blockIdx.x * pieces + i;
    float x[PIECE] = {}, weight[PIECE] = {}, squares = 0;
    if (has) {
        load_bf16(a.x + at, x);
        load_f32(a.weight + i * PIECE, weight);
    }
#pragma unroll
    for (int e = 0; e < PIECE; e++) squares += x[e] * x[e];
    float r = rsqrtf(block_sum(squares, warp_sums, warps) / a.width + a.eps);
#pragma unroll
    for (int e = 0; e < PIECE; e++) x[e] *= r * weight[e];
    if (has) store_bf16(a.y + at, x);
}

// With r = 1 / sqrt(mean(x^2) + eps) and g = dy * weight, dx = r (g - x r^2 mean(g x)) + residual, because dr/dx = -x r^3 / width. A block
// sums dy * x * r over its rows for the gradient of the weight. Grid: (blocks), each of which takes every gridDim.x-th row; block: as
// above.
extern "C" __global__ void __launch_bounds__(MOST_THREADS) train_norm_backward(const __grid_constant__ NormBackwardArguments a) {
    __shared__ float warp_sums[2][MOST_THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int pieces = a.width / PIECE, warps = ceil_div(pieces, WARP), i = threadIdx.x;
    bool has = i < pieces;
    float weight[PIECE] = {}, dweight[PIECE] = {};
    if (has) load_f32(a.weight + i * PIECE, weight);
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
        size_t at = (size_t)row * pieces + i;
        float x[PIECE] = {}, dy[PIECE] = {}, dx[PIECE] = {};
        if (has) {
            load_bf16(a.x + at, x);
            load_bf16(a.dy + at, dy);
            if (a.residual) load_bf16(a.residual + at, dx);
        }
        float squares = 0, products = 0;
#pragma unroll
        for (int e = 0; e < PIECE; e++) {
            squares += x[e] * x[e];
            products += dy[e] * weight[e] * x[e];
        }
        float r = rsqrtf(block_sum(squares, warp_sums[0], warps) / a.width + a.eps);
        float slope = r * r * (block_sum(products, warp_sums[1], warps) / a.width);
#pragma unroll
        for (int e = 0; e < PIECE; e++) {
            dweight[e] += dy[e] * (x[e] * r);
            dx[e] += r * (dy[e] * weight[e] - x[e] * slope);
        }
        if (has) store_bf16(a.dx + at, dx);
    }
    if (!has) return;
    float4* partial = (float4*)(a.partial + (size_t)blockIdx.x * a.width + i * PIECE);
    partial[0] = make_float4(dweight[0], dweight[1], dweight[2], dweight[3]);
    partial[1] = make_float4(dweight[4], dweight[5], dweight[6], dweight[7]);
}
