"""Reductions of marked loops on the host: in which dtypes they are carried, what they begin with, and what becomes of their parts.

In: the reductions of a loop (`frontend.simt.reductions`), the values their names have before it, and the types the loop's body gives
them. The kernel of the loop leaves one part for each thread; `gpu_reduce`'s program combines the parts after the old value. Out: what
the names hold after the loop. Numbers of Python stay numbers of Python, those of NumPy stay NumPy's.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.api.surroundings import Surroundings
from tilewright.base.dtypes import DType, accumulator, bool_, f64, from_numpy, i64, u64
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.execute.places import Array, DevicePlace, Number
from tilewright.execute.primitives.elements import reduced
from tilewright.execute.primitives.functions import monoid_of, number_of
from tilewright.frontend.simt.reductions import EXTREMES, LoopReduction
from tilewright.frontend.simt.regions import FIRST, RegionLoop
from tilewright.frontend.simt.words import word_of
from tilewright.tree.check.infer import TypePair


@record
class LoopAccumulator:
    """How a reduction is carried."""

    name: str
    operation: str
    dtype: DType
    """Of every part."""
    result: DType
    """Of the value, where that is a NumPy number."""

    @property
    def first(self) -> np.generic:
        """What every thread begins with: it changes nothing."""
        value: Number
        if self.operation in ("max", "min"):
            low = self.operation == "max"
            value = (-math.inf if low else math.inf) if self.dtype.is_float else self.dtype.min_value if low else self.dtype.max_value
        elif self.operation in ("&", "and"):
            value = True if self.dtype.is_bool else self.dtype.max_value if self.dtype is u64 else -1
        else:
            value = int(self.operation == "*")
        made: np.generic = np.dtype(self.dtype.numpy).type(value)
        return made

    def check(self, old: Number | np.generic) -> None:
        """Refuse an old value that the parts' dtype does not hold."""
        number_of(old, self.dtype, f"'{self.name}' before the loop")

    def combined(self, place: DevicePlace, parts: Array, old: Number | np.generic) -> object:
        """The value after the loop."""
        monoid = monoid_of(self.operation, self.dtype, "the loop")
        whole: Any = place.number(reduced(place, parts, monoid, self.dtype, number_of(old, self.dtype, self.name)))
        value = np.dtype(self.dtype.numpy).type(whole)
        return value.astype(self.result.numpy) if isinstance(old, np.generic) else value.item()


def old_values(loop: RegionLoop, around: Surroundings) -> dict[str, Number | np.generic]:
    """The values that the names of reductions have before the loop. Raises `UserError` where one has none, or is no number."""
    found: dict[str, Number | np.generic] = {}
    for reduction in loop.reductions:
        name, span = reduction.name, loop.place.span(reduction.place)
        known, value = around.find(name)
        if not known:
            raise UserError.at("TW002", f"'{name}' has no value before the loop", span, f"set it before the loop: {name} = 0")
        number = isinstance(value, np.generic) and from_numpy(value.dtype) is not None
        if not number and (isinstance(value, np.generic) or not isinstance(value, bool | int | float)):
            raise UserError.at(
                "TW009", f"'{name}' is a {type(value).__name__} before the loop, and iterations combine numbers into it", span,
                "begin with a number; for arrays, combine their elements in an inner loop or use tw.parallel_gpu with atomics",
            )  # fmt: skip
        found[name] = value  # type: ignore[assignment]
    return found


def stand_ins(old: Mapping[str, Number | np.generic]) -> dict[str, object]:
    """Literals for the Python numbers that reductions begin with, under the names that the outlined function has for them: like a
    literal they have no dtype of their own."""
    return {FIRST + name: type(value)(1) for name, value in old.items() if not isinstance(value, np.generic)}


def is_negative(value: Number | np.generic) -> bool:
    return bool(value < 0)  # type: ignore[operator]


def choose_accumulators(loop: RegionLoop, types: Mapping[str, TypePair], old: Mapping[str, Number | np.generic]) -> tuple[LoopAccumulator, ...]:
    """How the loop's reductions are carried, when its body gives their names these types."""
    return tuple(_accumulator(loop, r, types[r.name], old[r.name]) for r in loop.reductions)


def _accumulator(loop: RegionLoop, reduction: LoopReduction, pair: TypePair, old: Number | np.generic) -> LoopAccumulator:
    name, operation, (dtype, weak) = reduction.name, reduction.operation, pair
    span = loop.place.span(reduction.place)
    if weak == "float":
        dtype = f64  # A Python float that met no other.
    carried = accumulator(dtype)
    if operation in ("and", "or"):
        carried = bool_  # The front end refuses numbers here.
    elif operation in ("&", "|", "^"):
        if dtype.is_float:
            raise UserError.at("TW006", f"'{name}' is combined by '{operation}' and is {dtype}, not an integer", span)
        carried = bool_ if dtype.is_bool else carried
    elif dtype.is_bool and operation in ("max", "min"):
        carried = bool_
    if carried is u64 and dtype is not u64 and is_negative(old):
        carried = i64
    wide = operation in ("+", "*") and not dtype.is_float
    return LoopAccumulator(name, operation, carried, carried if wide else dtype)


def check_functions(loop: RegionLoop, names: Mapping[str, object]) -> None:
    """Refuse a `max` or `min` that means something else here."""
    for reduction in loop.reductions:
        for function in reduction.functions:
            meant = _meaning(function, names)
            if EXTREMES.get(word_of(meant) or "") != reduction.operation:
                raise UserError.at(
                    "TW012", f"'{reduction.name}' is carried from one iteration to the next: '{ast.unparse(function)}' is not Python's", loop.place.span(function),
                    "use max, min, or an operator such as +=",
                )  # fmt: skip


def _meaning(function: ast.expr, names: Mapping[str, object]) -> object:
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return getattr(names.get(function.value.id), function.attr, None)
    assert isinstance(function, ast.Name)
    return names.get(function.id, getattr(builtins, function.id, None))


def combine(
    accumulators: Sequence[LoopAccumulator], place: DevicePlace, parts: Sequence[Array], old: Mapping[str, Number | np.generic]
) -> dict[str, object]:
    """What the names hold after the loop."""
    return {a.name: a.combined(place, array, old[a.name]) for a, array in zip(accumulators, parts, strict=True)}


__all__ = ["LoopAccumulator", "check_functions", "choose_accumulators", "combine", "is_negative", "old_values", "stand_ins"]
