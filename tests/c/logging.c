/* The log callback: which messages reach it, with which word, and when they stop. */
#include "check.h"

#include <pthread.h>
#include <stdlib.h>

struct log {
    int messages, level, released;
    char text[256];
    size_t length;
    uint64_t token;
    int removes_itself;
    NVFP4_Status from_within;
};

static int32_t take(void *user, int32_t level, const char *message, size_t length)
{
    struct log *log = user;
    log->messages++;
    log->level = level;
    log->length = length;
    snprintf(log->text, sizeof log->text, "%.*s", (int)length, message);
    log->from_within = log->removes_itself ? NVFP4_log_remove(log->token) : NVFP4_log_remove(0);
    return 1;
}

static void released(void *user)
{
    struct log *log = user;
    log->released++;
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

/* A word on the heap, which is freed by its release and used by the callback until then. */
static int32_t add_up(void *user, int32_t level, const char *message, size_t length)
{
    int *sum = user;
    (void)level;
    (void)message;
    __atomic_add_fetch(sum, (int)length, __ATOMIC_RELAXED);
    return 0;
}

static void *fail_often(void *stop)
{
    while (!__atomic_load_n((int *)stop, __ATOMIC_RELAXED))
        NVFP4_set_threads(-5);
    return NULL;
}

/* Callbacks come and go while other threads have something to say. */
static void on_threads(void)
{
    pthread_t threads[3];
    int stop = 0;
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, fail_often, &stop) == 0);
    for (int i = 0; i < 200; i++) {
        uint64_t tokens[2];
        for (int j = 0; j < 2; j++) {
            int *word = calloc(1, sizeof *word);
            OK(NVFP4_log_add(add_up, word, NVFP4_LOG_DEBUG, free, &tokens[j]));
        }
        fail();
        for (int j = 0; j < 2; j++)
            OK(NVFP4_log_remove(tokens[j]));
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

int main(void)
{
    struct log first = {0}, second = {0};
    fail();
    OK(NVFP4_log_add(take, &first, NVFP4_LOG_DEBUG, released, &first.token));
    fail();
    CHECK(first.messages == 1 && first.level == NVFP4_LOG_DEBUG);
    CHECK(strstr(first.text, "NVFP4_set_threads: threads is -5") != NULL && strchr(first.text, '\n') == NULL);
    CHECK(first.length == strlen(first.text) && strstr(first.text, "status=1") != NULL);
    /* A failure in the callback is not logged again, and does not replace the message of the call that failed. */
    CHECK(first.from_within == NVFP4_NOT_FOUND);

    /* A second one beside the first; details are below a warning. */
    OK(NVFP4_log_add(take, &second, NVFP4_LOG_WARN, NULL, &second.token));
    CHECK(first.token != second.token);
    fail();
    CHECK(first.messages == 2 && second.messages == 0);
    fall_back();
    CHECK(first.messages == 3 && second.messages == 1 && second.level == NVFP4_LOG_WARN);
    CHECK(strstr(second.text, "falls back to dequant-matmul: there is no nf4-kernel") != NULL);

    /* Each goes by itself, from within its own callback too, and only once. */
    CHECK(first.released == 0);
    OK(NVFP4_log_remove(first.token));
    CHECK(first.released == 1);
    fail();
    FAILS(NVFP4_NOT_FOUND, NVFP4_log_remove(first.token));
    CHECK(first.messages == 3 && second.messages == 1);
    second.removes_itself = 1;
    fall_back();
    CHECK(second.messages == 2 && second.from_within == NVFP4_OK);
    fall_back();
    CHECK(second.messages == 2);
    FAILS(NVFP4_NOT_FOUND, NVFP4_log_remove(second.token));
    OK(NVFP4_log_add(take, &first, NVFP4_LOG_DEBUG, released, &first.token));
    first.removes_itself = 1;
    fail();
    CHECK(first.messages == 4 && first.released == 2);
    on_threads();
    return report("logging");
}
