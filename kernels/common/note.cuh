// Reports invalid input from a kernel to the host: see src/cuda/checks.rs.
#pragma once
#include "common/types.cuh"

struct Note {
    u64* first;     // all ones at first, then the least `index << 8 | what` that was found; null if nothing is to be reported
    u32* found;     // in host memory: set to 1 by the first thread that finds something
};

constexpr u64 NOTHING_NOTED = ~(u64)0;

__device__ __forceinline__ void take_note(const Note& note, u64 index, u32 what) {
    if (atomicMin(note.first, index << 8 | what) == NOTHING_NOTED) *(volatile u32*)note.found = 1;
}
