/* Checks for the tests in C: each prints a failure with its place, and main returns the number of failures. */
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

/* Where a test's tensors are. */
enum { ON_HOST, ON_DEVICE, MANAGED, PLACES };

/* Whether a place exists; if not, prints that `what` is skipped there. */
static inline int has_place(int place, const char *what)
{
    static const char *const names[] = {"the host", "CUDA device 0", "managed memory"};
    if (place == ON_HOST || (cuda_device() && (place == ON_DEVICE || NVFP4_can_use_managed())))
        return 1;
    printf("SKIPPED %s in %s: there is none\n", what, names[place]);
    return 0;
}

/* A copy of a tensor in an existing place. */
static inline NVFP4_Tensor *put(NVFP4_Tensor *tensor, int place)
{
    NVFP4_Tensor *copy = NULL;
    if (place == MANAGED)
        copy = (NVFP4_Tensor *)NVFP4_to_managed(tensor, 0, 0);
    else
        OK(NVFP4_tensor_copy_to_device(tensor, place == ON_HOST ? NVFP4_DEVICE_CPU : NVFP4_DEVICE_CUDA, 0, &copy));
    CHECK(copy != NULL);
    return copy;
}

/* Whether a tensor is in the memory of CUDA device 0, and not managed. */
static inline int is_on_device(NVFP4_Tensor *tensor)
{
    int32_t device_type = -1, device_index = -1;
    OK(NVFP4_tensor_device(tensor, &device_type, &device_index));
    return device_type == NVFP4_DEVICE_CUDA && device_index == 0 && !NVFP4_is_managed_tensor(tensor);
}

static inline int report(const char *name)
{
    printf("%s: %d checks, %d failed\n", name, checks, failures);
    NVFP4_empty_cache();
    return failures != 0;
}

#endif
