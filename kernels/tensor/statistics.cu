// What is asked of a gradient before it is used: the sum of its squares, its largest magnitude, and whether it is finite.
#include "common/reduce.cuh"
#include "common/values.cuh"

struct Statistics {
    float squares;          // the sum of the squares of finite elements
    float largest;          // the largest magnitude of finite elements
    float nonfinite;        // how many elements are infinite or NaN; exact up to 2^24
};

struct Arguments {
    const uint4* g;         // bf16
    Statistics* partial;    // [BLOCKS]
    u64 pieces;             // of eight elements
};

struct TotalArguments {
    const Statistics* partial;  // [BLOCKS]
    Statistics* total;
};

constexpr int THREADS = 256, BLOCKS = 512;

// Grid: (BLOCKS)
extern "C" __global__ void __launch_bounds__(THREADS) gradient_statistics(const __grid_constant__ Arguments a) {
    __shared__ float by_warp[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float squares = 0, largest = 0;
    int nonfinite = 0;
#pragma unroll 4
    for (u64 i = blockIdx.x * THREADS + threadIdx.x; i < a.pieces; i += BLOCKS * THREADS) {
        float g[PIECE], sum = 0;
        load_bf16(a.g + i, g);
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
    if (threadIdx.x == 0) *a.total = {(float)squares[0], largest, nonfinite};
}
