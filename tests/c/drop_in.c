/* The seven functions of TorchSharp hosts, with the library's own tensors, called as those hosts call them. */
#include "check.h"
#include <math.h>

enum { M = 33, N = 48, K = 96 };

/* The reordering that hosts apply to a row-major scale [rows, k_blocks] before NVFP4_scaled_mm. */
static size_t swizzle(const uint8_t *scale, size_t rows, size_t k_blocks, uint8_t *out)
{
    size_t tiles = (k_blocks + 3) / 4, length = (rows + 127) / 128 * tiles * 512;
    memset(out, 0, length);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < k_blocks; c++)
            out[(r / 128 * tiles + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4] = scale[r * k_blocks + c];
    return length;
}

static double e2m1(unsigned code)
{
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

static double e4m3(unsigned byte)
{
    unsigned exponent = byte >> 3 & 15, mantissa = byte & 7;
    return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, (int)exponent - 10);
}

static double decode(const uint8_t *codes, const uint8_t *scales, size_t row, size_t k)
{
    uint8_t pair = codes[(row * K + k) / 2];
    return e2m1(k % 2 ? pair >> 4 : pair & 15) * e4m3(scales[row * (K / 16) + k / 16]);
}

/* Quantizes x [rows, K] and copies the parts out. */
static void quantize(float *x, int64_t rows, void **qdata, uint8_t *codes, uint8_t *scales)
{
    const int64_t shape[] = {rows, K};
    NVFP4_Tensor *input;
    void *scale = NULL;
    int32_t dtype;
    int64_t sizes[2];
    size_t rank;
    OK(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    NVFP4_quantize(input, qdata, &scale);
    CHECK(*qdata != NULL && scale != NULL && *qdata != (void *)input && NVFP4_last_status() == NVFP4_OK);
    OK(NVFP4_tensor_dtype(*qdata, &dtype));
    CHECK(dtype == NVFP4_DTYPE_UINT8);
    OK(NVFP4_tensor_dtype(scale, &dtype));
    CHECK(dtype == NVFP4_DTYPE_FLOAT8_E4M3FN);
    OK(NVFP4_tensor_shape(*qdata, sizes, 2, &rank));
    CHECK(rank == 2 && sizes[0] == rows && sizes[1] == K / 2);
    OK(NVFP4_tensor_shape(scale, sizes, 2, &rank));
    CHECK(rank == 2 && sizes[0] == rows && sizes[1] == K / 16);
    OK(NVFP4_tensor_copy_to_host(*qdata, codes, (size_t)rows * K / 2));
    OK(NVFP4_tensor_copy_to_host(scale, scales, (size_t)rows * K / 16));
    OK(NVFP4_tensor_release(scale));
    OK(NVFP4_tensor_release(input));
}

/* The E4M3 byte nearest to a value in [0, 448]; a tie goes to the even one. */
static uint8_t nearest_e4m3(double value)
{
    uint8_t best = 0;
    for (uint8_t byte = 1; byte <= 0x7e; byte++) {
        double a = fabs(e4m3(byte) - value), b = fabs(e4m3(best) - value);
        if (a < b || (a <= b && byte % 2 == 0))
            best = byte;
    }
    return best;
}

/* The E2M1 code nearest to a value, ties to even; values above 6 go to 6. */
static uint8_t nearest_e2m1(float value)
{
    uint8_t best = 0;
    for (uint8_t code = 1; code < 8; code++) {
        double a = fabs(e2m1(code) - fabs((double)value)), b = fabs(e2m1(best) - fabs((double)value));
        if (a < b || (a <= b && code % 2 == 0))
            best = code;
    }
    return value < 0 ? best | 8 : best;
}

/* The rule of the hosts' reference, in another hand: the scale is amax / 6, clamped to [2^-16, 448] and cast to E4M3, where
 * it may become 0; values are divided by it plus 1e-12. Leading dimensions are folded, and strides are followed. */
static void the_rule(void)
{
    enum { A = 2, B = 3, WIDTH = 64, COUNT = A * B * WIDTH };
    static float x[COUNT], transposed[COUNT];
    static uint16_t halves[COUNT];
    static uint8_t codes[3][COUNT / 2], scales[3][COUNT / 16];
    for (int i = 0; i < COUNT; i++) {
        /* bfloat16 values of both signs, in blocks of very different magnitudes: 2^-22 to 2^13. */
        uint32_t bits = (uint32_t)i * 2654435761u & 0x807f0000u, value;
        value = bits | (uint32_t)(105 + i / 16 * 3 / 2) << 23;
        memcpy(&x[i], &value, 4);
        halves[i] = (uint16_t)(value >> 16);
    }
    for (int i = 32; i < 48; i++) {
        x[i] = i % 2 ? -0.0f : 0.0f;
        halves[i] = i % 2 ? 0x8000u : 0;
    }
    for (int r = 0; r < A * B; r++)
        for (int c = 0; c < WIDTH; c++)
            transposed[c * A * B + r] = x[r * WIDTH + c];

    const int64_t folded[] = {A, B, WIDTH}, strides[] = {B, 1, A * B};
    void *inputs[3] = {x, transposed, halves};
    for (int i = 0; i < 3; i++) {
        NVFP4_Tensor *input = NULL;
        void *q = NULL, *s = NULL;
        int64_t sizes[3];
        size_t rank;
        OK(NVFP4_tensor_from_host(inputs[i], folded, 3, i == 1 ? strides : NULL,
                                  i == 2 ? NVFP4_DTYPE_BFLOAT16 : NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
        NVFP4_quantize(input, &q, &s);
        OK(NVFP4_last_status());
        OK(NVFP4_tensor_shape(q, sizes, 3, &rank));
        CHECK(rank == 3 && sizes[0] == A && sizes[1] == B && sizes[2] == WIDTH / 2);
        OK(NVFP4_tensor_shape(s, sizes, 3, &rank));
        CHECK(rank == 3 && sizes[0] == A && sizes[1] == B && sizes[2] == WIDTH / 16);
        OK(NVFP4_tensor_copy_to_host(q, codes[i], COUNT / 2));
        OK(NVFP4_tensor_copy_to_host(s, scales[i], COUNT / 16));
        OK(NVFP4_tensor_release(q));
        OK(NVFP4_tensor_release(s));
        OK(NVFP4_tensor_release(input));
        CHECK(memcmp(codes[i], codes[0], COUNT / 2) == 0 && memcmp(scales[i], scales[0], COUNT / 16) == 0);
    }
    for (int b = 0; b < COUNT / 16; b++) {
        float amax = 0;
        for (int i = 16 * b; i < 16 * b + 16; i++)
            amax = fmaxf(amax, fabsf(x[i]));
        uint8_t scale = nearest_e4m3((double)fminf(fmaxf(amax / 6, 0x1p-16f), 448));
        CHECK(scales[0][b] == scale);
        for (int i = 16 * b; i < 16 * b + 16; i++) {
            uint8_t code = nearest_e2m1(x[i] / ((float)e4m3(scale) + 1e-12f));
            CHECK((i % 2 ? codes[0][i / 2] >> 4 : codes[0][i / 2] & 15) == code);
        }
    }
    /* The rows have blocks below the clamp, one of zeros and ones above it, so all of the rule was seen. */
    CHECK(scales[0][0] == 0 && scales[0][2] == 0 && codes[0][16] == 0 && scales[0][COUNT / 16 - 1] == 0x7e);

    const int64_t odd[] = {2, 24};
    NVFP4_Tensor *input = NULL;
    void *q = x, *s = x;
    OK(NVFP4_tensor_from_host(x, odd, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    NVFP4_quantize(input, &q, &s);
    CHECK(q == NULL && s == NULL);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_last_status());
    SAYS("24");
    OK(NVFP4_tensor_release(input));
}

/* On a GPU calls do not wait; a later one reports the error, once. */
static void found_later(void)
{
    static float x[2][K];
    static uint8_t codes[2 * K / 2];
    const int64_t shape[] = {2, K};
    NVFP4_Tensor *input;
    void *q = NULL, *s = NULL;
    if (!has_place(ON_DEVICE, "what is found later"))
        return;
    x[1][5] = NAN;
    OK(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    NVFP4_Tensor *there = put(input, ON_DEVICE);
    NVFP4_quantize(there, &q, &s);
    CHECK(q != NULL && s != NULL && NVFP4_last_status() == NVFP4_OK);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_tensor_copy_to_host(q, codes, sizeof codes));
    SAYS("NVFP4_quantize (checked call ");
    SAYS("index 101 (row 1, column 5) is NaN");
    OK(NVFP4_tensor_copy_to_host(q, codes, sizeof codes));
    OK(NVFP4_device_synchronize(NVFP4_DEVICE_CUDA, 0));
    OK(NVFP4_tensor_release(q));
    OK(NVFP4_tensor_release(s));

    /* Once the device has reported, also through a call that does not wait; that call then does nothing. */
    NVFP4_quantize(there, &q, &s);
    CHECK(NVFP4_last_status() == NVFP4_OK);
    OK(NVFP4_tensor_release(q));
    OK(NVFP4_tensor_release(s));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_device_synchronize(NVFP4_DEVICE_CUDA, 0));
    OK(NVFP4_tensor_release(there));
    OK(NVFP4_tensor_release(input));
}

/* Managed memory as the hosts use it: the probe, and a tensor there and back where there is a device for it. */
static void managed(NVFP4_Tensor *host)
{
    uint64_t bytes;
    OK(NVFP4_tensor_bytes(host, &bytes));
    CHECK(bytes <= 4096);
    CHECK(NVFP4_is_managed_tensor(host) == 0);
    NVFP4_managed_prefetch(host, 0);
    CHECK(NVFP4_last_status() == NVFP4_INVALID_ARGUMENT);
    SAYS("memory of the host");

    /* Whatever the policy was to be, the environment may have switched managed memory off. */
    int32_t policy = -1, can = -1;
    OK(NVFP4_memory_set_managed_policy(NVFP4_MANAGED_PREFERRED));
    OK(NVFP4_memory_get_managed_policy(&policy));
    const int off = policy == NVFP4_MANAGED_DISABLED;
    OK(NVFP4_memory_set_managed_policy(NVFP4_MANAGED_DISABLED));
    OK(NVFP4_memory_get_managed_policy(&policy));
    CHECK(policy == NVFP4_MANAGED_DISABLED && NVFP4_can_use_managed() == 0);
    CHECK(NVFP4_to_managed(host, -1, 0) == NULL && NVFP4_last_status() == NVFP4_UNSUPPORTED);
    SAYS(off ? "TS_Q4_DISABLE_UM" : "policy");
    NVFP4_Tensor *kept;
    void *at[2];
    OK(NVFP4_tensor_by_managed_policy(host, 0, 1, &kept));
    OK(NVFP4_tensor_data(host, &at[0]));
    OK(NVFP4_tensor_data(kept, &at[1]));
    CHECK(kept != host && at[0] == at[1]);
    OK(NVFP4_tensor_release(kept));

    OK(NVFP4_memory_set_managed_policy(NVFP4_MANAGED_REQUIRED));
    OK(NVFP4_memory_can_be_managed(0, &can));
    CHECK(can == NVFP4_can_use_managed());
    if (!can) {
        CHECK(NVFP4_to_managed(host, 0, 0) == NULL);
        SAYS("anaged memory");
        if (!off)
            CHECK(NVFP4_tensor_by_managed_policy(host, 0, 0, &kept) != NVFP4_OK);
        OK(NVFP4_memory_set_managed_policy(NVFP4_MANAGED_PREFERRED));
        OK(NVFP4_tensor_by_managed_policy(host, 0, 0, &kept));
        CHECK(NVFP4_is_managed_tensor(kept) == 0);
        OK(NVFP4_tensor_release(kept));
        printf("SKIPPED managed memory: there is no device for it\n");
        return;
    }
    OK(NVFP4_memory_set_managed_policy(NVFP4_MANAGED_PREFERRED));
    char first[4096], second[4096];
    OK(NVFP4_tensor_copy_to_host(host, first, bytes));
    void *there = NVFP4_to_managed(host, 0, 1);
    CHECK(there != NULL && NVFP4_is_managed_tensor(there) == 1);
    int32_t device_type, device_index;
    OK(NVFP4_tensor_device(there, &device_type, &device_index));
    CHECK(device_type == NVFP4_DEVICE_CUDA && device_index == 0);
    void *again = NVFP4_to_managed(there, -1, 0);
    CHECK(again != NULL && again != there && NVFP4_is_managed_tensor(again) == 1);
    OK(NVFP4_tensor_release(again));
    NVFP4_managed_prefetch(there, 0);
    CHECK(NVFP4_last_status() == NVFP4_OK);
    OK(NVFP4_tensor_copy_to_host(there, second, bytes));
    CHECK(memcmp(first, second, bytes) == 0);
    NVFP4_managed_prefetch(there, -1);
    CHECK(NVFP4_last_status() == NVFP4_OK);
    OK(NVFP4_tensor_release(there));
}

int main(void)
{
    the_rule();
    static float a[M * K], b[N * K], out[M * N];
    static uint8_t a_codes[M * K / 2], a_scales[M * K / 16], b_codes[N * K / 2], b_scales[N * K / 16];
    static uint8_t a_swizzled[1024], b_swizzled[1024];
    for (int i = 0; i < M * K; i++)
        a[i] = sinf(0.9f * (float)i) * 3;
    for (int i = 0; i < N * K; i++)
        b[i] = cosf(0.4f * (float)i) * 0.05f;
    /* A block of zeros has scale 0. */
    for (int i = 16; i < 32; i++)
        a[i] = 0;
    void *qa = NULL, *qb = NULL;
    quantize(a, M, &qa, a_codes, a_scales);
    quantize(b, N, &qb, b_codes, b_scales);
    CHECK(a_scales[1] == 0 && a_codes[8] == 0 && a_codes[15] == 0);
    for (size_t i = 0; i < M * K; i++) {
        /* Half of the widest gap, 1, and the largest value pushed past 6 by a scale that was rounded down. */
        double off = fabs(decode(a_codes, a_scales, i / K, i % K) - (double)a[i]);
        CHECK(off <= 1.01 * e4m3(a_scales[i / 16]));
    }

    size_t a_length = swizzle(a_scales, M, K / 16, a_swizzled), b_length = swizzle(b_scales, N, K / 16, b_swizzled);
    const int64_t a_shape[] = {(int64_t)a_length}, b_shape[] = {(int64_t)b_length};
    const int64_t t_shape[] = {K / 2, N}, t_strides[] = {1, K / 2};
    NVFP4_Tensor *scale_a, *scale_b, *qb_t;
    OK(NVFP4_tensor_from_host(a_swizzled, a_shape, 1, NULL, NVFP4_DTYPE_FLOAT8_E4M3FN, NULL, NULL, &scale_a));
    /* Scales of weights out of a .dat file come as bytes. */
    OK(NVFP4_tensor_from_host(b_swizzled, b_shape, 1, NULL, NVFP4_DTYPE_UINT8, NULL, NULL, &scale_b));
    OK(NVFP4_tensor_view(qb, t_shape, 2, t_strides, 0, &qb_t));

    const int8_t dtypes[] = {NVFP4_DTYPE_FLOAT32, NVFP4_DTYPE_BFLOAT16, NVFP4_DTYPE_FLOAT16};
    const double bounds[] = {1e-6, 3e-3, 1e-3};
    const int there[PLACES] = {1, has_place(ON_DEVICE, "products"), has_place(MANAGED, "products")};
    for (int way = 0; way < 3 * PLACES; way++) {
        const int d = way % 3, place = way / 3;
        if (!there[place])
            continue;
        NVFP4_Tensor *mat1 = put(qa, place), *rows = put(qb, place), *mat2 = NULL;
        NVFP4_Tensor *scale1 = put(scale_a, place), *scale2 = put(scale_b, place);
        OK(NVFP4_tensor_view(rows, t_shape, 2, t_strides, 0, &mat2));
        void *product = NVFP4_scaled_mm(mat1, mat2, scale1, scale2, dtypes[d]);
        CHECK(product != NULL && NVFP4_last_status() == NVFP4_OK);
        CHECK(is_on_device(product) == (place != ON_HOST));
        if (place != ON_HOST) {
            CHECK(NVFP4_scaled_mm(mat1, mat2, scale1, scale_b, dtypes[d]) == NULL);
            CHECK(NVFP4_last_status() == NVFP4_INVALID_ARGUMENT);
            SAYS("the memory of the host");
            CHECK(NVFP4_scaled_mm(qa, mat2, scale_a, scale2, dtypes[d]) == NULL);
            SAYS("cuda:0");
        }
        NVFP4_Tensor *const used[] = {mat2, mat1, rows, scale1, scale2};
        for (int t = 0; t < 5; t++)
            OK(NVFP4_tensor_release(used[t]));
        int32_t dtype;
        OK(NVFP4_tensor_dtype(product, &dtype));
        CHECK(dtype == dtypes[d]);
        OK(NVFP4_tensor_copy_as_float(product, out, M * N));
        OK(NVFP4_tensor_release(product));
        double error = 0, norm = 0;
        for (size_t i = 0; i < M; i++) {
            for (size_t j = 0; j < N; j++) {
                double sum = 0;
                for (size_t k = 0; k < K; k++)
                    sum += decode(a_codes, a_scales, i, k) * decode(b_codes, b_scales, j, k);
                error += pow((double)out[i * N + j] - sum, 2);
                norm += sum * sum;
            }
        }
        CHECK(sqrt(error) <= bounds[d] * sqrt(norm));
    }

    /* Invalid arguments give NULL and a reason, and never a crash. */
    void *q = qa, *s = qa;
    int foreign = 0;
    NVFP4_quantize(&foreign, &q, &s);
    CHECK(q == NULL && s == NULL && NVFP4_last_status() == NVFP4_INVALID_HANDLE);
    SAYS("libtorch");
    NVFP4_quantize(NULL, &q, &s);
    CHECK(q == NULL && s == NULL && NVFP4_last_status() == NVFP4_INVALID_HANDLE);
    NVFP4_quantize(qa, &q, &s);
    CHECK(q == NULL && NVFP4_last_status() == NVFP4_INVALID_ARGUMENT);
    SAYS("uint8");
    NVFP4_quantize(scale_a, NULL, NULL);
    CHECK(NVFP4_last_status() == NVFP4_INVALID_ARGUMENT);
    /* The weight is square in bytes, so only its strides tell that it was not transposed. */
    CHECK(NVFP4_scaled_mm(qa, qb, scale_a, scale_b, NVFP4_DTYPE_FLOAT32) == NULL);
    CHECK(NVFP4_last_status() == NVFP4_INVALID_ARGUMENT);
    SAYS("transposed");
    CHECK(NVFP4_scaled_mm(qa, qb_t, scale_a, qa, NVFP4_DTYPE_FLOAT32) == NULL);
    SAYS("swizzled");
    CHECK(NVFP4_scaled_mm(qa, qb_t, scale_a, scale_b, NVFP4_DTYPE_INT8) == NULL);
    SAYS("int8");
    CHECK(NVFP4_scaled_mm(qa, NULL, scale_a, scale_b, NVFP4_DTYPE_FLOAT32) == NULL);
    CHECK(NVFP4_scaled_mm(qa, qb_t, &foreign, scale_b, NVFP4_DTYPE_FLOAT32) == NULL);
    SAYS("scale_a");

    found_later();
    managed(qa);
    CHECK(NVFP4_is_managed_tensor(NULL) == 0 && NVFP4_is_managed_tensor(&foreign) == 0);
    CHECK(NVFP4_last_status() == NVFP4_OK);
    NVFP4_empty_cache();
    CHECK(NVFP4_last_status() == NVFP4_OK);

    OK(NVFP4_tensor_release(qb_t));
    OK(NVFP4_tensor_release(scale_a));
    OK(NVFP4_tensor_release(scale_b));
    OK(NVFP4_tensor_release(qa));
    OK(NVFP4_tensor_release(qb));
    return report("drop_in");
}
