// The start of a gated-delta-net layer: a causal convolution of each channel with SiLU, the L2 norms of queries and keys, and the gates.
// A warp takes a head of queries or keys, or as many channels of values, or the gates of 32 heads, in a tile of rows of one segment.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "norm/piece.cuh"
#include "recurrent/convolution.cuh"

struct Arguments {
    Convolution conv;       // of the query heads, the key heads and the value heads, in this order
    const float* a;         // [rows, value_heads], rows a_stride apart
    const float* b;         // [rows, value_heads], rows b_stride apart
    u64 a_stride;
    u64 b_stride;
    const float* a_log;     // [value_heads]
    const float* dt_bias;   // [value_heads]
    float* decay;           // [rows, value_heads]: the factor of S, exp(-exp(a_log) softplus(a + dt_bias))
    float* beta;            // [rows, value_heads]: sigmoid(b)
    int key_heads;
    int key_dim;
    int value_heads;
};

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr float NORM_EPS = 1e-6f;

// Grid: (ceil(units / WARPS), rows / TILE_ROWS + segments), where a warp takes a unit.
template <int PIECES>
__device__ __forceinline__ void run(const Arguments& a) {
    const Convolution& c = a.conv;
    Tile tile(c.segments, blockIdx.y);
    if (tile.is_empty()) return;
    constexpr int SPAN = Channels<PIECES>::SPAN;
    int unit = blockIdx.x * WARPS + threadIdx.x / WARP;
    int norms = 2 * a.key_heads, values = norms * a.key_dim, spans = ceil_div(c.channels - values, SPAN);
    if (unit < norms + spans) {
        bool is_value = unit >= norms;
        int first = is_value ? values + (unit - norms) * SPAN : unit * a.key_dim;
        Channels<PIECES> channels(c, first, is_value ? min(SPAN, c.channels - first) : a.key_dim);
        float scale = unit < a.key_heads ? rsqrtf(a.key_dim) : 1;
        wait_for_earlier_kernels();
        let_later_kernels_start();
        channels.load(c, tile);
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) {
            if (tile.first + i >= tile.end) continue;
            float4 y[PIECES];
            channels.convolve(c, i, y);
            float sum = 0;
#pragma unroll
            for (int p = 0; p < PIECES; p++) sum += square_sum(y[p]);
            channels.store(c, tile, i, y, is_value ? 1 : rsqrtf(warp_sum(sum) + NORM_EPS) * scale);
        }
        if (tile.is_first()) channels.keep(c, tile);
        return;
    }
    int head = (unit - norms - spans) * WARP + lane_id();
    bool has = head < a.value_heads;
    float rate = has ? expf(a.a_log[head]) : 0, bias = has ? a.dt_bias[head] : 0;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (!has) return;
    for (int row = tile.first; row < min(tile.first + TILE_ROWS, tile.end); row++) {
        size_t to = (size_t)row * a.value_heads + head;
        a.decay[to] = expf(-rate * softplus(a.a[row * a.a_stride + head] + bias));
        a.beta[to] = sigmoid(a.b[row * a.b_stride + head]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) delta_conv(const __grid_constant__ Arguments a) { run<1>(a); }
// For key heads of more than 128 elements.
extern "C" __global__ void __launch_bounds__(THREADS) delta_conv_wide(const __grid_constant__ Arguments a) { run<2>(a); }
