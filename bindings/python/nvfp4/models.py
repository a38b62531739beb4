"""Models, their tokenizers, and sessions: sequences of tokens and conversations."""

import array
import ctypes
import itertools
import json
import threading
import typing

from . import native
from ._files import GivenFiles
from .native import Handle, InvalidArgument, Single, chosen, lib
from .streams import Score, Stream
from .tensors import Tensor


# Options of a chat's turn. All others are those of a generation or of a session.
_CHAT_OPTIONS = ("think", "variables", "tools", "reasoning_budget", "keep_reasoning", "chat_template")


def _take_chat_options(options):
    """Takes those of a chat's turn out of a dictionary of options."""
    return {name: options.pop(name) for name in _CHAT_OPTIONS if name in options}


def _only_chat_options(options):
    """The same dictionary, which may hold no others."""
    for name in options:
        if name not in _CHAT_OPTIONS:
            raise TypeError(f"{name!r} is none of the options: {', '.join(_CHAT_OPTIONS)}")
    return options


def _chat_options(values):
    """The options of a chat's turn as a C struct."""
    variables = dict(values.get("variables") or {})
    if values.get("think") is not None:
        variables["enable_thinking"] = bool(values["think"])
    budget = values.get("reasoning_budget")
    return native.options(native.ChatOptions, {
        "variables": json.dumps(variables) if variables else "",
        "tools": json.dumps(values["tools"]) if values.get("tools") else "", "chat_template": values.get("chat_template") or "",
        "reasoning_budget": -1 if budget is None else budget, "keep_reasoning": bool(values.get("keep_reasoning"))})


def _shortest(value):
    """The shortest number that is `value` as a C float: 0.6, and not 0.6000000238418579."""
    numbers = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next(number for number in numbers if ctypes.c_float(number).value == value)


def _quantization(quantize):
    """None, True for the defaults, or a dictionary of quantize()'s options, as the library takes it."""
    return quantize and ctypes.byref(native.options(native.QuantizeOptions, {} if quantize is True else quantize)) or None


def _tokens(ids):
    """Token ids as C takes them."""
    if isinstance(ids, (str, bytes, bytearray)):  # Which an array would take for the memory of its numbers.
        raise TypeError(f"tokens are a sequence of ids, not {type(ids).__name__}; tokenizer.encode() makes them of text")
    ids = array.array("i", ids)
    return (ctypes.c_int32 * len(ids)).from_buffer(ids)


class Cancel(Handle):
    """
    Ends the long calls that are given it as `cancel`, from any thread: those that run, and those that have yet to begin. A
    generation or chat turn then ends as cancelled with the tokens it has, if any, and anything else raises Cancelled.
    """

    _kind = "cancel"
    _copies = "pass the same Cancel to every call that it is to end"
    _pickles = "make a Cancel in each process, and tell it by a multiprocessing.Event when to trigger it"

    def __init__(self):
        self._as_parameter_ = native.value_out(ctypes.c_void_p, lib.cancel_create)

    def trigger(self):
        """Cancels the calls, now and later."""
        self._mark(lib.cancel_trigger)

    def reset(self):
        """Makes it not triggered again."""
        self._mark(lib.cancel_reset)

    def _mark(self, function):
        if function(self):
            raise native.InvalidHandle("the Cancel was closed; make another one")

    @property
    def triggered(self):
        return bool(self._value(ctypes.c_int32, "is_triggered"))


def _watched(call, cancel=None, progress=None):
    """
    `call(options)`, a long call that an interrupt of this thread ends. That comes while this thread waits for another one, which
    makes the call: in a callback it would be lost. `progress` is called there.
    """
    flag = ctypes.c_int32()

    def made():
        with native.call_options(cancel, flag, progress) as options:
            return call(options)

    if threading.current_thread() is not threading.main_thread():  # Interrupts do not come here.
        return made()
    outcome, gate, ended = {}, threading.Lock(), threading.Event()

    def run():
        with gate:
            if outcome.setdefault("begun", True) is False:
                return
        try:
            outcome["result"] = made()
        except BaseException as error:
            outcome["error"] = error
        finally:
            ended.set()

    try:
        threading.Thread(target=run).start()
        ended.wait()  # A join() that was interrupted may take a thread for one that has ended.
    except BaseException:
        flag.value = 1
        with gate:  # The interrupt may have come before the thread did.
            begun = outcome.setdefault("begun", False)
        if begun:
            ended.wait()
        raise
    if "error" in outcome:
        raise outcome.pop("error")
    return outcome["result"]


class SpecialToken(typing.NamedTuple):
    """A special token, or another one with a role: its id, its name, and the names of its roles, such as "ends_text"."""

    token: int
    name: str
    roles: typing.FrozenSet[str]


class Tokenizer(Single):
    """A model's tokenizer: text to token ids and back."""

    _copies = "use the same Tokenizer from any thread"
    _pickles = "make a tokenizer in each process, by Tokenizer(path)"

    def __init__(self, model):
        """`model` is a Model, or a path, from which everything but the layers is loaded."""
        self._model = model if isinstance(model, Model) else Model(model, device="cpu", sampling_only=True)

    def encode(self, text, add_special=True, special=True):
        """
        `add_special` adds the special tokens that the model expects around a text. Names of special tokens in the text become those
        tokens; with special=False, for text of users, they are text.
        """
        tokenize = lib.model_tokenize if special else lib.model_tokenize_plain
        return native.items_out(ctypes.c_int32, tokenize, self._model, *native.text_in(text), add_special)

    def decode(self, tokens, skip_special=True):
        """Ids that are in the model's vocabulary but not in its tokenizer give no text."""
        tokens = _tokens(tokens)
        return native.text_out(lib.model_detokenize, self._model, tokens, len(tokens), skip_special)

    def token_bytes(self, token):
        """
        The bytes that a token adds to a text, which may be a part of a character; the name of a special token. Those of all tokens of a
        text, joined, are that text, after a space if it is a sentencepiece tokenizer.
        """
        return bytes(native.items_out(ctypes.c_uint8, lambda *place: lib.model_token_bytes(self._model, token, *place, None)))

    def is_special(self, token):
        """Whether a token is special, so that its bytes are a name and no text."""
        out, length = ctypes.c_int32(), ctypes.c_size_t()
        lib.model_token_bytes(self._model, token, None, 0, ctypes.byref(length), ctypes.byref(out))
        return bool(out.value)

    @property
    def special_tokens(self):
        """The special tokens, and others with a role, in order of their ids."""
        size = ctypes.sizeof(native.SpecialToken)
        found = native.items_out(native.SpecialToken, lambda buffer, capacity, count: lib.model_special_tokens(
            self._model, buffer, size, capacity, count))
        names = native.CHOICES["token_role"].items()
        return [SpecialToken(one.token, ctypes.string_at(one.name, one.name_length).decode(errors="replace"),
                             frozenset(name for name, bit in names if one.roles & bit)) for one in found]

    def render_chat(self, messages, add_generation_prompt=True, **options):
        """
        A conversation, of messages as for ChatSession.complete(), rendered by the model's chat template. Options are a chat's. Names of
        special tokens within messages look like the template's own here: messages of strangers go to a chat, or to encode_chat().
        """
        how = _chat_options(_only_chat_options(options))
        return native.text_out(lib.model_render_messages, self._model, *native.text_in(json.dumps(messages)), ctypes.byref(how),
                               add_generation_prompt)

    def encode_chat(self, messages, add_generation_prompt=True, **options):
        """The tokens that a chat runs for such messages, in which names of special tokens are text."""
        how = _chat_options(_only_chat_options(options))
        return native.items_out(ctypes.c_int32, lib.model_tokenize_messages, self._model, *native.text_in(json.dumps(messages)),
                                ctypes.byref(how), add_generation_prompt)


class Pool(Handle):
    """
    Threads of the program that work for models on the CPU, with pool= of Model, in place of threads of the library; any number of models may
    share it. `submit` is a function that has another thread call what it is given, such as `concurrent.futures.ThreadPoolExecutor(3).submit`;
    if it raises, the threads that call the model do the work. At most `threads` work at a time for a call, the calling one included; 0 is as
    many as the library would use. A task gives up the interpreter's lock while it works.
    """

    _kind = "pool"
    _copies = "use the same Pool for any number of models"
    _pickles = "make a Pool in each process"

    def __init__(self, submit, threads=0):
        if not callable(submit):
            raise TypeError(f"a Pool takes a function that has a thread call what it is given, not {submit!r}")

        def schedule(_user, run, task):
            try:
                submit(native.PoolTask(run), task)
            except BaseException:
                return 1
            return 0

        callback = native.PoolSubmit(schedule)
        with native.holding(callback) as user:
            self._as_parameter_ = native.value_out(ctypes.c_void_p, lib.pool_create, threads, callback, user, native.release)


class Model(Handle):
    """
    A model from a directory or file, on the GPU with room for it, or else on the CPU: info["device"] says where, and
    info["device_choice"] why. Options: device (auto, the default, cpu, cuda, cuda:1), threads, activations (exact, int8),
    sampling_only, kv_bytes (reserved for the keys and values of all sessions together; 0, the default, allocates as they grow),
    prefix_cache (whether sessions that begin with the same tokens share these; True), prefix_bytes (kept of them after the last session; 0),
    deterministic (on a GPU too, the logits of a session have the same bits whatever runs beside it; False, because it costs speed),
    pool (a Pool of the program's own threads), mlock (locks the weights in host memory, as far as `ulimit -l` allows; False),
    packed (whether weights on the CPU are mapped from the file of `nvfp4 quantize --packed`, which processes share: auto, the default, if it is
    there; off; required), tuning (the goal of passes with prompts while other sessions generate: throughput, the default, ends prompts soon;
    latency holds up the others as little as possible), prompt_tokens (most tokens of prompts in such a pass; 0, by measured times).
    `quantize` is True, or the options of quantize(), to make dense weights NVFP4; `progress` takes bytes done
    and in all, and cancels if it returns False; `cancel` is a Cancel.
    """

    _kind = "model"
    _copies = "use the same Model from any thread, or load another one by Model(path)"
    _pickles = "load the model in each process, by Model(path)"

    def __init__(self, path, quantize=None, progress=None, cancel=None, **options):
        how = native.options(native.LoadOptions, {"device": "auto", **native.told(options)})

        def load(call):
            how.call = call
            return native.value_out(
                ctypes.c_void_p, lib.model_load, *native.path_in(path), ctypes.byref(how), _quantization(quantize))

        self._as_parameter_ = _watched(load, cancel, progress)

    @classmethod
    def from_files(cls, files, quantize=None, progress=None, cancel=None, **options):
        """
        A model from files that never were on disk: a dictionary of the names in its directory (config.json, tokenizer.json, the weights) to
        contents. A content is bytes, or another buffer; a binary file object that can seek; or a pair of a size and a function
        `read(offset, size)`, which gives so many bytes, from any thread, several at once. Buffers are not copied: they stay locked until the
        library does not use them any more, at the latest when the model and its sessions are gone, and must not change. What `read` raises
        while the model is loaded leaves this; later, when rows of an embedding are read, the call fails with InputOutput. The rest is as
        for Model.
        """
        how = native.options(native.LoadOptions, {"device": "auto", **native.told(options)})
        quantized = _quantization(quantize)

        def load(call):
            how.call = call
            return GivenFiles(files).load(lambda *given: native.value_out(
                ctypes.c_void_p, lib.model_load_files, *given, ctypes.byref(how), quantized))

        return cls._own(_watched(load, cancel, progress))

    @property
    def info(self):
        """A description of the model, as a dictionary."""
        return json.loads(self._text("info"))

    @property
    def vocab_size(self):
        return self._value(ctypes.c_size_t, "vocab_size")

    @property
    def statistics(self):
        """Counts of the work since the model was loaded, and of the blocks that it holds now, as a dictionary. From any thread at any time."""
        now = native.ModelStatistics(struct_size=ctypes.sizeof(native.ModelStatistics))
        lib.model_statistics(self, ctypes.byref(now))
        names = (name for name, _ in now._fields_ if name not in ("struct_size", "reserved"))
        return {name: getattr(now, name) for name in names}

    def save_prefixes(self, path, cancel=None, progress=None):
        """Writes the prefixes that sessions can begin with to a file, while other threads go on."""
        _watched(lambda call: lib.model_save_prefixes(self, *native.path_in(path), call), cancel, progress)

    def restore_prefixes(self, path, cancel=None, progress=None):
        """Restores prefixes of a model with the same weights, as far as there is room: prefix_bytes or kv_bytes say how much."""
        _watched(lambda call: lib.model_restore_prefixes(self, *native.path_in(path), call), cancel, progress)

    @property
    def tokenizer(self):
        return Tokenizer(self)

    def generate_options(self):
        """The sampling settings that the model recommends, as a dictionary of options of a generation. Chats begin with them."""
        how = native.GenerateOptions()
        lib.model_generate_options(self, ctypes.byref(how), ctypes.sizeof(how))
        drawn = {name: _shortest(getattr(how, name)) for name in ("temperature", "top_p", "min_p", "repetition_penalty")}
        return {**drawn, "top_k": how.top_k}

    def session(self, **options):
        return Session(self, **options)

    def log_probabilities(self, text, after=None, cancel=None):
        """
        The log-probability of each token of a text, or with `after` of a text that comes after another one. Both are text, or tokens. The
        first token of all is NaN: nothing predicts it. For many continuations of one text use Session.score().
        """
        def tokens(of, add_special):
            return self.tokenizer.encode(of, add_special) if isinstance(of, (str, bytes, bytearray)) else of

        session = self.session()
        try:
            if after is not None:
                session.prefill(tokens(after, True), cancel=cancel)
            return session.score([tokens(text, after is None)], cancel=cancel)[0].log_probabilities
        finally:
            session.close()

    def embed(self, texts, cancel=None, progress=None, **options):
        """
        Embeddings of texts, or of lists of tokens, which run together: a Tensor of shape [texts, dimensions] in float32, for numpy() or
        torch.from_dlpack(). Options: pooling (model: that of its files; last, mean, cls), normalize (model, no, yes), dimensions (the first
        ones of a Matryoshka embedding; 0, the default, for all), prompt (a text that goes before each text), prompt_name (one of
        info["embedding"]["prompts"]), truncate (texts longer than the model takes; False refuses them), kv_type (float16, float32, float8),
        is_private (no text begins with the cached prefix of another one; False). With pooling="none" the rows are
        those of all tokens: hidden_states() divides them.
        """
        return self._embed(texts, cancel, progress, options)[0]

    def hidden_states(self, texts, cancel=None, progress=None, **options):
        """
        The hidden states of each of these texts or lists of tokens: a Tensor of shape [tokens, dimensions] with what the final norm gives
        for each token, which the output head reads. Options as for embed(), but for the pooling.
        """
        out, rows = self._embed(texts, cancel, progress, {**options, "pooling": "none"})
        width, ends = out.shape[1], itertools.accumulate(rows)
        return [out.view([count, width], offset=(end - count) * width) for count, end in zip(rows, ends)]

    def _embed(self, texts, cancel, progress, options):
        """The rows of all texts, and the number of rows of each."""
        if isinstance(texts, (str, bytes, bytearray)):
            raise TypeError("texts are a list of texts, or of lists of tokens; put a single text into a list")
        texts = list(texts)
        named = [text for text in texts if isinstance(text, (str, bytes, bytearray))]
        if 0 < len(named) < len(texts):
            raise TypeError(f"texts and lists of tokens are embedded apart; {len(named)} of {len(texts)} are texts")
        if named:
            function, data = lib.model_embed_texts, [native.text_in(text)[0] for text in named]
            pointers = (ctypes.c_char_p * len(data))(*data)
        else:
            function, data = lib.model_embed, [_tokens(tokens) for tokens in texts]
            pointers = (ctypes.c_void_p * len(data))(*map(ctypes.addressof, data))
        lengths, rows = (ctypes.c_size_t * len(data))(*map(len, data)), (ctypes.c_size_t * len(data))()
        how = native.options(native.EmbedOptions, options)

        def embed(call):
            how.call = call
            given, count = (self, pointers, lengths, len(data), ctypes.byref(how)), ctypes.c_size_t()
            function(*given, None, 0, ctypes.byref(count), rows)
            out = Tensor.zeros([sum(rows), count.value // max(sum(rows), 1)])
            if data:
                function(*given, out._value(ctypes.c_void_p, "data"), count.value, ctypes.byref(count), rows)
            return out

        return _watched(embed, cancel, progress), list(rows)

    def chat(self, system=None, **options):
        return ChatSession(self, system=system, **options)


def convert(source, destination, container="modelopt", quantize=None, progress=None, cancel=None, calibrate=None, **options):
    """
    Converts a model on disk to NVFP4 on disk. `container` is modelopt or dat. Options: replace (a directory that holds a model;
    without it one that is not empty is refused), tables (auto, bfloat16, int8, nvfp4: what embedding and head are written as; auto is
    int8 where the source has them in at most 8 bits and a directory is written, else 16 bits), keep_head (leaves the head, or the table
    that it shares with the embedding, in its precision), packed (also writes packed.nvfp4 into the directory, which appears with it or not at
    all: the weights as the CPU's kernels read them, which processes that load the model on the CPU share; if DESTINATION is SOURCE itself,
    nothing is quantized and that file alone is written). The rest is as for Model.

    `calibrate` True, or a dictionary of options, chooses codes and scales for which products with what the model makes of text differ
    least, and writes tables in int8 unless told. Its options: files (with text of the kinds that the model is used for, rows as for
    Data; what they do not fill comes from a text that the library brings), windows (32 on a CPU, 128 on a GPU), window (their
    tokens: 1024 or 2048), device (cpu), budget (bits of a weight on average, 4.5 to 8: blocks that lose most get 8), distill_steps (of
    learning what the original predicts, for GPUs). A call that was interrupted goes on after the blocks of the model that it had finished, which
    it keeps in DESTINATION.calibration.
    """
    how = native.options(native.ConvertOptions, dict(options, container=container))
    if calibrate:
        with_text = native.options(native.CalibrateOptions, {} if calibrate is True else calibrate)
        how.kept.append(with_text)
        how.calibrate = ctypes.addressof(with_text)

    def run(call):
        how.call = call
        lib.model_convert(*native.path_in(source), *native.path_in(destination), ctypes.byref(how), _quantization(quantize))

    _watched(run, cancel, progress)


class Grammar(Handle):
    """
    Texts that generations of a model are held to, compiled once; any number of generations may follow it at the same time, with
    grammar= as an option. A schema that is not supported, that no value fits or that takes more than 100 ms or 64 MB to compile raises
    InvalidArgument, which names the place.
    """

    _kind = "grammar"
    _copies = "use the same Grammar from any thread"
    _pickles = "pass the source, and compile it in each process"

    def __init__(self, model, source, kind="json_schema"):
        """`source` is the text of a JSON schema, of a regular expression (regex), of a grammar (lark, gbnf), or a JSON array (choices)."""
        how = native.options(native.GrammarOptions, {"kind": kind})
        self._as_parameter_ = native.value_out(
            ctypes.c_void_p, lib.grammar_create, model, ctypes.byref(how), *native.text_in(source))

    @classmethod
    def json_schema(cls, model, schema):
        """JSON that fits a schema: a dictionary, True, or text. It is written in one line, as by json.dumps()."""
        return cls(model, schema if isinstance(schema, (str, bytes, bytearray)) else json.dumps(schema))

    @classmethod
    def regex(cls, model, pattern):
        """Text that a regular expression fits as a whole, without look-around."""
        return cls(model, pattern, "regex")

    @classmethod
    def lark(cls, model, grammar):
        """Text of a context-free grammar, in the dialect of Lark that llguidance reads."""
        return cls(model, grammar, "lark")

    @classmethod
    def gbnf(cls, model, grammar):
        """Text of a context-free grammar in GBNF, as llama.cpp reads it, whose rule `root` is the whole text."""
        return cls(model, grammar, "gbnf")

    @classmethod
    def choices(cls, model, texts):
        """One of these texts."""
        return cls(model, json.dumps(list(texts)), "choices")


class Adapter(Handle):
    """
    A LoRA adapter of a model, from a directory that `nvfp4 train --adapter` or peft wrote. Sessions and chats that are given it
    with adapter= run with it, any number of them, beside others with other adapters and without one. An adapter of another base, or of
    another kind than LoRA beside linear maps, raises an error that names what differs. close() returns at once: the memory goes with the
    last session that uses it.
    """

    _kind = "adapter"
    _copies = "use the same Adapter from any thread"
    _pickles = "pass the path, and load it in each process"

    def __init__(self, model, path, cancel=None):
        load = lambda call: native.value_out(ctypes.c_void_p, lib.adapter_load, model, *native.path_in(path), call)
        self._as_parameter_ = _watched(load, cancel)

    @property
    def info(self):
        """name, rank, projections, bytes, identity and sessions, the number that use it now."""
        return json.loads(self._text("info"))

    def wait(self, cancel=None):
        """Waits until no session uses it, so that close() frees its memory at once."""
        _watched(lambda call: lib.adapter_wait(self, call), cancel)


class Session(Handle):
    """
    A sequence of tokens that a model runs. One call at a time may use it; another one raises Busy. Its length, memory and
    messages can be asked for at any time: during a call they are as they were before it. Options: context (tokens to hold; what
    the model was made for unless told), kv_type (float16, float32), eviction (error, drop_oldest, sliding_window), keep (tokens at the
    beginning that stay), drop (tokens that a sliding window drops at a time; half unless told), system, adapter (an Adapter of the model).

    Options of a generation: temperature, top_k, top_p (0 takes the argmax), min_p, repetition_penalty,
    repetition_window (tokens at the session's end that the penalty counts; all unless told), seed (a new one
    unless told), max_tokens (unless told, as many as there is room for), stop (tokens and strings, or one of them; a string may
    name a special token), ignore_model_stops, replay, log_probabilities (of each token, in the pieces), top_log_probabilities (of
    so many most probable tokens too), drafts (tokens that the
    model's drafter guesses in a step at most; -1 for none, and as many as are fastest unless told), prompt_lookup (tokens that a step
    drafts at most where the last tokens have occurred before; none unless told), draft_model (a smaller Model with the same tokenizer that
    guesses tokens), grammar (a Grammar that the text fits, in a chat the answer), tool_calls (of a chat: held to the schemas of its tools, required, or free, the default), logit_bias (a
    dictionary from tokens to what their logits get; -math.inf excludes a token), presence_penalty, frequency_penalty, bad_words (sequences
    of tokens that are not completed, such as model.tokenizer.encode(" word", False, special=False)), no_repeat_ngram_size (sequences of so
    many tokens occur once), min_tokens (new tokens before which none ends the text), dry_multiplier (strength of the DRY penalty of tokens
    that would extend a repetition; with dry_base, dry_allowed_length, dry_window, and dry_sequence_breakers, strings that no repetition
    contains), top_n_sigma, typical_p, xtc_probability with xtc_threshold, logits_processor (a function that changes the logits of each
    choice).

    A logits_processor is called with a writable memoryview of the logits, floats that numpy.frombuffer() takes without a copy; a
    memoryview of the tokens that the generation has so far; and the index of the session in step_sample(). Both views are gone when it
    returns. It ends the generation by returning False or raising; in a coroutine it runs on a thread of the library.

    Whatever may take long takes `cancel`, a Cancel, and ends at an interrupt. Prompts and files take `progress` too, which is
    called with what is done and what there is to do, in tokens or bytes, and ends the call by returning False; it may not use
    this model.

    The text of a generation has whole characters: the bytes of one that is unfinished at the end come with the text of the next
    generation, if that completes it.
    """

    _kind = "session"
    _copies = "session.fork() is a second session in the same state"
    _pickles = "session.to_bytes() and Session.from_bytes(model, data) take it to another process"
    _model = None  # A reference of its own to the model, for streams of event loops.
    _left = None  # The generation that the last of these streams has left before its end.

    def __init__(self, model, **options):
        how = native.options(native.SessionOptions, options)
        self._as_parameter_ = native.value_out(ctypes.c_void_p, lib.session_create, model, ctypes.byref(how))
        self._model = model._second()

    def close(self):
        super().close()
        if self._model is not None:
            self._model.close()

    @classmethod
    def restore(cls, model, path, cancel=None, progress=None):
        """A session in the state that save() wrote."""
        return cls._restored(lib.session_restore, model, native.path_in(path), cancel, progress)

    @classmethod
    def _restored(cls, function, model, source, cancel, progress):
        """A session from a path or from its state, by a function of the library that takes that: a pointer and a length."""
        restore = lambda call: native.value_out(ctypes.c_void_p, function, model, *source, call)
        out = cls._own(_watched(restore, cancel, progress))
        out._model = model._second()
        return out

    def save(self, path, cancel=None, progress=None):
        _watched(lambda call: lib.session_save(self, *native.path_in(path), call), cancel, progress)

    @classmethod
    def from_bytes(cls, model, data, cancel=None, progress=None):
        """A session in the state of what to_bytes() gave, or of the bytes of a file of save()."""
        view = memoryview(data).cast("B")
        at = bytes(view) if view.readonly else (ctypes.c_char * len(view)).from_buffer(view)
        return cls._restored(lib.session_restore_bytes, model, (at, len(view)), cancel, progress)

    def to_bytes(self, cancel=None, progress=None):
        """The bytes of a file of save(), in a bytearray."""
        def saved(call):
            size = ctypes.c_size_t()
            lib.session_save_bytes(self, None, 0, ctypes.byref(size), None)
            state = bytearray(size.value)
            lib.session_save_bytes(self, (ctypes.c_char * len(state)).from_buffer(state), len(state), ctypes.byref(size), call)
            return state

        return _watched(saved, cancel, progress)

    def fork(self):
        """A second session in the same state. A session that generates goes on, and its fork has the tokens so far."""
        out = self._own(self._value(ctypes.c_void_p, "fork"))
        out._model = self._model._second()
        return out

    def prefill(self, tokens, one_by_one=False, cancel=None, progress=None):
        """Appends tokens and runs them, all at once or, on the CPU to the same bits, one after the other."""
        tokens = _tokens(tokens)
        run = lib.session_prefill_token_by_token if one_by_one else lib.session_prefill
        _watched(lambda call: run(self, tokens, len(tokens), call), cancel, progress)

    def decode(self, token, cancel=None):
        """Appends a token and runs it."""
        with native.call_options(cancel) as call:
            lib.session_decode(self, token, call)

    def logits(self, cancel=None):
        """The logits of the next token, as an array of floats."""
        count = ctypes.c_size_t()
        with native.call_options(cancel) as call:
            lib.session_logits(self, None, 0, ctypes.byref(count), call)
            out = array.array("f", bytes(4 * count.value))
            lib.session_logits(self, out.buffer_info()[0], len(out), ctypes.byref(count), call)
        return out

    def sample(self, **options):
        """The next token, which is not appended."""
        how = native.options(native.GenerateOptions, options)
        with native.processed(how):
            return native.value_out(ctypes.c_int32, lib.session_sample, self, ctypes.byref(how))

    def score(self, continuations, cancel=None, progress=None):
        """
        A Score for each of these lists of tokens, as if it stood alone after the tokens of this session, which keeps its tokens.
        """
        texts = [_tokens(tokens) for tokens in continuations]
        total = sum(map(len, texts))
        values, argmaxes = (ctypes.c_float * total)(), (ctypes.c_int32 * total)()
        pointers, lengths = (ctypes.c_void_p * len(texts))(*map(ctypes.addressof, texts)), (ctypes.c_size_t * len(texts))(*map(len, texts))
        _watched(lambda call: lib.session_score(self, pointers, lengths, len(texts), call, values, argmaxes), cancel, progress)
        ends = list(itertools.accumulate(map(len, texts), initial=0))
        return [Score(values[start:end], [bool(one) for one in argmaxes[start:end]]) for start, end in zip(ends, ends[1:])]

    @property
    def top_log_probabilities(self):
        """
        Pairs of a token and its log-probability: the token that the last sample() or step_sample() chose for this session, and then the
        most probable ones. Empty unless its options asked for them.
        """
        count = ctypes.c_size_t()
        lib.session_top_log_probabilities(self, None, None, 0, ctypes.byref(count))
        tokens, values = (ctypes.c_int32 * count.value)(), (ctypes.c_float * count.value)()
        lib.session_top_log_probabilities(self, tokens, values, count.value, ctypes.byref(count))
        return list(zip(tokens, values))

    def generate(self, on_text=None, **options):
        """
        Generates from where the session stands, and returns a Generation. `on_text` is called with pieces of text as they
        come; if it returns False or raises, that ends the generation.
        """
        return Stream(self, "generate", (), options, on_text)._run()

    def stream(self, **options):
        """
        The same as a Stream, an iterator of pieces of text. The generation begins when the first one is asked for. Options for event
        loops are priority and deadline, in seconds: see Stream.
        """
        return Stream(self, "generate", (), options)

    def truncate(self, length):
        """Drops the tokens from position `length` on."""
        lib.session_truncate(self, length)

    def reset(self):
        """Drops all tokens and the conversation."""
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
        """The most tokens that it can hold."""
        return self._value(ctypes.c_size_t, "context")

    @property
    def evicted(self):
        """Tokens that eviction has dropped, because the context was full; during a call, those from before it."""
        return self._value(ctypes.c_size_t, "evicted")

    @property
    def nbytes(self):
        """Bytes of the KV cache."""
        return self._value(ctypes.c_uint64, "memory")


class ChatSession(Session):
    """
    A conversation with a model. Beside a session's its options are those of turns, which each turn may be given otherwise: think
    (True or False, where the model can do both; the variable enable_thinking of its template), variables (a dictionary of
    others), tools (a list of dictionaries, as chat servers take them), chat_template (Jinja in place of the
    model's own), reasoning_budget (the most tokens of reasoning),
    keep_reasoning (earlier reasoning stays in the session, so that a turn runs only what it adds).

    Tokens are drawn as the model recommends (see Model.generate_options()), as far as a turn is not told otherwise. Of what the
    model says only the answer is given in pieces, with parts=True also what it thinks and the tools that it calls: see Piece.
    """

    def __init__(self, model, **options):
        self._turns, self._drawn = _take_chat_options(options), model.generate_options()
        super().__init__(model, **options)

    @classmethod
    def restore(cls, model, path, cancel=None, progress=None, **options):
        """A conversation in the state that save() wrote, with the options of its last turn unless others are given here."""
        turns = _only_chat_options(options)
        return super().restore(model, path, cancel, progress)._resumed(model, turns)

    @classmethod
    def from_bytes(cls, model, data, cancel=None, progress=None, **options):
        """A conversation in the state of what to_bytes() gave; see restore()."""
        turns = _only_chat_options(options)
        return super().from_bytes(model, data, cancel, progress)._resumed(model, turns)

    def _resumed(self, model, turns):
        self._turns, self._drawn = turns or None, model.generate_options()
        return self

    def fork(self):
        out = super().fork()
        out._turns, out._drawn = self._turns, self._drawn
        return out

    def ask(self, text, **options):
        """
        Says something to the model: a Stream of the pieces of its answer, which begins when the first one is asked for. Options are
        those of a turn, of a generation and of stream().
        """
        return self._turn("chat", text, options)

    def say(self, text, on_text=None, **options):
        """The same, as the whole answer: a Generation. `on_text` is as for generate()."""
        return self._turn("chat", text, options, on_text)._run()

    def complete(self, messages, on_text=None, **options):
        """
        The answer to a whole conversation, as a Generation: a list of dictionaries as chat servers take them, with role (system,
        user, assistant, tool) and content, and where they belong reasoning_content, tool_calls and tool_call_id. Only what the
        session does not hold yet is run. The rest is as for say().
        """
        return self._turn("chat_messages", json.dumps(messages), options, on_text)._run()

    def stream(self, messages=None, **options):
        """The same as an iterator of pieces; without messages it generates after the tokens in the session."""
        if messages is None:
            return super().stream(**options)
        return self._turn("chat_messages", json.dumps(messages), options)

    def _turn(self, call, text, options, on_text=True):
        options = {**self._drawn, **native.told(options)}
        given = _take_chat_options(options)
        # A conversation from a file has options that only the library knows.
        how = None if self._turns is None and not given else ctypes.byref(_chat_options({**(self._turns or {}), **given}))
        return Stream(self, call, (*native.text_in(text), how), options, on_text)

    @property
    def messages(self):
        """The conversation, as complete() takes it; an answer has its reasoning and its tool calls."""
        return json.loads(self._text("messages"))


def step(sessions, tokens, cancel=None, statuses=None):
    """
    Appends tokens[i] to sessions[i] and runs all of them in one pass over the weights. With a list as `statuses`, a session that
    cannot take its token is left out: the list gets, for each, None, or the class of the error that it would be.
    """
    with native.call_options(cancel) as call:
        numbers = _statuses(statuses, len(tokens))
        lib.session_step(_handles(sessions, tokens), _tokens(tokens), len(tokens), call, numbers)
    _tell(statuses, numbers)


def step_sample(sessions, tokens, each=None, cancel=None, statuses=None, **options):
    """
    The same, and returns the next token of each session, which is not appended, or None where it was left out. Options are
    those of a generation; `each` is a list of dictionaries of them instead, one for each session. On a GPU no logits come to the
    host.
    """
    handles = _handles(sessions, tokens)
    if each is None:
        each = [options] * len(tokens)
    elif options:
        raise TypeError("options are given once for all, or in `each`, not both")
    elif len(each) != len(tokens):
        raise InvalidArgument(f"options for {len(each)} of {len(tokens)} sessions")
    how = [native.options(native.GenerateOptions, one) for one in each]
    pointers = (ctypes.c_void_p * len(tokens))(*(ctypes.addressof(one) for one in how))
    chosen = (ctypes.c_int32 * len(tokens))(*[-1] * len(tokens))
    numbers = _statuses(statuses, len(tokens))
    with native.processed(*how), native.call_options(cancel) as call:
        lib.session_step_sample(handles, _tokens(tokens), len(tokens), pointers, call, chosen, numbers)
    _tell(statuses, numbers)
    return [None if token < 0 else token for token in chosen]


def _statuses(wanted, count):
    return None if wanted is None else (ctypes.c_int32 * count)()


def _tell(statuses, numbers):
    if statuses is not None:
        statuses[:] = [native.ERRORS[number] if number else None for number in numbers]


def _handles(sessions, tokens):
    if len(sessions) != len(tokens):
        raise InvalidArgument(f"{len(tokens)} tokens for {len(sessions)} sessions")
    return (ctypes.c_void_p * len(sessions))(*(session._as_parameter_ for session in sessions))


class Detokenizer(Handle):
    """
    The text of one sequence as its tokens come, for those who step many. It goes on after `tokens`, and ends where generating with
    the same options (stop, ignore_model_stops, max_tokens) would.
    """

    _kind = "detokenizer"
    _copies = "make another one by Detokenizer(model, tokens)"
    _pickles = "pass the tokens, and make a Detokenizer(model, tokens) of them in each process"

    def __init__(self, model, tokens=(), **options):
        tokens, how = _tokens(tokens), native.options(native.GenerateOptions, options)
        self._as_parameter_ = native.value_out(
            ctypes.c_void_p, lib.detokenizer_create, model, tokens, len(tokens), ctypes.byref(how))

    def push(self, token):
        """The text that the token completes, and how the sequence ends with it, as in a Generation, or None."""
        finish = ctypes.c_int32()
        text = self._given(lib.detokenizer_push, token, finish=finish)
        return text, None if finish.value < 0 else chosen("finish", finish.value)

    @staticmethod
    def push_each(detokenizers, tokens):
        """Pushes a token to each of several detokenizers, in one call: a list of what push() gives. If it fails, none has changed."""
        tokens = _tokens(tokens)
        count = len(tokens)
        if len(detokenizers) != count:
            raise InvalidArgument(f"{count} tokens for {len(detokenizers)} detokenizers")
        handles = (ctypes.c_void_p * count)(*(one._as_parameter_ for one in detokenizers))
        texts, lengths, finishes = (ctypes.c_void_p * count)(), (ctypes.c_size_t * count)(), (ctypes.c_int32 * count)()
        lib.detokenizers_push(handles, tokens, count, texts, lengths, finishes)
        return [(ctypes.string_at(text, length).decode(), None if finish < 0 else chosen("finish", finish))
                for text, length, finish in zip(texts, lengths, finishes)]

    def finish(self):
        """Ends the sequence, and gives the text that was held back."""
        return self._given(lib.detokenizer_finish)

    def _given(self, function, *arguments, finish=None):
        text, length = ctypes.c_void_p(), ctypes.c_size_t()
        function(self, *arguments, ctypes.byref(text), ctypes.byref(length), *([] if finish is None else [ctypes.byref(finish)]))
        return ctypes.string_at(text, length.value).decode()
