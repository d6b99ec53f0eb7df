"""Complex numbers at the border of a call. In: arrays and numbers of complex dtypes; out: arrays of floats in the same memory, with one more axis of extent 2,
and results the other way round.

Compiled code knows floats only. A complex number among the arguments is an array of its two parts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tilewright.base.dtypes import DType, complex64, complex128, complex_from_numpy
from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.runtime.exchange.libraries import is_foreign, is_tensor
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree import syntax
from tilewright.tree.inline import nodes
from tilewright.tree.typed import ArrayArg

_WORDS = frozenset({"complex", "complex64", "complex128"})


def is_complex(value: object) -> bool:
    """Whether it is an array or a number of a complex dtype."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.kind == "c"
    if isinstance(value, DeviceArray):
        return value.dtype.is_complex
    # A tensor of another library in a device's memory; those in host memory are NumPy arrays by now.
    return isinstance(value, complex) or (is_foreign(value) and str(getattr(value, "dtype", "")).removeprefix("torch.") in _WORDS)


def any_complex(values: Iterable[object]) -> bool:
    return any(any_complex(v) if isinstance(v, list | tuple) else is_complex(v) for v in values)


def makes_complex(item: object) -> bool:
    """Whether a kernel, or one it calls, has words or numbers that are complex: its results may be."""
    for node in nodes(item):
        if isinstance(node, syntax.Number) and isinstance(node.value, complex):
            return True
        if (isinstance(node, syntax.Name) and node.id in _WORDS) or (isinstance(node, syntax.String) and node.value in _WORDS):
            return True
        if isinstance(node, syntax.Callee) and makes_complex(node.function):
            return True
    return False


def number_parts(name: str, value: complex | np.generic, span: Span) -> tuple[np.ndarray, DType, bool]:
    """A complex number as an array of its parts, its dtype, and whether it is a plain one of Python."""
    if isinstance(value, np.generic):
        dtype = complex_from_numpy(value.dtype)
        if dtype is None:
            raise UserError.at("TW009", f"argument '{name}' has dtype {value.dtype}, which is not supported", span, "convert it to complex64 or complex128")
        return np.array([value.real, value.imag], dtype.part.numpy), dtype, False
    return np.array([value.real, value.imag], complex128.part.numpy), complex128, True


def parts_of(array: np.ndarray) -> np.ndarray:
    """A complex array as one of floats in the same memory."""
    part = np.dtype(complex_part(array))
    found = np.lib.stride_tricks.as_strided(array.view(np.ndarray), writeable=array.flags.writeable) if not array.ndim else array
    real = found.real
    assert real.dtype == part
    return np.lib.stride_tricks.as_strided(real, (*array.shape, 2), (*array.strides, part.itemsize), writeable=array.flags.writeable)


def complex_part(array: np.ndarray) -> np.dtype:
    return (complex64 if array.dtype == np.complex64 else complex128).part.numpy


def paired(array: np.ndarray, dtype: DType) -> np.ndarray | np.generic:
    """An array of parts, without gaps, as one of complex numbers; one without axes as a number."""
    found = array.view(dtype.numpy)[..., 0]
    return found if found.ndim else found[()]


def complex_spec(spec: ArrayArg, dtype: DType) -> ArrayArg:
    """What code is asked for an array of parts that are complex numbers."""
    return replace(spec, dtype=dtype, rank=spec.rank - 1, strides=None if spec.strides is None else spec.strides[:-1])


def given_parts(out: object) -> object:
    """`out=` with arrays of parts in place of complex ones."""
    if isinstance(out, list | tuple):
        return tuple(given_parts(part) for part in out)
    if isinstance(out, DeviceArray):
        return out.parts() if out.dtype.is_complex else out
    return parts_of(out) if isinstance(out, np.ndarray) and out.dtype.kind == "c" and complex_from_numpy(out.dtype) is not None else out


def check_given(name: str, out: object, dtypes: Sequence[DType], span: Span) -> None:
    """Refuse an `out=` of which some arrays are complex where results are not, or the other way round."""
    given = list(out) if isinstance(out, list | tuple) else [out]
    for array, dtype in zip(given, dtypes, strict=False):
        if not isinstance(array, np.ndarray | DeviceArray):
            continue
        kind = array.dtype.numpy if isinstance(array, DeviceArray) else array.dtype
        if (kind.kind == "c" or dtype.is_complex) and kind != dtype.numpy:
            raise UserError.at("TW018", f"out= of {name} has dtype {array.dtype}, and the result is {dtype}", span, f"pass an array of {dtype}")


def results(found: object, dtypes: Sequence[DType], span: Span) -> object:
    """The results of a call, of which some are complex."""
    several = found if isinstance(found, tuple) else (found,)
    made: list[object] = []
    for value, dtype in zip(several, dtypes, strict=True):
        if dtype.is_complex and isinstance(value, DeviceArray):
            value = value.paired(dtype)
        elif dtype.is_complex and isinstance(value, np.ndarray):
            value = paired(value, dtype)
        elif dtype.is_complex and is_foreign(value):
            value = sys.modules["torch"].view_as_complex(value) if is_tensor(value) else value.view(dtype.numpy)[..., 0]
        made.append(value)
    return tuple(made) if isinstance(found, tuple) else made[0]
