// Rows of activations on their way into a product, and of the product on its way out: to f16, each row divided by a power of
// two that brings its largest magnitude near the top of f16, and back; and into the order of format/fragment_major.cuh.
#include "common/reduce.cuh"
#include "common/values.cuh"
#include "format/fragment_major.cuh"

constexpr int THREADS = 256;
constexpr int AT_ONCE = 8;  // values of a thread

constexpr float F16_MAX = 65504.0f;
constexpr int F16_EXPONENT = 15;    // of F16_MAX
constexpr int BIAS = 127;
constexpr int LARGEST_EXPONENT = 126;  // so that the power of two and its inverse are both normal

struct HalvesArguments {
    const u8* x;        // rows of k values, each aligned to 16 bytes
    u16* halves;        // f16 [rows, k]
    float* factors;     // [rows]: what each was divided by
    u64 stride;         // bytes from row to row of x
    int k;              // a multiple of AT_ONCE
};

template <Type T>
__device__ __forceinline__ void load(const u8* row, int i, float (&x)[AT_ONCE]) {
    constexpr int PIECES = (T == F32 ? 4 : 2) * AT_ONCE / 16;
    load_values<T>((const uint4*)row + (size_t)i * PIECES, x);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((u32)(BIAS + exponent) << 23); }

// What a row with this largest magnitude is divided by. What is infinite stays so, whatever it is divided by.
__device__ __forceinline__ int exponent_of(float largest) {
    if (!(largest > 0 && largest < INFINITY)) return 0;
    int exponent = (int)(__float_as_uint(largest) >> 23) - BIAS - F16_EXPONENT;
    exponent = min(max(exponent, -LARGEST_EXPONENT), LARGEST_EXPONENT);
    return largest * power_of_two(-exponent) > F16_MAX ? exponent + 1 : exponent;
}

// A block to a row.
template <Type T>
__device__ __forceinline__ void halves(const HalvesArguments& a) {
    __shared__ float most[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    const u8* row = a.x + blockIdx.x * a.stride;
    float x[AT_ONCE], largest = 0;
    for (int i = threadIdx.x; i < a.k / AT_ONCE; i += THREADS) {
        load<T>(row, i, x);
        // NaN does not count.
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) largest = fmaxf(largest, fabsf(x[j]));
    }
    largest = warp_max(largest);
    if (lane_id() == 0) most[threadIdx.x / WARP] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < THREADS / WARP; i++) largest = fmaxf(largest, most[i]);
    int exponent = exponent_of(largest);
    if (threadIdx.x == 0) a.factors[blockIdx.x] = power_of_two(exponent);
    float inverse = power_of_two(-exponent);
    uint4* out = (uint4*)a.halves + (size_t)blockIdx.x * (a.k / AT_ONCE);
    for (int i = threadIdx.x; i < a.k / AT_ONCE; i += THREADS) {
        load<T>(row, i, x);
        auto pair = [&](int j) { return pack_f16(x[j] * inverse, x[j + 1] * inverse); };
        out[i] = make_uint4(pair(0), pair(2), pair(4), pair(6));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) linear_halves_f32(const __grid_constant__ HalvesArguments a) { halves<F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_halves_f16(const __grid_constant__ HalvesArguments a) { halves<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_halves_bf16(const __grid_constant__ HalvesArguments a) { halves<BF16>(a); }

struct ResultArguments {
    const float* y;         // [rows, n]
    const float* factors;   // [rows]: what each is multiplied by
    void* out;              // [rows, n]
    int n;
};

// Grid: (ceil(n / THREADS), rows)
template <Type T>
__device__ __forceinline__ void result(const ResultArguments& a) {
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

extern "C" __global__ void __launch_bounds__(THREADS) linear_result_f32(const __grid_constant__ ResultArguments a) { result<F32>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_result_f16(const __grid_constant__ ResultArguments a) { result<F16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) linear_result_bf16(const __grid_constant__ ResultArguments a) { result<BF16>(a); }

struct ToFragmentsArguments {
    const u16* x;       // f16 [rows, k]
    u16* y;             // the same, fragment-major
    int k;              // a multiple of 16
};

// Grid: (rows, ceil(K / (2 * BLOCK) * 4 / THREADS)); a thread has four elements of both blocks of a pair.
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
