"""Atomic read-modify-write on memory: lanes go one after another, in the order of their numbers.

In: the memory, one place and one operand per access. Out: what each access found there. Accesses to different places are done
together, accesses to one place in rounds; integer sums, the common case of many lanes on one counter, in one go.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.base.dtypes import DType, compute_dtype
from tilewright.ir.emulator.memory.memory import Memory
from tilewright.ir.nodes import NO_ATTRS
from tilewright.ir.numerics import convert, evaluate

Array = np.ndarray


def update(kind: str, memory: Memory, places: Array, operands: Sequence[Array]) -> Array:
    """Apply the accesses, all arrays of one axis; gives the old values."""
    order = np.argsort(places, kind="stable")
    sorted_places = places[order]
    starts = np.ones(len(places), np.bool_)
    starts[1:] = sorted_places[1:] != sorted_places[:-1]
    first = np.maximum.accumulate(np.where(starts, np.arange(len(places)), 0))
    old = np.empty(len(places), memory.flat.dtype)
    if kind in ("add", "sub") and memory.dtype.is_int and len(places):
        with np.errstate(all="ignore"):
            steps = operands[0][order] if kind == "add" else np.negative(operands[0][order])
            running = np.cumsum(steps, dtype=steps.dtype)
            before = running - steps
            found = memory.read(sorted_places) + (before - before[first])
            last = np.append(starts[1:], True)
            memory.write(sorted_places[last], (found + steps)[last])
        old[order] = found
        return old
    turn = np.arange(len(places)) - first
    for number in range(int(turn.max(initial=-1)) + 1):
        chosen = order[turn == number] if number or not starts.all() else order
        found = memory.read(places[chosen])
        memory.write(places[chosen], _next(kind, found, [o[chosen] for o in operands], memory.dtype))
        old[chosen] = found
    return old


def accumulate(kind: str, memory: Memory, places: Array, values: Array) -> None:
    """Combine values into their places, in order. Floats narrower than f32 are added up in f32 and rounded once."""
    wide = compute_dtype(memory.dtype)
    order = np.argsort(places, kind="stable")
    unique, starts = np.unique(places[order], return_index=True)
    if not len(unique):
        return
    terms = values[order]
    result = convert(memory.read(unique), memory.dtype, wide)
    lengths = np.diff(np.append(starts, len(terms)))
    for number in range(int(lengths.max())):
        chosen = lengths > number
        result[chosen] = evaluate(kind, (result[chosen], terms[starts[chosen] + number]), NO_ATTRS, wide)
    memory.write(unique, convert(result, wide, memory.dtype))


def _next(kind: str, old: Array, operands: Sequence[Array], dtype: DType) -> Array:
    value = operands[-1]
    if kind == "exchange":
        return value
    if kind == "cas":
        bits = f"u{dtype.itemsize}"
        return np.where(old.view(bits) == operands[0].view(bits), value, old)
    one = np.ones((), old.dtype)
    if kind == "inc":
        return np.where(old >= value, old.dtype.type(0), old + one)
    if kind == "dec":
        return np.where((old == 0) | (old > value), value, old - one)
    return evaluate(kind, (old, value), NO_ATTRS, dtype)
