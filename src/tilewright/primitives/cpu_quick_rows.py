"""Sorting rows of keys of 32 and 64 bits on a CPU with wide vectors: each row by itself, in registers or by a quicksort.

In: what is sorted (`sort.SortPlan`), without values. Out: a program `keys[rows, n] -> sorted`.
"""

from __future__ import annotations

from tilewright.base.sizes import Size, minimum
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.cpu_quicksort import VECTOR_BYTES, Quicksort, register_keys
from tilewright.primitives.keys import cooked, raw, to_key
from tilewright.primitives.parts import call
from tilewright.primitives.sort import SortPlan

_ROWS, _N = Size.of("rows"), Size.of("n")
_BLOCKS = 64


def sorts_by_vectors(plan: SortPlan, target: Target) -> bool:
    """Whether keys are sorted so: those alone, of 32 and 64 bits, and by wide vectors."""
    return target.is_host and target.vector_bytes >= VECTOR_BYTES and plan.payload is None and plan.passes > 2


def quick_rows_program(plan: SortPlan) -> Program:
    blocks = minimum(_ROWS, _BLOCKS)

    def body(c: Code, keys: Mem, out: Mem) -> None:
        quick, size, rows, several = Quicksort(c, out, plan.dtype, plan.descending), c.size(_N), c.size(_ROWS), c.size(blocks)

        def key_of(value: Num) -> Num:
            return to_key(c, raw(value), plan.dtype, plan.descending)

        def source(i: Num, mask: Num | None) -> Num:
            if mask is None:
                return key_of(keys.load(i, quick.width, unaligned=True))
            return key_of(Num(c, c.b.emit("load_lanes", [keys.value, i.value, mask.value], {})[0]))

        def long(low: Num) -> None:
            copy_keys(c, keys, out, low, low + size, plan, quick.width)
            quick.sort(low, low + size)

        def row(r: Num) -> None:
            low = r * size
            c.either(size <= register_keys(plan.dtype), lambda: quick.in_registers(low, size, source), lambda: long(low))

        c.loop(c.block() * rows // several, (c.block() + 1) * rows // several, 1, [], row)

    params = [(name, tensor(plan.dtype, _ROWS * _N)) for name in ("keys", "sorted")]
    kernel = write_kernel("sort_rows", 1, [blocks], params, body)
    keys, out = (ProgramArray(name, tensor(plan.dtype, _ROWS, _N), role) for name, role in (("keys", "input"), ("sorted", "output")))
    return Program("sort_rows", (keys,), (out,), (), (call(kernel),))


def copy_keys(c: Code, keys: Mem, out: Mem, low: Num, high: Num, plan: SortPlan, width: int) -> None:
    """The keys of numbers, in the memory of numbers."""

    def one(i: Num, lanes: int) -> None:
        attrs = {"unaligned": True} if lanes > 1 else {}
        value = keys.load(i, lanes, **attrs)
        out.store(i, cooked(to_key(c, raw(value), plan.dtype, plan.descending), plan.dtype), **attrs)

    middle = low + ((high - low) & -width)
    c.loop(low, middle, width, [], lambda i: one(i, width))
    c.loop(middle, high, 1, [], lambda i: one(i, 1))
