// kernels/delta/*.cu on the CPU, as they ship, against the formulas of gated-delta-net layers in f64, for batches of several segments; parts
// of a segment, with the state between them, against the whole; and single rows in one launch against several. Prints "ok" or the first
// error.
#include "recurrent.hpp"

#include "common/cluster.cuh"
#include "common/reduce.cuh"
#include "delta/columns.cuh"
#include "delta/rule.cuh"
#include "norm/piece.cuh"
#include "recurrent/output.cuh"

namespace conv {
#include "delta/conv.cu"
}
// The shared memory that kernels declare is the one array of cuda.hpp.
namespace rule {
extern char shared[] asm("shared");
#include "delta/rule.cu"
#undef KERNEL
}
namespace single {
extern char shared[] asm("shared");
#include "delta/single.cu"
}
namespace norm {
#include "delta/norm.cu"
}
namespace step {
extern char shared[] asm("shared");
#include "delta/step.cu"
#undef KERNEL
}

constexpr float EPS = 1e-6f;

struct Shape {
    int key_heads, value_heads, key_dim, value_dim, taps;
    int keys() const { return key_heads * key_dim; }
    int values() const { return value_heads * value_dim; }
    int width() const { return values(); }
    int channels() const { return 2 * keys() + values(); }
    int matrices() const { return value_heads * key_dim * value_dim; }
    int floats() const { return matrices() + (taps - 1) * channels(); }
};

// A layer with the inputs of some rows. Rows of inputs have four more floats between them.
struct Layer {
    Shape s;
    int rows;
    Floats conv, a_log, dt_bias, weight, x, z, a, b;

    Layer(Shape s, int rows)
        : s(s), rows(rows), conv(s.channels() * s.taps), a_log(s.value_heads), dt_bias(s.value_heads), weight(s.value_dim), x(rows * (s.channels() + 4)),
          z(rows * (s.values() + 4)), a(rows * (s.value_heads + 1)), b(rows * s.value_heads) {
        conv.fill(s.channels() * s.taps), a_log.fill(s.value_heads), dt_bias.fill(s.value_heads), weight.fill(s.value_dim);
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < s.channels(); i++) x[r * (s.channels() + 4) + i] = uniform();
            for (int i = 0; i < s.values(); i++) z[r * (s.values() + 4) + i] = 3 * uniform();
            // Some are beyond 20, where softplus is the identity.
            for (int i = 0; i < s.value_heads; i++) a[r * (s.value_heads + 1) + i] = noise() % 8 ? 3 * uniform() - 2 : 21 + uniform();
            for (int i = 0; i < s.value_heads; i++) b[r * s.value_heads + i] = 3 * uniform();
        }
    }
};

struct Result {
    Floats qkv, decay, beta, o;
    Result(Shape s, int rows) : qkv(rows * s.channels()), decay(rows * s.value_heads), beta(rows * s.value_heads), o(rows * s.values()) {}
    Floats& answers() { return o; }
};

// Whether segments have a row each, which the kernel for those takes.
static bool of_single_rows = false;

// Runs the kernels for rows of a layer from `first` on.
static void run(Layer& l, const std::vector<Segment>& segments, int first, Blocks& blocks, Result& r) {
    Shape s = l.s;
    Batch batch(segments);
    int n = (int)segments.size(), rows = batch.rows();
    Segments all = batch.argument();
    u64 x_stride = s.channels() + 4, a_stride = s.value_heads + 1, b_stride = s.value_heads;
    float *qkv = &r.qkv[first * s.channels()], *decay = &r.decay[first * s.value_heads], *beta = &r.beta[first * s.value_heads];
    Convolution convolution = {&l.x[first * x_stride], x_stride, l.conv.data(), nullptr, qkv, all, blocks.states(s.matrices()), s.taps, s.channels()};
    conv::Arguments c = {convolution, &l.a[first * a_stride], &l.b[first * b_stride], a_stride, b_stride, l.a_log.data(), l.dt_bias.data(),
                         decay, beta, s.key_heads, s.key_dim, s.value_heads};
    bool wide = s.key_dim > 128;
    int units = 2 * s.key_heads + ceil_div(s.values(), wide ? 256 : 128) + ceil_div(s.value_heads, WARP);
    launch(ceil_div(units, conv::WARPS), rows / TILE_ROWS + n, 1, conv::THREADS, [&] { wide ? conv::delta_conv_wide(c) : conv::delta_conv(c); });
    RuleArguments u = {qkv, decay, beta, &r.o[first * s.values()], all, blocks.states(0), s.key_heads, s.value_heads, s.key_dim, s.value_dim};
    if (of_single_rows) return launch(s.value_dim / single::COLUMNS, s.value_heads, n, single::THREADS, [&] { single::delta_single_128(u); });
    launch(ceil_div(s.value_dim, rule::COLUMNS), s.value_heads, n, rule::THREADS, [&] {
        s.key_dim <= 64 ? rule::delta_rule_64(u) : s.key_dim <= 128 ? rule::delta_rule_128(u) : rule::delta_rule_256(u);
    });
}

// A segment in f64. `state` is that before its first row, and becomes that after its last.
static void check_segment(Layer& l, int first, int rows, std::vector<double>& state, Result& r) {
    Shape s = l.s;
    int channels = s.channels(), group = s.value_heads / s.key_heads;
    for (int row = first; row < first + rows; row++) {
        double* kept = &state[s.matrices()];
        std::vector<double> c(channels);
        for (int i = 0; i < channels; i++) c[i] = convolve64(&l.conv[i * s.taps], s.taps, 0, l.x[row * (channels + 4) + i], kept + i, channels);
        for (int h = 0; h < 2 * s.key_heads; h++) {
            double squares = 0;
            for (int i = 0; i < s.key_dim; i++) squares += c[h * s.key_dim + i] * c[h * s.key_dim + i];
            double factor = 1 / std::sqrt(squares + 1e-6) / (h < s.key_heads ? std::sqrt((double)s.key_dim) : 1);
            for (int i = 0; i < s.key_dim; i++) c[h * s.key_dim + i] *= factor;
        }
        for (int i = 0; i < channels; i++) expect(std::fabs(r.qkv[row * channels + i] - c[i]) <= 2e-6, "q, k or v", row, i, r.qkv[row * channels + i], c[i]);
        for (int h = 0; h < s.value_heads; h++) {
            double t = (double)l.a[row * (s.value_heads + 1) + h] + l.dt_bias[h];
            double decay = std::exp(-std::exp((double)l.a_log[h]) * softplus64(t)), beta = 1 / (1 + std::exp(-(double)l.b[row * s.value_heads + h]));
            int gate = row * s.value_heads + h;
            expect(std::fabs(r.decay[gate] - decay) <= 2e-6 && std::fabs(r.beta[gate] - beta) <= 1e-6, "gates", row, h, r.decay[gate], decay);
            const double *q = &c[h / group * s.key_dim], *k = q + s.keys(), *v = &c[2 * s.keys() + h * s.value_dim];
            for (int j = 0; j < s.value_dim; j++) {
                double* column = &state[(size_t)h * s.key_dim * s.value_dim + j];
                double product = 0, o = 0;
                for (int i = 0; i < s.key_dim; i++) product += k[i] * (column[i * s.value_dim] *= decay);
                double d = (v[j] - product) * beta;
                for (int i = 0; i < s.key_dim; i++) o += q[i] * (column[i * s.value_dim] += k[i] * d);
                float got = r.o[(row * s.value_heads + h) * s.value_dim + j];
                expect(std::fabs(got - o) <= 2e-6, "o", row, h * s.value_dim + j, got, o);
            }
        }
    }
}

// Element i of a row after the gated norm, from the results of the rule.
static double gated64(Layer& l, Result& r, int row, int i) {
    int width = l.s.values(), dim = l.s.value_dim;
    const float* head = &r.o[row * width + i / dim * dim];
    double squares = 0;
    for (int j = 0; j < dim; j++) squares += (double)head[j] * head[j];
    return r.o[row * width + i] / std::sqrt(squares / dim + EPS) * l.weight[i % dim] * silu64(l.z[row * (width + 4) + i]);
}

static void check_norm(Layer& l, Result& r) {
    Shape s = l.s;
    int width = s.values(), whole = padded_k(width), groups = ceil_div(l.rows, GROUP_ROWS);
    Floats f32(l.rows * width), f16(l.rows * width), fragments(groups * GROUP_ROWS * whole);
    std::vector<u32> overflow(l.rows);
    for (int output = 0; output < 3; output++) {
        Floats& y = output == 0 ? f32 : output == 1 ? f16 : fragments;
        norm::Arguments a = {r.o.data(), l.z.data(), l.weight.data(), {y.data(), overflow.data(), width, 6},
                             (u64)width + 4, s.value_heads, s.value_dim, EPS};
        launch(l.rows, ceil_div(ceil_div(s.value_heads, 2), norm::WARPS), 1, norm::THREADS,
               [&] { output == 0 ? norm::delta_norm_f32(a) : output == 1 ? norm::delta_norm_f16(a) : norm::delta_norm_fragments(a); });
    }
    for (int row = 0; row < l.rows; row++) expect(overflow[row] == 0, "a norm that fits f16", row, 0, overflow[row], 0);
    const u16 *halves = (u16*)f16.data(), *order = (u16*)fragments.data();
    for (int row = 0; row < l.rows; row++) {
        for (int i = 0; i < whole; i++) {
            u16 fragment = order[fragment_index(groups, row, i)];
            if (i >= width) expect(fragment == 0, "the padding of a norm", row, i, f16_to_float(fragment), 0);
            if (i >= width) continue;
            double want = gated64(l, r, row, i);
            float got = f32[row * width + i];
            u16 half = halves[row * width + i];
            expect(std::fabs(got - want) <= 1e-6 * std::fabs(want) + 1e-9, "a gated norm", row, i, got, want);
            expect(half == to_f16(got) && fragment == half, "a gated norm in f16", row, i, f16_to_float(half), got);
        }
    }
}

// A gate that takes one value of the last row beyond f16, and one that is NaN.
static void check_overflow(Layer& l, Result& r) {
    Shape s = l.s;
    int width = s.values(), last = l.rows - 1, groups = ceil_div(l.rows, GROUP_ROWS);
    Floats y(groups * GROUP_ROWS * padded_k(width));
    std::vector<u32> overflow(l.rows);
    for (float odd : {3e8f, NAN}) {
        for (bool fragment_major : {false, true}) {
            float &z = l.z[last * (width + 4) + width - 1], kept = z;
            z = odd;
            norm::Arguments a = {r.o.data(), l.z.data(), l.weight.data(), {y.data(), overflow.data(), width, 6},
                             (u64)width + 4, s.value_heads, s.value_dim, EPS};
            launch(l.rows, ceil_div(ceil_div(s.value_heads, 2), norm::WARPS), 1, norm::THREADS,
                   [&] { fragment_major ? norm::delta_norm_fragments(a) : norm::delta_norm_f16(a); });
            for (int row = 0; row < l.rows; row++) expect(overflow[row] == (row == last ? 7 : 0), "a norm beyond f16", row, fragment_major, overflow[row], 0);
            overflow[last] = 0;
            z = kept;
        }
    }
}

// Runs single rows by one launch, with so many columns of S in a block.
static void run_step(Layer& l, const Batch& batch, int columns, bool fragment_major, Blocks& blocks, void* y, u32* overflow) {
    Shape s = l.s;
    u64 x_stride = s.channels() + 4, z_stride = s.values() + 4, a_stride = s.value_heads + 1, b_stride = s.value_heads;
    step::Arguments a = {l.x.data(), l.z.data(), l.a.data(), l.b.data(), x_stride, z_stride, a_stride, b_stride, l.conv.data(), l.a_log.data(),
                         l.dt_bias.data(), l.weight.data(), batch.argument(), blocks.states(0), blocks.states(s.matrices()),
                         {y, overflow, s.values(), 6}, s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.taps, EPS};
    int blocks_of_head = s.value_heads / s.key_heads * s.value_dim / columns;
    auto kernel = [&] {
        if (columns == 32) return fragment_major ? step::delta_step_32_fragments(a) : step::delta_step_32_f16(a);
        if (columns == 64) return fragment_major ? step::delta_step_64_fragments(a) : step::delta_step_64_f16(a);
        fragment_major ? step::delta_step_128_fragments(a) : step::delta_step_128_f16(a);
    };
    launch(l.rows, s.key_heads, blocks_of_head, columns / WARP_COLUMNS * WARP, kernel, blocks_of_head);
}

// Single rows of sequences by one launch: the states of several launches, bit by bit, and their rows. Also notes on rows beyond f16.
static void check_step(Shape s, int columns) {
    Batch batch({{1, 1, 1}, {1, 2, 3}, {1, 0, 4}, {1, 5, 5}, {1, 6, 6}, {1, 7, 7}, {1, 8, 8}, {1, 0, 9}, {1, 10, 11}});
    std::vector<Segment> segments;
    for (int i = 0; i < batch.rows(); i++) segments.push_back({1, batch.read[i], batch.write[i]});
    int rows = batch.rows(), width = s.values(), whole = padded_k(width), groups = ceil_div(rows, GROUP_ROWS), last = rows - 1;
    Layer l(s, rows);
    Blocks before(s.floats(), 12), want = before;
    Result r(s, rows);
    run(l, segments, 0, want, r);
    for (bool fragment_major : {false, true}) {
        Floats y(fragment_major ? groups * GROUP_ROWS * whole : rows * width);
        std::vector<u32> overflow(rows);
        Blocks got = before;
        run_step(l, batch, columns, fragment_major, got, y.data(), overflow.data());
        expect_same(got.memory.data(), want.memory.data(), got.floats * got.count, "states after single rows");
        for (int row = 0; row < rows; row++) {
            expect(overflow[row] == 0, "a step that fits f16", row, 0, overflow[row], 0);
            for (int i = 0; i < (fragment_major ? whole : width); i++) {
                double of = i < width ? gated64(l, r, row, i) : 0;
                double is = f16_to_float(((u16*)y.data())[fragment_major ? fragment_index(groups, row, i) : (size_t)row * width + i]);
                expect(std::fabs(is - of) <= std::fabs(of) * 0x1.2p-11 + 1e-7, "the gated norm of single rows", row, i, is, of);
            }
        }
        float &z = l.z[last * (width + 4) + width - 1], kept = z;
        z = NAN;
        run_step(l, batch, columns, fragment_major, got, y.data(), overflow.data());
        for (int row = 0; row < rows; row++) expect(overflow[row] == (row == last ? 7 : 0), "a step beyond f16", row, 0, overflow[row], 7);
        z = kept;
    }
}

static void check(Shape s, const std::vector<Segment>& segments) { check_batch<Layer, Result>(s, segments, 0); }
static void check_parts(Shape s, int rows, const std::vector<int>& parts) { check_division<Layer, Result>(s, rows, parts); }

int main() {
    check({2, 4, 16, 32, 4}, RAGGED);
    check({3, 3, 32, 16, 3}, RAGGED);
    check({1, 2, 128, 128, 4}, RAGGED);
    check({1, 1, 48, 80, 4}, RAGGED);
    check({2, 4, 16, 32, 4}, CHAINED);
    check({1, 1, 48, 80, 2}, CHAINED);
    // Without rows a state is copied.
    check({1, 3, 48, 80, 2}, {{0, 1, 2}, {9, 0, 3}, {0, 4, 4}, {0, 0, 5}, {1, 6, 6}});
    check({1, 1, 208, 256, 4}, {{3, 1, 2}, {6, 0, 3}});
    // More segments than a warp has lanes, and more heads.
    check({1, 1, 16, 16, 4}, many_segments());
    check({2, 34, 16, 16, 4}, {{2, 0, 1}});
    check_parts({2, 4, 16, 32, 4}, 70, {1, 2, 3, 1, 1, 40, 22});
    check_parts({1, 1, 48, 80, 3}, 20, {1, 1, 8, 10});
    check_parts({1, 2, 128, 128, 4}, 19, {8, 2, 9});
    check_step({2, 4, 16, 32, 4}, 32);
    check_step({1, 2, 128, 128, 4}, 32);
    check_step({1, 1, 48, 256, 3}, 32);
    check_step({1, 3, 64, 128, 4}, 64);
    check_step({2, 16, 16, 128, 2}, 128);
    of_single_rows = true;
    const std::vector<Segment> single_rows = {{1, 1, 1}, {1, 2, 3}, {1, 0, 4}, {1, 5, 5}};
    check({1, 2, 128, 128, 4}, single_rows);
    check({2, 4, 48, 64, 3}, single_rows);
    puts("ok");
}
