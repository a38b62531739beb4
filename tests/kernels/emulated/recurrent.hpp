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

// Segments that start from their own block, from another and from zeros, with more rows than are loaded together.
static const std::vector<Segment> RAGGED = {{1, 1, 1}, {2, 2, 3}, {3, 0, 4}, {70, 5, 5}, {1, 0, 6}, {2, 2, 9}, {3, 7, 8}};
// Segments that continue the one before them, from a block, from zeros and in place.
static const std::vector<Segment> CHAINED = {{3, 1, 2}, {1, 2, 3}, {1, 3, 4}, {2, 4, 5}, {9, 5, 6}, {1, 7, 8}, {1, 8, 9}, {3, 0, 10}, {30, 10, 11}, {5, 12, 12}, {1, 12, 13}};

// More segments than a warp has lanes.
static std::vector<Segment> many_segments() {
    std::vector<Segment> many;
    for (u32 i = 0; i < 40; i++) many.push_back({1 + (int)i % 3, i % 2 * (2 * i + 1), 2 * i + 2});
    return many;
}

// A batch of segments. Blocks that none of them writes stay as they are. The error of S is absolute, and also relative to S by `relative`.
template <class Layer, class Result, class Shape>
static void check_batch(Shape s, const std::vector<Segment>& segments, double relative) {
    u32 last = 0;
    for (const Segment& g : segments) last = max(last, max(g.read, g.write));
    int rows = Batch(segments).rows();
    Layer l(s, rows);
    Blocks blocks(s.floats(), (int)last + 2);
    Floats before = blocks.memory;
    Result r(s, rows);
    run(l, segments, 0, blocks, r);
    int first = 0;
    for (const Segment& g : segments) {
        std::vector<double> state(s.floats());
        float* start = before.data() + (size_t)g.read * blocks.floats + 16;
        if (g.read != 0) state.assign(start, start + s.floats());
        check_segment(l, first, g.rows, state, r);
        first += g.rows;
        float *got = blocks.at(g.write), *old = before.data() + (size_t)g.write * blocks.floats + 16;
        for (int i = 0; i < s.matrices(); i++) {
            expect(std::fabs(got[i] - state[i]) <= 4e-6 * (1 + relative * std::fabs(state[i])), "S", g.write, i, got[i], state[i]);
        }
        for (int i = s.matrices(); i < s.floats(); i++) expect(got[i] == (float)state[i], "a kept input", g.write, i - s.matrices(), got[i], state[i]);
        memcpy(old, got, s.floats() * 4);
    }
    expect_same(blocks.memory.data(), before.data(), blocks.floats * blocks.count, "memory outside of written states");
    check_norm(l, r);
    if (rows > 0) check_overflow(l, r);
}

// One segment at once, and in parts with the state in other blocks or the same between them.
template <class Layer, class Result, class Shape>
static void check_division(Shape s, int rows, const std::vector<int>& parts) {
    Layer l(s, rows);
    Blocks blocks(s.floats(), 5);
    Result whole(s, rows), divided(s, rows);
    run(l, {{rows, 1, 2}}, 0, blocks, whole);
    u32 from = 1, to = 3;
    int first = 0;
    for (int count : parts) {
        run(l, {{count, from, to}}, first, blocks, divided);
        first += count;
        from = to, to = first % 2 ? to : 7 - to;
    }
    expect_same(divided.answers().data(), whole.answers().data(), rows * s.width(), "results in parts");
    expect_same(blocks.at(from), blocks.at(2), s.floats(), "a state in parts");
}
