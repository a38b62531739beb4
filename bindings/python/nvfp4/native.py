"""The C interface as it is: the library, its functions, structs and numbers, and its errors as exceptions.

What a function does stands in nvfp4.h; tests/python compares every line here with it. `lib` has all of its functions, under
their names without NVFP4_: one that returns a status raises the Error that belongs to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import types
from typing import TYPE_CHECKING, Any, Callable, Dict, Generator, List, Mapping, NoReturn, Optional, Sequence, Tuple, Type, TypeVar, Union

if TYPE_CHECKING:
    from typing_extensions import Self

    from .models import Cancel
    from .types import Path, Progress, Text

_Struct = TypeVar("_Struct", bound=ctypes.Structure)

# The header that this was written for.
ABI_VERSION = 1
VERSION_NUMBER = 100
VERSION = ".".join(str(VERSION_NUMBER // step % 100) for step in (10000, 100, 1))

# By the first part of its name in C, each choice: NVFP4_RECIPE_AMAX is CHOICES["recipe"]["amax"].
CHOICES: Dict[str, Dict[str, int]] = {
    "log": {"error": 1, "warn": 2, "info": 3, "debug": 4, "trace": 5},
    "memory": {"total": 0, "weights": 1, "kv_cache": 2, "scratch": 3, "tensor": 4, "device_weights": 5,
               "device_kv_cache": 6, "device_scratch": 7, "device_tensor": 8},
    "managed": {"disabled": 0, "preferred": 1, "required": 2},
    "dtype": {"uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7,
              "bool": 11, "bfloat16": 15, "float8_e4m3fn": 24, "float4_e2m1fn_x2": 45},
    "device": {"cpu": 0, "cuda": 1, "auto": -1},
    "levels": {"two": 0, "single": 1, "legacy": 2},
    "recipe": {"amax": 0, "four_over_six": 1, "sweep": 2},
    "rounding": {"nearest_even": 0, "half_away": 1, "stochastic": 2},
    "nonfinite": {"error": 0, "saturate": 1},
    "scales": {"linear": 0, "swizzled": 1},
    "activations": {"exact": 0, "int8": 1},
    "compute_path": {"auto": 0, "kernel_only": 1, "kernel_or_fallback": 2, "dequant_matmul_only": 3},
    "format": {"none": 0, "nvfp4": 1, "nf4": 2, "mixed": 3},
    "container": {"modelopt": 0, "dat": 1},
    "kv": {"float16": 0, "float32": 1},
    "eviction": {"error": 0, "drop_oldest": 1},
    "finish": {"none": -1, "stop": 0, "stop_string": 1, "length": 2, "context": 3, "cancelled": 4},
    "event": {"token": 0, "text": 1},
    "part": {"content": 0, "reasoning": 1, "tool_call": 2},
    "schedule": {"constant": 0, "cosine": 1, "linear": 2, "stable": 3},
    "clip": {"never": 0, "global": 1, "previous": 2, "tensor": 3},
    "teacher": {"auto": 0, "resident": 1, "streamed": 2},
    "weight_form": {"residual4": 0, "residual8": 1, "two_term": 2, "one_term": 3, "bfloat16": 4, "float32": 5},
    "first_moment": {"int4": 0, "nvfp4": 1, "int8": 2, "float32": 3},
    "second_moment": {"uint4": 0, "nvfp4": 1, "int8": 2, "float32": 3},
    "step": {"updated": 0, "skipped": 1},
    "tables": {"auto": -1, "bfloat16": 0, "nvfp4": 1, "int8": 2},
    "data": {"by_name": -1, "tsv": 0, "jsonl": 1, "text": 2, "csv": 3, "json": 4},
    "long": {"refuse": 0, "truncate": 1, "drop": 2},
    "empty_think": {"learn": 0, "given": 1, "none": 2},
}

# The fields of options that take a choice by name, with its table.
_CHOSEN = {"levels": "levels", "recipe": "recipe", "rounding": "rounding", "nonfinite": "nonfinite", "scale_layout": "scales",
           "compute_path": "compute_path", "dense_dtype": "dtype", "activations": "activations", "kv_type": "kv",
           "eviction": "eviction", "container": "container", "tables": "tables", "schedule": "schedule", "clip": "clip", "weights": "weight_form",
           "first_moments": "first_moment", "second_moments": "second_moment", "format": "data", "long_rows": "long",
           "empty_think": "empty_think", "weight_scales": "recipe", "teacher_memory": "teacher"}

# Types by letter: i I 32 bits, l L 64 bits, z size_t, b a byte, f d floats, p any pointer, s text with a NUL, v nothing.
_TYPES: Dict[str, Any] = {"i": ctypes.c_int32, "I": ctypes.c_uint32, "l": ctypes.c_int64, "L": ctypes.c_uint64, "z": ctypes.c_size_t,
          "b": ctypes.c_int8, "f": ctypes.c_float, "d": ctypes.c_double, "p": ctypes.c_void_p, "s": ctypes.c_char_p, "v": None}

# Each function with the types that it takes and that it returns; S is a status.
FUNCTIONS = """
status_name(i)s last_error()s last_status()i last_error_copy(pzp)S take_error(p)S error_status(p)i error_message(p)s error_retain(p)S error_release(p)S version()s abi_version()i version_number()i check_version(ii)S
log_add(ppipp)S log_remove(L)S
call_options_init(pI)S cancel_create(p)S cancel_trigger(p)i cancel_reset(p)i cancel_is_triggered(pp)S cancel_retain(p)S cancel_release(p)S
set_threads(i)S diagnose(pzp)S memory_stats(ipp)S memory_reset_peak()S memory_set_budget(L)S memory_get_budget(p)S
memory_set_managed_policy(i)S memory_get_managed_policy(p)S memory_can_be_managed(ip)S tensor_by_managed_policy(piip)S
tensor_from_host(ppipippp)S tensor_from_host_read_only(ppipippp)S tensor_from_device(ppipiippp)S tensor_empty(piiiip)S tensor_copy_to_device(piip)S
device_synchronize(ii)S tensor_view(ppiplp)S tensor_retain(p)S tensor_release(p)S tensor_dtype(pp)S tensor_device(ppp)S tensor_shape(ppzp)S
tensor_strides(ppzp)S tensor_data(pp)S tensor_bytes(pp)S tensor_copy_to_host(ppz)S tensor_copy_as_float(ppz)S
tensor_is_read_only(pp)S tensor_from_dlpack(pp)S tensor_to_dlpack(pp)S tensor_from_dlpack_versioned(pp)S
tensor_to_dlpack_versioned(pp)S quantize_options_init(pI)S tensor_quantize(ppppp)S tensor_dequantize(ppfiip)S
tensor_quantize_nf4(plpp)S tensor_dequantize_nf4(ppplpiip)S scales_swizzle(pp)S scales_unswizzle(pllp)S
quantize_packed(ppp)S dequantize_packed(ppip)S ste_weight(pip)S ste_clear()S
weight_options_init(pI)S backend_select(ippzp)S weight_create(ppfip)S weight_create_nvfp4(ppfpp)S weight_create_nf4(ppplllpp)S
weight_create_dense(pp)S weight_report(ppzp)S weight_retain(p)S weight_release(p)S weight_size(pppp)S linear(ppiip)S
matmul(ppfppfiip)S schema_detect(pzzpzp)S schema_report(pzzpzpzp)S schema_validate(pzzpz)S load_options_init(pI)S
model_load(pzppp)S model_retain(p)S model_release(p)S model_info(ppzp)S model_vocab_size(pp)S model_tokenize(ppzipzp)S model_tokenize_plain(ppzipzp)S
model_detokenize(ppzipzp)S model_render_chat(ppzzipzp)S convert_options_init(pI)S calibrate_options_init(pI)S
model_convert(pzpzpp)S
session_options_init(pI)S
generate_options_init(pI)S model_generate_options(ppI)S session_create(ppp)S session_retain(p)S session_release(p)S session_prefill(ppzp)S
session_prefill_token_by_token(ppzp)S session_decode(pip)S session_logits(ppzpp)S session_sample(ppp)S session_generate(ppppp)S
chat_options_init(pI)S session_chat(ppzppppp)S session_chat_messages(ppzppppp)S session_messages(ppzp)S session_reasoning(ppzp)S
session_tool_calls(ppzp)S model_render_messages(ppzpipzp)S model_tokenize_messages(ppzpipzp)S
session_text(ppzp)S session_length(pp)S session_context(pp)S
session_memory(pp)S session_tokens(ppzp)S session_truncate(pz)S session_reset(p)S session_fork(pp)S session_save(ppzp)S
session_restore(ppzpp)S session_step(ppzpp)S session_step_sample(ppzpppp)S
trainer_options_init(pI)S trainer_create(pzppp)S trainer_resume(pzpzppp)S trainer_retain(p)S trainer_release(p)S
trainer_step(ppzzpp)S trainer_evaluate(ppzzipp)S trainer_compare(ppzzippp)S trainer_info(ppzp)S trainer_save(ppzpzzp)S
trainer_data(ppzp)S
trainer_export_directory(ppziip)S trainer_export_dat(ppzp)S trainer_export_adapter(ppzpzip)S trainer_model(ppp)S
data_options_init(pI)S data_read(pzppzppp)S data_retain(p)S data_release(p)S data_count(pp)S data_document(pzpppzp)S data_mask(pzpzp)S
data_report(ppzp)S
optimizer_options_init(pI)S step_options_init(pI)S optimizer_create(ppp)S optimizer_restore(pziiip)S optimizer_retain(p)S
optimizer_release(p)S optimizer_step(ppppp)S optimizer_size(ppp)S optimizer_weight(piip)S optimizer_delivered(pppp)S
optimizer_save(ppzp)S rounding_seed(LLLp)S ste_linear(ppp)S ste_linear_backward(ppppp)S
detokenizer_create(ppzpp)S detokenizer_push(pippp)S detokenizer_finish(ppp)S detokenizer_retain(p)S detokenizer_release(p)S
 quantize(ppp)v scaled_mm(ppppb)p empty_cache()v can_use_managed()i is_managed_tensor(p)i to_managed(pii)p managed_prefetch(pi)v
"""


def _fields(text: str) -> List[Tuple[str, Any]]:
    return [(name, _TYPES[letter]) for name, letter in (field.split(":") for field in text.split())]


class QuantizeOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I levels:i recipe:i rounding:i nonfinite:i scale_layout:i seed:L call:p")


class WeightOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I compute_path:i device_type:i device_index:i scale_layout:i dense_dtype:i "
                       "exclude_cpu_kernels:i reserved:i backend:p backend_length:z")


class NamedTensor(ctypes.Structure):
    _fields_ = _fields("name:p name_length:z dtype:i rank:i sizes:p")


class SchemaResult(ctypes.Structure):
    _fields_ = _fields("struct_size:I format:i tensors:z weights:z problems:z out_features:l in_features:l block:l")


class CallOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I reserved:i cancel:p cancel_flag:p progress:p user:p")


class LoadOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I device_type:i device_index:i threads:i activations:i sampling_only:i call:p")


class ConvertOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I container:i replace:i keep_head:i call:p tables:i reserved:i "
                       "calibrate:p")


class CalibrateOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I device_type:i device_index:i windows:i window:z files:p file_lengths:p file_count:z "
                       "budget:d distill_steps:L")


class Message(ctypes.Structure):
    _fields_ = _fields("role:p role_length:z content:p content_length:z")


class SessionOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I kv_type:i eviction:i reserved:i context:z keep:z system:p system_length:z")


class GenerateOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I temperature:f top_k:i top_p:f min_p:f repetition_penalty:f ignore_model_stops:i replay:i "
                       "log_probabilities:i reserved:i max_tokens:z seed:L stop_tokens:p stop_token_count:z stop_strings:p stop_string_lengths:p "
                       "stop_string_count:z call:p")


class TokenEvent(ctypes.Structure):
    _fields_ = _fields("struct_size:I kind:i token:i index:i text:p text_length:z log_probability:f part:i")


class GenerationResult(ctypes.Structure):
    _fields_ = _fields("struct_size:I finish:i prompt_tokens:z generated_tokens:z prefill_seconds:d first_token_seconds:d "
                       "decode_seconds:d seed:L tool_calls:z")


class ChatOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I keep_reasoning:i reasoning_budget:l variables:p variables_length:z tools:p tools_length:z")


class TrainerOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I device_type:i device_index:i threads:i schedule:i clip:i weights:i first_moments:i "
                       "second_moments:i release:i recompute:i last_blocks:i steps:L warmup:L seed:L rate:d floor:d decay_share:d "
                       "weight_decay:d beta1:d beta2:d eps:d clip_norm:d delivered_share:d config:p config_length:z tables:i weight_scales:i "
                       "teacher:p teacher_length:z teacher_temperature:d label_share:d teacher_memory:i reserved:i")


class MicroBatch(ctypes.Structure):
    _fields_ = _fields("tokens:p labels:p token_count:z document_lengths:p document_count:z weights:p")


class DataOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I format:i long_rows:i empty_think:i train_on_all:i skip_bad_rows:i window:z separator:p "
                       "separator_length:z")


class StepReport(ctypes.Structure):
    _fields_ = _fields("struct_size:I outcome:i step:L targets:L loss:d rate:d gradient_norm:d changed:d changed_delivered:d")


class OptimizerOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I weights:i first_moments:i second_moments:i fresh_scales:i reserved:i")


class StepOptions(ctypes.Structure):
    _fields_ = _fields("struct_size:I gradient_scale:f rate:d beta1:d beta2:d eps:d weight_decay:d seed:L tensor:L")


LogCallback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t)
ProgressCallback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)
LogRelease = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
TokenCallback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(TokenEvent))
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class Error(Exception):
    """A call that failed. `status` is its number; the message is the library's own, one line for people."""

    status = 0


class InvalidArgument(Error, ValueError):
    status = 1


class Unsupported(Error):
    status = 2


class OutOfMemory(Error, MemoryError):
    status = 3


class OverBudget(Error, MemoryError):
    status = 4


class InputOutput(Error, OSError):
    status = 5


class CorruptFile(Error, ValueError):
    status = 6


class NotFound(Error, FileNotFoundError):
    status = 7


class ContextFull(Error):
    status = 8


class Busy(Error):
    status = 9


class Cancelled(Error):
    status = 10


class BufferTooSmall(Error):
    status = 11


class InvalidHandle(Error, ValueError):
    status = 12


class AbiMismatch(Error):
    status = 13


class DeviceUnavailable(Error):
    status = 14


class Internal(Error):
    status = 15


# The exception of each status.
ERRORS: Dict[int, Type[Error]] = {error.status: error for error in (
    InvalidArgument, Unsupported, OutOfMemory, OverBudget, InputOutput, CorruptFile, NotFound, ContextFull, Busy, Cancelled,
    BufferTooSmall, InvalidHandle, AbiMismatch, DeviceUnavailable, Internal)}
for _error in (Error, *ERRORS.values()):
    _error.__module__ = "nvfp4"  # Where everybody takes them from.


def _check(status: int, _function: Any, _arguments: Any) -> None:
    if status:
        raise ERRORS.get(status, Error)(lib.last_error().decode())


def _fitting(kind: Any) -> Any:
    """The parameter type of numbers of a ctypes type, which itself would cut off what does not fit."""
    def from_param(value: Any) -> Any:
        out = kind(value)
        if isinstance(value, int) and out.value != value:
            raise OverflowError(f"{value} does not fit into the {8 * ctypes.sizeof(kind)} bits that it has")
        return out

    return types.SimpleNamespace(from_param=from_param)


_PARAMETERS = {letter: _fitting(kind) if letter in "iIlLzb" else kind for letter, kind in _TYPES.items()}


def _candidates() -> List[str]:
    """Where the library may be: what was named, alone; or else beside this package, or where the system's loader looks."""
    name = "libNVFP4.so"
    named = os.environ.get("NVFP4_LIB_PATH")
    if named:
        return [os.path.join(named, name) if os.path.isdir(named) else named]
    return [os.path.join(os.path.dirname(os.path.abspath(__file__)), name), name]


# What ELF files say of the processor that they are for, by what Python calls it.
_MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}


def _refusal(message: str, path: Optional[str] = None) -> ImportError:
    """The one error of loading. With the name, `python -m nvfp4` shows it in one line."""
    return ImportError(message, name=__package__, path=path)


def _unfit(path: str, error: OSError) -> str:
    """Why a file that is there cannot be loaded. Of one for another processor the loader says that it is not there."""
    try:
        with open(path, "rb") as file:
            header = file.read(20)
    except OSError as unread:
        return str(unread.strerror)
    if header[:4] != b"\x7fELF":
        return "it is no shared library"
    number, here = int.from_bytes(header[18:20], "little" if header[5] == 1 else "big"), platform.machine()
    machine = _MACHINES.get(number, f"machine {number} of ELF")
    return str(error).replace(f"{path}: ", "") if machine == here else f"it is for {machine}, and this Python for {here}"


def _check_versions(library: ctypes.CDLL, path: str) -> None:
    """Raises unless the library is one that this package was made for, or a later one with the same binary interface."""
    needed = f"nvfp4 {VERSION} needs libNVFP4 {VERSION} or later with binary interface {ABI_VERSION}"
    try:
        version, number, interface = library.NVFP4_version, library.NVFP4_version_number(), library.NVFP4_abi_version()
    except AttributeError as error:
        raise _refusal(f"{path} is no libNVFP4, or one from before its versions ({error}); {needed}", path) from None
    version.restype = ctypes.c_char_p
    if (interface, max(number, VERSION_NUMBER)) != (ABI_VERSION, number):
        mend = (f"install libNVFP4 {VERSION} or later" if interface <= ABI_VERSION
                else f"install the nvfp4 package of version {version().decode()}, which is for that library")
        raise _refusal(f"{path} is libNVFP4 {version().decode()} with binary interface {interface}; {needed}: {mend}", path)


def _load() -> types.SimpleNamespace:
    tried = []
    for path in _candidates():
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            if os.sep in path and os.path.exists(path):
                raise _refusal(f"{path} cannot be loaded: {_unfit(path, error)}; nvfp4 {VERSION} needs libNVFP4 {VERSION} or later "
                               f"for {platform.machine()}", path) from None
            tried.append(str(error) if path in str(error) else f"{path}: {error}")
            continue
        _check_versions(library, path)
        functions = types.SimpleNamespace(path=path)
        for name, taken, returned in re.findall(r"(\w+)\((\w*)\)(\w)", FUNCTIONS):
            try:
                function = library["NVFP4_" + name]
            except AttributeError:
                raise _refusal(f"{path} has no NVFP4_{name}, though it says that it is libNVFP4 {library.NVFP4_version().decode()}; "
                               f"nvfp4 {VERSION} needs a whole libNVFP4 {VERSION} or later", path) from None
            function.argtypes = [_PARAMETERS[letter] for letter in taken]
            function.restype = _TYPES["i" if returned == "S" else returned]
            if returned == "S":
                function.errcheck = _check  # type: ignore[assignment] # None of its parameters is looked at.
            setattr(functions, name, function)
        return functions
    raise _refusal(f"libNVFP4.so was not found, and nvfp4 {VERSION} needs libNVFP4 {VERSION} or later; name the file or its folder in "
                   f"NVFP4_LIB_PATH. Tried: {'; '.join(tried)}")


lib = _load()


def choice(table: str, name: str) -> int:
    """The number of a choice, or an error that lists them all."""
    try:
        return CHOICES[table][name]
    except (KeyError, TypeError):
        raise InvalidArgument(f"{table} is {name!r}; it can be {', '.join(CHOICES[table])}") from None


def chosen(table: str, number: int) -> str:
    """The name of a choice."""
    return next((name for name, value in CHOICES[table].items() if value == number), str(number))


def device(name: str) -> Tuple[int, int]:
    """Type and index of a device: "cpu", "cuda", "cuda:1" or "auto"."""
    kind, _, index = name.partition(":")
    if index and not index.isdecimal():
        raise InvalidArgument(f"device is {name!r}; it can be cpu, cuda, cuda:1 and so on, or auto")
    return choice("device", kind), int(index or 0)


def options(struct: Type[_Struct], values: Mapping[str, Any]) -> _Struct:
    """
    A struct of options with its defaults, but for `values`: choices by name, flags as booleans, text as it is, a device as
    device=, and what ends a text as stop=, which holds tokens and strings; bytes are strings in UTF-8.
    """
    out = struct()
    name = "_".join(re.findall("[A-Z][a-z]+", struct.__name__)).lower()
    getattr(lib, name + "_init")(ctypes.byref(out), ctypes.sizeof(out))
    kinds: Dict[str, Any] = {name: kind for name, kind, *_ in struct._fields_}
    out.kept = []  # What the pointers in it point to.

    def point(field: str, count: str, array: ctypes.Array[Any]) -> None:
        out.kept.append(array)
        setattr(out, field, ctypes.addressof(array))
        setattr(out, count, len(array))

    for field, value in values.items():
        if field == "device" and "device_type" in kinds:
            out.device_type, out.device_index = device(value)
        elif field == "stop" and "stop_tokens" in kinds:
            value = [value] if isinstance(value, (int, str, bytes, bytearray)) else list(value)
            strings = [text_in(stop)[0] for stop in value if isinstance(stop, (str, bytes, bytearray))]
            tokens = [stop for stop in value if not isinstance(stop, (str, bytes, bytearray))]
            point("stop_tokens", "stop_token_count", numbers(ctypes.c_int32, tokens))
            point("stop_strings", "stop_string_count", (ctypes.c_char_p * len(strings))(*strings))
            point("stop_string_lengths", "stop_string_count", (ctypes.c_size_t * len(strings))(*map(len, strings)))
        elif field == "files" and "file_count" in kinds:
            for name, array in zip(("files", "file_lengths"), paths_in(value)):
                point(name, "file_count", array)
        elif field in ("backend", "system", "variables", "tools", "config", "separator", "teacher") and field in kinds:
            if value:
                data, length = path_in(value) if field == "teacher" else text_in(value)
                point(field, field + "_length", (ctypes.c_char * length).from_buffer_copy(data))
        elif field in _CHOSEN and field in kinds:
            setattr(out, field, choice(_CHOSEN[field], value))
        elif field in kinds and kinds[field] is not ctypes.c_void_p and field not in ("struct_size", "reserved"):
            setattr(out, field, value if isinstance(value, float) else _fitting(kinds[field]).from_param(value))
        else:
            raise TypeError(f"{field!r} is none of the options: {', '.join(kinds)}, device, stop")
    return out


def paths_in(files: Any) -> Tuple[ctypes.Array[Any], ctypes.Array[Any]]:
    """A path or several, and their lengths in bytes."""
    files = [files] if isinstance(files, (str, bytes, os.PathLike)) else files
    names = [path_in(file)[0] for file in files]
    return (ctypes.c_char_p * len(names))(*names), (ctypes.c_size_t * len(names))(*map(len, names))


def numbers(kind: Any, values: Sequence[int]) -> ctypes.Array[Any]:
    """A ctypes array of numbers that fit."""
    out: ctypes.Array[Any] = (kind * len(values))(*map(_fitting(kind).from_param, values))
    return out


def text_in(text: Text) -> Tuple[bytes, int]:
    """Text as C takes it: pointer and length in bytes."""
    data = bytes(text) if isinstance(text, (bytes, bytearray)) else text.encode()
    return data, len(data)


def path_in(path: Path) -> Tuple[bytes, int]:
    """A path as C takes it: its bytes as the system has them, as os.fsencode() gives them."""
    data = os.fsencode(path)
    return data, len(data)


def items_out(kind: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The ctypes array of what `function(*arguments, buffer, capacity, &count)` copies out."""
    count = ctypes.c_size_t()
    function(*arguments, None, 0, ctypes.byref(count))
    while True:
        out = (kind * count.value)()
        try:
            function(*arguments, out, len(out), ctypes.byref(count))
            return out[:count.value]
        except BufferTooSmall:  # It grew in between, and count says to what.
            continue


def text_out(function: Callable[..., Any], *arguments: Any) -> str:
    """The text that `function(*arguments, buffer, capacity, &length)` copies out."""
    return bytes(items_out(ctypes.c_char, function, *arguments)).decode()


def value_out(kind: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The one value that `function(*arguments, &value)` writes."""
    out = kind()
    function(*arguments, ctypes.byref(out))
    return out.value


@contextlib.contextmanager
def callback(kind: Any, function: Callable[..., Any]) -> Generator[Any, None, None]:
    """`function` as a callback of C for one call: False ends the call, and so does an exception, which then leaves it."""
    raised: List[BaseException] = []

    def guarded(_user: Any, *arguments: Any) -> int:
        try:
            return int(function(*arguments) is False)
        except BaseException as error:
            raised.append(error)
            return 1

    try:
        yield kind(guarded)
    finally:
        if raised:
            raise raised.pop() from None


@contextlib.contextmanager
def call_options(cancel: Optional[Cancel] = None, flag: Optional[ctypes.c_int32] = None,
                 progress: Optional[Progress] = None) -> Generator[Optional[int], None, None]:
    """
    The address of what may end a call: a Cancel, a c_int32, and `progress`, which is told how far it is and ends it by False or an
    exception. None where there is none of them.
    """
    if cancel is None and flag is None and progress is None:
        yield None
        return
    out = options(CallOptions, {})
    if cancel is not None:
        out.cancel = cancel._as_parameter_
        if not out.cancel:
            raise InvalidHandle("the Cancel was closed; pass one that is open")
    if flag is not None:
        out.cancel_flag = ctypes.addressof(flag)
    if progress is None:
        yield ctypes.addressof(out)
    else:
        with callback(ProgressCallback, progress) as function:
            out.progress = ctypes.cast(function, ctypes.c_void_p)
            yield ctypes.addressof(out)


class Single:
    """What owns a handle, or uses one that is not its own. A copy would release the handle a second time."""

    _copies = ""  # What to do instead of copying it.
    _pickles = ""  # What to do instead of passing it to another process, where its handle is unknown.

    def __copy__(self) -> NoReturn:
        self._refuse("copied", self._copies)

    def __deepcopy__(self, _memo: object) -> NoReturn:
        self._refuse("copied", self._copies)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        self._refuse("pickled", self._pickles)

    def __reduce__(self) -> NoReturn:
        self._refuse("pickled", self._pickles)

    def __getstate__(self) -> NoReturn:
        self._refuse("pickled", self._pickles)

    def _refuse(self, how: str, instead: str) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be {how}: it is a handle of this process; {instead}")


class Handle(Single):
    """One reference to an object of the library. close() gives it up, and so do the end of a `with` and the last use."""

    _kind = ""
    _as_parameter_: Optional[int] = None  # The handle: ctypes passes it where this object is an argument, and keeps the object until then.

    @classmethod
    def _own(cls, handle: Optional[int]) -> Self:
        out = cls.__new__(cls)
        out._as_parameter_ = handle
        return out

    def close(self) -> None:
        """Gives up the object; using it is an error then. What else needs it keeps it alive."""
        handle, self._as_parameter_ = self._as_parameter_, None
        if handle:
            getattr(lib, self._kind + "_release")(handle)

    def _second(self) -> Self:
        """Another owner of the same object."""
        getattr(lib, self._kind + "_retain")(self)
        return self._own(self._as_parameter_)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _text(self, name: str) -> str:
        return text_out(getattr(lib, f"{self._kind}_{name}"), self)

    def _value(self, kind: Any, name: str) -> Any:
        return value_out(kind, getattr(lib, f"{self._kind}_{name}"), self)

    def _items(self, kind: Any, name: str) -> Any:
        return items_out(kind, getattr(lib, f"{self._kind}_{name}"), self)
