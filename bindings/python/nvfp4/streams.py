"""Generations: what they give, as whole results and as streams of pieces, which a loop or an event loop takes."""

import asyncio
import atexit
import collections
import contextlib
import ctypes
import json
import threading
import time
import typing
import weakref

from . import native
from .native import Handle, Single, chosen, lib


class ToolCall(typing.NamedTuple):
    """A tool call of the model. Its result is passed as a message of the role tool, whose tool_call_id is `id`."""

    id: str
    name: str
    arguments: dict

    @classmethod
    def from_json(cls, text):
        """The call in a piece of the part tool_call."""
        return cls._of(json.loads(text))

    @classmethod
    def _of(cls, call):
        return cls(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))


class Generation(typing.NamedTuple):
    """
    The result of a generation. `finish` is stop, stop_string, length, context, cancelled or deadline; `seed` repeats its draws. In a chat,
    `text` is the answer alone, `reasoning` the reasoning before it, and `tool_calls` a list of ToolCall. `evicted_tokens` were dropped because
    the context was full.

    Times count from the call, or from the submission of a stream to its queue: `queue_seconds` until the first pass over the weights,
    `prefill_seconds` from there to the first token, `first_token_seconds` both together. `longest_gap_seconds` is the longest time between
    two tokens. `cached_tokens` of the prompt did not run, because their keys and values were held already. Of `drafted_tokens`, which a
    drafter, a lookup or a draft model proposed, `accepted_tokens` were the model's own choice. `preemptions` is how often the generation gave
    its memory up to others.
    """

    text: str
    finish: str
    reasoning: str
    tool_calls: list
    prompt_tokens: int
    generated_tokens: int
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    seed: int
    evicted_tokens: int
    queue_seconds: float
    longest_gap_seconds: float
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int


class Score(typing.NamedTuple):
    """
    A continuation, as a model predicts it: the log-probability of each of its tokens, NaN for one that no other stands before, and whether
    it is the argmax.
    """

    log_probabilities: list
    is_argmax: list

    @property
    def total(self):
        """The log-probability of the whole."""
        return sum(self.log_probabilities)

    @property
    def is_greedy(self):
        """Whether a greedy generation would give it."""
        return all(self.is_argmax)


def _generation(session, result):
    """The Generation that a session's last call has left, by its numbers."""
    calls = json.loads(session._text("tool_calls")) if result.tool_calls else []
    numbers = {name: getattr(result, name) for name in Generation._fields[4:]}
    return Generation(session._text("text"), chosen("finish", result.finish), session._text("reasoning"),
                      [ToolCall._of(call) for call in calls], **numbers)


class Piece(str):
    """
    A piece of text. `part` is content, reasoning, or tool_call: the JSON of a whole call, which ToolCall.from_json() reads. `token`
    is the one that completed it, or None for text that was held back; `log_probability` is None unless that was asked for, and
    `top_log_probabilities` a list of pairs of a token and its log-probability, the most probable first. Where either was asked for, pieces
    come for tokens that complete no text too.
    """

    token = log_probability = None
    top_log_probabilities = ()
    part = "content"


def _piece(event, parts, every):
    """The Piece of an event; None for one of another part than the content, unless all `parts` are wanted, and without text, unless `every`."""
    part = chosen("part", event.part)
    if not (event.text_length or every) or not (parts or part == "content"):
        return None
    piece = Piece(ctypes.string_at(event.text, event.text_length).decode())
    piece.part = part
    piece.token = None if event.token < 0 else event.token
    piece.log_probability = event.log_probability if every and event.token >= 0 else None
    if event.top_count and event.token >= 0:
        piece.top_log_probabilities = native.pairs(event.top_tokens, event.top_log_probabilities, event.top_count)
    return piece


class _Work(typing.NamedTuple):
    """What a generation does: `call` with `prompt` on `session`, a reference of its own. Pieces of all `parts` are wanted, or the content."""

    session: Handle
    call: str
    prompt: tuple
    options: dict
    cancel: object
    progress: object
    parts: bool


class _Relay:
    """
    Hands pieces from the thread that generates to the one that wants them. The first waits while the second has a piece, so
    what is generated is what was asked for, and not a token more.
    """

    NEW, ASKED, GIVEN, TAKEN, DONE = range(5)

    def __init__(self, work, wanted):
        self.changed = threading.Condition()
        self.phase, self.piece = self.NEW, None
        self.runs_in = None  # The thread that generates, while it does.
        self.work, self.wanted, self.stopped, self.all = work, wanted, False, False
        self.flag = ctypes.c_int32()  # Ends the call, also one that has yet to begin.
        self.result = self.error = None

    def run(self):
        """Runs in the thread that generates."""
        with self.changed:
            if self.stopped:
                return  # The caller was interrupted as it started this thread.
            self.runs_in = threading.get_ident()
        try:
            options = native.options(native.GenerateOptions, self.work.options)
            with native.call_options(self.work.cancel, self.flag, self.work.progress) as watched:
                options.call = watched
                self.result = self.generate(options)
        except BaseException as error:
            self.error = error.with_traceback(None)
        with self.changed:
            self.work.session.close()
            self.phase, self.runs_in = self.DONE, None
            self.changed.notify_all()

    def generate(self, options):
        session, result = self.work.session, native.GenerationResult(struct_size=ctypes.sizeof(native.GenerationResult))
        self.all = bool(options.log_probabilities or options.top_log_probabilities)
        # Without a callback, threads that generate do not wait for each other in the interpreter; stop() then ends the call by its flag.
        told = native.callback(native.TokenCallback, self.give) if self.wanted else contextlib.nullcontext()
        with native.processed(options), told as callback:
            getattr(lib, f"session_{self.work.call}")(session, *self.work.prompt, ctypes.byref(options), callback, None, ctypes.byref(result))
        return _generation(session, result)

    def give(self, event):
        event = event.contents
        with self.changed:
            piece = _piece(event, self.work.parts, self.all) if self.wanted and not self.stopped else None
            if piece is not None:
                self.phase, self.piece = self.GIVEN, piece
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.phase == self.ASKED)
            return not self.stopped

    def take(self):
        """The next piece, or None after the last. The first call starts the thread."""
        with self.changed:
            if self.phase == self.NEW:
                self.phase = self.ASKED
                # Not this thread: an interrupt would be lost in a callback, but not while this one waits for a piece.
                threading.Thread(target=self.run, daemon=True).start()
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

    def stop(self):
        with self.changed:
            self.stopped = True
            if self.runs_in is None:
                self.phase = self.DONE
                self.work.session.close()
            self.flag.value = 1
            self.go_on((self.GIVEN, self.TAKEN))

    def join(self):
        with self.changed:
            # The garbage collector may have run in that thread.
            self.changed.wait_for(lambda: self.runs_in in (None, threading.get_ident()))


class _Arrivals:
    """What has come of a generation that runs for an event loop."""

    _processed = set()  # Those whose generation may call a processor of logits.

    def __init__(self, queue, work, every, processor):
        self.queue, self.session, self.parts, self.every, self.processor = queue, work.session, work.parts, every, processor
        self.pieces, self.waiters = collections.deque(), []
        self.generation, self.ended = 0, False
        self.result = self.error = None

    def take(self, event):
        is_end, raised = event.kind == native.CHOICES["event"]["end"], None
        if is_end and self.processor is not None:
            self._processed.discard(self)
            raised = self.processor.raised
        if not is_end:
            piece = _piece(event, self.parts, self.every)
            if piece is not None:
                self.pieces.append(piece)
        elif raised is not None:
            self.end(raised)
        elif event.status:
            self.end(native.ERRORS.get(event.status, native.Error)(ctypes.string_at(event.text, event.text_length).decode()))
        else:
            try:
                result = native.GenerationResult(struct_size=ctypes.sizeof(native.GenerationResult))
                lib.session_result(self.session, ctypes.byref(result))
                self.result = _generation(self.session, result)
                self.end()
            except native.Error as error:  # The session was used or closed meanwhile.
                self.end(error)
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def end(self, error=None):
        self.ended, self.error = True, error
        self.session.close()

    async def next(self):
        """The next piece, or None after the last."""
        while not self.pieces and not self.ended:
            await self.change()
        if self.pieces:
            return self.pieces.popleft()
        if self.error is not None:
            raise self.error
        return None

    async def end_of_it(self):
        while not self.ended:
            if self.queue.is_of(asyncio.get_running_loop()):
                await self.change()
            else:  # Its own loop may be closed, and then nothing takes its events.
                self.queue.take_for_closed_loop()
                await asyncio.sleep(0.001)

    async def change(self):
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter

    def cancel(self):
        if not self.ended:
            self.queue.cancel(self.generation)


class _LoopQueue(Handle):
    """The generations of one model that run for one event loop, which watches the descriptor of their queue while there are any."""

    _kind = "queue"
    _known = weakref.WeakValueDictionary()  # By the loop's id and the model's handle.

    def __init__(self, loop, model):
        self._loop, self._running = weakref.ref(loop), {}
        self._events = (native.QueueEvent * 256)()
        self._as_parameter_ = native.value_out(ctypes.c_void_p, lib.queue_create, model, None)
        self._fd = self._value(ctypes.c_int32, "fd")

    @classmethod
    def of(cls, loop, model):
        key = id(loop), model._as_parameter_
        found = cls._known.get(key)
        if found is None or not (found._running and found.is_of(loop)):
            found = cls._known[key] = cls(loop, model)
        return found

    def submit(self, work, submit):
        """Submits work, and returns its _Arrivals."""
        how, when = native.options(native.GenerateOptions, work.options), native.options(native.SubmitOptions, submit)
        out = _Arrivals(self, work, bool(how.log_probabilities or how.top_log_probabilities), getattr(how, "processor", None))
        tokens = () if work.prompt else (None, 0)
        if not self._running:
            self._loop().add_reader(self._fd, self._take)
        try:
            with native.call_options(work.cancel) as how.call:
                out.generation = native.value_out(ctypes.c_uint64, getattr(lib, f"queue_{work.call}"), self, work.session, *tokens,
                                                  *work.prompt, ctypes.byref(how), ctypes.byref(when))
            self._running[out.generation] = out
            if out.processor is not None:
                _Arrivals._processed.add(out)
        finally:
            if not self._running:
                self._loop().remove_reader(self._fd)
        return out

    def is_of(self, loop):
        return self._loop() is loop

    def take_for_closed_loop(self):
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._take()

    def _take(self):
        count = ctypes.c_size_t()
        lib.queue_wait(self, self._events, ctypes.sizeof(native.QueueEvent), len(self._events), 0, ctypes.byref(count))
        for event in self._events[:count.value]:
            arrivals = self._running[event.generation]
            arrivals.take(event)
            if arrivals.ended:
                del self._running[event.generation]
        if not self._running:
            loop = self._loop()
            if loop is not None:
                loop.remove_reader(self._fd)
            self.close()

    def cancel(self, generation):
        if self._as_parameter_:
            lib.queue_cancel(self, generation)


class Stream(Single):
    """
    The pieces of a generation as they come: an iterator of text. It begins when the first piece is asked for, and has the
    session until it ends, is stopped, or is dropped, as at the end of a loop that was left: the session then has the tokens
    of the pieces that were taken.

    In a coroutine of asyncio `async for` takes the pieces, and `await` the whole Generation. Any number of such streams run without a
    thread of Python's, and do not wait for their readers. One that is left, or whose task is cancelled, ends with the tokens that it has;
    aclose() waits for that, and so does the next such stream of the session. Of those that wait to begin, a higher `priority` is
    first; after `deadline` seconds the generation ends, as deadline. There is no `progress`.
    """

    _copies = _pickles = "take its pieces here, and pass those on"

    def __init__(self, session, call, prompt, options, on_text=True):
        cancel, progress, parts = options.pop("cancel", None), options.pop("progress", None), options.pop("parts", False)
        self._submit = {name: options.pop(name) for name in ("priority", "deadline") if name in options}
        self._owner, self._arrivals, self._on_text = session, None, on_text
        work = _Work(session._second(), call, prompt, options, cancel, progress, parts)
        self._relay = _Relay(work, on_text is not None)
        _running.add(self)

    def __iter__(self):
        return self

    def __next__(self):
        if self._arrivals is not None or self._submit:
            raise TypeError("an event loop reads this stream, or is to by its priority or deadline; use async for, or await")
        try:
            piece = self._relay.take()
        except BaseException:
            self.stop()
            raise
        if piece is not None:
            return piece
        self._relay.join()
        if self._relay.error is not None:
            raise self._relay.error
        raise StopIteration

    def stop(self):
        """Ends the generation, from any thread, even while its prompt is run. There are no further pieces."""
        if self._arrivals is not None:
            self._arrivals.cancel()
            return
        self._relay.stop()
        self._relay.join()

    def __aiter__(self):
        return self

    async def __anext__(self):
        await self._submitted()
        try:
            piece = await self._arrivals.next()
        except BaseException:
            self._leave()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __await__(self):
        return self._whole().__await__()

    async def _whole(self):
        async for _ in self:
            pass
        return self._arrivals.result

    async def aclose(self):
        """Ends the generation, and waits until the session can be used."""
        self._leave()
        if self._arrivals is not None:
            await self._arrivals.end_of_it()

    async def _submitted(self):
        if self._arrivals is not None:
            return
        work, session = self._relay.work, self._owner
        if self._relay.phase != _Relay.NEW:
            raise TypeError("this stream is read without an event loop, or was stopped")
        if work.progress is not None:
            raise TypeError("a stream of an event loop takes no progress; its pieces say what has run")
        if session._left is not None:
            await session._left.end_of_it()
            session._left = None
        queue = _LoopQueue.of(asyncio.get_running_loop(), session._model)
        self._arrivals = queue.submit(work, self._submit)

    def _leave(self):
        """Ends a generation that runs for an event loop."""
        if self._arrivals is None:
            self.stop()
        elif not self._arrivals.ended:
            self._owner._left = self._arrivals
            self._arrivals.cancel()

    def __del__(self):
        if hasattr(self, "_relay"):
            self._leave()

    @property
    def result(self):
        """The Generation; waits for the remaining pieces. None if it was stopped before it began, and in an event loop until it has ended."""
        if self._arrivals is not None:
            return self._arrivals.result
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
    for arrivals in list(_Arrivals._processed):
        with contextlib.suppress(native.Error):  # Such as that of the child of a fork, which has no such generation.
            arrivals.cancel()
            while arrivals in _Arrivals._processed:
                arrivals.queue._take()
                time.sleep(0.001)
