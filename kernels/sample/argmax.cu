// The argmax of each row of logits (the first one on a tie), and the advance of the sequence to its next position, so that the host reads a
// single number. Each block finds the best token of its share of a row; the last block to arrive compares these.
#include "common/ptx.cuh"
#include "sample/choice.cuh"

struct Arguments {
    const float* logits;    // [rows, vocabulary]
    float* best_value;      // [rows, blocks]
    int* best_token;        // [rows, blocks]
    u32* arrived;           // [rows]: zero before and after
    int* tokens;            // [rows]: the results, where the embedding reads them
    int* positions;         // [rows]: of the input tokens; advanced by one. Or null
    int* history;           // [history_steps, rows]: results by position modulo the steps; unused without positions
    int vocabulary;
    int history_steps;
};

constexpr int THREADS = 256;

__device__ __forceinline__ void take_better(float& value, int& token, float other_value, int other_token) {
    if (other_value > value || (other_value == value && other_token < token)) {
        value = other_value;
        token = other_token;
    }
}

// Leaves the best of the block in thread 0.
__device__ __forceinline__ void best_of_block(float& value, int& token) {
    __shared__ float values[THREADS / WARP];
    __shared__ int tokens[THREADS / WARP];
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) {
        take_better(value, token, __shfl_xor_sync(ALL_LANES, value, d), __shfl_xor_sync(ALL_LANES, token, d));
    }
    __syncthreads();
    if (lane_id() == 0) {
        values[threadIdx.x / WARP] = value;
        tokens[threadIdx.x / WARP] = token;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS / WARP; i++) take_better(value, token, values[i], tokens[i]);
    }
}

// Grid: (blocks, rows)
extern "C" __global__ void __launch_bounds__(THREADS) argmax(const __grid_constant__ Arguments a) {
    __shared__ bool last;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.y, blocks = gridDim.x;
    const float* logits = a.logits + (size_t)row * a.vocabulary;
    float value = -INFINITY;
    int token = 0x7fffffff;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < a.vocabulary; i += blocks * THREADS) {
        float x = logits[i];
        // NaN and plus infinity win, so that the first of them is reported to the host.
        take_better(value, token, x < INFINITY ? x : INFINITY, i);
    }
    best_of_block(value, token);
    if (threadIdx.x == 0) {
        a.best_value[row * blocks + blockIdx.x] = value;
        a.best_token[row * blocks + blockIdx.x] = token;
        last = (int)atomic_add_release_acquire(a.arrived + row, 1) == blocks - 1;
    }
    __syncthreads();
    if (!last) return;
    value = -INFINITY;
    token = 0x7fffffff;
    for (int i = threadIdx.x; i < blocks; i += THREADS) {
        take_better(value, token, __ldcg(a.best_value + row * blocks + i), __ldcg(a.best_token + row * blocks + i));
    }
    best_of_block(value, token);
    if (threadIdx.x == 0) {
        a.arrived[row] = 0;
        a.tokens[row] = token;
        if (a.positions) {
            int position = ++a.positions[row];
            a.history[(size_t)(position % a.history_steps) * gridDim.y + row] = encode_choice(value, token);
        }
    }
}
