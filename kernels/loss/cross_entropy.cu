// Cross-entropy over chunks of the head's columns: the log-sum-exp of each row, chunk by chunk (Milakov and Gimelshein, arXiv 1805.02867),
// then the gradients of each chunk. A block takes a row. Rows without a label are not read.
#include "common/reduce.cuh"
#include "loss/logits.cuh"

struct Arguments {
    const float* logits;    // f32 [rows, columns]
    const int* labels;      // [rows]; negative: no loss
    float* max;             // [rows]: the largest logit so far
    float* sum;             // [rows]: of exp(logit - max) so far
    float* target;          // [rows]: the label's logit
    const float* weights;   // [rows]: gradient
    const float* lse;       // [rows]: gradient
    u16* dlogits;           // bf16 [rows, columns]: gradient
    int first_column;       // the token of the first column
    int columns;            // a multiple of 4, but for the ragged kernels
    int is_first;           // whether no chunk was before this one
    float cap;              // logits are cap * tanh(logit / cap); 0: as they are
};

struct FinishArguments {
    const float* max;       // [rows]
    const float* sum;
    const float* target;
    const int* labels;
    const float* weights;
    float* lse;             // [rows]: max + log(sum)
    float* losses;          // [rows]: weight * (lse - target)
    double* total;          // the sum of the losses
    int rows;
};

constexpr int THREADS = 256, FINISH_THREADS = 1024;

template <int COUNT>
__device__ __forceinline__ void chunk(const Arguments& a) {
    __shared__ float by_warp[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x, label = a.labels[row];
    if (label < 0) return;
    const float* logits = a.logits + (size_t)row * a.columns;
    float largest = LOWEST, sum = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < a.columns / COUNT; i += THREADS) {
        float x[COUNT];
        load_logits(logits + COUNT * i, a.cap, x);
        float before = largest;
        if constexpr (COUNT == 4) {
            largest = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), largest);
            sum = sum * __expf(before - largest) + (__expf(x[0] - largest) + __expf(x[1] - largest)) +
                  (__expf(x[2] - largest) + __expf(x[3] - largest));
        } else {
            largest = fmaxf(x[0], largest);
            sum = sum * __expf(before - largest) + __expf(x[0] - largest);
        }
    }
    float before = a.is_first ? LOWEST : a.max[row];
    float of_row = fmaxf(before, block_max(largest, by_warp, THREADS / WARP));
    sum = block_sum(sum * __expf(largest - of_row), by_warp, THREADS / WARP);
    if (threadIdx.x > 0) return;
    a.sum[row] = (a.is_first ? 0 : a.sum[row] * __expf(before - of_row)) + sum;
    a.max[row] = of_row;
    int column = label - a.first_column;
    if (0 <= column && column < a.columns) a.target[row] = capped(logits[column], a.cap);
}

// weight * (softmax - onehot), times the cap's derivative 1 - (l / cap)^2 for a capped logit l.
template <int COUNT>
__device__ __forceinline__ void gradient(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x, label = a.labels[row], pieces = a.columns / COUNT;
    const float* logits = a.logits + (size_t)row * a.columns;
    u16* dlogits = a.dlogits + (size_t)row * a.columns;
    if (label < 0) {
        const float zeros[COUNT] = {};
        for (int i = threadIdx.x; i < pieces; i += THREADS) store_gradients(dlogits + COUNT * i, zeros);
        return;
    }
    int target = label - a.first_column;
    float weight = a.weights[row], lse = a.lse[row];
#pragma unroll 4
    for (int i = threadIdx.x; i < pieces; i += THREADS) {
        float x[COUNT];
        load_logits(logits + COUNT * i, a.cap, x);
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            float slope = a.cap > 0 ? 1 - (x[e] / a.cap) * (x[e] / a.cap) : 1;
            x[e] = weight * (__expf(x[e] - lse) - (COUNT * i + e == target ? 1 : 0)) * slope;
        }
        store_gradients(dlogits + COUNT * i, x);
    }
}

// Grid of these four: (rows). The ragged ones take rows of any length.
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_chunk(const __grid_constant__ Arguments a) { chunk<4>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_chunk_ragged(const __grid_constant__ Arguments a) { chunk<1>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_gradient(const __grid_constant__ Arguments a) { gradient<4>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) cross_entropy_gradient_ragged(const __grid_constant__ Arguments a) { gradient<1>(a); }

// Grid: (1)
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) cross_entropy_finish(const __grid_constant__ FinishArguments a) {
    __shared__ double sums[FINISH_THREADS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    double sum = 0;
    for (int row = threadIdx.x; row < a.rows; row += FINISH_THREADS) {
        bool counts = a.labels[row] >= 0;
        float lse = counts ? a.max[row] + logf(a.sum[row]) : 0;
        float loss = counts ? a.weights[row] * (lse - a.target[row]) : 0;
        a.lse[row] = lse;
        a.losses[row] = loss;
        sum += loss;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = FINISH_THREADS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *a.total = sums[0];
}
