// Rows between a model and its drafter. Hidden rows are those of the residual stream after the final norm. The input of the drafter's
// projection is the norm of a token's embedding beside the norm of a hidden row.
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct HiddenArguments {
    const float* x;         // [rows, width]: the residual stream
    const float* weight;    // [width]: the final norm
    float* hidden;          // [rows, width]
    float* copies;          // [steps, rows, width]: the same for the host, at the row's position modulo the steps; or null
    const int* positions;   // [rows]; unused without copies
    int width;
    int steps;
    float eps;
};

struct InputArguments {
    const float* embeddings;    // [rows, width]
    const float* hidden;        // [.., width]
    const int* sources;         // [rows]: the hidden row that a row takes
    const float* embedding_norm;    // [width]
    const float* hidden_norm;       // [width]
    u16* y;                     // f16 [rows, 2 width]
    int width;
    float eps;
};

constexpr int THREADS = 256;

// The factor of the RMSNorm of a row, in every thread of the block.
__device__ __forceinline__ float norm_factor(const float* x, int width, float eps) {
    __shared__ float warp_sums[THREADS / WARP];
    float sum = 0;
    for (int i = threadIdx.x; i < width; i += THREADS) sum += x[i] * x[i];
    return 1 / sqrtf(block_sum(sum, warp_sums, THREADS / WARP) / width + eps);
}

// Grid: (rows)
extern "C" __global__ void __launch_bounds__(THREADS) drafter_hidden(const __grid_constant__ HiddenArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    size_t row = blockIdx.x;
    const float* x = a.x + row * a.width;
    float *hidden = a.hidden + row * a.width, *copy = nullptr;
    if (a.copies) copy = a.copies + ((size_t)(a.positions[row] % a.steps) * gridDim.x + row) * a.width;
    float factor = norm_factor(x, a.width, a.eps);
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        float y = x[i] * factor * a.weight[i];
        hidden[i] = y;
        if (copy) copy[i] = y;
    }
}

// Grid: (rows, 2); a block takes one of the two halves of a row.
extern "C" __global__ void __launch_bounds__(THREADS) drafter_inputs(const __grid_constant__ InputArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    size_t row = blockIdx.x;
    bool is_hidden = blockIdx.y == 1;
    const float* x = is_hidden ? a.hidden + (size_t)a.sources[row] * a.width : a.embeddings + row * a.width;
    const float* weight = is_hidden ? a.hidden_norm : a.embedding_norm;
    u16* y = a.y + (2 * row + is_hidden) * a.width;
    float factor = norm_factor(x, a.width, a.eps);
    for (int i = threadIdx.x; i < a.width; i += THREADS) y[i] = to_f16(x[i] * factor * weight[i]);
}
