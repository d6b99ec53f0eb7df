"""Sorting rows of keys of 32 and 64 bits on a CPU with wide vectors: each row by itself, in registers or by a quicksort.

In: what is sorted (`sort.SortPlan`), without values. Out: a program `keys[rows, n] -> sorted`.
"""

from __future__ import annotations

from tilewright.base.sizes import Size, minimum
from tilewright.base.target import Target
from tilewright.ir.program import Program, ProgramArray
from tilewright.ir.types import tensor
from tilewright.primitives.code import Code, Mem, Num, write_kernel
from tilewright.primitives.keys import cooked, key_dtype, raw, to_key
from tilewright.primitives.parts import call
from tilewright.primitives.sort import SortPlan
from tilewright.primitives.vectors.quicksort import VECTOR_BYTES, Quicksort, lanes_below, load_lanes, store_lanes

_ROWS, _N = Size.of("rows"), Size.of("n")
_BLOCKS = 64


def sorts_by_vectors(plan: SortPlan, target: Target) -> bool:
    """Whether keys are sorted so: those alone, of 32 and 64 bits, and by wide vectors."""
    return target.is_host and target.vector_bytes >= VECTOR_BYTES and plan.payload is None and plan.passes > 2


def quick_rows_program(plan: SortPlan) -> Program:
    blocks = minimum(_ROWS, _BLOCKS)

    def body(c: Code, keys: Mem, out: Mem) -> None:
        quick, size, rows, several = Quicksort(c, out, plan.dtype, plan.descending), c.size(_N), c.size(_ROWS), c.size(blocks)

        def row(r: Num) -> None:
            low = r * size
            copy_keys(c, keys, out, low, low + size, plan, quick.width)
            quick.sort(low, low + size)

        c.loop(c.block() * rows // several, (c.block() + 1) * rows // several, 1, [], row)

    params = [(name, tensor(plan.dtype, _ROWS * _N)) for name in ("keys", "sorted")]
    kernel = write_kernel("sort_rows", 1, [blocks], params, body)
    keys, out = (ProgramArray(name, tensor(plan.dtype, _ROWS, _N), role) for name, role in (("keys", "input"), ("sorted", "output")))
    return Program("sort_rows", (keys,), (out,), (), (call(kernel),))


def copy_keys(c: Code, keys: Mem, out: Mem, low: Num, high: Num, plan: SortPlan, width: int) -> None:
    """The keys of numbers, in the memory of numbers."""

    def cooked_keys(values: Num) -> Num:
        return cooked(to_key(c, raw(values), plan.dtype, plan.descending), plan.dtype)

    middle = low + ((high - low) & -width)
    c.loop(low, middle, width, [], lambda i: out.store(i, cooked_keys(keys.load(i, width, unaligned=True)), unaligned=True))
    rest = lanes_below(c, high - middle, width, key_dtype(plan.dtype))
    store_lanes(out, middle, cooked_keys(load_lanes(keys, middle, rest)), rest)
