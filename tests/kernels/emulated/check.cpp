// kernels/quantize/check.cu on the CPU, as it ships: it reports the first invalid scale of two matrices by number and byte, in either
// layout; padding may hold anything. Prints "ok" or the first error.
#include "cuda.hpp"

#include "common/ptx.cuh"
#include "common/note.cuh"
#include "format/swizzle.cuh"

namespace check {
#include "quantize/check.cu"
}

struct Matrix {
    int rows, blocks;
    bool swizzled;
    std::vector<u32> words;

    // Valid scales with invalid padding.
    Matrix(int rows, int blocks, bool swizzled) : rows(rows), blocks(blocks), swizzled(swizzled) {
        size_t bytes = swizzled ? (size_t)ceil_div(rows, SCALE_TILE_ROWS) * ceil_div(blocks, SCALES_IN_WORD) * SCALE_TILE_BYTES : (size_t)rows * blocks;
        words.assign(bytes / 4 + 1, 0xffffffffu);
        for (int i = 0; i < rows * blocks; i++) at(i) = (u8)(i % 0x7f);
    }
    u8& at(int i) {
        int row = i / blocks, block = i % blocks;
        u64 to = scale_row(swizzled, row, blocks) + (swizzled ? block / SCALES_IN_WORD * SCALE_TILE_BYTES + block % SCALES_IN_WORD : block);
        return ((u8*)words.data())[to];
    }
    check::Scales argument(u64 first) {
        int long_rows = swizzled ? rows : 1, row_blocks = swizzled ? blocks : rows * blocks;
        return {(const u8*)words.data(), (u64)long_rows * ceil_div(row_blocks, SCALES_IN_WORD), first, (u32)row_blocks, swizzled};
    }
};

static void expect(Matrix* a, Matrix* b, u64 want) {
    u64 first = NOTHING_NOTED;
    u32 found = 0;
    check::Arguments arguments = {{a->argument(0), {}}, {&first, &found}};
    if (b) arguments.matrices[1] = b->argument((u64)a->rows * a->blocks);
    int words = (int)(arguments.matrices[0].words + arguments.matrices[1].words);
    launch(ceil_div(words, check::THREADS), 1, 1, check::THREADS, [&] { check::check_scales(arguments); });
    if (first != want || found != (want != NOTHING_NOTED)) {
        printf("[%d, %d] %d: noted %llx and %u, not %llx\n", a->rows, a->blocks, a->swizzled, first, found, want);
        exit(1);
    }
}

int main() {
    const int sizes[][2] = {{1, 1}, {3, 5}, {2, 8}, {130, 6}};
    for (auto [rows, blocks] : sizes) {
        for (int layout = 0; layout < 4; layout++) {
            Matrix a(rows, blocks, layout & 1), b(rows + 1, blocks, layout >> 1);
            expect(&a, nullptr, NOTHING_NOTED);
            expect(&a, &b, NOTHING_NOTED);
            int last = (rows + 1) * blocks - 1, total = rows * blocks;
            const int places[] = {last, last / 2, 0};
            for (int i : places) {
                for (int byte : {0x7f, 0x80, 0xff, 0xfe}) {
                    u8 before = b.at(i);
                    b.at(i) = (u8)byte;
                    expect(&a, &b, (u64)(total + i) << 8 | byte);
                    expect(&b, nullptr, (u64)i << 8 | byte);
                    b.at(i) = before;
                }
            }
            // The first of several, whichever block of the grid runs first.
            b.at(last / 2) = 0x81, b.at(last) = 0x80;
            expect(&a, &b, (u64)(total + last / 2) << 8 | 0x81);
            a.at(total - 1) = 0xff;
            expect(&a, &b, (u64)(total - 1) << 8 | 0xff);
            a.at(0) = 0x7f;
            expect(&a, &b, 0x7f);
        }
    }
    puts("ok");
}
