/* Pools: threads of this program work for models. pool MODEL_DIR, with a small random model. */
#define _DEFAULT_SOURCE
#include "check.h"
#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORKERS = 2, PROMPT = 12, NEW = 20, MOST = 512, STACK = 512 << 10 };

static const int32_t prompt[PROMPT] = {17, 201, 33, 90, 4, 256, 77, 140, 8, 19, 300, 61};
static const char *path;
static float expected[MOST];
static size_t vocabulary;

typedef struct {
    NVFP4_PoolTask run;
    void *task;
} Task;

/* A pool of threads, as a program may have one. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t come;
    pthread_t workers[WORKERS];
    Task tasks[64];
    size_t count, submitted, released;
    int refuses, keeps, over;
} Host;

static int32_t submit(void *user, NVFP4_PoolTask run, void *task)
{
    Host *host = user;
    pthread_mutex_lock(&host->lock);
    const int refused = host->refuses;
    host->submitted++;
    if (!refused && host->count < sizeof host->tasks / sizeof *host->tasks)
        host->tasks[host->count++] = (Task){run, task};
    pthread_cond_signal(&host->come);
    pthread_mutex_unlock(&host->lock);
    return refused;
}

static void released(void *user)
{
    ((Host *)user)->released++;
}

static void *work(void *user)
{
    Host *host = user;
    pthread_mutex_lock(&host->lock);
    while (!host->over) {
        if (host->count == 0 || host->keeps) {
            pthread_cond_wait(&host->come, &host->lock);
            continue;
        }
        const Task task = host->tasks[--host->count];
        pthread_mutex_unlock(&host->lock);
        task.run(task.task);
        pthread_mutex_lock(&host->lock);
    }
    pthread_mutex_unlock(&host->lock);
    return NULL;
}

static Host *start(void)
{
    Host *host = calloc(1, sizeof *host);
    pthread_attr_t attributes;
    pthread_mutex_init(&host->lock, NULL);
    pthread_cond_init(&host->come, NULL);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    for (int i = 0; i < WORKERS; i++)
        CHECK(pthread_create(&host->workers[i], &attributes, work, host) == 0);
    pthread_attr_destroy(&attributes);
    return host;
}

/* Ends the host's threads, and then runs the tasks that are left. */
static void end(Host *host)
{
    pthread_mutex_lock(&host->lock);
    host->over = 1;
    pthread_cond_broadcast(&host->come);
    pthread_mutex_unlock(&host->lock);
    for (int i = 0; i < WORKERS; i++)
        CHECK(pthread_join(host->workers[i], NULL) == 0);
    while (host->count > 0) {
        host->count--;
        host->tasks[host->count].run(host->tasks[host->count].task);
    }
    pthread_mutex_destroy(&host->lock);
    pthread_cond_destroy(&host->come);
    free(host);
}

static NVFP4_Pool *pool_of(Host *host)
{
    NVFP4_Pool *pool = NULL;
    OK(NVFP4_pool_create(WORKERS + 1, submit, host, released, &pool));
    return pool;
}

static NVFP4_Model *load(const NVFP4_Pool *pool)
{
    NVFP4_LoadOptions options;
    NVFP4_Model *model = NULL;
    OK(NVFP4_load_options_init(&options, sizeof options));
    options.threads = pool ? 0 : 1;
    options.pool = pool;
    OK(NVFP4_model_load(path, strlen(path), &options, NULL, &model));
    return model;
}

/* The logits after a prompt and some tokens. */
static void logits_of(const NVFP4_Model *model, float *logits)
{
    NVFP4_Session *session = NULL;
    NVFP4_GenerateOptions options;
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = NEW;
    options.ignore_model_stops = 1;
    options.seed = 0;
    OK(NVFP4_session_prefill(session, prompt, PROMPT, NULL));
    OK(NVFP4_session_generate(session, &options, NULL, NULL, NULL));
    OK(NVFP4_session_logits(session, logits, MOST, &vocabulary, NULL));
    OK(NVFP4_session_release(session));
}

static int is_expected(const NVFP4_Model *model)
{
    float logits[MOST];
    logits_of(model, logits);
    return memcmp(logits, expected, vocabulary * sizeof *logits) == 0;
}

static int threads_here(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int count = 0;
    while (tasks && readdir(tasks))
        count++;
    if (tasks)
        closedir(tasks);
    return count;
}

static void *generates(void *model)
{
    return (void *)(is_expected(model) ? "expected" : NULL);
}

/* The host's threads do the work of two models that calls of two threads use, and the library starts none. */
static void works(void)
{
    Host *host = start();
    const int before = threads_here();
    NVFP4_Pool *pool = pool_of(host);
    NVFP4_Model *model = load(pool), *other = load(pool);
    CHECK(is_expected(model) && threads_here() == before);
    pthread_t thread;
    void *second = NULL;
    CHECK(pthread_create(&thread, NULL, generates, other) == 0);
    for (int i = 0; i < 5; i++)
        CHECK(is_expected(model));
    CHECK(pthread_join(thread, &second) == 0 && second != NULL);
    CHECK(host->submitted > 0);

    /* The child of a fork has none of these threads. */
    const pid_t child = fork();
    if (child == 0)
        _exit(is_expected(model) ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    /* Whoever has it keeps it. */
    OK(NVFP4_pool_retain(pool));
    OK(NVFP4_pool_release(pool));
    OK(NVFP4_pool_release(pool));
    OK(NVFP4_model_release(other));
    CHECK(is_expected(model) && host->released == 0);
    OK(NVFP4_model_release(model));
    CHECK(host->released == 1);
    end(host);
}

/* Calls come to their ends when the host refuses tasks, and when it runs them after everything is gone. */
static void no_work(void)
{
    Host *host = start();
    NVFP4_Pool *pool = pool_of(host);
    NVFP4_Model *model = load(pool);
    OK(NVFP4_pool_release(pool));
    host->refuses = 1;
    CHECK(is_expected(model) && host->submitted > WORKERS);
    host->refuses = 0;
    host->keeps = 1;
    CHECK(is_expected(model) && is_expected(model) && host->count >= 1 && host->count <= WORKERS);
    OK(NVFP4_model_release(model));
    CHECK(host->released == 1);
    end(host);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    path = argv[1];
    NVFP4_Model *model = load(NULL);
    logits_of(model, expected);
    CHECK(vocabulary > 0 && vocabulary <= MOST);
    OK(NVFP4_model_release(model));
    NVFP4_empty_cache();
    works();
    no_work();
    return report("pool");
}
