#!/usr/bin/env python3
"""A full fine-tuning step of transformers in bf16: what NVFP4_trainer_step is compared with.

torch_step.py CONFIG [--documents N] [--tokens N] [--steps N] [--keep]: random weights of the shape in the folder CONFIG, bf16 with AdamW's
moments in bf16 (fused), gradient checkpointing unless --keep, documents of equal length as a batch. Prints tokens per second (median of the
steps after the first two) and the peak of allocated memory.
"""
import argparse
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

a = argparse.ArgumentParser()
a.add_argument("config")
a.add_argument("--documents", type=int, default=4)
a.add_argument("--tokens", type=int, default=2048)
a.add_argument("--steps", type=int, default=7)
a.add_argument("--keep", action="store_true")
a = a.parse_args()

torch.manual_seed(0)
config = AutoConfig.from_pretrained(a.config)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
model.train()
if not a.keep:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
times = []
for step in range(a.steps):
    tokens = torch.randint(config.vocab_size, (a.documents, a.tokens), device="cuda")
    torch.cuda.synchronize()
    start = time.time()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
    torch.cuda.synchronize()
    times.append(time.time() - start)
median = statistics.median(times[2:])
print(
    f"transformers bf16: {a.documents} x {a.tokens} tokens: {median * 1e3:.0f} ms, {a.documents * a.tokens / median:.0f} tok/s, "
    f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
)
