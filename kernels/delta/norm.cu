// The end of a gated-delta-net layer: the RMSNorm of each value head of a row, gated by silu(z). A warp takes two heads of a row, whose
// elements are whole pairs of blocks.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "recurrent/layer.cuh"
#include "format/fragment_major.cuh"
#include "norm/piece.cuh"

struct Arguments {
    const float* o;         // [rows, heads, dim]
    const float* z;         // [rows, heads, dim], rows z_stride apart
    const float* weight;    // [dim]
    void* y;                // [rows, heads, dim]: f32 or f16
    u64 z_stride;
    int heads;
    int dim;                // a multiple of 16 up to 256
    float eps;
    int layer;
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where the row has a value that f16 cannot hold; null: not checked
};

enum Output { ROWS_F32, ROWS_F16, FRAGMENTS };

constexpr int WARPS = 4, THREADS = WARPS * WARP, MOST_DIM = 256;
constexpr int LANE_PIECES = 2 * MOST_DIM / 8 / WARP;

constexpr float F16_MAX = 65504;

// Whether f16 cannot hold one of four values. NaN is none that it can.
__device__ __forceinline__ bool overflows(float4 v) {
    return !(fabsf(v.x) <= F16_MAX && fabsf(v.y) <= F16_MAX && fabsf(v.z) <= F16_MAX && fabsf(v.w) <= F16_MAX);
}

__device__ __forceinline__ float4 gated(float4 v, float factor, const float* weight, float4 z) {
    v = apply_norm(v, factor, *(const float4*)weight);
    return make_float4(v.x * silu(z.x), v.y * silu(z.y), v.z * silu(z.z), v.w * silu(z.w));
}

// Stores elements k on and k + BLOCK on of a row.
template <Output OUTPUT>
__device__ __forceinline__ void store(const Arguments& a, int row, int k, float4 first, float4 second) {
    int width = a.heads * a.dim;
    if (OUTPUT == FRAGMENTS) {
        if (k < padded_k(width)) store_fragments((u16*)a.y, ceil_div(gridDim.x, GROUP_ROWS), row, k, first, second);
        return;
    }
    auto store_four = [&](int k, float4 v) {
        size_t at = (size_t)row * width + k;
        if (k >= width) return;
        if (OUTPUT == ROWS_F32) *(float4*)((float*)a.y + at) = v;
        else *(uint2*)((u16*)a.y + at) = make_uint2(pack_f16(v.x, v.y), pack_f16(v.z, v.w));
    };
    store_four(k, first);
    store_four(k + BLOCK, second);
}

// Grid: (rows, ceil(heads / 2 / WARPS)).
template <Output OUTPUT>
__device__ __forceinline__ void run(const Arguments& a) {
    int row = blockIdx.x, width = a.heads * a.dim, units = ceil_div(a.heads, 2), unit = blockIdx.y * WARPS + threadIdx.x / WARP;
    int count = a.dim / 4, first_piece = unit * count;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (unit >= units) return;
    const float *o = a.o + (size_t)row * width, *z = a.z + row * a.z_stride;
    Piece v[LANE_PIECES], gate[LANE_PIECES];
    // Whether elements from k on belong to the second of the two heads.
    auto is_second = [&](int k) { return k >= (2 * unit + 1) * a.dim; };
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < LANE_PIECES; j++) {
        int i = lane_id() + WARP * j, k = first_element(first_piece + i);
        int end = i < count ? width : 0;
        v[j] = Piece(o, first_piece + i, end);
        gate[j] = Piece(z, first_piece + i, end);
        float first = square_sum(v[j].first), second = square_sum(v[j].second);
        sums[0] += (is_second(k) ? 0 : first) + (is_second(k + BLOCK) ? 0 : second);
        sums[1] += (is_second(k) ? first : 0) + (is_second(k + BLOCK) ? second : 0);
    }
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; h++) factors[h] = rsqrtf(warp_sum(sums[h]) / a.dim + a.eps);
#pragma unroll
    for (int j = 0; j < LANE_PIECES; j++) {
        int i = lane_id() + WARP * j, k = first_element(first_piece + i);
        if (i >= count) continue;
        auto result = [&](int k, float4 v, float4 z) {
            bool second = is_second(k);
            return k >= width ? make_float4(0, 0, 0, 0) : gated(v, factors[second ? 1 : 0], a.weight + k - (2 * unit + second) * a.dim, z);
        };
        float4 first = result(k, v[j].first, gate[j].first), second = result(k + BLOCK, v[j].second, gate[j].second);
        if (OUTPUT != ROWS_F32 && a.overflow && (overflows(first) || overflows(second))) atomicCAS(a.overflow + row, 0, a.layer + 1);
        store<OUTPUT>(a, row, k, first, second);
    }
    // The rest of the padding.
    if (OUTPUT != FRAGMENTS || unit < units - 1) return;
    float4 zero = make_float4(0, 0, 0, 0);
    for (int i = units * count + lane_id(); i < padded_k(width) / 8; i += WARP) store<OUTPUT>(a, row, first_element(i), zero, zero);
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_norm_f32(const __grid_constant__ Arguments a) { run<ROWS_F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) delta_norm_f16(const __grid_constant__ Arguments a) { run<ROWS_F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) delta_norm_fragments(const __grid_constant__ Arguments a) { run<FRAGMENTS>(a); }
