// Cached keys and values of one layer: pages of 64 positions. A page is the layer's part of a block of the cache, which lies in an arena:
// keys [kv_heads][64][D] and then values [kv_heads][D][64]. Values are transposed because the product with the probabilities reads them by
// columns. Elements are f16 (u16), or e4m3 codes (u8); then the f32 scales of the keys [kv_heads][64] and of the values [kv_heads][64] follow.
#pragma once
#include "common/ptx.cuh"

constexpr int PAGE = 64;

// Whether each key and each value of a head has a scale.
template <typename E>
constexpr bool HAS_SCALES = sizeof(E) == 1;

struct Pages {
    char* base;         // the layer's page in block 0
    const u32* table;   // [sequences, stride]: block numbers
    u64 block_bytes;    // from a page to that of the next block
    u32* unfit;         // [rows]: 0, then 1 + the first layer with a query, key or value of the row that f16 cannot hold; or null
    int stride;
    int kv_heads;
    u32 layer;
};

// The page of a position.
__device__ __forceinline__ char* page_of(const Pages& p, int sequence, int position) {
    return p.base + p.table[(size_t)sequence * p.stride + position / PAGE] * p.block_bytes;
}
// The key of a head of `dim` elements.
template <typename E = u16>
__device__ __forceinline__ E* keys_of(const Pages& p, int dim, int sequence, int position, int head) {
    return (E*)page_of(p, sequence, position) + ((size_t)head * PAGE + position % PAGE) * dim;
}
// Element 0 of the value at `position`; element d is d * PAGE further on.
template <typename E = u16>
__device__ __forceinline__ E* values_of(const Pages& p, int dim, int sequence, int position, int head) {
    return (E*)page_of(p, sequence, position) + (size_t)(p.kv_heads + head) * dim * PAGE + position % PAGE;
}
// The scale of the key at `position`, in a page of e4m3 codes; that of the value is kv_heads * PAGE further on.
__device__ __forceinline__ float* scales_of(const Pages& p, int dim, int sequence, int position, int head) {
    return (float*)(page_of(p, sequence, position) + (size_t)2 * p.kv_heads * dim * PAGE) + head * PAGE + position % PAGE;
}
template <int D, typename E = u16>
__device__ __forceinline__ E* keys(const Pages& p, int sequence, int position, int head) {
    return keys_of<E>(p, D, sequence, position, head);
}
template <int D, typename E = u16>
__device__ __forceinline__ E* values(const Pages& p, int sequence, int position, int head) {
    return values_of<E>(p, D, sequence, position, head);
}

// Whether a number, rounded to f16, is finite.
__device__ __forceinline__ bool fits_f16(float x) { return fabsf(x) < 65520; }

// Reports a number of a row that does not fit to the host, unless an earlier layer has done so.
__device__ __forceinline__ void note_unfit(const Pages& p, int row, bool is_unfit) {
    if (is_unfit && p.unfit) atomicCAS(p.unfit + row, 0, p.layer + 1);
}

// Position of 16-byte piece `piece` of a row of PIECES in shared memory. Pieces are swizzled by row, so that the same pieces of 8
// neighbouring rows have no bank conflicts. Pieces are exchanged within groups whose size is a power of two.
template <int PIECES>
__device__ __forceinline__ int swizzled_piece(int row, int piece) {
    constexpr int GROUP = 8, REST = PIECES % GROUP, WHOLE = PIECES - REST;
    static_assert((REST & (REST - 1)) == 0, "");
    // Rows that fill the banks once.
    constexpr int ROWS = PIECES < GROUP ? GROUP / PIECES : 1;
    if (WHOLE == 0) return piece ^ row / ROWS % PIECES;
    return piece < WHOLE ? piece ^ row % GROUP : piece ^ row % (REST == 0 ? 1 : REST);
}

// The row in shared memory, and of a product's scores, of a position of a page; and the position of a row of 16. In this order of rows the
// scores of four neighbouring positions are of one lane, which has four codes of those positions' values.
template <typename E>
__device__ __forceinline__ int row_of_position(int position) {
    return HAS_SCALES<E> ? (position & ~15) | (position & 2) << 2 | (position >> 1 & 6) | (position & 1) : position;
}
template <typename E>
__device__ __forceinline__ int position_of_row(int row) {
    return HAS_SCALES<E> ? (row & ~15) | (row & 6) << 1 | (row >> 2 & 2) | (row & 1) : row;
}

// The factor of probabilities that are multiplied by scales of values: f16 holds the product with the largest scale, 65504 / 448, and with
// one that is far smaller.
template <typename E>
constexpr float PROBABILITY_FACTOR = HAS_SCALES<E> ? 256 : 1;

// A score after its soft cap, cap * tanh(score / cap).
__device__ __forceinline__ float capped(float score, float cap) {
    float e = exp2_approx(score * (2.885390082f / cap));  // 2 log2(e)
    return cap - 2 * cap / (e + 1);
}
