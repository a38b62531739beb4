// RMSNorm of rows: y = x / sqrt(mean(x^2) + eps) * weight. A block takes a row, which it stores row-major or fragment-major. Also rows as they
// are, for what takes the residual stream without a norm.
#include "common/reduce.cuh"
#include "format/fragment_major.cuh"
#include "norm/piece.cuh"

struct Arguments {
    const float* x;         // [rows, width]
    const float* weight;    // [width]
    u16* y;                 // f16 [rows, width]
    float* factors;         // [rows]: 1 / sqrt(mean(x^2) + eps); or null
    int width;              // a multiple of 4, and of 16 if fragment-major
    float eps;
};

struct StreamArguments {
    const float* x;         // [rows, width]
    u16* y;                 // f16 [rows, width]
    u32* overflow;          // [rows]: if it is 0, set to 1 + layer where f16 cannot hold the row
    int width;              // as above
    int layer;
};

constexpr int THREADS = 256;
// Minimum blocks per multiprocessor; 0 leaves it to the compiler, which on sm_86 and sm_89 aims at so many that it spills.
constexpr int BLOCKS = __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 ? 4 : 0;
constexpr int THREAD_PIECES = 2;    // in registers: enough for rows of 4,096; the rest of a longer row is loaded twice

// Pieces of a row, with its padding.
template <bool FRAGMENT_MAJOR>
__device__ __forceinline__ int pieces(int width) {
    return FRAGMENT_MAJOR ? padded_k(width) / 8 : ceil_div(width, 2 * BLOCK) * 4;
}

template <bool FRAGMENT_MAJOR>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int WARPS = THREADS / WARP;
    __shared__ float warp_sums[THREAD_PIECES * WARPS];
    int row = blockIdx.x, groups = ceil_div(gridDim.x, GROUP_ROWS);
    int count = pieces<FRAGMENT_MAJOR>(a.width);
    const float* x = a.x + (size_t)row * a.width;
    auto store = [&](int i, const Piece& v, float factor, const Piece& w) {
        float4 first = apply_norm(v.first, factor, w.first), second = apply_norm(v.second, factor, w.second);
        store_activations(a.y, FRAGMENT_MAJOR, groups, a.width, row, first_element(i), first, second);
    };

    // The weight does not depend on the predecessor kernel.
    Piece v[THREAD_PIECES], w[THREAD_PIECES];
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) w[j] = Piece(a.weight, threadIdx.x + j * THREADS, a.width);
    let_later_kernels_start();
    wait_for_earlier_kernels();
    // In the order of linear/skinny/activations.cuh.
    float sums[THREAD_PIECES];
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) v[j] = Piece(x, threadIdx.x + j * THREADS, a.width);
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) sums[j] = v[j].squares();
#pragma unroll 1
    for (int i = threadIdx.x + THREAD_PIECES * THREADS; i < count; i += THREADS) sums[0] += Piece(x, i, a.width).squares();
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        sums[j] = warp_sum(sums[j]);
        if (lane_id() == 0) warp_sums[j * WARPS + threadIdx.x / WARP] = sums[j];
    }
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < THREAD_PIECES * WARPS; i++) sum += warp_sums[i];
    float factor = rsqrtf(sum / a.width + a.eps);
    if (a.factors && threadIdx.x == 0) a.factors[row] = factor;
#pragma unroll
    for (int j = 0; j < THREAD_PIECES; j++) {
        int i = threadIdx.x + j * THREADS;
        if (i < count) store(i, v[j], factor, w[j]);
    }
#pragma unroll 1
    for (int i = threadIdx.x + THREAD_PIECES * THREADS; i < count; i += THREADS) store(i, Piece(x, i, a.width), factor, Piece(a.weight, i, a.width));
}

template <bool FRAGMENT_MAJOR>
__device__ __forceinline__ void store_stream(const StreamArguments& a) {
    int row = blockIdx.x, groups = ceil_div(gridDim.x, GROUP_ROWS), count = pieces<FRAGMENT_MAJOR>(a.width);
    const float* x = a.x + (size_t)row * a.width;
    bool fits = true;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        Piece v(x, i, a.width);
        fits &= v.fits_f16();
        store_activations(a.y, FRAGMENT_MAJOR, groups, a.width, row, first_element(i), v.first, v.second);
    }
    if (!fits) atomicCAS(a.overflow + row, 0, a.layer + 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm(const __grid_constant__ Arguments a) { run<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rms_norm_fragments(const __grid_constant__ Arguments a) { run<true>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) stream_rows(const __grid_constant__ StreamArguments a) { store_stream<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) stream_rows_fragments(const __grid_constant__ StreamArguments a) { store_stream<true>(a); }
