"""Lines of results are asked for before they are written. In and out: a thread-stage kernel for a CPU.

A store to a line that lies in no cache waits until the line has been read, and few such stores wait side by side. A loop that writes whole vectors one after
the other therefore asks for the lines that it writes some steps later, to write to them. Loops that read the array, too, bring its lines by that.

    for %i = 0, n, 64 { %v = load %x, %i …; store %out, %i, %v }
    ->   for %i = 0, n, 64 { %v = load %x, %i …; store %out, %i, %v; prefetch %out, (%i + 256) {write}; … }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, address, analyse
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.types import Tensor, Vec

LINE = 64
"""Bytes of a line of the cache."""


def fetch_results(kernel: Kernel, target: Target) -> Kernel:
    """The kernel whose loops ask for the lines of their results ahead."""
    if not target.fetches_results:
        return kernel
    return replace(kernel, body=_Announcing(kernel, target.costs.caches.results_ahead).block(kernel.body))


class _Announcing:
    def __init__(self, kernel: Kernel, ahead: int) -> None:
        self.ahead = ahead
        """Bytes between what is written and what is asked for."""
        self.arrays = {param for param in kernel.params if isinstance(param.type, Tensor)}
        self.forms: Forms = analyse(kernel)

    def block(self, block: Block) -> Block:
        return Block(block.args, tuple(self.op(op) for op in block.ops))

    def op(self, op: Op) -> Op:
        if not op.regions:
            return op
        if op.opcode == "for" and not any(inner.opcode in ("for", "while") for inner in walk(op.regions[0])):
            return self.loop(op)
        return replace(op, regions=tuple(map(self.block, op.regions)))

    def loop(self, loop: Op) -> Op:
        """The innermost loop with what it asks for."""
        body = loop.regions[0]
        index, step = body.args[0], self.forms[loop.operands[2]]
        read = {op.operands[0] for op in walk(body) if op.opcode != "store" and op.operands}
        rows: dict[tuple[Value, Affine], dict[int, Op]] = {}
        for op in body.ops:
            if op.opcode == "store" and op.operands[0] in self.arrays - read and isinstance(op.operands[-1].type, Vec) and not op.attrs.get("masked"):
                place = address(op, self.forms)
                if place.constant.constant is not None:
                    rows.setdefault((op.operands[0], replace(place, constant=ZERO)), {})[place.constant.constant] = op
        fetched: dict[int, tuple[Op, int]] = {}
        for (_, place), stores in rows.items():
            length = _length(stores)
            if not step.factors and place.factor(index) * step.constant == Size.of(length):
                fetched[id(stores[max(stores)])] = stores[min(stores)], length
        if not fetched:
            return loop
        b = Builder(loop.span)
        for op in body.ops:
            b.append(op)
            if id(op) in fetched:
                self.fetch(b, *fetched[id(op)])
        return replace(loop, regions=(Block(body.args, tuple(b.ops)),))

    def fetch(self, b: Builder, store: Op, length: int) -> None:
        """Ask for what a store and those beside it write some steps later: so many elements."""
        memory = store.operands[0]
        assert isinstance(memory.type, Tensor)
        size, places = memory.type.dtype.itemsize, list(store.operands[1 : 1 + memory.type.rank])
        axis = memory.type.strides.index(ONE) if ONE in memory.type.strides else -1
        if axis < 0 or length * size < LINE:
            return
        first = places[axis]
        for line in range(self.ahead, self.ahead + length * size, LINE):
            places[axis] = b.add(first, b.index(line // size))
            b.multi("prefetch", memory, *places, write=True)


def _length(stores: Mapping[int, Op]) -> int:
    """How many elements the stores, by where they begin, write without a gap; 0 where there is one."""
    start = end = min(stores)
    for begin in sorted(stores):
        value = stores[begin].operands[-1].type
        assert isinstance(value, Vec)
        if begin != end:
            return 0
        end += value.width
    return end - start
