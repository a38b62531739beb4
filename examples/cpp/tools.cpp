/* A conversation with a model that may call a tool, in C++: it asks for the weather, the program looks it up, and the model
 * answers.
 *
 *     c++ -std=c++17 tools.cpp $(pkg-config --cflags --libs nvfp4) -o tools
 *     ./tools MODEL "How is the weather in Paris?"
 */
#include <nvfp4.hpp>

#include <iostream>
#include <string>

namespace {

const char tools[] = R"([{"type": "function", "function": {"name": "weather", "description": "The weather in a city now.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])";

/* The result of these calls, as the contents of a JSON string. A real tool parses the arguments, which are a string of JSON, and
 * reads the city. */
std::string weather(const std::string &calls)
{
    return calls.find("Paris") != std::string::npos ? "Rain, 12 degrees" : "Sun, 25 degrees";
}

} // namespace

int main(int argc, char **argv)
try {
    if (argc != 3) {
        std::cerr << "usage: " << argv[0] << " MODEL QUESTION\n";
        return 2;
    }
    const nvfp4::Model model(argv[1]);
    nvfp4::Session session(model);
    const nvfp4::GenerateOptions options = model.generate_options();
    const auto print = [](const nvfp4::Piece &piece) {
        /* A call is passed in one piece, when it is complete. */
        if (piece.part == NVFP4_PART_TOOL_CALL)
            std::cerr << "[calls " << piece.text << "]\n";
        if (piece.part == NVFP4_PART_CONTENT)
            std::cout << piece.text << std::flush;
    };

    nvfp4::ChatOptions chat;
    chat.tools_json = tools;
    nvfp4::Generation answer = session.chat(argv[2], chat, options, print);

    /* The model calls tools until it has its answer. The limit is for models that never stop calling. */
    for (int turn = 0; answer.tool_calls > 0 && turn < 5; turn++) {
        std::string messages = session.messages();
        messages.pop_back();
        /* One result for each call, in their order. Each may name its call in `tool_call_id`. */
        for (std::size_t i = 0; i < answer.tool_calls; i++)
            messages += R"(,{"role":"tool","content":")" + weather(session.tool_calls()) + "\"}";
        answer = session.chat_messages(messages + "]", options, print);
    }
    std::cout << std::endl;
    return 0;
} catch (const nvfp4::Error &error) {
    std::cerr << error.name() << ": " << error.what() << '\n';
    return 1;
}
