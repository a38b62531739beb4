#!/usr/bin/env python3
"""Tokens a second of scores of given texts after a shared context.

    nvfp4 synth --arch qwen3-4b --out MODEL
    NVFP4_LIB_PATH=target/release PYTHONPATH=bindings/python python3 benches/scores.py MODEL --device cuda:0
"""

import argparse
import statistics
import time

import nvfp4


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each text")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with nvfp4.Model(args.model, device=args.device) as model, model.session() as session:
        session.prefill(list(range(100, 164)))
        texts = [[(i * 977 + j * 331 + 5) % 150_000 for j in range(args.tokens)] for i in range(args.texts)]
        rates = []
        for run in range(args.runs + 1):
            start = time.perf_counter()
            session.score(texts)
            if run > 0:
                rates.append(args.texts * args.tokens / (time.perf_counter() - start))
        print(f"{', '.join(f'{rate:.0f}' for rate in rates)} tok/s, {statistics.median(rates):.0f} median")


if __name__ == "__main__":
    main()
