// kernels/rope/store.cu and kernels/attention/{prefill,decode}.cu on the processor, against attention in f64: the sources as they
// ship, with instructions replaced by what the PTX ISA says of them. A sequence is filled in two runs of rows, and goes on by a
// token at a time. Prints "ok" or what is wrong.
#include "cuda.hpp"

#include "common/cluster.cuh"
#include "common/heads.cuh"
#include "common/pages.cuh"
#include "common/ptx.cuh"
#include "format/ordered.cuh"

namespace store {
#include "rope/store.cu"
#undef KERNEL
}
// What kernels declare as shared memory is the one array that the copies know.
namespace prefill {
extern u16 shared[] asm("shared");
#include "attention/prefill.cu"
#undef KERNEL
}
namespace decode {
extern char shared[] asm("shared");
#include "attention/decode.cu"
#undef KERNEL
}

static double half(double x) { return f16_to_float(to_f16(x)); }

// A sequence of one layer, whose tokens are all known in advance.
struct Sequence {
    int D, heads, kv_heads, length, all;
    bool normed;
    std::vector<float> qkv, q_norm, k_norm, frequencies;
    std::vector<std::vector<u16>> pages;
    std::vector<u64> table;
    static constexpr float EPS = 1e-6f, FACTOR = 1.25f;

    Sequence(int D, int heads, int kv_heads, int length, bool normed)
        : D(D), heads(heads), kv_heads(kv_heads), length(length), all(heads + 2 * kv_heads), normed(normed) {
        for (int i = 0; i < length * all * D; i++) qkv.push_back(uniform());
        for (int i = 0; i < D; i++) q_norm.push_back(1 + 0.5f * uniform()), k_norm.push_back(1 + 0.5f * uniform());
        for (int i = 0; i < D / 2; i++) frequencies.push_back(std::pow(100.0f, -2.0f * i / D));
        // Two layers, of which the second is used, and room to align them. What is not written yet is any number.
        for (int i = 0; i < ceil_div(length, PAGE); i++) {
            pages.emplace_back(2 * layer() / sizeof(u16) + 8);
            for (u16& x : pages.back()) x = to_f16(uniform());
            table.push_back((u64)(uintptr_t)((char*)pages.back().data() + 15) & ~(u64)15);
        }
    }
    // Bytes of a layer in a page.
    int layer() const { return 2 * kv_heads * PAGE * D * 2; }
    Pages arguments() const { return {table.data(), (int)table.size(), kv_heads, (u64)layer()}; }
    HeadOptions options() const { return {frequencies.data(), FACTOR, EPS}; }
    float scale() const { return 1 / std::sqrt((float)D); }

    // Head `head` of a token's queries, keys and values, as attention takes it.
    std::vector<double> vector(int token, int head) const {
        const float* x = &qkv[((size_t)token * all + head) * D];
        std::vector<double> y(x, x + D);
        if (head >= heads + kv_heads) return y;
        if (normed) {
            double squares = 0;
            for (double v : y) squares += v * v;
            for (int i = 0; i < D; i++) y[i] *= (head < heads ? q_norm : k_norm)[i] / std::sqrt(squares / D + EPS);
        }
        std::vector<double> r(D);
        for (int i = 0; i < D / 2; i++) {
            double angle = (double)token * frequencies[i], c = FACTOR * std::cos(angle), s = FACTOR * std::sin(angle);
            r[i] = y[i] * c - y[i + D / 2] * s;
            r[i + D / 2] = y[i + D / 2] * c + y[i] * s;
        }
        return r;
    }
    std::vector<double> attention(int token, int head) const {
        std::vector<double> q = vector(token, head), out(D), score;
        int kv_head = head / (heads / kv_heads);
        double sum = 0, best = -1e300;
        for (int p = 0; p <= token; p++) {
            std::vector<double> k = vector(p, heads + kv_head);
            double dot = 0;
            for (int i = 0; i < D; i++) dot += q[i] * half(k[i]);
            score.push_back(dot * scale());
            best = std::max(best, score.back());
        }
        for (int p = 0; p <= token; p++) {
            std::vector<double> v = vector(p, heads + kv_heads + kv_head);
            double weight = std::exp(score[p] - best);
            sum += weight;
            for (int i = 0; i < D; i++) out[i] += weight * half(v[i]);
        }
        for (double& x : out) x /= sum;
        return out;
    }
    // Queries and probabilities are f16 on the way.
    void compare(const char* what, const std::vector<u16>& got, int first, int rows) const {
        for (int row = 0; row < rows; row++) {
            for (int head = 0; head < heads; head++) {
                std::vector<double> want = attention(first + row, head);
                for (int i = 0; i < D; i++) {
                    double x = f16_to_float(got[((size_t)row * heads + head) * D + i]);
                    if (!(std::fabs(x - want[i]) <= 2e-3)) {
                        printf("%s, D = %d, token %d, head %d of %d (%d), element %d: %g, not %g\n", what, D, first + row, head, heads, kv_heads, i, x, want[i]);
                        exit(1);
                    }
                }
            }
        }
    }

    template <int D>
    void run(int first, int rows) {
        float log2 = scale() * 1.44269504f;
        std::vector<u16> q((size_t)rows * heads * D, 0x7e00), out(q);
        store::Arguments s = {&qkv[(size_t)first * all * D], normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr, q.data(), options(),
                              arguments(), heads, rows, first, log2};
        launch(rows, ceil_div(heads + kv_heads, store::WARPS), 1, store::WARPS * WARP, [&] { store::heads<D>(s); });
        launch((first + rows - 1) / 8 - first / 8 + 1, kv_heads, 1, D, [&] { store::store_values<D>(s); });
        prefill::Arguments p = {q.data(), out.data(), arguments(), heads, rows, first};
        launch(heads, ceil_div(rows, prefill::ROWS), 1, prefill::WARPS * WARP, [&] { prefill::run<D>(p); });
        compare("rows", out, first, rows);
    }
    template <int D>
    void step(int token, int parts) {
        step_with<D, decode::FEW_STAGES, decode::FEW_SPAN, false>(token, parts, token % 2);
        step_with<D, decode::SOME_STAGES, 1, false>(token, parts, parts % 2);
        step_with<D, decode::MANY_STAGES, 1, false>(token, parts, parts % 2);
#if __CUDA_ARCH__ >= 900
        step_with<D, decode::SOME_STAGES, 1, true>(token, 2, parts % 2);
#endif
    }
    template <int D, int STAGES, int SPAN, bool CLUSTER>
    void step_with(int token, int parts, int ordered) {
        int blocks = kv_heads * ceil_div(heads / kv_heads, decode::HEADS);
        int width = heads * D, whole = filled(width);
        std::vector<u16> out((size_t)whole * GROUP_ROWS, 0x7e00);
        std::vector<float> partial((size_t)blocks * parts * decode::HEADS * (D + 2), NAN);
        std::vector<u32> arrived(blocks);
        decode::Arguments d = {&qkv[(size_t)token * all * D], normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr, &token, out.data(),
                               partial.data(), arrived.data(), options(), arguments(), heads / kv_heads, scale() * 1.44269504f, ordered};
        launch(blocks, 1, parts, SPAN * decode::PAGE_WARPS * WARP, [&] { decode::run<D, STAGES, SPAN, CLUSTER>(d); }, CLUSTER ? parts : 1);
        if (ordered) {
            std::vector<u16> row;
            for (int k = 0; k < whole; k++) row.push_back(out[ordered_at(1, 0, k)]);
            for (int k = width; k < whole; k++) {
                if (row[k] != 0) printf("what is missing at the end is %g\n", f16_to_float(row[k])), exit(1);
            }
            out = row;
        }
        compare(CLUSTER ? "a token among pairs" : SPAN > 1 ? "a token" : STAGES > 1 ? "a token among some" : "a token among many", out, token, 1);
        for (u32 n : arrived) {
            if (n != 0) printf("%u blocks are still counted\n", n), exit(1);
        }
    }
};

template <int D>
static void check(int heads, int kv_heads, bool normed, int first, int more, int tokens, int parts) {
    Sequence s(D, heads, kv_heads, first + more + tokens, normed);
    s.run<D>(0, first);
    s.run<D>(first, more);
    for (int i = 0; i < tokens; i++) s.step<D>(first + more + i, i % 2 ? parts : 1);
}

int main() {
    check<32>(4, 2, false, 3, 70, 3, 2);
    check<64>(3, 1, true, 130, 9, 2, 3);
    check<64>(9, 1, false, 1, 1, 2, 2);
    check<128>(4, 1, true, 60, 5, 2, 4);
    check<128>(2, 2, false, 61, 66, 2, 3);
    puts("ok");
}
