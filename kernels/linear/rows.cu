// Conversions of rows before and after GEMMs: activations to f16, each row divided by a power of two that brings its largest magnitude near
// the top of f16; results back, multiplied by the same powers; and row-major activations to fragment-major ones.
#include "common/reduce.cuh"
#include "common/values.cuh"
#include "format/fragment_major.cuh"

constexpr int THREADS = 256;
constexpr int THREAD_VALUES = 8;    // that a thread loads at once

constexpr float F16_MAX = 65504.0f;
constexpr int F16_EXPONENT = 15;    // of F16_MAX
constexpr int BIAS = 127;
constexpr int LARGEST_EXPONENT = 126;  // so that the power of two and its inverse are both normal

struct ScaleArguments {
    const u8* x;        // rows of k values, each aligned to 16 bytes
    u16* scaled;        // f16 [rows, k]
    float* factors;     // [rows]: what each row was divided by
    u64 stride;         // bytes from row to row of x
    int k;              // a multiple of THREAD_VALUES
};

template <Type T>
__device__ __forceinline__ void load(const u8* row, int i, float (&x)[THREAD_VALUES]) {
    constexpr int PIECES = (T == F32 ? 4 : 2) * THREAD_VALUES / 16;
    load_values<T>((const uint4*)row + (size_t)i * PIECES, x);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(BIAS + exponent) << 23); }

// The exponent of the divisor of a row with this largest magnitude: 0 for zero and infinity, which no division changes.
__device__ __forceinline__ int exponent_of(float largest) {
    if (!(largest > 0 && largest < INFINITY)) return 0;
    int exponent = (int)(__float_as_uint(largest) >> 23) - BIAS - F16_EXPONENT;
    exponent = min(max(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT);
    return largest * power_of_two(-exponent) > F16_MAX ? exponent + 1 : exponent;
}

// A block takes a row.
template <Type T>
__device__ __forceinline__ void scale_row(const ScaleArguments& a) {
    __shared__ float warp_largest[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const u8* row = a.x + blockIdx.x * a.stride;
    float x[THREAD_VALUES], largest = 0;
    for (int i = threadIdx.x; i < a.k / THREAD_VALUES; i += THREADS) {
        load<T>(row, i, x);
        // fmaxf() ignores NaN.
#pragma unroll
        for (int j = 0; j < THREAD_VALUES; j++) largest = fmaxf(largest, fabsf(x[j]));
    }
    largest = warp_max(largest);
    if (lane_id() == 0) warp_largest[threadIdx.x / WARP] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) largest = fmaxf(largest, warp_largest[i]);
    int exponent = exponent_of(largest);
    if (threadIdx.x == 0) a.factors[blockIdx.x] = power_of_two(exponent);
    float inverse = power_of_two(-exponent);
    uint4* out = (uint4*)a.scaled + (size_t)blockIdx.x * (a.k / THREAD_VALUES);
    for (int i = threadIdx.x; i < a.k / THREAD_VALUES; i += THREADS) {
        load<T>(row, i, x);
        auto pair = [&](int j) { return pack_f16(x[j] * inverse, x[j + 1] * inverse); };
        out[i] = make_uint4(pair(0), pair(2), pair(4), pair(6));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) linear_scale_rows_f32(const __grid_constant__ ScaleArguments a) { scale_row<F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_scale_rows_f16(const __grid_constant__ ScaleArguments a) { scale_row<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_scale_rows_bf16(const __grid_constant__ ScaleArguments a) { scale_row<BF16>(a); }

struct UnscaleArguments {
    const float* y;         // [rows, n]
    const float* factors;   // [rows]: what each row is multiplied by
    void* out;              // [rows, n]
    int n;
};

// Grid: (ceil(n / THREADS), rows)
template <Type T>
__device__ __forceinline__ void unscale(const UnscaleArguments& a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.n) return;
    size_t at = (size_t)blockIdx.y * a.n + i;
    float y = a.y[at] * a.factors[blockIdx.y];
    if (T == F32) ((float*)a.out)[at] = y;
    if (T == F16) ((u16*)a.out)[at] = to_f16(y);
    if (T == BF16) ((u16*)a.out)[at] = (u16)pack_bf16(y, y);
}

extern "C" __global__ void __launch_bounds__(THREADS) linear_unscale_rows_f32(const __grid_constant__ UnscaleArguments a) { unscale<F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_unscale_rows_f16(const __grid_constant__ UnscaleArguments a) { unscale<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_unscale_rows_bf16(const __grid_constant__ UnscaleArguments a) { unscale<BF16>(a); }

struct ToFragmentsArguments {
    const u16* x;       // f16 [rows, k]
    u16* y;             // the same, fragment-major
    int k;              // a multiple of 16
};

// Grid: (rows, ceil(padded K / 8 / THREADS)); a thread takes four elements of each of two neighbouring blocks.
extern "C" __global__ void __launch_bounds__(THREADS) linear_to_fragments(const __grid_constant__ ToFragmentsArguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int i = blockIdx.y * THREADS + threadIdx.x, k = first_element(i);
    if (k >= padded_k(a.k)) return;
    const u16* row = a.x + (size_t)blockIdx.x * a.k;
    auto four = [&](int k) {
        uint2 halves = k < a.k ? *(const uint2*)(row + k) : make_uint2(0, 0);
        return make_float4(f16_low(halves.x), f16_high(halves.x), f16_low(halves.y), f16_high(halves.y));
    };
    store_fragments(a.y, ceil_div(gridDim.x, GROUP_ROWS), blockIdx.x, k, four(k), four(k + BLOCK));
}
