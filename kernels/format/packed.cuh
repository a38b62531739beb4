// The layout of NVFP4 weights on the device, which only files that include this one know. linear/pack.cu makes it.
//
// A weight [rows, k] is cut into chunks of 8 rows and 128 elements of k, each of them contiguous: 512 bytes of codes, then a scale for
// each row and block. The padding of rows and of k is zeros. Chunks of the same rows follow each other along k.
//
// Lane l of a warp takes 16 bytes of codes: with g = l / 4 and t = l % 4, elements 4 t to 4 t + 3 of each block of row g. Word j of them
// holds two blocks, 2 j and 2 j + 1, so that element i of both makes a pair of f16, block 2 j's in the low half; their scales are
// neighbours too. In an f16 a code has its sign in bit 15 and its magnitude in bits 11 to 9.
//
// Two pairs have bits of their own in a word, from which a shift and a mask extract each; there is no room for a third, whatever the
// shifts. So the other two pairs are exclusive ors of two shifted words each, whose bits encode_word() solves for: four shifts and four
// masks for the four pairs. A search over all shifts found these; fewer than four do not reach all bits of a word.
#pragma once
#include "format/nvfp4.cuh"

constexpr int CHUNK_ROWS = 8;
constexpr int CHUNK_K = 128;
constexpr int CHUNK_BLOCKS = CHUNK_K / BLOCK;
constexpr int CHUNK_CODES = CHUNK_ROWS * CHUNK_K / 2;
constexpr int CHUNK_BYTES = CHUNK_CODES + CHUNK_ROWS * CHUNK_BLOCKS;
static_assert(CHUNK_CODES == WARP * 16, "16 bytes of codes for a lane");
static_assert(CHUNK_BYTES % 16 == 0, "chunks are copied in 16-byte pieces");

// The factor that the results of decode_packed() lack. Their smallest, for a code of 1/2 and a scale of 2^-9, is the smallest subnormal of
// f16.
constexpr float PACKED_FACTOR = 16384.0f;

// Two scales (bytes 0 and 1 of `bytes`) as f16, exactly.
__device__ __forceinline__ u32 packed_scales(u32 bytes) {
#if __CUDA_ARCH__ >= 890
    return e4m3_to_f16((u16)bytes);
#else
    return mul_f16(__byte_perm(bytes, 0, 0x4140) << 7, TWO_8);
#endif
}

// The bits of codes in pairs of f16.
constexpr u32 CODES = SIGNS | MAGNITUDES;

// The four pairs of a word as f16, times 2^-14: pair i is element i of both blocks.
__device__ __forceinline__ void decode_word(u32 word, u32 (&pairs)[4]) {
    u32 right = word >> 3;
    pairs[0] = (word ^ right) & CODES;
    pairs[1] = (right ^ word << 2) & CODES;
    pairs[2] = (word << 6) & CODES;
    pairs[3] = (word << 9) & CODES;
}

// The word with these pairs: the inverse of decode_word().
__device__ __forceinline__ u32 encode_word(const u32 (&pairs)[4]) {
    auto bit = [](int i) { return 0x10001u << i; };     // of both halves
    // Each line solves for bits that decode_word() combines with bits from the lines before into bits of a pair.
    u32 word = pairs[2] >> 6 | pairs[3] >> 9;
    word |= ((pairs[0] ^ word) << 3) & bit(12);
    word |= ((pairs[1] ^ word << 2) << 3) & bit(14);
    word |= ((pairs[1] ^ word >> 3) >> 2) & bit(13);
    word |= ((pairs[1] ^ word >> 3) >> 2) & (bit(8) | bit(7));
    word |= (pairs[0] ^ word >> 3) & (bit(15) | bit(11) | bit(10));
    return word;
}

// The values of word j of a lane's codes, given the scales of its row in the chunk, as four pairs times 2^-14: exact.
__device__ __forceinline__ void decode_packed(u32 word, uint2 scales, int j, u32 (&pairs)[4]) {
    u32 scale = packed_scales((j < 2 ? scales.x : scales.y) >> (j % 2 * 16));
    decode_word(word, pairs);
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = mul_f16(pairs[i], scale);
}

// Lane t multiplies word j of its codes with piece 4 j + t of a row of activations: four elements from this one on, and the same four of
// the next block.
__device__ __forceinline__ int first_element(int piece) { return piece / 4 * (2 * BLOCK) + piece % 4 * 4; }

// Code i of four, the first one lowest, at its bits in the low half of a pair; and the inverse.
__device__ __forceinline__ u32 spread_code(u32 codes, int i) {
    u32 code = codes >> (4 * i);
    return (code >> 3 & 1) << 15 | (code & 7) << 9;
}
__device__ __forceinline__ u32 gather_code(u32 half) { return (half >> 15 & 1) << 3 | (half >> 9 & 7); }

// The chunk of row and k, in a weight with `chunks` chunks along k.
__device__ __forceinline__ const u8* chunk_of(const u8* weight, int chunks, int row, int k) {
    return weight + (u64)((u32)(row / CHUNK_ROWS) * (u32)chunks + (u32)(k / CHUNK_K)) * CHUNK_BYTES;
}

// One value of a weight [rows, width].
__device__ __forceinline__ float packed_value(const u8* weight, int width, int row, int k, float global) {
    int g = row % CHUNK_ROWS, block = k % CHUNK_K / BLOCK, e = k % BLOCK;
    const u8* chunk = chunk_of(weight, ceil_div(width, CHUNK_K), row, k);
    u32 pairs[4];
    decode_word(((const u32*)chunk)[(4 * g + e / 4) * 4 + block / 2], pairs);
    u32 code = gather_code(pairs[e % 4] >> (block % 2 * 16));
    return decode_value(code_to_float(code), scale_to_float(chunk[CHUNK_CODES + g * CHUNK_BLOCKS + block]), global);
}
