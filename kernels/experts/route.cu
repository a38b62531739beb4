// Which experts rows go to, by softmax over the logits of a router; and the pairs of a row and an expert in the order of experts, and of
// rows within them, cut into tiles for products (linear/experts.cu).
//
// A warp takes a row. Up to FEW_ROWS rows are brought into order by the block that has routed them, where every pair counts those before
// it; more of them by a kernel of their own, a block to an expert. Counts are whole numbers, so the order is always the same.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/tiles.cuh"

struct Arguments {
    const float* logits;    // [rows, stride], of which the first `experts` count
    int* choices;           // [rows, per_token]: experts, the most probable first; of equal ones those with the lower numbers
    float* weights;         // [rows, per_token]
    int* places;            // [rows, per_token]: the place of the pair in the order of experts
    int* sources;           // [pairs]: the row of the pair at a place
    ExpertTile* tiles;      // [most_tiles]
    u32* unfit;             // set to 1 + layer where a logit is not finite, unless something is there; see src/model/fused/memory.rs
    int rows;
    int stride;
    int experts;
    int per_token;
    int normalized;         // whether weights are divided by their sum
    int tile_pairs;         // of a tile, at most
    int most_tiles;
    int layer;
};

constexpr int MOST_EXPERTS = 512;
constexpr int OF_LANE = MOST_EXPERTS / WARP;
constexpr int FEW_ROWS = 16;
constexpr int FEW_PAIRS = 512;
constexpr int FEW_THREADS = FEW_ROWS * WARP;
constexpr int ROUTE_THREADS = 128;
constexpr int GROUP_THREADS = 512;
constexpr int GROUP_WARPS = GROUP_THREADS / WARP;
static_assert(GROUP_THREADS >= MOST_EXPERTS, "a thread has the count of an expert");
static_assert(FEW_THREADS >= FEW_PAIRS, "a thread has a pair");

// A warp routes a row, and calls put(i, expert) for its choices.
template <class Put>
__device__ __forceinline__ void route(const Arguments& a, int row, Put put) {
    int lane = lane_id();
    float logits[OF_LANE], largest = -INFINITY;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        int expert = i * WARP + lane;
        logits[i] = expert < a.experts ? a.logits[(size_t)row * a.stride + expert] : -INFINITY;
        if (expert < a.experts) finite = finite && fabsf(logits[i]) < INFINITY;
        largest = fmaxf(largest, logits[i]);
    }
    if (!__all_sync(ALL_LANES, finite) && lane == 0) atomicCAS(a.unfit, 0u, (u32)(1 + a.layer));
    largest = warp_max(largest);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) sum += expf(logits[i] - largest);
    sum = warp_sum(sum);

    float own = 0, total = 0;   // the probability of choice `lane`
    u32 taken = 0;              // of the lane's experts
    for (int choice = 0; choice < a.per_token; choice++) {
        // Of numbers that do not compare the first is taken, so that every choice is an expert, and none twice.
        float best = 0;
        int expert = MOST_EXPERTS;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) {
            bool free = i * WARP + lane < a.experts && !(taken >> i & 1);
            if (free && (expert == MOST_EXPERTS || logits[i] > best)) best = logits[i], expert = i * WARP + lane;
        }
#pragma unroll
        for (int d = WARP / 2; d > 0; d /= 2) {
            float other = __shfl_xor_sync(ALL_LANES, best, d);
            int theirs = __shfl_xor_sync(ALL_LANES, expert, d);
            bool wins = theirs != MOST_EXPERTS && (expert == MOST_EXPERTS || other > best || (!(best > other) && theirs < expert));
            if (wins) best = other, expert = theirs;
        }
        if (expert % WARP == lane) taken |= 1u << expert / WARP;
        float probability = expf(best - largest) / sum;
        total += probability;
        if (choice == lane) own = probability;
        if (lane == 0) put(choice, expert);
    }
    if (lane < a.per_token) a.weights[row * a.per_token + lane] = a.normalized ? own / total : own;
}

// Grid: rows in blocks of ROUTE_THREADS / WARP.
extern "C" __global__ void __launch_bounds__(ROUTE_THREADS) experts_route(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x * (ROUTE_THREADS / WARP) + threadIdx.x / WARP;
    if (row >= a.rows) return;
    route(a, row, [&](int i, int expert) { a.choices[row * a.per_token + i] = expert; });
}

// Up to FEW_ROWS rows with FEW_PAIRS pairs, in one block.
extern "C" __global__ void __launch_bounds__(FEW_THREADS) experts_route_few(const __grid_constant__ Arguments a) {
    __shared__ int choices[FEW_PAIRS], starts[FEW_PAIRS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = threadIdx.x / WARP, pair = threadIdx.x, pairs = a.rows * a.per_token;
    if (row < a.rows) route(a, row, [&](int i, int expert) { choices[row * a.per_token + i] = expert; });
    __syncthreads();
    // The place of a pair, its number within its expert, and how many the expert has.
    int own = 0, place = 0, number = 0, all = 0;
    if (pair < pairs) {
        own = choices[pair];
        for (int i = 0; i < pairs; i++) {
            int other = choices[i];
            place += other < own;
            number += other == own && i < pair;
            all += other == own;
        }
        place += number;
        a.choices[pair] = own;
        a.places[pair] = place;
        a.sources[place] = pair / a.per_token;
        starts[place] = number % a.tile_pairs == 0;
    }
    __syncthreads();
    if (pair < pairs && starts[place]) {
        int tile = 0;
        for (int i = 0; i < place; i++) tile += starts[i];
        a.tiles[tile] = {own, place, min(a.tile_pairs, all - number), 0};
    }
    int tiles = 0;
    for (int i = 0; i < pairs; i++) tiles += starts[i];
    for (int i = tiles + pair; i < a.most_tiles; i += FEW_THREADS) a.tiles[i] = {0, 0, 0, 0};
}

// The sum over the threads of a block.
__device__ __forceinline__ int block_sum(int x, int* sums) {
    x = warp_sum(x);
    if (lane_id() == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    x = 0;
    for (int i = 0; i < GROUP_WARPS; i++) x += sums[i];
    __syncthreads();
    return x;
}

// The place of every pair, after experts_route. Grid: experts.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) experts_group(const __grid_constant__ Arguments a) {
    __shared__ int counts[MOST_EXPERTS], of_warp[GROUP_WARPS], sums[GROUP_WARPS];
    int thread = threadIdx.x, warp = thread / WARP, lane = lane_id(), own = blockIdx.x, pairs = a.rows * a.per_token;
    for (int i = thread; i < MOST_EXPERTS; i += GROUP_THREADS) counts[i] = 0;
    __syncthreads();
    wait_for_earlier_kernels();
    let_later_kernels_start();
    // A warp takes pairs that follow each other.
    int share = ceil_div(ceil_div(pairs, GROUP_WARPS), WARP) * WARP, begin = warp * share, end = min(begin + share, pairs), mine = 0;
    for (int i = begin + lane; i < end; i += WARP) {
        int expert = a.choices[i];
        atomicAdd(&counts[expert], 1);
        mine += expert == own;
    }
    mine = warp_sum(mine);
    if (lane == 0) of_warp[warp] = mine;
    __syncthreads();
    int count = thread < a.experts ? counts[thread] : 0, tiles = ceil_div(count, a.tile_pairs);
    int first = block_sum(thread < own ? count : 0, sums), first_tile = block_sum(thread < own ? tiles : 0, sums);
    int all_tiles = block_sum(tiles, sums);

    int place = first;
    for (int i = 0; i < warp; i++) place += of_warp[i];
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
        for (int i = all_tiles + thread; i < a.most_tiles; i += GROUP_THREADS) a.tiles[i] = {0, 0, 0, 0};
    }
}
