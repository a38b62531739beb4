// Routes rows to experts by the logits of a router, and sorts the (row, expert) pairs by expert, and by row within an expert, into tiles
// for products (linear/experts.cu).
//
// Experts are scored by the softmax over all logits, or each by the sigmoid of its own. Sigmoids have a correction for the choice, and the
// choice may be confined to the groups of experts with the largest sums of their two best corrected scores (DeepSeek-AI, 2024,
// "DeepSeek-V3").
//
// A warp routes a row. With up to FEW_ROWS rows, the block that has routed them also sorts their pairs, by counting the pairs before each.
// More rows are sorted by a second kernel, with a block for each expert. Counts are integers, so the order is deterministic.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/tiles.cuh"

struct Arguments {
    const float* logits;    // [rows, stride], of which the first `experts` count
    int* choices;           // [rows, per_token]: experts, the best first, and by number where they are equal
    float* weights;         // [rows, per_token]
    int* places;            // [rows, per_token]: the index of the pair after sorting
    int* sources;           // [pairs]: the row of each sorted pair
    ExpertTile* tiles;      // [max_tiles]
    u32* unfit;             // [rows]: if it is 0, set to 1 + layer where a logit of the row is not finite
    const float* correction;    // [experts]: added to sigmoids for the choice; null for the softmax
    const float* factors;   // [experts]: of their weights; or null
    float scale;            // of the weights
    int groups;             // of consecutive experts, at most a warp's lanes
    int top_groups;         // whose experts may be chosen
    int rows;
    int stride;
    int experts;
    int per_token;
    int normalized;         // whether weights are divided by their sum
    int tile_pairs;         // of a tile, at most
    int max_tiles;
    int layer;
};

constexpr int MAX_EXPERTS = 512;
constexpr int LANE_EXPERTS = MAX_EXPERTS / WARP;
constexpr int FEW_ROWS = 16;
constexpr int FEW_PAIRS = 512;
constexpr int FEW_THREADS = FEW_ROWS * WARP;
constexpr int ROUTE_THREADS = 128;
constexpr int GROUP_THREADS = 512;
constexpr int GROUP_WARPS = GROUP_THREADS / WARP;
static_assert(GROUP_THREADS >= MAX_EXPERTS, "a thread has the count of an expert");
static_assert(FEW_THREADS >= FEW_PAIRS, "a thread has a pair");

constexpr int NONE = MAX_EXPERTS;

// The better of two candidates. If values do not compare (NaN), the lower number wins, so that every choice is one of the candidates.
struct Best {
    float value = 0;
    int index = NONE;

    __device__ __forceinline__ void take(float other, int other_index) {
        bool wins = other_index != NONE && (index == NONE || other > value || (!(value > other) && other_index < index));
        if (wins) value = other, index = other_index;
    }
};
// The best candidate of a warp, in each lane.
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) {
        float value = __shfl_xor_sync(ALL_LANES, best.value, d);
        best.take(value, __shfl_xor_sync(ALL_LANES, best.index, d));
    }
    return best;
}

__device__ __forceinline__ float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// The groups with the largest sums of their two largest values, as bits. A lane has the values of every 32nd expert.
__device__ __forceinline__ u32 best_groups(const Arguments& a, const float (&values)[LANE_EXPERTS]) {
    int lane = lane_id(), size = a.experts / a.groups;
    float own = 0;              // the sum of group `lane`
    for (int group = 0; group < a.groups; group++) {
        float sum = 0;
        int first = NONE;       // the largest of the group
        for (int turn = 0; turn < 2; turn++) {
            Best best;
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) {
                int expert = i * WARP + lane;
                if (expert / size == group && expert < a.experts && expert != first) best.take(values[i], expert);
            }
            best = warp_best(best);
            sum += best.value, first = best.index;
        }
        if (group == lane) own = sum;
    }
    u32 chosen = 0;
    for (int i = 0; i < a.top_groups; i++) {
        Best best;
        if (lane < a.groups && !(chosen >> lane & 1)) best.take(own, lane);
        chosen |= 1u << warp_best(best).index;
    }
    return chosen;
}

// A warp routes a row and calls store(i, expert) for each choice.
template <class Store>
__device__ __forceinline__ void route(const Arguments& a, int row, Store store) {
    int lane = lane_id();
    const float* logits = a.logits + (size_t)row * a.stride;
    float values[LANE_EXPERTS], largest = -INFINITY;    // by which experts are chosen
    bool finite = true;
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
        int expert = i * WARP + lane;
        values[i] = expert < a.experts ? logits[expert] : -INFINITY;
        if (expert < a.experts) finite = finite && fabsf(values[i]) < INFINITY;
        largest = fmaxf(largest, values[i]);
    }
    if (!__all_sync(ALL_LANES, finite) && lane == 0) atomicCAS(a.unfit + row, 0u, (u32)(1 + a.layer));
    float sum = 0;
    u32 taken = 0;              // of the lane's experts
    if (a.correction) {
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) {
            int expert = i * WARP + lane;
            if (expert < a.experts) values[i] = sigmoid(values[i]) + a.correction[expert];
        }
        if (a.groups > 1) {
            u32 groups = best_groups(a, values);
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) {
                int expert = i * WARP + lane;
                if (expert < a.experts && !(groups >> expert / (a.experts / a.groups) & 1)) taken |= 1u << i;
            }
        }
    } else {
        largest = warp_max(largest);
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) sum += expf(values[i] - largest);
        sum = warp_sum(sum);
    }

    // The order of values as that of integers. 0 stands for no candidate.
    u32 keys[LANE_EXPERTS];
#pragma unroll
    for (int i = 0; i < LANE_EXPERTS; i++) {
        u32 bits = __float_as_uint(values[i]);
        bool free = i * WARP + lane < a.experts && !(taken >> i & 1);
        keys[i] = free ? max(bits ^ ((u32)((int)bits >> 31) | 1u << 31), 1u) : 0;
    }
    int own = NONE;             // choice `lane`
    for (int choice = 0; choice < a.per_token; choice++) {
        u32 best = 0;
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(ALL_LANES, best);
        int expert = NONE;
#pragma unroll
        for (int i = LANE_EXPERTS - 1; i >= 0; i--) expert = keys[i] == best ? i * WARP + lane : expert;
        expert = (int)__reduce_min_sync(ALL_LANES, (u32)expert);
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) keys[i] = i * WARP + lane == expert ? 0 : keys[i];
        if (choice == lane) own = expert;
        if (lane == 0) store(choice, expert);
    }
    float weight = 0;
    if (own != NONE) weight = a.correction ? sigmoid(logits[own]) : expf(logits[own] - largest) / sum;
    // Keeps the quotient finite if no sigmoid is above zero.
    float total = a.normalized ? warp_sum(weight) + 1e-20f : 1;
    if (own != NONE) a.weights[row * a.per_token + lane] = weight / total * (a.factors ? a.factors[own] * a.scale : a.scale);
}

// Grid: (ceil(rows / (ROUTE_THREADS / WARP)))
extern "C" __global__ void __launch_bounds__(ROUTE_THREADS) experts_route(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.x * (ROUTE_THREADS / WARP) + threadIdx.x / WARP;
    if (row >= a.rows) return;
    route(a, row, [&](int i, int expert) { a.choices[row * a.per_token + i] = expert; });
}

// Routes and sorts up to FEW_ROWS rows with up to FEW_PAIRS pairs in one block.
extern "C" __global__ void __launch_bounds__(FEW_THREADS, 1) experts_route_few(const __grid_constant__ Arguments a) {
    __shared__ int choices[FEW_PAIRS], starts[FEW_PAIRS];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = threadIdx.x / WARP, pair = threadIdx.x, pairs = a.rows * a.per_token;
    if (row < a.rows) route(a, row, [&](int i, int expert) { choices[row * a.per_token + i] = expert; });
    __syncthreads();
    // The place of a pair, its number among the pairs of its expert, and the number of pairs of the expert.
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
    for (int i = tiles + pair; i < a.max_tiles; i += FEW_THREADS) a.tiles[i] = {0, 0, 0, 0};
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
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) experts_group(const __grid_constant__ Arguments a) {
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
