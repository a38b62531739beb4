// Calibrated NVFP4 quantization: codes and scales of a matrix that are best for its product, by all second moments of its inputs, see
// src/format/calibrated.rs. Rows are independent, with one thread each. A GEMM after each kernel propagates errors to distant blocks.
#include "common/types.cuh"
#include "quantize/calibrated.cuh"

constexpr int THREADS = 64;             // of a block: rows
constexpr int TOGETHER = 8;             // blocks whose errors reach the blocks far from them together
constexpr int GROUP = TOGETHER * BLOCK;
static_assert(THREADS * 4 == BLOCK * BLOCK, "a thread loads four elements of a block's moments");

struct Arguments {
    const float* weights;   // [rows, cols]
    const float* sums;      // [rows, cols]: what the errors of other groups make, in the order of `moments`
    const float* moments;   // [cols, cols]: M, or its factor R with blocks in the order of their turns
    const float* factors;   // [cols / 16, 16, 16]: the factor of each block of M
    const int* order;       // [cols / 16]: the block of each turn
    u8* codes;              // [rows, cols / 2]
    u8* scales;             // [rows, cols / 16]
    float* errors;          // [rows, GROUP]: errors of this group, or what has become of them
    int rows;
    int cols;
    int first, last;        // blocks of the group, by their turns
    float global;
};

struct Block {
    Matrix moments;
    BlockFactor factor;
};

// Loads a block of 16 rows and columns of a matrix whose rows are `stride` apart.
__device__ __forceinline__ void load_block(const float* from, size_t stride, Matrix& to) {
    int row = threadIdx.x / 4, col = threadIdx.x % 4 * 4;
    *(float4*)&to[row][col] = *(const float4*)(from + row * stride + col);
}
__device__ __forceinline__ void load_factor(const float* from, size_t stride, BlockFactor& to) {
    load_block(from, stride, to.r);
    if (threadIdx.x < BLOCK) to.inverses[threadIdx.x] = 1.0f / from[threadIdx.x * (stride + 1)];
}

// Adds the errors of the group's blocks before `turn`, times their rows of the moments, to the sums of this block.
__device__ __forceinline__ void add_group(const Arguments& a, const float* errors, int turn, Values& sums) {
    const float* column = a.moments + (size_t)a.first * BLOCK * a.cols + turn * BLOCK;
    for (int depth = 0; depth < (turn - a.first) * BLOCK; depth++) add_row(sums, column + (size_t)depth * a.cols, errors[depth]);
}

// Rounds the blocks of a group in turn, each weight to the code that compensates for the errors before it. Grid: (rows / THREADS)
extern "C" __global__ void __launch_bounds__(THREADS) calibrated_round_in_turn(const __grid_constant__ Arguments a) {
    __shared__ __align__(16) BlockFactor factor;
    wait_for_earlier_kernels();
    int row = blockIdx.x * THREADS + threadIdx.x;
    bool is_row = row < a.rows;
    size_t at = min(row, a.rows - 1);
    float* errors = a.errors + at * GROUP;
    for (int turn = a.first; turn < a.last; turn++) {
        int block = a.order[turn];
        __syncthreads();
        load_factor(a.moments + (size_t)turn * BLOCK * (a.cols + 1), a.cols, factor);
        __syncthreads();
        // Threads without a row process the last one, and store nothing.
        Values weights, sums, values;
        load(a.weights + at * a.cols + block * BLOCK, weights);
        load(a.sums + at * a.cols + turn * BLOCK, sums);
        add_group(a, errors, turn, sums);
        u32 scale = round_in_turn(weights, sums, a.global, factor, values);
        if (is_row) put(a.codes, a.scales, at * (a.cols / BLOCK) + block, values, scale, a.global);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) values[i] = weights[i] - values[i];
        if (is_row) store(errors + (turn - a.first) * BLOCK, values);
    }
}

// Moves each block of a group to the scale and codes that are best while the others stay fixed. Grid: (rows / THREADS)
extern "C" __global__ void __launch_bounds__(THREADS) calibrated_descend(const __grid_constant__ Arguments a) {
    __shared__ __align__(16) Block block;
    wait_for_earlier_kernels();
    int row = blockIdx.x * THREADS + threadIdx.x;
    bool is_row = row < a.rows;
    size_t at = min(row, a.rows - 1);
    float* errors = a.errors + at * GROUP;
    for (int index = a.first; index < a.last; index++) {
        __syncthreads();
        load_block(a.moments + (size_t)index * BLOCK * (a.cols + 1), a.cols, block.moments);
        load_factor(a.factors + (size_t)index * BLOCK * BLOCK, BLOCK, block.factor);
        __syncthreads();
        Values weights, gradient, held, change;
        load(a.weights + at * a.cols + index * BLOCK, weights);
        load(a.sums + at * a.cols + index * BLOCK, gradient);
        add_group(a, errors, index, gradient);
        size_t place = at * (a.cols / BLOCK) + index;
        u32 scale = get(a.codes, a.scales, place, a.global, held);
        if (round_beside(weights, gradient, a.global, block.moments, block.factor, scale, held, change) && is_row) {
            put(a.codes, a.scales, place, held, scale, a.global);
        }
        if (is_row) store(errors + (index - a.first) * BLOCK, change);
    }
}

// The scale of each block that is best for its own product, with each weight at its nearest code. `moments` are those of each block, [cols
// / 16, 16, 16]. Grid: (rows / THREADS, cols / 16)
extern "C" __global__ void __launch_bounds__(THREADS) calibrated_by_blocks(const __grid_constant__ Arguments a) {
    __shared__ __align__(16) Matrix moments;
    wait_for_earlier_kernels();
    int row = blockIdx.x * THREADS + threadIdx.x, block = blockIdx.y;
    load_block(a.moments + (size_t)block * BLOCK * BLOCK, BLOCK, moments);
    __syncthreads();
    if (row >= a.rows) return;
    Values weights, errors, values;
    load(a.weights + (size_t)row * a.cols + block * BLOCK, weights);
    u32 first = first_tried(weights, a.global);
    int best = 0;
    float least = INFINITY;
#pragma unroll 1
    for (int offset = 0; offset < TRIED; offset++) {
        forget_memory();
        float step = scale_to_float(tried(first, offset)) * a.global, inverse = 1.0f / step, cost = 0;
        Values products;
        clear(products);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            errors[i] = weights[i] - nearest_value(weights[i] * inverse) * step;
            add_row(products, moments[i], errors[i]);
        }
#pragma unroll
        for (int i = 0; i < BLOCK; i++) cost = __fmaf_rn(products[i], errors[i], cost);
        if (cost < least) best = offset, least = cost;
    }
    u32 scale = tried(first, best);
    float step = scale_to_float(scale) * a.global, inverse = 1.0f / step;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) values[i] = nearest_value(weights[i] * inverse) * step;
    put(a.codes, a.scales, (size_t)row * (a.cols / BLOCK) + block, values, scale, a.global);
}

struct ErrorArguments {
    const float* weights;   // [rows, cols]
    const u8* codes;        // [rows, cols / 2]; null: all are zero
    const u8* scales;       // [rows, cols / 16]
    float* errors;          // [rows, cols]
    u64 blocks;             // of all rows
    float global;
};

// errors = weights - values. Grid: (blocks / THREADS)
extern "C" __global__ void __launch_bounds__(THREADS) calibrated_errors(const __grid_constant__ ErrorArguments a) {
    wait_for_earlier_kernels();
    size_t block = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (block >= a.blocks) return;
    Values weights, values;
    load(a.weights + block * BLOCK, weights);
    clear(values);
    if (a.codes) get(a.codes, a.scales, block, a.global, values);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) weights[i] -= values[i];
    store(a.errors + block * BLOCK, weights);
}

struct DotArguments {
    const float* x;
    const float* y;
    double* sums;           // one for each block
    u64 count;
};

// The sum of the products of x and y, in an order that depends only on their number. Grid: (any)
extern "C" __global__ void __launch_bounds__(THREADS) calibrated_dot(const __grid_constant__ DotArguments a) {
    __shared__ double sums[THREADS];
    wait_for_earlier_kernels();
    double sum = 0;
    size_t step = (size_t)gridDim.x * THREADS;
    for (size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x; i < a.count; i += step) sum += (double)a.x[i] * a.y[i];
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) a.sums[blockIdx.x] = sums[0];
}
