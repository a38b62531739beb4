/* A plug-in whose constructor uses the library: constructor PLUGIN opens it, and PLUGIN is this file too, compiled with -DPLUGIN. While
 * the constructor runs, the loader's lock is held, so that a thread which the constructor waits for must not ask for it. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>

#ifdef PLUGIN
#include <stdlib.h>

static const float values[] = {0.5f, -1, 2, 3, -4, 5, 6, -0.25f, 0, 1, 1.5f, -2, 2.5f, 3.5f, 4, -6};

/* A thread that has never called the library before asks, fails, reads the error, and computes. */
static void *work(void *user)
{
    const int64_t shape[] = {1, 16};
    NVFP4_Tensor *tensor = NULL, *codes = NULL, *scales = NULL;
    NVFP4_Cancel *cancel = NULL;
    NVFP4_Error *error = NULL;
    uint64_t current, peak;
    float factor = 0;
    OK(NVFP4_memory_stats(NVFP4_MEMORY_TOTAL, &current, &peak));
    OK(NVFP4_memory_reset_peak());
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads(-1));
    SAYS("-1");
    OK(NVFP4_take_error(&error));
    OK(NVFP4_error_release(error));
    OK(NVFP4_cancel_create(&cancel));
    OK(NVFP4_cancel_release(cancel));
    OK(NVFP4_tensor_from_host((void *)(uintptr_t)values, shape, 2, NULL, NVFP4_DTYPE_FLOAT32, NULL, NULL, &tensor));
    OK(NVFP4_tensor_quantize(tensor, NULL, &codes, &scales, &factor));
    OK(NVFP4_tensor_release(codes));
    OK(NVFP4_tensor_release(scales));
    OK(NVFP4_tensor_release(tensor));
    CHECK(factor > 0);
    return user;
}

__attribute__((constructor)) static void begin(void)
{
    for (int i = 0; i < 3; i++) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, work, NULL) == 0 && pthread_join(thread, NULL) == 0);
    }
}

/* The failures in the constructor. */
int constructor_failures(void);
int constructor_failures(void)
{
    return checks == 0 ? -1 : failures;
}
#else
#include <dlfcn.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: constructor PLUGIN\n");
        return 2;
    }
    /* A lock that is never released would be waited for forever. */
    alarm(60);
    void *plugin = dlopen(argv[1], RTLD_NOW);
    CHECK(plugin != NULL);
    if (plugin == NULL)
        printf("%s\n", dlerror());
    else {
        int (*count)(void);
        *(void **)&count = dlsym(plugin, "constructor_failures");
        CHECK(count != NULL && count() == 0);
    }
    printf("constructor: %d checks, %d failed\n", checks, failures);
    return failures != 0;
}
#endif
