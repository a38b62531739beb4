"""Tensors, in and out of arrays without a copy; NVFP4 and NF4; products.

What takes a Tensor takes anything with memory: a numpy array, another object with the buffer protocol (array.array, bytes), or
one with __dlpack__ (a torch tensor). Neither numpy nor torch is imported unless a numpy array is asked for.
"""

import array
import collections
import ctypes
import json
import math
import sys
import typing

from . import native
from .native import Handle, InvalidArgument, choice, chosen, lib

_SIZES = {"uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8, "bool": 1,
          "bfloat16": 2, "float8_e4m3fn": 1, "float4_e2m1fn_x2": 1}
# DLPack's numbers of devices, by this library's.
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}


class _Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = [("data", ctypes.c_void_p), ("object", ctypes.py_object), ("bytes", ctypes.c_ssize_t),
                ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("rank", ctypes.c_int),
                ("format", ctypes.c_char_p), ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
                ("strides", ctypes.POINTER(ctypes.c_ssize_t)), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


_STRIDED_WITH_FORMAT = 0x1C  # PyBUF_STRIDES | PyBUF_FORMAT


def _python(name, returned, *taken):
    function = getattr(ctypes.pythonapi, name)
    function.restype, function.argtypes = returned, taken
    return function


_get_buffer = _python("PyObject_GetBuffer", ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = _python("PyBuffer_Release", None, ctypes.c_void_p)
_new_capsule = _python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_capsule_is = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_capsule_pointer = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename_capsule = _python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor, from dlpack.h."""

    _fields_ = [("data", ctypes.c_void_p), ("device", ctypes.c_int32 * 2), ("rank", ctypes.c_int32), ("dtype", ctypes.c_uint32),
                ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64),
                ("context", ctypes.c_void_p), ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p))]


class _ManagedVersioned(ctypes.Structure):
    """The beginning of DLManagedTensorVersioned."""

    _fields_ = [("version", ctypes.c_uint32 * 2), ("context", ctypes.c_void_p),
                ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p))]


class _Form(typing.NamedTuple):
    """A form of DLPack: the names of its capsules, which point to these, before and after they are taken; and its functions."""

    name: ctypes.c_char_p
    used: ctypes.c_char_p
    managed: type
    suffix: str


_PLAIN = _Form(ctypes.c_char_p(b"dltensor"), ctypes.c_char_p(b"used_dltensor"), _Managed, "")
_VERSIONED = _Form(ctypes.c_char_p(b"dltensor_versioned"), ctypes.c_char_p(b"used_dltensor_versioned"), _ManagedVersioned,
                   "_versioned")


def _form(capsule):
    """The form of a capsule that nobody has taken, or None."""
    return next((form for form in (_VERSIONED, _PLAIN) if _capsule_is(capsule, form.name)), None)


# Capsules that were handed out. One that is dropped before anybody has taken it over owns a tensor still. A destructor would
# be told, but it may run while an exception is on its way, when no function in Python may.
_offered = collections.deque()


def _first(queue):
    """Takes the first object from a queue, and how often it is referred to."""
    out = queue.popleft()
    return out, sys.getrefcount(out)


_ALONE = _first(collections.deque([object()]))[1]  # How often one is that nobody else has.


def _sweep():
    """Gives up what was handed out and dropped."""
    for _ in range(len(_offered)):
        try:
            capsule, references = _first(_offered)
        except IndexError:  # Another thread was faster.
            return
        form = _form(capsule)
        if form is None:
            continue
        if references > _ALONE:
            _offered.append(capsule)
            continue
        managed = _capsule_pointer(capsule, form.name)
        _rename_capsule(capsule, form.used)
        form.managed.from_address(managed).deleter(managed)


_lent = {}  # Buffers that the library holds, by their addresses.


@native.Deleter
def _give_back(_data, user):
    _release_buffer(ctypes.byref(_lent.pop(user)))


def _buffer_dtype(buffer):
    """The dtype of a buffer's elements, or None."""
    code = (buffer.format or b"B").decode().lstrip("@=<")
    kind = "int" if code in "bhilq" else "float" if code in "efd" else {"B": "uint", "c": "uint", "?": "bool"}.get(code)
    name = kind if kind in ("bool", None) else kind + str(8 * buffer.itemsize)
    return name if name in _SIZES else None


def _row_major(shape, itemsize):
    """Strides in bytes without gaps."""
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def _from_buffer(source, dtype, out):
    """Makes a tensor over the memory of a buffer, which is locked until the library is done with it; False if it is none."""
    buffer = _Buffer()
    try:
        _get_buffer(source, ctypes.byref(buffer), _STRIDED_WITH_FORMAT)
    except TypeError:
        return False
    user = ctypes.addressof(buffer)
    _lent[user] = buffer
    try:
        known = dtype or _buffer_dtype(buffer)
        number = choice("dtype", known) if known else None
        if number is None or _SIZES[known] != buffer.itemsize:
            raise InvalidArgument(f"elements of {buffer.itemsize} bytes with format {(buffer.format or b'').decode()!r} are no "
                                  f"{known or 'type of this library; name one of ' + ', '.join(_SIZES)}")
        shape = buffer.shape[:buffer.rank]
        # Arrays of ctypes give no strides, though they are asked for them.
        strides = buffer.strides[:buffer.rank] if buffer.strides else _row_major(shape, buffer.itemsize)
        if any(stride % buffer.itemsize or stride < 0 for stride in strides):
            raise InvalidArgument(f"strides of {strides} bytes for elements of {buffer.itemsize}: negative and uneven ones are "
                                  "not supported; copy the array (numpy.ascontiguousarray)")
        make = lib.tensor_from_host_read_only if buffer.readonly else lib.tensor_from_host
        make(buffer.data or ctypes.addressof(buffer), (ctypes.c_int64 * len(shape))(*shape), len(shape),
             (ctypes.c_int64 * len(shape))(*(stride // buffer.itemsize for stride in strides)), number, _give_back, user, out)
    except BaseException:
        _give_back(None, user)
        raise
    return True


def _from_dlpack(source, out):
    on_gpu = source.__dlpack_device__()[0] != _DLPACK_DEVICES["cpu"]
    # 1 is the legacy default stream, in whose order the library uses memory of a GPU.
    how = {"stream": 1} if on_gpu else {}
    try:
        capsule = source.__dlpack__(max_version=(1, 0), **how)
    except TypeError:  # It knows of no versions.
        capsule = source.__dlpack__(**how)
    form = _form(capsule)
    if form is None:
        raise BufferError(f"the __dlpack__ of a {type(source).__name__} gives no capsule of DLPack that is new")
    getattr(lib, "tensor_from_dlpack" + form.suffix)(_capsule_pointer(capsule, form.name), out)
    _rename_capsule(capsule, form.used)


class _Memory:
    """A tensor's memory as numpy asks for it, which keeps the tensor."""

    def __init__(self, tensor, dtype):
        self.tensor = tensor._second()
        self.__array_interface__ = {"version": 3, "shape": tensor.shape, "typestr": dtype.str,
                                    "data": (tensor._value(ctypes.c_void_p, "data"), tensor.read_only),
                                    "strides": tuple(stride * dtype.itemsize for stride in tensor.strides)}


class Tensor(Handle):
    """
    A typed, shaped view of memory: of `source`, without a copy, which must not change while it is used. `dtype` says what its
    elements are where their own type does not: uint16 that are bfloat16, say.
    """

    _kind = "tensor"
    _copies = "tensor.to('cpu') is a copy of its values, and view() another tensor over them"
    _pickles = "pass the values: tensor.numpy(raw=True), or tolist()"

    def __init__(self, source, dtype=None):
        handle = ctypes.c_void_p()
        if not _from_buffer(source, dtype, ctypes.byref(handle)):
            if not hasattr(source, "__dlpack__"):
                raise TypeError(f"a {type(source).__name__} has no memory to share: neither a buffer nor __dlpack__")
            if dtype is not None:
                raise TypeError("dtype is for buffers; what has __dlpack__ has a type")
            _from_dlpack(source, ctypes.byref(handle))
        self._as_parameter_ = handle.value

    @classmethod
    def zeros(cls, shape, dtype="float32", device="cpu"):
        """Zeros in memory of the library."""
        sizes = native.numbers(ctypes.c_int64, shape)
        return _made(lib.tensor_empty, sizes, len(sizes), choice("dtype", dtype), *native.device(device))

    @property
    def dtype(self):
        return chosen("dtype", self._value(ctypes.c_int32, "dtype"))

    @property
    def shape(self):
        return tuple(self._items(ctypes.c_int64, "shape"))

    @property
    def strides(self):
        """In elements."""
        return tuple(self._items(ctypes.c_int64, "strides"))

    @property
    def device(self):
        """"cpu", or "cuda:0" and so on."""
        kind, index = ctypes.c_int32(), ctypes.c_int32()
        lib.tensor_device(self, ctypes.byref(kind), ctypes.byref(index))
        name = chosen("device", kind.value)
        return name if name == "cpu" else f"{name}:{index.value}"

    @property
    def read_only(self):
        """Whether nobody may write to the memory, as its owner has said."""
        return bool(self._value(ctypes.c_int32, "is_read_only"))

    @property
    def nbytes(self):
        """Bytes of the elements without gaps."""
        return self._value(ctypes.c_uint64, "bytes")

    def view(self, shape, strides=None, offset=0):
        """Another view of the same memory; strides and offset count elements."""
        sizes = native.numbers(ctypes.c_int64, shape)
        if strides is not None and len(strides) != len(sizes):
            raise InvalidArgument(f"{len(strides)} strides for {len(sizes)} dimensions")
        return _made(lib.tensor_view, self, sizes, len(sizes),
                     None if strides is None else native.numbers(ctypes.c_int64, strides), offset)

    def to(self, device):
        """A copy without gaps in the memory of a device, or of the host."""
        return _made(lib.tensor_copy_to_device, self, *native.device(device))

    def numpy(self, raw=False):
        """
        A numpy array over the same memory, which it keeps alive. What numpy has no type for (bfloat16, float8_e4m3fn, ..) is
        refused, or with `raw` comes as the unsigned integers that hold its bits.
        """
        import numpy

        dtype = self.dtype
        if raw and (dtype.startswith("bf") or "_" in dtype):
            dtype = f"uint{8 * _SIZES[dtype]}"
        if dtype == "bfloat16" or "_" in dtype:
            raise TypeError(f"numpy has no {dtype}: take numpy(raw=True), tolist(), or torch.from_dlpack()")
        if self.device != "cpu":
            raise TypeError(f"the tensor is on {self.device}: take to('cpu').numpy()")

        if not math.prod(self.shape):
            return numpy.empty(self.shape, dtype)
        return numpy.asarray(_Memory(self, numpy.dtype(dtype)))

    def __array__(self, dtype=None, copy=None):
        out = self.numpy()
        if copy is False and dtype not in (None, out.dtype):
            raise ValueError(f"{out.dtype} to {dtype} takes a copy")
        return out.astype(dtype or out.dtype, copy=bool(copy))

    def __dlpack_device__(self):
        kind, _, index = self.device.partition(":")
        return _DLPACK_DEVICES[kind], int(index or 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A DLPack capsule over the same memory, with a version for those who take version 1 or later."""
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("a tensor gives its own memory, where it is, without a copy")
        form = _VERSIONED if max_version is not None and max_version[0] >= 1 else _PLAIN
        if form is _PLAIN and self.read_only:
            raise BufferError("the tensor is read-only, which DLPack without versions cannot say: take to('cpu') or another copy")
        if stream not in (None, -1, 1) and math.prod(self.shape):
            # The consumer's stream must come after the default one, for which a copy to the host waits.
            first = self.view((1,))
            lib.tensor_copy_to_host(first, ctypes.create_string_buffer(first.nbytes), first.nbytes)
        _sweep()
        capsule = _new_capsule(self._value(ctypes.c_void_p, "to_dlpack" + form.suffix), form.name, None)
        _offered.append(capsule)
        return capsule

    def close(self):
        super().close()
        _sweep()

    def tolist(self):
        """The values as nested lists; a number if there are no dimensions."""
        codes = {"uint8": "B", "int8": "b", "int16": "h", "int32": "i", "int64": "q", "bool": "B", "float64": "d"}
        count, code = math.prod(self.shape), codes.get(self.dtype, "f")
        flat = array.array(code, bytes(count * array.array(code).itemsize))
        address = flat.buffer_info()[0]
        if code == "f":
            lib.tensor_copy_as_float(self, address, count)
        else:
            lib.tensor_copy_to_host(self, address, self.nbytes)
        out = flat.tolist()
        for axis in range(len(self.shape) - 1, 0, -1):
            size = self.shape[axis]
            out = [out[i * size:(i + 1) * size] for i in range(math.prod(self.shape[:axis]))]
        return out if self.shape else out[0]

    def __repr__(self):
        if not self._as_parameter_:
            return "nvfp4.Tensor()"
        return f"nvfp4.Tensor(shape={self.shape}, dtype={self.dtype}, device={self.device})"


def tensor(source):
    """A Tensor as it is, or one over the memory of anything else."""
    return source if isinstance(source, Tensor) else Tensor(source)


class Quantized(typing.NamedTuple):
    """A tensor in NVFP4. Its parts may come from elsewhere."""

    codes: Tensor
    scales: Tensor
    global_scale: float = 1.0
    scale_layout: str = "linear"

    def _parts(self):
        return tensor(self.codes), tensor(self.scales), self.global_scale


class Nf4(typing.NamedTuple):
    """A tensor in NF4, as bitsandbytes lays it out. `quant_map` is None for the usual values."""

    codes: Tensor
    absmax: Tensor
    shape: tuple
    block: int = 64
    quant_map: typing.Optional[Tensor] = None

    def _parts(self):
        return tensor(self.codes), tensor(self.absmax), None if self.quant_map is None else tensor(self.quant_map)


def _made(function, *arguments):
    return Tensor._own(native.value_out(ctypes.c_void_p, function, *arguments))


def quantize(source, cancel=None, progress=None, **options):
    """
    To NVFP4 along the last dimension. Options: levels (two, single, legacy), recipe (amax, four_over_six, sweep), rounding
    (nearest_even, half_away, stochastic), nonfinite (error, saturate), scale_layout (linear, swizzled), seed. `cancel`, a Cancel, ends
    it; `progress` is told how many values are done, and of how many.
    """
    how = native.options(native.QuantizeOptions, options)
    codes, scales, factor = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
    with native.call_options(cancel, None, progress) as call:
        how.call = call
        lib.tensor_quantize(tensor(source), ctypes.byref(how), *map(ctypes.byref, (codes, scales, factor)))
    return Quantized(Tensor._own(codes.value), Tensor._own(scales.value), factor.value, chosen("scales", how.scale_layout))


def quantize_nf4(source, block=64):
    """To NF4, flattened."""
    source = tensor(source)
    codes, absmax = ctypes.c_void_p(), ctypes.c_void_p()
    lib.tensor_quantize_nf4(source, block, ctypes.byref(codes), ctypes.byref(absmax))
    return Nf4(Tensor._own(codes.value), Tensor._own(absmax.value), source.shape, block)


def dequantize(source, dtype="float32"):
    """A Quantized or an Nf4 back to a floating type."""
    if isinstance(source, Nf4):
        sizes = native.numbers(ctypes.c_int64, source.shape)
        return _made(lib.tensor_dequantize_nf4, *source._parts(), source.block, sizes, len(sizes), choice("dtype", dtype))
    return _made(lib.tensor_dequantize, *source._parts(), choice("scales", source.scale_layout), choice("dtype", dtype))


def quantize_packed(weight):
    """Codes and scales of a weight by the rule of the drop-in functions, for training in 4 bits."""
    codes, scales = ctypes.c_void_p(), ctypes.c_void_p()
    lib.quantize_packed(tensor(weight), ctypes.byref(codes), ctypes.byref(scales))
    return Tensor._own(codes.value), Tensor._own(scales.value)


def dequantize_packed(qdata, scale, dtype="float32"):
    """The values of what quantize_packed() gives."""
    return _made(lib.dequantize_packed, tensor(qdata), tensor(scale), choice("dtype", dtype))


def ste_weight(weight, keep=False):
    """
    What NVFP4 leaves of a weight, in its own type, for the forward pass of training; its gradient is that of these values. With
    `keep` the weight, a Tensor, must not change: its values are computed once and kept as long as it lives, or until ste_clear().
    """
    return _made(lib.ste_weight, tensor(weight), int(keep))


def ste_clear():
    """Gives up the values that ste_weight() keeps: call it when weights have changed."""
    lib.ste_clear()


def swizzle(scales):
    """Block scales in the order of tensor cores."""
    return _made(lib.scales_swizzle, tensor(scales))


def unswizzle(scales, rows, k_blocks):
    """Block scales in row-major order again."""
    return _made(lib.scales_unswizzle, tensor(scales), rows, k_blocks)


def scaled_mm(a, b, dtype="float32"):
    """Two Quantized, a [M, K] times b [N, K] transposed (W4A4). Both must have the same layout of scales."""
    if a.scale_layout != b.scale_layout:
        raise InvalidArgument("a and b have different layouts of scales; swizzle() or unswizzle() one")
    return _made(lib.matmul, *a._parts(), *b._parts(), choice("scales", a.scale_layout), choice("dtype", dtype))


class Weight(Handle):
    """
    A weight [N, K] prepared for products: a Quantized, an Nf4, or a dense tensor. Options, not for dense ones: compute_path
    (auto, kernel_only, kernel_or_fallback, dequant_matmul_only), device, backend, dense_dtype, exclude_cpu_kernels.
    """

    _kind = "weight"
    _copies = "use the same Weight from any thread"
    _pickles = "prepare the weight in each process, by Weight(...)"

    def __init__(self, weight, **options):
        make, arguments = lib.weight_create_dense, ()
        if isinstance(weight, (Quantized, Nf4)):
            how = native.options(native.WeightOptions, options)
            if isinstance(weight, Quantized):
                how.scale_layout = choice("scales", weight.scale_layout)
                make, arguments = lib.weight_create_nvfp4, (*weight._parts(), ctypes.byref(how))
            else:
                n, k = weight.shape
                make, arguments = lib.weight_create_nf4, (*weight._parts(), weight.block, n, k, ctypes.byref(how))
        elif options:
            raise TypeError(f"a dense weight has no options, such as {', '.join(options)}")
        else:
            arguments = (tensor(weight),)
        self._as_parameter_ = native.value_out(ctypes.c_void_p, make, *arguments)

    @property
    def report(self):
        """What multiplies with it and why, its shape and its bytes, as a dictionary."""
        return json.loads(self._text("report"))

    def linear(self, source, activations="exact", dtype="float32"):
        """[.., K] times the weight, transposed: [.., N]. With "int8" for activations they are rounded (W4A8)."""
        return _made(lib.linear, self, tensor(source), choice("activations", activations), choice("dtype", dtype))


def linear(source, weight, activations="exact", dtype="float32"):
    """Weight.linear() of a Weight, or of one that is prepared for this call only."""
    return (weight if isinstance(weight, Weight) else Weight(weight)).linear(source, activations, dtype)


def select_backend(format, **options):
    """Which backend a weight of a format (nvfp4, nf4) would have with the options of a Weight, as a dictionary."""
    how = native.options(native.WeightOptions, options)
    return json.loads(native.text_out(lib.backend_select, choice("format", format), ctypes.byref(how)))


def schema(tensors, prefix="", validate=False):
    """
    Which 4-bit weights are among `tensors`, a dictionary of names to (dtype, shape), under a prefix, as a dictionary. With
    `validate` what is wrong with them is raised, all at once.
    """
    names = [name.encode() for name in tensors]
    sizes = [native.numbers(ctypes.c_int64, shape) for _, shape in tensors.values()]
    plain = (native.NamedTensor * len(names))(*(
        (ctypes.cast(name, ctypes.c_void_p), len(name), choice("dtype", dtype), len(size), ctypes.addressof(size))
        for name, size, (dtype, _) in zip(names, sizes, tensors.values())))
    arguments = (plain, len(plain), ctypes.sizeof(native.NamedTensor), *native.text_in(prefix))
    if validate:
        lib.schema_validate(*arguments)
    return json.loads(native.text_out(lib.schema_report, *arguments))
