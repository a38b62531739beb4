// Rows of the embedding: tokens to the residual stream.
#include "common/ptx.cuh"
#include "format/nvfp4.cuh"

enum Kind { F32, F16, BF16, NVFP4 };

struct Arguments {
    const int* tokens;      // [rows]
    const void* table;      // [vocabulary, width]; NVFP4: the codes
    const u8* scales;       // NVFP4: [vocabulary, width / 16]
    float* out;             // [rows, width]
    float global;           // NVFP4
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
        default: {
            u32 byte = ((const u8*)a.table)[at / 2];
            value = code_to_float(at % 2 ? byte >> 4 : byte & 15) * scale_to_float(a.scales[at / BLOCK]) * a.global;
        }
    }
    a.out[(size_t)blockIdx.y * a.width + i] = value;
}
