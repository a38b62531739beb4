/* Multiply in 4 bits: both operands in NVFP4 (W4A4), and an NVFP4 weight with activations as they are (W4A16), each compared
 * with a plain loop over the decoded values.
 *
 *     cc 03_scaled_mm.c $(pkg-config --cflags --libs nvfp4) -lm -o 03_scaled_mm && ./03_scaled_mm
 */
#include <math.h>
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>

enum { M = 5, N = 48, K = 320 };

static void check(NVFP4_Status status)
{
    if (status != NVFP4_OK) {
        fprintf(stderr, "%s: %s\n", NVFP4_status_name(status), NVFP4_last_error());
        exit(1);
    }
}

/* Numbers in [-1, 1) without a pattern. */
static float noise(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

/* A matrix in NVFP4, and its decoded values. */
typedef struct {
    NVFP4_Tensor *codes, *scales;
    float global_scale;
    float values[N * K];
} Matrix;

static void quantize(float *x, int64_t rows, Matrix *out)
{
    const int64_t shape[] = {rows, K};
    NVFP4_Tensor *input, *values;
    check(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    check(NVFP4_tensor_quantize(input, NULL, &out->codes, &out->scales, &out->global_scale));
    check(NVFP4_tensor_dequantize(out->codes, out->scales, out->global_scale, NVFP4_SCALES_LINEAR,
                                  NVFP4_DTYPE_FLOAT32, &values));
    check(NVFP4_tensor_copy_as_float(values, out->values, (size_t)rows * K));
    check(NVFP4_tensor_release(values));
    check(NVFP4_tensor_release(input));
}

/* The relative L2 error of `product`, which is released, against the product of x and w in double. */
static double error_of(NVFP4_Tensor *product, const float *x, const float *w)
{
    static float y[M * N];
    double error = 0, norm = 0;
    check(NVFP4_tensor_copy_as_float(product, y, M * N));
    check(NVFP4_tensor_release(product));
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++)
                sum += (double)x[i * K + k] * (double)w[j * K + k];
            error += ((double)y[i * N + j] - sum) * ((double)y[i * N + j] - sum);
            norm += sum * sum;
        }
    }
    return sqrt(error / norm);
}

int main(void)
{
    static float x[M * K], w[N * K];
    static Matrix a, b;
    for (int i = 0; i < M * K; i++)
        x[i] = noise();
    for (int i = 0; i < N * K; i++)
        w[i] = 0.02f * noise();
    quantize(x, M, &a);
    quantize(w, N, &b);

    NVFP4_Tensor *product;
    check(NVFP4_matmul(a.codes, a.scales, a.global_scale, b.codes, b.scales, b.global_scale, NVFP4_SCALES_LINEAR,
                       NVFP4_DTYPE_FLOAT32, &product));
    double w4a4 = error_of(product, a.values, b.values);

    /* A weight that is used more than once is prepared once. */
    const int64_t shape[] = {M, K};
    NVFP4_Weight *weight;
    NVFP4_Tensor *input;
    check(NVFP4_weight_create(b.codes, b.scales, b.global_scale, NVFP4_SCALES_LINEAR, &weight));
    check(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    check(NVFP4_linear(weight, input, NVFP4_ACTIVATIONS_EXACT, NVFP4_DTYPE_FLOAT32, &product));
    double w4a16 = error_of(product, x, b.values);
    check(NVFP4_linear(weight, input, NVFP4_ACTIVATIONS_INT8, NVFP4_DTYPE_FLOAT32, &product));
    double w4a8 = error_of(product, x, b.values);

    printf("relative error against double: W4A4 %.1e, W4A16 %.1e, W4A8 %.1e\n", w4a4, w4a16, w4a8);

    check(NVFP4_tensor_release(input));
    check(NVFP4_weight_release(weight));
    check(NVFP4_tensor_release(a.codes));
    check(NVFP4_tensor_release(a.scales));
    check(NVFP4_tensor_release(b.codes));
    check(NVFP4_tensor_release(b.scales));
    NVFP4_empty_cache();
    /* W4A4 and W4A16 are exact up to the order of summation; W4A8 rounds activations to 8 bits. */
    return w4a4 <= 1e-6 && w4a16 <= 1e-6 && w4a8 > 1e-6 && w4a8 <= 1e-2 ? 0 : 1;
}
