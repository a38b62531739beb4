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

// 32 random bits of the stream `key`, for what is drawn anew for every weight in every step. Mirrors bits32().
__device__ __forceinline__ u32 random_bits32(u64 key, u32 counter) {
    u32 x = counter * (u32)(GOLDEN | 1) + (u32)key;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = ((x ^ x >> 15) + (u32)(key >> 32)) * 0x735a2d97u;
    return x ^ x >> 15;
}
