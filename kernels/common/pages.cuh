// Cached keys and values of one layer: pages of 64 positions. A page is the layer's part of a block of the cache, which lies in an arena:
// keys [kv_heads][64][D] and then values [kv_heads][D][64], both f16. Values are transposed because the product with the probabilities
// reads them by columns.
#pragma once
#include "common/ptx.cuh"

constexpr int PAGE = 64;

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
__device__ __forceinline__ u16* page_of(const Pages& p, int sequence, int position) {
    return (u16*)(p.base + p.table[(size_t)sequence * p.stride + position / PAGE] * p.block_bytes);
}
// The key of a head of `dim` elements.
__device__ __forceinline__ u16* keys_of(const Pages& p, int dim, int sequence, int position, int head) {
    return page_of(p, sequence, position) + ((size_t)head * PAGE + position % PAGE) * dim;
}
// Element 0 of the value at `position`; element d is d * PAGE further on.
__device__ __forceinline__ u16* values_of(const Pages& p, int dim, int sequence, int position, int head) {
    return page_of(p, sequence, position) + (size_t)(p.kv_heads + head) * dim * PAGE + position % PAGE;
}
template <int D>
__device__ __forceinline__ u16* keys(const Pages& p, int sequence, int position, int head) {
    return keys_of(p, D, sequence, position, head);
}
template <int D>
__device__ __forceinline__ u16* values(const Pages& p, int sequence, int position, int head) {
    return values_of(p, D, sequence, position, head);
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
    return piece < WHOLE ? piece ^ row % GROUP : piece ^ row % (REST == 0 ? 1 : REST);
}

// A score after its soft cap, cap * tanh(score / cap).
__device__ __forceinline__ float capped(float score, float cap) {
    float e = exp2_approx(score * (2.885390082f / cap));  // 2 log2(e)
    return cap - 2 * cap / (e + 1);
}
