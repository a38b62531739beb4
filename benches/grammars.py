#!/usr/bin/env python3
"""The cost of grammars: the first of a model, a later one, and tokens a second of threads with different schemas beside threads without.

    nvfp4 synth --arch qwen3-0.6b --out MODEL && cp tokenizer.json MODEL          # The tokenizer of Qwen3.
    NVFP4_LIB_PATH=target/release PYTHONPATH=bindings/python python3 benches/grammars.py MODEL
"""

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import nvfp4


def an_object(properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def schema(number, fields):
    """A long text, so that almost every token is chosen by a mask; or, with fields, many objects of so many, whose names are forced."""
    if fields == 0:
        return an_object({f"name{number}": {"type": "string", "minLength": 1000}})
    values = [{"type": "string", "minLength": 5, "maxLength": 20 + number % 7}, {"type": "integer"}, {"enum": ["red", "green", f"blue {number}"]}]
    item = an_object({f"field {number} of {i}": values[i % len(values)] for i in range(fields)})
    return {"type": "array", "items": item, "minItems": 1000}


def rate(model, grammars, tokens, temperature):
    """Tokens a second of as many threads as there are `grammars`, each of which is one or None."""
    sessions = [model.session() for _ in grammars]

    def generate(number):
        held = {} if grammars[number] is None else {"grammar": grammars[number]}
        how = {"max_tokens": tokens, "temperature": temperature, "seed": number, "ignore_model_stops": True}
        return sessions[number].generate(**how, **held).generated_tokens

    for number, session in enumerate(sessions):
        session.prefill([100 + number, 7, 9])
    with ThreadPoolExecutor(len(sessions)) as pool:
        start = time.perf_counter()
        count = sum(pool.map(generate, range(len(sessions))))
        taken = time.perf_counter() - start
    for session in sessions:
        session.close()
    return count / taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fields", type=int, default=0, help="fields of the objects of each schema; 0: one long text")
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    with nvfp4.Model(args.model, device=args.device) as model:
        times = []
        for word in ("first", "later"):
            start = time.perf_counter()
            nvfp4.Grammar.choices(model, [word, "other"])
            times.append(time.perf_counter() - start)
        print(f"the first grammar {times[0]:.2f} s, a later one {times[1] * 1e3:.1f} ms")
        held, free = [nvfp4.Grammar.json_schema(model, schema(i, args.fields)) for i in range(args.threads)], [None] * args.threads
        rates = {"free": [], "held": []}
        for run in range(args.runs + 1):
            for name, grammars in (("free", free), ("held", held)):
                found = rate(model, grammars, args.tokens, args.temperature)
                if run > 0:
                    rates[name].append(found)
        for name, found in rates.items():
            print(f"{name}: {', '.join(f'{x:.1f}' for x in found)} tok/s")
        print(f"held beside free: {statistics.median(rates['held']) / statistics.median(rates['free']):.3f} of medians")


if __name__ == "__main__":
    main()
