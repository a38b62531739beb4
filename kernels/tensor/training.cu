// Operations of training on plain arrays: sums of rows of partial sums, sums of two arrays, conversions, scaling, fills and column copies.
#include "common/reduce.cuh"
#include "common/values.cuh"

struct SumArguments {
    const float* partial;   // [parts, stride]
    float* sum;             // [width]
    int parts;
    int stride;
    int width;
};

// Columns of a block, one per lane; a warp takes every SUM_WARPS-th row.
constexpr int SUM_WARPS = 16;

// sum += the sum of the rows of `partial`, in an order that depends only on `parts`. Grid: (ceil(width / WARP))
extern "C" __global__ void __launch_bounds__(SUM_WARPS* WARP) train_add_partial_sums(const __grid_constant__ SumArguments a) {
    __shared__ float sums[SUM_WARPS][WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int warp = threadIdx.x / WARP, lane = lane_id(), column = blockIdx.x * WARP + lane;
    float sum = 0;
    if (column < a.width) {
#pragma unroll 8
        for (int part = warp; part < a.parts; part += SUM_WARPS) sum += a.partial[(size_t)part * a.stride + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= a.width) return;
#pragma unroll
    for (int i = 1; i < SUM_WARPS; i++) sum += sums[i][lane];
    a.sum[column] += sum;
}

struct ArrayArguments {
    void* x;
    const void* y;
    u64 pieces;             // of eight elements
    float value;
};

constexpr int THREADS = 256;

// The number of this thread's piece. Grid: (ceil(pieces / THREADS))
__device__ __forceinline__ u64 this_piece() {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    return (u64)blockIdx.x * THREADS + threadIdx.x;
}

// x += y in bf16.
extern "C" __global__ void __launch_bounds__(THREADS) train_add(const __grid_constant__ ArrayArguments a) {
    u64 i = this_piece();
    if (i >= a.pieces) return;
    float x[PIECE], y[PIECE];
    load_bf16((const uint4*)a.x + i, x);
    load_bf16((const uint4*)a.y + i, y);
#pragma unroll
    for (int e = 0; e < PIECE; e++) x[e] += y[e];
    store_bf16((uint4*)a.x + i, x);
}

// x *= value in bf16.
extern "C" __global__ void __launch_bounds__(THREADS) train_scale(const __grid_constant__ ArrayArguments a) {
    u64 i = this_piece();
    if (i >= a.pieces) return;
    float x[PIECE];
    load_bf16((const uint4*)a.x + i, x);
#pragma unroll
    for (int e = 0; e < PIECE; e++) x[e] *= a.value;
    store_bf16((uint4*)a.x + i, x);
}

// x = value in bf16.
extern "C" __global__ void __launch_bounds__(THREADS) train_fill(const __grid_constant__ ArrayArguments a) {
    u64 i = this_piece();
    u32 pair = pack_bf16(a.value, a.value);
    if (i < a.pieces) ((uint4*)a.x)[i] = make_uint4(pair, pair, pair, pair);
}

// bf16 x = f32 y.
extern "C" __global__ void __launch_bounds__(THREADS) train_to_bf16(const __grid_constant__ ArrayArguments a) {
    u64 i = this_piece();
    if (i >= a.pieces) return;
    float y[PIECE];
    load_f32((const float*)a.y + i * PIECE, y);
    store_bf16((uint4*)a.x + i, y);
}

// f32 x = bf16 y.
extern "C" __global__ void __launch_bounds__(THREADS) train_to_f32(const __grid_constant__ ArrayArguments a) {
    u64 i = this_piece();
    if (i >= a.pieces) return;
    float y[PIECE];
    load_bf16((const uint4*)a.y + i, y);
    float4* x = (float4*)a.x + 2 * i;
    x[0] = make_float4(y[0], y[1], y[2], y[3]);
    x[1] = make_float4(y[4], y[5], y[6], y[7]);
}

struct ColumnArguments {
    uint4* all;             // bf16, rows of `width` pieces
    uint4* part;            // bf16, rows of `columns` pieces, which are those of `all` from piece `first` on
    u64 pieces;             // of `part`
    int width;
    int columns;
    int first;
};

__device__ __forceinline__ uint4* piece_of_all(const ColumnArguments& a, u64 i) {
    return a.all + i / a.columns * a.width + a.first + i % a.columns;
}

extern "C" __global__ void __launch_bounds__(THREADS) train_columns_copy(const __grid_constant__ ColumnArguments a) {
    u64 i = this_piece();
    if (i < a.pieces) a.part[i] = *piece_of_all(a, i);
}

extern "C" __global__ void __launch_bounds__(THREADS) train_columns_add(const __grid_constant__ ColumnArguments a) {
    u64 i = this_piece();
    if (i >= a.pieces) return;
    uint4* sum = piece_of_all(a, i);
    float x[PIECE], y[PIECE];
    load_bf16(sum, x);
    load_bf16(a.part + i, y);
#pragma unroll
    for (int e = 0; e < PIECE; e++) x[e] += y[e];
    store_bf16(sum, x);
}
