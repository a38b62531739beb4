// The adapter of the projection that takes the output of attention, in a pass of one row: a warp multiplies a head's output by its columns of
// the A factor, which is a part of A x for each head (adapter/factors.cuh).
#pragma once
#include "adapter/factors.cuh"

// For heads of up to 128 elements, of which a lane has four neighbours.
template <int D>
class HeadAdapter {
    static_assert(D % 4 == 0 && D <= 4 * WARP, "four elements for a lane");
    const LowOutput& low;
    Factors f{};
    int head = -1;
    uint4 loaded[RANK_STEP];    // of the first ranks of the lane's elements

    __device__ __forceinline__ bool has_elements() const { return lane_id() * 4 < D; }
    __device__ __forceinline__ uint4 load(int rank) const {
        size_t k = (size_t)low.parts * D;
        return has_elements() && f.rank > 0 ? load_four(f.a, f.a_type, rank * k + head * D + lane_id() * 4) : make_uint4(0, 0, 0, 0);
    }

public:
    __device__ __forceinline__ explicit HeadAdapter(const LowOutput& low) : low(low) {}
    // Fetches the columns of `heads` heads to L2.
    static __device__ __forceinline__ void fetch(const LowOutput& low, int head, int heads, int threads) {
        const Factors* all = *low.adapter;
        if (!all) return;
        const Factors& f = all[low.first];
        int lines = ceil_div(heads * D * bytes_of(f.a_type), 128);
        for (int i = threadIdx.x; i < f.rank * lines; i += threads) {
            size_t at = ((size_t)(i / lines) * low.parts + head) * D * bytes_of(f.a_type);
            prefetch((const u8*)f.a + at + i % lines * 128);
        }
    }
    // Loads the columns of a head, unless that is done.
    __device__ __forceinline__ void load_head(int of) {
        if (of == head) return;
        head = of;
        if (const Factors* all = *low.adapter) f = all[low.first];
#pragma unroll
        for (int r = 0; r < RANK_STEP; r++) loaded[r] = load(r);
    }
    // Stores the part of A x of the head that was loaded. `y` is its output, f32 [D], which the whole warp has written.
    __device__ __forceinline__ void store(const float* y) const {
        __syncwarp();
        float2 first = make_float2(0, 0), second = first;
        if (has_elements()) first = *(const float2*)(y + lane_id() * 4), second = *(const float2*)(y + lane_id() * 4 + 2);
        float4 x = make_float4(first.x, first.y, second.x, second.y);
        float products[RANK_STEP];
#pragma unroll
        for (int r = 0; r < RANK_STEP; r++) products[r] = dot_four(loaded[r], f.a_type, x);
#pragma unroll 1
        for (int rank = 0; rank < f.rank; rank += RANK_STEP) {
#pragma unroll
            for (int r = 0; r < RANK_STEP; r++) {
                if (rank > 0) products[r] = dot_four(load(rank + r), f.a_type, x);
            }
            float sum = sums_over_lanes(products);
            if (lane_id() % 2 == 0) low.values[(head << low.shift) + rank + lane_id() / 2] = sum;
        }
    }
};
