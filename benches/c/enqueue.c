/* Time of a host to enqueue calls on a GPU, and of the GPU to run them: NVFP4_scaled_mm, NVFP4_matmul and
 * NVFP4_quantize (of 8 M rows), a thousand of each in a row on cuda:0, results released as they come.
 *
 *     cargo build --release && cc -O2 -Iinclude benches/c/enqueue.c -Ltarget/release -lNVFP4 -Wl,-rpath,$PWD/target/release -o target/enqueue && target/enqueue
 *
 * run: target/enqueue [CALLS [M N K]]
 *
 * A line for each function: microseconds of the host for a call (the mean of all, the median, the longest, and the mean of the
 * first hundred), then for the same calls until they are done, and how much of the whole the host was free. A host that is as
 * slow as the GPU says nothing of either: take sizes that keep the GPU busy for some tens of microseconds. The driver keeps a
 * bounded number of launches; where the mean is far above the median and the first hundred, the host has waited for room there
 * and not for an answer. */
#define _POSIX_C_SOURCE 200112L
#include <nvfp4.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static NVFP4_Tensor *x, *a_codes, *a_scales, *b_codes, *b_scales, *b_across;

static void stop_unless(int fine, const char *doing)
{
    if (!fine) {
        fprintf(stderr, "%s: %s\n", doing, NVFP4_last_error());
        exit(1);
    }
}

#define OK(call) stop_unless((call) == NVFP4_OK, #call)

static double microseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static void scaled_mm(void)
{
    void *product = NVFP4_scaled_mm(a_codes, b_across, a_scales, b_scales, NVFP4_DTYPE_BFLOAT16);
    stop_unless(product != NULL, "NVFP4_scaled_mm");
    OK(NVFP4_tensor_release((NVFP4_Tensor *)product));
}

static void matmul(void)
{
    NVFP4_Tensor *product = NULL;
    OK(NVFP4_matmul(a_codes, a_scales, 0.5F, b_codes, b_scales, 0.25F, NVFP4_SCALES_SWIZZLED, NVFP4_DTYPE_BFLOAT16, &product));
    OK(NVFP4_tensor_release(product));
}

static void quantize(void)
{
    void *codes = NULL, *scales = NULL;
    NVFP4_quantize(x, &codes, &scales);
    stop_unless(codes != NULL && scales != NULL, "NVFP4_quantize");
    OK(NVFP4_tensor_release((NVFP4_Tensor *)codes));
    OK(NVFP4_tensor_release((NVFP4_Tensor *)scales));
}

static int larger(const void *p, const void *q)
{
    double a = *(const double *)p, b = *(const double *)q;
    return (a > b) - (a < b);
}

static void measure(const char *name, void (*call)(void), int calls, double *taken)
{
    const int first = calls < 100 ? calls : 100;
    double start, enqueued, done, of_first = 0;
    int i;
    /* Kernels are compiled, and memory is there, before anything counts. */
    for (i = 0; i < 20; i++)
        call();
    OK(NVFP4_device_synchronize(NVFP4_DEVICE_CUDA, 0));
    start = microseconds();
    for (i = 0; i < calls; i++) {
        double before = microseconds();
        call();
        taken[i] = microseconds() - before;
    }
    enqueued = microseconds() - start;
    OK(NVFP4_device_synchronize(NVFP4_DEVICE_CUDA, 0));
    done = microseconds() - start;
    for (i = 0; i < first; i++)
        of_first += taken[i];
    qsort(taken, (size_t)calls, sizeof *taken, larger);
    printf("%-16s %10.2f %10.2f %10.2f %10.2f %12.2f %8.0f%%\n", name, enqueued / calls, taken[calls / 2], taken[calls - 1], of_first / first,
           done / calls, 100 * (done - enqueued) / done);
}

/* A tensor [rows, cols] of bfloat16 on the GPU, of values around zero. */
static NVFP4_Tensor *values(int64_t rows, int64_t cols)
{
    const int64_t shape[] = {rows, cols};
    const size_t count = (size_t)rows * (size_t)cols;
    uint16_t *host = malloc(count * sizeof *host);
    uint32_t state = 1;
    NVFP4_Tensor *here = NULL, *there = NULL;
    size_t i;
    stop_unless(host != NULL, "malloc");
    for (i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        /* Values of either sign, from 1/4 to 1. */
        host[i] = (uint16_t)((state >> 16 & 0x807fu) + 0x3e80u + (state >> 8 & 0x80u));
    }
    OK(NVFP4_tensor_from_host(host, shape, 2, NULL, NVFP4_DTYPE_BFLOAT16, NULL, NULL, &here));
    OK(NVFP4_tensor_copy_to_device(here, NVFP4_DEVICE_CUDA, 0, &there));
    OK(NVFP4_tensor_release(here));
    free(host);
    return there;
}

/* Codes and swizzled scales of a matrix of values. */
static void quantized(int64_t rows, int64_t k, NVFP4_Tensor **codes, NVFP4_Tensor **scales)
{
    NVFP4_Tensor *dense = values(rows, k);
    NVFP4_QuantizeOptions options;
    float global;
    OK(NVFP4_quantize_options_init(&options, sizeof options));
    options.levels = NVFP4_LEVELS_SINGLE;
    options.scale_layout = NVFP4_SCALES_SWIZZLED;
    OK(NVFP4_tensor_quantize(dense, &options, codes, scales, &global));
    OK(NVFP4_tensor_release(dense));
}

/* A size from the command line, or the default. */
static int64_t size(int argc, char **argv, int at, int64_t otherwise)
{
    long given = argc > at ? strtol(argv[at], NULL, 10) : (long)otherwise;
    if (given <= 0 || given > 1 << 20) {
        fprintf(stderr, "usage: enqueue [CALLS [M N K]], each from 1 to %d\n", 1 << 20);
        exit(2);
    }
    return given;
}

int main(int argc, char **argv)
{
    const int calls = (int)size(argc, argv, 1, 1000);
    const int64_t m = size(argc, argv, 2, 2048), n = size(argc, argv, 3, 4096), k = size(argc, argv, 4, 4096);
    const int64_t across[] = {k / 2, n}, strides[] = {1, k / 2};
    double *taken = malloc((size_t)calls * sizeof *taken);
    stop_unless(taken != NULL, "malloc");
    if (NVFP4_device_synchronize(NVFP4_DEVICE_CUDA, 0) != NVFP4_OK) {
        printf("SKIPPED no CUDA device: %s\n", NVFP4_last_error());
        free(taken);
        return 0;
    }
    x = values(8 * m, k);
    quantized(m, k, &a_codes, &a_scales);
    quantized(n, k, &b_codes, &b_scales);
    OK(NVFP4_tensor_view(b_codes, across, 2, strides, 0, &b_across));

    printf("%d calls, products of [%lld, %lld] and [%lld, %lld], values [%lld, %lld]; microseconds per call\n", calls, (long long)m,
           (long long)k, (long long)n, (long long)k, (long long)(8 * m), (long long)k);
    printf("%-16s %10s %10s %10s %10s %12s %9s\n", "", "enqueued", "median", "longest", "first 100", "until done", "free");
    measure("NVFP4_scaled_mm", scaled_mm, calls, taken);
    measure("NVFP4_matmul", matmul, calls, taken);
    measure("NVFP4_quantize", quantize, calls, taken);

    OK(NVFP4_tensor_release(b_across));
    OK(NVFP4_tensor_release(b_codes));
    OK(NVFP4_tensor_release(b_scales));
    OK(NVFP4_tensor_release(a_codes));
    OK(NVFP4_tensor_release(a_scales));
    OK(NVFP4_tensor_release(x));
    free(taken);
    return 0;
}
