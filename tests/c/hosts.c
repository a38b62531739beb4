/* Careless hosts: hosts MODEL_DIR SCRATCH_DIR. Threads are cancelled in a call, and end in a callback; a message outlives no thread; files
 * grow beyond the process's limit; FIFOs and devices stand where files should; files that are replaced keep what they have. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *path, *scratch;
static NVFP4_Model *model;
static NVFP4_Session *session;
static atomic_int in_callback, cancelled;

static void pause_for(long microseconds)
{
    struct timespec wait = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&wait, NULL);
}

static void *load_for_ever(void *user)
{
    for (;;) {
        NVFP4_Model *own = NULL;
        if (NVFP4_model_load(path, strlen(path), NULL, NULL, &own) == NVFP4_OK)
            NVFP4_model_release(own);
    }
    return user;
}

static void *prefill_for_ever(void *user)
{
    static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8};
    for (;;) {
        NVFP4_session_prefill(session, tokens, 8, NULL);
        NVFP4_session_reset(session);
        pthread_testcancel();
    }
    return user;
}

/* A thread that is cancelled in a call ends after the call: its locks are released, and the objects that it used stay usable. */
static void cancelled_in_calls(void)
{
    void *(*const works[])(void *) = {load_for_ever, prefill_for_ever};
    for (int i = 0; i < 24; i++) {
        pthread_t thread;
        void *end = NULL;
        CHECK(pthread_create(&thread, NULL, works[i % 2], NULL) == 0);
        pause_for(1000 + i * 700);
        CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &end) == 0 && end == PTHREAD_CANCELED);
    }
    const int32_t token = 3;
    OK(NVFP4_session_reset(session));
    OK(NVFP4_session_prefill(session, &token, 1, NULL));
    OK(NVFP4_session_reset(session));
}

static int32_t wait_for_cancel(void *user, const NVFP4_TokenEvent *event)
{
    int state = -1;
    (void)user;
    (void)event;
    atomic_store(&in_callback, 1);
    while (!atomic_load(&cancelled))
        pause_for(100);
    /* A cancellation point, which is none in a callback. */
    pthread_testcancel();
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state) == 0 && state == PTHREAD_CANCEL_DISABLE);
    return 1;
}

static void *generate_once(void *returned)
{
    NVFP4_GenerateOptions options;
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    int state = -1;
    OK(NVFP4_generate_options_init(&options, sizeof options));
    OK(NVFP4_session_generate(session, &options, wait_for_cancel, NULL, &result));
    CHECK(result.finish == NVFP4_FINISH_CANCELLED && result.generated_tokens == 1);
    *(int *)returned = 1;
    /* The thread can be cancelled again, which it now is. */
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0 && state == PTHREAD_CANCEL_ENABLE);
    pthread_testcancel();
    *(int *)returned = 2;
    return NULL;
}

static void cancelled_in_a_callback(void)
{
    pthread_t thread;
    int returned = 0;
    void *end = NULL;
    const int32_t token = 3;
    OK(NVFP4_session_prefill(session, &token, 1, NULL));
    CHECK(pthread_create(&thread, NULL, generate_once, &returned) == 0);
    while (!atomic_load(&in_callback))
        pause_for(100);
    CHECK(pthread_cancel(thread) == 0);
    atomic_store(&cancelled, 1);
    CHECK(pthread_join(thread, &end) == 0 && end == PTHREAD_CANCELED && returned == 1);
    size_t length = 0;
    OK(NVFP4_session_length(session, &length));
    CHECK(length == 2);
    OK(NVFP4_session_reset(session));
}

/* A thread that has its cancelling disabled finds it so. */
static void disabled_stays(void)
{
    int state = -1;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL) == 0);
    OK(NVFP4_session_reset(session));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_decode(session, -1, NULL));
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0 && state == PTHREAD_CANCEL_DISABLE);
}

static int32_t leave_progress(void *user, uint64_t done, uint64_t total)
{
    (void)user, (void)done, (void)total;
    pthread_exit(NULL);
}

static int32_t leave_token(void *user, const NVFP4_TokenEvent *event)
{
    (void)user, (void)event;
    pthread_exit(NULL);
}

static void *end_in_progress(void *user)
{
    NVFP4_CallOptions call;
    const int32_t token = 3;
    NVFP4_call_options_init(&call, sizeof call);
    call.progress = leave_progress;
    NVFP4_session_prefill(session, &token, 1, &call);
    return user;
}

static void *end_in_token(void *user)
{
    NVFP4_GenerateOptions options;
    const int32_t token = 3;
    NVFP4_generate_options_init(&options, sizeof options);
    NVFP4_session_prefill(session, &token, 1, NULL);
    NVFP4_session_generate(session, &options, leave_token, NULL, NULL);
    return user;
}

/* A callback that ends its thread would leave an inconsistent state. The process ends, and names the callback's function. */
static void leaving_callbacks(void)
{
    static const struct {
        void *(*work)(void *);
        const char *function;
    } ways[] = {{end_in_progress, "NVFP4_session_prefill"}, {end_in_token, "NVFP4_session_generate"}};
    for (int i = 0; i < 2; i++) {
        int ends[2], status = 0;
        char said[8192] = {0};
        size_t length = 0;
        fflush(stdout);
        CHECK(pipe(ends) == 0);
        pid_t child = fork();
        if (child == 0) {
            pthread_t thread;
            NVFP4_Model *own = NULL;
            setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
            dup2(ends[1], STDERR_FILENO);
            if (NVFP4_model_load(path, strlen(path), NULL, NULL, &own) || NVFP4_session_create(own, NULL, &session))
                _exit(3);
            pthread_create(&thread, NULL, ways[i].work, NULL);
            pthread_join(thread, NULL);
            _exit(4);
        }
        close(ends[1]);
        for (ssize_t n; (n = read(ends[0], said + length, sizeof said - 1 - length)) > 0;)
            length += (size_t)n;
        close(ends[0]);
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
        CHECK(strstr(said, ways[i].function) != NULL && strstr(said, "did not return") != NULL);
        CHECK(strstr(said, "pthread_exit") != NULL && strchr(said, '\n') != NULL);
    }
}

/* A destructor of the host that runs as its thread ends may call the library, whose own destructor may have run before. */
static pthread_key_t late_key;

static void call_late(void *round)
{
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads(1000000));
    SAYS("1000000");
    if (--*(int *)round > 0)
        pthread_setspecific(late_key, round);
}

static void *end_late(void *round)
{
    pthread_setspecific(late_key, round);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads(-7));
    return NULL;
}

static void late_destructors(void)
{
    CHECK(pthread_key_create(&late_key, call_late) == 0);
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        int rounds = 3;
        CHECK(pthread_create(&thread, NULL, end_late, &rounds) == 0 && pthread_join(thread, NULL) == 0 && rounds == 0);
    }
    CHECK(pthread_key_delete(late_key) == 0);
}

static const char *in_scratch(const char *name)
{
    static char buffers[4][512];
    static int next;
    char *out = buffers[next++ % 4];
    snprintf(out, sizeof buffers[0], "%s/%s", scratch, name);
    return out;
}

static NVFP4_Status save(const char *to)
{
    return NVFP4_session_save(session, to, strlen(to), NULL);
}

static NVFP4_Status restore(const char *from)
{
    NVFP4_Session *restored = NULL;
    NVFP4_Status status = NVFP4_session_restore(model, from, strlen(from), NULL, &restored);
    NVFP4_session_release(restored);
    return status;
}

static void content(const char *of, const char *text)
{
    FILE *file = fopen(of, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

/* The process's limit on the size of files is an error, not its end; a signal of its own is left to it. */
static void limit_on_files(void)
{
    struct rlimit before, small;
    sigset_t set, pending, mask;
    const char *place = in_scratch("limited");
    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small = (struct rlimit){64, before.rlim_max};
    CHECK(sigemptyset(&set) == 0 && sigaddset(&set, SIGXFSZ) == 0);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    FAILS(NVFP4_IO, save(place));
    SAYS("File too large");
    CHECK(access(place, F_OK) != 0);
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0 && sigismember(&mask, SIGXFSZ) == 0);
    CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
    FAILS(NVFP4_IO, save(place));
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 0);
    CHECK(raise(SIGXFSZ) == 0);
    FAILS(NVFP4_IO, save(place));
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1);
    int number = 0;
    CHECK(sigwait(&set, &number) == 0 && number == SIGXFSZ);
    CHECK(pthread_sigmask(SIG_UNBLOCK, &set, NULL) == 0);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    OK(save(place));
    OK(restore(place));
    CHECK(unlink(place) == 0);
}

/* FIFOs and devices are refused at once, to read from and to write to. Nobody has the other end of these FIFOs. */
static void no_files(void)
{
    static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full"};
    const char *fifo = in_scratch("fifo"), *folder = in_scratch("folder");
    struct stat there;
    char inside[600];
    NVFP4_Model *none = NULL;
    CHECK(mkfifo(fifo, 0600) == 0 && mkdir(folder, 0700) == 0);
    alarm(60);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load(fifo, strlen(fifo), NULL, NULL, &none));
    SAYS("it is a FIFO or pipe, not a regular file");
    FAILS(NVFP4_INVALID_ARGUMENT, restore(fifo));
    SAYS("it is a FIFO or pipe, not a regular file");
    FAILS(NVFP4_INVALID_ARGUMENT, save(fifo));
    SAYS("no file replaces");
    CHECK(stat(fifo, &there) == 0 && S_ISFIFO(there.st_mode));
    for (int i = 0; i < 3; i++) {
        FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_load(devices[i], strlen(devices[i]), NULL, NULL, &none));
        SAYS("it is a device, not a regular file");
        FAILS(NVFP4_INVALID_ARGUMENT, restore(devices[i]));
        SAYS("it is a device, not a regular file");
    }
    /* A device of the test's own, as only some users may make one: were it replaced, the machine's would be lost. */
    const char *device = in_scratch("device");
    if (mknod(device, S_IFCHR | 0666, makedev(1, 3)) == 0) {
        FAILS(NVFP4_INVALID_ARGUMENT, save(device));
        SAYS("no file replaces");
        CHECK(stat(device, &there) == 0 && S_ISCHR(there.st_mode) && unlink(device) == 0);
    } else
        printf("SKIPPED writing to a device: making one is refused\n");
    /* Each file of a model's directory. */
    static const char *const names[] = {"config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
                                        "generation_config.json"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        for (size_t k = 0; k < 4; k++) {
            static const char *const copied[] = {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"};
            char from[600];
            snprintf(from, sizeof from, "%s/%s", path, copied[k]);
            snprintf(inside, sizeof inside, "%s/%s", folder, copied[k]);
            unlink(inside);
            if (strcmp(copied[k], names[i]) != 0 && !(i == 1 && k == 1) && access(from, F_OK) == 0)
                CHECK(symlink(from, inside) == 0);
        }
        snprintf(inside, sizeof inside, "%s/%s", folder, names[i]);
        CHECK(mkfifo(inside, 0600) == 0);
        const char *opened = i == 1 ? inside : folder;
        NVFP4_Status status = NVFP4_model_load(opened, strlen(opened), NULL, NULL, &none);
        CHECK(status == NVFP4_INVALID_ARGUMENT && strstr(NVFP4_last_error(), names[i]) != NULL);
        SAYS("it is a FIFO or pipe, not a regular file");
        CHECK(unlink(inside) == 0);
    }
    alarm(0);
}

static mode_t mode_of(const char *file)
{
    struct stat there;
    CHECK(lstat(file, &there) == 0);
    return there.st_mode;
}

/* A replaced file keeps its mode, its owner, and the link that leads to it. A new one has the process's defaults. */
static void replaced(void)
{
    const char *old = in_scratch("old"), *link = in_scratch("link"), *far = in_scratch("far"), *fresh = in_scratch("fresh");
    struct stat there;
    mode_t before = umask(022);
    OK(save(fresh));
    CHECK(mode_of(fresh) == (S_IFREG | 0644) && unlink(fresh) == 0);
    umask(077);
    OK(save(fresh));
    CHECK(mode_of(fresh) == (S_IFREG | 0600));
    umask(022);
    static const mode_t modes[] = {0600, 0640, 0664, 0444};
    for (int i = 0; i < 4; i++) {
        content(old, "old");
        CHECK(chmod(old, modes[i]) == 0);
        if (geteuid() == 0)
            CHECK(chown(old, 1234, 4321) == 0);
        OK(save(old));
        CHECK(mode_of(old) == (S_IFREG | modes[i]) && stat(old, &there) == 0 && there.st_size > 3);
        CHECK(geteuid() != 0 || (there.st_uid == 1234 && there.st_gid == 4321));
        OK(restore(old));
        CHECK(unlink(old) == 0);
    }
    /* Through one link and another, to a file and to none, from a folder to another. */
    char folder[512];
    snprintf(folder, sizeof folder, "%s/links", scratch);
    CHECK(mkdir(folder, 0700) == 0);
    char second[600];
    snprintf(second, sizeof second, "%s/second", folder);
    CHECK(symlink("links/second", link) == 0 && symlink("../far", second) == 0);
    for (int i = 0; i < 2; i++) {
        OK(save(link));
        CHECK(S_ISLNK(mode_of(link)) && S_ISLNK(mode_of(second)));
        CHECK(mode_of(far) == (S_IFREG | (i == 0 ? 0644 : 0600)) && chmod(far, 0600) == 0);
        OK(restore(far));
    }
    CHECK(unlink(second) == 0 && symlink("second", second) == 0);
    FAILS(NVFP4_IO, save(link));
    CHECK(S_ISLNK(mode_of(link)));
    umask(before);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: hosts MODEL_DIR SCRATCH_DIR\n");
        return 2;
    }
    char own[400];
    path = realpath(argv[1], NULL);
    snprintf(own, sizeof own, "%s/hosts-%ld", argv[2], (long)getpid());
    CHECK(path != NULL && mkdir(own, 0700) == 0);
    scratch = own;
    leaving_callbacks();
    OK(NVFP4_model_load(path, strlen(path), NULL, NULL, &model));
    OK(NVFP4_session_create(model, NULL, &session));
    cancelled_in_calls();
    cancelled_in_a_callback();
    disabled_stays();
    late_destructors();
    const int32_t tokens[] = {1, 2, 3, 4};
    OK(NVFP4_session_prefill(session, tokens, 4, NULL));
    limit_on_files();
    no_files();
    replaced();
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
    free((void *)(uintptr_t)path);
    return report("hosts");
}
