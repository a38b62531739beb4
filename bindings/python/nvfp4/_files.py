"""Files of a model that Python gives for Model.from_files(): bytes in memory, file objects, and functions that read."""

import ctypes
import itertools
import threading

from . import native
from .tensors import _Buffer, _get_buffer, _release_buffer

_CONTIGUOUS = 0  # PyBUF_SIMPLE
_words = itertools.count(1)
_used = {}  # The files that the library uses, each by its word.


class _File:
    """A file by its name and content, until release()."""

    def __init__(self, name, content):
        self.name, self.buffer, self.read, self.raised = name.encode(), None, None, None
        self.address, self.lock, self.loading = None, threading.Lock(), True
        if hasattr(content, "read"):
            self.size, self.read, self.content = content.seek(0, 2), self._of_object, content
        elif isinstance(content, tuple):
            self.size, self.content = content
            self.read = self._of_function
        else:
            self.buffer = _Buffer()
            _get_buffer(content, ctypes.byref(self.buffer), _CONTIGUOUS)
            self.size, self.address = self.buffer.bytes, self.buffer.data

    def release(self):
        if self.buffer is not None:
            _release_buffer(ctypes.byref(self.buffer))
            self.buffer = None

    def _of_object(self, offset, size):
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

    def _of_function(self, offset, size):
        return self.content(offset, size)

    def copy(self, offset, out, size):
        """Reads to memory at `out`; the number of bytes, or -1 after an exception."""
        try:
            part = memoryview(self.read(offset, size)).cast("B")
            if len(part) > size:
                raise ValueError(f"{self.name.decode()}: {len(part)} bytes were read at {offset}, where {size} were asked for")
            ctypes.memmove(out, bytes(part), len(part))
            return len(part)
        except BaseException as error:
            # Later its frames would hold the session that reads, and with it this file.
            if self.loading:
                self.raised = self.raised or error
            return -1


@native.FileRead
def _read(word, offset, out, size):
    return _used[word].copy(offset, out, size)


@native.FileRelease
def _release(word):
    _used.pop(word).release()


class GivenFiles:
    """Files by their names, as the library takes them, once."""

    def __init__(self, contents):
        self._files = []
        try:
            for name, content in dict(contents).items():
                self._files.append(_File(name, content))
        except BaseException:
            for file in self._files:
                file.release()
            raise

    def load(self, call):
        """`call(files, count, size)`, by which the library takes the files. An exception of one that was read leaves it."""
        array = (native.ModelFile * len(self._files))()
        for place, file in zip(array, self._files):
            word = next(_words)
            _used[word] = file
            place.name, place.name_length = ctypes.cast(file.name, ctypes.c_void_p), len(file.name)
            place.size, place.user, place.release = file.size, word, ctypes.cast(_release, ctypes.c_void_p)
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
