// Gathers rows for an expert, and scatters its results back.
#include "common/values.cuh"

struct Arguments {
    const uint4* x;         // bf16: where rows are taken from [T, width], or an expert's results [n, width]
    const u32* rows;        // [n]: the rows that go to the expert, of which no two are equal
    const float* weights;   // [n]: what the results are multiplied by
    uint4* taken;           // bf16 [n, width]
    float* sum;             // [T, width]
    int width;              // a multiple of 16
};

constexpr int THREADS = 128;

// taken[i] = x[rows[i]]
// Grid: (n, ceil(width / 8 / THREADS))
extern "C" __global__ void __launch_bounds__(THREADS) train_take_rows(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x, pieces = a.width / PIECE;
    if (i >= pieces) return;
    a.taken[(size_t)blockIdx.x * pieces + i] = a.x[(size_t)a.rows[blockIdx.x] * pieces + i];
}

// sum[rows[i]] += weights[i] * x[i]
// Grid: (n, ceil(width / 8 / THREADS))
extern "C" __global__ void __launch_bounds__(THREADS) train_add_rows(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x, pieces = a.width / PIECE;
    if (i >= pieces) return;
    float x[PIECE], weight = a.weights[blockIdx.x];
    load_bf16(a.x + (size_t)blockIdx.x * pieces + i, x);
    float* to = a.sum + ((size_t)a.rows[blockIdx.x] * pieces + i) * PIECE;
#pragma unroll
    for (int e = 0; e < PIECE; e++) to[e] += weight * x[e];
}
