/* Checks for the tests in C: each prints what failed and where, and main returns how many did. */
#ifndef CHECK_H
#define CHECK_H

#include <nvfp4.h>
#include <stdio.h>
#include <string.h>

static int checks, failures;

#define CHECK(condition)                                                          \
    do {                                                                          \
        checks++;                                                                 \
        if (!(condition)) {                                                       \
            failures++;                                                           \
            printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);        \
        }                                                                         \
    } while (0)

/* The call succeeds. */
#define OK(call)                                                                                             \
    do {                                                                                                     \
        NVFP4_Status status_ = (call);                                                                       \
        checks++;                                                                                            \
        if (status_ != NVFP4_OK) {                                                                           \
            failures++;                                                                                      \
            printf("%s:%d: %s\n    %s: %s\n", __FILE__, __LINE__, #call, NVFP4_status_name(status_),         \
                   NVFP4_last_error());                                                                      \
        }                                                                                                    \
    } while (0)

/* The call fails with `expected` and a message of one line that is not empty and names no address. */
#define FAILS(expected, call)                                                                                \
    do {                                                                                                     \
        NVFP4_Status status_ = (call);                                                                       \
        const char *text_ = NVFP4_last_error();                                                              \
        checks++;                                                                                            \
        if (status_ != (expected) || text_[0] == '\0' || strchr(text_, '\n') != NULL ||                      \
            strstr(text_, "0x7f") != NULL || NVFP4_last_status() != status_) {                               \
            failures++;                                                                                      \
            printf("%s:%d: %s\n    gave %s (%s), expected %s\n", __FILE__, __LINE__, #call,                  \
                   NVFP4_status_name(status_), text_, NVFP4_status_name(expected));                          \
        }                                                                                                    \
    } while (0)

/* The message of the last failure has `part` in it. */
#define SAYS(part)                                                                                           \
    do {                                                                                                     \
        checks++;                                                                                            \
        if (strstr(NVFP4_last_error(), (part)) == NULL) {                                                    \
            failures++;                                                                                      \
            printf("%s:%d: '%s' is not in: %s\n", __FILE__, __LINE__, (part), NVFP4_last_error());           \
        }                                                                                                    \
    } while (0)

/* Whether there is a CUDA device 0. Where there is none, the error says why: the driver is missing or shows none, or the
 * device is too old. */
static inline int cuda_device(void)
{
    NVFP4_WeightOptions options;
    char buffer[4096];
    size_t length;
    OK(NVFP4_weight_options_init(&options, sizeof options));
    options.device_type = NVFP4_DEVICE_CUDA;
    if (NVFP4_backend_select(NVFP4_FORMAT_NVFP4, &options, buffer, sizeof buffer, &length) == NVFP4_OK)
        return 1;
    CHECK(NVFP4_last_status() == NVFP4_DEVICE_UNAVAILABLE);
    SAYS("CUDA device 0");
    CHECK(strstr(NVFP4_last_error(), "driver") != NULL || strstr(NVFP4_last_error(), "compute capability") != NULL);
    return 0;
}

static int report(const char *name)
{
    printf("%s: %d checks, %d failed\n", name, checks, failures);
    NVFP4_empty_cache();
    return failures != 0;
}

#endif
