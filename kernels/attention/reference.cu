// Attention of rows of one sequence in f32 over its cached keys and values, and the rounding of new ones into the cache: simple, for
// heads of any size, as what the fused kernels are compared with.
#include "common/pages.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int MOST_ELEMENTS = 256;  // of a head
constexpr int SLOTS = MOST_ELEMENTS / WARP;

struct AttendArguments {
    const float* q;     // [rows, heads, dim]
    float* out;         // [rows, heads, dim]
    Pages pages;        // of the one sequence
    int heads;
    int dim;
    int first_position; // of row 0
    int window;         // positions that a row sees, its own included; 0: all
    float scale;        // of the scores
    float cap;          // of the scores after that; 0: none
};

// Grid: (rows, heads). Each warp takes every eighth position and keeps a running softmax; the first one adds them up.
extern "C" __global__ void __launch_bounds__(THREADS) attention_reference(const __grid_constant__ AttendArguments a) {
    __shared__ float sums[WARPS][MOST_ELEMENTS], tops[WARPS], weights[WARPS];
    wait_for_earlier_kernels();
    int lane = lane_id(), warp = threadIdx.x / WARP, head = blockIdx.y, kv_head = head / (a.heads / a.pages.kv_heads);
    size_t row = ((size_t)blockIdx.x * a.heads + head) * a.dim;
    int position = a.first_position + blockIdx.x, start = a.window > 0 ? max(position + 1 - a.window, 0) : 0;

    float q[SLOTS], sum[SLOTS] = {}, top = -INFINITY, weight = 0;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) q[j] = lane + WARP * j < a.dim ? a.q[row + lane + WARP * j] : 0;
    for (int p = start + warp; p <= position; p += WARPS) {
        const u16 *k = keys_of(a.pages, a.dim, 0, p, kv_head), *v = values_of(a.pages, a.dim, 0, p, kv_head);
        float score = 0;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            if (lane + WARP * j < a.dim) score += q[j] * f16_to_float(k[lane + WARP * j]);
        }
        score = warp_sum(score) * a.scale;
        if (a.cap > 0) score = a.cap * tanhf(score / a.cap);
        float best = fmaxf(top, score), factor = expf(top - best), probability = expf(score - best);
        top = best;
        weight = weight * factor + probability;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            sum[j] *= factor;
            if (lane + WARP * j < a.dim) sum[j] += probability * f16_to_float(v[(lane + WARP * j) * PAGE]);
        }
    }
#pragma unroll
    for (int j = 0; j < SLOTS; j++) sums[warp][lane + WARP * j] = sum[j];
    if (lane == 0) tops[warp] = top, weights[warp] = weight;
    __syncthreads();

    // A row sees its own position at least, so the largest score is a number; a warp that has seen nothing counts for nothing.
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, tops[w]);
    for (int i = threadIdx.x; i < a.dim; i += THREADS) {
        float y = 0, whole = 0;
        for (int w = 0; w < WARPS; w++) {
            float factor = expf(tops[w] - top);
            y += sums[w][i] * factor;
            whole += weights[w] * factor;
        }
        a.out[row + i] = y / whole;
    }
}

struct StoreArguments {
    const float* k;     // [rows, kv_heads, dim]
    const float* v;
    Pages pages;        // of the one sequence
    int dim;
    int first_position; // of row 0
};

// Grid: (rows, kv_heads); a thread takes an element.
extern "C" __global__ void __launch_bounds__(MOST_ELEMENTS) attention_store(const __grid_constant__ StoreArguments a) {
    wait_for_earlier_kernels();
    int i = threadIdx.x, head = blockIdx.y, position = a.first_position + blockIdx.x;
    if (i >= a.dim) return;
    size_t at = ((size_t)blockIdx.x * a.pages.kv_heads + head) * a.dim + i;
    float k = a.k[at], v = a.v[at];
    keys_of(a.pages, a.dim, 0, position, head)[i] = to_f16(k);
    values_of(a.pages, a.dim, 0, position, head)[i * PAGE] = to_f16(v);
    note_unfit(a.pages, !fits_f16(k) || !fits_f16(v));
}
