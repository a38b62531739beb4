// RMSNorm fused into the GEMMs around it. The factor of a row, 1 / sqrt(mean(x^2) + eps), may be applied after the next product instead of
// before, and is then needed only at its end. So the GEMM that makes x, each of whose blocks knows a part of a row, stores x * weight as
// f16 and sums of squares, and the GEMMs after the norm add those up.
//
// To stay within f16, x is also multiplied by the row's factor in the previous norm, as an estimate. If the factor has changed too much for
// that, the GEMMs after the norm normalize the row from x itself.
#pragma once
#include "common/reduce.cuh"
#include "norm/piece.cuh"

struct FusedNorm {
    const float* weight;            // [width]
    float* squares;                 // [rows][tiles]: sums over the tiles of x, infinite where f16 overflows; null: no fused norm
    const float* previous_factors;  // [rows]: of the norm before this one
    int tiles;                      // a multiple of 4
    // For the GEMM that makes x:
    u16* rows;                      // f16: x * weight * previous factor
    // For the GEMMs after the norm:
    float* factors;                 // [rows]: of this norm, written for the next one
    const float* x;                 // f32 [rows, width]
    float eps;
};

constexpr float F16_MAX = 65504.0f;
// Whether f16 has represented a row well enough, by its factor divided by the previous one: not if the row has shrunk so much that f16
// loses bits, nor if a sum of squares is infinite.
__device__ __forceinline__ bool is_kept(float ratio) { return ratio > 0 && ratio <= 16; }

// A lane's share of the sums of squares of a row. The first 4 BATCH of them are requested some time before they are needed.
template <int BATCH>
class SquaresOfRow {
    static constexpr int AT_ONCE = BATCH * WARP * 4;
    const float* squares;   // of a lane
    int left;
    float4 batch[BATCH];

public:
    float previous_factor;

    __device__ __forceinline__ SquaresOfRow(const FusedNorm& norm, int row)
        : squares(norm.squares + row * norm.tiles + lane_id() * 4), left(norm.tiles - lane_id() * 4) {
        load();
        previous_factor = norm.previous_factors[row];
    }
    __device__ __forceinline__ float sum() {
        float sum = 0;
#pragma unroll 1
        for (;;) {
#pragma unroll
            for (int j = 0; j < BATCH; j++) sum += (batch[j].x + batch[j].y) + (batch[j].z + batch[j].w);
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
            batch[j] = j * WARP * 4 < left ? as_floats(load_global_16(squares + j * WARP * 4)) : make_float4(0, 0, 0, 0);
        }
    }
};
