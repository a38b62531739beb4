/* A TorchSharp host, in C: host TORCHSHARP LIBNVFP4 [LIBTORCH_CUDA].
 *
 * It is linked against none of the three, loads the first the way .NET does, and looks up every function of the second for each
 * call, as the hosts' probes do. It checks what those hosts rely on; see torchsharp.cpp for the other side. The
 * numbers in brackets are those of the hosts' own test cases. The last line is "host: N checks, N failed". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <math.h>
#include <nvfp4.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int checks, failures;
static const char *library;

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        checks++;                                                                                            \
        if (!(condition)) {                                                                                  \
            failures++;                                                                                      \
            printf("%s:%d: not so: %s (%s)\n", __FILE__, __LINE__, #condition, NV(NVFP4_last_error)());      \
        }                                                                                                    \
    } while (0)

/* A function of the library, from a handle that is closed before the call. */
static void *probe(const char *name)
{
    void *handle = dlopen(library, RTLD_LAZY);
    void *symbol = handle == NULL ? NULL : dlsym(handle, name);
    if (symbol == NULL) {
        printf("%s: %s\n", name, dlerror());
        exit(1);
    }
    dlclose(handle);
    return symbol;
}
#define NV(name) ((__typeof__(&name))probe(#name))

/* TorchSharp's functions. */
typedef void *Tensor;
#define TORCHSHARP(X)                                                                                            \
    X(char *, THSTorch_get_and_reset_last_err, (void))                                                           \
    X(Tensor, THSTensor_new, (void *, void (*)(void *), const int64_t *, int32_t, int8_t, int8_t, int32_t, int32_t, _Bool)) \
    X(Tensor, THSTensor_empty_strided, (const int64_t *, int32_t, const int64_t *, int32_t, int8_t, int32_t, int32_t, _Bool)) \
    X(Tensor, THSTensor_as_strided, (Tensor, const int64_t *, int32_t, const int64_t *, int32_t, int64_t))       \
    X(Tensor, THSTensor_alias, (Tensor))                                                                         \
    X(Tensor, THSTensor_to_sparse, (Tensor))                                                                     \
    X(Tensor, THSTensor_to_type, (Tensor, int8_t, _Bool, _Bool))                                                 \
    X(Tensor, THSTensor_to_device, (Tensor, int32_t, int32_t, _Bool, _Bool))                                     \
    X(Tensor, THSTensor_matmul, (Tensor, Tensor))                                                                \
    X(void *, THSTensor_data, (Tensor))                                                                          \
    X(int64_t, THSTensor_ndimension, (Tensor))                                                                   \
    X(int64_t, THSTensor_size, (Tensor, int64_t))                                                                \
    X(int64_t, THSTensor_stride, (Tensor, int64_t))                                                              \
    X(int8_t, THSTensor_type, (Tensor))                                                                          \
    X(int32_t, THSTensor_device_type, (Tensor))                                                                  \
    X(int32_t, THSTensor_requires_grad, (Tensor))                                                                \
    X(void, THSTensor_dispose, (Tensor))                                                                         \
    X(Tensor, host_undefined, (void))                                                                            \
    X(int64_t, host_storage_uses, (Tensor))
#define DECLARE(result, name, arguments) static result(*name) arguments;
TORCHSHARP(DECLARE)

enum { U8 = 0, I32 = 3, F16 = 5, F32 = 6, F64 = 7, C64 = 9, BF16 = 15, F8 = 24 };
enum { CPU = 0, CUDA = 1, META = 14 };

/* Where the tests' tensors are. */
static int32_t device_type = CPU, device_index = -1;

/* The host looks for an error and throws it: here it is printed and counted. */
static int thrown(const char *part)
{
    char *text = THSTorch_get_and_reset_last_err();
    int found = text != NULL && strstr(text, part) != NULL;
    if (text != NULL && !found)
        printf("    thrown: %.300s\n", text);
    free(text);
    return found;
}
static int quiet(void)
{
    return !thrown("") && NV(NVFP4_last_status)() == NVFP4_OK;
}

static uint32_t random_state = 1;
static float random_value(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (float)(random_state >> 8) / (1 << 23) - 1;
}

/* A new tensor of random values, row-major, that owns its memory. */
static Tensor random_tensor(const int64_t *sizes, int32_t rank, int8_t dtype)
{
    int64_t count = 1;
    for (int i = 0; i < rank; i++)
        count *= sizes[i];
    float *values = malloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++)
        values[i] = random_value();
    Tensor floats = THSTensor_new(values, free, sizes, rank, F32, F32, CPU, -1, 0);
    Tensor there = THSTensor_to_device(floats, device_type, device_index, 1, 0);
    THSTensor_dispose(floats);
    Tensor result = THSTensor_to_type(there, dtype, 0, 0);
    THSTensor_dispose(there);
    return result;
}
static Tensor matrix(int64_t rows, int64_t cols, int8_t dtype)
{
    return random_tensor((const int64_t[]){rows, cols}, 2, dtype);
}
static Tensor bytes_tensor(const void *bytes, int64_t count, int8_t dtype)
{
    void *copy = malloc((size_t)count + 1);
    memcpy(copy, bytes, (size_t)count);
    Tensor host = THSTensor_new(copy, free, &count, 1, dtype, dtype, CPU, -1, 0);
    Tensor there = THSTensor_to_device(host, device_type, device_index, 0, 0);
    THSTensor_dispose(host);
    return there;
}
static Tensor strided(Tensor t, int64_t rows, int64_t cols, int64_t row, int64_t col, int64_t offset)
{
    return THSTensor_as_strided(t, (const int64_t[]){rows, cols}, 2, (const int64_t[]){row, col}, 2, offset);
}
static Tensor transposed(Tensor t)
{
    return strided(t, THSTensor_size(t, 1), THSTensor_size(t, 0), THSTensor_stride(t, 1), THSTensor_stride(t, 0), 0);
}

/* The elements of a tensor that has no gaps, on the host, which the caller frees. */
static void *download(Tensor t, size_t bytes)
{
    void *out = malloc(bytes);
    Tensor host = THSTensor_to_device(t, CPU, -1, 0, 0);
    memcpy(out, THSTensor_data(host), bytes);
    THSTensor_dispose(host);
    return out;
}
static int same(Tensor a, Tensor b, size_t bytes)
{
    void *x = download(a, bytes), *y = download(b, bytes);
    int equal = memcmp(x, y, bytes) == 0;
    free(x);
    free(y);
    return equal;
}
static float *floats(Tensor t, size_t count)
{
    Tensor f = THSTensor_to_type(t, F32, 0, 0);
    float *out = download(f, count * sizeof *out);
    THSTensor_dispose(f);
    return out;
}

/* A result: of this dtype and shape, row-major, on the tests' device, without a gradient, and the only user of its memory. */
static int is_fresh(Tensor t, int8_t dtype, int64_t rows, int64_t cols)
{
    return t != NULL && THSTensor_type(t) == dtype && THSTensor_ndimension(t) == 2 && THSTensor_size(t, 0) == rows &&
           THSTensor_size(t, 1) == cols && THSTensor_stride(t, 0) == cols && THSTensor_stride(t, 1) == 1 &&
           THSTensor_device_type(t) == device_type && !THSTensor_requires_grad(t) && host_storage_uses(t) == 1;
}

/* A handle that was just freed, of memory that another one keeps. */
static Tensor freed(Tensor t)
{
    Tensor gone = THSTensor_alias(t);
    THSTensor_dispose(gone);
    return gone;
}

static void quantize(Tensor x, Tensor *q, Tensor *s)
{
    *q = *s = x;
    NV(NVFP4_quantize)(x, q, s);
}

/* The reordering that a host applies to row-major scales before a product. */
static Tensor blocked(Tensor scale, int8_t dtype)
{
    size_t rows = (size_t)THSTensor_size(scale, 0), cols = (size_t)THSTensor_size(scale, 1), tiles = (cols + 3) / 4;
    size_t count = (rows + 127) / 128 * tiles * 512;
    uint8_t *from = download(scale, rows * cols), *to = calloc(count, 1);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            to[(r / 128 * tiles + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4] = from[r * cols + c];
    Tensor result = bytes_tensor(to, (int64_t)count, dtype);
    free(from);
    free(to);
    return result;
}

/* Both operands of a product, x [m, k] and w [n, k], and the arguments of NVFP4_scaled_mm. */
struct Product {
    int64_t m, n, k;
    Tensor x, w, a, b, rows_of_b, scale_a, scale_b;
};
static struct Product product(int64_t m, int64_t n, int64_t k)
{
    struct Product p = {.m = m, .n = n, .k = k, .x = matrix(m, k, F16), .w = matrix(n, k, F16)};
    Tensor s;
    quantize(p.x, &p.a, &s);
    p.scale_a = blocked(s, F8);
    THSTensor_dispose(s);
    quantize(p.w, &p.rows_of_b, &s);
    /* Scales of weights out of a .dat file come as bytes. */
    p.scale_b = blocked(s, U8);
    THSTensor_dispose(s);
    p.b = transposed(p.rows_of_b);
    return p;
}
static void dispose_product(struct Product *p)
{
    Tensor all[] = {p->x, p->w, p->a, p->b, p->rows_of_b, p->scale_a, p->scale_b};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        THSTensor_dispose(all[i]);
}
static Tensor multiply(const struct Product *p, int8_t dtype)
{
    return NV(NVFP4_scaled_mm)(p->a, p->b, p->scale_a, p->scale_b, dtype);
}

/* The library's own tensor over a tensor of the host program, which must outlive it. */
static void *own(Tensor t)
{
    int64_t sizes[8], strides[8];
    int32_t rank = (int32_t)THSTensor_ndimension(t);
    for (int32_t i = 0; i < rank; i++) {
        sizes[i] = THSTensor_size(t, i);
        strides[i] = THSTensor_stride(t, i);
    }
    NVFP4_Tensor *made = NULL;
    if (device_type == CPU)
        CHECK(NV(NVFP4_tensor_from_host)(THSTensor_data(t), sizes, rank, strides, THSTensor_type(t), NULL, NULL, &made) == NVFP4_OK);
    else
        CHECK(NV(NVFP4_tensor_from_device)(THSTensor_data(t), sizes, rank, strides, THSTensor_type(t), device_index, NULL, NULL, &made) ==
              NVFP4_OK);
    return made;
}
static int same_as_own(Tensor t, void *made, size_t bytes)
{
    void *x = download(t, bytes), *y = malloc(bytes);
    int equal = NV(NVFP4_tensor_copy_to_host)(made, y, bytes) == NVFP4_OK && memcmp(x, y, bytes) == 0;
    free(x);
    free(y);
    return equal;
}

static void without_torch(void)
{
    uint64_t memory[4] = {0};
    void *q = memory, *s = memory;
    CHECK(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD) == NULL);
    NV(NVFP4_quantize)(memory, &q, &s);
    CHECK(q == NULL && s == NULL && NV(NVFP4_last_status)() == NVFP4_INVALID_HANDLE);
    CHECK(strstr(NV(NVFP4_last_error)(), "no libtorch") != NULL);
    CHECK(NV(NVFP4_scaled_mm)(memory, memory, memory, memory, F16) == NULL);
    CHECK(NV(NVFP4_is_managed_tensor)(memory) == 0 && NV(NVFP4_is_managed_tensor)(NULL) == 0);
    CHECK(NV(NVFP4_to_managed)(memory, 0, 0) == NULL);
    NV(NVFP4_managed_prefetch)(memory, 0);
    NV(NVFP4_empty_cache)();
    NV(NVFP4_can_use_managed)();
}

/* The library needs neither to be there when it is loaded, so this comes after it was used. */
static void load_torchsharp(const char *path, const char *cuda)
{
    if (cuda != NULL && dlopen(cuda, RTLD_LAZY) == NULL)
        printf("%s\n", dlerror());
    void *handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
    if (handle == NULL) {
        printf("%s\n", dlerror());
        exit(1);
    }
#define FIND(result, name, arguments) *(void **)&name = dlsym(handle, #name);
    TORCHSHARP(FIND)
    /* As with .NET, nothing of it can be found without its name. */
    if (dlsym(RTLD_DEFAULT, "THSTensor_data") != NULL || THSTensor_data == NULL) {
        printf("the functions of TorchSharp are visible where they must not be, or missing where they must be\n");
        exit(1);
    }
}

/* [TC-14] Shapes, dtypes and ownership; and whatever strides, offset, rank or gradient the input has, the bytes are those of
 * its values. */
static void quantizes(void)
{
    Tensor x = matrix(8, 64, F16), q, s;
    quantize(x, &q, &s);
    CHECK(quiet() && is_fresh(q, U8, 8, 32) && is_fresh(s, F8, 8, 4) && q != x && s != x);
    void *mine = own(x), *mine_q = NULL, *mine_s = NULL;
    NV(NVFP4_quantize)(mine, &mine_q, &mine_s);
    CHECK(same_as_own(q, mine_q, 8 * 32) && same_as_own(s, mine_s, 8 * 4));
    CHECK(NV(NVFP4_tensor_release)(mine) == NVFP4_OK && NV(NVFP4_tensor_release)(mine_q) == NVFP4_OK &&
          NV(NVFP4_tensor_release)(mine_s) == NVFP4_OK);
    THSTensor_dispose(x);

    const int8_t dtypes[] = {F16, BF16, F32};
    for (int d = 0; d < 3; d++) {
        /* Room for all of these: plain, transposed, at an odd offset with gaps, the last dimension with a step, and one row
         * for all. */
        Tensor memory = matrix(1, 40000, dtypes[d]);
        const int64_t views[][5] = {{8, 64, 64, 1, 0}, {8, 64, 1, 8, 0}, {7, 96, 101, 1, 13}, {5, 32, 70, 2, 3}, {6, 64, 0, 1, 9}};
        for (int v = 0; v < 5; v++) {
            const int64_t rows = views[v][0], cols = views[v][1];
            Tensor view = strided(memory, rows, cols, views[v][2], views[v][3], views[v][4]);
            Tensor plain = THSTensor_empty_strided((const int64_t[]){rows, cols}, 2, (const int64_t[]){cols, 1}, 2, dtypes[d], CPU, -1, 0);
            Tensor host = THSTensor_to_device(memory, CPU, -1, 0, 0);
            const size_t element = dtypes[d] == F32 ? 4 : 2;
            for (int64_t r = 0; r < rows; r++)
                for (int64_t c = 0; c < cols; c++)
                    memcpy((char *)THSTensor_data(plain) + (size_t)(r * cols + c) * element,
                           (char *)THSTensor_data(host) + (size_t)(views[v][4] + r * views[v][2] + c * views[v][3]) * element, element);
            Tensor there = THSTensor_to_device(plain, device_type, device_index, 0, 0), q1, s1, q2, s2;
            quantize(view, &q1, &s1);
            CHECK(quiet() && is_fresh(q1, U8, rows, cols / 2) && is_fresh(s1, F8, rows, cols / 16));
            quantize(there, &q2, &s2);
            CHECK(same(q1, q2, (size_t)(rows * cols / 2)) && same(s1, s2, (size_t)(rows * cols / 16)));
            Tensor all[] = {view, plain, host, there, q1, s1, q2, s2};
            for (int i = 0; i < 8; i++)
                THSTensor_dispose(all[i]);
        }
        /* Leading dimensions are one, and a vector is a row: norms come so. */
        Tensor folded = random_tensor((const int64_t[]){2, 3, 4, 32}, 4, dtypes[d]), q1, s1;
        quantize(folded, &q1, &s1);
        CHECK(is_fresh(q1, U8, 24, 16) && is_fresh(s1, F8, 24, 2));
        THSTensor_dispose(q1), THSTensor_dispose(s1), THSTensor_dispose(folded);
        folded = random_tensor((const int64_t[]){128}, 1, dtypes[d]);
        quantize(folded, &q1, &s1);
        CHECK(is_fresh(q1, U8, 1, 64) && is_fresh(s1, F8, 1, 8));
        THSTensor_dispose(q1), THSTensor_dispose(s1), THSTensor_dispose(folded);
        THSTensor_dispose(memory);
    }
    Tensor none = matrix(0, 32, F16), q0, s0;
    quantize(none, &q0, &s0);
    CHECK(quiet() && is_fresh(q0, U8, 0, 16) && is_fresh(s0, F8, 0, 2));
    THSTensor_dispose(q0), THSTensor_dispose(s0), THSTensor_dispose(none);
    THSTensor_dispose(q), THSTensor_dispose(s);
}

/* [TC-18, TC-19, TC-20] Quantizing weights that are being trained, again and again: results have no gradient, decode to what
 * is near the weight, and leave it alone. */
static void quantizes_in_training(void)
{
    float *values = malloc(16 * 64 * sizeof *values);
    for (int i = 0; i < 16 * 64; i++)
        values[i] = random_value();
    Tensor w = THSTensor_new(values, free, (const int64_t[]){16, 64}, 2, F32, F32, device_type, device_index, 1);
    CHECK(THSTensor_requires_grad(w));
    for (int i = 0; i < 128; i++) {
        Tensor q, s;
        quantize(w, &q, &s);
        CHECK(quiet() && is_fresh(q, U8, 16, 32) && is_fresh(s, F8, 16, 4) && THSTensor_requires_grad(w));
        float *scales = floats(s, 16 * 4);
        for (int b = 0; b < 16 * 4; b++)
            CHECK(isfinite(scales[b]) && scales[b] > 0 && scales[b] < 0.2f);
        free(scales);
        THSTensor_dispose(q), THSTensor_dispose(s);
    }
    THSTensor_dispose(w);
}

/* [TC-15] A product against the dense one of the values, and against that of the library's own tensors. */
/* A weight with its optimizer, and a linear layer, on libtorch's tensors: the same bits as on the library's own, and results are
 * libtorch's. */
static void trains(void)
{
    const int8_t dtypes[] = {BF16, F32};
    for (int d = 0; d < 2; d++) {
        const size_t element = dtypes[d] == F32 ? 4 : 2;
        Tensor w = matrix(8, 64, dtypes[d]), x = matrix(5, 64, dtypes[d]), g = matrix(8, 64, dtypes[d]);
        void *own_w = own(w), *own_x = own(x), *own_g = own(g);
        void *theirs[4] = {NULL}, *mine[4] = {NULL};
        CHECK(NV(NVFP4_ste_linear)(x, w, &theirs[0]) == NVFP4_OK && is_fresh(theirs[0], dtypes[d], 5, 8));
        CHECK(NV(NVFP4_ste_linear)(own_x, own_w, &mine[0]) == NVFP4_OK && same_as_own(theirs[0], mine[0], 40 * element));
        CHECK(NV(NVFP4_ste_linear_backward)(x, w, theirs[0], &theirs[1], &theirs[2]) == NVFP4_OK);
        CHECK(is_fresh(theirs[1], dtypes[d], 5, 64) && is_fresh(theirs[2], dtypes[d], 8, 64));
        CHECK(NV(NVFP4_ste_linear_backward)(own_x, own_w, mine[0], &mine[1], &mine[2]) == NVFP4_OK);
        CHECK(same_as_own(theirs[1], mine[1], 320 * element) && same_as_own(theirs[2], mine[2], 512 * element));
        CHECK(NV(NVFP4_ste_linear)(own_x, w, &mine[3]) == NVFP4_INVALID_HANDLE && mine[3] == NULL);

        NVFP4_OptimizerState *a = NULL, *b = NULL;
        uint64_t changed[2] = {0, 0};
        CHECK(NV(NVFP4_optimizer_create)(w, NULL, &a) == NVFP4_OK && NV(NVFP4_optimizer_create)(own_w, NULL, &b) == NVFP4_OK);
        for (int i = 0; i < 3; i++)
            CHECK(NV(NVFP4_optimizer_step)(a, g, NULL, &changed[0], NULL) == NVFP4_OK &&
                  NV(NVFP4_optimizer_step)(b, own_g, NULL, &changed[1], NULL) == NVFP4_OK && changed[0] == changed[1]);
        CHECK(NV(NVFP4_optimizer_step)(a, x, NULL, NULL, NULL) == NVFP4_INVALID_ARGUMENT);
        CHECK(NV(NVFP4_optimizer_weight)(a, 0, dtypes[d], &theirs[3]) == NVFP4_OK && is_fresh(theirs[3], dtypes[d], 8, 64));
        CHECK(NV(NVFP4_optimizer_weight)(b, 0, dtypes[d], &mine[3]) == NVFP4_OK && same_as_own(theirs[3], mine[3], 512 * element));
        CHECK(NV(NVFP4_optimizer_release)(a) == NVFP4_OK && NV(NVFP4_optimizer_release)(b) == NVFP4_OK);
        for (int i = 0; i < 4; i++) {
            THSTensor_dispose(theirs[i]);
            CHECK(NV(NVFP4_tensor_release)(mine[i]) == NVFP4_OK);
        }
        CHECK(NV(NVFP4_tensor_release)(own_w) == NVFP4_OK && NV(NVFP4_tensor_release)(own_x) == NVFP4_OK &&
              NV(NVFP4_tensor_release)(own_g) == NVFP4_OK);
        THSTensor_dispose(w), THSTensor_dispose(x), THSTensor_dispose(g);
    }
}

static void multiplies(void)
{
    struct Product p = product(4, 16, 64);
    Tensor wt = transposed(p.w), reference, y = multiply(&p, F16);
    CHECK(quiet() && is_fresh(y, F16, 4, 16));
    Tensor x32 = THSTensor_to_type(p.x, F32, 0, 0), w32 = THSTensor_to_type(wt, F32, 0, 0);
    reference = THSTensor_matmul(x32, w32);
    float *got = floats(y, 64), *wanted = floats(reference, 64);
    double error = 0, size = 0;
    for (int i = 0; i < 64; i++) {
        error += fabs((double)got[i] - (double)wanted[i]);
        size += fabs((double)wanted[i]);
    }
    /* The hosts ask for less than 1.5. */
    CHECK(error / size < 0.25);
    free(got), free(wanted);
    THSTensor_dispose(x32), THSTensor_dispose(w32), THSTensor_dispose(wt), THSTensor_dispose(reference), THSTensor_dispose(y);
    dispose_product(&p);

    /* M that is no multiple of anything, more than one tile of scales, and every type. */
    p = product(133, 48, 160);
    void *a = own(p.a), *b = own(p.b), *sa = own(p.scale_a), *sb = own(p.scale_b);
    const int8_t dtypes[] = {F16, BF16, F32};
    for (int d = 0; d < 3; d++) {
        size_t bytes = 133 * 48 * (dtypes[d] == F32 ? 4 : 2);
        y = multiply(&p, dtypes[d]);
        CHECK(quiet() && is_fresh(y, dtypes[d], 133, 48));
        void *mine = NV(NVFP4_scaled_mm)(a, b, sa, sb, dtypes[d]);
        CHECK(mine != NULL && same_as_own(y, mine, bytes));
        CHECK(NV(NVFP4_tensor_release)(mine) == NVFP4_OK);
        THSTensor_dispose(y);
    }
    void *all[] = {a, b, sa, sb};
    for (int i = 0; i < 4; i++)
        CHECK(NV(NVFP4_tensor_release)(all[i]) == NVFP4_OK);
    /* A row of a larger activation, and handles that are used twice. */
    Tensor row = strided(p.a, 1, 80, 80, 1, 80 * 5), first;
    Tensor scales = blocked(row, F8);
    THSTensor_dispose(scales);
    y = NV(NVFP4_scaled_mm)(p.rows_of_b, p.b, p.scale_b, p.scale_b, F32);
    CHECK(quiet() && is_fresh(y, F32, 48, 48));
    first = NV(NVFP4_scaled_mm)(p.rows_of_b, p.b, p.scale_b, p.scale_b, F32);
    CHECK(first != y && same(first, y, 48 * 48 * 4));
    THSTensor_dispose(row), THSTensor_dispose(first), THSTensor_dispose(y);
    dispose_product(&p);
}

/* Invalid arguments give NULL and an error that the host throws with our text, and the next valid call throws nothing. */
static void errors(void)
{
    struct Product p = product(32, 32, 64);
    Tensor q, s;
#define QUANTIZE_FAILS(input, part)                                                                          \
    do {                                                                                                     \
        quantize(input, &q, &s);                                                                             \
        CHECK(q == NULL && s == NULL && NV(NVFP4_last_status)() != NVFP4_OK);                                \
        CHECK(strstr(NV(NVFP4_last_error)(), part) != NULL);                                                 \
        CHECK(thrown("unable to open file <NVFP4_quantize: "));                                              \
        quantize(input, &q, &s);                                                                             \
        CHECK(thrown(part));                                                                                 \
        quantize(p.x, &q, &s);                                                                               \
        CHECK(quiet());                                                                                      \
        THSTensor_dispose(q), THSTensor_dispose(s);                                                          \
    } while (0)
#define PRODUCT_FAILS(a, b, sa, sb, dtype, part)                                                             \
    do {                                                                                                     \
        CHECK(NV(NVFP4_scaled_mm)(a, b, sa, sb, dtype) == NULL && NV(NVFP4_last_status)() != NVFP4_OK);      \
        CHECK(strstr(NV(NVFP4_last_error)(), part) != NULL);                                                 \
        CHECK(thrown(part));                                                                                 \
        Tensor good_ = multiply(&p, F16);                                                                    \
        CHECK(quiet());                                                                                      \
        THSTensor_dispose(good_);                                                                            \
    } while (0)

    const int8_t wrong[] = {I32, U8, F64, F8, C64};
    const char *names[] = {"int32", "uint8", "float64", "float8_e4m3fn", "dtype 9"};
    for (int i = 0; i < 5; i++) {
        Tensor x = THSTensor_empty_strided((const int64_t[]){4, 32}, 2, (const int64_t[]){32, 1}, 2, wrong[i], device_type, device_index, 0);
        QUANTIZE_FAILS(x, names[i]);
        THSTensor_dispose(x);
    }
    Tensor odd = matrix(4, 24, F16), scalar = random_tensor(NULL, 0, F16), narrow = matrix(4, 0, F16);
    QUANTIZE_FAILS(odd, "K = 24");
    QUANTIZE_FAILS(scalar, "scalar");
    QUANTIZE_FAILS(narrow, "K = 0");
    QUANTIZE_FAILS(NULL, "input is NULL");
    Tensor deep = random_tensor((const int64_t[]){1, 1, 1, 1, 1, 1, 1, 2, 16}, 9, F16);
    QUANTIZE_FAILS(deep, "at most 8 dimensions");
    Tensor nan = THSTensor_empty_strided((const int64_t[]){1, 16}, 2, (const int64_t[]){16, 1}, 2, F16, CPU, -1, 0);
    memcpy(THSTensor_data(nan), (const uint16_t[16]){[3] = 0x7e00}, 32);
    Tensor there = THSTensor_to_device(nan, device_type, device_index, 0, 0);
    if (device_type == CPU) {
        QUANTIZE_FAILS(there, "index 3");
    } else {
        /* As libtorch's own calls, this one does not wait; the host hears of it from the next one that does. */
        NV(NVFP4_quantize)(there, &q, &s);
        CHECK(q != NULL && s != NULL && quiet());
        THSTensor_dispose(q), THSTensor_dispose(s);
        CHECK(NV(NVFP4_device_synchronize)(device_type, device_index) == NVFP4_INVALID_ARGUMENT);
        CHECK(strstr(NV(NVFP4_last_error)(), "NVFP4_quantize (checked call ") != NULL);
        CHECK(strstr(NV(NVFP4_last_error)(), "index 3 (row 0, column 3) is NaN") != NULL);
        CHECK(NV(NVFP4_device_synchronize)(device_type, device_index) == NVFP4_OK);
    }
    THSTensor_dispose(there), THSTensor_dispose(nan);

    /* Addresses that are no tensor: other memory, an unmapped address, an odd one, and tensors without memory of their own. */
    uint64_t words[4] = {0, 1, 2, 3}, pointing[2] = {(uint64_t)(uintptr_t)words, 0};
    QUANTIZE_FAILS(words, "input is no live tensor");
    QUANTIZE_FAILS(pointing, "input is no live tensor");
    QUANTIZE_FAILS((void *)16, "input is no live tensor");
    QUANTIZE_FAILS((char *)p.x + 1, "input is no live tensor");
    QUANTIZE_FAILS((void *)(uintptr_t)0xffffffffff600000u, "input is no live tensor");
    Tensor undefined = host_undefined(), sparse = THSTensor_to_sparse(odd);
    QUANTIZE_FAILS(undefined, "input is no live tensor");
    QUANTIZE_FAILS(sparse, "sparse");
    Tensor meta = THSTensor_empty_strided((const int64_t[]){4, 32}, 2, (const int64_t[]){32, 1}, 2, F16, META, -1, 0);
    QUANTIZE_FAILS(meta, "device type 14");
    QUANTIZE_FAILS(freed(p.x), "input is no live tensor");
    NV(NVFP4_quantize)(p.x, NULL, &s);
    CHECK(s == NULL && thrown("qdata or scale is NULL"));

    PRODUCT_FAILS(NULL, p.b, p.scale_a, p.scale_b, F16, "mat1 is NULL");
    PRODUCT_FAILS(p.a, p.b, p.scale_a, NULL, F16, "scale_b is NULL");
    PRODUCT_FAILS(p.a, freed(p.b), p.scale_a, p.scale_b, F16, "mat2 is no live tensor");
    PRODUCT_FAILS(p.a, p.b, words, p.scale_b, F16, "scale_a is no live tensor");
    PRODUCT_FAILS(p.a, p.rows_of_b, p.scale_a, p.scale_b, F16, "transposed");
    PRODUCT_FAILS(scalar, p.b, p.scale_a, p.scale_b, F16, "must be a matrix");
    PRODUCT_FAILS(p.x, p.b, p.scale_a, p.scale_b, F16, "float16");
    PRODUCT_FAILS(p.a, p.b, p.x, p.scale_b, F16, "float16");
    PRODUCT_FAILS(p.a, p.b, p.scale_a, p.scale_b, U8, "uint8");
    PRODUCT_FAILS(p.a, p.b, p.scale_a, p.scale_b, F64, "float64");
    PRODUCT_FAILS(p.a, p.b, p.scale_a, p.scale_b, 99, "dtype 99");
    PRODUCT_FAILS(p.a, p.b, p.scale_a, meta, F16, "device type 14");
    Tensor length = bytes_tensor(words, 32, F8);
    PRODUCT_FAILS(p.a, p.b, length, p.scale_b, F16, "take 512 swizzled scales");
    PRODUCT_FAILS(p.a, p.b, p.scale_a, length, F16, "take 512 swizzled scales");
    struct Product other = product(8, 16, 128);
    PRODUCT_FAILS(p.a, other.b, p.scale_a, other.scale_b, F16, "K must be equal");
    Tensor wide = strided(p.a, 16, 28, 32, 1, 0);
    PRODUCT_FAILS(wide, p.b, p.scale_a, p.scale_b, F16, "K = 56");
    if (device_type == CUDA) {
        Tensor here = THSTensor_to_device(p.scale_a, CPU, -1, 0, 0);
        PRODUCT_FAILS(p.a, p.b, here, p.scale_b, F16, "one place");
        THSTensor_dispose(here);
    }
    /* The library's tensors and the host's in one call, whose result would have no definite kind. The caller checks our status. */
    void *mine = own(p.scale_b);
    CHECK(NV(NVFP4_scaled_mm)(p.a, p.b, p.scale_a, mine, F16) == NULL && NV(NVFP4_last_status)() == NVFP4_INVALID_HANDLE);
    CHECK(strstr(NV(NVFP4_last_error)(), "scale_b is an NVFP4_Tensor") != NULL && !thrown(""));
    CHECK(NV(NVFP4_scaled_mm)(mine, mine, mine, mine, F16) == NULL && !thrown(""));
    CHECK(NV(NVFP4_tensor_release)(mine) == NVFP4_OK);

    /* Where the host does not look for an error, there is none to be thrown later by a call that is right. */
    NV(NVFP4_managed_prefetch)(p.x, 0);
    CHECK(NV(NVFP4_last_status)() != NVFP4_OK && !thrown(""));
    NV(NVFP4_managed_prefetch)(freed(p.x), 0);
    CHECK(NV(NVFP4_last_status)() == NVFP4_INVALID_HANDLE && !thrown(""));
    CHECK(NV(NVFP4_is_managed_tensor)(freed(p.x)) == 0 && NV(NVFP4_is_managed_tensor)(words) == 0 && quiet());
    NV(NVFP4_empty_cache)();
    CHECK(quiet());
    CHECK(NV(NVFP4_to_managed)(NULL, 0, 0) == NULL && thrown("NVFP4_to_managed: input is NULL"));

    dispose_product(&other);
    Tensor all[] = {odd, scalar, narrow, deep, undefined, sparse, meta, length, wide};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        THSTensor_dispose(all[i]);
    dispose_product(&p);
}

/* [TC-07, TC-08, TC-21, TC-22, TC-23] Managed memory. */
static void managed(void)
{
    Tensor x = matrix(8, 64, F16);
    /* [TC-23] */
    CHECK(NV(NVFP4_is_managed_tensor)(x) == 0 && quiet());
    if (NV(NVFP4_can_use_managed)() == 0) {
        /* [TC-08] */
        CHECK(NV(NVFP4_to_managed)(x, 0, 0) == NULL && thrown("anaged memory"));
        printf("SKIPPED managed tensors (TC-07, TC-21, TC-22): there is no CUDA device for them\n");
        THSTensor_dispose(x);
        return;
    }
    const int32_t type = device_type, index = device_index;
    for (int from_host = 0; from_host < 2; from_host++) {
        Tensor input = from_host ? THSTensor_to_device(x, CPU, -1, 1, 0) : THSTensor_alias(x);
        Tensor there = NV(NVFP4_to_managed)(input, 0, from_host);
        device_type = CUDA, device_index = 0;
        CHECK(quiet() && is_fresh(there, F16, 8, 64) && there != input && NV(NVFP4_is_managed_tensor)(there) == 1);
        CHECK(same(there, input, 8 * 64 * 2));
        THSTensor_dispose(input);
        Tensor again = NV(NVFP4_to_managed)(there, -1, 0), q, s;
        CHECK(quiet() && again != NULL && again != there && THSTensor_data(again) == THSTensor_data(there));
        THSTensor_dispose(there);
        NV(NVFP4_managed_prefetch)(again, 0);
        CHECK(quiet());
        NV(NVFP4_managed_prefetch)(again, -1);
        CHECK(quiet() && same(again, x, 8 * 64 * 2));
        quantize(again, &q, &s);
        CHECK(quiet() && is_fresh(q, U8, 8, 32) && NV(NVFP4_is_managed_tensor)(q) == 0);
        THSTensor_dispose(q), THSTensor_dispose(s), THSTensor_dispose(again);
        device_type = type, device_index = index;
    }
    THSTensor_dispose(x);
}

/* Neither inputs nor results are copied: large memory is libtorch's, and the library holds only one piece at a time. */
static void no_copies(void)
{
    enum { ROWS = 2048, COLS = 4096 };
    Tensor x = matrix(ROWS, COLS, F32), q, s;
    uint64_t current, peak, before;
    CHECK(NV(NVFP4_memory_reset_peak)() == NVFP4_OK && NV(NVFP4_memory_stats)(NVFP4_MEMORY_TOTAL, &before, &peak) == NVFP4_OK);
    const void *data = THSTensor_data(x);
    quantize(x, &q, &s);
    CHECK(quiet() && THSTensor_data(x) == data && host_storage_uses(x) == 1);
    CHECK(NV(NVFP4_memory_stats)(NVFP4_MEMORY_TOTAL, &current, &peak) == NVFP4_OK);
    printf("quantizing %d MiB: the library holds at most %.1f MiB\n", ROWS * COLS * 4 >> 20, (double)(peak - before) / (1 << 20));
    CHECK(current == before && peak - before <= 1 << 20);
    CHECK(host_storage_uses(q) == 1 && host_storage_uses(s) == 1);
    THSTensor_dispose(x), THSTensor_dispose(q), THSTensor_dispose(s);

    struct Product p = product(16, 1024, 256);
    CHECK(NV(NVFP4_memory_reset_peak)() == NVFP4_OK && NV(NVFP4_memory_stats)(NVFP4_MEMORY_TENSOR, &before, &peak) == NVFP4_OK);
    Tensor y = multiply(&p, F16);
    CHECK(quiet() && NV(NVFP4_memory_stats)(NVFP4_MEMORY_TENSOR, &current, &peak) == NVFP4_OK && peak == before);
    CHECK(host_storage_uses(y) == 1 && host_storage_uses(p.a) == 1);
    THSTensor_dispose(y);
    dispose_product(&p);
}

/* Bytes that malloc has given out. */
static size_t in_use(void)
{
    struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
}
static size_t resident(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%*s %zu", &pages) != 1)
        pages = 0;
    if (file != NULL)
        fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}
/* The device whose context is current; 0 without one. */
static size_t on_gpu(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_NOW);
    int (*info)(size_t *, size_t *) = NULL;
    size_t unused = 0, total = 0;
    if (driver != NULL)
        *(void **)&info = dlsym(driver, "cuMemGetInfo_v2");
    if (info == NULL || info(&unused, &total) != 0)
        return 0;
    return total - unused;
}

/* 10,000 calls that work and 500 that do not, after a sixth as many to warm up. */
static void no_growth(void)
{
    struct Product p = product(4, 32, 64);
    Tensor wide = strided(p.a, 4, 28, 32, 1, 0);
    size_t used = 0, held = 0, device = 0;
    for (int i = 0; i < 6000; i++) {
        if (i == 1000) {
            used = in_use();
            held = resident();
            device = on_gpu();
        }
        Tensor q, s, y;
        quantize(p.x, &q, &s);
        y = multiply(&p, F16);
        if (q == NULL || s == NULL || y == NULL) {
            CHECK(!"a call failed");
            break;
        }
        THSTensor_dispose(q), THSTensor_dispose(s), THSTensor_dispose(y);
        if (i % 10 == 0) {
            CHECK(NV(NVFP4_scaled_mm)(wide, p.b, p.scale_a, p.scale_b, F16) == NULL);
            free(THSTorch_get_and_reset_last_err());
        }
    }
    long grown = (long)in_use() - (long)used, more = (long)resident() - (long)held, there = (long)on_gpu() - (long)device;
    printf("10000 calls: malloc's use grew by %ld bytes, resident memory by %ld KiB, a GPU's by %ld KiB\n", grown, more / 1024,
           there / 1024);
    // A leak per call, at least 32 bytes of malloc, would amount to 320,000; the driver keeps a few thousand of its own.
    CHECK(grown < 64 << 10 && more < 4 << 20 && there < 4 << 20);
    CHECK(device_type == CPU || device > 0);
    THSTensor_dispose(wide);
    dispose_product(&p);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}
static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Overhead of a product of the host's tensors over one of the library's own: medians of calls in turns. */
static void overhead(void)
{
    enum { CALLS = 2000, ATTEMPTS = 8 };
    static double torch[CALLS], mine[CALLS];
    struct Product p = product(1, 16, 32);
    void *a = own(p.a), *b = own(p.b), *sa = own(p.scale_a), *sb = own(p.scale_b);
    __typeof__(&NVFP4_scaled_mm) call = NV(NVFP4_scaled_mm);
    __typeof__(&NVFP4_tensor_release) release = NV(NVFP4_tensor_release);
    double least = INFINITY, direct = 0;
    for (int attempt = 0; attempt < ATTEMPTS && least > 5; attempt++) {
        for (int i = 0; i < CALLS; i++) {
            double start = now();
            Tensor y = call(p.a, p.b, p.scale_a, p.scale_b, F16);
            double between = now();
            THSTensor_dispose(y);
            double second = now();
            void *z = call(a, b, sa, sb, F16);
            double end = now();
            release(z);
            torch[i] = between - start;
            mine[i] = end - second;
        }
        qsort(torch, CALLS, sizeof *torch, by_value);
        qsort(mine, CALLS, sizeof *mine, by_value);
        if (torch[CALLS / 2] - mine[CALLS / 2] < least) {
            least = torch[CALLS / 2] - mine[CALLS / 2];
            direct = mine[CALLS / 2];
        }
    }
    printf("NVFP4_scaled_mm of [1, 32] and [16, 32]: %.2f us with the library's handles, %+.2f us with libtorch's\n", direct, least);
    /* The goal is 5; a busy machine gets room. */
    CHECK(least < 20);
    void *all[] = {a, b, sa, sb};
    for (int i = 0; i < 4; i++)
        release(all[i]);
    dispose_product(&p);
}

/* Threads that work while others fail: errors stay with the thread that made them. */
static void *one_thread(void *number)
{
    static const char *said[] = {"K = 24", "K = 40"};
    const int fails = (int)(intptr_t)number % 2, which = (int)(intptr_t)number / 2 % 2;
    Tensor x = THSTensor_empty_strided((const int64_t[]){4, which ? 40 : 24}, 2, (const int64_t[]){which ? 40 : 24, 1}, 2, F16, CPU, -1, 0);
    Tensor good = THSTensor_empty_strided((const int64_t[]){4, 32}, 2, (const int64_t[]){32, 1}, 2, F16, CPU, -1, 0);
    memset(THSTensor_data(good), 0, 4 * 32 * 2);
    intptr_t wrong = 0;
    for (int i = 0; i < 300; i++) {
        Tensor q, s;
        quantize(fails ? x : good, &q, &s);
        wrong += fails ? q != NULL || !thrown(said[which]) : q == NULL || thrown("");
        if (q != NULL)
            THSTensor_dispose(q), THSTensor_dispose(s);
    }
    THSTensor_dispose(x), THSTensor_dispose(good);
    return (void *)wrong;
}
static void threads(void)
{
    pthread_t all[8];
    for (intptr_t i = 0; i < 8; i++)
        CHECK(pthread_create(&all[i], NULL, one_thread, (void *)i) == 0);
    for (int i = 0; i < 8; i++) {
        void *wrong = NULL;
        CHECK(pthread_join(all[i], &wrong) == 0 && wrong == NULL);
    }
}

static void on_device(void)
{
    quantizes();
    quantizes_in_training();
    trains();
    multiplies();
    errors();
    managed();
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        printf("usage: host TORCHSHARP LIBNVFP4 [LIBTORCH_CUDA]\n");
        return 2;
    }
    library = argv[2];
    /* [TC-16] What the hosts look for before they choose this library. */
    const char *exports[] = {"NVFP4_quantize",          "NVFP4_scaled_mm",  "NVFP4_empty_cache",     "NVFP4_can_use_managed",
                             "NVFP4_is_managed_tensor", "NVFP4_to_managed", "NVFP4_managed_prefetch"};
    for (size_t i = 0; i < sizeof exports / sizeof *exports; i++)
        probe(exports[i]);
    without_torch();
    load_torchsharp(argv[1], argc > 3 ? argv[3] : NULL);
    on_device();
    no_copies();
    no_growth();
    overhead();
    threads();
    Tensor small = matrix(1, 16, F16), there = THSTensor_to_device(small, CUDA, 0, 0, 0);
    free(THSTorch_get_and_reset_last_err());
    THSTensor_dispose(small);
    if (there != NULL) {
        THSTensor_dispose(there);
        device_type = CUDA, device_index = 0;
        on_device();
        no_growth();
        overhead();
    } else {
        printf("SKIPPED tensors of a GPU (TC-14 to TC-16, TC-21 to TC-23 there): this libtorch reaches none\n");
    }
    printf("host: %d checks, %d failed\n", checks, failures);
    return failures != 0;
}
