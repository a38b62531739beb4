// The gated delta rule of delta/rule.cu for single rows of many sequences, bound by reading and writing each S once.
//
// A block takes COLUMNS columns of S of one head, 256 bytes of a row, because memory is slower to read in shorter parts. A thread has four
// columns of every ROWS_AT_ONCE-th row of S, in registers.
#include "common/ptx.cuh"
#include "delta/rule.cuh"

constexpr int THREADS = 128, WARPS = THREADS / WARP;
constexpr int COLUMNS = 64, PIECES = COLUMNS / 4, ROWS_AT_ONCE = THREADS / PIECES;
constexpr int KEY_DIM = 128, N = KEY_DIM / ROWS_AT_ONCE;
static_assert(PIECES == WARP / 2, "a warp has two rows at once");

__device__ __forceinline__ float4 multiply_add(float x, float4 s, float4 sum) {
    return make_float4(fmaf(x, s.x, sum.x), fmaf(x, s.y, sum.y), fmaf(x, s.z, sum.z), fmaf(x, s.w, sum.w));
}

// Sums of a block's columns over its threads, through f32 [WARPS][COLUMNS] in shared memory: in every thread those of its own.
__device__ __forceinline__ float4 sum_over_rows(float4 sum, float4* shared) {
    auto add = [](float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); };
    auto other_half = [](float x) { return __shfl_xor_sync(ALL_LANES, x, PIECES); };
    sum = add(sum, make_float4(other_half(sum.x), other_half(sum.y), other_half(sum.z), other_half(sum.w)));
    int piece = threadIdx.x % PIECES;
    if (lane_id() < PIECES) shared[threadIdx.x / WARP * PIECES + piece] = sum;
    __syncthreads();
    sum = shared[piece];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) sum = add(sum, shared[warp * PIECES + piece]);
    return sum;
}

// Grid: (value_dim / COLUMNS, value_heads, rows). Segment s is row s alone and continues no other. key_dim is at most KEY_DIM, value_dim a
// multiple of COLUMNS. Shared memory: f32 q and k [KEY_DIM], and sums [2][WARPS][COLUMNS].
extern "C" __global__ void __launch_bounds__(THREADS, 5) delta_single_128(const __grid_constant__ RuleArguments a) {
    extern __shared__ __align__(16) char shared[];
    float *q = (float*)shared, *k = q + KEY_DIM;
    float4* sums = (float4*)(k + KEY_DIM);
    int thread = threadIdx.x, first = thread / PIECES, column = blockIdx.x * COLUMNS + thread % PIECES * 4, head = blockIdx.y, row = blockIdx.z;
    size_t place = ((size_t)head * a.key_dim + first) * a.value_dim + column, below = (size_t)ROWS_AT_ONCE * a.value_dim;
    u32 read = a.segments.read[row];
    const float* from = a.states.at(read) + place;
    // S does not depend on the kernel before, which is the convolution.
    float4 s[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        bool is_there = read != 0 && first + i * ROWS_AT_ONCE < a.key_dim;
        s[i] = is_there ? *(const float4*)(from + i * below) : make_float4(0, 0, 0, 0);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();

    int keys = a.key_heads * a.key_dim;
    const float* qkv = a.qkv + (size_t)row * (2 * keys + a.value_heads * a.value_dim);
    const float* of_head = qkv + head / (a.value_heads / a.key_heads) * a.key_dim;
    if (thread < KEY_DIM) {
        bool is_there = thread < a.key_dim;
        q[thread] = is_there ? of_head[thread] : 0;
        k[thread] = is_there ? of_head[keys + thread] : 0;
    }
    float4 v = *(const float4*)(qkv + 2 * keys + head * a.value_dim + column);
    size_t gate = (size_t)row * a.value_heads + head;
    float decay = a.decay[gate], beta = a.beta[gate];
    __syncthreads();

    float4 product = make_float4(0, 0, 0, 0), o = product;
#pragma unroll
    for (int i = 0; i < N; i++) product = multiply_add(k[first + i * ROWS_AT_ONCE], s[i], product);
    product = sum_over_rows(product, sums);
    float4 d = make_float4((v.x - decay * product.x) * beta, (v.y - decay * product.y) * beta, (v.z - decay * product.z) * beta,
                           (v.w - decay * product.w) * beta);
    float* to = a.states.at(a.segments.write[row]) + place;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int at = first + i * ROWS_AT_ONCE;
        s[i] = multiply_add(k[at], d, make_float4(decay * s[i].x, decay * s[i].y, decay * s[i].z, decay * s[i].w));
        o = multiply_add(q[at], s[i], o);
        if (at < a.key_dim) *(float4*)(to + i * below) = s[i];
    }
    o = sum_over_rows(o, sums + WARPS * PIECES);
    if (first == 0) *(float4*)(a.o + ((size_t)row * a.value_heads + head) * a.value_dim + column) = o;
}
