// Second moments of the inputs of a GEMM, [cols, cols], and their factor: see src/cpu/moments.rs.
#include "common/ptx.cuh"

constexpr int BLOCK = 16;
constexpr int THREADS = 64;             // of a block of the factorization, and columns of its panels
constexpr int TILE = 16;                // rows and columns of a block of the other kernels

struct Arguments {
    float* values;          // [cols, cols]
    float* out;             // see the kernels
    const int* order;       // [cols / 16]
    int cols;
    int first, width;       // columns of a panel
    float more;             // is added to the diagonal
};

// Copies the diagonal blocks to out [cols / 16, 16, 16], mirroring the upper triangle to the lower one. Grid: (cols / 16)
extern "C" __global__ void moments_blocks(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    int row = threadIdx.x / BLOCK, col = threadIdx.x % BLOCK, first = blockIdx.x * BLOCK;
    a.out[blockIdx.x * BLOCK * BLOCK + threadIdx.x] = a.values[(size_t)(first + min(row, col)) * a.cols + first + max(row, col)];
}

// Mirrors the upper triangle to the lower one, and adds to the diagonal. Grid: (cols / TILE, cols / TILE)
extern "C" __global__ void moments_complete(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    size_t row = blockIdx.y * TILE + threadIdx.x / TILE, col = blockIdx.x * TILE + threadIdx.x % TILE;
    if (row == col) a.values[row * a.cols + col] += a.more;
    if (row > col) a.values[row * a.cols + col] = a.values[col * a.cols + row];
}

// Reorders blocks of 16 rows and columns to out [cols, cols]. Grid: (cols / TILE, cols / TILE)
extern "C" __global__ void moments_reorder(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    int row = threadIdx.x / TILE, col = threadIdx.x % TILE;
    size_t from = (size_t)(a.order[blockIdx.y] * BLOCK + row) * a.cols + a.order[blockIdx.x] * BLOCK + col;
    a.out[(size_t)(blockIdx.y * TILE + row) * a.cols + blockIdx.x * TILE + col] = a.values[from];
}

// The upper triangular factor of the diagonal square of a panel, in place, with zeros below. Sets out[0] to 1 if the square is not positive
// definite. Grid: (1)
extern "C" __global__ void __launch_bounds__(THREADS) moments_factor_square(const __grid_constant__ Arguments a) {
    __shared__ double r[THREADS][THREADS + 1];
    wait_for_earlier_kernels();
    int row = threadIdx.x;
    float* square = a.values + (size_t)a.first * (a.cols + 1);
    if (row < a.width) {
        for (int col = 0; col < a.width; col++) r[row][col] = square[(size_t)row * a.cols + col];
    }
    for (int i = a.width - 1; i >= 0; i--) {
        __syncthreads();
        double rest = 0;
        if (row <= i) {
            rest = r[row][i];
            for (int k = i + 1; k < a.width; k++) rest -= r[row][k] * r[i][k];
        }
        if (row == i) {
            if (!(rest > 0)) a.out[0] = 1, rest = 1;
            r[i][i] = (double)(float)sqrt(rest);
        }
        __syncthreads();
        if (row < i) r[row][i] = (double)(float)(rest / r[i][i]);
    }
    __syncthreads();
    if (row < a.width) {
        for (int col = 0; col < a.width; col++) square[(size_t)row * a.cols + col] = col < row ? 0 : (float)r[row][col];
    }
}

// The rows of a panel above its square, X with X R^T = A, in place and to out [first, width]. Grid: (first / THREADS)
extern "C" __global__ void __launch_bounds__(THREADS) moments_factor_rows(const __grid_constant__ Arguments a) {
    __shared__ float r[THREADS][THREADS];
    __shared__ float x[THREADS][THREADS + 1];
    wait_for_earlier_kernels();
    int thread = threadIdx.x, row = blockIdx.x * THREADS + thread;
    for (int i = 0; i < a.width; i++) {
        if (thread < a.width) r[i][thread] = a.values[(size_t)(a.first + i) * a.cols + a.first + thread];
    }
    __syncthreads();
    if (row >= a.first) return;
    float* values = a.values + (size_t)row * a.cols + a.first;
    for (int i = a.width - 1; i >= 0; i--) {
        float rest = values[i];
        for (int k = i + 1; k < a.width; k++) rest -= x[thread][k] * r[i][k];
        x[thread][i] = rest / r[i][i];
    }
    for (int i = 0; i < a.width; i++) values[i] = x[thread][i], a.out[(size_t)row * a.width + i] = x[thread][i];
}
