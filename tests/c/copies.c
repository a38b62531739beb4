/* Two copies of the library in a process: copies LIBRARY MODEL_DIR SCRATCH_DIR. Each works by itself, and takes no handle of the
 * other's: it says whose that is, and nothing of it is freed. */
#define _GNU_SOURCE
#include "check.h"
#include <dlfcn.h>
#include <stdlib.h>

struct copy {
    const char *(*last_error)(void);
    NVFP4_Status (*load)(const char *, size_t, const NVFP4_LoadOptions *, const NVFP4_QuantizeOptions *, NVFP4_Model **);
    NVFP4_Status (*vocab_size)(const NVFP4_Model *, size_t *);
    NVFP4_Status (*retain_model)(NVFP4_Model *), (*release_model)(NVFP4_Model *);
    NVFP4_Status (*create)(const NVFP4_Model *, const NVFP4_SessionOptions *, NVFP4_Session **);
    NVFP4_Status (*prefill)(NVFP4_Session *, const int32_t *, size_t, const NVFP4_CallOptions *);
    NVFP4_Status (*logits)(NVFP4_Session *, float *, size_t, size_t *, const NVFP4_CallOptions *);
    NVFP4_Status (*retain_session)(NVFP4_Session *), (*release_session)(NVFP4_Session *);
    NVFP4_Status (*empty)(const int64_t *, int32_t, int32_t, int32_t, int32_t, NVFP4_Tensor **);
    NVFP4_Status (*bytes)(const NVFP4_Tensor *, uint64_t *);
    NVFP4_Status (*retain_tensor)(NVFP4_Tensor *), (*release_tensor)(NVFP4_Tensor *);
    NVFP4_Status (*dense)(const NVFP4_Tensor *, NVFP4_Weight **);
    NVFP4_Status (*size)(const NVFP4_Weight *, int64_t *, int64_t *, uint64_t *);
    NVFP4_Status (*retain_weight)(NVFP4_Weight *), (*release_weight)(NVFP4_Weight *);
    NVFP4_Status (*cancel)(NVFP4_Cancel **), (*trigger)(NVFP4_Cancel *), (*release_cancel)(NVFP4_Cancel *);
    NVFP4_Status (*set_threads)(int32_t);
    NVFP4_Status (*take)(NVFP4_Error **);
    NVFP4_Status (*status)(const NVFP4_Error *);
    const char *(*message)(const NVFP4_Error *);
    NVFP4_Status (*retain_error)(NVFP4_Error *), (*release_error)(NVFP4_Error *);
    void (*empty_cache)(void);

    NVFP4_Model *model;
    NVFP4_Session *session;
    NVFP4_Tensor *tensor;
    NVFP4_Weight *weight;
    NVFP4_Error *error;
    NVFP4_Cancel *ends;
};

static struct copy ours, theirs;
static const char *path;

static void find(void *handle, const char *name, void *function, size_t size)
{
    void *found = dlsym(handle, name);
    CHECK(found != NULL);
    memcpy(function, &found, size);
}
#define FIND(copy, member, name) find(handle, name, &(copy)->member, sizeof(copy)->member)

static void open_copy(struct copy *copy, const char *library)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        printf("%s\n", dlerror());
        exit(1);
    }
    FIND(copy, last_error, "NVFP4_last_error");
    FIND(copy, load, "NVFP4_model_load");
    FIND(copy, vocab_size, "NVFP4_model_vocab_size");
    FIND(copy, retain_model, "NVFP4_model_retain");
    FIND(copy, release_model, "NVFP4_model_release");
    FIND(copy, create, "NVFP4_session_create");
    FIND(copy, prefill, "NVFP4_session_prefill");
    FIND(copy, logits, "NVFP4_session_logits");
    FIND(copy, retain_session, "NVFP4_session_retain");
    FIND(copy, release_session, "NVFP4_session_release");
    FIND(copy, empty, "NVFP4_tensor_empty");
    FIND(copy, bytes, "NVFP4_tensor_bytes");
    FIND(copy, retain_tensor, "NVFP4_tensor_retain");
    FIND(copy, release_tensor, "NVFP4_tensor_release");
    FIND(copy, dense, "NVFP4_weight_create_dense");
    FIND(copy, size, "NVFP4_weight_size");
    FIND(copy, retain_weight, "NVFP4_weight_retain");
    FIND(copy, release_weight, "NVFP4_weight_release");
    FIND(copy, cancel, "NVFP4_cancel_create");
    FIND(copy, trigger, "NVFP4_cancel_trigger");
    FIND(copy, release_cancel, "NVFP4_cancel_release");
    FIND(copy, set_threads, "NVFP4_set_threads");
    FIND(copy, take, "NVFP4_take_error");
    FIND(copy, status, "NVFP4_error_status");
    FIND(copy, message, "NVFP4_error_message");
    FIND(copy, retain_error, "NVFP4_error_retain");
    FIND(copy, release_error, "NVFP4_error_release");
    FIND(copy, empty_cache, "NVFP4_empty_cache");
}

/* The call of `copy` succeeds. */
#define DONE(copy, call)                                                                   \
    do {                                                                                   \
        checks++;                                                                          \
        if ((copy)->call != NVFP4_OK) {                                                    \
            failures++;                                                                    \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, (copy)->last_error());    \
        }                                                                                  \
    } while (0)

/* The call of `copy` gives back a handle of the other's, as such. */
#define FOREIGN(copy, call)                                                                \
    do {                                                                                   \
        checks++;                                                                          \
        if ((copy)->call != NVFP4_INVALID_HANDLE ||                                        \
            strstr((copy)->last_error(), "another copy") == NULL) {                        \
            failures++;                                                                    \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, (copy)->last_error());    \
        }                                                                                  \
    } while (0)

static void make(struct copy *copy)
{
    const int64_t shape[] = {16, 32};
    const int32_t prompt[] = {5, 6, 7};
    DONE(copy, load(path, strlen(path), NULL, NULL, &copy->model));
    DONE(copy, create(copy->model, NULL, &copy->session));
    DONE(copy, prefill(copy->session, prompt, 3, NULL));
    DONE(copy, empty(shape, 2, NVFP4_DTYPE_FLOAT32, NVFP4_DEVICE_CPU, 0, &copy->tensor));
    DONE(copy, dense(copy->tensor, &copy->weight));
    DONE(copy, cancel(&copy->ends));
    CHECK(copy->set_threads(-7) == NVFP4_INVALID_ARGUMENT);
    DONE(copy, take(&copy->error));
}

/* `copy` takes nothing of the other's. */
static void refuse(const struct copy *copy, const struct copy *other)
{
    const int32_t prompt[] = {8};
    NVFP4_Session *session = NULL;
    NVFP4_Weight *weight = NULL;
    float logits[1];
    size_t count = 0;
    int64_t n = 0, k = 0;
    uint64_t bytes = 0;
    FOREIGN(copy, vocab_size(other->model, &count));
    CHECK(copy->trigger(other->ends) == NVFP4_INVALID_HANDLE);
    FOREIGN(copy, release_cancel(other->ends));
    FOREIGN(copy, create(other->model, NULL, &session));
    FOREIGN(copy, retain_model(other->model));
    FOREIGN(copy, release_model(other->model));
    FOREIGN(copy, prefill(other->session, prompt, 1, NULL));
    FOREIGN(copy, logits(other->session, logits, 1, &count, NULL));
    FOREIGN(copy, retain_session(other->session));
    FOREIGN(copy, release_session(other->session));
    FOREIGN(copy, bytes(other->tensor, &bytes));
    FOREIGN(copy, dense(other->tensor, &weight));
    FOREIGN(copy, retain_tensor(other->tensor));
    FOREIGN(copy, release_tensor(other->tensor));
    FOREIGN(copy, size(other->weight, &n, &k, &bytes));
    FOREIGN(copy, retain_weight(other->weight));
    FOREIGN(copy, release_weight(other->weight));
    CHECK(copy->status(other->error) == NVFP4_INVALID_HANDLE && copy->message(other->error)[0] == '\0');
    FOREIGN(copy, retain_error(other->error));
    FOREIGN(copy, release_error(other->error));
    CHECK(session == NULL && weight == NULL && count == 0 && bytes == 0);
}

/* Objects of `copy` are intact. */
static void check_whole(const struct copy *copy, float *logits, size_t capacity, size_t *count)
{
    int64_t n = 0, k = 0;
    uint64_t bytes = 0;
    DONE(copy, logits(copy->session, logits, capacity, count, NULL));
    DONE(copy, bytes(copy->tensor, &bytes));
    CHECK(bytes == 16 * 32 * 4);
    DONE(copy, size(copy->weight, &n, &k, &bytes));
    CHECK(copy->status(copy->error) == NVFP4_INVALID_ARGUMENT && strstr(copy->message(copy->error), "-7") != NULL);
}

static void release(const struct copy *copy)
{
    DONE(copy, release_error(copy->error));
    DONE(copy, release_cancel(copy->ends));
    DONE(copy, release_weight(copy->weight));
    DONE(copy, release_tensor(copy->tensor));
    DONE(copy, release_session(copy->session));
    DONE(copy, release_model(copy->model));
    copy->empty_cache();
}

/* Another file with the same content. */
static void copy_file(const char *from, const char *to)
{
    static char bytes[1 << 16];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    CHECK(in != NULL && out != NULL);
    for (size_t length; in != NULL && out != NULL && (length = fread(bytes, 1, sizeof bytes, in)) > 0;)
        CHECK(fwrite(bytes, 1, length, out) == length);
    CHECK(in != NULL && fclose(in) == 0);
    CHECK(out != NULL && fclose(out) == 0);
}

int main(int argc, char **argv)
{
    static float here[4096], there[4096];
    char other[4096];
    size_t count = 0, number = 0;
    if (argc != 4)
        return 2;
    path = argv[2];
    snprintf(other, sizeof other, "%s/libcopy.so", argv[3]);
    copy_file(argv[1], other);
    open_copy(&ours, argv[1]);
    open_copy(&theirs, other);
    CHECK(remove(other) == 0);
    CHECK(memcmp(&ours.load, &theirs.load, sizeof ours.load) != 0);

    make(&ours);
    make(&theirs);
    refuse(&ours, &theirs);
    refuse(&theirs, &ours);
    check_whole(&ours, here, 4096, &count);
    check_whole(&theirs, there, 4096, &number);
    CHECK(count > 0 && count == number && memcmp(here, there, count * sizeof *here) == 0);

    /* A handle that is stale in its own copy is still foreign to the other. */
    release(&ours);
    refuse(&theirs, &ours);
    check_whole(&theirs, there, 4096, &number);
    release(&theirs);
    refuse(&ours, &theirs);
    printf("copies: %d checks, %d failed\n", checks, failures);
    return failures != 0;
}
