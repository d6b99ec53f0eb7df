"""Rows of several axes become rows of one: a group of channels, whose scales lie by channel, is walked by one index.

In: a loop-stage kernel whose reductions and sweeps walk the same axes, one after another in memory. Out: the same with one index for the row;
arrays along it are flat, and what depends on one of its axes alone is found by division. `collapse` has merged all that needs none. Sits where a
schedule says `flat`: a GPU then holds a row in registers, and a division is cheaper than another pass over memory.

    reduce %c, %h (%k, %y) { load %x, %i, %k, %y }; for %k { for %y { … load %x, %i, %k, %y; load %w, %k } }
    -> reduce c*h (%t) { load %x', i*c*h + t }; for %t { … load %x', i*c*h + t; load %w, t // h }
"""

from __future__ import annotations

from dataclasses import replace

from tilewright.analysis.affine import Affine, Forms, address, analyse
from tilewright.analysis.loop_nest import is_sweep
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, product
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk, watched_axes
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.types import INDEX, Tensor


@record(identity=True)
class AxesWalk:
    """A reduction, or loops of independent iterations inside one another, with nothing but one body."""

    op: Op
    indices: tuple[Value, ...]
    extents: tuple[Size, ...]
    ops: tuple[Op, ...]
    """What is done for each element, with the `yield` at its end."""


def row_walks(region: Block, forms: Forms) -> tuple[AxesWalk, ...] | None:
    """The reductions and sweeps of a nest; None where one of them has bounds of its own, or loops that are not simply inside one another."""
    found: list[AxesWalk] = []
    for op in region.ops:
        if op.opcode == "reduce":
            extents = [_extent(v, forms) for v in op.operands]
            found.append(AxesWalk(op, op.regions[0].args, tuple(e or ZERO for e in extents), op.regions[0].ops))
            if None in extents:
                return None
        elif op.opcode == "for":
            walk_found = _sweep(op, forms)
            if walk_found is None:
                return None
            found.append(walk_found)
        elif op.opcode in ("while", "parallel"):
            return None
    return tuple(found)


def _extent(value: Value, forms: Forms) -> Size | None:
    form = forms.get(value)
    return form.constant if form is not None and not form.factors else None


def _sweep(op: Op, forms: Forms) -> AxesWalk | None:
    """Loops from zero by ones, each with one loop inside it, and what is done in the last. What stands between them has no effects."""
    indices: list[Value] = []
    extents: list[Size] = []
    before: list[Op] = []
    current = op
    while True:
        ends = [_extent(v, forms) for v in current.operands]
        if not is_sweep(current) or ends[0] != ZERO or ends[2] != ONE or ends[1] is None:
            return None
        indices.append(current.regions[0].args[0])
        extents.append(ends[1])
        body = current.regions[0].ops
        inner = [o for o in body if o.opcode == "for"]
        if not inner:
            return AxesWalk(op, tuple(indices), tuple(extents), (*before, *body))
        rest = [o for o in body if o is not inner[0] and o.opcode != "yield"]
        if len(inner) > 1 or any(o.regions or (o.opcode != "load" and not OPS[o.opcode].is_pure) for o in rest):
            return None
        if body.index(inner[0]) != len(body) - 2:
            return None
        before += rest
        current = inner[0]


def flattened(kernel: Kernel) -> Kernel | None:
    """The kernel with rows of one axis, or None where its rows are not several axes that lie one after another in memory."""
    parallel = next((op for op in kernel.body.ops if op.opcode == "parallel"), None)
    if parallel is None or any(watched_axes(op) for op in walk(kernel.body)):
        return None
    forms = analyse(kernel)
    walks = row_walks(parallel.regions[0], forms)
    if walks is None or len(walks) < 2 or len(walks[0].extents) < 2 or any(w.extents != walks[0].extents for w in walks):
        return None
    if any(op.regions and op.opcode != "if" for w in walks for o in w.ops for op in walk(Block((), (o,)))):
        return None
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    between = [o for w in walks if w.op.opcode == "for" for o in w.ops if o.opcode == "load"]
    if any(o.operands[0] in written and o not in _innermost(walks) for o in between):
        return None  # a load that stands between loops is done for each element
    flat = _flat_arrays(kernel, walks, forms)
    return _Flattening(kernel, walks, flat, forms).run(parallel) if flat else None


def _innermost(walks: tuple[AxesWalk, ...]) -> set[Op]:
    found: set[Op] = set()
    for own in walks:
        block = own.op.regions[0]
        while any(o.opcode == "for" for o in block.ops):
            block = next(o for o in block.ops if o.opcode == "for").regions[0]
        found.update(block.ops)
    return found


def _steps(extents: tuple[Size, ...]) -> list[Size]:
    """How many elements of a row one step of each index is."""
    return [product(extents[p + 1 :]) for p in range(len(extents))]


def _is_linear(place: Affine, own: AxesWalk) -> bool:
    return all(place.factor(v) == step for v, step in zip(own.indices, _steps(own.extents), strict=True))


def _flat_arrays(kernel: Kernel, walks: tuple[AxesWalk, ...], forms: Forms) -> set[Value]:
    """Arrays that some row walks from element to element. None are where such an array has gaps, or is not only loaded and stored."""
    found: set[Value] = set()
    for own in walks:
        for op in walk(Block((), own.ops)):
            if op.opcode in ("load", "store") and _is_linear(address(op, forms), own):
                found.add(op.operands[0])
    for memory in found:
        assert isinstance(memory.type, Tensor)
        if memory.type.space != "global" or memory not in kernel.params or not _is_dense(memory.type):
            return set()
    if any(v in found for op in walk(kernel.body) for p, v in enumerate(op.operands) if p or op.opcode not in ("load", "store")):
        return set()
    return found


def _is_dense(memory: Tensor) -> bool:
    return all(stride == product(memory.shape[axis + 1 :]) for axis, stride in enumerate(memory.strides))


class _Flattening:
    def __init__(self, kernel: Kernel, walks: tuple[AxesWalk, ...], flat: set[Value], forms: Forms) -> None:
        self.kernel, self.flat, self.forms = kernel, flat, forms
        self.walks = {own.op: own for own in walks}
        self.mapping: dict[Value, Value] = {}
        for memory in flat:
            assert isinstance(memory.type, Tensor)
            shape = (product(memory.type.shape),)
            self.mapping[memory] = Value(replace(memory.type, shape=shape, strides=(ONE,)), memory.name)

    def run(self, parallel: Op) -> Kernel:
        whole = replace(self.kernel, params=tuple(self.mapping.get(p, p) for p in self.kernel.params), body=self.block(self.kernel.body, None, None))
        return eliminate_dead(whole)

    def block(self, old: Block, own: AxesWalk | None, index: Value | None) -> Block:
        b = Builder()
        for op in old.ops:
            with b.at(op.span):
                b.append(self.rebuilt(b, op, own, index))
        return Block(old.args, tuple(b.ops))

    def rebuilt(self, b: Builder, op: Op, own: AxesWalk | None, index: Value | None) -> Op:
        walk_found = self.walks.get(op)
        if walk_found is not None:
            return self.row(b, op, walk_found)
        operands = tuple(self.mapping.get(v, v) for v in op.operands)
        if op.opcode in ("load", "store") and op.operands[0] in self.flat:
            rank = len(op.operands) - 1 - (op.opcode == "store")
            operands = (operands[0], self.place(b, address(op, self.forms), own, index), *operands[1 + rank :])
        return replace(op, operands=operands, regions=tuple(self.block(r, own, index) for r in op.regions))

    def row(self, b: Builder, op: Op, own: AxesWalk) -> Op:
        index = Value(INDEX, "".join(v.name for v in own.indices))
        extent = b.index(product(own.extents))
        inner = Builder(op.span)
        before: Value | None = None
        for value, size, step in zip(own.indices, own.extents, _steps(own.extents), strict=True):
            number = index if step == ONE else inner.op("floordiv", index, inner.index(step))
            self.mapping[value] = number if before is None else inner.sub(number, inner.mul(before, inner.index(size)))
            before = number
        rest = self.block(Block((), own.ops), own, index)
        body = Block((index,), (*inner.ops, *rest.ops))
        if op.opcode == "reduce":
            return replace(op, operands=(extent,), regions=(body,))
        low, step_by = (self.mapping.get(v, v) for v in (op.operands[0], op.operands[2]))
        return replace(op, operands=(low, extent, step_by), regions=(body,))

    def place(self, b: Builder, form: Affine, own: AxesWalk | None, index: Value | None) -> Value:
        """The element of a flat array at which an access is."""
        total: Value | None = None
        linear = own is not None and _is_linear(form, own)
        for value, factor in form.factors:
            if linear and own is not None and value in own.indices:
                continue
            here = self.mapping.get(value, value)
            term = here if factor == ONE else b.mul(here, b.index(factor))
            total = term if total is None else b.add(total, term)
        if form.constant != ZERO:
            total = b.index(form.constant) if total is None else b.add(total, b.index(form.constant))
        if linear and index is not None:
            total = index if total is None else b.add(total, index)
        return total if total is not None else b.index(0)


def flatten_rows(kernel: Kernel) -> Kernel:
    """The kernel with rows of one axis."""
    return flattened(kernel) or kernel
