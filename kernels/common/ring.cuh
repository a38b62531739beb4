// A ring of stages in shared memory that one warp fills from global memory, ahead of its own use. A stage is two pieces of
// contiguous memory, one after the other.
#pragma once
#include "common/ptx.cuh"

template <int STAGES, int PIECE_BYTES>
struct WarpRing {
    static constexpr int STAGE_BYTES = 2 * PIECE_BYTES;
    static constexpr int BYTES = STAGES * STAGE_BYTES;
    static_assert(PIECE_BYTES % 16 == 0, "lanes copy 16 bytes");

    u32 base;

    __device__ __forceinline__ explicit WarpRing(void* memory) : base(shared_address(memory)) {}

    __device__ __forceinline__ u32 stage(int i) const { return base + i * STAGE_BYTES; }

    // Asks for two pieces, or for one and zeros. All lanes call this, for stages in turn and for each as often as wait(), when
    // no lane uses the stage any more.
    __device__ __forceinline__ void fill(int i, const u8* first, const u8* second, bool has_second) const {
        int lane = lane_id();
#pragma unroll
        for (int at = 0; at < STAGE_BYTES; at += WARP * 16) {
            int byte = at + lane * 16;
            bool zeros = byte >= PIECE_BYTES && !has_second;
            const u8* from = byte < PIECE_BYTES || zeros ? first : second - PIECE_BYTES;
            if (byte < STAGE_BYTES) copy_async_16(stage(i) + byte, from + (zeros ? 0 : byte), zeros ? 0 : 16);
        }
        copy_async_commit();
    }
    // In place of fill() when nothing is left to ask for.
    __device__ __forceinline__ void skip() const { copy_async_commit(); }

    // Waits for the stage that was asked for longest ago, of STAGES in flight.
    __device__ __forceinline__ void wait() const {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
    }
};
