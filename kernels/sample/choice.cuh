// What the host is told of a choice.
#pragma once
#include "common/types.cuh"

// The token; or a number below zero where there is none to choose: -1 if every logit is minus infinity, and -2 less the token of the
// first logit that is plus infinity or no number, which the largest logit then stands for as INFINITY.
__device__ __forceinline__ int said_of(float largest, int token) {
    if (largest == INFINITY) return -2 - token;
    return largest == -INFINITY ? -1 : token;
}
