// Draws a token from each row of logits by the row's rule, which src/ops/sample.rs defines; both give the same token. Three kernels, each
// with one or more passes over the logits: the largest logit, the weights of buckets, and the choice, for which a row has a single block.
#include "common/ptx.cuh"
#include "format/random.cuh"
#include "sample/choice.cuh"

constexpr int THREADS = 512;        // of a block that shares a row with others
constexpr int CHOOSERS = 1024;      // threads of the block that chooses
constexpr int BUCKETS = 2048;       // of tokens, by weight
constexpr int WEIGHT_BITS = 40;     // the weight of the argmax is 2 to this power
constexpr float BUCKETS_PER_HALVING = (float)BUCKETS / WEIGHT_BITS;
constexpr int DIGITS = 256;         // values of the key's digit by which a bucket is divided
constexpr int GROUP = 8;            // tokens whose buckets are loaded together
constexpr int BATCH = 2;            // groups that a thread loads at once
constexpr u16 NO_BUCKET = 0xffff;   // past the end of the vocabulary
static_assert(BUCKETS == 2 * CHOOSERS, "a thread has two buckets");
static_assert(BATCH * GROUP <= 32, "a word has a bit for each token");
static_assert(CHOOSERS == WARP * WARP, "one warp adds up the totals of all warps");

struct Rule {
    u64 seed;
    u64 draw;           // the number of the draw; advanced by one
    float scale;        // from logits to logarithms to base 2; 0: the argmax
    float least_log;    // the least logarithm that is kept, relative to the largest
    float top_p;
    float penalty;
    u32 top_k;          // 0: all
    u32 reserved;
};

struct Arguments {
    const float* logits;    // [rows, vocabulary]
    Rule* rules;            // [rows]
    u32* occurred;          // [rows, ceil(vocabulary / 32)]: a bit for each token; the row's input token is added. Or null: no penalties
    float* best_value;      // [rows, blocks of the first kernel]
    int* best_token;        // [rows, blocks of the first kernel]
    u16* buckets;           // [rows, stride]: the bucket of each token
    u64* weights;           // [rows, BUCKETS]: the weight of a bucket's tokens together; zero before and after
    u32* counts;            // [rows, BUCKETS]: how many tokens a bucket has; zero before and after
    int* tokens;            // [rows]: the input tokens, then the chosen ones
    int* positions;         // [rows]: of the input tokens; advanced by one
    int* history;           // [history_steps, rows]: results by position modulo the steps
    int vocabulary;
    int history_steps;
    int blocks;             // of the first kernel, for each row
    int stride;             // the vocabulary, rounded up to GROUP
};

// The logit of a token, after the penalty.
struct Logits {
    const float* logits;
    const u32* occurred;
    float penalty;
    int input;

    __device__ __forceinline__ Logits(const Arguments& a, int row)
        : logits(a.logits + (size_t)row * a.vocabulary),
          occurred(a.occurred ? a.occurred + (size_t)row * ceil_div(a.vocabulary, 32) : nullptr),
          penalty(a.rules[row].penalty),
          input(a.tokens[row]) {
        if (penalty == 1) occurred = nullptr;
    }
    __device__ __forceinline__ float operator()(int token) const {
        float x = logits[token];
        if (!occurred) return x;
        bool penalized = token == input || (occurred[token / 32] >> token % 32 & 1);
        if (!penalized || !(fabsf(x) < INFINITY)) return x;
        float y = x > 0 ? x / penalty : x * penalty;
        const float max_finite = __int_as_float(0x7f7fffff);
        return fminf(fmaxf(y, -max_finite), max_finite);
    }
};

struct Best {
    float value;
    int token;

    __device__ __forceinline__ void take(Best other) {
        if (other.value > value || (other.value == value && other.token < token)) *this = other;
    }
};
constexpr int NONE = 0x7fffffff;

// The best of the lanes of a warp, in every lane.
__device__ __forceinline__ Best best_of_warp(Best best) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) best.take({__shfl_xor_sync(ALL_LANES, best.value, d), __shfl_xor_sync(ALL_LANES, best.token, d)});
    return best;
}

// The best of a row, in every thread. Its value is INFINITY if a logit is that or NaN; the token then is the first of these.
__device__ __forceinline__ Best best_of_row(const Arguments& a, int row) {
    Best best = {-INFINITY, NONE};
    for (int i = lane_id(); i < a.blocks; i += WARP) best.take({a.best_value[row * a.blocks + i], a.best_token[row * a.blocks + i]});
    return best_of_warp(best);
}

__device__ __forceinline__ bool draws(Best best, const Rule& rule) { return rule.scale != 0 && fabsf(best.value) < INFINITY; }

// A logit's logarithm to base 2 relative to the largest, its bucket and its weight. The operations are those of src/cpu/generic/sample.rs,
// none of which may be contracted.
__device__ __forceinline__ float log_of(float x, float largest, float scale) { return __fmul_rn(__fsub_rn(x, largest), scale); }
__device__ __forceinline__ int bucket_of(float log) { return min(__float2int_rz(__fmul_rn(-log, BUCKETS_PER_HALVING)), BUCKETS - 1); }
__device__ __forceinline__ u64 weight_of(float log) {
    log = fmaxf(log, -(float)WEIGHT_BITS - 2);
    float n = rintf(log), r = __fsub_rn(log, n);
    float sum = 1.5252734e-5f;
    sum = __fmaf_rn(sum, r, 1.540353e-4f);
    sum = __fmaf_rn(sum, r, 1.3333558e-3f);
    sum = __fmaf_rn(sum, r, 9.618129e-3f);
    sum = __fmaf_rn(sum, r, 5.550411e-2f);
    sum = __fmaf_rn(sum, r, 0.24022651f);
    sum = __fmaf_rn(sum, r, 0.6931472f);
    float power = __fmaf_rn(sum, r, 1.0f);
    return __float2ull_rz(__fmul_rn(power, __int_as_float(((int)n + WEIGHT_BITS + 127) << 23)));
}
// The sort key of a token: larger for a larger logit, and for the lower token where logits are equal.
__device__ __forceinline__ u64 key_of(float logit, int token) {
    u32 bits = __float_as_uint(logit);
    u32 order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)order << 32 | (u32)~token;
}

__device__ __forceinline__ float logit_of(u64 key) {
    u32 order = (u32)(key >> 32);
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// A 64-bit counter as two words: shared memory has atomic additions of words, but emulates those of 64 bits by compare-and-swap loops.
struct Counter {
    u32 low, high;
    __device__ __forceinline__ void add(u64 x) {
        u32 l = (u32)x, before = atomicAdd(&low, l);
        u32 h = (u32)(x >> 32) + (before + l < before);
        if (h) atomicAdd(&high, h);
    }
    __device__ __forceinline__ u64 value() const { return (u64)high << 32 | low; }
};

// Grid: (blocks, rows)
extern "C" __global__ void __launch_bounds__(THREADS) draw_largest(const __grid_constant__ Arguments a) {
    __shared__ Best bests[THREADS / WARP];
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.y;
    Logits logit(a, row);
    Best best = {-INFINITY, NONE};
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < a.vocabulary; i += gridDim.x * THREADS) {
        float x = logit(i);
        best.take({x < INFINITY ? x : INFINITY, i});
    }
    best = best_of_warp(best);
    if (lane_id() == 0) bests[threadIdx.x / WARP] = best;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < THREADS / WARP; i++) best.take(bests[i]);
    int at = row * gridDim.x + blockIdx.x;
    a.best_value[at] = best.value;
    a.best_token[at] = best.token;
}

// Grid: (blocks, rows)
extern "C" __global__ void __launch_bounds__(THREADS) draw_buckets(const __grid_constant__ Arguments a) {
    __shared__ Counter weights[BUCKETS];
    __shared__ u32 counts[BUCKETS];
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) {
        weights[i] = {0, 0};
        counts[i] = 0;
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();
    __syncthreads();
    int row = blockIdx.y;
    Rule rule = a.rules[row];
    Best best = best_of_row(a, row);
    if (!draws(best, rule)) return;
    Logits logit(a, row);
    u16* buckets = a.buckets + (size_t)row * a.stride;
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < a.stride; i += gridDim.x * THREADS) {
        if (i >= a.vocabulary) {
            buckets[i] = NO_BUCKET;
            break;
        }
        float log = log_of(logit(i), best.value, rule.scale);
        int bucket = bucket_of(log);
        buckets[i] = (u16)bucket;
        weights[bucket].add(weight_of(log));
        atomicAdd(&counts[bucket], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BUCKETS; i += THREADS) {
        size_t at = (size_t)row * BUCKETS + i;
        if (!counts[i]) continue;
        atomicAdd(a.weights + at, weights[i].value());
        atomicAdd(a.counts + at, counts[i]);
    }
}

// The weight and the number of some tokens: of a bucket, or of all tokens up to one in the ranking.
struct Totals {
    u64 weight, count;
};
__device__ __forceinline__ Totals operator+(Totals a, Totals b) { return {a.weight + b.weight, a.count + b.count}; }
__device__ __forceinline__ Totals operator-(Totals a, Totals b) { return {a.weight - b.weight, a.count - b.count}; }

// The inclusive prefix sum over the threads of a block.
__device__ __forceinline__ Totals prefix_sum(Totals own) {
    __shared__ Totals warps[WARP];
    auto warp_prefix_sum = [](Totals s) {
#pragma unroll
        for (int d = 1; d < WARP; d *= 2) {
            u64 weight = __shfl_up_sync(ALL_LANES, s.weight, d), count = __shfl_up_sync(ALL_LANES, s.count, d);
            if (lane_id() >= d) s = s + Totals{weight, count};
        }
        return s;
    };
    Totals s = warp_prefix_sum(own);
    __syncthreads();
    if (lane_id() == WARP - 1) warps[threadIdx.x / WARP] = s;
    __syncthreads();
    if (threadIdx.x < WARP) warps[threadIdx.x] = warp_prefix_sum(warps[threadIdx.x]);
    __syncthreads();
    return threadIdx.x < WARP ? s : s + warps[threadIdx.x / WARP - 1];
}

// A row's tokens by bucket.
struct Ranking {
    const Arguments& a;
    int row;
    Logits logit;
    float largest, scale;

    __device__ __forceinline__ Ranking(const Arguments& a, int row, float largest, float scale)
        : a(a), row(row), logit(a, row), largest(largest), scale(scale) {}

    // The totals of a bucket. They are loaded each time, since there are no registers to keep them in.
    __device__ __forceinline__ Totals bucket_totals(int bucket) const {
        int at = row * BUCKETS + bucket;
        return {a.weights[at], a.counts[at]};
    }
    __device__ __forceinline__ Totals thread_totals() const { return bucket_totals(2 * threadIdx.x) + bucket_totals(2 * threadIdx.x + 1); }

    // Calls each(logarithm, key) for the tokens of this thread that are in a bucket.
    template <typename Each>
    __device__ __forceinline__ void in_bucket(int bucket, Each each) const {
        int groups = a.stride / GROUP;
        const uint4* buckets = (const uint4*)(a.buckets + (size_t)row * a.stride);
        for (int first = threadIdx.x; first < groups; first += BATCH * CHOOSERS) {
            // A bit for each token, so that only one place of the code handles the few that are in the bucket.
            u32 inside = 0;
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int at = first + i * CHOOSERS;
                if (at >= groups) break;
                uint4 group = buckets[at];
                u32 words[GROUP / 2] = {group.x, group.y, group.z, group.w};
#pragma unroll
                for (int j = 0; j < GROUP; j++) inside |= (u32)((words[j / 2] >> 16 * (j % 2) & 0xffff) == (u32)bucket) << (GROUP * i + j);
            }
            for (; inside; inside &= inside - 1) {
                int bit = __ffs(inside) - 1, token = (first + bit / GROUP * CHOOSERS) * GROUP + bit % GROUP;
                float x = logit(token);
                each(log_of(x, largest, scale), key_of(x, token));
            }
        }
    }
};

// Bitonic sort of a block's keys, one per thread, the largest first.
__device__ __forceinline__ u64 sorted(u64 key) {
    __shared__ u64 keys[CHOOSERS];
    int thread = threadIdx.x;
#pragma unroll 1
    for (int run = 2; run <= CHOOSERS; run *= 2) {
#pragma unroll 1
        for (int distance = run / 2; distance > 0; distance /= 2) {
            u64 other;
            if (distance < WARP) {
                other = __shfl_xor_sync(ALL_LANES, key, distance);
            } else {
                __syncthreads();
                keys[thread] = key;
                __syncthreads();
                other = keys[thread ^ distance];
            }
            bool larger = ((thread & run) == 0) == ((thread & distance) == 0);
            key = larger == (key > other) ? key : other;
        }
    }
    return key;
}

struct Found {
    u64 key;
    u64 weight;     // of the tokens up to this one, itself included
};

// The token at which the running weight, or number of tokens, exceeds `target`, which is less than the total.
__device__ __forceinline__ Found find(const Ranking& ranking, bool by_count, u64 target) {
    __shared__ u64 keys[CHOOSERS];
    __shared__ Counter digit_weights[DIGITS];
    __shared__ u32 digit_counts[DIGITS];
    __shared__ int shared_index, members;
    __shared__ Totals shared_before, shared_inside;
    __shared__ Found found;
    auto measure = [&](Totals s) { return by_count ? s.count : s.weight; };

    Totals before = ranking.thread_totals();
    before = prefix_sum(before) - before;
    for (int bucket = 2 * threadIdx.x; bucket < 2 * (int)threadIdx.x + 2; bucket++) {
        Totals inside = ranking.bucket_totals(bucket);
        if (measure(before) <= target && target < measure(before + inside)) {
            shared_index = bucket;
            shared_before = before;
            shared_inside = inside;
        }
        before = before + inside;
    }
    __syncthreads();
    int bucket = shared_index;
    u64 prefix = 0, mask = 0;
    // A radix descent: while too many tokens are left to be sorted, they are divided by the next digit of their keys.
    for (int shift = 56; shared_inside.count > CHOOSERS; shift -= 8) {
        before = shared_before;
        for (int i = threadIdx.x; i < DIGITS; i += CHOOSERS) {
            digit_weights[i] = {0, 0};
            digit_counts[i] = 0;
        }
        __syncthreads();
        ranking.in_bucket(bucket, [&](float log, u64 key) {
            if ((key & mask) != prefix) return;
            int digit = (int)(key >> shift) & (DIGITS - 1);
            digit_weights[digit].add(weight_of(log));
            atomicAdd(&digit_counts[digit], 1u);
        });
        __syncthreads();
        // From the largest digit down.
        int digit = DIGITS - 1 - (int)threadIdx.x;
        Totals mine = {0, 0};
        if (digit >= 0) mine = {digit_weights[digit].value(), digit_counts[digit]};
        Totals all = before + prefix_sum(mine);
        if (measure(all - mine) <= target && target < measure(all)) {
            shared_index = digit;
            shared_before = all - mine;
            shared_inside = mine;
        }
        __syncthreads();
        prefix |= (u64)shared_index << shift;
        mask |= (u64)(DIGITS - 1) << shift;
    }
    before = shared_before;
    if (threadIdx.x == 0) members = 0;
    __syncthreads();
    ranking.in_bucket(bucket, [&](float, u64 key) {
        if ((key & mask) == prefix) keys[atomicAdd(&members, 1)] = key;
    });
    __syncthreads();
    u64 key = sorted((int)threadIdx.x < members ? keys[threadIdx.x] : 0);
    Totals mine = {0, 0};
    if (key) mine = {weight_of(log_of(logit_of(key), ranking.largest, ranking.scale)), 1};
    Totals all = before + prefix_sum(mine);
    if (measure(all - mine) <= target && target < measure(all)) found = {key, all.weight};
    __syncthreads();
    return found;
}

__device__ __forceinline__ int drawn(const Arguments& a, const Ranking& ranking, const Rule& rule) {
    // The weight of the tokens that top-k keeps, and the smallest of those that top-p and min-p keep. In shared memory to save registers.
    __shared__ u64 all, kept;
    Totals totals = prefix_sum(ranking.thread_totals());
    if (threadIdx.x == CHOOSERS - 1) all = kept = totals.weight;
    if (rule.least_log > -INFINITY) {
        float least = rule.least_log;
        int last = bucket_of(least);
        totals = {0, 0};
        for (int bucket = 2 * threadIdx.x; bucket < min(last, 2 * (int)threadIdx.x + 2); bucket++) totals = totals + ranking.bucket_totals(bucket);
        ranking.in_bucket(last, [&](float log, u64) {
            if (log >= least) totals.weight += weight_of(log);
        });
        totals = prefix_sum(totals);
        if (threadIdx.x == CHOOSERS - 1) kept = totals.weight;
    }
    __syncthreads();
    // Top-k, top-p, and the draw: one call of find() serves all three, so that it is inlined once.
    for (int step = 0;; step++) {
        u64 target;
        if (step == 0) {
            if (rule.top_k == 0 || rule.top_k >= (u32)a.vocabulary) continue;
            target = rule.top_k - 1;
        } else if (step == 1) {
            if (rule.top_p >= 1) continue;
            target = (u64)ceil(__dmul_rn(__ull2double_rn(all), (double)rule.top_p));
            target = min(max(target, 1ull), all) - 1;
        } else {
            target = __umul64hi(random_bits(random_stream(rule.seed), rule.draw), min(kept, all));
        }
        Found found = find(ranking, step == 0, target);
        if (step == 2) return (int)~(u32)found.key;
        if (threadIdx.x == 0) {
            if (step == 0) all = found.weight;
            else kept = min(kept, found.weight);
        }
        __syncthreads();
    }
}

// Grid: (1, rows)
extern "C" __global__ void __launch_bounds__(CHOOSERS, 1) draw_choose(const __grid_constant__ Arguments a) {
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.y;
    const Rule& rule = a.rules[row];
    Best best = best_of_row(a, row);
    int token = best.token;
    if (draws(best, rule)) {
        Ranking ranking(a, row, best.value, rule.scale);
        token = drawn(a, ranking, rule);
        // All threads have read the totals of buckets before the last barrier.
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += CHOOSERS) {
            a.weights[row * BUCKETS + bucket] = 0;
            a.counts[row * BUCKETS + bucket] = 0;
        }
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    if (a.occurred) {
        int input = a.tokens[row];
        a.occurred[(size_t)row * ceil_div(a.vocabulary, 32) + input / 32] |= 1u << input % 32;
    }
    a.rules[row].draw++;
    a.tokens[row] = token;
    int position = ++a.positions[row];
    a.history[(size_t)(position % a.history_steps) * gridDim.y + row] = encode_choice(best.value, token);
}
