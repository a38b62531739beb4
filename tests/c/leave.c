/* The end of a process in the middle of everything: leave MODEL_DIR. While a thread generates without end, or loads a model again and
 * again, main returns, or main or another thread calls exit, at different moments. The process ends at once, with its own code. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TIMES = 50, CODE = 41, SECONDS = 20, WAYS = 3, WORK = 2 };

static const char *path;
static NVFP4_Session *session;
static atomic_int begun;

static int32_t on_token(void *user, const NVFP4_TokenEvent *event)
{
    (void)user;
    (void)event;
    atomic_fetch_add(&begun, 1);
    return 0;
}

static void *generate(void *user)
{
    NVFP4_GenerateOptions options;
    if (NVFP4_generate_options_init(&options, sizeof options) != NVFP4_OK)
        abort();
    options.max_tokens = 1000000000;
    options.ignore_model_stops = 1;
    for (;;)
        if (NVFP4_session_generate(session, &options, on_token, NULL, NULL) != NVFP4_OK ||
            NVFP4_session_truncate(session, 1) != NVFP4_OK)
            abort();
    return user;
}

static NVFP4_Model *load(void)
{
    NVFP4_Model *model = NULL;
    NVFP4_LoadOptions options;
    if (NVFP4_load_options_init(&options, sizeof options) != NVFP4_OK)
        abort();
    options.threads = 2;
    if (NVFP4_model_load(path, strlen(path), &options, NULL, &model) != NVFP4_OK)
        abort();
    return model;
}

static void *load_again(void *user)
{
    for (;;) {
        atomic_fetch_add(&begun, 1);
        if (NVFP4_model_release(load()) != NVFP4_OK)
            abort();
    }
    return user;
}

static void *leave(void *user)
{
    (void)user;
    exit(CODE);
}

/* The child: its way to leave, its concurrent work, and the microseconds until then. */
static int child(int way, int work, int wait)
{
    pthread_t worker, leaving;
    alarm(SECONDS);
    if (work == 0) {
        const int32_t prompt[] = {5};
        NVFP4_Model *model = load();
        if (NVFP4_session_create(model, NULL, &session) != NVFP4_OK || NVFP4_session_prefill(session, prompt, 1, NULL) != NVFP4_OK)
            abort();
    }
    if (pthread_create(&worker, NULL, work == 0 ? generate : load_again, NULL) != 0)
        abort();
    while (atomic_load(&begun) < 2)
        usleep(50);
    usleep((useconds_t)wait);
    if (way == 1)
        exit(CODE);
    if (way == 2) {
        if (pthread_create(&leaving, NULL, leave, NULL) != 0)
            abort();
        pause();
    }
    return CODE;
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    path = argv[1];
    const char *preloaded = getenv("LD_PRELOAD");
    const int simulated = preloaded != NULL && strstr(preloaded, "vgpreload") != NULL;
    const double start = now();
    for (int i = 0; i < TIMES; i += simulated ? 19 : 1) {
        const int way = i % WAYS, work = i / WAYS % WORK, wait = i * 997 % 7919;
        fflush(stdout);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0)
            return child(way, work, wait);
        int status = -1;
        CHECK(waitpid(pid, &status, 0) == pid);
        checks++;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != CODE) {
            failures++;
            printf("way %d, work %d, after %d us: %s %d\n", way, work, wait, WIFSIGNALED(status) ? "signal" : "exit",
                   WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        }
    }
    printf("the processes ended in %.1f s\n", now() - start);
    return report("leave");
}
