"""Simplify: fold constants, drop what changes nothing, share equal pure ops, decide comparisons that ranges prove.

In and out: a kernel at any stage. Runs first and again after each lowering, so that later passes see short code. Floating
point is only simplified where every bit stays the same (`x * 1`, not `x + 0`).

    %a = mul %x, 1.0           ->  %x
    %c = lt %i, %n             ->  true      where %i runs over 0..n
    if true {A} {B}            ->  A
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewright.analysis import ranges
from tilewright.base.dtypes import DType, i64
from tilewright.base.record import replace
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Value, walk
from tilewright.ir.numerics import evaluate
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.types import INDEX, Scalar, Type, dtype_of

Key = tuple[object, ...]
Number = int | float | bool

_WRITERS = frozenset({"store", "accumulate", "atomic", "atomic_store", "tma_load", "copy_async", "stmatrix", "copy_remote", "bulk_load", "raise_flag", "panel_dot",
                      "store_lanes", "scatter"})  # fmt: skip
"""Ops that write the tensor they have first."""


def simplify(kernel: Kernel) -> Kernel:
    body = _Simplifier(kernel).block(kernel.body, {})
    return eliminate_dead(replace(kernel, body=body))


class _Simplifier:
    def __init__(self, kernel: Kernel) -> None:
        self.ranges, self.least = ranges.analyse(kernel), ranges.least_sizes(kernel)
        self.extents = ranges.checked_extents(kernel)
        self.mapping: dict[Value, Value] = {}
        self.constants: dict[Value, Number] = {}
        written = {op.operands[0] for op in walk(kernel.body) if op.opcode in _WRITERS}
        written |= {op.operands[2] for op in walk(kernel.body) if op.opcode == "bulk_store"}
        self.read_only = set() if kernel.attrs.get("aliased") else {p for p in kernel.params if p not in written}

    def block(self, block: Block, outer: dict[Key, tuple[Value, ...]]) -> Block:
        seen = dict(outer)
        builder = Builder()
        self.ops(builder, block.ops, seen)
        return Block(block.args, tuple(builder.ops))

    def ops(self, builder: Builder, ops: Sequence[Op], seen: dict[Key, tuple[Value, ...]]) -> None:
        for op in ops:
            operands = tuple([self.mapping.get(v, v) for v in op.operands])
            if op.opcode == "if" and operands[0] in self.constants:
                # The taken region takes the op's place.
                region = op.regions[0 if self.constants[operands[0]] else 1]
                self.ops(builder, region.ops[:-1] if region.yields or _has_yield(region) else region.ops, seen)
                yields = tuple(self.mapping.get(v, v) for v in region.yields)
                self.mapping.update(zip(op.results, yields, strict=True))
                continue
            if op.regions:
                regions = tuple([self.block(r, seen) for r in op.regions])
                builder.append(Op(op.opcode, operands, op.results, op.attrs, regions, op.span))
                continue
            if operands != op.operands:
                op = Op(op.opcode, operands, op.results, op.attrs, (), op.span)
            with builder.at(op.span):
                self.one(builder, op, seen)

    def one(self, builder: Builder, op: Op, seen: dict[Key, tuple[Value, ...]]) -> None:
        if op.opcode == "load" and op.attrs.get("masked") and self.constants.get(op.operands[-1]) is True:
            op = replace(op, operands=op.operands[:-1], attrs={k: v for k, v in op.attrs.items() if k != "masked"})
        # Reading what nobody writes is as good as pure.
        pure = OPS[op.opcode].is_pure or (op.opcode == "load" and op.operands[0] in self.read_only)
        if not pure or not op.results:
            builder.append(op)
            return
        if op.opcode == "size":
            op = self._plain_size(op)
        replacement = self._replacement(builder, op, seen)
        if replacement is not None:
            self.mapping[op.results[0]] = replacement
            return
        attrs = tuple(sorted([(k, _key(v)) for k, v in op.attrs.items()])) if op.attrs else ()
        key = (op.opcode, op.operands, attrs, tuple([r.type for r in op.results]))
        known = seen.get(key)
        if known is not None:
            self.mapping.update(zip(op.results, known, strict=True))
            return
        seen[key] = op.results
        if op.opcode == "const" and not op.attrs.get("kept"):
            value = op.attrs["value"]
            assert isinstance(value, int | float)
            self.constants[op.results[0]] = value
        elif op.opcode == "broadcast" and op.operands[0] in self.constants and dtype_of(op.results[0].type).is_bool:
            self.constants[op.results[0]] = self.constants[op.operands[0]]
        elif op.opcode == "pack" and dtype_of(op.results[0].type).is_bool:
            lanes = {self.constants.get(v) for v in op.operands}
            if lanes == {True} or lanes == {False}:
                self.constants[op.results[0]] = lanes == {True}
        builder.append(op)

    def _plain_size(self, op: Op) -> Op:
        value = op.attrs["value"]
        assert isinstance(value, Size)
        if value.constant is None:
            return op
        return replace(op, opcode="const", attrs={"value": value.constant, "dtype": i64})

    def _constant(self, builder: Builder, value: Number, type_: Type, seen: dict[Key, tuple[Value, ...]]) -> Value | None:
        if not isinstance(type_, Scalar):
            return None
        before = len(builder.ops)
        result = builder.const(value, type_.dtype)
        op = builder.ops.pop()
        assert len(builder.ops) == before
        self.one(builder, op, seen)
        return self.mapping.get(result, result)

    def _replacement(self, builder: Builder, op: Op, seen: dict[Key, tuple[Value, ...]]) -> Value | None:
        """A value that equals the op's result, or None."""
        operands = op.operands
        constants = [self.constants.get(v) for v in operands]
        if operands and all(c is not None for c in constants) and OPS[op.opcode].group in ("elementwise", "function"):
            folded = _fold(op, [c for c in constants if c is not None])
            if folded is not None:
                return self._constant(builder, folded, op.results[0].type, seen)
        if op.opcode == "mod" and constants[1] == 1 and dtype_of(operands[0].type).is_int:
            return self._constant(builder, 0, op.results[0].type, seen)
        same = self._identity(op, constants)
        if same is not None:
            return same
        if op.opcode in ("lt", "le", "gt", "ge") and operands[0].type == INDEX:
            proven = self._proven(op)
            if proven is not None:
                return self._constant(builder, proven, op.results[0].type, seen)
        return None

    def _identity(self, op: Op, constants: Sequence[Number | None]) -> Value | None:
        """Ops that give one of their operands."""
        if op.opcode == "select" and (constants[0] is not None or op.operands[1] is op.operands[2]):
            return op.operands[1] if constants[0] or op.operands[1] is op.operands[2] else op.operands[2]
        if op.opcode in ("cast", "bitcast") and op.operands[0].type == op.results[0].type:
            return op.operands[0]
        if len(op.operands) != 2:
            return None
        a, b = op.operands
        left, right = constants
        integer = dtype_of(a.type).is_int
        if op.opcode == "mul":
            return a if right == 1 and right is not None else b if left == 1 and left is not None else None
        if op.opcode in ("div", "floordiv") and right == 1 and (integer or op.opcode == "div"):
            return a
        if integer and op.opcode in ("add", "or", "xor"):
            return a if right == 0 and right is not None else b if left == 0 and left is not None else None
        if integer and op.opcode in ("sub", "shl", "shr") and right == 0 and right is not None:
            return a
        if op.opcode in ("and", "or") and dtype_of(a.type).is_bool:
            wanted = op.opcode == "and"
            for constant, other, own in ((left, b, a), (right, a, b)):
                if constant is not None:
                    return other if bool(constant) == wanted else own
        if op.opcode in ("min", "max", "and", "or") and a is b:
            return a
        return None

    def _proven(self, op: Op) -> bool | None:
        a, b = (self.ranges.get(v) for v in op.operands)
        if a is None or b is None:
            return None
        if op.opcode in ("gt", "ge"):
            a, b = b, a
        strict = 1 if op.opcode in ("lt", "gt") else 0
        if ranges.surely_at_most(a.high + strict, b.low, self.least, self.extents):
            return True
        if ranges.surely_at_most(b.high + (1 - strict), a.low, self.least, self.extents):
            return False
        return None


def _has_yield(block: Block) -> bool:
    return bool(block.ops) and block.ops[-1].opcode == "yield"


def _key(value: Attr) -> str:
    # 1, 1.0 and True are equal in Python but not here; nor are 0.0 and -0.0.
    return f"{type(value).__name__}:{value!r}"


def _fold(op: Op, constants: Sequence[Number]) -> Number | None:
    dtype: DType = dtype_of(op.operands[0].type)
    arrays = [np.array([c]).astype(dtype_of(v.type).numpy) for c, v in zip(constants, op.operands, strict=True)]
    if not all(isinstance(v.type, Scalar) for v in op.operands) or dtype_of(op.results[0].type).is_small_float:
        return None
    result = evaluate(op.opcode, arrays, op.attrs, dtype)[0]
    value: Number = result.item()
    return value
