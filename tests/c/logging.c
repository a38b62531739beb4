/* The log callback: which messages reach it, with which word, and when they stop. */
#include "check.h"

struct log {
    int messages, level;
    char text[256];
    size_t length;
    NVFP4_Status from_within;
};

static int32_t take(void *user, int32_t level, const char *message, size_t length)
{
    struct log *log = user;
    log->messages++;
    log->level = level;
    log->length = length;
    snprintf(log->text, sizeof log->text, "%.*s", (int)length, message);
    log->from_within = NVFP4_set_log_callback(NULL, NULL, NVFP4_LOG_OFF);
    return 1;
}

static void fail(void)
{
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads(-5));
}

/* A weight in NF4, which the CPU decodes and says so. */
static void fall_back(void)
{
    static uint8_t codes[128];
    static float scales[4] = {1, 1, 1, 1};
    const int64_t bytes[] = {128}, four[] = {4};
    NVFP4_Tensor *c, *s;
    NVFP4_Weight *weight;
    OK(NVFP4_tensor_from_host(codes, bytes, 1, NULL, NVFP4_DTYPE_UINT8, NULL, NULL, &c));
    OK(NVFP4_tensor_from_host(scales, four, 1, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &s));
    OK(NVFP4_weight_create_nf4(c, s, NULL, 64, 16, 16, NULL, &weight));
    OK(NVFP4_weight_release(weight));
    OK(NVFP4_tensor_release(s));
    OK(NVFP4_tensor_release(c));
}

int main(void)
{
    struct log first = {0}, second = {0};
    fail();
    OK(NVFP4_set_log_callback(take, &first, NVFP4_LOG_DEBUG));
    fail();
    CHECK(first.messages == 1 && first.level == NVFP4_LOG_DEBUG);
    CHECK(strstr(first.text, "NVFP4_set_threads: threads is -5") != NULL && strchr(first.text, '\n') == NULL);
    CHECK(first.length == strlen(first.text) && strstr(first.text, "status=1") != NULL);
    /* The callback cannot be changed from within itself. What fails in there is not logged again, and does not take the place
     * of the message of the call that failed. */
    CHECK(first.from_within == NVFP4_BUSY);

    /* Another word takes the place of the first, and details are below a warning. */
    OK(NVFP4_set_log_callback(take, &second, NVFP4_LOG_WARN));
    fail();
    CHECK(second.messages == 0);
    fall_back();
    CHECK(first.messages == 1 && second.messages == 1 && second.level == NVFP4_LOG_WARN);
    CHECK(strstr(second.text, "falls back to dequant-matmul: there is no nf4-kernel") != NULL);

    OK(NVFP4_set_log_callback(take, &second, NVFP4_LOG_OFF));
    fall_back();
    OK(NVFP4_set_log_callback(take, &second, NVFP4_LOG_TRACE));
    OK(NVFP4_set_log_callback(NULL, NULL, NVFP4_LOG_TRACE));
    fall_back();
    fail();
    CHECK(first.messages == 1 && second.messages == 1);
    return report("logging");
}
