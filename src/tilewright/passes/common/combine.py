"""How two partial results of a reduction become one: shared by every pass that touches reductions."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.dtypes import DType
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Value
from tilewright.ir.types import dtype_of

Number = int | float | bool


def identities(kind: str, dtypes: Sequence[DType]) -> tuple[Number, ...]:
    """The values that change nothing: one, or (value, index) for argmin and argmax."""
    first = dtypes[0]
    values: dict[str, Number] = {
        "add": 0, "mul": 1, "min": first.max_value, "max": first.min_value, "and": True if first.is_bool else -1,
        "or": 0, "argmin": first.max_value, "argmax": first.min_value,
    }  # fmt: skip
    value = values[kind]
    if kind == "and" and first.kind == "u":
        value = int(first.max_value)
    return (value, int(dtypes[1].max_value)) if kind.startswith("arg") else (value,)


def combine_later(b: Builder, kind: str, best: Sequence[Value], later: Sequence[Value]) -> tuple[Value, ...]:
    """argmin or argmax step where `later` surely has the larger index: ties need no look at it.

    Values equal to the identity never win, not even against the identity: see `first_place`.
    """
    (value, index), (other, other_index) = best, later
    if not dtype_of(value.type).is_float:
        wins = b.op("gt" if kind == "argmax" else "lt", other, value)
    else:
        # `not (other <= value)` also holds when either is NaN; a NaN that is there already stays.
        beaten = b.op("le" if kind == "argmax" else "ge", other, value)
        wins = b.op("not", b.op("or", beaten, b.op("isnan", value)))
    return b.select(wins, other, value), b.select(wins, other_index, index)


def combine(b: Builder, kind: str, left: Sequence[Value], right: Sequence[Value]) -> tuple[Value, ...]:
    """`left op right`. For argmin and argmax: the better value, on ties the smaller index, NaN before everything."""
    if not kind.startswith("arg"):
        return (b.op(kind, left[0], right[0]),)
    (value, index), (other, other_index) = left, right
    better = b.op("gt" if kind == "argmax" else "lt", other, value)
    tie = b.op("eq", other, value)
    if dtype_of(value.type).is_float:
        value_nan, other_nan = b.op("isnan", value), b.op("isnan", other)
        better = b.op("or", better, b.op("and", other_nan, b.op("not", value_nan)))
        tie = b.op("or", tie, b.op("and", other_nan, value_nan))
    better = b.op("or", better, b.op("and", tie, b.op("lt", other_index, index)))
    return b.select(better, other, value), b.select(better, other_index, index)
