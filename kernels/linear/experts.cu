// GEMM of gathered rows with NVFP4 experts: for each (row, expert) pair of the routing, y[pair, n] = sum over k of x[row, k] w[expert][n,
// k], for f16 x. Pairs are sorted by expert (experts/route.cu). A tile is up to COLUMNS pairs of one expert; experts without rows have
// none.
//
// A block takes a tile and 64 output features, 16 to a warp, and multiplies them along K (linear/main_loop.cuh). In the product with gate
// and up, the 16 features of a warp are eight of gate and the same eight of up, and the result of the GLU is stored; that with up alone
// stores the squared ReLU. Biases are added.
//
// K must be a multiple of 16.
#include "activation/gate.cuh"
#include "common/tiles.cuh"
#include "linear/main_loop.cuh"
#include "linear/matrix.cuh"

enum Projection { GATE, UP, DOWN, PROJECTIONS };

struct Arguments {
    const u16* x;               // f16: for down [pairs, k], else [rows, k]
    const int* sources;         // [pairs]: the row of x; null for down, where the row is the pair
    const ExpertTile* tiles;
    const Matrix* experts;      // [experts, PROJECTIONS]
    void* out;                  // [pairs, n]: f32 for down, else f16
    int n;                      // a multiple of 2
    int k;
    float factor;               // of the product
    float out_scale;            // of activations: keeps them, which may be large, within f16
    Gating gating;
};

// Stages in shared memory. Small tiles need more of them to keep enough loads in flight.
template <int COLUMNS>
constexpr int STAGES = COLUMNS <= 8 ? 6 : COLUMNS <= 16 ? 4 : 3;

// P: GATE for the product with gate and up, or the only projection.
template <int COLUMNS, Projection P>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr bool IS_GLU = P == GATE, IS_FIRST = P != DOWN;
    using Loop = MainLoop<COLUMNS, STAGES<COLUMNS>>;
    constexpr int FEATURES = CHUNK_ROWS * (IS_GLU ? WARPS : LINES);    // of an output row
    extern __shared__ __align__(128) char shared[];
    int steps = ceil_div(a.k, CHUNK_K), first_feature = blockIdx.x * FEATURES;

    // The first product may directly follow the routing, whose tiles it reads. When down starts, the routing has completed.
    if (IS_FIRST) {
        wait_for_earlier_kernels();
        let_later_kernels_start();
    }
    ExpertTile tile = a.tiles[blockIdx.y];
    if (tile.pairs == 0) return;
    const Matrix* expert = a.experts + tile.expert * PROJECTIONS;

    // Beyond the last features, the last ones are repeated; their accumulators are dropped.
    int last_line = ceil_div(a.n, CHUNK_ROWS) - 1;
    Loop loop(shared, steps, [&](int line) {
        const Matrix& w = expert[IS_GLU && line % 2 == 1 ? UP : P];
        line = min(first_feature / CHUNK_ROWS + (IS_GLU ? line / 2 : line), last_line);
        return w.chunks + (size_t)line * steps * CHUNK_BYTES;
    });
    if (!IS_FIRST) {
        loop.load_first_weights();
        wait_for_earlier_kernels();
        let_later_kernels_start();
    }

    const u16* x[Loop::ROW_COPIES];
#pragma unroll
    for (int i = 0; i < Loop::ROW_COPIES; i++) {
        int pair = tile.first + min(first_copied_row() + i * ROW_STEP, tile.pairs - 1);
        x[i] = a.x + (size_t)(a.sources ? a.sources[pair] : pair) * a.k + copied_piece() * 8;
    }
    float c[Loop::TILES][4] = {};
    loop.multiply(a.x, tile.pairs, a.k, [&](int i) { return x[i]; }, c);

    int warp = threadIdx.x / WARP, g = lane_id() / 4, t = lane_id() % 4;
    const Matrix &low = expert[P], &high = expert[IS_GLU ? UP : P];
    float low_factor = low.global * a.factor * PACKED_FACTOR, high_factor = high.global * a.factor * PACKED_FACTOR;
    int feature = first_feature + warp * (IS_GLU ? CHUNK_ROWS : 2 * CHUNK_ROWS) + g, high_feature = feature + (IS_GLU ? 0 : CHUNK_ROWS);
    float low_bias = low.bias && feature < a.n ? low.bias[feature] : 0, high_bias = high.bias && high_feature < a.n ? high.bias[high_feature] : 0;
#pragma unroll
    for (int i = 0; i < Loop::TILES; i++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int m = 8 * i + 2 * t + e;
            if (m >= tile.pairs) continue;
            size_t at = (size_t)(tile.first + m) * a.n + feature;
            float x = c[i][e] * low_factor + low_bias, y = c[i][e + 2] * high_factor + high_bias;
            if (IS_GLU) {
                if (feature < a.n) ((u16*)a.out)[at] = to_f16(gated_unit(a.gating, x, y) * a.out_scale);
            } else if (P == UP) {
                if (feature < a.n) ((u16*)a.out)[at] = to_f16(relu_squared(x) * a.out_scale);
                if (feature + CHUNK_ROWS < a.n) ((u16*)a.out)[at + CHUNK_ROWS] = to_f16(relu_squared(y) * a.out_scale);
            } else {
                if (feature < a.n) ((float*)a.out)[at] = x;
                if (feature + CHUNK_ROWS < a.n) ((float*)a.out)[at + CHUNK_ROWS] = y;
            }
        }
    }
}

#define KERNEL(NAME, COLUMNS, P) \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) NAME##_##COLUMNS(const __grid_constant__ Arguments a) { run<COLUMNS, P>(a); }
#define KERNELS(COLUMNS)                        \
    KERNEL(linear_experts_glu, COLUMNS, GATE)   \
    KERNEL(linear_experts_relu2, COLUMNS, UP)   \
    KERNEL(linear_experts, COLUMNS, DOWN)

KERNELS(8)
KERNELS(16)
KERNELS(32)
KERNELS(64)
