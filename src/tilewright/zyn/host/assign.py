"""Assignments to parts of values in the ZynML host language: `x[0] = 1.0`, `x[1:3, :] = row`, `parts[2] = y`, `settings.scale =
0.5`.

In: a value, the places inside it, and what goes there. Out: the value as it is afterwards. Only the variable that is assigned
to changes: other names for the same array, record or list, those of the caller among them, keep what they had. An array that
nobody else refers to is changed where it is; else a copy is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.base.dtypes import DType, from_numpy
from tilewright.base.errors import UserError
from tilewright.base.source import Span
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host import values as host_values

Place = int | str | slice


def _references(holder: Mapping[str, object], name: str) -> int:
    """How many references there are to what a dictionary holds, those of looking among them."""
    return sys.getrefcount(holder[name])


_OWN = _references({"only": np.empty(0)}, "only")


def with_field(record: object, name: str, value: object, span: Span) -> dict[str, object]:
    """The record with one field that is new, or has another value."""
    if not isinstance(record, Mapping):
        raise UserError.at(
            "TW009", f"'.{name}' of {_kind(record)} cannot be assigned", span, "only records have fields that can"
        )
    return {**record, name: value}


def with_part(holder: dict[str, object], name: str, places: Sequence[Place], value: object, span: Span) -> object:
    """`holder[name]` with another part. An array that only `holder` has is changed in place."""
    if _is_sole(holder, name):
        return _stored(holder[name], places, value, span)
    return changed(holder[name], places, value, span)


def changed(value: object, places: Sequence[Place], part: object, span: Span) -> object:
    """A copy of a value with another part."""
    value = host_functions.settled(value)
    if isinstance(value, Mapping):
        (key,) = places if len(places) == 1 else (None,)
        if not isinstance(key, str):
            raise UserError.at("TW003", "a field of a record has a name", span, 'write r.name or r["name"]')
        return with_field(value, key, part, span)
    if isinstance(value, list):
        return _changed_list(value, places, part, span)
    if isinstance(value, np.ndarray):
        return _stored(value.copy(), places, part, span)
    if hasattr(value, "shape") and hasattr(value, "copy") and not isinstance(value, np.generic):
        return _stored(value.copy(), places, part, span)
    raise UserError.at("TW009", f"a part of {_kind(value)} cannot be assigned", span, "parts of arrays, lists and records can")


def _is_sole(holder: Mapping[str, object], name: str) -> bool:
    """Whether a dictionary has the only reference to an array that has memory of its own: a view of it would be another."""
    array = holder[name]
    if not isinstance(array, np.ndarray) or array.base is not None or not (array.flags.owndata and array.flags.writeable):
        return False
    del array
    return _references(holder, name) <= _OWN


def _changed_list(value: list[object], places: Sequence[Place], part: object, span: Span) -> list[object]:
    place = places[0]
    if len(places) != 1 or not isinstance(place, int):
        raise UserError.at("TW003", "one element of a list is assigned at a time, by its number", span)
    if not -len(value) <= place < len(value):
        raise UserError.at("TW013", f"index {place} of a list of {len(value)} element(s)", span)
    made = list(value)
    made[place] = part
    return made


def _stored(array: Any, places: Sequence[Place], value: object, span: Span) -> object:
    """The array itself, after a part of it got other values."""
    shape = tuple(array.shape)
    if any(isinstance(p, str) for p in places) or len(places) > len(shape):
        raise UserError.at("TW003", f"{len(places)} index(es) into an array of rank {len(shape)}", span)
    for axis, place in enumerate(places):
        if isinstance(place, int) and not -shape[axis] <= place < shape[axis]:
            raise UserError.at("TW013", f"index {place} on axis {axis}, which has {shape[axis]} element(s)", span)
    value = host_functions.settled(value)
    dtype = host_functions.dtype_of(array.dtype)
    for item in value if isinstance(value, list | tuple) else (value,):
        _check_type(dtype, item, span)
    if isinstance(value, list | tuple):
        value = np.array(value, dtype.numpy)
    wanted = _part_shape(shape, places)
    given = tuple(getattr(value, "shape", ()))
    if given and (len(given) > len(wanted) or any(g not in (1, w) for g, w in zip(reversed(given), reversed(wanted)))):
        raise UserError.at(
            "TW004", f"a part of shape {list(wanted)} is assigned an array of shape {list(given)}", span, "the sizes must agree"
        )
    array[tuple(places)] = np.asarray(value) if isinstance(array, np.ndarray) else _on_device(value, wanted)
    return array


def _on_device(value: object, wanted: tuple[int, ...]) -> object:
    if isinstance(value, np.ndarray):
        return value[()] if value.ndim == 0 else np.broadcast_to(value, wanted)
    return value


def _part_shape(shape: tuple[int, ...], places: Sequence[Place]) -> tuple[int, ...]:
    found = [len(range(*place.indices(shape[axis]))) for axis, place in enumerate(places) if isinstance(place, slice)]
    return (*found, *shape[len(places) :])


def _check_type(dtype: DType, value: object, span: Span) -> None:
    """Numbers of the text take the array's element type; other values must fit it without loss."""
    if isinstance(value, np.generic):
        fits: bool | None = None
    elif isinstance(value, bool):
        fits = dtype.is_bool
    elif isinstance(value, int):
        fits = dtype.is_float or (dtype.is_int and np.iinfo(dtype.numpy).min <= value <= np.iinfo(dtype.numpy).max)
    elif isinstance(value, float):
        fits = dtype.is_float
    else:
        fits = None
    if fits is None:
        found = from_numpy(value.dtype) if isinstance(value, np.ndarray | np.generic) else getattr(value, "dtype", None)
        if not isinstance(found, DType):
            raise UserError.at("TW009", f"{_kind(value)} is assigned to a part of an array", span, "assign numbers or an array")
        if found == dtype or np.can_cast(found.numpy, dtype.numpy, "safe"):
            return
        lost = f"a value of type {found} is assigned to an array of {dtype}, which would lose data"
        raise UserError.at("TW006", lost, span, f"convert it with cast(…, {dtype})")
    if not fits:
        raise UserError.at(
            "TW006", f"{host_functions.shown(value)} is assigned to an array of {dtype}, which cannot hold it", span
        )


def _kind(value: object) -> str:
    if host_values.as_scalar(value) is not None:
        return "a number"
    return "an array" if hasattr(value, "shape") else f"a {type(value).__name__}"
