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
// end, in a fixed order. Where tiles would divide unevenly, two blocks of a cluster have the same tiles and half of K each, and
// each adds up both halves of some outputs.
//
// x stands in shared memory as f16 in the order of the weights, padded with zeros to whole steps; they may come in the order of
// format/ordered.cuh, and are then copied as they are, of which products need not await the last. K must be a multiple of 16.
// Norms of x are applied at the end, and those of a sum of x and the product are prepared there (norm/deferred.cuh). Or a row is made
// on the way to shared memory, of what is added to the residual stream after a norm of its own, by every block for itself.
#include "activation/gate.cuh"
#include "common/cluster.cuh"
#include "common/ptx.cuh"
#include "common/ring.cuh"
#include "format/ordered.cuh"
#include "format/packed.cuh"
#include "linear/matrix.cuh"
#include "norm/deferred.cuh"

// a / b, where that is less than 2^19 and neither is negative, in a third of the instructions: what comes before the wait is
// taken from the kernel before this one.
__device__ __forceinline__ int quotient(int a, int b) {
    int q = (int)((float)a * (reciprocal_approx((float)b) * 0.999999f));
    return q + ((q + 1) * b <= a);
}

enum Tile { ROWS, PAIR, SPLIT };
enum Input { PLAIN, ORDERED, RESIDUAL };
enum Output { STORE_F32, STORE_F16, ADD_F32, GLU_F16, GLU_ORDERED };

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * WARP;
constexpr int X_CHUNK = CHUNK_K * 2;            // bytes of a row's activations for a chunk
constexpr int SUMS = 16;                        // of a tile, for each row of activations: features, or halves of sums

constexpr int PARTS = 2;    // of K, at most

// One row of x, which is norm(x + norm(y) * post) * weight. What is normalized at last is stored for those who add to it next.
struct ResidualRow {
    const float* y;         // [k]
    const float* post;      // [k]
    const float* x;         // [k]: the residual stream
    const float* weight;    // [k]
    float* sum;             // [k]: x + norm(y) * post; not x
    float eps;
};

struct Part {
    int first, steps;
    u32 inverse;            // 2^32 / steps, rounded up, but for a single step
};

struct Arguments {
    const u16* x;               // f16 [m, k]
    void* out;                  // [m, out_stride]; the matrices' features follow each other
    Matrix matrix[MATRICES];    // GLU: gate and up, of equal rows
    int tiles[MATRICES - 1];    // of all matrices up to this one; PAIR: of all
    int each, more;             // tiles of a cluster; clusters that have one more
    Part part[PARTS];           // of K, for the blocks of a cluster along the last dimension of the grid; the last one is no smaller
    int chunks;                 // of a row
    int m;
    int k;
    int out_stride;
    float out_scale;            // GLU: of the result, which may be large
    int activation;             // GLU
    DeferredNorm norm;          // ADD: of the result; others: of x
    ResidualRow residual;       // RESIDUAL
};

// Activations are kept in pieces of 16 bytes: those that lane t multiplies with word j of a chunk, elements 4 t to 4 t + 3 of
// blocks 2 j and 2 j + 1 in pairs. That is piece 16 chunk + 4 j + t of its row; in odd rows halves of 128 bytes are exchanged, so
// that neighbouring rows meet in no bank.

__device__ __forceinline__ uint4 paired(const Fours& x, const Fours& norm, float f) {
    float4 p = x.first, q = x.second, v = norm.first, w = norm.second;
    return make_uint4(pack_f16(p.x * f * v.x, q.x * f * w.x), pack_f16(p.y * f * v.y, q.y * f * w.y),
                      pack_f16(p.z * f * v.z, q.z * f * w.z), pack_f16(p.w * f * v.w, q.w * f * w.w));
}
__device__ __forceinline__ uint4 paired(u32 p, u32 p_next, u32 q, u32 q_next) {
    return make_uint4(__byte_perm(p, q, 0x5410), __byte_perm(p, q, 0x7632), __byte_perm(p_next, q_next, 0x5410),
                      __byte_perm(p_next, q_next, 0x7632));
}

// A block's activations in shared memory: those from first_k on, `chunks` of them for a row.
struct Room {
    u32 at;
    int first_k, chunks;
    u32 barriers;       // for as many chunks as fit
    __device__ __forceinline__ int pieces() const { return chunks * (X_CHUNK / 16); }
};
// After them: barriers, of which the last is for what another block sends, and factors of a norm.
constexpr int BARRIERS = 128, EXCHANGE = BARRIERS - 8, BEHIND = BARRIERS + WARPS * 4;

// Each of the following brings activations to a block. It is made before the kernel waits for the one before it, and with it all that can
// be done by then; run() is for after that and ends without a barrier; ready() tells a warp to go on with a chunk.

// Plain rows: each of MOST is brought by as many threads, two pieces at a time, BATCH of which are on their way before the first is used.
template <int MOST, int BATCH>
struct PlainLoad {
    static constexpr int SHARE = THREADS / MOST, STRIDE = 2 * SHARE;
    static_assert(STRIDE % 8 == 0, "a thread's pieces differ by whole halves of 128 bytes");
    const uint4* x;
    int k, piece, pieces;   // none of a row that does not exist
    u32 to;

    __device__ __forceinline__ PlainLoad(const Arguments& a, const Room& room, int thread) : pieces(room.pieces()) {
        int m = thread / SHARE;
        piece = 2 * (thread % SHARE);
        k = room.first_k + first_element(piece);
        x = (const uint4*)(a.x + m * a.k + k);
        to = room.at + (m * pieces + (piece ^ m % 2 * 4)) * 16;
        if (m >= a.m) piece = pieces;
    }
    __device__ __forceinline__ void run(const Arguments& a) {
#pragma unroll 1
        for (; piece < pieces; piece += BATCH * STRIDE) {
            uint4 low[BATCH], high[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                int left = piece + j * STRIDE < pieces ? a.k - k - j * STRIDE * 8 : 0;
                low[j] = left > 0 ? load_global_16(x + j * STRIDE) : make_uint4(0, 0, 0, 0);
                high[j] = left > BLOCK ? load_global_16(x + j * STRIDE + BLOCK / 8) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
                if (piece + j * STRIDE >= pieces) break;
                store_shared_16(to + j * STRIDE * 16, paired(low[j].x, low[j].y, high[j].x, high[j].y));
                store_shared_16(to + j * STRIDE * 16 + 16, paired(low[j].z, low[j].w, high[j].z, high[j].w));
            }
            x += BATCH * STRIDE;
            k += BATCH * STRIDE * 8;
            to += BATCH * STRIDE * 16;
        }
    }
    __device__ __forceinline__ void ready(int) const {}
};

// One row of up to 8 THREADS elements, of which each thread has a piece.
struct ResidualLoad {
    Room room;
    int thread;
    Fours post, weight;

    __device__ __forceinline__ ResidualLoad(const Arguments& a, const Room& room, int thread)
        : room(room), thread(thread), post(a.residual.post, thread, a.k), weight(a.residual.weight, thread, a.k) {}
    // The sum over the block, by way of WARPS floats of shared memory.
    __device__ __forceinline__ float block_sum(float sum, u32 sums) const {
        sum = warp_sum(sum);
        if (lane_id() == 0) store_shared_float(sums + thread / WARP * 4, sum);
        __syncthreads();
        return warp_sum(lane_id() < WARPS ? load_shared_float(sums + lane_id() * 4) : 0);
    }
    __device__ __forceinline__ void run(const Arguments& a) const {
        const ResidualRow& r = a.residual;
        Fours y(r.y, thread, a.k), x(r.x, thread, a.k);
        // The last of the barriers is in use.
        static_assert(2 * WARPS * 4 <= BEHIND && WARPS * 4 <= EXCHANGE, "sums stand where barriers and factors of norms would");
        float factor = rsqrtf(block_sum(y.squares(), room.barriers) / a.k + r.eps);
        auto add = [&](float4& to, float4 of, float4 post) {
            to = make_float4(to.x + of.x * factor * post.x, to.y + of.y * factor * post.y, to.z + of.z * factor * post.z, to.w + of.w * factor * post.w);
        };
        add(x.first, y.first, post.first);
        add(x.second, y.second, post.second);
        if (blockIdx.x == 0 && blockIdx.z == 0) {
            int k = first_element(thread);
            if (k < a.k) *(float4*)(r.sum + k) = x.first;
            if (k + BLOCK < a.k) *(float4*)(r.sum + k + BLOCK) = x.second;
        }
        factor = rsqrtf(block_sum(x.squares(), room.barriers + BARRIERS) / a.k + r.eps);
        int piece = thread - room.first_k / 8;
        if (piece >= 0 && piece < room.pieces()) store_shared_16(room.at + piece * 16, paired(x, weight, factor));
    }
    __device__ __forceinline__ void ready(int) const {}
};

// Rows of x of which f16 has not kept enough, from x itself.
template <bool ORDERED, int MOST>
__device__ __forceinline__ void normalise_anew(const Arguments& a, const Room& room, u16* rows, float* factors, bool first) {
    const DeferredNorm& norm = a.norm;
    int first_piece = room.first_k / 8, pieces = ceil_div(a.k, 2 * BLOCK) * 4;
    float own = -1;  // of the row that this thread tells others about
#pragma unroll 1
    for (int m = 0; m < a.m; m++) {
        if (is_kept(factors[m])) continue;
        const float* x = norm.x + m * a.k;
        float sum = 0;
#pragma unroll 1
        for (int i = lane_id(); i < pieces; i += WARP) sum += Fours(x, i, a.k).squares();
        float factor = rsqrtf(fmaf(warp_sum(sum), reciprocal_approx((float)a.k), norm.eps));
        if ((int)threadIdx.x == m) own = factor;
#pragma unroll 1
        for (int i = threadIdx.x; i < room.pieces(); i += THREADS) {
            Fours v(x, first_piece + i, a.k), w(norm.weight, first_piece + i, a.k);
            if (ORDERED) {
                store_ordered(rows, MOST / GROUP_ROWS, m, first_element(i), normalised(v.first, factor, w.first),
                              normalised(v.second, factor, w.second));
            } else {
                store_shared_16(room.at + (m * room.pieces() + (i ^ m % 2 * 4)) * 16, paired(v, w, factor));
            }
        }
    }
    __syncthreads();
    if (!(own < 0)) {
        factors[threadIdx.x] = 1;
        if (first) norm.factors[threadIdx.x] = own;
    }
    __syncthreads();
}

#if __CUDA_ARCH__ >= 900
// Ordered rows: bulk copies of PORTION chunks, each with a barrier.
template <int GROUPS>
struct OrderedLoad {
    static constexpr int PORTION = 8, CHUNK_X = GROUPS * GROUP_BYTES;
    Room room;
    int thread, last = -1;  // portion that this warp has awaited

    __device__ __forceinline__ OrderedLoad(const Arguments&, const Room& room, int thread) : room(room), thread(thread) {
        if (thread != 0) return;
        for (int i = 0; i * PORTION < room.chunks; i++) barrier_init(room.barriers + i * 8, 1);
        publish_barriers();
    }
    __device__ __forceinline__ void run(const Arguments& a) const {
        if (thread != 0) return;
        for (int i = 0; i * PORTION < room.chunks; i++) {
            int first = i * PORTION, bytes = min(PORTION, room.chunks - first) * CHUNK_X;
            barrier_expect(room.barriers + i * 8, bytes);
            copy_bulk(room.at + first * CHUNK_X, (const u8*)a.x + (room.first_k / CHUNK_K + first) * CHUNK_X, bytes, room.barriers + i * 8);
        }
    }
    __device__ __forceinline__ void ready(int chunk) {
        int portion = chunk / PORTION;
        if (portion == last) return;
        barrier_wait(room.barriers + portion * 8, 0);
        last = portion;
    }
};
#endif

template <Input INPUT, int MOST, int BATCH>
struct LoadOf {
    using Type = PlainLoad<MOST, BATCH>;
};
template <int MOST, int BATCH>
struct LoadOf<RESIDUAL, MOST, BATCH> {
    using Type = ResidualLoad;
};
#if __CUDA_ARCH__ >= 900
template <int MOST, int BATCH>
struct LoadOf<ORDERED, MOST, BATCH> {
    using Type = OrderedLoad<MOST / GROUP_ROWS>;
};
#endif

// How the steps of a block's tiles, in the order of K and then of tiles, are divided among its warps.
struct Shares {
    int steps, total;
    __device__ __forceinline__ int begin(int warp) const { return (u32)(total * warp) / WARPS; }
    // The first warp with steps from `step` on.
    __device__ __forceinline__ int owner(int step) const {
        int warp = quotient(step * WARPS, total);
        while (begin(warp + 1) <= step) warp++;
        return warp;
    }
};

// The sums of a warp's tile and how it adds a step to them: fetch() brings the step's weights to registers, after which their stage
// may be filled again, and multiply() multiplies them with the activations at byte `at` of a row.
template <Tile TILE, int COLUMNS, bool ORDERED>
struct FewRows {
    static_assert(!ORDERED || TILE != SPLIT, "");
    // From one step's activations to the next's.
    static constexpr int STEP = TILE == SPLIT ? 2 * X_CHUNK : ORDERED ? COLUMNS * GROUP_BYTES : X_CHUNK;
    u32 x[COLUMNS], turn[COLUMNS];
    int rows;
    float c[COLUMNS][2][4] = {};
    uint4 low_codes, high_codes;
    uint2 low_scales, high_scales;

    __device__ __forceinline__ FewRows(u32 xs, int rows, int row_bytes) : rows(rows) {
        int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            // Rows past the last repeat it; their sums are dropped.
            int m = min(TILE == SPLIT ? g % 4 : g + 8 * column, rows - 1);
            u32 in_row = (TILE == SPLIT && g >= 4 ? X_CHUNK : 0) + t * 16;
            x[column] = xs + (ORDERED ? column * GROUP_BYTES + lane_id() * 16 : m * row_bytes + in_row);
            turn[column] = (m & 1) * 64;
        }
    }
    template <typename Ring>
    __device__ __forceinline__ void fetch(const Ring& ring, u32 stage) {
        u32 codes = ring.lane_base + stage, scales = ring.base + stage + CHUNK_CODES + lane_id() / 4 * CHUNK_BLOCKS;
        low_codes = load_shared_16(codes);
        high_codes = load_shared_16(codes + CHUNK_BYTES);
        low_scales = load_shared_8(scales);
        high_scales = load_shared_8(scales + CHUNK_BYTES);
    }
    __device__ __forceinline__ void multiply(u32 at) {
        u32 low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w}, high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 b[COLUMNS][4], u[4], v[4];
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                if (ORDERED) {
                    load_matrices(b[column], x[column] + at + 4 * j * PIECE_BYTES);
                } else {
                    uint4 piece = load_shared_16(x[column] + at + ((j * 64) ^ turn[column]));
                    b[column][0] = piece.x, b[column][1] = piece.y, b[column][2] = piece.z, b[column][3] = piece.w;
                }
            }
            decode_packed(low[j], low_scales, j, u);
            decode_packed(high[j], high_scales, j, v);
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                mma_f16(c[column][0], u[0], v[0], u[1], v[1], b[column][0], b[column][1]);
                mma_f16(c[column][1], u[2], v[2], u[3], v[3], b[column][2], b[column][3]);
            }
        }
    }
    __device__ __forceinline__ void put_away(float* to) {
        int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
            float(&s)[2][4] = c[column];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // Of SPLIT, only low rows with low columns and high rows with high ones.
                int m = (TILE == SPLIT ? 2 * t % 4 : 8 * column + 2 * t) + i % 2;
                bool counts = m < rows && (TILE != SPLIT || t / 2 == i / 2);
                if (counts) to[m * SUMS + g + i / 2 * 8] = s[0][i] + s[1][i];
                s[0][i] = s[1][i] = 0;
            }
        }
    }
};

// One row leaves room in B for each block of a chunk to have a column of its own: the others' activations are zeros there. Then
// sums of blocks are multiplied by scales, 2 for each 32 weights, and not the weights. Activations become zeros by a product, which
// other pipes do than decode; what is not finite reaches all sums, as it does through weights of zero.
template <Tile TILE>
struct OneRow {
    static_assert(TILE != ROWS, "");
    static constexpr int STEP = TILE == SPLIT ? 2 * X_CHUNK : X_CHUNK;
    u32 x;
    u32 scales;         // of a lane, from a stage on
    u32 select[4];      // of a word's activations, those that go into the lane's column by 1, the others by 0
    float sums[2] = {};
    uint4 low_codes, high_codes;
    u32 first_scales, second_scales;

    // SPLIT has columns for half of the low chunk's blocks and half of the high one's, and goes over them twice.
    __device__ __forceinline__ OneRow(u32 xs, int, int) {
        int g = lane_id() / 4, t = lane_id() % 4, block = TILE == SPLIT ? g % 4 : g;
        x = xs + (TILE == SPLIT && g >= 4 ? X_CHUNK : 0) + block / 2 * 64 + t * 16;
        scales = CHUNK_CODES + g * CHUNK_BLOCKS + (TILE == SPLIT ? t / 2 * CHUNK_BYTES + t % 2 * 2 : t * 2);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            bool own = block / 2 == (TILE == SPLIT ? j % 2 : j);
            select[j] = !own ? 0 : block % 2 ? 0x3c000000 : 0x3c00;
        }
    }
    template <typename Ring>
    __device__ __forceinline__ void fetch(const Ring& ring, u32 stage) {
        u32 codes = ring.lane_base + stage, of_lane = ring.base + stage + scales;
        low_codes = load_shared_16(codes);
        high_codes = load_shared_16(codes + CHUNK_BYTES);
        first_scales = load_shared_2(of_lane);
        second_scales = load_shared_2(of_lane + (TILE == SPLIT ? CHUNK_BLOCKS / 2 : CHUNK_BYTES));
    }
    __device__ __forceinline__ void multiply(u32 at) {
        u32 low[4] = {low_codes.x, low_codes.y, low_codes.z, low_codes.w}, high[4] = {high_codes.x, high_codes.y, high_codes.z, high_codes.w};
        uint4 first = load_shared_16(x + at), second = TILE == SPLIT ? load_shared_16(x + at + 128) : first;
        float c[TILE == SPLIT ? 2 : 1][4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 u[4], v[4];
            decode_word(low[j], u);
            decode_word(high[j], v);
            uint4 b = j < 2 ? first : second;
            float(&of_half)[4] = c[TILE == SPLIT ? j / 2 : 0];
            mma_f16(of_half, u[0], v[0], u[1], v[1], mul_f16(b.x, select[j]), mul_f16(b.y, select[j]));
            mma_f16(of_half, u[2], v[2], u[3], v[3], mul_f16(b.z, select[j]), mul_f16(b.w, select[j]));
        }
        u32 p = packed_scales(first_scales), q = packed_scales(second_scales);
        if (TILE == SPLIT) {
            // Low rows with low columns, high rows with high ones.
            bool is_low = lane_id() % 4 < 2;
            sums[0] = fmaf(f16_low(p), is_low ? c[0][0] : c[0][2], fmaf(f16_high(p), is_low ? c[0][1] : c[0][3], sums[0]));
            sums[1] = fmaf(f16_low(q), is_low ? c[1][0] : c[1][2], fmaf(f16_high(q), is_low ? c[1][1] : c[1][3], sums[1]));
        } else {
            sums[0] = fmaf(f16_low(p), c[0][0], fmaf(f16_high(p), c[0][1], sums[0]));
            sums[1] = fmaf(f16_low(q), c[0][2], fmaf(f16_high(q), c[0][3], sums[1]));
        }
    }
    __device__ __forceinline__ void put_away(float* to) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float sum = sums[i];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            if (lane_id() % 4 == 0) to[lane_id() / 4 + 8 * i] = sum;
            sums[i] = 0;
        }
    }
};

// How many rows of activations a kernel takes: up to 8, or 4 of SPLIT; up to 16.
enum Count { ONE, FEW, MANY };
template <Tile TILE, Count COUNT, bool ORDERED>
struct SumsOf {
    using Type = FewRows<TILE, COUNT == MANY ? 2 : 1, ORDERED>;
};
template <Tile TILE, bool ORDERED>
struct SumsOf<TILE, ONE, ORDERED> {
    using Type = OneRow<TILE>;
};

template <Tile TILE, Input INPUT, Output OUTPUT, Count COUNT, int BLOCKS>
__device__ __forceinline__ void run(const Arguments& a) {
    constexpr int FEATURES = TILE == ROWS ? 16 : 8, STEP_CHUNKS = TILE == SPLIT ? 2 : 1;
    // What a warp asks for before the kernel's wait delays the last weights of the kernel before, and then its own activations, if there
    // is much of it; for the same reason a kernel with a long loop lets the next one start when its warps have asked for their
    // last weights. benches/NOTES.md has what was measured, of rings of more stages, too.
    constexpr bool LONG = TILE == PAIR, GLU = OUTPUT == GLU_F16 || OUTPUT == GLU_ORDERED;
    constexpr int EARLY = BLOCKS == 1 && INPUT == PLAIN ? 1 : 2, STAGES = LONG && COUNT == ONE ? 4 : 3;
    using Ring = WarpRing<STAGES, CHUNK_BYTES>;
    extern __shared__ __align__(128) char shared[];
    int thread = threadIdx.x, warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0);
    // Blocks of a cluster have the same tiles and a part of K each.
    constexpr bool DIVISIBLE = __CUDA_ARCH__ >= 900 && TILE != PAIR && (COUNT != MANY || INPUT == ORDERED);
    int part = DIVISIBLE ? blockIdx.z : 0, chunks = a.chunks, first_step = a.part[part].first, steps = a.part[part].steps;
    int block = blockIdx.x, first_tile = block * a.each + min(block, a.more), my_tiles = a.each + (block < a.more);
    Shares shares{steps, my_tiles * steps};
    int begin = shares.begin(warp), count = shares.begin(warp + 1) - begin;

    // The matrix of a tile and its first feature there.
    auto locate = [&](int tile, int& row) {
        int index = TILE == PAIR ? 0 : (tile >= a.tiles[0]) + (tile >= a.tiles[1]);
        row = (tile - (index == 0 ? 0 : a.tiles[index - 1])) * FEATURES;
        return index;
    };

    // Loads run ahead of the products, across tiles. Weights of a run of steps follow each other.
    Ring ring(shared + warp * Ring::BYTES);
    int tile = steps > 1 ? (int)__umulhi(begin, a.part[part].inverse) : begin, k = begin - tile * steps;
    int load_tile = first_tile + tile, load_k = k, load_left = count, run = 0;
    const u8* low = nullptr;  // 16 bytes further on for each lane
    long long to_high = 0;
    auto next_run = [&] {
        if (load_k == steps) {
            load_k = 0;
            load_tile++;
        }
        int row;
        const Matrix& w = a.matrix[locate(load_tile, row)];
        low = chunk_of(w.chunks, chunks, row, (first_step + load_k) * (STEP_CHUNKS * CHUNK_K));
        const u8* high = low;
        // Of an odd number of chunks the last has no second, and stands in for it: it meets activations that are zeros.
        if (TILE == SPLIT && first_step + load_k < (int)((u32)chunks / 2)) high += CHUNK_BYTES;
        if (TILE == PAIR) high += a.matrix[1].chunks - a.matrix[0].chunks;
        // Past the end, the last features again; their sums are dropped.
        if (TILE == ROWS && row + CHUNK_ROWS < w.rows) high += chunks * CHUNK_BYTES;
        to_high = Ring::to_second(low, high);
        low += lane_id() * 16;
        int whole = TILE == SPLIT ? (int)((u32)chunks / 2) - first_step : steps;
        run = min(load_k < whole ? min(whole, steps) - load_k : 1, load_left);
        load_k += run;
        load_left -= run;
    };
    auto load = [&](u32 stage, bool waited) {
        if (run == 0) {
            if (load_left == 0) {
                if (LONG && waited) let_later_kernels_start();
                return ring.skip();
            }
            next_run();
        }
        ring.fill(stage, low, to_high);
        low += STEP_CHUNKS * CHUNK_BYTES;
        run--;
    };

    // Before anything else: the kernel before this one leaves few instructions to it.
#pragma unroll 1
    for (int i = 0; i < EARLY; i++) load(Ring::offset(i), false);

    constexpr int MOST = COUNT == ONE ? 1 : COUNT == MANY ? 16 : TILE == SPLIT ? 4 : 8;  // rows
    int row_bytes = steps * STEP_CHUNKS * X_CHUNK;
    char* xs = shared + WARPS * Ring::BYTES;
    // What follows stands at one place in all blocks of a cluster.
    char* barriers = xs + (INPUT == ORDERED ? MOST : a.m) * a.part[PARTS - 1].steps * (STEP_CHUNKS * X_CHUNK);
    float* factors = (float*)(barriers + BARRIERS);     // of a norm of x, what is missing of each row's
    // From the other block, for this one's share of the outputs: from rows of a tile share(part) on.
    bool divided = DIVISIBLE && gridDim.z > 1;
    auto share = [&](int part) { return my_tiles * MOST * part / PARTS * FEATURES; };
    float* sent = (float*)(barriers + BEHIND);
    float* partial = sent + (divided ? share(PARTS) - share(PARTS - 1) : 0);    // [my_tiles + WARPS][m][SUMS]

    // Output `i` of the block: the address of its first sum, of how many warps there are some, and where it goes.
    struct Place {
        u32 sums;
        int count = 0, matrix, row, at;     // none of an output that does not exist
        int next;   // ADD: where it goes for the next norm
    };
    int outputs = my_tiles * MOST * FEATURES;
#if __CUDA_ARCH__ >= 900
    u32 exchange = shared_address(barriers) + EXCHANGE;
    if (divided) {
        if (thread == 0) {
            barrier_init(exchange, 1);
            barrier_expect(exchange, (share(part + 1) - share(part)) * 4);
            publish_barriers();
        }
        __syncwarp();
        cluster_arrive();
    }
#endif
    auto place = [&](int i) {
        Place p;
        int tile = i / (MOST * FEATURES), m = i / FEATURES % MOST, feature = i % FEATURES;
        p.matrix = locate(first_tile + tile, p.row);
        p.row += feature;
        int first = shares.owner(tile * steps);
        p.sums = shared_address(partial + ((tile + first) * a.m + m) * SUMS + feature);
        if (m < a.m && p.row < a.matrix[p.matrix].rows) p.count = shares.owner((tile + 1) * steps - 1) - first + 1;
        int column = p.row + (p.matrix > 0 ? a.matrix[0].rows : 0) + (p.matrix > 1 ? a.matrix[1].rows : 0);
        p.at = OUTPUT == GLU_ORDERED ? (int)ordered_at(MOST / GROUP_ROWS, m, p.row) : m * a.out_stride + column;
        p.next = INPUT == ORDERED ? (int)ordered_at(MOST / GROUP_ROWS, m, p.row) : p.at;
        return p;
    };

    // What an output is added to, and what it is multiplied by for the next norm.
    struct Former {
        float value, weight, factor;
    };
    auto former = [&](const Place& p, int i) {
        Former f{};
        if (OUTPUT == ADD_F32 && p.count > 0) {
            f.value = ((const float*)a.out)[p.at];
            if (a.norm.squares) {
                f.weight = a.norm.weight[p.row];
                f.factor = a.norm.before[i / FEATURES % MOST];
            }
        }
        return f;
    };

    Room room{shared_address(xs), first_step * (STEP_CHUNKS * CHUNK_K), steps * STEP_CHUNKS, shared_address(barriers)};
    typename LoadOf<INPUT, MOST, COUNT == ONE ? 1 : BLOCKS == 1 ? 4 : 2>::Type activations(a, room, thread);
    typename SumsOf<TILE, COUNT, INPUT == ORDERED>::Type sums(room.at, a.m, row_bytes);
    Place mine{};
    if (thread < outputs) mine = place(thread);
    wait_for_earlier_kernels();
    if (!LONG) let_later_kernels_start();
    Former before = former(mine, thread);
    constexpr bool MAY_DEFER = OUTPUT != ADD_F32 && OUTPUT != STORE_F16 && INPUT != RESIDUAL;
    bool deferred = MAY_DEFER && a.norm.squares;
    // A warp for each row, from the last warp on: they have fewer activations to bring.
    if (int row = WARPS - 1 - warp; deferred && row < a.m) {
        SquaresOfRow<COUNT == ONE ? 3 : 2> squares(a.norm, row);
        activations.run(a);
        float factor = rsqrtf(fmaf(warp_sum(squares.sum()), reciprocal_approx((float)a.k), a.norm.eps));
        if (lane_id() == 0) {
            factors[row] = factor * reciprocal_approx(squares.before);
            if (block == 0 && part == 0) a.norm.factors[row] = factor;
        }
    } else {
        activations.run(a);
    }
#pragma unroll 1
    for (int i = EARLY; i < STAGES; i++) load(Ring::offset(i), true);
#if __CUDA_ARCH__ >= 900
    if (divided) {
        __syncwarp();
        cluster_wait();
    }
#endif
    __syncthreads();
    if (deferred) {
        float factor = lane_id() < a.m ? factors[lane_id()] : 1;
        if (__any_sync(ALL_LANES, !is_kept(factor))) {
            for (int chunk = 0; chunk < room.chunks; chunk++) activations.ready(chunk);
            normalise_anew<INPUT == ORDERED, MOST>(a, room, (u16*)xs, factors, block == 0 && part == 0);
        }
    }

    u32 stage = 0;
    int left = count;
    do {
        int tile_left = min(left, steps - k);
        left -= tile_left;
#pragma unroll 1
        for (u32 at = k * sums.STEP; tile_left > 0; tile_left--, at += sums.STEP) {
            activations.ready(at / sums.STEP);
            ring.wait();
            sums.fetch(ring, stage);
            __syncwarp();
            load(stage, true);
            stage = Ring::after(stage);
            sums.multiply(at);
        }
        // A warp without steps puts away zeros. Warps that share a tile have places of their own.
        sums.put_away(partial + (tile + warp) * (a.m * SUMS));
        k = 0;
        tile++;
    } while (left > 0);
    __syncthreads();

    // What the block has of an output: of PAIR, of gate and up.
    auto sum_up = [&](const Place& p) {
        // A few loads on their way before the first is used.
        constexpr int BATCH = 4;
        int stride = a.m * SUMS * 4;
        float2 sum = {0, 0};
        u32 at = p.sums;
#pragma unroll 1
        for (int left = p.count; left > 0; left -= BATCH, at += BATCH * stride) {
            float x[BATCH], y[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                x[i] = i < left ? load_shared_float(at + i * stride) : 0;
                y[i] = TILE != ROWS && i < left ? load_shared_float(at + i * stride + SUMS / 2 * 4) : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                sum.x += x[i];
                sum.y += y[i];
            }
        }
        if (TILE == SPLIT) sum.x += sum.y;
        return sum;
    };
    auto put_out = [&](const Place& p, int i, float2 sum, const Former& before) {
        const Matrix& w = a.matrix[p.matrix];
        int m = i / FEATURES % MOST;
        float factor = deferred ? factors[m] * PACKED_FACTOR : PACKED_FACTOR;
        sum.x *= w.global * factor;
        if (w.bias) sum.x += w.bias[p.row];
        if (OUTPUT == STORE_F32) ((float*)a.out)[p.at] = sum.x;
        if (OUTPUT == ADD_F32) {
            float y = before.value + sum.x;
            ((float*)a.out)[p.at] = y;
            if (a.norm.squares) {
                float scaled = y * before.factor * before.weight;
                a.norm.rows[p.next] = to_f16(scaled);
                float square = fabsf(scaled) <= F16_MOST ? y * y : INFINITY;
                // Threads have features of a tile and a row in turn, none of which is missing.
#pragma unroll
                for (int d = FEATURES / 2; d > 0; d /= 2) {
                    square += __shfl_xor_sync(((1ull << FEATURES) - 1) << (lane_id() & ~(FEATURES - 1)), square, d);
                }
                if (i % FEATURES == 0) a.norm.squares[m * a.norm.tiles + p.row / FEATURES] = square;
            }
        }
        if (OUTPUT == STORE_F16) ((u16*)a.out)[p.at] = to_f16(sum.x);
        if (GLU) {
            const Matrix& up = a.matrix[1];
            sum.y *= up.global * factor;
            if (up.bias) sum.y += up.bias[p.row];
            ((u16*)a.out)[p.at] = to_f16(activate(a.activation, sum.x) * sum.y * a.out_scale);
        }
    };

    u16* ordered = OUTPUT == GLU_ORDERED ? (u16*)a.out : OUTPUT == ADD_F32 && INPUT == ORDERED && a.norm.squares ? a.norm.rows : nullptr;
    if (ordered && block == (int)gridDim.x - 1) {
        // What is missing at the end is zeros.
        int rows = a.matrix[0].rows, missing = filled(rows) - rows;
        for (int i = thread; i < a.m * missing; i += THREADS) {
            ordered[ordered_at(MOST / GROUP_ROWS, i / missing, rows + i % missing)] = 0;
        }
    }
#if __CUDA_ARCH__ >= 900
    if (divided) {
        // Each block puts out some of the outputs, for which the other one sends what it has of them.
        auto at = [&](int i) { return i == thread ? mine : place(i); };
        int begin = share(part), end = share(part + 1);
        for (int i = thread; i < outputs; i += THREADS) {
            if (i >= begin && i < end) continue;
            Place p = at(i);
            float sum = sum_up(p).x;
            send_to_cluster(shared_address(sent + i - share(1 - part)), 1 - part, sum, exchange);
        }
        for (int i = thread; i < end; i += THREADS) {
            if (i < begin) continue;
            Place p = at(i);
            if (i > thread) before = former(p, i);
            float sum = sum_up(p).x;
            barrier_wait(exchange, 0);
            if (p.count > 0) put_out(p, i, {sum + sent[i - begin], 0}, before);
        }
        // Without outputs of its own, too, a block stays until nothing more is sent to it.
        barrier_wait(exchange, 0);
        return;
    }
#endif
    for (int i = thread;;) {
        if (mine.count > 0) put_out(mine, i, sum_up(mine), before);
        i += THREADS;
        if (i >= outputs) return;
        mine = place(i);
        before = former(mine, i);
    }
}

#define KERNEL(NAME, TILE, INPUT, OUTPUT, COUNT, BLOCKS)                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) NAME(const __grid_constant__ Arguments a) { \
        run<TILE, INPUT, OUTPUT, COUNT, BLOCKS>(a);                                                           \
    }
#define KERNELS(NAME, OUTPUT)                      \
    KERNEL(NAME##_1, SPLIT, PLAIN, OUTPUT, ONE, 2) \
    KERNEL(NAME##_4, SPLIT, PLAIN, OUTPUT, FEW, 2) \
    KERNEL(NAME##_8, ROWS, PLAIN, OUTPUT, FEW, 1)  \
    KERNEL(NAME##_16, ROWS, PLAIN, OUTPUT, MANY, 1)

#if __CUDA_ARCH__ >= 900
#define ORDERED_KERNELS(NAME, TILE, OUTPUT, BLOCKS)              \
    KERNEL(NAME##_ordered_8, TILE, ORDERED, OUTPUT, FEW, BLOCKS) \
    KERNEL(NAME##_ordered_16, TILE, ORDERED, OUTPUT, MANY, 1)
ORDERED_KERNELS(linear_f32, ROWS, STORE_F32, 1)
ORDERED_KERNELS(linear_f16, ROWS, STORE_F16, 1)
ORDERED_KERNELS(linear_add, ROWS, ADD_F32, 1)
ORDERED_KERNELS(linear_glu, PAIR, GLU_ORDERED, 2)
#endif
KERNELS(linear_f32, STORE_F32)
KERNELS(linear_f16, STORE_F16)
KERNELS(linear_add, ADD_F32)
KERNEL(linear_glu_1, PAIR, PLAIN, GLU_F16, ONE, 2)
KERNEL(linear_glu_8, PAIR, PLAIN, GLU_F16, FEW, 2)
KERNEL(linear_glu_16, PAIR, PLAIN, GLU_F16, MANY, 1)
KERNEL(linear_f32_residual_1, SPLIT, RESIDUAL, STORE_F32, ONE, 2)
KERNEL(linear_glu_residual_1, PAIR, RESIDUAL, GLU_F16, ONE, 2)
