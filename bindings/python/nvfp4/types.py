"""
Names for annotations: choices, options, and what is taken in place of a Tensor. Nothing here does anything.

Options are given by name, nvfp4.Model("qwen3", device="cpu"), and None is the default of each. Who keeps some of them in a dictionary annotates
it:

    how: nvfp4.types.GenerationOptions = {"temperature": 0.3, "max_tokens": 200}
    chat.say("Why is the sky blue?", **how)

bindings/generate.py writes _types.py from nvfp4.h, with all choices, and all options that are numbers, flags and choices. Options of other
types stand here, and tests/python holds them against the fields of the structs.
"""

import array
import mmap
import os
from typing import TYPE_CHECKING, Any, BinaryIO, Callable, Literal, Mapping, Optional, Protocol, Sequence, Tuple, TypedDict, Union

from . import _types
from ._types import *
from ._types import ConvertOptions as ConvertOptions, GrammarOptions as GrammarOptions, OptimizerOptions as OptimizerOptions
from ._types import PlanOptions as PlanOptions, QuantizeOptions as QuantizeOptions, QueueOptions as QueueOptions
from ._types import SubmitOptions as SubmitOptions

if TYPE_CHECKING:
    from .models import Adapter, Grammar, Model, Pool

FloatDtype = Literal["float16", "float32", "bfloat16"]

# A device is "cpu", "cuda", "cuda:1" and so on, or where a model or a trainer is made "auto".
Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]
Text = Union[str, bytes, bytearray]
# A file of a model: a buffer, a binary file that can seek, or a size and a function of an offset and a size that gives so many bytes.
FileContent = Union[bytes, bytearray, memoryview, "array.array[int]", mmap.mmap, BinaryIO, Tuple[int, Callable[[int, int], bytes]]]
# Called with what is done and what there is to do; ends the call by returning False.
Progress = Callable[[int, int], object]
# Takes logits to change, of format f, the tokens that the generation has so far, of format i, and the index of the session in a step. Ends the
# generation by returning False.
LogitsProcessor = Callable[["memoryview[float]", "memoryview[int]", int], object]
# A conversation and tools, as chat servers take them.
Message = Mapping[str, Any]
Tool = Mapping[str, Any]


class SupportsDLPack(Protocol):
    """Such as a torch tensor, on any device of this library's."""

    def __dlpack__(self, *, stream: Any = ...) -> Any: ...

    def __dlpack_device__(self) -> Tuple[Any, int]: ...


class WeightOptions(_types.WeightOptions, total=False):
    device: Optional[str]
    backend: Optional[str]
    dense_dtype: Optional[FloatDtype]


class CalibrateOptions(_types.CalibrateOptions, total=False):
    device: Optional[str]
    files: Optional[Union[Path, Sequence[Path]]]


class LoadOptions(_types.LoadOptions, total=False):
    device: Optional[str]
    pool: Optional["Pool"]


class SessionOptions(_types.SessionOptions, total=False):
    adapter: Optional["Adapter"]


class GenerationOptions(_types.GenerateOptions, total=False):
    stop: Optional[Union[int, Text, Sequence[Union[int, Text]]]]
    grammar: Optional["Grammar"]
    draft_model: Optional["Model"]
    logit_bias: Optional[Mapping[int, float]]
    bad_words: Optional[Sequence[Sequence[int]]]
    dry_sequence_breakers: Optional[Union[Text, Sequence[Text]]]
    logits_processor: Optional[LogitsProcessor]


class TurnOptions(_types.ChatOptions, total=False):
    """Options of one turn of a chat, without those of its generation."""

    think: Optional[bool]
    variables: Optional[Mapping[str, Any]]
    tools: Optional[Sequence[Tool]]
    chat_template: Optional[Text]


class ChatOptions(SessionOptions, TurnOptions, total=False):
    """Options of a chat, for all of its turns, without `system`."""


class AskOptions(GenerationOptions, TurnOptions, total=False):
    """Options of one turn of a chat."""


class StreamOptions(GenerationOptions, SubmitOptions, total=False):
    """Options of a generation that is given in pieces. Those of SubmitOptions are for event loops."""


class AskStreamOptions(AskOptions, SubmitOptions, total=False):
    """Options of one turn of a chat that is given in pieces."""


class RecommendedOptions(TypedDict):
    """The sampling settings that a model recommends."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float


class EmbedOptions(_types.EmbedOptions, total=False):
    prompt: Optional[Text]
    prompt_name: Optional[Text]


class HiddenStateOptions(TypedDict, total=False):
    """Options of embeddings that are not pooled."""

    normalize: Optional[Normalize]
    dimensions: Optional[int]
    truncate: Optional[bool]
    kv_type: Optional[KvType]
    is_private: Optional[bool]
    prompt: Optional[Text]
    prompt_name: Optional[Text]


class DataOptions(_types.DataOptions, total=False):
    separator: Optional[Text]


class TrainerOptions(_types.TrainerOptions, total=False):
    teacher: Optional[Path]


class OptimizerStepOptions(_types.StepOptions, total=False):
    """Options of one step of an Optimizer."""
