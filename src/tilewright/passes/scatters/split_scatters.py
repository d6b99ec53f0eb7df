"""Make scatters (`accumulate`) parallel. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where every kernel with an `accumulate` is one that the device runs side by side.

On a CPU the points are cut into parts. Where one index of the nest is an index of every scatter too, each part has elements of its own and combines
right into the array. Else each part combines into a copy of its own, and another kernel combines the copies, in the order of the parts. How many parts
there are depends on sizes alone, never on how many threads there are, and each part goes through its points in order: the same call gives the same bits
on every run. Where the array is large for the points, there is one part.

    parallel %n (%i) { accumulate out, k[i], w[i] }
    -> parallel %parts, %m (%p, %j) { store copy[p, j] = 0 }
       parallel %parts (%p) { for i in p*chunk .. { accumulate copy, p, k[i], w[i] {alone} } }
       parallel %m (%j) { out[j] = out[j] + copy[0, j] + copy[1, j] + … }

On a GPU points combine by atomics; into a small array they do so in the shared memory of each block first (`share_scatters`). They combine in a copy of the array where `scatter_forms` says so: elements narrower than 32 bits, least and greatest floats, and
sums of floats that are to be deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis.loop_nest import Nest, nest_of
from tilewright.base.dtypes import DType, compute_dtype, f64, i32, i64, u32
from tilewright.base.errors import UserError
from tilewright.base.record import record
from tilewright.base.sizes import ONE, Size, ceildiv, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Block, Kernel, Op, Stage, Value, walk, watched_axes
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, rewrite, rewrite_block
from tilewright.ir.types import INDEX, Tensor, dtype_of, tensor
from tilewright.passes.choose.loops import power_of_two
from tilewright.passes.from_tree.lower_body import unchanging
from tilewright.passes.loop.collapse import collapse
from tilewright.passes.scatters.scatter_forms import CopySpec, ScatterForm, depends_on_order, form_for
from tilewright.passes.schedules.loops import Schedule
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.tree.metadata import KernelMetadata

MOST_PARTS = 64
"""Parts of a nest on a CPU: enough for its threads, and few enough for the copies."""
POINTS_PER_ELEMENT = 16
"""A copy is worth its filling and combining if that many points go into each of its elements; two parts are from 2 on."""
SHORTEST_PART = 4096
"""Points that are worth a part."""
FEW_OWNERS = 8
"""An index that says which elements a point may reach is cut instead where it has so many values."""
MOST_TERMS = 36
"""The exponent of how many terms one element may have where inner loops make more of them than there are points."""
SHARED_BYTES = 32 << 10
"""Shared memory that one block takes for its copies on a GPU, at most: several blocks find room on a multiprocessor."""
SHARED_THREADS, SHARED_BLOCKS = 256, 4
"""Threads of such a block, and blocks for each multiprocessor."""
SHARED_POINTS = 4096
"""Points that are worth such a block."""
LANES = 4
"""SIMD registers that one step of a part fills."""


@record
class _Scatter:
    """One array that a kernel combines into."""

    memory: Value
    kind: str
    wide: DType
    """What a copy is made of."""

    @property
    def type(self) -> Tensor:
        assert isinstance(self.memory.type, Tensor)
        return self.memory.type

    @property
    def elements(self) -> Size:
        return product(self.type.shape)


def split_scatters(
    program: Program, plans: Plans, target: Target, hints: Mapping[str, int], metadata: KernelMetadata | None = None
) -> tuple[Program, Plans]:
    """The program with parallel scatters, and plans for the calls there are then."""
    if not any(op.opcode == "accumulate" for call in program.calls for op in walk(call.kernel.body)):
        return program, plans
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, plan in zip(program.calls, plans, strict=True):
        scatters = _scatters(call.kernel)
        if not scatters:
            calls.append(call)
            schedules.append(plan)
            continue
        split = _Split(call, scatters, len(scratch))
        own = metadata.of(call.kernel.name) if metadata is not None else None
        made = split.on_gpu(target, hints, own is not None and own.deterministic) if target.simt else split.on_cpu(target, hints)
        calls += [one for one, _ in made]
        schedules += [schedule for _, schedule in made]
        scratch += split.scratch
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


def _scatters(kernel: Kernel) -> tuple[_Scatter, ...]:
    found: dict[Value, _Scatter] = {}
    for op in walk(kernel.body):
        if op.opcode == "accumulate":
            memory = op.operands[0]
            found[memory] = _Scatter(memory, str(op.attrs["kind"]), _wide(dtype_of(memory.type)))
    return tuple(found.values())


def _wide(dtype: DType) -> DType:
    """What is combined exactly, or in f32, and has atomics everywhere."""
    if dtype.is_float or dtype.bits >= 32:
        return compute_dtype(dtype)
    return i32 if dtype.kind == "i" else u32


@record
class _Copies:
    """The copies of an array on a GPU."""

    form: ScatterForm
    copies: tuple[Value, ...]


def _pairs(held: _Copies | None) -> Iterator[tuple[CopySpec, Value]]:
    return zip(held.form.copies, held.copies, strict=True) if held is not None else iter(())


class _Split:
    """The kernels that take the place of one call."""

    def __init__(self, call: KernelCall, scatters: tuple[_Scatter, ...], number: int) -> None:
        self.call, self.kernel, self.scatters, self.number = call, call.kernel, scatters, number
        self.names = dict(zip(call.kernel.params, call.args, strict=True))
        self.nest: Nest = nest_of(call.kernel)
        self.region = self.nest.parallel.regions[0]
        self.scratch: list[ProgramArray] = []

    # -- devices ------------------------------------------------------------------------------------------------------

    def on_gpu(self, target: Target, hints: Mapping[str, int], deterministic: bool) -> list[tuple[KernelCall, Plan]]:
        held: dict[Value, _Copies] = {}
        for scatter in self.scatters:
            if deterministic and depends_on_order(scatter.kind, scatter.type.dtype):
                raise UserError.at(
                    "TW020", f"deterministic: a product of {scatter.type.dtype} at places that data decides depends on the order of its factors", self.kernel.span,
                    "add up logarithms, leave deterministic out, or run it on a CPU, which has an order",
                )  # fmt: skip
            form = form_for(scatter.kind, scatter.type.dtype, unchanging(scatter.kind, scatter.type.dtype), deterministic)
            if form is not None:
                held[scatter.memory] = _Copies(form, tuple(self._copy(scatter, spec.dtype) for spec in form.copies))
        fills = [self._call(self._fill(scatter, spec.start, copy)) for scatter in self.scatters for spec, copy in _pairs(held.get(scatter.memory))]
        merges = [self._call(self._decode(scatter, held[scatter.memory])) for scatter in self.scatters if scatter.memory in held]
        last = max((own.form.rounds for own in held.values()), default=1)
        rounds = [self._shared(self._round(held, number, last), target, hints) for number in range(last)]
        return [*fills, *rounds, *merges]

    def _round(self, held: Mapping[Value, _Copies], number: int, last: int) -> Kernel:
        """The points, gone through once. All but the scatters of several rounds belongs to the last."""

        def change(b: Builder, op: Op) -> list[Value] | None:
            if op.opcode not in ("store", "accumulate"):
                return None
            own = held.get(op.operands[0]) if op.opcode == "accumulate" else None
            if own is None or own.form.rounds == 1:
                if number < last - 1:
                    return []
                return None if own is None else self._terms(b, op, own, 0)
            return self._terms(b, op, own, number)

        kernel = eliminate_dead(rewrite(self.kernel, change))
        copies = [copy for own in held.values() for copy in own.copies]
        name = self.kernel.name if number == last - 1 else f"{self.kernel.name}.largest"
        return self._with_params(replace(kernel, name=name), (*kernel.params, *copies))

    def _shared(self, kernel: Kernel, target: Target, hints: Mapping[str, int]) -> tuple[KernelCall, Plan]:
        """A round whose points are many for the elements goes through them in as many blocks as the device holds, which combine in shared memory."""
        into: dict[Value, Tensor] = {}
        for op in walk(kernel.body):
            if op.opcode == "accumulate" and isinstance(op.operands[0].type, Tensor):
                into[op.operands[0]] = op.operands[0].type
        elements, points, axis = ONE, product(self.nest.extents), self._longest(hints)
        for type_ in into.values():
            elements = elements + product(type_.shape)
        known = all(size.names <= hints.keys() for size in (elements, points))
        if axis is None or not into or not known or points.evaluate(hints) < max(SHARED_POINTS, 4 * elements.evaluate(hints)):
            return self._call(kernel)
        room = {memory: power_of_two(max(1, product(type_.shape).evaluate(hints))) for memory, type_ in into.items()}
        if sum(room[memory] * type_.dtype.itemsize for memory, type_ in into.items()) > SHARED_BYTES:
            return self._call(kernel)
        most = Size.of(target.multiprocessors * SHARED_BLOCKS)
        blocks = maximum(ONE, minimum(most, ceildiv(points, maximum(Size.of(SHARED_POINTS), elements * POINTS_PER_ELEMENT))))
        region = next(op for op in kernel.body.ops if op.opcode == "parallel").regions[0]

        def change(b: Builder, op: Op) -> list[Value] | None:
            if op.opcode != "accumulate":
                return None
            return list(b.emit("accumulate", op.operands, {**op.attrs, "shared": room[op.operands[0]]}))

        vector = max(1, min(4, target.vector_bytes // nest_of(kernel).narrowest))
        parts = self._nest(kernel, rewrite_block(region, change, {}), axis, blocks, kernel.params, None, SHARED_THREADS * vector)
        schedule = Schedule((1,), SHARED_THREADS * vector, vector, vector_on_reduction=True, threads=SHARED_THREADS)
        return self._call(parts, schedule)

    def _terms(self, b: Builder, op: Op, own: _Copies, number: int) -> list[Value]:
        place, value = op.operands[1:-1], op.operands[-1]
        attrs: dict[str, Attr] = {k: v for k, v in op.attrs.items() if k == "watch"}
        if attrs:
            attrs["of"] = self.names[op.operands[0]]
        before = [b.emit("load", [copy, *place], attrs)[0] for copy in own.copies[:1]] if number else []
        for which, term, condition in own.form.terms(b, value, before, self._counts(b), number):
            copy, spec = own.copies[which], own.form.copies[which]
            own_attrs = {**attrs, "kind": spec.kind}
            if condition is None:
                b.emit("accumulate", [copy, *place, term], own_attrs)
            else:
                b.if_(condition, lambda inner, c=copy, t=term, a=own_attrs: inner.emit("accumulate", [c, *place, t], a), lambda inner: [])
        return []

    def _counts(self, b: Builder) -> Value:
        """The exponent of a number of points, and of terms, that is surely large enough."""
        if any(op.opcode in ("for", "while") for op in walk(self.region)):
            return b.index(MOST_TERMS)
        points = b.cast(b.index(maximum(ONE, product(self.nest.extents))), f64)
        return b.sub(b.op("shr", b.bitcast(points, i64), b.index(52)), b.index(1022))

    def _decode(self, scatter: _Scatter, own: _Copies) -> Kernel:
        b = Builder(self.kernel.span)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            before = inner.cast(inner.op("load", scatter.memory, *indices), compute_dtype(scatter.type.dtype))
            copies = [inner.op("load", copy, *indices) for copy in own.copies]
            after = own.form.result(inner, before, copies, self._counts(inner))
            return list(inner.multi("store", scatter.memory, *indices, inner.cast(after, scatter.type.dtype)))

        b.parallel([b.index(e) for e in scatter.type.shape], body)
        return collapse(self._kernel(f"{self.kernel.name}.merge", b, (scatter.memory, *own.copies)))

    def on_cpu(self, target: Target, hints: Mapping[str, int]) -> list[tuple[KernelCall, Plan]]:
        owner = self._owner(hints)
        axis = owner if owner is not None else self._longest(hints)
        parts = ONE if axis is None else self.nest.extents[axis] if owner is not None else self._parts()
        known = parts.evaluate(hints) if parts.names <= hints.keys() else None
        copies: dict[Value, Value] = {}
        if owner is None and axis is not None and known != 1:
            copies = {s.memory: self._copy(s, s.wide, parts) for s in self.scatters}
        elif owner is None:
            parts = ONE
        kernel, schedule = self._parts_kernel(axis, parts, copies, target, owner is not None)
        copied = [s for s in self.scatters if s.memory in copies]
        fills = [self._call(self._fill(s, _start(s), copies[s.memory])) for s in copied]
        merges = [self._call(self._merge(s, copies[s.memory], parts)) for s in copied]
        return [*fills, self._call(kernel, schedule), *merges]

    def _owner(self, hints: Mapping[str, int]) -> int | None:
        """An index of the nest that is an index of every scatter, at the same axis of each array: points that differ in it never meet. Not the last
        axis: neighbours in memory stay together."""
        ops = [op for op in walk(self.kernel.body) if op.opcode == "accumulate"]
        for position, index in enumerate(self.region.args):
            axes: dict[Value, set[int]] = {}
            for op in ops:
                rank = len(op.operands) - 2
                own = {axis for axis in range(rank - 1) if op.operands[1 + axis] is index}
                axes[op.operands[0]] = axes.get(op.operands[0], own) & own
            extent = self.nest.extents[position]
            many = not extent.names <= hints.keys() or extent.evaluate(hints) >= FEW_OWNERS
            if many and all(axes.values()):
                return position
        return None

    def _longest(self, hints: Mapping[str, int]) -> int | None:
        """The index along which the points are cut: the outermost of the longest."""
        known = [e.evaluate(hints) if e.names <= hints.keys() else 0 for e in self.nest.extents]
        return known.index(max(known)) if known else None

    def _parts(self) -> Size:
        points = maximum(ONE, product(self.nest.extents))
        elements = ONE
        for scatter in self.scatters:
            elements = elements + scatter.elements
        two = minimum(Size.of(2), ceildiv(points, elements * 2))
        parts = maximum(two, ceildiv(points, elements * POINTS_PER_ELEMENT))
        return maximum(ONE, minimum(Size.of(MOST_PARTS), minimum(parts, ceildiv(points, Size.of(SHORTEST_PART)))))

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _copy(self, scatter: _Scatter, dtype: DType, *parts: Size) -> Value:
        """A copy of an array, or one for each part."""
        name = f"{self.names[scatter.memory]}.copy{self.number + len(self.scratch)}"
        copy = Value(tensor(dtype, *parts, *scatter.type.shape, align=64), name)
        assert isinstance(copy.type, Tensor)
        self.scratch.append(ProgramArray(name, copy.type, "scratch"))
        return copy

    def _call(self, kernel: Kernel, plan: Plan = None) -> tuple[KernelCall, Plan]:
        return KernelCall(kernel, tuple(self.names.get(p, p.name) for p in kernel.params), self.call.loops), plan

    def _fill(self, scatter: _Scatter, start: int | float | bool, copy: Value) -> Kernel:
        b = Builder(self.kernel.span)
        assert isinstance(copy.type, Tensor)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            return list(inner.multi("store", copy, *indices, inner.const(start, dtype_of(copy.type))))

        b.parallel([b.index(e) for e in copy.type.shape], body)
        return collapse(self._kernel(f"{self.kernel.name}.fill", b, (copy,)))

    def _merge(self, scatter: _Scatter, copy: Value, parts: Size) -> Kernel:
        b = Builder(self.kernel.span)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            before = inner.cast(inner.op("load", scatter.memory, *indices), scatter.wide)

            def step(deep: Builder, part: Value, total: Value) -> list[Value]:
                return [deep.op(scatter.kind, total, deep.op("load", copy, part, *indices))]

            (after,) = inner.for_(inner.index(0), inner.index(parts), inner.index(1), [before], step, name="part")
            return list(inner.multi("store", scatter.memory, *indices, inner.cast(after, scatter.type.dtype)))

        b.parallel([b.index(e) for e in scatter.type.shape], body)
        return collapse(self._kernel(f"{self.kernel.name}.merge", b, (scatter.memory, copy)))

    def _parts_kernel(
        self, axis: int | None, parts: Size, copies: Mapping[Value, Value], target: Target, owned: bool
    ) -> tuple[Kernel, Plan]:
        """Points of a part, one after the other. The innermost loop computes places and values in SIMD registers."""
        widest = max((dtype_of(r.type).itemsize for op in walk(self.region) for r in op.results if dtype_of(r.type).is_float), default=4)
        width = max(1, target.vector_bytes // widest) * LANES
        here = Value(INDEX, "part")
        changed = rewrite_block(
            self.region, lambda at, op: self._accumulate(at, op, copies, here, {"alone": True}) if op.opcode == "accumulate" else None, {}
        )
        kernel = self._nest(self.kernel, changed, axis, parts, (*self.kernel.params, *copies.values()), here, 1 if owned else width)
        kernel = replace(kernel, name=f"{self.kernel.name}.parts" if copies else self.kernel.name)
        return kernel, Schedule(() if parts == ONE else (1,), width, width, vector_on_reduction=True)

    def _nest(self, kernel: Kernel, body: Block, axis: int | None, parts: Size, params: Sequence[Value], here: Value | None, step: int = 1) -> Kernel:
        """A kernel with a point for each part, which goes through the part's points in loops; `here` stands for the number of the part. Parts along
        the last index are multiples of `step`."""
        step = step if axis == len(self.nest.extents) - 1 else 1
        inner_loops = any(op.opcode in ("for", "while", "reduce") for op in walk(body))
        b = Builder(kernel.span)
        mapping: dict[Value, Value] = {}
        clone_ops(b, [op for op in kernel.body.ops if op.opcode != "parallel"], mapping)

        def nest(inner: Builder, left: Sequence[int], local: dict[Value, Value], part: Value) -> list[Value]:
            if not left:
                clone_ops(inner, body.ops[:-1], local if here is None else {**local, here: part})
                return []
            position, rest = left[0], left[1:]
            extent = inner.index(self.nest.extents[position])
            low, high = inner.index(0), extent
            if position == axis and parts != ONE:
                # Parts begin where vectors do.
                chunk = inner.index(ceildiv(ceildiv(self.nest.extents[position], parts), Size.of(step)) * step)
                low = inner.mul(part, chunk)
                high = inner.op("min", inner.add(low, chunk), extent)
            arg = body.args[position]

            def turn(deep: Builder, index: Value) -> list[Value]:
                return nest(deep, rest, {**local, arg: index}, part)

            attrs: dict[str, Attr] = {"independent": True} if not rest and not inner_loops else {}
            inner.for_(low, high, inner.index(1), [], turn, name=arg.name, **attrs)
            return []

        order = list(range(len(self.nest.extents)))
        with b.at(self.nest.parallel.span):
            if parts == ONE:
                b.parallel([], lambda inner: nest(inner, order, dict(mapping), inner.index(0)))
            else:
                b.parallel([b.index(parts)], lambda inner, part: nest(inner, order, dict(mapping), part), ["part"])
        return self._kernel(kernel.name, b, params)

    def _kernel(self, name: str, b: Builder, params: Sequence[Value]) -> Kernel:
        body = Block((), tuple(b.ops))
        return self._with_params(Kernel(name, Stage.LOOP, (), body, facts=self.kernel.facts, attrs=self.kernel.attrs, span=self.kernel.span), params)

    def _with_params(self, kernel: Kernel, params: Sequence[Value]) -> Kernel:
        used = {v for op in walk(kernel.body) for v in op.operands}
        return replace(kernel, params=tuple(p for p in params if p in used))

    def _accumulate(self, b: Builder, op: Op, copies: Mapping[Value, Value], part: Value, extra: Mapping[str, Attr]) -> list[Value]:
        """The same, into the copy of a part where the array has copies."""
        memory, value = op.operands[0], op.operands[-1]
        attrs: dict[str, Attr] = {**op.attrs, **extra}
        if memory not in copies:
            return list(b.emit("accumulate", op.operands, attrs))
        if watched_axes(op):
            attrs["watch"] = tuple(axis + 1 for axis in watched_axes(op))
            attrs["of"] = self.names[memory]
        copy = copies[memory]
        return list(b.emit("accumulate", [copy, part, *op.operands[1:-1], b.cast(value, dtype_of(copy.type))], attrs))


def _start(scatter: _Scatter) -> int | float | bool:
    """What a copy holds before anything is combined: what changes nothing in an element of the array's own dtype."""
    start = unchanging(scatter.kind, scatter.type.dtype)
    return int(start) if scatter.wide.is_int else start
