"""What a call was given: arrays and numbers in, a signature to compile for out.

In: Python objects (NumPy arrays, device arrays, arrays of other libraries, numbers). Out: a list of `ReadArgument`s, each with its
array or number and the `ArgSpec` it asks code for. Anything else is a `UserError` that names the argument.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tilewright.base.dtypes import DType, bool_, complex_from_numpy, f64, from_numpy, i64
from tilewright.base.errors import UserError
from tilewright.base.source import NOWHERE, Span
from tilewright.compile.driver import Signature
from tilewright.execute.calls.complex_arrays import complex_spec, is_complex, number_parts, parts_of
from tilewright.execute.speed_warnings import copied
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.packed_array import PackedArray
from tilewright.tree.typed import ArgSpec, ArrayArg, NoneArg, ScalarArg

Number = int | float | bool
SIZE_CLASSES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 1 << 20)
"""Extents are rounded to these before they steer a schedule, so that a new size seldom means new code."""

DIVISORS = (64, 16, 8, 4)
"""What code is specialised for: whole blocks of a matrix, aligned vectors and copies."""


def divisor_of(extent: int, spec: ArgSpec) -> int:
    """What is known to divide an extent, or the stride of a row: of elements of two bytes also whether it is even, so that rows are whole words."""
    word = isinstance(spec, ArrayArg) and spec.dtype.itemsize == 2 and not spec.dtype.is_packed
    return next((d for d in DIVISORS if extent % d == 0), 2 if word and extent % 2 == 0 else 1)


@dataclass(frozen=True)
class ReadArgument:
    name: str
    value: np.ndarray | DeviceArray | Number | None
    """None where the call leaves an optional parameter out. Of packed blocks, their bytes, and of complex numbers, their parts: one axis more than `spec` has."""
    spec: ArgSpec

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape if isinstance(self.value, np.ndarray | DeviceArray) else ()


def read_optional(name: str, value: object, span: Span = NOWHERE, gpu: bool = False, with_complex: bool = False) -> ReadArgument:
    """As `read_argument`, for a parameter that may be left out."""
    return ReadArgument(name, None, NoneArg()) if value is None else read_argument(name, value, span, gpu, with_complex)


def element_strides(array: np.ndarray | DeviceArray) -> tuple[int, ...]:
    if isinstance(array, DeviceArray):
        return array.strides
    return tuple(s // array.itemsize for s in array.strides)


def read_argument(name: str, value: object, span: Span = NOWHERE, gpu: bool = False, with_complex: bool = False) -> ReadArgument:
    """Classify one argument. For a GPU, alignment counts. `with_complex`: complex numbers are taken, as pairs; only calls of `@kernel` do."""
    if isinstance(value, bool | np.bool_):
        return ReadArgument(name, bool(value), ScalarArg(bool_))
    if isinstance(value, np.generic | complex) and is_complex(value):
        if not with_complex:
            raise _no_complex(name, type(value).__name__, span)
        parts, kind, weak = number_parts(name, value, span)
        return ReadArgument(name, parts, ScalarArg(kind, weak))
    if isinstance(value, np.generic):
        # Before Python's numbers: numpy.float64 is one of them, too, and has a type of its own all the same.
        dtype = from_numpy(value.dtype)
        if dtype is None:
            raise _bad_dtype(name, value.dtype, span)
        return ReadArgument(name, value.item(), ScalarArg(dtype))
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise UserError.at("TW006", f"argument '{name}' is {value}, which no 64-bit integer holds", span)
        return ReadArgument(name, value, ScalarArg(i64, weak=True))
    if isinstance(value, float):
        return ReadArgument(name, value, ScalarArg(f64, weak=True))
    if isinstance(value, DeviceArray) and value.dtype.is_complex:
        if not with_complex:
            raise _no_complex(name, value.dtype.name, span)
        parts_there = value.parts()
        return ReadArgument(name, parts_there, complex_spec(_array_spec(parts_there, value.dtype, gpu), value.dtype))
    if isinstance(value, DeviceArray):
        return ReadArgument(name, value, _array_spec(value, value.dtype, gpu))
    if isinstance(value, PackedArray):
        return _read_packed(name, value, span, gpu)
    array = value if type(value) is np.ndarray else _as_numpy(name, value, span)
    dtype = from_numpy(array.dtype) or complex_from_numpy(array.dtype)
    if dtype is None:
        raise _bad_dtype(name, array.dtype, span)
    if not array.flags.aligned or any(s % array.itemsize for s in array.strides):
        # A field of a record, say: no whole number of elements apart.
        reason = "its elements do not begin where their dtype wants" if not array.flags.aligned else f"its strides, {array.strides} bytes, are no whole elements"
        copied(name, array, span, reason)
        array = np.array(array, order="C")
    if dtype.is_complex:
        if not with_complex:
            raise _no_complex(name, dtype.name, span)
        floats = parts_of(array)
        return ReadArgument(name, floats, complex_spec(_array_spec(floats, dtype, gpu), dtype))
    return ReadArgument(name, array, _array_spec(array, dtype, gpu))


def _read_packed(name: str, value: PackedArray, span: Span, gpu: bool) -> ReadArgument:
    """Packed blocks: an argument for the bytes, of the packed dtype. Rows may be apart, blocks follow each other."""
    found = read_argument(name, value.blocks, span, gpu)
    array, spec = found.value, found.spec
    assert isinstance(array, np.ndarray | DeviceArray) and isinstance(spec, ArrayArg)
    if spec.strides is not None and element_strides(array)[-2:] != (value.dtype.block_bytes, 1):
        if isinstance(array, DeviceArray):
            raise UserError.at("TW009", f"the blocks of argument '{name}' do not follow each other", span, "pass a contiguous copy")
        copied(name, array, span, "its blocks do not follow each other")
        return _read_packed(name, PackedArray(np.ascontiguousarray(array), value.dtype), span, gpu)
    strides = None if spec.strides is None else (*spec.strides[:-2], 1)
    return replace(found, spec=ArrayArg(value.dtype, value.ndim, strides, spec.align))


def _as_numpy(name: str, value: object, span: Span) -> np.ndarray:
    """A host array of another library, without a copy."""
    if isinstance(value, np.ndarray):
        return _plain(name, value, span)
    interface = getattr(value, "__array_interface__", None)
    if isinstance(interface, dict):
        _check_interface(name, interface, span)
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        from tilewright.runtime.exchange.imports import from_dlpack

        try:
            found = from_dlpack(value)
        except UserError as error:
            raise UserError.at("TW009", f"argument '{name}' cannot be shared: {error.diagnostics[0].message}", span, error.diagnostics[0].help) from error
        if isinstance(found, np.ndarray):
            return found
        raise UserError.at("TW009", f"argument '{name}' is on {found.device.id}", span, "copy it to the host, or call the kernel there")
    kind = type(value).__name__
    is_data = isinstance(value, list | tuple | memoryview | bytes | bytearray) or hasattr(value, "__array__")
    help_ = "pass a NumPy array, for instance numpy.asarray(…)" if is_data else "pass an array or a number"
    if hasattr(value, "__float__"):
        help_ = "convert it with float(…) or int(…)"
    raise UserError.at("TW009", f"argument '{name}' is a {kind}, not an array or a number", span, help_)


def _plain(name: str, value: np.ndarray, span: Span) -> np.ndarray:
    """An array of a subclass without it, where that means the same. A mask, a unit or another product would be lost."""
    if isinstance(value, np.ma.MaskedArray):
        raise UserError.at(
            "TW009", f"argument '{name}' is a masked array, whose mask kernels do not see", span,
            "pass x.filled(value), or x.data and x.mask as two arguments",
        )  # fmt: skip
    if isinstance(value, np.matrix) or type(value).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise UserError.at(
            "TW009", f"argument '{name}' is a {type(value).__name__}, whose arithmetic is not that of arrays", span, "pass numpy.asarray(…) of it"
        )
    return value.view(np.ndarray)


def _check_interface(name: str, interface: dict[str, object], span: Span) -> None:
    """What `__array_interface__` says that NumPy would believe or ignore."""
    if interface.get("mask") is not None:
        raise UserError.at("TW009", f"argument '{name}' has a mask, which kernels do not see", span, "pass the values and the mask as two arguments")
    shape, data = interface.get("shape"), interface.get("data")
    if not isinstance(shape, tuple) or not all(isinstance(extent, int) and extent >= 0 for extent in shape):
        raise UserError.at("TW009", f"argument '{name}' says its shape is {shape!r}", span)
    if isinstance(data, tuple) and not data[0] and 0 not in shape:
        raise UserError.at("TW009", f"argument '{name}' has shape {list(shape)} and no memory", span, "its storage was freed, or it is a stand-in")


def _bad_dtype(name: str, dtype: np.dtype, span: Span) -> UserError:
    swapped = not dtype.isnative
    reason = "has the other byte order" if swapped else "is not supported"
    error = UserError.at(
        "TW009", f"argument '{name}' has dtype {dtype}, which {reason}", span,
        "convert it with .astype(...)" if swapped else "convert it to a bool, integer, float or complex dtype first",
    )  # fmt: skip
    assert isinstance(error, UserError)
    return error


def _no_complex(name: str, kind: str, span: Span) -> UserError:
    error = UserError.at(
        "TW009", f"argument '{name}' is {kind}, and complex numbers are taken only by kernels (@tw.kernel) that run on one device", span,
        "pass its real and imaginary parts, or x.view(numpy.float32)",
    )  # fmt: skip
    assert isinstance(error, UserError)
    return error


def _array_spec(array: np.ndarray | DeviceArray, dtype: DType, gpu: bool) -> ArrayArg:
    contiguous = array.is_contiguous if isinstance(array, DeviceArray) else array.flags.c_contiguous
    align = 0
    if gpu:
        # Host arrays are copied to fresh, aligned device memory first.
        align = 16 if isinstance(array, np.ndarray) or array.is_aligned(16) else 0
    if contiguous or (gpu and isinstance(array, np.ndarray)):
        return ArrayArg(dtype, array.ndim, None, align)
    last = array.ndim - 1
    strides = tuple(
        s if s == 0 or (s == 1 and axis == last) or (gpu and 0 < s <= NEAR and array.shape[axis] > 1) else None for axis, s in enumerate(element_strides(array))
    )
    return ArrayArg(dtype, array.ndim, strides, align)


NEAR = 8
"""Elements of a view up to this far apart: a GPU's code knows how far, and its lanes walk along them."""


def signature(arguments: list[ReadArgument], gpu: bool) -> Signature:
    """What to compile for. On a GPU extents count in two ways: what divides them, and roughly how large they are."""
    args = tuple(a.spec for a in arguments)
    if not gpu:
        return Signature(args)
    divisors: list[tuple[str, int, int]] = []
    hints: list[tuple[str, int, int]] = []
    extents: list[tuple[str, int, int]] = []
    spacing: list[tuple[str, int, int]] = []
    for argument in arguments:
        spacing += _spacing(argument)
        for axis, extent in enumerate(argument.shape):
            divisor = divisor_of(extent, argument.spec)
            if divisor > 1:
                divisors.append((argument.name, axis, divisor))
            hints.append((argument.name, axis, size_class(extent)))
            extents.append((argument.name, axis, extent))
    return Signature(args, tuple(divisors), tuple(spacing), tuple(hints), extents=tuple(extents))


def _spacing(argument: ReadArgument) -> list[tuple[str, int, int]]:
    """What divides the strides of a view: rows that are whole 16 bytes apart can be copied as they lie."""
    spec = argument.spec
    if not isinstance(spec, ArrayArg) or spec.strides is None:
        return []
    assert isinstance(argument.value, np.ndarray | DeviceArray)
    rows = len(spec.strides) - spec.dtype.is_packed
    apart = zip(spec.strides[:rows], element_strides(argument.value)[:rows], strict=True)
    found = [(axis, divisor_of(s, spec)) for axis, (known, s) in enumerate(apart) if known is None]
    return [(argument.name, axis, divisor) for axis, divisor in found if divisor > 1]


def size_class(extent: int) -> int:
    """The extent, coarsened: the smallest class that holds it, or a large number."""
    for limit in SIZE_CLASSES:
        if extent <= limit:
            return limit
    return 1 << 26


def numbers(arguments: list[ReadArgument]) -> dict[str, Number]:
    return {a.name: a.value for a in arguments if a.value is not None and not isinstance(a.value, np.ndarray | DeviceArray)}
