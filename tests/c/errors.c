/* Every function of the header, called wrongly: errors NAMES MODEL_DIR. Each wrong call gives the status it should, one line that
 * says why, and no result. The file NAMES has the names that the header declares, so that a function without a case here is
 * found out. */
#include "check.h"
#include <math.h>
#include <stddef.h>
#include <pthread.h>
#include <stdlib.h>

static const char *covered[256];
static size_t covered_count;

static void cover(const char *name)
{
    for (size_t i = 0; i < covered_count; i++)
        if (strcmp(covered[i], name) == 0)
            return;
    covered[covered_count++] = name;
}

/* The call of the function fails like this. */
#define BAD(expected, function, ...)                                                                         \
    do {                                                                                                     \
        cover(#function);                                                                                    \
        FAILS(expected, function(__VA_ARGS__));                                                              \
    } while (0)

/* The call, with the handle `h` in it, refuses anything that is no handle of its type. */
static void *no_handles[4];
#define HANDLE(function, ...)                                                                                \
    do {                                                                                                     \
        for (int i_ = 0; i_ < 4; i_++) {                                                                     \
            void *h = no_handles[i_];                                                                        \
            BAD(NVFP4_INVALID_HANDLE, function, __VA_ARGS__);                                                \
        }                                                                                                    \
    } while (0)

/* The call gives up a reference: as HANDLE, but NULL has none to give up. */
#define RELEASE(function)                                                                                    \
    do {                                                                                                     \
        for (int i_ = 1; i_ < 4; i_++)                                                                       \
            BAD(NVFP4_INVALID_HANDLE, function, no_handles[i_]);                                             \
        OK(function(NULL));                                                                                  \
    } while (0)

/* The function cannot fail: it is called to see that it can be. */
#define SURE(function, result)                                                                               \
    do {                                                                                                     \
        cover(#function);                                                                                    \
        CHECK(result);                                                                                       \
    } while (0)

/* The function has no status; the one it leaves behind is this. */
#define LEAVES(expected, function, ...)                                                                      \
    do {                                                                                                     \
        cover(#function);                                                                                    \
        function(__VA_ARGS__);                                                                               \
        FAILS(expected, NVFP4_last_status());                                                                \
    } while (0)

static char text[65536];
static size_t length;
static float floats[64];
static const int64_t shape[] = {2, 32};
static NVFP4_Tensor *out;
static int cuda;

static void *read_error(void *error)
{
    SURE(NVFP4_error_status, NVFP4_error_status(error) == NVFP4_INVALID_ARGUMENT);
    SURE(NVFP4_error_message, strstr(NVFP4_error_message(error), "-17") != NULL);
    CHECK(NVFP4_error_status(NULL) == NVFP4_OK && NVFP4_error_message(NULL)[0] == '\0');
    CHECK(NVFP4_last_status() == NVFP4_OK);
    return NULL;
}

static int32_t on_log(void *user, int32_t level, const char *message, size_t bytes)
{
    (void)user;
    (void)level;
    (void)message;
    (void)bytes;
    return 0;
}

static void library(void)
{
    SURE(NVFP4_version, NVFP4_version()[0] != '\0');
    SURE(NVFP4_abi_version, NVFP4_abi_version() == NVFP4_ABI_VERSION);
    SURE(NVFP4_version_number, NVFP4_version_number() == NVFP4_VERSION_NUMBER);
    OK(NVFP4_check_version(NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER));
    OK(NVFP4_check_version(NVFP4_ABI_VERSION, 0));
    BAD(NVFP4_ABI_MISMATCH, NVFP4_check_version, NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER + 1);
    CHECK(strstr(NVFP4_last_error(), "install libNVFP4") != NULL);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_check_version, NVFP4_ABI_VERSION + 1, NVFP4_VERSION_NUMBER);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_check_version, NVFP4_ABI_VERSION - 1, NVFP4_VERSION_NUMBER);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_check_version, NVFP4_ABI_VERSION, -1);
    SURE(NVFP4_status_name, strcmp(NVFP4_status_name(NVFP4_BUSY), "BUSY") == 0 && NVFP4_status_name(-7) != NULL);
    uint64_t token = 0;
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_log_add, on_log, NULL, 6, NULL, &token);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_log_add, on_log, NULL, 0, NULL, &token);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_log_add, NULL, NULL, NVFP4_LOG_INFO, NULL, &token);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_log_add, on_log, NULL, NVFP4_LOG_INFO, NULL, NULL);
    BAD(NVFP4_NOT_FOUND, NVFP4_log_remove, token);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads, -1);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads, 1025);
    SURE(NVFP4_last_error, strstr(NVFP4_last_error(), "1025") != NULL);
    SURE(NVFP4_last_status, NVFP4_last_status() == NVFP4_INVALID_ARGUMENT);

    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_diagnose, text, sizeof text, NULL);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_diagnose, NULL, 1, &length);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_diagnose, text, 1, &length);
    CHECK(length > 1);
    OK(NVFP4_diagnose(text, sizeof text, &length));
    CHECK(strlen(text) == length && strstr(text, cuda ? "\"compute_capability\":" : "\"cuda\":{\"available\":false") != NULL);

    /* Reading a message leaves it as it is, also where reading fails. */
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads(-17));
    const char *message = NVFP4_last_error();
    CHECK(NVFP4_last_error_copy(text, sizeof text, NULL) == NVFP4_INVALID_ARGUMENT);
    length = 0;
    CHECK(NVFP4_last_error_copy(text, 1, &length) == NVFP4_BUFFER_TOO_SMALL && length == strlen(message));
    SURE(NVFP4_last_error_copy, NVFP4_last_error_copy(text, sizeof text, &length) == NVFP4_OK);
    CHECK(strstr(text, "-17") != NULL && strlen(text) == length);
    CHECK(NVFP4_last_error() == message && strcmp(message, text) == 0 && NVFP4_last_status() == NVFP4_INVALID_ARGUMENT);

    /* An error that was taken is another thread's to read. */
    NVFP4_Error *taken = NULL, *none = NULL;
    SURE(NVFP4_take_error, NVFP4_take_error(&taken) == NVFP4_OK && taken != NULL);
    CHECK(NVFP4_last_status() == NVFP4_OK && NVFP4_last_error()[0] == '\0');
    CHECK(NVFP4_take_error(&none) == NVFP4_OK && none == NULL);
    CHECK(NVFP4_take_error(NULL) == NVFP4_INVALID_ARGUMENT && NVFP4_last_status() == NVFP4_OK);
    OK(NVFP4_error_retain(taken));
    OK(NVFP4_error_release(taken));
    pthread_t reader;
    CHECK(pthread_create(&reader, NULL, read_error, taken) == 0 && pthread_join(reader, NULL) == 0);
    OK(NVFP4_error_release(taken));
    CHECK(NVFP4_error_status(taken) == NVFP4_INVALID_HANDLE && NVFP4_error_message(taken)[0] == '\0');
    HANDLE(NVFP4_error_retain, h);
    RELEASE(NVFP4_error_release);

    uint64_t current, peak;
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_stats, 99, &current, &peak);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_stats, 0, NULL, &peak);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_stats, 0, &current, NULL);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_get_budget, NULL);
    SURE(NVFP4_memory_set_budget, NVFP4_memory_set_budget(0) == NVFP4_OK);
    int32_t number;
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_set_managed_policy, 3);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_get_managed_policy, NULL);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_can_be_managed, 0, NULL);
    BAD(NVFP4_INVALID_ARGUMENT, NVFP4_memory_can_be_managed, -1, &number);
    OK(NVFP4_memory_can_be_managed(INT32_MAX, &number));
    CHECK(number == 0);
    SURE(NVFP4_memory_reset_peak, NVFP4_memory_reset_peak() == NVFP4_OK);
}

static void tensors(NVFP4_Tensor *t)
{
    const int64_t negative[] = {2, -1}, huge[] = {INT64_MAX, 4}, nine[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    const int32_t f32 = NVFP4_DTYPE_FLOAT32, cpu = NVFP4_DEVICE_CPU, invalid = NVFP4_INVALID_ARGUMENT;
    BAD(invalid, NVFP4_tensor_from_host, floats, shape, 2, NULL, f32, NULL, NULL, NULL);
    BAD(invalid, NVFP4_tensor_from_host, NULL, shape, 2, NULL, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host, floats, NULL, 2, NULL, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host, floats, shape, -1, NULL, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host, floats, negative, 2, NULL, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host, floats, huge, 2, NULL, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host, floats, nine, 9, NULL, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host, floats, shape, 2, negative, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host, floats, shape, 2, NULL, 8, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host_read_only, floats, shape, 2, NULL, f32, NULL, NULL, NULL);
    BAD(invalid, NVFP4_tensor_from_host_read_only, NULL, shape, 2, NULL, f32, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_host_read_only, floats, shape, 2, NULL, 8, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_empty, shape, 2, f32, cpu, 0, NULL);
    BAD(invalid, NVFP4_tensor_empty, shape, 2, f32, cpu, 1, &out);
    BAD(invalid, NVFP4_tensor_empty, shape, 2, f32, 7, 0, &out);
    BAD(invalid, NVFP4_tensor_empty, shape, 2, f32, cpu, -2, &out);
    BAD(invalid, NVFP4_tensor_empty, shape, 2, f32, NVFP4_DEVICE_AUTO, 0, &out);
    SAYS("NVFP4_LoadOptions");
    BAD(invalid, NVFP4_tensor_empty, shape, 2, f32, NVFP4_DEVICE_CUDA, -1, &out);
    BAD(NVFP4_DEVICE_UNAVAILABLE, NVFP4_tensor_empty, shape, 2, f32, NVFP4_DEVICE_CUDA, INT32_MAX, &out);
    BAD(invalid, NVFP4_tensor_from_device, floats, shape, 2, NULL, f32, 0, NULL, NULL, NULL);
    BAD(invalid, NVFP4_tensor_from_device, floats, shape, -1, NULL, f32, 0, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_device, floats, shape, 2, negative, f32, 0, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_device, floats, shape, 2, NULL, 8, 0, NULL, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_device, floats, shape, 2, NULL, f32, -1, NULL, NULL, &out);
    BAD(NVFP4_DEVICE_UNAVAILABLE, NVFP4_tensor_from_device, floats, shape, 2, NULL, f32, INT32_MAX, NULL, NULL, &out);
    BAD(invalid, NVFP4_device_synchronize, cpu, 1);
    BAD(invalid, NVFP4_device_synchronize, NVFP4_DEVICE_AUTO, 0);
    BAD(invalid, NVFP4_device_synchronize, NVFP4_DEVICE_CUDA, -1);
    BAD(NVFP4_DEVICE_UNAVAILABLE, NVFP4_device_synchronize, NVFP4_DEVICE_CUDA, INT32_MAX);
    OK(NVFP4_device_synchronize(cpu, 0));
    HANDLE(NVFP4_tensor_copy_to_device, h, cpu, 0, &out);
    BAD(invalid, NVFP4_tensor_copy_to_device, t, cpu, 0, NULL);
    BAD(invalid, NVFP4_tensor_copy_to_device, t, NVFP4_DEVICE_AUTO, 0, &out);
    BAD(invalid, NVFP4_tensor_copy_to_device, t, cpu, 1, &out);
    BAD(NVFP4_DEVICE_UNAVAILABLE, NVFP4_tensor_copy_to_device, t, NVFP4_DEVICE_CUDA, INT32_MAX, &out);
    HANDLE(NVFP4_tensor_by_managed_policy, h, 0, 0, &out);
    BAD(invalid, NVFP4_tensor_by_managed_policy, t, 0, 0, NULL);
    BAD(invalid, NVFP4_tensor_by_managed_policy, t, -1, 0, &out);
    BAD(invalid, NVFP4_tensor_by_managed_policy, t, 0, 2, &out);
    BAD(invalid, NVFP4_tensor_empty, NULL, 2, f32, cpu, 0, &out);
    BAD(invalid, NVFP4_tensor_empty, huge, 2, f32, cpu, 0, &out);
    BAD(invalid, NVFP4_tensor_empty, shape, 2, 99, cpu, 0, &out);
    const int64_t much[] = {INT64_MAX / 16};
    BAD(NVFP4_OUT_OF_MEMORY, NVFP4_tensor_empty, much, 1, f32, cpu, 0, &out);
    HANDLE(NVFP4_tensor_view, h, shape, 2, NULL, 0, &out);
    BAD(invalid, NVFP4_tensor_view, t, shape, 2, NULL, 0, NULL);
    BAD(invalid, NVFP4_tensor_view, t, shape, 2, NULL, -1, &out);
    BAD(invalid, NVFP4_tensor_view, t, shape, 2, NULL, 1, &out);
    BAD(invalid, NVFP4_tensor_view, t, NULL, 2, NULL, 0, &out);
    HANDLE(NVFP4_tensor_retain, h);
    RELEASE(NVFP4_tensor_release);

    int32_t a, b;
    int64_t sizes[2];
    uint64_t bytes;
    void *data;
    HANDLE(NVFP4_tensor_dtype, h, &a);
    BAD(invalid, NVFP4_tensor_dtype, t, NULL);
    HANDLE(NVFP4_tensor_device, h, &a, &b);
    BAD(invalid, NVFP4_tensor_device, t, NULL, &b);
    BAD(invalid, NVFP4_tensor_device, t, &a, NULL);
    HANDLE(NVFP4_tensor_shape, h, sizes, 2, &length);
    BAD(invalid, NVFP4_tensor_shape, t, sizes, 2, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_tensor_shape, t, sizes, 1, &length);
    HANDLE(NVFP4_tensor_strides, h, sizes, 2, &length);
    BAD(invalid, NVFP4_tensor_strides, t, sizes, 2, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_tensor_strides, t, sizes, 1, &length);
    HANDLE(NVFP4_tensor_data, h, &data);
    BAD(invalid, NVFP4_tensor_data, t, NULL);
    HANDLE(NVFP4_tensor_is_read_only, h, &a);
    BAD(invalid, NVFP4_tensor_is_read_only, t, NULL);
    HANDLE(NVFP4_tensor_bytes, h, &bytes);
    BAD(invalid, NVFP4_tensor_bytes, t, NULL);
    HANDLE(NVFP4_tensor_copy_to_host, h, floats, sizeof floats);
    BAD(invalid, NVFP4_tensor_copy_to_host, t, NULL, sizeof floats);
    BAD(invalid, NVFP4_tensor_copy_to_host, t, floats, sizeof floats - 1);
    HANDLE(NVFP4_tensor_copy_as_float, h, floats, 64);
    BAD(invalid, NVFP4_tensor_copy_as_float, t, NULL, 64);
    BAD(invalid, NVFP4_tensor_copy_as_float, t, floats, 63);
    struct DLManagedTensor *managed = NULL;
    BAD(invalid, NVFP4_tensor_from_dlpack, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_dlpack, NULL, NULL);
    HANDLE(NVFP4_tensor_to_dlpack, h, &managed);
    BAD(invalid, NVFP4_tensor_to_dlpack, t, NULL);
    struct DLManagedTensorVersioned *versioned = NULL;
    const uint32_t version[2] = {2, 0};
    BAD(invalid, NVFP4_tensor_from_dlpack_versioned, NULL, &out);
    BAD(invalid, NVFP4_tensor_from_dlpack_versioned, NULL, NULL);
    BAD(NVFP4_UNSUPPORTED, NVFP4_tensor_from_dlpack_versioned, (void *)version, &out);
    SAYS("version 2.0");
    HANDLE(NVFP4_tensor_to_dlpack_versioned, h, &versioned);
    BAD(invalid, NVFP4_tensor_to_dlpack_versioned, t, NULL);
    CHECK(out == NULL && managed == NULL && versioned == NULL);
}

static void formats(NVFP4_Tensor *t, NVFP4_Tensor *codes, NVFP4_Tensor *scales)
{
    const int32_t f32 = NVFP4_DTYPE_FLOAT32, linear = NVFP4_SCALES_LINEAR, invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Tensor *second = NULL;
    float global = 0;
    NVFP4_QuantizeOptions options;
    BAD(invalid, NVFP4_quantize_options_init, NULL, sizeof options);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_quantize_options_init, &options, 4);
    OK(NVFP4_quantize_options_init(&options, sizeof options));
    HANDLE(NVFP4_tensor_quantize, h, NULL, &out, &second, &global);
    BAD(invalid, NVFP4_tensor_quantize, t, NULL, NULL, &second, &global);
    BAD(invalid, NVFP4_tensor_quantize, t, NULL, &out, NULL, &global);
    BAD(invalid, NVFP4_tensor_quantize, t, NULL, &out, &second, NULL);
    options.recipe = 9;
    BAD(invalid, NVFP4_tensor_quantize, t, &options, &out, &second, &global);
    options.struct_size = 0;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_tensor_quantize, t, &options, &out, &second, &global);
    BAD(invalid, NVFP4_tensor_quantize, codes, NULL, &out, &second, &global);
    HANDLE(NVFP4_tensor_dequantize, h, scales, 1, linear, f32, &out);
    HANDLE(NVFP4_tensor_dequantize, codes, h, 1, linear, f32, &out);
    BAD(invalid, NVFP4_tensor_dequantize, codes, scales, 1, 5, f32, &out);
    BAD(invalid, NVFP4_tensor_dequantize, codes, scales, 1, linear, NVFP4_DTYPE_INT64, &out);
    BAD(invalid, NVFP4_tensor_dequantize, codes, scales, 1, linear, f32, NULL);
    BAD(invalid, NVFP4_tensor_dequantize, codes, codes, 1, linear, f32, &out);
    HANDLE(NVFP4_tensor_quantize_nf4, h, 64, &out, &second);
    BAD(invalid, NVFP4_tensor_quantize_nf4, t, 0, &out, &second);
    BAD(invalid, NVFP4_tensor_quantize_nf4, t, 64, NULL, &second);
    BAD(invalid, NVFP4_tensor_quantize_nf4, t, 64, &out, NULL);
    HANDLE(NVFP4_tensor_dequantize_nf4, h, t, NULL, 64, shape, 2, f32, &out);
    HANDLE(NVFP4_tensor_dequantize_nf4, codes, h, NULL, 64, shape, 2, f32, &out);
    BAD(invalid, NVFP4_tensor_dequantize_nf4, codes, t, codes, 64, shape, 2, f32, &out);
    BAD(invalid, NVFP4_tensor_dequantize_nf4, codes, t, NULL, -64, shape, 2, f32, &out);
    BAD(invalid, NVFP4_tensor_dequantize_nf4, codes, t, NULL, 64, NULL, 2, f32, &out);
    BAD(invalid, NVFP4_tensor_dequantize_nf4, codes, t, NULL, 64, shape, 2, f32, NULL);
    HANDLE(NVFP4_scales_swizzle, h, &out);
    BAD(invalid, NVFP4_scales_swizzle, scales, NULL);
    BAD(invalid, NVFP4_scales_swizzle, t, &out);
    HANDLE(NVFP4_scales_unswizzle, h, 2, 2, &out);
    BAD(invalid, NVFP4_scales_unswizzle, scales, 2, 2, &out);
    BAD(invalid, NVFP4_scales_unswizzle, scales, -2, 2, &out);
    BAD(invalid, NVFP4_scales_unswizzle, scales, INT64_MAX, INT64_MAX, &out);
    BAD(invalid, NVFP4_scales_unswizzle, scales, 2, 2, NULL);
    HANDLE(NVFP4_quantize_packed, h, &out, &second);
    BAD(invalid, NVFP4_quantize_packed, t, NULL, &second);
    BAD(invalid, NVFP4_quantize_packed, t, &out, NULL);
    BAD(invalid, NVFP4_quantize_packed, codes, &out, &second);
    HANDLE(NVFP4_dequantize_packed, h, scales, f32, &out);
    HANDLE(NVFP4_dequantize_packed, codes, h, f32, &out);
    BAD(invalid, NVFP4_dequantize_packed, codes, codes, f32, &out);
    BAD(invalid, NVFP4_dequantize_packed, codes, scales, NVFP4_DTYPE_INT64, &out);
    BAD(invalid, NVFP4_dequantize_packed, codes, scales, f32, NULL);
    HANDLE(NVFP4_ste_weight, h, 0, &out);
    HANDLE(NVFP4_ste_weight, h, 1, &out);
    BAD(invalid, NVFP4_ste_weight, t, 1, NULL);
    BAD(invalid, NVFP4_ste_weight, codes, 1, &out);
    CHECK(out == NULL && second == NULL);
}

static void products(NVFP4_Tensor *t, NVFP4_Tensor *codes, NVFP4_Tensor *scales)
{
    const int32_t f32 = NVFP4_DTYPE_FLOAT32, linear = NVFP4_SCALES_LINEAR, invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Weight *weight = NULL, *none = NULL;
    HANDLE(NVFP4_weight_create, h, scales, 1, linear, &none);
    HANDLE(NVFP4_weight_create, codes, h, 1, linear, &none);
    BAD(invalid, NVFP4_weight_create, codes, scales, 1, 5, &none);
    BAD(invalid, NVFP4_weight_create, codes, scales, 1, linear, NULL);
    BAD(invalid, NVFP4_weight_create, t, scales, 1, linear, &none);
    HANDLE(NVFP4_weight_create_dense, h, &none);
    BAD(invalid, NVFP4_weight_create_dense, t, NULL);
    BAD(invalid, NVFP4_weight_create_dense, codes, &none);
    HANDLE(NVFP4_weight_retain, h);
    RELEASE(NVFP4_weight_release);
    OK(NVFP4_weight_create(codes, scales, 1, linear, &weight));
    int64_t n, k;
    uint64_t bytes;
    HANDLE(NVFP4_weight_size, h, &n, &k, &bytes);
    BAD(invalid, NVFP4_weight_size, weight, NULL, &k, &bytes);
    BAD(invalid, NVFP4_weight_size, weight, &n, NULL, &bytes);
    BAD(invalid, NVFP4_weight_size, weight, &n, &k, NULL);
    HANDLE(NVFP4_weight_report, h, text, sizeof text, &length);
    BAD(invalid, NVFP4_weight_report, weight, text, sizeof text, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_weight_report, weight, text, 1, &length);
    HANDLE(NVFP4_linear, h, t, 0, f32, &out);
    HANDLE(NVFP4_linear, weight, h, 0, f32, &out);
    BAD(invalid, NVFP4_linear, weight, t, 2, f32, &out);
    BAD(invalid, NVFP4_linear, weight, t, 0, NVFP4_DTYPE_UINT8, &out);
    BAD(invalid, NVFP4_linear, weight, t, 0, f32, NULL);
    BAD(invalid, NVFP4_linear, weight, codes, 0, f32, &out);
    HANDLE(NVFP4_matmul, h, scales, 1, codes, scales, 1, linear, f32, &out);
    HANDLE(NVFP4_matmul, codes, h, 1, codes, scales, 1, linear, f32, &out);
    HANDLE(NVFP4_matmul, codes, scales, 1, h, scales, 1, linear, f32, &out);
    HANDLE(NVFP4_matmul, codes, scales, 1, codes, h, 1, linear, f32, &out);
    BAD(invalid, NVFP4_matmul, codes, scales, 1, codes, scales, 1, 5, f32, &out);
    BAD(invalid, NVFP4_matmul, codes, scales, 1, codes, scales, 1, linear, 4, &out);
    BAD(invalid, NVFP4_matmul, codes, scales, 1, codes, scales, 1, linear, f32, NULL);
    CHECK(out == NULL && none == NULL);
    OK(NVFP4_weight_release(weight));
}

/* Weight options that are refused. */
static void weight_options(NVFP4_Tensor *codes, NVFP4_Tensor *scales)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    static uint8_t bytes[32];
    static const int64_t flat[] = {32}, one[] = {1};
    NVFP4_WeightOptions good, bad;
    NVFP4_Weight *none = NULL;
    NVFP4_Tensor *nf4, *absmax;
    BAD(invalid, NVFP4_weight_options_init, NULL, sizeof good);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_weight_options_init, &good, 3);
    OK(NVFP4_weight_options_init(&good, sizeof good));
    OK(NVFP4_tensor_from_host(bytes, flat, 1, NULL, NVFP4_DTYPE_UINT8, NULL, NULL, &nf4));
    OK(NVFP4_tensor_from_host(floats, one, 1, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &absmax));

    HANDLE(NVFP4_weight_create_nvfp4, h, scales, 1, &good, &none);
    HANDLE(NVFP4_weight_create_nvfp4, codes, h, 1, &good, &none);
    BAD(invalid, NVFP4_weight_create_nvfp4, codes, scales, -1, &good, &none);
    BAD(invalid, NVFP4_weight_create_nvfp4, codes, scales, 1, &good, NULL);
    HANDLE(NVFP4_weight_create_nf4, h, absmax, NULL, 64, 4, 16, &good, &none);
    HANDLE(NVFP4_weight_create_nf4, nf4, h, NULL, 64, 4, 16, &good, &none);
    for (int i = 1; i < 4; i++)
        BAD(NVFP4_INVALID_HANDLE, NVFP4_weight_create_nf4, nf4, absmax, no_handles[i], 64, 4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, 64, 4, 16, &good, NULL);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, absmax, 64, 4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, nf4, NULL, 64, 4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, absmax, absmax, NULL, 64, 4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, 0, 4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, -64, 4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, 32, 4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, 64, 5, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, 64, 8, 8, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, 64, -4, 16, &good, &none);
    BAD(invalid, NVFP4_weight_create_nf4, nf4, absmax, NULL, 64, INT64_MAX, INT64_MAX, &good, &none);

    BAD(invalid, NVFP4_backend_select, NVFP4_FORMAT_NONE, &good, text, sizeof text, &length);
    BAD(invalid, NVFP4_backend_select, NVFP4_FORMAT_MIXED, &good, text, sizeof text, &length);
    BAD(invalid, NVFP4_backend_select, NVFP4_FORMAT_NF4, &good, text, sizeof text, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_backend_select, NVFP4_FORMAT_NF4, &good, text, 1, &length);
#define OPTION(expected, field, value)                                                                       \
    do {                                                                                                     \
        bad = good;                                                                                          \
        bad.field = (value);                                                                                 \
        BAD(expected, NVFP4_backend_select, NVFP4_FORMAT_NVFP4, &bad, text, sizeof text, &length);           \
        BAD(expected, NVFP4_weight_create_nvfp4, codes, scales, 1, &bad, &none);                             \
        BAD(expected, NVFP4_weight_create_nf4, nf4, absmax, NULL, 64, 4, 16, &bad, &none);                   \
    } while (0)
    OPTION(NVFP4_ABI_MISMATCH, struct_size, 0);
    OPTION(invalid, compute_path, 4);
    OPTION(invalid, compute_path, -1);
    OPTION(invalid, device_type, 2);
    if (cuda)
        printf("SKIPPED weights without a GPU: there is one\n");
    else
        OPTION(NVFP4_DEVICE_UNAVAILABLE, device_type, NVFP4_DEVICE_CUDA);
    OPTION(invalid, device_index, 1);
    OPTION(invalid, device_index, -2);
    NVFP4_WeightOptions on_cuda = good;
    on_cuda.device_type = NVFP4_DEVICE_AUTO;
    on_cuda.device_index = 1;
    BAD(invalid, NVFP4_backend_select, NVFP4_FORMAT_NVFP4, &on_cuda, text, sizeof text, &length);
    SAYS("device_index is 1");
    on_cuda.device_type = NVFP4_DEVICE_CUDA;
    on_cuda.device_index = -1;
    BAD(invalid, NVFP4_backend_select, NVFP4_FORMAT_NVFP4, &on_cuda, text, sizeof text, &length);
    on_cuda.device_index = INT32_MAX;
    BAD(NVFP4_DEVICE_UNAVAILABLE, NVFP4_backend_select, NVFP4_FORMAT_NVFP4, &on_cuda, text, sizeof text, &length);
    OPTION(invalid, scale_layout, 2);
    OPTION(invalid, dense_dtype, NVFP4_DTYPE_FLOAT64);
    OPTION(invalid, exclude_cpu_kernels, 2);
    OPTION(invalid, reserved, 1);
    OPTION(invalid, backend_length, 3);
    OPTION(invalid, backend, "");
    CHECK(none == NULL);
    OK(NVFP4_tensor_release(absmax));
    OK(NVFP4_tensor_release(nf4));
}

static void schemas(void)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    const int64_t negative[] = {2, -1}, huge[] = {INT64_MAX, 4};
    NVFP4_NamedTensor good = {"a.qdata", 7, NVFP4_DTYPE_UINT8, 2, shape}, bad;
    NVFP4_SchemaResult result;
    result.struct_size = sizeof result;
    BAD(invalid, NVFP4_schema_detect, &good, 1, sizeof(NVFP4_NamedTensor), NULL, 0, NULL);
    BAD(invalid, NVFP4_schema_report, &good, 1, sizeof(NVFP4_NamedTensor), NULL, 0, text, sizeof text, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_schema_report, &good, 1, sizeof(NVFP4_NamedTensor), NULL, 0, text, 1, &length);
    BAD(invalid, NVFP4_schema_validate, &good, 1, sizeof(NVFP4_NamedTensor), NULL, 0);
    BAD(NVFP4_NOT_FOUND, NVFP4_schema_validate, NULL, 0, sizeof(NVFP4_NamedTensor), NULL, 0);
    result.struct_size = 0;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_schema_detect, &good, 1, sizeof(NVFP4_NamedTensor), NULL, 0, &result);
    result.struct_size = sizeof result;
#define TENSORS(expected, ...)                                                                               \
    do {                                                                                                     \
        BAD(expected, NVFP4_schema_detect, __VA_ARGS__, &result);                                            \
        BAD(expected, NVFP4_schema_report, __VA_ARGS__, text, sizeof text, &length);                         \
        BAD(expected, NVFP4_schema_validate, __VA_ARGS__);                                                   \
    } while (0)
    const NVFP4_NamedTensor twice[] = {good, good};
    TENSORS(invalid, NULL, 1, sizeof good, NULL, 0);
    TENSORS(invalid, &good, 1, sizeof good, NULL, 3);
    TENSORS(invalid, &good, 1, sizeof good, "\xff", 1);
    TENSORS(invalid, twice, 2, sizeof good, NULL, 0);
    bad = good;
    bad.name = NULL;
    TENSORS(invalid, &bad, 1, sizeof good, NULL, 0);
    bad.name = "a.qdat\xff";
    TENSORS(invalid, &bad, 1, sizeof good, NULL, 0);
    bad = good;
    bad.rank = -1;
    TENSORS(invalid, &bad, 1, sizeof good, NULL, 0);
    bad.rank = 9;
    bad.sizes = (const int64_t[]){1, 1, 1, 1, 1, 1, 1, 1, 1};
    TENSORS(invalid, &bad, 1, sizeof good, NULL, 0);
    /* Sizes of elements that no version had, and one of a later version with something in it. */
    static const struct { NVFP4_NamedTensor known; uint64_t unknown; } later[1] = {{{"a.qdata", 7, NVFP4_DTYPE_UINT8, 2, shape}, 1}};
    TENSORS(NVFP4_ABI_MISMATCH, &good, 1, sizeof good - 8, NULL, 0);
    TENSORS(NVFP4_ABI_MISMATCH, &good, 1, 0, NULL, 0);
    TENSORS(NVFP4_ABI_MISMATCH, &later->known, 1, sizeof later[0], NULL, 0);
    bad = good;
    bad.sizes = NULL;
    TENSORS(invalid, &bad, 1, sizeof good, NULL, 0);
    bad.sizes = negative;
    TENSORS(invalid, &bad, 1, sizeof good, NULL, 0);
    bad.sizes = huge;
    TENSORS(invalid, &bad, 1, sizeof good, NULL, 0);
}

static int32_t no_thread(void *user, NVFP4_PoolTask run, void *task)
{
    return user == NULL && run != NULL && task != NULL;
}

static void models(NVFP4_Model *model, const char *path)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Model *none = NULL;
    NVFP4_LoadOptions options;
    NVFP4_QuantizeOptions quantize;
    BAD(invalid, NVFP4_load_options_init, NULL, sizeof options);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_load_options_init, &options, 0);
    OK(NVFP4_load_options_init(&options, sizeof options));
    OK(NVFP4_quantize_options_init(&quantize, sizeof quantize));
    /* tests/c/memory.c has more of these. */
    BAD(invalid, NVFP4_model_load_files, NULL, 1, sizeof(NVFP4_ModelFile), NULL, NULL, &none);
    BAD(invalid, NVFP4_model_load, NULL, 4, NULL, NULL, &none);
    BAD(invalid, NVFP4_model_load, path, strlen(path), NULL, NULL, NULL);
    BAD(invalid, NVFP4_model_load, "a\0b", 3, NULL, NULL, &none);
    SAYS("path has a NUL at byte 1 of 3");
    BAD(NVFP4_NOT_FOUND, NVFP4_model_load, "\xff", 1, NULL, NULL, &none);
    BAD(NVFP4_NOT_FOUND, NVFP4_model_load, "/nowhere", 8, NULL, NULL, &none);

    NVFP4_Pool *pool = NULL;
    BAD(invalid, NVFP4_pool_create, 2, NULL, NULL, NULL, &pool);
    SAYS("submit is NULL");
    BAD(invalid, NVFP4_pool_create, -1, no_thread, NULL, NULL, &pool);
    BAD(invalid, NVFP4_pool_create, 1025, no_thread, NULL, NULL, &pool);
    BAD(invalid, NVFP4_pool_create, 2, no_thread, NULL, NULL, NULL);
    OK(NVFP4_pool_create(2, no_thread, NULL, NULL, &pool));
    options.pool = pool;
    options.threads = 3;
    BAD(invalid, NVFP4_model_load, path, strlen(path), &options, NULL, &none);
    SAYS("threads is 3, and pool");
    options.threads = 0;
    options.pool = no_handles[1];
    BAD(NVFP4_INVALID_HANDLE, NVFP4_model_load, path, strlen(path), &options, NULL, &none);
    options.pool = NULL;
    HANDLE(NVFP4_pool_retain, h);
    RELEASE(NVFP4_pool_release);
    OK(NVFP4_pool_release(pool));
    options.activations = 9;
    BAD(invalid, NVFP4_model_load, path, strlen(path), &options, NULL, &none);
    options.activations = NVFP4_ACTIVATIONS_INT8;
    options.device_type = 2;
    BAD(invalid, NVFP4_model_load, path, strlen(path), &options, NULL, &none);
    /* A GPU has no 8-bit activations. */
    options.device_type = NVFP4_DEVICE_CUDA;
    BAD(cuda ? NVFP4_UNSUPPORTED : NVFP4_DEVICE_UNAVAILABLE, NVFP4_model_load, path, strlen(path), &options, NULL, &none);
    if (cuda)
        printf("SKIPPED models without a GPU: there is one\n");
    else
        SAYS("driver");
    options.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_load, path, strlen(path), &options, NULL, &none);
    quantize.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_load, path, strlen(path), NULL, &quantize, &none);
    NVFP4_PlanOptions wanted;
    NVFP4_Plan plan = {0};
    plan.struct_size = sizeof plan;
    BAD(invalid, NVFP4_plan_options_init, NULL, sizeof wanted);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_plan_options_init, &wanted, 0);
    OK(NVFP4_plan_options_init(&wanted, sizeof wanted));
    BAD(invalid, NVFP4_model_plan, path, strlen(path), NULL, NULL, NULL, NULL);
    SAYS("out is NULL");
    BAD(invalid, NVFP4_model_plan, NULL, 4, NULL, NULL, NULL, &plan);
    BAD(NVFP4_NOT_FOUND, NVFP4_model_plan, "/nowhere", 8, NULL, NULL, NULL, &plan);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_plan, path, strlen(path), &options, NULL, NULL, &plan);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_plan, path, strlen(path), NULL, &quantize, NULL, &plan);
    wanted.kv_type = 7;
    BAD(invalid, NVFP4_model_plan, path, strlen(path), NULL, NULL, &wanted, &plan);
    wanted.kv_type = NVFP4_KV_FLOAT32;
    wanted.sequences = 0;
    BAD(invalid, NVFP4_model_plan, path, strlen(path), NULL, NULL, &wanted, &plan);
    wanted.sequences = 1;
    wanted.context = 100000;
    BAD(invalid, NVFP4_model_plan, path, strlen(path), NULL, NULL, &wanted, &plan);
    SAYS("a context of 100000 positions");
    CHECK(plan.weight_bytes == 0);
    plan.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_plan, path, strlen(path), NULL, NULL, NULL, &plan);
    HANDLE(NVFP4_model_retain, h);
    RELEASE(NVFP4_model_release);

    int32_t token = 3;
    const NVFP4_Message message = {"user", 4, NULL, 2};
    HANDLE(NVFP4_model_info, h, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_info, model, text, sizeof text, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_model_info, model, text, 1, &length);
    HANDLE(NVFP4_model_vocab_size, h, &length);
    BAD(invalid, NVFP4_model_vocab_size, model, NULL);
    NVFP4_ModelStatistics statistics = {.struct_size = sizeof statistics};
    HANDLE(NVFP4_model_statistics, h, &statistics);
    BAD(invalid, NVFP4_model_statistics, model, NULL);
    statistics.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_statistics, model, &statistics);
    HANDLE(NVFP4_model_save_prefixes, h, "/dev/null/x", 11, NULL);
    BAD(invalid, NVFP4_model_save_prefixes, model, NULL, 1, NULL);
    BAD(NVFP4_IO, NVFP4_model_save_prefixes, model, "/dev/null/x", 11, NULL);
    BAD(invalid, NVFP4_model_save_prefixes, model, "/dev/null", 9, NULL);
    HANDLE(NVFP4_model_restore_prefixes, h, "/dev/null/x", 11, NULL);
    BAD(invalid, NVFP4_model_restore_prefixes, model, NULL, 1, NULL);
    BAD(invalid, NVFP4_model_restore_prefixes, model, "/dev/null/x", 11, NULL);
    SAYS("load it with prefix_bytes or kv_bytes");
    HANDLE(NVFP4_model_tokenize, h, "a", 1, 0, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize, model, NULL, 1, 0, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize, model, "a", 1, 2, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize, model, "a", 1, 0, &token, 1, NULL);
    HANDLE(NVFP4_model_tokenize_plain, h, "a", 1, 0, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_plain, model, NULL, 1, 0, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_plain, model, "a", 1, 2, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_plain, model, "\xff", 1, 0, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_plain, model, "a", 1, 0, &token, 1, NULL);
    HANDLE(NVFP4_model_detokenize, h, &token, 1, 0, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_detokenize, model, NULL, 1, 0, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_detokenize, model, &token, 1, 2, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_detokenize, model, &token, 1, 0, text, sizeof text, NULL);
    token = -3;
    BAD(invalid, NVFP4_model_detokenize, model, &token, 1, 0, text, sizeof text, &length);
    HANDLE(NVFP4_model_token_bytes, h, 1, NULL, 0, &length, NULL);
    BAD(invalid, NVFP4_model_token_bytes, model, 1, NULL, 0, NULL, NULL);
    BAD(invalid, NVFP4_model_token_bytes, model, 1, NULL, 1, &length, NULL);
    uint8_t one[1];
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_model_token_bytes, model, 0, one, 1, &length, NULL);
    BAD(invalid, NVFP4_model_token_bytes, model, -1, NULL, 0, &length, NULL);
    SAYS("the token is -1; the ids of the model are 0 to 319");
    BAD(invalid, NVFP4_model_token_bytes, model, 320, NULL, 0, &length, NULL);
    SAYS("the token is 320; the ids of the model are 0 to 319");
    NVFP4_SpecialToken special[8];
    HANDLE(NVFP4_model_special_tokens, h, special, sizeof *special, 8, &length);
    BAD(invalid, NVFP4_model_special_tokens, model, special, sizeof *special, 8, NULL);
    BAD(invalid, NVFP4_model_special_tokens, model, NULL, sizeof *special, 8, &length);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_model_special_tokens, model, special, sizeof *special, 2, &length);
    SAYS("room for 2, and 3 are needed");
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_special_tokens, model, special, 16, 8, &length);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_special_tokens, model, NULL, 16, 0, &length);
    HANDLE(NVFP4_model_render_chat, h, NULL, 0, sizeof(NVFP4_Message), 1, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_render_chat, model, NULL, 1, sizeof(NVFP4_Message), 1, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_render_chat, model, &message, 1, sizeof(NVFP4_Message), 1, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_render_chat, model, NULL, 0, sizeof(NVFP4_Message), 2, text, sizeof text, &length);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_render_chat, model, &message, 1, sizeof message + 4, 1, text, sizeof text, &length);
    NVFP4_ConvertOptions convert;
    BAD(invalid, NVFP4_convert_options_init, NULL, sizeof convert);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_convert_options_init, &convert, 0);
    OK(NVFP4_convert_options_init(&convert, sizeof convert));
    BAD(invalid, NVFP4_model_convert, NULL, 1, "/tmp", 4, NULL, NULL);
    BAD(invalid, NVFP4_model_convert, path, strlen(path), NULL, 4, NULL, NULL);
    convert.container = 9;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    convert.container = NVFP4_CONTAINER_MODELOPT;
    convert.replace = 2;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    convert.replace = 1;
    convert.keep_head = 2;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    convert.keep_head = 0;
    convert.tables = 3;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    CHECK(strstr(NVFP4_last_error(), "int8") != NULL);
    convert.tables = NVFP4_TABLES_INT8;
    convert.reserved = 1;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    convert.reserved = 0;
    convert.reserved2 = 1;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    SAYS("a reserved field of NVFP4_ConvertOptions is 1");
    convert.reserved2 = 0;
    convert.packed = 2;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    SAYS("packed is 2");
    convert.packed = 1;
    convert.container = NVFP4_CONTAINER_DAT;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    SAYS("packed is 1, and container is dat");
    convert.container = NVFP4_CONTAINER_MODELOPT;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), path, strlen(path), &convert, NULL);
    SAYS("replace has no effect");
    convert.packed = 0;
    NVFP4_CalibrateOptions calibrate;
    BAD(invalid, NVFP4_calibrate_options_init, NULL, sizeof calibrate);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_calibrate_options_init, &calibrate, 0);
    OK(NVFP4_calibrate_options_init(&calibrate, sizeof calibrate));
    convert.calibrate = &calibrate;
    calibrate.windows = -1;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    CHECK(strstr(NVFP4_last_error(), "windows is -1") != NULL);
    calibrate.windows = 0;
    calibrate.device_type = 7;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    calibrate.device_type = NVFP4_DEVICE_CPU;
    calibrate.file_count = 1;
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    calibrate.file_count = 0;
    /* Refused before any work, as it is without a calibration. */
    BAD(NVFP4_IO, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    convert.calibrate = NULL;
    /* Its directory exists, so that only the unsupported content is wrong. */
    convert.container = NVFP4_CONTAINER_DAT;
    BAD(NVFP4_UNSUPPORTED, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, &convert, NULL);
    convert.container = NVFP4_CONTAINER_MODELOPT;
    /* A directory that is not empty, and holds no model to replace. */
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/proc", 5, NULL, NULL);
    CHECK(strstr(NVFP4_last_error(), "is not empty") != NULL);
    BAD(invalid, NVFP4_model_convert, path, strlen(path), "/proc", 5, &convert, NULL);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_convert, path, strlen(path), "/dev/null/x", 11, NULL, &quantize);
    BAD(NVFP4_NOT_FOUND, NVFP4_model_convert, "/nowhere", 8, "/dev/null/x", 11, NULL, NULL);
    CHECK(none == NULL);
}

static void sessions(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Session *session = NULL, *none = NULL;
    NVFP4_SessionOptions options;
    NVFP4_GenerateOptions generate;
    NVFP4_GenerationResult result = {.struct_size = 4};
    BAD(invalid, NVFP4_session_options_init, NULL, sizeof options);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_options_init, &options, 12);
    OK(NVFP4_session_options_init(&options, sizeof options));
    BAD(invalid, NVFP4_generate_options_init, NULL, sizeof generate);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_generate_options_init, &generate, 0);
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    HANDLE(NVFP4_session_create, h, NULL, &none);
    BAD(invalid, NVFP4_session_create, model, NULL, NULL);
    options.kv_type = 7;
    BAD(invalid, NVFP4_session_create, model, &options, &none);
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.is_private = 2;
    BAD(invalid, NVFP4_session_create, model, &options, &none);
    SAYS("is_private is 2");
    options.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_create, model, &options, &none);
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.system = "\xff";
    options.system_length = 1;
    BAD(invalid, NVFP4_session_create, model, &options, &none);
    HANDLE(NVFP4_session_retain, h);
    RELEASE(NVFP4_session_release);
    OK(NVFP4_session_create(model, NULL, &session));

    int32_t token = 3;
    uint64_t bytes;
    HANDLE(NVFP4_session_prefill, h, &token, 1, NULL);
    BAD(invalid, NVFP4_session_prefill, session, NULL, 1, NULL);
    token = -1;
    BAD(invalid, NVFP4_session_prefill, session, &token, 1, NULL);
    BAD(invalid, NVFP4_session_prefill_token_by_token, session, &token, 1, NULL);
    BAD(invalid, NVFP4_session_prefill_token_by_token, session, NULL, 1, NULL);
    token = 3;
    HANDLE(NVFP4_session_prefill_token_by_token, h, &token, 1, NULL);
    HANDLE(NVFP4_session_decode, h, 3, NULL);
    BAD(invalid, NVFP4_session_decode, session, -3, NULL);
    HANDLE(NVFP4_session_logits, h, floats, 64, &length, NULL);
    HANDLE(NVFP4_session_sample, h, NULL, &token);
    HANDLE(NVFP4_session_generate, h, NULL, NULL, NULL, NULL);
    HANDLE(NVFP4_session_chat, h, "a", 1, NULL, NULL, NULL, NULL, NULL);
    BAD(invalid, NVFP4_session_chat, session, NULL, 1, NULL, NULL, NULL, NULL, NULL);
    NVFP4_ChatOptions chat;
    BAD(invalid, NVFP4_chat_options_init, NULL, sizeof chat);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_chat_options_init, &chat, 12);
    OK(NVFP4_chat_options_init(&chat, sizeof chat));
    const char *json = "[{\"role\": \"user\", \"content\": \"a\"}]";
    const size_t size = strlen(json);
    HANDLE(NVFP4_session_chat_messages, h, json, size, NULL, NULL, NULL, NULL, NULL);
    BAD(invalid, NVFP4_session_chat_messages, session, NULL, 1, NULL, NULL, NULL, NULL, NULL);
    BAD(invalid, NVFP4_session_chat_messages, session, json, size - 1, NULL, NULL, NULL, NULL, NULL);
    SAYS("line 1 column");
    BAD(invalid, NVFP4_session_chat_messages, session, "[{\"role\": \"\xff\"}]", 13, NULL, NULL, NULL, NULL, NULL);
    SAYS("UTF-8");
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_chat_messages, session, json, size, NULL, NULL, NULL, NULL, &result);
    HANDLE(NVFP4_session_reasoning, h, text, sizeof text, &length);
    BAD(invalid, NVFP4_session_reasoning, session, text, sizeof text, NULL);
    HANDLE(NVFP4_session_tool_calls, h, text, sizeof text, &length);
    BAD(invalid, NVFP4_session_tool_calls, session, text, sizeof text, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_session_tool_calls, session, text, 1, &length);
    HANDLE(NVFP4_model_render_messages, h, json, size, NULL, 1, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_render_messages, model, NULL, 1, NULL, 1, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_render_messages, model, json, size - 1, NULL, 1, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_render_messages, model, json, size, NULL, 2, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_render_messages, model, json, size, NULL, 1, text, sizeof text, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_model_render_messages, model, json, size, NULL, 1, text, 1, &length);
    HANDLE(NVFP4_model_tokenize_messages, h, json, size, NULL, 1, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_messages, model, NULL, 1, NULL, 1, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_messages, model, json, size - 1, NULL, 1, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_messages, model, json, size, NULL, 2, &token, 1, &length);
    BAD(invalid, NVFP4_model_tokenize_messages, model, json, size, NULL, 1, &token, 1, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_model_tokenize_messages, model, json, size, NULL, 1, &token, 1, &length);
    HANDLE(NVFP4_model_generate_options, h, &generate, sizeof generate);
    BAD(invalid, NVFP4_model_generate_options, model, NULL, sizeof generate);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_generate_options, model, &generate, 12);
    chat.reasoning_budget = -2;
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    BAD(invalid, NVFP4_model_render_messages, model, json, size, &chat, 1, text, sizeof text, &length);
    SAYS("reasoning_budget is -2");
    chat.reasoning_budget = INT64_MIN;
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    chat.reasoning_budget = -1;
    chat.keep_reasoning = -1;
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    chat.keep_reasoning = 0;
    chat.variables_length = 2;
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    chat.variables = "{x";
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    SAYS("line 1 column 2");
    chat.variables_length = 0;
    chat.tools_length = 2;
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    chat.tools = "{}";
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    SAYS("tools are not an array");
    chat.tools_length = 0;
    chat.chat_template_length = 2;
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    SAYS("chat_template is NULL");
    chat.chat_template = "{%";
    BAD(invalid, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    SAYS("(line 1)");
    BAD(invalid, NVFP4_model_render_messages, model, json, size, &chat, 1, text, sizeof text, &length);
    BAD(invalid, NVFP4_model_tokenize_messages, model, json, size, &chat, 1, &token, 1, &length);
    chat.struct_size = 12;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_chat, session, "a", 1, &chat, NULL, NULL, NULL, NULL);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_chat_messages, session, json, size, &chat, NULL, NULL, NULL, NULL);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_render_messages, model, json, size, &chat, 1, text, sizeof text, &length);
    OK(NVFP4_session_length(session, &length));
    CHECK(length == 0);
    BAD(invalid, NVFP4_session_sample, session, NULL, &token);
    OK(NVFP4_session_prefill(session, &token, 1, NULL));
    BAD(invalid, NVFP4_session_logits, session, floats, 64, NULL, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_session_logits, session, floats, 64, &length, NULL);
    CHECK(length == 320);
    BAD(invalid, NVFP4_session_sample, session, NULL, NULL);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_generate, session, NULL, NULL, NULL, &result);
    generate.top_p = 2;
    BAD(invalid, NVFP4_session_sample, session, &generate, &token);
    BAD(invalid, NVFP4_session_generate, session, &generate, NULL, NULL, NULL);
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    generate.top_k = -1;
    BAD(invalid, NVFP4_session_generate, session, &generate, NULL, NULL, NULL);
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    generate.stop_token_count = 1;
    BAD(invalid, NVFP4_session_generate, session, &generate, NULL, NULL, NULL);
    generate.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_generate, session, &generate, NULL, NULL, NULL);
    NVFP4_GenerationResult last = {.struct_size = sizeof last};
    HANDLE(NVFP4_session_result, h, &last);
    BAD(invalid, NVFP4_session_result, session, NULL);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_result, session, &result);
    HANDLE(NVFP4_session_text, h, text, sizeof text, &length);
    BAD(invalid, NVFP4_session_text, session, text, sizeof text, NULL);
    HANDLE(NVFP4_session_messages, h, text, sizeof text, &length);
    BAD(invalid, NVFP4_session_messages, session, text, sizeof text, NULL);
    HANDLE(NVFP4_session_length, h, &length);
    BAD(invalid, NVFP4_session_length, session, NULL);
    HANDLE(NVFP4_session_evicted, h, &length);
    BAD(invalid, NVFP4_session_evicted, session, NULL);
    HANDLE(NVFP4_session_context, h, &length);
    BAD(invalid, NVFP4_session_context, session, NULL);
    HANDLE(NVFP4_session_memory, h, &bytes);
    BAD(invalid, NVFP4_session_memory, session, NULL);
    HANDLE(NVFP4_session_tokens, h, &token, 1, &length);
    BAD(invalid, NVFP4_session_tokens, session, &token, 1, NULL);
    BAD(invalid, NVFP4_session_tokens, session, NULL, 1, &length);
    HANDLE(NVFP4_session_truncate, h, 0);
    BAD(invalid, NVFP4_session_truncate, session, 2);
    HANDLE(NVFP4_session_reset, h);
    HANDLE(NVFP4_session_fork, h, &none);
    BAD(invalid, NVFP4_session_fork, session, NULL);
    HANDLE(NVFP4_session_save, h, "/dev/null/x", 11, NULL);
    BAD(invalid, NVFP4_session_save, session, NULL, 1, NULL);
    HANDLE(NVFP4_session_restore, h, "/dev/null/x", 11, NULL, &none);
    BAD(invalid, NVFP4_session_restore, model, NULL, 1, NULL, &none);
    BAD(invalid, NVFP4_session_restore, model, "/dev/null/x", 11, NULL, NULL);
    HANDLE(NVFP4_session_save_bytes, h, NULL, 0, &length, NULL);
    BAD(invalid, NVFP4_session_save_bytes, session, NULL, 1, &length, NULL);
    BAD(invalid, NVFP4_session_save_bytes, session, NULL, 0, NULL, NULL);
    HANDLE(NVFP4_session_restore_bytes, h, (const uint8_t *)"x", 1, NULL, &none);
    BAD(invalid, NVFP4_session_restore_bytes, model, NULL, 1, NULL, &none);
    BAD(invalid, NVFP4_session_restore_bytes, model, (const uint8_t *)"x", 1, NULL, NULL);
    BAD(NVFP4_CORRUPT_FILE, NVFP4_session_restore_bytes, model, NULL, 0, NULL, &none);
    for (int i = 0; i < 4; i++) {
        NVFP4_Session *some[1];
        some[0] = no_handles[i];
        BAD(NVFP4_INVALID_HANDLE, NVFP4_session_step, some, &token, 1, NULL, NULL);
        BAD(NVFP4_INVALID_HANDLE, NVFP4_session_step_sample, some, &token, 1, NULL, NULL, &token, NULL);
    }
    BAD(invalid, NVFP4_session_step, NULL, &token, 1, NULL, NULL);
    BAD(invalid, NVFP4_session_step, &session, NULL, 1, NULL, NULL);
    BAD(invalid, NVFP4_session_step_sample, NULL, &token, 1, NULL, NULL, &token, NULL);
    BAD(invalid, NVFP4_session_step_sample, &session, NULL, 1, NULL, NULL, &token, NULL);
    BAD(invalid, NVFP4_session_step_sample, &session, &token, 1, NULL, NULL, NULL, NULL);

    /* A failed call has changed nothing. */
    OK(NVFP4_session_length(session, &length));
    CHECK(length == 1 && none == NULL);
    OK(NVFP4_session_release(session));
}

static void queues(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    const char json[] = "[{\"role\": \"user\", \"content\": \"a\"}]";
    const size_t size = sizeof json - 1;
    NVFP4_Queue *queue = NULL, *none = NULL;
    NVFP4_Session *session = NULL;
    NVFP4_QueueOptions limits;
    NVFP4_SubmitOptions submit;
    NVFP4_QueueEvent event;
    int32_t token = 3, fd = 7;
    uint64_t number = 7;
    size_t count = 7;
    BAD(invalid, NVFP4_queue_options_init, NULL, sizeof limits);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_queue_options_init, &limits, 0);
    OK(NVFP4_queue_options_init(&limits, sizeof limits));
    BAD(invalid, NVFP4_submit_options_init, NULL, sizeof submit);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_submit_options_init, &submit, 0);
    OK(NVFP4_submit_options_init(&submit, sizeof submit));
    HANDLE(NVFP4_queue_create, h, NULL, &none);
    BAD(invalid, NVFP4_queue_create, model, NULL, NULL);
    limits.running = 0;
    BAD(invalid, NVFP4_queue_create, model, &limits, &none);
    limits.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_queue_create, model, &limits, &none);
    HANDLE(NVFP4_queue_retain, h);
    RELEASE(NVFP4_queue_release);
    OK(NVFP4_queue_create(model, NULL, &queue));
    OK(NVFP4_session_create(model, NULL, &session));

    HANDLE(NVFP4_queue_generate, h, session, &token, 1, NULL, NULL, &number);
    HANDLE(NVFP4_queue_generate, queue, h, &token, 1, NULL, NULL, &number);
    BAD(invalid, NVFP4_queue_generate, queue, session, NULL, 1, NULL, NULL, &number);
    BAD(invalid, NVFP4_queue_generate, queue, session, &token, 1, NULL, NULL, NULL);
    HANDLE(NVFP4_queue_chat, h, session, "a", 1, NULL, NULL, NULL, &number);
    HANDLE(NVFP4_queue_chat, queue, h, "a", 1, NULL, NULL, NULL, &number);
    BAD(invalid, NVFP4_queue_chat, queue, session, NULL, 1, NULL, NULL, NULL, &number);
    BAD(invalid, NVFP4_queue_chat, queue, session, "\xff", 1, NULL, NULL, NULL, &number);
    HANDLE(NVFP4_queue_chat_messages, h, session, json, size, NULL, NULL, NULL, &number);
    HANDLE(NVFP4_queue_chat_messages, queue, h, json, size, NULL, NULL, NULL, &number);
    BAD(invalid, NVFP4_queue_chat_messages, queue, session, json, size - 1, NULL, NULL, NULL, &number);
    submit.deadline = -1;
    BAD(invalid, NVFP4_queue_generate, queue, session, &token, 1, NULL, &submit, &number);
    SAYS("deadline is -1 seconds");
    submit.struct_size = 4;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_queue_generate, queue, session, &token, 1, NULL, &submit, &number);

    HANDLE(NVFP4_queue_wait, h, &event, sizeof event, 1, 0, &count);
    BAD(invalid, NVFP4_queue_wait, queue, NULL, sizeof event, 1, 0, &count);
    BAD(invalid, NVFP4_queue_wait, queue, &event, sizeof event, 0, 0, &count);
    BAD(invalid, NVFP4_queue_wait, queue, &event, sizeof event, 1, -2, &count);
    BAD(invalid, NVFP4_queue_wait, queue, &event, sizeof event, 1, 0, NULL);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_queue_wait, queue, &event, 4, 1, 0, &count);
    HANDLE(NVFP4_queue_wake, h);
    HANDLE(NVFP4_queue_cancel, h, 1);
    BAD(invalid, NVFP4_queue_cancel, queue, 1);
    HANDLE(NVFP4_queue_fd, h, &fd);
    BAD(invalid, NVFP4_queue_fd, queue, NULL);
    HANDLE(NVFP4_queue_counts, h, &count, NULL, NULL);

    /* A failed call has changed nothing. */
    CHECK(none == NULL && number == 7 && fd == 7 && count == 7);
    OK(NVFP4_queue_counts(queue, &count, NULL, NULL));
    CHECK(count == 0);
    OK(NVFP4_session_length(session, &length));
    CHECK(length == 0);
    OK(NVFP4_session_release(session));
    OK(NVFP4_queue_release(queue));
}

static void calls(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_CallOptions call;
    NVFP4_Cancel *cancel = NULL;
    NVFP4_Session *session = NULL;
    int32_t flags[2] = {0, 0}, triggered = 7, token = 3;
    BAD(invalid, NVFP4_call_options_init, NULL, sizeof call);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_call_options_init, &call, 12);
    OK(NVFP4_call_options_init(&call, sizeof call));
    BAD(invalid, NVFP4_cancel_create, NULL);
    OK(NVFP4_cancel_create(&cancel));
    for (int i = 0; i < 4; i++) {
        SURE(NVFP4_cancel_trigger, NVFP4_cancel_trigger(no_handles[i]) == NVFP4_INVALID_HANDLE);
        SURE(NVFP4_cancel_reset, NVFP4_cancel_reset(no_handles[i]) == NVFP4_INVALID_HANDLE);
    }
    HANDLE(NVFP4_cancel_is_triggered, h, &triggered);
    BAD(invalid, NVFP4_cancel_is_triggered, cancel, NULL);
    HANDLE(NVFP4_cancel_retain, h);
    RELEASE(NVFP4_cancel_release);

    OK(NVFP4_session_create(model, NULL, &session));
    for (int i = 1; i < 4; i++) {
        call.cancel = no_handles[i];
        BAD(NVFP4_INVALID_HANDLE, NVFP4_session_prefill, session, &token, 1, &call);
    }
    call.cancel = cancel;
    call.reserved = 1;
    BAD(invalid, NVFP4_session_prefill, session, &token, 1, &call);
    call.reserved = 0;
    call.cancel_flag = (const volatile int32_t *)(const void *)((const char *)flags + 1);
    BAD(invalid, NVFP4_session_prefill, session, &token, 1, &call);
    call.cancel_flag = flags;
    call.struct_size = 24;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_session_prefill, session, &token, 1, &call);
    SAYS("which no version of NVFP4_CallOptions has");
    call.struct_size = sizeof call;
    OK(NVFP4_session_prefill(session, &token, 1, &call));
    OK(NVFP4_session_release(session));
    OK(NVFP4_cancel_release(cancel));
    CHECK(NVFP4_cancel_trigger(cancel) == NVFP4_INVALID_HANDLE && triggered == 7);
}

static void detokenizers(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    const int32_t token = 3;
    const char *piece = NULL;
    int32_t finish = 9;
    NVFP4_Detokenizer *detokenizer = NULL, *none = NULL;
    HANDLE(NVFP4_detokenizer_create, h, NULL, 0, NULL, &none);
    BAD(invalid, NVFP4_detokenizer_create, model, NULL, 1, NULL, &none);
    BAD(invalid, NVFP4_detokenizer_create, model, NULL, 0, NULL, NULL);
    OK(NVFP4_detokenizer_create(model, NULL, 0, NULL, &detokenizer));
    HANDLE(NVFP4_detokenizer_push, h, token, &piece, &length, &finish);
    BAD(invalid, NVFP4_detokenizer_push, detokenizer, token, NULL, &length, &finish);
    BAD(invalid, NVFP4_detokenizer_push, detokenizer, -1, &piece, &length, &finish);
    BAD(invalid, NVFP4_detokenizer_push, detokenizer, 1 << 30, &piece, &length, &finish);
    NVFP4_Detokenizer *several[3] = {NULL, NULL, NULL};
    const int32_t tokens[3] = {3, 3, 3}, beyond[3] = {3, 3, 1 << 30}, negative[3] = {3, -1, 3};
    const char *texts[3] = {NULL, NULL, NULL};
    size_t lengths[3] = {7, 7, 7};
    int32_t finishes[3] = {9, 9, 9};
    OK(NVFP4_detokenizers_push(NULL, NULL, 0, NULL, NULL, NULL));
    BAD(invalid, NVFP4_detokenizers_push, NULL, tokens, 1, texts, lengths, finishes);
    BAD(NVFP4_INVALID_HANDLE, NVFP4_detokenizers_push, several, tokens, 1, texts, lengths, finishes);
    SAYS("detokenizers[0]");
    for (int i = 0; i < 3; i++)
        OK(NVFP4_detokenizer_create(model, NULL, 0, NULL, &several[i]));
    BAD(invalid, NVFP4_detokenizers_push, several, NULL, 3, texts, lengths, finishes);
    BAD(invalid, NVFP4_detokenizers_push, several, tokens, 3, NULL, lengths, finishes);
    BAD(invalid, NVFP4_detokenizers_push, several, negative, 3, texts, lengths, finishes);
    SAYS("token 1 is -1");
    BAD(invalid, NVFP4_detokenizers_push, several, beyond, 3, texts, lengths, finishes);
    SAYS("detokenizers[2]");
    NVFP4_Detokenizer *twice[3] = {several[1], several[0], several[1]};
    BAD(invalid, NVFP4_detokenizers_push, twice, tokens, 3, texts, lengths, finishes);
    SAYS("detokenizers[0] and detokenizers[2] are the same");
    CHECK(texts[0] == NULL && lengths[2] == 7 && finishes[1] == 9);
    for (int i = 0; i < 3; i++)
        OK(NVFP4_detokenizer_release(several[i]));
    BAD(NVFP4_INVALID_HANDLE, NVFP4_detokenizers_push, several, tokens, 3, texts, lengths, finishes);
    HANDLE(NVFP4_detokenizer_finish, h, &piece, &length);
    BAD(invalid, NVFP4_detokenizer_finish, detokenizer, NULL, &length);
    CHECK(piece == NULL && finish == 9 && none == NULL);
    OK(NVFP4_detokenizer_finish(detokenizer, &piece, NULL));
    BAD(invalid, NVFP4_detokenizer_push, detokenizer, token, &piece, &length, &finish);
    SAYS("has ended");
    HANDLE(NVFP4_detokenizer_retain, h);
    RELEASE(NVFP4_detokenizer_release);
    OK(NVFP4_detokenizer_release(detokenizer));
}

static void grammars(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Grammar *grammar = NULL, *none = NULL;
    NVFP4_GrammarOptions options;
    HANDLE(NVFP4_grammar_create, h, NULL, "true", 4, &none);
    BAD(invalid, NVFP4_grammar_options_init, NULL, sizeof options);
    OK(NVFP4_grammar_options_init(&options, sizeof options));
    BAD(invalid, NVFP4_grammar_create, model, NULL, NULL, 4, &none);
    BAD(invalid, NVFP4_grammar_create, model, NULL, "true", 4, NULL);
    BAD(invalid, NVFP4_grammar_create, model, NULL, "\xff", 1, &none);
    BAD(invalid, NVFP4_grammar_create, model, NULL, "{\"items\": {\"type\": 3}}", 22, &none);
    SAYS("JSON schema: /items: ");
    options.kind = 9;
    BAD(invalid, NVFP4_grammar_create, model, &options, "a", 1, &none);
    options.kind = NVFP4_GRAMMAR_REGEX;
    BAD(invalid, NVFP4_grammar_create, model, &options, "a(", 2, &none);
    SAYS("byte 1");
    options.kind = NVFP4_GRAMMAR_LARK;
    BAD(invalid, NVFP4_grammar_create, model, &options, "start: x", 8, &none);
    options.kind = NVFP4_GRAMMAR_GBNF;
    BAD(invalid, NVFP4_grammar_create, model, &options, "root ::= x", 10, &none);
    SAYS("line 1, column 10: rule 'x'");
    options.kind = NVFP4_GRAMMAR_CHOICES;
    BAD(invalid, NVFP4_grammar_create, model, &options, "[1]", 3, &none);
    BAD(invalid, NVFP4_grammar_create, model, &options, "[]", 2, &none);
    CHECK(none == NULL);
    OK(NVFP4_grammar_create(model, &options, "[\"a\"]", 5, &grammar));

    /* Functions that choose single tokens take no grammar, and only a chat holds tool calls. */
    NVFP4_Session *session = NULL;
    NVFP4_Detokenizer *detokenizer = NULL;
    NVFP4_GenerateOptions how;
    NVFP4_GenerationResult result;
    int32_t token = 3;
    result.struct_size = sizeof result;
    OK(NVFP4_generate_options_init(&how, sizeof how));
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, &token, 1, NULL));
    how.grammar = grammar;
    BAD(invalid, NVFP4_session_sample, session, &how, &token);
    SAYS("follows no grammar");
    BAD(invalid, NVFP4_detokenizer_create, model, NULL, 0, &how, &detokenizer);
    how.grammar = (const NVFP4_Grammar *)session;
    BAD(NVFP4_INVALID_HANDLE, NVFP4_session_generate, session, &how, NULL, NULL, &result);
    how.grammar = NULL;
    how.tool_calls = NVFP4_TOOL_CALLS_HELD;
    BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, &result);
    how.tool_calls = 7;
    BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, &result);
    OK(NVFP4_session_release(session));
    HANDLE(NVFP4_grammar_retain, h);
    RELEASE(NVFP4_grammar_release);
    OK(NVFP4_grammar_release(grammar));
}

/* Adapters that are not of the model, and sessions that name something else. */
static void adapters(NVFP4_Model *model, const char *path)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Adapter *adapter = NULL, *none = NULL;
    NVFP4_Session *session = NULL;
    NVFP4_SessionOptions options;
    char place[1024], small[4];
    snprintf(place, sizeof place, "%s/../../training/qwen3_tied_peft", path);
    HANDLE(NVFP4_adapter_load, h, place, strlen(place), NULL, &none);
    BAD(invalid, NVFP4_adapter_load, model, NULL, 3, NULL, &none);
    BAD(invalid, NVFP4_adapter_load, model, place, strlen(place), NULL, NULL);
    BAD(NVFP4_NOT_FOUND, NVFP4_adapter_load, model, path, strlen(path), NULL, &none);
    SAYS("adapter_config.json");
    CHECK(none == NULL);
    OK(NVFP4_adapter_load(model, place, strlen(place), NULL, &adapter));
    HANDLE(NVFP4_adapter_info, h, NULL, 0, &length);
    BAD(invalid, NVFP4_adapter_info, adapter, NULL, 0, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_adapter_info, adapter, small, sizeof small, &length);
    HANDLE(NVFP4_adapter_wait, h, NULL);
    OK(NVFP4_adapter_wait(adapter, NULL));
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.adapter = (const NVFP4_Adapter *)model;
    BAD(NVFP4_INVALID_HANDLE, NVFP4_session_create, model, &options, &session);
    HANDLE(NVFP4_adapter_retain, h);
    RELEASE(NVFP4_adapter_release);
    OK(NVFP4_adapter_release(adapter));
    options.adapter = adapter;
    BAD(NVFP4_INVALID_HANDLE, NVFP4_session_create, model, &options, &session);
    CHECK(session == NULL);
}

/* Wrong adjustments of logits are errors before a generation, a step or a choice begins. */
static void adjustments(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Session *session = NULL;
    NVFP4_Queue *queue = NULL;
    NVFP4_GenerateOptions how;
    const NVFP4_GenerateOptions *each = &how;
    int32_t token = 3, biased[2] = {5, 5};
    float biases[2] = {1, 1};
    const int32_t *words[1] = {biased};
    size_t lengths[1] = {0}, held = 0, vocabulary = 0;
    uint64_t number = 0;
    OK(NVFP4_model_vocab_size(model, &vocabulary));
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_queue_create(model, NULL, &queue));
    OK(NVFP4_session_prefill(session, &token, 1, NULL));
    OK(NVFP4_generate_options_init(&how, sizeof how));
    how.max_tokens = 2;
    how.logit_bias_tokens = biased;
    how.logit_biases = biases;
    how.bad_words = words;
    how.bad_word_lengths = lengths;
    for (int i = 0; i < 8; i++) {
        how.logit_bias_count = i < 4 ? 2 : 0;
        how.bad_word_count = i == 4 || i == 5;
        how.presence_penalty = i == 6 ? NAN : 0;
        how.frequency_penalty = i == 7 ? INFINITY : 0;
        biased[1] = i == 0 || i == 5 ? (int32_t)vocabulary : i == 1 ? -1 : 5;
        biases[1] = i == 2 ? NAN : i == 3 ? INFINITY : -INFINITY;
        lengths[0] = i == 4 ? 0 : 2;
        BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
        SAYS(i < 2 || i == 5 ? "token" : i < 4 ? "the logit bias of token 5 is " : i == 4 ? "bad word 0 is empty" : "_penalty is ");
        BAD(invalid, NVFP4_session_chat, session, "a", 1, NULL, &how, NULL, NULL, NULL);
        BAD(invalid, NVFP4_queue_generate, queue, session, NULL, 0, &how, NULL, &number);
        BAD(invalid, NVFP4_session_sample, session, &how, &token);
        BAD(invalid, NVFP4_session_step_sample, &session, &token, 1, &each, NULL, &token, NULL);
    }
    how.frequency_penalty = 0;
    for (how.top_log_probabilities = -1; how.top_log_probabilities < 22; how.top_log_probabilities += 22) {
        BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
        BAD(invalid, NVFP4_session_step_sample, &session, &token, 1, &each, NULL, &token, NULL);
    }
    biased[1] = 400000;
    lengths[0] = 2;
    BAD(invalid, NVFP4_session_score, session, words, lengths, 1, NULL, biases, NULL);
    SAYS("token 400000");
    biased[1] = -1;
    BAD(invalid, NVFP4_session_score, session, words, lengths, 1, NULL, biases, NULL);
    SAYS("continuations[0]");
    biased[1] = 5;
    BAD(invalid, NVFP4_session_score, session, NULL, lengths, 1, NULL, biases, NULL);
    BAD(invalid, NVFP4_session_score, session, words, NULL, 1, NULL, biases, NULL);
    BAD(invalid, NVFP4_session_score, session, words, lengths, 1, NULL, NULL, NULL);
    HANDLE(NVFP4_session_score, h, words, lengths, 1, NULL, biases, NULL);
    OK(NVFP4_session_score(session, words, lengths, 1, NULL, biases, NULL));
    how.top_log_probabilities = 2;
    OK(NVFP4_session_sample(session, &how, &token));
    BAD(invalid, NVFP4_session_top_log_probabilities, session, biased, biases, 2, NULL);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_session_top_log_probabilities, session, biased, biases, 2, &held);
    CHECK(held == 3);
    HANDLE(NVFP4_session_top_log_probabilities, h, NULL, NULL, 0, &held);
    how.top_log_probabilities = 0;
    how.frequency_penalty = 0.5f;
    BAD(invalid, NVFP4_session_step_sample, &session, &token, 1, &each, NULL, &token, NULL);
    SAYS("logit bias");
    OK(NVFP4_session_generate(session, &how, NULL, NULL, NULL));
    how.bad_word_count = how.logit_bias_count = 1;
    how.bad_words = NULL;
    BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
    how.bad_words = words;
    how.logit_biases = NULL;
    BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
    words[0] = NULL;
    how.logit_biases = biases;
    BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
    SAYS("bad_words[0]");
    OK(NVFP4_session_length(session, &held));
    CHECK(held == 3);
    OK(NVFP4_queue_release(queue));
    OK(NVFP4_session_release(session));
}

/* Wrong numbers of samplers too, and wrong breakers. */
static void samplers(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_Session *session = NULL;
    NVFP4_GenerateOptions how;
    const NVFP4_GenerateOptions *each = &how;
    int32_t token = 3;
    float *const numbers[] = {&how.dry_multiplier, &how.dry_base, &how.top_n_sigma, &how.typical_p, &how.xtc_probability, &how.xtc_threshold};
    const char *const says[] = {"dry_multiplier is -", "dry_base is -",        "top_n_sigma is -",
                                "typical_p is -",      "xtc_probability is -", "xtc_threshold is -"};
    const char *breakers[2] = {"\n", "\xff"};
    size_t lengths[2] = {1, 0}, held = 0;
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, &token, 1, NULL));
    for (int i = 0; i < 10; i++) {
        OK(NVFP4_generate_options_init(&how, sizeof how));
        CHECK(how.min_tokens == 0 && how.no_repeat_ngram_size == 0 && how.dry_multiplier == 0 && how.dry_base == 1.75f);
        CHECK(how.dry_allowed_length == 2 && how.dry_window == 0 && how.dry_sequence_breaker_count == SIZE_MAX);
        CHECK(how.top_n_sigma == 0 && how.typical_p == 1 && how.xtc_probability == 0 && how.xtc_threshold == 0.1f);
        how.max_tokens = 2;
        how.dry_sequence_breaker_lengths = lengths;
        if (i < 6)
            *numbers[i] = -0.5f;
        else if (i == 6)
            how.dry_allowed_length = 0;
        else {
            how.dry_sequence_breaker_count = 2;
            how.dry_sequence_breakers = i == 7 ? NULL : breakers;
            lengths[1] = i == 9;
        }
        BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
        SAYS(i < 6 ? says[i] : i == 6 ? "dry_allowed_length is 0" : i == 7 ? "dry_sequence_breakers is NULL" : i == 8 ? "breaker 1 is empty" : "a dry sequence breaker");
        BAD(invalid, NVFP4_session_chat, session, "a", 1, NULL, &how, NULL, NULL, NULL);
        BAD(invalid, NVFP4_session_sample, session, &how, &token);
        BAD(invalid, NVFP4_session_step_sample, &session, &token, 1, &each, NULL, &token, NULL);
    }
    OK(NVFP4_generate_options_init(&how, sizeof how));
    how.dry_sequence_breakers = breakers;
    how.dry_sequence_breaker_lengths = lengths;
    BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
    SAYS("dry_sequence_breakers");
    OK(NVFP4_generate_options_init(&how, sizeof how));
    how.min_tokens = 3;
    BAD(invalid, NVFP4_session_sample, session, &how, &token);
    BAD(invalid, NVFP4_session_step_sample, &session, &token, 1, &each, NULL, &token, NULL);
    SAYS("min_tokens 3");
    how.max_tokens = 2;
    BAD(invalid, NVFP4_session_generate, session, &how, NULL, NULL, NULL);
    SAYS("min_tokens is 3 and max_tokens 2");
    OK(NVFP4_session_length(session, &held));
    CHECK(held == 1);
    /* A program that was built before these fields, whose memory goes on with something else. */
    how.struct_size = offsetof(NVFP4_GenerateOptions, min_tokens);
    how.typical_p = how.dry_base = NAN;
    OK(NVFP4_session_generate(session, &how, NULL, NULL, NULL));
    OK(NVFP4_session_release(session));
}

/* In the call numbered `at` a processor writes NaN, infinity, or nothing finite. */
typedef struct {
    int calls, at, what;
} Writer;

static int32_t write_wrong(void *user, const NVFP4_LogitsEvent *event)
{
    Writer *writer = user;
    if (writer->calls++ != writer->at)
        return 0;
    for (size_t i = writer->what == 2 ? 0 : event->logit_count - 1; i < event->logit_count; i++)
        event->logits[i] = writer->what == 0 ? NAN : writer->what == 1 ? INFINITY : -INFINITY;
    return 0;
}

/* A generation whose processor writes what no token can be chosen from fails in one line, and keeps what came before. */
static void embeddings(NVFP4_Model *model)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    const char *texts[2] = {"a", "b"};
    int32_t tokens[2] = {1, 2};
    const int32_t *lists[2] = {tokens, tokens + 1};
    size_t lengths[2] = {1, 1}, rows[2];
    NVFP4_EmbedOptions how;
    BAD(invalid, NVFP4_embed_options_init, NULL, sizeof how);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_embed_options_init, &how, 12);
    OK(NVFP4_embed_options_init(&how, sizeof how));
    BAD(invalid, NVFP4_model_embed_texts, model, texts, lengths, 2, &how, floats, 64, &length, rows);
    SAYS("the model names no pooling");
    how.pooling = NVFP4_POOLING_LAST;
    how.dimensions = 32;
    HANDLE(NVFP4_model_embed_texts, h, texts, lengths, 2, &how, floats, 64, &length, rows);
    HANDLE(NVFP4_model_embed, h, lists, lengths, 2, &how, floats, 64, &length, rows);
    BAD(invalid, NVFP4_model_embed_texts, model, NULL, lengths, 2, &how, floats, 64, &length, rows);
    BAD(invalid, NVFP4_model_embed_texts, model, texts, NULL, 2, &how, floats, 64, &length, rows);
    BAD(invalid, NVFP4_model_embed_texts, model, texts, lengths, 2, &how, NULL, 64, &length, rows);
    BAD(invalid, NVFP4_model_embed_texts, model, texts, lengths, 2, &how, floats, 64, NULL, rows);
    BAD(invalid, NVFP4_model_embed, model, NULL, lengths, 2, &how, floats, 64, &length, rows);
    BAD(invalid, NVFP4_model_embed, model, lists, NULL, 2, &how, floats, 64, &length, rows);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_model_embed, model, lists, lengths, 2, &how, floats, 63, &length, NULL);
    CHECK(length == 64);
    texts[1] = "\xff";
    BAD(invalid, NVFP4_model_embed_texts, model, texts, lengths, 2, &how, floats, 64, &length, rows);
    SAYS("texts[1]");
    tokens[1] = -1;
    BAD(invalid, NVFP4_model_embed, model, lists, lengths, 2, &how, floats, 64, &length, rows);
    SAYS("tokens[1]");
    tokens[1] = 400000;
    BAD(invalid, NVFP4_model_embed, model, lists, lengths, 2, &how, floats, 64, &length, rows);
    SAYS("text 1: token 400000");
    tokens[1] = 2;
    lengths[1] = 0;
    BAD(invalid, NVFP4_model_embed, model, lists, lengths, 2, &how, floats, 64, &length, rows);
    SAYS("text 1: no tokens");
    lengths[1] = 1;
    for (int i = 0; i < 9; i++) {
        how.kv_type = i == 7 ? 3 : NVFP4_KV_FLOAT16;
        how.is_private = i == 8 ? 2 : 0;
        how.pooling = i == 0 ? 5 : NVFP4_POOLING_MEAN;
        how.normalize = i == 1 ? -1 : NVFP4_NORMALIZE_NO;
        how.truncate = i == 2 ? 2 : 0;
        how.dimensions = i == 3 ? 65 : 32;
        how.prompt = i == 4 || i == 5 ? "q" : NULL;
        how.prompt_length = i == 4 ? 1 : 0;
        how.prompt_name = i == 5 ? "q" : NULL;
        how.prompt_name_length = i == 6 ? 1 : 0;
        BAD(invalid, NVFP4_model_embed, model, lists, lengths, 2, &how, floats, 64, &length, rows);
        SAYS(i == 0 ? "pooling is 5" : i == 1 ? "normalize is -1" : i == 2 ? "truncate is 2" : i == 3 ? "65 dimensions"
                : i == 5 ? "give one of both" : i == 6 ? "prompt_name is NULL" : i == 7 ? "kv_type is 3" : i == 8 ? "is_private is 2"
                : "a prompt for lists of tokens");
    }
    OK(NVFP4_embed_options_init(&how, sizeof how));
    how.struct_size = 12;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_model_embed, model, lists, lengths, 2, &how, floats, 64, &length, rows);
    OK(NVFP4_embed_options_init(&how, sizeof how));
    how.pooling = NVFP4_POOLING_LAST;
    how.dimensions = 32;
    OK(NVFP4_model_embed(model, lists, lengths, 2, &how, NULL, 0, &length, rows));
    CHECK(length == 64 && rows[0] == 1 && rows[1] == 1);
    OK(NVFP4_model_embed(model, NULL, NULL, 0, &how, floats, 64, &length, NULL));
    CHECK(length == 0);
}

static void processors(NVFP4_Model *model)
{
    static const char *says[] = {"written NaN as the logit of token 319 at position ", "written inf", "left no token at position "};
    NVFP4_Session *session = NULL, *empty = NULL;
    NVFP4_GenerateOptions how;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    const NVFP4_GenerateOptions *each = &how;
    Writer writer = {0, 0, 0};
    int32_t token = 3;
    size_t held = 0, now = 0;
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_create(model, NULL, &empty));
    OK(NVFP4_session_prefill(session, &token, 1, NULL));
    OK(NVFP4_generate_options_init(&how, sizeof how));
    how.max_tokens = 4;
    how.ignore_model_stops = 1;
    how.logits_processor = write_wrong;
    how.logits_user = &writer;
    for (int i = 0; i < 3; i++) {
        writer = (Writer){0, 2, i};
        BAD(NVFP4_INVALID_ARGUMENT, NVFP4_session_generate, session, &how, NULL, NULL, &result);
        SAYS(says[i]);
        OK(NVFP4_session_result(session, &result));
        OK(NVFP4_session_length(session, &held));
        CHECK(result.finish == NVFP4_FINISH_CANCELLED && result.generated_tokens == 2 && held == 1 + 2 * ((size_t)i + 1));
        writer = (Writer){0, 0, i};
        BAD(NVFP4_INVALID_ARGUMENT, NVFP4_session_chat, empty, "a", 1, NULL, &how, NULL, NULL, NULL);
        SAYS(says[i]);
        OK(NVFP4_session_length(empty, &now));
        CHECK(now == 0);
        writer = (Writer){0, 0, i};
        BAD(NVFP4_INVALID_ARGUMENT, NVFP4_session_sample, session, &how, &token);
        SAYS(says[i]);
        writer = (Writer){0, 0, i};
        BAD(NVFP4_INVALID_ARGUMENT, NVFP4_session_step_sample, &session, &token, 1, &each, NULL, &token, NULL);
        SAYS("session 0: the logits processor");
        OK(NVFP4_session_length(session, &now));
        CHECK(now == held);
    }
    OK(NVFP4_session_release(empty));
    OK(NVFP4_session_release(session));
}

/* Everything that is wrong with a batch is found before a step changes anything. */
static void batches(NVFP4_Trainer *trainer)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    int32_t tokens[] = {1, 2, 3, 4}, labels[] = {2, 3, 4, -100};
    size_t lengths[] = {3, 1};
    double loss = -1;
    const NVFP4_MicroBatch good = {tokens, labels, 4, lengths, 2, NULL};
    NVFP4_MicroBatch batch = good;
    NVFP4_StepReport report = {0};
    const size_t size = sizeof batch;
    HANDLE(NVFP4_trainer_step, h, &batch, 1, size, NULL, NULL);
    HANDLE(NVFP4_trainer_evaluate, h, &batch, 1, size, 1, NULL, &loss);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_trainer_step, trainer, &batch, 1, size, NULL, &report);
    report.struct_size = sizeof report;
    BAD(invalid, NVFP4_trainer_step, trainer, NULL, 0, size, NULL, &report);
    BAD(invalid, NVFP4_trainer_step, trainer, NULL, 1, size, NULL, &report);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_trainer_step, trainer, &batch, 1, size - 4, NULL, &report);
    BAD(invalid, NVFP4_trainer_evaluate, trainer, &batch, 1, size, 1, NULL, NULL);
    BAD(invalid, NVFP4_trainer_evaluate, trainer, &batch, 1, size, 2, NULL, &loss);
    HANDLE(NVFP4_trainer_compare, h, &batch, 1, size, 1, NULL, &loss, &loss);
    BAD(invalid, NVFP4_trainer_compare, trainer, &batch, 1, size, 1, NULL, NULL, &loss);
    BAD(invalid, NVFP4_trainer_compare, trainer, &batch, 1, size, 2, NULL, &loss, &loss);
    BAD(invalid, NVFP4_trainer_compare, trainer, &batch, 1, size, 1, NULL, &loss, &loss);
    batch.tokens = NULL;
    BAD(invalid, NVFP4_trainer_step, trainer, &batch, 1, size, NULL, &report);
    SAYS("batches[0]: tokens is NULL");
    batch = good;
    batch.labels = NULL;
    BAD(invalid, NVFP4_trainer_step, trainer, &batch, 1, size, NULL, &report);
    batch = good;
    batch.document_count = 1;
    BAD(invalid, NVFP4_trainer_step, trainer, &batch, 1, size, NULL, &report);
    SAYS("documents of 3 in all");
    lengths[1] = 0;
    BAD(invalid, NVFP4_trainer_step, trainer, &good, 1, size, NULL, &report);
    SAYS("document 1 has no tokens");
    lengths[1] = 1;
    labels[0] = 1 << 20;
    BAD(invalid, NVFP4_trainer_step, trainer, &good, 1, size, NULL, &report);
    SAYS("token 1048576 of a batch is outside the vocabulary");
    BAD(invalid, NVFP4_trainer_evaluate, trainer, &good, 1, size, 1, NULL, &loss);
    labels[0] = labels[1] = labels[2] = -100;
    BAD(invalid, NVFP4_trainer_step, trainer, &good, 1, size, NULL, &report);
    SAYS("nothing to learn");
    BAD(invalid, NVFP4_trainer_evaluate, trainer, &good, 1, size, 1, NULL, &loss);
    labels[0] = 2;
    tokens[3] = -1;
    BAD(invalid, NVFP4_trainer_step, trainer, &good, 1, size, NULL, &report);
    SAYS("token 3 is -1");
    CHECK(loss < 0 && report.step == 0);
    tokens[3] = 4;
    const float weights[] = {1, 1, -1, 1};
    batch = good;
    batch.weights = weights;
    labels[2] = 4;
    BAD(invalid, NVFP4_trainer_step, trainer, &batch, 1, size, NULL, &report);
    SAYS("weight 2 of a batch is -1");
    BAD(invalid, NVFP4_trainer_evaluate, trainer, &batch, 1, size, 1, NULL, &loss);
    labels[2] = -100;
    OK(NVFP4_trainer_step(trainer, &good, 1, size, NULL, &report));
    CHECK(report.step == 1 && report.targets == 1);
}

static void data(const char *path)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    const char *files[] = {"/nowhere.tsv"}, *odd[] = {NULL};
    const size_t bytes = strlen(path), lengths[] = {12};
    size_t count = 0;
    NVFP4_Data *none = NULL;
    NVFP4_DataOptions options;
    BAD(invalid, NVFP4_data_options_init, NULL, sizeof options);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_data_options_init, &options, 0);
#define READ(what, value)                                                                                                \
    do {                                                                                                                 \
        OK(NVFP4_data_options_init(&options, sizeof options));                                                           \
        options.what = value;                                                                                            \
        BAD(invalid, NVFP4_data_read, path, bytes, files, lengths, 1, &options, NULL, &none);                            \
        SAYS(#what " is");                                                                                               \
    } while (0)
    READ(format, 5);
    READ(long_rows, 3);
    READ(empty_think, 3);
    READ(train_on_all, 2);
    READ(skip_bad_rows, -1);
#undef READ
    BAD(NVFP4_NOT_FOUND, NVFP4_data_read, path, bytes, files, lengths, 1, NULL, NULL, &none);
    BAD(NVFP4_NOT_FOUND, NVFP4_data_read, "/nowhere", 8, files, lengths, 1, NULL, NULL, &none);
    BAD(invalid, NVFP4_data_read, path, bytes, NULL, NULL, 0, NULL, NULL, &none);
    SAYS("there are no files");
    BAD(invalid, NVFP4_data_read, path, bytes, NULL, lengths, 1, NULL, NULL, &none);
    BAD(invalid, NVFP4_data_read, path, bytes, odd, lengths, 1, NULL, NULL, &none);
    SAYS("files[0]");
    BAD(invalid, NVFP4_data_read, path, bytes, files, lengths, 1, NULL, NULL, NULL);
    CHECK(none == NULL);
    HANDLE(NVFP4_data_retain, h);
    HANDLE(NVFP4_data_count, h, &count);
    HANDLE(NVFP4_data_document, h, 0, NULL, NULL, NULL, 0, &count);
    HANDLE(NVFP4_data_mask, h, 0, text, sizeof text, &count);
    HANDLE(NVFP4_data_report, h, text, sizeof text, &count);
    RELEASE(NVFP4_data_release);
}

static void training(const char *path)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    const size_t bytes = strlen(path);
    NVFP4_Trainer *none = NULL, *trainer = NULL;
    NVFP4_Model *model = NULL;
    NVFP4_TrainerOptions options;
    BAD(invalid, NVFP4_trainer_options_init, NULL, sizeof options);
    BAD(NVFP4_ABI_MISMATCH, NVFP4_trainer_options_init, &options, 0);
#define DEFAULTS OK(NVFP4_trainer_options_init(&options, sizeof options))
/* A field that is set like this is refused, with these words. */
#define FIELD(set, words)                                                                                    \
    do {                                                                                                     \
        DEFAULTS;                                                                                            \
        options.set;                                                                                         \
        BAD(invalid, NVFP4_trainer_create, path, bytes, &options, NULL, &none);                              \
        SAYS(words);                                                                                         \
    } while (0)
    const double zero = 0;
    FIELD(rate = zero / zero, "a learning rate of NaN");
    FIELD(rate = -1, "a learning rate of -1");
    FIELD(beta1 = 1, "betas of 1");
    FIELD(eps = zero / zero, "eps NaN");
    FIELD(weight_decay = -1, "weight decay -1");
    FIELD(floor = 2, "a floor of 2");
    FIELD(clip_norm = zero / zero, "clipped to NaN");
    FIELD(delivered_share = zero / zero, "delivered_share is NaN");
    FIELD(steps = 0, "0 steps");
    FIELD(last_blocks = -2, "last_blocks is -2");
    FIELD(release = 1, "no global norm");
    FIELD(release = 2, "release is 2");
    FIELD(recompute = -1, "recompute is -1");
    FIELD(schedule = 4, "schedule is 4");
    FIELD(clip = 4, "clip is 4");
    FIELD(weights = 6, "weights is 6");
    FIELD(first_moments = 4, "first_moments is 4");
    FIELD(second_moments = 4, "second_moments is 4");
    FIELD(tables = 3, "tables is 3");
    FIELD(weight_scales = 3, "weight_scales is 3");
    FIELD(teacher_memory = 3, "teacher_memory is 3");
    FIELD(label_share = 1, "no teacher is given");
    FIELD(device_type = 7, "device_type is 7");
    FIELD(threads = -1, "threads");
    DEFAULTS;
    options.schedule = NVFP4_SCHEDULE_STABLE;
    options.decay_share = 0;
    BAD(invalid, NVFP4_trainer_create, path, bytes, &options, NULL, &none);
    DEFAULTS;
    options.config = "{\"steps\": 3, \"stepz\": 4}";
    options.config_length = strlen(options.config);
    BAD(invalid, NVFP4_trainer_create, path, bytes, &options, NULL, &none);
    SAYS("stepz");
    options.config_length = 12;
    BAD(invalid, NVFP4_trainer_create, path, bytes, &options, NULL, &none);
    options.rate = 1;
    BAD(invalid, NVFP4_trainer_create, path, bytes, &options, NULL, &none);
    SAYS("set either");
    options.struct_size = 12;
    BAD(NVFP4_ABI_MISMATCH, NVFP4_trainer_create, path, bytes, &options, NULL, &none);
    BAD(invalid, NVFP4_trainer_create, NULL, 4, NULL, NULL, &none);
    BAD(invalid, NVFP4_trainer_create, path, bytes, NULL, NULL, NULL);
    BAD(NVFP4_NOT_FOUND, NVFP4_trainer_create, "/nowhere", 8, NULL, NULL, &none);

    OK(NVFP4_trainer_create(path, bytes, NULL, NULL, &trainer));
    HANDLE(NVFP4_trainer_retain, h);
    RELEASE(NVFP4_trainer_release);
    batches(trainer);
    HANDLE(NVFP4_trainer_info, h, text, sizeof text, &length);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_trainer_info, trainer, text, 1, &length);
    HANDLE(NVFP4_trainer_data, h, text, sizeof text, &length);
    BAD(invalid, NVFP4_trainer_data, trainer, text, sizeof text, NULL);
    OK(NVFP4_trainer_data(trainer, text, sizeof text, &length));
    CHECK(length == 4 && strcmp(text, "null") == 0);
    HANDLE(NVFP4_trainer_save, h, "/dev/null/x", 11, NULL, 0, 1, NULL);
    BAD(invalid, NVFP4_trainer_save, trainer, NULL, 3, NULL, 0, 1, NULL);
    BAD(invalid, NVFP4_trainer_save, trainer, "/dev/null/x", 11, "{", 1, 1, NULL);
    SAYS("data is not JSON");
    BAD(invalid, NVFP4_trainer_save, trainer, "/dev/null/x", 11, NULL, 0, 0, NULL);
    BAD(NVFP4_IO, NVFP4_trainer_save, trainer, "/dev/null/x", 11, NULL, 0, 1, NULL);
    HANDLE(NVFP4_trainer_export_directory, h, "/dev/null/x", 11, 0, 0, NULL);
    BAD(invalid, NVFP4_trainer_export_directory, trainer, "/dev/null/x", 11, 3, 0, NULL);
    SAYS("tables is 3");
    BAD(invalid, NVFP4_trainer_export_directory, trainer, "/dev/null/x", 11, 0, 2, NULL);
    BAD(NVFP4_IO, NVFP4_trainer_export_directory, trainer, "/dev/null/x", 11, 0, 0, NULL);
    HANDLE(NVFP4_trainer_export_dat, h, "/dev/null/x", 11, NULL);
    BAD(invalid, NVFP4_trainer_export_dat, trainer, "/dev/null/x", 11, NULL);
    HANDLE(NVFP4_trainer_export_adapter, h, "/dev/null/x", 11, "base", 4, 0, NULL);
    BAD(invalid, NVFP4_trainer_export_adapter, trainer, NULL, 3, "base", 4, 0, NULL);
    BAD(invalid, NVFP4_trainer_export_adapter, trainer, "/dev/null/x", 11, NULL, 0, 0, NULL);
    SAYS("base is empty");
    BAD(invalid, NVFP4_trainer_export_adapter, trainer, "/dev/null/x", 11, "base", 4, 2, NULL);
    BAD(invalid, NVFP4_trainer_export_adapter, trainer, "/dev/null/x", 11, "base", 4, 0, NULL);
    SAYS("no adapters to write; export the model");
    HANDLE(NVFP4_trainer_model, h, NULL, &model);
    BAD(invalid, NVFP4_trainer_model, trainer, NULL, NULL);
    CHECK(model == NULL);

    DEFAULTS;
    BAD(NVFP4_NOT_FOUND, NVFP4_trainer_resume, path, bytes, "/nowhere", 8, &options, NULL, &none);
    options.rate = 1;
    BAD(invalid, NVFP4_trainer_resume, path, bytes, "/nowhere", 8, &options, NULL, &none);
    SAYS("those of its checkpoint");
    BAD(invalid, NVFP4_trainer_resume, path, bytes, NULL, 8, NULL, NULL, &none);
    BAD(invalid, NVFP4_trainer_resume, path, bytes, "/nowhere", 8, NULL, NULL, NULL);
    CHECK(none == NULL);
    OK(NVFP4_trainer_release(trainer));
    BAD(NVFP4_INVALID_HANDLE, NVFP4_trainer_info, trainer, text, sizeof text, &length);
    SAYS("trainer is stale");
}

static void optimizers(NVFP4_Tensor *t, NVFP4_Tensor *codes)
{
    const int32_t invalid = NVFP4_INVALID_ARGUMENT;
    NVFP4_OptimizerState *none = NULL, *state = NULL;
    NVFP4_OptimizerOptions options;
    NVFP4_StepOptions step;
    NVFP4_Tensor *scales = NULL;
    void *made = NULL, *second = NULL;
    uint64_t count = 0;
    uint8_t bytes[4096];
    float global = 0;
    BAD(invalid, NVFP4_optimizer_options_init, NULL, sizeof options);
    OK(NVFP4_optimizer_options_init(&options, sizeof options));
    BAD(invalid, NVFP4_step_options_init, NULL, sizeof step);
    OK(NVFP4_step_options_init(&step, sizeof step));
    BAD(NVFP4_INVALID_HANDLE, NVFP4_optimizer_create, NULL, NULL, &none);
    BAD(NVFP4_INVALID_HANDLE, NVFP4_optimizer_create, no_handles[1], NULL, &none);
    BAD(invalid, NVFP4_optimizer_create, t, NULL, NULL);
    BAD(invalid, NVFP4_optimizer_create, codes, NULL, &none);
    options.weights = 6;
    BAD(invalid, NVFP4_optimizer_create, t, &options, &none);
    options.weights = 0;
    options.reserved = 1;
    BAD(invalid, NVFP4_optimizer_create, t, &options, &none);
    options.reserved = 0;
    options.weights = NVFP4_WEIGHT_FORM_BFLOAT16;
    OK(NVFP4_optimizer_create(t, &options, &state));
    HANDLE(NVFP4_optimizer_retain, h);
    RELEASE(NVFP4_optimizer_release);
    HANDLE(NVFP4_optimizer_step, h, t, NULL, NULL, NULL);
    BAD(NVFP4_INVALID_HANDLE, NVFP4_optimizer_step, state, NULL, NULL, NULL, NULL);
    BAD(invalid, NVFP4_optimizer_step, state, codes, NULL, NULL, NULL);
    step.rate = -1;
    BAD(invalid, NVFP4_optimizer_step, state, t, &step, NULL, NULL);
    HANDLE(NVFP4_optimizer_size, h, &count, NULL);
    HANDLE(NVFP4_optimizer_weight, h, 0, NVFP4_DTYPE_FLOAT32, &made);
    BAD(invalid, NVFP4_optimizer_weight, state, 2, NVFP4_DTYPE_FLOAT32, &made);
    BAD(invalid, NVFP4_optimizer_weight, state, 0, 99, &made);
    BAD(invalid, NVFP4_optimizer_weight, state, 0, NVFP4_DTYPE_FLOAT32, NULL);
    HANDLE(NVFP4_optimizer_delivered, h, &out, &scales, &global);
    BAD(NVFP4_UNSUPPORTED, NVFP4_optimizer_delivered, state, &out, &scales, &global);
    BAD(invalid, NVFP4_optimizer_delivered, state, NULL, &scales, &global);
    HANDLE(NVFP4_optimizer_save, h, bytes, sizeof bytes, &length);
    BAD(NVFP4_BUFFER_TOO_SMALL, NVFP4_optimizer_save, state, bytes, 8, &length);
    OK(NVFP4_optimizer_save(state, bytes, sizeof bytes, &length));
    BAD(NVFP4_CORRUPT_FILE, NVFP4_optimizer_restore, bytes, length - 1, 0, 0, 0, &none);
    BAD(NVFP4_CORRUPT_FILE, NVFP4_optimizer_restore, bytes, 3, 0, 0, 0, &none);
    BAD(invalid, NVFP4_optimizer_restore, NULL, 3, 0, 0, 0, &none);
    BAD(invalid, NVFP4_optimizer_restore, bytes, length, 0, 0, 2, &none);
    BAD(invalid, NVFP4_optimizer_restore, bytes, length, 0, 0, 0, NULL);
    OK(NVFP4_optimizer_release(state));

    BAD(invalid, NVFP4_rounding_seed, 1, 2, 3, NULL);
    BAD(NVFP4_INVALID_HANDLE, NVFP4_ste_linear, NULL, t, &made);
    BAD(NVFP4_INVALID_HANDLE, NVFP4_ste_linear, t, no_handles[1], &made);
    BAD(invalid, NVFP4_ste_linear, t, t, NULL);
    BAD(invalid, NVFP4_ste_linear, t, codes, &made);
    BAD(invalid, NVFP4_ste_linear_backward, t, t, t, &made, &second);
    BAD(invalid, NVFP4_ste_linear_backward, t, t, t, NULL, NULL);
    CHECK(none == NULL && made == NULL && second == NULL && scales == NULL && count == 0);
}

static void drop_in(NVFP4_Tensor *t)
{
    for (int i = 0; i < 4; i++) {
        void *h = no_handles[i], *q = t, *s = t;
        LEAVES(NVFP4_INVALID_HANDLE, NVFP4_quantize, h, &q, &s);
        CHECK(q == NULL && s == NULL);
        LEAVES(NVFP4_INVALID_HANDLE, NVFP4_scaled_mm, h, t, t, t, 5);
        LEAVES(NVFP4_INVALID_HANDLE, NVFP4_to_managed, h, -1, 0);
        LEAVES(NVFP4_INVALID_HANDLE, NVFP4_managed_prefetch, h, 0);
        SURE(NVFP4_is_managed_tensor, NVFP4_is_managed_tensor(h) == 0);
    }
    LEAVES(NVFP4_INVALID_ARGUMENT, NVFP4_quantize, t, NULL, NULL);
    LEAVES(NVFP4_INVALID_ARGUMENT, NVFP4_scaled_mm, t, t, t, t, 5);
    LEAVES(NVFP4_INVALID_ARGUMENT, NVFP4_to_managed, t, -2, 0);
    LEAVES(NVFP4_INVALID_ARGUMENT, NVFP4_managed_prefetch, t, 0);
    SURE(NVFP4_can_use_managed, NVFP4_can_use_managed() == 0 || cuda);
    SURE(NVFP4_ste_clear, NVFP4_ste_clear() == NVFP4_OK);
    NVFP4_empty_cache();
    SURE(NVFP4_empty_cache, NVFP4_last_status() == NVFP4_OK && NVFP4_last_error()[0] == '\0');
}

/* Whether every name in the file has a case above, and nothing else has. */
static void all_covered(const char *path)
{
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    if (file == NULL)
        return;
    char line[128];
    size_t declared = 0;
    while (fgets(line, sizeof line, file) != NULL) {
        size_t i = 0;
        line[strcspn(line, "\n")] = '\0';
        while (i < covered_count && strcmp(covered[i], line) != 0)
            i++;
        if (i == covered_count)
            printf("%s: no case in %s\n", line, __FILE__);
        CHECK(i < covered_count);
        declared++;
    }
    fclose(file);
    CHECK(declared == covered_count && declared > 70);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: errors NAMES MODEL_DIR\n");
        return 2;
    }
    NVFP4_Tensor *t = NULL, *codes = NULL, *scales = NULL, *stale = NULL;
    NVFP4_Weight *weight = NULL;
    NVFP4_Model *model = NULL;
    float global;
    int64_t local = 0;
    OK(NVFP4_tensor_from_host(floats, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &t));
    OK(NVFP4_tensor_quantize(t, NULL, &codes, &scales, &global));
    OK(NVFP4_model_load(argv[2], strlen(argv[2]), NULL, NULL, &model));

    cuda = cuda_device();
    /* NULL, one that was released, an address that is no handle, and, for now, a weight: no function under test takes it. */
    OK(NVFP4_tensor_empty(shape, 2, NVFP4_DTYPE_UINT8, NVFP4_DEVICE_CPU, 0, &stale));
    OK(NVFP4_tensor_release(stale));
    OK(NVFP4_weight_create(codes, scales, global, NVFP4_SCALES_LINEAR, &weight));
    no_handles[1] = stale;
    no_handles[2] = &local;
    no_handles[3] = weight;
    library();
    tensors(t);
    formats(t, codes, scales);
    models(model, argv[2]);
    sessions(model);
    queues(model);
    calls(model);
    detokenizers(model);
    grammars(model);
    adapters(model, argv[2]);
    adjustments(model);
    samplers(model);
    embeddings(model);
    processors(model);
    data(argv[2]);
    training(argv[2]);
    optimizers(t, codes);
    drop_in(t);
    no_handles[3] = model;
    products(t, codes, scales);
    weight_options(codes, scales);
    schemas();
    all_covered(argv[1]);

    OK(NVFP4_weight_release(weight));
    OK(NVFP4_model_release(model));
    OK(NVFP4_tensor_release(scales));
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(t));
    return report("errors");
}
