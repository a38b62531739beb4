// Routes rows to experts by the logits of a router, and sorts their pairs with experts: see experts/choice.cuh.
//
// A warp routes a row. With up to FEW_ROWS rows, the block that has routed them also sorts their pairs. More rows are sorted by a second
// kernel, with a block for each expert. Counts are integers, so the order is deterministic.
#include "experts/choice.cuh"

constexpr int FEW_THREADS = FEW_ROWS * WARP;
constexpr int ROUTE_THREADS = 128;
constexpr int GROUP_THREADS = 512;
constexpr int GROUP_WARPS = GROUP_THREADS / WARP;
static_assert(GROUP_THREADS >= MAX_EXPERTS, "a thread has the count of an expert");

// Grid: (ceil(rows / (ROUTE_THREADS / WARP)))
extern "C" __global__ void __launch_bounds__(ROUTE_THREADS) experts_route(const __grid_constant__ Routing a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x * (ROUTE_THREADS / WARP) + threadIdx.x / WARP;
    if (row >= a.rows) return;
    route(a, row, [&](int i, int expert) { a.choices[row * a.per_token + i] = expert; });
}

// In one block. A single row takes one warp; the others keep blocks of other kernels from its multiprocessor, which would slow it down.
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1) experts_route_few(const __grid_constant__ Routing a) {
    __shared__ FewPairs few;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (a.rows > 1) return route_few(a, few);
    if (threadIdx.x < WARP) route_one(a);
}

// The sum over the threads of a block.
__device__ __forceinline__ int block_sum(int x, int* warp_sums) {
    x = warp_sum(x);
    if (lane_id() == 0) warp_sums[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < GROUP_WARPS; i++) x += warp_sums[i];
    __syncthreads();
    return x;
}

// Sorts the pairs of experts_route. Grid: (experts)
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) experts_group(const __grid_constant__ Routing a) {
    __shared__ int counts[MAX_EXPERTS], warp_counts[GROUP_WARPS], warp_sums[GROUP_WARPS];
    int thread = threadIdx.x, warp = thread / WARP, lane = lane_id(), own = blockIdx.x, pairs = a.rows * a.per_token;
    for (int i = thread; i < MAX_EXPERTS; i += GROUP_THREADS) counts[i] = 0;
    __syncthreads();
    wait_for_earlier_kernels();
    let_later_kernels_start();
    // A warp takes consecutive pairs.
    int share = ceil_div(ceil_div(pairs, GROUP_WARPS), WARP) * WARP, begin = warp * share, end = min(begin + share, pairs), mine = 0;
    for (int i = begin + lane; i < end; i += WARP) {
        int expert = a.choices[i];
        atomicAdd(&counts[expert], 1);
        mine += expert == own;
    }
    mine = warp_sum(mine);
    if (lane == 0) warp_counts[warp] = mine;
    __syncthreads();
    int count = thread < a.experts ? counts[thread] : 0, tiles = ceil_div(count, a.tile_pairs);
    int first = block_sum(thread < own ? count : 0, warp_sums), first_tile = block_sum(thread < own ? tiles : 0, warp_sums);
    int all_tiles = block_sum(tiles, warp_sums);

    int place = first;
    for (int i = 0; i < warp; i++) place += warp_counts[i];
    for (int i = begin; i < end; i += WARP) {
        bool is_own = i + lane < end && a.choices[i + lane] == own;
        u32 all = __ballot_sync(ALL_LANES, is_own);
        if (is_own) {
            int at = place + __popc(all & ((1u << lane) - 1));
            a.places[i + lane] = at;
            a.sources[at] = (i + lane) / a.per_token;
        }
        place += __popc(all);
    }
    for (int i = thread; i < ceil_div(counts[own], a.tile_pairs); i += GROUP_THREADS) {
        a.tiles[first_tile + i] = {own, first + i * a.tile_pairs, min(a.tile_pairs, counts[own] - i * a.tile_pairs), 0};
    }
    if (own == a.experts - 1) {
        for (int i = all_tiles + thread; i < a.max_tiles; i += GROUP_THREADS) a.tiles[i] = {0, 0, 0, 0};
    }
}
