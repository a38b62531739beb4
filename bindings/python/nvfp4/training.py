"""Training: trainers of whole models, and the optimizer of one weight for those who compute gradients themselves."""

import collections.abc
import ctypes
import json
import typing

from . import native
from .models import Model, _tokens, _watched
from .native import Handle, InvalidArgument, chosen, choice, lib
from .tensors import Tensor

# Where no label counts.
NO_LABEL = -100


class Step(typing.NamedTuple):
    """
    What a step came to. `outcome` is updated, or skipped where the loss or a gradient was not finite; `loss` is the mean cross-entropy
    of the `targets` labels that counted, in nats, before the step; `changed` and `changed_delivered` are shares of the weights.
    """

    outcome: str
    step: int
    targets: int
    loss: float
    rate: float
    gradient_norm: float
    changed: float
    changed_delivered: float


class Comparison(typing.NamedTuple):
    """Means over labels, in nats: the cross-entropy, and the divergence from a teacher's predictions, KL(teacher || model)."""

    loss: float
    divergence: float


class Batch(typing.NamedTuple):
    """
    Documents one after another: token ids, for each token the one that should come after it (-100 where none counts), and the number of
    tokens of each document, which is one where there are none. Sequences of integers, such as lists and numpy arrays. `weights` are what
    the loss of each label is multiplied by, 1 for all where there are none.
    """

    tokens: collections.abc.Sequence
    labels: collections.abc.Sequence
    documents: collections.abc.Sequence = ()
    weights: collections.abc.Sequence = ()

    @classmethod
    def of(cls, *documents):
        """A batch of documents of token ids, in which each token is to give the next one, and the last one of each nothing."""
        tokens, labels, lengths = [], [], []
        for document in documents:
            ids = [int(token) for token in document]
            tokens += ids
            labels += ids[1:] + [NO_LABEL]
            lengths.append(len(ids))
        return cls(tokens, labels, lengths)


def _batches(batches):
    """A Batch or several as C takes them, and what their pointers point to."""
    batches = [batches] if isinstance(batches, Batch) else [Batch(*batch) for batch in batches]
    out, kept = (native.MicroBatch * len(batches))(), []
    for one, batch in zip(out, batches):
        tokens, labels = _tokens(batch.tokens), _tokens(batch.labels)
        if len(tokens) != len(labels):
            raise InvalidArgument(f"{len(tokens)} tokens and {len(labels)} labels; each token takes one")
        lengths = native.numbers(ctypes.c_size_t, [int(length) for length in batch.documents])
        weights = (ctypes.c_float * len(batch.weights))(*map(float, batch.weights))
        if len(weights) not in (0, len(labels)):
            raise InvalidArgument(f"{len(labels)} labels and {len(weights)} weights; each label takes one, or none does")
        kept += [tokens, labels, lengths, weights]
        one.tokens, one.labels, one.token_count = ctypes.addressof(tokens), ctypes.addressof(labels), len(tokens)
        one.document_lengths, one.document_count = ctypes.addressof(lengths), len(lengths)
        one.weights = ctypes.addressof(weights) if weights else None
    return out, kept


def _options(device, config, options):
    """The options of a trainer; `config` is a dictionary of all settings, as Trainer.info["config"] has them."""
    values = {"device": device, **options}
    if config is not None:
        values["config"] = json.dumps(config)
    return native.options(native.TrainerOptions, values)


class Trainer(Handle):
    """
    Trains the dense model at `path`, with weights and both moments of AdamW in 4 bits by default.

        with nvfp4.Trainer("qwen3-0.6b", steps=1000, rate=1e-4) as trainer:
            for documents in data:
                print(trainer.step(nvfp4.Batch.of(*documents)).loss)
            trainer.export("qwen3-tuned")

    Options: steps, rate, warmup, schedule (cosine, linear, constant, stable), floor, decay_share, weight_decay, beta1, beta2, eps,
    clip (global, never, previous, tensor), clip_norm, weights (residual4, residual8, two_term, one_term, bfloat16, float32),
    first_moments (int4, nvfp4, int8, float32), second_moments (uint4, nvfp4, int8, float32), tables (auto, bfloat16, int8, nvfp4: what
    embedding and head are delivered as), weight_scales (sweep, four_over_six, amax: of linear weights that the model does not hold in
    NVFP4), release, recompute, last_blocks, delivered_share, seed, threads; or instead of all of these `config`, a dictionary as info["config"] gives it. With
    `teacher`, the path of a model of the same vocabulary, what that predicts is learned, with teacher_temperature, label_share (of the
    labels' cross-entropy in the loss) and teacher_memory (auto, resident, streamed). `device` is cpu, cuda, cuda:1 or auto. One call at a time may use a trainer; `cancel` is a Cancel, and a call that it ends changes nothing.
    """

    _kind = "trainer"
    _copies = "trainer.save(directory) and Trainer.resume(path, directory) make a second one in the same state"
    _pickles = "trainer.save(directory) and Trainer.resume(path, directory) take it to another process"

    def __init__(self, path, device="auto", config=None, cancel=None, **options):
        how = _options(device, config, options)
        self._as_parameter_ = _watched(
            lambda call: native.value_out(ctypes.c_void_p, lib.trainer_create, *native.path_in(path), ctypes.byref(how), call), cancel)

    @classmethod
    def resume(cls, path, directory, device="auto", threads=0, cancel=None, teacher=None, teacher_memory="auto"):
        """
        A trainer from the last checkpoint in `directory`, or from the checkpoint that it is, with its settings; `path` is the model that
        training began with, and `teacher` its teacher if there was one. It goes on to the same bits. `data` is what was saved with it.
        """
        how = _options(device, None, {"threads": threads, "teacher": teacher, "teacher_memory": teacher_memory})
        return cls._own(_watched(
            lambda call: native.value_out(ctypes.c_void_p, lib.trainer_resume, *native.path_in(path), *native.path_in(directory),
                                          ctypes.byref(how), call), cancel))

    @property
    def info(self):
        """A description of the trainer, as a dictionary: steps, parameters, bytes, config and more."""
        return json.loads(self._text("info"))

    @property
    def data(self):
        """What was last given to save(), or saved with the checkpoint that this was resumed from."""
        return json.loads(self._text("data"))

    def step(self, batches, progress=None, cancel=None):
        """
        A step by a Batch, or by several micro-batches whose gradients are summed, each label counting the same. `progress` takes the
        tokens that are done and those in all.
        """
        out, kept = _batches(batches)
        report = native.StepReport(struct_size=ctypes.sizeof(native.StepReport))
        _watched(lambda call: lib.trainer_step(self, out, len(out), ctypes.sizeof(native.MicroBatch), call, ctypes.byref(report)),
                 cancel, progress)
        del kept
        return Step(chosen("step", report.outcome), *(getattr(report, name) for name in Step._fields[1:]))

    def evaluate(self, batches, delivered=True, cancel=None):
        """The mean cross-entropy of the labels that count: of what is delivered, or of all that is stored."""
        out, kept = _batches(batches)
        loss = _watched(
            lambda call: native.value_out(ctypes.c_double, lib.trainer_evaluate, self, out, len(out),
                                          ctypes.sizeof(native.MicroBatch), delivered, call), cancel)
        del kept
        return loss

    def compare(self, batches, delivered=True, cancel=None):
        """A Comparison with the labels that count and with the trainer's teacher: of what is delivered, or of all that is stored."""
        out, kept = _batches(batches)
        loss, divergence = ctypes.c_double(), ctypes.c_double()
        _watched(lambda call: lib.trainer_compare(self, out, len(out), ctypes.sizeof(native.MicroBatch), delivered, call,
                                                  ctypes.byref(loss), ctypes.byref(divergence)), cancel)
        del kept
        return Comparison(loss.value, divergence.value)

    def save(self, directory, data=None, keep=2, cancel=None):
        """Writes a checkpoint into `directory`, with `data`, and removes all there but the last `keep`."""
        text = native.text_in(json.dumps(data))
        _watched(lambda call: lib.trainer_save(self, *native.path_in(directory), *text, keep, call), cancel)

    def export(self, path, tables="auto", replace=False, cancel=None):
        """
        Writes the model to a directory in ModelOpt's layout; `tables` (auto, bfloat16, int8, nvfp4) are embedding and head: auto is what
        they are trained for. What has not changed is written as the model has it.
        """
        tables = choice("tables", tables)
        _watched(lambda call: lib.trainer_export_directory(self, *native.path_in(path), tables, replace, call), cancel)

    def export_dat(self, path, cancel=None):
        """Writes the model to a .dat file, every tensor in the type that it has in the .dat file that training began with."""
        _watched(lambda call: lib.trainer_export_dat(self, *native.path_in(path), call), cancel)

    def export_adapter(self, path, base, replace=False, cancel=None):
        """Writes the adapters to a directory as peft reads them; `base` is what the model below them is called there."""
        texts = *native.path_in(path), *native.path_in(base)
        _watched(lambda call: lib.trainer_export_adapter(self, *texts, replace, call), cancel)

    def model(self, cancel=None):
        """
        The model that is trained, for sessions beside the steps, on the memory that is trained. It follows each step: its sessions keep their
        tokens, and go on with the new weights. Other threads may run them during a step, and wait for it.
        """
        return Model._own(_watched(lambda call: native.value_out(ctypes.c_void_p, lib.trainer_model, self, call), cancel))


class Row(typing.NamedTuple):
    """A document of Data: its tokens, for each the one that should come after it (-1 where none counts), and what the loss of that counts for."""

    tokens: list
    labels: list
    weights: list


class Data(Handle):
    """
    The documents of files for the model at `path`, of which no weights are read: rows as `nvfp4 train` reads them, with what is learned.

        data = nvfp4.Data("qwen3-0.6b", ["rows.jsonl", "more.csv.gz"])
        for start in range(0, len(data), 8):
            trainer.step(data.batch(range(start, min(start + 8, len(data)))))

    Options: format (by_name, tsv, jsonl, text, csv, json), long_rows (refuse, truncate, drop), empty_think (learn, given, none),
    train_on_all, skip_bad_rows, window, separator. `progress` takes the rows that are read and those of the file. Any thread may use it.
    """

    _kind = "data"
    _copies = "any thread can use it as it is"
    _pickles = "read it in each process, by Data(path, files)"

    def __init__(self, path, files, progress=None, cancel=None, **options):
        places, lengths = native.paths_in(files)
        how = native.options(native.DataOptions, options)
        self._as_parameter_ = _watched(
            lambda call: native.value_out(ctypes.c_void_p, lib.data_read, *native.path_in(path), places, lengths, len(places),
                                          ctypes.byref(how), call), cancel, progress)

    def __len__(self):
        return self._value(ctypes.c_size_t, "count")

    def __getitem__(self, index):
        """A document as a Row."""
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"document {index} of {count}")
        index, length = index % count, ctypes.c_size_t()
        lib.data_document(self, index, None, None, None, 0, ctypes.byref(length))
        tokens, labels = ((ctypes.c_int32 * length.value)() for _ in range(2))
        weights = (ctypes.c_float * length.value)()
        lib.data_document(self, index, tokens, labels, weights, length.value, ctypes.byref(length))
        return Row(list(tokens), list(labels), list(weights))

    def batch(self, indices):
        """A Batch of these documents."""
        rows = [self[index] for index in indices]
        return Batch([t for row in rows for t in row.tokens], [t for row in rows for t in row.labels], [len(row.tokens) for row in rows],
                     [w for row in rows for w in row.weights])

    def mask(self, index):
        """A document as a dictionary: file, line, tokens, pieces (the text that each completes), special, learned, weights."""
        return json.loads(native.text_out(lib.data_mask, self, index))

    @property
    def report(self):
        """What was read, as a dictionary: files, rows, bad_rows, truncated, dropped."""
        return json.loads(self._text("report"))


def rounding_seed(seed, tensor, step):
    """A seed for quantize(rounding="stochastic"), so that every tensor and step has random bits of its own."""
    return native.value_out(ctypes.c_uint64, lib.rounding_seed, seed, tensor, step)


class Optimizer(Handle):
    """
    A weight `[.., K]` with the moments of AdamW, in 4 bits by default, for passes that are computed elsewhere. `weight` is a Tensor.
    Options: weights, first_moments, second_moments, fresh_scales.
    """

    _kind = "optimizer"
    _copies = "Optimizer.restore(optimizer.save()) is a second one in the same state"
    _pickles = "pass the bytes of optimizer.save(), and restore them by Optimizer.restore()"

    def __init__(self, weight, **options):
        how = native.options(native.OptimizerOptions, options)
        self._as_parameter_ = native.value_out(ctypes.c_void_p, lib.optimizer_create, weight, ctypes.byref(how))

    @classmethod
    def restore(cls, state, device="cpu"):
        """An optimizer from the bytes of save(), on any device, which goes on to the same bits."""
        data = (ctypes.c_char * len(state)).from_buffer_copy(state)
        return cls._own(native.value_out(ctypes.c_void_p, lib.optimizer_restore, data, len(state), *native.device(device), 0))

    def step(self, gradient, **options):
        """
        A step by a Tensor of the weight's shape; gives the number of weights that changed, as they are stored and as they are delivered.
        Options: rate, beta1, beta2, eps, weight_decay, gradient_scale, seed, tensor.
        """
        how, changed, delivered = native.options(native.StepOptions, options), ctypes.c_uint64(), ctypes.c_uint64()
        lib.optimizer_step(self, gradient, ctypes.byref(how), ctypes.byref(changed), ctypes.byref(delivered))
        return changed.value, delivered.value

    @property
    def steps(self):
        return native.value_out(ctypes.c_uint64, lambda out: lib.optimizer_size(self, out, None))

    @property
    def bytes(self):
        return native.value_out(ctypes.c_uint64, lambda out: lib.optimizer_size(self, None, out))

    def weight(self, delivered=False, dtype="float32"):
        """The weight as a Tensor: all that is stored, or the NVFP4 codes alone."""
        return Tensor._own(native.value_out(ctypes.c_void_p, lib.optimizer_weight, self, delivered, choice("dtype", dtype)))

    def delivered(self):
        """Codes and block scales as Tensors of the host, and the global scale."""
        codes, scales, scale = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        lib.optimizer_delivered(self, ctypes.byref(codes), ctypes.byref(scales), ctypes.byref(scale))
        return Tensor._own(codes.value), Tensor._own(scales.value), scale.value

    def save(self):
        """Everything that steps go on from, as bytes."""
        return bytes(native.items_out(ctypes.c_char, lib.optimizer_save, self))


def ste_linear(x, weight):
    """`x` `[.., K]` times `weight` `[N, K]` transposed, whose values are rounded to 4 bits as by ste_weight()."""
    return Tensor._own(native.value_out(ctypes.c_void_p, lib.ste_linear, x, weight))


def ste_linear_backward(x, weight, gradient):
    """The gradients of x and of weight, from those of ste_linear()'s result."""
    dx, dweight = ctypes.c_void_p(), ctypes.c_void_p()
    lib.ste_linear_backward(x, weight, gradient, ctypes.byref(dx), ctypes.byref(dweight))
    return Tensor._own(dx.value), Tensor._own(dweight.value)
