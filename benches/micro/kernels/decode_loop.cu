// Decodes NVFP4 weights in shared memory and multiplies them with wgmma, over and over: the rate of a multiprocessor that memory does not
// limit.
//
// A tile has 64 rows by 32 k. A lane reads eight bytes of codes, in the order of the fragment, and four scales: of rows g and g + 8, for
// both blocks of k. Columns of B are terms of activations for one of the two blocks, so each block has its own sums, which are multiplied
// by its scale in f32. Codes become e4m3 directly, 2^-6 too small; scales become f32, 2^-120 too small.
#include "common/wgmma.cuh"

struct Arguments {
    const u8* b;        // [TILES, 256]
    float* keep;
    u64* clocks;        // [blocks]
    int rounds;
};

constexpr int TILES = 8;    // that a warpgroup goes through before its pipeline runs empty

__device__ __forceinline__ u64 clock_now() {
    u64 t;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(t)::"memory");
    return t;
}
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 0, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Eight codes, four to a word: those in the low halves of bytes, and those in the high halves.
__device__ __forceinline__ void decode(u32 codes, u32& low, u32& high) {
    low = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1c1c1c1cu);
    high = (codes & 0x80808080u) | (codes >> 2 & 0x1c1c1c1cu);
}
// Scale i of four.
__device__ __forceinline__ float scale(u32 four, int i) {
    u32 bits = i < 3 ? four << (20 - 8 * i) : four >> 4;
    return __uint_as_float(bits & 0x07f00000u);
}

extern "C" __global__ void __launch_bounds__(512) decode_loop(const __grid_constant__ Arguments p) {
    extern __shared__ __align__(128) u8 memory[];
    // [warpgroups][TILES]: codes of a tile and its scales; then B.
    u32 groups = blockDim.x / WARPGROUP, group = threadIdx.x / WARPGROUP, lane = threadIdx.x % WARPGROUP;
    uint2* codes = (uint2*)memory + group * TILES * WARPGROUP;
    u32* scales = (u32*)(memory + groups * TILES * WARPGROUP * 8) + group * TILES * WARPGROUP;
    u8* b = memory + groups * TILES * WARPGROUP * 12;
    for (int tile = 0; tile < TILES; tile++) {
        u32 noise = (tile * WARPGROUP + lane) * 0x9e3779b1u;
        codes[tile * WARPGROUP + lane] = make_uint2(noise ^ noise >> 15, noise * 0x85ebca77u);
        scales[tile * WARPGROUP + lane] = 0x30383438u;
    }
    for (int i = threadIdx.x; i < TILES * 256; i += blockDim.x) b[i] = p.b[i];
    publish_shared();
    __syncthreads();
    float sum[4] = {}, d[2][4] = {};
    u32 a[2][4];
    u64 start = clock_now();
    for (int round = 0; round < p.rounds; round++) {
        u32 own[2];
        wgmma_fence();
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            // Read again each time, as from a ring.
            u64 c = *(volatile u64*)(codes + tile * WARPGROUP + lane);
            own[tile % 2] = *(volatile u32*)(scales + tile * WARPGROUP + lane);
            decode((u32)c, a[tile % 2][0], a[tile % 2][1]);
            decode((u32)(c >> 32), a[tile % 2][2], a[tile % 2][3]);
            wgmma_fence();
            multiply(d[tile % 2], a[tile % 2], wgmma_descriptor<128, 256>(shared_address(b + tile * 256)));
            wgmma_commit();
            if (tile > 0) {
                wgmma_wait<1>();
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    asm volatile("" : "+f"(d[(tile + 1) % 2][i])::"memory");
                    sum[i] += scale(own[(tile + 1) % 2], i) * d[(tile + 1) % 2][i];
                }
            }
        }
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm volatile("" : "+f"(d[(TILES + 1) % 2][i])::"memory");
            sum[i] += scale(own[(TILES + 1) % 2], i) * d[(TILES + 1) % 2][i];
        }
    }
    __syncthreads();
    u64 end = clock_now();
    if (sum[0] + sum[1] + sum[2] + sum[3] == -1.5f) p.keep[threadIdx.x] = sum[0];
    if (threadIdx.x == 0) p.clocks[blockIdx.x] = end - start;
}
