// The end of a mixture of experts: x += the weighted sum of the outputs of a row's experts + the output of the shared expert, followed by
// the norm of the new x if that can be fused. A block takes a row. Experts are added in the order of their probabilities.
#include "norm/residual.cuh"

struct Arguments {
    const float* outputs;   // [pairs, width]: of experts, sorted as experts/route.cu has them
    const int* places;      // [rows, per_token]: of a row's pairs in `outputs`
    const float* weights;   // [rows, per_token]
    const float* shared;    // [rows, width]: of the shared expert; or null
    const float* gate;      // a logit at r * gate_stride for row r, whose sigmoid multiplies `shared`; or null
    float* x;               // [rows, width]: the residual stream
    NextNorm next;
    int per_token;
    int gate_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS) experts_sum(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[WARPS];
    int row = blockIdx.x, width = a.next.width;
    float* x = a.x + (size_t)row * width;

    // Weights do not depend on the predecessor kernel.
    Piece next_weight[THREAD_PIECES], r[THREAD_PIECES];
    a.next.load(next_weight);
    wait_for_earlier_kernels();
    let_later_kernels_start();
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) r[j] = Piece(x, threadIdx.x + j * THREADS, width);
    auto add_output = [&](const float* y, float weight) {
#pragma unroll
        for (int j = 0; j < THREAD_PIECES; j++) {
            Piece v(y, threadIdx.x + j * THREADS, width);
            r[j].first = add(r[j].first, scaled(v.first, weight));
            r[j].second = add(r[j].second, scaled(v.second, weight));
        }
    };
#pragma unroll 2
    for (int i = 0; i < a.per_token; i++) {
        int at = row * a.per_token + i;
        add_output(a.outputs + (size_t)a.places[at] * width, a.weights[at]);
    }
    if (a.shared) add_output(a.shared + (size_t)row * width, a.gate ? 1 / (1 + expf(-a.gate[(size_t)row * a.gate_stride])) : 1);
    a.next.store(row, x, r, next_weight, warp_sums);
}
