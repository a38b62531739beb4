"""The shape of Qwen3-0.6B with random weights: what running it takes in memory, and how soon it starts. check.py BUILD MODEL"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "common"))
from bars import check_memory, check_start, close

build, model = map(pathlib.Path, sys.argv[1:])
check_memory(build / "nvfp4", model, "--prompt", "Hello there. " * 20, "--context", 256, "--max-tokens", 64)
check_start(build / "nvfp4", model, 3)
close()
