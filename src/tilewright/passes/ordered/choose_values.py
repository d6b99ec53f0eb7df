"""Short branches that only choose a value become choices without a jump. In and out: a kernel at the thread stage.

A branch in a loop that nobody can foretell, such as the condition of a masked running sum, costs more than what it saves. Where both sides are a few pure ops and loads that may be
done anyway, they are done, and `select` takes one of the results. A load may be done anyway where another one, at the same indices of an array of the same shape, is done
in the same block before it: then its place exists. Loads that are checked as they run stay where they are.

    %k = load %keep, %r, %i                           %k = load %keep, %r, %i
    %t = if %c { %v = load %x, %r, %i; yield %v }  -> %v = load %x, %r, %i
              { yield %zero }                         %t = select %c, %v, %zero
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.base.record import replace
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops
from tilewright.ir.types import Scalar, Tensor

_MOST = 4
"""Ops of a side that are done for nothing."""
_SLOW = frozenset({"div", "floordiv", "mod", "sqrt", "every"})


def choose_values(kernel: Kernel) -> Kernel:
    """The kernel with choices for short branches inside its loops."""
    if not any(op.opcode == "if" and op.results for op in walk(kernel.body)):
        return kernel
    written = {op.operands[0] for op in walk(kernel.body) if op.operands and OPS[op.opcode].effect not in ("pure", "read")}
    return replace(kernel, body=_Choosing(written).block(kernel.body, False, {}))


class _Choosing:
    def __init__(self, written: set[Value]) -> None:
        self.written = written

    def block(self, block: Block, inside: bool, values: dict[Value, Value]) -> Block:
        b = Builder()
        places: set[tuple[object, ...]] = set()
        for op in block.ops:
            operands = tuple(values.get(v, v) for v in op.operands)
            if inside and op.opcode == "if" and op.results and self.is_short(op, places, values):
                with b.at(op.span):
                    self.choice(b, op, operands[0], values)
                continue
            regions = tuple(self.block(region, inside or op.opcode == "for", values) for region in op.regions)
            op = replace(op, operands=operands, regions=regions)
            b.append(op)
            if op.opcode == "load" and not op.attrs:
                places.add(_place(op.operands))
        return Block(block.args, tuple(b.ops))

    def is_short(self, op: Op, places: set[tuple[object, ...]], values: dict[Value, Value]) -> bool:
        """Whether both sides may be done, and hardly cost anything."""
        if any(not isinstance(r.type, Scalar) for r in op.results) or len(op.results) > 2:
            return False
        for region in op.regions:
            body = [inner for inner in region.ops if inner.opcode not in ("yield", "const")]
            if len(body) > _MOST:
                return False
            for inner in body:
                if inner.regions or inner.opcode in _SLOW or OPS[inner.opcode].group == "function":
                    return False
                if inner.opcode == "load":
                    operands = tuple(values.get(v, v) for v in inner.operands)
                    if inner.attrs or operands[0] in self.written or _place(operands) not in places:
                        return False
                elif OPS[inner.opcode].effect != "pure":
                    return False
        return any(inner.opcode not in ("yield", "const") for region in op.regions for inner in region.ops)

    @staticmethod
    def choice(b: Builder, op: Op, condition: Value, values: dict[Value, Value]) -> None:
        sides: list[Sequence[Value]] = []
        for region in op.regions:
            mapping = dict(values)
            clone_ops(b, [inner for inner in region.ops if inner.opcode != "yield"], mapping)
            sides.append([mapping.get(v, v) for v in region.yields])
        for result, first, second in zip(op.results, *sides, strict=True):
            values[result] = b.select(condition, first, second)


def _place(operands: Sequence[Value]) -> tuple[object, ...]:
    """Which element of what shape a load reads."""
    memory = operands[0].type
    assert isinstance(memory, Tensor)
    return (tuple(map(str, memory.shape)), *operands[1:])
