// Products of some rows with NVFP4 weights on Hopper: y[m, n] = sum over k of x[m, k] w[n, k], for x in the order of
// format/fragment_major.cuh. As linear/tiled.cu, with the products of warpgroups, and tiles so wide that activations are read from the
// second-level cache a third as often.
//
// A block takes 192 output features, 16 to a warp, and up to COLUMNS rows of activations, and goes along K a chunk of
// format/packed.cuh at a time. Weights are the A operand, decoded once for all rows; a warp brings its own through a ring, which it
// begins to fill before the kernel waits for the one before it. Activations are the B operand; one more warp brings them, as far
// ahead as there is room.
//
// Where that makes too few blocks, the blocks of a cluster share a tile, each with a range of K. In the end each adds up what all
// of them have of a part of the tile, in order. K must be a multiple of 16.
#include "common/cluster.cuh"
#include "common/ring.cuh"
#include "common/wgmma.cuh"
#include "linear/tile.cuh"

constexpr int GROUPS = 3;
constexpr int WARPS = GROUPS * WARPGROUP / WARP;    // that multiply
constexpr int THREADS = (WARPS + 1) * WARP;
constexpr int FEATURES = WARPS * 16;
constexpr int PAIR_FEATURES = FEATURES / 2;
static_assert(PAIR_FEATURES == GROUPS * 2 * BLOCK, "a warpgroup has a pair of blocks of gate and of up");
constexpr int STAGES = 3;                           // of a warp's ring
constexpr int MOST_PARTS = 8;
using Ring = WarpRing<STAGES, CHUNK_BYTES>;

// Stages of activations in shared memory, a chunk of all rows in each, and two barriers for each of them: that it is full, and that
// it is empty again.
template <int COLUMNS>
struct Stages {
    static constexpr int COUNT = COLUMNS <= 64 ? 4 : 3, STAGE_BYTES = COLUMNS / GROUP_ROWS * GROUP_BYTES, BYTES = COUNT * (STAGE_BYTES + 16);
    u32 base;

    __device__ __forceinline__ u32 data(int step) const { return base + step % COUNT * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(int step) const { return base + COUNT * STAGE_BYTES + step % COUNT * 16; }
    __device__ __forceinline__ u32 empty(int step) const { return full(step) + 8; }
    static __device__ __forceinline__ u32 phase(int step) { return step / COUNT % 2; }

    __device__ __forceinline__ void init() const {
        for (int i = 0; i < COUNT; i++) {
            barrier_init(full(i), 1);
            barrier_init(empty(i), WARPS);
        }
        publish_barriers();
    }
    // Brings chunks that are so far apart; one thread calls this.
    __device__ __forceinline__ void bring(const u8* from, size_t distance, int bytes, int steps) const {
        for (int step = 0; step < steps; step++) {
            if (step >= COUNT) barrier_wait(empty(step), phase(step - COUNT));
            barrier_expect(full(step), bytes);
            copy_bulk(data(step), from + step * distance, bytes, full(step));
        }
    }
};

// Puts away what a warpgroup has of gate and up as fragment_major results. Their features are a pair of blocks, of which groups of rows are
// contiguous: they go out whole, by way of shared memory.
template <int TILES>
__device__ __forceinline__ void store_pair(const Arguments& a, char* shared, int first_feature, int first_row, const float (&c)[TILES][4]) {
    constexpr int PAIR_BYTES = 4 * FRAGMENT_BYTES, PIECES = PAIR_BYTES / 16;
    static_assert(TILES * PAIR_BYTES <= 4 * Ring::BYTES, "pairs take the place of the warps' rings");
    int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, groups = ceil_div(a.m, GROUP_ROWS);
    auto together = [] { barrier(1 + threadIdx.x / WARPGROUP, WARPGROUP); };
    together();
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        put_away_glu(a, first_feature + warp * 8, 0, c[i], [&](int m, int feature, u16 value) {
            ((u16*)(shared + i * PAIR_BYTES))[fragment_index(1, m, feature - first_feature)] = value;
        });
    }
    together();
    if (first_feature >= padded_k(a.matrix[0].rows)) return;
    for (int i = thread; i < TILES * PIECES; i += WARPGROUP) {
        int row = first_row + i / PIECES * GROUP_ROWS;
        if (row < a.m) ((uint4*)((u16*)a.out + fragment_index(groups, row, first_feature)))[i % PIECES] = ((const uint4*)shared)[i];
    }
}

// PAIR: the sixteen features of a warp are eight of gate and the same eight of up.
template <int COLUMNS, bool PAIR>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int TILES = COLUMNS / 8;
    using X = Stages<COLUMNS>;
    extern __shared__ __align__(128) char shared[];
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = lane_id(), g = lane / 4;
    int chunks = ceil_div(a.k, CHUNK_K), part = blockIdx.z;
    int begin = chunks * part / a.parts, steps = chunks * (part + 1) / a.parts - begin;
    int first_row = blockIdx.y * COLUMNS, groups = ceil_div(a.m, GROUP_ROWS);

    TilePlace<FEATURES> tile(a, PAIR ? 0 : blockIdx.x);
    const Matrix& w = *tile.matrix;
    int tile_feature = PAIR ? blockIdx.x * PAIR_FEATURES : tile.first_feature;
    auto first_feature = [&](int warp) { return tile_feature + warp * (PAIR ? 8 : 16); };
    X x{shared_address(shared)};
    char* rings = shared + X::BYTES;
    if (threadIdx.x == 0) x.init();
    float c[TILES][4] = {};

    if (warp == WARPS) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
        __syncthreads();
        int first_group = first_row / GROUP_ROWS, some = min(groups - first_group, TILES);
        const u8* from = (const u8*)a.x + ((size_t)begin * groups + first_group) * GROUP_BYTES;
        if (lane == 0) x.bring(from, (size_t)groups * GROUP_BYTES, some * GROUP_BYTES, steps);
        __syncwarp();
    } else {
        // Features past the end repeat the last; their sums are dropped.
        int last_line = ceil_div(w.rows, CHUNK_ROWS) - 1;
        auto line = [&](int i) {
            const u8* from = PAIR ? a.matrix[i].chunks : w.chunks;
            return from + ((size_t)min(first_feature(warp) / CHUNK_ROWS + (PAIR ? 0 : i), last_line) * chunks + begin) * CHUNK_BYTES;
        };
        const u8* low = line(0) + lane * 16;
        long long to_high = Ring::to_second(line(0), line(1));
        Ring ring(rings + warp * Ring::BYTES);
        auto load = [&](int step) {
            if (step < steps) {
                ring.fill(Ring::offset(step % STAGES), low + step * CHUNK_BYTES, to_high);
            } else {
                ring.skip();
            }
        };
        // Weights depend on no earlier kernel.
#pragma unroll
        for (int i = 0; i < STAGES; i++) load(i);
        wait_for_earlier_kernels();
        let_later_kernels_start();
        __syncthreads();

        for (int step = 0; step < steps; step++) {
            ring.wait();
            u32 stage = ring.base + Ring::offset(step % STAGES);
            uint4 low_codes = load_shared_16(stage + lane * 16), high_codes = load_shared_16(stage + CHUNK_BYTES + lane * 16);
            uint2 low_scales = load_shared_8(stage + CHUNK_CODES + g * CHUNK_BLOCKS);
            uint2 high_scales = load_shared_8(stage + CHUNK_BYTES + CHUNK_CODES + g * CHUNK_BLOCKS);
            __syncwarp();
            load(step + STAGES);
            u32 words_low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
            u32 words_high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
            u32 u[4][4], v[4][4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                decode_packed(words_low[j], low_scales, j, u[j]);
                decode_packed(words_high[j], high_scales, j, v[j]);
                if (j == 0) {
                    // Products of a step go on while the next one begins.
                    wgmma_wait<0>();
                    if (step > 0 && lane == 0) barrier_arrive(x.empty(step - 1));
                    barrier_wait(x.full(step), X::phase(step));
                }
                auto b = [&](int i) { return wgmma_descriptor<FRAGMENT_BYTES, GROUP_BYTES>(x.data(step) + (4 * j + i) * FRAGMENT_BYTES); };
                wgmma_fence();
                wgmma_f16(c, u[j][0], v[j][0], u[j][1], v[j][1], b(0));
                wgmma_f16(c, u[j][2], v[j][2], u[j][3], v[j][3], b(2));
                wgmma_commit();
            }
        }
        wgmma_wait<0>();
        wgmma_fence_accumulators(c);
    }

    auto put = [&](int warp, int i, const float (&sums)[4]) {
        if (PAIR) {
            put_away_glu(a, first_feature(warp), first_row + 8 * i, sums, [&](int m, int feature, u16 value) {
                bool fragment_major = a.output == STORE_FRAGMENT_MAJOR;
                if (m >= a.m || feature >= (fragment_major ? padded_k(w.rows) : w.rows)) return;
                ((u16*)a.out)[fragment_major ? fragment_index(groups, m, feature) : (size_t)m * a.out_stride + feature] = value;
            });
        } else {
            put_away(a, w, tile.column, first_feature(warp), first_row + 8 * i, sums);
        }
    };
    if (PAIR && a.parts == 1 && a.output == STORE_FRAGMENT_MAJOR) {
        if (warp < WARPS) store_pair<TILES>(a, rings + warp / 4 * (4 * Ring::BYTES), tile_feature + warp / 4 * (2 * BLOCK), first_row, c);
        return;
    }
    if (a.parts == 1) {
        if (warp == WARPS) return;
#pragma unroll
        for (int i = 0; i < TILES; i++) put(warp, i, c[i]);
        return;
    }
    // What blocks have stands where activations were: by warps, groups of rows, and lanes.
    static_assert(WARPS * TILES * WARP * 16 <= X::COUNT * X::STAGE_BYTES, "sums take the place of activations");
    __syncthreads();
    if (warp < WARPS) {
#pragma unroll
        for (int i = 0; i < TILES; i++) ((float4*)shared)[(warp * TILES + i) * WARP + lane] = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
    }
    __syncwarp();
    cluster_sync();
    int end = WARPS * TILES * (part + 1) / a.parts, i = WARPS * TILES * part / a.parts + warp;
    bool last;
    do {
        float sums[4] = {};
        u32 own = x.base + (i * WARP + lane) * 16;
        if (i < end) {
#pragma unroll
            for (int p = 0; p < MOST_PARTS; p++) {
                if (p >= a.parts) break;
                float4 s = load_cluster_16(own, p);
                sums[0] += s.x, sums[1] += s.y, sums[2] += s.z, sums[3] += s.w;
            }
            // Nobody reads this, but loads from other blocks have ended when it is written.
            store_shared_16(own, make_uint4(__float_as_uint(sums[0]), __float_as_uint(sums[1]), __float_as_uint(sums[2]), __float_as_uint(sums[3])));
        }
        last = i + THREADS / WARP >= end;
        __syncwarp();
        // Other blocks may end when no warp reads their memory any more. That is no release, which would wait for all that was written.
        if (last) cluster_arrive();
        if (i < end) put(i / TILES, i % TILES, sums);
        i += THREADS / WARP;
    } while (!last);
    __syncwarp();
    cluster_wait();
}

#define KERNEL(COLUMNS)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_wide_##COLUMNS(const __grid_constant__ Arguments a) {    \
        run<COLUMNS, false>(a);                                                                                              \
    }                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) linear_wide_glu_##COLUMNS(const __grid_constant__ Arguments a) { \
        run<COLUMNS, true>(a);                                                                                               \
    }

KERNEL(8)
KERNEL(16)
KERNEL(32)
KERNEL(64)
KERNEL(128)
