// The end of a mixture of experts: x += sum over the experts of a row of weight * what they have made, and of what the expert of every row
// has made; and, where it is known what comes next, the norm of the new x. A block takes a row. Experts are added in the order of their
// probabilities.
#include "norm/residual.cuh"

struct Arguments {
    const float* made;      // [pairs, width], at the places of experts/route.cu
    const int* places;      // [rows, per_token]
    const float* weights;   // [rows, per_token]
    const float* shared;    // [rows, width]; or null
    const float* gate;      // of row r the logit at r * gate_stride, whose sigmoid multiplies `shared`; or null
    float* x;               // [rows, width]: the residual stream
    NextNorm next;
    int per_token;
    int gate_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS) experts_sum(const __grid_constant__ Arguments a) {
    __shared__ float sums[WARPS];
    int row = blockIdx.x, width = a.next.width;
    float* x = a.x + (size_t)row * width;

    // Weights depend on no earlier kernel.
    Piece after[HELD], r[HELD];
    a.next.load(after);
    wait_for_earlier_kernels();
    let_later_kernels_start();
#pragma unroll
    for (int j = 0; j < HELD; j++) r[j] = Piece(x, threadIdx.x + j * THREADS, width);
    auto add = [&](const float* y, float weight) {
#pragma unroll
        for (int j = 0; j < HELD; j++) {
            Piece v(y, threadIdx.x + j * THREADS, width);
            r[j].first = sum_of(r[j].first, scaled(v.first, weight));
            r[j].second = sum_of(r[j].second, scaled(v.second, weight));
        }
    };
#pragma unroll 2
    for (int i = 0; i < a.per_token; i++) {
        int at = row * a.per_token + i;
        add(a.made + (size_t)a.places[at] * width, a.weights[at]);
    }
    if (a.shared) add(a.shared + (size_t)row * width, a.gate ? 1 / (1 + expf(-a.gate[(size_t)row * a.gate_stride])) : 1);
    a.next.put(row, x, r, after, sums);
}
