// Int8 rows on their way to tensor cores: a warp's ring of stages in shared memory, which it fills by asynchronous copies of 256 bytes of a row
// at a time, because memory is slower to read in shorter parts.
#pragma once
#include "format/int8.cuh"

constexpr int STEP_K = 256, ROW_PIECES = STEP_K / 16;   // elements of K in a stage, and pieces of 16 bytes of a row of it
constexpr int ROWS_AT_ONCE = WARP / ROW_PIECES;         // that a warp copies with one instruction

// A stage has ROWS rows.
template <int ROWS>
class Int8Ring {
    u32 to, own;    // in stage 0: where the lane copies its first piece, and where it finds its first codes of row lane / 4

public:
    static constexpr int STAGE_BYTES = ROWS * STEP_K;

    // The first of the rows that a lane copies, each ROWS_AT_ONCE after the one before, and the first element of its pieces.
    static __device__ __forceinline__ int first_row() { return lane_id() / ROW_PIECES; }
    static __device__ __forceinline__ int first_k() { return lane_id() % ROW_PIECES * 16; }

    // Pieces of a row are swizzled, so that two rows have no bank conflicts: odd rows exchange neighbouring fours. The base is aligned to 128.
    __device__ __forceinline__ explicit Int8Ring(u32 base)
        : to(base + first_row() * STEP_K + (first_k() ^ (first_row() % 2 * 64))), own(base + lane_id() / 4 * STEP_K + lane_id() / 4 % 2 * 64 + lane_id() % 4 * 16) {}

    // Starts copying a step for a stage that no lane uses any more. `from` is the lane's first piece, in rows of `pitch` bytes, of which the
    // matrix has `below` after the lane's first; beyond them its last row is copied. Without `is_there`, pieces are zeros.
    __device__ __forceinline__ void request(int stage, const u8* from, int below, int pitch, bool is_there) const {
#pragma unroll
        for (int row = 0; row < ROWS; row += ROWS_AT_ONCE) {
            const u8* piece = is_there ? from + (long long)min(row, below) * pitch : from;
            copy_async_16(to + stage * STAGE_BYTES + row * STEP_K, piece, is_there ? 16 : 0);
        }
    }
    // The lane's 16 codes of 64 elements of K, the `index`-th of the stage, in row lane / 4 or an even number of rows below it.
    __device__ __forceinline__ uint4 take(int stage, int index, int below = 0) const {
        return load_shared_16((own ^ (index % 2 * 64)) + stage * STAGE_BYTES + below * STEP_K + index / 2 * 128);
    }
};
