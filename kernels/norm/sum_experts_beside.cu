// The end of a mixture of experts beside a dense MLP: x = (x + norm(norm(sum of experts) + norm(output of the MLP))) * scale, followed by
// the norm of the new x if that can be fused. A block takes a row. Experts are added in the order of their probabilities.
#include "norm/residual.cuh"

struct Arguments {
    const float* outputs;       // [pairs, width]: of experts, sorted as experts/route.cu has them
    const int* places;          // [rows, per_token]: of a row's pairs in `outputs`
    const float* weights;       // [rows, per_token]
    const float* dense;         // [rows, width]: of the dense MLP
    const float* experts_norm;  // [width]: of the norms' weights
    const float* dense_norm;
    const float* post_norm;
    const float* scale;         // one number; null for 1
    float* x;                   // [rows, width]: the residual stream
    NextNorm next;              // with a weight, or nothing follows
    int per_token;
};

__device__ __forceinline__ float squares(const Piece (&x)[THREAD_PIECES]) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) sum += x[j].squares();
    return sum;
}
// The RMSNorm of a row of which a thread has these pieces.
__device__ __forceinline__ void normalize(Piece (&x)[THREAD_PIECES], const float* weight, int width, float eps, float* warp_sums) {
    float factor = rsqrtf(block_sum(squares(x), warp_sums) / width + eps);
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        Piece w(weight, threadIdx.x + j * THREADS, width);
        x[j].first = apply_norm(x[j].first, factor, w.first);
        x[j].second = apply_norm(x[j].second, factor, w.second);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) experts_sum_beside(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[4][WARPS];
    int row = blockIdx.x, width = a.next.width;
    float* x = a.x + (size_t)row * width;

    // Weights do not depend on the predecessor kernel.
    Piece next_weight[THREAD_PIECES], sum[THREAD_PIECES], dense[THREAD_PIECES];
    a.next.load(next_weight);
    float scale = a.scale ? *a.scale : 1;
    wait_for_earlier_kernels();
    let_later_kernels_start();
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        sum[j].first = sum[j].second = make_float4(0, 0, 0, 0);
        dense[j] = Piece(a.dense + (size_t)row * width, threadIdx.x + j * THREADS, width);
    }
#pragma unroll 2
    for (int i = 0; i < a.per_token; i++) {
        int at = row * a.per_token + i;
        const float* y = a.outputs + (size_t)a.places[at] * width;
        float weight = a.weights[at];
#pragma unroll
        for (int j = 0; j < THREAD_PIECES; j++) {
            Piece v(y, threadIdx.x + j * THREADS, width);
            sum[j].first = add(sum[j].first, scaled(v.first, weight));
            sum[j].second = add(sum[j].second, scaled(v.second, weight));
        }
    }
    normalize(sum, a.experts_norm, width, a.next.eps, warp_sums[0]);
    normalize(dense, a.dense_norm, width, a.next.eps, warp_sums[1]);
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        sum[j].first = add(sum[j].first, dense[j].first);
        sum[j].second = add(sum[j].second, dense[j].second);
    }
    normalize(sum, a.post_norm, width, a.next.eps, warp_sums[2]);
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        Piece r(x, threadIdx.x + j * THREADS, width);
        sum[j].first = scaled(add(r.first, sum[j].first), scale);
        sum[j].second = scaled(add(r.second, sum[j].second), scale);
    }
    a.next.store(row, x, sum, next_weight, warp_sums[3]);
}
