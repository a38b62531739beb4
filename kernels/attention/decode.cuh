// Attention of one new token for each sequence of a batch over its cached keys and values, which the same kernel extends: the
// norm and rotation of queries and keys happen on the way in. Bound by reading the cache.
//
// A block takes up to 8 query heads that share a key/value head, and one of several parts of a sequence, one or two pages at a
// time, of which each warp has 16 positions. Scores are computed transposed (keys as A, the heads as B), so that 8 heads fill the
// instruction. Pages pass through a ring in shared memory, which is filled before the kernel waits for the one before it: what
// the new token itself adds is worked out apart, and nothing else of the cache depends on that kernel. The last block of a
// sequence to finish adds the parts in order; or the parts are a cluster, whose blocks send each other what they have seen, and
// each of them adds some heads.
#pragma once
#include "common/cluster.cuh"
#include "common/heads.cuh"
#include "common/pages.cuh"
#include "format/fragment_major.cuh"

constexpr int HEADS = 8;        // the N of the matrix instruction
constexpr int STEP = 16;        // positions of a warp at a time
constexpr int PAGE_WARPS = PAGE / STEP;

struct Arguments {
    const float* qkv;           // [sequences, (heads + 2 kv_heads) D]
    const float* q_norm;        // [D] or null
    const float* k_norm;
    const int* positions;       // [sequences]: of the new token
    u16* out;                   // f16 [sequences, heads D], or the same, fragment-major
    float* partial;             // [sequences, head blocks, parts, HEADS, D + 2]
    u32* arrived;               // [sequences, head blocks], zero; left zero
    HeadOptions head;
    Pages pages;
    int group;                  // query heads for each key/value head
    float scale;                // of the scores, times log2(e)
    float cap;                  // of the scores, times log2(e); 0: none
    int window;                 // positions that a token sees, its own included; 0: all
    int fragment_major;
};

// Where the output of a sequence goes.
struct Row {
    u16* out;
    int sequence, width, groups;  // groups of 8 sequences, or 0 for rows one after the other

    __device__ __forceinline__ Row(const Arguments& a, int sequence, int width)
        : out(a.out), sequence(sequence), width(width), groups(a.fragment_major ? ceil_div(gridDim.y, GROUP_ROWS) : 0) {}
    __device__ __forceinline__ u16& at(int k) const {
        return out[groups > 0 ? fragment_index(groups, sequence, k) : (size_t)sequence * width + k];
    }
};

// A page's keys and values of a head in shared memory, rows of keys [PAGE][D] and columns of values [D][PAGE]. Of neighbouring
// rows the pieces of 16 bytes stand in different orders, so that 8 of them meet in no bank.
template <int D, int THREADS>
struct PageStage {
    static constexpr int KEY_PIECES = D / 8, VALUE_PIECES = PAGE / 8, KEY_BYTES = PAGE * D * 2, BYTES = 2 * KEY_BYTES;
    u32 base;

    template <int PIECES>
    static __device__ __forceinline__ int place(int row, int piece) {
        return (row * PIECES + swizzled_piece<PIECES>(row, piece)) * 16;
    }
    // Asks for a page; all threads call this.
    __device__ __forceinline__ void fill(const u16* keys, const u16* values) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < PAGE * KEY_PIECES; i += THREADS) {
            copy_async_16(base + place<KEY_PIECES>(i / KEY_PIECES, i % KEY_PIECES), keys + i * 8, 16);
            copy_async_16(base + KEY_BYTES + place<VALUE_PIECES>(i / VALUE_PIECES, i % VALUE_PIECES), values + i * 8, 16);
        }
    }
    // Elements 16 j to 16 j + 15 of 16 positions from `first` on, as A.
    __device__ __forceinline__ void keys(int first, int j, u32 (&a)[4]) const {
        int lane = lane_id();
        load_matrices(a, base + place<KEY_PIECES>(first + lane % 16, 2 * j + lane / 16));
    }
    // The same, transposed.
    __device__ __forceinline__ void values(int first, int j, u32 (&a)[4]) const {
        int lane = lane_id();
        load_matrices(a, base + KEY_BYTES + place<VALUE_PIECES>(16 * j + lane % 16, first / 8 + lane / 16));
    }
};

// What a block knows of the new token, and whether it is the last.
template <int D>
struct __align__(128) Token {
    u16 q[HEADS][D], key[D], value[D];
    u64 exchange;   // barrier for what other blocks of the cluster send
    int last;
};

// What a head has seen of a sequence: a lane's share of the sum of values, the largest score, and the sum of weights.
template <int D>
struct Seen {
    static constexpr int LINE = D + 2;
    static constexpr int N = SLOTS<D>;
    float y[N] = {}, top = -INFINITY, weight = 0;

    Seen() = default;
    // Adds up what warps or parts have seen, in order: lines of D sums, the score and the weight.
    __device__ __forceinline__ Seen(const float* lines, int count, int stride) {
#pragma unroll
        for (int i = 0; i < count; i++) top = fmaxf(top, lines[i * stride + D]);
#pragma unroll
        for (int i = 0; i < count; i++) {
            // Who has seen nothing has no largest score.
            float score = lines[i * stride + D], factor = score == -INFINITY ? 0 : exp2_approx(score - top);
            weight += lines[i * stride + D + 1] * factor;
#pragma unroll
            for (int j = 0; j < N; j++) y[j] += has_slot<D>(j) ? lines[i * stride + lane_id() + WARP * j] * factor : 0;
        }
    }
    // Adds up parts, at most as many as lanes, in global memory: scores at once, and sums of several before the first is used.
    static __device__ __forceinline__ Seen of_parts(const float* lines, int parts) {
        constexpr int STRIDE = HEADS * LINE, BATCH = 8;
        Seen seen;
        bool is_part = lane_id() < parts;
        const float* own = lines + lane_id() * STRIDE + D;
        float score = is_part ? own[0] : -INFINITY, weight = is_part ? own[1] : 0;
        seen.top = warp_max(score);
        float factor = score == -INFINITY ? 0 : exp2_approx(score - seen.top);
        seen.weight = warp_sum(weight * factor);
#pragma unroll 1
        for (int first = 0; first < parts; first += BATCH) {
            float y[BATCH][N];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
#pragma unroll
                for (int j = 0; j < N; j++) y[i][j] = first + i < parts && has_slot<D>(j) ? lines[(first + i) * STRIDE + lane_id() + WARP * j] : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                float f = __shfl_sync(ALL_LANES, factor, first + i);
#pragma unroll
                for (int j = 0; j < N; j++) seen.y[j] += y[i][j] * f;
            }
        }
        return seen;
    }
    __device__ __forceinline__ void write(float* line) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (has_slot<D>(j)) line[lane_id() + WARP * j] = y[j];
        }
        if (lane_id() == 0) {
            line[D] = top;
            line[D + 1] = weight;
        }
    }
#if __CUDA_ARCH__ >= 900
    // To the line at this place of another block of the cluster.
    __device__ __forceinline__ void send(u32 line, int block, u32 barrier) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (has_slot<D>(j)) send_to_cluster(line + (lane_id() + WARP * j) * 4, block, y[j], barrier);
        }
        if (lane_id() == 0) {
            send_to_cluster(line + D * 4, block, top, barrier);
            send_to_cluster(line + (D + 1) * 4, block, weight, barrier);
        }
    }
#endif
    __device__ __forceinline__ void write_out(const Row& row, int first) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (has_slot<D>(j)) row.at(first + lane_id() + WARP * j) = to_f16(y[j] / weight);
        }
    }
};

// Of STAGES pages in the ring, SPAN are worked on at a time. CLUSTER: the parts of a sequence are one. LIMITED: there may be a window and a soft cap.
// PARTIAL: see Rotation.
template <int D, bool LIMITED, bool PARTIAL, int STAGES, int SPAN, bool CLUSTER>
__device__ __forceinline__ void run(const Arguments& a) {
    static_assert(STAGES % SPAN == 0, "");
    constexpr int WARPS = SPAN * PAGE_WARPS, THREADS = WARPS * WARP;
    constexpr int TILES = D / 16, LINE = Seen<D>::LINE, N = SLOTS<D>;
    using Stage = PageStage<D, THREADS>;
    extern __shared__ __align__(128) char shared[];
    auto& [q, new_key, new_value, exchange, last] = *(Token<D>*)shared;
    char* ring = shared + sizeof(Token<D>);

    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int head_blocks = ceil_div(a.group, HEADS);
    int kv_head = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * HEADS;
    int heads = min(HEADS, a.group - first_head), all_heads = a.group * a.pages.kv_heads;
    int sequence = blockIdx.y, part = blockIdx.z, parts = gridDim.z;
    first_head += kv_head * a.group;

    // Positions change between steps only, and pages, norms and earlier positions not even then: kernels let the next one start
    // when they have waited themselves, so everything before the last one is done by now.
    int position = a.positions[sequence];
    // Parts have as many pages as possible alike: beside a multiprocessor that was done sooner, blocks of the next kernels would crowd.
    int start = LIMITED && a.window > 0 ? max(position + 1 - a.window, 0) : 0, first_page = start / PAGE, all = position / PAGE + 1 - first_page;
    int begin = (first_page + all * part / parts) * PAGE, next = (first_page + all * (part + 1) / parts) * PAGE;
    int end = min(position, next), pages = LIMITED && start >= end ? 0 : ceil_div(max(end - begin, 0), PAGE);
    bool has_new = position >= begin && position < next;

    auto stage = [&](int i) { return Stage{shared_address(ring) + i % STAGES * Stage::BYTES}; };
    auto load = [&](int i) {
        if (i < pages) {
            int p = begin + i * PAGE;
            stage(i).fill(keys<D>(a.pages, sequence, p, kv_head), values<D>(a.pages, sequence, p, kv_head));
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) load(i);
#if __CUDA_ARCH__ >= 900
    // Of a cluster, each block puts out the heads h with h % parts == part.
    if (CLUSTER) {
        if (threadIdx.x == 0) {
            barrier_init(shared_address(&exchange), 1);
            barrier_expect(shared_address(&exchange), (heads - part + parts - 1) / parts * (parts - 1) * LINE * 4);
            publish_barriers();
        }
        __syncwarp();
        cluster_arrive();
    }
#endif
    Rotation<D, PARTIAL> rotation(a.head, position);
    float q_weight[N], k_weight[N];
    load_norm<D>(a.q_norm, q_weight);
    load_norm<D>(a.k_norm, k_weight);

    wait_for_earlier_kernels();
    let_later_kernels_start();
    // Queries, then the key and the value: heads of a row, as many as a warp's turns. All are on their way before one is used.
    constexpr int TURNS = ceil_div(HEADS + 2, WARPS);
    const float* row = a.qkv + (size_t)sequence * (all_heads + 2 * a.pages.kv_heads) * D;
    float y[TURNS][N];
    bool is_unfit = false;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int i = warp + turn * WARPS;
        int head = i < heads ? first_head + i : all_heads + kv_head + (i == heads ? 0 : a.pages.kv_heads);
        if (i < heads + 2) load_head<D>(row + head * D, y[turn]);
    }
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int i = warp + turn * WARPS;
        if (i < heads) {
            norm_and_rotate<D>(y[turn], a.q_norm != nullptr, q_weight, a.head.eps, rotation, a.scale);
        } else if (i == heads) {
            norm_and_rotate<D>(y[turn], a.k_norm != nullptr, k_weight, a.head.eps, rotation, 1);
        }
        u16* to = i < heads ? q[i] : i == heads ? new_key : new_value;
        if (i < heads + 2) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (has_slot<D>(j)) to[lane + WARP * j] = to_f16(y[turn][j]);
                is_unfit |= !fits_f16(y[turn][j]);
            }
        }
    }
    note_unfit(a.pages, is_unfit);
    for (int i = threadIdx.x; i < (HEADS - heads) * D; i += THREADS) q[heads + i / D][i % D] = 0;
    __syncthreads();

    if (has_new) {
        u16 *to_key = keys<D>(a.pages, sequence, position, kv_head), *to_value = values<D>(a.pages, sequence, position, kv_head);
        for (int i = threadIdx.x; i < D; i += THREADS) {
            to_key[i] = new_key[i];
            to_value[i * PAGE] = new_value[i];
        }
    }
    u32 query[TILES][2];
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        query[j][0] = *(const u32*)&q[g][16 * j + 2 * t];
        query[j][1] = *(const u32*)&q[g][16 * j + 2 * t + 8];
    }
    float sums[TILES][4] = {}, top[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};

    for (int i = 0; i < pages; i += SPAN) {
        copy_async_wait<STAGES - SPAN>();
        __syncthreads();
        int page = i + warp / PAGE_WARPS, first = warp % PAGE_WARPS * STEP, p = begin + page * PAGE + first;
        if (p < end && (!LIMITED || p + STEP > start)) {
            float score[4] = {};
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                u32 k[4];
                stage(page).keys(first, j, k);
                mma_f16(score, k[0], k[1], k[2], k[3], query[j][0], query[j][1]);
            }
            if (LIMITED && a.cap > 0) {
#pragma unroll
                for (int e = 0; e < 4; e++) score[e] = capped(score[e], a.cap);
            }
            if (p + g >= end || (LIMITED && p + g < start)) score[0] = score[1] = -INFINITY;
            if (p + g + 8 >= end || (LIMITED && p + g + 8 < start)) score[2] = score[3] = -INFINITY;
            float factor[2];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float best = fmaxf(score[h], score[h + 2]);
#pragma unroll
                for (int d = 4; d < WARP; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, d));
                best = fmaxf(best, top[h]);
                factor[h] = exp2_approx(top[h] - best);
                top[h] = best;
                weight[h] *= factor[h];
            }
            u32 probability[2];
#pragma unroll
            for (int b = 0; b < 2; b++) {
                float x = exp2_approx(score[2 * b] - top[0]), z = exp2_approx(score[2 * b + 1] - top[1]);
                weight[0] += x;
                weight[1] += z;
                probability[b] = transpose_matrix(pack_f16(x, z));
            }
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                u32 v[4];
                stage(page).values(first, j, v);
#pragma unroll
                for (int e = 0; e < 4; e++) sums[j][e] *= factor[e % 2];
                mma_f16(sums[j], v[0], v[1], v[2], v[3], probability[0], probability[1]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < SPAN; j++) load(i + j + STAGES);
    }

    // Nobody uses the ring any more.
    static_assert((WARPS + 1) * HEADS * LINE * 4 <= STAGES * Stage::BYTES, "what is added up stands where the ring was");
    float(*merged)[HEADS][LINE] = (float(*)[HEADS][LINE])ring;  // [WARPS + 1]; the last is the new token's
    for (int h = warp; h < heads; h += WARPS) {
        float score = 0, *line = merged[WARPS][h];
#pragma unroll
        for (int j = 0; j < N; j++) {
            int i = lane + WARP * j;
            if (!has_slot<D>(j)) continue;
            score += f16_to_float(q[h][i]) * f16_to_float(new_key[i]);
            line[i] = f16_to_float(new_value[i]);
        }
        score = warp_sum(score);
        if (LIMITED && a.cap > 0) score = capped(score, a.cap);
        if (lane == 0) {
            line[D] = has_new ? score : -INFINITY;
            line[D + 1] = 1;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int d = 4; d < WARP; d *= 2) weight[h] += __shfl_xor_sync(ALL_LANES, weight[h], d);
        float* line = merged[warp][2 * t + h];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            line[16 * i + g] = sums[i][h];
            line[16 * i + g + 8] = sums[i][h + 2];
        }
        if (g == 0) {
            line[D] = top[h];
            line[D + 1] = weight[h];
        }
    }
    __syncthreads();

    Row out(a, sequence, all_heads * D);
    if (a.fragment_major && part == 0 && first_head == 0) {
        // What is missing at the end is zeros.
        for (int k = out.width + threadIdx.x; k < padded_k(out.width); k += THREADS) out.at(k) = 0;
    }
#if __CUDA_ARCH__ >= 900
    if (CLUSTER) {
        float(*parted)[HEADS][LINE] = (float(*)[HEADS][LINE])(ring + STAGES * Stage::BYTES);  // [parts]
        __syncwarp();
        cluster_wait();
        for (int h = warp; h < heads; h += WARPS) {
            Seen<D> seen(merged[0][h], WARPS + 1, HEADS * LINE);
            if (h % parts == part) {
                seen.write(parted[part][h]);
            } else {
                seen.send(shared_address(parted[part][h]), h % parts, shared_address(&exchange));
            }
        }
        __syncwarp();
        barrier_wait(shared_address(&exchange), 0);
        for (int h = warp; h < heads; h += WARPS) {
            if (h % parts == part) Seen<D>(parted[0][h], parts, HEADS * LINE).write_out(out, (first_head + h) * D);
        }
        return;
    }
#endif
    int block = sequence * gridDim.x + blockIdx.x;
    float* lines = a.partial + (size_t)block * parts * HEADS * LINE;
    for (int h = warp; h < heads; h += WARPS) {
        Seen<D> seen(merged[0][h], WARPS + 1, HEADS * LINE);
        if (parts == 1) {
            seen.write_out(out, (first_head + h) * D);
        } else {
            seen.write(lines + (part * HEADS + h) * LINE);
        }
    }
    if (parts == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = (int)atomic_add_release_acquire(a.arrived + block, 1) == parts - 1;
        if (last) a.arrived[block] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    for (int h = warp; h < heads; h += WARPS) Seen<D>::of_parts(lines + h * LINE, parts).write_out(out, (first_head + h) * D);
}

// Where blocks are few, a ring of several pages for each, two of them at a time; where they are some, and in pairs, one at a time and a
// ring that leaves room for a block of the kernels before and after; where they are many, several of them share a multiprocessor.
constexpr int FEW_STAGES = 4, FEW_SPAN = 2, SOME_STAGES = 2, SOME_BLOCKS = 2, MANY_STAGES = 1, MANY_BLOCKS = 4;

#define KERNEL(D, LIMITED, PARTIAL, NAME, STAGES, SPAN, BLOCKS, CLUSTER)                                                                 \
    extern "C" __global__ void __launch_bounds__(SPAN* PAGE_WARPS* WARP, BLOCKS) NAME(const __grid_constant__ Arguments a) { \
        run<D, LIMITED, PARTIAL, STAGES, SPAN, CLUSTER>(a);                                                                              \
    }
#define KERNELS(D, LIMITED, PARTIAL, NAME, FEW_BLOCKS, BLOCKS)                             \
    KERNEL(D, LIMITED, PARTIAL, NAME##_few, FEW_STAGES, FEW_SPAN, FEW_BLOCKS, false)       \
    KERNEL(D, LIMITED, PARTIAL, NAME##_some, SOME_STAGES, 1, FEW_BLOCKS, false)            \
    KERNEL(D, LIMITED, PARTIAL, NAME##_many, MANY_STAGES, 1, BLOCKS, false)
