// A ring of stages in shared memory that one warp fills from global memory ahead of its own use. A stage holds two pieces, each of them
// contiguous in global memory.
#pragma once
#include "common/ptx.cuh"

template <int STAGES, int PIECE_BYTES>
struct WarpRing {
    static constexpr int STAGE_BYTES = 2 * PIECE_BYTES, BYTES = STAGES * STAGE_BYTES;
    // Lanes copy 16 bytes at a time, in two rounds of all lanes and a third of the last lanes. In the second round the first lanes copy the
    // end of the first piece.
    static constexpr int ROUND = WARP * 16, ENDING = (PIECE_BYTES - ROUND) / 16, REST = STAGE_BYTES - 2 * ROUND;
    static_assert(PIECE_BYTES % 16 == 0 && ENDING >= 0 && REST >= 0 && REST <= ROUND, "a stage takes three rounds");

    u32 base, lane_base;
    bool is_last;   // whether the lane copies in the third round

    __device__ __forceinline__ explicit WarpRing(void* memory)
        : base(shared_address(memory)), lane_base(base + lane_id() * 16), is_last(lane_id() >= WARP - REST / 16) {}

    // Offset of stage i.
    static __device__ __forceinline__ u32 offset(int i) { return i * STAGE_BYTES; }
    // Offset of the stage after the one at `offset`.
    static __device__ __forceinline__ u32 after(u32 offset) { return offset + STAGE_BYTES == BYTES ? 0 : offset + STAGE_BYTES; }

    // Offset of the stage before.
    static __device__ __forceinline__ u32 before(u32 offset) { return (offset == 0 ? BYTES : offset) - STAGE_BYTES; }

    // The offset from a lane's address in the first piece to its addresses in the second.
    static __device__ __forceinline__ long long to_second(const u8* first, const u8* second) {
        return lane_id() < ENDING ? 0 : second - first - PIECE_BYTES;
    }
    // Requests two pieces for a stage; `first` is the first one, 16 bytes further on for each lane. All lanes call this for each stage in
    // turn, once per wait(), when no lane uses the stage any more.
    __device__ __forceinline__ void fill(u32 offset, const u8* first, long long to_second) const {
        u32 to = lane_base + offset;
        const u8* second = first + to_second;
        copy_async_16(to, first);
        copy_async_16(to + ROUND, second + ROUND);
        if (is_last) copy_async_16(to + ROUND + REST, second + ROUND + REST);
        copy_async_commit();
    }
    // Replaces fill() when nothing is left to request.
    __device__ __forceinline__ void skip() const { copy_async_commit(); }

    // Waits for the oldest of STAGES requests in flight.
    __device__ __forceinline__ void wait() const {
        copy_async_wait<STAGES - 1>();
        __syncwarp();
    }
};
