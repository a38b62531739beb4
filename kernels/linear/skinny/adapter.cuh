// LoRA adapters of a pass of one row in the skinny GEMM: y += scale * B (A x), where the kernel that made x has left A x in parts
// (adapter/factors.cuh). They are added up while the first weights arrive, and their products with B are added to the outputs in the
// epilogue. If adapted projections take the outputs, the block multiplies its part of them by those A factors at its end.
//
// Before the kernel waits for its predecessor, the factors that the block needs are requested into shared memory. What has no room there is
// fetched to L2 instead.
#pragma once
#include "adapter/factors.cuh"
#include "linear/skinny/input_norm.cuh"

struct AdapterMemory {
    Factors own[MATRICES], next[MATRICES];  // beside the block's matrices, and beside those that take its outputs
    float low[MATRICES][MOST_RANK];         // scale * A x
    float sums[THREADS];                    // of the parts that each thread or pair of threads adds up
    int b_stride, a_at, a_stride;           // bytes of a row of B in `copies`; where numbers of A are there, and bytes of a rank. 0: not there
    int unused;
};  // The block's outputs as the next kernels take them follow, f32, and then the copies.

// Without an adapter. The operations are in the order of calls.
template <class C, bool ADAPTED = C::ADAPTED>
class RowAdapter {
public:
    __device__ __forceinline__ RowAdapter(const Arguments&, const Schedule<C>&, const SharedMemory<C>&, int) {}
    __device__ __forceinline__ void fetch(bool, int, int) const {}
    __device__ __forceinline__ void request() const {}
    __device__ __forceinline__ void add_up() const {}
    __device__ __forceinline__ void finish(const InputNorm<C>&, bool) const {}
    __device__ __forceinline__ void wait() const {}
    __device__ __forceinline__ float added(int, int, int, int) const { return 0; }
    __device__ __forceinline__ void keep(int, u16) const {}
    __device__ __forceinline__ void store_part() const {}
};

template <class C>
class RowAdapter<C, true> {
    static_assert(C::MAX_ROWS == 1 && MATRICES <= 3 && WARPS == 16, "an adapter of one row; a quarter of the warps for a matrix");
    static constexpr int OWN = C::TILE == GATE_UP ? 2 : 1;      // matrices of an output
    static constexpr bool MAKES_ROW = C::OUTPUT != STORE_F32;   // that adapted projections take; attention takes the others
    static constexpr int REQUESTS = 9;                        // numbers of parts that a thread has in flight
    const Arguments& a;
    const Schedule<C>& schedule;
    AdapterMemory& memory;
    int thread;
    int first, count;               // the block's matrices
    float requested[REQUESTS];

    __device__ __forceinline__ int warp() const { return thread / WARP; }
    // The outputs that the block stores, and the first of them in a row.
    __device__ __forceinline__ int begin() const { return schedule.splits_k() ? SharedMemory<C>::share_begin(schedule, schedule.rank) : 0; }
    __device__ __forceinline__ int column() const { return schedule.first_tile * C::FEATURES + begin(); }
    __device__ __forceinline__ int end() const { return schedule.splits_k() ? SharedMemory<C>::share_begin(schedule, schedule.rank + 1) : schedule.outputs(); }
    __device__ __forceinline__ int columns() const { return min(end() - begin(), a.matrix[0].rows - column()); }
    static __device__ __forceinline__ int row_bytes(const Factors& f) { return f.rank * bytes_of(f.b_type); }
    // The logarithm of the number of warps that add up the parts of a matrix.
    __device__ __forceinline__ int turns() const { return count == 1 ? 4 : count == 2 ? 3 : 2; }
    // Number i of the thread among the parts of its warp's matrix; beyond the last, and for further warps, 0.
    __device__ __forceinline__ float number(int i) const {
        int matrix = warp() >> turns(), size = a.low.parts << a.next.shift, at = (thread & ((WARP << turns()) - 1)) + i * (WARP << turns());
        return a.low.values && matrix < count && at < size ? ((const volatile float*)a.low.values)[(size_t)(first + matrix) * size + at] : 0;
    }
    __device__ __forceinline__ int ranks() const { return 1 << a.next.shift; }
    // Rank of number i among those of several projections.
    __device__ __forceinline__ int rank(int i) const { return i & ((1 << a.next.shift) - 1); }
    // The block's outputs, and the copies.
    __device__ __forceinline__ float* outputs() const { return (float*)(&memory + 1); }
    __device__ __forceinline__ u8* copies() const { return (u8*)(outputs() + schedule.outputs()); }
    // Multiplies the whole input by the A factors of the block's matrices; x(k) has four elements from k on.
    template <class X>
    __device__ __forceinline__ void multiply(X x, float factor) {
#pragma unroll 1
        for (int i = warp(); i < count << a.next.shift; i += WARPS) {
            const Factors& f = memory.own[first + (i >> a.next.shift)];
            int r = rank(i);
            if (r >= f.rank) continue;
            float sum = 0;
#pragma unroll 2
            for (int k = lane_id() * 4; k < a.k; k += WARP * 4) sum += dot_four(load_four(f.a, f.a_type, (size_t)r * a.k + k), f.a_type, x(k));
            sum = warp_sum(sum);
            if (lane_id() == 0) memory.low[first + (i >> a.next.shift)][r] = sum * (f.scale * factor);
        }
    }

public:
    __device__ __forceinline__ RowAdapter(const Arguments& a, const Schedule<C>& schedule, const SharedMemory<C>& shared, int thread)
        : a(a), schedule(schedule), memory(*(AdapterMemory*)(shared.accumulators + (schedule.tiles + WARPS) * ACCUMULATORS)), thread(thread) {
        constexpr int WORDS = sizeof(Factors) / 4;
        int row;
        first = C::TILE == GATE_UP ? 0 : Schedule<C>::locate(a, schedule.first_tile, row);
        count = (C::TILE == GATE_UP ? 2 : Schedule<C>::locate(a, schedule.first_tile + schedule.tiles - 1, row) + 1) - first;
        const Factors* all = *a.next.adapter;
        if (thread < 2 * MATRICES * WORDS) {
            int slot = thread / WORDS, of_next = slot - MATRICES;
            bool exists = all && (of_next < 0 ? a.matrix[slot].rows > 0 : of_next < a.next.count);
            const u32* from = (const u32*)(all + (of_next < 0 ? a.low.first + slot : a.next.first + of_next));
            ((u32*)memory.own)[thread] = exists ? from[thread % WORDS] : 0;
        }
    }
    // Requests the factors of the thread's first output, and those of the outputs' own projections.
    __device__ __forceinline__ void fetch(bool exists, int matrix, int row) const {
        const Factors* all = *a.next.adapter;
        int b_stride = 0, a_stride = 0, width = end() - begin(), ranks = MAKES_ROW ? a.next.count << a.next.shift : 0;
        for (int i = 0; all && i < count; i++) b_stride = max(b_stride, row_bytes(all[a.low.first + first + i]));
        for (int i = 0; MAKES_ROW && all && i < a.next.count; i++) a_stride = max(a_stride, width * bytes_of(all[a.next.first + i].a_type));
        int b_bytes = OWN * schedule.outputs() * b_stride;
        if (schedule.outputs() > THREADS || b_bytes > a.next.copies) b_bytes = b_stride = 0;
        if (b_bytes + ranks * a_stride > a.next.copies) a_stride = 0;
        if (thread == 0) memory.b_stride = b_stride, memory.a_at = b_bytes, memory.a_stride = a_stride;
        if (!all) return;
        if (blockIdx.x == 0 && thread * 128 < a.next.laters * (int)sizeof(Factors)) prefetch((const u8*)(all + a.next.later) + thread * 128);
        auto request = [&](u8* copy, const void* from, int bytes) {
            if (copy) {
                for (int at = 0; at < bytes; at += 16) copy_async_16(shared_address(copy) + at, (const u8*)from + at, 16);
            } else {
                for (int at = 0; at < bytes; at += 128) prefetch((const u8*)from + at);
            }
        };
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (!exists) break;
            const Factors& f = all[a.low.first + matrix + i];
            int bytes = row_bytes(f);
            request(b_stride > 0 ? copies() + (OWN * thread + i) * b_stride : nullptr, (const u8*)f.b + (size_t)row * bytes, bytes);
        }
        for (int i = THREADS - 1 - thread; MAKES_ROW && i < ranks; i += THREADS) {
            const Factors& f = all[a.next.first + (i >> a.next.shift)];
            if (rank(i) >= f.rank) continue;
            size_t from = (size_t)rank(i) * a.matrix[0].rows + column();
            request(a_stride > 0 ? copies() + b_bytes + i * a_stride : nullptr, (const u8*)f.a + from * bytes_of(f.a_type), columns() * bytes_of(f.a_type));
        }
    }
    // Requests the first parts of A x.
    __device__ __forceinline__ void request() {
#pragma unroll
        for (int i = 0; i < REQUESTS; i++) requested[i] = number(i);
    }
    __device__ __forceinline__ void add_up() {
        float sum = requested[0];
#pragma unroll
        for (int i = 1; i < REQUESTS; i++) sum += requested[i];
        if (!a.low.values) return;
#pragma unroll 1
        for (int i = REQUESTS; i * (WARP << turns()) < a.low.parts << a.next.shift; i++) sum += number(i);
        if (ranks() == RANK_STEP) sum += __shfl_xor_sync(ALL_LANES, sum, RANK_STEP);
        if (lane_id() < ranks()) memory.sums[warp() * min(ranks(), WARP) + lane_id()] = sum;
    }
    // After a barrier of the block: completes scale * A x. `normalized` says whether the block has normalized the row itself.
    __device__ __forceinline__ void finish(const InputNorm<C>& norm, bool normalized) {
        if (normalized) {
            float squares = 0;
            auto load = [&](const float* row, int k) { return *(const float4*)(row + k); };
#pragma unroll 1
            for (int k = lane_id() * 4; k < a.k; k += WARP * 4) squares += square_sum(load(a.norm.x, k));
            float factor = rsqrtf(fmaf(warp_sum(squares), reciprocal_approx((float)a.k), a.norm.eps));
            return multiply([&](int k) {
                float4 v = apply_norm(load(a.norm.x, k), factor, load(a.norm.weight, k));
                return make_float4(f16_to_float(to_f16(v.x)), f16_to_float(to_f16(v.y)), f16_to_float(to_f16(v.z)), f16_to_float(to_f16(v.w)));
            }, 1);
        }
        float factor = norm.factor(0) * a.low.factor;
        if (!a.low.values) {
            return multiply([&](int k) {
                uint2 v = *(const uint2*)(a.x + k);
                return make_float4(f16_low(v.x), f16_high(v.x), f16_low(v.y), f16_high(v.y));
            }, factor);
        }
        int sums = min(ranks(), WARP) << turns();    // of a matrix
        for (int i = THREADS - 1 - thread; i < count << a.next.shift; i += THREADS) {
            int matrix = i >> a.next.shift;
            float sum = 0;
#pragma unroll 8
            for (int at = rank(i); at < sums; at += ranks()) sum += memory.sums[matrix * sums + at];
            memory.low[first + matrix][rank(i)] = sum * (memory.own[first + matrix].scale * factor);
        }
    }
    // Before the last barrier: waits for the factors that the thread has requested.
    __device__ __forceinline__ void wait() const { copy_async_wait<0>(); }
    // scale * B (A x) of output i of the block: feature `row` of its matrix number `which`, which is `matrix`.
    __device__ __forceinline__ float added(int i, int matrix, int row, int which) const {
        const Factors& f = memory.own[matrix];
        const float4* low = (const float4*)memory.low[matrix];
        int bytes = row_bytes(f);
        const uint4* from = (const uint4*)(memory.b_stride > 0 ? copies() + (OWN * i + which) * memory.b_stride : (const u8*)f.b + (size_t)row * bytes);
        // Two sums hide more of the latency.
        float sum = 0, other = 0;
        int step = 4 / bytes_of(f.b_type);
#pragma unroll 1
        for (int piece = 0; piece < bytes / 16; piece += 2, low += 2 * step) {
            uint4 v = from[piece], w = from[piece + 1];
            sum = dot_piece(v, f.b_type, low, sum);
            other = dot_piece(w, f.b_type, low + step, other);
        }
        return sum + other;
    }
    // Keeps output i of the block as the next kernels take it.
    __device__ __forceinline__ void keep(int i, u16 value) const { outputs()[i - begin()] = f16_to_float(value); }
    // After the last keep(): stores the block's part of A x for the projections that take its outputs.
    __device__ __forceinline__ void store_part() const {
        if (!MAKES_ROW || a.next.count == 0) return;
        __syncthreads();
        // Several lanes share a rank: a tile has 8 outputs, and blocks of gated units have more tiles.
        constexpr int LANES = C::IS_GLU ? WARP : 8, AT_ONCE = THREADS / LANES;
        int part = blockIdx.x * gridDim.z + blockIdx.z, columns = this->columns(), lane = lane_id() % LANES;
#pragma unroll 1
        for (int first = 0; first < a.next.count << a.next.shift; first += AT_ONCE) {
            int i = min(first + thread / LANES, (a.next.count << a.next.shift) - 1);
            const Factors& f = memory.next[i >> a.next.shift];
            size_t row = (size_t)rank(i) * a.matrix[0].rows + column();
            const u8* from = memory.a_stride > 0 ? copies() + memory.a_at + i * memory.a_stride : (const u8*)f.a + row * bytes_of(f.a_type);
            bool exists = rank(i) < f.rank;
            float sum = 0;
#pragma unroll 4
            for (int at = lane; at < columns; at += LANES) {
                if (exists) sum = fmaf(value_of(load_raw(from, f.a_type, at), f.a_type), outputs()[at], sum);
            }
#pragma unroll
            for (int d = LANES / 2; d > 0; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
            if (lane == 0 && exists) a.next.values[(((size_t)(i >> a.next.shift) * a.next.parts + part) << a.next.shift) + rank(i)] = sum;
        }
    }
};
