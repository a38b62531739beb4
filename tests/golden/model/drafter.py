"""Makes the goldens of drafters by multi-token prediction: models of make.py with `mtp.*` tensors, and what a drafter of transformers' own
decoder layer, norms and head predicts. transformers has no class for a drafter; vLLM's qwen3_next_mtp.py and qwen3_5_mtp.py say how it is
put together: the norms of the next token's embedding and of the model's hidden row after the final norm, side by side in this order, a
projection, one layer with attention at the position of the hidden row, a norm, and the model's head. Run like make.py:

    python tests/golden/model/drafter.py [CASE ...]

Each case has the files of make.py's cases; expected.safetensors also has, for each length L, `drafted_L`: the drafter's logits at the last
positions, from the first L - 1 hidden rows and the tokens after them.
"""

import importlib
import sys

import torch
from safetensors.torch import load_file, save_file

import make

# The seed of a case is its number, counted from here.
SEED = 1000
CASES = {
    "qwen35_drafter": ("Qwen3_5", {
        **make.MEDIUM, **make.RECURRENT, "num_hidden_layers": 2, "full_attention_interval": 2, "tie_word_embeddings": True,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, **make.sections(2, 1, 1)}),
    "qwen35moe_drafter": ("Qwen3_5Moe", {
        **make.RECURRENT_EXPERTS, "num_hidden_layers": 2, "num_experts": 4, "intermediate_size": None, "norm_topk_prob": None,
        "full_attention_interval": 2, "mtp_num_hidden_layers": 1, **make.sections(2, 1, 1)}),
    # The config does not name the drafter.
    "qwen3next_drafter": ("Qwen3Next", {
        **make.RECURRENT_EXPERTS, "num_hidden_layers": 2, "num_experts": 4, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "full_attention_interval": 2,
        **make.rope(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.25)}),
}


class Drafter(torch.nn.Module):
    """The modules of a drafter, by the names of its tensors."""

    def __init__(self, model):
        super().__init__()
        config = model.config
        module = importlib.import_module(type(model).__module__)
        of_family = {name.removeprefix(type(model).__name__.removesuffix("ForCausalLM")): value for name, value in vars(module).items()}
        norm = lambda: of_family["RMSNorm"](config.hidden_size, eps=config.rms_norm_eps)
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        # A layer with attention: the index of one in the model.
        self.layers = torch.nn.ModuleList([of_family["DecoderLayer"](config, config.layer_types.index("full_attention"))])
        self.norm = norm()
        self.pre_fc_norm_embedding = norm()
        self.pre_fc_norm_hidden = norm()

    def forward(self, model, tokens, hidden):
        """The logits of rows of hidden states and the tokens after their positions."""
        embeddings = model.model.embed_tokens(tokens)
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1))[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        x = self.layers[0](
            x, position_embeddings=model.model.rotary_emb(x, positions), attention_mask=mask, position_ids=positions)
        return model.lm_head(self.norm(x[0] if isinstance(x, tuple) else x))[0]


def fill(drafter, generator):
    """Random weights: matrices of the layer in NVFP4, the projection of both inputs in 16 bits. Returns what is stored."""
    random = lambda shape: torch.randn(shape, generator=generator)
    stored = {}
    for key, value in drafter.state_dict().items():
        name = "mtp." + key
        if value.dim() == 1:
            w = 0.2 * random(value.shape)
            stored[name] = w
        elif key == "fc.weight" or key.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
            w = (random(value.shape) * (2.0 / value.shape[1] ** 0.5)).bfloat16()
            stored[name] = w
        elif ".experts." in key:
            w = torch.stack([
                make.store_expert(stored, name, e, random(part.shape) * (2.0 / part.shape[1] ** 0.5)) for e, part in enumerate(value)])
        else:
            packed, scales, multiplier, w = make.quantize(random(value.shape) * (2.0 / value.shape[1] ** 0.5))
            stored[name], stored[name + "_scale"], stored[name + "_scale_2"] = packed, scales, multiplier
        value.copy_(w)
    return stored


def add(name, model, seed):
    """Adds a drafter to the model of a case, and its logits to what is expected."""
    drafter = Drafter(model).eval().float()
    stored = fill(drafter, torch.Generator().manual_seed(seed))
    out = make.HERE / name
    save_file({**load_file(out / "model.safetensors"), **stored}, out / "model.safetensors")
    expected = load_file(out / "expected.safetensors")
    for length in make.RECURRENT_LENGTHS:
        tokens = expected[f"tokens_{length}"]
        with torch.no_grad():
            hidden = model.model(tokens[None]).last_hidden_state[0]
            expected[f"drafted_{length}"] = drafter(model, tokens[1:], hidden[:-1])[-make.KEPT:].contiguous()
    save_file(expected, out / "expected.safetensors")
    print(f"{name}: drafted logits vary by {expected['drafted_33'].std().item():.2f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or CASES
    for seed, (name, (family, settings)) in enumerate(CASES.items(), start=SEED):
        if name in wanted:
            add(name, make.make(name, family, settings, seed), seed)
