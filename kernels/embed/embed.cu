// Embedding: looks up the rows of tokens for the residual stream.
#include "common/ptx.cuh"
#include "embed/table.cuh"

struct Arguments {
    const int* tokens;      // [rows]
    float* out;             // [rows, table.width]
    Table table;
};

constexpr int THREADS = 256;

// Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) embed(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < a.table.width) a.out[(size_t)blockIdx.y * a.table.width + i] = a.table.at(a.tokens[blockIdx.y], i);
}
