#!/usr/bin/env python3
"""What torch and transformers make of the same training: torch_train.py MODEL TRAIN HELD [--seed N] [--steps N] [--autocast]

MODEL is a folder with config.json and tokenizer.json, whose weights transformers draws; TRAIN and HELD are files of {"text": ...} lines, as
benches/train/corpus.py writes them. Documents, windows and their order are those of `nvfp4 train` with the same seed, as are AdamW's settings, the
rate and its schedule, and the norm that gradients are clipped to. Weights and moments are float32, products in TF32, or in bf16 with --autocast.
Prints the loss on HELD, in nats, as it is at the end of `nvfp4 train --eval HELD`.
"""
import argparse
import json
import math
import time

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
LOOK_AHEAD = 4096


def mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def bits(seed, counter):
    """src/format/random.rs"""
    start = mix((seed + GOLDEN) & MASK)
    return mix((start + (counter + 1) * GOLDEN) & MASK)


def shuffled(count, key):
    items = list(range(count))
    for i in range(count - 1, 0, -1):
        j = bits(key, i) * (i + 1) >> 64
        items[i], items[j] = items[j], items[i]
    return items


def documents(path, tokenizer, end, window):
    with open(path) as lines:
        texts = [json.loads(line)["text"] for line in lines]
    parts = []
    for encoding in tokenizer.encode_batch(texts):
        ids = encoding.ids + [end]
        count = -(-len(ids) // window)
        parts += [ids[len(ids) * i // count : len(ids) * (i + 1) // count] for i in range(count)]
    return parts


def packed(parts, window, seed):
    """Windows of documents: the longest first, each where it leaves the least room (src/train/data/window.rs)."""
    order, windows = shuffled(len(parts), bits(seed, MASK)), []
    for first in range(0, len(order), LOOK_AHEAD):
        room = {}  # of each number of free tokens, the windows that have it
        for i in sorted(order[first : first + LOOK_AHEAD], key=lambda i: -len(parts[i])):
            length = len(parts[i])
            fits = min((free for free, numbers in room.items() if free >= length and numbers), default=None)
            if fits is None:
                number, free = len(windows), window
                windows.append([])
            else:
                number, free = min(room[fits]), fits
                room[fits].remove(number)
            windows[number].append(parts[i])
            if free > length:
                room.setdefault(free - length, set()).add(number)
    return windows


def batch(windows, window):
    """Tokens, labels, positions, and the number of its document for each token: [windows, window]; -1 and 0 behind the last."""
    shape = len(windows), window
    tokens, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels, number = torch.full(shape, -100), torch.full(shape, -1)
    for row, held in enumerate(windows):
        at = 0
        for i, ids in enumerate(held):
            to = slice(at, at + len(ids))
            tokens[row, to] = torch.tensor(ids)
            positions[row, to] = torch.arange(len(ids))
            labels[row, at : at + len(ids) - 1] = torch.tensor(ids[1:])
            number[row, to] = i
            at += len(ids)
    return [x.cuda(non_blocking=True) for x in (tokens, labels, positions, number)]


def total_loss(model, windows, window):
    """The sum of the labels' losses, and their number."""
    tokens, labels, positions, number = batch(windows, window)
    causal = torch.ones(window, window, dtype=torch.bool, device="cuda").tril()
    mask = ((number[:, :, None] == number[:, None, :]) & causal)[:, None]
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return loss, (labels >= 0).sum()


def main():
    arguments = argparse.ArgumentParser()
    for name in ("model", "train", "held"):
        arguments.add_argument(name)
    for name, kind, default in [("seed", int, 1), ("steps", int, 1000), ("batch", int, 64), ("window", int, 512), ("rate", float, 1.5e-3),
                                ("warmup", int, 50), ("decay", float, 0.1)]:
        arguments.add_argument(f"--{name}", type=kind, default=default)
    arguments.add_argument("--autocast", action="store_true")
    a = arguments.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    config = AutoConfig.from_pretrained(a.model)
    tokenizer = Tokenizer.from_file(f"{a.model}/tokenizer.json")
    windows = packed(documents(a.train, tokenizer, config.eos_token_id, a.window), a.window, a.seed)
    held = packed(documents(a.held, tokenizer, config.eos_token_id, a.window), a.window, a.seed)
    torch.manual_seed(a.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").cuda()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": a.decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.rate, betas=(0.9, 0.95), eps=1e-8, fused=True)
    cast = torch.autocast("cuda", torch.bfloat16, enabled=a.autocast)
    order, epoch, start = [], 0, time.monotonic()
    for step in range(a.steps):
        chosen = []
        while len(chosen) < a.batch:
            if not order:
                order, epoch = shuffled(len(windows), bits(a.seed, epoch))[::-1], epoch + 1
            chosen.append(windows[order.pop()])
        done = (step - a.warmup) / max(a.steps - a.warmup, 1)
        share = (step + 1) / a.warmup if step < a.warmup else 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = a.rate * share
        with cast:
            loss, count = total_loss(model, chosen, a.window)
            loss = loss / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.4f}, {time.monotonic() - start:.0f} s", flush=True)
    with torch.no_grad(), cast:
        sums = [total_loss(model, held[i : i + a.batch], a.window) for i in range(0, len(held), a.batch)]
    loss, count = (sum(x).item() for x in zip(*sums))
    print(f"transformers, seed {a.seed}: loss {loss / count:.4f} of {count} labels; {len(windows)} windows")


if __name__ == "__main__":
    main()
