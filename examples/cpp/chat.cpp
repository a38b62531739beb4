/* Talk with a language model, in C++.
 *
 *     c++ -std=c++17 chat.cpp $(pkg-config --cflags --libs nvfp4) -o chat
 *     ./chat MODEL "Why is the sky blue?"     answers and ends
 *     ./chat MODEL                            a conversation, one turn per line
 */
#include <nvfp4.hpp>

#include <iostream>
#include <string>

int main(int argc, char **argv)
try {
    if (argc != 2 && argc != 3) {
        std::cerr << "usage: " << argv[0] << " MODEL [PROMPT]\n";
        return 2;
    }
    /* The GPU with room for the model is taken, or else the CPU; the log says which and why. */
    nvfp4::Log log(NVFP4_LOG_INFO, [](std::int32_t, std::string_view line) { std::cerr << '[' << line << "]\n"; });
    nvfp4::SessionOptions session_options("You are a helpful assistant.");
    session_options.eviction = NVFP4_EVICTION_DROP_OLDEST;
    const nvfp4::Model model(argv[1]);
    nvfp4::Session session(model, session_options);

    /* The sampling settings that the model recommends. Without any it is greedy, and small models tend to repeat themselves. */
    nvfp4::GenerateOptions options = model.generate_options();
    if (options.temperature <= 0 && options.repetition_penalty <= 1)
        options.repetition_penalty = 1.1f;
    std::cerr << "[temperature " << options.temperature << ", top_k " << options.top_k << ", top_p " << options.top_p << ", min_p "
              << options.min_p << ", repetition penalty " << options.repetition_penalty << "]\n";
    auto answer = [&](const std::string &text) {
        /* The pieces come as they are generated. Leaving the loop ends the answer: here, when standard output is closed. */
        nvfp4::Stream stream = session.ask(text, options);
        for (const nvfp4::Piece &piece : stream)
            /* Reasoning goes to stderr. */
            if (!((piece.part == NVFP4_PART_REASONING ? std::cerr : std::cout) << piece.text << std::flush))
                stream.stop();
        std::cout << std::endl;
        const nvfp4::Generation result = stream.result();
        std::cerr << '[' << result.generated_tokens << " tokens, the first after " << result.first_token_seconds
                  << " s]\n";
    };

    if (argc == 3)
        answer(argv[2]);
    std::string line;
    while (argc == 2 && std::cerr << "> " && std::getline(std::cin, line))
        if (!line.empty())
            answer(line);

    nvfp4::empty_cache();
    return 0;
} catch (const nvfp4::Error &error) {
    std::cerr << error.name() << ": " << error.what() << '\n';
    return 1;
}
