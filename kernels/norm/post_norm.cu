// The norm after a part of a block, and its addition to the residual stream: x = (x + rms_norm(y) * weight) * scale. The input of the next
// part follows if that can be fused: the norm of the new x, or its rows as f16. A block takes a row, which passes through registers once.
#include "norm/residual.cuh"

struct Arguments {
    const float* y;         // [rows, width]
    const float* divisors;  // [rows]: by which the rows of y were divided; or null
    const float* weight;    // [width]
    const float* scale;     // one number; null for 1
    float* x;               // [rows, width]: the residual stream
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where the squares of a row of y have no finite sum
    int layer;              // of the part
    NextNorm next;
};

extern "C" __global__ void __launch_bounds__(THREADS) post_norm(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[2][WARPS];
    int row = blockIdx.x, width = a.next.width;
    const float* y = a.y + (size_t)row * width;
    float* x = a.x + (size_t)row * width;

    // Weights do not depend on the predecessor kernel.
    Piece w[THREAD_PIECES], next_weight[THREAD_PIECES], v[THREAD_PIECES], r[THREAD_PIECES];
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) w[j] = Piece(a.weight, threadIdx.x + j * THREADS, width);
    a.next.load(next_weight);
    float scale = a.scale ? *a.scale : 1;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float sum = 0;
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        int i = threadIdx.x + j * THREADS;
        v[j] = Piece(y, i, width);
        r[j] = Piece(x, i, width);
        sum += v[j].squares();
    }
    float divisor = a.divisors ? a.divisors[row] : 1;
    sum = block_sum(sum, warp_sums[0]);
    if (!(sum < INFINITY)) {
        // By every thread, so that none has noted the layer of the next part before.
        atomicCAS(a.overflow + row, 0, a.layer + 1);
        // NaN, so that logits are not finite, where the host looks for notes.
        sum -= sum;
    }
    float factor = rsqrtf(sum / width * (divisor * divisor) + a.next.eps) * divisor;
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        r[j].first = scaled(add(r[j].first, apply_norm(v[j].first, factor, w[j].first)), scale);
        r[j].second = scaled(add(r[j].second, apply_norm(v[j].second, factor, w[j].second)), scale);
    }
    a.next.store(row, x, r, next_weight, warp_sums[1]);
}
