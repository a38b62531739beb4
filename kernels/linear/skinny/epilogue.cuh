// The end of the skinny GEMM: a block adds up its warps' accumulators of each output in a fixed order, combines them with those of the
// other block of a cluster that splits K, and applies the fused epilogue.
#pragma once
#include "activation/gate.cuh"
#include "linear/skinny/adapter.cuh"

template <class C>
class Epilogue {
    // An output of the block: the position and number of its warps' accumulators, and its destination.
    struct Place {
        u32 accumulators;
        int count = 0, matrix, row;     // no accumulators of an output that does not exist
        int at;                         // in `out`
        int next;                       // ADD: in the rows for a fused norm
    };
    // ADD: the value that an output is added to, and the factor of the sum for a fused norm.
    struct Residual {
        float value, weight, factor;
    };
    const Arguments& a;
    const Schedule<C>& schedule;
    const SharedMemory<C>& memory;
    const InputNorm<C>& norm;
    const RowAdapters<C>& adapters;
    int thread;
    Place first_place{};
    Residual first_residual;

    __device__ __forceinline__ u32 exchange() const { return memory.barriers_at + EXCHANGE_BARRIER; }
    __device__ __forceinline__ int share_begin(int rank) const { return SharedMemory<C>::share_begin(schedule, rank); }

    __device__ __forceinline__ Place place(int i) const {
        Place p;
        int tile = i / (C::MAX_ROWS * C::FEATURES), m = i / C::FEATURES % C::MAX_ROWS, feature = i % C::FEATURES;
        p.matrix = Schedule<C>::locate(a, schedule.first_tile + tile, p.row);
        p.row += feature;
        bool exists = m < a.m && p.row < a.matrix[p.matrix].rows;
        int first = C::IN_RANGES ? tile * (schedule.ranges - 1) : schedule.shares.owner(tile * schedule.steps);
        p.accumulators = shared_address(memory.accumulators + ((tile + first) * a.m + m) * ACCUMULATORS + feature);
        if (exists) p.count = C::IN_RANGES ? schedule.ranges : schedule.shares.owner((tile + 1) * schedule.steps - 1) - first + 1;
        int column = p.row + (p.matrix > 0 ? a.matrix[0].rows : 0) + (p.matrix > 1 ? a.matrix[1].rows : 0);
        p.at = C::OUTPUT == GLU_FRAGMENT_MAJOR ? (int)fragment_index(C::MAX_ROWS / GROUP_ROWS, m, p.row) : m * a.out_stride + column;
        p.next = C::TAKES_FRAGMENTS ? (int)fragment_index(C::MAX_ROWS / GROUP_ROWS, m, p.row) : p.at;
        return p;
    }
    __device__ __forceinline__ Residual load_residual(const Place& p, int i) const {
        Residual r{};
        if (C::OUTPUT == ADD_F32 && p.count > 0) {
            r.value = ((const float*)a.out)[p.at];
            if (a.norm.squares) {
                r.weight = a.norm.weight[p.row];
                r.factor = a.norm.previous_factors[i / C::FEATURES % C::MAX_ROWS];
            }
        }
        return r;
    }
    // The block's sum of an output, added to `before`; for GATE_UP, of gate and up.
    __device__ __forceinline__ float2 sum_of(const Place& p, float before = 0) const {
        // A few loads are in flight before the first is used.
        constexpr int BATCH = 4;
        int stride = a.m * ACCUMULATORS * 4;
        float2 sum = {before, 0};
        u32 at = p.accumulators;
#pragma unroll 1
        for (int left = p.count; left > 0; left -= BATCH, at += BATCH * stride) {
            float x[BATCH], y[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                x[i] = i < left ? load_shared_float(at + i * stride) : 0;
                y[i] = C::TILE != TALL && i < left ? load_shared_float(at + i * stride + ACCUMULATORS / 2 * 4) : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                sum.x += x[i];
                sum.y += y[i];
            }
        }
        if (C::TILE == DEEP) sum.x += sum.y;
        return sum;
    }
    __device__ __forceinline__ void store(const Place& p, int i, float2 sum, const Residual& residual) const {
        const Matrix& w = a.matrix[p.matrix];
        int m = i / C::FEATURES % C::MAX_ROWS;
        float factor = norm.factor(m) * PACKED_FACTOR;
        sum.x = scaled_sum(sum.x, w.global * factor, w.bias, p.row);
        if (C::ADAPTED) sum.x += adapters.added(m, p.matrix, p.row) * norm.factor(m);
        if (C::OUTPUT == STORE_F32) ((float*)a.out)[p.at] = sum.x;
        if (C::OUTPUT == STORE_F16) ((u16*)a.out)[p.at] = to_f16(sum.x);
        if (C::OUTPUT == ADD_F32) {
            float y = residual.value + sum.x;
            ((float*)a.out)[p.at] = y;
            if (a.norm.squares) store_for_norm(p, i, y, residual);
        }
        if (C::IS_GLU) {
            const Matrix& up = a.matrix[1];
            sum.y = scaled_sum(sum.y, up.global * factor, up.bias, p.row);
            if (C::ADAPTED) sum.y += adapters.added(m, 1, p.row) * norm.factor(m);
            u16 y = to_f16(activate(a.activation, sum.x) * sum.y * a.out_scale);
            ((u16*)a.out)[p.at] = y;
        }
    }
    __device__ __forceinline__ void store_for_norm(const Place& p, int i, float y, const Residual& residual) const {
        float scaled = y * residual.factor * residual.weight;
        a.norm.rows[p.next] = to_f16(scaled);
        float square = fabsf(scaled) <= F16_MAX ? y * y : INFINITY;
        // Consecutive threads take the existing features of a tile and row.
#pragma unroll
        for (int d = C::FEATURES / 2; d > 0; d /= 2) {
            square += __shfl_xor_sync(((1ull << C::FEATURES) - 1) << (lane_id() & ~(C::FEATURES - 1)), square, d);
        }
        int m = i / C::FEATURES % C::MAX_ROWS;
        if (i % C::FEATURES == 0) a.norm.squares[m * a.norm.tiles + p.row / C::FEATURES] = square;
    }
    // The padding of fragment-major rows along K.
    __device__ __forceinline__ void store_padding() const {
        u16* rows = nullptr;
        if (C::OUTPUT == GLU_FRAGMENT_MAJOR) rows = (u16*)a.out;
        if (C::OUTPUT == ADD_F32 && C::TAKES_FRAGMENTS && a.norm.squares) rows = a.norm.rows;
        if (!rows || !schedule.is_last_cluster()) return;
        int width = a.matrix[0].rows, padding = padded_k(width) - width;
        for (int i = thread; i < a.m * padding; i += THREADS) {
            rows[fragment_index(C::MAX_ROWS / GROUP_ROWS, i / padding, width + i % padding)] = 0;
        }
    }
#if __CUDA_ARCH__ >= 900
    // Each block of the cluster stores its share of the outputs, for which the other block sends its sums, IN_RANGES that of each range.
    __device__ __forceinline__ void store_share() {
        auto place_of = [&](int i) { return i == thread ? first_place : place(i); };
        int begin = share_begin(schedule.rank), end = share_begin(schedule.rank + 1), other = 1 - schedule.rank;
        for (int i = thread; i < schedule.outputs(); i += THREADS) {
            if (i >= begin && i < end) continue;
            Place p = place_of(i);
            if (C::IN_RANGES) {
                u32 to = shared_address(memory.received + (i - share_begin(other)) * schedule.ranges);
                for (int range = 0; range < schedule.ranges; range++) {
                    float sum = range < p.count ? load_shared_float(p.accumulators + range * a.m * ACCUMULATORS * 4) : 0;
                    send_to_cluster(to + range * 4, other, sum, exchange());
                }
                continue;
            }
            float sum = sum_of(p).x;
            send_to_cluster(shared_address(memory.received + i - share_begin(other)), other, sum, exchange());
        }
        for (int i = thread; i < end; i += THREADS) {
            if (i < begin) continue;
            Place p = place_of(i);
            if (i > thread) first_residual = load_residual(p, i);
            if (C::IN_RANGES) {
                barrier_wait(exchange(), 0);
                int sent = a.ranges - schedule.ranges;
                const float* received = memory.received + (i - begin) * sent;
                float sum = schedule.rank > 0 ? 0 : sum_of(p).x;
                for (int range = 0; range < sent; range++) sum += received[range];
                if (schedule.rank > 0) sum = sum_of(p, sum).x;
                if (p.count > 0) store(p, i, {sum, 0}, first_residual);
                continue;
            }
            float sum = sum_of(p).x;
            barrier_wait(exchange(), 0);
            if (p.count > 0) store(p, i, {sum + memory.received[i - begin], 0}, first_residual);
        }
        // A block, even without outputs of its own, must not end before everything sent to it has arrived.
        barrier_wait(exchange(), 0);
    }
#endif

public:
    // Before the wait for the kernel's predecessor.
    __device__ __forceinline__ Epilogue(const Arguments& a, const Schedule<C>& schedule, const SharedMemory<C>& memory, const InputNorm<C>& norm,
                                        const RowAdapters<C>& adapters, int thread)
        : a(a), schedule(schedule), memory(memory), norm(norm), adapters(adapters), thread(thread) {
#if __CUDA_ARCH__ >= 900
        if (schedule.splits_k()) {
            if (thread == 0) {
                barrier_init(exchange(), 1);
                int sums = C::IN_RANGES ? a.ranges - schedule.ranges : 1;
                barrier_expect(exchange(), (share_begin(schedule.rank + 1) - share_begin(schedule.rank)) * sums * 4);
                publish_barriers();
            }
            __syncwarp();
            cluster_arrive();
        }
#endif
    }
    // Finds the thread's first output, without reading anything that the predecessor writes, and loads the value that it is added to.
    __device__ __forceinline__ void find_first() {
        if (thread < schedule.outputs()) first_place = place(thread);
    }
    __device__ __forceinline__ void load_first() { first_residual = load_residual(first_place, thread); }
    // Waits until the cluster's other block has initialized its barrier.
    __device__ __forceinline__ void wait_for_cluster() const {
#if __CUDA_ARCH__ >= 900
        if (schedule.splits_k()) {
            __syncwarp();
            cluster_wait();
        }
#endif
    }
    // Call after the barrier that follows the stores of accumulators.
    __device__ __forceinline__ void run() {
        store_padding();
#if __CUDA_ARCH__ >= 900
        if (schedule.splits_k()) return store_share();
#endif
        for (int i = thread;;) {
            if (first_place.count > 0) store(first_place, i, sum_of(first_place), first_residual);
            i += THREADS;
            if (i >= schedule.outputs()) return;
            first_place = place(i);
            first_residual = load_residual(first_place, i);
        }
    }
};
