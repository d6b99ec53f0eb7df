"""Large windows are reduced along one axis after the other. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a kernel whose results reduce a window of several axes, of more terms than are written
out for a result, is two: one reduces along one axis, the other the rest of a window. 121 terms of a window of 11 x 11 are 22. Guards
that ask one axis each go with their axis; what only counts the terms inside is a product of two counts. On a GPU windows that overlap little, or not at all, stay as they are.

On a GPU (`separate_windows`) the last axis goes first, for every row:

    parallel %h, %w (%y, %z) { %m = reduce 11, 11 {max} (%a, %b) { x[y + a, z + b] }; … }
    -> parallel %h', %w (%p, %z) { %m = reduce 11 {max} (%b) { x[p, z + b] }; store rows[p, z] }
       parallel %h, %w (%y, %z) { %m = reduce 11 {max} (%a) { rows[y + a, z] }; … }

On a CPU (`separate_columns`) the first axis does: a vector of sums down the columns is whole vectors of memory, whatever the windows' steps are, and
sums along a row, whose elements lie apart where windows do, are as few as the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilewright.analysis.affine import Forms, analyse
from tilewright.analysis.loop_nest import Nest, nest_of
from tilewright.base.cost_model import MapCosts
from tilewright.base.dtypes import DType
from tilewright.base.record import record
from tilewright.base.sizes import Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, is_watched, walk
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, has_effects
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.choose.windows import MOST_TERMS
from tilewright.passes.common.combine import identities
from tilewright.passes.schedules.plans import Plan, Plans

Kept = tuple[Value, Size]
"""An index of the results, and what it runs to."""
LONGEST = 64
"""Terms of a window along one axis; longer sums are not windows."""


CPU_TERMS = 12
"""Terms of a window, on a CPU, up to which all of them are read for each result."""


def separate_windows(program: Program, plans: Plans, target: Target) -> tuple[Program, Plans]:
    """The program with large windows reduced axis by axis, the last axis first."""
    return _separated(program, plans, MOST_TERMS, -1, target.costs.maps) if target.simt and target.has_warps else (program, plans)


def separate_columns(program: Program, plans: Plans, target: Target) -> tuple[Program, Plans]:
    """The program with large windows reduced axis by axis, the first axis first."""
    return (program, plans) if target.simt else _separated(program, plans, CPU_TERMS, 0, None)


def _separated(program: Program, plans: Plans, fewest: int, near: int, costs: MapCosts | None) -> tuple[Program, Plans]:
    """Windows of more than `fewest` terms are reduced along the index at `near` first, where that is less work."""
    calls: list[KernelCall] = []
    schedules: list[Plan] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plans, strict=True):
        last = call
        while schedule is None and not call.varies:
            found = _separate(last, len(scratch), fewest, near, costs)
            if found is None:
                break
            first, last, array = found
            calls.append(first)
            schedules.append(None)
            scratch.append(array)
        calls.append(last)
        schedules.append(schedule)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(schedules)


@record(identity=True)
class _WindowReduction:
    """A reduction over a window, and what its parts depend on."""

    op: Op
    tests: tuple[Value, ...]
    """What must hold for a term to count."""
    ops: tuple[Op, ...]
    """The ops of its body, those of the branch for terms that count included."""
    value: Value
    """The term."""
    load: Op | None


def _separate(call: KernelCall, number: int, fewest: int, near: int, costs: MapCosts | None) -> tuple[KernelCall, KernelCall, ProgramArray] | None:
    kernel = call.kernel
    nest = nest_of(kernel)
    region = nest.parallel.regions[0]
    if is_watched(kernel) or nest.sweeps or not nest.reductions or any(has_effects(op) for op in region.ops if op.opcode not in ("store", "yield")):
        return None
    forms = analyse(kernel)
    for op in nest.reductions:
        extents = [forms[v].constant.constant if not forms[v].factors else None for v in op.operands]
        if len(extents) < 2 or any(e is None or not 1 < e <= LONGEST for e in extents) or prod(e or 0 for e in extents) <= fewest:
            return None
    windows = [_window(op) for op in nest.reductions]
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    loading = [w for w in windows if w is not None and w.load is not None]
    if len(loading) != 1 or None in windows or any(w.load.operands[0] in written for w in loading if w.load is not None):
        return None
    if costs is not None and loading[0].load is not None and _is_less_at_once(loading[0].op, loading[0].load, nest, forms, costs):
        return None
    return _Separation(call, loading[0], [w for w in windows if w is not None], number, near).run()


def _is_less_at_once(op: Op, load: Op, nest: Nest, forms: Forms, costs: MapCosts) -> bool:
    """GPU: whether it is less work for a result to reduce its window at once. Where windows lie apart, few of the results along one axis are needed by others
    than those of their own window; where they overlap much, each is needed by many."""
    indices, args = nest.parallel.regions[0].args, op.regions[0].args
    turns, steps = [forms[v].constant.constant or 1 for v in op.operands], [1] * len(args)
    for position, arg in enumerate(args):
        for form in (forms[v] for v in load.operands[1:] if v in forms and arg in forms[v].values):
            steps[position] = max(1, *(form.factor(index).constant or 1 for index in indices if index in form.values), 1)

    def at_once(first: int, last: int) -> float:
        """A thread's results along the first of these indices share what they read."""
        shared = ((costs.window_apart - 1) * steps[first] + turns[first]) / (costs.window_apart * turns[first])
        return prod(turns[first:last]) * (1 + costs.window_element * min(1.0, shared))

    last = len(args) - 1
    rows = prod(steps[:last]) * (turns[last] * (1 + costs.window_element) + costs.window_stored)
    return at_once(0, last + 1) <= rows + at_once(0, last)


def _window(op: Op) -> _WindowReduction | None:
    """The parts of a reduction whose terms are loads, or counts, under tests; None for all others."""
    kind, region = str(op.attrs["kind"]), op.regions[0]
    if len(op.results) != 1 or kind not in ("add", "max", "min", "mul"):
        return None
    made = {result: inner for inner in region.ops for result in inner.results}
    ops, tests, value = [o for o in region.ops if o.opcode != "yield"], tuple[Value, ...](), region.yields[0]
    branch = made.get(value)
    if branch is not None and branch.opcode == "if":
        then, otherwise = branch.regions
        nothing = made.get(otherwise.yields[0]) or next((o for o in otherwise.ops if otherwise.yields[0] in o.results), None)
        if nothing is None or nothing.opcode != "const" or nothing.attrs["value"] != identities(kind, [dtype_of(op.results[0].type)])[0]:
            return None
        tests, value = _conjuncts(branch.operands[0], made), then.yields[0]
        ops = [*(o for o in ops if o is not branch), *(o for o in then.ops if o.opcode != "yield")]
    loads = [o for o in ops if o.opcode == "load"]
    if any(o.regions or (o.opcode != "load" and not OPS[o.opcode].is_pure) for o in ops) or len(loads) > 1:
        return None
    return _WindowReduction(op, tests, tuple(ops), value, loads[0] if loads else None)


def _conjuncts(value: Value, made: dict[Value, Op]) -> tuple[Value, ...]:
    op = made.get(value)
    if op is not None and op.opcode == "and":
        return (*_conjuncts(op.operands[0], made), *_conjuncts(op.operands[1], made))
    return (value,)


class _Separation:
    def __init__(self, call: KernelCall, window: _WindowReduction, windows: Sequence[_WindowReduction], number: int, near: int) -> None:
        self.call, self.kernel, self.window, self.windows, self.number = call, call.kernel, window, windows, number
        self.near = near
        """Which index of a window is reduced first."""
        self.nest = nest_of(self.kernel)
        self.region = self.nest.parallel.regions[0]
        self.uses: dict[Value, frozenset[Value]] = {}
        for one in windows:
            indices = {*self.region.args, *one.op.regions[0].args}
            for op in one.ops:
                found = frozenset(v for operand in op.operands for v in (self.uses.get(operand) or ({operand} if operand in indices else ())))
                self.uses.update(dict.fromkeys(op.results, found))

    def of(self, value: Value) -> frozenset[Value]:
        own = {*self.region.args, *(v for w in self.windows for v in w.op.regions[0].args)}
        return self.uses.get(value, frozenset({value} if value in own else ()))

    def parts(self, given: Sequence[Value]) -> tuple[list[Value], Value]:
        """What belongs to the indices that are reduced later, and to the one that is reduced first."""
        rest = list(given)
        return rest, rest.pop(self.near)

    def sides(self, window: _WindowReduction) -> tuple[list[Value], list[Value]] | None:
        """The tests of the indices that are reduced later, and those of the one reduced first; None where one asks both."""
        outer, last = self.parts(window.op.regions[0].args)
        rows: list[Value] = []
        columns: list[Value] = []
        for test in window.tests:
            if last in self.of(test) and any(v in self.of(test) for v in outer):
                return None
            (columns if last in self.of(test) else rows).append(test)
        return rows, columns

    def run(self) -> tuple[KernelCall, KernelCall, ProgramArray] | None:
        load = self.window.load
        assert load is not None
        memory = load.operands[0].type
        assert isinstance(memory, Tensor)
        outer, last = self.parts(self.window.op.regions[0].args)
        sides = [self.sides(w) for w in self.windows]
        if any(s is None for s in sides) or any(not self.is_count(w) for w in self.windows if w is not self.window):
            return None
        subscripts = load.operands[1 : 1 + memory.rank]
        self.rows = {axis: v for axis, v in enumerate(subscripts) if any(o in self.of(v) for o in outer)}
        """Axes of the array along which the rows of a window lie, and where a term is."""
        if not self.rows or any(last in self.of(v) for v in self.rows.values()):
            return None
        moved = {v for where in self.rows.values() for v in self.of(where)} & set(self.region.args)
        if not moved:
            return None  # all results reduce the same rows
        rest = [v for axis, v in enumerate(subscripts) if axis not in self.rows]
        own = sides[list(self.windows).index(self.window)]
        assert own is not None
        beside = self.needed([self.window.value, *own[1], *rest], {load})
        elsewhere = {*outer, *moved, *(result for op in self.region.ops for result in op.results)}
        if any(v in elsewhere for op in beside for v in op.operands) or any(v in elsewhere for v in (*rest, *own[1])):
            return None
        forms = analyse(self.kernel)
        if any(v not in forms or any(f.constant is None for _, f in forms[v].factors) for v in self.rows.values()):
            return None
        self.moved, self.last, self.own = moved, last, own
        return self.kernels(load, memory)

    def is_count(self, window: _WindowReduction) -> bool:
        """Whether a reduction only counts, or adds up a constant, for terms inside."""
        made = {result: op for op in window.ops for result in op.results}
        term = made.get(window.value)
        return window.load is None and window.op.attrs["kind"] == "add" and term is not None and term.opcode == "const"

    def needed(self, values: Sequence[Value], stop: set[Op]) -> list[Op]:
        made = {result: op for w in self.windows for op in w.ops for result in op.results}
        chosen: set[int] = set()
        pending = list(values)
        while pending:
            op = made.get(pending.pop())
            if op is not None and op not in stop and id(op) not in chosen:
                chosen.add(id(op))
                pending += op.operands
        return [op for w in self.windows for op in w.ops if id(op) in chosen]

    def kernels(self, load: Op, memory: Tensor) -> tuple[KernelCall, KernelCall, ProgramArray]:
        kept = [(v, e) for v, e in zip(self.region.args, self.nest.extents, strict=True) if v not in self.moved]
        axes = sorted(self.rows)
        # Rows stand where the first index that they take the place of stood.
        place = next(p for p, v in enumerate(self.region.args) if v in self.moved)
        before = [(v, e) for v, e in kept if self.region.args.index(v) < place]
        behind = [(v, e) for v, e in kept if self.region.args.index(v) > place]
        extents = [*(e for _, e in before), *(memory.shape[a] for a in axes), *(e for _, e in behind)]
        array = Value(tensor(self.stored(), *extents, align=16), f"{self.kernel.name}.rows{self.number}")
        first = self.first(load, before, axes, behind, extents, array)
        second = self.second(before, axes, behind, array)
        names = dict(zip(self.kernel.params, self.call.args, strict=True)) | {array: array.name}
        assert isinstance(array.type, Tensor)
        one, two = (KernelCall(k, tuple(names[p] for p in k.params), self.call.loops) for k in (first, second))
        return one, two, ProgramArray(array.name, array.type, "scratch")

    def stored(self) -> DType:
        """The dtype of what is reduced along one axis: the largest of some numbers is one of them."""
        own, term = dtype_of(self.window.op.results[0].type), self.window.value
        made = {result: op for op in self.window.ops for result in op.results}
        cast = made.get(term)
        if self.window.op.attrs["kind"] not in ("max", "min") or cast is None or cast.opcode != "cast" or self.window.load is not made.get(cast.operands[0]):
            return own
        read = dtype_of(cast.operands[0].type)
        return read if read.is_float and own.is_float and read.itemsize < own.itemsize else own

    def finished(self, name: str, b: Builder, array: Value) -> Kernel:
        made = Kernel(name, Stage.LOOP, (), Block((), tuple(b.ops)), facts=self.kernel.facts, attrs=self.kernel.attrs, span=self.kernel.span)
        made = eliminate_dead(made)
        used = {v for op in walk(made.body) for v in op.operands}
        return replace(made, params=tuple(p for p in (*self.kernel.params, array) if p in used))

    def first(self, load: Op, before: Sequence[Kept], axes: Sequence[int], behind: Sequence[Kept], extents: Sequence[Size], array: Value) -> Kernel:
        window, kind = self.window, str(self.window.op.attrs["kind"])
        dtype = dtype_of(window.op.results[0].type)
        b = Builder(self.kernel.span)
        outside: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], outside)

        def body(inner: Builder, *indices: Value) -> list[Value]:
            local = dict(outside)
            local.update(zip((v for v, _ in before), indices, strict=False))
            rows = dict(zip(axes, indices[len(before) :], strict=False))
            local.update(zip((v for v, _ in behind), indices[len(before) + len(axes) :], strict=True))

            def value(deep: Builder, deepest: dict[Value, Value]) -> list[Value]:
                subscripts = load.operands[1:]
                clone_ops(deep, self.needed([v for a, v in enumerate(subscripts) if a not in rows], set()), deepest)
                where = [rows[a] if a in rows else deepest.get(v, v) for a, v in enumerate(subscripts)]
                (deepest[load.results[0]],) = deep.emit("load", [load.operands[0], *where], load.attrs)
                rest = [op for op in self.needed([window.value], {load}) if any(r not in deepest for r in op.results)]
                clone_ops(deep, rest, deepest)
                return [deepest[window.value]]

            def term(deep: Builder, k: Value) -> Sequence[Value]:
                deepest = {**local, self.last: k}
                clone_ops(deep, self.needed(self.own[1], set()), deepest)
                inside: Value | None = None
                for test in self.own[1]:
                    inside = deepest.get(test, test) if inside is None else deep.logical_and(inside, deepest.get(test, test))
                if inside is None:
                    return value(deep, deepest)
                nothing = deep.const(identities(kind, [dtype])[0], dtype)
                return deep.if_(inside, lambda then: value(then, dict(deepest)), lambda otherwise: [nothing])

            extent = self.parts(window.op.operands)[1]
            results = inner.reduce(kind, [outside.get(extent, extent)], term, [self.last.name])
            inner.multi("store", array, *indices, *(inner.cast(r, dtype_of(array.type)) for r in results))
            return []

        names = [*(v.name for v, _ in before), *(f"row{a}" for a in axes), *(v.name for v, _ in behind)]
        with b.at(self.nest.parallel.span):
            b.parallel([b.index(e) for e in extents], body, names)
        return self.finished(f"{self.kernel.name}.rows", b, array)

    def second(self, before: Sequence[Kept], axes: Sequence[int], behind: Sequence[Kept], array: Value) -> Kernel:
        b = Builder(self.kernel.span)
        outside: dict[Value, Value] = {}
        clone_ops(b, [op for op in self.kernel.body.ops if op.opcode != "parallel"], outside)

        def over(inner: Builder, window: _WindowReduction, indices: Sequence[Value], extents: Sequence[Value], tests: Sequence[Value], local: dict[Value, Value], counted: bool) -> Value:
            """A reduction over some indices, of what the rows have or of ones."""
            kind, dtype = str(window.op.attrs["kind"]), dtype_of(window.op.results[0].type)

            def value(deep: Builder, deepest: dict[Value, Value]) -> list[Value]:
                if counted:
                    return [deep.const(1, dtype)]
                clone_ops(deep, self.needed(list(self.rows.values()), set()), deepest)
                where = [*(deepest[v] for v, _ in before), *(deepest.get(self.rows[a], self.rows[a]) for a in axes), *(deepest[v] for v, _ in behind)]
                return [deep.cast(deep.op("load", array, *where), dtype)]

            def term(deep: Builder, *given: Value) -> Sequence[Value]:
                deepest = {**local, **dict(zip(indices, given, strict=True))}
                clone_ops(deep, self.needed(tests, set()), deepest)
                inside: Value | None = None
                for test in tests:
                    inside = deepest.get(test, test) if inside is None else deep.logical_and(inside, deepest.get(test, test))
                if inside is None:
                    return value(deep, deepest)
                nothing = deep.const(identities(kind, [dtype])[0], dtype)
                return deep.if_(inside, lambda then: value(then, dict(deepest)), lambda otherwise: [nothing])

            return inner.reduce(kind, [outside.get(v, v) for v in extents], term, [v.name for v in indices])[0]

        def body(inner: Builder, *own: Value) -> list[Value]:
            local = {**outside, **dict(zip(self.region.args, own, strict=True))}
            by_op = {w.op: w for w in self.windows}
            for op in self.region.ops[:-1]:
                window = by_op.get(op)
                if window is None:
                    clone_ops(inner, [op], local)
                    continue
                outer, last = self.parts(op.regions[0].args)
                later, first = self.parts(op.operands)
                sides = self.sides(window)
                assert sides is not None
                result = over(inner, window, outer, later, sides[0], local, window is not self.window)
                if window is not self.window:
                    columns = over(inner, window, [last], [first], sides[1], local, True)
                    clone_ops(inner, self.needed([window.value], set()), local)
                    result = inner.mul(inner.mul(result, columns), local[window.value])
                local[op.results[0]] = result
            return []

        with b.at(self.nest.parallel.span):
            b.parallel([b.index(e) for e in self.nest.extents], body, [v.name for v in self.region.args])
        return self.finished(self.kernel.name, b, array)
