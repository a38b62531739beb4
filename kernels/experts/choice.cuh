// The choice of a row's experts by the logits of a router, and the order of the (row, expert) pairs of few rows: by expert, and by row
// within an expert, in tiles for products (linear/experts.cu). Kernels of this folder include it.
//
// Experts are scored by the softmax over all logits, or each by the sigmoid of its own. Sigmoids have a correction for the choice, and the
// choice may be confined to the groups of experts with the largest sums of their two best corrected scores (DeepSeek-AI, 2024,
// "DeepSeek-V3").
#pragma once
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/tiles.cuh"

struct Routing {
    float* logits;          // [rows, stride], of which the first `experts` count
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
constexpr int FEW_ROWS = 16;
constexpr int FEW_PAIRS = 512;
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

// The groups with the largest sums of their two largest values, as bits. A lane has the values of every 32nd expert, and their groups.
template <int LANE_EXPERTS>
__device__ __forceinline__ u32 best_groups(const Routing& a, const float (&values)[LANE_EXPERTS], const int (&groups)[LANE_EXPERTS]) {
    int lane = lane_id();
    float own = 0;              // the sum of group `lane`
    for (int group = 0; group < a.groups; group++) {
        float sum = 0;
        int first = NONE;       // the largest of the group
#pragma unroll 1
        for (int turn = 0; turn < 2; turn++) {
            Best best;
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) {
                int expert = i * WARP + lane;
                if (groups[i] == group && expert < a.experts && expert != first) best.take(values[i], expert);
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

// A warp routes a row among up to WARP * LANE_EXPERTS experts and calls store(i, expert) for each choice. Returns the choice of the lane's
// number, or NONE.
template <int LANE_EXPERTS, class Store>
__device__ __forceinline__ int route_among(const Routing& a, int row, Store store) {
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
            int groups[LANE_EXPERTS], size = a.experts / a.groups;
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) groups[i] = (i * WARP + lane) / size;
            u32 best = best_groups(a, values, groups);
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) {
                if (i * WARP + lane < a.experts && !(best >> groups[i] & 1)) taken |= 1u << i;
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
    return own;
}

// Routes a row by the least code that serves its experts: one warp issues everything.
template <class Store>
__device__ __forceinline__ int route(const Routing& a, int row, Store store) {
    if (a.experts <= MAX_EXPERTS / 2) return route_among<MAX_EXPERTS / WARP / 2>(a, row, store);
    return route_among<MAX_EXPERTS / WARP>(a, row, store);
}

// As route_few() for a single row, by one warp without the others.
__device__ __forceinline__ void route_one(const Routing& a) {
    int lane = lane_id(), own = route(a, 0, [](int, int) {}), place = 0;
    for (int i = 0; i < a.per_token; i++) place += __shfl_sync(ALL_LANES, own, i) < own;
    if (own != NONE) {
        a.choices[lane] = own, a.places[lane] = place, a.sources[place] = 0;
        a.tiles[place] = {own, place, 1, 0};
    }
    for (int i = a.per_token + lane; i < a.max_tiles; i += WARP) a.tiles[i] = {0, 0, 0, 0};
}

// The pairs of few rows in shared memory.
struct FewPairs {
    int choices[FEW_PAIRS];     // experts
    int sorted[FEW_PAIRS];      // experts, by place
    int tiles[FEW_PAIRS];       // by place: the pairs of the tile that begins there, or 0
};

// Routes and sorts up to FEW_ROWS rows with up to FEW_PAIRS pairs, by counting the pairs before each. All threads of the block call this.
__device__ __forceinline__ void route_few(const Routing& a, FewPairs& few) {
    int pairs = a.rows * a.per_token, thread = threadIdx.x, threads = blockDim.x;
    for (int row = thread / WARP; row < a.rows; row += threads / WARP) {
        route(a, row, [&](int i, int expert) { few.choices[row * a.per_token + i] = expert; });
    }
    __syncthreads();
    for (int pair = thread; pair < pairs; pair += threads) {
        // The place of a pair, its number among the pairs of its expert, and the number of pairs of the expert.
        int own = few.choices[pair], place = 0, number = 0, all = 0;
        for (int i = 0; i < pairs; i++) {
            int other = few.choices[i];
            place += other < own;
            number += other == own && i < pair;
            all += other == own;
        }
        place += number;
        a.choices[pair] = own;
        a.places[pair] = place;
        a.sources[place] = pair / a.per_token;
        few.sorted[place] = own;
        few.tiles[place] = number % a.tile_pairs == 0 ? min(a.tile_pairs, all - number) : 0;
    }
    __syncthreads();
    for (int place = thread; place < pairs; place += threads) {
        if (few.tiles[place] == 0) continue;
        int tile = 0;
        for (int i = 0; i < place; i++) tile += few.tiles[i] > 0;
        a.tiles[tile] = {few.sorted[place], place, few.tiles[place], 0};
    }
    int tiles = 0;
    for (int i = 0; i < pairs; i++) tiles += few.tiles[i] > 0;
    for (int i = tiles + thread; i < a.max_tiles; i += threads) a.tiles[i] = {0, 0, 0, 0};
}
