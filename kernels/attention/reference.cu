// Reference attention in f32: rows of one sequence attend to its cached keys and values; new keys and values are rounded into the cache.
// Simple, for heads of any size; the fused kernels are compared with it.
#include "common/pages.cuh"
#include "common/reduce.cuh"
#include "format/f8.cuh"

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

// Grid: (rows, heads). Each warp takes every eighth position with a running softmax; in the end the block combines their results. E: an
// element of the cache.
template <typename E>
__device__ __forceinline__ void attend(const AttendArguments& a) {
    __shared__ float warp_y[WARPS][MAX_DIM], max_scores[WARPS], weights[WARPS];
    wait_for_earlier_kernels();
    int lane = lane_id(), warp = threadIdx.x / WARP, head = blockIdx.y, kv_head = head / (a.heads / a.pages.kv_heads);
    size_t row = ((size_t)blockIdx.x * a.heads + head) * a.dim;
    int position = a.first_position + blockIdx.x, start = a.window > 0 ? max(position + 1 - a.window, 0) : 0;

    float q[SLOTS], y[SLOTS] = {}, max_score = -INFINITY, weight = 0;
#pragma unroll
    for (int j = 0; j < SLOTS; j++) q[j] = lane + WARP * j < a.dim ? a.q[row + lane + WARP * j] : 0;
    for (int p = start + warp; p <= position; p += WARPS) {
        const E *k = keys_of<E>(a.pages, a.dim, 0, p, kv_head), *v = values_of<E>(a.pages, a.dim, 0, p, kv_head);
        const float* scales = HAS_SCALES<E> ? scales_of(a.pages, a.dim, 0, p, kv_head) : nullptr;
        float score = 0;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            if (lane + WARP * j < a.dim) score += q[j] * element_to_float(k[lane + WARP * j]);
        }
        score = warp_sum(score) * a.scale * (HAS_SCALES<E> ? scales[0] : 1);
        if (a.cap > 0) score = a.cap * tanhf(score / a.cap);
        float best = fmaxf(max_score, score), factor = expf(max_score - best), probability = expf(score - best);
        max_score = best;
        weight = weight * factor + probability;
        probability *= HAS_SCALES<E> ? scales[a.pages.kv_heads * PAGE] : 1;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            y[j] *= factor;
            if (lane + WARP * j < a.dim) y[j] += probability * element_to_float(v[(lane + WARP * j) * PAGE]);
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

extern "C" __global__ void __launch_bounds__(THREADS) attention_reference(const __grid_constant__ AttendArguments a) { attend<u16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_reference_f8(const __grid_constant__ AttendArguments a) { attend<u8>(a); }

// Grid: (rows, kv_heads)
template <typename E>
__device__ __forceinline__ void store(const StoreArguments& a) {
    __shared__ float maxima[WARPS];
    wait_for_earlier_kernels();
    int head = blockIdx.y, position = a.first_position + blockIdx.x;
    size_t vector = ((size_t)blockIdx.x * a.pages.kv_heads + head) * a.dim;
    float of_key = 1, of_value = 1;
    if (HAS_SCALES<E>) {
        float key = 0, value = 0;
        for (int i = threadIdx.x; i < a.dim; i += THREADS) {
            key = fmaxf(key, f8_magnitude(a.k[vector + i]));
            value = fmaxf(value, f8_magnitude(a.v[vector + i]));
        }
        of_key = f8_scale(block_max(key, maxima, WARPS));
        of_value = f8_scale(block_max(value, maxima, WARPS));
        float* scales = scales_of(a.pages, a.dim, 0, position, head);
        if (threadIdx.x == 0) scales[0] = of_key, scales[a.pages.kv_heads * PAGE] = of_value;
    }
    for (int i = threadIdx.x; i < a.dim; i += THREADS) {
        float k = a.k[vector + i], v = a.v[vector + i];
        keys_of<E>(a.pages, a.dim, 0, position, head)[i] = to_element<E>(k, of_key);
        values_of<E>(a.pages, a.dim, 0, position, head)[i * PAGE] = to_element<E>(v, of_value);
        note_unfit(a.pages, blockIdx.x, !fits_f16(k) || !fits_f16(v));
    }
}
extern "C" __global__ void __launch_bounds__(THREADS) attention_store(const __grid_constant__ StoreArguments a) { store<u16>(a); }
extern "C" __global__ void __launch_bounds__(THREADS) attention_store_f8(const __grid_constant__ StoreArguments a) { store<u8>(a); }
