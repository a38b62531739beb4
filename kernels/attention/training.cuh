// Attention of training. Rows [T, (heads + 2 kv_heads) D] of bf16 hold normalized and rotated queries, keys and values of consecutive
// documents. A query sees the rows of its document up to its own, or the last `window` of them.
//
// Products are m16n8k16 of bf16 with f32 accumulators. Asynchronous copies bring tiles of 64 rows of two arrays to shared memory, two tiles
// in flight. The backward pass recomputes probabilities from each row's log-sum-exp (Dao, arXiv 2307.08691), and they go from one product
// to the next in registers: an accumulator's fragment is the fragment of a left operand.
#pragma once
#include "common/ptx.cuh"
#include "common/reduce.cuh"

struct Arguments {
    const u16* qkv;     // bf16 [T, (heads + 2 kv_heads) D]
    u16* out;           // bf16 [T, heads D]
    float* lse;         // [heads, T]: natural logarithms
    const u16* dout;    // bf16 [T, heads D]
    u16* dqkv;          // as qkv
    float* delta;       // [heads, T]: sums of dout out
    const u32* starts;  // [T]: the first row of each row's document
    const u32* ends;    // [T]: one past its last
    int rows;
    int heads;
    int kv_heads;
    int window;         // 0: none
    float scale;
    float cap;          // 0: none
};

constexpr int TILE = 64;

// The first row that a query sees.
__device__ __forceinline__ int first_seen(const Arguments& a, int row) {
    int first = a.starts[row];
    return a.window ? max(first, row + 1 - a.window) : first;
}
// One past the last query that sees a key.
__device__ __forceinline__ int seen_until(const Arguments& a, int key) {
    int last = a.ends[key];
    return a.window ? min(last, key + a.window) : last;
}

// Sets scores that are not seen to -inf, in the thread's fragments of a warp's 16 rows from `row` on and of columns from `column` on. Here
// rows are queries, and `first` holds the first keys that rows g and g + 8 see.
template <int N>
__device__ __forceinline__ void hide_keys(float (&s)[N][4], int row, int column, const int (&first)[2]) {
    int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int key = column + 8 * n + 2 * t + j % 2;
            if ((key > row + g + j / 2 * 8) | (key < first[j / 2])) s[n][j] = -INFINITY;
        }
    }
}
// As above for rows that are keys; `until` is one past the last queries that see them.
template <int N>
__device__ __forceinline__ void hide_queries(float (&s)[N][4], int row, int column, const int (&until)[2]) {
    int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int query = column + 8 * n + 2 * t + j % 2;
            if ((query < row + g + j / 2 * 8) | (query >= until[j / 2])) s[n][j] = -INFINITY;
        }
    }
}

// Products become scores times log2(e). Gradients of capped scores, if given, become those of the scores before the cap, up to `scale`.
template <int N>
__device__ __forceinline__ void scale_scores(const Arguments& a, float (&s)[N][4], float (*gradients)[4] = nullptr) {
    // Tested once here, and not for every score.
    if (!a.cap) {
        float scale = a.scale * LOG2E;
#pragma unroll
        for (int n = 0; n < N; n++) s[n][0] *= scale, s[n][1] *= scale, s[n][2] *= scale, s[n][3] *= scale;
        return;
    }
    float scale = a.scale / a.cap, cap = a.cap * LOG2E;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float t = tanhf(s[n][j] * scale);
            s[n][j] = cap * t;
            if (gradients) gradients[n][j] *= 1 - t * t;
        }
    }
}

// A tile of TILE rows of D elements in shared memory. The eight rows of a loaded matrix are in different banks: pieces of 16 bytes are
// swizzled by the row's number if a row has 8 or 16 of them; otherwise rows are padded by a piece.
template <int D>
struct SharedTile {
    static constexpr int PIECES = D / 8;
    static constexpr bool EXCHANGED = PIECES >= 8 && (PIECES & (PIECES - 1)) == 0;
    static constexpr int STRIDE = 2 * D + (EXCHANGED ? 0 : 16), BYTES = TILE * STRIDE;
    u32 address;

    __device__ __forceinline__ u32 at(int row, int piece) const { return address + row * STRIDE + (EXCHANGED ? piece ^ (row & 7) : piece) * 16; }

    // Starts to copy rows from `first` on, `stride` elements apart; those past `rows` become zeros.
    template <int THREADS>
    __device__ __forceinline__ void load(const u16* from, int first, int rows, size_t stride) const {
        constexpr int COPIES = TILE * PIECES / THREADS, AT_ONCE = THREADS / PIECES;
        if constexpr (COPIES * THREADS == TILE * PIECES && AT_ONCE * PIECES == THREADS && AT_ONCE % 8 == 0) {
            // A thread copies the same piece of rows whose numbers share the last three bits.
            int row = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
            u32 to = at(row, piece);
            from += (first + row) * stride + piece * 8;
#pragma unroll
            for (int i = 0; i < TILE; i += AT_ONCE) copy_async_16(to + i * STRIDE, from + i * stride, first + row + i < rows ? 16 : 0);
        } else {
            for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
                int row = i / PIECES, piece = i % PIECES;
                copy_async_16(at(row, piece), from + (first + row) * stride + piece * 8, first + row < rows ? 16 : 0);
            }
        }
    }
    // The fragment of a left operand: rows `row` to row + 15, elements k to k + 15.
    __device__ __forceinline__ void left(u32 (&r)[4], int row, int k) const {
        int l = lane_id();
        load_matrices(r, at(row + l % 16, k / 8 + l / 16));
    }
    // Right operands whose columns are the rows here: columns `row` to row + 15, in two fragments, at elements k to k + 15.
    __device__ __forceinline__ void right(u32 (&r)[4], int row, int k) const {
        int l = lane_id();
        load_matrices(r, at(row + l / 16 * 8 + l % 8, k / 8 + l / 8 % 2));
    }
    // Right operands whose rows are the rows here: `row` to row + 15, at columns n to n + 15, in two fragments.
    __device__ __forceinline__ void right_transposed(u32 (&r)[4], int row, int n) const {
        int l = lane_id();
        load_matrices_transposed(r, at(row + l % 16, n / 8 + l / 16));
    }
};

// c[16, 16 N] = rows `row` on of `x` times rows `column` on of `y` transposed.
template <int D, int N>
__device__ __forceinline__ void product(float (&c)[2 * N][4], const SharedTile<D>& x, int row, const SharedTile<D>& y, int column) {
#pragma unroll
    for (int i = 0; i < 2 * N; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        u32 a[4];
        x.left(a, row, k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            u32 b[4];
            y.right(b, column + 16 * n, k);
            mma_bf16(c[2 * n], a, b[0], b[1]);
            mma_bf16(c[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// sum[16, D] += p[16, 16 N] times rows `row` on of `y`.
template <int D, int N>
__device__ __forceinline__ void add_product(float (&sum)[D / 8][4], const float (&p)[2 * N][4], const SharedTile<D>& y, int row) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        u32 a[4] = {pack_bf16(p[2 * k][0], p[2 * k][1]), pack_bf16(p[2 * k][2], p[2 * k][3]), pack_bf16(p[2 * k + 1][0], p[2 * k + 1][1]),
                    pack_bf16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            u32 b[4];
            y.right_transposed(b, row + 16 * k, 16 * n);
            mma_bf16(sum[2 * n], a, b[0], b[1]);
            mma_bf16(sum[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// Stores sixteen rows of sums, each times a factor, as rows of bf16; rows from `rows` on are left out.
template <int D>
__device__ __forceinline__ void store_rows(const float (&sum)[D / 8][4], u16* to, int first, int rows, size_t stride, float low, float high) {
    int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        if (first + g < rows) *(u32*)(to + (first + g) * stride + 8 * n + 2 * t) = pack_bf16(sum[n][0] * low, sum[n][1] * low);
        if (first + g + 8 < rows) *(u32*)(to + (first + g + 8) * stride + 8 * n + 2 * t) = pack_bf16(sum[n][2] * high, sum[n][3] * high);
    }
}
