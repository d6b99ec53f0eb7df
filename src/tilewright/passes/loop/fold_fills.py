"""Arrays that are filled with a number, and then written by a kernel whole, are not filled. `Program -> Program`.

In: a program at the loop stage. Out: the same, where a kernel that has each element of the array at one point writes the number itself, and only where it
writes nothing else:

    parallel i { store y[i], 0 }                                     parallel i { if x[i] > 0 { store y[i], x[i] } else { store y[i], 0 } }
    parallel i { if x[i] > 0 { store y[i], x[i] } }             ->
    parallel i { store z[i], 0 }                                     parallel i { store z[i], reduce k { … } }
    parallel i { store z[i], z[i] + reduce k { … } }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.analysis.affine import Forms, analyse
from tilewright.ir.nodes import NO_ATTRS, Block, Kernel, Op, Value, walk
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import eliminate_dead
from tilewright.passes.common.fills import fill_of, is_whole, loop_extent


def fold_fills(program: Program) -> Program:
    """The program without such fills; the very same one where there are none."""
    calls: list[KernelCall | None] = list(program.calls)
    for position, call in enumerate(program.calls):
        fill = fill_of(call.kernel) if not call.varies else None
        later = _next(calls, position + 1, call.args[0]) if fill is not None else None
        if fill is None or later is None:
            continue
        user = calls[later]
        assert user is not None
        if user.loops != call.loops or user.varies or user.args.count(call.args[0]) != 1:
            continue
        made = _filling(user.kernel, user.kernel.params[user.args.index(call.args[0])], fill)
        if made is not None:
            calls[position], calls[later] = None, replace(user, kernel=made)
    left = tuple(call for call in calls if call is not None)
    return replace(program, calls=left) if len(left) < len(program.calls) else program


def _next(calls: list[KernelCall | None], start: int, array: str) -> int | None:
    """The call from `start` on that has to do with an array."""
    return next((at for at, call in enumerate(calls[start:], start) if call is not None and array in call.args), None)


def _filling(kernel: Kernel, memory: Value, fill: Op) -> Kernel | None:
    """The kernel for an array that holds nothing yet, where it is to hold a number."""
    nests = [op for op in kernel.body.ops if op.regions]
    if len(nests) != 1 or nests[0].opcode != "parallel":
        return None
    store = next((op for op in walk(kernel.body) if op.opcode == "store" and op.operands[0] is memory), None)
    if store is None:
        return None
    body = _nest(kernel.body, _Fill(memory, store.operands[:-1], fill, analyse(kernel)), {})
    return eliminate_dead(replace(kernel, body=body)) if body is not None else None


class _Fill:
    """What is written where."""

    def __init__(self, memory: Value, place: tuple[Value, ...], number: Op, forms: Forms) -> None:
        self.memory = memory
        self.place = place
        self.number = number
        self.forms = forms

    def touches(self, op: Op) -> bool:
        return self.memory in op.operands or any(self.memory in inner.operands for region in op.regions for inner in walk(region))

    def accesses_alone(self, op: Op) -> bool:
        """Whether it accesses the place, and nothing else of the array."""
        accesses = op.operands[: len(self.place)] == self.place and self.memory not in op.operands[len(self.place) :] and not op.attrs
        return accesses and op.opcode in ("load", "store")

    def stores(self, op: Op) -> bool:
        return any(inner.opcode == "store" and self.memory in inner.operands for inner in (op, *(i for region in op.regions for i in walk(region))))

    def ops(self) -> tuple[Op, Op]:
        """The number, and the store of it."""
        (old,) = self.number.results
        number = Value(old.type, old.name)
        made = replace(self.number, results=(number,))
        return made, Op("store", (*self.place, number), (), NO_ATTRS, (), self.number.span)


def _nest(block: Block, fill: _Fill, extents: Mapping[Value, Value]) -> Block | None:
    """A block with the loops that make the place, and what they run, changed."""
    if extents and set(extents) == set(fill.place[1:]):
        return _point(block, fill, {}) if is_whole(fill.place, extents, fill.forms) else None
    first = next((op for op in block.ops if fill.touches(op)), None)
    if first is None or not first.regions:
        return None
    if first.opcode == "parallel":
        own = dict(zip(first.regions[0].args, first.operands, strict=True))
    else:
        # What comes after it in a point of the parallel loop finds all of the point's elements written. Inside, iterations follow each other.
        extent = loop_extent(first, fill.forms)
        if extent is None or not all(fill.accesses_alone(op) for op in walk(first.regions[0]) if fill.memory in op.operands):
            return None
        own = {first.regions[0].args[0]: extent}
    body = _nest(first.regions[0], fill, {**extents, **own})
    return None if body is None else Block(block.args, tuple(replace(op, regions=(body,)) if op is first else op for op in block.ops))


def _point(block: Block, fill: _Fill, known: Mapping[Value, Value]) -> Block | None:
    """What is done at one point, for an element that holds nothing yet. `known`: what stands for what was read of it so far."""
    mapping, ops = dict(known), list[Op]()
    for position, op in enumerate(block.ops):
        if op.opcode in ("load", "store") and fill.memory in op.operands and not fill.accesses_alone(op):
            return None
        if fill.stores(op):
            if op.opcode == "if":
                regions = [_point(region, fill, mapping) for region in op.regions]
                if None in regions:
                    return None
                op = replace(op, regions=tuple(region for region in regions if region is not None))
            elif op.opcode != "store":
                return None
            return Block(block.args, (*ops, _renamed(op, mapping), *(_renamed(later, mapping) for later in block.ops[position + 1 :])))
        if op.opcode == "load" and fill.memory in op.operands:
            number, _ = fill.ops()
            mapping[op.result] = number.result
            ops.append(number)
        elif fill.touches(op):
            return None
        elif (total := _sum_alone(op, fill, mapping, ops)) is not None:
            mapping[op.result] = total
        else:
            ops.append(_renamed(op, mapping))
    end = [op for op in ops if op.opcode == "yield"]
    return Block(block.args, (*(op for op in ops if op.opcode != "yield"), *fill.ops(), *end))


def _sum_alone(op: Op, fill: _Fill, mapping: Mapping[Value, Value], before: list[Op]) -> Value | None:
    """The sum that is added to zeros: it is never the zero that has a sign, so the zero is left out."""
    if op.opcode != "add" or fill.number.attrs["value"] != 0:
        return None
    sums = {result for other in before if other.opcode == "reduce" and other.attrs.get("kind") == "add" for result in other.results}
    for old, total in (op.operands, op.operands[::-1]):
        if old in mapping and total in sums and mapping[old].type == total.type:
            return total
    return None


def _renamed(op: Op, mapping: Mapping[Value, Value]) -> Op:
    """An op on what stands for its operands now."""
    if not mapping:
        return op
    regions = tuple(Block(region.args, tuple(_renamed(inner, mapping) for inner in region.ops)) for region in op.regions)
    return replace(op, operands=tuple(mapping.get(v, v) for v in op.operands), regions=regions)
