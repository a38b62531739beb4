"""Makes the golden checkpoint files beside this script, and for each a NAME.expected.safetensors with the values to be read.

Files and expected values come from numpy, torch, safetensors and gguf, never from this project. Run it with those installed:
    python make.py
The seed is fixed: running it again gives the same bytes, but for the order of the metadata in torchao.safetensors.
"""

import json
import pathlib
import struct

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent
rng = np.random.default_rng(20260822)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def save(name, tensors, metadata=None):
    tensors = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in tensors.items()}
    save_file({k: v.contiguous() for k, v in tensors.items()}, HERE / name, metadata=metadata)


def expected(name, tensors):
    save(f"{name}.expected.safetensors", {k: torch.tensor(v).float() for k, v in tensors.items()})


def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)


# --- NVFP4 pieces ---------------------------------------------------------------------------------------------------------
def nvfp4(rows, cols):
    """Random codes [rows, cols] and e4m3 scale bytes [rows, cols/16]."""
    return rng.integers(0, 16, (rows, cols), dtype=np.uint8), rng.integers(0, 0x7F, (rows, cols // 16), dtype=np.uint8)


def pack(codes):
    return codes[:, 0::2] | codes[:, 1::2] << 4


def e4m3(scale_bytes):
    return torch.from_numpy(scale_bytes.copy()).view(torch.float8_e4m3fn)


def values(codes, scale_bytes, multiplier):
    """Rounded once: float32 holds a code times its scale exactly."""
    scaled = torch.from_numpy(E2M1[codes]) * e4m3(scale_bytes).float().repeat_interleave(16, dim=1)
    return scaled * torch.tensor(multiplier, dtype=torch.float32)


# --- every GGUF type ------------------------------------------------------------------------------------------------------
def random_blocks(kind, blocks):
    """Random bytes with the f16 multipliers made finite."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    halves = {
        T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0], T.Q2_K: [80, 82], T.Q3_K: [108],
        T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208], T.IQ4_NL: [0], T.IQ4_XS: [0],
    }
    for at in halves.get(kind, []):
        data[:, at:at + 2] = normal(blocks, 1).astype(np.float16).view(np.uint8)
    if kind == T.NVFP4:
        data[:, :4] &= 0x7F
        data[0, 0] = 0x7F
    return data


def blocks_file():
    writer = gguf.GGUFWriter(HERE / "blocks.gguf", "golden")
    want = {}
    kinds = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.IQ4_NL, T.IQ4_XS, T.MXFP4,
             T.NVFP4, T.BF16]
    for kind in kinds:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        per_row = 256 // elements if elements > 1 else 16
        data = random_blocks(kind, 2 * per_row).reshape(2, per_row * size)
        if kind == T.BF16:
            data = (normal(2, 16).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(2, 32)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        want[kind.name] = gguf.quants.dequantize(data, kind)
    for name, array in {"F32": normal(2, 5), "F16": normal(3, 7).astype(np.float16), "I32": np.arange(-3, 3, dtype=np.int32)}.items():
        writer.add_tensor(name, array)
        want[name] = array.astype(np.float32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected("blocks.gguf", want)


# --- a llama model: names, row order, config, vocabulary ------------------------------------------------------------------
def interleave(weight, heads):
    """The row order that the llama converter of llama.cpp writes."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def ggml_nvfp4(codes, scales):
    rows, cols = codes.shape
    runs = codes.reshape(rows, cols // 64, 4, 2, 8)
    quants = (runs[..., 0, :] | runs[..., 1, :] << 4).reshape(rows, cols // 64, 32)
    return np.concatenate([scales.reshape(rows, cols // 64, 4), quants], axis=-1).reshape(rows, -1)


def llama_file():
    hidden, heads, kv_heads, head_dim, ffn, vocab = 64, 4, 2, 16, 128, 10
    writer = gguf.GGUFWriter(HERE / "llama.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "c", "Ġ", "é", "<unk>", "<pad>"])
    writer.add_token_types([3, 3, 1, 1, 1, 1, 1, 1, 2, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(8)
    writer.add_pad_token_id(9)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    writer.add_array("golden.nested", [[1, 2], [3]])
    want = {}

    def dense(gguf_name, hf_name, array, stored=None):
        writer.add_tensor(gguf_name, array if stored is None else stored)
        want[hf_name] = array.astype(np.float32)

    def fp4(gguf_base, hf_name, rows, cols, multiplier, heads=None):
        codes, scales = nvfp4(rows, cols)
        order = (lambda a: interleave(a, heads)) if heads else (lambda a: a)
        writer.add_tensor(f"{gguf_base}.weight", ggml_nvfp4(order(codes), order(scales)), raw_dtype=T.NVFP4)
        if multiplier is not None:
            writer.add_tensor(f"{gguf_base}.scale", np.array([multiplier], np.float32))
        want[hf_name] = values(codes, scales, multiplier if multiplier is not None else 1.0).numpy()
        want[f"{hf_name}/codes"] = pack(codes)
        want[f"{hf_name}/scales"] = scales

    layer = "model.layers.0"
    dense("token_embd.weight", "model.embed_tokens.weight", normal(vocab, hidden))
    dense("output_norm.weight", "model.norm.weight", normal(hidden))
    dense("blk.0.attn_norm.weight", f"{layer}.input_layernorm.weight", normal(hidden))
    dense("blk.0.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", normal(hidden))
    fp4("blk.0.attn_q", f"{layer}.self_attn.q_proj.weight", heads * head_dim, hidden, 0.0123, heads)
    key = normal(kv_heads * head_dim, hidden)
    dense("blk.0.attn_k.weight", f"{layer}.self_attn.k_proj.weight", key, interleave(key, kv_heads))
    bias = normal(kv_heads * head_dim)
    dense("blk.0.attn_k.bias", f"{layer}.self_attn.k_proj.bias", bias, interleave(bias, kv_heads))
    value = normal(kv_heads * head_dim, hidden).astype(np.float16)
    dense("blk.0.attn_v.weight", f"{layer}.self_attn.v_proj.weight", value)
    fp4("blk.0.attn_output", f"{layer}.self_attn.o_proj.weight", hidden, heads * head_dim, None)
    fp4("blk.0.ffn_gate", f"{layer}.mlp.gate_proj.weight", ffn, hidden, 2.5)
    fp4("blk.0.ffn_up", f"{layer}.mlp.up_proj.weight", ffn, hidden, 1e-4)
    fp4("blk.0.ffn_down", f"{layer}.mlp.down_proj.weight", hidden, ffn, 1e-4)
    dense("rope_freqs.weight", "rope_freqs.weight", np.linspace(1, 8, head_dim // 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected("llama.gguf", want)


# --- safetensors ----------------------------------------------------------------------------------------------------------
def plain_file():
    x = torch.from_numpy(normal(3, 5) * 10)
    tensors = {
        "f64": x.double(), "f32": x, "f16": x.half(), "bf16": x.bfloat16(), "f8": x.to(torch.float8_e4m3fn),
        "i64": (x * 100).long(), "i32": (x * 100).int(), "i16": (x * 100).short(), "i8": x.to(torch.int8),
        "u8": x.abs().to(torch.uint8), "bool": x > 0, "scalar": torch.tensor(1.5), "deep": torch.from_numpy(normal(2, 3, 4)),
    }
    save("plain.safetensors", tensors)
    expected("plain.safetensors", {k: v.float().numpy() for k, v in tensors.items()})


def modelopt_file():
    codes, scales = nvfp4(6, 48)
    s2 = np.float32(0.00321)
    f8 = torch.from_numpy(normal(4, 8)).to(torch.float8_e4m3fn)
    save("modelopt.safetensors", {
        "a.weight": torch.from_numpy(pack(codes)), "a.weight_scale": e4m3(scales), "a.weight_scale_2": torch.tensor(s2),
        "a.input_scale": torch.tensor(0.25), "b.weight": f8, "b.weight_scale": torch.tensor(0.5),
        "norm.weight": torch.from_numpy(normal(48)).bfloat16(),
    })
    expected("modelopt.safetensors", {
        "a.weight": values(codes, scales, s2).numpy(), "a.weight/codes": pack(codes), "a.weight/scales": scales,
        "b.weight": (f8.float() * 0.5).numpy(),
    })


def compressed_file():
    codes, scales = nvfp4(6, 48)
    divisor = np.float32(311.7)
    save("compressed.safetensors", {
        "a.weight_packed": torch.from_numpy(pack(codes)), "a.weight_scale": e4m3(scales),
        "a.weight_global_scale": torch.tensor([divisor]), "a.input_global_scale": torch.tensor([4.0]),
    })
    want = torch.from_numpy(E2M1[codes]) * (e4m3(scales).float() / torch.tensor(divisor)).repeat_interleave(16, dim=1)
    expected("compressed.safetensors", {"a.weight": want.numpy(), "a.weight/codes": pack(codes), "a.weight/scales": scales})


def blocked(scales):
    """torchao's to_blocked: 128x4 tiles, zero padded, as a 2-D view."""
    rows, cols = scales.shape
    r, c = -(-rows // 128), -(-cols // 4)
    padded = np.zeros((r * 128, c * 4), np.uint8)
    padded[:rows, :cols] = scales
    tiles = padded.reshape(r, 128, c, 4).transpose(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(0, 2, 1, 3).reshape(-1, 32, 16).reshape(32 * r, 16 * c)


def torchao_file():
    tensors, want, metadata = {}, {}, {"tensor_names": json.dumps(["a.weight", "b.weight"])}
    for module, swizzled, multiplier in [("a", True, 0.0071), ("b", False, None)]:
        codes, scales = nvfp4(130 if swizzled else 6, 80)
        tensors[f"{module}._weight_qdata"] = torch.from_numpy(pack(codes))
        tensors[f"{module}._weight_scale"] = e4m3(blocked(scales) if swizzled else scales)
        if multiplier is not None:
            tensors[f"{module}._weight_per_tensor_scale"] = torch.tensor(multiplier)
        metadata[f"{module}.weight"] = json.dumps({"_type": "NVFP4Tensor", "_data": {"is_swizzled_scales": swizzled}})
        want[f"{module}.weight"] = values(codes, scales, multiplier or 1.0).numpy()
        want[f"{module}.weight/codes"] = pack(codes)
        want[f"{module}.weight/scales"] = scales
    save("torchao.safetensors", tensors, metadata)
    expected("torchao.safetensors", want)


# --- bitsandbytes NF4, written out by hand --------------------------------------------------------------------------------
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                1.0], np.float32)


def nf4_file():
    tensors, want = {}, {}
    for module, shape, nested in [("a", (6, 37), False), ("b", (40, 48), True)]:
        count, block = int(np.prod(shape)), 64
        codes = rng.integers(0, 16, count + count % 2, dtype=np.uint8)
        blocks = -(-count // block)
        state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
        key = f"{module}.weight"
        if nested:
            index = rng.integers(0, 256, blocks, dtype=np.uint8)
            table = np.linspace(-1, 1, 256, dtype=np.float32)
            outer = np.abs(normal(-(-blocks // 16)))
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.75}
            absmax = table[index] * np.repeat(outer, 16)[:blocks] + np.float32(0.75)
            tensors |= {f"{key}.absmax": index, f"{key}.nested_absmax": outer, f"{key}.nested_quant_map": table}
        else:
            absmax = np.abs(normal(blocks))
            tensors[f"{key}.absmax"] = absmax
        tensors[key] = (codes[0::2] << 4 | codes[1::2]).reshape(-1, 1)
        tensors[f"{key}.quant_map"] = NF4
        text = json.dumps(state).encode()
        tensors[f"{key}.quant_state.bitsandbytes__nf4"] = np.frombuffer(text, np.uint8)
        want[key] = (NF4[codes[:count]] * np.repeat(absmax, block)[:count]).reshape(shape)
    save("nf4.safetensors", tensors)
    expected("nf4.safetensors", want)


# --- TorchSharp's .dat ----------------------------------------------------------------------------------------------------
def leb128(value):
    out = b""
    while True:
        byte, value = value & 0x7F, value >> 7
        out += bytes([byte | 0x80 if value else byte])
        if not value:
            return out


def dat_file():
    codes, scales = nvfp4(6, 48)
    other, other_scales = nvfp4(2, 32)
    embed, norm = normal(9, 32).astype(np.float16), normal(48)
    other_f16 = e4m3(other_scales).to(torch.float16).numpy()
    brain = torch.from_numpy(normal(2, 3)).bfloat16()
    entries = [
        ("model.embed_tokens.weight", 5, embed.shape, embed.tobytes()),
        ("model.layers.0.mlp.up_proj.weight.qdata", 0, (6, 24), pack(codes).tobytes()),
        ("model.layers.0.mlp.up_proj.weight.scale", 101, (6, 3), scales.tobytes()),
        ("other.qdata", 100, (2, 16), pack(other).tobytes()),
        ("model.norm.weight", 6, norm.shape, norm.tobytes()),
        ("other.scale", 5, (2, 2), other_f16.tobytes()),
        ("brain", 15, (2, 3), brain.view(torch.uint8).numpy().tobytes()),
    ]
    data = leb128(len(entries))
    for key, kind, shape, payload in entries:
        key = key.encode()
        data += leb128(len(key)) + key + leb128(kind) + leb128(len(shape)) + b"".join(map(leb128, shape)) + payload
    (HERE / "host.dat").write_bytes(data)
    expected("host.dat", {
        "model.embed_tokens.weight": embed.astype(np.float32), "model.norm.weight": norm, "brain": brain.float().numpy(),
        "model.layers.0.mlp.up_proj.weight": values(codes, scales, 1.0).numpy(),
        "model.layers.0.mlp.up_proj.weight/codes": pack(codes), "model.layers.0.mlp.up_proj.weight/scales": scales,
        "other.weight": values(other, other_scales, 1.0).numpy(),
        "other.weight/codes": pack(other), "other.weight/scales": other_scales,
    })


for make in [blocks_file, llama_file, plain_file, modelopt_file, compressed_file, torchao_file, nf4_file, dat_file]:
    make()
