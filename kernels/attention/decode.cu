// Attention of one new token for each sequence of a batch over its cached keys and values, which the same kernel extends: the
// norm and rotation of queries and keys happen on the way in. Bound by reading the cache.
//
// A block takes up to 8 query heads that share a key/value head, and one of several parts of a sequence; its warps take 32
// positions at a time. Scores are computed transposed (keys as A, the heads as B), so that 8 heads fill the instruction, and
// keys and values come straight from the cache in 16-byte pieces: the order of positions inside 32 is chosen such that the
// piece of values that a lane reads matches the scores that it holds. The last block of a sequence to finish adds the parts
// in order.
#include "common/heads.cuh"
#include "common/pages.cuh"

constexpr int HEADS = 8;        // the N of the matrix instruction
constexpr int STEP = 32;        // positions of a warp at a time
constexpr int WARPS = 8;
constexpr int PREFETCHED = 4;   // pages
static_assert(PAGE % STEP == 0, "a step lies in one page");

struct Arguments {
    const float* qkv;           // [sequences, (heads + 2 kv_heads) D]
    const float* q_norm;        // [D] or null
    const float* k_norm;
    const int* positions;       // [sequences]: of the new token
    u16* out;                   // f16 [sequences, heads D]
    float* partial;             // [sequences, head blocks, parts, HEADS, D + 2]
    u32* arrived;               // [sequences, head blocks], zero; left zero
    HeadOptions head;
    Pages pages;
    int group;                  // query heads for each key/value head
    float scale;                // of the scores, times log2(e)
};

template <int D>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int PIECES = D / 32, TILES = D / 16, LINE = D + 2;
    __shared__ __align__(16) u16 q[HEADS][D];
    __shared__ float merged[WARPS][HEADS][LINE];  // sums of values, then the maximum and the sum of weights
    __shared__ bool last;

    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int head_blocks = ceil_div(a.group, HEADS);
    int kv_head = blockIdx.x / head_blocks, first_head = blockIdx.x % head_blocks * HEADS;
    int heads = min(HEADS, a.group - first_head), all_heads = a.group * a.pages.kv_heads;
    int sequence = blockIdx.y, part = blockIdx.z, parts = gridDim.z;
    first_head += kv_head * a.group;

    // Positions change between steps only, and pages and norms not even then: kernels let the next one start when they have
    // waited themselves, so everything before the last one is done by now.
    int position = a.positions[sequence], length = position + 1;
    Rotation<D> rotation(a.head, position);
    float q_weight[D / WARP], k_weight[D / WARP];
    load_norm<D>(a.q_norm, q_weight);
    load_norm<D>(warp == 0 ? a.k_norm : nullptr, k_weight);
    int share = ceil_div(ceil_div(length, parts), STEP) * STEP;
    int begin = part * share, end = min(length, begin + share);

    // All keys and values but the new ones are there; the first of them are on their way while earlier kernels end.
    constexpr int LINE_BYTES = 128, PAGE_LINES = PAGE * D * 2 / LINE_BYTES;
    for (int i = threadIdx.x; i < PREFETCHED * PAGE_LINES; i += WARPS * WARP) {
        int p = begin / PAGE * PAGE + i / PAGE_LINES * PAGE;
        if (p >= min(end, position)) break;
        prefetch_line((const char*)keys<D>(a.pages, sequence, p, kv_head) + i % PAGE_LINES * LINE_BYTES);
        prefetch_line((const char*)values<D>(a.pages, sequence, p, kv_head) + i % PAGE_LINES * LINE_BYTES);
    }

    wait_for_earlier_kernels();
    let_later_kernels_start();
    const float* row = a.qkv + (size_t)sequence * (all_heads + 2 * a.pages.kv_heads) * D;
    float y[D / WARP];
    {
        int h = min(warp, heads - 1);
        norm_and_rotate<D>(row + (first_head + h) * D, a.q_norm != nullptr, q_weight, a.head.eps, rotation, a.scale, y);
#pragma unroll
        for (int j = 0; j < D / WARP; j++) q[warp][lane + WARP * j] = to_f16(y[j]);
    }
    if (position >= begin && position < end) {
        if (warp == 0) {
            norm_and_rotate<D>(row + (all_heads + kv_head) * D, a.k_norm != nullptr, k_weight, a.head.eps, rotation, 1, y);
            u16* k = keys<D>(a.pages, sequence, position, kv_head);
#pragma unroll
            for (int j = 0; j < D / WARP; j++) k[lane + WARP * j] = to_f16(y[j]);
        } else if (warp == 1) {
            const float* x = row + (all_heads + a.pages.kv_heads + kv_head) * D;
            u16* v = values<D>(a.pages, sequence, position, kv_head);
#pragma unroll
            for (int j = 0; j < D / WARP; j++) v[(lane + WARP * j) * PAGE] = to_f16(x[lane + WARP * j]);
        }
    }
    __syncthreads();

    uint4 query[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; j++) query[j] = *(const uint4*)&q[g][32 * j + 8 * t];
    float sums[TILES][4] = {}, top[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};

    for (int p = begin + warp * STEP; p < end; p += WARPS * STEP) {
        const u16* k = keys<D>(a.pages, sequence, p, kv_head);
        const u16* v = values<D>(a.pages, sequence, p, kv_head);
        float score[2][4] = {};
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            // Row r of the 8 x 8 block b stands for position 8 (r / 2) + 2 b + r % 2.
            int low = 8 * (g / 2) + 4 * tile + g % 2;
            uint4 x[PIECES], z[PIECES];
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                x[j] = *(const uint4*)(k + low * D + 32 * j + 8 * t);
                z[j] = *(const uint4*)(k + (low + 2) * D + 32 * j + 8 * t);
            }
#pragma unroll
            for (int j = 0; j < PIECES; j++) {
                mma_f16(score[tile], x[j].x, z[j].x, x[j].y, z[j].y, query[j].x, query[j].y);
                mma_f16(score[tile], x[j].z, z[j].z, x[j].w, z[j].w, query[j].z, query[j].w);
            }
        }
#pragma unroll
        for (int b = 0; b < 4; b++) {
            if (p + 8 * (g / 2) + 2 * b + g % 2 >= end) score[b / 2][b % 2 * 2] = score[b / 2][b % 2 * 2 + 1] = -INFINITY;
        }
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float best = fmaxf(fmaxf(score[0][h], score[0][h + 2]), fmaxf(score[1][h], score[1][h + 2]));
#pragma unroll
            for (int d = 4; d < WARP; d *= 2) best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, d));
            best = fmaxf(best, top[h]);
            factor[h] = exp2_approx(top[h] - best);
            top[h] = best;
            weight[h] *= factor[h];
        }
        u32 probability[4];
#pragma unroll
        for (int b = 0; b < 4; b++) {
            float x = exp2_approx(score[b / 2][b % 2 * 2] - top[0]), z = exp2_approx(score[b / 2][b % 2 * 2 + 1] - top[1]);
            weight[0] += x;
            weight[1] += z;
            probability[b] = transpose_matrix(pack_f16(x, z));
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint4 x = *(const uint4*)(v + (16 * i + g) * PAGE + 8 * t), z = *(const uint4*)(v + (16 * i + g + 8) * PAGE + 8 * t);
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] *= factor[j % 2];
            mma_f16(sums[i], x.x, z.x, x.y, z.y, probability[0], probability[1]);
            mma_f16(sums[i], x.z, z.z, x.w, z.w, probability[2], probability[3]);
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

    // Warp h adds up head h: over the warps, and then over the parts.
    auto add_up = [&](const float* lines, int count, int stride, float (&y)[D / WARP], float& top, float& weight) {
        top = -INFINITY;
        for (int i = 0; i < count; i++) top = fmaxf(top, lines[i * stride + D]);
        weight = 0;
#pragma unroll
        for (int j = 0; j < D / WARP; j++) y[j] = 0;
        for (int i = 0; i < count; i++) {
            // A part without positions has no maximum; nor may all.
            float factor = lines[i * stride + D] == -INFINITY ? 0 : exp2_approx(lines[i * stride + D] - top);
            weight += lines[i * stride + D + 1] * factor;
#pragma unroll
            for (int j = 0; j < D / WARP; j++) y[j] += lines[i * stride + lane + WARP * j] * factor;
        }
    };
    float best, total;
    add_up(merged[0][warp], WARPS, HEADS * LINE, y, best, total);
    int block = sequence * gridDim.x + blockIdx.x;
    if (parts > 1) {
        float* lines = a.partial + (size_t)block * parts * HEADS * LINE;
        float* mine = lines + (part * HEADS + warp) * LINE;
#pragma unroll
        for (int j = 0; j < D / WARP; j++) mine[lane + WARP * j] = y[j];
        if (lane == 0) {
            mine[D] = best;
            mine[D + 1] = total;
        }
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = (int)atomic_add_release_acquire(a.arrived + block, 1) == parts - 1;
            if (last) a.arrived[block] = 0;
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        add_up(lines + warp * LINE, parts, HEADS * LINE, y, best, total);
    }
    if (warp < heads) {
        u16* out = a.out + ((size_t)sequence * all_heads + first_head + warp) * D;
#pragma unroll
        for (int j = 0; j < D / WARP; j++) out[lane + WARP * j] = to_f16(y[j] / total);
    }
}

#define KERNEL(D)                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARPS* WARP, 2) attention_decode_##D(const __grid_constant__ Arguments a) { run<D>(a); }

KERNEL(32)
KERNEL(64)
KERNEL(128)
