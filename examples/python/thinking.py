"""A model that thinks before it answers, in Python.

    export PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release
    python3 examples/python/thinking.py MODEL "How many primes are there below 100?"

Its reasoning goes to stderr, its answer to stdout: once after as much reasoning as it likes, once after 200 tokens of it at
most, and once without any.
"""

import sys
from typing import List

import nvfp4
from nvfp4.types import TurnOptions


def main() -> int:
    if len(sys.argv) != 3:
        print(f"usage: {sys.argv[0]} MODEL PROMPT", file=sys.stderr)
        return 2
    chat = nvfp4.Model(sys.argv[1]).chat()
    # Pieces are strings with a `part`. Without parts=True they are only those of the answer.
    for piece in chat.ask(sys.argv[2], parts=True):
        print(piece, end="", flush=True, file=sys.stderr if piece.part == "reasoning" else sys.stdout)
    print()
    # The same question again: the tokens in the session are not run again.
    question = chat.messages[:-1]
    ways: List[TurnOptions] = [{"reasoning_budget": 200}, {"think": False}]
    for how in ways:
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
