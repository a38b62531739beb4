#!/usr/bin/env python3
"""Writes format.safetensors: what independent implementations of the number formats say.

Conversions are those of ml_dtypes and torch; the quantizers are spelled out here on whole arrays, by brute force where
src/format searches. Needs numpy, ml_dtypes, torch and safetensors. Deterministic: run it again and the file is the same.
"""

import pathlib

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import save_file

f32 = np.float32
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(f32)
out = {}


def e4m3(x):
    """Bytes, saturating. torch and ml_dtypes agree below the point where both go to NaN."""
    x = np.clip(np.nan_to_num(np.asarray(x, f32), nan=0, posinf=448, neginf=-448), -448, 448)
    byte = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    other = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (byte == other).all()
    return byte


def e4m3_value(byte):
    return np.asarray(byte, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(f32)


def e2m1(x):
    return np.asarray(x, f32).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)


def e2m1_half_away(x):
    """Nearest of the eight magnitudes by distance; the larger one wins a tie. The sign is the sign bit."""
    x = np.asarray(x, f32)
    a = np.minimum(np.abs(x.astype(np.float64)), 6)
    distance = np.abs(a[..., None] - E2M1[:8].astype(np.float64))
    code = 7 - np.argmin(distance[..., ::-1], -1)
    return (code | np.signbit(x) * 8).astype(np.uint8)


def pack(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4


def runs(name, codes):
    """A table over all 65536 bf16 bit patterns as the patterns where its value changes, and the values there."""
    starts = np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]])
    out[name + ".start"] = starts.astype(np.uint16)
    out[name + ".code"] = codes[starts]


# Conversions over their whole domain. 255 stands for "no code": the NaNs.
bf16 = (np.arange(65536, dtype=np.uint32) << 16).view(f32)
nan = np.isnan(bf16)
values = e4m3_value(np.arange(256))
torch_values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
assert np.array_equal(values, torch_values, equal_nan=True)
out["e4m3.value"] = values
out["product"] = (values.astype(np.float64)[:, None] * E2M1.astype(np.float64)).astype(f32)
runs("e4m3.of_bf16", np.where(nan, np.uint8(255), e4m3(bf16)))
runs("e2m1.of_bf16", np.where(nan, np.uint8(255), e2m1(np.nan_to_num(bf16, nan=0, posinf=1e9, neginf=-1e9))))
runs("e2m1.half_away_of_bf16", np.where(nan, np.uint8(255), e2m1_half_away(np.nan_to_num(bf16, nan=0))))

# Random bits, in Python integers.
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def bits(seed, counter):
    return mix((mix((seed + GOLDEN) & MASK) + (counter + 1) * GOLDEN) & MASK)


positions = [(s, c) for s in (0, 1, 0x123456789ABCDEF, MASK) for c in (0, 1, 2, 1000, 1 << 40)]
out["random.position"] = np.array(positions, np.uint64)
out["random.bits"] = np.array([bits(s, c) for s, c in positions], np.uint64)

# Quantizers. The input has blocks of ordinary weights, of outliers, of ties, of zeros, and some far below the rest.
rng = np.random.default_rng(1)
ROWS, COLS = 24, 64
x = (rng.standard_normal((ROWS, COLS)) * 0.02).astype(f32)
x[2] = rng.standard_t(2, COLS) * 0.05
x[3] = rng.choice(E2M1, COLS) * 0.0625
x[4] = rng.integers(-24, 25, COLS) * 0.25
x[4, ::16] = 6
x[5] = 0
x[6] *= 1e-5
x[7] *= np.repeat([1e-4, 1e-3, 1e-2, 1e3], 16)
x[8, 3:16] = -0.0
x[9] = x[9].astype(ml_dtypes.bfloat16)
x[10] *= np.repeat([1e-6, 3e-6, 1e-8, 1], 16)
blocks = x.reshape(-1, 16)
amax = np.abs(blocks).max(1)
out["quantize.x"] = x


def finish(name, scale, codes, g):
    zero = (codes & 7 == 0).all(1)
    scale = np.where(zero, np.uint8(0), scale)
    codes = np.where(zero[:, None], np.uint8(0), codes)
    out[f"quantize.{name}.scales"] = scale.reshape(ROWS, COLS // 16)
    out[f"quantize.{name}.codes"] = pack(codes).reshape(ROWS, COLS // 2)
    out[f"quantize.{name}.global"] = np.array([g], f32)


def quotient(scale, g):
    return blocks / (e4m3_value(scale) * f32(g))[:, None]


def squared_error(scale, g):
    value = E2M1[e2m1(quotient(scale, g))].astype(np.float64)
    value *= e4m3_value(scale).astype(np.float64)[:, None] * np.float64(f32(g))
    return ((blocks - value) ** 2).sum(1)


def nearest_scale(x):
    return np.maximum(e4m3(x), 1)


def stochastic(q, seed):
    """The upper neighbour if 24 random bits, as a fraction of 2^24, are below the distance from the lower one in gaps."""
    a = np.minimum(np.abs(q), f32(6)).astype(np.float64)
    low = np.searchsorted(E2M1[:8], a, "right") - 1
    gap = np.diff(np.r_[E2M1[:8], 8])
    random = np.array([bits(seed, i) >> 40 for i in range(a.size)]).reshape(a.shape)
    up = random < (a - E2M1[low]) / gap[low] * 2.0**24
    return (low + up | np.signbit(q) * 8).astype(np.uint8)


A = amax.max()
for level, g, g46 in (("two", A / f32(2688), A / f32(1536)), ("single", f32(1), f32(1))):
    s = nearest_scale(amax / f32(6) / g)
    q = quotient(s, g)
    finish(f"{level}.amax", s, e2m1(q), g)
    finish(f"{level}.amax.half_away", s, e2m1_half_away(q), g)
    finish(f"{level}.amax.stochastic", s, stochastic(q, 99), g)
    six, four = nearest_scale(amax / f32(6) / g46), nearest_scale(amax / f32(4) / g46)
    s = np.where(squared_error(four, g46) < squared_error(six, g46), four, six)
    finish(f"{level}.four_over_six", s, e2m1(quotient(s, g46)), g46)
    errors = [squared_error(np.full(len(blocks), c, np.uint8), g) for c in range(1, 127)]
    s = (np.argmin(errors, 0) + 1).astype(np.uint8)
    finish(f"{level}.sweep", s, e2m1(quotient(s, g)), g)

# The legacy host's rule, with torch as the host uses it.
t = torch.from_numpy(blocks)
s = (t.abs().amax(1, keepdim=True) / 6).clamp(1.5258789e-05, 448).to(torch.float8_e4m3fn)
v = (t / (s.float() + 1e-12)).clamp(-6, 6)
away = sum((v.abs() >= edge).to(torch.uint8) for edge in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0))
away = (away | (v < 0).to(torch.uint8) * 8).numpy()
even = e2m1(v.numpy())
even = np.where((even == 8) & ~(v < 0).numpy(), np.uint8(0), even)
for name, codes in (("legacy", even), ("legacy.half_away", away)):
    out[f"quantize.{name}.scales"] = s.view(torch.uint8).numpy().reshape(ROWS, COLS // 16)
    out[f"quantize.{name}.codes"] = pack(codes).reshape(ROWS, COLS // 2)
    out[f"quantize.{name}.global"] = np.ones(1, f32)

# NF4: the nearest of the sixteen values, by brute force, over a length that fills neither its last block nor its last byte.
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], f32)  # fmt: skip
x = (rng.standard_normal(1001) * 0.3).astype(f32)
absmax = np.array([np.abs(b).max() for b in np.split(x, range(64, 1001, 64))], f32)
scaled = x / np.repeat(absmax, 64)[:1001]
codes = np.argmin(np.abs(scaled.astype(np.float64)[:, None] - NF4), 1).astype(np.uint8)
padded = np.r_[codes, np.uint8(0)]
out["nf4.value"] = NF4
out["nf4.x"] = x
out["nf4.codes"] = padded[0::2] << 4 | padded[1::2]
out["nf4.absmax"] = absmax
out["nf4.decoded"] = NF4[codes] * np.repeat(absmax, 64)[:1001]

# The swizzle, as the permutation of a padded tensor.
scales = torch.from_numpy(rng.integers(0, 256, (200, 7), np.uint8))
padded = torch.zeros(256, 8, dtype=torch.uint8)
padded[:200, :7] = scales
out["swizzle.linear"] = scales.numpy()
out["swizzle.swizzled"] = padded.view(2, 4, 32, 2, 4).permute(0, 3, 2, 1, 4).contiguous().flatten().numpy()

path = pathlib.Path(__file__).with_name("format.safetensors")
save_file({k: np.ascontiguousarray(v) for k, v in out.items()}, path)
print(f"{path.name}: {len(out)} tensors, {path.stat().st_size} bytes")
