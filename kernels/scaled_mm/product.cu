// W4A4 products: y[m, n] = sum over k of a[m, k] b[n, k] of two NVFP4 matrices, summed in a fixed order.
//
// A block computes a tile of the result. Asynchronous copies bring codes and scales to a ring in shared memory. From there they go to
// registers, 64 elements of K at a time, as fragments of the instruction that multiplies e2m1 codes with their scales. For tensor cores
// without it, each word of eight codes is decoded to four pairs of f16, two pairs for each instruction; both operands are decoded in the
// same order along K, so that order does not matter. Warps that split K each take a range of every step, and their accumulators are added
// in a fixed order.
//
// The f16 of a code times its scale is the exact value times 2^-8: a multiple of 2^-18 up to 10.5, with six significant bits. Products of
// two have twelve, at most 2^7, and a sum of 2^31 of them stays below 2^38: nothing overflows, and only sums are rounded.
//
// K is a multiple of 16. Scales are 0 to 0x7e. Beyond the last rows, the last ones are repeated, and the results are dropped.
#include "common/ptx.cuh"
#include "format/nvfp4.cuh"
#include "format/swizzle.cuh"

enum Output { STORE_F32, STORE_F16, STORE_BF16 };

struct Operand {
    const u8* codes;    // [rows, k / 2]
    const u8* scales;   // [rows, k / 16], or swizzled
    int rows;
    int swizzled;
};

struct Arguments {
    Operand a;
    Operand b;
    void* out;          // [a.rows, b.rows]
    float factors[2];   // that multiply the result, one after the other
    int k;
    int output;
};

constexpr int PIECE = 16;               // bytes of an asynchronous copy, and of a row of a fragment
constexpr int FRAGMENT = 2 * PIECE;     // bytes of a row that a warp multiplies at a time
constexpr int FRAGMENT_K = 64;          // elements in them
static_assert(FRAGMENT_K / 2 == FRAGMENT && FRAGMENT_K / BLOCK == SCALES_IN_WORD, "a fragment has a word of scales");

// The tile of a block: rows of a and of b, elements of K in a step, the warps along each of them, and the stages of the ring.
template <int M_, int N_, int STEP_, int WARPS_M_, int WARPS_N_, int WARPS_K_, int STAGES_>
struct Tile {
    static constexpr int M = M_, N = N_, STEP = STEP_, WARPS_M = WARPS_M_, WARPS_N = WARPS_N_, WARPS_K = WARPS_K_, STAGES = STAGES_;
    static constexpr int THREADS = WARPS_M * WARPS_N * WARPS_K * WARP;
    static constexpr int ROWS = M + N;
    static constexpr int PIECES = STEP / 2 / PIECE;             // of a row's codes
    static constexpr int SCALE_WORDS = STEP / FRAGMENT_K;       // of a row
    static constexpr int CODES = ROWS * PIECES * PIECE;
    static constexpr int STAGE = CODES + ROWS * SCALE_WORDS * 4;
    static constexpr int SHARED = STAGES * STAGE;               // bytes that the launcher requests
    static constexpr int ROWS_M = M / WARPS_M;                  // of a warp
    static constexpr int TILES_M = ROWS_M / 16, TILES_N = N / WARPS_N / 8;  // of a warp
    static constexpr int FRAGMENTS = STEP / FRAGMENT_K / WARPS_K;           // of a warp, along a step
    static constexpr int SUM_STRIDE = N + 8;                    // keeps the lanes of a fragment's rows in different banks
    static_assert(TILES_M * WARPS_M * 16 == M && TILES_N * WARPS_N * 8 == N, "warps cover the tile");
    static_assert(TILES_N % 4 == 0, "fragments of b are loaded two or four at a time");
    static_assert(FRAGMENTS * WARPS_K * FRAGMENT_K == STEP, "warps cover a step");
    static_assert((FRAGMENTS & (FRAGMENTS - 1)) == 0, "the number of a warp's fragment has bits of its own in an address");
    static_assert(THREADS / PIECES % 16 == 0, "the rows that a thread copies are 16 apart, or multiples of it");
    static_assert(STAGES >= 3 && CODES % 128 == 0 && STAGE % 128 == 0, "a ring of whole lines");
    static_assert(WARPS_K * ROWS_M * SUM_STRIDE * 4 <= SHARED, "accumulators take the place of the operands");
};

// Position of a piece of a row in a tile whose rows have PIECES pieces: swizzled, so that the same pieces of eight neighbouring rows are in
// different banks. The swizzle is an exclusive or, so the address of piece p ^ q is that of piece p, exclusive or 16 q. It repeats every 16
// rows.
template <int PIECES>
__device__ __forceinline__ int piece_at(int row, int piece) {
    constexpr int ROWS_IN_LINE = PIECES < 8 ? 8 / PIECES : 1, SWIZZLED = PIECES < 8 ? PIECES : 8;
    return (row * PIECES + (piece ^ row / ROWS_IN_LINE % SWIZZLED)) * PIECE;
}

// The number of existing bytes among the PIECE bytes from `at` on, in a row of `bytes`.
__device__ __forceinline__ int bytes_left(int bytes, int at) { return min(max(bytes - at, 0), PIECE); }

// Stores two neighbours of a row of the result; the second may be beyond the end. `pairs`: pairs are aligned.
__device__ __forceinline__ void store(const Arguments& a, int m, int n, bool pairs, float x, float y) {
    size_t at = (size_t)m * a.b.rows + n;
    bool second = n + 1 < a.b.rows;
    if (a.output == STORE_F32) {
        float* to = (float*)a.out + at;
        if (pairs) {
            *(float2*)to = make_float2(x, y);
        } else {
            to[0] = x;
            if (second) to[1] = y;
        }
    } else {
        u32 both = a.output == STORE_F16 ? pack_f16(x, y) : pack_bf16(x, y);
        u16* to = (u16*)a.out + at;
        if (pairs) {
            *(u32*)to = both;
        } else {
            to[0] = (u16)both;
            if (second) to[1] = (u16)(both >> 16);
        }
    }
}

// WHOLE: K is a multiple of 64, so that pieces of codes are whole and aligned, and words of scales too.
template <class T, bool WHOLE>
__device__ __forceinline__ void run(const Arguments& a) {
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, lane = thread % WARP, warp = thread / WARP;
    int warp_k = warp % T::WARPS_K, warp_n = warp / T::WARPS_K % T::WARPS_N, warp_m = warp / T::WARPS_K / T::WARPS_N;
    int first_m = blockIdx.x * T::M, first_n = blockIdx.y * T::N;
    int steps = ceil_div(a.k, T::STEP), code_bytes = a.k / 2, blocks = a.k / BLOCK;

    // Row `row` of the tile's operands: those of a, and then those of b.
    auto operand = [&](int row) -> const Operand& { return row < T::M ? a.a : a.b; };
    auto source_row = [&](int row) { return row < T::M ? min(first_m + row, a.a.rows - 1) : min(first_n + row - T::M, a.b.rows - 1); };

    // The pieces that this thread copies in each step.
    constexpr int CODE_COPIES = ceil_div(T::ROWS * T::PIECES, T::THREADS), SCALE_COPIES = ceil_div(T::ROWS * T::SCALE_WORDS, T::THREADS);
    const u8 *codes[CODE_COPIES], *scales[SCALE_COPIES];
#pragma unroll
    for (int j = 0; j < CODE_COPIES; j++) {
        int row = min((thread + j * T::THREADS) / T::PIECES, T::ROWS - 1);
        codes[j] = operand(row).codes + (size_t)source_row(row) * code_bytes;
    }
#pragma unroll
    for (int j = 0; j < SCALE_COPIES; j++) {
        int row = min((thread + j * T::THREADS) / T::SCALE_WORDS, T::ROWS - 1);
        scales[j] = operand(row).scales + scale_row(operand(row).swizzled, source_row(row), blocks);
    }
    int copied_at = piece_at<T::PIECES>(thread / T::PIECES, thread % T::PIECES);
    auto load = [&](int step) {
        if (step < steps) {
            char* stage = shared + step % T::STAGES * T::STAGE;
            u32 to = shared_address(stage);
            int from = (step * T::PIECES + thread % T::PIECES) * PIECE, bytes = bytes_left(code_bytes, from);
#pragma unroll
            for (int j = 0; j < CODE_COPIES; j++) {
                if (T::ROWS * T::PIECES % T::THREADS != 0 && thread + j * T::THREADS >= T::ROWS * T::PIECES) break;
                u32 at = to + copied_at + j * T::THREADS * PIECE;
                if (WHOLE) {
                    copy_async_16(at, codes[j] + (bytes ? from : 0), bytes);
                } else {
                    copy_async_8(at, codes[j] + (bytes ? from : 0), min(bytes, 8));
                    copy_async_8(at + 8, codes[j] + (bytes > 8 ? from + 8 : 0), max(bytes - 8, 0));
                }
            }
#pragma unroll
            for (int j = 0; j < SCALE_COPIES; j++) {
                int i = thread + j * T::THREADS, row = i / T::SCALE_WORDS;
                if (T::ROWS * T::SCALE_WORDS % T::THREADS != 0 && row >= T::ROWS) break;
                int word = step * T::SCALE_WORDS + i % T::SCALE_WORDS, left = blocks - word * SCALES_IN_WORD;
                const u8* from = scales[j] + (left > 0 ? (size_t)word * scale_word_stride(operand(row).swizzled) : 0);
                if (WHOLE) {
                    copy_async_4(to + T::CODES + i * 4, from, left > 0 ? 4 : 0);
                } else {
                    // Padding, which may hold anything, is replaced by zeros.
                    u32 valid = 0;
#pragma unroll
                    for (int b = 0; b < SCALES_IN_WORD; b++) {
                        if (b < left) valid |= (u32)from[b] << (8 * b);
                    }
                    *(u32*)(stage + T::CODES + i * 4) = valid;
                }
            }
        }
        copy_async_commit();
    };

    int a_row = warp_m * T::ROWS_M, b_row = T::M + warp_n * T::TILES_N * 8, first_piece = warp_k * T::FRAGMENTS * 2;
    constexpr int ROWS_16 = 16 * T::PIECES * PIECE;
    // Lanes give the addresses of rows to load. For a: 16 rows of one piece, then of the next.
    int a_at = piece_at<T::PIECES>(a_row + lane % 16, first_piece + lane / 16);
#if HAS_FP4_MMA
    // For b: 8 rows of each of two pieces, then the next 8 rows.
    int b_at = piece_at<T::PIECES>(b_row + lane / 16 * 8 + lane % 8, first_piece + lane / 8 % 2);
#else
    // For b: 32 rows of one piece.
    int b_at = piece_at<T::PIECES>(b_row + lane, first_piece);
#endif
    float c[T::TILES_M][T::TILES_N][4] = {};     // accumulators
    auto multiply = [&](const char* stage) {
        u32 codes_at = shared_address(stage);
#pragma unroll
        for (int f = 0; f < T::FRAGMENTS; f++) {
            const u32* words = (const u32*)(stage + T::CODES) + warp_k * T::FRAGMENTS + f;
            auto scales_of = [&](int row) { return words[row * T::SCALE_WORDS]; };
            u32 x[4], w_scales[T::TILES_N];
            auto load_x = [&](int i) { load_matrices(x, codes_at + (a_at ^ f * FRAGMENT) + i * ROWS_16); };
#if HAS_FP4_MMA
            u32 w[T::TILES_N / 2][4];
#pragma unroll
            for (int j = 0; j < T::TILES_N; j += 2) load_matrices(w[j / 2], codes_at + (b_at ^ f * FRAGMENT) + j / 2 * ROWS_16);
#pragma unroll
            for (int j = 0; j < T::TILES_N; j++) w_scales[j] = scales_of(b_row + j * 8 + lane / 4);
#pragma unroll
            for (int i = 0; i < T::TILES_M; i++) {
                load_x(i);
                u32 x_scales = scales_of(a_row + i * 16 + lane / 4 + lane % 2 * 8);
#pragma unroll
                for (int j = 0; j < T::TILES_N; j++) mma_fp4(c[i][j], x, w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1], x_scales, w_scales[j]);
            }
#else
            // The two of a row's four scales that belong to this lane's codes, in the first and in the second half of the fragment.
            auto my_scales = [&](int row) { return scale_pair_apart(scales_of(row) >> (lane % 4 / 2 * 8)); };
            u32 x_scales[T::TILES_M][2];
#pragma unroll
            for (int i = 0; i < T::TILES_M; i++) {
#pragma unroll
                for (int r = 0; r < 2; r++) x_scales[i][r] = my_scales(a_row + i * 16 + lane / 4 + 8 * r);
            }
#pragma unroll
            for (int j = 0; j < T::TILES_N; j++) w_scales[j] = my_scales(b_row + j * 8 + lane / 4);
            // One half after the other: there are not enough registers for both.
#pragma unroll 1
            for (int half = 0; half < 2; half++) {
                auto mine = [&](u32 scales) { return half ? both_high(scales) : both_low(scales); };
                u32 v[T::TILES_N][4];
#pragma unroll
                for (int j = 0; j < T::TILES_N; j += 4) {
                    u32 w[4];
                    load_matrices(w, codes_at + (b_at ^ f * FRAGMENT ^ half * PIECE) + j / 2 * ROWS_16);
#pragma unroll
                    for (int q = 0; q < 4; q++) decode_scaled(w[q], mine(w_scales[j + q]), v[j + q]);
                }
#pragma unroll
                for (int i = 0; i < T::TILES_M; i++) {
                    load_x(i);
                    u32 u[2][4];
#pragma unroll
                    for (int r = 0; r < 2; r++) decode_scaled(half ? x[2 + r] : x[r], mine(x_scales[i][r]), u[r]);
#pragma unroll
                    for (int p = 0; p < 4; p += 2) {
#pragma unroll
                        for (int j = 0; j < T::TILES_N; j++) mma_f16(c[i][j], u[0][p], u[1][p], u[0][p + 1], u[1][p + 1], v[j][p], v[j][p + 1]);
                    }
                }
            }
#endif
        }
    };

    wait_for_earlier_kernels();
    let_later_kernels_start();
#pragma unroll 1
    for (int i = 0; i < T::STAGES - 1; i++) load(i);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        copy_async_wait<T::STAGES - 2>();
        __syncthreads();
        // Into the stage of the previous step.
        load(i + T::STAGES - 1);
        multiply(shared + i % T::STAGES * T::STAGE);
    }
    copy_async_wait<0>();

    // Warps along M take turns to store their rows: [warp_k][row][column]
    float* partial = (float*)shared;
    constexpr float FACTOR = HAS_FP4_MMA ? 1 : WEIGHT_FACTOR * WEIGHT_FACTOR;
    bool pairs = a.b.rows % 2 == 0;
#pragma unroll 1
    for (int turn = 0; turn < T::WARPS_M; turn++) {
        __syncthreads();
        if (warp_m == turn) {
#pragma unroll
            for (int i = 0; i < T::TILES_M; i++) {
#pragma unroll
                for (int j = 0; j < T::TILES_N; j++) {
                    int row = i * 16 + lane / 4, column = (warp_n * T::TILES_N + j) * 8 + lane % 4 * 2;
                    float* to = partial + (warp_k * T::ROWS_M + row) * T::SUM_STRIDE + column;
                    *(float2*)to = make_float2(c[i][j][0], c[i][j][1]);
                    *(float2*)(to + 8 * T::SUM_STRIDE) = make_float2(c[i][j][2], c[i][j][3]);
                }
            }
        }
        __syncthreads();
#pragma unroll 2
        for (int i = thread; i < T::ROWS_M * T::N / 2; i += T::THREADS) {
            int row = i / (T::N / 2), column = i % (T::N / 2) * 2;
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int p = 0; p < T::WARPS_K; p++) {
                float2 term = *(const float2*)(partial + (p * T::ROWS_M + row) * T::SUM_STRIDE + column);
                sum = make_float2(sum.x + term.x, sum.y + term.y);
            }
            int m = first_m + turn * T::ROWS_M + row, n = first_n + column;
            if (m < a.a.rows && n < a.b.rows) {
                store(a, m, n, pairs, sum.x * FACTOR * a.factors[0] * a.factors[1], sum.y * FACTOR * a.factors[0] * a.factors[1]);
            }
        }
    }
}

#define KERNEL(NAME, TILE, BLOCKS_PER_SM)                                                                                   \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS_PER_SM) NAME(const __grid_constant__ Arguments a) {          \
        run<TILE, true>(a);                                                                                                 \
    }                                                                                                                       \
    extern "C" __global__ void __launch_bounds__(TILE::THREADS, BLOCKS_PER_SM) NAME##_ragged(const __grid_constant__ Arguments a) { \
        run<TILE, false>(a);                                                                                                \
    }

// For few rows of a: its warps share K.
using Small = Tile<16, 32, 512, 1, 1, 8, 5>;
using Medium = Tile<64, 64, 256, 2, 2, 4, 4>;
using Large = Tile<128, 128, 64, 2, 2, 1, 5>;

// Grid: (ceil(a.rows / M), ceil(b.rows / N))
KERNEL(scaled_mm_16x32, Small, 3)
KERNEL(scaled_mm_64x64, Medium, 1)
KERNEL(scaled_mm_128x128, Large, 2)
