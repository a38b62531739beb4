// The kernels of training but for attention, products and the optimizer on the CPU, against f64, as they ship, with their instructions
// emulated as the PTX ISA describes them. Prints "ok" or the first error.
#include "cuda.hpp"

#include "activation/gate.cuh"
#include "common/ptx.cuh"
#include "common/reduce.cuh"
#include "common/values.cuh"
#include "loss/logits.cuh"

// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace norm {
#include "norm/training.cu"
}
namespace rope {
#include "rope/training.cu"
}
namespace activation {
#include "activation/training.cu"
}
namespace arrays {
#include "tensor/training.cu"
}
namespace statistics {
#include "tensor/statistics.cu"
}
namespace moments {
#include "tensor/input_moments.cu"
}
namespace embedding {
#include "embed/training.cu"
}
namespace experts {
#include "experts/rows.cu"
}
namespace loss {
#include "loss/cross_entropy.cu"
}
namespace divergence {
#include "loss/divergence.cu"
}
namespace l1 {
#include "loss/l1.cu"
}
namespace operand {
#include "quantize/training.cu"
}

// The error of rounding to bf16, relative to the value, and of some operations in f32, relative to the size of their operands.
constexpr double ROUNDING = 0x1.01p-8, ARITHMETIC = 0x1p-20;

static void expect(bool held, const char* what, int row, int i, double got, double want) {
    if (!held) printf("%s: (%d, %d) is %g, not %g\n", what, row, i, got, want), exit(1);
}
// Refuses a value that is not `want`, rounded to bf16; `size` is that of the terms that were added up in f32 to make it.
static void expect_bf16(const char* what, int row, int i, double got, double want, double size) {
    expect(std::fabs(got - want) <= std::fabs(want) * ROUNDING + size * ARITHMETIC, what, row, i, got, want);
}
static void expect_f32(const char* what, int i, double got, double want, double size) {
    expect(std::fabs(got - want) <= size * ARITHMETIC, what, 0, i, got, want);
}

// bf16 of random values, or NaNs; whole pieces.
struct Bf16 {
    std::vector<uint4> pieces;
    explicit Bf16(size_t count) : pieces(count / PIECE, uint4{~0u, ~0u, ~0u, ~0u}) {}
    Bf16(size_t count, float size) : Bf16(count) {
        for (size_t i = 0; i < count; i++) set(i, size * uniform());
    }
    void set(size_t i, float x) { ((u16*)pieces.data())[i] = to_bf16(x); }
    double operator[](size_t i) const { return bf16_to_float(((const u16*)pieces.data())[i]); }
    uint4* data() { return pieces.data(); }
};
// f32 that is aligned to 16 bytes.
struct F32Array {
    std::vector<float4> pieces;
    F32Array(size_t count, float size, float offset = 0) : pieces(ceil_div((int)count, 4)) {
        for (size_t i = 0; i < count; i++) data()[i] = size * uniform() + offset;
    }
    float* data() { return &pieces[0].x; }
    double operator[](size_t i) const { return (&pieces[0].x)[i]; }
};

// Adds rows of partial sums to `sum`, as launchers do.
static void add_partial_sums(const float* partial, int parts, int stride, int width, float* sum) {
    arrays::SumArguments a = {partial, sum, parts, stride, width};
    launch(ceil_div(width, WARP), 1, 1, arrays::SUM_WARPS * WARP, [&] { arrays::train_add_partial_sums(a); });
}

static void check_norm(int rows, int width, int blocks, bool with_residual, bool in_place) {
    size_t count = (size_t)rows * width;
    Bf16 x(count, 3), dy(count, 1), residual(count, 1), y(count), dx(count);
    Bf16 dy_before = dy, x_before = x;
    F32Array weight(width, 0.5f, 1), dweight(width, 1), partial((size_t)blocks * width, NAN);
    F32Array dweight_before = dweight;
    float eps = 1e-5f;
    int threads = ceil_div(width / PIECE, WARP) * WARP;
    uint4* dx_at = in_place ? dy.data() : dx.data();
    const uint4* residual_at = with_residual ? residual.data() : nullptr;
    norm::NormBackwardArguments b = {x.data(), weight.data(), dy.data(), residual_at, dx_at, partial.data(), rows, width, eps};
    launch(blocks, 1, 1, threads, [&] { norm::train_norm_backward(b); });
    add_partial_sums(partial.data(), blocks, width, width, dweight.data());
    const Bf16& got_dx = in_place ? dy : dx;
    uint4* y_at = in_place ? x.data() : y.data();
    norm::NormArguments a = {x.data(), weight.data(), y_at, width, eps};
    launch(rows, 1, 1, threads, [&] { norm::train_norm(a); });
    const Bf16& got_y = in_place ? x : y;
    std::vector<double> sums(width), sizes(width);
    for (int r = 0; r < rows; r++) {
        size_t at = (size_t)r * width;
        double squares = 0, products = 0;
        for (int i = 0; i < width; i++) {
            squares += x_before[at + i] * x_before[at + i];
            products += dy_before[at + i] * weight[i] * x_before[at + i];
        }
        double f = 1 / std::sqrt(squares / width + eps);
        for (int i = 0; i < width; i++) {
            double xi = x_before[at + i], d = dy_before[at + i], before = with_residual ? residual[at + i] : 0;
            double want = before + f * (d * weight[i] - xi * f * f * products / width);
            expect_bf16("a norm", r, i, got_y[at + i], xi * f * weight[i], 1);
            expect_bf16("a norm backward", r, i, got_dx[at + i], want, 4);
            sums[i] += d * xi * f, sizes[i] += std::fabs(d * xi * f);
        }
    }
    for (int i = 0; i < width; i++) {
        expect_f32("the gradient of a norm's weight", i, dweight[i], dweight_before[i] + sums[i], sizes[i] + 1);
    }
}

static void check_heads(int rows, int heads, int kv_heads, int dim, int half, bool q_normed, bool k_normed, int blocks, bool in_place) {
    int all = heads + 2 * kv_heads, width = all * dim, lanes = 1;
    while (lanes * PIECE < dim) lanes *= 2;
    size_t count = (size_t)rows * width;
    Bf16 qkv(count, 2), dout(count, 1), out(count), dqkv(count);
    Bf16 dout_before = dout, qkv_before = qkv;
    F32Array q_norm(dim, 0.5f, 1), k_norm(dim, 0.5f, 1), cos((size_t)rows * half, 1), sin((size_t)rows * half, 1);
    F32Array dq(dim, 1), dk(dim, 1), partial((size_t)blocks * 2 * dim, NAN);
    F32Array dq_before = dq, dk_before = dk;
    float eps = 1e-6f;
    bool normed = q_normed || k_normed;
    rope::HeadsArguments a = {qkv.data(), dout.data(), in_place ? dout.data() : dqkv.data(),
                              q_normed ? q_norm.data() : nullptr, k_normed ? k_norm.data() : nullptr, cos.data(), sin.data(),
                              normed ? partial.data() : nullptr, rows, heads, kv_heads, dim, half, lanes, eps};
    launch(blocks, 1, 1, rope::THREADS, [&] { rope::train_heads_backward(a); });
    if (q_normed) add_partial_sums(partial.data(), blocks, 2 * dim, dim, dq.data());
    if (k_normed) add_partial_sums(partial.data() + dim, blocks, 2 * dim, dim, dk.data());
    const Bf16& got_d = in_place ? dout : dqkv;
    a.out = in_place ? qkv.data() : out.data();
    launch(ceil_div(rows * all, rope::THREADS / lanes), 1, 1, rope::THREADS, [&] { rope::train_heads(a); });
    const Bf16& got = in_place ? qkv : out;
    std::vector<double> sums[2] = {std::vector<double>(dim), std::vector<double>(dim)}, sizes[2] = {sums[0], sums[0]};
    for (int r = 0; r < rows; r++) {
        for (int h = 0; h < all; h++) {
            size_t at = (size_t)r * width + h * dim;
            bool is_value = h >= heads + kv_heads;
            int which = h >= heads;
            bool has_norm = !is_value && (which ? k_normed : q_normed);
            double squares = 0, products = 0;
            std::vector<double> x(dim), d(dim), y(dim);
            for (int i = 0; i < dim; i++) x[i] = y[i] = qkv_before[at + i], d[i] = dout_before[at + i], squares += x[i] * x[i];
            double f = 1 / std::sqrt(squares / dim + eps);
            auto weight = [&](int i) { return which ? k_norm[i] : q_norm[i]; };
            for (int i = 0; has_norm && i < dim; i++) y[i] *= f * weight(i);
            for (int i = 0; !is_value && i < half; i++) {
                double c = cos[r * half + i], s = sin[r * half + i];
                double low = y[i], high = y[i + half], dlow = d[i], dhigh = d[i + half];
                y[i] = low * c - high * s, y[i + half] = high * c + low * s;
                d[i] = dlow * c + dhigh * s, d[i + half] = dhigh * c - dlow * s;
            }
            for (int i = 0; has_norm && i < dim; i++) products += d[i] * weight(i) * x[i];
            for (int i = 0; i < dim; i++) {
                double want = d[i];
                if (has_norm) {
                    sums[which][i] += d[i] * x[i] * f, sizes[which][i] += std::fabs(d[i] * x[i] * f);
                    want = f * (d[i] * weight(i) - x[i] * f * f * products / dim);
                }
                expect_bf16("a head", r, h * dim + i, got[at + i], y[i], 4);
                expect_bf16("a head backward", r, h * dim + i, got_d[at + i], want, 4);
            }
        }
    }
    for (int i = 0; i < dim; i++) {
        expect_f32("the gradient of queries' norm", i, dq[i], dq_before[i] + sums[0][i], sizes[0][i] + 1);
        expect_f32("the gradient of keys' norm", i, dk[i], dk_before[i] + sums[1][i], sizes[1][i] + 1);
    }
}

static void check_glu(int rows, int width, int kind, bool in_place) {
    size_t count = (size_t)rows * width;
    Bf16 gate_up(2 * count, 8), dy(count, 1), y(count), d(2 * count), again(count);
    Bf16 before = gate_up, dy_before = dy;
    activation::GluArguments a = {gate_up.data(), nullptr, nullptr, y.data(), width, kind};
    launch(rows, ceil_div(width / PIECE, activation::THREADS), 1, activation::THREADS, [&] { activation::train_glu(a); });
    activation::GluArguments b = {gate_up.data(), dy.data(), in_place ? gate_up.data() : d.data(), in_place ? dy.data() : again.data(), width, kind};
    if (rows == 1) b.y = nullptr;
    launch(rows, ceil_div(width / PIECE, activation::THREADS), 1, activation::THREADS, [&] { activation::train_glu_backward(b); });
    const Bf16 &got = in_place ? gate_up : d, &got_y = in_place ? dy : again;
    for (int r = 0; r < rows; r++) {
        for (int i = 0; i < width; i++) {
            size_t at = (size_t)r * width + i, gate_at = at + (size_t)r * width, up_at = gate_at + width;
            double g = before[gate_at], up = before[up_at], dyi = dy_before[at];
            double s = 1 / (1 + std::exp(-g)), t = std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g));
            double value = kind == SILU ? g * s : 0.5 * g * (1 + t);
            double slope = kind == SILU ? s + g * s * (1 - s)
                                        : 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * g * g);
            // In f32 the argument of the exponential, up to 50, has an error of 2^-19, and 1 - s one of 2^-25.
            expect_bf16("a gated unit", r, i, y[at], value * up, 8);
            expect_bf16("the gradient of a gate", r, i, got[gate_at], dyi * up * slope, 64);
            expect_bf16("the gradient of up", r, i, got[up_at], dyi * value, 8);
            if (b.y) expect(got_y[at] == y[at], "a gated unit once more", r, i, got_y[at], y[at]);
        }
    }
}

static void check_bias(int rows, int width, int blocks) {
    size_t count = (size_t)rows * width;
    Bf16 x(count, 4), before = x;
    F32Array bias(width, 1), sum(width, 1), sum_before = sum, partial((size_t)blocks * width, NAN);
    activation::BiasArguments a = {x.data(), bias.data(), partial.data(), rows, width};
    launch(ceil_div(width / PIECE, activation::COLUMN_PIECES), blocks, 1, activation::THREADS, [&] { activation::train_column_sums(a); });
    add_partial_sums(partial.data(), blocks, width, width, sum.data());
    launch(rows, ceil_div(width / PIECE, activation::THREADS), 1, activation::THREADS, [&] { activation::train_add_bias(a); });
    for (int i = 0; i < width; i++) {
        double want = sum_before[i], size = 1;
        for (int r = 0; r < rows; r++) {
            size_t at = (size_t)r * width + i;
            want += before[at], size += std::fabs(before[at]);
            expect_bf16("a sum with a bias", r, i, x[at], before[at] + bias[i], 0);
        }
        expect_f32("the gradient of a bias", i, sum[i], want, size);
    }
}

static void check_arrays(int count) {
    Bf16 x(count, 4), y(count, 1), before = x;
    F32Array from(count, 3), to(count, NAN);
    auto run = [&](auto kernel, void* x, const void* y, float value) {
        arrays::ArrayArguments a = {x, y, (u64)count / PIECE, value};
        launch(ceil_div(count / PIECE, arrays::THREADS), 1, 1, arrays::THREADS, [&] { kernel(a); });
    };
    run([](auto& a) { arrays::train_add(a); }, x.data(), y.data(), 0);
    for (int i = 0; i < count; i++) expect_bf16("a sum", 0, i, x[i], before[i] + y[i], 0);
    x = before;
    run([](auto& a) { arrays::train_scale(a); }, x.data(), nullptr, -0.3f);
    for (int i = 0; i < count; i++) expect_bf16("a factor", 0, i, x[i], before[i] * -0.3, 0);
    run([](auto& a) { arrays::train_to_f32(a); }, to.data(), x.data(), 0);
    for (int i = 0; i < count; i++) expect(to[i] == x[i], "bf16 as f32", 0, i, to[i], x[i]);
    run([](auto& a) { arrays::train_to_bf16(a); }, x.data(), from.data(), 0);
    for (int i = 0; i < count; i++) expect_bf16("f32 as bf16", 0, i, x[i], from[i], 0);
    run([](auto& a) { arrays::train_fill(a); }, x.data(), nullptr, -2.5f);
    for (int i = 0; i < count; i++) expect(x[i] == -2.5, "one value", 0, i, x[i], -2.5);
}

// Tokens of rows, some of which occur often, and a gradient of the tokens from `first` on.
static void check_embedding(int rows, int width, int vocabulary, int first, int held, bool add) {
    Bf16 dx((size_t)rows * width, 1), gradient((size_t)held * width, 1), before = gradient;
    std::vector<u32> tokens, order, offsets, ids;
    for (int i = 0; i < rows; i++) tokens.push_back(noise() % 3 ? noise() % vocabulary : first + 1);
    for (int token = 0; token < vocabulary; token++) {
        size_t start = order.size();
        for (int i = 0; i < rows; i++) {
            if ((int)tokens[i] == token) order.push_back(i);
        }
        if (order.size() > start) ids.push_back(token), offsets.push_back((u32)start);
    }
    offsets.push_back((u32)order.size());
    embedding::Arguments a = {dx.data(), order.data(), offsets.data(), ids.data(), gradient.data(), (u32)first, (u32)held, width, 1.5f, add};
    launch((unsigned)ids.size(), ceil_div(width / PIECE, embedding::THREADS), 1, embedding::THREADS, [&] { embedding::train_embed(a); });
    for (int t = 0; t < held; t++) {
        for (int i = 0; i < width; i++) {
            double sum = 0, size = 1, old = before[(size_t)t * width + i];
            bool occurs = false;
            for (int r = 0; r < rows; r++) {
                if ((int)tokens[r] != first + t) continue;
                double x = dx[(size_t)r * width + i];
                occurs = true, sum += 1.5 * x, size += 1.5 * std::fabs(x);
            }
            expect_bf16("the gradient of an embedding", t, i, gradient[(size_t)t * width + i], occurs ? sum + (add ? old : 0) : old, size);
        }
    }
}

// An expert takes every third row and the last one, its results are added to them, and gradients go the same way back.
static void check_experts(int rows, int width) {
    Bf16 x((size_t)rows * width, 1), dsum((size_t)rows * width, 1);
    std::vector<u32> routed;
    for (int r = 0; r < rows; r++) {
        if (r % 3 == 0 || r == rows - 1) routed.push_back(r);
    }
    int n = (int)routed.size(), pieces = width / PIECE;
    size_t len = (size_t)n * width;
    Bf16 taken(len), dx(len);
    F32Array weights(n, 0.5f, 1), x_f32(len, 1), sum((size_t)rows * width, 1), before = sum;
    std::vector<float> dweights(n, NAN);
    auto run = [&](auto kernel, const void* from, void* to, int width_in_pieces) {
        experts::Arguments a = {routed.data(), weights.data(), (const uint4*)from, dsum.data(), (uint4*)to, sum.data(), dweights.data(),
                                width_in_pieces};
        launch((unsigned)n, ceil_div(width_in_pieces, experts::THREADS), 1, experts::THREADS, [&] { kernel(a); });
    };
    run(experts::expert_take, x.data(), taken.data(), pieces);
    run(experts::expert_add, taken.data(), nullptr, pieces);
    run(experts::expert_take_backward, taken.data(), nullptr, pieces);
    run(experts::expert_add_f32, x_f32.data(), nullptr, pieces);
    experts::Arguments back = {routed.data(), weights.data(), taken.data(), dsum.data(), dx.data(), nullptr, dweights.data(), pieces};
    launch((unsigned)n, 1, 1, experts::THREADS, [&] { experts::expert_add_backward(back); });
    std::vector<double> want((size_t)rows * width);
    for (size_t i = 0; i < want.size(); i++) want[i] = before[i];
    for (int j = 0; j < n; j++) {
        double dot = 0, size = 0;
        for (int i = 0; i < width; i++) {
            size_t own = (size_t)j * width + i, row = (size_t)routed[j] * width + i;
            expect(taken[own] == x[row], "a row of an expert", j, i, taken[own], x[row]);
            want[row] += weights[j] * x[row] + x[row] + weights[j] * x_f32[own];
            expect_bf16("a gradient of an expert's results", j, i, dx[own], weights[j] * dsum[row], 0);
            dot += (double)dsum[row] * x[row], size += std::fabs((double)dsum[row] * x[row]);
        }
        expect_f32("a gradient of an expert's weight", j, dweights[j], dot, size);
    }
    for (size_t i = 0; i < want.size(); i++) expect_f32("a sum of experts", (int)i, sum[i], want[i], 8);
}

static void check_cross_entropy(int rows, std::vector<int> chunks, float cap, float size) {
    int vocabulary = 0;
    for (int chunk : chunks) vocabulary += chunk;
    std::vector<F32Array> logits;
    for (int chunk : chunks) logits.emplace_back((size_t)rows * chunk, size);
    F32Array weights(rows, 0.5f, 1);
    std::vector<float> max(rows, NAN), sum(rows, NAN), target(rows, NAN), lse(rows, NAN), losses(rows, NAN);
    std::vector<int> labels;
    for (int r = 0; r < rows; r++) labels.push_back(r % 3 == 1 ? -1 : (int)(noise() % vocabulary));
    auto of_chunk = [&](size_t c, int first, u16* dlogits) {
        return loss::Arguments{logits[c].data(), labels.data(), max.data(), sum.data(), target.data(), weights.data(), lse.data(), dlogits,
                               first, chunks[c], c == 0, cap};
    };
    for (size_t c = 0, first = 0; c < chunks.size(); first += chunks[c++]) {
        loss::Arguments a = of_chunk(c, (int)first, nullptr);
        launch(rows, 1, 1, loss::THREADS, [&] { chunks[c] % 4 ? loss::cross_entropy_chunk_ragged(a) : loss::cross_entropy_chunk(a); });
    }
    double total = NAN, want_total = 0;
    loss::FinishArguments f = {max.data(), sum.data(), target.data(), labels.data(), weights.data(), lse.data(), losses.data(), &total, rows};
    launch(1, 1, 1, loss::FINISH_THREADS, [&] { loss::cross_entropy_finish(f); });
    auto capped = [&](double l) { return cap > 0 ? cap * std::tanh(l / cap) : l; };
    std::vector<double> want_lse(rows);
    for (int r = 0; r < rows; r++) {
        double exponentials = 0, of_label = 0;
        for (size_t c = 0, first = 0; c < chunks.size(); first += chunks[c++]) {
            for (int i = 0; i < chunks[c]; i++) {
                double l = capped(logits[c][(size_t)r * chunks[c] + i]);
                exponentials += std::exp(l);
                if (labels[r] == (int)first + i) of_label = l;
            }
        }
        want_lse[r] = std::log(exponentials);
        double want = labels[r] < 0 ? 0 : weights[r] * (want_lse[r] - of_label);
        if (labels[r] >= 0) expect_f32("the logarithm of a sum of exponentials", r, lse[r], want_lse[r], size);
        expect_f32("a row's loss", r, losses[r], want, 2 * size);
        want_total += want;
    }
    expect_f32("the loss", 0, total, want_total, 2 * size * rows);
    for (size_t c = 0, first = 0; c < chunks.size(); first += chunks[c++]) {
        Bf16 dlogits((size_t)rows * chunks[c] * 2);  // room for rows that are no whole pieces
        loss::Arguments a = of_chunk(c, (int)first, (u16*)dlogits.data());
        launch(rows, 1, 1, loss::THREADS, [&] { chunks[c] % 4 ? loss::cross_entropy_gradient_ragged(a) : loss::cross_entropy_gradient(a); });
        for (int r = 0; r < rows; r++) {
            for (int i = 0; i < chunks[c]; i++) {
                size_t at = (size_t)r * chunks[c] + i;
                double l = capped(logits[c][at]), p = std::exp(l - want_lse[r]), slope = cap > 0 ? 1 - l / cap * (l / cap) : 1;
                // What is too small for f32 may be zero.
                bool is_label = labels[r] == (int)first + i;
                double want = labels[r] < 0 ? 0 : weights[r] * (p - is_label) * slope;
                // An error of the exponent is one of the factor.
                expect_bf16("the gradient of a logit", r, (int)first + i, dlogits[at], want, 2 * size * p + is_label + 0x1p-100);
            }
        }
    }
}

// Logits of a student and of its teacher, which are the student's if they are equal: then there is nothing to learn, exactly.
static void check_divergence(int rows, std::vector<int> chunks, float cap, float size, float temperature, float share, bool equal) {
    int vocabulary = 0;
    for (int chunk : chunks) vocabulary += chunk;
    std::vector<F32Array> logits, teacher;
    for (int chunk : chunks) {
        logits.emplace_back((size_t)rows * chunk, size);
        teacher.push_back(equal ? logits.back() : F32Array((size_t)rows * chunk, size));
    }
    F32Array weights(rows, 0.5f, 1);
    std::vector<divergence::Row> found(rows, {NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN});
    std::vector<divergence::RowSums> sums(rows, {NAN, NAN, NAN, NAN});
    std::vector<int> labels;
    for (int r = 0; r < rows; r++) labels.push_back(r % 3 == 1 ? -1 : (int)(noise() % vocabulary));
    auto of_chunk = [&](size_t c, int first, u16* dlogits) {
        return divergence::Arguments{logits[c].data(), teacher[c].data(), labels.data(), found.data(), sums.data(), weights.data(), dlogits,
                                     first, chunks[c], c == 0, cap, cap, 1 / temperature, (1 - share) * temperature, share};
    };
    for (size_t c = 0, first = 0; c < chunks.size(); first += chunks[c++]) {
        divergence::Arguments a = of_chunk(c, (int)first, nullptr);
        launch(rows, 1, 1, divergence::THREADS,
               [&] { chunks[c] % 4 ? divergence::divergence_chunk_ragged(a) : divergence::divergence_chunk(a); });
    }
    double totals[3] = {NAN, NAN, NAN};
    float factor = (1 - share) * temperature * temperature;
    divergence::FinishArguments f = {found.data(), labels.data(), weights.data(), sums.data(), totals, rows, 1 / temperature, factor, share};
    launch(1, 1, 1, divergence::FINISH_THREADS, [&] { divergence::divergence_finish(f); });
    auto capped = [&](double l) { return cap > 0 ? cap * std::tanh(l / cap) : l; };
    auto sum_of = [&](std::vector<F32Array>& of, int r, double inverse) {
        double sum = 0;
        for (size_t c = 0; c < chunks.size(); c++)
            for (int i = 0; i < chunks[c]; i++) sum += std::exp(capped(of[c][(size_t)r * chunks[c] + i]) * inverse);
        return std::log(sum);
    };
    double want[3] = {0, 0, 0}, inverse = 1.0 / temperature;
    for (int r = 0; r < rows; r++) {
        double one = sum_of(logits, r, 1), warm = sum_of(logits, r, inverse), of_teacher = sum_of(teacher, r, inverse), entropy = 0, kl = 0;
        for (size_t c = 0, first = 0; c < chunks.size(); first += chunks[c++])
            for (int i = 0; i < chunks[c]; i++) {
                double s = capped(logits[c][(size_t)r * chunks[c] + i]), t = capped(teacher[c][(size_t)r * chunks[c] + i]);
                kl += std::exp(t * inverse - of_teacher) * ((t * inverse - of_teacher) - (s * inverse - warm));
                if (labels[r] == (int)first + i) entropy = one - s;
            }
        if (labels[r] < 0) {
            expect(sums[r].teacher == 0 && sums[r].warm == 0, "sums of a row without a label", r, 0, sums[r].teacher, 0);
            continue;
        }
        expect_f32("a student's sum", r, sums[r].student, one, 2 * size);
        expect_f32("a student's sum at a temperature", r, sums[r].warm, warm, 2 * size);
        expect_f32("a teacher's sum at a temperature", r, sums[r].teacher, of_teacher, 2 * size);
        want[0] += weights[r] * (factor * kl + share * entropy), want[1] += weights[r] * entropy, want[2] += weights[r] * kl;
    }
    for (int i = 0; i < 3; i++) expect_f32("a sum of losses", i, totals[i], want[i], 4 * size * rows * std::max(1.0f, factor));
    if (equal) expect(totals[2] == 0, "a divergence from itself", rows, 0, totals[2], 0);
    for (size_t c = 0, first = 0; c < chunks.size(); first += chunks[c++]) {
        Bf16 dlogits((size_t)rows * chunks[c] * 2);
        divergence::Arguments a = of_chunk(c, (int)first, (u16*)dlogits.data());
        launch(rows, 1, 1, divergence::THREADS,
               [&] { chunks[c] % 4 ? divergence::divergence_gradient_ragged(a) : divergence::divergence_gradient(a); });
        for (int r = 0; r < rows; r++) {
            double one = sum_of(logits, r, 1), warm = sum_of(logits, r, inverse), of_teacher = sum_of(teacher, r, inverse);
            for (int i = 0; i < chunks[c]; i++) {
                size_t at = (size_t)r * chunks[c] + i;
                double s = capped(logits[c][at]), slope = cap > 0 ? 1 - s / cap * (s / cap) : 1;
                double p = std::exp(s - one), own = std::exp(s * inverse - warm), t = std::exp(capped(teacher[c][at]) * inverse - of_teacher);
                bool is_label = labels[r] == (int)first + i;
                double g = weights[r] * ((1 - share) * temperature * (own - t) + share * (p - is_label)) * slope;
                double error = 2 * size * (temperature * (own + t) + share * p) + is_label + 0x1p-100;
                expect_bf16("the gradient of a student's logit", r, (int)first + i, dlogits[at], labels[r] < 0 ? 0 : g, error);
                if (equal && share == 0) expect(dlogits[at] == 0, "the gradient by itself", r, (int)first + i, dlogits[at], 0);
            }
        }
    }
}

static void check_input_moments(int rows, int cols) {
    Bf16 x((size_t)rows * cols, 3);
    F32Array sums((size_t)cols * moments::BLOCK, 2);
    F32Array before = sums;
    moments::Arguments a = {(const u16*)x.data(), sums.data(), rows, cols};
    launch(cols / moments::BLOCK, 1, 1, moments::THREADS, [&] { moments::train_input_moments(a); });
    for (int at = 0; at < cols * moments::BLOCK; at++) {
        int first = at / moments::THREADS * moments::BLOCK, i = first + at / moments::BLOCK % moments::BLOCK, j = first + at % moments::BLOCK;
        double want = before[at], size = std::fabs(want);
        for (int row = 0; row < rows; row++) {
            double product = x[(size_t)row * cols + i] * x[(size_t)row * cols + j];
            want += product, size += std::fabs(product);
        }
        expect_f32("a sum of products of inputs", at, sums[at], want, size);
    }
}

static void check_statistics(int count, bool odd) {
    Bf16 g(count, 3);
    if (odd) {
        g.set(0, NAN), g.set(count / 2, __uint_as_float(0x7f800000)), g.set(count - 1, -__uint_as_float(0x7f800000));
        g.set(PIECE * WARP + 3, -1e15f);  // of the second warp
    }
    std::vector<statistics::Statistics> partial(statistics::BLOCKS, {NAN, NAN, NAN});
    statistics::Entry entry, before = {{}, 1};
    statistics::Statistics& total = entry.found;
    statistics::Arguments a = {g.data(), partial.data(), (u64)count / PIECE};
    launch(statistics::BLOCKS, 1, 1, statistics::THREADS, [&] { statistics::gradient_statistics(a); });
    statistics::TotalArguments b = {partial.data(), &entry, &before, 1.5f};
    launch(1, 1, 1, statistics::BLOCKS, [&] { statistics::gradient_statistics_total(b); });
    double squares = 0, largest = 0;
    int nonfinite = 0;
    for (int i = 0; i < count; i++) {
        if (!std::isfinite(g[i])) {
            nonfinite++;
            continue;
        }
        squares += g[i] * g[i];
        largest = std::max(largest, std::fabs(g[i]));
    }
    expect_f32("a sum of squares", count, total.squares, squares, squares);
    expect(total.largest == largest, "the largest magnitude", count, 0, total.largest, largest);
    expect(total.nonfinite == nonfinite, "elements that are not finite", count, 0, total.nonfinite, nonfinite);
    double factor = nonfinite ? NAN : std::min(1.0, 1.5 / std::sqrt(squares));
    if (nonfinite)
        expect(std::isinf(entry.factor), "a factor of what is not finite", count, 0, entry.factor, factor);
    else
        expect_f32("a factor", count, entry.factor, factor, 1);
}

static void check_l1(int count, bool in_place) {
    Bf16 h(count, 1), target(count, 1), d(count);
    for (int i = 0; i < count; i += 5) h.set(i, (float)target[i]);
    Bf16 before = h;
    std::vector<float> partial(l1::BLOCKS, NAN);
    float total = NAN, weight = 0.375f;
    l1::Arguments a = {h.data(), target.data(), in_place ? h.data() : d.data(), partial.data(), (u64)count / PIECE, weight};
    launch(l1::BLOCKS, 1, 1, l1::THREADS, [&] { l1::l1_gradient(a); });
    l1::TotalArguments b = {partial.data(), &total, weight};
    launch(1, 1, 1, l1::BLOCKS, [&] { l1::l1_total(b); });
    double want = 0;
    for (int i = 0; i < count; i++) {
        double difference = before[i] - target[i], sign = difference > 0 ? 0.375 : difference < 0 ? -0.375 : 0, got = in_place ? h[i] : d[i];
        expect(got == sign, "the sign of a difference", 0, i, got, sign);
        want += 0.375 * std::fabs(difference);
    }
    expect_f32("a sum of absolute differences", count, total, want, want);
}

static void check_columns(int rows, int width, int first, int columns) {
    Bf16 all((size_t)rows * width, 1), part((size_t)rows * columns);
    Bf16 before = all;
    arrays::ColumnArguments a = {all.data(), part.data(), (u64)rows * columns / PIECE, width / PIECE, columns / PIECE, first / PIECE};
    int blocks = ceil_div(rows * columns / PIECE, arrays::THREADS);
    launch(blocks, 1, 1, arrays::THREADS, [&] { arrays::train_columns_copy(a); });
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < columns; i++) {
            double want = before[(size_t)r * width + first + i];
            expect(part[(size_t)r * columns + i] == want, "copied columns", r, i, part[(size_t)r * columns + i], want);
        }
    launch(blocks, 1, 1, arrays::THREADS, [&] { arrays::train_columns_add(a); });
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i++) {
            double x = before[(size_t)r * width + i], want = i >= first && i < first + columns ? 2 * x : x;
            expect(all[(size_t)r * width + i] == want, "columns that are added to", r, i, all[(size_t)r * width + i], want);
        }
}

// The value of an e4m3 byte, and of an e2m1 code without sign.
static double scale_value(int byte) {
    int exponent = byte >> 3, mantissa = byte & 7;
    return exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
}
static double code_value(int code) { return (code < 4 ? code : code < 6 ? 2 * code - 4 : code == 6 ? 8 : 12) / 2.0; }
// The number, below `count`, of the value nearest to x; of two that are as near, the even one.
template <class Value>
static int nearest(double x, int count, Value value) {
    int best = 0;
    for (int i = 1; i < count; i++) {
        double d = std::fabs(value(i) - x) - std::fabs(value(best) - x);
        if (d < 0 || (d == 0 && i % 2 == 0)) best = i;
    }
    return best;
}

// Refuses values of a block that are not those of NVFP4 for x.
static void expect_rounded(int row, const double (&x)[16], const double (&y)[16], double reach, int rule, u64 key, u32 index, u32 stride) {
    double global = 1, amax = 0;
    while (reach < std::ldexp(global, 10)) global /= 2;
    while (reach >= std::ldexp(global, 10)) global *= 2;
    for (double v : x) amax = std::fmax(amax, std::fabs(v));
    // Divided twice in f32, as on the CPU.
    double sixth = (double)(float)((double)(float)(amax / 6) / global);
    auto error = [&](int scale) {
        double sum = 0, step = scale_value(scale) * global;
        for (double v : x) sum += std::pow(std::fabs(v) - code_value(nearest(std::fabs(v) / step, 8, code_value)) * step, 2);
        return sum;
    };
    int scale = std::max(nearest(sixth, 127, scale_value), amax > 0 ? 1 : 0);
    if (rule == operand::RULE_STOCHASTIC)
        for (scale = 0; scale_value(scale) < sixth;) scale++;
    if (rule == operand::RULE_FOUR_OVER_SIX && amax > 0) {
        int four = std::max(nearest((double)(float)((double)(float)(amax / 4) / global), 127, scale_value), 1);
        if (error(four) < error(scale)) scale = four;
    }
    double step = scale_value(scale) * global;
    for (int i = 0; i < 16; i++) {
        double q = step > 0 ? (float)(std::fabs(x[i]) / step) : 0;
        int code = nearest(q, 8, code_value);
        if (rule == operand::RULE_STOCHASTIC) {
            for (code = 7; code_value(code) > q;) code--;
            double gap = code < 7 ? code_value(code + 1) - code_value(code) : 1;
            double threshold = (operand::random_words(key, index + i * stride).x >> 8) / 16777216.0;
            code += threshold < (q - code_value(code)) / gap;
        }
        double want = std::copysign(code_value(code) * step, x[i]);
        expect(y[i] == want, "an operand", row, i, y[i], want);
    }
}

static void check_operand_rows(int rows, int width, int rule, float size) {
    Bf16 x((size_t)rows * width, size), y((size_t)rows * width);
    if (width > 16)
        for (int i = 0; i < 16; i++) x.set(16 + i, 0);
    u64 key = 0x123456789abcdefull;
    operand::RowsArguments a = {x.data(), y.data(), key, width / 16, rule};
    launch(rows, 1, 1, operand::THREADS, [&] { operand::train_operand_rows(a); });
    for (int r = 0; r < rows; r++) {
        double amax = 0;
        for (int i = 0; i < width; i++) amax = std::fmax(amax, std::fabs(x[(size_t)r * width + i]));
        for (int first = 0; first < width; first += 16) {
            size_t at = (size_t)r * width + first;
            double from[16], to[16];
            for (int i = 0; i < 16; i++) from[i] = x[at + i], to[i] = y[at + i];
            expect_rounded(r, from, to, amax, rule, key, at, 1);
        }
    }
    operand::RowsArguments int8 = {x.data(), y.data(), 0, width / 16, operand::RULE_INT8};
    launch(rows, 1, 1, operand::THREADS, [&] { operand::train_operand_rows(int8); });
    for (int r = 0; r < rows; r++) {
        float amax = 0;
        for (int i = 0; i < width; i++) amax = std::fmax(amax, std::fabs((float)x[(size_t)r * width + i]));
        float scale = amax / 127;
        for (int i = 0; i < width; i++) {
            size_t at = (size_t)r * width + i;
            float want = std::nearbyint((float)x[at] / scale) * scale;
            expect_bf16("a row of a table", r, i, y[at], want, 0);
        }
    }
    x.set(width - 1, INFINITY);
    launch(rows, 1, 1, operand::THREADS, [&] { operand::train_operand_rows(a); });
    for (int i = 0; i < width; i++) expect(std::isnan(y[i]), "a row that is not finite", 0, i, y[i], NAN);
    if (rows > 1) expect(!std::isnan(y[width]), "the row after it", 1, 0, y[width], 0);
}

static void check_operand_columns(int rows, int width, int rule) {
    int groups = ceil_div(rows, operand::ROTATED);
    Bf16 x((size_t)rows * width), y((size_t)groups * operand::ROTATED * width);
    double amax = 0;
    for (int i = 0; i < rows * width; i++) {
        // Multiples of 1/64 up to 4, whose sums are exact in f32.
        x.set(i, std::floor(256 * uniform()) / 64);
        amax = std::fmax(amax, std::fabs(x[i]));
    }
    std::vector<float> maxima(operand::MAXIMA, NAN);
    u64 key = 0xfedcba987654321ull;
    operand::MaximaArguments m = {x.data(), maxima.data(), (u64)rows * width / PIECE};
    operand::ColumnsArguments a = {(u32*)x.data(), (u32*)y.data(), maxima.data(), key, rows, width / 2, rule};
    auto run = [&] {
        launch(operand::MAXIMA, 1, 1, operand::THREADS, [&] { operand::train_operand_maxima(m); });
        launch(ceil_div(width / 2, operand::THREADS), groups, 1, operand::THREADS, [&] { operand::train_operand_columns(a); });
    };
    run();
    for (int first = 0; first < groups * 16; first += 16)
        for (int j = 0; j < width; j++) {
            double from[16], to[16];
            for (int i = 0; i < 16; i++) {
                from[i] = 0;
                for (int t = 0; t < 16 && first + t < rows; t++) {
                    bool negative = (__builtin_popcount(i & t) + (operand::ROTATION_SIGNS >> t & 1)) % 2;
                    from[i] += (negative ? -0.25 : 0.25) * x[(size_t)(first + t) * width + j];
                }
                to[i] = y[(size_t)(first + i) * width + j];
                if (rule == operand::RULE_KEEP) expect_bf16("a rotated operand", first + i, j, to[i], from[i], 0);
            }
            if (rule != operand::RULE_KEEP) expect_rounded(first, from, to, 4 * amax, rule, key, first * width + j, width);
        }
    x.set(rows * width - 1, NAN);
    run();
    expect(std::isnan(y[0]), "an operand that is not finite", 0, 0, y[0], NAN);
}

int main() {
    check_norm(7, 48, 3, true, false);
    check_norm(3, 272, 2, false, true);
    check_norm(2, 2560, 2, true, true);
    check_norm(1, 8192, 1, false, false);
    check_heads(5, 4, 2, 64, 32, true, true, 2, false);
    check_heads(3, 3, 1, 80, 16, false, true, 3, true);
    check_heads(2, 2, 1, 256, 64, true, false, 1, false);
    check_heads(9, 40, 4, 16, 8, false, false, 2, true);
    check_heads(2, 32, 8, 128, 64, true, true, 2, true);
    check_glu(2, 48, SILU, false);
    check_glu(3, 2064, GELU_TANH, true);
    check_glu(1, 64, GELU_TANH, false);
    check_bias(37, 272, 3);
    check_bias(3, 2064, 1);
    check_arrays(4112);
    check_columns(37, 96, 48, 32);
    check_columns(300, 64, 0, 16);
    check_columns(5, 48, 0, 48);
    check_embedding(40, 48, 30, 7, 12, true);
    check_embedding(37, 1040, 9, 0, 9, false);
    check_experts(7, 48);
    check_experts(20, 2064);
    check_cross_entropy(4, {4, 8}, 0, 8);
    check_cross_entropy(5, {1028, 60, 4}, 5, 12);
    check_cross_entropy(2, {2052, 2052}, 0, 60);
    check_cross_entropy(4, {260, 61, 1}, 5, 8);
    check_divergence(4, {4, 8}, 0, 8, 1, 0, false);
    check_divergence(5, {1028, 60, 4}, 5, 12, 2, 0.25f, false);
    check_divergence(3, {2052, 516}, 0, 30, 0.5f, 0, false);
    check_divergence(4, {260, 61, 1}, 5, 8, 3, 0.5f, false);
    check_divergence(4, {260, 61, 4}, 0, 20, 1, 0, true);
    check_divergence(4, {1028, 61, 4}, 30, 20, 1.7f, 0, true);
    for (int rows : {1, 128, 301}) check_input_moments(rows, 48);
    check_statistics(8 * 131500, false);
    check_statistics(4112, true);
    check_l1(4112, false);
    check_l1(8 * 131500, true);
    for (int rule : {operand::RULE_AMAX, operand::RULE_FOUR_OVER_SIX, operand::RULE_STOCHASTIC}) {
        check_operand_rows(3, 48, rule, 3);
        check_operand_rows(2, 4208, rule, 1e-6f);
        check_operand_columns(37, 48, rule);
    }
    check_operand_columns(16, 528, operand::RULE_STOCHASTIC);
    check_operand_columns(5, 32, operand::RULE_KEEP);
    puts("ok");
}
