// Per-layer embeddings: the inputs that blocks have of their own, from the projections of embeddings and the rows of a table.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "embed/table.cuh"

struct Arguments {
    const int* tokens;      // [rows]
    const float* factors;   // [rows]: by which the embeddings of a row were multiplied before their projection
    const float* norm;      // [width]
    float* x;               // [rows, blocks, width]: projections, which become inputs
    Table table;            // [vocabulary, blocks * width]
    float scale;            // of the projections
    float eps;
    int width;
};

constexpr int THREADS = 128;
constexpr float SQRT_HALF = 0.70710678f;

// x = (norm(x * scale / factor) + row of the table) / sqrt(2). Grid: (blocks, rows)
extern "C" __global__ void __launch_bounds__(THREADS) per_layer_inputs(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.y, first = blockIdx.x * a.width;
    float* x = a.x + (size_t)row * a.table.width + first;
    float scale = a.scale / a.factors[row], sum = 0;
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        float v = x[i] * scale;
        sum += v * v;
    }
    float factor = rsqrtf(block_sum(sum, warp_sums, THREADS / WARP) / a.width + a.eps) * scale;
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        x[i] = (x[i] * factor * a.norm[i] + a.table.at(a.tokens[row], first + i)) * SQRT_HALF;
    }
}
