// Products of gathered rows with NVFP4 experts: for each pair of a row and an expert that it goes to, y[pair, n] = sum over k of
// x[row, k] w[expert][n, k], for f16 x. Pairs lie in the order of their experts (experts/route.cu); a tile is up to COLUMNS pairs of
// one expert, which the grid takes one by one, so that an expert without rows costs nothing.
//
// A block takes a tile and 64 output features, 16 to a warp, and goes along K a chunk of format/packed.cuh at a time. Weights are the
// A operand of the matrix instruction, decoded once for all pairs of the tile; activations are the B operand, in the order of K that
// the codes of a lane have: elements 4 t to 4 t + 3 of a block. Of gate and up, a warp's 16 features are eight of gate and the same
// eight of up, and what is stored is the gated activation.
//
// K must be a multiple of 16.
#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "common/tiles.cuh"
#include "format/packed.cuh"
#include "linear/matrix.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int LINES = 2 * WARPS;                            // rows of chunks of a block
constexpr int X_LINE = CHUNK_K * 2;                         // bytes of a pair's activations in a stage
constexpr int X_PIECES = X_LINE / 16;
constexpr int CHUNK_PIECES = CHUNK_BYTES / 16;
constexpr int WEIGHT_BYTES = LINES * CHUNK_BYTES;
constexpr int WEIGHT_PIECES = WEIGHT_BYTES / 16;
static_assert(THREADS % X_PIECES == 0, "a thread copies the same piece of several pairs");

enum Projection { GATE, UP, DOWN, PROJECTIONS };

struct Arguments {
    const u16* x;               // f16: of gate and up [rows, k], of down [pairs, k]
    const int* sources;         // [pairs]: the row of x; or null, where that is the pair
    const ExpertTile* tiles;
    const Matrix* experts;      // [experts, PROJECTIONS]
    void* out;                  // [pairs, n]: f16 of gate and up, f32 of down
    int n;                      // a multiple of 2
    int k;
    float factor;               // of the product
    float out_scale;            // of the gated activation, which may be large
    int activation;
};

// Where a piece of 16 bytes of pair m stands: four neighbouring pairs meet in no bank.
__device__ __forceinline__ int piece_at(int m, int piece) { return m * X_LINE + ((piece ^ (m % 4 * 2)) * 16); }

// Stages of shared memory, as many as keep the memory busy where a tile has few pairs.
template <int COLUMNS>
constexpr int STAGES = COLUMNS <= 8 ? 6 : COLUMNS <= 16 ? 4 : 3;

template <int COLUMNS, bool IS_GLU>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int COUNT = STAGES<COLUMNS>, STAGE_BYTES = WEIGHT_BYTES + COLUMNS * X_LINE, TILES = COLUMNS / 8;
    constexpr int WEIGHT_COPIES = ceil_div(WEIGHT_PIECES, THREADS), ROW_STEP = THREADS / X_PIECES, X_COPIES = ceil_div(COLUMNS, ROW_STEP);
    constexpr int FEATURES = CHUNK_ROWS * (IS_GLU ? WARPS : LINES);    // of an output row
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4;
    int steps = ceil_div(a.k, CHUNK_K), first_feature = blockIdx.x * FEATURES;

    // Where pairs go is known when gate and up are done; what those are of may just have been decided.
    if (IS_GLU) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
    }
    ExpertTile tile = a.tiles[blockIdx.y];
    if (tile.pairs == 0) return;
    const Matrix* expert = a.experts + tile.expert * PROJECTIONS;

    // Features past the end repeat the last; their sums are dropped.
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

    // Past the end of K and of the pairs stand zeros.
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
            bool there = inside && m < tile.pairs;
            copy_async_16(shared_address(stage + piece_at(m, x_piece)), there ? x_from[i] + step * CHUNK_K : a.x, there ? 16 : 0);
        }
    };
#pragma unroll
    for (int i = 0; i < COUNT - 1; i++) {
        if (i < steps) load_x(i);
        copy_async_commit();
    }

    // Of piece_at(), what is the lane's.
    int x_lane = g * X_LINE + t * 8, turn = g % 4 * 32;
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
            // Pairs of both blocks become neighbours of one.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 select = half ? 0x7632 : 0x5410;
                u32 a0 = __byte_perm(u[0], u[1], select), a1 = __byte_perm(v[0], v[1], select);
                u32 a2 = __byte_perm(u[2], u[3], select), a3 = __byte_perm(v[2], v[3], select);
                const char* from = x + x_lane + (((2 * j + half) * 32) ^ turn);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    uint2 b = *(const uint2*)(from + i * 8 * X_LINE);
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
