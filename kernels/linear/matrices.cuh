// Weights of any type as operands of one launch, the block's place among them, and the sum over the blocks of a cluster that share K.
#pragma once
#include "common/cluster.cuh"

constexpr int MATRICES = 4;
constexpr int MAX_SPLIT_K = 8;

enum Output { STORE_F32, STORE_F16, ADD_F32 };

// Stores a product for an output, or adds it.
template <class Arguments>
__device__ __forceinline__ void store_product(const Arguments& a, size_t to, float y) {
    if (a.output == STORE_F32) ((float*)a.out)[to] = y;
    if (a.output == ADD_F32) ((float*)a.out)[to] += y;
    if (a.output == STORE_F16) ((u16*)a.out)[to] = to_f16(y);
}

struct Matrix {
    const void* weight;     // [rows, k]
    const float* scales;    // [rows]: int8
    const float* bias;      // [rows] or null
    u64 rows;
};

// The rows of one of the blocks of `each` rows into which every matrix is divided; those of the matrices follow each other.
struct Place {
    const void* weight; // of the matrix
    int matrix, rows;   // the matrix, and its rows
    int first_row;      // of the block, in the matrix
    int first_column;   // of the matrix, in the output

    __device__ __forceinline__ Place(const Matrix (&matrices)[MATRICES], int block, int each)
        : weight(matrices[0].weight), matrix(0), rows(matrices[0].rows), first_column(0) {
#pragma unroll
        for (int i = 1; i < MATRICES; i++) {
            int blocks = ceil_div(rows, each);
            if (block < blocks) continue;
            block -= blocks, first_column += rows;
            weight = matrices[i].weight, rows = matrices[i].rows, matrix = i;
        }
        first_row = block * each;
    }
};

#if __CUDA_ARCH__ >= 900
// Each block of the cluster adds up the sums of all for its share of them, [warp][group][lane], and calls store(warp, group, sum). The first
// `warps` have sums, and all add. The sums take the place of what asynchronous copies have written to shared memory.
template <int GROUPS, class Store>
__device__ __forceinline__ void sum_over_cluster(const float (&sums)[GROUPS][4], char* shared, int warps, int split, int split_k, Store store) {
    int warp = threadIdx.x / WARP, lane = lane_id(), parts = warps * GROUPS;
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (warp >= warps) break;
        const float* c = sums[group];
        ((float4*)shared)[(warp * GROUPS + group) * WARP + lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
    cluster_sync();
    for (int i = parts * split / split_k + warp; i < parts * (split + 1) / split_k; i += blockDim.x / WARP) {
        float4 of_blocks[MAX_SPLIT_K];
#pragma unroll
        for (int s = 0; s < MAX_SPLIT_K; s++) {
            of_blocks[s] = make_float4(0, 0, 0, 0);
            if (s < split_k) of_blocks[s] = load_cluster_16(shared_address(shared) + (i * WARP + lane) * 16, s);
        }
        float c[4] = {};
#pragma unroll
        for (int s = 0; s < MAX_SPLIT_K; s++) c[0] += of_blocks[s].x, c[1] += of_blocks[s].y, c[2] += of_blocks[s].z, c[3] += of_blocks[s].w;
        store(i / GROUPS, i % GROUPS, c);
    }
    // No block may end while another reads its memory.
    cluster_sync();
}
#endif
