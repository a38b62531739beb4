"""
NVFP4 from Python: quantize and multiply, and run language models whose weights stay in 4 bits. Over libNVFP4.so, by ctypes.

    import nvfp4
    chat = nvfp4.Model("qwen3-nvfp4").chat(system="Be brief.")
    for piece in chat.ask("Why is the sky blue?"):
        print(piece, end="", flush=True)

A chat samples tokens as the model recommends, and gives only the answer: the model's reasoning before it is in the result, and
in the pieces if parts=True asks for it. For tools, reasoning and whole conversations see ChatSession.

A model runs on the GPU with room for it, or else on the CPU, unless device= names a device; model.info says which and why.

In a coroutine of asyncio, `async for piece in chat.ask(...)` does the same, and `await chat.ask(...)` gives the whole answer: any number of
conversations run on one thread, and are decoded together. See Stream.

tensors.py has Tensor, quantize() and products; models.py has Model, Tokenizer, Session and ChatSession; streams.py has what generations give;
training.py has Trainer, and Optimizer for passes that are computed elsewhere; types.py has the names of options and choices, for
annotations. native.py has the C interface itself: what has no wrapper is called as nvfp4.native.lib.NAME. The stubs beside models.py,
streams.py, tensors.py and training.py have their types. `python -m nvfp4` is a conversation in the terminal.

The library is the one that NVFP4_LIB_PATH names (the file or its folder), or else libNVFP4.so beside these files, as in a wheel, or else
the one that the system's loader finds. Errors are nvfp4.Error, one class for each status, and the message is the library's. Objects are
given up by close(), by the end of a `with`, or with their last use. Calls may come from any thread, and run at the same time.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any, Callable, Dict, Optional, Tuple

from . import native, types
from .models import (Adapter, Cancel, ChatSession, Detokenizer, Grammar, Model, Pool, Session, SpecialToken, Tokenizer, convert, step,
                     step_sample)
from .native import (AbiMismatch, BufferTooSmall, Busy, Cancelled, ContextFull, CorruptFile, DeviceUnavailable, Error,
                     InputOutput, Internal, InvalidArgument, InvalidHandle, NotFound, OutOfMemory, OverBudget, Unsupported)
from .streams import Generation, Piece, Score, Stream, ToolCall
from .tensors import (Nf4, Quantized, Tensor, Weight, dequantize, dequantize_packed, linear, quantize, quantize_nf4,
                      quantize_packed, scaled_mm, schema, select_backend, ste_clear, ste_weight, swizzle, unswizzle)
from .training import (NO_LABEL, Batch, Comparison, Data, Optimizer, Row, Step, Trainer, rounding_seed, ste_linear,
                       ste_linear_backward)

__all__ = [
    "NO_LABEL", "AbiMismatch", "Adapter", "Batch", "BufferTooSmall", "Busy", "Cancel", "Cancelled", "ChatSession", "Comparison", "ContextFull", "CorruptFile",
    "Data", "Detokenizer", "DeviceUnavailable", "Error", "Generation", "Grammar", "InputOutput", "Internal", "InvalidArgument", "InvalidHandle", "Model",
    "Nf4", "NotFound", "Optimizer", "OutOfMemory", "OverBudget", "Piece", "Pool", "Quantized", "Row", "Score", "Session", "SpecialToken", "Step", "Stream", "Tensor", "Tokenizer",
    "ToolCall", "Trainer", "Unsupported", "Weight", "convert", "dequantize", "dequantize_packed", "diagnose", "empty_cache", "linear",
    "memory", "memory_budget", "native", "quantize", "quantize_nf4", "quantize_packed", "reset_memory_peak", "rounding_seed", "scaled_mm",
    "schema", "select_backend", "set_log", "set_memory_budget", "set_threads", "ste_clear", "ste_linear", "ste_linear_backward",
    "ste_weight", "step", "step_sample", "swizzle", "synchronize", "types", "unswizzle", "version",
]

version: str = native.lib.version().decode()


def diagnose() -> Dict[str, Any]:
    """What the library supports on this machine, and why something is missing, as a dictionary."""
    out: Dict[str, Any] = json.loads(native.text_out(native.lib.diagnose))
    return out


def memory() -> Dict[str, Tuple[int, int]]:
    """Bytes in use by purpose, now and at the peak since the last reset_memory_peak(): {"weights": (current, peak), ..}."""
    out = {}
    for tag, number in native.CHOICES["memory"].items():
        current, peak = ctypes.c_uint64(), ctypes.c_uint64()
        native.lib.memory_stats(number, ctypes.byref(current), ctypes.byref(peak))
        out[tag] = current.value, peak.value
    return out


def reset_memory_peak() -> None:
    """Sets all peaks to what is in use now."""
    native.lib.memory_reset_peak()


def memory_budget() -> int:
    """The most bytes that may be in use; 0 if there is no limit."""
    return int(native.value_out(ctypes.c_uint64, native.lib.memory_get_budget))


def set_memory_budget(number_of_bytes: int) -> None:
    """Makes allocations beyond it fail with OverBudget; 0 removes the limit."""
    native.lib.memory_set_budget(number_of_bytes)


def synchronize(device: str = "cuda") -> None:
    """Waits until all work that calls have enqueued on a device has run, and raises an error that the device has found in it."""
    native.lib.device_synchronize(*native.device(device))


def empty_cache() -> None:
    """Frees what is kept for reuse."""
    native.lib.empty_cache()


def set_threads(threads: int) -> None:
    """Sets the CPU threads of later calls and objects; 0 leaves it to the environment and the machine."""
    native.lib.set_threads(threads)


_log: Optional[int] = None  # The token of what set_log() was given last.


def set_log(function: Optional[Callable[[str, str], object]], level: types.LogLevel = "warn") -> None:
    """Calls `function` with the level's name and a line of text for each log message, on any thread. None removes it."""
    global _log

    token, threshold = None, native.choice("log", level)
    if function:
        told = function

        def take(_user: int, number: int, message: int, length: int) -> int:
            told(native.chosen("log", number), ctypes.string_at(message, length).decode(errors="replace"))
            return 0

        callback = native.LogCallback(take)
        with native.holding(callback) as user:
            token = native.value_out(ctypes.c_uint64, native.lib.log_add, callback, user, threshold, native.release)
    old, _log = _log, token
    if old:
        native.lib.log_remove(old)
