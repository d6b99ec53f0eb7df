"""The code of a block of threads on a CPU: scalars of the block, and loops over the groups of its threads. Part of `simt_to_simd`.

In: a thread-stage kernel with a grid of one axis, and how many threads are the lanes of a vec. Out: ops. A stretch of ops without barriers is one
loop over groups (`stretch`). Values that a later stretch needs are computed again where that takes few ops, else kept in memory: one element
for each thread, or for each group where the lanes have one form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from types import MappingProxyType

from tilewright.analysis.uniform import block_values, waiting_ops
from tilewright.base.dtypes import bool_, u32
from tilewright.base.sizes import Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.ops import OPS
from tilewright.ir.rewrite import clone_ops, use_counts
from tilewright.ir.types import BOOL, Tensor, dtype_of
from tilewright.passes.simt_to_simd.lane_memory import Group, Own
from tilewright.passes.simt_to_simd.lane_ops import LaneCode
from tilewright.passes.simt_to_simd.lane_values import Lanes, Linear, Uniform, Varying

_CHEAP = 10
"""Ops that are rather computed again after a barrier than kept."""
_DEAR = frozenset({"div", "sqrt", "floordiv", "mod"})


@dataclass(frozen=True)
class KeptValue:
    """A value over the threads of a block, in memory: one element for each thread, or for each group where lanes have one form."""

    memory: Value
    form: Lanes | None


@dataclass(frozen=True)
class Rows:
    """How several blocks walk their rows together: after the `start` ops of the body, for each of `count` rows of threads, for `block` from `first`
    to `last`."""

    start: int
    block: Value
    first: Value
    last: Value
    count: int
    across: Size
    others: Value
    """The grid's extent along x, and the block's number along the other axes."""


Stores = Sequence[tuple[Value, Value]]
"""Values of threads, and the arrays they are stored to."""


class BlockCode(ABC):
    """Writes the code of a block: scalars, and loops over the groups of its threads."""

    def __init__(self, kernel: Kernel, width: int, warp_size: int) -> None:
        self.kernel, self.width, self.warp_size = kernel, width, warp_size
        self.groups = -(-kernel.threads // width)
        self.waiting = waiting_ops(kernel)
        self.shared_values = block_values(kernel, self.waiting)
        self.uses = use_counts(kernel.body)
        self.origin = {r: op for op in walk(kernel.body) for r in op.results}
        self.head, self.b = Builder(kernel.span), Builder(kernel.span)
        self.number = self.head.op("program_id", axis=0, name="block")
        """The block's linear number, for reports."""
        self.scalars: dict[Value, Value] = {p: p for p in kernel.params}
        self.kept: dict[Value, KeptValue] = {}
        self.own: dict[Value, Own] = {}
        self.mask: Value | None = None
        """The array with the mask of the threads that run; None for all."""
        self.costs: dict[Value, int | None] = {}
        self.row: tuple[Value, int] | None = None
        """Where rows are walked one by one: the first thread of this one, and its groups."""

    def run(self, rows: Rows | None = None) -> Kernel:
        for op in walk(self.kernel.body):
            if op.opcode == "alloc":
                self._place(op)
        if self.kernel.threads % self.width:
            self.mask = self._threads_mask()
        if rows is None:
            self.ops(self.kernel.body.ops)
        else:
            self._rows(rows)
        attrs = {**self.kernel.attrs, "noalias": not self.kernel.attrs.get("aliased")}
        ops = (*self.head.ops, *self.b.ops)
        return replace(self.kernel, body=Block((), ops), threads=1, attrs=MappingProxyType(attrs))

    def _rows(self, rows: Rows) -> None:
        """The body for each row of threads and, in it, each block."""
        ops = self.kernel.body.ops
        self.ops(ops[: rows.start])
        groups = self.groups // rows.count
        outer = self.b

        def row(b: Builder, number: Value) -> Sequence[Value]:
            self.row = b.mul(number, b.index(groups * self.width)), groups
            b.for_(self.scalars[rows.first], self.scalars[rows.last], b.index(1), [], block, name="block")
            return []

        def block(b: Builder, number: Value) -> Sequence[Value]:
            self.scalars[rows.block] = number
            self.b = b
            self.number = b.add(b.mul(self.scalars[rows.others], b.index(rows.across)), number)
            self.ops(ops[rows.start :])
            return []

        outer.for_(outer.index(0), outer.index(rows.count), outer.index(1), [], row, name="row")
        self.b = outer

    def _place(self, op: Op) -> None:
        """Memory is allocated once, at the start; that of single threads has axes of groups and lanes."""
        type_ = op.result.type
        assert isinstance(type_, Tensor)
        if type_.space != "local":
            self.head.append(op)
            return
        shape = tuple(extent.evaluate({}) for extent in type_.shape)
        grouped = bool(self.waiting)
        whole = ((self.groups,) if grouped else ()) + (*shape, self.width)
        memory = self.head.op("alloc", name=op.result.name, dtype=type_.dtype, shape=whole, space="local", align=64)
        self.own[op.result] = Own(memory, grouped)

    def _threads_mask(self) -> Value:
        """The mask of lanes that are threads at all, where the last group is not full."""
        memory = self.array(Value(BOOL))

        def each(code: LaneCode) -> None:
            thread = code.vec(code.thread())
            inside = code.b.op("lt", thread, code.b.splat(self.kernel.threads, thread))
            code.write(memory, self.where(code), Varying(inside), None)

        self.each_group(each)
        return memory

    # -- ops of a block ------------------------------------------------------------------------------------------

    def ops(self, ops: Sequence[Op], stores: Stores = ()) -> None:
        """The ops in order, then what is to be stored of their values."""
        pending: list[Op] = []
        for op in ops:
            if op.opcode in ("yield", "alloc"):
                continue
            if op in self.waiting:
                self.stretch(pending)
                pending = []
                with self.b.at(op.span):
                    self.structured(op)
            elif op.results and all(r in self.shared_values for r in op.results):
                clone_ops(self.b, [op], self.scalars)
            else:
                pending.append(op)
        self.stretch(pending, stores)

    @abstractmethod
    def structured(self, op: Op) -> None:
        """A barrier, or an op with a barrier inside."""

    # -- loops over groups ---------------------------------------------------------------------------------------

    def array(self, like: Value) -> Value:
        """Memory for one value of each thread."""
        return self.head.op("alloc", name=like.name, dtype=dtype_of(like.type), shape=(self.groups, self.width), space="local", align=64)

    def where(self, code: LaneCode) -> list[Lanes]:
        return [Uniform(code.group.number), Linear(code.b.index(0), 1, self.width, 0, self.width - 1)]

    def read(self, code: LaneCode, memory: Value) -> Value:
        return code.b.op("load", memory, code.group.number, code.b.index(0), width=self.width, unaligned=True)

    def each_group(self, each: Callable[[LaneCode], None]) -> None:
        """A loop over the groups that have active threads."""

        def group(b: Builder, number: Value) -> Sequence[Value]:
            code = self._group(b, number)

            def active(inner: Builder) -> Sequence[Value]:
                code.b = inner
                each(code)
                return []

            return active(b) if code.mask is None else b.if_(code.any(code.mask), active, lambda inner: [])

        b = self.b
        groups = self.groups if self.row is None else self.row[1]
        b.for_(b.index(0), b.index(groups), b.index(1), [], group, name="group")

    def any_group(self, each: Callable[[LaneCode], Value]) -> Value:
        """A loop over all groups, with active threads or without; gives whether what `each` gives holds for any."""

        def group(b: Builder, number: Value, before: Value) -> Sequence[Value]:
            return [b.op("or", before, each(self._group(b, number)))]

        b = self.b
        return b.for_(b.index(0), b.index(self.groups), b.index(1), [b.const(False, bool_)], group, name="group")[0]

    def count_groups(self, each: Callable[[LaneCode], Sequence[Value]]) -> tuple[Value, ...]:
        """A loop over all groups; gives the sums of the two numbers that `each` gives."""

        def group(b: Builder, number: Value, *before: Value) -> Sequence[Value]:
            return [b.add(x, y) for x, y in zip(before, each(self._group(b, number)), strict=True)]

        b = self.b
        return b.for_(b.index(0), b.index(self.groups), b.index(1), [b.const(0, u32), b.const(0, u32)], group, name="group")

    def _group(self, b: Builder, number: Value) -> LaneCode:
        first = b.mul(number, b.index(self.width))
        place = Group(self.number, number, first, self.width, self.kernel.threads, self.warp_size)
        if self.row is not None:
            start, groups = self.row
            place = replace(place, first=b.add(start, first), row=(start, first, groups * self.width))
        code = LaneCode(b, self.head, place, self.own, None)
        code.mask = None if self.mask is None else self.read(code, self.mask)
        return code

    def resolve(self, code: LaneCode, value: Value) -> Lanes:
        """What a value from outside is for the group."""
        known = code.known.get(value)
        if known is not None:
            return known
        found: Lanes
        kept = self.kept.get(value)
        if value in self.scalars:
            found = Uniform(self.scalars[value])
            self._note(code, value, found.value)
        elif kept is not None and kept.form is None:
            found = Varying(self.read(code, kept.memory))
        elif kept is not None:
            scalar = code.b.op("load", kept.memory, code.group.number)
            found = replace(kept.form, base=scalar) if isinstance(kept.form, Linear) else Uniform(scalar)
        else:
            op = self.origin[value]
            for operand in op.operands:
                self.resolve(code, operand)
            code.op(op)
            return code.known[value]
        code.known[value] = found
        return found

    def _note(self, code: LaneCode, value: Value, scalar: Value) -> None:
        """Tell the arithmetic of lanes what is known about a scalar of the block."""
        op = self.origin.get(value)
        if op is None:
            return
        number = op.attrs.get("value")
        if op.opcode == "const" and type(number) is int:
            code.constants[scalar] = number
        elif op.opcode in ("mul", "add", "sub") and dtype_of(value.type).is_int:
            divisor = self._divisor(value)
            if divisor > 1:
                code.multiples[scalar] = divisor

    def _divisor(self, value: Value, depth: int = 8) -> int:
        op = self.origin.get(value)
        if op is None or depth == 0:
            return 1
        number = op.attrs.get("value")
        if op.opcode == "const" and type(number) is int:
            return abs(number)
        if op.opcode in ("mul", "add", "sub"):
            a, b = (self._divisor(v, depth - 1) for v in op.operands)
            return a * b if op.opcode == "mul" else gcd(a, b)
        return 1

    def stretch(self, ops: Sequence[Op], stores: Stores = ()) -> None:
        """Ops without barriers, for all groups; what later code needs of them is kept."""
        if not ops and not stores:
            return
        block = Block((), tuple(ops))
        inside = use_counts(block)
        for value, _ in stores:
            inside[value] = inside.get(value, 0) + 1
        leaving = [r for op in ops for r in op.results if self.uses.get(r, 0) > inside.get(r, 0) and self._cost(r) is None]
        defined = {v for op in walk(block) for v in (*op.results, *(a for region in op.regions for a in region.args))}
        free = [v for v in inside if v not in defined and not isinstance(v.type, Tensor)]

        def each(code: LaneCode) -> None:
            for value in free:
                self.resolve(code, value)
            code.ops(ops)
            for value in leaving:
                self._keep(code, value)
            found = [(code.get(value), memory) for value, memory in stores]
            vecs = [(Varying(code.vec(lanes)), memory) for lanes, memory in found]
            for lanes, memory in vecs:
                code.write(memory, self.where(code), lanes, code.mask)

        self.each_group(each)

    def _cost(self, value: Value) -> int | None:
        """Ops it takes to compute a value of threads again anywhere; None where it cannot be, or is too much."""
        if value in self.scalars:
            return 0
        if value not in self.costs:
            self.costs[value] = self._cost_of(self.origin.get(value))
        return self.costs[value]

    def _cost_of(self, op: Op | None) -> int | None:
        if op is None or op.regions:
            return None
        if op.opcode == "thread_id":
            return 0
        row = OPS[op.opcode]
        if not row.is_pure or row.group not in ("elementwise", "structure"):
            return None
        costs = [self._cost(v) for v in op.operands]
        known = [c for c in costs if c is not None]
        if len(known) < len(costs) or sum(known) >= _CHEAP:
            return None
        if op.opcode in _DEAR and (dtype_of(op.result.type).is_float or self.origin[op.operands[1]].opcode != "const"):
            return None
        return sum(known) + 1

    def _keep(self, code: LaneCode, value: Value) -> None:
        lanes = code.get(value)
        if isinstance(lanes, Varying):
            memory = self.array(value)
            code.write(memory, self.where(code), lanes, None)
            self.kept[value] = KeptValue(memory, None)
            return
        scalar = lanes.base if isinstance(lanes, Linear) else lanes.value
        memory = self.head.op("alloc", name=value.name, dtype=dtype_of(value.type), shape=(self.groups,), space="local", align=64)
        code.b.multi("store", memory, code.group.number, scalar)
        self.kept[value] = KeptValue(memory, lanes)
