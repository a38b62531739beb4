// Second moments of the inputs of GEMMs, in blocks of 16 columns.
#include "common/values.cuh"

struct Arguments {
    const u16* x;       // bf16 [rows, cols]
    float* sums;        // [cols / 16, 16, 16]
    int rows;
    int cols;
};

constexpr int BLOCK = 16, THREADS = BLOCK * BLOCK;
// Rows in shared memory at a time: a piece of them for each thread.
constexpr int ROWS = THREADS * PIECE / BLOCK;
static_assert(ROWS == 128, "two pieces make a row of a block");

// sums += x^T x of each 16 columns. A thread has one sum, and adds up ROWS rows before it adds those to it, so that less is rounded away.
// Grid: (cols / 16)
extern "C" __global__ void __launch_bounds__(THREADS) train_input_moments(const __grid_constant__ Arguments a) {
    __shared__ float x[ROWS][BLOCK];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int thread = threadIdx.x, i = thread / BLOCK, j = thread % BLOCK;
    float* to = a.sums + (size_t)blockIdx.x * THREADS + thread;
    float sum = 0;
    for (int first = 0; first < a.rows; first += ROWS) {
        int row = thread / 2, half = thread % 2 * PIECE;
        float piece[PIECE] = {};
        if (first + row < a.rows) load_bf16((const uint4*)(a.x + (size_t)(first + row) * a.cols + blockIdx.x * BLOCK + half), piece);
        __syncthreads();
#pragma unroll
        for (int e = 0; e < PIECE; e++) x[row][half + e] = piece[e];
        __syncthreads();
        float part = 0;
#pragma unroll 8
        for (int r = 0; r < ROWS; r++) part += x[r][i] * x[r][j];
        sum += part;
    }
    *to += sum;
}
