/* nvfp4.hpp where nothing is thrown, in one program with wrapper.cpp, where errors are. */
#define NVFP4_NO_EXCEPTIONS
#include <nvfp4.hpp>

#include <cstdio>

extern "C" int without_exceptions(const char *path);

namespace {

int failures;

#define CHECK(condition)                                                          \
    do {                                                                          \
        if (!(condition)) {                                                       \
            failures++;                                                           \
            std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);   \
        }                                                                         \
    } while (0)

template <class T>
bool failed(const nvfp4::Result<T> &result, NVFP4_Status status)
{
    return !result && result.status() == status && result.error().status() == status && result.error().what()[0] != '\0';
}

void tensors()
{
    CHECK(nvfp4::check_version() && nvfp4::check(NVFP4_OK) && failed(nvfp4::set_threads(-5), NVFP4_INVALID_ARGUMENT));
    float data[32] = {1, 2, 3, 4, 5, 6};
    nvfp4::Result<nvfp4::Tensor> tensor = nvfp4::Tensor::borrow(data, {2, 16});
    CHECK(tensor && tensor.status() == NVFP4_OK && *tensor->elements() == 32 && *tensor->data() == data);
    CHECK(failed(tensor->view({7, 7}), NVFP4_INVALID_ARGUMENT) && failed(tensor->view({2}, {1, 1}), NVFP4_INVALID_ARGUMENT));
    nvfp4::Result<nvfp4::Quantized> quantized = nvfp4::quantize(*tensor);
    CHECK(quantized && nvfp4::dequantize(*quantized)->to_floats()->at(0) == 1);
    nvfp4::Result<nvfp4::Weight> weight = nvfp4::Weight::prepare(*quantized);
    CHECK(weight && weight->size()->n == 2 && *weight->linear(*tensor)->shape() == (std::vector<std::int64_t>{2, 2}));
    nvfp4::WeightOptions options;
    options.backend_name = "none such";
    CHECK(failed(nvfp4::Weight::prepare(*quantized, options), NVFP4_INVALID_ARGUMENT));
    CHECK(!*nvfp4::can_be_managed(1 << 20) && failed(nvfp4::drop_in::quantize(nvfp4::Tensor()), NVFP4_INVALID_HANDLE));

    /* After a failure there is an empty value, and using that fails too. */
    nvfp4::Result<nvfp4::Tensor> none = nvfp4::Tensor::zeros({-1});
    CHECK(failed(none, NVFP4_INVALID_ARGUMENT) && !*none && failed(none->shape(), NVFP4_INVALID_HANDLE));
    CHECK(failed(none->clone(), NVFP4_INVALID_HANDLE) && failed(none->to_vector<float>(), NVFP4_INVALID_HANDLE));
    CHECK(failed(none->values<float>(), NVFP4_INVALID_HANDLE) && failed(none->to_floats(), NVFP4_INVALID_HANDLE));

    int told = 0;
    CHECK(!nvfp4::Tensor::adopt(data, {32}, 99, [&](void *) { told++; }) && told == 0);
    CHECK(nvfp4::Tensor::adopt(data, {32}, NVFP4_DTYPE_FLOAT32, [&](void *) { told++; }) && told == 0);
    CHECK(told == 1);
    CHECK(nvfp4::Tensor::adopt(std::vector<float>(4), {4}) && failed(nvfp4::Tensor::adopt(std::vector<float>(4), {5}),
                                                                    NVFP4_INVALID_ARGUMENT));
    int lines = 0;
    {
        nvfp4::Result<nvfp4::Log> log = nvfp4::Log::start(NVFP4_LOG_DEBUG, [&](std::int32_t, std::string_view) { lines++; });
        CHECK(log && !nvfp4::set_threads(-5) && lines == 1);
    }
    CHECK(!nvfp4::set_threads(-5) && lines == 1);
}

void sessions(const char *path)
{
    CHECK(failed(nvfp4::Model::load("/nowhere"), NVFP4_NOT_FOUND));
    const nvfp4::LoadOptions load;
    CHECK(failed(nvfp4::Model::load(path, load, nullptr, [](std::uint64_t, std::uint64_t) { return false; }), NVFP4_CANCELLED));
    CHECK(failed(nvfp4::Model::load_files({}, load), NVFP4_INVALID_ARGUMENT));
    nvfp4::Result<nvfp4::Model> model = nvfp4::Model::load(path);
    CHECK(model && model->statistics()->passes == 0);
    CHECK(model && *model->vocab_size() == 320 && model->info() && model->tokenize("Hello")->size() > 0);
    CHECK(failed(model->tokenize("\xff"), NVFP4_INVALID_ARGUMENT));
    nvfp4::Result<nvfp4::Session> session = nvfp4::Session::create(*model);
    nvfp4::GenerateOptions options;
    options.max_tokens = 8;
    options.ignore_model_stops = 1;
    std::string heard;
    nvfp4::Result<nvfp4::Generation> answer = session->chat("Hi", options, [&](std::string_view text) { heard += text; });
    CHECK(answer && answer->text == heard && answer->generated_tokens == 8);
    CHECK(session->clear());

    const char *messages = R"([{"role": "user", "content": "Hi"}])";
    nvfp4::ChatOptions chat;
    CHECK(session->chat_messages(messages, chat, options)->text == heard && session->reasoning()->empty());
    CHECK(model->generate_options()->max_tokens == SIZE_MAX && !model->render_messages(messages)->empty());
    chat.tools_json = R"([{"name": "f"}])";
    CHECK(failed(session->chat_messages(messages, chat, options), NVFP4_UNSUPPORTED) && *session->tool_calls() == "[]");
    CHECK(session->clear());

    /* A cancel handle is one from the beginning; an empty one is not taken for none. */
    nvfp4::Cancel cancel;
    const nvfp4::Cancel nothing(nullptr);
    CHECK(cancel && cancel.trigger() && *cancel.triggered() && failed(nothing.triggered(), NVFP4_INVALID_HANDLE));
    const nvfp4::CallOptions stopped(cancel), empty(nothing);
    CHECK(failed(session->prefill({1, 2, 3}, &stopped), NVFP4_CANCELLED) && failed(session->prefill({1, 2, 3}, &empty), NVFP4_INVALID_HANDLE));
    CHECK(model->tokenize_plain("<|im_end|>")->size() > 1 && session->clear());
    CHECK(model->special_tokens()->size() == 3);
    CHECK(model->token_bytes(2)->bytes == "<|im_end|>" && failed(model->token_bytes(320), NVFP4_INVALID_ARGUMENT));

    std::string text;
    nvfp4::Stream stream = session->ask("Hi", options);
    for (const nvfp4::Piece &piece : stream)
        text += piece.text;
    CHECK(text == heard && stream.result()->text == heard && *session->text() == heard);

    /* A failed generation has no pieces, and its result says why. */
    options.temperature = -1;
    nvfp4::Stream none = session->stream(options);
    CHECK(none.begin() == none.end() && failed(none.result(), NVFP4_INVALID_ARGUMENT));
    CHECK(failed(nvfp4::Stream().result(), NVFP4_INVALID_HANDLE) && failed(session->generate(options), NVFP4_INVALID_ARGUMENT));
    CHECK(failed(nvfp4::step({&*session}, {1, 2}), NVFP4_INVALID_ARGUMENT));
    CHECK(failed(nvfp4::Session::restore(*model, "/nowhere"), NVFP4_NOT_FOUND));
}

} // namespace

int without_exceptions(const char *path)
{
    tensors();
    sessions(path);
    return failures;
}
