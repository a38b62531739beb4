// E2M1 codes with a residual in local steps. Mirrors src/format/residual.rs bit for bit.
//
// A point of the grid is an index, counted in steps from zero: a level, -7 to 7, times the steps of a gap, plus the residual. Gaps are 0.5
// wide up to level 4, then 1 up to level 6, then 2, so that the value of an index is the largest of three lines, and the index of a value
// the smallest of their inverses.
#pragma once
#include "common/types.cuh"

template <int BITS>
struct Residual {
    static constexpr int STEPS = 1 << BITS;
    static constexpr int LAST = 7 * STEPS + STEPS / 2 - 1;

    // The index of a code and its residual.
    static __device__ __forceinline__ int index(u32 code, int residual) {
        int level = code & 7;
        return (code & 8 ? -level : level) * STEPS + residual;
    }
    static __device__ __forceinline__ float value(int index) {
        float x = abs(index), half = x * (0.5f / STEPS);
        float v = fmaxf(fmaxf(half, x * (1.0f / STEPS) - 2.0f), x * (2.0f / STEPS) - 8.0f);
        return index < 0 ? -v : v;
    }
    // The index of a value, rounded stochastically by a threshold in (0, 1).
    static __device__ __forceinline__ int encode(float value, float threshold) {
        float x = fabsf(value);
        float exact = fminf(fminf(2.0f * x, x + 2.0f), fminf(0.5f * x + 4.0f, 8.0f)) * STEPS;
        int low = (int)exact;
        int at = low + (threshold < exact - (float)low);
        at = value < 0 ? -at : at;
        return min(max(at, -LAST - 1), LAST);
    }
    // The code of an index; the residual is what it leaves.
    static __device__ __forceinline__ u32 code(int index, int& residual) {
        int level = (index + STEPS / 2) >> BITS;
        residual = index - level * STEPS;
        return level < 0 ? 8 - level : level;
    }
};
