#!/usr/bin/env python3
"""A model with every matrix rounded to NVFP4, embeddings too, as a model in float32: rounded.py MODEL OUT [--recipe four_over_six]

MODEL is a folder with model.safetensors. What it takes to compare training in NVFP4 with rounding what was trained in float32. Needs numpy,
safetensors, and the package in bindings/python.
"""
import argparse
import pathlib
import shutil

import numpy
import nvfp4
from safetensors.numpy import load_file, save_file

arguments = argparse.ArgumentParser()
arguments.add_argument("model", type=pathlib.Path)
arguments.add_argument("out", type=pathlib.Path)
arguments.add_argument("--recipe", default="four_over_six")
a = arguments.parse_args()
a.out.mkdir(parents=True)
for file in a.model.iterdir():
    if file.suffix == ".json":
        shutil.copy(file, a.out)
tensors = load_file(a.model / "model.safetensors")
for name, values in tensors.items():
    if values.ndim == 2:
        tensors[name] = nvfp4.dequantize(nvfp4.quantize(values.astype(numpy.float32), recipe=a.recipe)).numpy()
save_file(tensors, a.out / "model.safetensors", metadata={"format": "pt"})
