"""Makes the golden of adapters as peft reads them: `nvfp4 train` trains adapters of rank 4 beside `tests/golden/model/qwen3_tied` for some
steps, peft loads what it writes into that model in transformers, and what peft then computes and holds is kept. Run with torch,
transformers, peft and safetensors installed, and with the command built:

    NVFP4=target/debug/nvfp4 python tests/golden/training/peft_adapter.py

`qwen3_tied_peft/` has the two files that the command wrote, and `expected.safetensors`: `tokens`, the `logits` that peft computes for them,
and each of peft's parameters by its name, as peft holds it.
"""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import peft
import torch
from make import HERE, MODELS, load
from safetensors.torch import save_file

CASE = "qwen3_tied"
TEXT = "The little prince asked the fox what that means, and the fox said that one only sees clearly with the heart. " * 20


def train(folder):
    (folder / "text.txt").write_text(TEXT)
    subprocess.run([
        os.environ["NVFP4"], "train", "--model", MODELS / CASE, "--data", folder / "text.txt", "--out", folder / "run", "--device", "cpu",
        "--adapter", "4", "--adapter-alpha", "12", "--adapter-targets", "q_proj,v_proj,down_proj", "--steps", "12", "--rate", "2e-2",
        "--window", "64", "--batch", "2",
    ], check=True)
    return folder / "run" / "adapter"


def main():
    torch.set_num_threads(1)
    out = HERE / f"{CASE}_peft"
    with tempfile.TemporaryDirectory() as folder:
        written = train(pathlib.Path(folder))
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(written, out)
    config = out / "adapter_config.json"
    settings = json.loads(config.read_text())
    settings["base_model_name_or_path"] = CASE
    config.write_text(json.dumps(settings, indent=1) + "\n")

    base, _ = load(CASE)
    model = base.float()
    tokens = torch.randint(0, model.config.vocab_size, (24,), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        plain = model(tokens[None]).logits[0]
        model = peft.PeftModel.from_pretrained(model, out).eval()
        logits = model(tokens[None]).logits[0]
        known = peft.get_peft_model_state_dict(model)
        assert peft.PeftConfig.from_pretrained(out).lora_alpha == 12
        print(f"peft {peft.__version__}: {len(known)} parameters, logits differ by up to {(logits - plain).abs().max():.3f} from the model's")
    save_file({"tokens": tokens.int(), "logits": logits, **known}, out / "expected.safetensors")


if __name__ == "__main__":
    main()
