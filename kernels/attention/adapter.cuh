// The adapter of the projection that takes the output of attention, in a pass of one row: a warp multiplies a head's output by its columns of
// the A factor, which is a part of A x for each head (adapter/factors.cuh).
#pragma once
#include "adapter/factors.cuh"

// For heads of up to 128 elements, of which a lane has four neighbours.
template <int D>
class HeadAdapter {
    static_assert(D % 4 == 0 && D <= 4 * WARP, "four elements for a lane");
    static constexpr int AT_ONCE = 4;   // ranks beyond those of `loaded`
    const LowOutput& low;
    Factors f{};
    uint2 loaded[RANK_STEP];    // of a head, for factors in 16 bits: numbers of the first ranks for the lane's elements

    __device__ __forceinline__ bool has_elements() const { return lane_id() * 4 < D; }
    __device__ __forceinline__ size_t place(int head, int rank) const { return ((size_t)rank * low.parts + head) * D + lane_id() * 4; }
    __device__ __forceinline__ float product(int head, int rank, float4 x) const {
        return has_elements() ? dot_four(load_four(f.a, f.a_type, place(head, rank)), f.a_type, x) : 0;
    }

public:
    // Before the wait for the predecessor: fetches the columns of `heads` heads to L2.
    __device__ __forceinline__ HeadAdapter(const LowOutput& low, int head, int heads, int threads) : low(low) {
        const Factors* all = *low.adapter;
        if (!all) return;
        const Factors& f = all[low.first];
        int lines = ceil_div(heads * D * bytes_of(f.a_type), 128);
        for (int i = threadIdx.x; i < f.rank * lines; i += threads) {
            size_t at = ((size_t)(i / lines) * low.parts + head) * D * bytes_of(f.a_type);
            prefetch((const u8*)f.a + at + i % lines * 128);
        }
    }
    // Requests the columns of a head.
    __device__ __forceinline__ void load(int head) {
        if (const Factors* all = *low.adapter) f = all[low.first];
#pragma unroll
        for (int r = 0; r < RANK_STEP; r++) {
            bool loads = f.rank > 0 && f.a_type != F32 && has_elements();
            loaded[r] = loads ? *(const uint2*)((const u16*)f.a + place(head, r)) : make_uint2(0, 0);
        }
    }
    // Stores the part of A x of the head that was loaded. `y` is its output, f32 [D], which the whole warp has written.
    __device__ __forceinline__ void store(int head, const float* y) const {
        __syncwarp();
        float2 first = make_float2(0, 0), second = first;
        if (has_elements()) first = *(const float2*)(y + lane_id() * 4), second = *(const float2*)(y + lane_id() * 4 + 2);
        float4 x = make_float4(first.x, first.y, second.x, second.y);
        float* to = low.values + (head << low.shift);
        int rank = 0;
        if (f.rank > 0 && f.a_type != F32) {
            float products[RANK_STEP];
#pragma unroll
            for (int r = 0; r < RANK_STEP; r++) products[r] = dot_four(make_uint4(loaded[r].x, loaded[r].y, 0, 0), f.a_type, x);
            float sum = sums_over_lanes(products);
            if (lane_id() % 2 == 0) to[lane_id() / 2] = sum;
            rank = RANK_STEP;
        }
        // The others with fewer registers.
#pragma unroll 1
        for (; rank < f.rank; rank += AT_ONCE) {
            float sums[AT_ONCE];
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) sums[r] = product(head, rank + r, x);
#pragma unroll
            for (int r = 0; r < AT_ONCE; r++) {
                sums[r] = warp_sum(sums[r]);
                if (lane_id() == r) to[rank + r] = sums[r];
            }
        }
    }
};

// Without an adapter.
struct NoAdapter {
    __device__ __forceinline__ NoAdapter(const LowOutput&, int, int, int) {}
};
template <int D, bool ADAPTED>
struct AdapterChoice {
    using Type = HeadAdapter<D>;
};
template <int D>
struct AdapterChoice<D, false> {
    using Type = NoAdapter;
};
template <int D, bool ADAPTED>
using AdapterOf = typename AdapterChoice<D, ADAPTED>::Type;
