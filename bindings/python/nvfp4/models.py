"""Models, their tokenizers, and sessions: sequences of tokens and conversations, with the text as it comes."""

import array
import atexit
import ctypes
import json
import threading
import typing
import weakref

from . import native
from .native import Cancelled, Handle, InvalidArgument, chosen, choice, lib


class Generation(typing.NamedTuple):
    """What a generation came to. `finish` is stop, stop_string, length, context or cancelled."""

    text: str
    finish: str
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float


def _quantization(quantize):
    """None, True for the defaults, or a dictionary of quantize()'s options, as the library takes it."""
    return quantize and ctypes.byref(native.options(native.QuantizeOptions, {} if quantize is True else quantize)) or None


def _tokens(ids):
    """Token ids as C takes them."""
    ids = array.array("i", ids)
    return (ctypes.c_int32 * len(ids)).from_buffer(ids)


def _loading(progress, call):
    """
    `call(callback)`, in another thread: an interrupt comes to this one, which waits, and not into a callback, where it would
    be lost. `progress` is called there.
    """
    outcome, stopped = {}, threading.Event()

    def run():
        try:
            with native.callback(native.ProgressCallback, goes_on) as callback:
                outcome["result"] = call(callback)
        except BaseException as error:
            outcome["error"] = error

    def goes_on(done, total):
        return not stopped.is_set() and (progress is None or progress(done, total))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        thread.join()
    except BaseException:
        stopped.set()
        thread.join()
        raise
    if "error" in outcome:
        raise outcome.pop("error")
    return outcome["result"]


class Tokenizer:
    """Text to token ids and back, as a model does it."""

    def __init__(self, model):
        """`model` is a Model, or a path from which all but the layers is loaded."""
        self._model = model if isinstance(model, Model) else Model(model, sampling_only=True)

    def encode(self, text, add_special=True):
        """`add_special` adds what the model wants around a text."""
        return native.items_out(ctypes.c_int32, lib.model_tokenize, self._model, *native.text_in(text), add_special)

    def decode(self, tokens, skip_special=True):
        tokens = _tokens(tokens)
        return native.text_out(lib.model_detokenize, self._model, tokens, len(tokens), skip_special)

    def render_chat(self, messages, add_generation_prompt=True):
        """A conversation, of dictionaries with role and content, spelled by the model's chat template."""
        texts = [native.text_in(message[key]) for message in messages for key in ("role", "content")]
        fields = [field for data, length in texts for field in (ctypes.cast(data, ctypes.c_void_p).value, length)]
        plain = (native.Message * len(messages))(*(tuple(fields[i:i + 4]) for i in range(0, len(fields), 4)))
        return native.text_out(lib.model_render_chat, self._model, plain, len(plain), add_generation_prompt)


class Model(Handle):
    """
    A model from a directory or file. Options: device (cpu, cuda, cuda:1, auto), threads, activations (exact, int8),
    sampling_only. `quantize` is True, or the options of quantize(), to make dense weights NVFP4; `progress` takes bytes done
    and in all, and cancels if it returns False.
    """

    _kind = "model"

    def __init__(self, path, quantize=None, progress=None, **options):
        how = native.options(native.LoadOptions, options)
        self._as_parameter_ = _loading(progress, lambda callback: native.value_out(
            ctypes.c_void_p, lib.model_load, *native.text_in(path), ctypes.byref(how), _quantization(quantize), callback, None))

    @property
    def info(self):
        """What was loaded, as a dictionary."""
        return json.loads(self._text("info"))

    @property
    def vocab_size(self):
        return self._value(ctypes.c_size_t, "vocab_size")

    @property
    def tokenizer(self):
        return Tokenizer(self)

    def session(self, **options):
        return Session(self, **options)

    def chat(self, system=None, **options):
        return ChatSession(self, system=system, **options)


def convert(source, destination, container="modelopt", quantize=None, progress=None):
    """Converts a model on disk to NVFP4 on disk. `container` is modelopt or dat; the rest is as for Model."""
    _loading(progress, lambda callback: lib.model_convert(
        *native.text_in(source), *native.text_in(destination), choice("container", container), _quantization(quantize), callback,
        None))


class Session(Handle):
    """
    A sequence of tokens that a model runs. One call at a time may use it; another one raises Busy. Its length, memory and
    messages can be asked for at any time: during a call they are as they were before it. Options: context (tokens to hold),
    kv_type (float16, float32), eviction (error, drop_oldest), keep, system.

    Options of a generation: temperature, top_k, top_p, min_p, repetition_penalty, seed, max_tokens, stop (tokens and
    strings), ignore_model_stops, replay.
    """

    _kind = "session"

    def __init__(self, model, **options):
        how = native.options(native.SessionOptions, options)
        self._as_parameter_ = native.value_out(ctypes.c_void_p, lib.session_create, model, ctypes.byref(how))

    @classmethod
    def restore(cls, model, path):
        """A session as it was when save() wrote it."""
        return cls._own(native.value_out(ctypes.c_void_p, lib.session_restore, model, *native.text_in(path)))

    def save(self, path):
        lib.session_save(self, *native.text_in(path))

    def fork(self):
        """A second session in the same state."""
        return self._own(self._value(ctypes.c_void_p, "fork"))

    def prefill(self, tokens, one_by_one=False):
        """Appends tokens and runs them, all at once or, to the same bits, one after the other."""
        tokens = _tokens(tokens)
        run = lib.session_prefill_token_by_token if one_by_one else lib.session_prefill
        run(self, tokens, len(tokens))

    def decode(self, token):
        """Appends a token and runs it."""
        lib.session_decode(self, token)

    def logits(self):
        """Those of the token to come, as an array of floats."""
        out = array.array("f", bytes(4 * self._count("logits")))
        lib.session_logits(self, out.buffer_info()[0], len(out), ctypes.byref(ctypes.c_size_t()))
        return out

    def _count(self, name):
        return native.value_out(ctypes.c_size_t, getattr(lib, "session_" + name), self, None, 0)

    def sample(self, **options):
        """The token to come, which is not appended."""
        how = native.options(native.GenerateOptions, options)
        return native.value_out(ctypes.c_int32, lib.session_sample, self, ctypes.byref(how))

    def generate(self, on_text=None, **options):
        """
        Generates from where the session stands, and returns a Generation. `on_text` is called with pieces of text as they
        come; if it returns False or raises, that ends the generation.
        """
        return Stream(self, lib.session_generate, (), options, on_text)._run()

    def stream(self, **options):
        """The same as an iterator of pieces of text."""
        return Stream(self, lib.session_generate, (), options)

    def cancel(self):
        """Ends the call that uses the session, from any thread."""
        lib.session_cancel(self)

    def truncate(self, length):
        """Forgets the tokens from `length` on."""
        lib.session_truncate(self, length)

    def reset(self):
        """Forgets all tokens and the conversation."""
        lib.session_reset(self)

    def __len__(self):
        return self._value(ctypes.c_size_t, "length")

    def __bool__(self):
        return True

    @property
    def tokens(self):
        return self._items(ctypes.c_int32, "tokens")

    @property
    def context(self):
        """Tokens that it can hold."""
        return self._value(ctypes.c_size_t, "context")

    @property
    def nbytes(self):
        """Bytes of the cached keys and values."""
        return self._value(ctypes.c_uint64, "memory")


class ChatSession(Session):
    """A conversation with a model."""

    def ask(self, text, **options):
        """Says something to the model: an iterator of the pieces of its answer. Options are those of a generation."""
        return Stream(self, lib.session_chat, native.text_in(text), options)

    def say(self, text, on_text=None, **options):
        """The same, as the whole answer: a Generation. `on_text` is as for generate()."""
        return Stream(self, lib.session_chat, native.text_in(text), options, on_text)._run()

    @property
    def messages(self):
        """The conversation, as a list of dictionaries with role and content."""
        return json.loads(self._text("messages"))


def step(sessions, tokens):
    """Appends tokens[i] to sessions[i] and runs all of them in one pass over the weights."""
    if len(sessions) != len(tokens):
        raise InvalidArgument(f"{len(tokens)} tokens for {len(sessions)} sessions")
    handles = (ctypes.c_void_p * len(sessions))(*(session._as_parameter_ for session in sessions))
    lib.session_step(handles, _tokens(tokens), len(handles))


class _Relay:
    """
    Hands pieces from the thread that generates to the one that wants them. The first waits while the second has a piece, so
    what is generated is what was asked for, and not a token more.
    """

    ASKED, GIVEN, TAKEN, DONE = range(4)

    def __init__(self, wanted):
        self.changed = threading.Condition()
        self.phase, self.piece = self.ASKED, None
        self.wanted, self.stopped = wanted, False
        self.result = self.error = None

    def run(self, session, call, prompt, options):
        """In the thread that generates."""
        try:
            self.result = self.generate(session, call, prompt, native.options(native.GenerateOptions, options))
        except BaseException as error:
            self.error = error.with_traceback(None)
        with self.changed:
            session.close()
            self.phase = self.DONE
            self.changed.notify_all()

    def generate(self, session, call, prompt, options):
        result = native.GenerationResult(struct_size=ctypes.sizeof(native.GenerationResult))
        with native.callback(native.TokenCallback, self.give) as callback:
            call(session, *prompt, ctypes.byref(options), callback, None, ctypes.byref(result))
        numbers = {name: getattr(result, name) for name in Generation._fields[2:]}
        return Generation(session._text("text"), chosen("finish", result.finish), **numbers)

    def give(self, _token, text, length):
        with self.changed:
            if length and self.wanted and not self.stopped:
                self.phase, self.piece = self.GIVEN, ctypes.string_at(text, length).decode()
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.phase == self.ASKED)
            return not self.stopped

    def take(self):
        """The next piece, or None after the last."""
        with self.changed:
            self.go_on()
            self.changed.wait_for(lambda: self.phase != self.ASKED)
            if self.phase == self.DONE:
                return None
            self.phase = self.TAKEN
            return self.piece

    def go_on(self, phases=(TAKEN,)):
        if self.phase in phases:
            self.phase = self.ASKED
            self.changed.notify_all()

    def stop(self, session):
        with self.changed:
            self.stopped = True
            if self.phase == self.ASKED:
                session.cancel()
            self.go_on((self.GIVEN, self.TAKEN))


class Stream:
    """
    The pieces of a generation as they come: an iterator of text. It has the session until it ends, is stopped, or is dropped,
    as at the end of a loop that was left: the session then has the tokens of the pieces that were taken.
    """

    def __init__(self, session, call, prompt, options, on_text=True):
        self._session = session._second()
        self._on_text, self._relay = on_text, _Relay(on_text is not None)
        # Not this thread: an interrupt would be lost in a callback, but not while this one waits for a piece.
        self._thread = threading.Thread(target=self._relay.run, args=(self._session, call, prompt, options), daemon=True)
        self._thread.start()
        _running.add(self)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            piece = self._relay.take()
        except BaseException:
            self.stop()
            raise
        if piece is not None:
            return piece
        self._thread.join()
        if self._relay.error is not None and not (self._relay.stopped and isinstance(self._relay.error, Cancelled)):
            raise self._relay.error
        raise StopIteration

    def stop(self):
        """Ends the generation, from any thread. There are no further pieces."""
        self._relay.stop(self._session)
        if self._thread is not threading.current_thread():  # Where the collector of garbage may have found this.
            self._thread.join()

    def __del__(self):
        if hasattr(self, "_thread"):
            self.stop()

    @property
    def result(self):
        """The Generation, of which the remaining pieces are waited for. None if it was stopped before its first token."""
        for _ in self:
            pass
        return self._relay.result

    def _run(self):
        try:
            for piece in self:
                if self._on_text(piece) is False:
                    break
        finally:
            self.stop()
        return self.result


_running = weakref.WeakSet()


@atexit.register
def _stop_all():
    """A thread that is in the library must not be there when the interpreter ends."""
    for stream in list(_running):
        stream.stop()
