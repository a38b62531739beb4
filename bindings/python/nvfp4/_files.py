"""Files of a model that Python gives for Model.from_files(): bytes in memory, file objects, and functions that read."""

from __future__ import annotations

import ctypes
import threading
from typing import Any, Callable, List, Mapping, Optional

from . import native
from .tensors import _Buffer, _get_buffer, _release_buffer  # type: ignore[attr-defined]

_CONTIGUOUS = 0  # PyBUF_SIMPLE


class _File:
    """A file by its name and content, until release()."""

    def __init__(self, name: str, content: Any) -> None:
        self.name, self.lock, self.loading = name.encode(), threading.Lock(), True
        self.buffer: Optional[Any] = None
        self.address: Optional[int] = None
        self.read: Optional[Callable[[int, int], Any]] = None
        self.raised: Optional[BaseException] = None
        if hasattr(content, "read"):
            self.size, self.read, self.content = content.seek(0, 2), self._of_object, content
        elif isinstance(content, tuple):
            self.size, self.content = content
            self.read = self._of_function
        else:
            self.buffer = _Buffer()
            _get_buffer(content, ctypes.byref(self.buffer), _CONTIGUOUS)
            self.size, self.address = self.buffer.bytes, self.buffer.data

    def release(self) -> None:
        if self.buffer is not None:
            _release_buffer(ctypes.byref(self.buffer))
            self.buffer = None

    def _of_object(self, offset: int, size: int) -> bytes:
        with self.lock:
            self.content.seek(offset)
            parts = []
            while size > 0:
                part = self.content.read(size)
                if not part:  # At the end, or nothing there yet: fewer bytes are an error of the library's.
                    break
                parts.append(part)
                size -= len(part)
        return b"".join(parts)

    def _of_function(self, offset: int, size: int) -> Any:
        return self.content(offset, size)

    def copy(self, offset: int, out: int, size: int, read: Callable[[int, int], Any]) -> int:
        """Reads to memory at `out`; the number of bytes, or -1 after an exception."""
        try:
            part = memoryview(read(offset, size)).cast("B")
            if len(part) > size:
                raise ValueError(f"{self.name.decode()}: {len(part)} bytes were read at {offset}, where {size} were asked for")
            ctypes.memmove(out, bytes(part), len(part))
            return len(part)
        except BaseException as error:
            # Later its frames would hold the session that reads, and with it this file.
            if self.loading:
                self.raised = self.raised or error
            return -1


@native.FileRead  # type: ignore[untyped-decorator]
def _read(user: int, offset: int, out: int, size: int) -> int:
    file: _File = native.held(user)
    return file.copy(offset, out, size, file.read) if file.read else -1


class GivenFiles:
    """Files by their names, as the library takes them, once."""

    def __init__(self, contents: Mapping[str, Any]) -> None:
        self._files: List[_File] = []
        try:
            for name, content in dict(contents).items():
                self._files.append(_File(name, content))
        except BaseException:
            for file in self._files:
                file.release()
            raise

    def load(self, call: Callable[..., Any]) -> Any:
        """`call(files, count, size)`, by which the library takes the files. An exception of one that was read leaves it."""
        array = (native.ModelFile * len(self._files))()
        for place, file in zip(array, self._files):
            place.name, place.name_length = ctypes.cast(ctypes.c_char_p(file.name), ctypes.c_void_p), len(file.name)
            place.size, place.user = file.size, native.hold(file, file.release)
            place.release = ctypes.cast(native.release, ctypes.c_void_p)
            if file.read is not None:
                place.read = ctypes.cast(_read, ctypes.c_void_p)
            else:
                place.data = file.address
        try:
            return call(array, len(array), ctypes.sizeof(native.ModelFile))
        except native.InputOutput:
            for file in self._files:
                if file.raised is not None:
                    raise file.raised
            raise
        finally:
            for file in self._files:
                file.loading, file.raised = False, None
