/* Tensors over lent memory, views, DLPack in and out, and the number formats. */
#include "check.h"
#include <math.h>
#include <stdlib.h>

/* DLPack's structs, as dlpack.h has them: the header under test must not need that file. */
typedef struct {
    void *data;
    struct { int32_t device_type, device_id; } device;
    int32_t ndim;
    struct { uint8_t code, bits; uint16_t lanes; } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *);
};

struct DLManagedTensorVersioned {
    struct { uint32_t major, minor; } version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *);
    uint64_t flags;
    DLTensor dl_tensor;
};
enum { READ_ONLY = 1, COPIED = 2, PADDED = 4 };

static int deleted;
static void *deleted_data, *deleted_user;

static void deleter(void *data, void *user)
{
    deleted++;
    deleted_data = data;
    deleted_user = user;
}

static void lent_memory(void)
{
    float data[6] = {1, 2, 3, 4, 5, 6}, out[6];
    const int64_t shape[] = {2, 3}, transposed[] = {3, 2}, strides[] = {1, 3}, too_far[] = {4, 2};
    NVFP4_Tensor *t, *v, *bad = NULL;
    OK(NVFP4_tensor_from_host(data, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, deleter, out, &t));
    OK(NVFP4_tensor_view(t, transposed, 2, strides, 0, &v));

    int64_t read[8] = {0};
    size_t rank = 0;
    OK(NVFP4_tensor_shape(v, NULL, 0, &rank));
    CHECK(rank == 2);
    FAILS(NVFP4_BUFFER_TOO_SMALL, NVFP4_tensor_shape(v, read, 1, &rank));
    OK(NVFP4_tensor_shape(v, read, 8, &rank));
    CHECK(rank == 2 && read[0] == 3 && read[1] == 2);
    OK(NVFP4_tensor_strides(v, read, 2, &rank));
    CHECK(read[0] == 1 && read[1] == 3);
    int32_t dtype = -1, device_type = -1, device_index = -1;
    OK(NVFP4_tensor_dtype(v, &dtype));
    OK(NVFP4_tensor_device(v, &device_type, &device_index));
    CHECK(dtype == NVFP4_DTYPE_FLOAT32 && device_type == NVFP4_DEVICE_CPU && device_index == 0);
    void *address;
    OK(NVFP4_tensor_data(t, &address));
    CHECK(address == data);
    uint64_t bytes;
    OK(NVFP4_tensor_bytes(v, &bytes));
    CHECK(bytes == sizeof data);
    OK(NVFP4_tensor_copy_to_host(v, out, sizeof out));
    CHECK(out[0] == 1 && out[1] == 4 && out[2] == 2 && out[5] == 6);
    OK(NVFP4_tensor_copy_as_float(t, out, 6));
    CHECK(out[1] == 2);

    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_tensor_view(t, too_far, 2, NULL, 0, &bad));
    CHECK(bad == NULL);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_tensor_copy_to_host(v, out, sizeof out - 4));
    SAYS("24");
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_tensor_copy_as_float(v, out, 5));
    FAILS(NVFP4_INVALID_ARGUMENT,
          NVFP4_tensor_from_host((char *)data + 2, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, deleter, NULL, &bad));
    SAYS("aligned");

    /* The memory goes back once, when the last view of it is gone. */
    OK(NVFP4_tensor_retain(t));
    OK(NVFP4_tensor_release(t));
    OK(NVFP4_tensor_release(t));
    CHECK(deleted == 0);
    OK(NVFP4_tensor_copy_to_host(v, out, sizeof out));
    OK(NVFP4_tensor_release(v));
    CHECK(deleted == 1 && deleted_data == data && deleted_user == out);
    FAILS(NVFP4_INVALID_HANDLE, NVFP4_tensor_retain(v));
    SAYS("stale");
}

static void dlpack_delete(struct DLManagedTensor *managed)
{
    deleted++;
    free(managed);
}

static void dlpack(void)
{
    static uint16_t halves[4] = {0x3c00, 0x4000, 0xc200, 0};
    static int64_t shape[] = {4};
    struct DLManagedTensor *managed = calloc(1, sizeof *managed);
    managed->dl_tensor.data = (char *)halves - 2;
    managed->dl_tensor.byte_offset = 2;
    managed->dl_tensor.device.device_type = 1;
    managed->dl_tensor.ndim = 1;
    managed->dl_tensor.dtype.code = 2;
    managed->dl_tensor.dtype.bits = 16;
    managed->dl_tensor.dtype.lanes = 1;
    managed->dl_tensor.shape = shape;
    managed->deleter = dlpack_delete;
    deleted = 0;

    NVFP4_Tensor *t = NULL;
    managed->dl_tensor.device.device_type = 4;
    FAILS(NVFP4_UNSUPPORTED, NVFP4_tensor_from_dlpack(managed, &t));
    /* Host memory that claims to be CUDA memory. */
    const NVFP4_Status refused = cuda_device() ? NVFP4_INVALID_ARGUMENT : NVFP4_DEVICE_UNAVAILABLE;
    managed->dl_tensor.device.device_type = 2;
    FAILS(refused, NVFP4_tensor_from_dlpack(managed, &t));
    managed->dl_tensor.device.device_type = 13;
    FAILS(refused, NVFP4_tensor_from_dlpack(managed, &t));
    CHECK(t == NULL && deleted == 0);
    managed->dl_tensor.device.device_type = 1;
    OK(NVFP4_tensor_from_dlpack(managed, &t));
    float out[4];
    OK(NVFP4_tensor_copy_as_float(t, out, 4));
    CHECK(out[0] == 1 && out[1] == 2 && out[2] == -3 && out[3] == 0);

    struct DLManagedTensor *exported;
    OK(NVFP4_tensor_to_dlpack(t, &exported));
    OK(NVFP4_tensor_release(t));
    CHECK(deleted == 0);
    CHECK(exported->dl_tensor.data == halves && exported->dl_tensor.ndim == 1 && exported->dl_tensor.shape[0] == 4);
    CHECK(exported->dl_tensor.dtype.code == 2 && exported->dl_tensor.dtype.bits == 16);
    exported->deleter(exported);
    CHECK(deleted == 1);
}

static int is_read_only(const NVFP4_Tensor *t)
{
    int32_t out = -1;
    OK(NVFP4_tensor_is_read_only(t, &out));
    return out;
}

static void versioned_delete(struct DLManagedTensorVersioned *managed)
{
    deleted++;
    free(managed);
}

/* Versioned DLPack, and read-only memory: a write to it would end the program. */
static void dlpack_versioned(void)
{
    static const uint8_t codes[4] = {0x12, 0x34, 0x56, 0x78};
    static int64_t shape[] = {4};
    struct DLManagedTensorVersioned *managed = calloc(1, sizeof *managed), *exported = NULL;
    struct DLManagedTensor *plain = NULL;
    managed->version.major = 1;
    managed->flags = READ_ONLY | COPIED;
    const void *address = codes;
    memcpy(&managed->dl_tensor.data, &address, sizeof address);
    managed->dl_tensor.device.device_type = 1;
    managed->dl_tensor.ndim = 1;
    managed->dl_tensor.dtype.code = 17;
    managed->dl_tensor.dtype.bits = 4;
    managed->dl_tensor.dtype.lanes = 2;
    managed->dl_tensor.shape = shape;
    managed->deleter = versioned_delete;
    deleted = 0;

    NVFP4_Tensor *t = NULL, *v = NULL, *copy = NULL;
    managed->version.major = 2;
    FAILS(NVFP4_UNSUPPORTED, NVFP4_tensor_from_dlpack_versioned(managed, &t));
    SAYS("version 2.0");
    managed->version.major = 1;
    managed->flags = PADDED;
    FAILS(NVFP4_UNSUPPORTED, NVFP4_tensor_from_dlpack_versioned(managed, &t));
    SAYS("padded");
    managed->flags = 64;
    FAILS(NVFP4_UNSUPPORTED, NVFP4_tensor_from_dlpack_versioned(managed, &t));
    SAYS("flags 0x40");
    CHECK(t == NULL && deleted == 0);
    managed->flags = READ_ONLY | COPIED;
    managed->version.minor = 7;
    OK(NVFP4_tensor_from_dlpack_versioned(managed, &t));
    OK(NVFP4_tensor_view(t, shape, 1, NULL, 0, &v));
    CHECK(is_read_only(t) == 1 && is_read_only(v) == 1);
    OK(NVFP4_tensor_release(t));

    FAILS(NVFP4_UNSUPPORTED, NVFP4_tensor_to_dlpack(v, &plain));
    SAYS("read-only");
    CHECK(plain == NULL);
    OK(NVFP4_tensor_to_dlpack_versioned(v, &exported));
    CHECK(exported->version.major == 1 && exported->version.minor == 1 && exported->flags == READ_ONLY);
    CHECK(exported->dl_tensor.data == address && exported->dl_tensor.dtype.code == 17);
    OK(NVFP4_tensor_release(v));
    OK(NVFP4_tensor_from_dlpack_versioned(exported, &t));
    CHECK(is_read_only(t) == 1 && deleted == 0);

    /* A copy is another's to write. */
    OK(NVFP4_tensor_copy_to_device(t, NVFP4_DEVICE_CPU, 0, &copy));
    CHECK(is_read_only(copy) == 0);
    OK(NVFP4_tensor_release(t));
    CHECK(deleted == 1);
    OK(NVFP4_tensor_to_dlpack(copy, &plain));
    plain->deleter(plain);
    OK(NVFP4_tensor_release(copy));

    /* A tensor over a pointer to const. */
    deleted = 0;
    OK(NVFP4_tensor_from_host_read_only(codes, shape, 1, NULL, NVFP4_DTYPE_UINT8, deleter, NULL, &t));
    OK(NVFP4_tensor_view(t, shape, 1, NULL, 0, &v));
    CHECK(is_read_only(t) == 1 && is_read_only(v) == 1);
    FAILS(NVFP4_UNSUPPORTED, NVFP4_tensor_to_dlpack(t, &plain));
    OK(NVFP4_tensor_release(t));
    OK(NVFP4_tensor_release(v));
    CHECK(deleted == 1 && deleted_data == address);

    float numbers[] = {1, 2, 3, 4};
    OK(NVFP4_tensor_from_host(numbers, shape, 1, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &t));
    OK(NVFP4_tensor_to_dlpack_versioned(t, &exported));
    CHECK(is_read_only(t) == 0 && exported->flags == 0 && exported->version.major == 1 && exported->version.minor == 0);
    exported->deleter(exported);
    OK(NVFP4_tensor_release(t));
}

static void formats(void)
{
    float x[2 * 32], y[2 * 32];
    for (int i = 0; i < 64; i++)
        x[i] = (float)((i * 37) % 13 - 6);
    const int64_t shape[] = {2, 32};
    NVFP4_Tensor *t, *codes, *scales, *swizzled, *linear, *back, *absmax;
    OK(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &t));

    NVFP4_QuantizeOptions options;
    OK(NVFP4_quantize_options_init(&options, sizeof options));
    CHECK(options.struct_size == sizeof options && options.levels == NVFP4_LEVELS_TWO);
    options.levels = NVFP4_LEVELS_SINGLE;
    float global = 0;
    OK(NVFP4_tensor_quantize(t, &options, &codes, &scales, &global));
    CHECK(global == 1);
    size_t rank;
    int64_t sizes[2];
    OK(NVFP4_tensor_shape(codes, sizes, 2, &rank));
    CHECK(sizes[0] == 2 && sizes[1] == 16);
    OK(NVFP4_tensor_shape(scales, sizes, 2, &rank));
    CHECK(sizes[0] == 2 && sizes[1] == 2);
    /* Every block's largest value is 6, so every scale is 1.0 and whole numbers up to 4 are exact. */
    uint8_t bytes[4];
    OK(NVFP4_tensor_copy_to_host(scales, bytes, 4));
    CHECK(bytes[0] == 0x38 && bytes[3] == 0x38);
    OK(NVFP4_tensor_dequantize(codes, scales, global, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT32, &back));
    OK(NVFP4_tensor_copy_to_host(back, y, sizeof y));
    for (int i = 0; i < 64; i++)
        CHECK(fabsf(x[i]) == 5 ? fabsf(y[i]) == 4 : y[i] == x[i]);
    OK(NVFP4_tensor_release(back));

    OK(NVFP4_scales_swizzle(scales, &swizzled));
    OK(NVFP4_tensor_shape(swizzled, sizes, 2, &rank));
    CHECK(rank == 1 && sizes[0] == 512);
    OK(NVFP4_scales_unswizzle(swizzled, 2, 2, &linear));
    OK(NVFP4_tensor_copy_to_host(linear, bytes, 4));
    CHECK(bytes[0] == 0x38 && bytes[3] == 0x38);
    OK(NVFP4_tensor_dequantize(codes, swizzled, global, NVFP4_SCALES_SWIZZLED, NVFP4_DTYPE_BFLOAT16, &back));
    OK(NVFP4_tensor_copy_as_float(back, y, 64));
    CHECK(y[0] == -6);
    OK(NVFP4_tensor_release(back));
    OK(NVFP4_tensor_release(linear));
    OK(NVFP4_tensor_release(swizzled));
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(scales));

    /* A struct of a size that no version had. */
    options.struct_size = 24;
    options.rounding = NVFP4_ROUNDING_STOCHASTIC;
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_tensor_quantize(t, &options, &codes, &scales, &global));
    SAYS("no version of NVFP4_QuantizeOptions");
    /* A newer host's struct has more at its end, zero where it is not used. */
    struct { NVFP4_QuantizeOptions known; uint64_t unknown; } newer = {options, 0};
    newer.known.struct_size = sizeof newer;
    OK(NVFP4_tensor_quantize(t, &newer.known, &codes, &scales, &global));
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(scales));
    newer.unknown = 1;
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_tensor_quantize(t, &newer.known, &codes, &scales, &global));

    x[40] = NAN;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_tensor_quantize(t, NULL, &codes, &scales, &global));
    SAYS("index 40");
    x[40] = 0;

    OK(NVFP4_tensor_quantize_nf4(t, 64, &codes, &absmax));
    OK(NVFP4_tensor_dequantize_nf4(codes, absmax, NULL, 64, shape, 2, NVFP4_DTYPE_FLOAT32, &back));
    OK(NVFP4_tensor_copy_to_host(back, y, sizeof y));
    CHECK(y[0] == -6);
    OK(NVFP4_tensor_release(back));
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(absmax));
    OK(NVFP4_tensor_release(t));
}

/* A weight as training in 4 bits has it. Multiples of 0.75 are often halfway between two codes. */
static void straight_through(void)
{
    float x[2 * 32], y[2 * 32], z[2 * 32];
    for (int i = 0; i < 64; i++)
        x[i] = (float)((i * 29) % 17 - 8) * 0.75f;
    const int64_t shape[] = {2, 32};
    NVFP4_Tensor *t, *codes, *scales, *values, *again, *back;
    void *legacy[2] = {NULL, NULL};
    uint8_t bytes[2][32], expected[2][32];
    OK(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &t));
    OK(NVFP4_quantize_packed(t, &codes, &scales));
    NVFP4_quantize(t, &legacy[0], &legacy[1]);
    OK(NVFP4_last_status());
    OK(NVFP4_tensor_copy_to_host(codes, bytes[0], 32));
    OK(NVFP4_tensor_copy_to_host(scales, bytes[1], 4));
    OK(NVFP4_tensor_copy_to_host(legacy[0], expected[0], 32));
    OK(NVFP4_tensor_copy_to_host(legacy[1], expected[1], 4));
    CHECK(memcmp(bytes[0], expected[0], 32) == 0 && memcmp(bytes[1], expected[1], 4) == 0);
    OK(NVFP4_dequantize_packed(codes, scales, NVFP4_DTYPE_FLOAT32, &back));
    OK(NVFP4_tensor_copy_to_host(back, y, sizeof y));
    OK(NVFP4_ste_weight(t, 0, &values));
    OK(NVFP4_tensor_copy_to_host(values, z, sizeof z));
    CHECK(memcmp(y, z, sizeof y) == 0 && memcmp(x, z, sizeof x) != 0);
    OK(NVFP4_tensor_release(values));

    /* The cached values are those of the old weight until they are cleared. */
    void *data, *other;
    OK(NVFP4_ste_weight(t, 1, &values));
    x[0] = 100;
    OK(NVFP4_ste_weight(t, 1, &again));
    OK(NVFP4_tensor_data(values, &data));
    OK(NVFP4_tensor_data(again, &other));
    CHECK(values != again && data == other);
    OK(NVFP4_tensor_release(again));
    OK(NVFP4_ste_clear());
    OK(NVFP4_ste_weight(t, 1, &again));
    OK(NVFP4_tensor_copy_to_host(again, z, sizeof z));
    CHECK(z[0] > 90 && y[0] < 0);
    OK(NVFP4_tensor_release(again));
    OK(NVFP4_tensor_release(values));

    /* It goes with the weight. */
    uint64_t held, kept, peak;
    NVFP4_Tensor *large;
    const int64_t wide[] = {64, 1024};
    NVFP4_empty_cache();
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TENSOR, &held, &peak));
    OK(NVFP4_tensor_empty(wide, 2, NVFP4_DTYPE_FLOAT16, NVFP4_DEVICE_CPU, 0, &large));
    OK(NVFP4_ste_weight(large, 1, &values));
    OK(NVFP4_tensor_release(values));
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TENSOR, &kept, &peak));
    CHECK(kept == held + 2 * 64 * 1024 * 2);
    OK(NVFP4_tensor_release(large));
    NVFP4_empty_cache();
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TENSOR, &kept, &peak));
    CHECK(kept == held);
    OK(NVFP4_tensor_release(t));
    OK(NVFP4_ste_clear());
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(scales));
    OK(NVFP4_tensor_release(back));
    OK(NVFP4_tensor_release(legacy[0]));
    OK(NVFP4_tensor_release(legacy[1]));
}

static void memory(void)
{
    const int64_t shape[] = {1024};
    NVFP4_Tensor *t = NULL;
    uint64_t before, now, peak, budget;
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TENSOR, &before, &peak));
    OK(NVFP4_tensor_empty(shape, 1, NVFP4_DTYPE_FLOAT32, NVFP4_DEVICE_CPU, 0, &t));
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TENSOR, &now, &peak));
    CHECK(now == before + 4096 && peak >= now);
    OK(NVFP4_tensor_release(t));
    OK(NVFP4_memory_reset_peak());
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TENSOR, &now, &peak));
    CHECK(now == before && peak == now);

    for (int32_t tag = NVFP4_MEMORY_TOTAL; tag <= NVFP4_MEMORY_MAPPED; tag++)
        OK(NVFP4_memory_stats(tag, &now, &peak));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_memory_stats(NVFP4_MEMORY_MAPPED + 1, &now, &peak));
    SAYS("device_tensor");

    OK(NVFP4_memory_stats(NVFP4_MEMORY_TOTAL, &now, &peak));
    OK(NVFP4_memory_set_budget(now + 1000));
    OK(NVFP4_memory_get_budget(&budget));
    CHECK(budget == now + 1000);
    FAILS(NVFP4_OVER_BUDGET, NVFP4_tensor_empty(shape, 1, NVFP4_DTYPE_FLOAT32, NVFP4_DEVICE_CPU, 0, &t));
    SAYS("4096");
    OK(NVFP4_memory_set_budget(0));
    OK(NVFP4_memory_get_budget(&budget));
    CHECK(budget == 0);
    OK(NVFP4_tensor_empty(shape, 1, NVFP4_DTYPE_FLOAT32, NVFP4_DEVICE_CPU, 0, &t));
    OK(NVFP4_tensor_release(t));
}

/* Tensors on a device: refusals without a device, and with one the same results. */
static void device(void)
{
    float x[4 * 64], y[4 * 64], z[4 * 64];
    for (int i = 0; i < 4 * 64; i++)
        x[i] = (float)((i * 37) % 101 - 50) / 8;
    const int64_t shape[] = {4, 64};
    NVFP4_Tensor *host, *there = NULL, *lent = NULL, *codes[2], *scales[2], *back;
    OK(NVFP4_tensor_from_host(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &host));
    deleted = 0;
    if (!cuda_device()) {
        FAILS(NVFP4_DEVICE_UNAVAILABLE, NVFP4_tensor_copy_to_device(host, NVFP4_DEVICE_CUDA, 0, &there));
        FAILS(NVFP4_DEVICE_UNAVAILABLE,
              NVFP4_tensor_empty(shape, 2, NVFP4_DTYPE_FLOAT32, NVFP4_DEVICE_CUDA, 0, &there));
        FAILS(NVFP4_DEVICE_UNAVAILABLE,
              NVFP4_tensor_from_device(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, 0, deleter, NULL, &there));
        CHECK(there == NULL && deleted == 0);
        printf("SKIPPED tensors on a device: there is none\n");
        OK(NVFP4_tensor_release(host));
        return;
    }
    OK(NVFP4_tensor_copy_to_device(host, NVFP4_DEVICE_CUDA, 0, &there));
    int32_t device_type = -1, device_index = -1;
    OK(NVFP4_tensor_device(there, &device_type, &device_index));
    CHECK(device_type == NVFP4_DEVICE_CUDA && device_index == 0);
    OK(NVFP4_tensor_copy_as_float(there, y, 256));
    CHECK(memcmp(x, y, sizeof x) == 0);

    /* Its memory, lent again, and host memory, which is not the device's. */
    void *data;
    OK(NVFP4_tensor_data(there, &data));
    FAILS(NVFP4_INVALID_ARGUMENT,
          NVFP4_tensor_from_device(x, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, 0, deleter, NULL, &lent));
    CHECK(lent == NULL && deleted == 0);
    OK(NVFP4_tensor_from_device(data, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, 0, deleter, y, &lent));

    NVFP4_QuantizeOptions options;
    OK(NVFP4_quantize_options_init(&options, sizeof options));
    for (options.scale_layout = 0; options.scale_layout < 2; options.scale_layout++) {
        float global[2];
        NVFP4_Tensor *inputs[2] = {host, lent};
        for (int i = 0; i < 2; i++)
            OK(NVFP4_tensor_quantize(inputs[i], &options, &codes[i], &scales[i], &global[i]));
        CHECK(global[0] == global[1]);
        uint8_t bytes[2][1024];
        uint64_t count;
        OK(NVFP4_tensor_bytes(scales[1], &count));
        for (int i = 0; i < 2; i++)
            OK(NVFP4_tensor_copy_to_host(scales[i], bytes[i], count));
        CHECK(memcmp(bytes[0], bytes[1], count) == 0);
        for (int i = 0; i < 2; i++)
            OK(NVFP4_tensor_copy_to_host(codes[i], bytes[i], 128));
        CHECK(memcmp(bytes[0], bytes[1], 128) == 0);
        float *out[2] = {y, z};
        for (int i = 0; i < 2; i++) {
            OK(NVFP4_tensor_dequantize(codes[i], scales[i], global[i], options.scale_layout, NVFP4_DTYPE_FLOAT32, &back));
            OK(NVFP4_tensor_device(back, &device_type, &device_index));
            CHECK(device_type == (i ? NVFP4_DEVICE_CUDA : NVFP4_DEVICE_CPU));
            OK(NVFP4_tensor_copy_to_host(back, out[i], sizeof y));
            OK(NVFP4_tensor_release(back));
        }
        CHECK(memcmp(y, z, sizeof y) == 0);
        /* Parts in two places, and functions for host memory only. */
        FAILS(NVFP4_UNSUPPORTED,
              NVFP4_tensor_dequantize(codes[0], scales[1], 1, options.scale_layout, NVFP4_DTYPE_FLOAT32, &back));
        SAYS("cuda:0");
        NVFP4_Tensor *absmax = NULL;
        FAILS(NVFP4_UNSUPPORTED, NVFP4_tensor_quantize_nf4(lent, 64, &back, &absmax));
        SAYS("cuda:0");
        CHECK(absmax == NULL);
        for (int i = 0; i < 2; i++) {
            OK(NVFP4_tensor_release(codes[i]));
            OK(NVFP4_tensor_release(scales[i]));
        }
    }
    void *q = NULL, *s = NULL;
    NVFP4_quantize(lent, &q, &s);
    CHECK(NVFP4_last_status() == NVFP4_OK && q != NULL && s != NULL);
    OK(NVFP4_tensor_device(q, &device_type, &device_index));
    CHECK(device_type == NVFP4_DEVICE_CUDA);
    OK(NVFP4_tensor_release(q));
    OK(NVFP4_tensor_release(s));

    struct DLManagedTensor *exported;
    OK(NVFP4_tensor_to_dlpack(lent, &exported));
    CHECK(exported->dl_tensor.device.device_type == 2 && exported->dl_tensor.data == data);
    OK(NVFP4_tensor_release(lent));
    CHECK(deleted == 0);
    exported->deleter(exported);
    CHECK(deleted == 1 && deleted_data == data && deleted_user == y);
    OK(NVFP4_tensor_release(there));

    x[77] = NAN;
    OK(NVFP4_tensor_copy_to_device(host, NVFP4_DEVICE_CUDA, 0, &there));
    NVFP4_quantize(there, &q, &s);
    CHECK(NVFP4_last_status() == NVFP4_INVALID_ARGUMENT && q == NULL && s == NULL);
    SAYS("index 77 (row 1, column 13)");
    OK(NVFP4_tensor_release(there));
    OK(NVFP4_tensor_release(host));
}

int main(void)
{
    lent_memory();
    dlpack();
    dlpack_versioned();
    formats();
    straight_through();
    memory();
    device();
    return report("tensors");
}
