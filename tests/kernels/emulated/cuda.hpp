// What CUDA C++ adds to the language, as far as the kernels tested here use it, for one block whose threads are fibers of one
// thread of the processor: a barrier hands over to the next fiber. Fibers take turns in an order that the seed decides.
#pragma once
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
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) r |= (unsigned)(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return r;
}

inline Index threadIdx, blockIdx, gridDim;
// As much as any block may have.
alignas(128) inline char shared[228 << 10];

inline std::mt19937 noise(__CUDA_ARCH__);
inline float uniform() { return (float)((int)(noise() % 2001) - 1000) * 1e-3f; }

// Threads of a block.
struct Block {
    struct Fiber {
        ucontext_t context;
        bool done = false;
        // It goes on when this counts further.
        const uint64_t* counter = nullptr;
        uint64_t count = 0;
    };
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<int> order;
    ucontext_t scheduler;
    std::function<void()> body;
    int waiting = 0;
    uint64_t barriers = 0;
    static inline Block* current;
    // Used again by the next block.
    static constexpr size_t STACK = 64 << 10;
    static inline std::vector<std::unique_ptr<char[]>> stacks;

    static void start() {
        current->body();
        current->fibers[threadIdx.x]->done = true;
        swapcontext(&current->fibers[threadIdx.x]->context, &current->scheduler);
    }

    // Runs `body` as each of `threads` threads.
    Block(int threads, unsigned seed, std::function<void()> what) : body(std::move(what)) {
        current = this;
        for (int i = 0; i < threads; i++) {
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
        for (int left = threads; left > 0;) {
            bool any = false;
            // Half of the warps rest, so that some fall behind for longer than a turn.
            unsigned resting = random();
            for (int i : order) {
                Fiber& f = *fibers[i];
                if (f.done || (f.counter && *f.counter == f.count)) continue;
                any = true;
                if (resting >> i / 32 & 1) continue;
                threadIdx.x = i;
                swapcontext(&scheduler, &f.context);
                left -= f.done;
            }
            if (!any) printf("%d threads wait for each other\n", left), exit(1);
        }
    }

    // Lets other threads run until `counter` is no longer what it is.
    static void wait(const uint64_t& counter) {
        Fiber& f = *current->fibers[threadIdx.x];
        f.counter = &counter;
        f.count = counter;
        swapcontext(&f.context, &current->scheduler);
        f.counter = nullptr;
    }
};

inline void __syncthreads() {
    Block& b = *Block::current;
    if (++b.waiting == (int)b.fibers.size()) {
        b.waiting = 0;
        b.barriers++;
    } else {
        Block::wait(b.barriers);
    }
}

// Runs all blocks of a grid, in any order: the last to arrive is not always the last of the grid.
inline void launch(unsigned x, unsigned y, unsigned z, int threads, const std::function<void()>& kernel) {
    gridDim = {x, y, z};
    std::vector<unsigned> order(x * y * z);
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), noise);
    for (unsigned i : order) {
        blockIdx = {i % x, i / x % y, i / x / y};
        // NaN for whoever takes it for numbers.
        memset(shared, 0xff, sizeof shared);
        Block(threads, noise(), kernel);
    }
}
