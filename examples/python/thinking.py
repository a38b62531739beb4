"""A model that thinks before it answers, in Python.

    export PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release
    python3 examples/python/thinking.py MODEL "How many primes are there below 100?"

What it thinks goes to stderr, what it answers to stdout: once after as much reasoning as it likes, once after 200 tokens of it at
most, and once without any.
"""

import sys

import nvfp4


def main():
    if len(sys.argv) != 3:
        print(f"usage: {sys.argv[0]} MODEL PROMPT", file=sys.stderr)
        return 2
    chat = nvfp4.Model(sys.argv[1]).chat()
    # Pieces are strings that know what they are a part of. Without parts=True only the answer comes.
    for piece in chat.ask(sys.argv[2], parts=True):
        print(piece, end="", flush=True, file=sys.stderr if piece.part == "reasoning" else sys.stdout)
    print()
    # The same question again: what the session holds of the conversation is not run anew.
    question = chat.messages[:-1]
    for how in ({"reasoning_budget": 200}, {"think": False}):
        result = chat.complete(question, **how)
        print(f"[{result.generated_tokens} tokens, {len(result.reasoning)} characters of reasoning]", file=sys.stderr)
        print(result.text)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except nvfp4.Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
