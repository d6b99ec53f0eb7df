"""What kernels say and check as they run: prints, assertions, and indices that lie outside. Part of `lower_tiles`.

In: `print`, `assert`, `report` and `inside` ops of the tile stage. Out: the same for what one thread holds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tilewright.base.dtypes import u64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Op, Value
from tilewright.ir.types import Vec
from tilewright.passes.common.registers import Held, ThreadView, shape_of

Env = Mapping[Value, Held]


def lower_print(view: ThreadView, env: Env, b: Builder, op: Op) -> None:
    """One thread writes for all: kernels that print have no tiles."""
    values = [v for v in (env[operand] for operand in op.operands) if isinstance(v, Value)]
    if view.kernel.threads == 1:
        b.emit("print", values, op.attrs)
        return

    def write(inner: Builder) -> list[Value]:
        inner.emit("print", values, op.attrs)
        return []

    b.if_(b.op("eq", view.thread, b.index(0)), write, lambda inner: [])


def lower_assert(view: ThreadView, env: Env, b: Builder, op: Op) -> None:
    """Kernels with assertions of their author have no tiles. A CPU leaves its function where one fails."""
    holds = env[op.operands[0]]
    assert isinstance(holds, Value)
    if view.target.simt:
        b.emit("assert", [holds], op.attrs)
        return

    def fail(inner: Builder) -> list[Value]:
        inner.multi("fault", inner.index(0), inner.index(0), text=str(op.attrs["text"]))
        return []

    b.if_(b.op("not", holds), fail, lambda inner: [])


def lower_report(view: ThreadView, env: Env, b: Builder, op: Op) -> None:
    """The first element that lies outside is named."""
    cell, place, extent, *outside = op.operands
    limit = env[extent]
    assert isinstance(limit, Value)
    if not outside:
        index = env[place]
        assert isinstance(index, Value)
        b.emit(op.opcode, [cell, index, limit], op.attrs)
        return
    wrong = _singles_of(view, env, b, outside[0])

    def first(inner: Builder) -> list[Value]:
        """The first of a thread's elements that lies outside, which is looked for only where there is one."""
        indices = _singles_of(view, env, inner, place)
        index = indices[-1]
        for bad, one in zip(reversed(wrong[:-1]), reversed(indices[:-1]), strict=True):
            index = inner.select(bad, one, index)
        inner.emit(op.opcode, [cell, index, limit], op.attrs)
        return []

    b.if_(functools.reduce(lambda one, other: b.op("or", one, other), dict.fromkeys(wrong)), first, lambda inner: [])


def lower_inside(view: ThreadView, env: Env, b: Builder, op: Op) -> Value:
    """Whether all indices that a thread holds are inside."""
    extent = env[op.operands[1]]
    assert isinstance(extent, Value)
    limit = b.cast(extent, u64)
    found = [b.op("lt", b.cast(one, u64), limit) for one in _singles_of(view, env, b, op.operands[0])]
    while len(found) > 1:
        # In pairs, so that compilers see how to chain them.
        found = [*map(b.logical_and, found[::2], found[1::2]), *found[len(found) & ~1 :]]
    return found[0]


def _singles_of(view: ThreadView, env: Env, b: Builder, value: Value) -> list[Value]:
    """The numbers of a tile that this thread holds, one by one."""
    held, shape = env[value], shape_of(value)
    if isinstance(held, Value):
        return [held]
    registers = view.registers(b, held, shape)
    found: list[Value] = []
    for cell in view.cells(shape):
        one = registers.cells[cell]
        found += [b.op("extract", one, lane=lane) for lane in range(one.type.width)] if isinstance(one.type, Vec) else [one]
    return found
