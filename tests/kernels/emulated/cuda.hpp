// The extensions of CUDA C++ that the kernels tested here use, for the blocks of one cluster. Their threads are fibers of one CPU thread: a
// barrier switches to the next fiber. Fibers take turns in an order that depends on the seed.
#pragma once
// Checked jumps take one to another fiber's stack for a mistake.
#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#undef INFINITY
#define __device__
#define __host__
#define __global__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct Index {
    unsigned x, y, z;
};
struct float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
using std::isnan;
using std::max;
using std::min;
using std::signbit;

inline float __uint_as_float(unsigned x) {
    float r;
    memcpy(&r, &x, 4);
    return r;
}
inline unsigned __float_as_uint(float x) {
    unsigned r;
    memcpy(&r, &x, 4);
    return r;
}
inline float __int_as_float(int x) { return __uint_as_float((unsigned)x); }
// Conversions saturate.
inline float __fsub_rn(float a, float b) { return a - b; }
inline double __ull2double_rn(unsigned long long x) { return (double)x; }
inline int __float2int_rz(float x) { return x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : (int)x; }
inline unsigned long long __float2ull_rz(float x) { return x < 0 ? 0 : x >= 0x1p64f ? ~0ull : (unsigned long long)x; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return r;
}

inline Index threadIdx, blockIdx, gridDim, blockDim;
// The shared memory of the running block, as large as any block may have.
alignas(128) inline char shared[228 << 10];

inline std::mt19937 noise(__CUDA_ARCH__);
inline float uniform() { return (float)((int)(noise() % 2001) - 1000) * 1e-3f; }

// The blocks of a cluster.
struct Cluster {
    struct Fiber {
        // Where it begins. It resumes at `place`, since swapcontext makes a system call for each switch.
        ucontext_t context;
        jmp_buf place;
        bool begun = false, done = false;
        // The fiber resumes when this counter is no longer `count`.
        const uint64_t* counter = nullptr;
        uint64_t count = 0;
        // The count of the cluster's barrier when the thread arrived there.
        uint64_t arrived = 0;
    };
    struct Barrier {
        int waiting = 0;
        uint64_t passed = 0;
    };
    std::vector<std::unique_ptr<Fiber>> fibers;
    jmp_buf scheduler;
    std::function<void()> body;
    int threads;
    std::vector<Barrier> barriers;
    Barrier all;
    // Shared memory of the blocks that are not running.
    std::vector<std::vector<char>> memories;
    // Asynchronous operations in flight.
    std::vector<std::function<void()>> later;
    static inline Cluster* current;
    // The running block's rank in the cluster.
    static inline int rank;
    // Reused by the next cluster.
    static constexpr size_t STACK = 64 << 10;
    static inline std::vector<std::unique_ptr<char[]>> stacks;

    Fiber& fiber() { return *fibers[rank * threads + threadIdx.x]; }
    static void start() {
        current->body();
        current->fiber().done = true;
        _longjmp(current->scheduler, 1);
    }
    // Runs a fiber until it waits or is done.
    void resume(Fiber& f) {
        if (_setjmp(scheduler)) return;
        if (f.begun) _longjmp(f.place, 1);
        f.begun = true;
        setcontext(&f.context);
    }
    void pause(Fiber& f) {
        if (!_setjmp(f.place)) _longjmp(scheduler, 1);
    }

    void switch_to(int block, int first_z) {
        if (block == rank) return;
        memcpy(memories[rank].data(), shared, sizeof shared);
        memcpy(shared, memories[block].data(), sizeof shared);
        rank = block;
        blockIdx.z = first_z + block;
    }

    // Runs `body` as each of `threads` threads of each of `blocks` blocks, which follow each other along z.
    Cluster(int threads, int blocks, unsigned seed, std::function<void()> what) : body(std::move(what)), threads(threads), barriers(blocks) {
        current = this;
        rank = 0;
        if (blocks > 1) memories.assign(blocks, std::vector<char>(shared, shared + sizeof shared));
        int first_z = blockIdx.z;
        std::vector<int> order;
        for (int i = 0; i < threads * blocks; i++) {
            fibers.push_back(std::make_unique<Fiber>());
            Fiber& f = *fibers.back();
            getcontext(&f.context);
            if ((int)stacks.size() == i) stacks.emplace_back(new char[STACK]);
            f.context.uc_stack.ss_sp = stacks[i].get();
            f.context.uc_stack.ss_size = STACK;
            f.context.uc_link = nullptr;
            makecontext(&f.context, start, 0);
            order.push_back(i);
        }
        std::mt19937 random(seed);
        std::shuffle(order.begin(), order.end(), random);
        std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return i / threads < j / threads; });
        for (int left = threads * blocks; left > 0;) {
            bool any = !later.empty();
            if (random() % 2) {
                std::vector<std::function<void()>> now;
                now.swap(later);
                for (auto& happen : now) happen();
            }
            // Half of the warps are skipped, so that some fall behind for longer than a turn.
            unsigned skipped = random();
            for (int i : order) {
                Fiber& f = *fibers[i];
                if (f.done || (f.counter && *f.counter == f.count)) continue;
                any = true;
                if (skipped >> i / 32 % 32 & 1) continue;
                switch_to(i / threads, first_z);
                threadIdx.x = i % threads;
                resume(f);
                left -= f.done;
            }
            if (!any) printf("%d threads wait for each other\n", left), exit(1);
        }
    }

    // Lets other threads run until `counter` changes.
    static void wait(const uint64_t& counter) {
        Fiber& f = current->fiber();
        f.counter = &counter;
        f.count = counter;
        current->pause(f);
        f.counter = nullptr;
    }
    // Whether this thread is the last of `threads` to arrive.
    static bool arrive(Barrier& barrier, int threads) {
        if (++barrier.waiting < threads) return false;
        barrier.waiting = 0;
        barrier.passed++;
        return true;
    }
    static void wait(Barrier& barrier, int threads) {
        if (!arrive(barrier, threads)) wait(barrier.passed);
    }
    // The shared memory of a block of the cluster.
    char* memory(int block) { return block == rank ? shared : memories[block].data(); }
    // The thread's number in the cluster.
    static int thread() { return rank * current->threads + (int)threadIdx.x; }
};

inline void __syncthreads() { Cluster::wait(Cluster::current->barriers[Cluster::rank], Cluster::current->threads); }

// Runs all blocks of a grid in random order, so that the last to arrive is not always the last of the grid; but those with an x below `first`,
// for which others may wait, before others. `cluster` is the number of blocks of a cluster, along z.
inline void launch(unsigned x, unsigned y, unsigned z, int threads, const std::function<void()>& kernel, unsigned cluster = 1, unsigned first = 0) {
    gridDim = {x, y, z};
    blockDim = {(unsigned)threads, 1, 1};
    std::vector<unsigned> order(x * y * z / cluster);
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), noise);
    std::stable_partition(order.begin(), order.end(), [&](unsigned i) { return i % x < first; });
    for (unsigned i : order) {
        blockIdx = {i % x, i / x % y, i / x / y * cluster};
        // Uninitialized memory reads as NaN.
        memset(shared, 0xff, sizeof shared);
        Cluster(threads, (int)cluster, noise(), kernel);
    }
}
