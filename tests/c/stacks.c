/* Preloaded into programs that run under valgrind: no thread asks for more than 8 MiB of stack. The library reserves 128 MiB for a template,
 * of which it uses what the template needs, and valgrind writes down the state of each of these bytes: 0.6 s for every rendering. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

static int (*next)(pthread_attr_t *, size_t);

/* Before anything else runs: later dlsym may wait for a loader that itself waits for the thread. */
__attribute__((constructor)) static void find(void) { *(void **)&next = dlsym(RTLD_NEXT, "pthread_attr_setstacksize"); }

int pthread_attr_setstacksize(pthread_attr_t *attributes, size_t size)
{
    const size_t most = (size_t)8 << 20;
    return next(attributes, size < most ? size : most);
}
