// GEMM of gathered rows with NVFP4 experts: for each (row, expert) pair of the routing, y[pair, n] = sum over k of x[row, k] w[expert][n,
// k], for f16 x. Pairs are sorted by expert (experts/route.cu). A tile is up to COLUMNS pairs of one expert; experts without rows have
// none.
//
// A block takes a tile and 64 output features, 16 to a warp, and goes along K a chunk of format/packed.cuh at a time. Weights are the A
// operand of the matrix instruction, decoded once for all pairs of the tile. Activations are the B operand. Both have K in the order of a
// lane's codes: elements 4 t to 4 t + 3 of a block. In the product with gate and up, the 16 features of a warp are eight of gate and the
// same eight of up, and the result of the GLU is stored.
//
// K must be a multiple of 16.
#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "common/tiles.cuh"
#include "format/packed.cuh"
#include "linear/matrix.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int LINES = 2 * WARPS;                            // of a block: a line is the chunks of the same 8 rows
constexpr int X_ROW_BYTES = CHUNK_K * 2;                    // of a pair's activations in a stage
constexpr int X_PIECES = X_ROW_BYTES / 16;
constexpr int CHUNK_PIECES = CHUNK_BYTES / 16;
constexpr int WEIGHT_BYTES = LINES * CHUNK_BYTES;
constexpr int WEIGHT_PIECES = WEIGHT_BYTES / 16;
static_assert(THREADS % X_PIECES == 0, "a thread copies the same piece of several pairs");

enum Projection { GATE, UP, DOWN, PROJECTIONS };

struct Arguments {
    const u16* x;               // f16: for gate and up [rows, k], for down [pairs, k]
    const int* sources;         // [pairs]: the row of x; null for down, where the row is the pair
    const ExpertTile* tiles;
    const Matrix* experts;      // [experts, PROJECTIONS]
    void* out;                  // [pairs, n]: f16 for gate and up, f32 for down
    int n;                      // a multiple of 2
    int k;
    float factor;               // of the product
    float out_scale;            // GLU: keeps the result, which may be large, within f16
    int activation;
};

// Position of a 16-byte piece of pair m in a stage: swizzled, so that four neighbouring pairs have no bank conflicts.
__device__ __forceinline__ int piece_at(int m, int piece) { return m * X_ROW_BYTES + ((piece ^ (m % 4 * 2)) * 16); }

// Stages in shared memory. Small tiles need more of them to keep enough loads in flight.
template <int COLUMNS>
constexpr int STAGES = COLUMNS <= 8 ? 6 : COLUMNS <= 16 ? 4 : 3;

template <int COLUMNS, bool IS_GLU>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int COUNT = STAGES<COLUMNS>, STAGE_BYTES = WEIGHT_BYTES + COLUMNS * X_ROW_BYTES, TILES = COLUMNS / 8;
    constexpr int WEIGHT_COPIES = ceil_div(WEIGHT_PIECES, THREADS), ROW_STEP = THREADS / X_PIECES, X_COPIES = ceil_div(COLUMNS, ROW_STEP);
    constexpr int FEATURES = CHUNK_ROWS * (IS_GLU ? WARPS : LINES);    // of an output row
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4;
    int steps = ceil_div(a.k, CHUNK_K), first_feature = blockIdx.x * FEATURES;

    // Gate and up may directly follow the routing, whose tiles they read. When down starts, the routing has completed.
    if (IS_GLU) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
    }
    ExpertTile tile = a.tiles[blockIdx.y];
    if (tile.pairs == 0) return;
    const Matrix* expert = a.experts + tile.expert * PROJECTIONS;

    // Beyond the last features, the last ones are repeated; their accumulators are dropped.
    const u8* weight_from[WEIGHT_COPIES];
    int last_line = ceil_div(a.n, CHUNK_ROWS) - 1;
#pragma unroll
    for (int i = 0; i < WEIGHT_COPIES; i++) {
        int piece = thread + i * THREADS, line = min(piece / CHUNK_PIECES, LINES - 1);
        const Matrix& w = expert[!IS_GLU ? DOWN : line % 2 == 0 ? GATE : UP];
        line = min(first_feature / CHUNK_ROWS + (IS_GLU ? line / 2 : line), last_line);
        weight_from[i] = w.chunks + (size_t)line * steps * CHUNK_BYTES + piece % CHUNK_PIECES * 16;
    }
    auto load_weights = [&](int step) {
        char* stage = shared + step % COUNT * STAGE_BYTES;
#pragma unroll
        for (int i = 0; i < WEIGHT_COPIES; i++) {
            int piece = thread + i * THREADS;
            if (piece < WEIGHT_PIECES) copy_async_16(shared_address(stage + piece * 16), weight_from[i] + (size_t)step * CHUNK_BYTES, 16);
        }
    };
#pragma unroll
    for (int i = 0; i < COUNT - 1; i++) {
        if (i < steps) load_weights(i);
    }
    if (!IS_GLU) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
    }

    // Beyond the end of K and of the pairs, activations are zeros.
    int x_piece = thread % X_PIECES, x_row = thread / X_PIECES;
    const u16* x_from[X_COPIES];
#pragma unroll
    for (int i = 0; i < X_COPIES; i++) {
        int m = x_row + i * ROW_STEP, pair = tile.first + min(m, tile.pairs - 1);
        x_from[i] = a.x + (size_t)(a.sources ? a.sources[pair] : pair) * a.k + x_piece * 8;
    }
    auto load_x = [&](int step) {
        char* stage = shared + step % COUNT * STAGE_BYTES + WEIGHT_BYTES;
        bool inside = step * CHUNK_K + x_piece * 8 < a.k;
#pragma unroll
        for (int i = 0; i < X_COPIES; i++) {
            int m = x_row + i * ROW_STEP;
            if (COLUMNS % ROW_STEP != 0 && m >= COLUMNS) break;
            bool exists = inside && m < tile.pairs;
            copy_async_16(shared_address(stage + piece_at(m, x_piece)), exists ? x_from[i] + step * CHUNK_K : a.x, exists ? 16 : 0);
        }
    };
#pragma unroll
    for (int i = 0; i < COUNT - 1; i++) {
        if (i < steps) load_x(i);
        copy_async_commit();
    }

    // The terms of piece_at() that depend only on the lane.
    int x_lane = g * X_ROW_BYTES + t * 8, swizzle = g % 4 * 32;
    float c[TILES][4] = {};
    for (int step = 0; step < steps; step++) {
        copy_async_wait<COUNT - 2>();
        __syncthreads();
        if (step + COUNT - 1 < steps) {
            load_weights(step + COUNT - 1);
            load_x(step + COUNT - 1);
        }
        copy_async_commit();
        const char* stage = shared + step % COUNT * STAGE_BYTES;
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

    const Matrix &gate = expert[GATE], &up = expert[UP], &down = expert[DOWN];
    float low_factor = (IS_GLU ? gate : down).global * a.factor * PACKED_FACTOR, high_factor = (IS_GLU ? up : down).global * a.factor * PACKED_FACTOR;
    int feature = first_feature + warp * (IS_GLU ? CHUNK_ROWS : 2 * CHUNK_ROWS) + g;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int m = 8 * i + 2 * t + e;
            if (m >= tile.pairs) continue;
            size_t at = (size_t)(tile.first + m) * a.n + feature;
            float x = c[i][e] * low_factor, y = c[i][e + 2] * high_factor;
            if (IS_GLU) {
                if (feature < a.n) ((u16*)a.out)[at] = to_f16(activate(a.activation, x) * y * a.out_scale);
            } else {
                if (feature < a.n) ((float*)a.out)[at] = x;
                if (feature + CHUNK_ROWS < a.n) ((float*)a.out)[at + CHUNK_ROWS] = y;
            }
        }
    }
}

#define KERNELS(COLUMNS)                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) linear_experts_glu_##COLUMNS(const __grid_constant__ Arguments a) {     \
        run<COLUMNS, true>(a);                                                                                                         \
    }                                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) linear_experts_##COLUMNS(const __grid_constant__ Arguments a) {         \
        run<COLUMNS, false>(a);                                                                                                        \
    }

KERNELS(8)
KERNELS(16)
KERNELS(32)
KERNELS(64)
