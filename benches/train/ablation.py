#!/usr/bin/env python3
"""Trains a model once for each recipe and seed, and prints what the recipes cost as a table: ablation.py ROWS OUT [OPTION...] -- TRAIN...

ROWS is a JSON object of names to recipes (benches/train/ablation.json); the first is what the others are compared with, seed by seed. TRAIN is
an nvfp4 train command without --out, --recipe and --seed, which is the same for all runs: of model, data, steps, rate. Each run goes to
OUT/NAME-SEED, and one that is finished is not made again. --jobs runs so many at once, on one device, and --seconds begins none after so many,
so that a longer comparison can be made in parts. Medians over seeds of the evaluation's loss, in nats.
"""
import argparse
import csv
import json
import pathlib
import statistics
import subprocess
import sys
import time


def arguments():
    command, separator, train = sys.argv[1:], "--", []
    if separator in command:
        at = command.index(separator)
        command, train = command[:at], command[at + 1:]
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", help="names of rows, with commas between them")
    found = parser.parse_args(command)
    if not train:
        parser.error("a command that trains comes after --")
    return found, train


def losses(run):
    """As stored and as delivered, at the last step of a run that is finished."""
    if not (run / "model").exists():
        return None
    with open(run / "loss.csv", newline="") as table:
        last = [row for row in csv.DictReader(table) if row["eval_loss_stored"]][-1]
    return float(last["eval_loss_stored"]), float(last["eval_loss_delivered"])


def main():
    found, train = arguments()
    rows = json.loads(found.rows.read_text())
    names = found.only.split(",") if found.only else list(rows)
    found.out.mkdir(parents=True, exist_ok=True)
    place = lambda name, seed: found.out / f"{name}-{seed}"
    waiting = [(name, seed) for seed in found.seeds for name in names if losses(place(name, seed)) is None]
    began, running, failed = time.monotonic(), [], False
    while waiting or running:
        while waiting and len(running) < found.jobs and time.monotonic() - began < found.seconds:
            name, seed = waiting.pop(0)
            recipe = found.out / f"{name}.json"
            recipe.write_text(json.dumps({**rows[name], "seed": seed}))
            run = place(name, seed)
            command = [*train, "--out", str(run), "--recipe", str(recipe), "--seed", str(seed)]
            if (run / "checkpoints").exists():
                command.append("--resume")
            log = open(f"{run}.log", "w")
            running.append((run, subprocess.Popen(command, stdout=log, stderr=log)))
        if not running:
            break
        for run, process in running:
            if process.poll():
                failed = True
                print(f"{run}: exit code {process.returncode}, see {run}.log", file=sys.stderr)
        running = [(run, process) for run, process in running if process.poll() is None]
        time.sleep(0.2)

    table = {name: {seed: losses(place(name, seed)) for seed in found.seeds} for name in names}
    base = table[names[0]]
    print("| recipe | seeds | loss as stored | as delivered | stored to the first | delivered to the first |\n|---|---|---|---|---|---|")
    for name, runs in table.items():
        both = [(loss, base[seed]) for seed, loss in runs.items() if loss and base[seed]]
        if not both:
            continue
        median = lambda values: statistics.median(list(values))
        stored, delivered = (median(loss[i] for loss, _ in both) for i in (0, 1))
        gaps = [median(100 * (loss[i] / first[0] - 1) for loss, first in both) for i in (0, 1)]
        print(f"| {name} | {len(both)} | {stored:.4f} | {delivered:.4f} | {gaps[0]:+.2f} % | {gaps[1]:+.2f} % |")
    return failed


if __name__ == "__main__":
    sys.exit(main())
