"""Train a model, with its weights and the optimizer in 4 bits, on the lines of a text, and write what it has become.

    PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release python3 examples/python/train.py MODEL TEXT OUT [EPOCHS]
"""

import sys

import nvfp4


def main() -> int:
    if len(sys.argv) not in (4, 5):
        print(__doc__, file=sys.stderr)
        return 2
    model, text, out = sys.argv[1:4]
    epochs = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    tokenizer = nvfp4.Tokenizer(model)
    with open(text, encoding="utf-8") as file:
        lines = [tokenizer.encode(line) for line in file if line.strip()]
    # Eight lines a step, which do not see each other; a line of one token has nothing to learn.
    lines = [line for line in lines if len(line) > 1]
    data = [lines[i : i + 8] for i in range(0, len(lines), 8)] * epochs
    if not data:
        print(f"{text} has no line to learn", file=sys.stderr)
        return 1

    with nvfp4.Trainer(model, steps=len(data), rate=1e-3) as trainer:
        for documents in data:  # Lists of token ids.
            print(trainer.step(nvfp4.Batch.of(*documents)).loss)
        trainer.export(out)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except nvfp4.Error as error:
        sys.exit(f"{type(error).__name__}: {error}")
