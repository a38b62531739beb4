// The end of a Mamba-2 layer: y times silu(z), and then the RMSNorm of each group of a row. A block takes a group, or two whose size is no
// multiple of 32, so that its elements are whole pairs of blocks.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "norm/piece.cuh"
#include "recurrent/layer.cuh"
#include "recurrent/output.cuh"

struct Arguments {
    const float* y;         // [rows, groups, size]
    const float* z;         // [rows, groups, size], rows z_stride apart
    const float* weight;    // [groups, size]
    Target to;
    u64 z_stride;
    int groups;
    int size;               // a multiple of 16
    float eps;
};

constexpr int WARPS = 4, THREADS = WARPS * WARP;

__device__ __forceinline__ float4 gated(float4 v, float4 z) {
    return make_float4(v.x * silu(z.x), v.y * silu(z.y), v.z * silu(z.z), v.w * silu(z.w));
}

// Grid: (rows, groups, or half as many if a block takes two).
template <Output OUTPUT>
__device__ __forceinline__ void run(const Arguments& a) {
    __shared__ float warp_sums[WARPS];
    int row = blockIdx.x, width = a.to.width, of_block = a.size % (2 * BLOCK) == 0 ? 1 : 2;
    int middle = (of_block * blockIdx.y + 1) * a.size, count = of_block * a.size / 8, first_piece = blockIdx.y * count;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const float *y = a.y + (size_t)row * width, *z = a.z + row * a.z_stride;
    auto load = [&](int piece) {
        Piece v(y, piece, width), gate(z, piece, width);
        v.first = gated(v.first, gate.first), v.second = gated(v.second, gate.second);
        return v;
    };
    // Whether elements from k on belong to the second of two groups.
    auto is_second = [&](int k) { return k >= middle; };
    float sums[2] = {};
    for (int i = threadIdx.x; i < count; i += THREADS) {
        Piece v = load(first_piece + i);
        int k = first_element(first_piece + i);
        float first = square_sum(v.first), second = square_sum(v.second);
        sums[0] += (is_second(k) ? 0 : first) + (is_second(k + BLOCK) ? 0 : second);
        sums[1] += (is_second(k) ? first : 0) + (is_second(k + BLOCK) ? second : 0);
    }
    float factors[2];
#pragma unroll
    for (int g = 0; g < 2; g++) factors[g] = rsqrtf(block_sum(sums[g], warp_sums, WARPS) / a.size + a.eps);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        Piece v = load(first_piece + i);
        int k = first_element(first_piece + i);
        auto result = [&](int k, float4 v) {
            return k >= width ? make_float4(0, 0, 0, 0) : apply_norm(v, factors[is_second(k) ? 1 : 0], *(const float4*)(a.weight + k));
        };
        a.to.store<OUTPUT>(k, result(k, v.first), result(k + BLOCK, v.second));
    }
    if (blockIdx.y == gridDim.y - 1) a.to.pad<OUTPUT>(first_piece + count, threadIdx.x, THREADS);
}

extern "C" __global__ void __launch_bounds__(THREADS) mamba_norm_f32(const __grid_constant__ Arguments a) { run<ROWS_F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) mamba_norm_f16(const __grid_constant__ Arguments a) { run<ROWS_F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) mamba_norm_fragments(const __grid_constant__ Arguments a) { run<FRAGMENTS>(a); }
