// The order in which f16 activations [rows, k] lie for products by warpgroups (linear/wide.cu). Made by whatever makes such
// activations, and by linear/rows.cu of activations that lie row after row.
//
// Activations are cut into chunks of 128 elements of k, as weights are in format/packed.cuh, and those into groups of 8 rows, each
// of them contiguous. Groups of a chunk follow each other. What is missing at the end of k is zeros; rows that are missing in the
// last group may be anything.
//
// A group is 16 pieces of 8 rows by 16 bytes, which tensor cores read as a whole. Piece 4 j + i has elements 4 t + i of blocks 2 j
// and 2 j + 1, which are neighbours, for each t: the order in which a lane's codes become pairs.
#pragma once
#include "format/packed.cuh"

constexpr int GROUP_ROWS = 8;
constexpr int PIECE_BYTES = GROUP_ROWS * 16;
constexpr int GROUP_BYTES = CHUNK_K / 8 * PIECE_BYTES;

// Elements of a row with the zeros at its end.
__device__ __forceinline__ int filled(int k) { return ceil_div(k, CHUNK_K) * CHUNK_K; }

// Where element k of a row stands, of activations with so many groups of rows, in elements.
__device__ __forceinline__ size_t ordered_at(int groups, int row, int k) {
    int pair = k % CHUNK_K / (2 * BLOCK), second = k / BLOCK % 2, t = k % BLOCK / 4, i = k % 4;
    size_t group = (size_t)(k / CHUNK_K) * groups + row / GROUP_ROWS;
    return group * (GROUP_BYTES / 2) + (4 * pair + i) * (PIECE_BYTES / 2) + row % GROUP_ROWS * 8 + t * 2 + second;
}

// Elements k and k + BLOCK of a row, four of each from k on, where k is a multiple of 4 in an even block.
__device__ __forceinline__ void store_ordered(u16* to, int groups, int row, int k, float4 first, float4 second) {
    constexpr int NEXT = PIECE_BYTES / 4;
    u32* at = (u32*)(to + ordered_at(groups, row, k));
    at[0] = pack_f16(first.x, second.x);
    at[NEXT] = pack_f16(first.y, second.y);
    at[2 * NEXT] = pack_f16(first.z, second.z);
    at[3 * NEXT] = pack_f16(first.w, second.w);
}
