// kernels/quantize/{check,expand}.cu on the CPU, from their sources: which bytes are valid block scales, and the dequantized values.
// Cases come on standard input and results go to standard output, as tests/kernels.rs writes and reads them.
#include "cuda.hpp"

#include "common/ptx.cuh"
#include "common/note.cuh"
#include "common/values.cuh"
#include "format/nvfp4.cuh"
#include "format/swizzle.cuh"

namespace checking {
#include "quantize/check.cu"
}
namespace expanding {
#include "quantize/expand.cu"
}

struct Case {
    u32 type;       // f32, f16 or bf16
    u32 rows, row_blocks, swizzled, scale_bytes;
    float global;
};

static void run(const Case& c, const std::vector<uint2>& codes, const std::vector<u32>& scales) {
    u32 blocks = c.rows * c.row_blocks, found = 0;
    u64 note = NOTHING_NOTED;
    // Row-major scales are one long row.
    u32 rows = c.swizzled ? c.rows : 1, row_blocks = blocks / rows;
    u64 words = (u64)rows * ceil_div((int)row_blocks, SCALES_IN_WORD);
    checking::Arguments check = {{{(const u8*)scales.data(), words, 0, row_blocks, (int)c.swizzled}, {}}, {&note, &found}};
    launch(ceil_div((int)words, checking::THREADS), 1, 1, checking::THREADS, [&] { checking::check_scales(check); });
    size_t bytes = (size_t)blocks * BLOCK * (c.type == F32 ? 4 : 2);
    std::vector<uint4> out(bytes / 16 + 1, uint4{0xeeeeeeee, 0xeeeeeeee, 0xeeeeeeee, 0xeeeeeeee});
    expanding::Arguments a = {};
    a.codes = (const u8*)codes.data();
    a.scales = (const u8*)scales.data();
    a.out = (u8*)out.data();
    a.codes_stride = c.row_blocks * 8;
    a.scales_stride = c.swizzled ? 0 : c.row_blocks;
    a.blocks = blocks;
    a.row_blocks = c.row_blocks;
    a.global = c.global;
    a.swizzled = (int)c.swizzled;
    void (*kernels[])(expanding::Arguments) = {expanding::dequantize_f32, expanding::dequantize_f16, expanding::dequantize_bf16};
    launch(ceil_div((int)blocks, expanding::THREADS), 1, 1, expanding::THREADS, [&] { kernels[c.type](a); });
    u32 status[2] = {found, out.back().x == 0xeeeeeeee && out.back().w == 0xeeeeeeee};
    fwrite(status, sizeof status, 1, stdout);
    fwrite(out.data(), 1, bytes, stdout);
}

int main() {
    Case c;
    while (fread(&c, sizeof c, 1, stdin) == 1) {
        std::vector<uint2> codes((size_t)c.rows * c.row_blocks);
        std::vector<u32> scales(ceil_div((int)c.scale_bytes, 4));
        if (fread(codes.data(), 8, codes.size(), stdin) != codes.size()) return 1;
        if (fread(scales.data(), 1, c.scale_bytes, stdin) != c.scale_bytes) return 1;
        run(c, codes, scales);
    }
}
