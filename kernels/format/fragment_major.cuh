// The fragment-major layout of f16 activations [rows, k], in which tensor cores take their fragments. Every kernel that produces
// activations for linear/wide.cu writes it, and so does linear/rows.cu from row-major ones.
//
// Activations are cut into chunks of 128 elements of k, as weights are in format/packed.cuh, and those into groups of 8 rows, each
// contiguous. The groups of a chunk follow each other. The padding at the end of k is zeros; absent rows of the last group may hold
// anything.
//
// A group is 16 fragments of 8 rows by 16 bytes. Fragment 4 j + i has elements 4 t + i of blocks 2 j and 2 j + 1, which are neighbours,
// for each t: the order in which a lane's codes become pairs.
#pragma once
#include "format/packed.cuh"

constexpr int GROUP_ROWS = 8;
constexpr int FRAGMENT_BYTES = GROUP_ROWS * 16;
constexpr int GROUP_BYTES = CHUNK_K / 8 * FRAGMENT_BYTES;

// Elements of a row with its padding.
__device__ __forceinline__ int padded_k(int k) { return ceil_div(k, CHUNK_K) * CHUNK_K; }

// The index of element k of a row, in activations with this many groups of rows.
__device__ __forceinline__ size_t fragment_index(int groups, int row, int k) {
    int pair = k % CHUNK_K / (2 * BLOCK), second = k / BLOCK % 2, t = k % BLOCK / 4, i = k % 4;
    size_t group = (size_t)(k / CHUNK_K) * groups + row / GROUP_ROWS;
    return group * (GROUP_BYTES / 2) + (4 * pair + i) * (FRAGMENT_BYTES / 2) + row % GROUP_ROWS * 8 + t * 2 + second;
}

// Stores elements k and k + BLOCK of a row, four of each from k on, where k is a multiple of 4 in an even block.
__device__ __forceinline__ void store_fragments(u16* to, int groups, int row, int k, float4 first, float4 second) {
    constexpr int NEXT = FRAGMENT_BYTES / 4;
    u32* at = (u32*)(to + fragment_index(groups, row, k));
    at[0] = pack_f16(first.x, second.x);
    at[NEXT] = pack_f16(first.y, second.y);
    at[2 * NEXT] = pack_f16(first.z, second.z);
    at[3 * NEXT] = pack_f16(first.w, second.w);
}

// As store_fragments(), or to row-major activations of `width`, which have no padding.
__device__ __forceinline__ void store_activations(u16* to, bool fragment_major, int groups, int width, int row, int k, float4 first, float4 second) {
    if (fragment_major) {
        store_fragments(to, groups, row, k, first, second);
        return;
    }
    u16* at = to + (size_t)row * width + k;
    if (k < width) *(uint2*)at = make_uint2(pack_f16(first.x, first.y), pack_f16(first.z, first.w));
    if (k + BLOCK < width) *(uint2*)(at + BLOCK) = make_uint2(pack_f16(second.x, second.y), pack_f16(second.z, second.w));
}
