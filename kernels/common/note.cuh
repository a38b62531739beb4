// How a kernel tells the host of what its call must not have been given: see src/cuda/checks.rs.
#pragma once
#include "common/types.cuh"

struct Note {
    u64* first;     // all ones at first, then the least `index << 8 | what` that was found; NULL where nobody wants to know
    u32* found;     // in memory of the host: set to 1 by the first that finds something
};

constexpr u64 NOTHING_NOTED = ~(u64)0;

__device__ __forceinline__ void take_note(const Note& note, u64 index, u32 what) {
    if (atomicMin(note.first, index << 8 | what) == NOTHING_NOTED) *(volatile u32*)note.found = 1;
}
