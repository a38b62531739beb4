/* Use the library without linking to it: what a plug-in, or the run-time of another language, does.
 *
 *     cc dlopen.c $(pkg-config --cflags nvfp4) -ldl -o dlopen && ./dlopen /path/to/libNVFP4.so.0
 */
#include <dlfcn.h>
#include <nvfp4.h>
#include <stdio.h>
#include <string.h>

/* The functions this program uses, with the types that the header declares. */
static struct {
    __typeof__(&NVFP4_check_version) check_version;
    __typeof__(&NVFP4_version) version;
    __typeof__(&NVFP4_last_error) last_error;
    __typeof__(&NVFP4_tensor_empty) tensor_empty;
    __typeof__(&NVFP4_tensor_release) tensor_release;
    __typeof__(&NVFP4_empty_cache) empty_cache;
} nvfp4;

static int find(void *library, const char *name, void *place)
{
    /* C has no conversion from an object pointer to a function pointer; POSIX says that their bytes agree. */
    void *address = dlsym(library, name);
    if (address == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 0;
    }
    memcpy(place, &address, sizeof address);
    return 1;
}

int main(int argc, char **argv)
{
    const char *path = argc > 1 ? argv[1] : "libNVFP4.so.0";
    /* Hosts that only look whether a function is there load and unload freely. */
    for (int i = 0; i < 100; i++) {
        void *probe = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (probe == NULL || dlsym(probe, "NVFP4_scaled_mm") == NULL) {
            fprintf(stderr, "%s\n", dlerror());
            return 1;
        }
        dlclose(probe);
    }

    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    if (!find(library, "NVFP4_check_version", &nvfp4.check_version) || !find(library, "NVFP4_version", &nvfp4.version) ||
        !find(library, "NVFP4_last_error", &nvfp4.last_error) ||
        !find(library, "NVFP4_tensor_empty", &nvfp4.tensor_empty) ||
        !find(library, "NVFP4_tensor_release", &nvfp4.tensor_release) ||
        !find(library, "NVFP4_empty_cache", &nvfp4.empty_cache))
        return 1;
    if (nvfp4.check_version(NVFP4_ABI_VERSION, NVFP4_VERSION_NUMBER) != NVFP4_OK) {
        fprintf(stderr, "%s\n", nvfp4.last_error());
        return 1;
    }

    const int64_t shape[] = {4, 16};
    NVFP4_Tensor *tensor;
    if (nvfp4.tensor_empty(shape, 2, NVFP4_DTYPE_FLOAT16, NVFP4_DEVICE_CPU, 0, &tensor) != NVFP4_OK ||
        nvfp4.tensor_release(tensor) != NVFP4_OK) {
        fprintf(stderr, "%s\n", nvfp4.last_error());
        return 1;
    }
    /* The handle is stale now, and that is an error, not a crash. */
    if (nvfp4.tensor_release(tensor) != NVFP4_INVALID_HANDLE)
        return 1;
    printf("libNVFP4 %s, loaded at run time; as it should, it said: %s\n", nvfp4.version(), nvfp4.last_error());
    nvfp4.empty_cache();
    dlclose(library);
    return 0;
}
