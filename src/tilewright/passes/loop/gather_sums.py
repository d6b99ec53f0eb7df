"""Sums that loops scatter over an array, to places that several indices make, become sums of what each place has. `Program -> Program`.

In: a program at the loop stage. Out: the same, where products that are added to places such as `2 i + p` are sums under conditions, as the rest of the compiler knows transposed convolutions:

    parallel b, g { for c { for i { for p { y[b, g, 2 i + p] += x[b, c, i] * w[c, g, p] } } } }
    -> parallel b, g, o { y[b, g, o] = reduce c, p { i = (o - p) // 2; if (o - p) % 2 == 0 and 0 <= i and i < n { x[b, c, i] * w[c, g, p] } else { 0 } } }

Loops may come in any order. Where the array was filled with zeros right before, it is not read. Terms of one place are added up in the order of the loops that are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched
from tilewright.ir.ops import OPS
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, eliminate_dead
from tilewright.ir.types import Tensor, dtype_of
from tilewright.passes.common.fills import fill_of
from tilewright.passes.windows.guards import emit

MOST = 32
"""Rests of the places of a kernel: `split_phases` cuts no more."""


@record
class _ScatteredSum:
    """A nest around one sum into an array: its loops, the ops that make the term, in order, and the conditions around."""

    loops: dict[Value, Size]
    ops: list[Op]
    conditions: list[Value]
    memory: Value
    places: tuple[Value, ...]
    term: Value


@record
class _PlaceOnAxis:
    """One axis of the array: the index that walks it, by steps of `step`, and what else makes the place."""

    index: Value
    step: int
    rest: Affine
    whole: bool
    """Whether the index is the place itself, and walks the whole axis."""


def gather_sums(program: Program) -> Program:
    """The program with such sums gathered; the very same one where there are none."""
    calls: list[KernelCall] = []
    for call in program.calls:
        found = None if call.varies or is_watched(call.kernel) else _find(call.kernel)
        if found is None:
            calls.append(call)
            continue
        scatter, places = found
        name = dict(zip(call.kernel.params, call.args, strict=True))[scatter.memory]
        cleared = bool(calls) and calls[-1].loops == call.loops and calls[-1].args == (name,) and _clears(calls[-1].kernel)
        if cleared:
            calls.pop()
        calls.append(replace(call, kernel=_gathered(call.kernel, scatter, places, cleared)))
    return program if len(calls) == len(program.calls) and all(a is b for a, b in zip(calls, program.calls, strict=True)) else replace(program, calls=tuple(calls))


def _clears(kernel: Kernel) -> bool:
    """Whether a kernel writes zeros to all of its array, and does nothing else."""
    fill = fill_of(kernel)
    return fill is not None and fill.attrs["value"] == 0


def _find(kernel: Kernel) -> tuple[_ScatteredSum, list[_PlaceOnAxis]] | None:
    nests = [op for op in kernel.body.ops if op.opcode == "parallel"]
    if len(nests) != 1 or not {"accumulate", "store"} & kernel.opcodes or ("mul" not in kernel.opcodes and "fma" not in kernel.opcodes):
        return None
    forms = analyse(kernel)
    scatter = _scatter(nests[0], forms)
    if scatter is None:
        return None
    loads = [op for op in scatter.ops if op.opcode == "load"]
    if len({op.operands[0] for op in loads}) < 2 or scatter.memory in {op.operands[0] for op in loads}:
        return None
    first = next(param for param in kernel.params if any(op.operands[0] is param for op in loads))
    in_first = {v for op in loads if op.operands[0] is first for index in op.operands[1:] if index in forms for v in forms[index].values}
    places = _places(scatter, forms, in_first)
    if places is None or prod(place.step for place in places) > MOST:
        return None
    if any(op.opcode == "load" for op in _apart(scatter)[0]):
        return None  # conditions on data would be read where no loop goes
    made_of = [forms[place].values for place in scatter.places]
    if not any(len(values) > 1 for values in made_of):
        return None
    summed = any(all(index not in values for values in made_of) for index in scatter.loops)
    # Along one axis, with no sum beside, scattering a row is as fast: sums of polynomials' coefficients.
    return (scatter, places) if summed or sum(len(values) > 1 for values in made_of) > 1 else None


def _scatter(nest: Op, forms: Forms) -> _ScatteredSum | None:
    """The nest taken apart; None where it is anything else."""
    loops: dict[Value, Size] = {}
    ops: list[Op] = []
    conditions: list[Value] = []
    around = 0  # ops outside of the innermost loop
    op = nest
    while True:
        around = around if op.opcode == "if" else len(ops)
        if op.opcode in ("parallel", "reduce"):
            extents = [forms.get(v) for v in op.operands]
            if any(extent is None or extent.factors for extent in extents):
                return None
            loops |= {arg: extent.constant for arg, extent in zip(op.regions[0].args, extents, strict=True) if extent is not None}
        elif op.opcode == "for":
            bounds = [forms.get(v) for v in op.operands[:3]]
            if op.results or len(op.operands) != 3 or any(bound is None or bound.factors for bound in bounds):
                return None
            low, high, step = (bound.constant for bound in bounds if bound is not None)
            if low != ZERO or step != ONE:
                return None
            loops[op.regions[0].args[0]] = high
        elif op.opcode == "if":
            if op.results or (len(op.regions) > 1 and any(inner.opcode != "yield" for inner in op.regions[1].ops)):
                return None
            conditions.append(op.operands[0])
        body = [inner for inner in op.regions[0].ops if inner.opcode != "yield"]
        inside = [inner for inner in body if inner.regions]
        effects = [inner for inner in body if inner.opcode in ("store", "accumulate")]
        plain = [inner for inner in body if inner not in inside and inner not in effects]
        if any(inner.opcode != "load" and not OPS[inner.opcode].is_pure for inner in plain):
            return None
        if len(inside) == 1 and not effects and inside[0].opcode in ("for", "if"):
            ops += plain
            (op,) = inside
            continue
        return _with_term(loops, [*ops, *plain], around, conditions, inside, effects[0], forms) if len(effects) == 1 and len(inside) < 2 else None


def _with_term(
    loops: dict[Value, Size], ops: list[Op], around: int, conditions: list[Value], inside: Sequence[Op], effect: Op, forms: Forms
) -> _ScatteredSum | None:
    """What is added to which place. The term may be a sum itself. An element read in one of the first `around` ops is as it was before the innermost loop."""
    memory, *places, value = effect.operands
    made = {result: op for op in (*ops, *inside) for result in op.results}
    if effect.opcode == "accumulate":
        if effect.attrs.get("kind") != "add":
            return None
    else:
        last = made.get(value)
        old = [v for v in last.operands if _reads(made.get(v), memory, places, forms)] if last is not None else []
        if last is None or last.opcode not in ("add", "fma") or len(old) != 1 or (last.opcode == "fma" and last.operands[2] is not old[0]):
            return None
        if made[old[0]] in ops[:around] or sum(old[0] in op.operands for op in (*ops, *inside)) != 1:
            return None
        ops = [op for op in ops if op is not last and old[0] not in op.results]
        if last.opcode == "fma":
            value = Value(value.type, value.name)
            ops.append(Op("mul", last.operands[:2], (value,), span=last.span))
        else:
            value = next(v for v in last.operands if v is not old[0])
    if inside:
        (total,) = inside
        if total.opcode != "reduce" or total.attrs["kind"] != "add" or total.results != (value,) or any(op.regions for op in total.regions[0].ops):
            return None
        if any(extent not in forms or forms[extent].factors for extent in total.operands):
            return None
        loops = loops | {arg: forms[extent].constant for arg, extent in zip(total.regions[0].args, total.operands, strict=True)}
        ops = [*ops, *total.regions[0].ops[:-1]]
        (value,) = total.regions[0].yields
    return _ScatteredSum(loops, ops, conditions, memory, tuple(places), value)


def _reads(op: Op | None, memory: Value, places: Sequence[Value], forms: Forms) -> bool:
    """Whether an op loads the element at a place."""
    if op is None or op.opcode != "load" or op.operands[0] is not memory:
        return False
    return all(a is b or (a in forms and forms[a] == forms.get(b)) for a, b in zip(op.operands[1:], places, strict=True))


def _places(scatter: _ScatteredSum, forms: Forms, in_first: set[Value]) -> list[_PlaceOnAxis] | None:
    """What makes the places, axis by axis. `in_first`: indices of the array that is named first, which walk the axis where others could, too."""
    assert isinstance(scatter.memory.type, Tensor)
    found: list[_PlaceOnAxis] = []
    seen: set[Value] = set()
    for place, extent in zip(scatter.places, scatter.memory.type.shape, strict=True):
        form = forms.get(place)
        if form is None or not form.factors or any(v in seen or v not in scatter.loops or factor.constant is None for v, factor in form.factors):
            return None
        seen |= set(form.values)
        index = max(form.values, key=lambda v: (abs(form.factor(v).constant or 0), v in in_first))
        step = form.factor(index).constant or 0
        if step < 1:
            return None
        rest = Affine(tuple((v, factor) for v, factor in form.factors if v is not index), form.constant)
        found.append(_PlaceOnAxis(index, step, rest, form.is_just(index) and scatter.loops[index] == extent))
    return found


def _gathered(kernel: Kernel, scatter: _ScatteredSum, places: Sequence[_PlaceOnAxis], cleared: bool) -> Kernel:
    memory, dtype = scatter.memory, dtype_of(scatter.term.type)
    assert isinstance(memory.type, Tensor)
    stored = dtype_of(memory.type)  # sums of two-byte floats are carried in f32
    top = Builder(kernel.span)
    mapping: dict[Value, Value] = {}
    clone_ops(top, [op for op in kernel.body.ops if op.opcode not in ("parallel", "yield")], mapping)
    left = [v for v in scatter.loops if all(v is not place.index for place in places)]

    def point(b: Builder, *own: Value) -> list[Value]:
        def terms(inner: Builder, *turns: Value) -> list[Value]:
            local: dict[Value, Value] = {**mapping, **dict(zip(left, turns, strict=True))}
            tests: list[Value] = []
            for place, at in zip(places, own, strict=True):
                tests += _placed(inner, place, at, scatter.loops[place.index], local)
            early, late = _apart(scatter)
            clone_ops(inner, early, local)
            tests += [local.get(c, c) for c in scatter.conditions]

            def then(deep: Builder) -> list[Value]:
                clone_ops(deep, late, local)
                return [local.get(scatter.term, scatter.term)]

            if not tests:
                return then(inner)
            holds = tests[0]
            for test in tests[1:]:
                holds = inner.logical_and(holds, test)
            return list(inner.if_(holds, then, lambda deep: [deep.const(0, dtype)]))

        (total,) = b.reduce("add", [b.index(scatter.loops[v]) for v in left], terms, names=[v.name for v in left])
        if not cleared:
            total = b.add(b.cast(b.op("load", memory, *own), dtype), total)
        return list(b.multi("store", memory, *own, b.cast(total, stored)))

    top.parallel([top.index(extent) for extent in memory.type.shape], point, names=[f"o{axis}" if not place.whole else place.index.name for axis, place in enumerate(places)])
    return eliminate_dead(replace(kernel, body=Block((), tuple(top.ops))))


def _placed(b: Builder, place: _PlaceOnAxis, at: Value, extent: Size, local: dict[Value, Value]) -> list[Value]:
    """The index that has its term at a place, into `local`; and the conditions under which there is one."""
    if place.whole:
        local[place.index] = at
        return []
    moved = Affine(tuple((local[v], factor) for v, factor in place.rest.factors), place.rest.constant)
    apart = b.sub(at, emit(b, moved)) if moved.factors or moved.constant != ZERO else at
    tests: list[Value] = []
    index = apart
    if place.step > 1:
        tests.append(b.op("eq", b.op("mod", apart, b.index(place.step)), b.index(0)))
        index = b.op("floordiv", apart, b.index(place.step))
    local[place.index] = index
    return [*tests, b.op("ge", index, b.index(0)), b.op("lt", index, b.index(extent))]


def _apart(scatter: _ScatteredSum) -> tuple[list[Op], list[Op]]:
    """Ops that conditions need, and the others."""
    made: Mapping[Value, Op] = {result: op for op in scatter.ops for result in op.results}
    needed: set[Op] = set()
    waiting = list(scatter.conditions)
    while waiting:
        op = made.get(waiting.pop())
        if op is not None and op not in needed:
            needed.add(op)
            waiting += op.operands
    return [op for op in scatter.ops if op in needed], [op for op in scatter.ops if op not in needed]
