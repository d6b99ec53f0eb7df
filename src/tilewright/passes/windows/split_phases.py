"""Cut sums whose terms count only where an index divides into phases. `Program -> Program`.

In: a program whose sums have one condition each (`join_guards.py`). Out: the same, where a kernel whose sum asks `p % s == 0`, with p made of an index of
the results and one of the sum, is one kernel for each rest of that index: of its sum only the terms are left that count, and `p // s` is affine.
Strided transposed convolutions become convolutions without steps, one for each phase of the results:

    parallel o { reduce r { p = o + 1 - r; if p % 2 == 0 and p // 2 < n { x[p // 2] * w[r] } else { 0 } }; store y[o] }
    -> parallel o (of length / 2, rounded up) { reduce t { if o + t < n … { x[o + t - 1] * w[3 - 2 t] } … }; store y[2 o] }
       parallel o (of length / 2)             { reduce t { if o + t < n … { x[o + t] * w[2 - 2 t] } … };     store y[2 o + 1] }

Where such a sum runs over a size that is to become a number (`later`), the kernel stays whole, and says so in `waits`: its phases are cut once, with that number.

Several such indices give the product of their phases. Where phases have no terms, one kernel before all others writes what is made of an empty sum to all
results. Terms run upwards through what they read, so that windows are recognised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, lcm, prod
from types import MappingProxyType

from tilewright.analysis.affine import Affine, Forms, analyse, floored, quotient
from tilewright.base.affine import combined
from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, without_clamp
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.rewrite import clone_ops, eliminate_dead, rewrite
from tilewright.ir.types import INDEX, Tensor, dtype_of
from tilewright.passes.common.simplify import simplify
from tilewright.passes.windows.guards import GuardTest, divisor_of, emit, guard_tests, remainder
from tilewright.passes.windows.join_guards import flattened, is_sum, join_guards

MOST = 32
"""Phases of one kernel: each is code of its own."""


def split_phases(program: Program, later: frozenset[str] = frozenset(), target: Target | None = None) -> Program:
    """The program with such kernels cut."""
    shares = target is not None and not target.simt
    calls: list[KernelCall] = []
    for call in program.calls:
        kernels = () if call.varies or is_watched(call.kernel) else _phases(call.kernel, later, shares)
        calls += [KernelCall(kernel, call.args, call.loops) for kernel in kernels] or [call]
    return replace(program, calls=tuple(calls))


@record
class _Divided:
    """A sum whose terms count only where its tests hold, each with a divisor."""

    reduction: Op
    tests: tuple[GuardTest, ...]


def _phases(kernel: Kernel, later: frozenset[str], shares: bool) -> tuple[Kernel, ...]:
    """The kernel's phases, or itself where they have to wait; none where it has no such sum. `shares`: code of phases that differ in numbers alone is generated once."""
    nest = _nest(kernel)
    if nest is None:
        return ()
    forms = analyse(kernel)
    periods: dict[int, int] = {}
    for divided in _divided(kernel, nest, forms):
        for test in divided.tests:
            assert test.form is not None
            own = _numbers(test.form, (*nest.regions[0].args, *divided.reduction.regions[0].args))
            if own is None:
                continue
            for position, index in enumerate(nest.regions[0].args):
                period = test.divisor // gcd(own.get(index, 0), test.divisor)
                periods[position] = lcm(periods.get(position, 1), period)
    for position, period in (*_digits(kernel, nest, forms).items(), *_inner(kernel, nest, forms).items()) if shares else ():
        periods[position] = lcm(periods.get(position, 1), period)
    periods = {position: period for position, period in periods.items() if period > 1}
    found = _divided(kernel, nest, forms)
    waits = {name for divided in found for v in divided.reduction.operands if (name := forms[v].constant.name) is not None and not forms[v].factors} & later
    if waits:
        return (replace(kernel, attrs=MappingProxyType({**kernel.attrs, "waits": tuple(sorted(waits))})),)
    if not (found or periods) or prod(periods.values()) > MOST:
        return ()
    kernels: list[Kernel] = []
    for rests in product(*(range(period) for period in periods.values())):
        cut = {position: (period, rest) for (position, period), rest in zip(periods.items(), rests, strict=True)}
        kernels.append(_finished(_with_rests(kernel, nest, cut, forms, len(kernels)), shares))
    full = [k for k in kernels if any(op.opcode == "reduce" for op in walk(k.body))]
    empty = _empty(kernel, nest) if len(full) < len(kernels) else None
    return tuple(kernels) if empty is None else (empty, *full)


def _empty(kernel: Kernel, nest: Op) -> Kernel | None:
    """The kernel with empty sums, for all results: phases without terms are neighbours of others, and whole rows are written faster than they are. None where
    some phase would read what it has written."""
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode in ("store", "atomic", "accumulate")}
    if any(op.opcode in ("atomic", "accumulate") or (op.opcode == "load" and op.operands[0] in written) for op in walk(kernel.body)):
        return None
    b = Builder(nest.span)
    mapping: dict[Value, Value] = {}
    for op in nest.regions[0].ops:
        if not is_sum(op):
            clone_ops(b, [op], mapping)
            continue
        with b.at(op.span):
            mapping[op.result] = b.const(0, dtype_of(op.result.type))
    changed = replace(nest, regions=(Block(nest.regions[0].args, tuple(b.ops)),))
    body = Block(kernel.body.args, tuple(changed if op is nest else op for op in kernel.body.ops))
    return simplify(eliminate_dead(replace(kernel, name=f"{kernel.name}.empty", body=body)))


def _nest(kernel: Kernel) -> Op | None:
    parallels = [op for op in kernel.body.ops if op.opcode == "parallel"]
    return parallels[0] if len(parallels) == 1 and parallels[0].operands else None


def _divided(kernel: Kernel, nest: Op, forms: Forms) -> list[_Divided]:
    made = {result: op for op in walk(kernel.body) for result in op.results}
    found: list[_Divided] = []
    for op in nest.regions[0].ops:
        flat = flattened(op, made) if is_sum(op) else None
        if flat is None or flat.extents != op.operands:
            continue
        tests = [t for c in flat.conditions for t in guard_tests(c, made, forms) if t.divisor > 1]
        if tests:
            found.append(_Divided(op, tuple(tests)))
    return found


def _digits(kernel: Kernel, nest: Op, forms: Forms) -> dict[int, int]:
    """Which indices of the results products take apart: `x[i // s] * w[i % s]`. By position, the number they are divided by."""
    made = {result: op for op in walk(kernel.body) for result in op.results}
    found: dict[int, int] = {}
    for reduction in (op for op in nest.regions[0].ops if is_sum(op)):
        loads = [op for op in walk(reduction.regions[0]) if op.opcode == "load"]
        taken = {
            opcode: list(dict.fromkeys(v for load in loads for v in load.operands[1:] if (own := made.get(v)) is not None and own.opcode == opcode))
            for opcode in ("mod", "floordiv")
        }
        for rest in taken["mod"]:
            form, divisor = forms.get(made[rest].operands[0]), divisor_of(made[rest], forms)
            if form is None or divisor is None or divisor < 2:
                continue
            same = [v for v in taken["floordiv"] if forms.get(made[v].operands[0]) == form and divisor_of(made[v], forms) == divisor]
            position = next((p for p, index in enumerate(nest.regions[0].args) if form.is_just(index)), None)
            if same and position is not None:
                found[position] = lcm(found.get(position, 1), divisor)
    return found


def _inner(kernel: Kernel, nest: Op, forms: Forms) -> dict[int, int]:
    """Which indices count the results inside a step, whose places they share with another index: `y[s * i + p] = sum`. By position, how many there are."""
    sums = [op for op in nest.regions[0].ops if is_sum(op)]
    if not sums:
        return {}
    found: dict[int, int] = {}
    # Indices that a factor has, too, are one axis in two parts, as groups and the results of a group.
    read = [forms[v] for reduction in sums for op in walk(reduction.regions[0]) if op.opcode == "load" for v in op.operands[1:] if v in forms]
    args = nest.regions[0].args
    for store in (op for op in nest.regions[0].ops if op.opcode == "store"):
        for place in store.operands[1:-1]:
            form = forms.get(place)
            if form is None or len(form.factors) < 2 or _numbers(form, args) is None or form in read:
                continue
            for position, (index, extent) in enumerate(zip(args, nest.operands, strict=True)):
                count = forms[extent].constant.constant if not forms[extent].factors else None
                steps = [abs(factor.constant or 0) for other, factor in form.factors if other is not index]
                if count is not None and count > 1 and form.factor(index) in (Size.of(1), Size.of(-1)) and min(steps) >= count and _leaves_columns(sums, index, args, forms):
                    found[position] = count
    return found


def _leaves_columns(sums: Sequence[Op], index: Value, args: Sequence[Value], forms: Forms) -> bool:
    """Whether the factors that an index walks have results of their own without it. The columns of a head are no steps: each by itself is no product."""
    for reduction in sums:
        loads = [op for op in walk(reduction.regions[0]) if op.opcode == "load"]
        walked = [{arg for arg in args if any(v in forms and arg in forms[v].values for v in op.operands[1:])} for op in loads]
        common = set(args).intersection(*walked)
        if any(index in own and not own - common - {index} for own in walked) and any(index not in own for own in walked):
            return False
    return True


def _numbers(form: Affine, indices: Sequence[Value]) -> dict[Value, int] | None:
    """The factors of a form whose indices are these, as numbers."""
    if any(v not in indices or f.constant is None for v, f in form.factors):
        return None
    return {v: f.constant for v, f in form.factors if f.constant is not None}


# -- one phase ----------------------------------------------------------------------------------------------------------------------


def _with_rests(kernel: Kernel, nest: Op, cut: Mapping[int, tuple[int, int]], forms: Forms, number: int) -> Kernel:
    """The results whose indices leave these rests: index `i` becomes `period * i + rest`."""
    top, b = Builder(kernel.span), Builder(nest.span)
    mapping: dict[Value, Value] = {}
    for op in kernel.body.ops:
        if op is not nest:
            clone_ops(top, [op], mapping)
            continue
        extents: list[Value] = []
        args: list[Value] = []
        for position, (arg, extent) in enumerate(zip(nest.regions[0].args, nest.operands, strict=True)):
            if position in cut and not forms[extent].factors and forms[extent].constant.constant == cut[position][0]:
                mapping[arg] = b.op("const", value=cut[position][1], dtype=i64, kept=True)  # one turn is no loop
                continue
            own = Value(INDEX, arg.name)
            args.append(own)
            extents.append(mapping.get(extent, extent))
            mapping[arg] = own
            if position in cut:
                period, rest = cut[position]
                extents[-1] = _shorter(top, kernel, forms[extent], period, rest, extents[-1])
                # The sum is written for rest 0, too: code of all phases is then the same but for numbers, and is generated once.
                mapping[arg] = b.add(b.mul(own, b.index(period)), b.op("const", value=rest, dtype=i64, kept=True))
        clone_ops(b, nest.regions[0].ops, mapping)
        top.append(replace(nest, operands=tuple(extents), regions=(Block(tuple(args), tuple(b.ops)),)))
    attrs = MappingProxyType({**kernel.attrs, "phase": number, "phase_of": kernel.name})
    return replace(kernel, name=f"{kernel.name}.phase{number}" if cut else kernel.name, body=Block((), tuple(top.ops)), attrs=attrs)


def _shorter(b: Builder, kernel: Kernel, extent: Affine, period: int, rest: int, value: Value) -> Value:
    """How many numbers below an extent leave a rest: `(extent - rest) / period`, rounded up."""
    if extent.factors:
        number = b.add(value, b.index(period - 1 - rest))
        return b.op("floordiv", number, b.index(period))
    size = extent.constant
    open_ = without_clamp(size)
    shapes = {s for p in kernel.params if isinstance(p.type, Tensor) for s in p.type.shape}
    if open_ != size and open_ in shapes:
        size = open_  # no array has a negative extent
    return b.index(floored(size + (period - 1 - rest), period))


def _finished(kernel: Kernel, shares: bool) -> Kernel:
    """A phase with its sums shortened to the terms that count."""
    while True:
        kernel = simplify(_folded(kernel))
        shorter = _shortened(kernel, shares)
        if shorter is None:
            return simplify(_without_zeros(join_guards(kernel)))
        kernel = shorter


def _without_zeros(kernel: Kernel) -> Kernel:
    """Sums all of whose terms are zero, since no tap of the phase divides, are zero."""

    def fold(b: Builder, op: Op) -> Sequence[Value] | None:
        if not is_sum(op):
            return None
        term = op.regions[0].ops[-1].operands[0]
        source = next((o for o in op.regions[0].ops if term in o.results), None)
        if source is None or source.opcode != "const" or source.attrs["value"] != 0:
            return None
        return [b.const(0, dtype_of(op.result.type))]

    return eliminate_dead(rewrite(kernel, fold))


def _folded(kernel: Kernel) -> Kernel:
    """Divisions that leave the same rest for all values of their indices are affine forms and numbers."""
    forms = analyse(kernel)

    def fold(b: Builder, op: Op) -> Sequence[Value] | None:
        if len(op.results) != 1 or op.results[0].type != INDEX or not op.operands:
            return None
        if op.opcode not in ("mod", "floordiv"):
            # What it is made of may have been folded.
            forms[op.result] = combined(op.opcode, [forms.get(v) for v in op.operands]) or forms[op.result]
            return None
        divisor, form = divisor_of(op, forms), forms.get(op.operands[0])
        if divisor is None or form is None:
            return None
        if op.opcode == "mod":
            rest = remainder(form, divisor)
            return None if rest is None else [b.index(rest)]
        found = quotient(form, divisor)
        if found is None:
            return None
        value = emit(b, found)
        forms[value] = found
        return [value]

    return eliminate_dead(rewrite(kernel, fold))


def _shortened(kernel: Kernel, shares: bool) -> Kernel | None:
    """The kernel with one more sum shortened; None where there is none."""
    nest = _nest(kernel)
    assert nest is not None
    forms = analyse(kernel)
    for divided in _divided(kernel, nest, forms):
        reduction = divided.reduction
        for test in divided.tests:
            assert test.form is not None
            own = _numbers(test.form, (*nest.regions[0].args, *reduction.regions[0].args))
            gamma = _rest(test.form.constant, test.divisor)
            if own is None or gamma is None or any(own.get(i, 0) % test.divisor for i in nest.regions[0].args):
                continue
            moving = [v for v in reduction.regions[0].args if own.get(v, 0) % test.divisor]
            if len(moving) == 1:
                return _every(kernel, nest, reduction, moving[0], own[moving[0]], gamma, test.divisor, forms, shares)
    return None


def _rest(size: Size, divisor: int) -> int | None:
    return remainder(Affine((), size), divisor)


def _every(kernel: Kernel, nest: Op, reduction: Op, index: Value, factor: int, gamma: int, divisor: int, forms: Forms, shares: bool) -> Kernel:
    """The sum over only those values of an index for which `factor * index + gamma` divides."""
    period = divisor // gcd(factor, divisor)
    first = next((r for r in range(period) if (factor * r + gamma) % divisor == 0), None)
    region = reduction.regions[0]
    position = region.args.index(index)
    extent = forms[reduction.operands[position]]
    b = Builder(nest.span)
    mapping: dict[Value, Value] = {}
    for op in nest.regions[0].ops:
        if op is not reduction:
            clone_ops(b, [op], mapping)
            continue
        count = None if extent.factors else floored(extent.constant + (period - 1 - (first or 0)), period)
        if first is None or (count is not None and count.constant == 0):
            with b.at(op.span):
                mapping[op.result] = b.const(0, dtype_of(op.result.type))
            continue
        outer = mapping.get(op.operands[position], op.operands[position])
        length = b.index(count) if count is not None else b.op("floordiv", b.add(outer, b.index(period - 1 - first)), b.index(period))
        inner = Builder(op.span)
        args = tuple(Value(INDEX, a.name) for a in region.args)
        mapping.update(zip(region.args, args, strict=True))
        steps = Affine(((args[position], Size.of(period)),), Size.of(first))
        if factor < 0 and count is not None:
            # What is read comes in rising order.
            steps = Affine(((args[position], Size.of(-period)),), (count - 1) * period + first)
        least = steps.constant.constant
        if shares and least is not None:
            # What is added is written where it is 0, too.
            mapping[index] = inner.add(emit(inner, Affine(steps.factors, ZERO)), inner.op("const", value=least, dtype=i64, kept=True))
        else:
            mapping[index] = emit(inner, steps)
        clone_ops(inner, region.ops, mapping)
        extents = tuple(length if p == position else mapping.get(v, v) for p, v in enumerate(op.operands))
        result = Value(op.result.type, op.result.name)
        b.append(replace(op, operands=extents, results=(result,), regions=(Block(args, tuple(inner.ops)),)))
        mapping[op.result] = result
    changed = replace(nest, regions=(Block(nest.regions[0].args, tuple(b.ops)),))
    return replace(kernel, body=Block(kernel.body.args, tuple(changed if op is nest else op for op in kernel.body.ops)))
