// A gated-delta-net layer between its projections in a step of decoding, which has one row of each of several sequences: the convolution, the
// norms of queries and keys, the gates, the delta rule and the gated norm (delta/conv.cu, delta/rule.cu and delta/norm.cu) in one launch.
//
// A block takes some columns of S of one value head. The blocks of a key head are a cluster. Each of them computes q and k for itself, and
// they send each other sums of squares for the gated norm. The barrier after that also separates the last read of the kept inputs of q and k
// from their write, which may be to the same block of the arena. S is written after the barrier, which would wait for it. For Hopper and
// later.
#include "common/cluster.cuh"
#include "common/reduce.cuh"
#include "delta/columns.cuh"
#include "norm/piece.cuh"
#include "recurrent/convolution.cuh"
#include "recurrent/output.cuh"

struct Arguments {
    const float* x;         // [rows, channels], rows x_stride apart: inputs of the query heads, the key heads and the value heads
    const float* z;         // [rows, value_heads, value_dim], rows z_stride apart
    const float* a;         // [rows, value_heads], rows a_stride apart
    const float* b;         // [rows, value_heads], rows b_stride apart
    u64 x_stride;
    u64 z_stride;
    u64 a_stride;
    u64 b_stride;
    const float* conv;      // [channels, taps]
    const float* a_log;     // [value_heads]
    const float* dt_bias;   // [value_heads]
    const float* weight;    // [value_dim]: of the norm
    Segments segments;      // segment s is row s, and none continues another
    States matrices;        // S
    States inputs;          // of the convolution at the last positions
    Target to;
    int key_heads;
    int value_heads;
    int key_dim;            // a multiple of 4 up to MAX_KEY_DIM
    int value_dim;          // a multiple of the columns of a block
    int taps;
    float norm_eps;
};

constexpr int MAX_KEY_DIM = 128, N = MAX_KEY_DIM / SLICES;
constexpr int MAX_CLUSTER = 8;
constexpr float L2_EPS = 1e-6f;

template <int WARPS>
struct __align__(16) Shared {
    static constexpr int COLUMNS = WARPS * WARP_COLUMNS;
    float squares[MAX_CLUSTER * WARPS]; // of o, by the blocks of a value head and their warps
    float q[MAX_KEY_DIM], k[MAX_KEY_DIM], v[COLUMNS], o[COLUMNS], decay, beta;
};

// Warps by what they do before the rule.
enum Role { QUERY, KEY, VALUE, GATES };

// The convolution of four channels in one row. The last input is the row's own, the first ones are kept in the state.
struct RowConvolution {
    int channel, taps, channels;
    bool has;
    float4 w[MOST_TAPS], x[MOST_TAPS];

    __device__ __forceinline__ float4* kept(const States& inputs, u32 block, int i) const {
        return (float4*)(inputs.at(block) + (size_t)(i - (MOST_TAPS - taps)) * channels + channel);
    }
    __device__ __forceinline__ RowConvolution(const Arguments& a, int channel, int channels, bool has, u32 read)
        : channel(channel), taps(a.taps), channels(channels), has(has) {
#pragma unroll
        for (int i = 0; i < MOST_TAPS; i++) w[i] = x[i] = make_float4(0, 0, 0, 0);
        if (!has) return;
        load_weights(a.conv + (size_t)channel * taps, taps, w);
#pragma unroll
        for (int i = 0; i < BEFORE; i++) {
            if (read != 0 && i >= MOST_TAPS - taps) x[i] = *kept(a.inputs, read, i);
        }
    }
    __device__ __forceinline__ void load(const float* row) {
        if (has) x[BEFORE] = *(const float4*)(row + channel);
    }
    // After SiLU; zeros without channels.
    __device__ __forceinline__ float4 result() const {
        float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < MOST_TAPS; i++) {
            if (i >= MOST_TAPS - taps) add_product(y, w[i], x[i]);
        }
        return make_float4(silu(y.x), silu(y.y), silu(y.z), silu(y.w));
    }
    __device__ __forceinline__ void keep(const States& inputs, u32 write) const {
#pragma unroll
        for (int i = 0; i < BEFORE; i++) {
            if (has && i >= MOST_TAPS - taps) *kept(inputs, write, i) = x[i + 1];
        }
    }
};

__device__ __forceinline__ float4 gated(float4 v, float factor, float4 weight, float4 z) {
    v = apply_norm(v, factor, weight);
    return make_float4(v.x * silu(z.x), v.y * silu(z.y), v.z * silu(z.z), v.w * silu(z.w));
}

// Grid: (rows, key_heads, blocks of a key head), in clusters along the last. The blocks of a value head follow each other.
template <int WARPS, Output OUTPUT>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int COLUMNS = Shared<WARPS>::COLUMNS;
    extern __shared__ __align__(16) char shared[];
    Shared<WARPS>& s = *(Shared<WARPS>*)shared;
    // Announces that this block's memory may be written.
    cluster_arrive();
    // The shuffle tells the compiler that all lanes agree.
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = lane_id(), row = blockIdx.x, key_head = blockIdx.y;
    int parts = a.value_dim / COLUMNS, group = a.value_heads / a.key_heads, rank = blockIdx.z;
    int head = key_head * group + rank / parts, first_column = rank % parts * COLUMNS;
    int keys = a.key_heads * a.key_dim, channels = 2 * keys + a.value_heads * a.value_dim;
    u32 read = a.segments.read[row], write = a.segments.write[row];

    // S, the weights and the kept inputs do not depend on the kernel before.
    int slice = lane / (WARP / SLICES), in_block = warp * WARP_COLUMNS + lane % (WARP / SLICES) * 2, below = a.value_dim;
    size_t place = ((size_t)head * a.key_dim + 4 * slice) * below + first_column + in_block;
    auto has_piece = [&](int i) { return 4 * (slice + SLICES * i) < a.key_dim; };
    float2 m[N] = {};
    const float* from = a.matrices.at(read) + place;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (read == 0 || !has_piece(i)) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) m[4 * i + j] = *(const float2*)(from + (4 * SLICES * i + j) * below);
    }
    int first_channel = warp == VALUE ? 2 * keys + head * a.value_dim + first_column : warp * keys + key_head * a.key_dim;
    bool has_channels = warp < GATES && 4 * lane < (warp == VALUE ? COLUMNS : a.key_dim);
    RowConvolution convolution(a, first_channel + 4 * lane, channels, has_channels, read);
    float rate = 0, bias = 0;
    if (warp == GATES) rate = expf(a.a_log[head]), bias = a.dt_bias[head];
    // A lane normalizes four columns of each block of a pair.
    int column = first_element(lane), first = head * a.value_dim + first_column + column;
    bool ends = warp == GATES && column < COLUMNS;
    float4 weight[2] = {}, z[2] = {};
    if (ends) weight[0] = *(const float4*)(a.weight + first_column + column), weight[1] = *(const float4*)(a.weight + first_column + column + BLOCK);
    wait_for_earlier_kernels();
    let_later_kernels_start();

    convolution.load(a.x + row * a.x_stride);
    if (ends) {
        const float* from = a.z + row * a.z_stride + first;
        z[0] = *(const float4*)from, z[1] = *(const float4*)(from + BLOCK);
    }
    if (warp == GATES) {
        float decay = expf(-rate * softplus(a.a[row * a.a_stride + head] + bias)), beta = sigmoid(a.b[row * a.b_stride + head]);
        if (lane == 0) s.decay = decay, s.beta = beta;
    } else if (warp < GATES) {
        float4 y = convolution.result();
        float factor = 1;
        if (warp != VALUE) factor = rsqrtf(warp_sum(square_sum(y)) + L2_EPS) * (warp == QUERY ? rsqrtf(a.key_dim) : 1);
        float* to = warp == QUERY ? s.q : warp == KEY ? s.k : s.v;
        if (warp != VALUE || has_channels) *(float4*)(to + 4 * lane) = make_float4(y.x * factor, y.y * factor, y.z * factor, y.w * factor);
    }
    __syncthreads();
    cluster_wait();

    float k[N], q[N], decay = s.decay, beta = s.beta;
    load_slice<SLICES>(s.k, slice, k);
    load_slice<SLICES>(s.q, slice, q);
    float2 v = *(const float2*)(s.v + in_block), d = sum_slices(multiply(k, m));
    d = make_float2((v.x - decay * d.x) * beta, (v.y - decay * d.y) * beta);
#pragma unroll
    for (int j = 0; j < N; j++) m[j] = make_float2(fmaf(k[j], d.x, decay * m[j].x), fmaf(k[j], d.y, decay * m[j].y));
    bool second = slice % 2;
    float o = sum_slices_of_one(multiply(q, m), second), squares = warp_sum(slice < 2 ? o * o : 0);
    if (slice < 2) s.o[in_block + second] = o;
    if (lane < parts) store_cluster(shared_address(s.squares + rank % parts * WARPS + warp), rank / parts * parts + lane, squares);
    __syncwarp();
    cluster_sync();

    if (ends) {
        float all = 0;
        for (int i = 0; i < parts * WARPS; i += 4) all += (s.squares[i] + s.squares[i + 1]) + (s.squares[i + 2] + s.squares[i + 3]);
        float factor = rsqrtf(all / a.value_dim + a.norm_eps);
        const float* o = s.o + column;
        a.to.store<OUTPUT>(first, gated(*(const float4*)o, factor, weight[0], z[0]), gated(*(const float4*)(o + BLOCK), factor, weight[1], z[1]));
    }
    if (warp == GATES && head == a.value_heads - 1 && rank % parts == parts - 1) a.to.pad<OUTPUT>(a.to.width / 8, lane, WARP);
    // All blocks of the key head have read the kept inputs.
    if (warp == VALUE || rank == 0) convolution.keep(a.inputs, write);
    float2* to = (float2*)(a.matrices.at(write) + place);
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (!has_piece(i)) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) to[(4 * SLICES * i + j) * below / 2] = m[4 * i + j];
    }
}

#define KERNEL(COLUMNS, NAME, OUTPUT)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(COLUMNS / WARP_COLUMNS * WARP) delta_step_##COLUMNS##_##NAME(const __grid_constant__ Arguments a) { \
        run<COLUMNS / WARP_COLUMNS, OUTPUT>(a);                                                                                          \
    }
KERNEL(32, f16, ROWS_F16)
KERNEL(64, f16, ROWS_F16)
KERNEL(128, f16, ROWS_F16)
KERNEL(32, fragments, FRAGMENTS)
KERNEL(64, fragments, FRAGMENTS)
KERNEL(128, fragments, FRAGMENTS)
