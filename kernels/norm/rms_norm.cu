// RMSNorm of rows: y = x / sqrt(mean(x^2) + eps) * weight. A block takes a row, which it writes as it is, or in the order of
// format/ordered.cuh.
#include "common/reduce.cuh"
#include "format/ordered.cuh"

struct Arguments {
    const float* x;         // [rows, width]
    const float* weight;    // [width]
    u16* y;                 // f16 [rows, width]
    int width;              // a multiple of 4, and of 16 if ordered
    float eps;
};

constexpr int THREADS = 256;
constexpr int HELD = 2;     // pairs of fours that a thread keeps, which is all of a row of 4,096

__device__ __forceinline__ float square_sum(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__device__ __forceinline__ float4 product(float4 v, float factor, float4 w) {
    return make_float4(v.x * factor * w.x, v.y * factor * w.y, v.z * factor * w.z, v.w * factor * w.w);
}

// Four elements of each block of a pair.
struct Fours {
    float4 first, second;

    static __device__ __forceinline__ int k(int i) { return i / 4 * (2 * BLOCK) + i % 4 * 4; }
    __device__ __forceinline__ void load(const float* from, int i, int width) {
        float4 zeros = make_float4(0, 0, 0, 0);
        first = k(i) < width ? *(const float4*)(from + k(i)) : zeros;
        second = k(i) + BLOCK < width ? *(const float4*)(from + k(i) + BLOCK) : zeros;
    }
};

template <bool ORDERED>
__device__ __forceinline__ void run(const Arguments& a) {
    __shared__ float sums[THREADS / WARP];
    int row = blockIdx.x, groups = ceil_div(gridDim.x, GROUP_ROWS);
    int count = ORDERED ? ceil_div(a.width, CHUNK_K) * (CHUNK_K / 8) : ceil_div(a.width, 2 * BLOCK) * 4;
    const float* x = a.x + (size_t)row * a.width;
    auto put = [&](int i, const Fours& v, float factor, const Fours& w) {
        float4 first = product(v.first, factor, w.first), second = product(v.second, factor, w.second);
        int k = Fours::k(i);
        if (ORDERED) {
            store_ordered(a.y, groups, row, k, first, second);
        } else {
            u16* y = a.y + (size_t)row * a.width + k;
            if (k < a.width) *(uint2*)y = make_uint2(pack_f16(first.x, first.y), pack_f16(first.z, first.w));
            if (k + BLOCK < a.width) *(uint2*)(y + BLOCK) = make_uint2(pack_f16(second.x, second.y), pack_f16(second.z, second.w));
        }
    };

    // The weight depends on no earlier kernel.
    Fours v[HELD], w[HELD];
#pragma unroll
    for (int j = 0; j < HELD; j++) w[j].load(a.weight, threadIdx.x + j * THREADS, a.width);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float sum = 0;
#pragma unroll
    for (int j = 0; j < HELD; j++) v[j].load(x, threadIdx.x + j * THREADS, a.width);
#pragma unroll
    for (int j = 0; j < HELD; j++) sum += square_sum(v[j].first) + square_sum(v[j].second);
#pragma unroll 1
    for (int i = threadIdx.x + HELD * THREADS; i < count; i += THREADS) {
        Fours more;
        more.load(x, i, a.width);
        sum += square_sum(more.first) + square_sum(more.second);
    }
    sum = warp_sum(sum);
    if (lane_id() == 0) sums[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) sum += sums[i];
    float factor = rsqrtf(sum / a.width + a.eps);
#pragma unroll
    for (int j = 0; j < HELD; j++) {
        int i = threadIdx.x + j * THREADS;
        if (i < count) put(i, v[j], factor, w[j]);
    }
#pragma unroll 1
    for (int i = threadIdx.x + HELD * THREADS; i < count; i += THREADS) {
        Fours more, weight;
        more.load(x, i, a.width);
        weight.load(a.weight, i, a.width);
        put(i, more, factor, weight);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rms_norm(const __grid_constant__ Arguments a) { run<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) rms_norm_ordered(const __grid_constant__ Arguments a) { run<true>(a); }
