// Loads activations to shared memory: one class for each form of input.
//
// Each is constructed before the kernel waits for its predecessor, and then does the work that does not depend on it. load() follows the
// wait and ends without a barrier of the block. wait() lets a warp proceed to a chunk.
#pragma once
#include "common/cluster.cuh"
#include "format/fragment_major.cuh"
#include "linear/skinny/memory.cuh"
#include "norm/piece.cuh"

// Row-major rows: several threads load each of MAX_ROWS rows, two pieces at a time, with BATCH such pairs in flight.
template <class C>
class RowMajorLoad {
    static constexpr int BATCH = C::MAX_ROWS == 1 ? 1 : C::BLOCKS == 1 ? 4 : 2;
    static constexpr int ROW_THREADS = THREADS / C::MAX_ROWS, STRIDE = 2 * ROW_THREADS;
    static_assert(STRIDE % 8 == 0, "a thread's pieces differ by whole halves of 128 bytes");
    const uint4* x;
    int k, piece, pieces;   // no pieces of an absent row
    u32 to;

public:
    __device__ __forceinline__ RowMajorLoad(const Arguments& a, const SharedMemory<C>& memory, int thread) : pieces(memory.pieces()) {
        int m = thread / ROW_THREADS;
        piece = 2 * (thread % ROW_THREADS);
        k = memory.first_k + first_element(piece);
        x = (const uint4*)(a.x + m * a.k + k);
        to = memory.activations_at + (m * pieces + (piece ^ m % 2 * 4)) * 16;
        if (m >= a.m) piece = pieces;
    }
    __device__ __forceinline__ void load(const Arguments& a) {
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
                store_shared_16(to + j * STRIDE * 16, interleave(low[j].x, low[j].y, high[j].x, high[j].y));
                store_shared_16(to + j * STRIDE * 16 + 16, interleave(low[j].z, low[j].w, high[j].z, high[j].w));
            }
            x += BATCH * STRIDE;
            k += BATCH * STRIDE * 8;
            to += BATCH * STRIDE * 16;
        }
    }
    __device__ __forceinline__ void wait(int) const {}

private:
    // Four elements of a block, p and p_next, with those of the next block, q and q_next.
    static __device__ __forceinline__ uint4 interleave(u32 p, u32 p_next, u32 q, u32 q_next) {
        return make_uint4(__byte_perm(p, q, 0x5410), __byte_perm(p, q, 0x7632), __byte_perm(p_next, q_next, 0x5410),
                          __byte_perm(p_next, q_next, 0x7632));
    }
};

// ResidualRow, of up to 8 THREADS elements: a thread computes one piece.
template <class C>
class ResidualLoad {
    const SharedMemory<C>& memory;
    int thread;
    Piece post, weight;

public:
    __device__ __forceinline__ ResidualLoad(const Arguments& a, const SharedMemory<C>& memory, int thread)
        : memory(memory), thread(thread), post(a.residual.post, thread, a.k), weight(a.residual.weight, thread, a.k) {}
    __device__ __forceinline__ void load(const Arguments& a) const {
        const ResidualRow& r = a.residual;
        Piece y(r.y, thread, a.k), x(r.x, thread, a.k);
        // Both sums' scratch lies where barriers for bulk copies and factors of fused norms would. The exchange barrier is in use.
        static_assert(2 * FACTOR_BYTES <= BARRIER_BYTES + FACTOR_BYTES && FACTOR_BYTES <= EXCHANGE_BARRIER, "scratch memory of the sums");
        u32 scratch = memory.barriers_at;
        float factor = rsqrtf(block_sum(y.squares(), scratch) / a.k + r.eps);
        auto add = [&](float4& to, float4 y, float4 post) {
            to = make_float4(to.x + y.x * factor * post.x, to.y + y.y * factor * post.y, to.z + y.z * factor * post.z, to.w + y.w * factor * post.w);
        };
        add(x.first, y.first, post.first);
        add(x.second, y.second, post.second);
        if (blockIdx.x == 0 && blockIdx.z == 0) {
            int k = first_element(thread);
            if (k < a.k) *(float4*)(r.sum + k) = x.first;
            if (k + BLOCK < a.k) *(float4*)(r.sum + k + BLOCK) = x.second;
        }
        factor = rsqrtf(block_sum(x.squares(), scratch + BARRIER_BYTES) / a.k + r.eps);
        int piece = thread - memory.first_k / 8;
        if (piece >= 0 && piece < memory.pieces()) store_shared_16(memory.activations_at + piece * 16, x.normalized_f16(factor, weight));
    }
    __device__ __forceinline__ void wait(int) const {}

private:
    // The sum over the block, by way of WARPS floats of shared memory.
    __device__ __forceinline__ float block_sum(float sum, u32 scratch) const {
        sum = warp_sum(sum);
        if (lane_id() == 0) store_shared_float(scratch + thread / WARP * 4, sum);
        __syncthreads();
        return warp_sum(lane_id() < WARPS ? load_shared_float(scratch + lane_id() * 4) : 0);
    }
};

// NormalizedRows, with the bits of norm/rms_norm.cu: a warp has the pieces that one of its warps has at a time, of all rows.
template <class C>
class NormalizedLoad {
    static_assert(NORMALIZED_WIDTH == 8 * THREADS, "a thread has a piece of each row");
    const SharedMemory<C>& memory;
    int thread;
    Piece weight;

public:
    __device__ __forceinline__ NormalizedLoad(const Arguments& a, const SharedMemory<C>& memory, int thread)
        : memory(memory), thread(thread), weight(a.normalized.weight, thread, a.k) {}
    __device__ __forceinline__ void load(const Arguments& a) const {
        // Nothing is in the place of accumulators yet.
        float* sums = memory.accumulators;
        Piece x[C::MAX_ROWS];
#pragma unroll
        for (int m = 0; m < C::MAX_ROWS; m++) x[m] = Piece(a.normalized.x + m * a.k, thread, m < a.m ? a.k : 0);
#pragma unroll
        for (int m = 0; m < C::MAX_ROWS; m++) {
            float sum = warp_sum(x[m].squares());
            if (lane_id() == 0 && m < a.m) sums[m * WARPS + thread / WARP] = sum;
        }
        __syncthreads();
        int at = thread - memory.first_k / 8, pieces = memory.pieces();
        if (at < 0 || at >= pieces) return;
#pragma unroll
        for (int m = 0; m < C::MAX_ROWS; m++) {
            if (m >= a.m) break;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += sums[m * WARPS + i];
            float factor = rsqrtf(sum / a.k + a.normalized.eps);
            store_shared_16(memory.activations_at + (m * pieces + (at ^ m % 2 * 4)) * 16, x[m].normalized_f16(factor, weight));
        }
    }
    __device__ __forceinline__ void wait(int) const {}
};

#if __CUDA_ARCH__ >= 900
// Fragment-major rows: bulk copies of PORTION chunks, each with a barrier, so that products need not wait for the last one.
template <class C>
class FragmentLoad {
    static constexpr int PORTION = 8, CHUNK_X = C::MAX_ROWS / GROUP_ROWS * GROUP_BYTES;
    const SharedMemory<C>& memory;
    int thread, last = -1;  // the portion that this warp has awaited

public:
    __device__ __forceinline__ FragmentLoad(const Arguments&, const SharedMemory<C>& memory, int thread) : memory(memory), thread(thread) {
        if (thread != 0) return;
        for (int i = 0; i * PORTION < memory.chunks; i++) barrier_init(barrier(i), 1);
        publish_barriers();
    }
    __device__ __forceinline__ void load(const Arguments& a) const {
        if (thread != 0) return;
        for (int i = 0; i * PORTION < memory.chunks; i++) {
            int first = i * PORTION, bytes = min(PORTION, memory.chunks - first) * CHUNK_X;
            barrier_expect(barrier(i), bytes);
            copy_bulk(memory.activations_at + first * CHUNK_X, (const u8*)a.x + (memory.first_k / CHUNK_K + first) * CHUNK_X, bytes,
                      barrier(i));
        }
    }
    __device__ __forceinline__ void wait(int chunk) {
        int portion = chunk / PORTION;
        if (portion == last) return;
        barrier_wait(barrier(portion), 0);
        last = portion;
    }

private:
    __device__ __forceinline__ u32 barrier(int portion) const { return memory.barriers_at + portion * 8; }
};
#endif

template <class C, Input INPUT = C::INPUT>
struct ActivationLoadOf {
    using Type = RowMajorLoad<C>;
};
template <class C>
struct ActivationLoadOf<C, RESIDUAL> {
    using Type = ResidualLoad<C>;
};
template <class C>
struct ActivationLoadOf<C, NORMALIZED> {
    using Type = NormalizedLoad<C>;
};
#if __CUDA_ARCH__ >= 900
template <class C>
struct ActivationLoadOf<C, FRAGMENT_MAJOR> {
    using Type = FragmentLoad<C>;
};
#endif
template <class C>
using ActivationLoad = typename ActivationLoadOf<C>::Type;
