// Matrices under training on the device: the position of a block's codes, and their values. Mirrors src/format/adamw.rs.
//
// Codes and scales of NVFP4 weights are in the order of format/packed.cuh, so that inference reads them as they are. Everything else is
// row-major: residuals, moments, and dense weights.
#pragma once
#include "format/encode.cuh"
#include "format/packed.cuh"
#include "format/residual.cuh"

enum WeightForm { RESIDUAL4, RESIDUAL8, TWO_TERM, ONE_TERM, DENSE_BF16, DENSE_F32 };

// Divisor of the second code of two.
constexpr float SECOND_TERM = 6.0f;

struct Weights {
    u8* codes;      // chunks, or row-major values
    u8* rest;       // row-major
    float global;
    int form;
    int cols;       // a multiple of 16
    int chunks;     // along a row
};

// Sixteen 4-bit codes, row-major: code i in bits 4 (i % 8) of a word.
struct Nibbles {
    u32 words[2];

    __device__ __forceinline__ u32 at(int i) const { return words[i / 8] >> (4 * (i % 8)) & 15; }
    // Puts the low four bits of `code` where there are zeros.
    __device__ __forceinline__ void put(int i, u32 code) { words[i / 8] |= (code & 15) << (4 * (i % 8)); }
};

__device__ __forceinline__ Nibbles load_nibbles(const u8* codes, u64 block) {
    uint2 v = ((const uint2*)codes)[block];
    return {{v.x, v.y}};
}
__device__ __forceinline__ void store_nibbles(u8* codes, u64 block, const Nibbles& n) { ((uint2*)codes)[block] = make_uint2(n.words[0], n.words[1]); }
// Loads the nibbles of two neighbouring blocks, the first of which is even.
__device__ __forceinline__ void load_nibbles(const u8* codes, u64 block, Nibbles (&n)[2]) {
    uint4 v = ((const uint4*)codes)[block / 2];
    n[0] = {{v.x, v.y}}, n[1] = {{v.z, v.w}};
}
__device__ __forceinline__ void store_nibbles(u8* codes, u64 block, const Nibbles (&n)[2]) {
    ((uint4*)codes)[block / 2] = make_uint4(n[0].words[0], n[0].words[1], n[1].words[0], n[1].words[1]);
}

// Codes of a block in a chunk, and the place of its scale.
__device__ __forceinline__ const u32* chunk_words(const u8* chunk, int row, int block) {
    return (const u32*)chunk + 16 * (row % CHUNK_ROWS) + block % CHUNK_BLOCKS / 2;
}
__device__ __forceinline__ u8* scale_at(u8* chunk, int row, int block) {
    return chunk + CHUNK_CODES + row % CHUNK_ROWS * CHUNK_BLOCKS + block % CHUNK_BLOCKS;
}

// The sixteen bits of pair i of a word that belong to one of its two blocks.
__device__ __forceinline__ u32 half_of(u32 pair, int second) { return second ? pair >> 16 : pair & 0xffff; }

// The codes of one of the two blocks that four words hold.
__device__ __forceinline__ Nibbles unpack_block(const u32 (&words)[4], int second) {
    Nibbles codes = {};
#pragma unroll
    for (int t = 0; t < 4; t++) {
        u32 pairs[4];
        decode_word(words[t], pairs);
#pragma unroll
        for (int i = 0; i < 4; i++) codes.put(4 * t + i, gather_code(half_of(pairs[i], second)));
    }
    return codes;
}
// The four words of two blocks.
__device__ __forceinline__ void pack_blocks(const Nibbles& first, const Nibbles& second, u32 (&words)[4]) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) pairs[i] = spread_code(first.at(4 * t + i), 0) | spread_code(second.at(4 * t + i), 0) << 16;
        words[t] = encode_word(pairs);
    }
}

__device__ __forceinline__ int signed_nibble(u32 code) { return (int)(code << 28) >> 28; }

// Stored residuals beside the codes of a block.
struct Rest {
    Nibbles nibbles;    // of 4 bits each
    u32 bytes[4];       // of 8
};

__device__ __forceinline__ Rest load_rest(const Weights& w, int form, u64 block) {
    Rest rest = {};
    if (form == RESIDUAL4 || form == TWO_TERM) {
        uint2 v = ((const uint2*)w.rest)[block];
        rest.nibbles.words[0] = v.x, rest.nibbles.words[1] = v.y;
    } else if (form == RESIDUAL8) {
        uint4 v = ((const uint4*)w.rest)[block];
        rest.bytes[0] = v.x, rest.bytes[1] = v.y, rest.bytes[2] = v.z, rest.bytes[3] = v.w;
    }
    return rest;
}
__device__ __forceinline__ void store_rest(const Weights& w, int form, u64 block, const Rest& rest) {
    if (form == RESIDUAL4 || form == TWO_TERM) {
        ((uint2*)w.rest)[block] = make_uint2(rest.nibbles.words[0], rest.nibbles.words[1]);
    } else if (form == RESIDUAL8) {
        ((uint4*)w.rest)[block] = make_uint4(rest.bytes[0], rest.bytes[1], rest.bytes[2], rest.bytes[3]);
    }
}

// The value of weight i of a block in units of its scale, by everything stored or by the code alone.
__device__ __forceinline__ float weight_quotient(int form, const Nibbles& codes, const Rest& rest, int i, bool whole) {
    float code = code_to_float(codes.at(i));
    if (!whole || form == ONE_TERM) return code;
    if (form == TWO_TERM) return code + code_to_float(rest.nibbles.at(i)) * (1.0f / SECOND_TERM);
    if (form == RESIDUAL8) {
        return Residual<8>::value(codes.at(i), (int)(rest.bytes[i / 4] << (24 - 8 * (i % 4))) >> 24);
    }
    return Residual<4>::value(codes.at(i), signed_nibble(rest.nibbles.at(i)));
}

// Dense values of a block.
__device__ __forceinline__ void load_dense(const Weights& w, int form, u64 block, float (&values)[BLOCK]) {
    if (form == DENSE_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float4 v = ((const float4*)w.codes)[block * 4 + i];
            values[4 * i] = v.x, values[4 * i + 1] = v.y, values[4 * i + 2] = v.z, values[4 * i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) values[i] = bf16_to_float(((const u16*)w.codes)[block * BLOCK + i]);
    }
}

// Pairs of two blocks' codes and residuals of 4 bits, elements 4 t to 4 t + 3, in the form of format/residual.cuh.
__device__ __forceinline__ void load_pairs(u32 word, const Nibbles& first, const Nibbles& second, int t, u32 (&pairs)[4]) {
    decode_word(word, pairs);
    u32 a = first.words[t / 2], b = second.words[t / 2];
    join_residuals(t % 2 ? high_halves(a, b) : low_halves(a, b), pairs);
}

// The values of the block in `row` from column 16 * column_block on.
__device__ __forceinline__ void decode_block(const Weights& w, int form, int row, int column_block, bool whole, float (&values)[BLOCK]) {
    u64 block = (u64)row * (w.cols / BLOCK) + column_block;
    if (form >= DENSE_BF16) return load_dense(w, form, block, values);
    u8* chunk = w.codes + ((u64)(row / CHUNK_ROWS) * w.chunks + column_block / CHUNK_BLOCKS) * CHUNK_BYTES;
    const u32* at = chunk_words(chunk, row, column_block);
    u32 words[4] = {at[0], at[4], at[8], at[12]};
    Rest rest = load_rest(w, form, block);
    // f32 holds a quotient times a scale exactly, so that only the product with the global scale rounds.
    float scale = scale_to_float(*scale_at(chunk, row, column_block));
    if (form == RESIDUAL4 && whole) {
        // The other block's codes are joined with residuals of zero instead of these.
        const Nibbles none = {};
#pragma unroll
        for (int t = 0; t < 4; t++) {
            u32 pairs[4];
            load_pairs(words[t], column_block % 2 ? none : rest.nibbles, column_block % 2 ? rest.nibbles : none, t, pairs);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 value = values_of_pair(pairs[i]);
                values[4 * t + i] = (column_block % 2 ? f16_high(value) : f16_low(value)) * 16384.0f * scale * w.global;
            }
        }
        return;
    }
    Nibbles codes = unpack_block(words, column_block % 2);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) values[i] = weight_quotient(form, codes, rest, i, whole) * scale * w.global;
}
