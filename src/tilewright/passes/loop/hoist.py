"""Compute a reduction once: those that a loop does not change leave it, and equal ones become one.

In and out: a loop-stage kernel. Texts over tiles say `weights = exp(scores - max(scores))` and use the weights twice; each use is an
expression of its own, with the maximum inside the loop over the weights. Plain loops have the maximum before it, and so has what comes
out here:

    for (%e) { %m = reduce …; %l = reduce { %n = reduce …; … %n … }; … }   ->   %m = reduce …; %l = reduce { … %m … }; for (%e) { … }

Only reductions of what nobody writes move. They may then be computed where a loop has no iterations, and checks at the call leave out
what no iteration reaches: so a reduction only leaves a loop if all it reads is proven to lie inside, whatever the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.analysis import ranges
from tilewright.base.record import replace
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import has_effects
from tilewright.ir.types import Tensor
from tilewright.passes.common.simplify import simplify

Key = tuple[object, ...]


def hoist(kernel: Kernel) -> Kernel:
    """The kernel with each reduction where it is computed least often; the very same one where nothing moves."""
    if sum(op.opcode == "reduce" for op in walk(kernel.body)) < 2:
        return kernel
    found = _Hoist(kernel)
    body = found.block(kernel.body, {})
    return simplify(replace(kernel, body=body)) if found.changed else kernel


class _Hoist:
    def __init__(self, kernel: Kernel) -> None:
        self.written = {op.operands[0] for op in walk(kernel.body) if not op.regions and op.operands and has_effects(op)}
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.ranges = ranges.analyse(kernel)
        self.extents = {
            index: extent
            for op in walk(kernel.body) if op.opcode in ("parallel", "reduce")
            for extent, index in zip(op.operands, op.regions[0].args, strict=True)
        }  # fmt: skip
        self.mapping: dict[Value, Value] = {}
        self.keys: dict[Value, Key] = {}
        """Of values that are equal when these are; all others are only equal to themselves."""
        self.changed = False

    def block(self, block: Block, known: dict[Key, tuple[Value, ...]]) -> Block:
        """A block with its reductions shared; `known` are those of the blocks around it."""
        known = dict(known)
        builder = Builder()
        for op in block.ops:
            self._append(builder, op, known)
        return Block(block.args, tuple(builder.ops))

    def _append(self, builder: Builder, op: Op, known: dict[Key, tuple[Value, ...]]) -> None:
        op = replace(op, operands=tuple(self.mapping.get(v, v) for v in op.operands))
        if op.opcode in ("for", "reduce"):
            region = op.regions[0]
            moving = self._moving(region)
            self.changed = self.changed or any(m.opcode == "reduce" for m in moving)
            for first in moving:
                self._append(builder, first, known)
            region = Block(region.args, tuple(o for o in region.ops if o not in moving))
            op = replace(op, regions=(self.block(region, known),))
            inner = self._moving(op.regions[0])
            if any(m.opcode == "reduce" for m in inner):
                # What left a loop inside may leave this one too.
                self._append(builder, op, known)
                return
        elif op.regions:
            op = replace(op, regions=tuple(self.block(r, known) for r in op.regions))
        if self._is_plain(op) and op.results:
            key = self._key(op)
            same = known.get(key)
            if same is not None:
                self.changed = self.changed or op.opcode == "reduce"
                self.mapping.update(zip(op.results, same, strict=True))
                return
            known[key] = op.results
        builder.append(op)

    def _moving(self, region: Block) -> list[Op]:
        """Reductions in a loop that it does not change, and the arithmetic they need, in order."""
        varying = set(region.args)
        still: list[Op] = []
        for op in region.ops:
            used = {*op.operands, *(v for r in op.regions for inner in walk(r) for v in inner.operands)}
            arithmetic = not op.regions and OPS[op.opcode].is_pure and bool(op.results)
            if used & varying or not (arithmetic or (op.opcode == "reduce" and self._is_plain(op) and self._reads_inside(op))):
                varying.update(op.results)
            else:
                still.append(op)
        needed: set[Value] = set()
        found: list[Op] = []
        for op in reversed(still):
            if op.opcode == "reduce" or any(r in needed for r in op.results):
                needed.update(op.operands, (v for r in op.regions for inner in walk(r) for v in inner.operands))
                found.insert(0, op)
        return found if any(op.opcode == "reduce" for op in found) else []

    def _is_plain(self, op: Op) -> bool:
        """Whether an op gives the same wherever it stands."""
        for inner in walk(Block((), (op,))):
            pure = inner.opcode in ("reduce", "if", "yield") or OPS[inner.opcode].is_pure
            if not pure and not (inner.opcode == "load" and inner.operands[0] not in self.written):
                return False
        return True

    def _reads_inside(self, op: Op) -> bool:
        """Whether every load lies inside its array, proven from the ranges of indices alone."""
        for inner in walk(op.regions[0]):
            if inner.opcode != "load":
                continue
            memory = inner.operands[0].type
            assert isinstance(memory, Tensor)
            if not all(self._is_inside(v, size) for v, size in zip(inner.operands[1 : 1 + memory.rank], memory.shape, strict=True)):
                return False
        return True

    def _is_inside(self, index: Value, size: Size) -> bool:
        found = self.ranges.get(index)
        if found is not None:
            return ranges.surely_not_negative(found.low) and ranges.surely_at_most(found.high + 1, size)
        extent = self.extents.get(index)
        return extent is not None and any(ranges.surely_at_most(most, size) for most in self._at_most(extent))

    def _at_most(self, value: Value) -> list[Size]:
        """Sizes that a value does not exceed: all there are of a minimum."""
        found = self.ranges.get(value)
        op = self.made.get(value)
        if found is not None:
            return [found.high]
        return [most for v in op.operands for most in self._at_most(v)] if op is not None and op.opcode == "min" else []

    def _key(self, op: Op) -> Key:
        """Equal for ops that give the same results."""
        names: dict[Value, Key] = {}

        def of(value: Value) -> Key:
            return names.get(value, ("value", id(self.mapping.get(value, value))))

        def block(ops: Sequence[Op]) -> Key:
            found: list[object] = []
            for inner in ops:
                for region in inner.regions:
                    names.update({arg: ("arg", len(names) + n) for n, arg in enumerate(region.args)})
                attrs = sorted((n, type(a).__name__, repr(a)) for n, a in inner.attrs.items())
                types = tuple(str(r.type) for r in inner.results)
                own = (inner.opcode, *attrs, types, *(of(v) for v in inner.operands), *(block(r.ops) for r in inner.regions))
                names.update({r: ("op", len(names) + n) for n, r in enumerate(inner.results)})
                found.append(own)
            return tuple(found)

        return block((op,))
