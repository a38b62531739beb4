// Assigns tiles and steps along K to the blocks and warps of the skinny GEMM.
//
// A cluster takes consecutive tiles; each of its blocks takes all of them over a range of K of its own. A block lines up the steps of its
// tiles, tile after tile, and cuts that line into equal shares for its warps, so a share may begin and end inside a tile. IN_RANGES, shares
// are whole ranges of tiles instead, and the first warps have one more than the others.
#pragma once
#include "linear/skinny/config.cuh"

// a / b for a, b >= 0 and a / b < 2^19, in a third of the instructions of a division. Instructions before the wait for the predecessor slow
// that kernel down.
__device__ __forceinline__ int quotient(int a, int b) {
    int q = (int)((float)a * (reciprocal_approx((float)b) * 0.999999f));
    return q + ((q + 1) * b <= a);
}

// The shares of the warps in a block's line of steps.
struct WarpShares {
    int steps, total;   // of a tile; of all tiles
    __device__ __forceinline__ int begin(int warp) const { return (u32)(total * warp) / WARPS; }
    // The first warp that has a step at or after `step`.
    __device__ __forceinline__ int owner(int step) const {
        int warp = quotient(step * WARPS, total);
        while (begin(warp + 1) <= step) warp++;
        return warp;
    }
};

template <class C>
struct Schedule {
    // Block:
    int rank;                   // in its cluster
    int first_step, steps;      // of its range of K
    int cluster;
    int first_tile, tiles;
    WarpShares shares;
    // Warp: `count` steps from step `step` of the block's tile `tile` on.
    int count, tile, step;
    // IN_RANGES: of the block's part of K; the first range of the warp, counted over all tiles.
    int first_range, ranges, first_of_warp;

    __device__ __forceinline__ Schedule(const Arguments& a, int warp) {
        rank = C::MAY_SPLIT_K ? blockIdx.z : 0;
        first_step = a.k_range[rank].first, steps = a.k_range[rank].steps;
        cluster = blockIdx.x;
        first_tile = cluster * a.cluster_tiles + min(cluster, a.larger_clusters), tiles = a.cluster_tiles + (cluster < a.larger_clusters);
        shares = {steps, tiles * steps};
        if (C::IN_RANGES) {
            first_range = splits_k() ? a.ranges * rank / MAX_SPLIT_K : 0;
            ranges = (splits_k() ? a.ranges * (rank + 1) / MAX_SPLIT_K : a.ranges) - first_range;
            int all = tiles * ranges, each = all / WARPS, more = all % WARPS;
            first_of_warp = warp * each + min(warp, more);
            int end = first_of_warp + each + (warp < more);
            tile = quotient(first_of_warp, ranges);
            int end_tile = quotient(end, ranges);
            step = range_begin(a, first_of_warp - tile * ranges);
            count = end_tile * steps + range_begin(a, end - end_tile * ranges) - (tile * steps + step);
            return;
        }
        int begin = shares.begin(warp);
        count = shares.begin(warp + 1) - begin;
        tile = steps > 1 ? (int)__umulhi(begin, a.k_range[rank].inverse) : begin;
        step = begin - tile * steps;
    }
    // Where range number `range` of the block begins; past its last one, the number of steps.
    __device__ __forceinline__ int range_begin(const Arguments& a, int range) const {
        return quotient(a.chunks * (first_range + range), a.ranges) - first_step;
    }
    __device__ __forceinline__ bool splits_k() const { return C::MAY_SPLIT_K && gridDim.z > 1; }
    // Exactly one block of the grid is the first; one cluster is the last.
    __device__ __forceinline__ bool is_first_block() const { return cluster == 0 && rank == 0; }
    __device__ __forceinline__ bool is_last_cluster() const { return cluster == (int)gridDim.x - 1; }
    // Output elements of the cluster, including those of absent rows and features.
    __device__ __forceinline__ int outputs() const { return tiles * C::MAX_ROWS * C::FEATURES; }

    // The matrix of a tile of the grid, and the tile's first feature in it.
    static __device__ __forceinline__ int locate(const Arguments& a, int tile, int& row) {
        int index = C::TILE == GATE_UP ? 0 : (tile >= a.tiles[0]) + (tile >= a.tiles[1]);
        row = (tile - (index == 0 ? 0 : a.tiles[index - 1])) * C::FEATURES;
        return index;
    }
};
