/* Queues: queue MODEL_DIR [STORM], with a small random model, whose texts mean nothing. STORM is the number of generations that are cancelled
 * or released at random. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

enum { PROMPT = 12, MANY = 64, MOST = 4096, ENDLESS = 100000000 };

static NVFP4_Model *model;
static const int32_t prompt[PROMPT] = {17, 201, 33, 90, 4, 256, 77, 140, 8, 19, 300, 61};

static NVFP4_Session *create(void)
{
    NVFP4_Session *session = NULL;
    OK(NVFP4_session_create(model, NULL, &session));
    return session;
}

/* One that drops old tokens, so that it can generate for long. */
static NVFP4_Session *create_endless(void)
{
    NVFP4_Session *session = NULL;
    NVFP4_SessionOptions options;
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.eviction = NVFP4_EVICTION_DROP_OLDEST;
    OK(NVFP4_session_create(model, &options, &session));
    return session;
}

static NVFP4_Queue *queue_of(int32_t running, size_t submissions, size_t events)
{
    NVFP4_QueueOptions options;
    NVFP4_Queue *queue = NULL;
    OK(NVFP4_queue_options_init(&options, sizeof options));
    options.running = running;
    options.submissions = submissions;
    options.events = events;
    OK(NVFP4_queue_create(model, &options, &queue));
    return queue;
}

static NVFP4_GenerateOptions generate_options(size_t max_tokens)
{
    NVFP4_GenerateOptions options;
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = max_tokens;
    options.ignore_model_stops = 1;
    options.temperature = 0.8f;
    options.seed = 7;
    return options;
}

/* A generation, and what has come of it. */
typedef struct {
    NVFP4_Session *session;
    uint64_t generation;
    size_t count;
    int32_t tokens[MOST];
    char text[8 * MOST];
    size_t text_length;
    int32_t finish;
    NVFP4_Status status;
    int ended;
} Client;

static void take(const NVFP4_QueueEvent *event)
{
    Client *client = event->user;
    CHECK(event->generation == client->generation && !client->ended);
    if (event->kind == NVFP4_EVENT_END) {
        CHECK(event->token == -1 && (event->status == NVFP4_OK) == (event->finish != NVFP4_FINISH_NONE));
        client->ended = 1;
        client->finish = event->finish;
        client->status = event->status;
        client->text_length = event->status == NVFP4_OK ? client->text_length : 0;
    } else {
        CHECK(event->status == NVFP4_OK && event->finish == NVFP4_FINISH_NONE && event->part == NVFP4_PART_CONTENT);
        CHECK((event->kind == NVFP4_EVENT_TOKEN) == (event->token >= 0));
        if (event->token >= 0)
            client->tokens[client->count++ % MOST] = event->token;
    }
    if (client->text_length + event->text_length < sizeof client->text) {
        memcpy(client->text + client->text_length, event->text, event->text_length);
        client->text_length += event->text_length;
    }
}

/* Takes events until `ends` generations have ended. */
static void run(NVFP4_Queue *queue, size_t ends)
{
    NVFP4_QueueEvent events[16];
    while (ends > 0) {
        size_t count = 99;
        OK(NVFP4_queue_wait(queue, events, sizeof events[0], 16, 60000, &count));
        CHECK(count > 0 && count <= 16);
        if (count == 0 || count > 16)
            return;
        for (size_t i = 0; i < count; i++) {
            take(&events[i]);
            ends -= events[i].kind == NVFP4_EVENT_END;
        }
    }
}

static uint64_t submit(NVFP4_Queue *queue, Client *client, size_t length, const NVFP4_GenerateOptions *options, double deadline)
{
    NVFP4_SubmitOptions submit;
    OK(NVFP4_submit_options_init(&submit, sizeof submit));
    submit.user = client;
    submit.deadline = deadline;
    client->ended = 0;
    client->count = client->text_length = 0;
    OK(NVFP4_queue_generate(queue, client->session, prompt, length, options, &submit, &client->generation));
    return client->generation;
}

/* The tokens and text of a blocking call with the same prompt. */
static size_t alone(size_t length, const NVFP4_GenerateOptions *options, int32_t *tokens, char *text, size_t *text_length)
{
    NVFP4_Session *session = create();
    size_t count;
    OK(NVFP4_session_prefill(session, prompt, length, NULL));
    OK(NVFP4_session_generate(session, options, NULL, NULL, NULL));
    OK(NVFP4_session_tokens(session, tokens, MOST, &count));
    OK(NVFP4_session_text(session, text, MOST, text_length));
    OK(NVFP4_session_release(session));
    return count;
}

/* Sixty-four conversations on this thread say what each says alone, turn after turn. */
static void many(void)
{
    static Client clients[MANY];
    static int32_t expected[MOST], tokens[MOST];
    static char text[MOST], own[MOST];
    NVFP4_Queue *queue = queue_of(MANY, MANY, 64);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < MANY; i++) {
            NVFP4_GenerateOptions options = generate_options((size_t)(5 + i % 20));
            if (turn == 0)
                clients[i].session = create();
            submit(queue, &clients[i], turn == 0 ? (size_t)(1 + i % PROMPT) : 0, &options, 0);
        }
        run(queue, MANY);
        for (int i = 0; i < MANY; i++) {
            Client *client = &clients[i];
            CHECK(client->ended && client->status == NVFP4_OK && client->finish == NVFP4_FINISH_LENGTH);
            if (turn == 0) {
                NVFP4_GenerateOptions options = generate_options((size_t)(5 + i % 20));
                size_t length, count, own_length;
                count = alone((size_t)(1 + i % PROMPT), &options, expected, text, &length);
                size_t held = 0;
                OK(NVFP4_session_tokens(client->session, tokens, MOST, &held));
                CHECK(held == count && memcmp(tokens, expected, count * sizeof *tokens) == 0);
                CHECK(client->count == options.max_tokens &&
                      memcmp(client->tokens, tokens + count - client->count, client->count * sizeof *tokens) == 0);
                CHECK(client->text_length == length && memcmp(client->text, text, length) == 0);
                OK(NVFP4_session_text(client->session, own, MOST, &own_length));
                CHECK(own_length == length && memcmp(own, text, length) == 0);
            }
            NVFP4_GenerationResult result = {.struct_size = sizeof result};
            OK(NVFP4_session_result(client->session, &result));
            CHECK(result.finish == NVFP4_FINISH_LENGTH && result.generated_tokens == client->count && result.seed == 7);
        }
    }
    for (int i = 0; i < MANY; i++)
        OK(NVFP4_session_release(clients[i].session));
    OK(NVFP4_queue_release(queue));
}

/* The session is in use until its end can be taken. */
static void busy(void)
{
    static Client client;
    NVFP4_Queue *queue = queue_of(2, 2, 100);
    NVFP4_GenerateOptions options = generate_options(ENDLESS);
    uint64_t number = 77;
    size_t length = 99, waiting = 9, running = 9, events = 9;
    client.session = create_endless();
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    OK(NVFP4_session_result(client.session, &result));
    CHECK(result.finish == NVFP4_FINISH_NONE && result.generated_tokens == 0);
    submit(queue, &client, PROMPT, &options, 0);
    FAILS(NVFP4_BUSY, NVFP4_queue_generate(queue, client.session, prompt, 1, NULL, NULL, &number));
    FAILS(NVFP4_BUSY, NVFP4_session_truncate(client.session, 0));
    OK(NVFP4_session_length(client.session, &length));
    CHECK(number == 77 && length == 0);
    OK(NVFP4_queue_cancel(queue, client.generation));
    run(queue, 1);
    CHECK(client.finish == NVFP4_FINISH_CANCELLED && client.status == NVFP4_OK);
    OK(NVFP4_session_length(client.session, &length));
    CHECK((length > 0) == (client.count > 0));
    OK(NVFP4_queue_cancel(queue, client.generation));
    OK(NVFP4_queue_counts(queue, &waiting, &running, &events));
    CHECK(waiting == 0 && running == 0 && events == 0);
    /* A deadline ends it too, and so does a cancel handle, which may be gone. */
    OK(NVFP4_session_reset(client.session));
    submit(queue, &client, PROMPT, &options, 0.05);
    run(queue, 1);
    CHECK(client.finish == NVFP4_FINISH_DEADLINE);
    OK(NVFP4_session_result(client.session, &result));
    CHECK(result.finish == NVFP4_FINISH_DEADLINE && result.generated_tokens == client.count);
    NVFP4_CallOptions call;
    NVFP4_Cancel *cancel = NULL;
    OK(NVFP4_cancel_create(&cancel));
    OK(NVFP4_call_options_init(&call, sizeof call));
    call.cancel = cancel;
    options.call = &call;
    OK(NVFP4_session_reset(client.session));
    submit(queue, &client, PROMPT, &options, 0);
    OK(NVFP4_cancel_trigger(cancel));
    OK(NVFP4_cancel_release(cancel));
    run(queue, 1);
    CHECK(client.finish == NVFP4_FINISH_CANCELLED);
    OK(NVFP4_session_release(client.session));
    OK(NVFP4_queue_release(queue));
}

/* A session that is released takes its generation with it, and so does a queue. */
static void released(void)
{
    static Client client;
    NVFP4_GenerateOptions options = generate_options(ENDLESS);
    NVFP4_Queue *queue = queue_of(2, 2, 5);
    client.session = create_endless();
    submit(queue, &client, PROMPT, &options, 0);
    OK(NVFP4_session_release(client.session));
    run(queue, 1);
    CHECK(client.finish == NVFP4_FINISH_CANCELLED);
    client.session = create_endless();
    submit(queue, &client, PROMPT, &options, 0);
    OK(NVFP4_queue_release(queue));
    NVFP4_Status status;
    size_t length;
    while ((status = NVFP4_session_tokens(client.session, NULL, 0, &length)) == NVFP4_BUSY)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    CHECK(status == NVFP4_OK);
    FAILS(NVFP4_INVALID_HANDLE, NVFP4_queue_cancel(queue, 1));
    OK(NVFP4_session_release(client.session));
}

static void *waits(void *argument)
{
    NVFP4_QueueEvent events[4];
    size_t count = 9;
    NVFP4_Status status;
    do {
        status = NVFP4_queue_wait(argument, events, sizeof events[0], 4, -1, &count);
    } while (status == NVFP4_BUSY);
    return (void *)(status == NVFP4_OK && count == 0 ? "woken" : NVFP4_status_name(status));
}

/* Waits: for a time, until they are woken, one at a time, by a descriptor; until the queue is released. */
static void waiting(void)
{
    static Client client;
    NVFP4_Queue *queue = queue_of(2, 2, 100);
    NVFP4_QueueEvent events[4];
    struct pollfd ready = {.fd = -1, .events = POLLIN};
    pthread_t thread;
    void *said = NULL;
    size_t count = 9;
    OK(NVFP4_queue_wait(queue, events, sizeof events[0], 4, 0, &count));
    CHECK(count == 0);
    OK(NVFP4_queue_wait(queue, events, sizeof events[0], 4, 20, &count));
    CHECK(count == 0);
    OK(NVFP4_queue_fd(queue, &ready.fd));
    CHECK(ready.fd >= 0 && poll(&ready, 1, 0) == 0);
    client.session = create();
    NVFP4_GenerateOptions options = generate_options(3);
    submit(queue, &client, PROMPT, &options, 0);
    CHECK(poll(&ready, 1, 60000) == 1);
    run(queue, 1);
    CHECK(poll(&ready, 1, 0) == 0);
    pthread_create(&thread, NULL, waits, queue);
    NVFP4_Status status;
    do {
        status = NVFP4_queue_wait(queue, events, sizeof events[0], 4, 0, &count);
    } while (status == NVFP4_OK);
    FAILS(NVFP4_BUSY, status = NVFP4_queue_wait(queue, events, sizeof events[0], 4, 0, &count));
    SAYS("another wait");
    OK(NVFP4_queue_wake(queue));
    pthread_join(thread, &said);
    CHECK(said != NULL && strcmp(said, "woken") == 0);
    pthread_create(&thread, NULL, waits, queue);
    nanosleep(&(struct timespec){0, 20000000}, NULL);
    OK(NVFP4_queue_release(queue));
    pthread_join(thread, &said);
    /* Released before the wait began, or during it. */
    CHECK(said != NULL && (strcmp(said, "CANCELLED") == 0 || strcmp(said, "INVALID_HANDLE") == 0));
    OK(NVFP4_session_release(client.session));
}

static int32_t progress(void *user, uint64_t done, uint64_t total)
{
    (void)user, (void)done, (void)total;
    return 0;
}

/* A paused generation is forked by the thread that takes its events; the fork says what the generation says. */
static void forked(void)
{
    enum { TOKENS = 40 };
    static int32_t whole[MOST], tokens[MOST];
    static Client client;
    NVFP4_Queue *queue = queue_of(1, 4, 3);
    NVFP4_Session *fork = NULL;
    NVFP4_GenerateOptions options = generate_options(TOKENS);
    size_t count, length = 0;
    client.session = create();
    submit(queue, &client, PROMPT, &options, 0);
    NVFP4_Status status;
    while ((status = NVFP4_session_fork(client.session, &fork)) == NVFP4_BUSY)
        SAYS("session");
    OK(status);
    OK(NVFP4_session_length(fork, &length));
    CHECK(length >= PROMPT && length <= PROMPT + 4);
    run(queue, 1);
    CHECK(client.count == TOKENS && client.finish == NVFP4_FINISH_LENGTH);
    options.max_tokens = PROMPT + TOKENS - length;
    OK(NVFP4_session_generate(fork, &options, NULL, NULL, NULL));
    OK(NVFP4_session_tokens(client.session, whole, MOST, &count));
    CHECK(count == PROMPT + TOKENS);
    OK(NVFP4_session_tokens(fork, tokens, MOST, &count));
    CHECK(count == PROMPT + TOKENS && memcmp(whole, tokens, count * sizeof *tokens) == 0);
    OK(NVFP4_session_release(fork));
    OK(NVFP4_session_release(client.session));
    OK(NVFP4_queue_release(queue));
}

/* The time in a queue counts from the submission: the first generation waits until its events are taken, the second until the first ends. */
static void queued(void)
{
    static Client first, second;
    NVFP4_Queue *queue = queue_of(1, 2, 1);
    NVFP4_GenerateOptions options = generate_options(4);
    NVFP4_GenerationResult results[2] = {{.struct_size = sizeof results[0]}, {.struct_size = sizeof results[0]}};
    first.session = create(), second.session = create();
    submit(queue, &first, PROMPT, &options, 0);
    submit(queue, &second, PROMPT, &options, 0);
    nanosleep(&(struct timespec){0, 40000000}, NULL);
    run(queue, 2);
    OK(NVFP4_session_result(first.session, &results[0]));
    OK(NVFP4_session_result(second.session, &results[1]));
    CHECK(results[1].queue_seconds >= 0.04 && results[1].first_token_seconds >= results[1].queue_seconds);
    CHECK(results[0].queue_seconds < results[1].queue_seconds);
    for (int i = 0; i < 2; i++) {
        const NVFP4_GenerationResult *result = &results[i];
        CHECK(fabs(result->first_token_seconds - result->queue_seconds - result->prefill_seconds) < 1e-6);
        CHECK(result->longest_gap_seconds > 0 && result->longest_gap_seconds <= result->decode_seconds);
        CHECK(result->cached_tokens < PROMPT && result->drafted_tokens == 0 && result->accepted_tokens == 0 && result->preemptions == 0);
    }
    OK(NVFP4_session_release(first.session));
    OK(NVFP4_session_release(second.session));
    OK(NVFP4_queue_release(queue));
}

/* Bad arguments are told before anything is submitted; faults of a generation come with its end. */
static void bad(const char *path)
{
    static Client client;
    NVFP4_Queue *queue = queue_of(1, 1, 100), *none = NULL;
    NVFP4_QueueOptions limits;
    NVFP4_SubmitOptions how;
    NVFP4_QueueEvent events[4];
    NVFP4_CallOptions call;
    uint64_t number = 0;
    size_t count = 0;
    int32_t unknown = 100000000;
    OK(NVFP4_queue_options_init(&limits, sizeof limits));
    limits.running = 0;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_create(model, &limits, &none));
    limits.running = -1;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_create(model, &limits, &none));
    SAYS("running is -1");
    client.session = create_endless();
    NVFP4_GenerateOptions options = generate_options(3);
    OK(NVFP4_submit_options_init(&how, sizeof how));
    how.deadline = -1;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_generate(queue, client.session, prompt, PROMPT, &options, &how, &number));
    how.deadline = NAN;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_generate(queue, client.session, prompt, PROMPT, &options, &how, &number));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_generate(queue, client.session, prompt, PROMPT, &options, NULL, NULL));
    FAILS(NVFP4_INVALID_HANDLE, NVFP4_queue_generate(queue, NULL, prompt, PROMPT, &options, NULL, &number));
    FAILS(NVFP4_INVALID_HANDLE, NVFP4_queue_generate(NULL, client.session, prompt, PROMPT, &options, NULL, &number));
    options.temperature = -1;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_generate(queue, client.session, prompt, PROMPT, &options, NULL, &number));
    options = generate_options(3);
    OK(NVFP4_call_options_init(&call, sizeof call));
    call.progress = progress;
    options.call = &call;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_generate(queue, client.session, prompt, PROMPT, &options, NULL, &number));
    SAYS("progress");
    options.call = NULL;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_wait(queue, events, sizeof events[0], 0, 0, &count));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_wait(queue, NULL, sizeof events[0], 4, 0, &count));
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_queue_wait(queue, events, 3, 4, 0, &count));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_wait(queue, events, sizeof events[0], 4, -2, &count));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_cancel(queue, 1));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_result(client.session, NULL));
    /* Nothing of it has touched the session. */
    OK(NVFP4_session_tokens(client.session, NULL, 0, &count));
    CHECK(count == 0 && number == 0);
    OK(NVFP4_submit_options_init(&how, sizeof how));
    how.user = &client;
    OK(NVFP4_queue_generate(queue, client.session, &unknown, 1, &options, &how, &client.generation));
    run(queue, 1);
    CHECK(client.status == NVFP4_INVALID_ARGUMENT && client.text_length > 0 && strstr(client.text, "100000000") != NULL);
    OK(NVFP4_queue_generate(queue, client.session, prompt, 0, &options, &how, &client.generation));
    client.ended = 0;
    run(queue, 1);
    CHECK(client.status == NVFP4_INVALID_ARGUMENT && strstr(client.text, "empty") != NULL);
    /* A full queue. */
    static Client other;
    other.session = create();
    options.max_tokens = ENDLESS;
    submit(queue, &client, PROMPT, &options, 0);
    FAILS(NVFP4_BUSY, NVFP4_queue_generate(queue, other.session, prompt, PROMPT, &options, NULL, &number));
    SAYS("full");
    OK(NVFP4_queue_cancel(queue, client.generation));
    run(queue, 1);
    /* One that ends before it has begun leaves its session as it was, with a result of its own. */
    static Client waits;
    NVFP4_GenerationResult ended = {.struct_size = sizeof ended};
    NVFP4_Queue *narrow = queue_of(1, 3, 100);
    NVFP4_GenerateOptions few = generate_options(3);
    char words[64];
    size_t held, said, length;
    waits.session = create();
    submit(narrow, &waits, PROMPT, &few, 0);
    run(narrow, 1);
    OK(NVFP4_session_length(waits.session, &held));
    CHECK(waits.finish == NVFP4_FINISH_LENGTH && held > PROMPT);
    submit(narrow, &client, PROMPT, &options, 0);
    for (int by_deadline = 0; by_deadline < 2; by_deadline++) {
        submit(narrow, &waits, PROMPT, &few, by_deadline ? 0.02 : 0);
        if (!by_deadline)
            OK(NVFP4_queue_cancel(narrow, waits.generation));
        while (!waits.ended)
            run(narrow, 1);
        CHECK(waits.finish == (by_deadline ? NVFP4_FINISH_DEADLINE : NVFP4_FINISH_CANCELLED) && waits.count == 0 && !client.ended);
        OK(NVFP4_session_result(waits.session, &ended));
        CHECK(ended.finish == waits.finish && ended.generated_tokens == 0);
        OK(NVFP4_session_text(waits.session, words, sizeof words, &said));
        CHECK(said == 0);
        OK(NVFP4_session_length(waits.session, &length));
        CHECK(length == held);
    }
    OK(NVFP4_queue_cancel(narrow, client.generation));
    run(narrow, 1);
    OK(NVFP4_session_release(waits.session));
    OK(NVFP4_queue_release(narrow));
    /* A session of another model. */
    NVFP4_Model *second = NULL;
    NVFP4_Session *foreign = NULL;
    OK(NVFP4_model_load(path, strlen(path), NULL, NULL, &second));
    OK(NVFP4_session_create(second, NULL, &foreign));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_generate(queue, foreign, prompt, PROMPT, NULL, NULL, &number));
    SAYS("another model");
    OK(NVFP4_session_reset(foreign));
    OK(NVFP4_session_release(foreign));
    OK(NVFP4_model_release(second));
    OK(NVFP4_session_release(other.session));
    OK(NVFP4_session_release(client.session));
    OK(NVFP4_queue_release(queue));
}

/* Chat turns, as text and as messages, and one of a model without a fitting template fails as the blocking call does. */
static void chats(void)
{
    static Client client;
    static char text[MOST];
    static const char json[] = "[{\"role\": \"user\", \"content\": \"Hello\"}]";
    NVFP4_Queue *queue = queue_of(2, 2, 100);
    NVFP4_GenerateOptions options = generate_options(9);
    NVFP4_SubmitOptions how;
    size_t length = 0;
    OK(NVFP4_submit_options_init(&how, sizeof how));
    how.user = &client;
    NVFP4_Session *same = create();
    OK(NVFP4_session_chat(same, "Hello", 5, NULL, &options, NULL, NULL, NULL));
    OK(NVFP4_session_text(same, text, sizeof text, &length));
    for (int as_messages = 0; as_messages < 2; as_messages++) {
        client = (Client){.session = create()};
        if (as_messages)
            OK(NVFP4_queue_chat_messages(queue, client.session, json, sizeof json - 1, NULL, &options, &how, &client.generation));
        else
            OK(NVFP4_queue_chat(queue, client.session, "Hello", 5, NULL, &options, &how, &client.generation));
        run(queue, 1);
        CHECK(client.status == NVFP4_OK && client.count == 9);
        CHECK(client.text_length == length && memcmp(client.text, text, length) == 0);
        size_t messages = 0;
        OK(NVFP4_session_messages(client.session, NULL, 0, &messages));
        CHECK(messages > 60);
        OK(NVFP4_session_release(client.session));
    }
    uint64_t number = 0;
    client.session = create();
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_queue_chat_messages(queue, client.session, "[", 1, NULL, &options, &how, &number));
    OK(NVFP4_session_release(client.session));
    OK(NVFP4_session_release(same));
    OK(NVFP4_queue_release(queue));
}

static uint32_t drawn;

static uint32_t draw(uint32_t below)
{
    drawn = drawn * 1664525u + 1013904223u;
    return (drawn >> 8) % below;
}

/* Generations that are cancelled, whose sessions are released and whose deadlines pass, at random: each ends once, and no block is lost. */
static void storm(unsigned all)
{
    enum { OPEN = 24 };
    static Client clients[OPEN];
    NVFP4_Queue *queue = queue_of(8, OPEN, 50);
    NVFP4_ModelStatistics statistics = {.struct_size = sizeof statistics};
    unsigned submitted = 0, open = 0, released = 0;
    for (int i = 0; i < OPEN; i++)
        clients[i].ended = 1;
    while (submitted < all || open > 0) {
        Client *client = &clients[draw(OPEN)];
        if (client->ended && submitted < all) {
            NVFP4_GenerateOptions options = generate_options(1 + draw(30));
            if (client->session == NULL)
                client->session = create();
            else if (draw(2))
                OK(NVFP4_session_reset(client->session));
            submit(queue, client, 1 + draw(PROMPT), &options, draw(10) == 0 ? 1e-3 * draw(20) + 1e-6 : 0);
            submitted++, open++;
        } else if (!client->ended && draw(3) == 0) {
            OK(NVFP4_queue_cancel(queue, client->generation));
        } else if (!client->ended && client->session != NULL && draw(6) == 0) {
            OK(NVFP4_session_release(client->session));
            client->session = NULL;
            released++;
        }
        NVFP4_QueueEvent events[16];
        size_t count = 0;
        OK(NVFP4_queue_wait(queue, events, sizeof events[0], 16, submitted < all ? 0 : 10, &count));
        for (size_t i = 0; i < count; i++) {
            take(&events[i]);
            open -= events[i].kind == NVFP4_EVENT_END;
        }
    }
    CHECK(released > 0);
    for (int i = 0; i < OPEN; i++) {
        CHECK(clients[i].ended && (clients[i].status == NVFP4_OK || clients[i].status == NVFP4_CONTEXT_FULL));
        OK(NVFP4_session_release(clients[i].session));
    }
    OK(NVFP4_queue_release(queue));
    OK(NVFP4_model_statistics(model, &statistics));
    CHECK(statistics.blocks_used == 0 && statistics.used_bytes == 0 && statistics.generating == 0 && statistics.waiting == 0);
}

int main(int argc, char **argv)
{
    if (argc != 2 && argc != 3)
        return 2;
    NVFP4_LoadOptions load;
    OK(NVFP4_load_options_init(&load, sizeof load));
    load.threads = 2;
    OK(NVFP4_model_load(argv[1], strlen(argv[1]), &load, NULL, &model));
    many();
    busy();
    released();
    waiting();
    forked();
    queued();
    bad(argv[1]);
    chats();
    storm(argc == 3 ? (unsigned)atoi(argv[2]) : 300);
    OK(NVFP4_model_release(model));
    return report("queue");
}
