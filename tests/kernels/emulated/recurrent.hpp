// Shared by the tests of recurrent layers: segments, memory of floats, and the blocks of an arena.
#pragma once
#include "cuda.hpp"

#include "common/ptx.cuh"
#include "recurrent/convolution.cuh"

static void expect(bool held, const char* what, int row, int i, double got, double want) {
    if (!held) printf("%s: (%d, %d) is %g, not %g\n", what, row, i, got, want), exit(1);
}

static void expect_same(const float* got, const float* want, int count, const char* what) {
    for (int i = 0; i < count; i++) expect(memcmp(got + i, want + i, 4) == 0, what, 0, i, got[i], want[i]);
}

static double silu64(double x) { return x / (1 + std::exp(-x)); }
static double softplus64(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// A segment has `rows` rows and blocks to read and to write.
struct Segment {
    int rows;
    u32 read, write;
};

// The segments of a batch as kernels take them.
struct Batch {
    std::vector<int> starts = {0};
    std::vector<u32> read, write;
    explicit Batch(const std::vector<Segment>& segments) {
        for (const Segment& g : segments) starts.push_back(starts.back() + g.rows), read.push_back(g.read), write.push_back(g.write);
    }
    int rows() const { return starts.back(); }
    Segments argument() const { return {starts.data(), read.data(), write.data(), (int)read.size()}; }
};

// Memory that begins at a multiple of 16 bytes.
struct Floats {
    std::vector<float4> pieces;
    explicit Floats(size_t count, float value = NAN) : pieces(count / 4 + 1, float4{value, value, value, value}) {}
    float* data() { return &pieces[0].x; }
    float& operator[](size_t i) { return data()[i]; }
    void fill(size_t count) {
        for (size_t i = 0; i < count; i++) data()[i] = uniform();
    }
};

// Blocks of an arena, in which a state of some floats stands after 16 others. Their memory begins as random numbers, and block 0 as NaN.
struct Blocks {
    int floats, count;
    Floats memory;
    Blocks(int state, int count) : floats(state + 32), count(count), memory(floats * count) {
        for (int i = floats; i < floats * count; i++) memory[i] = uniform();
    }
    float* at(u32 block) { return memory.data() + (size_t)block * floats + 16; }
    // The part of states from a float on.
    States states(int from) { return {(u8*)(at(0) + from), (u64)floats * 4}; }
};

// A channel's convolution in f64, with the inputs kept before, which become those after.
static double convolve64(const float* weights, int taps, double bias, float x, double* kept, int channels) {
    double sum = bias + (double)x * weights[taps - 1];
    for (int j = 0; j < taps - 1; j++) sum += kept[j * channels] * weights[j];
    for (int j = 0; j < taps - 2; j++) kept[j * channels] = kept[(j + 1) * channels];
    kept[(taps - 2) * channels] = x;
    return silu64(sum);
}
