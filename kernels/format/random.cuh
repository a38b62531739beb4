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
