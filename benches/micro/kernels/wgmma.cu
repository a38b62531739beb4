// wgmma m64nNk32 on e4m3 with A from registers: its issue rate, its latency, and the precision of its sums.
//
// A warpgroup holds A as the instruction wants it: warp w of the four has rows 16w to 16w + 15, lane l with g = l / 4 and
// t = l % 4 holds rows g and g + 8, four neighbours along K in a word: k = 4t in words 0 and 1, k = 16 + 4t in words 2 and 3.
// B lies in shared memory without swizzle: 8 columns by 16 k make 128 bytes; two of those along K, then the next columns.
#include "common/wgmma.cuh"

struct Arguments {
    const u32* a;       // [steps, 128, 4]: fragments
    const u8* b;        // [steps, N * 32]
    float* sums;        // [blocks, 128, 4]: start values, replaced by the results of `sums_8`
    u64* clocks;        // [blocks]
    int steps;          // instructions of a warpgroup
};

constexpr int LARGEST = 32;     // columns
constexpr int STEPS = 16;       // instructions in a row

__device__ __forceinline__ u64 clock_now() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}

template <int N>
struct Sums {
    float d[N / 2];
};

// Keeps uses of the sums from being moved before this place.
template <int N>
__device__ __forceinline__ void hold(Sums<N>& s) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) asm volatile("" : "+f"(s.d[i])::"memory");
}

template <int N>
__device__ __forceinline__ void add(Sums<N>& total, Sums<N>& s) {
    hold(s);
#pragma unroll
    for (int i = 0; i < N / 2; i++) total.d[i] += 0.75f * s.d[i];
}

template <bool ADD>
__device__ __forceinline__ void multiply(Sums<8>& s, const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, %9, 1, 1;"
                 : "+f"(s.d[0]), "+f"(s.d[1]), "+f"(s.d[2]), "+f"(s.d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD));
}
template <bool ADD>
__device__ __forceinline__ void multiply(Sums<16>& s, const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, %13, 1, 1;"
                 : "+f"(s.d[0]), "+f"(s.d[1]), "+f"(s.d[2]), "+f"(s.d[3]), "+f"(s.d[4]), "+f"(s.d[5]), "+f"(s.d[6]), "+f"(s.d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD));
}
template <bool ADD>
__device__ __forceinline__ void multiply(Sums<32>& s, const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, %21, 1, 1;"
                 : "+f"(s.d[0]), "+f"(s.d[1]), "+f"(s.d[2]), "+f"(s.d[3]), "+f"(s.d[4]), "+f"(s.d[5]), "+f"(s.d[6]), "+f"(s.d[7]), "+f"(s.d[8]),
                   "+f"(s.d[9]), "+f"(s.d[10]), "+f"(s.d[11]), "+f"(s.d[12]), "+f"(s.d[13]), "+f"(s.d[14]), "+f"(s.d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)ADD));
}

enum Kind {
    LATENCY,    // each waits for the one before
    CHAINED,    // all onto the same sums, none waited for
    SEPARATE,   // each starts from zero and is added to sums of the thread; four are under way
    FED,        // the same with A made anew for each, and two under way
};

__device__ __forceinline__ void load(u32 (&a)[4], const u32* from) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = from[threadIdx.x % WARPGROUP * 4 + i];
}

template <int N, Kind KIND>
__device__ __forceinline__ void time(const Arguments& p) {
    __shared__ __align__(128) u8 b[LARGEST * 32];
    for (int i = threadIdx.x; i < N * 32; i += blockDim.x) b[i] = p.b[i];
    publish_shared();
    __syncthreads();
    u64 where = wgmma_descriptor<128, 256>(shared_address(b));
    u32 a[2][4];
    load(a[0], p.a);
    load(a[1], p.a + WARPGROUP * 4);
    u32 first[4];
    load(first, p.a);
    Sums<N> s[4] = {}, total = {};
    __syncthreads();
    u64 start = clock_now();
    for (int i = 0; i < p.steps; i += STEPS) {
        constexpr int DEPTH = KIND == SEPARATE ? 4 : 2;
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            if (KIND == LATENCY) {
                wgmma_fence();
                multiply<true>(s[0], a[0], where);
                wgmma_commit();
                wgmma_wait<0>();
            } else if (KIND == CHAINED) {
                multiply<true>(s[0], a[j % 2], where);
                wgmma_commit();
            } else {
                if (KIND == FED) {
#pragma unroll
                    for (int k = 0; k < 4; k++) a[j % 2][k] = first[k] ^ (u32)(i + j);
                }
                wgmma_fence();
                multiply<false>(s[j % DEPTH], a[j % 2], where);
                wgmma_commit();
                if (j >= DEPTH - 1) {
                    wgmma_wait<DEPTH - 1>();
                    add(total, s[(j + 1) % DEPTH]);
                }
            }
        }
        // The assembler gives up on a pipeline across loop iterations, so it drains here.
        if (KIND == SEPARATE || KIND == FED) {
            wgmma_wait<0>();
#pragma unroll
            for (int j = 1; j < DEPTH; j++) add(total, s[j]);
        }
    }
    wgmma_wait<0>();
    __syncthreads();
    u64 end = clock_now();
    float keep = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) keep += s[0].d[i] + s[1].d[i] + s[2].d[i] + s[3].d[i] + total.d[i];
    // Never true; makes the compiler keep the sums.
    if (keep == -1.5f) p.sums[threadIdx.x] = keep;
    if (threadIdx.x == 0) p.clocks[blockIdx.x] = end - start;
}

#define TIME(NAME, N, KIND)                                                                          \
    extern "C" __global__ void __launch_bounds__(512) NAME##_##N(const __grid_constant__ Arguments p) { \
        time<N, KIND>(p);                                                                            \
    }
#define ALL(N) TIME(latency, N, LATENCY) TIME(chained, N, CHAINED) TIME(separate, N, SEPARATE) TIME(fed, N, FED)
ALL(8) ALL(16) ALL(32)

// Each block, of one warpgroup, adds `steps` products to its sums, with A and B of its own.
extern "C" __global__ void __launch_bounds__(WARPGROUP) sums_8(const __grid_constant__ Arguments p) {
    __shared__ __align__(128) u8 b[8 * 32];
    Sums<8> s;
    float* sums = p.sums + ((size_t)blockIdx.x * WARPGROUP + threadIdx.x) * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) s.d[i] = sums[i];
    for (int step = blockIdx.x * p.steps; step < (blockIdx.x + 1) * p.steps; step++) {
        for (int i = threadIdx.x; i < 8 * 32; i += WARPGROUP) b[i] = p.b[step * 8 * 32 + i];
        publish_shared();
        __syncthreads();
        u32 a[4];
        load(a, p.a + step * WARPGROUP * 4);
        wgmma_fence();
        multiply<true>(s, a, wgmma_descriptor<128, 256>(shared_address(b)));
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = s.d[i];
}
