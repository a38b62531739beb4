// LoRA adapters of the rows of the skinny GEMM, each row's own or none: y = W x + scale * B (A x).
//
// The blocks of a launch share A x. Each multiplies the rows, which it has in shared memory, by one rank of an A factor over a part of its
// range of K, and stores the sums for all blocks. Numbers of A x that are not there yet are PENDING; warps request them near the end of their
// products, and the epilogue adds B times them to the outputs.
//
// So all blocks of a launch must run at the same time, some time. Where they never do, since two processes share a device's multiprocessors, a
// block gives up in the end, and its outputs are NaN.
#pragma once
#include "adapter/shrink.cuh"
#include "linear/skinny/input_norm.cuh"

constexpr u32 PENDING = 0xffffffff;     // the bits of a NaN that no product has
constexpr int MOST_REQUESTS = 1 << 22;  // of a number that stays pending: seconds

// Without an adapter. The operations are in the order of calls.
template <class C, bool ADAPTED = C::ADAPTED>
class RowAdapters {
public:
    __device__ __forceinline__ RowAdapters(const Arguments&, const Schedule<C>&, const SharedMemory<C>&, int) {}
    __device__ __forceinline__ void prepare(int) const {}
    __device__ __forceinline__ void prefetch_next(int) const {}
    __device__ __forceinline__ void clear() const {}
    __device__ __forceinline__ void wait_for_factors(int) const {}
    __device__ __forceinline__ void share(ActivationLoad<C>&, int) const {}
    __device__ __forceinline__ void request(u32, int) const {}
    __device__ __forceinline__ void complete(int) const {}
    __device__ __forceinline__ float added(int, int, int) const { return 0; }
};

template <class C>
class RowAdapters<C, true> {
    static constexpr int OWN = C::IS_GLU ? 2 : 1;                                                       // matrices of an output
    static constexpr int MOST_MATRICES = C::OUTPUT == STORE_F32 ? MATRICES : OWN;                       // of the launch
    static constexpr int COLUMNS = ceil_div(C::MAX_ROWS, 8), GROUP = C::MAX_ROWS < 8 ? C::MAX_ROWS : 8; // of rows, as for the products
    static constexpr int UNIT = 2 * BLOCK, CHUNK_UNITS = CHUNK_K / UNIT;    // elements of K for four lanes
    static constexpr int UNITS = 8 / GROUP;                                 // that a warp takes at a time
    static constexpr int QUAD = 4;                                          // ranks that a thread takes at a time
    // Work is divided among warps so that none has much: the warp that serves the others before the wait, those that compute the block's share of
    // A x, and the first of those that collect A x. The first warps have outputs.
    static constexpr int SERVER = C::MAX_ROWS < 16 ? WARPS - 1 - C::MAX_ROWS : WARPS / 2;
    static constexpr int FIRST_SHARER = 4, SHARERS = 8, FIRST_COLLECTOR = 12;
    static constexpr int SHARERS_BARRIER = 1;

    struct BFactor {
        const void* b;
        u16 rank, type;
        int at;         // row 0, or where it would be, in `copies`; NOWHERE: the block's rows are not there
    };
    static constexpr int NOWHERE = 1 << 30;
    struct Memory {
        __align__(16) float sums[SHARERS][C::MAX_ROWS];     // of the block's rank
        __align__(16) int a_bytes;          // of the block's numbers of A in `copies`; 0: they are not there
        int unused[3];
        signed char adapter_of[16];         // of each row; -1: none
        Factors task;                       // the factors of the block's rank
        BFactor b[MOST_MATRICES][C::MAX_ROWS];  // of each adapter
    };  // Copies follow.
    // A rank of the A factor of one adapter and matrix, over a part of a block's range of K.
    struct Task {
        int part, rank, matrix, adapter;
    };
    // Units along K.
    struct Range {
        int begin, end;
    };
    const Arguments& a;
    const Schedule<C>& schedule;
    const SharedMemory<C>& shared_memory;
    int thread;
    u32 requested = 0;      // where the numbers of A x are that the thread has requested; 0: nowhere

    // The block's matrices: the first, and their number. Registers are rarer than instructions.
    __device__ __forceinline__ int first() const {
        int row;
        return C::OUTPUT == STORE_F32 ? Schedule<C>::locate(a, schedule.first_tile, row) : 0;
    }
    __device__ __forceinline__ int count() const {
        int row;
        return C::OUTPUT == STORE_F32 ? Schedule<C>::locate(a, schedule.first_tile + schedule.tiles - 1, row) + 1 - first() : OWN;
    }
    __device__ __forceinline__ Memory& memory() const { return *(Memory*)(shared_memory.accumulators + (schedule.tiles + WARPS - 1) * a.m * ACCUMULATORS); }
    // The logarithm of the parts of a block's range of K.
    __device__ __forceinline__ int part_shift() const { return a.low.part_shift - (schedule.splits_k() ? 1 : 0); }
    __device__ __forceinline__ int parts() const { return 1 << a.low.part_shift; }
    __device__ __forceinline__ int ranks() const { return 1 << a.low.rank_shift; }
    __device__ __forceinline__ int tasks() const { return a.low.matrices * a.low.adapters << (a.low.rank_shift + part_shift()); }
    // Divisions would take most of the time that adapters take.
    __device__ __forceinline__ Task task(int i) const {
        Task t{i & ((1 << part_shift()) - 1), i >> part_shift() & (ranks() - 1), 0, i >> (part_shift() + a.low.rank_shift)};
        while (t.adapter >= a.low.adapters) t.adapter -= a.low.adapters, t.matrix++;
        return t;
    }
    // Part number `part` of the range of K of the block of a rank.
    __device__ __forceinline__ Range range(int rank, int part) const {
        int from = a.k_range[rank].first * C::STEP_CHUNKS * CHUNK_UNITS, units = a.k_range[rank].steps * C::STEP_CHUNKS * CHUNK_UNITS;
        return {from + (units * part >> part_shift()), from + (units * (part + 1) >> part_shift())};
    }
    __device__ __forceinline__ u8* copies() const { return (u8*)(&memory() + 1); }
    // The numbers of A x of a row of a matrix.
    __device__ __forceinline__ float* low_of(int matrix, int row) const {
        return a.low.values + ((size_t)(matrix * a.m + row) << (a.low.part_shift + a.low.rank_shift));
    }

    // Elements of a unit of the rows, for the lane's row of each column.
    __device__ __forceinline__ uint4 rows_at(int unit, int column) const {
        int lane = lane_id(), own = unit - shared_memory.first_k / UNIT;
        u32 at = shared_memory.activations_at;
        if (C::TAKES_FRAGMENTS) {
            u32 words[4];
            load_matrices(words, at + (own / CHUNK_UNITS * COLUMNS + column) * GROUP_BYTES + (own % CHUNK_UNITS * 4 + lane / 8) * FRAGMENT_BYTES + lane % 8 * 16);
            return make_uint4(words[0], words[1], words[2], words[3]);
        }
        int row = min(lane / 4 % GROUP + 8 * column, a.m - 1);
        return load_shared_16(at + (row * shared_memory.pieces() + ((own * 4 + lane % 4) ^ row % 2 * 4)) * 16);
    }

    // The sums over the units of a range that sharer `warp` has of the products with a row of A, for the lane's row of each column.
    __device__ __forceinline__ void multiply(float (&sums)[COLUMNS], const void* factor, int type, Range range, int warp) const {
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) sums[column] = 0;
#pragma unroll C::BLOCKS == 1 ? 2 : 1
        for (int unit = range.begin + warp * UNITS + lane_id() / 4 / GROUP; unit < range.end; unit += SHARERS * UNITS) {
            int k = unit * UNIT + lane_id() % 4 * 4;
            uint4 x[COLUMNS];
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) x[column] = rows_at(unit, column);
            // Elements of the first block of the unit are in the low halves of words, those of the second in the high ones.
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float numbers[4] = {};
                if (k + half * BLOCK < a.k) unpack(load_four(factor, type, k + half * BLOCK), type, numbers);
#pragma unroll
                for (int column = 0; column < COLUMNS; column++) {
                    u32 words[4] = {x[column].x, x[column].y, x[column].z, x[column].w};
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[column] = fmaf(numbers[i], half == 0 ? f16_low(words[i]) : f16_high(words[i]), sums[column]);
                }
            }
        }
#pragma unroll
        for (int column = 0; column < COLUMNS; column++) {
#pragma unroll
            for (int d = 1; d < WARP; d = d == 2 ? 4 * GROUP : 2 * d) sums[column] += __shfl_xor_sync(ALL_LANES, sums[column], d);
        }
    }

    // The outputs of a block need the numbers of A x of its matrices, for each row in quads of ranks: its items. A warp takes ITEMS of them at
    // a time, one a lane.
    static constexpr int ITEMS = 16;
    __device__ __forceinline__ int quad_shift() const { return a.low.rank_shift - 2; }
    __device__ __forceinline__ int items() const { return count() * a.m << quad_shift(); }
    // Where an item's numbers are, a part after the other; null if the row has none.
    __device__ __forceinline__ const float* source(int item) const {
        int quad = item & ((1 << quad_shift()) - 1), row = item >> quad_shift(), matrix = 0;
        while (row >= a.m) row -= a.m, matrix++;
        int adapter = memory().adapter_of[row];
        if (adapter < 0 || quad * QUAD >= memory().b[first() + matrix][adapter].rank) return nullptr;
        return low_of(first() + matrix, row) + quad * QUAD;
    }
    // The warp's first item.
    static __device__ __forceinline__ int first_item(int warp) { return (warp + WARPS - FIRST_COLLECTOR) % WARPS * ITEMS; }
    // Where the sum of an item's parts is: in the rings, which are done with then.
    __device__ __forceinline__ float4* sum_of(int item) const {
        extern __shared__ __align__(128) char shared[];
        return (float4*)(shared + (item / ITEMS + FIRST_COLLECTOR) % WARPS * C::Ring::BYTES) + item / (ITEMS * WARPS) * ITEMS + item % ITEMS;
    }
    static __device__ __forceinline__ bool is_pending(uint4 v) { return v.x == PENDING || v.y == PENDING || v.z == PENDING || v.w == PENDING; }

    // A copy by a warp.
    __device__ __forceinline__ void copy(int to, const u8* from, int bytes) const {
#pragma unroll 1
        for (int at = lane_id() * 16; at < bytes; at += WARP * 16) copy_async_16(shared_address(copies()) + to + at, from + at);
    }
    // Fetches the block's share of `bytes` bytes to L2.
    __device__ __forceinline__ void fetch_share(const void* from, int bytes) const {
        int blocks = gridDim.x * gridDim.z, lines = ceil_div(bytes, 128);
#pragma unroll 1
        for (int line = blockIdx.x * gridDim.z + blockIdx.z; line < lines; line += blocks) prefetch((const u8*)from + line * 128);
    }

public:
    __device__ __forceinline__ RowAdapters(const Arguments& a, const Schedule<C>& schedule, const SharedMemory<C>& shared_memory, int thread)
        : a(a), schedule(schedule), shared_memory(shared_memory), thread(thread) {}
    // Before the wait for the predecessor, by one warp: finds the rows' adapters, and requests the block's numbers of A and rows of B.
    __device__ __forceinline__ void prepare(int warp) {
        if (warp != SERVER) return;
        int lane = lane_id(), own = blockIdx.x;
        Task t = task(min(own, tasks() - 1));
        // Stores do not come between loads, which would then wait for each other.
        RowTile tile{};
        if (lane < a.low.adapters) tile = a.low.tiles[lane];
        if (lane < 16) memory().adapter_of[lane] = -1;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < C::MAX_ROWS; i++) {
            if (tile.factors && i < tile.rows) memory().adapter_of[tile.row[i]] = lane;
        }
#pragma unroll C::BLOCKS == 1 ? MOST_MATRICES : 1
        for (int matrix = 0; matrix < a.low.matrices; matrix++) {
            Factors f = factors_of(tile, a.low.first + matrix);
            if (lane < a.low.adapters) memory().b[matrix][lane] = {f.b, (u16)f.rank, (u16)f.b_type, NOWHERE};
            if (lane == t.adapter && matrix == t.matrix) memory().task = f;
        }
        __syncwarp();
        Factors f = memory().task;
        Range range = this->range(schedule.rank, t.part);
        int begin = range.begin * UNIT, length = max(min(range.end * UNIT, a.k) - begin, 0), a_bytes = length * bytes_of(f.a_type);
        if (own >= tasks() || t.rank >= f.rank || a_bytes > a.low.copies) a_bytes = 0;
        if (lane == 0) memory().a_bytes = a_bytes;
        copy(0, (const u8*)f.a + ((size_t)t.rank * a.k + begin) * bytes_of(f.a_type), a_bytes);
        // The block's rows of B follow each other.
        int used = a_bytes, end = schedule.first_tile + schedule.tiles;
#pragma unroll 1
        for (int i = 0; i < count() * a.low.adapters; i++) {
            int adapter = i, matrix = first();
            while (adapter >= a.low.adapters) adapter -= a.low.adapters, matrix++;
            BFactor& g = memory().b[matrix][adapter];
            int of_matrix = C::IS_GLU || matrix == 0 ? 0 : a.tiles[matrix - 1], row_bytes = g.rank * bytes_of(g.type);
            int row = max(schedule.first_tile - of_matrix, 0) * C::FEATURES, rows = min((end - of_matrix) * C::FEATURES, a.matrix[matrix].rows) - row;
            if (used + rows * row_bytes > a.low.copies) continue;
            copy(used, (const u8*)g.b + (size_t)row * row_bytes, rows * row_bytes);
            if (lane == 0) g.at = used - row * row_bytes;
            used += rows * row_bytes;
        }
        copy_async_commit();
    }
    // By another warp: fetches the block's share of the factors of the next product to L2.
    __device__ __forceinline__ void prefetch_next(int warp) const {
        if (warp != SERVER - 1) return;
        const NextFactors& next = a.low.next;
#pragma unroll 1
        for (int i = lane_id(); i < next.matrices * a.low.adapters; i += WARP) {
            int adapter = i, matrix = 0;
            while (adapter >= a.low.adapters) adapter -= a.low.adapters, matrix++;
            const Factors* all = a.low.tiles[adapter].factors;
            if (!all) continue;
            const Factors& f = all[next.first + matrix];
            fetch_share(f.a, f.rank * next.k * bytes_of(f.a_type));
            fetch_share(f.b, f.rank * next.features[matrix] * bytes_of(f.b_type));
        }
    }
    // After the wait: makes numbers pending that an earlier launch has taken.
    __device__ __forceinline__ void clear() const {
        int blocks = gridDim.x * gridDim.z;
        for (int i = thread * blocks + blockIdx.x * gridDim.z + blockIdx.z; i < a.low.taken_pieces; i += THREADS * blocks) {
            a.low.taken[i] = make_uint4(PENDING, PENDING, PENDING, PENDING);
        }
    }
    // Before a barrier of the block, when the rings are full: waits for what prepare() has requested.
    __device__ __forceinline__ void wait_for_factors(int warp) const {
        if (warp == SERVER) copy_async_wait<C::STAGES - C::EARLY_STAGES>();
    }
    // After it: computes the block's share of A x.
    __device__ __forceinline__ void share(ActivationLoad<C>& activations, int warp) const {
        int sharer = warp - FIRST_SHARER;
        if (sharer < 0 || sharer >= SHARERS) return;
#pragma unroll 1
        for (int i = blockIdx.x; i < tasks(); i += gridDim.x) {
            Task t = task(i);
            Factors f = memory().task;
            bool is_prepared = i == (int)blockIdx.x;
            if (!is_prepared) f = factors_of(a.low.tiles[t.adapter], a.low.first + t.matrix);
            if (t.rank >= f.rank) continue;
            Range range = this->range(schedule.rank, t.part);
            for (int chunk = range.begin / CHUNK_UNITS; C::TAKES_FRAGMENTS && chunk <= (range.end - 1) / CHUNK_UNITS; chunk++) {
                activations.wait(chunk - shared_memory.first_k / CHUNK_K);
            }
            const u8* factor = (const u8*)f.a + (size_t)t.rank * a.k * bytes_of(f.a_type);
            if (is_prepared && memory().a_bytes > 0) factor = copies() - range.begin * UNIT * bytes_of(f.a_type);
            float sums[COLUMNS];
            multiply(sums, factor, f.a_type, range, sharer);
            float* to = low_of(t.matrix, 0) + (((schedule.rank << part_shift()) + t.part) << a.low.rank_shift) + t.rank;
            float scale = f.scale * a.low.factor;
#pragma unroll
            for (int column = 0; column < COLUMNS; column++) {
                if (lane_id() % 4 == 0 && lane_id() / 4 < GROUP) memory().sums[sharer][lane_id() / 4 + 8 * column] = sums[column];
            }
            barrier(SHARERS_BARRIER, SHARERS * WARP);
            int row = lane_id();
            if (sharer == 0 && row < a.m && memory().adapter_of[row] == t.adapter) {
                float sum = 0;
#pragma unroll
                for (int j = 0; j < SHARERS; j++) sum += memory().sums[j][row];
                store_relaxed(to + ((size_t)row << (a.low.part_shift + a.low.rank_shift)), sum * scale);
            }
            barrier(SHARERS_BARRIER, SHARERS * WARP);
        }
    }
    // Near the end of a warp's products: requests the thread's numbers of A x to a stage of the warp's ring that is not filled again.
    __device__ __forceinline__ void request(u32 stage, int warp) {
        int item = first_item(warp) + lane_id();
        if (first_item(warp) >= items() || items() > ITEMS * WARPS || ITEMS * 16 << a.low.part_shift > C::Ring::STAGE_BYTES) return;
        requested = stage + lane_id() * 16;
        const float* from = lane_id() < ITEMS && item < items() ? source(item) : nullptr;
#pragma unroll 1
        for (int part = 0; from && part < parts(); part++) copy_async_16(requested + part * ITEMS * 16, from + (part << a.low.rank_shift));
    }
    // Before the barrier after the products: adds up the parts of the thread's items, and waits for what it has requested.
    __device__ __forceinline__ void complete(int warp) {
        copy_async_commit();
        copy_async_wait<0>();
#pragma unroll 1
        for (int begin = first_item(warp); begin < items(); begin += WARPS * ITEMS) {
            int item = begin + lane_id();
            const float* from = lane_id() < ITEMS && item < items() ? source(item) : nullptr;
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
            for (int part = 0; from && part < parts(); part++) {
                const float* at = from + (part << a.low.rank_shift);
                uint4 v = requested ? load_shared_16(requested + part * ITEMS * 16) : load_relaxed_16(at);
                for (int requests = 1; is_pending(v) && requests < MOST_REQUESTS; requests++) v = load_relaxed_16(at);
                sum.x += __uint_as_float(v.x), sum.y += __uint_as_float(v.y), sum.z += __uint_as_float(v.z), sum.w += __uint_as_float(v.w);
            }
            // Others of the warp may have requested theirs to the same place.
            __syncwarp();
            if (from) *sum_of(item) = sum;
        }
    }
    // scale * B (A x) of feature `row` of a matrix, for row m.
    __device__ __forceinline__ float added(int m, int matrix, int row) const {
        int adapter = memory().adapter_of[m];
        if (adapter < 0) return 0;
        const BFactor& f = memory().b[matrix][adapter];
        int row_bytes = f.rank * bytes_of(f.type), item = ((matrix - first()) * a.m + m) << quad_shift();
        const u8* from = f.at == NOWHERE ? (const u8*)f.b + (size_t)row * row_bytes : copies() + f.at + row * row_bytes;
        float sum = 0;
#pragma unroll 2
        for (int rank = 0; rank < f.rank; rank += QUAD) sum += dot_four(load_four(from, f.type, rank), f.type, *sum_of(item + rank / QUAD));
        return sum;
    }
};
