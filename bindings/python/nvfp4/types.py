"""
Names for annotations: choices, options, and what is taken in place of a Tensor. Nothing here does anything.

Options are given by name, nvfp4.Model("qwen3", device="cpu"); who keeps some of them in a dictionary annotates it:

    how: nvfp4.types.GenerationOptions = {"temperature": 0.3, "max_tokens": 200}
    chat.say("Why is the sky blue?", **how)

tests/python holds these against the library: each choice is one that it has, and each option a field of the struct that it takes.
"""

import os
from typing import Any, Callable, Literal, Mapping, Protocol, Sequence, Tuple, TypedDict, Union

Dtype = Literal["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "bfloat16", "float8_e4m3fn",
                "float4_e2m1fn_x2"]
FloatDtype = Literal["float16", "float32", "bfloat16"]
ScaleLayout = Literal["linear", "swizzled"]
Activations = Literal["exact", "int8"]
Levels = Literal["two", "single", "legacy"]
Recipe = Literal["amax", "four_over_six", "sweep"]
Rounding = Literal["nearest_even", "half_away", "stochastic"]
Nonfinite = Literal["error", "saturate"]
ComputePath = Literal["auto", "kernel_only", "kernel_or_fallback", "dequant_matmul_only"]
Format = Literal["nvfp4", "nf4"]
Container = Literal["modelopt", "dat"]
KvType = Literal["float16", "float32"]
Eviction = Literal["error", "drop_oldest"]
Finish = Literal["stop", "stop_string", "length", "context", "cancelled"]
Part = Literal["content", "reasoning", "tool_call"]
Schedule = Literal["constant", "cosine", "linear", "stable"]
Clip = Literal["never", "global", "previous", "tensor"]
TeacherMemory = Literal["auto", "resident", "streamed"]
WeightForm = Literal["residual4", "residual8", "two_term", "one_term", "bfloat16", "float32"]
FirstMoments = Literal["int4", "nvfp4", "int8", "float32"]
SecondMoments = Literal["uint4", "nvfp4", "int8", "float32"]
Outcome = Literal["updated", "skipped"]
Tables = Literal["auto", "bfloat16", "nvfp4", "int8"]
DataFormat = Literal["by_name", "tsv", "jsonl", "text", "csv", "json"]
LongRows = Literal["refuse", "truncate", "drop"]
EmptyThink = Literal["learn", "given", "none"]
LogLevel = Literal["error", "warn", "info", "debug", "trace"]

# A device is "cpu", "cuda", "cuda:1" and so on, or where a model or a trainer is made "auto".
Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
Text = Union[str, bytes, bytearray]
# Called with what is done and what there is to do; ends the call by returning False.
Progress = Callable[[int, int], object]
# A conversation and tools, as chat servers take them.
Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class SupportsDLPack(Protocol):
    """Such as a torch tensor, on any device of this library's."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> Tuple[Any, int]: ...


class QuantizeOptions(TypedDict, total=False):
    levels: Levels
    recipe: Recipe
    rounding: Rounding
    nonfinite: Nonfinite
    scale_layout: ScaleLayout
    seed: int


class WeightOptions(TypedDict, total=False):
    compute_path: ComputePath
    device: str
    backend: str
    dense_dtype: FloatDtype
    exclude_cpu_kernels: bool


class CalibrateOptions(TypedDict, total=False):
    device: str
    files: Union[Path, Sequence[Path]]
    windows: int
    window: int
    budget: float
    distill_steps: int


class LoadOptions(TypedDict, total=False):
    device: str
    threads: int
    activations: Activations
    sampling_only: bool


class SessionOptions(TypedDict, total=False):
    """Beside `system`, the system prompt."""

    context: int
    kv_type: KvType
    eviction: Eviction
    keep: int


class GenerationOptions(TypedDict, total=False):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    stop: Union[int, Text, Sequence[Union[int, Text]]]
    ignore_model_stops: bool
    replay: bool
    log_probabilities: bool


class TurnOptions(TypedDict, total=False):
    """Of a turn of a chat, beside those of its generation."""

    think: bool
    variables: Mapping[str, Any]
    tools: Sequence[Tool]
    reasoning_budget: int
    keep_reasoning: bool


class ChatOptions(SessionOptions, TurnOptions, total=False):
    """Of a chat, for all of its turns, beside `system`."""


class AskOptions(GenerationOptions, TurnOptions, total=False):
    """Of one turn of a chat."""


class RecommendedOptions(TypedDict):
    """The sampling settings that a model recommends."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


class DataOptions(TypedDict, total=False):
    format: DataFormat
    long_rows: LongRows
    empty_think: EmptyThink
    train_on_all: bool
    skip_bad_rows: bool
    window: int
    separator: Text


class TrainerOptions(TypedDict, total=False):
    threads: int
    schedule: Schedule
    clip: Clip
    weights: WeightForm
    first_moments: FirstMoments
    second_moments: SecondMoments
    tables: Tables
    weight_scales: Recipe
    release: bool
    recompute: bool
    last_blocks: int
    steps: int
    warmup: int
    seed: int
    rate: float
    floor: float
    decay_share: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip_norm: float
    delivered_share: float
    teacher: Path
    teacher_temperature: float
    label_share: float
    teacher_memory: TeacherMemory


class OptimizerOptions(TypedDict, total=False):
    weights: WeightForm
    first_moments: FirstMoments
    second_moments: SecondMoments
    fresh_scales: bool


class OptimizerStepOptions(TypedDict, total=False):
    rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    gradient_scale: float
    seed: int
    tensor: int
