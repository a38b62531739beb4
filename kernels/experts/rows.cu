// Rows on their way to an expert of a mixture, and its results on their way back, forward and backward.
#include "common/reduce.cuh"
#include "common/values.cuh"

struct Arguments {
    const u32* rows;        // [n]: the rows of x or sum that go to the expert, of which no two are equal
    const float* weights;   // [n]: what the expert's results are multiplied by
    const uint4* x;         // rows [T, width], or rows of the expert [n, width]
    const uint4* dsum;      // bf16 [T, width]: gradients of the sum
    uint4* taken;           // [n, width]: rows of the expert, or the gradients of its results
    float* sum;             // [T, width]
    float* dweights;        // [n]: gradients of the weights
    int pieces;             // a row's width in pieces: of 16 bytes where rows are taken, of eight elements elsewhere
};

constexpr int THREADS = 128;

// The piece of this thread within a row, or -1 past its end. Grid: (n, ceil(pieces / THREADS))
__device__ __forceinline__ int piece_of(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x;
    return i < a.pieces ? i : -1;
}

// taken[i] = x[rows[i]], of elements of any size
extern "C" __global__ void __launch_bounds__(THREADS) expert_take(const __grid_constant__ Arguments a) {
    int i = piece_of(a);
    if (i >= 0) a.taken[(size_t)blockIdx.x * a.pieces + i] = a.x[(size_t)a.rows[blockIdx.x] * a.pieces + i];
}

// sum[rows[i]] += weight * x[i]
template <Type T>
__device__ __forceinline__ void add_piece(const Arguments& a, float weight) {
    int i = piece_of(a);
    if (i < 0) return;
    float x[PIECE];
    load_values<T, PIECE>(a.x + ((size_t)blockIdx.x * a.pieces + i) * (T == F32 ? 2 : 1), x);
    float* to = a.sum + ((size_t)a.rows[blockIdx.x] * a.pieces + i) * PIECE;
#pragma unroll
    for (int e = 0; e < PIECE; e++) to[e] += weight * x[e];
}

// sum[rows[i]] += weights[i] * x[i], of bf16
extern "C" __global__ void __launch_bounds__(THREADS) expert_add(const __grid_constant__ Arguments a) {
    add_piece<BF16>(a, a.weights[blockIdx.x]);
}

// sum[rows[i]] += weights[i] * x[i], of f32
extern "C" __global__ void __launch_bounds__(THREADS) expert_add_f32(const __grid_constant__ Arguments a) {
    add_piece<F32>(a, a.weights[blockIdx.x]);
}

// sum[rows[i]] += x[i], of bf16
extern "C" __global__ void __launch_bounds__(THREADS) expert_take_backward(const __grid_constant__ Arguments a) { add_piece<BF16>(a, 1); }

// taken[i] = weights[i] * dsum[rows[i]], dweights[i] = dsum[rows[i]] . x[i]
// Grid: (n)
extern "C" __global__ void __launch_bounds__(THREADS) expert_add_backward(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float weight = a.weights[blockIdx.x], products = 0;
    for (int i = threadIdx.x; i < a.pieces; i += THREADS) {
        size_t at = (size_t)blockIdx.x * a.pieces + i;
        float d[PIECE], x[PIECE];
        load_bf16(a.dsum + (size_t)a.rows[blockIdx.x] * a.pieces + i, d);
        load_bf16(a.x + at, x);
#pragma unroll
        for (int e = 0; e < PIECE; e++) products += d[e] * x[e], d[e] *= weight;
        store_bf16(a.taken + at, d);
    }
    products = block_sum(products, warp_sums, THREADS / WARP);
    if (threadIdx.x == 0) a.dweights[blockIdx.x] = products;
}
