// Products of few rows, 1 to 16, with NVFP4 weights: y[m, n] = sum over k of x[m, k] w[n, k]. Bound by reading the weights
// once, and almost as much by the instructions that decode them.
//
// Weights are the A operand of the matrix instruction, whose rows 0 to 7 are one chunk of format/packed.cuh and whose rows 8 to
// 15 are another:
//   ROWS  the next 8 output features
//   PAIR  the same features of another matrix (gate and up)
//   SPLIT the next 128 elements of K. Activations of the first chunk stand in columns 0 to 3 of B, those of the second in
//         columns 4 to 7, and only the quarters of the result that belong together count. For up to 4 rows: a tile is half as
//         large, and small matrices keep all multiprocessors busy.
// Activations are the B operand: up to 8 rows in its 8 columns, up to 16 in two of them.
//
// A block takes consecutive tiles, and cuts the steps of all of them, one tile after the other, into equal shares for its
// warps. A warp streams its share through a ring in shared memory of its own, which it begins to fill before the kernel waits for
// the one before it, since weights depend on nothing. What warps have of a tile goes to shared memory and is added up at the
// end, in a fixed order.
//
// x stands in shared memory as f16 in the order of the weights, padded with zeros to whole steps. K must be a multiple of 16.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/ring.cuh"
#include "format/packed.cuh"
#include "linear/matrix.cuh"

enum Tile { ROWS, PAIR, SPLIT };
enum Input { PLAIN, NORMED };
enum Output { STORE_F32, STORE_F16, ADD_F32, SWIGLU_F16 };

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int STAGES = 3;                       // of a warp's ring
constexpr int X_CHUNK = CHUNK_K * 2;            // bytes of a row's activations for a chunk
constexpr int SUMS = 16;                        // of a tile, for each row of activations: features, or halves of sums

struct Arguments {
    const void* x;              // PLAIN: f16 [m, k]; NORMED: f32 [k], of one row
    const float* norm_weight;   // NORMED: [k]
    void* out;                  // [m, out_stride]; the matrices' features follow each other
    Matrix matrix[MATRICES];    // SWIGLU: gate and up, of equal rows
    int matrices;
    int m;
    int k;
    int out_stride;
    float eps;
    float out_scale;            // SWIGLU: of the result, which may be large
};

// Activations are kept in pieces of 16 bytes: those that lane t multiplies with word j of a chunk, elements 4 t to 4 t + 3 of
// blocks 2 j and 2 j + 1 in pairs. Where piece 16 chunk + 4 j + t of row m stands: odd rows exchange halves of 128 bytes, so
// that neighbouring rows meet in no bank.
__device__ __forceinline__ int piece_offset(int m, int piece, int row_bytes) { return m * row_bytes + ((piece ^ (m & 1) * 4) * 16); }
__device__ __forceinline__ int first_element(int piece) { return piece / 4 * (2 * BLOCK) + piece % 4 * 4; }

__device__ __forceinline__ uint4 paired(float4 p, float4 q, float4 v, float4 w, float f) {
    return make_uint4(pack_f16(p.x * f * v.x, q.x * f * w.x), pack_f16(p.y * f * v.y, q.y * f * w.y),
                      pack_f16(p.z * f * v.z, q.z * f * w.z), pack_f16(p.w * f * v.w, q.w * f * w.w));
}
__device__ __forceinline__ uint4 paired(uint2 p, uint2 q) {
    return make_uint4(__byte_perm(p.x, q.x, 0x5410), __byte_perm(p.x, q.x, 0x7632), __byte_perm(p.y, q.y, 0x5410),
                      __byte_perm(p.y, q.y, 0x7632));
}
__device__ __forceinline__ float square_sum(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__device__ __forceinline__ float4 load4(const float* p, int i, int count) {
    return i < count ? *(const float4*)(p + i) : make_float4(0, 0, 0, 0);
}

// A piece's share of the norm's weight, which depends on no earlier kernel.
struct NormPiece {
    float4 low, high;
    __device__ __forceinline__ NormPiece(const float* weight, int piece, int k)
        : low(load4(weight, first_element(piece), k)), high(load4(weight, first_element(piece) + BLOCK, k)) {}
};

// Brings x into shared memory; `mine` is the norm of piece `thread`. Ends with everything written, but not with a barrier.
template <Input INPUT>
__device__ __forceinline__ void load_activations(const Arguments& a, const NormPiece* mine, int thread, char* xs, int row_bytes,
                                                 float* sums) {
    int pieces = row_bytes / 16, warp = thread / WARP;
    if (INPUT == NORMED) {
        // Most threads hold what they have of the row from the sum to the product.
        const float* x = (const float*)a.x;
        float4 p = make_float4(0, 0, 0, 0), q = p;
        if (thread < pieces) {
            p = load4(x, first_element(thread), a.k);
            q = load4(x, first_element(thread) + BLOCK, a.k);
        }
        float sum = square_sum(p) + square_sum(q);
        for (int i = thread + THREADS; i < pieces; i += THREADS) {
            sum += square_sum(load4(x, first_element(i), a.k)) + square_sum(load4(x, first_element(i) + BLOCK, a.k));
        }
        sum = warp_sum(sum);
        if (lane_id() == 0) sums[warp] = sum;
        __syncthreads();
        sum = lane_id() < WARPS ? sums[lane_id()] : 0;
        float factor = rsqrtf(warp_sum(sum) / a.k + a.eps);
        if (thread < pieces) *(uint4*)(xs + piece_offset(0, thread, row_bytes)) = paired(p, q, mine->low, mine->high, factor);
        for (int i = thread + THREADS; i < pieces; i += THREADS) {
            NormPiece norm(a.norm_weight, i, a.k);
            *(uint4*)(xs + piece_offset(0, i, row_bytes)) =
                paired(load4(x, first_element(i), a.k), load4(x, first_element(i) + BLOCK, a.k), norm.low, norm.high, factor);
        }
    } else {
        // Several loads on their way before the first is used.
        constexpr int BATCH = 4;
        for (int first = thread; first < pieces * a.m; first += BATCH * THREADS) {
            uint2 low[BATCH], high[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                int i = first + j * THREADS, m = i / pieces, k = first_element(i - m * pieces);
                const uint2* x = (const uint2*)((const u16*)a.x + (size_t)m * a.k + k);
                low[j] = m < a.m && k < a.k ? x[0] : make_uint2(0, 0);
                high[j] = m < a.m && k + BLOCK < a.k ? x[BLOCK / 4] : make_uint2(0, 0);
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                int i = first + j * THREADS, m = i / pieces;
                if (m < a.m) *(uint4*)(xs + piece_offset(m, i - m * pieces, row_bytes)) = paired(low[j], high[j]);
            }
        }
    }
}

// How the steps of a block's tiles, in the order of K and then of tiles, are divided among its warps.
struct Shares {
    int steps, total;
    __device__ __forceinline__ int begin(int warp) const { return total * warp / WARPS; }
    // The first warp with steps from `step` on.
    __device__ __forceinline__ int owner(int step) const {
        int warp = step * WARPS / total;
        while (begin(warp + 1) <= step) warp++;
        return warp;
    }
};

// MANY: 9 to 16 rows of activations.
template <Tile TILE, Input INPUT, Output OUTPUT, bool MANY>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int FEATURES = TILE == ROWS ? 16 : 8, COLUMNS = MANY ? 2 : 1, STEP_CHUNKS = TILE == SPLIT ? 2 : 1;
    using Ring = WarpRing<STAGES, CHUNK_BYTES>;
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, warp = __shfl_sync(ALL_LANES, thread / WARP, 0), lane = thread % WARP, g = lane / 4, t = lane % 4;
    int chunks = ceil_div(a.k, CHUNK_K), steps = ceil_div(chunks, STEP_CHUNKS), row_bytes = steps * STEP_CHUNKS * X_CHUNK;
    char* xs = shared + WARPS * Ring::BYTES;
    float* norm_sums = (float*)(xs + a.m * row_bytes);
    float* partial = norm_sums + WARPS;  // [tiles + WARPS][m][SUMS]

    int end0 = ceil_div(a.matrix[0].rows, FEATURES), end1 = end0, tiles = end0;
    if (TILE != PAIR) {
        if (a.matrices > 1) end1 = tiles += ceil_div(a.matrix[1].rows, FEATURES);
        if (a.matrices > 2) tiles += ceil_div(a.matrix[2].rows, FEATURES);
    }
    int each = tiles / gridDim.x, more = tiles % gridDim.x, block = blockIdx.x;
    int first_tile = block * each + min(block, more), my_tiles = each + (block < more);
    Shares shares{steps, my_tiles * steps};
    int begin = shares.begin(warp), count = shares.begin(warp + 1) - begin;

    // The matrix of a tile and its first feature there.
    auto locate = [&](int tile, int& row) -> const Matrix& {
        int index = TILE == PAIR || tile < end0 ? 0 : tile < end1 ? 1 : 2;
        row = (tile - (index == 0 ? 0 : index == 1 ? end0 : end1)) * FEATURES;
        return a.matrix[index];
    };

    // Output `i` of the block.
    struct Place {
        const Matrix* matrix;
        int tile, feature, m, row;
        size_t at;
    };
    auto place = [&](int i) {
        Place p;
        int features = my_tiles * FEATURES, feature = i % features;
        p.m = i / features;
        p.tile = feature / FEATURES;
        p.feature = feature % FEATURES;
        p.matrix = &locate(first_tile + p.tile, p.row);
        p.row += p.feature;
        int earlier = p.matrix == a.matrix ? 0 : p.matrix == a.matrix + 1 ? a.matrix[0].rows : a.matrix[0].rows + a.matrix[1].rows;
        p.at = (size_t)p.m * a.out_stride + earlier + p.row;
        return p;
    };
    int outputs = a.m * my_tiles * FEATURES;
    float* before = partial + (my_tiles + WARPS) * a.m * SUMS;  // ADD_F32: what sums are added to, [m][tiles][FEATURES]

    // Loads run ahead of the products, across tiles.
    Ring ring(shared + warp * Ring::BYTES);
    int load_tile = begin / steps, load_k = begin % steps, load_left = count;
    const u8* low = nullptr;
    long long to_high = TILE == SPLIT ? CHUNK_BYTES : TILE == PAIR ? a.matrix[1].chunks - a.matrix[0].chunks : 0;
    auto aim = [&]() {
        int row;
        const Matrix& w = locate(first_tile + load_tile, row);
        low = chunk_of(w.chunks, chunks, row, load_k * STEP_CHUNKS * CHUNK_K);
        // Past the end, the last features again; their sums are dropped.
        if (TILE == ROWS) to_high = row + CHUNK_ROWS < w.rows ? chunks * CHUNK_BYTES : 0;
    };
    auto load = [&](int stage) {
        if (load_left > 0) {
            // Of an odd number of chunks, the last has no second; its activations are zeros, too.
            ring.fill(stage, low, low + to_high, TILE != SPLIT || load_k < chunks / 2);
            low += STEP_CHUNKS * CHUNK_BYTES;
            load_left--;
            if (++load_k == steps) {
                load_k = 0;
                load_tile++;
                if (load_left > 0) aim();
            }
        } else {
            ring.skip();
        }
    };

    if (count > 0) aim();
#pragma unroll
    for (int i = 0; i < STAGES; i++) load(i);
    NormPiece norm(a.norm_weight, thread, INPUT == NORMED ? a.k : 0);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    if (OUTPUT == ADD_F32) {
        // Early, so that nothing waits for it at the end.
        for (int i = thread; i < outputs; i += THREADS) {
            Place p = place(i);
            before[i] = p.row < p.matrix->rows ? ((const float*)a.out)[p.at] : 0;
        }
    }
    load_activations<INPUT>(a, &norm, thread, xs, row_bytes, norm_sums);
    __syncthreads();

    // Rows past the last repeat it; their sums are dropped.
    const char* x_lane[COLUMNS];
    int turn[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        int m = min(TILE == SPLIT ? g % 4 : g + 8 * c, a.m - 1);
        x_lane[c] = xs + m * row_bytes + (TILE == SPLIT && g >= 4 ? X_CHUNK : 0) + t * 16;
        turn[c] = (m & 1) * 64;
    }

    float c[COLUMNS][2][4] = {};
    int tile = begin / steps, k = begin % steps;
    // Warps that share a tile have places of their own.
    auto put_away = [&]() {
        float* to = partial + (tile + warp) * (a.m * SUMS);
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            float(&s)[2][4] = c[column];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Of SPLIT, only low rows with low columns and high rows with high ones.
                int m = (TILE == SPLIT ? 2 * t % 4 : 8 * column + 2 * t) + i % 2;
                bool counts = m < a.m && (TILE != SPLIT || t / 2 == i / 2);
                if (counts) to[m * SUMS + g + i / 2 * 8] = s[0][i] + s[1][i];
                s[0][i] = s[1][i] = 0;
            }
        }
    };
    for (int left = count; left > 0; left -= STAGES) {
#pragma unroll
        for (int i = 0; i < STAGES; i++) {
            if (i >= left) break;
            ring.wait();
            u32 stage = ring.stage(i);
            uint4 low_codes = load_shared_16(stage + lane * 16), high_codes = load_shared_16(stage + CHUNK_BYTES + lane * 16);
            uint2 low_scales = load_shared_8(stage + CHUNK_CODES + g * CHUNK_BLOCKS);
            uint2 high_scales = load_shared_8(stage + CHUNK_BYTES + CHUNK_CODES + g * CHUNK_BLOCKS);
            __syncwarp();
            load(i);
            u32 words_low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w};
            u32 words_high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
            int x_step = k * (STEP_CHUNKS * X_CHUNK);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 u[4], v[4];
                decode_packed(words_low[j], low_scales, j, u);
                decode_packed(words_high[j], high_scales, j, v);
#pragma unroll
                for (int column = 0; column < COLUMNS; column++) {
                    uint4 x = *(const uint4*)(x_lane[column] + x_step + ((j * 64) ^ turn[column]));
                    mma_f16(c[column][0], u[0], v[0], u[1], v[1], x.x, x.y);
                    mma_f16(c[column][1], u[2], v[2], u[3], v[3], x.z, x.w);
                }
            }
            if (++k == steps) {
                put_away();
                k = 0;
                tile++;
            }
        }
    }
    if (k > 0) put_away();
    __syncthreads();

    for (int i = thread; i < outputs; i += THREADS) {
        Place place_of = place(i);
        const Matrix& w = *place_of.matrix;
        int row = place_of.row, from = place_of.tile * steps;
        if (row >= w.rows) continue;
        float sum = 0, second = 0;
        for (int p = shares.owner(from); p < WARPS && shares.begin(p) < from + steps; p++) {
            if (shares.begin(p) == shares.begin(p + 1)) continue;
            const float* at = partial + ((place_of.tile + p) * a.m + place_of.m) * SUMS + place_of.feature;
            sum += at[0];
            if (TILE != ROWS) second += at[SUMS / 2];
        }
        if (TILE == SPLIT) sum += second;
        sum *= w.global * PACKED_FACTOR;
        if (w.bias) sum += w.bias[row];
        if (OUTPUT == STORE_F32) ((float*)a.out)[place_of.at] = sum;
        if (OUTPUT == ADD_F32) ((float*)a.out)[place_of.at] = before[i] + sum;
        if (OUTPUT == STORE_F16) ((u16*)a.out)[place_of.at] = to_f16(sum);
        if (OUTPUT == SWIGLU_F16) {
            const Matrix& up = a.matrix[1];
            second *= up.global * PACKED_FACTOR;
            if (up.bias) second += up.bias[row];
            ((u16*)a.out)[place_of.at] = to_f16(sum / (1 + __expf(-sum)) * second * a.out_scale);
        }
    }
}

#define KERNEL(NAME, TILE, INPUT, OUTPUT, MANY, BLOCKS)                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Arguments a) { \
        run<TILE, INPUT, OUTPUT, MANY>(a);                                                                    \
    }
#define KERNELS(NAME, INPUT, OUTPUT)                 \
    KERNEL(NAME##_4, SPLIT, INPUT, OUTPUT, false, 2) \
    KERNEL(NAME##_8, ROWS, INPUT, OUTPUT, false, 1)  \
    KERNEL(NAME##_16, ROWS, INPUT, OUTPUT, true, 1)

KERNELS(linear_f32, PLAIN, STORE_F32)
KERNELS(linear_f16, PLAIN, STORE_F16)
KERNELS(linear_add, PLAIN, ADD_F32)
KERNEL(linear_swiglu_8, PAIR, PLAIN, SWIGLU_F16, false, 2)
KERNEL(linear_swiglu_16, PAIR, PLAIN, SWIGLU_F16, true, 1)
KERNEL(linear_normed_f32, SPLIT, NORMED, STORE_F32, false, 2)
KERNEL(linear_normed_swiglu, PAIR, NORMED, SWIGLU_F16, false, 2)
