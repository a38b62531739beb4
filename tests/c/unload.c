/* Loading and unloading: unload LIBRARY MODEL_DIR. 300 times the library is opened, used and closed, from threads that end too.
 * It stays where it is, and neither memory nor threads grow with the number of times. */
#define _GNU_SOURCE
#include "check.h"
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum { TIMES = 300, WARM = 100, SLACK = 2 << 20 };

static const char *library, *path;
static void *first;

/* Opens the library and finds the functions that this program calls: it is not linked with it. */
static void *opened(void)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    CHECK(handle != NULL);
    return handle;
}

static void find(void *handle, const char *name, void *function, size_t size)
{
    void *found = dlsym(handle, name);
    CHECK(found != NULL);
    memcpy(function, &found, size);
}

static void *use(void *user)
{
    NVFP4_Status (*load)(const char *, size_t, const NVFP4_LoadOptions *, const NVFP4_QuantizeOptions *, NVFP4_Model **);
    NVFP4_Status (*create)(const NVFP4_Model *, const NVFP4_SessionOptions *, NVFP4_Session **);
    NVFP4_Status (*prefill)(NVFP4_Session *, const int32_t *, size_t, const NVFP4_CallOptions *);
    NVFP4_Status (*release)(NVFP4_Session *), (*release_model)(NVFP4_Model *), (*set_threads)(int32_t);
    const char *(*version)(void);
    void (*empty)(void);
    const int32_t prompt[] = {5, 6, 7};
    NVFP4_Model *model = NULL;
    NVFP4_Session *session = NULL;
    void *handle = opened();
    if (handle == NULL)
        return NULL;
    find(handle, "NVFP4_version", &version, sizeof version);
    find(handle, "NVFP4_model_load", &load, sizeof load);
    find(handle, "NVFP4_session_create", &create, sizeof create);
    find(handle, "NVFP4_session_prefill", &prefill, sizeof prefill);
    find(handle, "NVFP4_session_release", &release, sizeof release);
    find(handle, "NVFP4_model_release", &release_model, sizeof release_model);
    find(handle, "NVFP4_set_threads", &set_threads, sizeof set_threads);
    find(handle, "NVFP4_empty_cache", &empty, sizeof empty);
    if (first == NULL)
        memcpy(&first, &version, sizeof first);
    CHECK(memcmp(&first, &version, sizeof first) == 0);
    CHECK(version()[0] != 0);
    CHECK(set_threads(-1) == NVFP4_INVALID_ARGUMENT && set_threads(2) == NVFP4_OK);
    if (user != NULL) {
        CHECK(load(path, strlen(path), NULL, NULL, &model) == NVFP4_OK);
        CHECK(create(model, NULL, &session) == NVFP4_OK);
        CHECK(prefill(session, prompt, 3, NULL) == NVFP4_OK);
        CHECK(release(session) == NVFP4_OK && release_model(model) == NVFP4_OK);
    }
    empty();
    CHECK(dlclose(handle) == 0);
    return NULL;
}

static size_t field(const char *name)
{
    char line[256];
    size_t value = 0;
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (strncmp(line, name, strlen(name)) == 0)
            value = strtoul(line + strlen(name), NULL, 10);
    if (status != NULL)
        fclose(status);
    return value;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    library = argv[1];
    path = argv[2];
#ifdef M_ARENA_MAX
    /* When the C library makes another arena of 64 MiB for threads is a matter of chance. */
    CHECK(mallopt(M_ARENA_MAX, 1) == 1);
#endif
    size_t memory = 0, addresses = 0;
    for (int i = 0; i < TIMES; i++) {
        pthread_t thread;
        /* Every other time from a thread that then ends, every tenth with a model. */
        void *user = i % 10 < 2 ? &first : NULL;
        if (i % 2 == 0)
            use(user);
        else
            CHECK(pthread_create(&thread, NULL, use, user) == 0 && pthread_join(thread, NULL) == 0);
        if (i == WARM) {
            memory = field("VmRSS:") << 10;
            addresses = field("VmSize:") << 10;
        }
        /* A thread that was waited for takes a moment to be gone. */
        for (int tries = 0; tries < 1000 && field("Threads:") != 1; tries++)
            usleep(100);
        CHECK(field("Threads:") == 1);
    }
    const size_t now = field("VmRSS:") << 10, mapped = field("VmSize:") << 10;
    printf("memory after %d times %zu bytes, after %d %zu; addresses %zu and %zu\n", WARM, memory, TIMES, now, addresses, mapped);
    const char *preloaded = getenv("LD_PRELOAD");
    if (preloaded == NULL || strstr(preloaded, "vgpreload") == NULL)
        CHECK(now < memory + SLACK && mapped < addresses + SLACK);
    printf("unload: %d checks, %d failed\n", checks, failures);
    return failures != 0;
}
