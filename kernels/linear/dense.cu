// Products with dense weights of any floating type, in f32: y[m, n] = sum over k of x[m, k] w[n, k]. For the few matrices
// that a model leaves unquantized, and where no library serves large products. A warp takes an output feature and up to 8
// rows of x at a time.
#include "common/ptx.cuh"
#include "common/reduce.cuh"

enum Kind { F32, F16, BF16 };
enum Output { STORE_F32, STORE_F16, ADD_F32 };

struct Arguments {
    const u16* x;           // f16 [m, k]
    const void* weight;     // [rows, k]
    const float* bias;      // [rows] or null
    void* out;              // [m, out_stride]
    float factor;           // of the product
    int kind;
    int output;
    int m;
    int rows;
    int k;
    int out_stride;
};

constexpr int WARPS = 8;
constexpr int TOKENS = 8;

__device__ __forceinline__ float at(const void* p, int kind, size_t i) {
    switch (kind) {
        case F32: return ((const float*)p)[i];
        case F16: return f16_to_float(((const u16*)p)[i]);
        default: return bf16_to_float(((const u16*)p)[i]);
    }
}

// Grid: (ceil(rows / WARPS), ceil(m / TOKENS))
extern "C" __global__ void __launch_bounds__(WARPS* WARP) linear_dense(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x * WARPS + threadIdx.x / WARP, first = blockIdx.y * TOKENS, lane = lane_id();
    if (row >= a.rows) return;
    int tokens = min(TOKENS, a.m - first);
    float sums[TOKENS] = {};
    for (int i = lane; i < a.k; i += WARP) {
        float w = at(a.weight, a.kind, (size_t)row * a.k + i);
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            if (m < tokens) sums[m] += w * f16_to_float(a.x[(size_t)(first + m) * a.k + i]);
        }
    }
#pragma unroll
    for (int m = 0; m < TOKENS; m++) sums[m] = warp_sum(sums[m]);
    if (lane != 0) return;
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
        if (m >= tokens) continue;
        float y = sums[m] * a.factor + (a.bias ? a.bias[row] : 0);
        size_t to = (size_t)(first + m) * a.out_stride + row;
        if (a.output == STORE_F32) ((float*)a.out)[to] = y;
        if (a.output == ADD_F32) ((float*)a.out)[to] += y;
        if (a.output == STORE_F16) ((u16*)a.out)[to] = to_f16(y);
    }
}
