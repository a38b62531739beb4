/* Children of a process that has used the library: fork MODEL_DIR. A child works with models of its own and with those of its
 * parent, and gets a status for what a thread of its parent was using; it never waits for threads that it does not have. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROMPT = 40, MOST = 4096, FORKS = 8 };

static const char *path;
static NVFP4_Model *model;
static NVFP4_Session *parents, *generating;
static int32_t prompt[PROMPT];
static float expected[MOST];
static size_t vocabulary;
static atomic_int tokens_made, stop, hold, held;
static NVFP4_Queue *queue;
static NVFP4_Session *queued;
static uint64_t generation;

static NVFP4_Model *load(void)
{
    NVFP4_Model *loaded = NULL;
    NVFP4_LoadOptions options;
    OK(NVFP4_load_options_init(&options, sizeof options));
    options.threads = 2;
    OK(NVFP4_model_load(path, strlen(path), &options, NULL, &loaded));
    return loaded;
}

/* Prefills a new session; its logits are those of the parent. */
static void prefill(NVFP4_Model *with)
{
    static float logits[MOST];
    NVFP4_Session *session = NULL;
    size_t count = 0;
    OK(NVFP4_session_create(with, NULL, &session));
    OK(NVFP4_session_prefill(session, prompt, PROMPT, NULL));
    OK(NVFP4_session_logits(session, logits, MOST, &count, NULL));
    CHECK(count == vocabulary && memcmp(logits, expected, count * sizeof *logits) == 0);
    OK(NVFP4_session_release(session));
}

static void with_its_own_model(void)
{
    NVFP4_Model *own = load();
    prefill(own);
    OK(NVFP4_model_release(own));
}

static void with_its_parents_model(void)
{
    prefill(model);
    OK(NVFP4_session_decode(parents, prompt[0], NULL));
    size_t length = 0;
    OK(NVFP4_session_length(parents, &length));
    CHECK(length == PROMPT + 1);
    OK(NVFP4_session_release(parents));
}

static void beside_what_was_in_use(void)
{
    size_t length = 0;
    FAILS(NVFP4_BUSY, NVFP4_session_decode(generating, prompt[0], NULL));
    SAYS("forked");
    FAILS(NVFP4_BUSY, NVFP4_session_length(generating, &length));
    prefill(model);
    with_its_own_model();
}

/* The threads of a queue are not here. */
static void beside_a_queue(void)
{
    NVFP4_QueueEvent event;
    size_t count = 0;
    uint64_t number = 0;
    FAILS(NVFP4_BUSY, NVFP4_queue_wait(queue, &event, sizeof event, 1, -1, &count));
    SAYS("forked");
    FAILS(NVFP4_BUSY, NVFP4_queue_cancel(queue, generation));
    FAILS(NVFP4_BUSY, NVFP4_queue_generate(queue, queued, prompt, 1, NULL, NULL, &number));
    FAILS(NVFP4_BUSY, NVFP4_session_truncate(queued, 0));
    OK(NVFP4_session_release(queued));
    OK(NVFP4_queue_release(queue));
    NVFP4_Model *own = load();
    NVFP4_Session *session = NULL;
    NVFP4_GenerateOptions options;
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = 3;
    OK(NVFP4_queue_create(own, NULL, &queue));
    OK(NVFP4_session_create(own, NULL, &session));
    OK(NVFP4_queue_generate(queue, session, prompt, PROMPT, &options, NULL, &number));
    do
        OK(NVFP4_queue_wait(queue, &event, sizeof event, 1, -1, &count));
    while (event.kind != NVFP4_EVENT_END);
    CHECK(event.status == NVFP4_OK && event.generation == number);
    OK(NVFP4_session_release(session));
    OK(NVFP4_queue_release(queue));
    OK(NVFP4_model_release(own));
}

static void nothing_but_errors(void)
{
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_set_threads(-3));
}

/* Runs `child` in a child, which has a minute. */
static void forked(void (*child)(void))
{
    fflush(stdout);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(60);
        failures = 0;
        child();
        fflush(stdout);
        _exit(failures != 0);
    }
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Forks while a queue generates, which goes on in the parent. */
static void queues(void)
{
    NVFP4_SessionOptions endless;
    NVFP4_GenerateOptions options;
    NVFP4_QueueEvent event;
    size_t count = 0;
    OK(NVFP4_session_options_init(&endless, sizeof endless));
    endless.eviction = NVFP4_EVICTION_DROP_OLDEST;
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.ignore_model_stops = 1;
    options.max_tokens = 100000000;
    OK(NVFP4_queue_create(model, NULL, &queue));
    OK(NVFP4_session_create(model, &endless, &queued));
    OK(NVFP4_queue_generate(queue, queued, prompt, 2, &options, NULL, &generation));
    OK(NVFP4_queue_wait(queue, &event, sizeof event, 1, -1, &count));
    forked(beside_a_queue);
    OK(NVFP4_queue_cancel(queue, generation));
    do
        OK(NVFP4_queue_wait(queue, &event, sizeof event, 1, -1, &count));
    while (event.kind != NVFP4_EVENT_END);
    CHECK(event.finish == NVFP4_FINISH_CANCELLED);
    OK(NVFP4_session_release(queued));
    OK(NVFP4_queue_release(queue));
}

static int32_t on_token(void *user, const NVFP4_TokenEvent *event)
{
    (void)user;
    (void)event;
    atomic_fetch_add(&tokens_made, 1);
    /* The generation stays in this call while the process forks. */
    while (atomic_load(&hold)) {
        atomic_store(&held, 1);
        usleep(100);
    }
    atomic_store(&held, 0);
    return atomic_load(&stop);
}

static void *generate(void *user)
{
    (void)user;
    NVFP4_GenerateOptions options;
    if (NVFP4_generate_options_init(&options, sizeof options) != NVFP4_OK)
        return NULL;
    options.ignore_model_stops = 1;
    options.max_tokens = 1000000;
    while (!atomic_load(&stop)) {
        if (NVFP4_session_generate(generating, &options, on_token, NULL, NULL) != NVFP4_OK ||
            NVFP4_session_truncate(generating, 1) != NVFP4_OK)
            return NULL;
    }
    return generating;
}

/* Threads of the host get the signals of the process: those of the library block them all. */
static void *raise_signals(void *user)
{
    sigset_t set;
    (void)user;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    for (int i = 0; i < 2000; i++)
        kill(getpid(), SIGUSR1);
    return NULL;
}

static pthread_t host;
static atomic_int elsewhere, taken;

static void on_signal(int number)
{
    (void)number;
    atomic_fetch_add(&taken, 1);
    if (!pthread_equal(pthread_self(), host))
        atomic_fetch_add(&elsewhere, 1);
}

static void signals(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    host = pthread_self();
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    pthread_t raising;
    CHECK(pthread_create(&raising, NULL, raise_signals, NULL) == 0);
    for (int i = 0; i < 20; i++)
        prefill(model);
    with_its_own_model();
    CHECK(pthread_join(raising, NULL) == 0);
    CHECK(atomic_load(&taken) > 0 && atomic_load(&elsewhere) == 0);
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    path = argv[1];
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = 3 + 7 * i;
    model = load();
    OK(NVFP4_session_create(model, NULL, &parents));
    OK(NVFP4_session_prefill(parents, prompt, PROMPT, NULL));
    OK(NVFP4_session_logits(parents, expected, MOST, &vocabulary, NULL));

    forked(with_its_own_model);
    forked(with_its_parents_model);
    prefill(model);

    OK(NVFP4_session_create(model, NULL, &generating));
    OK(NVFP4_session_prefill(generating, prompt, 1, NULL));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, generate, NULL) == 0);
    for (int i = 0; i < FORKS; i++) {
        /* While the thread is within a generation. */
        int made = atomic_load(&tokens_made);
        while (atomic_load(&tokens_made) < made + 2)
            usleep(100);
        if (i % 2 != 0) {
            forked(nothing_but_errors);
            continue;
        }
        /* Between two generations the session is free, so the process forks within a callback. */
        atomic_store(&hold, 1);
        while (!atomic_load(&held))
            usleep(100);
        forked(beside_what_was_in_use);
        atomic_store(&hold, 0);
    }
    atomic_store(&stop, 1);
    void *ended = NULL;
    CHECK(pthread_join(thread, &ended) == 0);
    CHECK(ended != NULL);
    prefill(model);

    queues();
    signals();

    OK(NVFP4_session_release(generating));
    OK(NVFP4_session_release(parents));
    OK(NVFP4_model_release(model));
    return report("fork");
}
