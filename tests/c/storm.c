/* Signals all the time: storm MODEL_DIR SCRATCH_DIR. A timer interrupts the process ten thousand times a second, system calls are
 * not taken up again, and the handler runs on the host's threads alone. Everything gives what it gives without. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/time.h>

enum { MOST = 4096, PROMPT = 60, TOKENS = 24, ROUNDS = 8 };

static const char *path, *scratch;
static pthread_t host;
static atomic_uint taken, elsewhere;

static void on_alarm(int number)
{
    const int before = errno;
    (void)number;
    atomic_fetch_add(&taken, 1);
    if (!pthread_equal(pthread_self(), host))
        atomic_fetch_add(&elsewhere, 1);
    errno = before;
}

static void storm(int microseconds)
{
    struct itimerval timer;
    memset(&timer, 0, sizeof timer);
    timer.it_interval.tv_usec = timer.it_value.tv_usec = microseconds;
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

/* The results of everything. */
struct results {
    float logits[MOST], restored[MOST];
    size_t logit_count, restored_count, text_length, answer_length, converted, session;
    char text[MOST], answer[MOST];
    unsigned long long converted_sum, session_sum;
};

/* The length and a checksum of a file. */
static void sum(const char *name, size_t *length, unsigned long long *out)
{
    FILE *file = fopen(name, "rb");
    CHECK(file != NULL);
    *length = 0;
    *out = 14695981039346656037ULL;
    for (int c; file != NULL && ((c = getc(file)) != EOF || (ferror(file) && errno == EINTR));) {
        if (c == EOF) {
            clearerr(file);
            continue;
        }
        *out = (*out ^ (unsigned)c) * 1099511628211ULL;
        ++*length;
    }
    if (file != NULL)
        fclose(file);
}

static void run(struct results *out)
{
    NVFP4_Model *model = NULL;
    NVFP4_Session *session = NULL, *chatting = NULL, *restored = NULL;
    NVFP4_LoadOptions load;
    NVFP4_GenerateOptions generate;
    NVFP4_ConvertOptions convert;
    char file[MOST], converted[MOST];
    int32_t prompt[PROMPT];
    memset(out, 0, sizeof *out);
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = 3 + 5 * i;
    snprintf(file, sizeof file, "%s/storm.session", scratch);
    snprintf(converted, sizeof converted, "%s/storm.dat", scratch);

    OK(NVFP4_load_options_init(&load, sizeof load));
    load.threads = 2;
    OK(NVFP4_model_load(path, strlen(path), &load, NULL, &model));
    OK(NVFP4_session_create(model, NULL, &session));
    OK(NVFP4_session_prefill(session, prompt, PROMPT, NULL));
    OK(NVFP4_session_logits(session, out->logits, MOST, &out->logit_count, NULL));
    OK(NVFP4_generate_options_init(&generate, sizeof generate));
    generate.max_tokens = TOKENS;
    generate.ignore_model_stops = 1;
    generate.temperature = 0.8f;
    generate.seed = 1;
    OK(NVFP4_session_generate(session, &generate, NULL, NULL, NULL));
    OK(NVFP4_session_text(session, out->text, MOST, &out->text_length));
    OK(NVFP4_session_create(model, NULL, &chatting));
    OK(NVFP4_session_chat(chatting, "How are you?", 12, NULL, &generate, NULL, NULL, NULL));
    OK(NVFP4_session_text(chatting, out->answer, MOST, &out->answer_length));

    OK(NVFP4_session_save(session, file, strlen(file), NULL));
    sum(file, &out->session, &out->session_sum);
    OK(NVFP4_session_restore(model, file, strlen(file), NULL, &restored));
    OK(NVFP4_session_logits(restored, out->restored, MOST, &out->restored_count, NULL));

    OK(NVFP4_convert_options_init(&convert, sizeof convert));
    convert.container = NVFP4_CONTAINER_DAT;
    convert.replace = 1;
    OK(NVFP4_model_convert(path, strlen(path), converted, strlen(converted), &convert, NULL));
    sum(converted, &out->converted, &out->converted_sum);

    OK(NVFP4_session_release(restored));
    OK(NVFP4_session_release(chatting));
    OK(NVFP4_session_release(session));
    OK(NVFP4_model_release(model));
    CHECK(remove(file) == 0 && remove(converted) == 0);
}

int main(int argc, char **argv)
{
    static struct results calm, stormy;
    if (argc != 3)
        return 2;
    path = argv[1];
    scratch = argv[2];
    host = pthread_self();
    run(&calm);
    CHECK(calm.logit_count > 0 && calm.text_length > 0 && calm.session > 0 && calm.converted > 0);

    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    /* Under valgrind, where every handler takes its time, the process would get nowhere. */
    const char *preloaded = getenv("LD_PRELOAD");
    const int simulated = preloaded != NULL && strstr(preloaded, "vgpreload") != NULL;
    storm(simulated ? 5000 : 100);
    for (int round = 0; round < (simulated ? 1 : ROUNDS); round++) {
        run(&stormy);
        CHECK(memcmp(&calm, &stormy, sizeof calm) == 0);
    }
    storm(0);
    printf("%u signals, %u of them on other threads than the host's\n", atomic_load(&taken), atomic_load(&elsewhere));
    CHECK(atomic_load(&taken) > (simulated ? 1 : 100) && atomic_load(&elsewhere) == 0);
    return report("storm");
}
