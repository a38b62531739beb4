// The gated delta rule, the recurrence of a gated-delta-net layer. For each value head and row, with S [key_dim, value_dim]:
//     S *= decay;  d = (v - k^T S) * beta;  S += k d^T;  o = q^T S
// A block takes some columns of S of one head through all rows of a sequence. S stays in registers.
//
// With 128 rows of S, a row of the batch takes a warp some 175 instructions. With one block on a multiprocessor, and so one warp for each
// scheduler, that is about 190 cycles: 32 multiply-adds each for o, k^T S and S, and between the last two some 90 cycles for the shuffles
// and d, during which S is multiplied by the decay.
#include "delta/columns.cuh"
#include "delta/rule.cuh"

constexpr int WARPS = 4, THREADS = WARPS * WARP;
constexpr int COLUMNS = WARPS * WARP_COLUMNS;
static_assert(COLUMNS == 32, "the launcher divides by it");
// Rows of q, k and v that are loaded together, while the rows before them are processed.
constexpr int CHUNK = 8;

// The inputs of a row, padded with zeros.
template <int K>
struct __align__(16) Row {
    float q[K], k[K], v[COLUMNS], decay, beta, unused[2];
};

// Loads a chunk of rows from `first` on, a row a warp.
template <int K>
__device__ __forceinline__ void fill(const RuleArguments& a, Row<K>* rows, size_t first, int count, int warp, int head, int column) {
    int keys = a.key_heads * a.key_dim, channels = 2 * keys + a.value_heads * a.value_dim, lane = lane_id();
    int q = head / (a.value_heads / a.key_heads) * a.key_dim, v = 2 * keys + head * a.value_dim + column;
#pragma unroll
    for (int turn = 0; turn < CHUNK / WARPS; turn++) {
        int i = turn * WARPS + warp;
        if (i >= count) break;
        Row<K>& row = rows[i];
        const float* from = a.qkv + (first + i) * channels;
#pragma unroll
        for (int j = 4 * lane; j < K; j += 4 * WARP) {
            int bytes = j < a.key_dim ? 16 : 0;
            copy_async_16(shared_address(row.q + j), from + q + j, bytes);
            copy_async_16(shared_address(row.k + j), from + keys + q + j, bytes);
        }
        if (int j = 4 * lane; j < COLUMNS) copy_async_16(shared_address(row.v + j), from + v + j, column + j < a.value_dim ? 16 : 0);
        size_t gate = (first + i) * a.value_heads + head;
        if (int j = WARP - 1 - lane; j < 2) copy_async_4(shared_address(&row.decay + j), (j == 0 ? a.decay : a.beta) + gate, 4);
    }
    copy_async_commit();
}

// K: key_dim, padded. Grid: (ceil(value_dim / COLUMNS), value_heads, segments).
template <int K>
__device__ __forceinline__ void run(const RuleArguments& a) {
    constexpr int N = K / SLICES;
    extern __shared__ __align__(16) char shared[];
    Row<K>* ring = (Row<K>*)shared;     // [2][CHUNK]
    // The shuffle tells the compiler that all lanes agree.
    int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), head = blockIdx.y, segment = blockIdx.z;
    int slice = lane_id() / (WARP / SLICES), first_column = blockIdx.x * COLUMNS;
    int in_block = warp * WARP_COLUMNS + lane_id() % (WARP / SLICES) * 2, column = first_column + in_block;
    bool has = first_column + warp * WARP_COLUMNS < a.value_dim;
    if (a.segments.continues(segment)) return;
    SequenceRows sequence(a.segments, segment);
    int start = sequence.start, rows = sequence.rows;

    // The lane's first element in a block, and the distance to an element of the next row.
    size_t place = ((size_t)head * a.key_dim + 4 * slice) * a.value_dim + column;
    int below = a.value_dim;
    auto has_piece = [&](int i) { return has && 4 * (slice + SLICES * i) < a.key_dim; };
    u32 read = a.segments.read[segment];
    float2 s[N] = {};
    // S does not depend on the kernel before, which is the convolution.
    const float* from = a.states.at(read) + place;
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (read == 0 || !has_piece(i)) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) s[4 * i + j] = *(const float2*)(from + (4 * SLICES * i + j) * below);
    }
    wait_for_earlier_kernels();
    let_later_kernels_start();

    // Writes the state after a segment.
    auto keep = [&] {
        float2* to = (float2*)(a.states.at(a.segments.write[sequence.segment]) + place);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            if (!has_piece(i)) continue;
#pragma unroll
            for (int j = 0; j < 4; j++) to[(4 * SLICES * i + j) * below / 2] = s[4 * i + j];
        }
    };
    sequence.find_end(a.segments);
    bool second = slice % 2;
    size_t o_stride = (size_t)a.value_heads * a.value_dim;
    float* o = a.o + start * o_stride + head * a.value_dim + column + second;
    auto store = [&](float* to, const float (&q)[N], bool is_row) {
        float sum = sum_slices_of_one(multiply(q, s), second);
        if (slice < 2 && is_row) *to = sum;
    };
    auto chunk_of = [&](int first) { return ring + first / CHUNK % 2 * CHUNK; };
    auto fill_from = [&](int first) { fill<K>(a, chunk_of(first), start + first, min(CHUNK, rows - first), warp, head, first_column); };
    float q[N] = {};
    fill_from(0);
    for (int first = 0; first < rows; first += CHUNK) {
        copy_async_wait<0>();
        __syncthreads();
        if (first + CHUNK < rows) fill_from(first + CHUNK);
        const Row<K>* chunk = chunk_of(first);
        int count = has ? min(CHUNK, rows - first) : 0;
        // A row's o is summed in the next row, while that row's k^T S is.
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const Row<K>& row = chunk[i];
            float k[N], decay = row.decay, beta = row.beta;
            load_slice<SLICES>(row.k, slice, k);
            float2 v = *(const float2*)(row.v + in_block), d = sum_slices(multiply(k, s));
            store(o - o_stride, q, first + i > 0);
            o += o_stride;
            load_slice<SLICES>(row.q, slice, q);
#pragma unroll
            for (int j = 0; j < N; j++) s[j] = make_float2(decay * s[j].x, decay * s[j].y);
            d = make_float2((v.x - decay * d.x) * beta, (v.y - decay * d.y) * beta);
#pragma unroll
            for (int j = 0; j < N; j++) s[j] = make_float2(fmaf(k[j], d.x, s[j].x), fmaf(k[j], d.y, s[j].y));
            if (first + i + 1 == sequence.end) keep(), sequence.next(a.segments);
        }
    }
    if (!has) return;
    store(o - o_stride, q, rows > 0);
    keep();
}

#define KERNEL(K) \
    extern "C" __global__ void __launch_bounds__(THREADS) delta_rule_##K(const __grid_constant__ RuleArguments a) { run<K>(a); }
KERNEL(64)
KERNEL(128)
KERNEL(256)
