"""The C interface as it is: the library, its functions, structs and numbers, and its errors as exceptions.

bindings/generate.py writes _abi.py from nvfp4.h, with all structs, numbers, callbacks and signatures; their names are here too. `lib` has
all functions, under their names without NVFP4_ and with their documentation as __doc__: one that returns a status raises the Error that
belongs to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import platform
import re
import traceback
import types
import weakref
from typing import TYPE_CHECKING, Any, Callable, Dict, Generator, List, Mapping, NoReturn, Optional, Sequence, Tuple, Type, TypeVar, Union

from ._abi import *

if TYPE_CHECKING:
    from typing_extensions import Self

    from .models import Cancel
    from .types import Path, Progress, Text

_Struct = TypeVar("_Struct", bound=ctypes.Structure)

VERSION = ".".join(str(VERSION_NUMBER // step % 100) for step in (10000, 100, 1))


class Error(Exception):
    """A call that failed. `status` is its number; the message is the library's own, one line for people."""

    status = 0


class InvalidArgument(Error, ValueError):
    status = STATUSES["invalid_argument"]


class Unsupported(Error):
    status = STATUSES["unsupported"]


class OutOfMemory(Error, MemoryError):
    status = STATUSES["out_of_memory"]


class OverBudget(Error, MemoryError):
    status = STATUSES["over_budget"]


class InputOutput(Error, OSError):
    status = STATUSES["io"]


class CorruptFile(Error, ValueError):
    status = STATUSES["corrupt_file"]


class NotFound(Error, FileNotFoundError):
    status = STATUSES["not_found"]


class ContextFull(Error):
    status = STATUSES["context_full"]


class Busy(Error):
    status = STATUSES["busy"]


class Cancelled(Error):
    status = STATUSES["cancelled"]


class BufferTooSmall(Error):
    status = STATUSES["buffer_too_small"]


class InvalidHandle(Error, ValueError):
    status = STATUSES["invalid_handle"]


class AbiMismatch(Error):
    status = STATUSES["abi_mismatch"]


class DeviceUnavailable(Error):
    status = STATUSES["device_unavailable"]


class Internal(Error):
    status = STATUSES["internal"]


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


_PARAMETERS = {kind: _fitting(kind) for kind in (ctypes.c_int8, ctypes.c_uint8, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64,
                                                 ctypes.c_uint64, ctypes.c_size_t)}

# Functions whose status is their answer, or that signal handlers call.
_NOT_RAISED = ("last_status", "error_status", "cancel_trigger", "cancel_reset")


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
        for name, parameters, result, doc in FUNCTIONS:
            try:
                function = library["NVFP4_" + name]
            except AttributeError:
                raise _refusal(f"{path} has no NVFP4_{name}, though it says that it is libNVFP4 {library.NVFP4_version().decode()}; "
                               f"nvfp4 {VERSION} needs a whole libNVFP4 {VERSION} or later", path) from None
            function.argtypes = [_PARAMETERS.get(kind, kind) for kind in parameters]
            function.restype = ctypes.c_int32 if result is Status else result
            function.__doc__ = doc
            if result is Status and name not in _NOT_RAISED:
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


def with_article(name: str) -> str:
    """The name of a class after "a" or "an"."""
    return f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def handle(value: Any, kind: str, option: str) -> Any:
    """The handle of an object that is given as an option."""
    if getattr(value, "_kind", None) != kind:
        raise TypeError(f"{option}= takes {with_article(kind.capitalize())}, not {value!r}"
                        + ("; nvfp4.Grammar.json_schema(model, schema) makes one" if kind == "grammar" and isinstance(value, dict) else ""))
    if not value._as_parameter_:  # Which would be no object at all to the library.
        raise InvalidHandle(f"the {kind.capitalize()} was closed; pass one that is open")
    return value._as_parameter_


def told(values: Mapping[str, Any]) -> Dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in values.items() if value is not None}


# Options that are several fields, the first of which says which structs have them.
_COMPOSED = {"device": ("device_type", "device_index"), "stop": ("stop_tokens", "stop_strings"), "logit_bias": ("logit_bias_tokens", "logit_biases")}
_TEXTS = ("backend", "system", "variables", "tools", "config", "separator", "teacher", "chat_template")
_PROMPTS = ("prompt", "prompt_name")
_OBJECTS = ("adapter", "draft_model", "grammar", "pool")
_POINTERS = (*_TEXTS, *_PROMPTS, *_OBJECTS, "bad_words", "dry_sequence_breakers", "files", "logits_processor")


def _option_names(kinds: Mapping[str, Any]) -> List[str]:
    """The names of options of a struct with these fields."""
    composed = [name for name, fields in _COMPOSED.items() if fields[0] in kinds]
    hidden = {"struct_size", "reserved", "reserved2"}.union(*(_COMPOSED[name] for name in composed))
    pointers = [name for name, kind in kinds.items() if kind is ctypes.c_void_p]
    # Lengths and counts belong to pointers.
    for name in kinds:
        array = re.fullmatch("(.+)_(length|count)", name)
        if array and any(pointer.startswith(array[1]) for pointer in pointers):
            hidden.add(name)
    single = [name for name, kind in kinds.items() if (kind is not ctypes.c_void_p or name in _POINTERS) and name not in hidden]
    return single + composed


def options(struct: Type[_Struct], values: Mapping[str, Any]) -> _Struct:
    """
    A struct of options with its defaults, but for `values`: choices by name, flags as booleans, text as it is, a device as
    device=, what ends a text as stop=, which holds tokens and strings, biases as a dictionary, and bad words as sequences of tokens; bytes
    are strings in UTF-8. None leaves an option as it is.
    """
    out = struct()
    name = "_".join(re.findall("[A-Z][a-z]+", struct.__name__)).lower()
    getattr(lib, name + "_init")(ctypes.byref(out), ctypes.sizeof(out))
    kinds: Dict[str, Any] = {name: kind for name, kind, *_ in struct._fields_}
    names, choices = _option_names(kinds), CHOSEN.get(struct.__name__, {})
    for field in values:
        if field not in names:
            raise TypeError(f"{field!r} is none of the options: {', '.join(names)}")
    out.kept = []  # What the pointers in it point to.

    def point(field: str, count: str, array: ctypes.Array[Any]) -> None:
        out.kept.append(array)
        setattr(out, field, ctypes.addressof(array))
        setattr(out, count, len(array))

    def point_strings(one: str, strings: List[bytes]) -> None:
        point(one + "s", one + "_count", (ctypes.c_char_p * len(strings))(*strings))
        point(one + "_lengths", one + "_count", (ctypes.c_size_t * len(strings))(*map(len, strings)))

    for field, value in told(values).items():
        if field == "device":
            out.device_type, out.device_index = device(value)
        elif field == "stop":
            value = [value] if isinstance(value, (int, str, bytes, bytearray)) else list(value)
            strings = [text_in(stop)[0] for stop in value if isinstance(stop, (str, bytes, bytearray))]
            tokens = [stop for stop in value if not isinstance(stop, (str, bytes, bytearray))]
            point("stop_tokens", "stop_token_count", numbers(ctypes.c_int32, tokens))
            point_strings("stop_string", strings)
        elif field == "dry_sequence_breakers":
            value = [value] if isinstance(value, (str, bytes, bytearray)) else list(value)
            point_strings("dry_sequence_breaker", [text_in(breaker)[0] for breaker in value])
        elif field == "files":
            for name, array in zip(("files", "file_lengths"), paths_in(value)):
                point(name, "file_count", array)
        elif field in _TEXTS:
            if value:
                data, length = path_in(value) if field == "teacher" else text_in(value)
                point(field, field + "_length", (ctypes.c_char * length).from_buffer_copy(data))
        elif field in _PROMPTS:  # An empty prompt is one.
            data, length = text_in(value)
            point(field, field + "_length", (ctypes.c_char * length).from_buffer_copy(data))
        elif field in _OBJECTS:
            out.kept.append(value)
            setattr(out, field, handle(value, field.rpartition("_")[2], field))
        elif field == "logit_bias":
            biases = dict(value)
            point("logit_bias_tokens", "logit_bias_count", numbers(ctypes.c_int32, list(biases)))
            point("logit_biases", "logit_bias_count", (ctypes.c_float * len(biases))(*biases.values()))
        elif field == "bad_words":
            words = [numbers(ctypes.c_int32, list(word)) for word in value]
            out.kept.append(words)
            point(field, "bad_word_count", (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words)))
            point("bad_word_lengths", "bad_word_count", (ctypes.c_size_t * len(words))(*map(len, words)))
        elif field == "logits_processor":
            out.processor = Processor(value)
            out.kept.append(out.processor)
            out.logits_processor = ctypes.cast(out.processor.function, ctypes.c_void_p)
        elif field in choices:
            setattr(out, field, choice(choices[field], value))
        else:
            try:
                setattr(out, field, value if isinstance(value, float) else _fitting(kinds[field]).from_param(value))
            except (TypeError, OverflowError) as error:
                raise type(error)(f"{field} is {value!r}: {error}") from None
    return out


def pairs(tokens: int, values: int, count: int) -> List[Tuple[int, float]]:
    """Tokens with their numbers, of two arrays at these addresses."""
    return list(zip((ctypes.c_int32 * count).from_address(tokens), (ctypes.c_float * count).from_address(values)))


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


# Objects that the library holds, each with a function to call once it has given the object up, by the number that it has for `user`.
_held: Dict[int, Tuple[Any, Callable[[], object]]] = {}
_numbers = itertools.count(1)


def hold(value: Any, given_up: Callable[[], object] = lambda: None) -> int:
    """Keeps `value` until the library calls `release` with the number that this returns."""
    number = next(_numbers)
    _held[number] = (value, given_up)
    return number


def held(number: int) -> Any:
    return _held[number][0]


@LogRelease  # type: ignore[untyped-decorator]  # LogRelease, PoolRelease and FileRelease are one type.
def release(number: int) -> None:
    _held.pop(number)[1]()


@contextlib.contextmanager
def holding(value: Any) -> Generator[int, None, None]:
    """A number for `value`, which is kept unless the call that hands it to the library raises."""
    number = hold(value)
    try:
        yield number
    except BaseException:
        del _held[number]
        raise


class Processor:
    """A host's function as a processor of logits. What it raises ends the generation; `raise_again` is for after that."""

    def __init__(self, process: Callable[..., Any]) -> None:
        if not callable(process):
            raise TypeError(f"logits_processor= takes a function of logits, tokens and index, not {process!r}")
        self.process, self.raised = process, None  # type: Callable[..., Any], Optional[BaseException]
        self.function = LogitsProcessor(self._guarded)

    def _guarded(self, _user: Any, event: Any) -> int:
        try:
            return int(self._call(event.contents) is False)
        except BaseException as error:
            self.raised = error
            return 1

    def _call(self, event: Any) -> Any:
        logits, tokens = _View(ctypes.c_float, event.logits, event.logit_count), _View(ctypes.c_int32, event.tokens, event.token_count)
        try:
            goes_on = self.process(logits.memory, tokens.memory.toreadonly(), event.index)
        except BaseException as error:
            # Frames of the exception may hold the memory, which the library uses again.
            if logits.outlives() or tokens.outlives():
                traceback.clear_frames(error.__traceback__)
            raise
        if logits.outlives() or tokens.outlives():
            raise RuntimeError("a logits processor has kept a view of its logits or tokens, which are gone when it returns; keep a copy, "
                               "such as logits.tolist() or numpy.array(logits)")
        return goes_on

    def raise_again(self) -> None:
        raised, self.raised = self.raised, None
        if raised is not None:
            raise raised


class _View:
    """Numbers of the library as a memoryview, for a while."""

    def __init__(self, kind: Any, address: Optional[int], count: int) -> None:
        array = (kind * count).from_address(address) if count else (kind * 0)()
        self.memory, self._array = memoryview(array).cast("B").cast("f" if kind is ctypes.c_float else "i"), weakref.ref(array)

    def outlives(self) -> bool:
        """Ends the view, and says whether another one of the same numbers is left."""
        with contextlib.suppress(BufferError):
            self.memory.release()
        return self._array() is not None


@contextlib.contextmanager
def processed(*options: ctypes.Structure) -> Generator[None, None, None]:
    """For a call with options of a generation: what their processors raised leaves it."""
    try:
        yield
    finally:
        for one in options:
            processor = getattr(one, "processor", None)
            if processor is not None:
                processor.raise_again()


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
        out.cancel = handle(cancel, "cancel", "cancel")
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
        raise TypeError(f"{with_article(type(self).__name__)} cannot be {how}: it is a handle of this process; {instead}")


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
