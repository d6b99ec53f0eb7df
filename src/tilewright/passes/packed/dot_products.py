"""Sums of products of bytes become the dot products of an Arm CPU. In and out: a thread-stage kernel with `dots`.

    %p = mul cast(%a: vec<i8, 32>), cast(%b: vec<i8, 32>)        %h, %l = split %a …
    %n = fold %p {kind = "add"}                             ->   %v = dot_lanes (dot_lanes 0, %h, …), %l, … : vec<i32, 4>
    %t = mul %s, %n    … sums of such …                          %w = mul broadcast(%s), %v    … sums of such …    %t = fold %w

Lanes are added up as late as can be: after all that is linear in them. A loop that only adds scaled sums to one number carries four of them.
LLVM finds x86's instructions by itself.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import f32, i8, i32
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.rewrite import use_counts
from tilewright.ir.types import Scalar, Vec
from tilewright.passes.common.dot_units import dot_unit

_LANES = 4
_BYTES = 16


def dot_products(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with dot products; the very same one where there are none."""
    if "dots" not in kernel.attrs or not target.triple.startswith("aarch64"):
        return kernel
    return replace(kernel, body=_Dots(kernel, dot_unit(target)).block(kernel.body, {}))


class _Dots:
    def __init__(self, kernel: Kernel, unit: str) -> None:
        self.unit = unit
        self.made = {result: op for op in walk(kernel.body) for result in op.results}
        self.uses = use_counts(kernel.body)

    def block(self, block: Block, values: dict[Value, Value]) -> Block:
        region = _LaneSums(self, values)
        for op in block.ops:
            region.op(op)
        return Block(block.args, tuple(region.b.ops))

    def factors(self, op: Op) -> tuple[Value, Value] | None:
        """The vecs of bytes whose products an op adds up."""
        if op.opcode != "fold" or op.attrs.get("kind") != "add" or op.results[0].type != Scalar(i32):
            return None
        product = self.made.get(op.operands[0])
        if product is None or product.opcode != "mul":
            return None
        casts = [self.made.get(v) for v in product.operands]
        bytes_ = [c.operands[0] for c in casts if c is not None and c.opcode == "cast"]
        sizes = {v.type.width for v in bytes_ if isinstance(v.type, Vec) and v.type.dtype is i8}
        return (bytes_[0], bytes_[1]) if len(bytes_) == 2 and len(sizes) == 1 and min(sizes) >= 8 else None

    def scaled_sum(self, value: Value) -> tuple[Value, Value] | None:
        """Of `f32(n) * c`, used once: the whole number and the factor."""
        op = self.made.get(value)
        if op is None or op.opcode != "mul" or self.uses.get(value) != 1:
            return None
        for number, factor in (op.operands, op.operands[::-1]):
            cast = self.made.get(number)
            if cast is not None and cast.opcode == "cast" and cast.operands[0].type == Scalar(i32) and self.uses.get(number) == 1:
                return cast.operands[0], factor
        return None


class _LaneSums:
    """One region: what is linear in sums of lanes stays lanes until somebody needs the number."""

    def __init__(self, dots: _Dots, values: dict[Value, Value]) -> None:
        self.dots, self.values = dots, values
        self.b = Builder()
        self.lanes: dict[Value, tuple[Value, Value | None]] = {}
        """Numbers that are the sum of a vec, and of a number."""

    def get(self, value: Value) -> Value:
        if value in self.lanes and value not in self.values:
            vec, rest = self.lanes[value]
            total = self.b.op("fold", vec, kind="add", together=True)
            self.values[value] = total if rest is None else self.b.add(total, rest)
        return self.values.get(value, value)

    def op(self, op: Op) -> None:
        self.b.span = op.span
        factors = self.dots.factors(op)
        if factors is not None:
            self.lanes[op.results[0]] = self.dot(*(self.get(v) for v in factors)), None
            return
        if op.opcode in ("add", "sub", "mul") and len(op.results) == 1 and op.results[0].type == Scalar(i32) and any(v in self.lanes for v in op.operands):
            found = self.linear(op)
            if found is not None:
                self.lanes[op.results[0]] = found
                return
        if op.opcode == "for" and self.carried(op):
            return
        operands = tuple(self.get(v) for v in op.operands)
        regions = tuple(self.dots.block(region, self.values) for region in op.regions)
        self.b.append(replace(op, operands=operands, regions=regions))

    def dot(self, a: Value, b: Value) -> Value:
        pieces = [(a, b)]
        while isinstance(pieces[0][0].type, Vec) and pieces[0][0].type.width > _BYTES:
            pieces = [half for x, y in pieces for half in zip(self.b.multi("split", x), self.b.multi("split", y), strict=True)]
        assert isinstance(pieces[0][0].type, Vec)
        total = self.b.op("broadcast", self.b.const(0, i32), width=pieces[0][0].type.width // _LANES)
        for x, y in pieces:
            total = self.b.op("dot_lanes", total, x, y, unit=self.dots.unit) if self.dots.unit else self.b.op("dot_lanes", total, x, y)
        return total

    def linear(self, op: Op) -> tuple[Value, Value | None] | None:
        left, right = op.operands
        a, b = self.lanes.get(left), self.lanes.get(right)
        if op.opcode == "mul":
            if a is not None and b is not None:
                return None
            vec, factor = (a, self.get(right)) if a is not None else (b, self.get(left))
            assert vec is not None
            rest = None if vec[1] is None else self.b.mul(vec[1], factor)
            return self.b.mul(vec[0], self.b.like(factor, vec[0])), rest
        if a is not None and b is not None:
            if a[0].type != b[0].type:
                return None
            rests = [part[1] for part in (a, b)]
            if None in rests and any(rests):
                return None
            return self.b.op(op.opcode, a[0], b[0]), None if rests[0] is None or rests[1] is None else self.b.op(op.opcode, rests[0], rests[1])
        if op.opcode == "sub":
            return None
        vec, other = (a, self.get(right)) if a is not None else (b, self.get(left))
        assert vec is not None
        return vec[0], other if vec[1] is None else self.b.add(vec[1], other)

    def carried(self, op: Op) -> bool:
        """A loop that adds scaled sums to one number: it carries lanes of it, and the number is their sum."""
        (block,) = op.regions
        if len(op.results) != 1 or op.results[0].type != Scalar(f32) or self.dots.uses.get(block.args[1]) != 1:
            return False
        last = self.dots.made.get(block.yields[0])
        if last is None or last.opcode != "add" or last not in block.ops or block.args[1] not in last.operands:
            return False
        term = next(v for v in last.operands if v is not block.args[1]) if last.operands[0] is not last.operands[1] else None
        found = self.dots.scaled_sum(term) if term is not None else None
        if found is None:
            return False
        number, factor = found
        inner = _LaneSums(self.dots, dict(self.values))
        skipped = {last.results[0], term, next(v for v in self.dots.made[term].operands if v is not factor)}  # type: ignore[index]
        for part in block.ops[:-1]:
            if not any(result in skipped for result in part.results):
                inner.op(part)
        if number not in inner.lanes or inner.lanes[number][1] is not None:
            return False
        vec = inner.lanes[number][0]
        assert isinstance(vec.type, Vec)
        sums = Value(Vec(f32, vec.type.width), op.results[0].name)
        scale = inner.get(factor)
        after = inner.b.fma(inner.b.cast(vec, f32), inner.b.op("broadcast", scale, width=vec.type.width), sums)
        inner.b.multi("yield", after)
        first = self.b.op("broadcast", self.b.const(0.0, f32), width=vec.type.width)
        result = Value(sums.type, op.results[0].name)
        lo, hi, step, start = (self.get(v) for v in op.operands)
        region = Block((block.args[0], sums), tuple(inner.b.ops))
        self.b.append(Op("for", (lo, hi, step, first), (result,), MappingProxyType(dict(op.attrs)), (region,), op.span))
        self.values[op.results[0]] = self.b.add(start, self.b.op("fold", result, kind="add"))
        return True
