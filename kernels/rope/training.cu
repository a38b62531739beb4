// Between the projections and attention, for training: RMSNorm of each head of queries and keys if the model has it, then RoPE, forward and
// backward. A group of lanes takes a head, and a lane eight of its elements.
#include "common/reduce.cuh"
#include "common/values.cuh"

struct HeadsArguments {
    const uint4* qkv;       // bf16 [rows, (heads + 2 kv_heads) dim]: before norm and rotation
    const uint4* dout;      // backward: bf16, as qkv: the gradients of what the forward pass gave
    uint4* out;             // bf16, as qkv; may be qkv forward, and dout backward
    const float* q_norm;    // [dim] or null
    const float* k_norm;
    const float* cos;       // [rows, half]
    const float* sin;
    float* partial;         // backward: [gridDim.x, 2, dim]: of the gradients of q_norm and k_norm; null without norms
    int rows;
    int heads;
    int kv_heads;
    int dim;                // a multiple of 16 up to 256
    int half;               // element i < half rotates with element i + half, the others pass: a multiple of 8
    int lanes;              // of a group: a power of two from dim / 8 up to a warp
    float eps;
};

constexpr int THREADS = 256;

__device__ __forceinline__ float group_sum(float x, int lanes) {
    for (int d = lanes / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}

// This thread's part of a row, independent of the head.
struct Piece {
    int index;          // in the head
    bool exists;
    bool is_low;        // in the first half of what rotates
    bool rotates;
    int partner;        // the lane that has the elements with which these rotate
    int angle;          // the first of its angles

    __device__ __forceinline__ Piece(const HeadsArguments& a) {
        index = threadIdx.x % a.lanes;
        exists = index < a.dim / PIECE;
        int half = a.half / PIECE;
        is_low = index < half;
        rotates = index < 2 * half;
        partner = lane_id() + (!rotates ? 0 : is_low ? half : -half);
        angle = (is_low ? index : index - half) * PIECE;
    }

    // Rotates a head of a row by its angles times `direction`, 1 or -1. All lanes of the warp call it.
    __device__ __forceinline__ void rotate(const HeadsArguments& a, int row, bool of_head, float direction, float (&x)[PIECE]) const {
        float other[PIECE], cos[PIECE], sin[PIECE];
#pragma unroll
        for (int e = 0; e < PIECE; e++) other[e] = __shfl_sync(ALL_LANES, x[e], partner);
        if (!rotates || !of_head) return;
        load_f32(a.cos + (size_t)row * a.half + angle, cos);
        load_f32(a.sin + (size_t)row * a.half + angle, sin);
        float sign = is_low ? -direction : direction;
#pragma unroll
        for (int e = 0; e < PIECE; e++) x[e] = x[e] * cos[e] + other[e] * (sign * sin[e]);
    }
};

// Grid: (ceil(rows * (heads + 2 kv_heads) / (THREADS / lanes)))
extern "C" __global__ void __launch_bounds__(THREADS) train_heads(const __grid_constant__ HeadsArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int all = a.heads + 2 * a.kv_heads;
    u64 index = (u64)blockIdx.x * (THREADS / a.lanes) + threadIdx.x / a.lanes;
    int row = (int)(index / all), head = (int)(index % all);
    Piece piece(a);
    bool has = piece.exists && row < a.rows, is_value = head >= a.heads + a.kv_heads;
    size_t at = index * (a.dim / PIECE) + piece.index;
    float x[PIECE] = {}, squares = 0;
    if (has) load_bf16(a.qkv + at, x);
#pragma unroll
    for (int e = 0; e < PIECE; e++) squares += x[e] * x[e];
    float r = rsqrtf(group_sum(squares, a.lanes) / a.dim + a.eps);
    const float* norm = is_value ? nullptr : head < a.heads ? a.q_norm : a.k_norm;
    if (norm && has) {
        float weight[PIECE];
        load_f32(norm + piece.index * PIECE, weight);
#pragma unroll
        for (int e = 0; e < PIECE; e++) x[e] *= r * weight[e];
    }
    piece.rotate(a, row, has && !is_value, 1, x);
    if (has) store_bf16(a.out + at, x);
}

// Rotates gradients back, and applies the backward pass of the norm: see kernels/norm/training.cu. Grid: (blocks), each of which takes
// every gridDim.x-th row, and a group every (THREADS / lanes)-th head of it.
extern "C" __global__ void __launch_bounds__(THREADS) train_heads_backward(const __grid_constant__ HeadsArguments a) {
    // The gradients of q_norm and k_norm, per group. A group of lanes has room for as many elements.
    __shared__ float sums[2][THREADS * PIECE];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int all = a.heads + 2 * a.kv_heads, groups = THREADS / a.lanes, group = threadIdx.x / a.lanes;
    Piece piece(a);
    float dnorm[2][PIECE] = {};
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x) {
        for (int first = 0; first < all; first += groups) {
            int head = first + group;
            bool has = piece.exists && head < all, is_query = head < a.heads, is_value = head >= a.heads + a.kv_heads;
            size_t at = ((size_t)row * all + head) * (a.dim / PIECE) + piece.index;
            const float* norm = is_value ? nullptr : is_query ? a.q_norm : a.k_norm;
            float x[PIECE] = {}, d[PIECE] = {}, weight[PIECE] = {};
            if (has) load_bf16(a.dout + at, d);
            if (has && norm) {
                load_bf16(a.qkv + at, x);
                load_f32(norm + piece.index * PIECE, weight);
            }
            piece.rotate(a, row, has && !is_value, -1, d);
            float squares = 0, products = 0;
#pragma unroll
            for (int e = 0; e < PIECE; e++) {
                squares += x[e] * x[e];
                products += d[e] * weight[e] * x[e];
            }
            float r = rsqrtf(group_sum(squares, a.lanes) / a.dim + a.eps);
            float slope = r * r * (group_sum(products, a.lanes) / a.dim);
            if (!has) continue;
            if (norm) {
#pragma unroll
                for (int e = 0; e < PIECE; e++) {
                    float own = d[e] * (x[e] * r);
                    dnorm[0][e] += is_query ? own : 0;
                    dnorm[1][e] += is_query ? 0 : own;
                    d[e] = r * (d[e] * weight[e] - x[e] * slope);
                }
            }
            store_bf16(a.out + at, d);
        }
    }
    if (!a.partial) return;
#pragma unroll
    for (int e = 0; e < PIECE; e++) {
        sums[0][threadIdx.x * PIECE + e] = dnorm[0][e];
        sums[1][threadIdx.x * PIECE + e] = dnorm[1][e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * a.dim; i += THREADS) {
        float sum = 0;
        for (int g = 0; g < groups; g++) sum += sums[i / a.dim][g * a.lanes * PIECE + i % a.dim];
        a.partial[(size_t)blockIdx.x * 2 * a.dim + i] = sum;
    }
}
