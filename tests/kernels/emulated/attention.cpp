// kernels/rope/store.cuh, kernels/attention/{prefill,decode}.cuh and kernels/attention/reference.cu on the CPU, against attention in f64: the
// sources as they ship, with their instructions emulated as the PTX ISA describes them. A sequence is filled by two prefills and continued
// by several tokens at once, and by one token at a time. In 8 bits the codes in the cache are taken as they are, and each is compared
// with the element that it stands for. Prints "ok" or the first error.
#include "cuda.hpp"

#include "attention/splits.cuh"
#include "common/cluster.cuh"
#include "common/heads.cuh"
#include "common/pages.cuh"
#include "common/ptx.cuh"
#include "format/f8.cuh"
#include "format/fragment_major.cuh"

// The shared memory that kernels declare is the one array of cuda.hpp.
namespace prefill {
extern u16 shared[] asm("shared");
#include "attention/prefill.cuh"
#undef KERNEL
#undef KERNEL_OF
}
namespace decode {
extern char shared[] asm("shared");
#include "attention/decode.cuh"
}
// Static shared memory may outlive its block, as no two blocks run at once.
#undef __shared__
#define __shared__ static
namespace store {
#include "rope/store.cuh"
}
namespace reference {
#include "attention/reference.cu"
}

static double half(double x) { return f16_to_float(to_f16((float)x)); }

// A sequence of one layer; all its tokens are known in advance. E: an element of the cache.
template <typename E>
struct Sequence {
    int D, heads, kv_heads, length, all, rotary_dim, window;
    float cap;
    bool normed;
    // Whether keys before norm and rotation are the values too, and whether values are normalized.
    bool keys_as_values = false, value_norm = false;
    // Whether norms are of rotated heads.
    bool rotates_first = false;
    std::vector<float> qkv, q_norm, k_norm, frequencies;
    std::vector<float> sinks;   // [heads], or empty
    std::vector<u8> arena;
    std::vector<u32> table;
    std::vector<u32> unfit;     // [rows]
    bool compares = true;
    static constexpr float EPS = 1e-6f, FACTOR = 1.25f;

    Sequence(int D, int heads, int kv_heads, int length, bool normed, int rotary_dim, int window, float cap)
        : D(D), heads(heads), kv_heads(kv_heads), length(length), all(heads + 2 * kv_heads), rotary_dim(rotary_dim), window(window), cap(cap),
          normed(normed), unfit(length) {
        for (int i = 0; i < length * all * D; i++) qkv.push_back(uniform());
        for (int i = 0; i < D; i++) q_norm.push_back(1 + 0.5f * uniform()), k_norm.push_back(1 + 0.5f * uniform());
        for (int i = 0; i < rotary_dim / 2; i++) frequencies.push_back(std::pow(100.0f, -2.0f * i / rotary_dim));
        // Blocks of two layers, the second of which is used, last to first; and 16 bytes for alignment. Memory that is not written yet holds
        // random numbers.
        int blocks = ceil_div(length, PAGE);
        arena.resize((size_t)blocks * 2 * page() + 16);
        for (int i = 0; i < 2 * blocks; i++) {
            char* of_page = block_0() + (size_t)i * page();
            E* elements = (E*)of_page;
            for (int j = 0; j < 2 * kv_heads * PAGE * D; j++) elements[j] = to_element<E>(uniform(), 1 / 64.0f);
            float* scales = (float*)(elements + 2 * kv_heads * PAGE * D);
            for (int j = 0; HAS_SCALES<E> && j < 2 * kv_heads * PAGE; j++) scales[j] = std::fabs(uniform());
        }
        for (int i = 0; i < blocks; i++) table.push_back(blocks - 1 - i);
    }
    // Bytes of a page.
    int page() const { return 2 * kv_heads * PAGE * (D * (int)sizeof(E) + (HAS_SCALES<E> ? 4 : 0)); }
    char* block_0() { return (char*)(((uintptr_t)arena.data() + 15) & ~(uintptr_t)15); }
    Pages arguments() {
        return {block_0() + page(), table.data(), 2 * (u64)page(), unfit.data(), (int)table.size(), kv_heads, 1};
    }
    HeadOptions options() const { return {frequencies.data(), FACTOR, EPS, rotary_dim, rotates_first}; }
    // Rows have the heads of all projections, or of queries alone for a layer whose keys and values are those of this one.
    RowHeads row(bool has_keys = true) const { return {has_keys ? all : heads, heads + (keys_as_values ? 0 : kv_heads), has_keys, value_norm}; }
    // Leaves values out of the rows of projections.
    void drop_values() {
        std::vector<float> kept;
        for (int token = 0; token < length; token++) {
            for (int i = 0; i < (heads + kv_heads) * D; i++) kept.push_back(qkv[(size_t)token * all * D + i]);
        }
        qkv = kept, all = heads + kv_heads, keys_as_values = true;
    }
    // The queries of some rows.
    std::vector<float> queries(int first, int rows) const {
        std::vector<float> q;
        for (int token = first; token < first + rows; token++) {
            q.insert(q.end(), &qkv[(size_t)token * all * D], &qkv[(size_t)token * all * D] + heads * D);
        }
        return q;
    }
    const float* sink() const { return sinks.empty() ? nullptr : sinks.data(); }
    // Sinks below, among and above the scores.
    void add_sinks() {
        for (int h = 0; h < heads; h++) sinks.push_back(3.0f * h - 3 + uniform());
    }
    float scale() const { return 1 / std::sqrt((float)D); }

    // Head `head` of a token's queries, keys and values after norm and RoPE.
    std::vector<double> vector(int token, int head) const {
        bool is_value = head >= heads + kv_heads;
        const float* x = &qkv[((size_t)token * all + head - (is_value && keys_as_values ? kv_heads : 0)) * D];
        std::vector<double> y(x, x + D);
        if (is_value && value_norm) {
            double squares = 0;
            for (double v : y) squares += v * v;
            for (double& v : y) v /= std::sqrt(squares / D + EPS);
        }
        if (is_value) return y;
        auto normalize = [&](std::vector<double>& y) {
            double squares = 0;
            for (double v : y) squares += v * v;
            for (int i = 0; i < D; i++) y[i] *= (head < heads ? q_norm : k_norm)[i] / std::sqrt(squares / D + EPS);
        };
        if (normed && !rotates_first) normalize(y);
        std::vector<double> r = y;
        int half = rotary_dim / 2;
        for (int i = 0; i < half; i++) {
            double angle = (double)token * frequencies[i], c = FACTOR * std::cos(angle), s = FACTOR * std::sin(angle);
            r[i] = y[i] * c - y[i + half] * s;
            r[i + half] = y[i + half] * c + y[i] * s;
        }
        if (normed && rotates_first) normalize(r);
        return r;
    }
    // A token's key or value as the cache has it, rounded from its exact elements.
    std::vector<double> cached(int token, int head, bool is_value) {
        std::vector<double> exact = vector(token, heads + head + (is_value ? kv_heads : 0)), y(D);
        Pages pages = arguments();
        const E *key = keys_of<E>(pages, D, 0, token, head), *value = values_of<E>(pages, D, 0, token, head);
        float scale = HAS_SCALES<E> ? scales_of(pages, D, 0, token, head)[is_value ? kv_heads * PAGE : 0] : 1;
        double amax = 0;
        for (int i = 0; i < D; i++) {
            y[i] = HAS_SCALES<E> ? (double)element_to_float(is_value ? value[i * PAGE] : key[i]) * scale : half(exact[i]);
            amax = std::max(amax, std::fabs(exact[i]));
            double bound = HAS_SCALES<E> ? std::max(std::fabs(exact[i]) / 16, (double)scale / 1024) * 1.001 + 1e-6 * amax : INFINITY;
            if (std::fabs(y[i] - exact[i]) <= bound) continue;
            printf("D = %d, token %d, head %d, %s %d: %g in 8 bits, not %g\n", D, token, head, is_value ? "value" : "key", i, y[i], exact[i]), exit(1);
        }
        if (HAS_SCALES<E> && !(std::fabs(scale * 448 - amax) <= 1e-5 * amax)) {
            printf("D = %d, token %d, head %d: the scale %g of %g\n", D, token, head, scale, amax), exit(1);
        }
        return y;
    }
    std::vector<double> attention(int token, int head) {
        std::vector<double> q = vector(token, head), out(D), score;
        int kv_head = head / (heads / kv_heads);
        double sum = 0, best = -1e300;
        int start = window > 0 ? std::max(token + 1 - window, 0) : 0;
        for (int p = start; p <= token; p++) {
            std::vector<double> k = cached(p, kv_head, false);
            double dot = 0;
            for (int i = 0; i < D; i++) dot += q[i] * k[i];
            dot *= scale();
            score.push_back(cap > 0 ? cap * std::tanh(dot / cap) : dot);
            best = std::max(best, score.back());
        }
        if (!sinks.empty()) best = std::max(best, (double)sinks[head]), sum = std::exp(sinks[head] - best);
        for (int p = start; p <= token; p++) {
            std::vector<double> v = cached(p, kv_head, true);
            double weight = std::exp(score[p - start] - best);
            sum += weight;
            for (int i = 0; i < D; i++) out[i] += weight * v[i];
        }
        for (double& x : out) x /= sum;
        return out;
    }
    // Queries and probabilities are rounded to f16.
    void compare(const char* what, const std::vector<u16>& got, int first, int rows) {
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

    template <int D, int ROTARY>
    void run(int first, int rows) {
        float log2 = scale() * 1.44269504f;
        std::vector<u16> q((size_t)rows * heads * D, 0x7e00);
        store::Arguments s = {&qkv[(size_t)first * all * D], normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr, q.data(), options(), row(),
                              arguments(), heads, rows, first, log2};
        launch(rows, ceil_div(heads + kv_heads, store::WARPS), 1, store::WARPS * WARP, [&] { store::heads<D, ROTARY, E>(s); });
        launch((first + rows - 1) / 8 - first / 8 + 1, kv_heads, 1, D, [&] { store::store_values<D, E>(s); });
        attend<D>("rows", q, first, rows);
    }
    // Rows of a layer that has queries alone, over the keys and values that this one has stored.
    template <int D, int ROTARY>
    void run_queries(int first, int rows) {
        std::vector<float> own = queries(first, rows);
        std::vector<u16> q((size_t)rows * heads * D, 0x7e00);
        std::vector<u8> before = arena;
        store::Arguments s = {own.data(), normed ? q_norm.data() : nullptr, nullptr, q.data(), options(), row(false), arguments(), heads, rows, first,
                              scale() * 1.44269504f};
        launch(rows, ceil_div(heads, store::WARPS), 1, store::WARPS * WARP, [&] { store::heads<D, ROTARY, E>(s); });
        attend<D>("rows of queries", q, first, rows);
        if (before != arena) puts("rows of queries changed the cache"), exit(1);
    }
    template <int D>
    void attend(const char* what, const std::vector<u16>& q, int first, int rows) {
        std::vector<u16> out(q.size(), 0x7e00);
        prefill::Arguments p = {q.data(), sink(), out.data(), arguments(), heads, rows, first, window, cap * 1.44269504f, 0};
        launch(heads, ceil_div(rows, prefill::ROWS<D>), 1, prefill::MOST_WARPS * WARP, [&] { prefill::run<D, E>(p); });
        if (compares) compare(what, out, first, rows);
    }
    // Rows of which each has the bits that it has as a single token, whichever rows are beside it, with splits of one page or two. All rows are
    // stored. Without keys they are those of a layer that has queries alone.
    template <int D, bool LIMITED, int ROTARY>
    void rows_as_tokens(int first, int rows, bool has_keys = true) {
        constexpr int SPLITS = 8, RING = HAS_SCALES<E> ? 2 : 1;
        const int split_pages = 1 + length % 2;
        const float log2 = scale() * 1.44269504f, cap_log2 = cap * 1.44269504f;
        int group = heads / kv_heads, blocks = kv_heads * ceil_div(group, decode::HEADS);
        const float *q_weight = normed ? q_norm.data() : nullptr, *k_weight = normed ? k_norm.data() : nullptr;
        std::vector<float> own = has_keys ? std::vector<float>(&qkv[(size_t)first * all * D], &qkv[(size_t)(first + rows) * all * D]) : queries(first, rows);
        size_t row_values = own.size() / rows, row_outputs = heads * D;
        std::vector<u16> tokens(rows * row_outputs, 0x7e00), q(tokens), at_once(tokens), in_parts(tokens);
        for (int i = 0; i < rows; i++) {
            int position = first + i;
            // A token that an earlier kernel has stored has no other bits than one that the kernel stores.
            bool stored = i % 3 == 0;
            if (has_keys && !stored) spoil(arguments(), 0, position);
            std::vector<float> partial((size_t)blocks * SPLITS * decode::HEADS * (D + 2), NAN);
            std::vector<u32> arrived(blocks);
            decode::Arguments d = {&own[i * row_values], q_weight, k_weight, sink(), &position, &tokens[i * row_outputs], partial.data(), arrived.data(),
                                   options(), row(has_keys), arguments(), group, log2, cap_log2, window, 0, stored, split_pages};
            auto launch_ring = [&](auto ring) {
                launch(blocks, 1, SPLITS, decode::PAGE_WARPS * WARP, [&] { decode::run<D, LIMITED, ROTARY, ring(), 1, false, E, true>(d); });
            };
            if (i % 2 == 0) {
                launch_ring(std::integral_constant<int, 2 * RING>());
            } else {
                launch_ring(std::integral_constant<int, RING>());
            }
            for (u32 n : arrived) {
                if (n != 0) printf("D = %d: %u blocks of a token are still counted\n", D, n), exit(1);
            }
        }
        store::Arguments s = {own.data(), q_weight, nullptr, q.data(), options(), row(false), arguments(), heads, rows, first, log2};
        s.row.all = (int)row_values / D;
        launch(rows, ceil_div(heads, store::WARPS), 1, store::WARPS * WARP, [&] { store::heads<D, ROTARY, E>(s); });
        auto attend = [&](auto warps, int from, int count, std::vector<u16>& out) {
            constexpr int WARPS = warps(), OF_BLOCK = prefill::ROWS<D, true, WARPS>;
            int row_blocks = (first + from + count - 1) / OF_BLOCK - (first + from) / OF_BLOCK + 1;
            prefill::Arguments p = {&q[from * row_outputs], sink(), &out[from * row_outputs], arguments(), heads, count, first + from, window, cap_log2, split_pages};
            launch(heads, row_blocks, 1, WARPS * WARP, [&] { prefill::run<D, E, true, WARPS>(p); });
        };
        std::integral_constant<int, prefill::MOST_WARPS> all_warps;
        std::integral_constant<int, prefill::MOST_WARPS / (D <= 128 ? 2 : 1)> half;
        attend(all_warps, 0, rows, at_once);
        for (int i = 0, count = 1; i < rows; i += count++) count = std::min(count, rows - i), attend(half, i, count, in_parts);
        compare(has_keys ? "rows as tokens" : "rows of queries as tokens", at_once, first, rows);
        if (at_once != tokens || in_parts != tokens) {
            printf("D = %d, rows from %d on, %d heads (%d): %s have other bits than tokens\n", D, first, heads, kv_heads, at_once != tokens ? "rows at once" : "rows in parts");
            exit(1);
        }
    }
    // Overwrites what is stored of a token of a sequence.
    void spoil(const Pages& pages, int sequence, int position) {
        for (int h = 0; h < kv_heads; h++) {
            for (int j = 0; j < D; j++) {
                keys_of<E>(pages, D, sequence, position, h)[j] = to_element<E>(1, 1);
                values_of<E>(pages, D, sequence, position, h)[j * PAGE] = to_element<E>(1, 1);
            }
            for (int v = 0; HAS_SCALES<E> && v < 2; v++) scales_of(pages, D, sequence, position, h)[v * kv_heads * PAGE] = 3;
        }
    }
    // Keys, values and queries in f32; the cache rounds to f16.
    void run_reference(int first, int rows) {
        std::vector<float> q, k, v, out((size_t)rows * heads * D, NAN);
        for (int token = first; token < first + rows; token++) {
            for (int head = 0; head < heads + 2 * kv_heads; head++) {
                std::vector<double> y = vector(token, head);
                std::vector<float>& to = head < heads ? q : head < heads + kv_heads ? k : v;
                to.insert(to.end(), y.begin(), y.end());
            }
        }
        reference::StoreArguments s = {k.data(), v.data(), arguments(), D, first};
        launch(rows, kv_heads, 1, reference::THREADS, [&] { reference::store<E>(s); });
        reference::AttendArguments a = {q.data(), sink(), out.data(), arguments(), heads, D, first, window, scale(), cap};
        launch(rows, heads, 1, reference::THREADS, [&] { reference::attend<E>(a); });
        if (!compares) return;
        for (int row = 0; row < rows; row++) {
            for (int head = 0; head < heads; head++) {
                std::vector<double> want = attention(first + row, head);
                for (int i = 0; i < D; i++) {
                    float x = out[((size_t)row * heads + head) * D + i];
                    if (std::fabs(x - want[i]) <= 2e-6) continue;
                    printf("the reference, D = %d, token %d, head %d, element %d: %g, not %g\n", D, first + row, head, i, x, want[i]), exit(1);
                }
            }
        }
    }
    // `want` of one row, and nothing of the others.
    void expect_unfit(const char* what, u32 want, size_t row = 0) {
        for (size_t r = 0; r < unfit.size(); r++) {
            u32 of_row = r == row ? want : 0;
            if (unfit[r] != of_row) printf("%s: row %zu has a number that does not fit in layer %u, not %u\n", what, r, unfit[r], of_row), exit(1);
            unfit[r] = 0;
        }
    }
    // Consecutive tokens as rows of a decode step, whose keys and values are stored before.
    template <int D, bool LIMITED, int ROTARY, int STAGES, int SPAN, bool CLUSTER>
    void verify(int first, int rows, int splits) {
        int blocks = kv_heads * ceil_div(heads / kv_heads, decode::HEADS);
        std::vector<int> positions;
        std::vector<u32> tables;
        for (int i = 0; i < rows; i++) positions.push_back(first + i), tables.insert(tables.end(), table.begin(), table.end());
        Pages pages = arguments();
        pages.table = tables.data();
        const float* k_weight = normed ? k_norm.data() : nullptr;
        const float* x = &qkv[(size_t)first * all * D];
        // Each row one position before its own, and then where it is.
        for (int before = 0; before < 2; before++) {
            std::vector<int> shifted = positions;
            for (int& p : shifted) p += before;
            store::RowsArguments s = {x, k_weight, shifted.data(), options(), pages, heads, before};
            launch(rows, ceil_div(2 * kv_heads, store::WARPS), 1, store::WARPS * WARP, [&] { store::store_rows<D, ROTARY, E>(s); });
            std::vector<u16> out((size_t)rows * heads * D, 0x7e00);
            std::vector<float> partial((size_t)rows * blocks * splits * decode::HEADS * (D + 2), NAN);
            std::vector<u32> arrived(rows * blocks);
            decode::Arguments d = {x, normed ? q_norm.data() : nullptr, k_weight, sink(), positions.data(), out.data(), partial.data(), arrived.data(),
                                   options(), row(), pages, heads / kv_heads, scale() * 1.44269504f, cap * 1.44269504f, window, 0, 1, 0};
            launch(blocks, rows, splits, SPAN * decode::PAGE_WARPS * WARP, [&] { decode::run<D, LIMITED, ROTARY, STAGES, SPAN, CLUSTER, E>(d); },
                   CLUSTER ? splits : 1);
            compare("tokens at once", out, first, rows);
            // What is stored a second time was spoiled before.
            for (int i = 0; i < rows; i++) spoil(pages, i, positions[i]);
        }
    }
    template <int D, bool LIMITED, int ROTARY>
    void step(int token, int splits) {
        // Rings of codes have twice as many pages.
        constexpr int RING = HAS_SCALES<E> ? 2 : 1;
        if constexpr (D <= 256) step_with<D, LIMITED, ROTARY, 4 * RING, 2, false>(token, splits, token % 2);
        step_with<D, LIMITED, ROTARY, 2 * RING, 1, false>(token, splits, splits % 2);
        step_with<D, LIMITED, ROTARY, RING, 1, false>(token, splits, splits % 2);
        if constexpr (D == 256) step_with<D, LIMITED, ROTARY, 2, 2, false>(token, splits, token % 2);
        if constexpr (LIMITED) {
            std::vector<u8> before = arena;
            step_with<D, LIMITED, ROTARY, 1, 1, false>(token, splits, token % 2, false);
            if (before != arena) puts("queries of a token changed the cache"), exit(1);
        }
#if __CUDA_ARCH__ >= 900
        if constexpr (!LIMITED && D <= 128) step_with<D, LIMITED, ROTARY, 2, 1, true>(token, 2, splits % 2);
#endif
    }
    // Without keys the row has queries alone, and the token's key and value are in the cache.
    template <int D, bool LIMITED, int ROTARY, int STAGES, int SPAN, bool CLUSTER>
    void step_with(int token, int splits, int fragment_major, bool has_keys = true) {
        std::vector<float> own = queries(token, 1);
        int blocks = kv_heads * ceil_div(heads / kv_heads, decode::HEADS);
        int width = heads * D, whole = padded_k(width);
        std::vector<u16> out((size_t)whole * GROUP_ROWS, 0x7e00);
        std::vector<float> partial((size_t)blocks * splits * decode::HEADS * (D + 2), NAN);
        std::vector<u32> arrived(blocks);
        decode::Arguments d = {has_keys ? &qkv[(size_t)token * all * D] : own.data(), normed ? q_norm.data() : nullptr, normed ? k_norm.data() : nullptr, sink(), &token,
                               out.data(), partial.data(), arrived.data(), options(), row(has_keys), arguments(), heads / kv_heads, scale() * 1.44269504f,
                               cap * 1.44269504f, window, fragment_major, 0, 0};
        launch(blocks, 1, splits, SPAN * decode::PAGE_WARPS * WARP, [&] { decode::run<D, LIMITED, ROTARY, STAGES, SPAN, CLUSTER, E>(d); }, CLUSTER ? splits : 1);
        if (fragment_major) {
            std::vector<u16> row;
            for (int k = 0; k < whole; k++) row.push_back(out[fragment_index(1, 0, k)]);
            for (int k = width; k < whole; k++) {
                if (row[k] != 0) printf("the padding is %g\n", f16_to_float(row[k])), exit(1);
            }
            out = row;
        }
        char what[48];
        snprintf(what, sizeof what, "a token%s, %s %d", has_keys ? "" : "'s queries", CLUSTER ? "cluster, ring" : "ring", STAGES);
        if (compares) compare(what, out, token, 1);
        for (u32 n : arrived) {
            if (n != 0) printf("%u blocks are still counted\n", n), exit(1);
        }
    }
};

template <int D, bool LIMITED = false, int ROTARY = D, typename E = u16>
static void check(int heads, int kv_heads, bool normed, int first, int more, int tokens, int splits, int rotary_dim = D, int window = 0,
                  float cap = 0, bool has_sinks = false, bool rotates_first = false) {
    Sequence<E> s(D, heads, kv_heads, first + more + tokens, normed, rotary_dim, window, cap);
    s.rotates_first = rotates_first;
    if (has_sinks) s.add_sinks();
    s.template run<D, ROTARY>(0, first);
    s.template run<D, ROTARY>(first, more);
    if constexpr (D <= 256) {
        s.template verify<D, LIMITED, ROTARY, 2, 1, false>(first + more, tokens, splits);
        s.template verify<D, LIMITED, ROTARY, 4, 2, false>(first + more, tokens, 1);
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (!LIMITED && D <= 128) s.template verify<D, LIMITED, ROTARY, 2, 1, true>(first + more, tokens, 2);
#endif
    for (int i = 0; i < tokens; i++) s.template step<D, LIMITED, ROTARY>(first + more + i, i % 2 ? splits : 1);
    s.template rows_as_tokens<D, LIMITED, ROTARY>(std::max(s.length - 11, 0), std::min(s.length, 11));
    if constexpr (HAS_SCALES<E>) {
        // The codes and scales are the same, whichever kernel stored them.
        std::vector<u8> before = s.arena;
        s.template run<D, ROTARY>(0, first + more + tokens);
        if (before != s.arena) printf("D = %d: prefill stores other codes than steps\n", D), exit(1);
    }
}

// Heads of Gemma 4: normalized values, which may be the keys, and layers that have queries alone.
template <int D>
static void check_values(int heads, int kv_heads, bool keys_as_values, int first, int more, int tokens, int splits, int window = 0) {
    Sequence<u16> s(D, heads, kv_heads, first + more + tokens, true, D, window, 0);
    s.value_norm = true;
    if (keys_as_values) s.drop_values();
    s.run<D, D>(0, first);
    s.run<D, D>(first, more);
    s.run_queries<D, D>(first, more);
    for (int i = 0; i < tokens; i++) s.step<D, true, D>(first + more + i, i % 2 ? splits : 1);
    for (bool has_keys : {true, false}) s.rows_as_tokens<D, true, D>(std::max(s.length - 11, 0), std::min(s.length, 11), has_keys);
}

template <typename E = u16>
static void check_reference(int D, int heads, int kv_heads, int first, int more, int rotary_dim, int window, float cap, bool has_sinks = false) {
    Sequence<E> s(D, heads, kv_heads, first + more, true, rotary_dim, window, cap);
    if (has_sinks) s.add_sinks();
    s.run_reference(0, first);
    s.run_reference(first, more);
    s.expect_unfit("the reference", 0);
}

// Values, keys and queries of the last token: one that f16 holds after rounding, and others that it does not.
template <typename E>
static void check_unfit() {
    const int D = 64, HEADS = 2, LENGTH = 3, LAST = LENGTH - 1;
    struct { int head; float value; u32 want; } cases[] = {{3, 65519, 0}, {3, -65520, 2}, {3, NAN, 2}, {2, 1e6f, 2}, {0, 1e7f, 2}};
    for (auto& c : cases) {
        Sequence<E> s(D, HEADS, 1, LENGTH, false, D, 0, 0);
        float& x = s.qkv[((size_t)LAST * s.all + c.head) * D + 5];
        s.template run<D, D>(0, LAST);
        s.expect_unfit("before", 0);
        x = c.value;
        // Beside numbers so large the results have no correct digits.
        s.compares = false;
        s.template run<D, D>(LAST, 1);
        s.expect_unfit("a row", c.want);
        s.template run<D, D>(0, LENGTH);
        s.expect_unfit("rows", c.want, LAST);
        s.template step_with<D, false, D, HAS_SCALES<E> ? 2 : 1, 1, false>(LAST, 1, 0);
        s.expect_unfit("a token", c.want);
        s.run_reference(LAST, 1);
        s.expect_unfit("the reference", c.head == 0 ? 0 : c.want);
        // An earlier layer has reported one already.
        s.unfit[0] = 1;
        s.template run<D, D>(LAST, 1);
        s.expect_unfit("a row", 1);
    }
}

int main() {
    check_unfit<u16>();
    check_unfit<u8>();
    check_reference(16, 2, 1, 3, 70, 16, 0, 0);
    check_reference<u8>(48, 2, 2, 66, 5, 20, 30, 0.5f);
    check_reference<u8>(128, 2, 1, 70, 3, 128, 0, 0);
    check_reference(48, 2, 2, 66, 5, 20, 30, 0.5f);
    check_reference(128, 2, 1, 70, 3, 128, 65, 0);
    check_reference(256, 1, 1, 5, 65, 256, 1, 2);
    check_reference(64, 4, 2, 66, 5, 64, 30, 0, true);
    check<32>(4, 2, false, 3, 70, 3, 2);
    check<64>(3, 1, true, 130, 9, 2, 3);
    check<64>(9, 1, false, 1, 1, 2, 2);
    check<128>(4, 1, true, 60, 5, 2, 4);
    check<128>(2, 2, false, 61, 66, 2, 3);
    // In 8 bits.
    check<32, false, 32, u8>(4, 2, false, 3, 70, 3, 2);
    check<64, false, 64, u8>(3, 1, true, 130, 9, 2, 3);
    check<64, false, 64, u8>(9, 1, false, 1, 1, 2, 2);
    check<128, false, 128, u8>(4, 1, true, 60, 5, 2, 4);
    check<128, false, 128, u8>(2, 2, false, 61, 66, 2, 3);
    // Windows within a page, at its end and over several; soft caps that bite.
    check<32, true>(2, 1, true, 70, 65, 2, 2, 32, 1, 0);
    check<64, true>(2, 1, true, 130, 70, 2, 2, 64, 64, 0.5f);
    check<128, true>(1, 1, true, 66, 70, 2, 3, 128, 65, 0);
    check<32, true>(1, 1, false, 10, 200, 2, 2, 32, 100, 1);
    // Sinks, with a window and without.
    check<64, true>(8, 2, false, 130, 5, 3, 2, 64, 0, 0, true);
    check<64, true>(16, 1, false, 60, 70, 3, 3, 64, 16, 0, true);
    check<128, true>(3, 3, true, 3, 66, 2, 2, 128, 0, 1, true);
    // Other sizes, and heads that rotate partially or not at all.
    check<32, true, ANY_ROTARY>(2, 1, true, 3, 20, 2, 2, 20, 0, 0);
    check<80, true, ANY_ROTARY>(2, 1, true, 66, 5, 2, 2, 80, 30, 0);
    check<80, true, ANY_ROTARY>(2, 2, false, 3, 66, 2, 2, 32, 0, 0);
    check<96, true, ANY_ROTARY>(2, 1, true, 66, 5, 2, 2, 96, 0, 1);
    check<128, true, ANY_ROTARY>(2, 1, true, 3, 66, 2, 2, 96, 0, 0);
    check<128, true, ANY_ROTARY>(4, 1, false, 3, 66, 2, 2, 0, 0, 0);
    check<32, true, ANY_ROTARY>(2, 1, true, 66, 5, 2, 2, 0, 0, 0);
    check<192, true>(1, 1, true, 66, 5, 2, 2, 192, 20, 0);
    check<192, true, ANY_ROTARY>(1, 1, true, 3, 66, 1, 2, 64, 0, 0);
    check<256, true>(2, 1, true, 66, 5, 2, 2, 256, 0, 2);
    check<256, true, ANY_ROTARY>(1, 1, false, 66, 5, 1, 2, 128, 9, 0);
    // The first elements rotate, each with its partner in the same lane.
    check<256, false, 64>(4, 1, true, 130, 5, 3, 2, 64);
    check<256, false, 64>(2, 2, false, 3, 60, 2, 2, 64);
    check<128, true, 64>(2, 1, true, 3, 66, 2, 2, 64, 30, 0);
    check_reference(512, 2, 1, 5, 65, 512, 0, 0);
    check_values<32>(4, 2, false, 3, 70, 2, 2, 8);
    check_values<64>(4, 1, true, 66, 5, 2, 2);
    check_values<256>(2, 2, false, 60, 9, 2, 2, 20);
    check_values<512>(8, 1, true, 61, 70, 3, 2);
    check_values<512>(3, 1, false, 30, 3, 2, 3);
    check<512, true>(2, 1, true, 66, 5, 2, 2, 512, 40, 2);
    check<512, true>(9, 1, false, 3, 30, 2, 2, 512, 0, 0, true);
    // Norms of rotated heads.
    check<64>(4, 2, true, 3, 70, 3, 2, 64, 0, 0, false, true);
    check<128, false, 128, u8>(4, 1, true, 60, 5, 2, 4, 128, 0, 0, false, true);
    check<32, true, ANY_ROTARY>(2, 1, true, 66, 5, 2, 2, 20, 9, 0, false, true);
    puts("ok");
}
