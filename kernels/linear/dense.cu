// GEMM with dense weights of any floating-point type, accumulated in f32: y[m, n] = sum over k of x[m, k] w[n, k]. For the few matrices that a
// model keeps in more than 4 bits, and for large GEMMs without cuBLASLt. A warp takes an output feature and up to 8 rows of x at a time. A
// single row of x is taken by linear/row.cu.
#include "common/reduce.cuh"
#include "linear/dense.cuh"

constexpr int TOKENS = 8;    // of a block
constexpr int UNROLL = 2;

// The first UNROLL pieces of a row are loaded before the kernel waits for earlier ones, which write no weights.
template <int KIND>
__device__ __forceinline__ void run(const Arguments& a) {
    int feature = blockIdx.x * WARPS + threadIdx.x / WARP, first = blockIdx.y * TOKENS, lane = lane_id();
    // The bias is loaded last: sm_80 has too few registers to keep it during the product.
    const void* weight = a.matrices[0].weight;
    int row = feature, rows = a.matrices[0].rows, which = 0;
#pragma unroll
    for (int i = 1; i < MATRICES; i++) {
        if (row < rows) continue;
        row -= rows;
        weight = a.matrices[i].weight, rows = a.matrices[i].rows, which = i;
    }
    bool has = row < rows;
    int tokens = min(TOKENS, a.m - first);
    float accumulators[TOKENS] = {};
    constexpr int COUNT = Values<KIND>::COUNT, STEP = Values<KIND>::STEP;
    size_t start = (size_t)row * a.k;
    auto multiply_by = [&](const Values<KIND>& w, int i) {
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            if (m >= tokens) continue;
            Values<F16> x(a.x, (size_t)(first + m) * a.k + i);
#pragma unroll
            for (int j = 0; j < COUNT; j++) accumulators[m] += w.v[j] * x.v[j];
        }
    };
    Bits<KIND> ahead[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int i = COUNT * lane + STEP * u;
        if (has && i < a.k) ahead[u] = Bits<KIND>(weight, start + i);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (!has) return;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
        int i = COUNT * lane + STEP * u;
        if (i < a.k) multiply_by(Values<KIND>(ahead[u]), i);
    }
#pragma unroll UNROLL
    for (int i = COUNT * lane + STEP * UNROLL; i < a.k; i += STEP) multiply_by(Values<KIND>(weight, start + i), i);
#pragma unroll
    for (int m = 0; m < TOKENS; m++) accumulators[m] = warp_sum(accumulators[m]);
    if (lane != 0) return;
    const Matrix& matrix = a.matrices[which];
#pragma unroll
    for (int m = 0; m < TOKENS; m++) {
        if (m >= tokens) continue;
        float y = accumulators[m] * a.factor + (matrix.bias ? matrix.bias[row] : 0);
        store_product(a, (size_t)(first + m) * a.out_stride + feature, y);
    }
}

// Grid: (ceil(rows / WARPS), ceil(m / TOKENS)).
extern "C" __global__ void __launch_bounds__(THREADS) linear_dense(const __grid_constant__ Arguments a) {
    switch (a.kind) {
        case F32: return run<F32>(a);
        case F16: return run<F16>(a);
        default: return run<BF16>(a);
    }
}
