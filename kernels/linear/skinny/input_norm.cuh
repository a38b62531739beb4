// A fused norm of the activations (norm/fused_norm.cuh): the factor of each row, which the epilogue applies.
#pragma once
#include "linear/skinny/activations.cuh"

template <class C>
class InputNorm {
    const Arguments& a;
    const SharedMemory<C>& memory;
    bool stores_factors;    // for the next norm: one block of the grid does

public:
    bool fused;

    __device__ __forceinline__ InputNorm(const Arguments& a, const SharedMemory<C>& memory, bool first_block)
        : a(a), memory(memory), stores_factors(first_block), fused(C::MAY_FUSE_NORM && a.norm.squares) {}

    // Loads the activations and meanwhile computes the rows' factors, one warp per row from the last warp on, because the last warps have
    // fewer activations to load.
    __device__ __forceinline__ void load(ActivationLoad<C>& activations, int warp) const {
        int row = WARPS - 1 - warp;
        if (!fused || row >= a.m) return activations.load(a);
        SquaresOfRow<C::MAX_ROWS == 1 ? 3 : 2> squares(a.norm, row);
        activations.load(a);
        float factor = rsqrtf(fmaf(warp_sum(squares.sum()), reciprocal_approx((float)a.k), a.norm.eps));
        if (lane_id() == 0) {
            memory.row_factors[row] = factor * reciprocal_approx(squares.previous_factor);
            if (stores_factors) a.norm.factors[row] = factor;
        }
    }
    // After a barrier of the block: normalizes rows that f16 has not represented well enough, from the residual stream itself.
    __device__ __forceinline__ void mend(ActivationLoad<C>& activations) const {
        if (!fused) return;
        float factor = lane_id() < a.m ? memory.row_factors[lane_id()] : 1;
        if (!__any_sync(ALL_LANES, !is_kept(factor))) return;
        for (int chunk = 0; chunk < memory.chunks; chunk++) activations.wait(chunk);
        normalize_rows();
    }
    // The factor by which the epilogue multiplies the outputs of a row.
    __device__ __forceinline__ float factor(int row) const { return fused ? memory.row_factors[row] : 1; }

private:
    __device__ __forceinline__ void normalize_rows() const {
        int first_piece = memory.first_k / 8, pieces = ceil_div(a.k, 2 * BLOCK) * 4;
        float own = -1;  // the factor of the row with this thread's number
#pragma unroll 1
        for (int m = 0; m < a.m; m++) {
            if (is_kept(memory.row_factors[m])) continue;
            const float* x = a.norm.x + m * a.k;
            float sum = 0;
#pragma unroll 1
            for (int i = lane_id(); i < pieces; i += WARP) sum += Piece(x, i, a.k).squares();
            float factor = rsqrtf(fmaf(warp_sum(sum), reciprocal_approx((float)a.k), a.norm.eps));
            if ((int)threadIdx.x == m) own = factor;
#pragma unroll 1
            for (int i = threadIdx.x; i < memory.pieces(); i += THREADS) {
                Piece v(x, first_piece + i, a.k), w(a.norm.weight, first_piece + i, a.k);
                if (C::TAKES_FRAGMENTS) {
                    store_fragments((u16*)memory.activations, C::MAX_ROWS / GROUP_ROWS, m, first_element(i), apply_norm(v.first, factor, w.first),
                                    apply_norm(v.second, factor, w.second));
                } else {
                    store_shared_16(memory.activations_at + (m * memory.pieces() + (i ^ m % 2 * 4)) * 16, v.normalized_f16(factor, w));
                }
            }
        }
        __syncthreads();
        if (!(own < 0)) {
            memory.row_factors[threadIdx.x] = 1;
            if (stores_factors) a.norm.factors[threadIdx.x] = own;
        }
        __syncthreads();
    }
};
