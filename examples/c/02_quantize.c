/* Quantize a matrix to NVFP4, expand it again, and check the error against what the format promises.
 *
 *     cc 02_quantize.c $(pkg-config --cflags --libs nvfp4) -lm -o 02_quantize && ./02_quantize
 */
#include <math.h>
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROWS = 8, K = 256, BLOCK = 16 };

/* Every call that can fail returns a status, and sets an error message of one line. */
static void check(NVFP4_Status status)
{
    if (status != NVFP4_OK) {
        fprintf(stderr, "%s: %s\n", NVFP4_status_name(status), NVFP4_last_error());
        exit(1);
    }
}

int main(void)
{
    static float x[ROWS * K], y[ROWS * K];
    for (int i = 0; i < ROWS * K; i++)
        x[i] = sinf(0.37f * (float)i) * expf(-0.001f * (float)(i % 500));

    /* A tensor over our own memory: no copy, and no deleter, since x outlives it. */
    const int64_t shape[] = {ROWS, K};
    NVFP4_Tensor *input;
    check(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));

    /* Options start from their defaults, so that fields added later keep theirs. */
    NVFP4_QuantizeOptions options;
    check(NVFP4_quantize_options_init(&options, sizeof options));
    options.recipe = NVFP4_RECIPE_FOUR_OVER_SIX;

    NVFP4_Tensor *codes, *scales, *expanded;
    float global_scale;
    check(NVFP4_tensor_quantize(input, &options, &codes, &scales, &global_scale));
    check(NVFP4_tensor_dequantize(codes, scales, global_scale, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT32, &expanded));
    check(NVFP4_tensor_copy_to_host(expanded, y, sizeof y));

    uint64_t code_bytes, scale_bytes;
    check(NVFP4_tensor_bytes(codes, &code_bytes));
    check(NVFP4_tensor_bytes(scales, &scale_bytes));
    printf("%zu bytes of float32 in %llu bytes of NVFP4\n", sizeof x, (unsigned long long)(code_bytes + scale_bytes));

    /* The widest gap between neighbouring codes is from 4 to 6, so the error is at most 1 on the scale where the block's
     * largest value is 6 (or 4), and that scale is itself rounded to 4 significant bits. */
    double worst = 0, error = 0, norm = 0;
    for (int b = 0; b < ROWS * K; b += BLOCK) {
        double largest = 0, off = 0;
        for (int i = b; i < b + BLOCK; i++) {
            double d = (double)y[i] - (double)x[i];
            largest = fmax(largest, fabs((double)x[i]));
            off = fmax(off, fabs(d));
            error += d * d;
            norm += (double)x[i] * (double)x[i];
        }
        worst = fmax(worst, off / largest);
    }
    printf("worst error: %.3f of a block's largest value; relative error of the whole: %.4f\n", worst,
           sqrt(error / norm));

    check(NVFP4_tensor_release(expanded));
    check(NVFP4_tensor_release(scales));
    check(NVFP4_tensor_release(codes));
    check(NVFP4_tensor_release(input));
    NVFP4_empty_cache();
    return worst <= 1.0 / 4 * (1 + 1.0 / 16) && sqrt(error / norm) < 0.1 ? 0 : 1;
}
