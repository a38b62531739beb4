/* Preloaded into programs that run under valgrind: no thread asks for more than 8 MiB of stack. The library reserves 128 MiB for a template,
 * of which it uses what the template needs, and valgrind writes down the state of each of these bytes: 0.6 s for every rendering. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>

int pthread_attr_setstacksize(pthread_attr_t *attributes, size_t size)
{
    const size_t most = (size_t)8 << 20;
    int (*next)(pthread_attr_t *, size_t);
    *(void **)&next = dlsym(RTLD_NEXT, "pthread_attr_setstacksize");
    return next(attributes, size < most ? size : most);
}
