// AdamW on rows of a matrix in their stored form, in one pass over its memory. Mirrors src/format/adamw.rs and
// src/cpu/training/optimizer.rs, bit for bit except for roots and quotients, which are exact to two units in the last place: exact ones
// would take a third of the time, for numbers that are then rounded to 4 bits.
//
// The kernel is bound by the rate of issued instructions, half of that for integer ones, not by memory. As much as possible is therefore
// left to fused multiply-adds: conversions, fractions of random bits and rounding are parts of them (format/fraction.cuh).
//
// A block of threads takes a group of 8 rows; or a cluster of blocks does, each with some of the columns. First they find the largest
// gradient and the largest scales of the moments, from which the group's new global scales follow. Then each thread updates two blocks of
// 16 weights that share words of a chunk, one after the other in the same instructions, because the code is too long to exist twice.
// Gradients are read twice, the second time from a cache.
//
// A single matrix leaves a part of the GPU idle while its last groups are updated. Steps of several matrices may therefore run at once.
#include "common/cluster.cuh"
#include "common/reduce.cuh"
#include "format/moment.cuh"
#include "optimizer/weights.cuh"

enum FirstForm { FIRST_INT4, FIRST_NVFP4, FIRST_INT8, FIRST_F32 };
enum SecondForm { SECOND_UINT4, SECOND_NVFP4, SECOND_INT8, SECOND_F32 };

// Mirrors Coefficients.
struct Coefficients {
    float factor, beta1, rest1, beta2, rest2, correction, eps, keep, rate;
};

// Whether weights stay as they are. Only the general kernel checks, because the one for the default forms has no register to spare.
__device__ __forceinline__ bool is_still(const Coefficients& c) { return c.rate == 0 && c.keep == 1; }

// Mirrors Band.
struct Band {
    float least, most, spread;
};

struct Moments {
    u8* codes;
    u8* scales;         // a byte for each block, row-major; unless in f32
    float* globals;     // one for each group of rows
    int form;
};

struct Arguments {
    Weights w;
    Moments first;
    Moments second;
    const u16* gradients;   // bf16 [rows, cols], those of the first row first
    u64 rounding;           // keys
    u64 dither;
    u64 previous;
    u64* counters;          // added to: weights changed as stored, and as delivered, and blocks that the largest scale clips
    const float* clip;      // multiplies the factor, unless null; if it is not finite, nothing is done
    Coefficients c;
    int first_row;          // a multiple of 8
    int rows;
    Band band;
    // Whether the previous and the next kernel are steps that may run at the same time.
    int follows;
    int leads;
};

constexpr int THREADS = 128, WARPS = THREADS / WARP;
// Whether this architecture has clusters; without them, one block takes a group.
#if __CUDA_ARCH__ >= 900
constexpr bool CLUSTERS = true;
#else
constexpr bool CLUSTERS = false;
#endif
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
// Mirrors ROOM.
constexpr float ROOM = 6.6f;

// Factors for the scales of a group's moments after a step: 1 divided by the global scale, and also by the largest code.
struct Globals {
    float inverse, most;
};
__device__ __forceinline__ Globals globals_of(float global, float largest) { return {1 / global, 1 / (largest * global)}; }

__device__ __forceinline__ float first_most(int form) { return form == FIRST_INT4 ? FIRST_MAX : form == FIRST_NVFP4 ? E2M1_MAX : WIDE_MAX; }
__device__ __forceinline__ float second_most(int form) { return form == SECOND_UINT4 ? SECOND_MAX : form == SECOND_NVFP4 ? E2M1_MAX : WIDE_MAX; }
__device__ __forceinline__ int first_bits(int form) { return form <= FIRST_NVFP4 ? 11 : 15; }
__device__ __forceinline__ int second_bits(int form) { return form == SECOND_UINT4 ? 12 : form == SECOND_NVFP4 ? 11 : 15; }

// The largest of all threads' values, which must not be negative.
__device__ __forceinline__ float block_max(float x, float* shared) {
    x = warp_max(x);
    __syncthreads();
    if (lane_id() == 0) shared[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int i = 0; i < THREADS / WARP; i++) x = fmaxf(x, shared[i]);
    return x;
}

__device__ __forceinline__ void load_gradients(const u16* from, float (&g)[BLOCK]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint4 v = ((const uint4*)from)[i];
        u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            g[8 * i + 2 * j] = bf16_to_float((u16)words[j]);
            g[8 * i + 2 * j + 1] = bf16_to_float((u16)(words[j] >> 16));
        }
    }
}

__device__ __forceinline__ float amax_of(const float (&x)[BLOCK]) {
    float most = fabsf(x[0]);
#pragma unroll
    for (int i = 1; i < BLOCK; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
}
// For non-negative values, whose bit patterns order like the values: three at a time if there is an instruction for that.
__device__ __forceinline__ float amax_of_roots(const float (&x)[BLOCK]) {
    u32 most = __float_as_uint(x[0]);
#pragma unroll
    for (int i = 1; i < BLOCK; i++) most = max(most, __float_as_uint(x[i]));
    return __uint_as_float(most);
}
// The reciprocal of an e4m3 scale; for zero, that of the smallest scale. Correctly rounded, because the reciprocal of a four-bit number is
// far from the middle between two f32.
__device__ __forceinline__ float inverse_scale(u32 scale) {
    float x = scale_to_float(max(scale, 1u)), r = reciprocal_approx(x);
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1), r);
}

// Stored moments of a block: the scale, and codes of 4 bits. Wider codes stay in memory.
struct Stored {
    Nibbles codes;
    u32 scale;
};
static_assert((int)FIRST_NVFP4 == (int)SECOND_NVFP4 && (int)FIRST_F32 == (int)SECOND_F32, "either kind of form is compared as one");
__device__ __forceinline__ Stored load_stored(const Moments& m, int form, u32 block) {
    Stored x = {};
    if (form <= FIRST_NVFP4) x.codes = load_nibbles(m.codes, block);
    if (form != FIRST_F32) x.scale = m.scales[block];
    return x;
}
__device__ __forceinline__ void store_stored(const Moments& m, int form, u32 block, const Stored& x) {
    if (form <= FIRST_NVFP4) store_nibbles(m.codes, block, x.codes);
    if (form != FIRST_F32) m.scales[block] = x.scale;
}

// A byte for each of two neighbouring blocks, the first one in the lower byte.
__device__ __forceinline__ u32 byte_of(u32 bytes, int half) { return bytes >> (8 * half) & 0xff; }
__device__ __forceinline__ u32 with_byte(u32 bytes, int half, u32 byte) { return half ? (bytes & 0xff) | byte << 8 : (bytes & 0xff00) | byte; }

// Stored moments of two neighbouring blocks, the first of which is even, with codes of 4 bits: halves the number of loads.
struct StoredPair {
    Nibbles codes[2];
    u32 scales;

    __device__ __forceinline__ void load(const Moments& m, u32 block) {
        load_nibbles(m.codes, block, codes);
        scales = *(const u16*)(m.scales + block);
    }
    __device__ __forceinline__ void store(const Moments& m, u32 block) const {
        store_nibbles(m.codes, block, codes);
        *(u16*)(m.scales + block) = scales;
    }
    __device__ __forceinline__ Stored get(int half) const { return {half ? codes[1] : codes[0], byte_of(scales, half)}; }
    __device__ __forceinline__ void put(int half, const Stored& x) {
        if (half) codes[1] = x.codes;
        if (!half) codes[0] = x.codes;
        scales = with_byte(scales, half, x.scale);
    }
};

// First moments, divided by `unit`, the block's unit. Codes that are not in `stored` are loaded from memory.
__device__ __forceinline__ void decode_first(const Moments& m, int form, u32 block, const Stored& stored, float global, u64 key, float (&x)[BLOCK],
                                             float& unit) {
    unit = 1;
    if (form == FIRST_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = ((const float*)m.codes)[(u64)block * BLOCK + i];
        return;
    }
    unit = scale_to_float(stored.scale) * global;
    if (form == FIRST_INT8) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = (float)((const signed char*)m.codes)[(u64)block * BLOCK + i];
        return;
    }
    if (form == FIRST_NVFP4) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = code_to_float(stored.codes.at(i));
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) decode_first8(stored.codes.words[half], random_words(key, 2 * block + half), x + 8 * half);
}

// Encodes them. Wider codes go directly to memory.
__device__ __forceinline__ Stored encode_first(const Moments& m, int form, u32 block, const Globals& now, u64 key, const float (&x)[BLOCK]) {
    if (form == FIRST_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) ((float*)m.codes)[(u64)block * BLOCK + i] = x[i];
        return {};
    }
    u32 scale = moment_scale(amax_of(x), now.most);
    float inverse = inverse_scale(scale) * now.inverse;
    if (form == FIRST_INT8) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            float r = round_stochastic(__fmul_rn(x[i], inverse), fraction16(random_bits16(key, block * BLOCK + i), 0));
            m.codes[(u64)block * BLOCK + i] = (u8)(int)fminf(fmaxf(r, -WIDE_MAX), WIDE_MAX);
        }
        return {{}, scale};
    }
    Nibbles codes = {};
    if (form == FIRST_NVFP4) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            float q = x[i] * inverse;
            u32 random = random_bits16(key, block * BLOCK + i) << 16 | 1 << 15;
            codes.put(i, (__float_as_uint(q) >> 28 & 8) | stochastic(fabsf(q), random));
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; half++) codes.words[half] = encode_first8(x + 8 * half, inverse * 65536, random_words(key, 2 * block + half));
    }
    return {codes, scale};
}

// Square roots of second moments, times `factor`.
__device__ __forceinline__ void decode_second(const Moments& m, int form, u32 block, const Stored& stored, float global, float factor,
                                              float (&x)[BLOCK]) {
    if (form == SECOND_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = sqrtf(((const float*)m.codes)[(u64)block * BLOCK + i]) * factor;
        return;
    }
    float unit = scale_to_float(stored.scale) * global * factor;
    if (form == SECOND_INT8) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = (float)m.codes[(u64)block * BLOCK + i] * unit;
        return;
    }
    if (form == SECOND_NVFP4) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = code_to_float(stored.codes.at(i) & 7) * unit;
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) decode_second8(stored.codes.words[half], unit, x + 8 * half);
}

// As encode_first(). Each draw serves two elements.
__device__ __forceinline__ Stored encode_second(const Moments& m, int form, u32 block, const Globals& now, const u32 (&draws)[BLOCK / 2],
                                                const float (&x)[BLOCK], const float (&squares)[BLOCK]) {
    if (form == SECOND_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) ((float*)m.codes)[(u64)block * BLOCK + i] = squares[i] < SMALLEST_NORMAL ? 0 : squares[i];
        return {};
    }
    u32 scale = moment_scale(amax_of_roots(x), now.most);
    float inverse = inverse_scale(scale) * now.inverse;
    Nibbles codes = {};
    if (form == SECOND_UINT4) {
#pragma unroll
        for (int half = 0; half < 2; half++) codes.words[half] = encode_second8(x + 8 * half, inverse * 65536, draws + 4 * half);
        return {codes, scale};
    }
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float q = __fmul_rn(x[i], inverse);
        u32 draw = draws[i / 2] >> (16 * (i % 2)) & 0xffff;
        if (form == SECOND_NVFP4) {
            codes.put(i, max(stochastic(q, draw << 16 | 1 << 15), 1u));
        } else {
            m.codes[(u64)block * BLOCK + i] = (u8)fminf(fmaxf(round_stochastic(q, fraction16(draw, 0)), 1.0f), WIDE_MAX);
        }
    }
    return {codes, scale};
}

// The 18 random bits that round weight i, from the draws of a block.
__device__ __forceinline__ u32 weight_draw(const u32 (&draws)[BLOCK / 2], int i) { return i % 2 ? draws[i / 2] & 0x3ffff : draws[i / 2] >> 14; }

// Converts a block of weights from units of its scale to those of its next scale, which is returned: the old one, or a new one. `draw` has
// 18 random bits, and `last` is the end of the grid. Counts blocks that exceed the reach of the largest scale; these are so rare that
// saving registers comes first.
__device__ __forceinline__ u32 rescale(float (&x)[BLOCK], u32 scale, const Band& band, u32 draw, float last, u64* clipped) {
    float amax = amax_of(x), share = __fmul_rn((float)(draw + 1), 1.0f / (1 << 18));
    if (scale == 0 || amax < band.least || amax > __fmaf_rn(share, band.spread, band.most)) {
        float from = scale_to_float(max(scale, 1u));
        // Moves weights beyond the end of the grid to where stochastic rounding would have carried them.
        if (scale > 0 && amax > band.most) {
            float end = band.most + band.spread;
            amax = fmaxf(amax, end);
#pragma unroll
            for (int i = 0; i < BLOCK; i++)
                if (fabsf(x[i]) > band.most) x[i] = copysignf(fmaxf(fabsf(x[i]), end), x[i]);
        }
        scale = encode_scale(__fmul_rn(__fmul_rn(amax, from), 1.0f / E2M1_MAX));
        if (scale == 0 && amax > 0) scale = 1;
        float ratio = from * inverse_scale(scale);
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = __fmul_rn(x[i], ratio);
        amax = __fmul_rn(amax, ratio);
        if (scale == E4M3_MAX_BYTE && amax > ROOM) atomicAdd(clipped, (u64)1);
    }
    if (amax > last) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = fminf(fmaxf(x[i], -last), last);
    }
    return scale;
}

// Encodes a block of weights, in units of its scale, as codes and residuals.
__device__ __forceinline__ void encode_weights(int form, const float (&x)[BLOCK], const u32 (&draws)[BLOCK / 2], Nibbles& codes, Rest& rest) {
    codes = {}, rest = {};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float q = x[i];
        u32 draw = weight_draw(draws, i), random = (draw << 14 & 0xffff0000u) | 1 << 15, sign = __float_as_uint(q) >> 28 & 8;
        if (form == RESIDUAL8) {
            u32 index = Residual<8>::encode(q, draw) >> Residual<8>::SHIFT & 0x7ff;
            codes.put(i, sign | index >> 8);
            rest.bytes[i / 4] |= ((index & 255) ^ 128) << (8 * (i % 4));
        } else if (form == TWO_TERM) {
            u32 code = sign | nearest_even(fabsf(q));
            float remainder = (q - code_to_float(code)) * SECOND_TERM;
            codes.put(i, code);
            rest.nibbles.put(i, (__float_as_uint(remainder) >> 28 & 8) | stochastic(fabsf(remainder), random));
        } else {
            codes.put(i, sign | stochastic(fabsf(q), random));
        }
    }
}

__device__ __forceinline__ void store_dense(const Weights& w, int form, u32 block, const float (&x)[BLOCK], const u32 (&draws)[BLOCK / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        // A carry out of the lower half goes to the next bf16.
        if (form == DENSE_BF16) ((u16*)w.codes)[(u64)block * BLOCK + i] = (__float_as_uint(x[i]) + (weight_draw(draws, i) >> 2)) >> 16;
        if (form == DENSE_F32) ((float*)w.codes)[(u64)block * BLOCK + i] = x[i];
    }
}

// Number of nibbles that are not zero.
__device__ __forceinline__ int count_nibbles(u32 x) {
    x |= x >> 2;
    return __popc((x | x >> 1) & 0x11111111u);
}
// The codes that differ as numbers, in two words of codes.
__device__ __forceinline__ u32 differing_codes(u32 a, u32 b) {
    u32 both = (a | b) & 0x77777777u, zeros = ~(both | both >> 1 | both >> 2) & 0x11111111u;
    return (a ^ b) & ~(zeros << 3);
}

// Counts the weights of a block whose stored form has changed.
__device__ __forceinline__ void count_changes(int form, bool rescaled, const Nibbles& codes, const Rest& rest, const Nibbles& codes_now,
                                              const Rest& rest_now, int& stored, int& delivered) {
    if (rescaled) {
        stored += BLOCK, delivered += BLOCK;
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 differing = differing_codes(codes.words[i], codes_now.words[i]);
        delivered += count_nibbles(differing);
        if (form == RESIDUAL8) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 before = rest.bytes[2 * i + j / 4] >> (8 * (j % 4)) & 255, now = rest_now.bytes[2 * i + j / 4] >> (8 * (j % 4)) & 255;
                // The sign of a zero with a residual is the weight's.
                u32 code = now ? codes.words[i] ^ codes_now.words[i] : differing;
                stored += before != now || (code >> (4 * j) & 15) != 0;
            }
        } else {
            stored += count_nibbles(differing | (rest.nibbles.words[i] ^ rest_now.nibbles.words[i]));
        }
    }
}

// For a sum of up to 2^15 words whose halves each have all bits or none: the number of halves with all bits.
__device__ __forceinline__ int halves_of_sum(u32 sum) {
    // A low half is 2^16 - 1, and a high one -2^16.
    u32 low = (0u - sum) & 0xffff, high = (low - ((sum + low) >> 16)) & 0xffff;
    return (int)(low + high);
}

// Shared memory of a block.
struct Shared {
    // With residuals of 4 bits, the indices of both blocks of a thread: the old ones, then the new ones.
    uint4 indices[2][2][THREADS];
    // The largest gradient, and the largest scales of first and of second moments, which the blocks of a cluster read from each other.
    float4 maxima;
    float by_warp[WARPS];
    // For first and for second moments.
    Globals now[2];

    __device__ __forceinline__ void put(int half, const u32 (&x)[BLOCK / 2]) {
        indices[half][0][threadIdx.x] = make_uint4(x[0], x[1], x[2], x[3]);
        indices[half][1][threadIdx.x] = make_uint4(x[4], x[5], x[6], x[7]);
    }
    __device__ __forceinline__ void get(int half, u32 (&x)[BLOCK / 2]) const {
        uint4 v = indices[half][0][threadIdx.x], next = indices[half][1][threadIdx.x];
        x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w, x[4] = next.x, x[5] = next.y, x[6] = next.z, x[7] = next.w;
    }
};
static_assert(sizeof(Shared) == 4 * 16 * THREADS + 48, "what its launcher reserves");

// A warp takes a chunk, and a lane the pair of blocks of 16 weights whose codes share words.
constexpr int PAIRS = CHUNK_BLOCKS / 2;
static_assert(PAIRS * CHUNK_ROWS == WARP, "a pair of blocks for a lane");
constexpr int MOST_COLUMNS = 1 << 19;
static_assert(MOST_COLUMNS / (WARPS * CHUNK_K) * 2 * BLOCK < 1 << 16, "what a lane counts");

// Prefetches what a lane will read of its warp's next chunk in the default forms. Without this a quarter of the time would be spent waiting
// for memory, because registers allow only five warps per scheduler.
__device__ __forceinline__ void prefetch_next(const Arguments& a, const u32* at, const u16* gradients, u32 block) {
    constexpr int STEP = WARPS * CHUNK_BLOCKS;
    prefetch((const u8*)at + WARPS * CHUNK_BYTES), prefetch((const u8*)at + WARPS * CHUNK_BYTES + 32);
    prefetch(gradients + STEP * BLOCK), prefetch(gradients + (STEP + 1) * BLOCK);
    prefetch(a.w.rest + (u64)block * BLOCK / 2 + STEP * BLOCK / 2);
    prefetch(a.first.codes + (u64)block * BLOCK / 2 + STEP * BLOCK / 2), prefetch(a.first.scales + block + STEP);
    prefetch(a.second.codes + (u64)block * BLOCK / 2 + STEP * BLOCK / 2), prefetch(a.second.scales + block + STEP);
}

template <bool ANY>
__device__ __forceinline__ void adamw(const Arguments& a) {
    extern __shared__ __align__(16) char shared[];
    Shared& s = *(Shared*)shared;
    const int form = ANY ? a.w.form : RESIDUAL4, first = ANY ? a.first.form : FIRST_INT4, second = ANY ? a.second.form : SECOND_UINT4;
    Coefficients c = a.c;
    if (a.clip) {
        if (!is_finite(*a.clip)) return;
        c.factor *= *a.clip;
    }
    int group = a.first_row / CHUNK_ROWS + blockIdx.x, row0 = blockIdx.x * CHUNK_ROWS, rows = min(CHUNK_ROWS, a.rows - row0);
    int blocks = a.w.cols / BLOCK, row = lane_id() / PAIRS, first_column = lane_id() % PAIRS * 2;
    // The chunks of the group that are this block's.
    int splits = gridDim.z, split = blockIdx.z;
    int from = a.w.chunks * split / splits + threadIdx.x / WARP, to = a.w.chunks * (split + 1) / splits;

    // Blocks are counted in 32 bits.
    u32 begin = (u32)(a.first_row + row0) * blocks, magnitudes = 0, byte1 = 0, byte2 = 0;
    for (int chunk = from; chunk < to; chunk += WARPS) {
        // A missing block is replaced by another one, so that no load waits for a branch: a maximum may see a number twice.
        int column = min(chunk * CHUNK_BLOCKS + first_column, blocks - (ANY ? 1 : 2));
        u64 first_block = (u32)min(row, rows - 1) * blocks + column;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u64 block = first_block + (half && (!ANY || column + 1 < blocks));
            const uint4* gradients = (const uint4*)a.gradients + 2 * ((u64)row0 * blocks + block);
            uint4 v = gradients[0], next = gradients[1];
            u32 words[8] = {v.x, v.y, v.z, v.w, next.x, next.y, next.z, next.w};
#pragma unroll
            for (int j = 0; j < 8; j++) magnitudes = max_bf16(magnitudes, words[j] & 0x7fff7fffu);
            if (first != FIRST_F32) byte1 = max(byte1, (u32)a.first.scales[begin + block]);
            if (second != SECOND_F32) byte2 = max(byte2, (u32)a.second.scales[begin + block]);
        }
    }
    // Read before the barriers, because they are overwritten after those.
    float old1 = first == FIRST_F32 ? 0 : a.first.globals[group], old2 = second == SECOND_F32 ? 0 : a.second.globals[group];
    float largest = block_max(fmaxf(bf16_to_float((u16)magnitudes), bf16_to_float((u16)(magnitudes >> 16))), s.by_warp);
    float scale1 = block_max(scale_to_float(byte1), s.by_warp), scale2 = block_max(scale_to_float(byte2), s.by_warp);
    if (CLUSTERS && splits > 1) {
        if (threadIdx.x == 0) s.maxima = make_float4(largest, scale1, scale2, 0);
        cluster_sync();
        for (int i = 0; i < splits; i++) {
            float4 other = load_cluster_16(shared_address(&s.maxima), i);
            largest = fmaxf(largest, other.x), scale1 = fmaxf(scale1, other.y), scale2 = fmaxf(scale2, other.z);
        }
        cluster_arrive();
    }
    largest *= c.factor;
    float m = (first_most(first) + 0.5f) * scale1 * old1, root2 = second_most(second) * scale2 * old2;
    float new1 = power_for(__fmaf_rn(c.beta1, m, c.rest1 * largest), first_bits(first));
    float new2 = power_for(sqrtf(__fmaf_rn(c.beta2 * root2, root2, c.rest2 * largest * largest)), second_bits(second));
    if (threadIdx.x == 0) {
        s.now[0] = globals_of(new1, first_most(first)), s.now[1] = globals_of(new2, second_most(second));
        if (first != FIRST_F32 && split == 0) a.first.globals[group] = new1;
        if (second != SECOND_F32 && split == 0) a.second.globals[group] = new2;
    }
    __syncthreads();
    const float rest1 = c.rest1 * c.factor, rest2 = sqrtf(c.rest2) * c.factor, beta2 = sqrtf(c.beta2);
    const float rate = form < DENSE_BF16 ? -c.rate / a.w.global : -c.rate;
    // Weights whose stored code changed in the low half, and whose delivered code changed in the high half: rows of MOST_COLUMNS fill
    // neither.
    u32 changes = 0;
    for (int chunk = from; chunk < to; chunk += WARPS) {
        int column = chunk * CHUNK_BLOCKS + first_column;
        if (row >= rows || column >= blocks) continue;
        bool both = !ANY || column + 1 < blocks;
        u32 first_block = begin + row * blocks + column;
        u8* chunk_at = a.w.codes + (u64)((u32)group * a.w.chunks + chunk) * CHUNK_BYTES;
        u32* at = (u32*)chunk_words(chunk_at, row, first_column);
        const u16* gradients = a.gradients + (u64)(first_block - (u32)a.first_row * blocks) * BLOCK;
        u32 words[4] = {};
        if (form < DENSE_BF16) {
#pragma unroll
            for (int t = 0; t < 4; t++) words[t] = at[t * PAIRS];
        }
        u8* scales_at = scale_at(chunk_at, row, first_column);
        u32 scales = form < DENSE_BF16 ? *(const u16*)scales_at : 0;
        StoredPair first_pair, second_pair;
        Nibbles rests[2] = {}, codes_now[2] = {};
        if (!ANY) {
            load_nibbles(a.w.rest, first_block, rests);
            first_pair.load(a.first, first_block), second_pair.load(a.second, first_block);
        } else if (form == RESIDUAL4) {
            rests[0] = load_nibbles(a.w.rest, first_block);
            if (both) rests[1] = load_nibbles(a.w.rest, first_block + 1);
        }
        if (form == RESIDUAL4) {
            u32 stored_lows[BLOCK / 2], stored_highs[BLOCK / 2];
#pragma unroll
            for (int t = 0; t < 4; t++) {
                u32 pairs[4];
                load_pairs(words[t], rests[0], rests[1], t, pairs);
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    stored_lows[2 * t + j] = low_halves(pairs[2 * j], pairs[2 * j + 1]);
                    stored_highs[2 * t + j] = high_halves(pairs[2 * j], pairs[2 * j + 1]);
                }
            }
            s.put(0, stored_lows), s.put(1, stored_highs);
        }
        if (!ANY && column + WARPS * CHUNK_BLOCKS < blocks) prefetch_next(a, at, gradients, first_block);
#pragma unroll(ANY ? 2 : 1)
        for (int half = 0; half < 2; half++) {
            if (half && !both) break;
            forget_memory();
            u32 block = first_block + half, index = block * BLOCK;
            float g[BLOCK], moment[BLOCK], root[BLOCK], square[BLOCK], w[BLOCK], unit1;
            load_gradients(gradients + half * BLOCK, g);
            Stored of_first = ANY ? load_stored(a.first, first, block) : first_pair.get(half);
            Stored of_second = ANY ? load_stored(a.second, second, block) : second_pair.get(half);
            decode_first(a.first, first, block, of_first, old1, a.previous, moment, unit1);
            decode_second(a.second, second, block, of_second, old2, beta2, root);
            float beta1 = c.beta1 * unit1;
#pragma unroll
            for (int j = 0; j < BLOCK; j++) {
                moment[j] = __fmaf_rn(moment[j], beta1, __fmul_rn(rest1, g[j]));
                float fresh = __fmul_rn(rest2, g[j]);
                square[j] = __fmaf_rn(root[j], root[j], __fmul_rn(fresh, fresh));
                root[j] = sqrt_approx(square[j]);
            }
            u32 draws[BLOCK / 2];
#pragma unroll
            for (int j = 0; j < BLOCK / 4; j++) {
                uint2 two = random_words(a.rounding, index / 4 + j);
                draws[2 * j] = two.x, draws[2 * j + 1] = two.y;
            }
            of_first = encode_first(a.first, first, block, s.now[0], a.dither, moment);
            of_second = encode_second(a.second, second, block, s.now[1], draws, root, square);
            if (ANY) {
                store_stored(a.first, first, block, of_first), store_stored(a.second, second, block, of_second);
            } else {
                first_pair.put(half, of_first), second_pair.put(half, of_second);
            }
            if (ANY && is_still(a.c)) continue;
            // Loaded only now, because registers do not suffice for weights beside the moments.
            Nibbles codes = {};
            Rest rest = {};
            u32 scale = 0;
            float kept = c.keep, step = rate, old[BLOCK];
            if (form >= DENSE_BF16) {
                load_dense(a.w, form, block, w);
#pragma unroll
                for (int j = 0; j < BLOCK; j++) old[j] = w[j];
            } else {
                scale = byte_of(scales, half);
                if (scale == 0) kept = 0;
                step = rate * inverse_scale(scale);
                if (form == RESIDUAL4) {
                    kept *= 16384;
                    u32 indices[BLOCK / 2];
                    s.get(half, indices);
#pragma unroll
                    for (int j = 0; j < BLOCK / 2; j++) {
                        u32 values = values_of_pair(indices[j]);
                        w[2 * j] = f16_low(values), w[2 * j + 1] = f16_high(values);
                    }
                } else {
                    rest = load_rest(a.w, form, block);
                    codes = unpack_block(words, half);
#pragma unroll
                    for (int j = 0; j < BLOCK; j++) w[j] = weight_quotient(form, codes, rest, j, true);
                }
            }
#pragma unroll
            for (int j = 0; j < BLOCK; j++) {
                float denominator = __fmaf_rn(c.correction, root[j], c.eps);
                w[j] = __fmaf_rn(step, moment[j] * reciprocal_approx(denominator), __fmul_rn(kept, w[j]));
            }
            if (form >= DENSE_BF16) {
                store_dense(a.w, form, block, w, draws);
                float after[BLOCK];
                load_dense(a.w, form, block, after);
                int changed = 0;
#pragma unroll
                for (int j = 0; j < BLOCK; j++) changed += after[j] != old[j];
                changes += changed | changed << 16;
                continue;
            }
            float last = form == RESIDUAL4 ? Residual<4>::LAST : form == RESIDUAL8 ? Residual<8>::LAST : INFINITY;
            u32 scale_now = rescale(w, scale, a.band, weight_draw(draws, 0) ^ weight_draw(draws, BLOCK / 2), last, a.counters + 2);
            bool rescaled = scale != scale_now;
            if (form == RESIDUAL4) {
                u32 before[BLOCK / 2], after[BLOCK / 2], differing = 0, differing_codes = 0;
                s.get(half, before);
#pragma unroll
                for (int j = 0; j < BLOCK / 2; j++) {
                    u32 low = Residual<4>::encode(w[2 * j], weight_draw(draws, 2 * j));
                    u32 high = Residual<4>::encode(w[2 * j + 1], weight_draw(draws, 2 * j + 1));
                    after[j] = pair_of_indices(high_halves(low, high));
                    differing += differing_f16(values_of_pair(after[j]), values_of_pair(before[j]));
                    differing_codes += differing_f16(after[j] & CODES, before[j] & CODES);
                }
                s.put(half, after);
                changes += rescaled ? BLOCK << 16 | BLOCK : halves_of_sum(differing) | halves_of_sum(differing_codes) << 16;
            } else {
                Rest left;
                encode_weights(form, w, draws, codes_now[half], left);
                int stored = 0, delivered = 0;
                count_changes(form, rescaled, codes, rest, codes_now[half], left, stored, delivered);
                changes += stored | delivered << 16;
                store_rest(a.w, form, block, left);
            }
            scales = with_byte(scales, half, scale_now);
        }
        if (!(ANY && is_still(a.c)) && form == RESIDUAL4) {
            u32 lows[BLOCK / 2], highs[BLOCK / 2], residuals[4];
            s.get(0, lows), s.get(1, highs);
#pragma unroll
            for (int t = 0; t < 4; t++) {
                u32 pairs[4], codes[4];
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    pairs[2 * j] = low_halves(lows[2 * t + j], highs[2 * t + j]);
                    pairs[2 * j + 1] = high_halves(lows[2 * t + j], highs[2 * t + j]);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) codes[j] = pairs[j] & CODES;
                residuals[t] = residuals_of_pairs(pairs);
                at[t * PAIRS] = encode_word(codes);
            }
            rests[0] = {{low_halves(residuals[0], residuals[1]), low_halves(residuals[2], residuals[3])}};
            rests[1] = {{high_halves(residuals[0], residuals[1]), high_halves(residuals[2], residuals[3])}};
        }
        if (!ANY) first_pair.store(a.first, first_block), second_pair.store(a.second, first_block);
        if (ANY && is_still(a.c)) continue;
        if (!ANY) {
            store_nibbles(a.w.rest, first_block, rests);
        } else if (form == RESIDUAL4) {
            store_nibbles(a.w.rest, first_block, rests[0]);
            if (both) store_nibbles(a.w.rest, first_block + 1, rests[1]);
        } else if (form < DENSE_BF16) {
            pack_blocks(codes_now[0], codes_now[1], words);
#pragma unroll
            for (int t = 0; t < 4; t++) at[t * PAIRS] = words[t];
        }
        if (form < DENSE_BF16) *(u16*)scales_at = scales;
    }
    int stored = warp_sum((int)(changes & 0xffff)), delivered = warp_sum((int)(changes >> 16));
    if (lane_id() == 0) {
        // Integer sums do not depend on the order.
        atomicAdd(a.counters, (u64)stored);
        atomicAdd(a.counters + 1, (u64)delivered);
    }
    // Until then other blocks may read this block's shared memory.
    if (CLUSTERS && splits > 1) cluster_wait();
}

template <bool ANY>
__device__ __forceinline__ void step(const Arguments& a) {
    // Work before the first of several steps is complete when the others start, because the first one lets them start only then.
    if (!a.follows) wait_for_earlier_kernels();
    if (a.leads) let_later_kernels_start();
    adamw<ANY>(a);
    // Waiting for the last step then includes all of them.
    if (a.follows) wait_for_earlier_kernels();
}

// Blocks of the general kernel that a multiprocessor runs at once: each has the registers that it needs.
#if __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int ANY_BLOCKS = 2;
#else
constexpr int ANY_BLOCKS = 3;
#endif

// Grid: (ceil(rows / 8), 1, splits), where the splits of a group are a cluster. One kernel for the default forms with columns that are a
// multiple of 32, and one for any.
extern "C" __global__ void __launch_bounds__(THREADS, 5) adamw_default(const __grid_constant__ Arguments a) { step<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, ANY_BLOCKS) adamw_any(const __grid_constant__ Arguments a) { step<true>(a); }

struct VectorArguments {
    float* weights;
    float* first;
    float* second;
    float* gradients;       // become zero
    const float* clip;      // multiplies the factor, unless null; if it is not finite, nothing is done
    Coefficients c;
    int count;
};

// Mirrors step_f32().
extern "C" __global__ void __launch_bounds__(THREADS) adamw_vector(const __grid_constant__ VectorArguments a) {
    wait_for_earlier_kernels();
    int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= a.count) return;
    if (a.clip && !is_finite(*a.clip)) return;
    float factor = a.clip ? a.c.factor * *a.clip : a.c.factor;
    float g = a.gradients[i] * factor;
    float m = __fmaf_rn(a.c.rest1, g, __fmul_rn(a.c.beta1, a.first[i]));
    float v = __fmaf_rn(__fmul_rn(a.c.rest2, g), g, __fmul_rn(a.c.beta2, a.second[i]));
    float denominator = __fmaf_rn(a.c.correction, sqrtf(v), a.c.eps);
    a.first[i] = m, a.second[i] = v, a.gradients[i] = 0;
    if (is_still(a.c)) return;
    a.weights[i] = __fmaf_rn(-a.c.rate, m / denominator, __fmul_rn(a.c.keep, a.weights[i]));
}
