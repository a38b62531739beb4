// The recurrence of a Mamba-2 layer. For each head and row, with S [state_size, head_dim]:
//     S = decay S + B (step x)^T;  y = S^T C + D x
// A block takes some columns of S of one head through all rows of a sequence. S stays in registers: a lane has four columns of every 16th
// piece of four rows, so that it uses each B and C that it loads four times, and that five shuffles sum the columns.
//
// The floor of one row is S, read and written once. At the sizes of Nemotron 3 Nano, 64 heads of 64 with a state of 128, that is 2 MiB each
// way in 128 blocks, with all loads of a block in flight at once: 1.3 us a layer at 3.35 TB/s, 0.9 us at 4.8 TB/s. With more rows, a row
// takes a warp some 130 instructions: 32 products and 64 multiply-adds for S and y, the loads of B and C, and the shuffles of the row
// before.
#include "recurrent/recurrence.cuh"

struct Arguments {
    const float* xbc;       // [rows, channels]: x of all heads, then B and C of all groups
    const float* decay;     // [rows, heads]
    const float* steps;     // [rows, heads]
    const float* skip;      // [heads]: D
    float* y;               // [rows, heads, head_dim]
    Segments segments;
    States states;          // S
    int heads;
    int head_dim;
    int groups;
    int state_size;
};

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int SLICES = 16, WARP_COLUMNS = WARP / SLICES * 4, COLUMNS = WARPS * WARP_COLUMNS;
static_assert(COLUMNS == 32, "the launcher divides by it");
// Rows of B, C and x that are loaded together, while the rows before them are processed.
constexpr int CHUNK = 8;

// The inputs of a row, padded with zeros.
template <int K>
struct __align__(16) Row {
    float b[K], c[K], x[COLUMNS], decay, step, unused[2];
};

__device__ __forceinline__ float4 scaled(float factor, float4 v) { return make_float4(factor * v.x, factor * v.y, factor * v.z, factor * v.w); }
__device__ __forceinline__ float4 multiply_add(float factor, float4 v, float4 sum) {
    return make_float4(fmaf(factor, v.x, sum.x), fmaf(factor, v.y, sum.y), fmaf(factor, v.z, sum.z), fmaf(factor, v.w, sum.w));
}

// Loads a chunk of rows from `first` on, a row a warp.
template <int K>
__device__ __forceinline__ void fill(const Arguments& a, Row<K>* rows, size_t first, int count, int warp, int head, int column) {
    int width = a.heads * a.head_dim, of_groups = a.groups * a.state_size, lane = lane_id();
    int b = width + head / (a.heads / a.groups) * a.state_size, x = head * a.head_dim + column;
#pragma unroll
    for (int turn = 0; turn < CHUNK / WARPS; turn++) {
        int i = turn * WARPS + warp;
        if (i >= count) break;
        Row<K>& row = rows[i];
        const float* from = a.xbc + (first + i) * (width + 2 * of_groups);
#pragma unroll
        for (int j = 4 * lane; j < K; j += 4 * WARP) {
            int bytes = j < a.state_size ? 16 : 0;
            copy_async_16(shared_address(row.b + j), from + b + j, bytes);
            copy_async_16(shared_address(row.c + j), from + b + of_groups + j, bytes);
        }
        if (int j = 4 * lane; j < COLUMNS) copy_async_16(shared_address(row.x + j), from + x + j, column + j < a.head_dim ? 16 : 0);
        size_t gate = (first + i) * a.heads + head;
        if (int j = WARP - 1 - lane; j < 2) copy_async_4(shared_address(&row.decay + j), (j == 0 ? a.decay : a.steps) + gate, 4);
    }
    copy_async_commit();
}

// Sums over slices: in each lane the sum of one of the four columns, 2 (slice % 2) + slice / 2 % 2.
__device__ __forceinline__ float sum_slices(float4 y, int slice) {
    bool odd = slice % 2, second = slice / 2 % 2;
    float low = (odd ? y.z : y.x) + __shfl_xor_sync(ALL_LANES, odd ? y.x : y.z, WARP / SLICES);
    float high = (odd ? y.w : y.y) + __shfl_xor_sync(ALL_LANES, odd ? y.y : y.w, WARP / SLICES);
    float sum = (second ? high : low) + __shfl_xor_sync(ALL_LANES, second ? low : high, 2 * WARP / SLICES);
#pragma unroll
    for (int d = 4 * WARP / SLICES; d < WARP; d *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    return sum;
}

// K: state_size, padded. Grid: (ceil(head_dim / COLUMNS), heads, segments).
template <int K>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int N = K / SLICES;
    extern __shared__ __align__(16) char shared[];
    Row<K>* ring = (Row<K>*)shared;     // [2][CHUNK]
    // The shuffle tells the compiler that all lanes agree.
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), head = blockIdx.y, segment = blockIdx.z;
    int slice = lane_id() / (WARP / SLICES), first_column = blockIdx.x * COLUMNS;
    int in_block = warp * WARP_COLUMNS + lane_id() % (WARP / SLICES) * 4, column = first_column + in_block;
    bool has = first_column + warp * WARP_COLUMNS < a.head_dim;
    if (a.segments.continues(segment)) return;
    SequenceRows sequence(a.segments, segment);
    int start = sequence.start, rows = sequence.rows;

    // The lane's first element in a block, and the distance to an element of the next row.
    size_t place = ((size_t)head * a.state_size + 4 * slice) * a.head_dim + column;
    int below = a.head_dim;
    auto has_piece = [&](int i) { return has && 4 * (slice + SLICES * i) < a.state_size; };
    u32 read = a.segments.read[segment];
    float4 s[N] = {};
    // S does not depend on the kernel before, which is the convolution.
    const float* from = a.states.at(read) + place;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (read == 0 || !has_piece(i)) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) s[4 * i + j] = *(const float4*)(from + (4 * SLICES * i + j) * below);
    }
    // One slice adds D x.
    float skip = slice == 0 ? a.skip[head] : 0;
    wait_for_earlier_kernels();
    let_later_kernels_start();

    // Writes the state after a segment.
    auto keep = [&] {
        float* to = a.states.at(a.segments.write[sequence.segment]) + place;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            if (!has_piece(i)) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) *(float4*)(to + (4 * SLICES * i + j) * below) = s[4 * i + j];
        }
    };
    sequence.find_end(a.segments);
    size_t y_stride = (size_t)a.heads * a.head_dim;
    float* y = a.y + start * y_stride + head * a.head_dim + column + 2 * (slice % 2) + slice / 2 % 2;
    auto store = [&](float* to, float4 sums, bool is_row) {
        float sum = sum_slices(sums, slice);
        if (slice < 4 && is_row) *to = sum;
    };
    auto chunk_of = [&](int first) { return ring + first / CHUNK % 2 * CHUNK; };
    auto fill_from = [&](int first) { fill<K>(a, chunk_of(first), start + first, min(CHUNK, rows - first), warp, head, first_column); };
    float4 sums = make_float4(0, 0, 0, 0);
    fill_from(0);
    for (int first = 0; first < rows; first += CHUNK) {
        copy_async_wait<0>();
        __syncthreads();
        if (first + CHUNK < rows) fill_from(first + CHUNK);
        const Row<K>* chunk = chunk_of(first);
        int count = has ? min(CHUNK, rows - first) : 0;
        // A row's y is summed over slices in the next row.
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const Row<K>& row = chunk[i];
            float b[N], c[N], decay = row.decay;
            load_slice<SLICES>(row.b, slice, b);
            load_slice<SLICES>(row.c, slice, c);
            float4 x = *(const float4*)(row.x + in_block), added = scaled(row.step, x);
            store(y - y_stride, sums, first + i > 0);
            y += y_stride;
            sums = scaled(skip, x);
#pragma unroll
            for (int j = 0; j < N; j++) {
                s[j] = multiply_add(b[j], added, scaled(decay, s[j]));
                sums = multiply_add(c[j], s[j], sums);
            }
            if (first + i + 1 == sequence.end) keep(), sequence.next(a.segments);
        }
    }
    if (!has) return;
    store(y - y_stride, sums, rows > 0);
    keep();
}

#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int BLOCKS = 1;   // of a multiprocessor at least; without a number, registers of mamba_scan_64 spill
#else
constexpr int BLOCKS = 0;
#endif

#define KERNEL(K) \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) mamba_scan_##K(const __grid_constant__ Arguments a) { run<K>(a); }
KERNEL(64)
KERNEL(128)
KERNEL(256)
