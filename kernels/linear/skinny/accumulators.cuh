// The accumulators of a warp's tile, and how it adds a step to them: fetch() loads the step's weights to registers, after which their stage
// of the ring may be filled again; multiply() multiplies them with the activations at byte `at` of a row; store() writes the accumulators
// to shared memory, as [m][ACCUMULATORS], and resets them to zero.
#pragma once
#include "linear/skinny/memory.cuh"
#include "format/fragment_major.cuh"

// Up to 16 rows. Activations are the B operand: up to 8 rows in its 8 columns, up to 16 in two of them. DEEP has the activations of the
// first chunk in columns 0 to 3 and those of the second in columns 4 to 7, and only the matching quarters of the result count: tiles are
// half as large, and small matrices keep all multiprocessors busy.
template <class C>
class Accumulators {
    static constexpr int COLUMNS = ceil_div(C::MAX_ROWS, 8);
    static constexpr int CHAINS = C::IN_RANGES ? 1 : 2;     // of sums: two hide more of the latency of matrix instructions
    static constexpr Tile TILE = C::TILE;
    u32 x[COLUMNS], swap[COLUMNS];
    int rows;
    float c[COLUMNS][CHAINS][4] = {};
    uint4 low_codes, high_codes;
    uint2 low_scales, high_scales;

public:
    // Distance between the activations of consecutive steps.
    static constexpr int STRIDE = C::TAKES_FRAGMENTS ? COLUMNS * GROUP_BYTES : C::STEP_BYTES;

    __device__ __forceinline__ Accumulators(const Arguments& a, const SharedMemory<C>& memory) : rows(a.m) {
        int g = lane_id() / 4, t = lane_id() % 4;
        u32 xs = memory.activations_at;
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            // Beyond the last row, that one is repeated; its accumulators are dropped.
            int m = min(TILE == DEEP ? g % 4 : g + 8 * column, rows - 1);
            u32 in_row = (TILE == DEEP && g >= 4 ? X_CHUNK_BYTES : 0) + t * 16;
            x[column] = xs + (C::TAKES_FRAGMENTS ? column * GROUP_BYTES + lane_id() * 16 : m * memory.row_bytes() + in_row);
            swap[column] = (m & 1) * 64;
        }
    }
    template <typename Ring>
    __device__ __forceinline__ void fetch(const Ring& ring, u32 stage) {
        u32 codes = ring.lane_base + stage, scales = ring.base + stage + CHUNK_CODES + lane_id() / 4 * CHUNK_BLOCKS;
        low_codes = load_shared_16(codes);
        high_codes = load_shared_16(codes + CHUNK_BYTES);
        low_scales = load_shared_8(scales);
        high_scales = load_shared_8(scales + CHUNK_BYTES);
    }
    __device__ __forceinline__ void multiply(u32 at) {
        u32 low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w}, high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 b[COLUMNS][4], u[4], v[4];
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                if (C::TAKES_FRAGMENTS) {
                    load_matrices(b[column], x[column] + at + 4 * j * FRAGMENT_BYTES);
                } else {
                    uint4 piece = load_shared_16(x[column] + at + ((j * 64) ^ swap[column]));
                    b[column][0] = piece.x, b[column][1] = piece.y, b[column][2] = piece.z, b[column][3] = piece.w;
                }
            }
            decode_packed(low[j], low_scales, j, u);
            decode_packed(high[j], high_scales, j, v);
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                mma_f16(c[column][0], u[0], v[0], u[1], v[1], b[column][0], b[column][1]);
                mma_f16(c[column][CHAINS - 1], u[2], v[2], u[3], v[3], b[column][2], b[column][3]);
            }
        }
    }
    __device__ __forceinline__ void store(float* to) {
        int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            float(&s)[CHAINS][4] = c[column];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // For DEEP, only rows and columns of the same chunk count.
                int m = (TILE == DEEP ? 2 * t % 4 : 8 * column + 2 * t) + i % 2;
                bool counts = m < rows && (TILE != DEEP || t / 2 == i / 2);
                if (counts) to[m * ACCUMULATORS + g + i / 2 * 8] = CHAINS == 1 ? s[0][i] : s[0][i] + s[CHAINS - 1][i];
#pragma unroll
                for (int chain = 0; chain < CHAINS; chain++) s[chain][i] = 0;
            }
        }
    }
};

// With one row, B has room for a column per block of a chunk, in which the activations of the other blocks are zeros. The sums of blocks
// are then multiplied by scales, 2 per 32 weights, instead of the weights. Activations become zeros by a product, in another pipe than the
// one that decodes; a value that is not finite reaches all sums, as it does through weights of zero.
template <class C>
class OneRowAccumulators {
    static_assert(C::TILE != TALL, "one row takes small tiles");
    static constexpr Tile TILE = C::TILE;
    u32 x;
    u32 scales;         // of a lane, from the start of a stage
    u32 select[4];      // for each word of codes: 1 for the activations that belong in the lane's column, 0 for the others
    float sums[2] = {};
    uint4 low_codes, high_codes;
    u32 first_scales, second_scales;

public:
    static constexpr int STRIDE = C::STEP_BYTES;

    // DEEP has columns for half of the first chunk's blocks and half of the second's, and makes two passes over them.
    __device__ __forceinline__ OneRowAccumulators(const Arguments&, const SharedMemory<C>& memory) {
        int g = lane_id() / 4, t = lane_id() % 4, block = TILE == DEEP ? g % 4 : g;
        x = memory.activations_at + (TILE == DEEP && g >= 4 ? X_CHUNK_BYTES : 0) + block / 2 * 64 + t * 16;
        scales = CHUNK_CODES + g * CHUNK_BLOCKS + (TILE == DEEP ? t / 2 * CHUNK_BYTES + t % 2 * 2 : t * 2);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool own = block / 2 == (TILE == DEEP ? j % 2 : j);
            select[j] = !own ? 0 : block % 2 ? 0x3c000000 : 0x3c00;
        }
    }
    template <typename Ring>
    __device__ __forceinline__ void fetch(const Ring& ring, u32 stage) {
        u32 codes = ring.lane_base + stage, of_lane = ring.base + stage + scales;
        low_codes = load_shared_16(codes);
        high_codes = load_shared_16(codes + CHUNK_BYTES);
        first_scales = load_shared_2(of_lane);
        second_scales = load_shared_2(of_lane + (TILE == DEEP ? CHUNK_BLOCKS / 2 : CHUNK_BYTES));
    }
    __device__ __forceinline__ void multiply(u32 at) {
        u32 low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w}, high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
        uint4 first = load_shared_16(x + at), second = TILE == DEEP ? load_shared_16(x + at + 128) : first;
        float c[TILE == DEEP ? 2 : 1][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 u[4], v[4];
            decode_word(low[j], u);
            decode_word(high[j], v);
            uint4 b = j < 2 ? first : second;
            float(&half)[4] = c[TILE == DEEP ? j / 2 : 0];
            mma_f16(half, u[0], v[0], u[1], v[1], mul_f16(b.x, select[j]), mul_f16(b.y, select[j]));
            mma_f16(half, u[2], v[2], u[3], v[3], mul_f16(b.z, select[j]), mul_f16(b.w, select[j]));
        }
        u32 p = packed_scales(first_scales), q = packed_scales(second_scales);
        if (TILE == DEEP) {
            // Rows of the first chunk with its columns, and rows of the second with the others.
            bool is_first = lane_id() % 4 < 2;
            sums[0] = fmaf(f16_low(p), is_first ? c[0][0] : c[0][2], fmaf(f16_high(p), is_first ? c[0][1] : c[0][3], sums[0]));
            sums[1] = fmaf(f16_low(q), is_first ? c[1][0] : c[1][2], fmaf(f16_high(q), is_first ? c[1][1] : c[1][3], sums[1]));
        } else {
            sums[0] = fmaf(f16_low(p), c[0][0], fmaf(f16_high(p), c[0][1], sums[0]));
            sums[1] = fmaf(f16_low(q), c[0][2], fmaf(f16_high(q), c[0][3], sums[1]));
        }
    }
    __device__ __forceinline__ void store(float* to) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = sums[i];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            if (lane_id() % 4 == 0) to[lane_id() / 4 + 8 * i] = sum;
            sums[i] = 0;
        }
    }
};

template <class C, bool ONE_ROW = C::MAX_ROWS == 1 && !C::IN_RANGES>
struct AccumulatorsOf {
    using Type = Accumulators<C>;
};
template <class C>
struct AccumulatorsOf<C, true> {
    using Type = OneRowAccumulators<C>;
};
