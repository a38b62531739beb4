// Counter-based random bits: a pure function of a seed and a counter. Mirrors src/format/random.rs.
#pragma once
#include "common/types.cuh"

constexpr u64 GOLDEN = 0x9e3779b97f4a7c15ull;

__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
// The stream of a seed, which all its counters share.
__device__ __forceinline__ u64 random_stream(u64 seed) { return mix(seed + GOLDEN); }
__device__ __forceinline__ u64 random_bits(u64 stream, u64 counter) { return mix(stream + (counter + 1) * GOLDEN); }

// 64 random bits of the stream `key`, for draws per weight and step. Mirrors words().
__device__ __forceinline__ uint2 random_words(u64 key, u32 counter) {
    u32 x = counter, y = (u32)(key >> 32);
#pragma unroll
    for (u32 round = 0; round < 4; round++) {
        // A single 64-bit product would need another addition for the upper half.
        u32 low = x * 0xd256d193u, high = __umulhi(x, 0xd256d193u);
        x = high ^ y ^ ((u32)key + (u32)(GOLDEN >> 32) * round);
        y = low;
    }
    return make_uint2(x, y);
}
// Mirrors bits16().
__device__ __forceinline__ u32 random_bits16(u64 key, u32 index) {
    uint2 words = random_words(key, index / 4);
    return (index & 2 ? words.y : words.x) >> (16 * (index % 2)) & 0xffff;
}
