"""Reductions and scans along an axis of an array: kinds, identities, ties and NaN as the op table has them.

Floats narrower than f32 are combined in f32 and rounded once at the end. Sums of floats are pairwise. `argmin` and `argmax`
of nothing give the identity of min or max and the largest index, which no element loses against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.base.dtypes import DType, f32
from tilewright.ir.numerics import convert

Array = np.ndarray

_UFUNCS: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "argmin": np.minimum, "argmax": np.maximum,
}  # fmt: skip


def identities(kind: str, dtypes: Sequence[DType]) -> tuple[Array, ...]:
    """What an empty reduction gives, one array of shape [1] per result."""
    dtype = dtypes[0]
    number: int | float | bool
    if kind == "add":
        number = 0
    elif kind == "mul":
        number = 1
    elif kind in ("min", "argmin"):
        number = dtype.max_value
    elif kind in ("max", "argmax"):
        number = dtype.min_value
    elif kind == "and":
        number = -1 if dtype.kind == "i" else dtype.max_value
    else:
        number = 0
    first = np.full(1, number, dtype.numpy)
    return (first,) if len(dtypes) == 1 else (first, np.full(1, dtypes[1].max_value, dtypes[1].numpy))


def combine(kind: str, arrays: Sequence[Array], dtypes: Sequence[DType], axis: int) -> tuple[Array, ...]:
    """Combine along an axis, which stays with extent 1 and is not empty."""
    dtype = dtypes[0]
    values = arrays[0].astype(np.float32) if dtype.is_small_float else arrays[0]
    with np.errstate(all="ignore"):
        if kind == "add" and dtype.is_float:
            # NumPy sums pairwise only along the last, contiguous axis.
            moved = np.ascontiguousarray(np.moveaxis(values, axis, -1))
            best = np.moveaxis(np.add.reduce(moved, axis=-1, keepdims=True), -1, axis)
        else:
            best = _UFUNCS[kind].reduce(values, axis=axis, keepdims=True, dtype=values.dtype)
            if dtype.is_float and kind in ("min", "max"):
                found = np.logical_or.reduce(_zeros(kind, values), axis=axis, keepdims=True)
                best = _signed(kind, best, found)
    result = convert(best, f32, dtype) if dtype.is_small_float else best
    if len(arrays) == 1:
        return (result,)
    hit = values == best
    if dtype.is_float:
        hit |= np.isnan(values) & np.isnan(best)
    index = np.where(hit, arrays[1], np.asarray(dtypes[1].max_value, dtypes[1].numpy))
    return result, np.minimum.reduce(index, axis=axis, keepdims=True)


def _zeros(kind: str, values: Array) -> Array:
    """Which elements are the zero that wins: -0 is below +0. What NumPy takes of the two depends on the processor."""
    return np.asarray((values == 0) & (np.signbit(values) == (kind == "min")))


def _signed(kind: str, best: Array, found: Array) -> Array:
    """The results, with the sign of zeros that such a zero among the elements decides."""
    zero = np.where(found == (kind == "min"), best.dtype.type(-0.0), best.dtype.type(0.0))
    return np.where(best == 0, zero, best).astype(best.dtype)


def scan(kind: str, values: Array, dtype: DType, axis: int) -> Array:
    """Inclusive prefix combination along an axis."""
    wide = values.astype(np.float32) if dtype.is_small_float else values
    with np.errstate(all="ignore"):
        result = _UFUNCS[kind].accumulate(wide, axis=axis, dtype=wide.dtype)
        if dtype.is_float and kind in ("min", "max"):
            result = _signed(kind, result, np.logical_or.accumulate(_zeros(kind, wide), axis=axis))
    return convert(result, f32, dtype) if dtype.is_small_float else result
