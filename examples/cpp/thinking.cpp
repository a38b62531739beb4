/* A conversation with a reasoning model, in C++: its reasoning apart from its answers, without reasoning, and with a budget for it.
 *
 *     c++ -std=c++17 thinking.cpp $(pkg-config --cflags --libs nvfp4) -o thinking
 *     ./thinking MODEL
 */
#include <nvfp4.hpp>

#include <iostream>

int main(int argc, char **argv)
try {
    if (argc != 2) {
        std::cerr << "usage: " << argv[0] << " MODEL\n";
        return 2;
    }
    const nvfp4::Model model(argv[1]);
    nvfp4::Session session(model);

    /* The sampling settings that the model recommends. Greedy reasoning tends to repeat itself. */
    const nvfp4::GenerateOptions options = model.generate_options();
    /* Reasoning goes to stderr, the answer to stdout. */
    const auto print = [](const nvfp4::Piece &piece) {
        (piece.part == NVFP4_PART_REASONING ? std::cerr : std::cout) << piece.text << std::flush;
    };

    nvfp4::ChatOptions chat;
    session.chat("Why is the sky blue?", chat, options, print);
    std::cout << std::endl;

    /* At most 100 tokens of reasoning. */
    chat.reasoning_budget = 100;
    session.chat("And at sunset?", chat, options, print);
    std::cout << std::endl;

    /* None at all, in this turn and those after it. */
    chat.variables_json = R"({"enable_thinking": false})";
    session.chat("On Mars too?", chat, options, print);
    std::cout << std::endl;
    session.chat("Thank you.", options, print);
    std::cout << std::endl;
    return 0;
} catch (const nvfp4::Error &error) {
    std::cerr << error.name() << ": " << error.what() << '\n';
    return 1;
}
