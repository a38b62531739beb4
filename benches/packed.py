#!/usr/bin/env python3
"""Memory and time of loading packed weights: python3 benches/packed.py MODEL [--library target/release] [--tokens 8] [--rounds 5]

MODEL is a directory that `nvfp4 quantize --packed` has written. Loads it on the CPU and generates tokens in one process, and in two at once,
with weights packed into memory and with mapped ones. Prints the sum of the proportional set sizes (PSS) of all processes, two over one, and the
median seconds of loading in a process of its own. Files are in the system's cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


def pss(process):
    """Bytes."""
    with open(f"/proc/{process}/smaps_rollup", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def serve(path, packed, tokens):
    """Loads, generates, says the seconds of loading, and waits for a line."""
    sys.path.insert(0, os.path.join(ROOT, "bindings/python"))
    import nvfp4

    start = time.perf_counter()
    model = nvfp4.Model(path, device="cpu", threads=1, packed=packed)
    seconds = time.perf_counter() - start
    session = model.session(context=64 + tokens)
    session.prefill([11, 48, 85])
    made = []
    for _ in range(tokens):
        made.append(session.sample(temperature=0))
        session.decode(made[-1])
    print(json.dumps({"seconds": seconds, "tokens": made}), flush=True)
    sys.stdin.readline()


def measure(args, packed, count):
    """Bytes of so many processes, and the seconds in which each has loaded the model."""
    command = [sys.executable, __file__, args.model, "--serve", packed, "--tokens", str(args.tokens)]
    environment = {**os.environ, "NVFP4_LIB_PATH": os.path.abspath(args.library)}
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(count)]
    said = [json.loads(process.stdout.readline()) for process in processes]
    assert all(one["tokens"] == said[0]["tokens"] for one in said)
    total = sum(pss(process.pid) for process in processes)
    for process in processes:
        process.communicate("\n")
    return total, [one["seconds"] for one in said]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--library", default=os.path.join(ROOT, "target/release"))
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=("off", "required"))
    args = parser.parse_args()
    if args.serve:
        return serve(args.model, args.serve, args.tokens)
    for packed in ("off", "required"):
        one, two = (measure(args, packed, count)[0] for count in (1, 2))
        seconds = statistics.median(measure(args, packed, 1)[1][0] for _ in range(args.rounds))
        print(f"packed={packed}: 1 process {one / 1e6:.1f} MB, 2 processes {two / 1e6:.1f} MB ({two / one:.3f}), loading {seconds:.3f} s")


if __name__ == "__main__":
    main()
