"""What a C program gets through nvfp4.h against what `nvfp4 bench` prints, side by side on one machine.

    python3 benches/host.py --model MODEL [--device cuda:0] [--batches 1,8,64] [--rounds 3] [--json FILE]

Compiles benches/c/host.c against target/release (or $NVFP4_BUILD), and runs the two in turns, so that what slows the machine down
slows both. Prints medians, the ratio of stepping through the C interface to the benchmark, which is to be 0.9 or more, and of every
kind of sampling to the greedy one, likewise; and what eight threads make that generate at the same time. Needs cc and nothing but Python.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.9


def output(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3, help="of each program in a round")
    parser.add_argument("--host", help="benches/c/host.c, compiled already")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    build = Path(os.environ.get("NVFP4_BUILD", ROOT / "target/release")).resolve()
    with tempfile.TemporaryDirectory() as folder:
        host = args.host
        if host is None:
            host = Path(folder) / "host"
            output("cc", "-O2", "-I", ROOT / "include", ROOT / "benches/c/host.c", "-L", build, "-lNVFP4", "-lpthread", f"-Wl,-rpath,{build}", "-o", host)
        batches = [int(batch) for batch in args.batches.split(",")]
        common = ["--model", args.model, "--prompt-tokens", args.prompt, "--gen-tokens", args.tokens, "--device", args.device,
                  "--runs", args.runs, "--json"]
        bench = {batch: [] for batch in batches}
        stepped, threads = {}, []
        for _ in range(args.rounds):
            for batch in batches:
                bench[batch].append(json.loads(output(build / "nvfp4", "bench", *common, "--batch", batch))["decode_tok_s"])
            printed = output(host, args.model, "--device", args.device, "--prompt", args.prompt, "--tokens", args.tokens,
                             "--runs", args.runs, "--batches", args.batches, "--json")
            for one in json.loads(printed):
                if one["sampling"] == "threads":
                    threads.append((one["step_tok_s"], one["generate_tok_s"]))
                    continue
                stepped.setdefault((one["batch"], one["sampling"]), []).append((one["step_tok_s"], one["generate_tok_s"]))
    missed = False
    figures = []
    for batch in batches:
        reference = statistics.median(bench[batch])
        print(f"{batch:3} sequences, nvfp4 bench {reference:10.1f} tok/s")
        greedy = None
        for (of, sampling), rates in stepped.items():
            if of != batch:
                continue
            step, alone = (statistics.median(column) for column in zip(*rates))
            greedy = greedy or step
            to = step / reference if sampling == "greedy" else step / greedy
            missed |= to < BAR
            what = "of the benchmark" if sampling == "greedy" else "of greedy"
            generating = f"; generating {alone:.1f}" if alone else ""
            print(f"    {sampling:33} {step:10.1f} tok/s, {to:.2f} {what}{generating}{'  BELOW THE BAR' if to < BAR else ''}")
            figures.append({"batch": batch, "sampling": sampling, "step_tok_s": step, "generate_tok_s": alone, "bench_tok_s": reference})
    if threads:
        many, single = (statistics.median(column) for column in zip(*threads))
        print(f"8 threads that generate {many:10.1f} tok/s in all, {many / single:.2f} of one ({single:.1f})")
        figures.append({"threads": 8, "tok_s": many, "one_tok_s": single})
    if args.json:
        record = {"date": datetime.date.today().isoformat(), "device": args.device, "model": args.model, "prompt": args.prompt,
                  "tokens": args.tokens, "figures": figures}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
