// The order in which an NVFP4 weight lies on the device, which only files that include this one know. Made by linear/pack.cu.
//
// A weight [rows, k] is cut into chunks of 8 rows and 128 elements of k, each of them contiguous: 512 bytes of codes, then a
// scale for each row and block. What is missing at the ends is zeros. Chunks of the same rows follow each other along k.
//
// Lane l of a warp takes 16 bytes of codes: with g = l / 4 and t = l % 4, elements 4 t to 4 t + 3 of each block of row g. Word j
// of them holds two blocks, 2 j in its low and 2 j + 1 in its high half, so that element i of both makes a pair of f16 whose
// scales are neighbours too. Within a half, the bits of the four elements lie where the fewest operations bring sign and
// magnitude to their places in an f16:
//     15     14     13     12     11-9         8-6          5-3          2-0
//     sign 0 sign 2 sign 3 sign 1 magnitude 0  magnitude 1  magnitude 2  magnitude 3
#pragma once
#include "format/nvfp4.cuh"

constexpr int CHUNK_ROWS = 8;
constexpr int CHUNK_K = 128;
constexpr int CHUNK_BLOCKS = CHUNK_K / BLOCK;
constexpr int CHUNK_CODES = CHUNK_ROWS * CHUNK_K / 2;
constexpr int CHUNK_BYTES = CHUNK_CODES + CHUNK_ROWS * CHUNK_BLOCKS;
static_assert(CHUNK_CODES == WARP * 16, "16 bytes of codes for a lane");
static_assert(CHUNK_BYTES % 16 == 0, "chunks are copied in 16-byte pieces");

// Where the sign and the lowest bit of the magnitude of element i stand in a half.
__host__ __device__ constexpr int sign_bit(int i) { return i == 0 ? 15 : i == 1 ? 12 : i == 2 ? 14 : 13; }
__host__ __device__ constexpr int magnitude_bit(int i) { return 9 - 3 * i; }

// What decode_packed() gives is to be multiplied by. The smallest such product, of a code of 1/2 and a scale of
// 2^-9, is the smallest subnormal of f16.
constexpr float PACKED_FACTOR = 16384.0f;

// Two scales (bytes 0 and 1 of `bytes`) as f16, exactly.
__device__ __forceinline__ u32 packed_scales(u32 bytes) {
#if __CUDA_ARCH__ >= 890
    return e4m3_to_f16((u16)bytes);
#else
    return mul_f16(__byte_perm(bytes, 0, 0x4140) << 7, TWO_8);
#endif
}

// The four pairs of a word as f16 times 2^-14: element i of both blocks.
__device__ __forceinline__ void decode_word(u32 word, u32 (&pairs)[4]) {
    constexpr u32 CODES = SIGNS | MAGNITUDES;
    pairs[0] = word & CODES;
    pairs[1] = (word << 3) & CODES;
    pairs[2] = ((word << 6) & MAGNITUDES) | ((word << 1) & SIGNS);
    pairs[3] = ((word << 9) & MAGNITUDES) | ((word << 2) & SIGNS);
}

// Word j of a lane's codes, and the scales of its row in the chunk: the four pairs as their values times 2^-14, exactly.
__device__ __forceinline__ void decode_packed(u32 word, uint2 scales, int j, u32 (&pairs)[4]) {
    u32 scale = packed_scales((j < 2 ? scales.x : scales.y) >> (j % 2 * 16));
    decode_word(word, pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = mul_f16(pairs[i], scale);
}

// Of a row of activations, piece 4 j + t is what lane t multiplies with word j of its codes: four elements from this one on, and
// the same of the next block.
__device__ __forceinline__ int first_element(int piece) { return piece / 4 * (2 * BLOCK) + piece % 4 * 4; }

// Four codes, the first one lowest, as a half.
__device__ __forceinline__ u32 pack_half(u32 codes) {
    u32 half = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 code = codes >> (4 * i);
        half |= (code >> 3 & 1) << sign_bit(i) | (code & 7) << magnitude_bit(i);
    }
    return half;
}
__device__ __forceinline__ u32 code_of_half(u32 half, int i) {
    return (half >> sign_bit(i) & 1) << 3 | (half >> magnitude_bit(i) & 7);
}

// The chunk that row and k are in, of a weight with `chunks` of them along k.
__device__ __forceinline__ const u8* chunk_of(const u8* weight, int chunks, int row, int k) {
    return weight + (u64)((u32)(row / CHUNK_ROWS) * (u32)chunks + (u32)(k / CHUNK_K)) * CHUNK_BYTES;
}
