/* Models and sessions: sessions MODEL_DIR SCRATCH_DIR, with a small random model, whose texts mean nothing. */
#include "check.h"
#include <pthread.h>
#include <stdlib.h>

enum { PROMPT = 12, NEW = 20, MOST = 512 };

static NVFP4_Model *model;
static size_t vocabulary;
static const int32_t prompt[PROMPT] = {17, 201, 33, 90, 4, 256, 77, 140, 8, 19, 300, 61};

static NVFP4_Session *create(const NVFP4_SessionOptions *options)
{
    NVFP4_Session *session = NULL;
    OK(NVFP4_session_create(model, options, &session));
    return session;
}

static NVFP4_GenerateOptions generate_options(size_t max_tokens)
{
    NVFP4_GenerateOptions options;
    OK(NVFP4_generate_options_init(&options, sizeof options));
    options.max_tokens = max_tokens;
    options.ignore_model_stops = 1;
    return options;
}

static size_t length_of(NVFP4_Session *session)
{
    size_t length = 0;
    OK(NVFP4_session_length(session, &length));
    return length;
}

static size_t tokens_of(NVFP4_Session *session, int32_t *tokens)
{
    size_t count = 0;
    OK(NVFP4_session_tokens(session, tokens, MOST, &count));
    return count;
}

/* Whether two sessions hold the same tokens and expect the same next. */
static int same(NVFP4_Session *a, NVFP4_Session *b)
{
    static int32_t x[MOST], y[MOST];
    static float u[MOST], v[MOST];
    size_t n = tokens_of(a, x), m = tokens_of(b, y), i = 0, j = 0;
    OK(NVFP4_session_logits(a, u, MOST, &i));
    OK(NVFP4_session_logits(b, v, MOST, &j));
    return n == m && memcmp(x, y, n * sizeof *x) == 0 && i == vocabulary && i == j && memcmp(u, v, i * sizeof *u) == 0;
}

static void models(const char *path)
{
    NVFP4_LoadOptions options;
    OK(NVFP4_load_options_init(&options, sizeof options));
    options.threads = 1;
    NVFP4_QuantizeOptions quantize;
    OK(NVFP4_quantize_options_init(&quantize, sizeof quantize));
    OK(NVFP4_model_load(path, strlen(path), &options, &quantize, NULL, NULL, &model));
    OK(NVFP4_model_vocab_size(model, &vocabulary));
    CHECK(vocabulary == 320);

    char text[4096];
    size_t length = 0, count = 0;
    OK(NVFP4_model_info(model, text, sizeof text, &length));
    CHECK(strlen(text) == length && strstr(text, "\"nvfp4\"") != NULL && strstr(text, "\"stop_tokens\":[0,2]") != NULL);

    int32_t tokens[16];
    OK(NVFP4_model_tokenize(model, "h\xc3\xa9llo", 6, 0, NULL, 0, &count));
    CHECK(count > 0 && count <= 6);
    FAILS(NVFP4_BUFFER_TOO_SMALL, NVFP4_model_tokenize(model, "h\xc3\xa9llo", 6, 0, tokens, 1, &count));
    OK(NVFP4_model_tokenize(model, "h\xc3\xa9llo", 6, 0, tokens, 16, &count));
    OK(NVFP4_model_detokenize(model, tokens, count, 1, text, sizeof text, &length));
    CHECK(length == 6 && strcmp(text, "h\xc3\xa9llo") == 0);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_model_tokenize(model, "\xff", 1, 0, tokens, 16, &count));
    SAYS("UTF-8");

    const NVFP4_Message messages[] = {{"system", 6, "Be brief.", 9}, {"user", 4, "Hi", 2}};
    OK(NVFP4_model_render_chat(model, messages, 2, 1, text, sizeof text, &length));
    CHECK(strcmp(text, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                       "<|im_start|>assistant\n") == 0);
}

static void prefill_and_decode(void)
{
    NVFP4_Session *whole = create(NULL), *single = create(NULL), *grown = create(NULL);
    OK(NVFP4_session_prefill(whole, prompt, PROMPT));
    OK(NVFP4_session_prefill_token_by_token(single, prompt, PROMPT));
    CHECK(same(whole, single));
    OK(NVFP4_session_prefill(grown, prompt, 5));
    for (int i = 5; i < PROMPT; i++)
        OK(NVFP4_session_decode(grown, prompt[i]));
    CHECK(same(whole, grown));

    /* The likeliest token is the one with the largest logit. */
    float logits[MOST];
    size_t count;
    OK(NVFP4_session_logits(whole, NULL, 0, &count));
    CHECK(count == vocabulary);
    FAILS(NVFP4_BUFFER_TOO_SMALL, NVFP4_session_logits(whole, logits, count - 1, &count));
    OK(NVFP4_session_logits(whole, logits, MOST, &count));
    int32_t best = 0, token = -1;
    for (int32_t i = 0; i < (int32_t)count; i++)
        best = logits[i] > logits[best] ? i : best;
    OK(NVFP4_session_sample(whole, NULL, &token));
    CHECK(token == best && length_of(whole) == PROMPT);

    /* Sampling and appending, one by one, is what generating does. */
    NVFP4_GenerateOptions options = generate_options(NEW);
    options.temperature = 1.2f;
    options.top_k = 40;
    options.top_p = 0.95f;
    options.min_p = 0.01f;
    options.repetition_penalty = 1.1f;
    options.seed = 7;
    for (int i = 0; i < NEW; i++) {
        OK(NVFP4_session_sample(single, &options, &token));
        OK(NVFP4_session_decode(single, token));
    }
    OK(NVFP4_session_generate(whole, &options, NULL, NULL, NULL));
    CHECK(same(whole, single));
    options.replay = 1;
    OK(NVFP4_session_generate(grown, &options, NULL, NULL, NULL));
    CHECK(same(whole, grown));

    /* Another seed, another text. */
    OK(NVFP4_session_truncate(grown, PROMPT));
    options.replay = 0;
    options.seed = 8;
    OK(NVFP4_session_generate(grown, &options, NULL, NULL, NULL));
    CHECK(length_of(grown) == PROMPT + NEW && !same(whole, grown));

    size_t context = 0;
    uint64_t bytes = 0, before, after, peak;
    OK(NVFP4_session_context(whole, &context));
    CHECK(context == 256);
    OK(NVFP4_session_memory(whole, &bytes));
    OK(NVFP4_memory_stats(NVFP4_MEMORY_KV_CACHE, &before, &peak));
    CHECK(bytes > 0 && before >= 3 * bytes);
    OK(NVFP4_session_release(single));
    OK(NVFP4_memory_stats(NVFP4_MEMORY_KV_CACHE, &after, &peak));
    CHECK(after < before);

    OK(NVFP4_session_reset(whole));
    CHECK(length_of(whole) == 0);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_logits(whole, logits, MOST, &count));
    SAYS("empty");
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_decode(whole, -1));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_decode(whole, 320));
    SAYS("320");
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_truncate(whole, 1));
    OK(NVFP4_session_release(whole));
    OK(NVFP4_session_release(grown));
}

/* What a callback saw, and what it is to do. */
typedef struct {
    NVFP4_Session *session;
    char text[4 * MOST];
    size_t bytes, calls, break_at;
    int32_t tokens[MOST];
    NVFP4_Status within;
    int cancel, release, wait, done;
} Seen;

static void *another_thread(void *session)
{
    static NVFP4_Status status;
    status = NVFP4_session_decode(session, 3);
    return &status;
}

static int32_t on_token(void *user, int32_t token, const char *text, size_t length)
{
    Seen *seen = user;
    memcpy(seen->text + seen->bytes, text, length);
    seen->bytes += length;
    if (seen->calls < MOST)
        seen->tokens[seen->calls] = token;
    seen->calls++;
    if (seen->session != NULL) {
        size_t n;
        seen->within = NVFP4_session_reset(seen->session);
        OK(NVFP4_session_context(seen->session, &n));
        if (seen->wait) {
            pthread_t thread;
            void *status;
            CHECK(pthread_create(&thread, NULL, another_thread, seen->session) == 0);
            CHECK(pthread_join(thread, &status) == 0 && *(NVFP4_Status *)status == NVFP4_BUSY);
        }
        if (seen->cancel)
            OK(NVFP4_session_cancel(seen->session));
        if (seen->release)
            OK(NVFP4_session_release(seen->session));
        seen->release = 0;
    }
    return seen->calls == seen->break_at;
}

static void streaming(void)
{
    static Seen seen;
    static int32_t tokens[MOST];
    static char text[4 * MOST];
    size_t length;
    NVFP4_GenerationResult result = {.struct_size = sizeof result, .finish = -1};
    NVFP4_GenerateOptions options = generate_options(NEW);
    NVFP4_Session *session = create(NULL);
    OK(NVFP4_session_text(session, text, sizeof text, &length));
    CHECK(length == 0);
    OK(NVFP4_session_prefill(session, prompt, PROMPT));
    OK(NVFP4_session_generate(session, &options, on_token, &seen, &result));
    CHECK(result.finish == NVFP4_FINISH_LENGTH && result.prompt_tokens == PROMPT && result.generated_tokens == NEW);
    CHECK(result.first_token_seconds >= result.prefill_seconds && result.decode_seconds > 0);
    CHECK(tokens_of(session, tokens) == PROMPT + NEW && memcmp(tokens + PROMPT, seen.tokens, NEW * sizeof *tokens) == 0);
    OK(NVFP4_session_text(session, text, sizeof text, &length));
    CHECK(length == seen.bytes && length > 0 && memcmp(text, seen.text, length) == 0);

    /* The same again, and a stop token, which is not part of it. */
    static Seen again;
    int32_t stop = seen.tokens[7];
    size_t at = 0;
    while (seen.tokens[at] != stop)
        at++;
    OK(NVFP4_session_truncate(session, PROMPT));
    options.stop_tokens = &stop;
    options.stop_token_count = 1;
    OK(NVFP4_session_generate(session, &options, on_token, &again, &result));
    CHECK(result.finish == NVFP4_FINISH_STOP && result.generated_tokens == at && length_of(session) == PROMPT + at);
    options.stop_tokens = NULL;
    options.stop_token_count = 0;

    /* A stop string: the text ends before it. */
    static const char *stops[2] = {"never", NULL};
    size_t lengths[2] = {5, 3}, where = 6;
    while (where < seen.bytes && (text[where] & 0x80) != 0)
        where++;
    stops[1] = text + where;
    while (lengths[1] > 1 && ((stops[1][1] | stops[1][2]) & 0x80) != 0)
        lengths[1] = 1;
    options.stop_strings = stops;
    options.stop_string_lengths = lengths;
    options.stop_string_count = 2;
    OK(NVFP4_session_truncate(session, PROMPT));
    memset(&again, 0, sizeof again);
    OK(NVFP4_session_generate(session, &options, on_token, &again, &result));
    CHECK(result.finish == NVFP4_FINISH_STOP_STRING && again.bytes <= where);
    CHECK(memcmp(again.text, seen.text, again.bytes) == 0);
    options.stop_strings = NULL;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_generate(session, &options, NULL, NULL, NULL));
    SAYS("stop_strings");
    options.stop_string_count = 0;

    /* Ended by the callback, and by a cancel call; what came until then is kept. */
    OK(NVFP4_session_truncate(session, PROMPT));
    memset(&again, 0, sizeof again);
    again.break_at = 4;
    OK(NVFP4_session_generate(session, &options, on_token, &again, &result));
    CHECK(result.finish == NVFP4_FINISH_CANCELLED && result.generated_tokens == 4 && length_of(session) == PROMPT + 4);
    OK(NVFP4_session_truncate(session, PROMPT));
    memset(&again, 0, sizeof again);
    again.session = session;
    again.cancel = 1;
    again.wait = 1;
    OK(NVFP4_session_generate(session, &options, on_token, &again, &result));
    CHECK(again.within == NVFP4_BUSY);
    CHECK(result.finish == NVFP4_FINISH_CANCELLED && result.generated_tokens == 1);
    /* That ended the call then running, and none after it. */
    OK(NVFP4_session_cancel(session));
    OK(NVFP4_session_generate(session, &options, NULL, NULL, &result));
    CHECK(result.finish == NVFP4_FINISH_LENGTH);

    /* Releasing the session while it runs lets it end. */
    OK(NVFP4_session_truncate(session, PROMPT));
    memset(&again, 0, sizeof again);
    again.session = session;
    again.release = 1;
    options.max_tokens = 1;
    OK(NVFP4_session_generate(session, &options, on_token, &again, &result));
    CHECK(result.generated_tokens == 1);
    FAILS(NVFP4_INVALID_HANDLE, NVFP4_session_reset(session));
    SAYS("stale");

    /* A host built with the struct as it was before times were added to it. */
    session = create(NULL);
    OK(NVFP4_session_prefill(session, prompt, PROMPT));
    struct { NVFP4_GenerationResult known; uint64_t unknown; } newer = {.known = {.struct_size = sizeof newer}, .unknown = 1};
    result.struct_size = 24;
    result.decode_seconds = -1;
    options.max_tokens = 2;
    OK(NVFP4_session_generate(session, &options, NULL, NULL, &result));
    CHECK(result.struct_size == 24 && result.generated_tokens == 2 && result.decode_seconds <= -1);
    OK(NVFP4_session_generate(session, &options, NULL, NULL, &newer.known));
    CHECK(newer.known.generated_tokens == 2 && newer.unknown == 0);
    result.struct_size = 0;
    FAILS(NVFP4_ABI_MISMATCH, NVFP4_session_generate(session, &options, NULL, NULL, &result));
    CHECK(length_of(session) == PROMPT + 4);
    OK(NVFP4_session_release(session));
}

static void *cancel_often(void *user)
{
    Seen *seen = user;
    while (!__atomic_load_n(&seen->done, __ATOMIC_ACQUIRE))
        if (NVFP4_session_cancel(seen->session) != NVFP4_OK)
            return user;
    return NULL;
}

/* Anything but a generation fails when it is cancelled, and has changed nothing. */
static void cancelled_prefill(void)
{
    static Seen seen;
    static int32_t tokens[240];
    for (int i = 0; i < 240; i++)
        tokens[i] = prompt[i % PROMPT];
    seen.session = create(NULL);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, cancel_often, &seen) == 0);
    NVFP4_Status status = NVFP4_OK;
    /* A cancel call may come too early or too late for any one prefill, not for all of them. */
    for (int i = 0; i < 1000 && status == NVFP4_OK; i++) {
        OK(NVFP4_session_reset(seen.session));
        status = NVFP4_session_prefill(seen.session, tokens, 240);
    }
    FAILS(NVFP4_CANCELLED, status);
    CHECK(length_of(seen.session) == 0);
    __atomic_store_n(&seen.done, 1, __ATOMIC_RELEASE);
    void *failed = &seen;
    CHECK(pthread_join(thread, &failed) == 0 && failed == NULL);
    OK(NVFP4_session_prefill(seen.session, tokens, 240));
    OK(NVFP4_session_release(seen.session));
}

static void chat(void)
{
    static Seen seen;
    static char json[8 * MOST];
    size_t length;
    NVFP4_SessionOptions options;
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.system = "Be brief.";
    options.system_length = 9;
    options.kv_type = NVFP4_KV_FLOAT32;
    NVFP4_Session *session = create(&options);
    NVFP4_GenerateOptions generate = generate_options(8);
    NVFP4_GenerationResult first = {.struct_size = sizeof first}, second = {.struct_size = sizeof second};
    OK(NVFP4_session_chat(session, "Hi", 2, &generate, on_token, &seen, &first));
    CHECK(seen.calls >= 8 && first.generated_tokens == 8 && length_of(session) == first.prompt_tokens + 8);
    /* The second turn runs what it adds, not the conversation. */
    OK(NVFP4_session_chat(session, "Hi", 2, &generate, NULL, NULL, &second));
    CHECK(second.prompt_tokens < first.prompt_tokens);
    CHECK(length_of(session) == first.prompt_tokens + second.prompt_tokens + 16);
    OK(NVFP4_session_messages(session, json, sizeof json, &length));
    static const char begins[] = "[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":\"Hi\"},"
                                 "{\"role\":\"assistant\",\"content\":\"";
    CHECK(strncmp(json, begins, strlen(begins)) == 0);
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_chat(session, "\xc3", 1, &generate, NULL, NULL, NULL));
    SAYS("UTF-8");

    /* A prefilled session is no conversation. */
    OK(NVFP4_session_reset(session));
    OK(NVFP4_session_prefill(session, prompt, PROMPT));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_chat(session, "Hi", 2, &generate, NULL, NULL, NULL));
    SAYS("12 tokens");
    OK(NVFP4_session_release(session));
}

typedef struct Looker {
    NVFP4_Session *session;
    size_t length, json_length, calls;
    uint64_t memory;
    char json[8 * MOST];
} Looker;

static void look(Looker *looker)
{
    OK(NVFP4_session_length(looker->session, &looker->length));
    OK(NVFP4_session_memory(looker->session, &looker->memory));
    OK(NVFP4_session_messages(looker->session, looker->json, sizeof looker->json, &looker->json_length));
}

static void *look_from_another_thread(void *looker)
{
    look(looker);
    return NULL;
}

static int32_t on_looking(void *user, int32_t token, const char *text, size_t length)
{
    Looker *looker = user;
    pthread_t thread;
    (void)token, (void)text, (void)length;
    if (looker->calls++ == 0) {
        CHECK(pthread_create(&thread, NULL, look_from_another_thread, looker) == 0);
        CHECK(pthread_join(thread, NULL) == 0);
    } else {
        look(looker);
    }
    return 0;
}

/* During a call a session tells its length, memory and messages as they were before it, to its own callback and to others. */
static void looking(void)
{
    static Looker before, within, after;
    NVFP4_GenerateOptions generate = generate_options(NEW);
    NVFP4_Session *session = create(NULL);
    before.session = within.session = after.session = session;
    OK(NVFP4_session_chat(session, "Hi", 2, &generate, NULL, NULL, NULL));
    look(&before);
    OK(NVFP4_session_chat(session, "Once more, at some length", 25, &generate, on_looking, &within, NULL));
    look(&after);
    CHECK(within.calls >= NEW && within.length == before.length && within.memory == before.memory);
    CHECK(strcmp(within.json, before.json) == 0 && strstr(after.json, "Once more") != NULL);
    CHECK(after.length > before.length && after.memory >= before.memory);
    OK(NVFP4_session_release(session));
}

static void full_contexts(void)
{
    NVFP4_SessionOptions options;
    OK(NVFP4_session_options_init(&options, sizeof options));
    options.context = 16;
    NVFP4_Session *session = create(&options);
    NVFP4_GenerateOptions generate = generate_options(NEW);
    NVFP4_GenerationResult result = {.struct_size = sizeof result};
    OK(NVFP4_session_prefill(session, prompt, PROMPT));
    FAILS(NVFP4_CONTEXT_FULL, NVFP4_session_prefill(session, prompt, 5));
    SAYS("12 of 16");
    OK(NVFP4_session_generate(session, &generate, NULL, NULL, &result));
    CHECK(result.finish == NVFP4_FINISH_CONTEXT && result.generated_tokens == 4);
    FAILS(NVFP4_CONTEXT_FULL, NVFP4_session_decode(session, 3));
    OK(NVFP4_session_release(session));

    options.eviction = NVFP4_EVICTION_DROP_OLDEST;
    options.keep = 2;
    session = create(&options);
    OK(NVFP4_session_prefill(session, prompt, PROMPT));
    OK(NVFP4_session_generate(session, &generate, NULL, NULL, &result));
    CHECK(result.finish == NVFP4_FINISH_LENGTH && result.generated_tokens == NEW && length_of(session) <= 16);
    static int32_t tokens[MOST];
    tokens_of(session, tokens);
    CHECK(tokens[0] == prompt[0] && tokens[1] == prompt[1] && tokens[2] != prompt[2]);
    OK(NVFP4_session_release(session));

    NVFP4_Session *none = NULL;
    options.keep = 16;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_create(model, &options, &none));
    options.keep = 2;
    options.eviction = 9;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_create(model, &options, &none));
    SAYS("drop oldest");
    options.eviction = 0;
    options.reserved = 1;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_create(model, &options, &none));
    CHECK(none == NULL);
}

static void forks_and_files(const char *scratch)
{
    char path[1024];
    int written = snprintf(path, sizeof path, "%s/sessions.nvfp4session", scratch);
    CHECK(written > 0 && written < (int)sizeof path);
    NVFP4_GenerateOptions options = generate_options(NEW);
    NVFP4_Session *session = create(NULL), *fork = NULL, *restored = NULL, *none = NULL;
    OK(NVFP4_session_chat(session, "Hi", 2, &options, NULL, NULL, NULL));
    OK(NVFP4_session_save(session, path, strlen(path)));
    OK(NVFP4_session_fork(session, &fork));
    OK(NVFP4_session_restore(model, path, strlen(path), &restored));
    CHECK(same(session, fork) && same(session, restored));
    OK(NVFP4_session_chat(session, "More", 4, &options, NULL, NULL, NULL));
    CHECK(!same(session, fork) && same(fork, restored));
    OK(NVFP4_session_chat(fork, "More", 4, &options, NULL, NULL, NULL));
    OK(NVFP4_session_chat(restored, "More", 4, &options, NULL, NULL, NULL));
    CHECK(same(session, fork) && same(session, restored));

    FAILS(NVFP4_IO, NVFP4_session_save(session, "/dev/null/x", 11));
    FAILS(NVFP4_NOT_FOUND, NVFP4_session_restore(model, "/nowhere", 8, &none));
    FILE *file = fopen(path, "r+b");
    CHECK(file != NULL && fseek(file, 200, SEEK_SET) == 0 && fputc(0x5a, file) == 0x5a && fclose(file) == 0);
    FAILS(NVFP4_CORRUPT_FILE, NVFP4_session_restore(model, path, strlen(path), &none));
    CHECK(none == NULL && remove(path) == 0);
    OK(NVFP4_session_release(session));
    OK(NVFP4_session_release(fork));
    OK(NVFP4_session_release(restored));
}

static void batches(const char *path)
{
    enum { COUNT = 3 };
    NVFP4_Session *together[COUNT], *alone[COUNT];
    int32_t tokens[COUNT];
    for (int i = 0; i < COUNT; i++) {
        together[i] = create(NULL);
        OK(NVFP4_session_prefill(together[i], prompt, (size_t)(PROMPT - 3 * i)));
        OK(NVFP4_session_fork(together[i], &alone[i]));
    }
    for (int n = 0; n < 6; n++) {
        for (int i = 0; i < COUNT; i++) {
            OK(NVFP4_session_sample(together[i], NULL, &tokens[i]));
            OK(NVFP4_session_decode(alone[i], tokens[i]));
        }
        OK(NVFP4_session_step(together, tokens, COUNT));
    }
    for (int i = 0; i < COUNT; i++)
        CHECK(same(together[i], alone[i]));
    OK(NVFP4_session_step(NULL, NULL, 0));

    /* Each of these changes nothing. */
    NVFP4_Session *bad[COUNT] = {together[0], together[1], together[0]};
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_step(bad, tokens, COUNT));
    SAYS("sessions[2]");
    bad[2] = NULL;
    FAILS(NVFP4_INVALID_HANDLE, NVFP4_session_step(bad, tokens, COUNT));
    SAYS("sessions[2]");
    NVFP4_Model *other = NULL;
    OK(NVFP4_model_load(path, strlen(path), NULL, NULL, NULL, NULL, &other));
    OK(NVFP4_session_create(other, NULL, &bad[2]));
    /* The session keeps its model. */
    OK(NVFP4_model_release(other));
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_step(bad, tokens, COUNT));
    SAYS("another model");
    OK(NVFP4_session_prefill(bad[2], prompt, PROMPT));
    OK(NVFP4_session_release(bad[2]));
    tokens[1] = 320;
    FAILS(NVFP4_INVALID_ARGUMENT, NVFP4_session_step(together, tokens, COUNT));
    for (int i = 0; i < COUNT; i++) {
        CHECK(same(together[i], alone[i]));
        OK(NVFP4_session_release(together[i]));
        OK(NVFP4_session_release(alone[i]));
    }
}

static int32_t stop_loading(void *user, uint64_t done, uint64_t total)
{
    CHECK(done <= total);
    return ++*(int *)user == 1;
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: sessions MODEL_DIR SCRATCH_DIR\n");
        return 2;
    }
    models(argv[1]);
    prefill_and_decode();
    streaming();
    cancelled_prefill();
    chat();
    looking();
    full_contexts();
    forks_and_files(argv[2]);
    batches(argv[1]);

    int calls = 0;
    NVFP4_Model *none = NULL;
    FAILS(NVFP4_CANCELLED, NVFP4_model_load(argv[1], strlen(argv[1]), NULL, NULL, stop_loading, &calls, &none));
    CHECK(none == NULL && calls == 1);
    OK(NVFP4_model_release(model));
    uint64_t current, peak;
    OK(NVFP4_memory_stats(NVFP4_MEMORY_WEIGHTS, &current, &peak));
    CHECK(current == 0 && peak > 0);
    OK(NVFP4_memory_stats(NVFP4_MEMORY_KV_CACHE, &current, &peak));
    CHECK(current == 0);
    return report("sessions");
}
