// The arguments of the gated delta rule.
#pragma once
#include "recurrent/layer.cuh"

struct RuleArguments {
    const float* qkv;       // [rows, channels]
    const float* decay;     // [rows, value_heads]
    const float* beta;      // [rows, value_heads]
    float* o;               // [rows, value_heads, value_dim]
    Segments segments;
    States states;          // S
    int key_heads;
    int value_heads;
    int key_dim;
    int value_dim;
};
