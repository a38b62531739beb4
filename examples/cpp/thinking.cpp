/* A conversation with a model that thinks before it answers, in C++: its thoughts apart from its answers, no thoughts, and short
 * ones.
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

    /* The sampling that the model's maker asks for. Thoughts that are not drawn tend to go round in circles. */
    const nvfp4::GenerateOptions options = model.generate_options();
    /* Thoughts are for whoever wants to see them; the answer is what was asked for. */
    const auto print = [](const nvfp4::Piece &piece) {
        (piece.part == NVFP4_PART_REASONING ? std::cerr : std::cout) << piece.text << std::flush;
    };

    nvfp4::ChatOptions chat;
    session.chat("Why is the sky blue?", chat, options, print);
    std::cout << std::endl;

    /* A thought of at most 100 tokens. */
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
