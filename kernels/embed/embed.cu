// Embedding: looks up the rows of tokens for the residual stream.
#include "common/ptx.cuh"
#include "format/int8.cuh"
#include "format/packed.cuh"

enum Kind { F32, F16, BF16, NVFP4, INT8 };

struct Arguments {
    const int* tokens;      // [rows]
    const void* table;      // [vocabulary, width]; NVFP4: see format/packed.cuh
    const float* scales;    // [vocabulary]: INT8
    float* out;             // [rows, width]
    float global;           // NVFP4
    float scale;            // of the rows
    int kind;
    int width;
};

constexpr int THREADS = 256;

// Grid: (ceil(width / THREADS), rows)
extern "C" __global__ void __launch_bounds__(THREADS) embed(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.width) return;
    size_t at = (size_t)a.tokens[blockIdx.y] * a.width + i;
    float value;
    switch (a.kind) {
        case F32: value = ((const float*)a.table)[at]; break;
        case F16: value = f16_to_float(((const u16*)a.table)[at]); break;
        case BF16: value = bf16_to_float(((const u16*)a.table)[at]); break;
        case INT8: value = int8_code(a.table, at) * a.scales[a.tokens[blockIdx.y]]; break;
        default: value = packed_value((const u8*)a.table, a.width, a.tokens[blockIdx.y], i, a.global);
    }
    a.out[(size_t)blockIdx.y * a.width + i] = value * a.scale;
}
