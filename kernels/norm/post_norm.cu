// The end of a half of a block that normalizes what leaves it: x += rms_norm(y) * weight, and, where it is known what comes next, the norm of
// the new x. A block takes a row, which passes through registers once.
#include "norm/residual.cuh"

struct Arguments {
    const float* y;         // [rows, width]
    const float* weight;    // [width]
    float* x;               // [rows, width]: the residual stream
    NextNorm next;
};

extern "C" __global__ void __launch_bounds__(THREADS) post_norm(const __grid_constant__ Arguments a) {
    __shared__ float sums[2][WARPS];
    int row = blockIdx.x, width = a.next.width;
    const float* y = a.y + (size_t)row * width;
    float* x = a.x + (size_t)row * width;

    // Weights depend on no earlier kernel.
    Piece w[HELD], after[HELD], v[HELD], r[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) w[j] = Piece(a.weight, threadIdx.x + j * THREADS, width);
    a.next.load(after);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float sum = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = threadIdx.x + j * THREADS;
        v[j] = Piece(y, i, width);
        r[j] = Piece(x, i, width);
        sum += v[j].squares();
    }
    float factor = rsqrtf(block_sum(sum, sums[0]) / width + a.next.eps);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        r[j].first = sum_of(r[j].first, apply_norm(v[j].first, factor, w[j].first));
        r[j].second = sum_of(r[j].second, apply_norm(v[j].second, factor, w[j].second));
    }
    a.next.put(row, x, r, after, sums[1]);
}
