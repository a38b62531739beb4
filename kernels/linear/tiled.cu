// GEMM of tens of rows with NVFP4 weights: y[m, n] = sum over k of x[m, k] w[n, k], for f16 x.
//
// A block takes 64 output features, 16 to a warp, and up to COLUMNS rows of activations, and multiplies them along K
// (linear/main_loop.cuh).
//
// If that gives too few blocks, K is split (split-K): several blocks take the same tile over a range of K each, and a second kernel adds up
// their accumulators in a fixed order. K must be a multiple of 16.
#include "linear/main_loop.cuh"
#include "linear/tile.cuh"

constexpr int FEATURES = LINES * CHUNK_ROWS;
constexpr int STAGES = 3;

template <int COLUMNS>
__device__ __forceinline__ void run(const Arguments& a) {
    using Loop = MainLoop<COLUMNS, STAGES>;
    extern __shared__ __align__(128) char shared[];
    int chunks = ceil_div(a.k, CHUNK_K), split = blockIdx.z;
    int begin = chunks * split / a.split_k, end = chunks * (split + 1) / a.split_k;
    int first_row = blockIdx.y * COLUMNS;

    TilePlace<FEATURES> tile(a, blockIdx.x);
    const Matrix& w = *tile.matrix;
    int last_line = ceil_div(w.rows, CHUNK_ROWS) - 1;

    // Beyond the last features, the last ones are repeated; their accumulators are dropped.
    Loop loop(shared, end - begin, [&](int line) {
        line = min(tile.first_feature / CHUNK_ROWS + line, last_line);
        return w.chunks + ((size_t)line * chunks + begin) * CHUNK_BYTES;
    });
    const u16* x = a.x + (size_t)(first_row + first_copied_row()) * a.k + begin * CHUNK_K + copied_piece() * 8;
    auto row = [&](int i) { return x + (size_t)(i * ROW_STEP) * a.k; };

    loop.load_first_weights();
    wait_for_earlier_kernels();
    let_later_kernels_start();
    float c[Loop::TILES][4] = {};
    loop.multiply(a.x, a.m - first_row, a.k - begin * CHUNK_K, row, c);

    int first = tile.first_feature + threadIdx.x / WARP * 16;
#pragma unroll
    for (int i = 0; i < Loop::TILES; i++) {
        if (a.split_k == 1) {
            store_accumulators(a, w, tile.column, first, first_row + 8 * i, c[i]);
        } else {
            store_partial(a, w, tile.column, first, first_row + 8 * i, split, c[i]);
        }
    }
}

// Adds up the accumulators of all splits of K. Grid: (ceil(features / SUM_THREADS), m)
constexpr int SUM_THREADS = 256;
extern "C" __global__ void __launch_bounds__(SUM_THREADS) linear_tiled_sum(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int feature = blockIdx.x * SUM_THREADS + threadIdx.x, m = blockIdx.y, all = features_of(a);
    if (feature >= all) return;
    float sum = 0;
#pragma unroll 4
    for (int split = 0; split < a.split_k; split++) sum += a.partial[((size_t)split * a.m + m) * all + feature];
    int index = 0, column = 0;
    while (index < a.matrices - 1 && feature - column >= a.matrix[index].rows) column += a.matrix[index++].rows;
    store(a, a.matrix[index], column, m, feature - column, sum);
}

#define KERNEL(COLUMNS) \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) linear_tiled_##COLUMNS(const __grid_constant__ Arguments a) { run<COLUMNS>(a); }

KERNEL(8)
KERNEL(16)
KERNEL(32)
KERNEL(64)
