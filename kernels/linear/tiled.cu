// GEMM of tens of rows with NVFP4 weights: y[m, n] = sum over k of x[m, k] w[n, k], for f16 x.
//
// A block takes 64 output features, 16 to a warp, and up to COLUMNS rows of activations, and goes along K a chunk of format/packed.cuh at
// a time. Weights are the A operand of the matrix instruction, decoded once for all rows. Activations are the B operand. Both have K in
// the order of a lane's codes: elements 4 t to 4 t + 3 of a block.
//
// If that gives too few blocks, K is split (split-K): several blocks take the same tile over a range of K each, and a second kernel adds up
// their accumulators in a fixed order. K must be a multiple of 16.
#include "linear/tile.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int FEATURES = WARPS * 16;
constexpr int STAGES = 3;
constexpr int X_ROW_BYTES = CHUNK_K * 2;                    // of a row's activations in a stage
constexpr int X_PIECES = X_ROW_BYTES / 16;
constexpr int CHUNK_PIECES = CHUNK_BYTES / 16;
constexpr int WEIGHT_BYTES = FEATURES / CHUNK_ROWS * CHUNK_BYTES;
constexpr int WEIGHT_PIECES = WEIGHT_BYTES / 16;
static_assert(THREADS % X_PIECES == 0, "a thread copies the same piece of several rows");

// Position of a 16-byte piece of row m in a stage: swizzled, so that four neighbouring rows have no bank conflicts.
__device__ __forceinline__ int piece_at(int m, int piece) { return m * X_ROW_BYTES + ((piece ^ (m % 4 * 2)) * 16); }

template <int COLUMNS>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int STAGE_BYTES = WEIGHT_BYTES + COLUMNS * X_ROW_BYTES, TILES = COLUMNS / 8;
    constexpr int WEIGHT_COPIES = ceil_div(WEIGHT_PIECES, THREADS), ROW_STEP = THREADS / X_PIECES, X_COPIES = ceil_div(COLUMNS, ROW_STEP);
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4;
    int chunks = ceil_div(a.k, CHUNK_K), split = blockIdx.z;
    int begin = chunks * split / a.split_k, end = chunks * (split + 1) / a.split_k;
    int first_row = blockIdx.y * COLUMNS, rows = min(COLUMNS, a.m - first_row);

    TilePlace<FEATURES> tile(a, blockIdx.x);
    const Matrix& w = *tile.matrix;
    int last_line = ceil_div(w.rows, CHUNK_ROWS) - 1;

    // Beyond the last features, the last ones are repeated; their accumulators are dropped.
    const u8* weight_from[WEIGHT_COPIES];
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++) {
        int piece = thread + i * THREADS;
        int line = min(tile.first_feature / CHUNK_ROWS + piece / CHUNK_PIECES, last_line);
        weight_from[i] = w.chunks + ((size_t)line * chunks + begin) * CHUNK_BYTES + piece % CHUNK_PIECES * 16;
    }
    int x_piece = thread % X_PIECES, x_row = thread / X_PIECES;
    const u16* x_from = a.x + (size_t)(first_row + x_row) * a.k + begin * CHUNK_K + x_piece * 8;
    auto load_weights = [&](int step) {
        char* stage = shared + step % STAGES * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < WEIGHT_COPIES; i++) {
            int piece = thread + i * THREADS;
            if (piece < WEIGHT_PIECES) copy_async_16(shared_address(stage + piece * 16), weight_from[i] + (size_t)step * CHUNK_BYTES, 16);
        }
    };
    // Beyond the end of K and of the rows, activations are zeros.
    auto load_x = [&](int step) {
        char* stage = shared + step % STAGES * STAGE_BYTES + WEIGHT_BYTES;
        bool inside = (begin + step) * CHUNK_K + x_piece * 8 < a.k;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) {
            int m = x_row + i * ROW_STEP;
            if (COLUMNS % ROW_STEP != 0 && m >= COLUMNS) break;
            bool exists = inside && m < rows;
            const u16* from = exists ? x_from + step * CHUNK_K + (size_t)(i * ROW_STEP) * a.k : a.x;
            copy_async_16(shared_address(stage + piece_at(m, x_piece)), from, exists ? 16 : 0);
        }
    };

    // Weights do not depend on the predecessor kernel.
    int steps = end - begin;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps) load_weights(i);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps) load_x(i);
        copy_async_commit();
    }

    // The terms of piece_at() that depend only on the lane.
    int x_lane = g * X_ROW_BYTES + t * 8, swizzle = g % 4 * 32;
    float c[TILES][4] = {};
    for (int step = 0; step < steps; step++) {
        copy_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) {
            load_weights(step + STAGES - 1);
            load_x(step + STAGES - 1);
        }
        copy_async_commit();
        const char* stage = shared + step % STAGES * STAGE_BYTES;
        const char *low = stage + 2 * warp * CHUNK_BYTES, *high = low + CHUNK_BYTES, *x = stage + WEIGHT_BYTES;
        uint4 low_codes = *(const uint4*)(low + lane * 16), high_codes = *(const uint4*)(high + lane * 16);
        uint2 low_scales = *(const uint2*)(low + CHUNK_CODES + g * CHUNK_BLOCKS);
        uint2 high_scales = *(const uint2*)(high + CHUNK_CODES + g * CHUNK_BLOCKS);
        u32 words_low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
        u32 words_high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 u[4], v[4];
            decode_packed(words_low[j], low_scales, j, u);
            decode_packed(words_high[j], high_scales, j, v);
            // Regroups pairs of an element of each block into pairs of neighbours in one block.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 select = half ? 0x7632 : 0x5410;
                u32 a0 = __byte_perm(u[0], u[1], select), a1 = __byte_perm(v[0], v[1], select);
                u32 a2 = __byte_perm(u[2], u[3], select), a3 = __byte_perm(v[2], v[3], select);
                const char* from = x + x_lane + (((2 * j + half) * 32) ^ swizzle);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    uint2 b = *(const uint2*)(from + i * 8 * X_ROW_BYTES);
                    mma_f16(c[i], a0, a1, a2, a3, b.x, b.y);
                }
            }
        }
    }

    int first = tile.first_feature + warp * 16;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
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
