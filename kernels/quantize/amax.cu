// The largest magnitude (amax) of a matrix. The maximum does not depend on the order of comparisons, so the result is deterministic.
#include "common/values.cuh"

struct Arguments {
    const u8* input;    // rows of row_vectors x 16 bytes
    u32* amax;          // 0 at first: the bits of an f32; at least those of infinity if a value is not finite, unless values saturate
    u64 stride;         // bytes from row to row
    u64 vectors;        // of 16 bytes, of all rows
    u32 row_vectors;
    int saturate;       // values that are not finite are ignored
};

constexpr int THREADS = 256;
constexpr int BATCH = 4;    // loads of a thread in flight
constexpr u32 INFINITY_BITS = 0x7f800000u;

// The largest of `largest` and the magnitudes in a word, as bits of an f32.
template <Type T>
__device__ __forceinline__ u32 larger(u32 largest, u32 word, bool saturate) {
    auto one = [&](u32 bits) { return saturate && bits >= INFINITY_BITS ? largest : max(largest, bits); };
    if (T == F32) return one(word & 0x7fffffffu);
    if (T == BF16) {
        largest = one(word << 16 & 0x7fffffffu);
        return one(word & 0x7fff0000u);
    }
    largest = one(__float_as_uint(f16_low(word)) & 0x7fffffffu);
    return one(__float_as_uint(f16_high(word)) & 0x7fffffffu);
}

template <Type T>
__device__ __forceinline__ void amax(const Arguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    bool dense = a.stride == (u64)a.row_vectors * 16;
    auto load = [&](u64 i) {
        u64 at = dense ? i * 16 : i / a.row_vectors * a.stride + i % a.row_vectors * 16;
        return *(const uint4*)(a.input + at);
    };
    u32 largest = 0;
    auto take = [&](const uint4& v) {
        largest = larger<T>(largest, v.x, a.saturate);
        largest = larger<T>(largest, v.y, a.saturate);
        largest = larger<T>(largest, v.z, a.saturate);
        largest = larger<T>(largest, v.w, a.saturate);
    };
    u64 step = (u64)gridDim.x * THREADS;
    u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (BATCH - 1) * step < a.vectors; i += BATCH * step) {
        uint4 v[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++) v[j] = load(i + j * step);
#pragma unroll
        for (int j = 0; j < BATCH; j++) take(v[j]);
    }
    for (; i < a.vectors; i += step) take(load(i));
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, d));
    if (lane_id() == 0 && largest) atomicMax(a.amax, largest);
}

extern "C" __global__ void __launch_bounds__(THREADS) amax_f32(const __grid_constant__ Arguments a) { amax<F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) amax_f16(const __grid_constant__ Arguments a) { amax<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) amax_bf16(const __grid_constant__ Arguments a) { amax<BF16>(a); }
