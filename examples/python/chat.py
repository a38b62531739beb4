"""Talk with a language model, in Python.

    export PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release
    python3 examples/python/chat.py MODEL "Why is the sky blue?"     answers and ends
    python3 examples/python/chat.py MODEL                            a conversation, one turn per line
"""

import sys

import nvfp4


def answer(chat: nvfp4.ChatSession, text: str) -> None:
    # The pieces come as they are generated. Leaving the loop ends the answer, and so does Ctrl-C. Tokens are sampled as the model
    # recommends; chat.ask(text, temperature=0.3) would change that.
    stream = chat.ask(text)
    for piece in stream:
        print(piece, end="", flush=True)
    result = stream.result  # None if the answer was stopped before it began.
    print()
    if result:
        print(f"[{result.generated_tokens} tokens, the first after {result.first_token_seconds:.2f} s]", file=sys.stderr)


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(f"usage: {sys.argv[0]} MODEL [PROMPT]", file=sys.stderr)
        return 2
    # On the GPU with room for it, or else on the CPU.
    model = nvfp4.Model(sys.argv[1])
    print(f"[{model.info['device_choice']}]", file=sys.stderr)
    # A long conversation drops its oldest turns instead of ending.
    chat = model.chat(system="You are a helpful assistant.", eviction="drop_oldest")
    if len(sys.argv) == 3:
        answer(chat, sys.argv[2])
        return 0
    while True:
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return 0
        if line.strip():
            answer(chat, line.strip())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except nvfp4.Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
