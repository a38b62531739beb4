// Assigns tiles and steps along K to the blocks and warps of the skinny GEMM.
//
// A cluster takes consecutive tiles; each of its blocks takes all of them over a range of K of its own. A block lines up the steps of its
// tiles, tile after tile, and cuts that line into equal shares for its warps, so a share may begin and end inside a tile.
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

    __device__ __forceinline__ Schedule(const Arguments& a, int warp) {
        rank = C::MAY_SPLIT_K ? blockIdx.z : 0;
        first_step = a.k_range[rank].first, steps = a.k_range[rank].steps;
        cluster = blockIdx.x;
        first_tile = cluster * a.cluster_tiles + min(cluster, a.larger_clusters), tiles = a.cluster_tiles + (cluster < a.larger_clusters);
        shares = {steps, tiles * steps};
        int begin = shares.begin(warp);
        count = shares.begin(warp + 1) - begin;
        tile = steps > 1 ? (int)__umulhi(begin, a.k_range[rank].inverse) : begin;
        step = begin - tile * steps;
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
