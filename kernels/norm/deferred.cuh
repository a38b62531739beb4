// RMSNorm without a kernel of its own, between a product that makes x and products that take its norm. The factor of a row,
// 1 / sqrt(mean(x^2) + eps), may as well be applied to what is made of the row, and is then needed only at the end. So the kernel that
// makes x, each of whose blocks knows a part of it, leaves x * weight as f16 and sums of squares, and the kernels that take it
// add those up.
//
// So that f16 has room, x is multiplied by the factor of the row's last norm, as if it had not changed. Where it has changed so much
// that the room does not suffice, the kernels that take the row normalise it anew.
#pragma once
#include "common/reduce.cuh"
#include "norm/fours.cuh"

struct DeferredNorm {
    const float* weight;    // [width]
    float* squares;         // [rows][tiles]: sums over the tiles of x, infinite where something does not fit f16; or null: no norm
    const float* before;    // [rows]: factors of the last norm
    int tiles;              // a multiple of 4
    // For the kernel that makes x:
    u16* rows;              // f16 x * weight * before
    // For those that take it:
    float* factors;         // [rows]: of this norm, left for the next one
    const float* x;         // f32 [rows, width]
    float eps;
};

constexpr float F16_MOST = 65504.0f;
// Whether f16 has kept a row, by what is missing of its factor: not if it has shrunk so much that bits of f16 are lost, and not if
// it has infinite squares.
__device__ __forceinline__ bool is_kept(float missing) { return missing > 0 && missing <= 16; }

// A lane's share of the squares of a row, of which it asks for the first BATCH times 4 some time before it needs them.
template <int BATCH>
class SquaresOfRow {
    static constexpr int AT_ONCE = BATCH * WARP * 4;
    const float* squares;   // of a lane
    int left;
    float4 some[BATCH];

public:
    float before;

    __device__ __forceinline__ SquaresOfRow(const DeferredNorm& norm, int row)
        : squares(norm.squares + row * norm.tiles + lane_id() * 4), left(norm.tiles - lane_id() * 4) {
        load();
        before = norm.before[row];
    }
    __device__ __forceinline__ float sum() {
        float sum = 0;
#pragma unroll 1
        for (;;) {
#pragma unroll
            for (int j = 0; j < BATCH; j++) sum += (some[j].x + some[j].y) + (some[j].z + some[j].w);
            squares += AT_ONCE;
            left -= AT_ONCE;
            if (left <= 0) return sum;
            load();
        }
    }

private:
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            some[j] = j * WARP * 4 < left ? as_floats(load_global_16(squares + j * WARP * 4)) : make_float4(0, 0, 0, 0);
        }
    }
};
