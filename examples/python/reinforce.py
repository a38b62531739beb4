"""Reinforce what is wanted of a model: a thread samples answers while the trainer steps on those before, weighted by what they are worth.

    PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release python3 examples/python/reinforce.py MODEL PROMPT [STEPS [RATE]]
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import List, Sequence

import nvfp4

GROUP = 8
LENGTH = 16


def worth(answer: Sequence[int]) -> List[float]:
    """The worth of each token of an answer: 1 for even ids. It stands for whatever judges answers."""
    return [1.0 - token % 2 for token in answer]


def sampled(asked: nvfp4.Session) -> List[List[int]]:
    """A group of answers of the session `asked`, which holds the prompt. A step may come between any two tokens of them."""
    answers = []
    for _ in range(GROUP):
        with asked.fork() as session:
            before = len(session.tokens)
            session.generate(max_tokens=LENGTH, temperature=1.0, ignore_model_stops=True)
            answers.append(session.tokens[before:])
    return answers


def batch_of(prompt: Sequence[int], answers: Sequence[Sequence[int]]) -> nvfp4.Batch:
    """Each token of an answer is learned as far as it is worth it, and those of the prompt are not."""
    tokens: List[int] = []
    labels: List[int] = []
    lengths: List[int] = []
    weights: List[float] = []
    for answer in answers:
        tokens += [*prompt, *answer]
        labels += [-100] * (len(prompt) - 1) + [*answer, -100]
        weights += [0.0] * (len(prompt) - 1) + [*worth(answer), 0.0]
        lengths.append(len(prompt) + len(answer))
    return nvfp4.Batch(tokens, labels, lengths, weights)


def main() -> int:
    if len(sys.argv) not in (3, 4, 5):
        print(__doc__, file=sys.stderr)
        return 2
    path, text = sys.argv[1:3]
    steps = int(sys.argv[3]) if len(sys.argv) > 3 else 50
    rate = float(sys.argv[4]) if len(sys.argv) > 4 else 1e-3
    with nvfp4.Trainer(path, steps=steps, rate=rate) as trainer, trainer.model() as model, ThreadPoolExecutor(1) as pool:
        prompt = model.tokenizer.encode(text)
        # One session for the whole run: after each step it goes on with the new weights.
        with model.session() as asked:
            asked.prefill(prompt)
            coming = pool.submit(sampled, asked)
            for _ in range(steps):
                answers = coming.result()
                coming = pool.submit(sampled, asked)
                trainer.step(batch_of(prompt, answers))
                print(sum(sum(worth(answer)) for answer in answers) / (GROUP * LENGTH), flush=True)
            coming.result()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except nvfp4.Error as error:
        sys.exit(f"{type(error).__name__}: {error}")
