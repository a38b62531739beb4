// The gradient of an embedding: sums the residual stream's gradient by token.
#include "common/values.cuh"

struct Arguments {
    const uint4* dx;        // bf16 [T, width]
    const u32* order;       // rows of dx, by token
    const u32* offsets;     // [gridDim.x + 1]: where each token's rows begin in `order`
    const u32* ids;         // [gridDim.x]: the tokens, each of which is there once
    uint4* gradient;        // bf16 [rows, width]: of the tokens from first_id on
    u32 first_id;
    u32 rows;
    int width;              // a multiple of 16
    float scale;
    int add;                // whether to add to the gradient, or replace it
};

constexpr int THREADS = 128;

// gradient[id - first_id] = or += scale * the sum of the token's rows, in order; other rows stay as they are.
// Grid: (tokens, ceil(width / 8 / THREADS))
extern "C" __global__ void __launch_bounds__(THREADS) train_embed(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x, pieces = a.width / PIECE;
    // Tokens before first_id wrap around to numbers beyond the last row.
    u32 row = a.ids[blockIdx.x] - a.first_id;
    if (row >= a.rows || i >= pieces) return;
    float sum[PIECE] = {};
#pragma unroll 8
    for (u32 j = a.offsets[blockIdx.x]; j < a.offsets[blockIdx.x + 1]; j++) {
        float x[PIECE];
        load_bf16(a.dx + (size_t)a.order[j] * pieces + i, x);
#pragma unroll
        for (int e = 0; e < PIECE; e++) sum[e] += x[e];
    }
    uint4* to = a.gradient + (size_t)row * pieces + i;
    float before[PIECE] = {};
    if (a.add) load_bf16(to, before);
#pragma unroll
    for (int e = 0; e < PIECE; e++) sum[e] = before[e] + a.scale * sum[e];
    store_bf16(to, sum);
}
