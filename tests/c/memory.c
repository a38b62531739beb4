/* Models from memory: memory MODEL_DIR SCRATCH_DIR, a model whose embedding stays in its file on the CPU. Its files as bytes and behind a
 * function give the logits of the model on disk; reads that fail or come short are errors, while it is loaded and later; `release` is called
 * once for each file, whatever comes of the call. Weights are locked in memory, or refused by the limit of the process. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FILES = 2, VOCAB = 512, TOKENS = 6 };

/* A file with faults to plant, and the counts of its calls from all threads. */
typedef struct {
    unsigned char *bytes;
    size_t size;
    long reads, fails_at;
    int short_by, releases;
    pthread_mutex_t lock;
} Content;

static const char *names[FILES] = {"config.json", "model.safetensors"};
static Content contents[FILES];
static const int32_t tokens[TOKENS] = {1, 5, 9, 2, 7, 3};

static void read_file(const char *folder, const char *name, Content *to)
{
    char place[4096];
    snprintf(place, sizeof place, "%s/%s", folder, name);
    FILE *file = fopen(place, "rb");
    CHECK(file != NULL);
    if (file == NULL)
        exit(1);
    fseek(file, 0, SEEK_END);
    to->size = (size_t)ftell(file);
    rewind(file);
    to->bytes = malloc(to->size);
    CHECK(to->bytes != NULL && fread(to->bytes, 1, to->size, file) == to->size);
    fclose(file);
    pthread_mutex_init(&to->lock, NULL);
}

static int64_t on_read(void *user, uint64_t offset, void *out, size_t size)
{
    Content *content = user;
    pthread_mutex_lock(&content->lock);
    const long number = ++content->reads;
    const int fails = content->fails_at > 0 && number >= content->fails_at;
    pthread_mutex_unlock(&content->lock);
    CHECK(offset <= content->size && size <= content->size - offset && content->releases == 0);
    if (fails && content->short_by == 0)
        return -5;
    memcpy(out, content->bytes + offset, size);
    return (int64_t)size - (fails ? content->short_by : 0);
}

static void on_release(void *user)
{
    ((Content *)user)->releases++;
}

/* The files, read by a function or as bytes. */
static void prepare(NVFP4_ModelFile *files, int by_function)
{
    for (int i = 0; i < FILES; i++) {
        Content *content = &contents[i];
        content->reads = content->fails_at = 0;
        content->short_by = content->releases = 0;
        memset(&files[i], 0, sizeof files[i]);
        files[i].name = names[i];
        files[i].name_length = strlen(names[i]);
        files[i].data = by_function ? NULL : content->bytes;
        files[i].size = content->size;
        files[i].read = by_function ? on_read : NULL;
        files[i].release = on_release;
        files[i].user = content;
    }
}

/* Every file has been released so often. */
#define RELEASED(times)                                                                                      \
    do {                                                                                                     \
        for (int i_ = 0; i_ < FILES; i_++)                                                                   \
            CHECK(contents[i_].releases == (times));                                                         \
    } while (0)

static NVFP4_Status load(const NVFP4_ModelFile *files, NVFP4_Model **model)
{
    return NVFP4_model_load_files(files, FILES, sizeof *files, NULL, NULL, model);
}

static size_t logits_of(NVFP4_Model *model, float *logits)
{
    NVFP4_Session *session = NULL;
    size_t count = 0;
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens, TOKENS, NULL));
    OK(NVFP4_session_logits(session, logits, VOCAB, &count, NULL));
    OK(NVFP4_session_release(session));
    return count;
}

static void same_logits(const char *folder)
{
    static float want[VOCAB], got[VOCAB];
    NVFP4_Model *model = NULL;
    OK(NVFP4_model_load(folder, strlen(folder), NULL, NULL, &model));
    const size_t count = logits_of(model, want);
    CHECK(count > 0);
    OK(NVFP4_model_release(model));
    for (int by_function = 0; by_function < 2; by_function++) {
        NVFP4_ModelFile files[FILES];
        NVFP4_Session *session = NULL;
        prepare(files, by_function);
        OK(load(files, &model));
        /* The array itself is not used any more. */
        memset(files, 0xff, sizeof files);
        CHECK(logits_of(model, got) == count && memcmp(want, got, count * sizeof *got) == 0);
        /* The file with the embedding is in use. */
        CHECK(contents[1].releases == 0);
        /* A session keeps the model's weights and files. */
        OK(NVFP4_session_create(model, NULL, &session));
        OK(NVFP4_model_release(model));
        CHECK(contents[1].releases == 0);
        OK(NVFP4_session_prefill(session, tokens, TOKENS, NULL));
        OK(NVFP4_session_release(session));
        RELEASED(1);
        CHECK(!by_function || contents[1].reads > 0);
    }
}

static void failing_reads(void)
{
    NVFP4_ModelFile files[FILES];
    NVFP4_Model *model = NULL;
    prepare(files, 1);
    OK(load(files, &model));
    OK(NVFP4_model_release(model));
    const long reads[FILES] = {contents[0].reads, contents[1].reads};
    for (int i = 0; i < FILES; i++)
        for (long at = 1; at <= reads[i]; at += 1 + reads[i] / 8)
            for (int short_by = 0; short_by < 2; short_by++) {
                prepare(files, 1);
                contents[i].fails_at = at;
                contents[i].short_by = short_by;
                FAILS(NVFP4_IO, load(files, &model));
                SAYS(names[i]);
                SAYS(" bytes at offset ");
                SAYS(short_by ? "its read gave " : "its read returned -5");
                RELEASED(1);
            }
    /* Rows of the embedding are read while tokens run. */
    for (int short_by = 0; short_by < 2; short_by++) {
        NVFP4_Session *session = NULL;
        size_t length = 1;
        prepare(files, 1);
        OK(load(files, &model));
        OK(NVFP4_session_create(model, NULL, &session));
        contents[1].short_by = short_by;
        contents[1].fails_at = 1;
        FAILS(NVFP4_IO, NVFP4_session_prefill(session, tokens, TOKENS, NULL));
        SAYS(" of model.safetensors: its read ");
        OK(NVFP4_session_length(session, &length));
        CHECK(length == 0);
        contents[1].fails_at = 0;
        OK(NVFP4_session_prefill(session, tokens, TOKENS, NULL));
        OK(NVFP4_session_release(session));
        OK(NVFP4_model_release(model));
        RELEASED(1);
    }
}

static int32_t stop(void *user, uint64_t done, uint64_t total)
{
    (void)user;
    (void)done;
    (void)total;
    return 1;
}

/* Calls that fail release what they were given too. */
static void refusals(void)
{
    const size_t size = sizeof(NVFP4_ModelFile);
    NVFP4_ModelFile files[FILES];
    NVFP4_Model *model = NULL;
    NVFP4_LoadOptions options;
    NVFP4_CallOptions call;
    OK(NVFP4_load_options_init(&options, sizeof options));
    OK(NVFP4_call_options_init(&call, sizeof call));

    prepare(files, 0);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load_files(files, FILES, size, NULL, NULL, NULL));
    RELEASED(1);
    prepare(files, 0);
    options.activations = 9;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load_files(files, FILES, size, &options, NULL, &model));
    RELEASED(1);
    options.activations = 0;
    prepare(files, 0);
    call.progress = stop;
    options.call = &call;
    FAILS(NVFP4_CANCELLED, NVFP4_model_load_files(files, FILES, size, &options, NULL, &model));
    RELEASED(1);
    prepare(files, 0);
    files[1].name = names[0];
    files[1].name_length = strlen(names[0]);
    FAILS(NVFP4_INVALID_ARGUMENT, load(files, &model));
    SAYS("config.json is given twice");
    RELEASED(1);
    prepare(files, 0);
    files[0].name = "../config.json";
    files[0].name_length = strlen(files[0].name);
    FAILS(NVFP4_INVALID_ARGUMENT, load(files, &model));
    SAYS("'../config.json' is not the name of a file");
    RELEASED(1);
    prepare(files, 0);
    files[1].name = "\xff";
    files[1].name_length = 1;
    FAILS(NVFP4_INVALID_ARGUMENT, load(files, &model));
    SAYS("files[1]: name is not valid UTF-8");
    RELEASED(1);
    prepare(files, 0);
    files[1].data = NULL;
    FAILS(NVFP4_INVALID_ARGUMENT, load(files, &model));
    SAYS("files[1]: model.safetensors has neither data nor read");
    RELEASED(1);
    prepare(files, 0);
    files[1].read = on_read;
    FAILS(NVFP4_INVALID_ARGUMENT, load(files, &model));
    SAYS("files[1]: model.safetensors has both data and read");
    RELEASED(1);
    prepare(files, 0);
    files[1].size = UINT64_MAX;
    FAILS(NVFP4_INVALID_ARGUMENT, load(files, &model));
    SAYS("files[1]: model.safetensors cannot have 18446744073709551615 bytes in memory");
    RELEASED(1);
    /* Contents that are wrong. */
    prepare(files, 0);
    files[1].size /= 2;
    FAILS(NVFP4_CORRUPT_FILE, load(files, &model));
    SAYS("model.safetensors: ");
    RELEASED(1);
    prepare(files, 0);
    files[0].size = 0;
    FAILS(NVFP4_CORRUPT_FILE, load(files, &model));
    SAYS("config.json: ");
    RELEASED(1);
    prepare(files, 0);
    FAILS(NVFP4_NOT_FOUND, NVFP4_model_load_files(files, 1, size, NULL, NULL, &model));
    SAYS("the model of the given files holds no model");
    CHECK(contents[0].releases == 1 && contents[1].releases == 0);

    /* Without an array there is nothing to release. */
    prepare(files, 0);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load_files(NULL, FILES, size, NULL, NULL, &model));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load_files(files, 0, size, NULL, NULL, &model));
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_model_load_files(files, FILES, size - 8, NULL, NULL, &model));
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_model_load_files(files, FILES, 0, NULL, NULL, &model));
    RELEASED(0);
    /* A later version of the struct with a field that this one does not know. */
    struct {
        NVFP4_ModelFile known;
        uint64_t added;
    } later[FILES];
    for (int i = 0; i < FILES; i++) {
        later[i].known = files[i];
        later[i].added = 0;
    }
    OK(NVFP4_model_load_files(&later[0].known, FILES, sizeof later[0], NULL, NULL, &model));
    OK(NVFP4_model_release(model));
    RELEASED(1);
    prepare(files, 0);
    later[1].added = 1;
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_model_load_files(&later[0].known, FILES, sizeof later[0], NULL, NULL, &model));
    RELEASED(1);
}

/* A session that was saved with the model on disk goes on with the model from memory. */
static void restores(const char *folder, const char *scratch)
{
    char place[4096];
    NVFP4_ModelFile files[FILES];
    NVFP4_Model *disk = NULL, *model = NULL;
    NVFP4_Session *session = NULL, *restored = NULL;
    size_t length = 0;
    snprintf(place, sizeof place, "%s/from-disk.session", scratch);
    OK(NVFP4_model_load(folder, strlen(folder), NULL, NULL, &disk));
    OK(NVFP4_session_create(disk, NULL, &session));
    OK(NVFP4_session_prefill(session, tokens, TOKENS, NULL));
    OK(NVFP4_session_save(session, place, strlen(place), NULL));
    prepare(files, 1);
    OK(load(files, &model));
    OK(NVFP4_session_restore(model, place, strlen(place), NULL, &restored));
    OK(NVFP4_session_length(restored, &length));
    CHECK(length == TOKENS);
    OK(NVFP4_session_release(session));
    OK(NVFP4_session_release(restored));
    OK(NVFP4_model_release(model));
    OK(NVFP4_model_release(disk));
    RELEASED(1);
}

static void *runs(void *model)
{
    float logits[VOCAB];
    for (int i = 0; i < 5; i++)
        CHECK(logits_of(model, logits) > 0);
    return NULL;
}

static void threads(void)
{
    NVFP4_ModelFile files[FILES];
    NVFP4_Model *model = NULL;
    pthread_t running[4];
    prepare(files, 1);
    OK(load(files, &model));
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&running[i], NULL, runs, model) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(running[i], NULL);
    OK(NVFP4_model_release(model));
    RELEASED(1);
}

/* kB of locked memory of this process. */
static long locked_kb(void)
{
    char line[256];
    long kb = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL)
        if (sscanf(line, "VmLck: %ld kB", &kb) == 1)
            break;
    if (status != NULL)
        fclose(status);
    return kb;
}

static NVFP4_Status load_locked(NVFP4_Model **model)
{
    NVFP4_ModelFile files[FILES];
    NVFP4_LoadOptions options;
    NVFP4_Status status = NVFP4_load_options_init(&options, sizeof options);
    if (status != NVFP4_OK)
        return status;
    options.threads = 1;
    options.mlock = 1;
    prepare(files, 0);
    return NVFP4_model_load_files(files, FILES, sizeof *files, &options, NULL, model);
}

/* In a child without privileges, for which the limit holds. */
static int refused(void)
{
    const struct rlimit little = {8192, 8192};
    NVFP4_Model *model = NULL;
    if (setrlimit(RLIMIT_MEMLOCK, &little) != 0 || (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0))
        return 2;
    FAILS(NVFP4_OUT_OF_MEMORY, load_locked(&model));
    SAYS(" bytes of weights cannot be locked in memory");
    SAYS("locked memory of this process is limited to 8192 bytes");
    SAYS("ulimit -l");
    CHECK(locked_kb() == 0);
    RELEASED(1);
    return failures != 0;
}

static void locks(void)
{
    NVFP4_Model *first = NULL, *second = NULL;
    NVFP4_Session *session = NULL;
    NVFP4_LoadOptions options;
    int status = 0;
    CHECK(locked_kb() == 0);
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        const int code = refused();
        fflush(stdout);
        _exit(code);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (load_locked(&first) != NVFP4_OK) {
        /* The limit of this machine. */
        SAYS("ulimit -l");
        printf("SKIPPED locked weights: %s\n", NVFP4_last_error());
        return;
    }
    uint64_t weights = 0, peak = 0;
    OK(NVFP4_memory_stats(NVFP4_MEMORY_WEIGHTS, &weights, &peak));
    const long one = locked_kb();
    CHECK((uint64_t)one * 1024 >= weights && weights > 0);
    OK(load_locked(&second));
    CHECK(locked_kb() > one);
    OK(NVFP4_session_create(first, NULL, &session));
    OK(NVFP4_model_release(first));
    CHECK(locked_kb() > one);
    OK(NVFP4_session_prefill(session, tokens, TOKENS, NULL));
    OK(NVFP4_session_release(session));
    CHECK(locked_kb() >= one / 2 && locked_kb() <= one + 256);
    OK(NVFP4_model_release(second));
    CHECK(locked_kb() == 0);
    OK(NVFP4_load_options_init(&options, sizeof options));
    options.mlock = 2;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load("/nowhere", 8, &options, NULL, &first));
    SAYS("mlock");
    options.mlock = 0;
    options.packed = 3;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load("/nowhere", 8, &options, NULL, &first));
    SAYS("packed");
    options.packed = NVFP4_PACKED_REQUIRED;
    NVFP4_ModelFile files[FILES];
    prepare(files, 0);
    FAILS(NVFP4_UNSUPPORTED, NVFP4_model_load_files(files, FILES, sizeof *files, &options, NULL, &first));
    SAYS("files that are given in memory are not mapped");
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    for (int i = 0; i < FILES; i++)
        read_file(argv[1], names[i], &contents[i]);
    same_logits(argv[1]);
    failing_reads();
    refusals();
    restores(argv[1], argv[2]);
    threads();
    locks();
    for (int i = 0; i < FILES; i++)
        free(contents[i].bytes);
    return report("memory");
}
