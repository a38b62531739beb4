// Products of some rows with NVFP4 weights on Hopper: y[m, n] = sum over k of x[m, k] w[n, k], for f16 x. As linear/tiled.cu, with
// the products of warpgroups, and tiles so wide that activations are read from the second-level cache a third as often.
//
// A block takes 192 output features, 16 to a warp, and up to COLUMNS rows of activations, and goes along K a chunk of
// format/packed.cuh at a time. Weights are the A operand, decoded once for all rows; a warp brings its own through a ring, which it
// begins to fill before the kernel waits for the one before it. Activations are the B operand, in the order of K in which weights
// are decoded: element i of both blocks of a pair are neighbours. They pass through registers, which change that order on the
// way, while the step before them is multiplied.
//
// Where that makes too few blocks, several share a tile, each with a range of K; a second kernel adds up their sums in order:
// linear_tiled_sum. K must be a multiple of 16.
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "linear/tile.cuh"

constexpr int GROUPS = 3;
constexpr int THREADS = GROUPS * WARPGROUP;
constexpr int WARPS = THREADS / WARP;
constexpr int FEATURES = WARPS * 16;
constexpr int STAGES = 4;                       // of a warp's ring
constexpr int X_STAGES = 3;
constexpr int STEP_PAIRS = CHUNK_BLOCKS / 2;    // pairs of blocks in a step

// Activations of a step on their way: 16 bytes of each block of a pair, elements 8 s to 8 s + 7, of a row.
template <int COLUMNS>
struct Pieces {
    static constexpr int COUNT = COLUMNS * STEP_PAIRS * 2;
    static constexpr int EACH = ceil_div(COUNT, THREADS);
    // Products of 16 elements of K follow each other; a pair of blocks is two.
    static constexpr int PRODUCT_BYTES = COLUMNS * 16 * 2;
    static constexpr int BYTES = CHUNK_K / 16 * PRODUCT_BYTES;

    uint4 low[EACH], high[EACH];

    // Neighbouring lanes have the two halves of blocks, and then the next rows: they meet in no bank when they store.
    struct Place {
        int half, row, pair;
        __device__ __forceinline__ explicit Place(int i) : half(i % 2), row(i / 2 % 8 + i / (16 * STEP_PAIRS) * 8), pair(i / 16 % STEP_PAIRS) {}
    };

    // Past the end of K and of the rows stand zeros.
    __device__ __forceinline__ void load(const u16* x, int rows, int k, int first_k) {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int i = threadIdx.x + j * THREADS;
            Place p(i);
            int at = first_k + p.pair * 2 * BLOCK + p.half * 8;
            bool there = (COUNT % THREADS == 0 || i < COUNT) && p.row < rows;
            const uint4* from = (const uint4*)(x + (size_t)p.row * k + at);
            low[j] = there && at < k ? from[0] : make_uint4(0, 0, 0, 0);
            high[j] = there && at + BLOCK < k ? from[BLOCK / 8] : make_uint4(0, 0, 0, 0);
        }
    }

    // Element 4 t + i of both blocks, for all t, are 16 bytes of a row: those of i = 0 and 1 in the first product, those of 2 and 3 in
    // the second.
    __device__ __forceinline__ void store(char* stage) const {
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int i = threadIdx.x + j * THREADS;
            if (COUNT % THREADS != 0 && i >= COUNT) break;
            Place p(i);
            char* to = stage + 2 * p.pair * PRODUCT_BYTES + p.row / 8 * 256 + p.row % 8 * 16 + p.half * 8;
            auto put = [&](int e, u32 first_low, u32 first_high, u32 second_low, u32 second_high) {
                u32 select = e % 2 ? 0x7632 : 0x5410;
                *(uint2*)(to + e / 2 * PRODUCT_BYTES + e % 2 * 128) =
                    make_uint2(__byte_perm(first_low, first_high, select), __byte_perm(second_low, second_high, select));
            };
            put(0, low[j].x, high[j].x, low[j].z, high[j].z);
            put(1, low[j].x, high[j].x, low[j].z, high[j].z);
            put(2, low[j].y, high[j].y, low[j].w, high[j].w);
            put(3, low[j].y, high[j].y, low[j].w, high[j].w);
        }
    }
};

// PAIR: the sixteen features of a warp are eight of gate and the same eight of up.
template <int COLUMNS, bool PAIR>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int TILES = COLUMNS / 8;
    // Products of a step go on while the next one begins, where there are registers for both.
    constexpr bool GOES_ON = COLUMNS <= 64;
    using X = Pieces<COLUMNS>;
    using Ring = WarpRing<STAGES, CHUNK_BYTES>;
    extern __shared__ __align__(128) char shared[];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4;
    int chunks = ceil_div(a.k, CHUNK_K), part = blockIdx.z;
    int begin = chunks * part / a.parts, steps = chunks * (part + 1) / a.parts - begin;
    int first_row = blockIdx.y * COLUMNS, rows = min(COLUMNS, a.m - first_row);

    constexpr int OF_MATRIX = PAIR ? FEATURES / 2 : FEATURES;
    TilePlace<OF_MATRIX> tile(a, blockIdx.x);
    const Matrix& w = *tile.matrix;
    // Features past the end repeat the last; their sums are dropped.
    int first_feature = tile.first_feature + warp * (PAIR ? 8 : 16), last_line = ceil_div(w.rows, CHUNK_ROWS) - 1;
    auto line = [&](int i) {
        const u8* from = PAIR ? a.matrix[i].chunks : w.chunks;
        return from + ((size_t)min(first_feature / CHUNK_ROWS + (PAIR ? 0 : i), last_line) * chunks + begin) * CHUNK_BYTES;
    };
    const u8* low = line(0) + lane * 16;
    long long to_high = Ring::to_second(line(0), line(1));
    Ring ring(shared + X_STAGES * X::BYTES + warp * Ring::BYTES);
    auto load = [&](int step) {
        if (step < steps) {
            ring.fill(Ring::offset(step % STAGES), low + step * CHUNK_BYTES, to_high, true);
        } else {
            ring.skip();
        }
    };

    // Weights depend on no earlier kernel.
#pragma unroll
    for (int i = 0; i < STAGES; i++) load(i);
    wait_for_earlier_kernels();
    let_later_kernels_start();

    const u16* x = a.x + (size_t)first_row * a.k;
    X next;
    next.load(x, rows, a.k, begin * CHUNK_K);
    next.store(shared);
    next.load(x, rows, a.k, (begin + 1) * CHUNK_K);
    publish_shared();
    __syncthreads();

    float c[TILES][4] = {};
    for (int step = 0; step < steps; step++) {
        // Everyone has waited for the products that read this stage, those of the step before the last.
        next.store(shared + (step + 1) % X_STAGES * X::BYTES);
        publish_shared();
        next.load(x, rows, a.k, (begin + step + 2) * CHUNK_K);

        ring.wait();
        u32 stage = ring.base + Ring::offset(step % STAGES);
        uint4 low_codes = load_shared_16(stage + lane * 16), high_codes = load_shared_16(stage + CHUNK_BYTES + lane * 16);
        uint2 low_scales = load_shared_8(stage + CHUNK_CODES + g * CHUNK_BLOCKS);
        uint2 high_scales = load_shared_8(stage + CHUNK_BYTES + CHUNK_CODES + g * CHUNK_BLOCKS);
        __syncwarp();
        load(step + STAGES);
        u32 words_low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
        u32 words_high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
        u32 from = shared_address(shared) + step % X_STAGES * X::BYTES;
        u32 u[4][4], v[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            decode_packed(words_low[j], low_scales, j, u[j]);
            decode_packed(words_high[j], high_scales, j, v[j]);
            if (GOES_ON && j == 0) wgmma_wait<0>();
            wgmma_fence();
            wgmma_f16(c, u[j][0], v[j][0], u[j][1], v[j][1], wgmma_operand(from + 2 * j * X::PRODUCT_BYTES));
            wgmma_f16(c, u[j][2], v[j][2], u[j][3], v[j][3], wgmma_operand(from + (2 * j + 1) * X::PRODUCT_BYTES));
            wgmma_commit();
        }
        if (!GOES_ON) wgmma_wait<0>();
        __syncthreads();
    }
    wgmma_wait<0>();
    wgmma_settle(c);
    if (PAIR) {
        put_away_swiglu(a, first_feature, first_row, rows, c);
    } else {
        put_away(a, w, tile.column, first_feature, first_row, rows, part, c);
    }
}

#define KERNEL(COLUMNS)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_wide_##COLUMNS(const __grid_constant__ Arguments a) {    \
        run<COLUMNS, false>(a);                                                                                              \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_wide_swiglu_##COLUMNS(const __grid_constant__ Arguments a) { \
        run<COLUMNS, true>(a);                                                                                               \
    }

KERNEL(8)
KERNEL(16)
KERNEL(32)
KERNEL(64)
KERNEL(128)
