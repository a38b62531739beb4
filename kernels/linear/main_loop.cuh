// Main loop of linear/tiled.cu and linear/experts.cu: products of 64 rows of NVFP4 weights with up to COLUMNS rows of f16 activations. A
// kernel says where its weights and its activations are, and stores the accumulators.
//
// A block goes along K a chunk of format/packed.cuh at a time. Chunks of weights and activations are copied to STAGES stages of shared
// memory, STAGES - 1 of them ahead. Each warp multiplies 16 rows of weights. Weights are the A operand of the matrix instruction, decoded
// once for all rows of activations. Activations are the B operand. Both have K in the order of a lane's codes: elements 4 t to 4 t + 3 of a
// block.
#pragma once
#include "common/ptx.cuh"
#include "format/packed.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * WARP;
constexpr int LINES = 2 * WARPS;                            // of a block: a line is the chunks of the same 8 rows of weights
constexpr int CHUNK_PIECES = CHUNK_BYTES / 16;
constexpr int WEIGHT_BYTES = LINES * CHUNK_BYTES;           // of a stage; activations follow
constexpr int WEIGHT_PIECES = WEIGHT_BYTES / 16;
constexpr int WEIGHT_COPIES = ceil_div(WEIGHT_PIECES, THREADS);
constexpr int X_ROW_BYTES = CHUNK_K * 2;                    // of a row's activations in a stage
constexpr int X_PIECES = X_ROW_BYTES / 16;
constexpr int ROW_STEP = THREADS / X_PIECES;                // between the rows of activations that a thread copies
static_assert(THREADS % X_PIECES == 0, "a thread copies the same piece of several rows");
static_assert(ROW_STEP % 4 == 0, "pieces that a thread copies have the same swizzle");

// Position of a 16-byte piece of row m in a stage: swizzled, so that four neighbouring rows have no bank conflicts.
__device__ __forceinline__ int piece_at(int m, int piece) { return m * X_ROW_BYTES + ((piece ^ (m % 4 * 2)) * 16); }

// A thread copies this piece of activations, in this row of the tile and every ROW_STEP-th row after it.
__device__ __forceinline__ int copied_piece() { return (int)threadIdx.x % X_PIECES; }
__device__ __forceinline__ int first_copied_row() { return (int)threadIdx.x / X_PIECES; }

template <int COLUMNS, int STAGES>
struct MainLoop {
    static constexpr int TILES = COLUMNS / 8;               // accumulators of a warp: each is 16 rows of weights by 8 of activations
    static constexpr int ROW_COPIES = COLUMNS / ROW_STEP;
    static constexpr int STAGE_BYTES = WEIGHT_BYTES + COLUMNS * X_ROW_BYTES;
    static_assert(COLUMNS % ROW_STEP == 0, "threads copy equally many rows");

    char* shared;                           // [STAGES, STAGE_BYTES]
    int steps;                              // chunks along K
    const u8* weight_from[WEIGHT_COPIES];   // pieces of the first step
    bool has_first_weights = false;         // whether their copies have started

    // line(i) returns the first chunk of line i. Its result for i >= LINES is not used. Warp w multiplies lines 2 w and 2 w + 1.
    template <class Line>
    __device__ __forceinline__ MainLoop(char* shared, int steps, Line line) : shared(shared), steps(steps) {
#pragma unroll
        for (int i = 0; i < WEIGHT_COPIES; i++) {
            int piece = (int)threadIdx.x + i * THREADS;
            weight_from[i] = line(piece / CHUNK_PIECES) + piece % CHUNK_PIECES * 16;
        }
    }

    // Starts the copies of the first weights, which do not depend on the predecessor kernel. The first step then waits for all of them.
    __device__ __forceinline__ void load_first_weights() {
        has_first_weights = true;
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < steps) load_weights(i);
        }
    }

    // Adds the products along K to the accumulators of a warp.
    //
    // row(i) returns the address of the copied_piece() of the first step in row first_copied_row() + i * ROW_STEP of the tile. Activations
    // beyond `rows` and `k` are zeros: their copies get the address `x` and read nothing.
    template <class Row>
    __device__ __forceinline__ void multiply(const u16* x, int rows, int k, Row row, float (&c)[TILES][4]) const {
        int x_piece = copied_piece(), x_row = first_copied_row();
        auto load_x = [&](int step) {
            u32 to = shared_address(stage_at(step) + WEIGHT_BYTES + piece_at(x_row, x_piece));
            bool inside = step * CHUNK_K + x_piece * 8 < k;
#pragma unroll
            for (int i = 0; i < ROW_COPIES; i++) {
                bool exists = inside && x_row + i * ROW_STEP < rows;
                copy_async_16(to + i * ROW_STEP * X_ROW_BYTES, exists ? row(i) + step * CHUNK_K : x, exists ? 16 : 0);
            }
        };
#pragma unroll
        for (int i = 0; i < STAGES - 1; i++) {
            if (i < steps) {
                if (!has_first_weights) load_weights(i);
                load_x(i);
            }
            copy_async_commit();
        }

        int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
        // The terms of piece_at() that depend only on the lane.
        int x_lane = g * X_ROW_BYTES + t * 8, swizzle = g % 4 * 32;
        for (int step = 0; step < steps; step++) {
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            if (step + STAGES - 1 < steps) {
                load_weights(step + STAGES - 1);
                load_x(step + STAGES - 1);
            }
            copy_async_commit();
            const char* stage = stage_at(step);
            const char *low = stage + 2 * warp * CHUNK_BYTES, *high = low + CHUNK_BYTES, *staged_x = stage + WEIGHT_BYTES;
            uint4 low_codes = *(const uint4*)(low + lane * 16), high_codes = *(const uint4*)(high + lane * 16);
            uint2 low_scales = *(const uint2*)(low + CHUNK_CODES + g * CHUNK_BLOCKS);
            uint2 high_scales = *(const uint2*)(high + CHUNK_CODES + g * CHUNK_BLOCKS);
            u32 words_low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
            u32 words_high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 u[4], v[4];
                decode_packed(words_low[j], low_scales, j, u);
                decode_packed(words_high[j], high_scales, j, v);
                // Regroups pairs of an element of each block into pairs of neighbours in one block.
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 select = half ? 0x7632 : 0x5410;
                    u32 a0 = __byte_perm(u[0], u[1], select), a1 = __byte_perm(v[0], v[1], select);
                    u32 a2 = __byte_perm(u[2], u[3], select), a3 = __byte_perm(v[2], v[3], select);
                    const char* from = staged_x + x_lane + (((2 * j + half) * 32) ^ swizzle);
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        uint2 b = *(const uint2*)(from + i * 8 * X_ROW_BYTES);
                        mma_f16(c[i], a0, a1, a2, a3, b.x, b.y);
                    }
                }
            }
        }
    }

private:
    __device__ __forceinline__ char* stage_at(int step) const { return shared + step % STAGES * STAGE_BYTES; }

    __device__ __forceinline__ void load_weights(int step) const {
        u32 to = shared_address(stage_at(step) + (int)threadIdx.x * 16);
#pragma unroll
        for (int i = 0; i < WEIGHT_COPIES; i++) {
            bool exists = (int)threadIdx.x + i * THREADS < WEIGHT_PIECES;
            if (exists) copy_async_16(to + i * THREADS * 16, weight_from[i] + (size_t)step * CHUNK_BYTES, 16);
        }
    }
};
