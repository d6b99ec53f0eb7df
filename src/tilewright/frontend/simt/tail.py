"""The tail of a launch of a kernel whose threads work together.

Threads beyond the launch's count cannot simply end: others wait for them at barriers, shuffle with their lanes and count on what they
bring into shared memory. They run like all others, but an access of theirs that leaves its array does nothing: a load gives 0, a
store is left out, an atomic operation too and gives 0, an asynchronous copy brings zeros. They print and assert nothing. Accesses of the
other threads are not touched.

    %v = load %x, %i   ->   %ok = or %inside, ge(%i, 0) and lt(%i, extent);  %v = if %ok { load %x, %i } { 0 }
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import i64
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Op, Value
from tilewright.ir.types import Tensor, Vec, dtype_of

_ACCESSES = ("load", "store", "atomic", "atomic_load", "atomic_store")


def guard_accesses(start: Sequence[Op], ops: Sequence[Op], inside: Value) -> list[Op]:
    """The ops of a kernel with the accesses of threads outside made harmless. `inside`: whether a thread counts."""
    return [*start, *_guarded(ops, inside)]


def _guarded(ops: Sequence[Op], inside: Value) -> list[Op]:
    found: list[Op] = []
    for op in ops:
        if op.regions:
            regions = tuple(replace(region, ops=tuple(_guarded(region.ops, inside))) for region in op.regions)
            found.append(replace(op, regions=regions))
        elif op.opcode in _ACCESSES and _is_global(op.operands[0]):
            found += _access(op, inside)
        elif op.opcode == "copy_async":
            found += _copy(op, inside)
        elif op.opcode == "print":
            found.append(_if(op, inside))
        elif op.opcode == "assert":
            b = Builder(op.span)
            b.emit("assert", (b.op("or", op.operands[0], b.op("not", inside)),), op.attrs)
            found += b.ops
        else:
            found.append(op)
    return found


def _is_global(memory: Value) -> bool:
    return isinstance(memory.type, Tensor) and memory.type.space == "global"


def _if(op: Op, condition: Value) -> Op:
    """An op without results where the condition holds."""
    done, left_out = Builder(op.span), Builder(op.span)
    done.append(op)
    for builder in (done, left_out):
        builder.multi("yield")
    return Op("if", (condition,), (), MappingProxyType({}), (Block((), tuple(done.ops)), Block((), tuple(left_out.ops))), op.span)


def _copy(op: Op, inside: Value) -> list[Op]:
    """The source is the third operand; what is not copied becomes zeros."""
    b = Builder(op.span)
    allowed = _allowed(b, op, 2, inside)
    operands = op.operands
    if op.attrs.get("masked"):
        allowed, operands = b.logical_and(operands[-1], allowed), operands[:-1]
    b.emit("copy_async", (*operands, allowed), {**op.attrs, "masked": True})
    return b.ops


def _allowed(b: Builder, op: Op, position: int, inside: Value) -> Value:
    """Whether the thread counts, or the indices after the tensor at that position are inside it."""
    memory = op.operands[position].type
    assert isinstance(memory, Tensor)
    fits: Value | None = None
    for index, extent in zip(op.operands[position + 1 : position + 1 + memory.rank], memory.shape, strict=True):
        here = b.cast(index, i64)
        own = b.logical_and(b.op("ge", here, b.index(0)), b.op("lt", here, b.index(extent)))
        fits = own if fits is None else b.logical_and(fits, own)
    return inside if fits is None else b.op("or", inside, fits)


def _access(op: Op, inside: Value) -> list[Op]:
    b = Builder(op.span)
    allowed = _allowed(b, op, 0, inside)
    results = tuple(Value(r.type, r.name) for r in op.results)
    done = Builder(op.span)
    done.append(replace(op, results=results))
    done.multi("yield", *results)
    left_out = Builder(op.span)
    zeros = [_zero(left_out, result) for result in op.results]
    left_out.multi("yield", *zeros)
    blocks = Block((), tuple(done.ops)), Block((), tuple(left_out.ops))
    b.append(Op("if", (allowed,), op.results, MappingProxyType({}), blocks, op.span))
    return b.ops


def _zero(b: Builder, like: Value) -> Value:
    zero = b.const(0, dtype_of(like.type))
    return b.op("broadcast", zero, width=like.type.width) if isinstance(like.type, Vec) else zero
