"""Quantize a weight to NVFP4 with numpy, and compare how far the recipes stay from it and from its product with activations.

    PYTHONPATH=bindings/python NVFP4_LIB_PATH=target/release python3 examples/python/quantize.py
"""

import sys
from typing import Tuple

import numpy as np
import nvfp4
from numpy.typing import NDArray
from nvfp4.types import Recipe


def distance(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The relative L2 distance of a from b."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def main() -> int:
    random = np.random.default_rng(1)
    weight = random.normal(0, 0.02, (64, 256)).astype("float32")
    x = random.normal(0, 1, (4, 256)).astype("float32")
    good = True
    recipes: Tuple[Recipe, ...] = ("amax", "four_over_six", "sweep")
    for recipe in recipes:
        # Neither the input nor the results are copied on their way between numpy and the library.
        quantized = nvfp4.quantize(weight, recipe=recipe)
        of_weight = distance(nvfp4.dequantize(quantized).numpy(), weight)
        of_product = distance(nvfp4.linear(x, quantized).numpy(), x @ weight.T)
        print(f"{recipe:14} weight off by {of_weight:.4f}, product by {of_product:.4f}")
        good = good and of_weight < 0.12 and of_product < 0.2
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
