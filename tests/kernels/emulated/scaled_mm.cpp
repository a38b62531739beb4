// kernels/scaled_mm/product.cu on the CPU, against sums in f64: the source as it ships, with its instructions emulated as the PTX ISA
// describes them. tests/kernels.rs builds this twice, with __CUDA_ARCH__ of tensor cores that multiply f16 and of those that multiply e2m1.
// Prints threads and shared memory of each kernel's block, then "ok" or the first error.
#include "cuda.hpp"

#include "scaled_mm/product.cu"

struct Matrix {
    int rows, k;
    bool swizzled;
    // Separate allocations, so that a sanitizer finds accesses past the end.
    std::vector<u8> codes, scales;

    // `k` is a multiple of 16. The padding of swizzled scales is NaN.
    Matrix(int rows, int k, bool swizzled) : rows(rows), k(k), swizzled(swizzled), codes((size_t)rows * k / 2) {
        int blocks = k / 16;
        size_t bytes = swizzled ? (size_t)ceil_div(rows, 128) * ceil_div(blocks, 4) * 512 : (size_t)rows * blocks;
        scales.assign(bytes, 0xff);
        for (u8& c : codes) c = (u8)noise();
        for (int r = 0; r < rows; r++) {
            for (int b = 0; b < blocks; b++) {
                // Any valid scale, but half of them from the ends and the middle of the range.
                u8 special[] = {0x00, 0x01, 0x7e, 0x38};
                scales[place(r, b)] = noise() % 2 ? special[noise() % 4] : (u8)(noise() % 0x7f);
            }
        }
    }
    // As in src/format/swizzle.rs.
    size_t place(int row, int block) const {
        size_t blocks = k / 16;
        if (!swizzled) return row * blocks + block;
        size_t tile = row / 128 * ((blocks + 3) / 4) + block / 4;
        return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
    }
    double at(int row, int column) const {
        u8 byte = codes[((size_t)row * k + column) / 2];
        return e2m1(column % 2 ? byte >> 4 : byte) * ue4m3(scales[place(row, column / 16)]);
    }
    Operand operand() const { return {codes.data(), scales.data(), rows, swizzled}; }
};

template <class T>
static void check(const char* name, void (*kernel)(Arguments), int m, int n, int k, int output) {
    Matrix a(m, k, noise() % 2), b(n, k, noise() % 2);
    constexpr u8 POISON = 0xee;
    int element = output == STORE_F32 ? 4 : 2;
    size_t bytes = (size_t)m * n * element;
    std::vector<u8> out(bytes + 64, POISON);
    Arguments arguments = {a.operand(), b.operand(), out.data(), {3e-7f, 0.37f}, k, output};
    for (blockIdx.y = 0; blockIdx.y < (unsigned)ceil_div(n, T::N); blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < (unsigned)ceil_div(m, T::M); blockIdx.x++) {
            for (int i = 0; i < T::SHARED; i++) shared[i] = (char)noise();
            Cluster(T::THREADS, 1, noise(), [&] { kernel(arguments); });
        }
    }
    char what[128];
    snprintf(what, sizeof what, "%s, [%d, %d] x [%d, %d], swizzled %d and %d, output %d", name, m, k, n, k, a.swizzled, b.swizzled, output);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0, size = 0, factor = (double)3e-7f * 0.37f;
            for (int c = 0; c < k; c++) {
                double term = a.at(i, c) * b.at(j, c) * factor;
                sum += term;
                size += std::fabs(term);
            }
            u32 bits = 0;
            memcpy(&bits, &out[((size_t)i * n + j) * element], element);
            double got = output == STORE_F32 ? __uint_as_float(bits) : output == STORE_F16 ? f16_to_float((u16)bits) : __uint_as_float(bits << 16);
            // Half of the last place of the type, and the rounding of sums in f32.
            double places[] = {0, 0x1p-11, 0x1p-8}, tiny = output == STORE_F16 ? 0x1p-25 : 0;
            if (!(std::fabs(got - sum) <= std::fabs(sum) * places[output] + tiny + size * 1e-6)) {
                printf("%s: (%d, %d) is %g, not %g\n", what, i, j, got, sum);
                exit(1);
            }
        }
    }
    for (size_t i = bytes; i < out.size(); i++) {
        if (out[i] != POISON) printf("%s: written past the end\n", what), exit(1);
    }
}

template <class T>
static void check_tile(const char* name, void (*whole)(Arguments), void (*ragged)(Arguments)) {
    printf("%s: %d threads, %d bytes\n", name, T::THREADS, T::SHARED);
    static_assert(T::SHARED <= 96 << 10, "fits in shared memory");
    int output = 0;
    for (int k : {64, 704, 1088}) {
        int m = 1 + (int)(noise() % (T::M + T::M / 2)), n = 1 + (int)(noise() % (T::N + T::N / 2));
        check<T>(name, whole, m, n, k, output % 3);
        check<T>(name, ragged, n, m, k - 16 * (1 + (int)(noise() % 3)), output++ % 3);
    }
    check<T>(name, whole, T::M + 1, T::N, 320, STORE_F32);
    check<T>(name, ragged, T::M, T::N + 1, 336, STORE_BF16);
}

int main() {
    check_tile<Small>("scaled_mm_16x32", [](Arguments a) { scaled_mm_16x32(a); }, [](Arguments a) { scaled_mm_16x32_ragged(a); });
    check_tile<Medium>("scaled_mm_64x64", [](Arguments a) { scaled_mm_64x64(a); }, [](Arguments a) { scaled_mm_64x64_ragged(a); });
    check_tile<Large>("scaled_mm_128x128", [](Arguments a) { scaled_mm_128x128(a); }, [](Arguments a) { scaled_mm_128x128_ragged(a); });
    puts("ok");
}
