// AdamW on rows of a matrix in their stored form, in one pass over its memory. Mirrors src/format/adamw.rs and src/cpu/training/optimizer.rs,
// bit for bit but for roots and quotients, which are exact to two units in the last place: exact ones would take a fifth of the time, for
// numbers that are rounded to 4 bits next.
//
// A block of threads takes a group of 8 rows. First it looks for the largest gradient and the largest scales of the moments, from which the
// group's new global scales follow; then each thread updates two blocks of 16 weights at a time, those that share words of a chunk. Gradients
// are read twice, the second time out of a cache.
#include "common/reduce.cuh"
#include "format/moment.cuh"
#include "optimizer/weights.cuh"

enum FirstForm { FIRST_INT4, FIRST_NVFP4, FIRST_INT8, FIRST_F32 };
enum SecondForm { SECOND_UINT4, SECOND_NVFP4, SECOND_INT8, SECOND_F32 };

// Mirrors Coefficients.
struct Coefficients {
    float factor, beta1, rest1, beta2, rest2, correction, eps, keep, rate;
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
    u64* counters;          // weights changed as stored, and as delivered: added to; and the largest scale of weights
    const float* clip;      // multiplies the factor, unless null; if it is not finite, nothing is done
    Coefficients c;
    int first_row;          // a multiple of 8
    int rows;
    int fresh_scales;
};

constexpr int THREADS = 128;
constexpr float KEPT_LEAST = 5.2f, KEPT_MOST = 6.6f;

__device__ __forceinline__ float first_most(int form) { return form == FIRST_INT4 ? FIRST_MAX : form == FIRST_NVFP4 ? E2M1_MAX : WIDE_MAX; }
__device__ __forceinline__ float second_most(int form) { return form == SECOND_UINT4 ? SECOND_MAX : form == SECOND_NVFP4 ? E2M1_MAX : WIDE_MAX; }
__device__ __forceinline__ int first_bits(int form) { return form <= FIRST_NVFP4 ? 11 : 15; }
__device__ __forceinline__ int second_bits(int form) { return form == SECOND_UINT4 ? 12 : form == SECOND_NVFP4 ? 11 : 15; }

// The largest of some values of all threads, which must not be negative.
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

__device__ __forceinline__ Nibbles load_nibbles(const u8* codes, u64 block) {
    uint2 v = ((const uint2*)codes)[block];
    return {{v.x, v.y}};
}
__device__ __forceinline__ void store_nibbles(u8* codes, u64 block, const Nibbles& n) { ((uint2*)codes)[block] = make_uint2(n.words[0], n.words[1]); }

__device__ __forceinline__ float amax_of(const float (&x)[BLOCK]) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) most = fmaxf(most, fabsf(x[i]));
    return most;
}
__device__ __forceinline__ float root_of(float x) { return x * rsqrt_approx(fmaxf(x, 1e-37f)); }
__device__ __forceinline__ float inverse_of(float unit) { return unit > 0 ? 1 / unit : 0; }

__device__ __forceinline__ void load_first(const Moments& m, int form, u64 block, float global, u64 key, u32 index, float (&x)[BLOCK]) {
    if (form == FIRST_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = ((const float*)m.codes)[block * BLOCK + i];
        return;
    }
    float unit = scale_to_float(m.scales[block]) * global;
    if (form == FIRST_INT8) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = (float)((const signed char*)m.codes)[block * BLOCK + i] * unit;
        return;
    }
    Nibbles codes = load_nibbles(m.codes, block);
    if (form == FIRST_NVFP4) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = code_to_float(codes.at(i)) * unit;
        return;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Bytes bytes = bytes_of_nibbles(codes.words[half] ^ 0x88888888u);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int at = 8 * half + i;
            u32 draw = random_bits32(key, index / 4 + at / 4);
            x[at] = decode_first(from_nibble(bytes, i), dither8(draw, at % 4)) * unit;
        }
    }
}

__device__ __forceinline__ void store_first(const Moments& m, int form, u64 block, float global, u64 key, u32 index, const float (&x)[BLOCK]) {
    if (form == FIRST_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) ((float*)m.codes)[block * BLOCK + i] = x[i];
        return;
    }
    u32 scale = moment_scale(amax_of(x), first_most(form), global);
    m.scales[block] = scale;
    float inverse = inverse_of(scale_to_float(scale) * global);
    if (form == FIRST_INT8) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            float r = round_stochastic(__fmul_rn(x[i], inverse), threshold16(random_bits32(key, index + i)));
            m.codes[block * BLOCK + i] = (u8)(int)fminf(fmaxf(r, -WIDE_MAX), WIDE_MAX);
        }
        return;
    }
    Nibbles codes = {};
    if (form == FIRST_NVFP4) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            float q = x[i] * inverse;
            u32 random = random_bits32(key, index + i) << 16 | 1 << 15;
            codes.put(i, (__float_as_uint(q) >> 28 & 8) | stochastic(fabsf(q), random));
        }
    } else {
        float rounded[BLOCK];
#pragma unroll
        for (int i = 0; i < BLOCK; i++) rounded[i] = encode_first(__fmul_rn(x[i], inverse), dither8(random_bits32(key, index / 4 + i / 4), i % 4));
        codes.words[0] = low_nibbles(rounded), codes.words[1] = low_nibbles(rounded + 8);
    }
    store_nibbles(m.codes, block, codes);
}

// Roots of second moments.
__device__ __forceinline__ void load_second(const Moments& m, int form, u64 block, float global, float (&x)[BLOCK]) {
    if (form == SECOND_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = sqrtf(((const float*)m.codes)[block * BLOCK + i]);
        return;
    }
    float unit = scale_to_float(m.scales[block]) * global;
    if (form == SECOND_INT8) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) x[i] = (float)m.codes[block * BLOCK + i] * unit;
        return;
    }
    Nibbles codes = load_nibbles(m.codes, block);
    Bytes bytes[2] = {bytes_of_nibbles(codes.words[0]), bytes_of_nibbles(codes.words[1])};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        x[i] = (form == SECOND_UINT4 ? from_nibble(bytes[i / 8], i % 8) - TWO_23 : code_to_float(codes.at(i) & 7)) * unit;
    }
}

__device__ __forceinline__ void store_second(const Moments& m, int form, u64 block, float global, const u32 (&draws)[BLOCK], const float (&x)[BLOCK],
                                             const float (&squares)[BLOCK]) {
    if (form == SECOND_F32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) ((float*)m.codes)[block * BLOCK + i] = squares[i];
        return;
    }
    u32 scale = moment_scale(amax_of(x), second_most(form), global);
    m.scales[block] = scale;
    float inverse = inverse_of(scale_to_float(scale) * global);
    Nibbles codes = {};
    float rounded[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float q = __fmul_rn(x[i], inverse);
        if (form == SECOND_UINT4) {
            rounded[i] = encode_second(q, fraction16(draws[i], 1));
        } else if (form == SECOND_NVFP4) {
            codes.put(i, max(stochastic(q, (draws[i] & 0xffff0000u) | 1 << 15), 1u));
        } else {
            m.codes[block * BLOCK + i] = (u8)fminf(fmaxf(round_stochastic(q, fraction16(draws[i], 1)), 1.0f), WIDE_MAX);
        }
    }
    if (form == SECOND_UINT4) codes.words[0] = low_nibbles(rounded), codes.words[1] = low_nibbles(rounded + 8);
    if (form != SECOND_INT8) store_nibbles(m.codes, block, codes);
}

__device__ __forceinline__ u32 code_of_level(int level) { return level < 0 ? 8 - level : level; }

// The scale of a block of weights: as it was, or anew.
__device__ __forceinline__ u32 weight_scale(const float (&x)[BLOCK], float global, u32 scale, bool keeps) {
    float amax = amax_of(x), unit = scale_to_float(scale) * global;
    if (keeps && amax >= KEPT_LEAST * unit && amax <= KEPT_MOST * unit) return scale;
    scale = encode_scale(amax / (E2M1_MAX * global));
    return scale == 0 && amax > 0 ? 1 : scale;
}

// The codes and the rest of a block of weights; draws hold 16 bits for each in their lower halves.
__device__ __forceinline__ void encode_weights(int form, const float (&x)[BLOCK], float inverse, const u32 (&draws)[BLOCK], Nibbles& codes, Rest& rest) {
    codes = {}, rest = {};
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        float q = __fmul_rn(x[i], inverse);
        u32 random = draws[i] << 16 | 1 << 15, sign = __float_as_uint(q) >> 28 & 8;
        if (form == RESIDUAL8) {
            int index = (int)Residual<8>::encode(q, Residual<8>::fraction(draws[i]));
            codes.put(i, code_of_level((index + 128) >> 8));
            rest.bytes[i / 4] |= (u32)(index & 255) << (8 * (i % 4));
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

__device__ __forceinline__ void store_dense(const Weights& w, int form, u64 block, const float (&x)[BLOCK], const u32 (&draws)[BLOCK]) {
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        // What carries out of the lower half goes to the next bf16.
        if (form == DENSE_BF16) ((u16*)w.codes)[block * BLOCK + i] = (__float_as_uint(x[i]) + (draws[i] & 0xffff)) >> 16;
        if (form == DENSE_F32) ((float*)w.codes)[block * BLOCK + i] = x[i];
    }
}

// Nibbles that are not zero.
__device__ __forceinline__ int count_nibbles(u32 x) {
    x |= x >> 2;
    return __popc((x | x >> 1) & 0x11111111u);
}
// A code of -0 as one of 0.
__device__ __forceinline__ u32 without_minus_zero(u32 x) {
    u32 magnitudes = x & 0x77777777u;
    return magnitudes | (x & ((magnitudes << 1 | magnitudes << 2 | magnitudes << 3) & 0x88888888u));
}

// How many weights of a block are stored otherwise than before.
__device__ __forceinline__ void count_changes(int form, bool rescaled, const Nibbles& codes, const Rest& rest, const Nibbles& codes_now,
                                              const Rest& rest_now, int& stored, int& delivered) {
    if (rescaled) {
        stored += BLOCK, delivered += BLOCK;
        return;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 differing = without_minus_zero(codes.words[i]) ^ without_minus_zero(codes_now.words[i]);
        delivered += count_nibbles(differing);
        if (form == RESIDUAL8) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                u32 bytes = rest.bytes[2 * i + j / 4] ^ rest_now.bytes[2 * i + j / 4];
                stored += (bytes >> (8 * (j % 4)) & 255) != 0 || (differing >> (4 * j) & 15) != 0;
            }
        } else {
            stored += count_nibbles(differing | (rest.nibbles.words[i] ^ rest_now.nibbles.words[i]));
        }
    }
}

template <bool ANY>
__device__ __forceinline__ void adamw(const Arguments& a) {
    __shared__ float shared[THREADS / WARP];
    wait_for_earlier_kernels();
    const int form = ANY ? a.w.form : RESIDUAL4, first = ANY ? a.first.form : FIRST_INT4, second = ANY ? a.second.form : SECOND_UINT4;
    const bool keeps = !ANY || !a.fresh_scales;
    Coefficients c = a.c;
    if (a.clip) {
        if (!is_finite(*a.clip)) return;
        c.factor *= *a.clip;
    }
    int cols = a.w.cols, blocks = cols / BLOCK, pairs = ceil_div(blocks, 2), group = a.first_row / CHUNK_ROWS + blockIdx.x;
    int row0 = blockIdx.x * CHUNK_ROWS, rows = min(CHUNK_ROWS, a.rows - row0);

    float largest = 0, scale1 = 0, scale2 = 0;
    u64 begin = (u64)(a.first_row + row0) * blocks;
    for (int i = threadIdx.x; i < rows * blocks; i += THREADS) {
        float g[BLOCK];
        load_gradients(a.gradients + ((u64)row0 * blocks + i) * BLOCK, g);
        largest = fmaxf(largest, amax_of(g));
        if (first != FIRST_F32) scale1 = fmaxf(scale1, scale_to_float(a.first.scales[begin + i]));
        if (second != SECOND_F32) scale2 = fmaxf(scale2, scale_to_float(a.second.scales[begin + i]));
    }
    largest = block_max(largest, shared) * c.factor;
    scale1 = block_max(scale1, shared), scale2 = block_max(scale2, shared);
    float old1 = first == FIRST_F32 ? 0 : a.first.globals[group], old2 = second == SECOND_F32 ? 0 : a.second.globals[group];
    float m = (first_most(first) + 0.5f) * scale1 * old1, s = second_most(second) * scale2 * old2;
    float new1 = power_for(__fmaf_rn(c.beta1, m, c.rest1 * largest), first_bits(first));
    float new2 = power_for(sqrtf(__fmaf_rn(c.beta2 * s, s, c.rest2 * largest * largest)), second_bits(second));
    __syncthreads();
    if (threadIdx.x == 0) {
        if (first != FIRST_F32) a.first.globals[group] = new1;
        if (second != SECOND_F32) a.second.globals[group] = new2;
    }

    int stored = 0, delivered = 0;
    u32 most = 0;
    // Neighbouring threads take the pairs of a chunk's row, then its rows.
    constexpr int PAIRS = CHUNK_BLOCKS / 2;
    for (int i = threadIdx.x; i < ceil_div(pairs, PAIRS) * PAIRS * CHUNK_ROWS; i += THREADS) {
        int row = i / PAIRS % CHUNK_ROWS, pair = i / (PAIRS * CHUNK_ROWS) * PAIRS + i % PAIRS;
        if (row >= rows || pair >= pairs) continue;
        u8* chunk = a.w.codes + ((u64)group * a.w.chunks + pair / PAIRS) * CHUNK_BYTES;
        u32* at = (u32*)chunk + 16 * row + pair % PAIRS;
        u32 words[4] = {};
        if (form < DENSE_BF16) words[0] = at[0], words[1] = at[4], words[2] = at[8], words[3] = at[12];
        Nibbles now[2] = {};
        u32 codes_now[2][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int column = 2 * pair + half;
            if (column >= blocks) break;
            u64 block = begin + (u64)row * blocks + column;
            u32 index = (u32)block * BLOCK;
            float g[BLOCK], moment[BLOCK], root[BLOCK], square[BLOCK], w[BLOCK];
            u32 draws[BLOCK];
            load_gradients(a.gradients + ((u64)(row0 + row) * blocks + column) * BLOCK, g);
            load_first(a.first, first, block, old1, a.previous, index, moment);
            load_second(a.second, second, block, old2, root);
            Nibbles codes = {};
            Rest rest = {};
            Indices indices[4] = {};
            u32 scale = 0;
            if (form >= DENSE_BF16) {
                load_dense(a.w, form, block, w);
            } else {
                rest = load_rest(a.w, form, block);
                scale = *scale_at(chunk, row, column);
                float unit = scale_to_float(scale) * a.w.global;
                if (form != RESIDUAL4) codes = unpack_block(words, half);
#pragma unroll
                for (int j = 0; j < BLOCK; j++) {
                    if (form == RESIDUAL4 && j % 4 == 0) indices[j / 4] = indices_of(words[j / 4], half, rest, j / 4);
                    w[j] = (form == RESIDUAL4 ? Residual<4>::value(indices[j / 4].at(j % 4)) : weight_quotient(form, codes, rest, j, true)) * unit;
                }
            }
            float old[BLOCK];
#pragma unroll
            for (int j = 0; j < BLOCK; j++) {
                old[j] = w[j];
                draws[j] = random_bits32(a.rounding, index + j);
                float gradient = g[j] * c.factor;
                moment[j] = __fmaf_rn(c.rest1, gradient, __fmul_rn(c.beta1, moment[j]));
                square[j] = __fmaf_rn(__fmul_rn(c.beta2, root[j]), root[j], __fmul_rn(__fmul_rn(c.rest2, gradient), gradient));
                root[j] = root_of(square[j]);
                float denominator = __fmaf_rn(c.correction, root[j], c.eps);
                w[j] = __fmaf_rn(-c.rate, moment[j] * reciprocal_approx(denominator), __fmul_rn(c.keep, w[j]));
            }
            store_first(a.first, first, block, new1, a.dither, index, moment);
            store_second(a.second, second, block, new2, draws, root, square);
            if (form >= DENSE_BF16) {
                store_dense(a.w, form, block, w, draws);
                float after[BLOCK];
                load_dense(a.w, form, block, after);
                int changed = 0;
#pragma unroll
                for (int j = 0; j < BLOCK; j++) changed += after[j] != old[j];
                stored += changed, delivered += changed;
                continue;
            }
            u32 scale_now = weight_scale(w, a.w.global, scale, keeps);
            float inverse = inverse_of(scale_to_float(scale_now) * a.w.global);
            Rest left = {};
            if (form == RESIDUAL4) {
                int differing = 0, differing_codes = 0;
#pragma unroll
                for (int t = 0; t < 4; t++) {
                    auto encode = [&](int j) { return Residual<4>::encode(__fmul_rn(w[j], inverse), Residual<4>::fraction(draws[j])); };
                    Indices after = Indices::of(encode(4 * t), encode(4 * t + 1), encode(4 * t + 2), encode(4 * t + 3));
                    u32 changed = after.bytes ^ indices[t].bytes;
                    differing += count_bytes((changed | changed >> 4) & 0x0f0f0f0fu);
                    differing_codes += count_bytes(after.levels() ^ indices[t].levels());
                    codes_now[half][t] = after.codes();
                    u32 residuals = after.bytes & 0x0f0f0f0fu;
                    residuals |= residuals >> 4;
                    left.nibbles.words[t / 2] |= __byte_perm(residuals, 0, 0x4420) << (16 * (t % 2));
                }
                stored += scale == scale_now ? differing : BLOCK;
                delivered += scale == scale_now ? differing_codes : BLOCK;
            } else {
                encode_weights(form, w, inverse, draws, now[half], left);
                count_changes(form, scale != scale_now, codes, rest, now[half], left, stored, delivered);
            }
            store_rest(a.w, form, block, left);
            *scale_at(chunk, row, column) = scale_now;
            most = max(most, scale_now);
        }
        if (form == RESIDUAL4) {
#pragma unroll
            for (int t = 0; t < 4; t++) at[4 * t] = word_of_codes(codes_now[0][t], codes_now[1][t]);
        } else if (form < DENSE_BF16) {
            pack_blocks(now[0], now[1], words);
            at[0] = words[0], at[4] = words[1], at[8] = words[2], at[12] = words[3];
        }
    }
    stored = warp_sum(stored), delivered = warp_sum(delivered), most = (u32)warp_max((float)most);
    if (lane_id() == 0) {
        // Whole numbers add up to the same whatever their order.
        atomicAdd(a.counters, (u64)stored);
        atomicAdd(a.counters + 1, (u64)delivered);
        atomicMax(a.counters + 2, (u64)most);
    }
}

// Grid: (ceil(rows / 8)). The default forms, and any.
extern "C" __global__ void __launch_bounds__(THREADS) adamw_default(const __grid_constant__ Arguments a) { adamw<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) adamw_any(const __grid_constant__ Arguments a) { adamw<true>(a); }

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
    a.weights[i] = __fmaf_rn(-a.c.rate, m / denominator, __fmul_rn(a.c.keep, a.weights[i]));
}
