"""Makes the golden float8 folders beside this script: float8_NAME/model.safetensors, its config.json, and the values to be read.

Weights are compressed and decompressed by compressed-tensors itself, never by this project; scales are widened to float32 before
they multiply, as they are when transformers loads such a model in float32. Run it with torch and compressed-tensors 0.20 installed:
    python compressed_float8.py
The seed is fixed: running it again gives the same bytes.
"""

import json
import pathlib

import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
ROWS, COLS = 44, 72  # no multiples of the blocks


def blocks(rows, cols):
    return -(-ROWS // rows), -(-COLS // cols)


def make(name, weights, scales, dtype, cols=COLS, config_weights=None):
    """Compresses a matrix with random scales of shape `scales`; `config_weights` is what older versions wrote of it."""
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = MXFP8QuantizationCompressor if dtype == torch.uint8 else NaiveQuantizationCompressor
    scale = (torch.rand(scales) * 0.01 + 0.001).to(torch.float32 if dtype == torch.uint8 else dtype)
    if dtype == torch.uint8:
        scale = 2.0 ** scale.log2().floor()
    dense = torch.randn(ROWS, cols)
    stored = compressor.compress({"weight": dense, "weight_scale": scale}, scheme)
    assert stored["weight"].dtype == torch.float8_e4m3fn and stored["weight_scale"].dtype == dtype, name
    wide = dict(stored)
    if dtype != torch.uint8:
        wide["weight_scale"] = stored["weight_scale"].float()
    want = compressor.decompress(wide, scheme)["weight"].float()
    # Some values saturate and others do not, so that a wrong scale shows everywhere.
    assert 0.1 < (want - dense).abs().max() and (want != 0).float().mean() > 0.9, name
    folder = HERE / f"float8_{name}"
    folder.mkdir(exist_ok=True)
    module = "model.layers.0.mlp.up_proj"
    save_file({f"{module}.{k}": v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    save_file({f"{module}.weight": want.contiguous()}, folder / "model.safetensors.expected.safetensors")
    config = {"quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if dtype == torch.uint8 else "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": config_weights or {"num_bits": 8, "type": "float", **weights}}},
    }}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


torch.manual_seed(20261126)
block = {"strategy": "block", "block_structure": [32, 16]}
make("block", block, blocks(32, 16), torch.bfloat16)
make("block_text", block, blocks(32, 16), torch.float16,
     config_weights={"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "32x16"})
make("channel", {"strategy": "channel"}, (ROWS, 1), torch.bfloat16)
make("tensor", {"strategy": "tensor"}, (1,), torch.float16)
make("group", {"strategy": "group", "group_size": 24}, (ROWS, 3), torch.float32)
make("mx", {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, (ROWS, 2), torch.uint8, cols=64,
     config_weights={"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"})
