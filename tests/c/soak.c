/* Endurance: soak MODEL_DIR SECONDS SEED [cpu|cuda:0], on a GPU with `deterministic`. A child runs random calls on random sessions, in threads
 * and in a queue, in less memory than they want, while its parent stops and continues it. Canaries, generations whose tokens were recorded
 * before, give the same tokens under the load, each within 30 s. From time to time all sessions are released: then no block is in use, and
 * memory is what it was. Choices follow from the seed, the thread and the number of the call. */
#define _GNU_SOURCE
#include "check.h"
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
    TENANTS = 4,      /* threads with sessions of their own */
    WATCHERS = 2,     /* threads that run canaries */
    SLOTS = 3,        /* sessions of a tenant */
    CLIENTS = 8,      /* generations of the queue */
    CANARIES = 16,    /* at most */
    TOKENS = 24,      /* of a canary */
    CONTEXT = 480,    /* at most */
    SEQUENCES = 5,    /* whole contexts that fit in the reserved memory: fewer than there are sessions */
    PATIENCE = 30,    /* seconds for a canary */
    BEGIN = 240,      /* seconds to load, compile kernels and record */
    SLACK_KB = 4096   /* by which resident memory may grow from the second idle point to the last, beside what is used later */
};

/* Numbers of the streams of choices; tenants and watchers follow. */
enum { OF_PARENT = 1, OF_QUEUE, OF_DISTURBER, OF_CANARIES, OF_TENANTS = 100, OF_WATCHERS = 200 };

/* Memory that parent and child share. Patience is counted in the time for which the parent meant to sleep, which does not go on where the
 * machine runs neither of the two. */
typedef struct {
    atomic_int runs;
    atomic_ulong slept_us;
    atomic_ulong stops, canaries[WATCHERS + 1];
} Shared;

static Shared *shared;
static const char *path;
static uint64_t seed;
static int on_gpu;
static NVFP4_Model *model;
static NVFP4_Grammar *grammar;
static size_t context, vocabulary;
static uint64_t later_bytes;
static int32_t types[3];
static size_t type_count;
static int has_text;

static atomic_ulong generations, tokens_made, checked, cancels, releases, refusals, forks, restores, longest_ms;

/* Ends the process that calls it. */
static _Noreturn void fail(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    flockfile(stdout);
    printf("soak FAILED, seed %llu: ", (unsigned long long)seed);
    vprintf(format, arguments);
    printf("\n");
    fflush(stdout);
    va_end(arguments);
    _exit(1);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void nap(double seconds)
{
    struct timespec time = {(time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds))};
    while (nanosleep(&time, &time) != 0)
        continue;
}

static double slept(void)
{
    return 1e-6 * (double)atomic_load(&shared->slept_us);
}

/* Choices: splitmix64. */
typedef struct {
    uint64_t state;
} Random;

static uint64_t next(Random *random)
{
    uint64_t x = random->state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static Random random_of(uint64_t stream, uint64_t call)
{
    Random random = {seed * 0xd1342543de82ef95u + stream};
    random.state = next(&random) ^ call * 0x2545f4914f6cdd1du;
    next(&random);
    return random;
}

static size_t below(Random *random, size_t bound)
{
    return (size_t)(next(random) % bound);
}

/* Seconds between `from` and `to`. */
static double seconds_of(Random *random, double from, double to)
{
    return from + (to - from) * (double)(next(random) >> 11) * 0x1p-53;
}

#define MUST(call) must((call), #call, __LINE__)

static void must(NVFP4_Status status, const char *call, int line)
{
    if (status != NVFP4_OK)
        fail("line %d: %s gave %s: %s", line, call, NVFP4_status_name(status), NVFP4_last_error());
}

/* A prompt: the beginning of one of a few texts, and then tokens of its own. */
static size_t make_prompt(Random *random, size_t most, int32_t *out)
{
    const size_t length = 1 + below(random, most), own = below(random, 3) == 0 ? 0 : below(random, length);
    const uint64_t text = below(random, 5);
    for (size_t i = 0; i < length - own; i++)
        out[i] = (int32_t)((i * i * 7 + i * (text * 31 + 11) + text * 57) % vocabulary);
    for (size_t i = length - own; i < length; i++)
        out[i] = (int32_t)below(random, vocabulary);
    return length;
}

/* Options with a fixed seed, where the default is a new one. */
static NVFP4_GenerateOptions how(size_t most)
{
    NVFP4_GenerateOptions options;
    MUST(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = most;
    options.ignore_model_stops = 1;
    options.seed = 7;
    return options;
}

/* ---- Canaries ---- */

typedef struct {
    int32_t kv_type, eviction;
    float temperature;
    size_t context, prompt_length;
    int32_t prompt[CONTEXT], expected[TOKENS];
} Canary;

static Canary canaries[CANARIES];
static size_t canary_count;

static NVFP4_Session *session_of(const Canary *canary, int32_t is_private)
{
    NVFP4_SessionOptions options;
    NVFP4_Session *session = NULL;
    MUST(NVFP4_session_options_init(&options, sizeof options));
    options.kv_type = canary->kv_type;
    options.eviction = canary->eviction;
    options.context = canary->context;
    options.is_private = is_private;
    MUST(NVFP4_session_create(model, &options, &session));
    return session;
}

static NVFP4_GenerateOptions options_of(const Canary *canary, size_t most)
{
    NVFP4_GenerateOptions options = how(most);
    options.temperature = canary->temperature;
    options.seed = canary->prompt_length;
    return options;
}

/* The tokens of a generation. */
typedef struct {
    size_t count;
    int32_t tokens[TOKENS];
} Said;

static int32_t hear(void *user, const NVFP4_TokenEvent *event)
{
    Said *said = user;
    if (event->kind == NVFP4_EVENT_TOKEN && said->count < TOKENS)
        said->tokens[said->count++] = event->token;
    return 0;
}

static void release(NVFP4_Session **session)
{
    if (*session != NULL)
        MUST(NVFP4_session_release(*session));
    *session = NULL;
}

/* Copies a session to memory and back. If it `moves`, the first one is released between. */
static NVFP4_Status store(NVFP4_Session **session, int moves, const NVFP4_CallOptions *call, NVFP4_Session **out)
{
    size_t length = 0;
    uint8_t *bytes = NULL;
    NVFP4_Status status = NVFP4_session_save_bytes(*session, NULL, 0, &length, call);
    if (status == NVFP4_OK && (bytes = malloc(length)) == NULL)
        fail("no memory for %zu bytes of a session", length);
    if (status == NVFP4_OK)
        status = NVFP4_session_save_bytes(*session, bytes, length, &length, call);
    if (status == NVFP4_OK && moves)
        release(session);
    if (status == NVFP4_OK)
        status = NVFP4_session_restore_bytes(model, bytes, length, call, out);
    free(bytes);
    atomic_fetch_add(&restores, status == NVFP4_OK);
    return status;
}

/* The ways to a canary's tokens. */
enum { AT_ONCE, BY_STEPS, FORKED, STORED, CUT, WAYS };

static NVFP4_Status steps(NVFP4_Session *session, const NVFP4_GenerateOptions *options, Said *said)
{
    NVFP4_Status status = NVFP4_session_sample(session, options, &said->tokens[0]);
    for (said->count = 1; status == NVFP4_OK && said->count < TOKENS; said->count++)
        status = NVFP4_session_step_sample(&session, &said->tokens[said->count - 1], 1, &options, NULL, &said->tokens[said->count], NULL);
    return status;
}

/* Generates the tokens of a canary. Some ways end in another session, which replaces the first. */
static NVFP4_Status generate(const Canary *canary, int way, size_t first, NVFP4_Session **session, Said *said)
{
    NVFP4_GenerateOptions options = options_of(canary, TOKENS), part = options_of(canary, first);
    NVFP4_Session *other = NULL;
    NVFP4_Status status = NVFP4_session_prefill(*session, canary->prompt, canary->prompt_length, NULL);
    said->count = 0;
    if (status != NVFP4_OK || way == AT_ONCE)
        return status != NVFP4_OK ? status : NVFP4_session_generate(*session, &options, hear, said, NULL);
    if (way == BY_STEPS)
        return steps(*session, &options, said);
    status = NVFP4_session_generate(*session, way == CUT ? &options : &part, hear, said, NULL);
    if (status != NVFP4_OK)
        return status;
    if (way == CUT) {
        said->count = first;
        status = NVFP4_session_truncate(*session, canary->prompt_length + first);
    } else {
        status = way == FORKED ? NVFP4_session_fork(*session, &other) : store(session, 1, NULL, &other);
        if (status == NVFP4_OK) {
            release(session);
            *session = other;
        }
    }
    options.max_tokens = TOKENS - first;
    return status != NVFP4_OK ? status : NVFP4_session_generate(*session, &options, hear, said, NULL);
}

static void compare(const Canary *canary, const char *where, const int32_t *said, size_t count)
{
    for (size_t i = 0; i < TOKENS; i++)
        if (i >= count || said[i] != canary->expected[i])
            fail("canary %d %s: token %zu of %zu is %d, recorded was %d (kv_type %d, eviction %d, temperature %g, prompt of %zu)",
                 (int)(canary - canaries), where, i, count, i < count ? said[i] : -1, canary->expected[i], canary->kv_type,
                 canary->eviction, (double)canary->temperature, canary->prompt_length);
}

/* A moment by both clocks. */
typedef struct {
    double at, slept;
} Moment;

static Moment moment(void)
{
    return (Moment){now(), slept()};
}

static int is_late(const Moment *since)
{
    return slept() - since->slept > PATIENCE;
}

/* Counts a canary that began at `since`. */
static void in_time(const Moment *since, int watcher)
{
    unsigned long ms = (unsigned long)(1e3 * (now() - since->at)), longest = atomic_load(&longest_ms);
    while (ms > longest && !atomic_compare_exchange_weak(&longest_ms, &longest, ms))
        continue;
    if (is_late(since))
        fail("a canary took %.1f s", now() - since->at);
    atomic_fetch_add(&shared->canaries[watcher], 1);
}

/* Memory that idle sessions and prompts hold may be refused to a generation that runs alone. */
static int is_refused(NVFP4_Status status)
{
    atomic_fetch_add(&refusals, status == NVFP4_OUT_OF_MEMORY);
    return status == NVFP4_OUT_OF_MEMORY;
}

static void run_canary(Random *random, int watcher)
{
    static const char *const names[WAYS] = {"at once", "by steps", "forked", "stored", "cut"};
    const Canary *canary = &canaries[below(random, canary_count)];
    /* A cut goes back to what eviction may have dropped. */
    const int way = (int)below(random, canary->eviction != NVFP4_EVICTION_ERROR ? CUT : WAYS);
    const size_t first = 1 + below(random, TOKENS - 1);
    const int32_t is_private = below(random, 3) == 0;
    const Moment since = moment();
    Said said;
    NVFP4_Status status;
    do {
        NVFP4_Session *session = session_of(canary, is_private);
        status = generate(canary, way, first, &session, &said);
        if (status != NVFP4_OK && !is_refused(status))
            fail("canary %s gave %s: %s", names[way], NVFP4_status_name(status), NVFP4_last_error());
        release(&session);
        if (status != NVFP4_OK)
            nap(1e-3);
    } while (status != NVFP4_OK && !is_late(&since));
    in_time(&since, watcher);
    compare(canary, names[way], said.tokens, said.count);
}

/* Whether sessions of this type can run. */
static int runs(int32_t kv_type)
{
    const int32_t token = 0;
    NVFP4_SessionOptions options;
    NVFP4_Session *session = NULL;
    MUST(NVFP4_session_options_init(&options, sizeof options));
    options.kv_type = kv_type;
    NVFP4_Status status = NVFP4_session_create(model, &options, &session);
    if (status == NVFP4_OK) {
        status = NVFP4_session_prefill(session, &token, 1, NULL);
        MUST(NVFP4_session_release(session));
    }
    if (status != NVFP4_OK && status != NVFP4_UNSUPPORTED && status != NVFP4_INVALID_ARGUMENT)
        MUST(status);
    return status == NVFP4_OK;
}

static void record(void)
{
    Random random = random_of(OF_CANARIES, 0);
    for (size_t type = 0; type < type_count; type++)
        for (int drawn = 0; drawn < 2; drawn++)
            for (int windowed = 0; windowed < 2; windowed++) {
                Canary *canary = &canaries[canary_count++];
                Said said = {0};
                canary->kv_type = types[type];
                canary->temperature = drawn ? 0.9f : 0;
                canary->eviction = windowed ? NVFP4_EVICTION_SLIDING_WINDOW : NVFP4_EVICTION_ERROR;
                canary->context = windowed ? 40 : context;
                canary->prompt_length = make_prompt(&random, windowed ? 30 : context / 2, canary->prompt);
                NVFP4_Session *session = session_of(canary, 1);
                MUST(generate(canary, AT_ONCE, 0, &session, &said));
                MUST(NVFP4_session_release(session));
                if (said.count != TOKENS)
                    fail("a canary has %zu tokens in place of %d", said.count, TOKENS);
                memcpy(canary->expected, said.tokens, sizeof said.tokens);
            }
}

/* ---- Turns of load, idle points ---- */

static atomic_int draining, ending;
static pthread_barrier_t drained, resumed;

/* Between two calls: waits while all is drained. Returns whether there is more to do. `drain` releases what the thread holds. */
static int goes_on(void (*drain)(void *), void *user)
{
    if (!atomic_load(&draining))
        return 1;
    if (drain != NULL)
        drain(user);
    pthread_barrier_wait(&drained);
    pthread_barrier_wait(&resumed);
    return !atomic_load(&ending);
}

static void *watch_canaries(void *number)
{
    const int watcher = *(const int *)number;
    for (uint64_t call = 0; goes_on(NULL, NULL); call++) {
        Random random = random_of(OF_WATCHERS + (uint64_t)watcher, call);
        run_canary(&random, watcher);
    }
    return NULL;
}

/* ---- Tenants ---- */

typedef struct {
    /* Another thread may take it and release it, also during a call. */
    _Atomic(NVFP4_Session *) session;
    int32_t kv_type;
    /* Nothing but turns has changed it. */
    int chats;
} Slot;

typedef struct {
    int number;
    NVFP4_Cancel *cancel;
    Slot slots[SLOTS];
} Tenant;

static Tenant tenants[TENANTS];

static void leave(Slot *slot)
{
    NVFP4_Session *session = atomic_exchange(&slot->session, NULL);
    if (session != NULL)
        MUST(NVFP4_session_release(session));
}

static void leave_all(void *user)
{
    Tenant *tenant = user;
    for (int i = 0; i < SLOTS; i++)
        leave(&tenant->slots[i]);
}

static void take(Slot *slot, NVFP4_Session *session, int32_t kv_type, int chats)
{
    leave(slot);
    slot->kv_type = kv_type;
    slot->chats = chats;
    atomic_store(&slot->session, session);
}

/* Whether a call has succeeded. A cancellation, a full context, full memory, and a release of the session by another thread are no faults. */
static int came(NVFP4_Status status, Slot *slot, const NVFP4_Session *session, const char *call)
{
    const int released = atomic_load(&slot->session) != session;
    if (status == NVFP4_OK)
        return 1;
    if (status == NVFP4_CANCELLED)
        atomic_fetch_add(&cancels, 1);
    else if (is_refused(status) || status == NVFP4_CONTEXT_FULL)
        leave(slot);
    else if (status != NVFP4_INVALID_HANDLE || !released)
        fail("%s gave %s: %s", call, NVFP4_status_name(status), NVFP4_last_error());
    return 0;
}

/* The length of a session, or SIZE_MAX if it has been released. */
static size_t length_of(Slot *slot, const NVFP4_Session *session)
{
    size_t length = SIZE_MAX;
    return came(NVFP4_session_length(session, &length), slot, session, "length") ? length : SIZE_MAX;
}

static void open_one(Random *random, Slot *slot, int chats)
{
    static const int32_t evictions[] = {NVFP4_EVICTION_ERROR, NVFP4_EVICTION_ERROR, NVFP4_EVICTION_DROP_OLDEST, NVFP4_EVICTION_SLIDING_WINDOW};
    NVFP4_SessionOptions options;
    NVFP4_Session *session = NULL;
    MUST(NVFP4_session_options_init(&options, sizeof options));
    options.kv_type = types[below(random, type_count)];
    options.eviction = evictions[below(random, chats ? 3 : 4)];
    options.is_private = below(random, 4) == 0;
    options.context = options.eviction == NVFP4_EVICTION_ERROR || chats ? context : 24 + below(random, context - 24);
    if (options.eviction == NVFP4_EVICTION_SLIDING_WINDOW && below(random, 2))
        options.drop = 1 + below(random, 12);
    MUST(NVFP4_session_create(model, &options, &session));
    take(slot, session, options.kv_type, chats);
}

/* An act of a callback after some tokens: to end the generation, or to fork it. */
typedef struct {
    size_t after;
    NVFP4_Session *session, *fork;
    int forks;
} Interruption;

static int32_t interrupt(void *user, const NVFP4_TokenEvent *event)
{
    Interruption *interruption = user;
    if (event->kind != NVFP4_EVENT_TOKEN || interruption->after == 0 || --interruption->after > 0)
        return 0;
    if (!interruption->forks)
        return 1;
    const NVFP4_Status status = NVFP4_session_fork(interruption->session, &interruption->fork);
    if (status != NVFP4_OK && status != NVFP4_INVALID_HANDLE)
        MUST(status);
    return 0;
}

/* Random options, some of which change logits. */
static NVFP4_GenerateOptions random_how(Random *random, size_t most, const NVFP4_CallOptions *call)
{
    static const int32_t biased[] = {5, 17, 60};
    static const float biases[] = {2, -4, -1};
    NVFP4_GenerateOptions options = how(1 + below(random, most));
    options.call = call;
    options.temperature = below(random, 3) == 0 ? 0 : 0.8f;
    options.top_k = below(random, 3) == 0 ? 20 : 0;
    options.ignore_model_stops = below(random, 4) != 0;
    options.seed = next(random);
    switch (below(random, 8)) {
    case 0:
        options.logit_bias_tokens = biased;
        options.logit_biases = biases;
        options.logit_bias_count = sizeof biased / sizeof biased[0];
        break;
    case 1: options.presence_penalty = 0.5f; break;
    case 2: options.repetition_penalty = 1.3f; break;
    case 3: options.prompt_lookup = 1 + below(random, 6); break;
    case 4: options.grammar = grammar; break;
    case 5: options.top_log_probabilities = 3; break;
    default: break;
    }
    return options;
}

static void count(const NVFP4_GenerationResult *result)
{
    atomic_fetch_add(&generations, 1);
    atomic_fetch_add(&tokens_made, result->generated_tokens);
    atomic_fetch_add(&cancels, result->finish == NVFP4_FINISH_CANCELLED);
}

/* A session after any calls generates greedily what a new session generates that is given its tokens. */
static void check_one(Random *random, Slot *slot, NVFP4_Session *session)
{
    static _Thread_local int32_t tokens[CONTEXT];
    const Canary alone = {.kv_type = slot->kv_type, .context = context};
    NVFP4_GenerateOptions options = how(1 + below(random, TOKENS));
    Said said = {0}, anew = {0};
    size_t length = 0, room = 0;
    if (!came(NVFP4_session_tokens(session, tokens, CONTEXT, &length), slot, session, "tokens") ||
        !came(NVFP4_session_context(session, &room), slot, session, "context"))
        return;
    /* Neither may come to the end of its context. */
    if (length == 0 || length + options.max_tokens > room)
        return;
    if (!came(NVFP4_session_generate(session, &options, hear, &said, NULL), slot, session, "generate"))
        return;
    NVFP4_Session *second = session_of(&alone, 1);
    NVFP4_Status status = NVFP4_session_prefill(second, tokens, length, NULL);
    if (status == NVFP4_OK)
        status = NVFP4_session_generate(second, &options, hear, &anew, NULL);
    if (status != NVFP4_OK && !is_refused(status))
        MUST(status);
    MUST(NVFP4_session_release(second));
    if (status != NVFP4_OK)
        return;
    atomic_fetch_add(&checked, 1);
    for (size_t i = 0; i < options.max_tokens; i++)
        if (said.count != options.max_tokens || anew.count != said.count || said.tokens[i] != anew.tokens[i])
            fail("a session of %zu tokens (kv_type %d) says %d as token %zu, and %d anew", length, slot->kv_type, said.tokens[i], i,
                 anew.tokens[i]);
}

/* All sessions of a tenant take some steps together. */
static void step_all(Random *random, Tenant *tenant, const NVFP4_CallOptions *call)
{
    NVFP4_Session *together[SLOTS];
    NVFP4_Status statuses[SLOTS];
    Slot *slots[SLOTS];
    int32_t tokens[SLOTS];
    size_t joined = 0, rounds = 1 + below(random, 8);
    for (int i = 0; i < SLOTS; i++) {
        NVFP4_Session *session = atomic_load(&tenant->slots[i].session);
        if (session == NULL || tenant->slots[i].chats)
            continue;
        slots[joined] = &tenant->slots[i];
        together[joined] = session;
        tokens[joined++] = (int32_t)below(random, vocabulary);
    }
    for (size_t round = 0; joined > 0 && round < rounds; round++) {
        const NVFP4_Status status = NVFP4_session_step_sample(together, tokens, joined, NULL, call, tokens, statuses);
        if (status == NVFP4_CANCELLED || status == NVFP4_OUT_OF_MEMORY) {
            came(status, slots[0], together[0], "step");
            return;
        }
        MUST(status);
        for (size_t i = 0; i < joined; i++)
            if (!came(statuses[i], slots[i], together[i], "step"))
                return;
        atomic_fetch_add(&tokens_made, joined);
    }
}

static void chat(Random *random, Slot *slot, NVFP4_Session *session, const NVFP4_GenerateOptions *options)
{
    static const char *const questions[] = {"Hello", "How far is it to the sea?", "And then?", "Why?"};
    const char *question = questions[below(random, 4)];
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    if (came(NVFP4_session_chat(session, question, strlen(question), NULL, options, NULL, NULL, &result), slot, session, "chat"))
        count(&result);
}

static void score(Random *random, Slot *slot, NVFP4_Session *session)
{
    static _Thread_local int32_t tokens[3][12];
    const int32_t *const continuations[] = {tokens[0], tokens[1], tokens[2]};
    float log_probabilities[36];
    size_t lengths[3];
    for (int i = 0; i < 3; i++)
        lengths[i] = make_prompt(random, 12, tokens[i]);
    came(NVFP4_session_score(session, continuations, lengths, 3, NULL, log_probabilities, NULL), slot, session, "score");
}

static void act(Random *random, Tenant *tenant)
{
    /* Generations and comparisons are more frequent. */
    enum { PREFILL, MORE, GENERATE, LAST_GENERATE = GENERATE + 4, DECODE, STEP, FORK, TRUNCATE, STORE, LEAVE, CHAT, SCORE, COMPARE, KINDS = COMPARE + 3 };
    static _Thread_local int32_t prompt[CONTEXT];
    size_t kind = below(random, KINDS), place = below(random, SLOTS), before, length;
    Slot *slot = &tenant->slots[place], *other = &tenant->slots[(place + 1) % SLOTS];
    Interruption interruption = {.after = below(random, 2) * below(random, 20), .forks = (int)below(random, 2)};
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    NVFP4_CallOptions call;
    NVFP4_Session *session, *second = NULL;
    MUST(NVFP4_call_options_init(&call, sizeof call));
    MUST(NVFP4_cancel_reset(tenant->cancel));
    call.cancel = tenant->cancel;
    const NVFP4_GenerateOptions options = random_how(random, 60, &call);
    if (atomic_load(&slot->session) == NULL || (kind == CHAT && has_text && !slot->chats))
        open_one(random, slot, kind == CHAT && has_text);
    session = atomic_load(&slot->session);
    if (session == NULL || (before = length_of(slot, session)) == SIZE_MAX)
        return;
    /* Sessions that do nothing shall leave room for canaries, whose prompts are refused memory rather than wait for it. */
    if (before == 0 && !slot->chats)
        kind = PREFILL;
    else if (before > context / 2)
        kind = TRUNCATE;
    else if (slot->chats && kind != FORK && kind != STORE && kind != LEAVE && kind != SCORE)
        kind = CHAT;
    if (kind == PREFILL || kind == MORE) {
        length = make_prompt(random, before == 0 ? context / 2 : 40, prompt);
        /* A call that fails leaves the session as it was. */
        if (!came(NVFP4_session_prefill(session, prompt, length, &call), slot, session, "prefill") && atomic_load(&slot->session) == session &&
            length_of(slot, session) != before && atomic_load(&slot->session) == session)
            fail("a prompt that failed left another length than %zu", before);
    } else if (kind >= GENERATE && kind <= LAST_GENERATE) {
        interruption.session = session;
        if (came(NVFP4_session_generate(session, &options, interrupt, &interruption, &result), slot, session, "generate"))
            count(&result);
        if (interruption.fork != NULL)
            take(other, interruption.fork, slot->kv_type, 0);
        atomic_fetch_add(&forks, interruption.fork != NULL);
    } else if (kind == DECODE) {
        if (came(NVFP4_session_decode(session, (int32_t)below(random, vocabulary), &call), slot, session, "decode"))
            atomic_fetch_add(&tokens_made, 1);
    } else if (kind == STEP) {
        step_all(random, tenant, &call);
    } else if (kind == FORK) {
        if (came(NVFP4_session_fork(session, &second), slot, session, "fork"))
            take(other, second, slot->kv_type, slot->chats);
        atomic_fetch_add(&forks, second != NULL);
    } else if (kind == TRUNCATE) {
        came(NVFP4_session_truncate(session, below(random, before)), slot, session, "truncate");
    } else if (kind == STORE) {
        if (came(store(&session, 0, &call, &second), slot, session, "store"))
            take(other, second, slot->kv_type, slot->chats);
    } else if (kind == LEAVE) {
        leave(slot);
    } else if (kind == CHAT) {
        if (slot->chats)
            chat(random, slot, session, &options);
    } else if (kind == SCORE) {
        score(random, slot, session);
    } else {
        check_one(random, slot, session);
    }
}

static void *live(void *user)
{
    Tenant *tenant = user;
    for (uint64_t call = 0; goes_on(leave_all, tenant); call++) {
        Random random = random_of(OF_TENANTS + (uint64_t)tenant->number, call);
        act(&random, tenant);
    }
    return NULL;
}

/* Cancels calls of tenants, and releases their sessions, also during calls. */
static void *disturb(void *user)
{
    for (uint64_t call = 0; goes_on(NULL, NULL); call++) {
        Random random = random_of(OF_DISTURBER, call);
        Tenant *tenant = &tenants[below(&random, TENANTS)];
        if (below(&random, 4) != 0) {
            MUST(NVFP4_cancel_trigger(tenant->cancel));
        } else {
            NVFP4_Session *session = atomic_exchange(&tenant->slots[below(&random, SLOTS)].session, NULL);
            if (session != NULL) {
                MUST(NVFP4_session_release(session));
                atomic_fetch_add(&releases, 1);
            }
        }
        nap(seconds_of(&random, 1e-4, 8e-3));
    }
    return user;
}

/* ---- The queue ---- */

typedef struct {
    NVFP4_Session *session;
    const Canary *canary;
    uint64_t generation;
    Moment since;
    int open;
    Said said;
} Client;

static NVFP4_Queue *queue;
static Client clients[CLIENTS];

static void open_queue(void)
{
    NVFP4_QueueOptions options;
    MUST(NVFP4_queue_options_init(&options, sizeof options));
    options.running = CLIENTS - 2;
    options.submissions = CLIENTS;
    options.events = 40;
    MUST(NVFP4_queue_create(model, &options, &queue));
}

static void end_of(Client *client, const NVFP4_QueueEvent *event)
{
    size_t length = 0;
    client->open = 0;
    if (event->status != NVFP4_OK && !is_refused(event->status) && (client->canary != NULL || event->status != NVFP4_CONTEXT_FULL))
        fail("a generation of the queue gave %s: %.*s", NVFP4_status_name(event->status), (int)event->text_length, event->text);
    atomic_fetch_add(&generations, 1);
    atomic_fetch_add(&cancels, event->finish == NVFP4_FINISH_CANCELLED);
    if (client->canary != NULL && event->status == NVFP4_OK) {
        compare(client->canary, "in a queue", client->said.tokens, client->said.count);
        in_time(&client->since, WATCHERS);
    }
    if (client->session != NULL) {
        MUST(NVFP4_session_length(client->session, &length));
        if (client->canary != NULL || event->status != NVFP4_OK || length > context / 3)
            release(&client->session);
    }
    if (event->status == NVFP4_OK)
        client->canary = NULL;
}

static void take_events(int64_t timeout_ms)
{
    NVFP4_QueueEvent events[16];
    size_t taken = 0;
    MUST(NVFP4_queue_wait(queue, events, sizeof events[0], 16, timeout_ms, &taken));
    for (size_t i = 0; i < taken; i++) {
        Client *client = events[i].user;
        if (!client->open || events[i].generation != client->generation)
            fail("an event of generation %llu came to another one", (unsigned long long)events[i].generation);
        if (events[i].kind == NVFP4_EVENT_END)
            end_of(client, &events[i]);
        else if (events[i].kind == NVFP4_EVENT_TOKEN) {
            atomic_fetch_add(&tokens_made, 1);
            if (client->said.count < TOKENS)
                client->said.tokens[client->said.count++] = events[i].token;
        }
    }
}

static void submit(Random *random, Client *client)
{
    static int32_t prompt[CONTEXT];
    NVFP4_SubmitOptions when;
    const int again = client->canary != NULL;
    MUST(NVFP4_submit_options_init(&when, sizeof when));
    when.user = client;
    when.priority = (int32_t)below(random, 3);
    client->said.count = 0;
    client->open = 1;
    /* A canary that was refused memory is tried again until its time is over. */
    if (again || below(random, 3) == 0) {
        if (!again) {
            client->canary = &canaries[below(random, canary_count)];
            client->since = moment();
        }
        if (is_late(&client->since))
            in_time(&client->since, WATCHERS);
        const Canary *canary = client->canary;
        const NVFP4_GenerateOptions options = options_of(canary, TOKENS);
        release(&client->session);
        client->session = session_of(canary, 0);
        MUST(NVFP4_queue_generate(queue, client->session, canary->prompt, canary->prompt_length, &options, &when, &client->generation));
        return;
    }
    const NVFP4_GenerateOptions options = random_how(random, 60, NULL);
    const size_t length = make_prompt(random, context / 2, prompt);
    const Canary kind = {.kv_type = types[below(random, type_count)], .eviction = NVFP4_EVICTION_DROP_OLDEST, .context = context};
    if (below(random, 4) == 0)
        when.deadline = seconds_of(random, 1e-6, 0.05);
    if (client->session == NULL)
        client->session = session_of(&kind, below(random, 4) == 0);
    MUST(NVFP4_queue_generate(queue, client->session, prompt, length, &options, &when, &client->generation));
}

static void drain_queue(void *user)
{
    (void)user;
    for (int i = 0; i < CLIENTS; i++) {
        Client *client = &clients[i];
        if (client->open && client->canary == NULL)
            MUST(NVFP4_queue_cancel(queue, client->generation));
        while (client->open)
            take_events(10);
        release(&client->session);
    }
    if (queue != NULL)
        MUST(NVFP4_queue_release(queue));
    queue = NULL;
}

static void *serve(void *user)
{
    for (uint64_t call = 0; goes_on(drain_queue, NULL); call++) {
        Random random = random_of(OF_QUEUE, call);
        Client *client = &clients[below(&random, CLIENTS)];
        if (queue == NULL)
            open_queue();
        if (!client->open) {
            submit(&random, client);
        } else if (client->canary == NULL) {
            const size_t chance = below(&random, 12);
            if (chance < 2)
                MUST(NVFP4_queue_cancel(queue, client->generation));
            else if (chance == 2 && client->session != NULL) {
                release(&client->session);
                atomic_fetch_add(&releases, 1);
            }
        }
        take_events((int64_t)below(&random, 6));
    }
    return user;
}

/* ---- Parent and child ---- */

static long resident_kb(void)
{
    long pages = -1;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%*d %ld", &pages) != 1)
        fail("/proc/self/statm cannot be read");
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Memory while nothing runs and no session exists. A GPU's working memory grows to that of the longest passes, as they come. */
typedef struct {
    uint64_t counted;
    /* Reserved, and neither free nor cached: blocks for the padding of recorded steps. */
    uint64_t padding;
    long resident_kb;
    uint64_t preemptions;
} Idle;

static Idle idle_point(void)
{
    NVFP4_ModelStatistics statistics = {.struct_size = sizeof statistics};
    static const int32_t working[] = {NVFP4_MEMORY_SCRATCH, NVFP4_MEMORY_DEVICE_SCRATCH};
    Idle idle = {0};
    uint64_t scratch, peak;
    MUST(NVFP4_model_statistics(model, &statistics));
    if (statistics.blocks_used != 0 || statistics.used_bytes != 0 || statistics.generating != 0 || statistics.waiting != 0)
        fail("without sessions %llu blocks of %llu bytes are used, %llu generate and %llu wait", (unsigned long long)statistics.blocks_used,
             (unsigned long long)statistics.used_bytes, (unsigned long long)statistics.generating, (unsigned long long)statistics.waiting);
    idle.padding = statistics.reserved_bytes - statistics.free_bytes - statistics.cached_bytes;
    malloc_trim(0);
    MUST(NVFP4_memory_stats(NVFP4_MEMORY_TOTAL, &idle.counted, &peak));
    for (size_t i = 0; on_gpu && i < sizeof working / sizeof working[0]; i++) {
        MUST(NVFP4_memory_stats(working[i], &scratch, &peak));
        idle.counted -= scratch;
    }
    idle.resident_kb = resident_kb();
    idle.preemptions = statistics.preemptions;
    return idle;
}

static void load(void)
{
    NVFP4_LoadOptions options;
    NVFP4_PlanOptions wanted;
    NVFP4_Plan plan = {.struct_size = sizeof plan};
    static const int32_t all[] = {NVFP4_KV_FLOAT16, NVFP4_KV_FLOAT32, NVFP4_KV_FLOAT8};
    int32_t token;
    size_t length = 0;
    MUST(NVFP4_set_threads(2));
    MUST(NVFP4_load_options_init(&options, sizeof options));
    options.device_type = on_gpu ? NVFP4_DEVICE_CUDA : NVFP4_DEVICE_CPU;
    options.deterministic = on_gpu;
    MUST(NVFP4_plan_options_init(&wanted, sizeof wanted));
    wanted.sequences = SEQUENCES;
    MUST(NVFP4_model_plan(path, strlen(path), &options, NULL, &wanted, &plan));
    wanted.context = context = plan.context < CONTEXT ? plan.context : CONTEXT;
    MUST(NVFP4_model_plan(path, strlen(path), &options, NULL, &wanted, &plan));
    options.kv_bytes = plan.kv_bytes;
    /* Reserved host memory that is touched later, and recorded steps. */
    later_bytes = plan.graph_bytes_bound + (on_gpu ? 0 : plan.kv_bytes);
    MUST(NVFP4_model_load(path, strlen(path), &options, NULL, &model));
    MUST(NVFP4_model_vocab_size(model, &vocabulary));
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        if (runs(all[i]))
            types[type_count++] = all[i];
    has_text = NVFP4_model_tokenize(model, "a", 1, 0, &token, 1, &length) == NVFP4_OK;
    if (has_text) {
        static const char text[] = "[a-z ]{1,30}";
        NVFP4_GrammarOptions kind;
        MUST(NVFP4_grammar_options_init(&kind, sizeof kind));
        kind.kind = NVFP4_GRAMMAR_REGEX;
        MUST(NVFP4_grammar_create(model, &kind, text, sizeof text - 1, &grammar));
    }
}

static unsigned long sum_of_canaries(void)
{
    unsigned long sum = 0;
    for (int i = 0; i <= WATCHERS; i++)
        sum += atomic_load(&shared->canaries[i]);
    return sum;
}

static void say(const char *what, const Idle *first, const Idle *last)
{
    printf("soak %s: %lu generations, %lu tokens, %lu canaries, %lu checked anew, %lu cancelled, %lu released, %lu forks, %lu restores, "
           "%llu preemptions, %lu refused, %lu stops, longest canary %.2f s, resident %ld then %ld kB, counted %llu then %llu bytes\n",
           what, atomic_load(&generations), atomic_load(&tokens_made), sum_of_canaries(), atomic_load(&checked), atomic_load(&cancels),
           atomic_load(&releases), atomic_load(&forks), atomic_load(&restores), (unsigned long long)last->preemptions, atomic_load(&refusals),
           atomic_load(&shared->stops), 1e-3 * (double)atomic_load(&longest_ms), first->resident_kb, last->resident_kb,
           (unsigned long long)first->counted, (unsigned long long)last->counted);
    fflush(stdout);
}

static int run(double seconds)
{
    enum { THREADS = TENANTS + WATCHERS + 2 };
    pthread_t threads[THREADS];
    int numbers[WATCHERS], started = 0, points = 0;
    Idle first = {0}, last = {0};
    if (on_gpu && !cuda_device()) {
        const char *required = getenv("NVFP4_REQUIRE");
        if (required != NULL && strstr(required, "cuda") != NULL)
            fail("NVFP4_REQUIRE names cuda: %s", NVFP4_last_error());
        printf("SKIPPED soak on CUDA device 0: there is none\n");
        return 0;
    }
    /* With an arena for each thread, what the allocator cannot give back grows for minutes. */
    mallopt(M_ARENA_MAX, 1);
    load();
    record();
    pthread_barrier_init(&drained, NULL, THREADS + 1);
    pthread_barrier_init(&resumed, NULL, THREADS + 1);
    for (int i = 0; i < TENANTS; i++) {
        tenants[i].number = i;
        MUST(NVFP4_cancel_create(&tenants[i].cancel));
        pthread_create(&threads[started++], NULL, live, &tenants[i]);
    }
    for (int i = 0; i < WATCHERS; i++) {
        numbers[i] = i;
        pthread_create(&threads[started++], NULL, watch_canaries, &numbers[i]);
    }
    pthread_create(&threads[started++], NULL, disturb, NULL);
    pthread_create(&threads[started++], NULL, serve, NULL);
    atomic_store(&shared->runs, 1);
    const double begin = now(), pause = seconds < 12 ? seconds / 6 : seconds < 180 ? 2 : seconds / 90;
    double said = begin;
    while (!atomic_load(&ending)) {
        nap(pause < 30 ? pause : 30);
        atomic_store(&draining, 1);
        pthread_barrier_wait(&drained);
        last = idle_point();
        /* Caches fill and threads start until the second one. */
        if (++points == 2)
            first = last;
        if (points > 2 && last.counted > first.counted)
            fail("the library counts %llu bytes at idle point %d, and %llu at the second", (unsigned long long)last.counted, points,
                 (unsigned long long)first.counted);
        if (points > 2 && last.padding != first.padding)
            fail("%llu reserved bytes are neither free nor cached at idle point %d, and %llu at the second", (unsigned long long)last.padding,
                 points, (unsigned long long)first.padding);
        if (now() - said >= 60) {
            say("so far", &first, &last);
            said = now();
        }
        if (now() - begin >= seconds && points > 2)
            atomic_store(&ending, 1);
        atomic_store(&draining, 0);
        pthread_barrier_wait(&resumed);
    }
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < TENANTS; i++)
        MUST(NVFP4_cancel_release(tenants[i].cancel));
    if (grammar != NULL)
        MUST(NVFP4_grammar_release(grammar));
    MUST(NVFP4_model_release(model));
    say("ends", &first, &last);
    if (last.resident_kb - first.resident_kb > SLACK_KB + (long)(later_bytes / 1024))
        fail("resident memory grew from %ld to %ld kB", first.resident_kb, last.resident_kb);
    /* A slow machine does not come to everything. */
    if (atomic_load(&generations) > 1000 && (atomic_load(&checked) == 0 || atomic_load(&cancels) == 0 || atomic_load(&restores) == 0 || last.preemptions == 0))
        fail("the load left something out");
    return 0;
}

/* Ends the child and this process, with a reason. */
static _Noreturn void give_up(pid_t child, const char *reason)
{
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    fail("%s, after %lu stops", reason, atomic_load(&shared->stops));
}

static void sleep_for(double seconds)
{
    nap(seconds);
    atomic_fetch_add(&shared->slept_us, (unsigned long)(1e6 * seconds));
}

/* Sleeps, and returns whether the child has ended meanwhile. */
static int ends_within(pid_t child, double seconds, int *status)
{
    enum { PART_MS = 10 };
    for (int left = 1 + (int)(1e3 * seconds); left > 0; left -= PART_MS) {
        if (waitpid(child, status, WNOHANG) == child)
            return 1;
        sleep_for(1e-3 * (left < PART_MS ? left : PART_MS));
    }
    return 0;
}

/* Stops the child and continues it, until it ends. Canaries of each thread end soon. */
static int stop_and_continue(pid_t child, double seconds)
{
    unsigned long seen[WATCHERS + 1] = {0};
    double since[WATCHERS + 1], begin = slept();
    int status = 0;
    while (!atomic_load(&shared->runs)) {
        if (ends_within(child, 0.05, &status))
            return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        if (slept() - begin > BEGIN)
            give_up(child, "the load did not begin");
    }
    begin = slept();
    for (int i = 0; i <= WATCHERS; i++)
        since[i] = begin;
    for (uint64_t call = 0;; call++) {
        Random random = random_of(OF_PARENT, call);
        const double runs_for = seconds_of(&random, 0.02, 1), stands_for = below(&random, 8) == 0 ? 2 : 0.2;
        if (ends_within(child, runs_for, &status))
            return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
        for (int i = 0; i <= WATCHERS; i++) {
            const unsigned long count_now = atomic_load(&shared->canaries[i]);
            if (count_now != seen[i]) {
                seen[i] = count_now;
                since[i] = slept();
            } else if (slept() - since[i] > PATIENCE)
                give_up(child, "no canary has ended for 30 s");
        }
        if (slept() - begin > 2 * seconds + 2 * PATIENCE)
            give_up(child, "the load does not end");
        if (kill(child, SIGSTOP) != 0)
            give_up(child, "the child cannot be stopped");
        atomic_fetch_add(&shared->stops, 1);
        sleep_for(seconds_of(&random, 0.01, stands_for));
        kill(child, SIGCONT);
    }
}

int main(int argc, char **argv)
{
    if (argc < 4 || argc > 5 || (argc == 5 && strcmp(argv[4], "cpu") != 0 && strcmp(argv[4], "cuda:0") != 0)) {
        fprintf(stderr, "usage: soak MODEL_DIR SECONDS SEED [cpu|cuda:0]\n");
        return 2;
    }
    const double seconds = atof(argv[2]);
    path = argv[1];
    seed = strtoull(argv[3], NULL, 10);
    on_gpu = argc == 5 && strcmp(argv[4], "cuda:0") == 0;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        fail("no shared memory");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        /* A stopped child would outlive a parent that is killed. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        return run(seconds) != 0;
    }
    if (child < 0)
        fail("no child");
    const int code = stop_and_continue(child, seconds);
    if (code < 0)
        fail("the load was ended by signal %d", -code);
    return code;
}
