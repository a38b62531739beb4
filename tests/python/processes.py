"""A model and the processes of multiprocessing: processes.py MODEL. Part of test_nvfp4.py."""

import multiprocessing
import sys

import nvfp4


def size(model):
    return model.vocab_size


def tell(model, queue):
    queue.put(model.vocab_size)


def refusal(call):
    try:
        return f"nothing was refused: {call()}"
    except TypeError as error:
        return f"TypeError: {error}"


if __name__ == "__main__":
    model = nvfp4.Model(sys.argv[1], device="cpu")
    for how in ("spawn", "forkserver"):
        print(f"{how}: {refusal(multiprocessing.get_context(how).Process(target=size, args=(model,)).start)}")
    context, sizes = multiprocessing.get_context("fork"), []
    for _ in range(2):
        queue = context.SimpleQueue()
        child = context.Process(target=tell, args=(model, queue))
        child.start()
        child.join()
        sizes.append(None if child.exitcode or queue.empty() else queue.get())
    print(f"fork: {sizes}")
    with context.Pool(1) as pool:
        print(f"pool: {refusal(lambda: pool.map(size, [model]))}")
    print(f"here: {model.vocab_size}")
