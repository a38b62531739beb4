// Cached keys and values: pages of 64 positions. A page holds, for each layer, keys [kv_heads][64][D] and then values
// [kv_heads][D][64], both f16: a column of values lies together, as the product with the probabilities reads it.
#pragma once
#include "common/types.cuh"

constexpr int PAGE = 64;

struct Pages {
    const u64* table;   // [sequences, stride]: addresses of pages
    int stride;
    int kv_heads;
    u64 layer_offset;   // bytes into a page
};

template <int D>
__device__ __forceinline__ u16* keys(const Pages& p, int sequence, int position, int head) {
    u64 page = p.table[(size_t)sequence * p.stride + position / PAGE] + p.layer_offset;
    return (u16*)page + ((size_t)head * PAGE + position % PAGE) * D;
}
// The column of element 0 at `position`; element d stands d * PAGE further on.
template <int D>
__device__ __forceinline__ u16* values(const Pages& p, int sequence, int position, int head) {
    u64 page = p.table[(size_t)sequence * p.stride + position / PAGE] + p.layer_offset;
    return (u16*)page + (size_t)(p.kv_heads + head) * D * PAGE + position % PAGE;
}
