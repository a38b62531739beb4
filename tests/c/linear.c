/* Weights in NVFP4 and NF4, by every compute path: the choice, the report and the result, to the bit. */
#include "check.h"
#include <stdlib.h>

static const int64_t square[] = {16, 16}, packed[] = {16, 8}, one_block[] = {16, 1}, flat[] = {16 * 16 / 2};
static char text[4096];

/* The JSON in `text` has the pair. */
static int has(const char *key, const char *value)
{
    char pair[128];
    snprintf(pair, sizeof pair, "\"%s\":%s", key, value);
    return strstr(text, pair) != NULL;
}

static NVFP4_WeightOptions path(int32_t compute_path)
{
    NVFP4_WeightOptions options;
    OK(NVFP4_weight_options_init(&options, sizeof options));
    options.compute_path = compute_path;
    return options;
}

static void named(NVFP4_WeightOptions *options, const char *backend)
{
    options->backend = backend;
    options->backend_length = strlen(backend);
}

static void report_of(NVFP4_Weight *weight)
{
    size_t length;
    OK(NVFP4_weight_report(weight, text, sizeof text, &length));
    CHECK(strlen(text) == length);
}

/* Row r of the weight has `value(r, k)`: the product with the identity, in some place, gives back the weight, transposed, in
 * every type. */
static void decodes_in(int place, NVFP4_Weight *weight, float (*value)(int r, int k))
{
    const int32_t types[] = {NVFP4_DTYPE_FLOAT32, NVFP4_DTYPE_FLOAT16, NVFP4_DTYPE_BFLOAT16};
    float identity[256] = {0}, out[256];
    NVFP4_Tensor *here, *x, *y = NULL;
    for (int i = 0; i < 16; i++)
        identity[i * 17] = 1;
    OK(NVFP4_tensor_from_host(identity, square, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &here));
    x = put(here, place);
    for (int i = 0; i < 3; i++) {
        int32_t dtype = -1;
        OK(NVFP4_linear(weight, x, NVFP4_ACTIVATIONS_EXACT, types[i], &y));
        OK(NVFP4_tensor_dtype(y, &dtype));
        CHECK(dtype == types[i] && is_on_device(y) == (place != ON_HOST));
        OK(NVFP4_tensor_copy_as_float(y, out, 256));
        for (int r = 0; r < 16; r++)
            for (int k = 0; k < 16; k++)
                CHECK(out[k * 16 + r] == value(r, k));
        OK(NVFP4_tensor_release(y));
    }
    OK(NVFP4_tensor_release(x));
    OK(NVFP4_tensor_release(here));
}

static void decodes_to(NVFP4_Weight *weight, float (*value)(int r, int k))
{
    decodes_in(ON_HOST, weight, value);
}

/* Each row has the 16 codes in order, and the scale of row r is 2^(r % 8 - 4); all of it times 0.5. */
static float nvfp4_value(int r, int k)
{
    static const float codes[] = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    float scale = 0.5F / 16;
    for (int i = 0; i < r % 8; i++)
        scale *= 2;
    return (k < 8 ? codes[k] : -codes[k - 8]) * scale;
}

static uint8_t nvfp4_codes[16 * 8], nvfp4_scales[16];

/* The weight on a GPU, with its codes and decoded: equal to the CPU to the bit, because the sums are exact. */
static void on_cuda(NVFP4_Tensor *codes, NVFP4_Tensor *scales)
{
    static char diagnosis[65536];
    const int32_t kernel = NVFP4_COMPUTE_PATH_KERNEL_ONLY, decoded = NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY;
    const struct {
        int32_t path, type;
        const char *stored;
    } ways[] = {{kernel, NVFP4_DTYPE_FLOAT32, "\"nvfp4\""},
                {decoded, NVFP4_DTYPE_FLOAT32, "\"f32\""},
                {decoded, NVFP4_DTYPE_FLOAT16, "\"f16\""},
                {decoded, NVFP4_DTYPE_BFLOAT16, "\"bf16\""}};
    static float ones[256];
    NVFP4_Weight *weight = NULL;
    NVFP4_Tensor *x, *y = NULL;
    uint64_t before, now, peak;
    size_t length;
    OK(NVFP4_diagnose(diagnosis, sizeof diagnosis, &length));
    if (strstr(diagnosis, "\"cuda\":{\"available\":true") == NULL) {
        printf("SKIPPED weights on a GPU: NVFP4_diagnose says why there is none\n");
        return;
    }
    for (int i = 0; i < 256; i++)
        ones[i] = 1;
    OK(NVFP4_tensor_from_host(ones, square, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &x));
    for (int i = 0; i < 4; i++) {
        NVFP4_WeightOptions options = path(ways[i].path);
        options.device_type = NVFP4_DEVICE_CUDA;
        options.dense_dtype = ways[i].type;
        OK(NVFP4_memory_stats(NVFP4_MEMORY_DEVICE_WEIGHTS, &before, &peak));
        OK(NVFP4_weight_create_nvfp4(codes, scales, 0.5F, &options, &weight));
        OK(NVFP4_memory_stats(NVFP4_MEMORY_DEVICE_WEIGHTS, &now, &peak));
        CHECK(now > before && peak >= now);
        report_of(weight);
        CHECK(strstr(text, "\"device\":\"cuda:0 (") != NULL && has("stored", ways[i].stored) && has("fallback_reason", "null"));
        decodes_to(weight, nvfp4_value);
        NVFP4_empty_cache();
        CHECK(NVFP4_last_status() == NVFP4_OK);
        decodes_to(weight, nvfp4_value);
        if (ways[i].path == kernel) {
            FAILS(NVFP4_UNSUPPORTED, NVFP4_linear(weight, x, NVFP4_ACTIVATIONS_INT8, NVFP4_DTYPE_FLOAT32, &y));
            SAYS("exact");
        }
        OK(NVFP4_weight_release(weight));
        OK(NVFP4_memory_stats(NVFP4_MEMORY_DEVICE_WEIGHTS, &now, &peak));
        CHECK(now == before && y == NULL);
    }
    OK(NVFP4_tensor_release(x));
}

/* Products of tensors in device memory and in managed memory: the weight is prepared there, and the product is computed there. */
static void in_place(NVFP4_Tensor *host_codes, NVFP4_Tensor *host_scales, int place)
{
    if (!has_place(place, "weights of tensors"))
        return;
    NVFP4_Tensor *codes = put(host_codes, place), *scales = put(host_scales, place), *swizzled, *y = NULL, *there;
    NVFP4_Weight *weight = NULL, *on_cpu = NULL;
    OK(NVFP4_scales_swizzle(scales, &swizzled));
    for (int32_t p = 0; p < 4; p++) {
        for (int32_t layout = 0; layout < 2; layout++) {
            NVFP4_WeightOptions options = path(p);
            options.device_type = NVFP4_DEVICE_CUDA;
            options.scale_layout = layout;
            options.dense_dtype = NVFP4_DTYPE_BFLOAT16;
            OK(NVFP4_weight_create_nvfp4(codes, layout ? swizzled : scales, 0.5F, &options, &weight));
            report_of(weight);
            int decoded = p == NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY;
            CHECK(has("stored", decoded ? "\"bf16\"" : "\"nvfp4\"") && has("fallback_reason", "null"));
            CHECK(has("backend", decoded ? "\"dequant-matmul\"" : "\"nvfp4-kernel\""));
            CHECK(strstr(text, "\"device\":\"cuda:0 (") != NULL);
            decodes_in(place, weight, nvfp4_value);
            decodes_to(weight, nvfp4_value);
            OK(NVFP4_weight_release(weight));
        }
    }

    /* Calls that name no device follow the tensors. */
    OK(NVFP4_weight_create(codes, swizzled, 0.5F, NVFP4_SCALES_SWIZZLED, &weight));
    report_of(weight);
    CHECK(has("path", "\"Auto\"") && strstr(text, "\"device\":\"cuda:0 (") != NULL);
    decodes_in(place, weight, nvfp4_value);
    OK(NVFP4_weight_release(weight));
    OK(NVFP4_weight_create_nvfp4(codes, scales, 0.5F, NULL, &weight));
    report_of(weight);
    CHECK(strstr(text, "\"device\":\"cuda:0 (") != NULL);
    OK(NVFP4_tensor_dequantize(codes, scales, 0.5F, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT16, &there));
    NVFP4_Weight *dense = NULL;
    OK(NVFP4_weight_create_dense(there, &dense));
    report_of(dense);
    CHECK(has("format", "\"dense\"") && has("stored", "\"f16\"") && strstr(text, "\"device\":\"cuda:0 (") != NULL);
    decodes_in(place, dense, nvfp4_value);
    OK(NVFP4_weight_release(dense));

    /* Tensors in two places, and types without a kernel, are refused and not computed elsewhere. */
    FAILS(NVFP4_UNSUPPORTED, NVFP4_linear(weight, there, NVFP4_ACTIVATIONS_INT8, NVFP4_DTYPE_FLOAT32, &y));
    FAILS(NVFP4_UNSUPPORTED, NVFP4_linear(weight, there, NVFP4_ACTIVATIONS_EXACT, NVFP4_DTYPE_FLOAT64, &y));
    OK(NVFP4_weight_create(host_codes, host_scales, 0.5F, NVFP4_SCALES_LINEAR, &on_cpu));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_linear(on_cpu, there, NVFP4_ACTIVATIONS_EXACT, NVFP4_DTYPE_FLOAT32, &y));
    SAYS("cuda:0");
    SAYS("cpu (");
    OK(NVFP4_weight_release(on_cpu));
    on_cpu = NULL;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_weight_create(codes, host_scales, 0.5F, NVFP4_SCALES_LINEAR, &on_cpu));
    SAYS("cuda:0");
    SAYS("the memory of the host");
    NVFP4_WeightOptions cpu = path(NVFP4_COMPUTE_PATH_AUTO);
    FAILS(NVFP4_UNSUPPORTED, NVFP4_weight_create_nvfp4(codes, scales, 0.5F, &cpu, &on_cpu));
    SAYS("cuda:0");

    /* A scale that is NaN, at the last place. */
    nvfp4_scales[15] = 0xff;
    NVFP4_Tensor *bad = put(host_scales, place);
    nvfp4_scales[15] = (15 % 8 + 3) << 3;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_weight_create(codes, bad, 0.5F, NVFP4_SCALES_LINEAR, &on_cpu));
    SAYS("block 0 in row 15 has the byte 0xff");
    CHECK(on_cpu == NULL);
    /* A product does not wait for the device, and a later call reports its finding, once. */
    OK(NVFP4_matmul(codes, scales, 1, codes, bad, 1, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT32, &y));
    OK(NVFP4_tensor_release(y));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_device_synchronize(NVFP4_DEVICE_CUDA, 0));
    SAYS("NVFP4_matmul");
    SAYS("the second matrix: the scale of block 0 in row 15 has the byte 0xff");
    OK(NVFP4_device_synchronize(NVFP4_DEVICE_CUDA, 0));
    OK(NVFP4_matmul(codes, bad, 1, codes, bad, 1, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT32, &y));
    static float undefined[256];
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_tensor_copy_to_host(y, undefined, sizeof undefined));
    SAYS("the first matrix: ");
    OK(NVFP4_tensor_copy_to_host(y, undefined, sizeof undefined));
    OK(NVFP4_tensor_release(y));
    y = NULL;

    /* The product of the weight with itself, in the codes of both. */
    static float out[256], same[256];
    OK(NVFP4_matmul(codes, swizzled, 0.5F, codes, swizzled, 2, NVFP4_SCALES_SWIZZLED, NVFP4_DTYPE_FLOAT32, &y));
    CHECK(is_on_device(y));
    OK(NVFP4_tensor_copy_to_host(y, out, sizeof out));
    OK(NVFP4_tensor_release(y));
    OK(NVFP4_matmul(host_codes, host_scales, 0.5F, host_codes, host_scales, 2, NVFP4_SCALES_LINEAR, NVFP4_DTYPE_FLOAT32, &y));
    CHECK(!is_on_device(y));
    OK(NVFP4_tensor_copy_to_host(y, same, sizeof same));
    CHECK(memcmp(out, same, sizeof out) == 0);

    NVFP4_Tensor *const tensors[] = {y, bad, there, swizzled, scales, codes};
    for (int i = 0; i < 6; i++)
        OK(NVFP4_tensor_release(tensors[i]));
    OK(NVFP4_weight_release(weight));
}

static void nvfp4(void)
{
    for (int r = 0; r < 16; r++) {
        for (int j = 0; j < 8; j++)
            nvfp4_codes[r * 8 + j] = (uint8_t)(2 * j | (2 * j + 1) << 4);
        nvfp4_scales[r] = (uint8_t)((r % 8 + 3) << 3);
    }
    NVFP4_Tensor *codes, *scales;
    OK(NVFP4_tensor_from_host(nvfp4_codes, packed, 2, NULL, NVFP4_DTYPE_UINT8, NULL, NULL, &codes));
    OK(NVFP4_tensor_from_host(nvfp4_scales, one_block, 2, NULL, NVFP4_DTYPE_UINT8, NULL, NULL, &scales));

    const int32_t kernels[] = {NVFP4_COMPUTE_PATH_AUTO, NVFP4_COMPUTE_PATH_KERNEL_ONLY,
                               NVFP4_COMPUTE_PATH_KERNEL_OR_FALLBACK};
    const char *const names[] = {"\"Auto\"", "\"KernelOnly\"", "\"KernelOrFallback\""};
    NVFP4_Weight *weight = NULL;
    int64_t n, k;
    uint64_t bytes;
    for (int i = 0; i < 3; i++) {
        NVFP4_WeightOptions options = path(kernels[i]);
        OK(NVFP4_weight_create_nvfp4(codes, scales, 0.5F, &options, &weight));
        report_of(weight);
        CHECK(has("format", "\"nvfp4\"") && has("backend", "\"nvfp4-kernel\"") && has("path", names[i]));
        CHECK(has("fallback_reason", "null") && strstr(text, "\"device\":\"cpu (") != NULL);
        CHECK(has("n", "16") && has("k", "16") && has("stored", "\"nvfp4\""));
        decodes_to(weight, nvfp4_value);
        OK(NVFP4_weight_release(weight));
    }
    on_cuda(codes, scales);
    in_place(codes, scales, ON_DEVICE);
    in_place(codes, scales, MANAGED);
    OK(NVFP4_weight_create_nvfp4(codes, scales, 0.5F, NULL, &weight));
    decodes_to(weight, nvfp4_value);
    OK(NVFP4_weight_release(weight));
    OK(NVFP4_weight_create(codes, scales, 0.5F, NVFP4_SCALES_LINEAR, &weight));
    report_of(weight);
    CHECK(has("backend", "\"nvfp4-kernel\"") && has("path", "\"Auto\""));
    OK(NVFP4_weight_release(weight));

    /* Decoded, in each type: the values are short enough for all of them. */
    const int32_t types[] = {NVFP4_DTYPE_FLOAT32, NVFP4_DTYPE_FLOAT16, NVFP4_DTYPE_BFLOAT16};
    const char *const stored[] = {"\"f32\"", "\"f16\"", "\"bf16\""};
    for (int i = 0; i < 3; i++) {
        NVFP4_WeightOptions options = path(NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY);
        options.dense_dtype = types[i];
        OK(NVFP4_weight_create_nvfp4(codes, scales, 0.5F, &options, &weight));
        report_of(weight);
        CHECK(has("format", "\"nvfp4\"") && has("backend", "\"dequant-matmul\"") && has("stored", stored[i]));
        CHECK(has("path", "\"DequantMatmulOnly\"") && has("fallback_reason", "null"));
        OK(NVFP4_weight_size(weight, &n, &k, &bytes));
        CHECK(n == 16 && k == 16 && bytes == (i == 0 ? 1024 : 512));
        decodes_to(weight, nvfp4_value);
        OK(NVFP4_weight_release(weight));
    }

    /* As TorchSharp hosts understand a CPU target: there is no kernel, which is an error or a reason. */
    NVFP4_WeightOptions options = path(NVFP4_COMPUTE_PATH_KERNEL_ONLY);
    options.exclude_cpu_kernels = 1;
    weight = NULL;
    FAILS(NVFP4_UNSUPPORTED, NVFP4_weight_create_nvfp4(codes, scales, 0.5F, &options, &weight));
    SAYS("KernelOnly");
    CHECK(weight == NULL);
    options.compute_path = NVFP4_COMPUTE_PATH_AUTO;
    OK(NVFP4_weight_create_nvfp4(codes, scales, 0.5F, &options, &weight));
    report_of(weight);
    CHECK(has("backend", "\"dequant-matmul\"") && strstr(text, "\"fallback_reason\":\"there is no nvfp4-kernel") != NULL);
    decodes_to(weight, nvfp4_value);
    OK(NVFP4_weight_release(weight));

    /* Scales in the order of tensor cores. */
    NVFP4_Tensor *swizzled;
    OK(NVFP4_scales_swizzle(scales, &swizzled));
    for (int32_t p = 0; p < 4; p++) {
        options = path(p);
        options.scale_layout = NVFP4_SCALES_SWIZZLED;
        OK(NVFP4_weight_create_nvfp4(codes, swizzled, 0.5F, &options, &weight));
        decodes_to(weight, nvfp4_value);
        OK(NVFP4_weight_release(weight));
    }
    OK(NVFP4_tensor_release(swizzled));
    OK(NVFP4_tensor_release(scales));
    OK(NVFP4_tensor_release(codes));
}

/* Codes in order, high nibble first, in blocks of 64: four rows share a scale, 2^(r / 4); the map is k - 8. */
static float nf4_value(int r, int k)
{
    return (float)((k - 8) * (1 << r / 4));
}

static float nf4_map[16];

static void nf4(void)
{
    static uint8_t bytes[128];
    static float scales[] = {1, 2, 4, 8};
    const int64_t four[] = {4}, sixteen[] = {16};
    for (int i = 0; i < 128; i++)
        bytes[i] = (uint8_t)((2 * i & 15) << 4 | ((2 * i + 1) & 15));
    for (int i = 0; i < 16; i++)
        nf4_map[i] = (float)(i - 8);
    NVFP4_Tensor *codes, *absmax, *map;
    OK(NVFP4_tensor_from_host(bytes, flat, 1, NULL, NVFP4_DTYPE_UINT8, NULL, NULL, &codes));
    OK(NVFP4_tensor_from_host(scales, four, 1, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &absmax));
    OK(NVFP4_tensor_from_host(nf4_map, sixteen, 1, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &map));

    NVFP4_Weight *weight = NULL;
    OK(NVFP4_weight_create_nf4(codes, absmax, map, 64, 16, 16, NULL, &weight));
    report_of(weight);
    CHECK(has("format", "\"nf4\"") && has("backend", "\"dequant-matmul\"") && has("path", "\"Auto\""));
    CHECK(strstr(text, "\"fallback_reason\":\"there is no nf4-kernel for cpu") != NULL);
    CHECK(has("stored", "\"f32\"") && has("bytes", "1024"));
    decodes_to(weight, nf4_value);
    OK(NVFP4_weight_release(weight));

    NVFP4_WeightOptions options = path(NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY);
    options.dense_dtype = NVFP4_DTYPE_BFLOAT16;
    OK(NVFP4_weight_create_nf4(codes, absmax, map, 64, 16, 16, &options, &weight));
    report_of(weight);
    CHECK(has("fallback_reason", "null") && has("stored", "\"bf16\""));
    decodes_to(weight, nf4_value);
    OK(NVFP4_weight_release(weight));

    options = path(NVFP4_COMPUTE_PATH_KERNEL_ONLY);
    weight = NULL;
    FAILS(NVFP4_UNSUPPORTED, NVFP4_weight_create_nf4(codes, absmax, map, 64, 16, 16, &options, &weight));
    SAYS("no nf4-kernel for cpu");
    CHECK(weight == NULL);

    /* The usual map: the last code is 1, so the last value of each row is its scale. */
    float out[16], x[16] = {0};
    x[15] = 1;
    NVFP4_Tensor *input, *y;
    OK(NVFP4_weight_create_nf4(codes, absmax, NULL, 64, 16, 16, NULL, &weight));
    OK(NVFP4_tensor_from_host(x, sixteen, 1, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &input));
    OK(NVFP4_linear(weight, input, NVFP4_ACTIVATIONS_EXACT, NVFP4_DTYPE_FLOAT32, &y));
    OK(NVFP4_tensor_copy_to_host(y, out, sizeof out));
    for (int r = 0; r < 16; r++)
        CHECK(out[r] == (float)(1 << r / 4));
    OK(NVFP4_tensor_release(y));
    OK(NVFP4_tensor_release(input));
    OK(NVFP4_weight_release(weight));
    OK(NVFP4_tensor_release(map));
    OK(NVFP4_tensor_release(absmax));
    OK(NVFP4_tensor_release(codes));
}

static void dense(void)
{
    static float values[256];
    for (int i = 0; i < 256; i++)
        values[i] = nf4_value(i / 16, i % 16);
    NVFP4_Tensor *t;
    NVFP4_Weight *weight;
    OK(NVFP4_tensor_from_host(values, square, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &t));
    OK(NVFP4_weight_create_dense(t, &weight));
    report_of(weight);
    CHECK(has("format", "\"dense\"") && has("backend", "\"dense-matmul\"") && has("path", "null"));
    decodes_to(weight, nf4_value);
    OK(NVFP4_weight_release(weight));
    OK(NVFP4_tensor_release(t));
}

static NVFP4_Status select_for(int32_t format, const NVFP4_WeightOptions *options)
{
    size_t length;
    return NVFP4_backend_select(format, options, text, sizeof text, &length);
}

static void selection(void)
{
    OK(select_for(NVFP4_FORMAT_NVFP4, NULL));
    CHECK(has("format", "\"nvfp4\"") && has("backend", "\"nvfp4-kernel\"") && has("fallback_reason", "null"));
    OK(select_for(NVFP4_FORMAT_NF4, NULL));
    CHECK(has("backend", "\"dequant-matmul\"") && !has("fallback_reason", "null"));
    NVFP4_WeightOptions options = path(NVFP4_COMPUTE_PATH_KERNEL_ONLY);
    options.device_type = NVFP4_DEVICE_AUTO;
    OK(select_for(NVFP4_FORMAT_NVFP4, &options));
    FAILS(NVFP4_UNSUPPORTED, select_for(NVFP4_FORMAT_NF4, &options));
    if (cuda_device()) {
        options.device_type = NVFP4_DEVICE_CUDA;
        OK(select_for(NVFP4_FORMAT_NVFP4, &options));
        CHECK(has("backend", "\"nvfp4-kernel\"") && strstr(text, "\"device\":\"cuda:0 (") != NULL);
        FAILS(NVFP4_UNSUPPORTED, select_for(NVFP4_FORMAT_NF4, &options));
    }

    /* By name, in any case. What the name and the path say must go together. */
    options = path(NVFP4_COMPUTE_PATH_AUTO);
    named(&options, "Dequant-Matmul");
    OK(select_for(NVFP4_FORMAT_NVFP4, &options));
    CHECK(has("backend", "\"dequant-matmul\"") && has("fallback_reason", "null"));
    options.compute_path = NVFP4_COMPUTE_PATH_KERNEL_ONLY;
    FAILS(NVFP4_INVALID_ARGUMENT, select_for(NVFP4_FORMAT_NVFP4, &options));
    SAYS("not a kernel, and the compute path is KernelOnly");
    named(&options, "nvfp4-kernel");
    OK(select_for(NVFP4_FORMAT_NVFP4, &options));
    FAILS(NVFP4_INVALID_ARGUMENT, select_for(NVFP4_FORMAT_NF4, &options));
    options.compute_path = NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY;
    FAILS(NVFP4_INVALID_ARGUMENT, select_for(NVFP4_FORMAT_NVFP4, &options));
    named(&options, "nf4-kernel");
    options.compute_path = NVFP4_COMPUTE_PATH_KERNEL_OR_FALLBACK;
    FAILS(NVFP4_UNSUPPORTED, select_for(NVFP4_FORMAT_NF4, &options));
    named(&options, "unknown");
    FAILS(NVFP4_INVALID_ARGUMENT, select_for(NVFP4_FORMAT_NVFP4, &options));
    SAYS("'unknown'");

    /* A struct of a size that no version had. */
    options = path(NVFP4_COMPUTE_PATH_DEQUANT_MATMUL_ONLY);
    options.struct_size = 8;
    FAILS(NVFP4_ABI_MISMATCH, select_for(NVFP4_FORMAT_NVFP4, &options));

    size_t length;
    static char large[65536];
    OK(NVFP4_diagnose(large, sizeof large, &length));
    CHECK(strstr(large, "\"linear\":[\"nvfp4-kernel\",\"dequant-matmul\"]") != NULL);
}

int main(void)
{
    nvfp4();
    nf4();
    dense();
    selection();
    return report("linear");
}
