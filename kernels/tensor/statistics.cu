// Statistics of a gradient for clipping: the sum of its squares, its largest magnitude, and whether it is finite.
#include "common/reduce.cuh"
#include "common/values.cuh"

struct Statistics {
    float squares;          // the sum of the squares of finite elements
    float largest;          // the largest magnitude of finite elements
    float nonfinite;        // how many elements are infinite or NaN; exact up to 2^24
};

// Statistics of a gradient, as a step uses them.
struct Entry {
    Statistics found;
    float factor;           // multiplies it; infinite if it or one before it in the step is not finite
};

struct Arguments {
    const void* g;          // bf16, or f32
    Statistics* partial;    // [BLOCKS]
    u64 pieces;             // of eight elements
};

struct TotalArguments {
    const Statistics* partial;  // [BLOCKS]
    Entry* entry;
    const Entry* previous;      // of the same step, or null
    float bound;                // that the norm is clipped to; may be infinite
};

constexpr int THREADS = 256, BLOCKS = 512;

__device__ __forceinline__ void load_piece(const u16* g, u64 piece, float (&x)[PIECE]) { load_bf16((const uint4*)g + piece, x); }
__device__ __forceinline__ void load_piece(const float* g, u64 piece, float (&x)[PIECE]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float4 v = ((const float4*)g)[2 * piece + i];
        x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
    }
}

template <class T>
__device__ __forceinline__ void statistics(const Arguments& a) {
    __shared__ float by_warp[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float squares = 0, largest = 0;
    int nonfinite = 0;
#pragma unroll 4
    for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < a.pieces; i += BLOCKS * THREADS) {
        float g[PIECE], sum = 0;
        load_piece((const T*)a.g, i, g);
#pragma unroll
        for (int e = 0; e < PIECE; e++) {
            float magnitude = fabsf(g[e]);
            // NaN is not less than infinity either.
            bool is_finite = magnitude < INFINITY;
            nonfinite += !is_finite;
            float finite = is_finite ? magnitude : 0;
            sum += finite * finite;
            largest = fmaxf(largest, finite);
        }
        squares += sum;
    }
    squares = block_sum(squares, by_warp, THREADS / WARP);
    largest = block_max(largest, by_warp, THREADS / WARP);
    float count = block_sum((float)nonfinite, by_warp, THREADS / WARP);
    if (threadIdx.x == 0) a.partial[blockIdx.x] = {squares, largest, count};
}

// Grid: (BLOCKS)
extern "C" __global__ void __launch_bounds__(THREADS) gradient_statistics(const __grid_constant__ Arguments a) { statistics<u16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) gradient_statistics_f32(const __grid_constant__ Arguments a) { statistics<float>(a); }

// Grid: (1)
extern "C" __global__ void __launch_bounds__(BLOCKS) gradient_statistics_total(const __grid_constant__ TotalArguments a) {
    __shared__ double squares[BLOCKS];
    __shared__ float by_warp[BLOCKS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    Statistics own = a.partial[threadIdx.x];
    float largest = block_max(own.largest, by_warp, BLOCKS / WARP);
    float nonfinite = block_sum(own.nonfinite, by_warp, BLOCKS / WARP);
    squares[threadIdx.x] = own.squares;
    __syncthreads();
    for (int half = BLOCKS / 2; half > 0; half /= 2) {
        if ((int)threadIdx.x < half) squares[threadIdx.x] += squares[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        float sum = (float)squares[0];
        bool usable = nonfinite == 0 && sum < INFINITY && (!a.previous || a.previous->factor < INFINITY);
        *a.entry = {{sum, largest, nonfinite}, usable ? fminf(1.0f, a.bound / sqrtf(sum)) : INFINITY};
    }
}
