"""Many conversations at once on one thread, in Python.

    export PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release
    seq 64 | python3 examples/python/conversations.py MODEL

Each line of stdin is asked in a conversation of its own. All of them are decoded together, and answers are printed as they end. An answer
that takes longer than ten minutes is cut off there.
"""

import asyncio
import sys

import nvfp4


async def answer(model: nvfp4.Model, question: str) -> None:
    chat = model.chat(system="Be brief.")
    result = await chat.ask(question, deadline=600.0)
    print(f"{question}: {result.text.strip()} [{result.finish}]", flush=True)


async def answer_all(model: nvfp4.Model) -> None:
    questions = [line.strip() for line in sys.stdin if line.strip()]
    await asyncio.gather(*(answer(model, question) for question in questions))


def main() -> int:
    if len(sys.argv) != 2:
        print(f"usage: {sys.argv[0]} MODEL", file=sys.stderr)
        return 2
    asyncio.run(answer_all(nvfp4.Model(sys.argv[1])))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except nvfp4.Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
