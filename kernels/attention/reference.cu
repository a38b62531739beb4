// Reference attention in f32: rows of one sequence attend to its cached keys and values; new keys and values are rounded into the cache.
// Simple, for heads of any size; the fused kernels are compared with it.
#include "common/pages.cuh"
#include "common/reduce.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * WARP;
constexpr int MAX_DIM = 512;    // elements of a head
constexpr int SLOTS = MAX_DIM / WARP;

struct AttendArguments {
    const float* q;     // [rows, heads, dim]
    const float* sinks; // [heads]: a logit of each head that has no value; or null
    float* out;         // [rows, heads, dim]
    Pages pages;        // of the one sequence
    int heads;
    int dim;
    int first_position; // of row 0
    int window;         // positions that a row sees, its own included; 0: all
    float scale;        // of the scores
    float cap;          // of the scores after that; 0: none
};

// Grid: (rows, heads). Each warp takes every eighth position with a running softmax; in the end the block combines their results.
extern "C" __global__ void __launch_bounds__(THREADS) attention_reference(const __grid_constant__ AttendArguments a) {
    __shared__ float warp_y[WARPS][MAX_DIM], max_scores[WARPS], weights[WARPS];
    wait_for_earlier_kernels();
    int lane = lane_id(), warp = threadIdx.x / WARP, head = blockIdx.y, kv_head = head / (a.heads / a.pages.kv_heads);
    size_t row = ((size_t)blockIdx.x * a.heads + head) * a.dim;
    int position = a.first_position + blockIdx.x, start = a.window > 0 ? max(position + 1 - a.window, 0) : 0;

    float q[SLOTS], y[SLOTS] = {}, max_score = -INFINITY, weight = 0;
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
        float best = fmaxf(max_score, score), factor = expf(max_score - best), probability = expf(score - best);
        max_score = best;
        weight = weight * factor + probability;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            y[j] *= factor;
            if (lane + WARP * j < a.dim) y[j] += probability * f16_to_float(v[(lane + WARP * j) * PAGE]);
        }
    }
#pragma unroll
    for (int j = 0; j < SLOTS; j++) warp_y[warp][lane + WARP * j] = y[j];
    if (lane == 0) max_scores[warp] = max_score, weights[warp] = weight;
    __syncthreads();

    // A row sees at least its own position, so the largest score is finite; a warp without positions has minus infinity and adds nothing.
    float sink = a.sinks ? a.sinks[head] : -INFINITY;
    max_score = fmaxf(max_score, sink);
    for (int w = 0; w < WARPS; w++) max_score = fmaxf(max_score, max_scores[w]);
    for (int i = threadIdx.x; i < a.dim; i += THREADS) {
        float sum = 0, total_weight = expf(sink - max_score);
        for (int w = 0; w < WARPS; w++) {
            float factor = expf(max_scores[w] - max_score);
            sum += warp_y[w][i] * factor;
            total_weight += weights[w] * factor;
        }
        a.out[row + i] = sum / total_weight;
    }
}

struct StoreArguments {
    const float* k;     // [rows, kv_heads, dim]
    const float* v;
    Pages pages;        // of the one sequence
    int dim;
    int first_position; // of row 0
};

// Grid: (rows, kv_heads)
extern "C" __global__ void __launch_bounds__(THREADS) attention_store(const __grid_constant__ StoreArguments a) {
    wait_for_earlier_kernels();
    int head = blockIdx.y, position = a.first_position + blockIdx.x;
    for (int i = threadIdx.x; i < a.dim; i += THREADS) {
        size_t at = ((size_t)blockIdx.x * a.pages.kv_heads + head) * a.dim + i;
        float k = a.k[at], v = a.v[at];
        keys_of(a.pages, a.dim, 0, position, head)[i] = to_f16(k);
        values_of(a.pages, a.dim, 0, position, head)[i * PAGE] = to_f16(v);
        note_unfit(a.pages, blockIdx.x, !fits_f16(k) || !fits_f16(v));
    }
}
