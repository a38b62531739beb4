// kernels/mamba/*.cu on the CPU, as they ship, against the formulas of Mamba-2 layers in f64, for batches of several segments; and parts
// of a segment, with the state between them, against the whole. Prints "ok" or the first error.
#include "recurrent.hpp"

#include "common/reduce.cuh"
#include "norm/piece.cuh"
#include "recurrent/output.cuh"

namespace conv {
#include "mamba/conv.cu"
}
// The shared memory that kernels declare is the one array of cuda.hpp.
namespace scan {
extern char shared[] asm("shared");
#include "mamba/scan.cu"
#undef KERNEL
}
// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace norm {
#include "mamba/norm.cu"
}

constexpr float EPS = 1e-6f;

struct Shape {
    int heads, head_dim, groups, state_size, taps;
    bool has_bias = true;
    float least = 0, largest = 1e30f;
    int width() const { return heads * head_dim; }
    int of_groups() const { return groups * state_size; }
    int channels() const { return width() + 2 * of_groups(); }
    int matrices() const { return heads * state_size * head_dim; }
    int floats() const { return matrices() + (taps - 1) * channels(); }
    int x_stride() const { return channels() + 4; }
    int dt_stride() const { return heads + 1; }
    int z_stride() const { return width() + 4; }
};

// A layer with the inputs of some rows, which have more floats between them.
struct Layer {
    Shape s;
    int rows;
    Floats conv, bias, a_log, dt_bias, skip, weight, x, z, dt;

    Layer(Shape s, int rows)
        : s(s), rows(rows), conv(s.channels() * s.taps), bias(s.channels()), a_log(s.heads), dt_bias(s.heads), skip(s.heads), weight(s.width()),
          x(rows * s.x_stride()), z(rows * s.z_stride()), dt(rows * s.dt_stride()) {
        conv.fill(s.channels() * s.taps), bias.fill(s.channels()), a_log.fill(s.heads), dt_bias.fill(s.heads), skip.fill(s.heads), weight.fill(s.width());
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < s.channels(); i++) x[r * s.x_stride() + i] = uniform();
            for (int i = 0; i < s.width(); i++) z[r * s.z_stride() + i] = 3 * uniform();
            // Some are beyond 20, where softplus is the identity.
            for (int i = 0; i < s.heads; i++) dt[r * s.dt_stride() + i] = noise() % 8 ? 3 * uniform() - 2 : 21 + uniform();
        }
    }
};

struct Result {
    Floats xbc, steps, decay, y;
    Result(Shape s, int rows) : xbc(rows * s.channels()), steps(rows * s.heads), decay(rows * s.heads), y(rows * s.width()) {}
    Floats& answers() { return y; }
};

// Runs the kernels for rows of a layer from `first` on.
static void run(Layer& l, const std::vector<Segment>& segments, int first, Blocks& blocks, Result& r) {
    Shape s = l.s;
    Batch batch(segments);
    int n = (int)segments.size(), rows = batch.rows();
    Segments all = batch.argument();
    float *xbc = &r.xbc[first * s.channels()], *steps = &r.steps[first * s.heads], *decay = &r.decay[first * s.heads];
    float* bias = s.has_bias ? l.bias.data() : nullptr;
    Convolution convolution = {&l.x[first * s.x_stride()], (u64)s.x_stride(), l.conv.data(), bias, xbc, all, blocks.states(s.matrices()), s.taps, s.channels()};
    conv::Arguments c = {convolution, &l.dt[first * s.dt_stride()], (u64)s.dt_stride(), l.a_log.data(), l.dt_bias.data(), steps, decay,
                         s.least, s.largest, s.heads};
    int units = ceil_div(s.channels(), 128) + ceil_div(s.heads, WARP);
    launch(ceil_div(units, conv::WARPS), rows / TILE_ROWS + n, 1, conv::THREADS, [&] { conv::mamba_conv(c); });
    scan::Arguments u = {xbc, decay, steps, l.skip.data(), &r.y[first * s.width()], all, blocks.states(0), s.heads, s.head_dim, s.groups, s.state_size};
    launch(ceil_div(s.head_dim, scan::COLUMNS), s.heads, n, scan::THREADS, [&] {
        s.state_size <= 64 ? scan::mamba_scan_64(u) : s.state_size <= 128 ? scan::mamba_scan_128(u) : scan::mamba_scan_256(u);
    });
}

// A segment in f64. `state` is that before its first row, and becomes that after its last.
static void check_segment(Layer& l, int first, int rows, std::vector<double>& state, Result& r) {
    Shape s = l.s;
    int channels = s.channels();
    for (int row = first; row < first + rows; row++) {
        double* kept = &state[s.matrices()];
        std::vector<double> c(channels);
        for (int i = 0; i < channels; i++) {
            c[i] = convolve64(&l.conv[i * s.taps], s.taps, s.has_bias ? l.bias[i] : 0, l.x[row * s.x_stride() + i], kept + i, channels);
            expect(std::fabs(r.xbc[row * channels + i] - c[i]) <= 2e-6, "x, B or C", row, i, r.xbc[row * channels + i], c[i]);
        }
        for (int h = 0; h < s.heads; h++) {
            double t = softplus64((double)l.dt[row * s.dt_stride() + h] + l.dt_bias[h]), step = std::min(std::max(t, (double)s.least), (double)s.largest);
            double decay = std::exp(-std::exp((double)l.a_log[h]) * step);
            int at = row * s.heads + h;
            expect(std::fabs(r.steps[at] - step) <= 1e-6 * (1 + step), "a time step", row, h, r.steps[at], step);
            expect(std::fabs(r.decay[at] - decay) <= 2e-6, "a decay", row, h, r.decay[at], decay);
            const double *b = &c[s.width() + h / (s.heads / s.groups) * s.state_size], *read = b + s.of_groups();
            for (int j = 0; j < s.head_dim; j++) {
                double* column = &state[(size_t)h * s.state_size * s.head_dim + j];
                double x = c[h * s.head_dim + j], y = l.skip[h] * x, sum = std::fabs(y);
                for (int i = 0; i < s.state_size; i++) {
                    double& v = column[i * s.head_dim];
                    v = decay * v + b[i] * step * x;
                    y += read[i] * v, sum += std::fabs(read[i] * v);
                }
                float got = r.y[(row * s.heads + h) * s.head_dim + j];
                expect(std::fabs(got - y) <= 4e-6 * (1 + sum), "y", row, h * s.head_dim + j, got, y);
            }
        }
    }
}

static void run_norm(Layer& l, Result& r, int output, Floats& y, std::vector<u32>& overflow) {
    Shape s = l.s;
    int size = s.width() / s.groups, of_block = size % 32 ? 2 : 1;
    norm::Arguments a = {r.y.data(), l.z.data(), l.weight.data(), {y.data(), overflow.data(), s.width(), 6}, (u64)s.z_stride(), s.groups, size, EPS};
    launch(l.rows, ceil_div(s.groups, of_block), 1, norm::THREADS,
           [&] { output == 0 ? norm::mamba_norm_f32(a) : output == 1 ? norm::mamba_norm_f16(a) : norm::mamba_norm_fragments(a); });
}

static void check_norm(Layer& l, Result& r) {
    Shape s = l.s;
    int width = s.width(), size = width / s.groups, whole = padded_k(width), groups = ceil_div(l.rows, GROUP_ROWS);
    Floats f32(l.rows * width), f16(l.rows * width), fragments(groups * GROUP_ROWS * whole);
    std::vector<u32> overflow(l.rows);
    run_norm(l, r, 0, f32, overflow), run_norm(l, r, 1, f16, overflow), run_norm(l, r, 2, fragments, overflow);
    for (int row = 0; row < l.rows; row++) expect(overflow[row] == 0, "a norm that fits f16", row, 0, overflow[row], 0);
    const u16 *halves = (u16*)f16.data(), *order = (u16*)fragments.data();
    for (int row = 0; row < l.rows; row++) {
        std::vector<double> gated(width), squares(s.groups);
        for (int i = 0; i < width; i++) {
            gated[i] = r.y[row * width + i] * silu64(l.z[row * s.z_stride() + i]);
            squares[i / size] += gated[i] * gated[i];
        }
        for (int i = 0; i < whole; i++) {
            u16 fragment = order[fragment_index(groups, row, i)];
            if (i >= width) expect(fragment == 0, "the padding of a norm", row, i, f16_to_float(fragment), 0);
            if (i >= width) continue;
            double want = gated[i] / std::sqrt(squares[i / size] / size + EPS) * l.weight[i];
            float got = f32[row * width + i];
            u16 half = halves[row * width + i];
            expect(std::fabs(got - want) <= 1e-6 * std::fabs(want) + 1e-9, "a norm of a group", row, i, got, want);
            expect(half == to_f16(got) && fragment == half, "a norm of a group in f16", row, i, f16_to_float(half), got);
        }
    }
}

// A gate of the last row that is NaN, and a weight that takes a value of every row beyond f16.
static void check_overflow(Layer& l, Result& r) {
    int width = l.s.width(), last = l.rows - 1;
    Floats y(ceil_div(l.rows, GROUP_ROWS) * GROUP_ROWS * padded_k(width));
    for (int output : {1, 2}) {
        std::vector<u32> overflow(l.rows);
        float &z = l.z[last * l.s.z_stride() + width - 1], kept = z;
        z = NAN;
        run_norm(l, r, output, y, overflow);
        for (int row = 0; row < l.rows; row++) expect(overflow[row] == (row == last ? 7 : 0), "a norm that is NaN", row, output, overflow[row], 0);
        z = kept;
        float &weight = l.weight[0], before = weight;
        weight = 3e10f;
        run_norm(l, r, output, y, overflow);
        for (int row = 0; row < l.rows; row++) expect(overflow[row] == 7, "a norm beyond f16", row, output, overflow[row], 7);
        weight = before;
    }
}

static void check(Shape s, const std::vector<Segment>& segments) { check_batch<Layer, Result>(s, segments, 1); }
static void check_parts(Shape s, int rows, const std::vector<int>& parts) { check_division<Layer, Result>(s, rows, parts); }

int main() {
    check({4, 32, 2, 16, 4}, RAGGED);
    // Groups whose size is no multiple of 32, an odd number of them; limits of the time steps, and no bias.
    check({3, 16, 3, 32, 3, false, 0.1f, 2}, RAGGED);
    check({2, 64, 1, 128, 4}, RAGGED);
    check({6, 48, 2, 80, 4, true, 0.01f}, RAGGED);
    check({4, 32, 2, 16, 4}, CHAINED);
    check({3, 80, 1, 48, 3}, CHAINED);
    // Without rows a state is copied.
    check({3, 80, 1, 48, 2}, {{0, 1, 2}, {9, 0, 3}, {0, 4, 4}, {0, 0, 5}, {1, 6, 6}});
    check({1, 256, 1, 208, 4}, {{3, 1, 2}, {6, 0, 3}});
    // More segments than a warp has lanes, and more heads; a group with more pieces than a block has threads.
    check({1, 16, 1, 16, 4}, many_segments());
    check({72, 16, 1, 16, 4}, {{2, 0, 1}});
    check_parts({4, 32, 2, 16, 4}, 70, {1, 2, 3, 1, 1, 40, 22});
    check_parts({3, 80, 1, 48, 3}, 20, {1, 1, 8, 10});
    check_parts({2, 64, 1, 128, 4}, 19, {8, 2, 9});
    puts("ok");
}
