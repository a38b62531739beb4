"""Decoding on a machine that others use too: alone, and beside one and two busy loops, each pinned to a core of its own.

    python3 benches/neighbours.py --model MODEL [--build target/release] [--build OTHER] [--threads 1,2,8] [--tokens 48] [--rounds 5]

Runs all builds in turn within a round, so that what slows the machine down slows all of them, and prints medians of tokens a second,
their ratio to one thread beside the same neighbours, and context switches a token. With --prefill, a prompt of that many tokens is
measured too. Needs Linux and the Python package's numpy.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCENES = {"alone": 0, "beside one": 1, "beside two": 2}


def measure(threads, model, tokens, prompt):
    """In a process of its own: prints what decoding came to."""
    import nvfp4

    nvfp4.set_threads(threads)
    loaded = nvfp4.Model(model)
    found = {}
    if prompt:
        session = loaded.session()
        session.prefill(list(range(1, 33)))
        begun = time.perf_counter()
        loaded.session().prefill([1 + i % 100 for i in range(prompt)])
        found["prefill"] = prompt / (time.perf_counter() - begun)
    session = loaded.session()
    session.prefill([1, 2, 3, 4])
    session.generate(max_tokens=3, ignore_model_stops=True)
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    session.generate(max_tokens=tokens, ignore_model_stops=True)
    took, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    found["decode"] = tokens / took
    found["switches"] = (after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw) / tokens
    print(json.dumps(found))


def busy(core):
    return subprocess.Popen(["taskset", "-c", str(core), sys.executable, "-c", "while True: pass"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--build", action="append", help="a folder with libNVFP4.so; several are compared")
    parser.add_argument("--threads", default="1,2,8")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scenes", default=",".join(SCENES), help="of " + ", ".join(SCENES))
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        return measure(args.measure, args.model, args.tokens, args.prefill)
    builds = [Path(build).resolve() for build in args.build or [ROOT / "target/release"]]
    cores = sorted(os.sched_getaffinity(0))
    for scene in args.scenes.split(","):
        # The highest cores first: the first ones get most interrupts.
        neighbours = [busy(core) for core in cores[::-1][:SCENES[scene]]]
        results = {}
        try:
            time.sleep(0.3)
            for _ in range(args.rounds):
                for threads in map(int, args.threads.split(",")):
                    for build in builds:
                        environment = {**os.environ, "NVFP4_LIB_PATH": str(build), "PYTHONPATH": str(ROOT / "bindings/python")}
                        command = [sys.executable, __file__, "--measure", threads, "--model", args.model, "--tokens", args.tokens,
                                   "--prefill", args.prefill]
                        done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
                        if done.returncode != 0:
                            sys.exit(done.stderr)
                        results.setdefault((threads, build), []).append(json.loads(done.stdout))
        finally:
            for neighbour in neighbours:
                neighbour.kill()
        print(scene)
        for (threads, build), found in results.items():
            median = {name: statistics.median(one[name] for one in found) for name in found[0]}
            single = results.get((1, build))
            ratio = f"  {median['decode'] / statistics.median(one['decode'] for one in single):5.2f} of one thread" if single else ""
            prefill = f"  prefill {median['prefill']:7.1f}" if "prefill" in median else ""
            print(f"  {threads:3} threads  {median['decode']:7.1f} tok/s{ratio}{prefill}  {median['switches']:6.1f} switches a token  {build}", flush=True)


if __name__ == "__main__":
    main()
