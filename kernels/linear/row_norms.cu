// Euclidean norms of the rows of a weight with weighted columns, which bound its products.
#include "common/reduce.cuh"
#include "common/values.cuh"
#include "format/int8.cuh"
#include "format/packed.cuh"

struct Arguments {
    const void* matrix;     // [rows, k]; NVFP4: see format/packed.cuh
    const float* scales;    // [rows]: int8
    const float* columns;   // [k] or null
    float* out;             // [rows]
    float global;           // NVFP4
    int kind;               // a Type, or the numbers after them for NVFP4 and int8
    int k;
};

constexpr int THREADS = 256;
constexpr int INT8 = 4;     // of kind

// Grid: (rows)
extern "C" __global__ void __launch_bounds__(THREADS) linear_row_norms(const __grid_constant__ Arguments a) {
    __shared__ float warp_sums[THREADS / WARP];
    wait_for_earlier_kernels();
    int row = blockIdx.x;
    size_t first = (size_t)row * a.k;
    float sum = 0;
    for (int i = threadIdx.x; i < a.k; i += THREADS) {
        float value;
        switch (a.kind) {
            case F32: value = ((const float*)a.matrix)[first + i]; break;
            case F16: value = f16_to_float(((const u16*)a.matrix)[first + i]); break;
            case BF16: value = bf16_to_float(((const u16*)a.matrix)[first + i]); break;
            case INT8: value = int8_code(a.matrix, first + i) * a.scales[row]; break;
            default: value = packed_value((const u8*)a.matrix, a.k, row, i, a.global);
        }
        if (a.columns) value *= a.columns[i];
        sum += value * value;
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) warp_sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) sum += warp_sums[i];
    a.out[row] = sqrtf(sum);
}
