// Products of few rows, 1 to 16, with NVFP4 weights: y[m, n] = sum over k of x[m, k] w[n, k]. Bound by reading the weights
// once, and almost as much by the instructions that decode them.
//
// Weights are the A operand of the matrix instruction, whose 16 rows are what the lanes' two pieces of 32 codes make them:
//   ROWS  16 output features
//   PAIR   8 output features of one matrix and the same of another (gate and up)
//   SPLIT  8 output features twice, 128 elements of K apart; activations of the first half stand in columns 0 to 3 of B, those
//          of the second in columns 4 to 7, and only the quarters of the result that belong together count. For up to 4 rows:
//          a tile is half as large, and small matrices keep all multiprocessors busy.
// Activations are the B operand: up to 8 rows in its 8 columns, up to 16 in two of them.
//
// A group of warps takes a tile at a time and divides K among its warps, each of which streams its share through a ring in
// shared memory of its own: no barrier stands between a load and its use. The ring fills before the kernel waits for the one
// before it, since weights depend on nothing. Sums over the warps of a group are made in a fixed order.
//
// x stands in shared memory as f16, its rows padded with zeros to whole steps. K must be a multiple of 16.
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "format/nvfp4.cuh"

enum Tile { ROWS, PAIR, SPLIT };
enum Input { PLAIN, NORMED };
enum Output { STORE_F32, STORE_F16, ADD_F32, SWIGLU_F16 };

constexpr int PIECE = 32;                   // codes of a lane's piece: 16 bytes
constexpr int RUN = 4 * PIECE;              // elements of K that the four lanes of a row hold together
constexpr int STEP = 2 * RUN;               // elements of K that a warp takes at a time: a row's codes are a cache line
constexpr int LINE = STEP / 2;
constexpr int SCALE_LINE = STEP / BLOCK;
constexpr int ROW_BYTES = LINE + SCALE_LINE;
constexpr int WARP_BYTES = 6 * 8 * ROW_BYTES;  // of a warp's ring: six stages of 8 rows, or three of 16
static_assert(LINE == 128 && SCALE_LINE == 16, "a line of codes and a piece of scales");
constexpr int SUMS = 16 * 8;                // of a tile and 8 rows of activations
constexpr int MATRICES = 3;
constexpr int MAX_THREADS = 512;            // leaves each of them 128 registers

struct Matrix {
    const u8* codes;    // [rows, k / 2]
    const u8* scales;   // [rows, k / 16]
    const float* bias;  // [rows] or null
    float global;
    int rows;
};

struct Arguments {
    const void* x;              // PLAIN: f16 [m, k]; NORMED: f32 [m, k]
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

// Where eight activations of row m from k on stand: pieces of 16 bytes, exchanged so that neither the four lanes of a row nor
// neighbouring rows meet in a bank.
__device__ __forceinline__ int piece_offset(int m, int k, int row_bytes) {
    int lane = k / PIECE % 4, piece = k / 8 % 4;
    return m * row_bytes + k / RUN * (RUN * 2) + lane * (PIECE * 2) + ((piece ^ lane ^ (m & 1)) * 16);
}

// Eight normalised activations in the order that decode_pairs() gives weights in: elements j and j + 4 together.
__device__ __forceinline__ uint4 normed_piece(float4 p, float4 q, float4 v, float4 w, float f) {
    return make_uint4(pack_f16(p.x * f * v.x, q.x * f * w.x), pack_f16(p.y * f * v.y, q.y * f * w.y),
                      pack_f16(p.z * f * v.z, q.z * f * w.z), pack_f16(p.w * f * v.w, q.w * f * w.w));
}
__device__ __forceinline__ float square_sum(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// Brings x into shared memory. Ends with everything written, but not with a barrier.
template <Input INPUT>
__device__ __forceinline__ void load_activations(const Arguments& a, char* xs, int row_bytes, float* sums) {
    int threads = blockDim.x * blockDim.y * blockDim.z;
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int pieces = a.k / 8, warps = threads / WARP, warp = thread / WARP;
    if (INPUT == NORMED) {
        const float4* weight = (const float4*)a.norm_weight;
        if (a.m == 1) {
            // All threads share the row, and most hold what they have of it from the sum to the product.
            const float4* x = (const float4*)a.x;
            float4 p = make_float4(0, 0, 0, 0), q = p, v = p, w = p;
            if (thread < pieces) {
                p = x[2 * thread];
                q = x[2 * thread + 1];
                v = weight[2 * thread];
                w = weight[2 * thread + 1];
            }
            float sum = square_sum(p) + square_sum(q);
            for (int i = thread + threads; i < pieces; i += threads) sum += square_sum(x[2 * i]) + square_sum(x[2 * i + 1]);
            sum = warp_sum(sum);
            if (lane_id() == 0) sums[warp] = sum;
            __syncthreads();
            sum = 0;
            for (int i = 0; i < warps; i++) sum += sums[i];
            float factor = rsqrtf(sum / a.k + a.eps);
            if (thread < pieces) *(uint4*)(xs + piece_offset(0, 8 * thread, row_bytes)) = normed_piece(p, q, v, w, factor);
            for (int i = thread + threads; i < pieces; i += threads) {
                *(uint4*)(xs + piece_offset(0, 8 * i, row_bytes)) = normed_piece(x[2 * i], x[2 * i + 1], weight[2 * i], weight[2 * i + 1], factor);
            }
        } else {
            // A warp to a row.
            for (int m = warp; m < a.m; m += warps) {
                const float4* x = (const float4*)a.x + (size_t)m * (a.k / 4);
                float sum = 0;
#pragma unroll 2
                for (int i = lane_id(); i < a.k / 4; i += WARP) sum += square_sum(x[i]);
                float factor = rsqrtf(warp_sum(sum) / a.k + a.eps);
#pragma unroll 1
                for (int i = lane_id(); i < pieces; i += WARP) {
                    *(uint4*)(xs + piece_offset(m, 8 * i, row_bytes)) = normed_piece(x[2 * i], x[2 * i + 1], weight[2 * i], weight[2 * i + 1], factor);
                }
            }
        }
    } else {
        const uint4* x = (const uint4*)a.x;
#pragma unroll 4
        for (int i = thread; i < pieces * a.m; i += threads) {
            uint4 v = x[i];
            uint4 r = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                                 __byte_perm(v.y, v.w, 0x7632));
            *(uint4*)(xs + piece_offset(i / pieces, i % pieces * 8, row_bytes)) = r;
        }
    }
    int padding = (row_bytes / 16) - pieces;
    for (int i = thread; i < padding * a.m; i += threads) {
        *(uint4*)(xs + piece_offset(i / padding, 8 * (pieces + i % padding), row_bytes)) = make_uint4(0, 0, 0, 0);
    }
}

// MANY: 9 to 16 rows of activations. WHOLE: K is a multiple of the step.
template <Tile TILE, Input INPUT, Output OUTPUT, bool MANY, bool WHOLE>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int FEATURES = TILE == ROWS ? 16 : 8, COLUMNS = MANY ? 2 : 1;
    constexpr int STAGE_ROWS = TILE == SPLIT ? 8 : 16, STAGE_BYTES = STAGE_ROWS * ROW_BYTES, STAGES = WARP_BYTES / STAGE_BYTES;
    extern __shared__ __align__(128) char shared[];
    int split = blockDim.y, groups = blockDim.z;
    int warps = split * groups, part = threadIdx.y, group = threadIdx.z;
    int warp = part + split * group, lane = threadIdx.x;
    int g = lane / 4, t = lane % 4;
    int steps = ceil_div(a.k, STEP), row_bytes = steps * STEP * 2;

    char* ring = shared + warp * WARP_BYTES;
    char* xs = shared + warps * WARP_BYTES;
    float* partial = (float*)(xs + a.m * row_bytes);    // [2][groups][split][COLUMNS][SUMS]
    int partial_size = groups * split * COLUMNS * SUMS;
    float* sums = partial + 2 * partial_size;

    int end0 = ceil_div(a.matrix[0].rows, FEATURES), end1 = end0, tiles = end0;
    if (TILE != PAIR) {
        if (a.matrices > 1) end1 = tiles += ceil_div(a.matrix[1].rows, FEATURES);
        if (a.matrices > 2) tiles += ceil_div(a.matrix[2].rows, FEATURES);
    }
    int first = blockIdx.x + group * gridDim.x, stride = gridDim.x * groups;
    int my_steps = part < steps ? (steps - part - 1) / split + 1 : 0;
    int my_tiles = first < tiles ? (tiles - first - 1) / stride + 1 : 0;

    // The matrix of a tile and its first feature there.
    auto locate = [&](int tile, int& row) -> const Matrix& {
        int index = TILE == PAIR || tile < end0 ? 0 : tile < end1 ? 1 : 2;
        row = (tile - (index == 0 ? 0 : index == 1 ? end0 : end1)) * FEATURES;
        return a.matrix[index];
    };

    // Loads run ahead of the products, across tiles; a stage is filled again as soon as its codes are in registers.
    // Lanes copy lines, four rows at a time, and not what they will read: rows stand apart by a line, their pieces exchanged
    // between odd and even rows so that neighbours meet in no bank.
    auto piece_at = [](int row, int piece) { return row * LINE + ((piece ^ (row % 2 * 4)) * 16); };
    int load_tile = first, load_left = 0, load_k = 0;
    const u8 *codes[2] = {}, *scales = nullptr, *high_scales = nullptr;
    int next_rows[2] = {};
    auto aim = [&]() {
        if (load_tile >= tiles) return;
        int row;
        const Matrix& w = locate(load_tile, row);
        const Matrix& other = TILE == PAIR ? a.matrix[1] : w;
        int code_row = a.k / 2, scale_row = a.k / BLOCK, last = w.rows - 1, high = TILE == ROWS ? row + 8 : row;
        // Features past the end repeat the last; their sums are dropped.
        if (WHOLE) {
            int r = lane / 8;
            codes[0] = w.codes + (size_t)min(row + r, last) * code_row + part * LINE + lane % 8 * 16;
            next_rows[0] = (min(row + r + 4, last) - min(row + r, last)) * code_row;
            if (STAGE_ROWS == 16) {
                codes[1] = other.codes + (size_t)min(high + r, last) * code_row + part * LINE + lane % 8 * 16;
                next_rows[1] = (min(high + r + 4, last) - min(high + r, last)) * code_row;
            }
            scales = lane < 8 ? w.scales + (size_t)min(row + lane, last) * scale_row : other.scales + (size_t)min(high + lane % 8, last) * scale_row;
            scales += part * SCALE_LINE;
        } else {
            load_k = part * STEP + t * PIECE;
            codes[0] = w.codes + (size_t)min(row + g, last) * code_row;
            codes[1] = other.codes + (size_t)min(high + g, last) * code_row;
            scales = w.scales + (size_t)min(row + g, last) * scale_row;
            high_scales = other.scales + (size_t)min(high + g, last) * scale_row;
        }
        load_left = my_steps;
        load_tile += stride;
    };
    auto load = [&](char* stage) {
        if (load_left > 0) {
            u32 to = shared_address(stage);
            if (WHOLE) {
#pragma unroll
                for (int h = 0; h < STAGE_ROWS / 8; h++) {
                    int r = h * 8 + lane / 8;
                    copy_async_16(to + piece_at(r, lane % 8), codes[h], 16);
                    copy_async_16(to + piece_at(r + 4, lane % 8), codes[h] + next_rows[h], 16);
                    codes[h] += split * LINE;
                }
                if (lane < STAGE_ROWS) copy_async_16(to + STAGE_ROWS * LINE + lane * SCALE_LINE, scales, 16);
                scales += split * SCALE_LINE;
            } else {
                // Pieces may end early and begin at any eighth byte; scales come one at a time.
                static_assert(WHOLE || TILE != SPLIT, "halves of K that are not whole");
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int h = i / 2, half = i % 2, k = load_k + half * RUN, row = h * 8 + g;
                    int left = min(max(a.k - k, 0), PIECE) / 2;
                    const u8* from = codes[h] + (left > 0 ? k / 2 : 0);
                    u32 piece = to + piece_at(row, half * 4 + t);
                    copy_async_8(piece, from, min(left, 8));
                    copy_async_8(piece + 8, left > 8 ? from + 8 : from, max(left - 8, 0));
                    const u8* s = (h ? high_scales : scales) + k / BLOCK;
                    u16 pair = left > 0 ? s[0] : 0;
                    if (left > 8) pair |= (u16)s[1] << 8;
                    *(u16*)(stage + STAGE_ROWS * LINE + row * SCALE_LINE + half * 8 + t * 2) = pair;
                }
                load_k += split * STEP;
            }
            if (--load_left == 0) aim();
        }
        copy_async_commit();
    };

    if (my_steps > 0) aim();
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) load(ring + i * STAGE_BYTES);
    wait_for_earlier_kernels();
    let_later_kernels_start();
    load_activations<INPUT>(a, xs, row_bytes, sums);
    __syncthreads();

    // Rows past the last repeat it; their sums are dropped.
    const char* x_lane[COLUMNS];
    int turn[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        int m = min(TILE == SPLIT ? g % 4 : g + 8 * c, a.m - 1);
        x_lane[c] = xs + m * row_bytes + part * (STEP * 2) + (TILE == SPLIT && g >= 4 ? RUN * 2 : 0) + t * (PIECE * 2);
        turn[c] = (t ^ (m & 1)) * 16;
    }

    char* stage = ring;
    char* stages_end = ring + STAGES * STAGE_BYTES;
    int buffer = 0;
    for (int n = 0; n < my_tiles; n++) {
        float c[COLUMNS][2][4] = {};
        int x_step = 0;
#pragma unroll 1
        for (int i = 0; i < my_steps; i++) {
            copy_async_wait<STAGES - 1>();
            __syncwarp();
            // The halves of K, of 8 and of 8 more rows; or for SPLIT both halves of 8 rows at once.
            constexpr int TURNS = STAGE_ROWS / 8;
            uint4 low[TURNS], high[TURNS];
            u32 scale_low[TURNS], scale_high[TURNS];
#pragma unroll
            for (int h = 0; h < TURNS; h++) {
                int high_row = TILE == SPLIT ? g : g + 8, high_half = TILE == SPLIT ? 1 : h;
                const char* s = stage + STAGE_ROWS * LINE + t * 2;
                low[h] = *(const uint4*)(stage + piece_at(g, 4 * h + t));
                high[h] = *(const uint4*)(stage + piece_at(high_row, 4 * high_half + t));
                scale_low[h] = *(const u16*)(s + g * SCALE_LINE + h * 8);
                scale_high[h] = *(const u16*)(s + high_row * SCALE_LINE + high_half * 8);
            }
            __syncwarp();
            load(stage);
            stage += STAGE_BYTES;
            if (stage == stages_end) stage = ring;
#pragma unroll
            for (int h = 0; h < TURNS; h++) {
                u32 words_low[4] = {low[h].x, low[h].y, low[h].z, low[h].w};
                u32 words_high[4] = {high[h].x, high[h].y, high[h].z, high[h].w};
                u32 pair_low = scale_pair(scale_low[h]), pair_high = scale_pair(scale_high[h]);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 u[4], v[4];
                    u32 su = j < 2 ? both_low(pair_low) : both_high(pair_low), sv = j < 2 ? both_low(pair_high) : both_high(pair_high);
                    decode_pairs(words_low[j], u);
                    decode_pairs(words_high[j], v);
#pragma unroll
                    for (int p = 0; p < 4; p++) {
                        u[p] = mul_f16(u[p], su);
                        v[p] = mul_f16(v[p], sv);
                    }
#pragma unroll
                    for (int column = 0; column < COLUMNS; column++) {
                        uint4 x = *(const uint4*)(x_lane[column] + x_step + h * (RUN * 2) + ((j * 16) ^ turn[column]));
                        mma_f16(c[column][0], u[0], v[0], u[1], v[1], x.x, x.y);
                        mma_f16(c[column][1], u[2], v[2], u[3], v[3], x.z, x.w);
                    }
                }
            }
            x_step += split * (STEP * 2);
        }
        // [part][column][16 rows of the tile][8 rows of activations]
        float* mine = partial + buffer * partial_size + group * (split * COLUMNS * SUMS);
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            float* to = mine + (part * COLUMNS + column) * SUMS;
            const float(&s)[2][4] = c[column];
            *(float2*)(to + g * 8 + 2 * t) = make_float2(s[0][0] + s[1][0], s[0][1] + s[1][1]);
            *(float2*)(to + (g + 8) * 8 + 2 * t) = make_float2(s[0][2] + s[1][2], s[0][3] + s[1][3]);
        }
        barrier(1 + group, split * WARP);
        int row;
        const Matrix& w = locate(first + n * stride, row);
        int column_of_row = (&w == a.matrix ? 0 : &w == a.matrix + 1 ? a.matrix[0].rows : a.matrix[0].rows + a.matrix[1].rows);
        for (int i = part * WARP + lane; i < a.m * FEATURES; i += split * WARP) {
            int m = i / FEATURES, r = i % FEATURES;
            const float* from = mine + m / 8 * SUMS + r * 8 + m % 8;
            float sum = 0, second = 0;
            for (int p = 0; p < split; p++) {
                sum += from[p * (COLUMNS * SUMS)];
                if (TILE == PAIR) second += from[p * (COLUMNS * SUMS) + 64];
                if (TILE == SPLIT) second += from[p * (COLUMNS * SUMS) + 64 + 4];
            }
            if (TILE == SPLIT) sum += second;
            if (row + r >= w.rows) continue;
            sum *= w.global * WEIGHT_FACTOR;
            if (w.bias) sum += w.bias[row + r];
            size_t at = (size_t)m * a.out_stride + column_of_row + row + r;
            if (OUTPUT == STORE_F32) ((float*)a.out)[at] = sum;
            if (OUTPUT == ADD_F32) ((float*)a.out)[at] += sum;
            if (OUTPUT == STORE_F16) ((u16*)a.out)[at] = (u16)pack_f16(sum, 0);
            if (OUTPUT == SWIGLU_F16) {
                const Matrix& up = a.matrix[1];
                second *= up.global * WEIGHT_FACTOR;
                if (up.bias) second += up.bias[row + r];
                ((u16*)a.out)[at] = (u16)pack_f16(sum / (1 + __expf(-sum)) * second * a.out_scale, 0);
            }
        }
        // Two buffers take turns, so a warp that runs ahead writes where nobody reads any more.
        buffer ^= 1;
    }
}

#define KERNEL(NAME, TILE, INPUT, OUTPUT, MANY, WHOLE)                                                        \
    extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) NAME(const __grid_constant__ Arguments a) {  \
        run<TILE, INPUT, OUTPUT, MANY, WHOLE>(a);                                                             \
    }
#define KERNELS(NAME, INPUT, OUTPUT)                        \
    KERNEL(NAME##_4, SPLIT, INPUT, OUTPUT, false, true)     \
    KERNEL(NAME##_8, ROWS, INPUT, OUTPUT, false, true)      \
    KERNEL(NAME##_16, ROWS, INPUT, OUTPUT, true, true)      \
    KERNEL(NAME##_ragged, ROWS, INPUT, OUTPUT, true, false)

KERNELS(linear_f32, PLAIN, STORE_F32)
KERNELS(linear_f16, PLAIN, STORE_F16)
KERNELS(linear_add, PLAIN, ADD_F32)
KERNELS(linear_normed_f32, NORMED, STORE_F32)
KERNEL(linear_normed_swiglu_8, PAIR, NORMED, SWIGLU_F16, false, true)
KERNEL(linear_normed_swiglu_16, PAIR, NORMED, SWIGLU_F16, true, true)
KERNEL(linear_normed_swiglu_ragged, PAIR, NORMED, SWIGLU_F16, true, false)
