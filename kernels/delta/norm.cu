// The end of a gated-delta-net layer: the RMSNorm of each value head of a row, gated by silu(z). A warp takes two heads of a row, whose
// elements are whole pairs of blocks.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "norm/piece.cuh"
#include "recurrent/layer.cuh"
#include "recurrent/output.cuh"

struct Arguments {
    const float* o;         // [rows, heads, dim]
    const float* z;         // [rows, heads, dim], rows z_stride apart
    const float* weight;    // [dim]
    Target to;
    u64 z_stride;
    int heads;
    int dim;                // a multiple of 16 up to 256
    float eps;
};

constexpr int WARPS = 4, THREADS = WARPS * WARP, MOST_DIM = 256;
constexpr int LANE_PIECES = 2 * MOST_DIM / 8 / WARP;

__device__ __forceinline__ float4 gated(float4 v, float factor, const float* weight, float4 z) {
    v = apply_norm(v, factor, *(const float4*)weight);
    return make_float4(v.x * silu(z.x), v.y * silu(z.y), v.z * silu(z.z), v.w * silu(z.w));
}

// Grid: (rows, ceil(heads / 2 / WARPS)).
template <Output OUTPUT>
__device__ __forceinline__ void run(const Arguments& a) {
    int row = blockIdx.x, width = a.to.width, units = ceil_div(a.heads, 2), unit = blockIdx.y * WARPS + threadIdx.x / WARP;
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
        a.to.store<OUTPUT>(k, result(k, v[j].first, gate[j].first), result(k + BLOCK, v[j].second, gate[j].second));
    }
    if (unit == units - 1) a.to.pad<OUTPUT>(units * count, lane_id(), WARP);
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_norm_f32(const __grid_constant__ Arguments a) { run<ROWS_F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) delta_norm_f16(const __grid_constant__ Arguments a) { run<ROWS_F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) delta_norm_fragments(const __grid_constant__ Arguments a) { run<FRAGMENTS>(a); }
