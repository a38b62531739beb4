// The largest logits of each row, in order, and the sum of all weights of a softmax: what drawing a token takes, unless the
// distribution is flat. Blocks sort the largest of their share; the last to arrive chooses among those.
//
// A logit and its token make a key: larger for a larger logit (-0 below +0), and of equal ones for the lower token. Keys differ, so
// the largest are a set that does not depend on the order in which they are found.
#include "common/ptx.cuh"

constexpr int THREADS = 512;
constexpr int KEPT = 256;           // largest logits of a row
constexpr int SHORT = 2048;         // keys that the last block chooses from in shared memory
constexpr int DIGIT = 8;            // bits of a key that a pass looks at
constexpr int DIGITS = 1 << DIGIT;
static_assert(DIGITS == 8 * WARP, "a lane sums eight digits");

struct Result {
    u64 keys[KEPT];     // from the largest down; 0 after the last
    double total;       // sum over all logits of exp((x - largest) * inverse_temperature)
    u64 unusable;       // logits that are NaN or plus infinity
};

struct Arguments {
    const float* logits;            // [rows, vocabulary]
    u64* lists;                     // [rows, blocks, KEPT]
    double* sums;                   // [rows, blocks]: with the block's largest for the largest
    u64* unusable;                  // [rows, blocks]
    u32* arrived;                   // [rows], zero; left zero
    Result* results;                // [rows]
    double inverse_temperature;     // 0: no sums
    int vocabulary;
};

__device__ __forceinline__ u64 key_of(float logit, int token) {
    u32 bits = __float_as_uint(logit);
    u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (u32)~token;
}
__device__ __forceinline__ float logit_of(u64 key) {
    u32 ordered = (u32)(key >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// Sums over a warp and over a block, in an order that is always the same. The block's sum is thread 0's.
template <typename T>
__device__ __forceinline__ T sum_of_warp(T x) {
#pragma unroll
    for (int d = WARP / 2; d > 0; d /= 2) x += __shfl_xor_sync(ALL_LANES, x, d);
    return x;
}
template <typename T>
__device__ __forceinline__ T sum_of_block(T x) {
    __shared__ T parts[THREADS / WARP];
    x = sum_of_warp(x);
    __syncthreads();
    if (lane_id() == 0) parts[threadIdx.x / WARP] = x;
    __syncthreads();
    for (int i = 1; threadIdx.x == 0 && i < THREADS / WARP; i++) x += parts[i];
    return x;
}

// The `wanted`-th largest of those of `count` keys that are not below `least`, which are as many or more; all threads get it.
template <typename Keys>
__device__ __forceinline__ u64 nth_largest(int count, int wanted, u64 least, Keys keys) {
    __shared__ u32 histogram[DIGITS];
    __shared__ u64 shared_prefix;
    __shared__ int shared_wanted;
    u64 prefix = 0, mask = 0;
    for (int shift = 64 - DIGIT; shift >= 0; shift -= DIGIT) {
        for (int i = threadIdx.x; i < DIGITS; i += THREADS) histogram[i] = 0;
        __syncthreads();
        for (int start = 0; start < count; start += THREADS) {
            int i = start + threadIdx.x;
            u64 key = i < count ? keys(i) : 0;
            bool counts = i < count && key >= least && (key & mask) == prefix;
            u32 counting = __ballot_sync(ALL_LANES, counts);
            if (counts) {
                // Neighbours often have the same digit: one of them adds for all.
                u32 digit = (u32)(key >> shift) & (DIGITS - 1);
                u32 same = __match_any_sync(counting, digit);
                if (lane_id() == __ffs(same) - 1) atomicAdd(&histogram[digit], __popc(same));
            }
        }
        __syncthreads();
        if (threadIdx.x < WARP) {
            // Lane l has the digits 8l to 8l + 7, and sums what lies in them and above.
            int lane = lane_id(), own = 0, above;
#pragma unroll
            for (int i = 0; i < 8; i++) own += histogram[8 * lane + i];
            int from_here = own;
#pragma unroll
            for (int d = 1; d < WARP; d *= 2) {
                int other = __shfl_down_sync(ALL_LANES, from_here, d);
                if (lane + d < WARP) from_here += other;
            }
            above = from_here - own;
            if (above < wanted && from_here >= wanted) {
                int digit = 8 * lane + 7;
                while (above + (int)histogram[digit] < wanted) above += histogram[digit--];
                shared_prefix = prefix | (u64)digit << shift;
                // Negative: all keys with this beginning are wanted, and no more need be known.
                shared_wanted = above + (int)histogram[digit] == wanted ? -1 : wanted - above;
            }
        }
        __syncthreads();
        prefix = shared_prefix;
        wanted = shared_wanted;
        mask |= (u64)(DIGITS - 1) << shift;
        __syncthreads();
        if (wanted < 0) break;
    }
    return prefix > least ? prefix : least;
}

// Sorts KEPT keys in shared memory, the largest first.
__device__ __forceinline__ void sort(u64 (&keys)[KEPT]) {
    for (int run = 2; run <= KEPT; run *= 2) {
        for (int apart = run / 2; apart > 0; apart /= 2) {
            __syncthreads();
            int i = threadIdx.x, j = i ^ apart;
            if (i < KEPT && j > i) {
                bool descending = (i & run) == 0;
                u64 a = keys[i], b = keys[j];
                if ((a < b) == descending) {
                    keys[i] = b;
                    keys[j] = a;
                }
            }
        }
    }
    __syncthreads();
}

// The largest of `count` keys, at most KEPT of them, sorted; 0 after the last. `there` of the keys are not below `least`, which
// is not 0.
template <typename Keys>
__device__ __forceinline__ void largest(u64 (&kept)[KEPT], int count, int there, u64 least, Keys keys) {
    __shared__ int found;
    u64 threshold = there > KEPT ? nth_largest(count, KEPT, least, keys) : least;
    if (threadIdx.x == 0) found = 0;
    for (int i = threadIdx.x; i < KEPT; i += THREADS) kept[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) {
        u64 key = keys(i);
        if (key >= threshold) kept[atomicAdd(&found, 1)] = key;
    }
    sort(kept);
}

// Grid: (blocks, rows)
extern "C" __global__ void __launch_bounds__(THREADS) shortlist(const __grid_constant__ Arguments a) {
    __shared__ u64 kept[KEPT];
    __shared__ u64 chosen[SHORT];
    __shared__ int shared_count;
    __shared__ u64 ends, common;
    __shared__ bool last;
    wait_for_earlier_kernels();
    let_later_kernels_start();
    int row = blockIdx.y, blocks = gridDim.x;
    const float* logits = a.logits + (size_t)row * a.vocabulary;
    // Shares are of THREADS neighbours, in turn; those past the vocabulary have keys of 0.
    int turns = ceil_div(a.vocabulary, THREADS), block = blockIdx.x;
    int mine = turns > block ? ceil_div(turns - block, blocks) : 0;
    int past = mine > 0 && (turns - 1) % blocks == block ? turns * THREADS - a.vocabulary : 0;
    auto token_at = [&](int i) { return ((i / THREADS) * blocks + block) * THREADS + i % THREADS; };
    auto key_at = [&](int i) {
        int token = token_at(i);
        return token < a.vocabulary ? key_of(logits[token], token) : 0ull;
    };
    largest(kept, mine * THREADS, mine * THREADS - past, 1, key_at);

    float top = logit_of(kept[0]);
    double sum = 0;
    u64 unusable = 0;
    for (int i = threadIdx.x; i < mine * THREADS; i += THREADS) {
        int token = token_at(i);
        if (token >= a.vocabulary) break;
        float x = logits[token];
        if (!(x < INFINITY)) unusable++;
        // All minus infinity have no weight, whatever the largest is.
        if (a.inverse_temperature > 0 && x > -INFINITY) sum += exp(((double)x - top) * a.inverse_temperature);
    }
    sum = sum_of_block(sum);
    unusable = sum_of_block(unusable);
    size_t place = (size_t)row * blocks;
    for (int i = threadIdx.x; i < KEPT; i += THREADS) a.lists[(place + block) * KEPT + i] = kept[i];
    if (threadIdx.x == 0) {
        a.sums[place + block] = sum;
        a.unusable[place + block] = unusable;
        shared_count = 0;
        ends = 1;
        common = ~0ull;
    }
    __syncthreads();
    if (threadIdx.x == 0) last = (int)atomic_add_release_acquire(a.arrived + row, 1) == blocks - 1;
    __syncthreads();
    if (!last) return;

    const u64* lists = a.lists + place * KEPT;
    auto listed = [&](int i) { return __ldcg(lists + i); };
    // Not smaller than one of these are KEPT keys: the last of any list; and the smallest of those that stand far enough down
    // in every list for all lists together.
    int down = ceil_div(KEPT, blocks) - 1;
    for (int b = threadIdx.x; b < blocks; b += THREADS) {
        atomicMax(&ends, listed(b * KEPT + KEPT - 1));
        atomicMin(&common, listed(b * KEPT + down));
    }
    __syncthreads();
    u64 least = common > ends ? common : ends;
    for (int i = threadIdx.x; i < blocks * KEPT; i += THREADS) {
        u64 key = listed(i);
        if (key >= least) {
            int at = atomicAdd(&shared_count, 1);
            if (at < SHORT) chosen[at] = key;
        }
    }
    __syncthreads();
    int count = shared_count;
    if (count <= SHORT) {
        largest(kept, count, count, least, [&](int i) { return chosen[i]; });
    } else {
        largest(kept, blocks * KEPT, count, least, listed);
    }

    Result& result = a.results[row];
    for (int i = threadIdx.x; i < KEPT; i += THREADS) result.keys[i] = kept[i];
    top = logit_of(kept[0]);
    double total = 0;
    unusable = 0;
    for (int b = threadIdx.x; b < blocks; b += THREADS) {
        u64 first = listed(b * KEPT);
        unusable += __ldcg(a.unusable + place + b);
        double part = __ldcg(a.sums + place + b);
        if (part > 0) total += part * exp(((double)logit_of(first) - top) * a.inverse_temperature);
    }
    total = sum_of_block(total);
    unusable = sum_of_block(unusable);
    if (threadIdx.x == 0) {
        result.total = total;
        result.unusable = unusable;
        a.arrived[row] = 0;
    }
}
