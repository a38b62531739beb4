// The layouts of block scales. Mirrors src/format/swizzle.rs: swizzled scales are in tiles of 128 rows by 4 blocks, 512 bytes each, tile
// after tile along a row of tiles; within a tile, 32 groups of 16 bytes hold 4 scales of each of 4 rows that are 32 apart.
#pragma once
#include "common/types.cuh"

constexpr int SCALES_IN_WORD = 4;  // scales of neighbouring blocks of one row, which are contiguous in both layouts
constexpr int SCALE_TILE_ROWS = 128;
constexpr int SCALE_TILE_BYTES = SCALE_TILE_ROWS * SCALES_IN_WORD;

// Bytes from the scales of a row's first four blocks to those of its next four.
__host__ __device__ __forceinline__ int scale_word_stride(bool swizzled) { return swizzled ? SCALE_TILE_BYTES : SCALES_IN_WORD; }

// Offset of the scales of a row of `blocks` blocks.
__host__ __device__ __forceinline__ u64 scale_row(bool swizzled, int row, int blocks) {
    if (!swizzled) return (u64)row * blocks;
    u64 tiles = (u64)(row / SCALE_TILE_ROWS) * ceil_div(blocks, SCALES_IN_WORD);
    return tiles * SCALE_TILE_BYTES + row % 32 * 16 + row % SCALE_TILE_ROWS / 32 * SCALES_IN_WORD;
}
