// The start of a gated-delta-net layer: a causal convolution of each channel with SiLU, the L2 norms of queries and keys, and the gates.
// A warp takes a head of queries or keys, or as many channels of values, or the gates of 32 heads, in a tile of rows of one segment.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "recurrent/layer.cuh"
#include "norm/piece.cuh"

struct Arguments {
    const float* x;         // [rows, channels], rows x_stride apart
    const float* a;         // [rows, value_heads], rows a_stride apart
    const float* b;         // [rows, value_heads], rows b_stride apart
    u64 x_stride;
    u64 a_stride;
    u64 b_stride;
    const float* conv;      // [channels, taps]
    const float* a_log;     // [value_heads]
    const float* dt_bias;   // [value_heads]
    float* qkv;             // [rows, channels]
    float* decay;           // [rows, value_heads]: the factor of S, exp(-exp(a_log) softplus(a + dt_bias))
    float* beta;            // [rows, value_heads]: sigmoid(b)
    Segments segments;
    States inputs;          // the inputs of the last positions
    int taps;
    int key_heads;
    int key_dim;
    int value_heads;
    int channels;
};

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int MOST_TAPS = 4, BEFORE = MOST_TAPS - 1;
// Rows of a tile. The first tile of a segment has the rows that depend on the state, so it alone reads and then writes it.
constexpr int TILE_ROWS = 4;
static_assert(TILE_ROWS >= BEFORE, "");
constexpr float NORM_EPS = 1e-6f;

struct Tile {
    int segment, start, end;    // the segment and its rows
    int first;                  // row of the tile

    // Tile i. A segment has tiles from row_starts[s] / TILE_ROWS + s on, which are enough for its rows; those that begin after its last row
    // are empty.
    __device__ __forceinline__ Tile(const Segments& s, int i) {
        int begun = 0;
        for (int from = 0; from < s.count; from += WARP) {
            int j = from + lane_id();
            begun += __popc(__ballot_sync(ALL_LANES, j < s.count && s.row_starts[j] / TILE_ROWS + j <= i));
        }
        segment = begun - 1;
        start = s.row_starts[segment], end = s.row_starts[segment + 1];
        first = start + (i - (start / TILE_ROWS + segment)) * TILE_ROWS;
    }
    __device__ __forceinline__ bool is_first() const { return first == start; }
    __device__ __forceinline__ bool is_empty() const { return first >= end && !is_first(); }
};

__device__ __forceinline__ void add_product(float4& sum, float4 x, float4 y) {
    sum.x += x.x * y.x, sum.y += x.y * y.y, sum.z += x.z * y.z, sum.w += x.w * y.w;
}

// The weights of four channels, by tap. The last tap, which is the row's own, is always MOST_TAPS - 1.
__device__ __forceinline__ void load_weights(const float* conv, int taps, float4 (&w)[MOST_TAPS]) {
    if (taps == MOST_TAPS) {
        const float4* c = (const float4*)conv;
        float4 x = c[0], y = c[1], z = c[2], t = c[3];
        w[0] = make_float4(x.x, y.x, z.x, t.x), w[1] = make_float4(x.y, y.y, z.y, t.y);
        w[2] = make_float4(x.z, y.z, z.z, t.z), w[3] = make_float4(x.w, y.w, z.w, t.w);
        return;
    }
#pragma unroll
    for (int j = 1; j < MOST_TAPS; j++) {
        int i = j - (MOST_TAPS - taps);
        if (i >= 0) w[j] = make_float4(conv[i], conv[taps + i], conv[2 * taps + i], conv[3 * taps + i]);
    }
}

// PIECES: pieces of four channels that a lane takes, 128 channels apart.
template <int PIECES>
struct Channels {
    static constexpr int SPAN = PIECES * WARP * 4;

    int first, width;       // channels of the warp
    bool has[PIECES];
    float4 w[PIECES][MOST_TAPS];
    float4 x[BEFORE + TILE_ROWS][PIECES];   // inputs of the positions before the tile, and of its rows

    __device__ __forceinline__ static int at(int piece) { return 4 * (lane_id() + WARP * piece); }

    __device__ __forceinline__ Channels(const Arguments& a, int first, int width) : first(first), width(width) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            has[p] = at(p) < width;
            if (has[p]) load_weights(a.conv + (size_t)(first + at(p)) * a.taps, a.taps, w[p]);
        }
    }
    __device__ __forceinline__ const float4* input(const Arguments& a, int row, int piece) const {
        return (const float4*)(a.x + row * a.x_stride + first + at(piece));
    }
    // The address of input i of the last BEFORE ones in a block; those that the layer does not need have none.
    __device__ __forceinline__ float4* kept(const Arguments& a, u32 block, int i, int piece) const {
        return (float4*)(a.inputs.at(block) + (size_t)(i - (MOST_TAPS - a.taps)) * a.channels + first + at(piece));
    }
    __device__ __forceinline__ void load(const Arguments& a, const Tile& tile) {
        u32 block = a.segments.read[tile.segment];
#pragma unroll
        for (int i = 0; i < BEFORE + TILE_ROWS; i++) {
            int row = tile.first - BEFORE + i;
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                x[i][p] = make_float4(0, 0, 0, 0);
                if (!has[p] || row >= tile.end) continue;
                if (row >= tile.start) x[i][p] = *input(a, row, p);
                else if (block != 0 && i >= MOST_TAPS - a.taps) x[i][p] = *kept(a, block, i, p);
            }
        }
    }
    // Row i of the tile, multiplied by `scale` and by the inverse of its norm if `norms`.
    __device__ __forceinline__ void convolve(const Arguments& a, const Tile& tile, int i, bool norms, float scale) const {
        float4 y[PIECES];
        float sum = 0;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            y[p] = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < MOST_TAPS; j++) {
                if (has[p] && j >= MOST_TAPS - a.taps) add_product(y[p], w[p][j], x[i + j][p]);
            }
            y[p] = make_float4(silu(y[p].x), silu(y[p].y), silu(y[p].z), silu(y[p].w));
            sum += square_sum(y[p]);
        }
        float factor = norms ? rsqrtf(warp_sum(sum) + NORM_EPS) * scale : 1;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            float4* to = (float4*)(a.qkv + (size_t)(tile.first + i) * a.channels + first + at(p));
            if (has[p]) *to = make_float4(y[p].x * factor, y[p].y * factor, y[p].z * factor, y[p].w * factor);
        }
    }
    // Writes the last inputs of the segment. A lane has read those of its channels before.
    __device__ __forceinline__ void keep(const Arguments& a, const Tile& tile) const {
        u32 block = a.segments.write[tile.segment];
        int rows = tile.end - tile.start;
#pragma unroll
        for (int i = 0; i < BEFORE; i++) {
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                if (!has[p] || i < MOST_TAPS - a.taps) continue;
                float4 v = x[i][p];
#pragma unroll
                for (int n = 1; n <= TILE_ROWS; n++) {
                    if (rows == n) v = x[i + n][p];
                }
                if (rows > TILE_ROWS) v = *input(a, tile.end - BEFORE + i, p);
                *kept(a, block, i, p) = v;
            }
        }
    }
};

__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Grid: (ceil(units / WARPS), rows / TILE_ROWS + segments), where a warp takes a unit.
template <int PIECES>
__device__ __forceinline__ void run(const Arguments& a) {
    Tile tile(a.segments, blockIdx.y);
    if (tile.is_empty()) return;
    constexpr int SPAN = Channels<PIECES>::SPAN;
    int unit = blockIdx.x * WARPS + threadIdx.x / WARP;
    int norms = 2 * a.key_heads, values = norms * a.key_dim, spans = ceil_div(a.channels - values, SPAN);
    if (unit < norms + spans) {
        bool is_value = unit >= norms;
        int first = is_value ? values + (unit - norms) * SPAN : unit * a.key_dim;
        Channels<PIECES> channels(a, first, is_value ? min(SPAN, a.channels - first) : a.key_dim);
        float scale = unit < a.key_heads ? rsqrtf(a.key_dim) : 1;
        wait_for_earlier_kernels();
        let_later_kernels_start();
        channels.load(a, tile);
#pragma unroll
        for (int i = 0; i < TILE_ROWS; i++) {
            if (tile.first + i < tile.end) channels.convolve(a, tile, i, !is_value, scale);
        }
        if (tile.is_first()) channels.keep(a, tile);
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
