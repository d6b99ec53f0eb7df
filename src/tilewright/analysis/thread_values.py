"""What the threads of one block hold in a value of a thread-stage kernel, as far as the text says it.

A `ThreadValue` is a number of every thread: a sum of unknowns that all threads share (`base`) and what each thread adds (`parts`). Where
`parts` is not known, `data` may still say in which threads the value comes from different elements of an array nobody writes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.base.dtypes import DType, i32, i64
from tilewright.base.sizes import Size
from tilewright.ir.nodes import Op
from tilewright.ir.numerics import convert, evaluate
from tilewright.ir.ops import OPS
from tilewright.ir.types import Scalar, dtype_of

Array = np.ndarray
Terms = tuple[tuple[Hashable, int], ...]
_INDICES = (i32, i64)


@dataclass(frozen=True, eq=False)
class ThreadValue:
    """A number of each thread: `base` + `parts`; all unknown where `parts` is None."""

    parts: Array | None = None
    base: Terms = ()
    data: Array | None = None
    """A number for the element each thread's value comes from; threads with different numbers hold different data."""

    @property
    def exact(self) -> Array | None:
        """The numbers themselves, where they are known."""
        return None if self.base else self.parts

    @property
    def uniform(self) -> bool:
        """Whether all threads certainly hold the same."""
        return self.parts is not None and bool((self.parts == self.parts[0]).all())


UNKNOWN = ThreadValue()


def same(number: object, threads: int, dtype: DType) -> ThreadValue:
    """One number in all threads."""
    wide = np.asarray(number, np.float64 if dtype.is_float else np.bool_ if dtype.is_bool else np.int64)
    if dtype.is_float and dtype.numpy != np.float64:
        return ThreadValue(np.full(threads, wide.astype(np.float32)))
    return ThreadValue(np.full(threads, wide.astype(dtype.numpy)))


def shared_unknown(name: Hashable, threads: int) -> ThreadValue:
    """A number nobody knows, the same in all threads."""
    return ThreadValue(np.zeros(threads, np.int64), ((name, 1),))


def joined(columns: Sequence[Array]) -> Array:
    """A number for each thread, different only where some column differs."""
    found = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        found = found * 1_000_003 + column
    return found


def choose(mask: Array, yes: ThreadValue, no: ThreadValue) -> ThreadValue:
    """What each thread holds after it went one of two ways."""
    if mask.all():
        return yes
    if not mask.any():
        return no
    if yes.parts is None or no.parts is None or yes.base != no.base:
        return UNKNOWN
    return ThreadValue(np.where(mask, yes.parts, no.parts), yes.base)


def computed(op: Op, operands: Sequence[ThreadValue], threads: int) -> ThreadValue:
    """The result of an op without regions and without memory."""
    if op.opcode == "const":
        value, dtype = op.attrs["value"], op.attrs["dtype"]
        assert isinstance(dtype, DType)
        if isinstance(value, int | float) and dtype.bits >= 8 and not dtype.is_small_float:
            return same(value, threads, dtype)
        return shared_unknown((str(value), dtype.name), threads)
    if op.opcode == "size":
        size = op.attrs["value"]
        if isinstance(size, Size) and size.constant is not None:
            return same(size.constant, threads, i64)
        return shared_unknown(str(size), threads)
    if op.opcode in ("program_id", "grid_size"):
        return shared_unknown((op.opcode, str(op.attrs["axis"])), threads)
    if op.opcode == "thread_id":
        return ThreadValue(np.arange(threads, dtype=np.int64))
    if OPS[op.opcode].group not in ("elementwise", "function") or OPS[op.opcode].effect != "pure":
        return UNKNOWN
    if not operands or not all(isinstance(v.type, Scalar) for v in (*op.operands, *op.results)):
        return UNKNOWN
    exact = [o.exact for o in operands]
    first = dtype_of(op.operands[0].type)
    if all(e is not None for e in exact):
        with np.errstate(all="ignore"):
            return ThreadValue(np.broadcast_to(evaluate(op.opcode, [e for e in exact if e is not None], op.attrs, first), (threads,)))
    linear = _linear(op, operands)
    if linear is not None:
        return linear
    if all(o.uniform for o in operands):
        return shared_unknown((op.opcode, str(sorted(map(str, op.attrs.items()))), *(key_of(o) for o in operands)), threads)
    data = [o.data for o in operands if o.data is not None]
    return ThreadValue(data=joined(data)) if data and op.opcode != "select" else UNKNOWN


def key_of(value: ThreadValue) -> Hashable:
    """What two numbers have in common that are the same in all threads, and equal."""
    assert value.parts is not None
    return value.base, value.parts[0].item()


def _linear(op: Op, operands: Sequence[ThreadValue]) -> ThreadValue | None:
    """Sums, differences and multiples of integers keep what threads add apart."""
    if any(dtype_of(v.type) not in _INDICES for v in (*op.operands, *op.results)) or any(o.parts is None for o in operands):
        return None
    parts = [o.parts.astype(np.int64) for o in operands if o.parts is not None]
    if op.opcode == "cast":
        return ThreadValue(convert(parts[0], i64, i64), operands[0].base)
    if op.opcode in ("add", "sub"):
        sign = 1 if op.opcode == "add" else -1
        return ThreadValue(parts[0] + sign * parts[1], _sum(operands[0].base, operands[1].base, sign))
    if op.opcode == "mul":
        for one, other in ((0, 1), (1, 0)):
            if operands[one].uniform and not operands[one].base:
                factor = int(parts[one][0])
                return ThreadValue(parts[other] * factor, _sum((), operands[other].base, factor))
    return None


def _sum(left: Terms, right: Terms, factor: int) -> Terms:
    found = dict(left)
    for name, count in right:
        found[name] = found.get(name, 0) + factor * count
    return tuple(sorted(((n, c) for n, c in found.items() if c), key=lambda item: repr(item[0])))
