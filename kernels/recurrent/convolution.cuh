// The causal convolution of each channel with SiLU, in which recurrent layers begin. A warp takes some channels of a tile of rows of one
// segment.
#pragma once
#include "recurrent/layer.cuh"

struct Convolution {
    const float* x;         // [rows, channels], rows x_stride apart
    u64 x_stride;
    const float* weights;   // [channels, taps]
    const float* bias;      // [channels], or null
    float* y;               // [rows, channels]
    Segments segments;
    States inputs;          // the inputs of the last positions
    int taps;
    int channels;           // a multiple of 4
};

constexpr int MOST_TAPS = 4, BEFORE = MOST_TAPS - 1;
// Rows of a tile. The first tile of a sequence has the rows that depend on the state, so it alone reads it. That of a segment writes it.
constexpr int TILE_ROWS = 4;
static_assert(TILE_ROWS >= BEFORE, "");

struct Tile {
    int segment, start, end;    // the segment and its rows
    int first;                  // row of the tile
    int begin;                  // the first row of the sequence
    u32 before;                 // the block with the state before it

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
        int sequence = s.first_of(segment);
        begin = s.row_starts[sequence], before = s.read[sequence];
    }
    __device__ __forceinline__ bool is_first() const { return first == start; }
    __device__ __forceinline__ bool is_empty() const { return first >= end && !is_first(); }
};

__device__ __forceinline__ void add_product(float4& sum, float4 x, float4 y) {
    sum.x += x.x * y.x, sum.y += x.y * y.y, sum.z += x.z * y.z, sum.w += x.w * y.w;
}

// The weights of four channels, by tap. The last tap, which is the row's own, is always MOST_TAPS - 1.
__device__ __forceinline__ void load_weights(const float* weights, int taps, float4 (&w)[MOST_TAPS]) {
    if (taps == MOST_TAPS) {
        const float4* v = (const float4*)weights;
        float4 x = v[0], y = v[1], z = v[2], t = v[3];
        w[0] = make_float4(x.x, y.x, z.x, t.x), w[1] = make_float4(x.y, y.y, z.y, t.y);
        w[2] = make_float4(x.z, y.z, z.z, t.z), w[3] = make_float4(x.w, y.w, z.w, t.w);
        return;
    }
#pragma unroll
    for (int j = 1; j < MOST_TAPS; j++) {
        int i = j - (MOST_TAPS - taps);
        if (i >= 0) w[j] = make_float4(weights[i], weights[taps + i], weights[2 * taps + i], weights[3 * taps + i]);
    }
}

// PIECES: pieces of four channels that a lane takes, 128 channels apart.
template <int PIECES>
struct Channels {
    static constexpr int SPAN = PIECES * WARP * 4;

    int first, width;       // channels of the warp
    bool has[PIECES];
    float4 w[PIECES][MOST_TAPS], bias[PIECES];
    float4 x[BEFORE + TILE_ROWS][PIECES];   // inputs of the positions before the tile, and of its rows

    __device__ __forceinline__ static int at(int piece) { return 4 * (lane_id() + WARP * piece); }

    __device__ __forceinline__ Channels(const Convolution& c, int first, int width) : first(first), width(width) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            has[p] = at(p) < width;
            if (has[p]) load_weights(c.weights + (size_t)(first + at(p)) * c.taps, c.taps, w[p]);
            bias[p] = has[p] && c.bias ? *(const float4*)(c.bias + first + at(p)) : make_float4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ const float4* input(const Convolution& c, int row, int piece) const {
        return (const float4*)(c.x + row * c.x_stride + first + at(piece));
    }
    // The address of input i of the last BEFORE ones in a block; those that the layer does not need have none.
    __device__ __forceinline__ float4* kept(const Convolution& c, u32 block, int i, int piece) const {
        return (float4*)(c.inputs.at(block) + (size_t)(i - (MOST_TAPS - c.taps)) * c.channels + first + at(piece));
    }
    __device__ __forceinline__ void load(const Convolution& c, const Tile& tile) {
#pragma unroll
        for (int i = 0; i < BEFORE + TILE_ROWS; i++) {
            int row = tile.first - BEFORE + i, of_kept = row - tile.begin + BEFORE;
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                x[i][p] = make_float4(0, 0, 0, 0);
                if (!has[p] || row >= tile.end) continue;
                if (row >= tile.begin) x[i][p] = *input(c, row, p);
                else if (tile.before != 0 && of_kept >= MOST_TAPS - c.taps) x[i][p] = *kept(c, tile.before, of_kept, p);
            }
        }
    }
    // Row i of the tile after SiLU; zeros in pieces that the warp lacks.
    __device__ __forceinline__ void convolve(const Convolution& c, int i, float4 (&y)[PIECES]) const {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            y[p] = bias[p];
#pragma unroll
            for (int j = 0; j < MOST_TAPS; j++) {
                if (has[p] && j >= MOST_TAPS - c.taps) add_product(y[p], w[p][j], x[i + j][p]);
            }
            y[p] = make_float4(silu(y[p].x), silu(y[p].y), silu(y[p].z), silu(y[p].w));
        }
    }
    // Stores row i of the tile, multiplied by a factor.
    __device__ __forceinline__ void store(const Convolution& c, const Tile& tile, int i, const float4 (&y)[PIECES], float factor) const {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            float4* to = (float4*)(c.y + (size_t)(tile.first + i) * c.channels + first + at(p));
            if (has[p]) *to = make_float4(y[p].x * factor, y[p].y * factor, y[p].z * factor, y[p].w * factor);
        }
    }
    // Writes the last inputs of the segment. A lane has read those of its channels before.
    __device__ __forceinline__ void keep(const Convolution& c, const Tile& tile) const {
        u32 block = c.segments.write[tile.segment];
        int rows = tile.end - tile.start;
#pragma unroll
        for (int i = 0; i < BEFORE; i++) {
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
                if (!has[p] || i < MOST_TAPS - c.taps) continue;
                float4 v = x[i][p];
#pragma unroll
                for (int n = 1; n <= TILE_ROWS; n++) {
                    if (rows == n) v = x[i + n][p];
                }
                if (rows > TILE_ROWS) v = *input(c, tile.end - BEFORE + i, p);
                *kept(c, block, i, p) = v;
            }
        }
    }
};
