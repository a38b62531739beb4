// The shared memory of a block of the skinny GEMM, in this order:
//
//   rings           of weights, one for each warp
//   activations     of the block's range of K, padded with zeros to whole steps
//   barriers        BARRIER_BYTES: for activations that arrive by bulk copies; the last is for outputs that another block sends
//   row_factors     [WARPS]: the missing part of each row's factor of a fused norm
//   received        of a cluster that splits K: the other block's sums for this block's share of the outputs, IN_RANGES one for each range
//   accumulators    [tiles + WARPS - 1][m][ACCUMULATORS], IN_RANGES [tiles][ranges][m][ACCUMULATORS]
//
// Everything but the accumulators has the same address in all blocks of a cluster.
//
// A row's activations are kept in pieces of 16 bytes, as in norm/piece.cuh: lane t multiplies piece 16 chunk + 4 j + t with word j of a
// chunk of weights. Odd rows exchange the halves of each 128 bytes, so that neighbouring rows share no bank. Fragment-major activations
// follow format/fragment_major.cuh instead.
#pragma once
#include "common/ptx.cuh"
#include "linear/skinny/schedule.cuh"

constexpr int BARRIER_BYTES = 128, EXCHANGE_BARRIER = BARRIER_BYTES - 8, FACTOR_BYTES = WARPS * 4;

template <class C>
struct SharedMemory {
    int first_k, chunks;    // of the activations
    char* activations;
    float *row_factors, *received, *accumulators;
    // Shared memory addresses of these, computed once: converting a pointer takes three instructions.
    u32 activations_at, barriers_at;

    __device__ __forceinline__ SharedMemory(const Arguments& a, const Schedule<C>& schedule, char* shared)
        : first_k(schedule.first_step * C::STEP_K), chunks(schedule.steps * C::STEP_CHUNKS) {
        activations = shared + WARPS * C::Ring::BYTES;
        char* barriers = activations + (C::TAKES_FRAGMENTS ? C::MAX_ROWS : a.m) * a.k_range[MAX_SPLIT_K - 1].steps * C::STEP_BYTES;
        row_factors = (float*)(barriers + BARRIER_BYTES);
        received = (float*)(barriers + BARRIER_BYTES + FACTOR_BYTES);
        int last_share = share_begin(schedule, MAX_SPLIT_K) - share_begin(schedule, MAX_SPLIT_K - 1);
        int sums = C::IN_RANGES ? ceil_div(a.ranges, MAX_SPLIT_K) : 1;
        accumulators = received + (schedule.splits_k() ? last_share * sums : 0);
        activations_at = shared_address(activations), barriers_at = shared_address(barriers);
    }
    // Pieces of a row.
    __device__ __forceinline__ int pieces() const { return chunks * (X_CHUNK_BYTES / 16); }
    __device__ __forceinline__ int row_bytes() const { return chunks * X_CHUNK_BYTES; }

    // The blocks of a cluster that splits K share its outputs: the block of this rank takes those from here on, up to the next rank's.
    static __device__ __forceinline__ int share_begin(const Schedule<C>& schedule, int rank) {
        return schedule.tiles * C::MAX_ROWS * rank / MAX_SPLIT_K * C::FEATURES;
    }
};
