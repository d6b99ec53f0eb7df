"""Windows whose places wrap around, or stop at the border, read a copy with a border of such elements. `Program -> Program`.

In: a program at the loop stage. Out: the same, where sums (and largest numbers) over windows read an array by places that are no linear function of their indices,
but a function of one:

    total += x[(i + p + n - 1) % n] * w[p]        copy[u] = x[(u + n - 1) % n]; … total += copy[i + p] * w[p]

so that they are convolutions, pools and stencils like others, with neighbours side by side. On GPUs, which read single elements as fast, products of matrices alone.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace

from tilewright.analysis import ranges
from tilewright.analysis.affine import Affine, Forms, analyse
from tilewright.analysis.contraction import find_contraction
from tilewright.base.record import record
from tilewright.base.sizes import ONE, ZERO, Size, maximum, minimum, product
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Stage, Value, is_watched, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import clone_ops, eliminate_dead, rewrite
from tilewright.ir.types import Tensor, dtype_of, tensor

FEWEST = 3
"""Terms of a window from which on a copy pays; windows of unknown length count."""
_ARITHMETIC = frozenset({"add", "sub", "mul", "min", "max", "mod", "floordiv", "select", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "abs", "const", "size"})


@record
class _Place:
    """An index that is a function of one linear one: `root` is that, with values from `low` on, `count` of them; `results` are those of the loops over results in it."""

    root: Value
    low: Size
    count: Size
    results: Size


def copy_borders(program: Program, target: Target | None) -> Program:
    """The program with copies; the very same one where it needs none."""
    if target is None:
        return program
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    for call in program.calls:
        while (found := _find(call.kernel) if "reduce" in call.kernel.opcodes and not call.varies and not is_watched(call.kernel) else None) is not None:
            load, places = found
            memory = load.operands[0]
            assert isinstance(memory.type, Tensor)
            shape = [extent if place is None else place.count for place, extent in zip(places, memory.type.shape, strict=True)]
            type_ = tensor(dtype_of(memory.type), *shape, align=16)
            copy = Value(type_, f"{call.kernel.name}.bordered{len(scratch)}")
            kernel = _reading(call.kernel, load, copy, places)
            if target.simt and find_contraction(kernel) is None:
                break
            names = dict(zip(call.kernel.params, call.args, strict=True))
            scratch.append(ProgramArray(copy.name, type_, "scratch"))
            calls.append(KernelCall(_copying(call.kernel, load, copy, places), (names[memory], copy.name), call.loops))
            used = {v for op in walk(kernel.body) for v in op.operands}
            params = tuple(p for p in call.kernel.params if p in used)
            call = KernelCall(replace(kernel, params=(*params, copy)), (*(names[p] for p in params), copy.name), call.loops)
        calls.append(call)
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)) if len(scratch) > len(program.scratch) else program


def _find(kernel: Kernel) -> tuple[Op, tuple[_Place | None, ...]] | None:
    """A load by such places, axis by axis; None where there is none, or where something else has to do with its array."""
    forms, known = analyse(kernel), ranges.analyse(kernel)
    made = {result: op for op in walk(kernel.body) for result in op.results}
    loops = [op for op in walk(kernel.body) if op.opcode in ("parallel", "reduce")]
    if not all(extent in forms and not forms[extent].factors for op in loops for extent in op.operands):
        return None
    lengths = {arg: forms[extent].constant for op in loops for extent, arg in zip(op.operands, op.regions[0].args, strict=True)}
    results = {arg for op in loops if op.opcode == "parallel" for arg in op.regions[0].args}
    for reduction in (op for op in loops if op.opcode == "reduce"):
        terms = product(lengths[arg] for arg in reduction.regions[0].args)
        if terms.constant is not None and terms.constant < FEWEST:
            continue
        for load in (op for op in reduction.regions[0].ops if op.opcode == "load"):
            memory = load.operands[0]
            users = [op.opcode for op in walk(kernel.body) if memory in op.operands]
            if set(users) != {"load"} or memory not in kernel.params:
                continue
            assert isinstance(memory.type, Tensor)
            places: list[_Place | None] = []
            for index in load.operands[1 : 1 + memory.type.rank]:
                place = _place(index, made, forms, known, results, lengths)
                if place is None and not _is_walked(forms.get(index), memory.type.shape[len(places)], lengths):
                    break
                places.append(place)
            else:
                if any(places):
                    return load, tuple(places)
    return None


def _is_walked(form: Affine | None, extent: Size, lengths: Mapping[Value, Size]) -> bool:
    """Whether loops walk over a whole axis, so that a copy has no more than they read."""
    if form is None or not form.factors or not _is_linear(form, lengths):
        return False
    return len(form.factors) > 1 or any(form.is_just(v) and lengths[v] == extent for v in form.values)


def _is_linear(form: Affine | None, indices: Container[Value]) -> bool:
    return form is not None and all(v in indices for v in form.values)


def _place(
    index: Value, made: Mapping[Value, Op], forms: Forms, known: Mapping[Value, ranges.Range], results: Collection[Value], lengths: Mapping[Value, Size]
) -> _Place | None:
    """What an index is a function of; None where it is linear itself, or a function of several. `lengths` are those of all loops."""
    terms = lengths.keys() - set(results)
    if index not in forms or _is_linear(forms[index], lengths):
        return None
    roots: list[Value] = []
    waiting = [index]
    while waiting:
        value = waiting.pop()
        form = forms.get(value)
        if form is not None and _is_linear(form, lengths):
            if form.factors:
                roots.append(value)
            continue
        op = made.get(value)
        if op is None or op.opcode not in _ARITHMETIC:
            return None
        waiting += op.operands
    if not roots:
        return None
    first = forms[roots[0]]
    if any(forms[other].minus(first).factors for other in roots) or not (set(first.values) & set(results) and set(first.values) & terms):
        return None
    steps = [abs(factor.constant or 0) for _, factor in first.factors]
    if 0 in steps or (max(steps) > 1 and not any(step == 1 and (lengths[v].constant or 0) >= max(steps) for (v, _), step in zip(first.factors, steps, strict=True))):
        return None  # between the places that are read there are others, which may lie anywhere
    reach = known.get(roots[0])
    if reach is None:
        return None
    return _Place(roots[0], reach.low, maximum(reach.high - reach.low + 1, ZERO), product(lengths[v] for v in first.values if v in results))


def _copying(kernel: Kernel, load: Op, copy: Value, places: Sequence[_Place | None]) -> Kernel:
    """The kernel that makes the copy."""
    forms = analyse(kernel)
    made = {result: op for op in walk(kernel.body) for result in op.results}
    memory = load.operands[0]
    assert isinstance(copy.type, Tensor)
    b = Builder(load.span)

    def body(inner: Builder, *indices: Value) -> list[Value]:
        read: list[Value] = []
        for place, index, own in zip(places, load.operands[1:], indices, strict=False):
            if place is None:
                read.append(own)
                continue
            mapping: dict[Value, Value] = {}
            needed = _needed(index, made, forms, forms[place.root])
            for op in needed:
                for value in (*op.operands, *op.results):
                    form = forms.get(value)
                    if form is not None and form.factors and not form.minus(forms[place.root]).factors:
                        # The root itself, or it and a number.
                        apart = form.minus(forms[place.root]).constant + place.low
                        mapping.setdefault(value, inner.add(own, inner.index(apart)))
            clone_ops(inner, [op for op in needed if op.results[0] not in mapping], mapping)
            read.append(mapping[index])
        value = inner.op("load", memory, *read)
        return list(inner.multi("store", copy, *indices, value))

    # Without results there is nothing to read, and no place to stop at.
    turns = [extent if place is None else extent * minimum(place.results, ONE) for place, extent in zip(places, copy.type.shape, strict=True)]
    b.parallel([b.index(extent) for extent in turns], body, names=[f"u{axis}" for axis in range(len(turns))])
    return Kernel(f"{kernel.name}.border", Stage.LOOP, (memory, copy), Block((), tuple(b.ops)), span=kernel.span)


def _needed(index: Value, made: Mapping[Value, Op], forms: Forms, root: Affine) -> list[Op]:
    """The ops between the linear index and the place, in order."""
    found: list[Op] = []

    def visit(value: Value) -> None:
        form = forms.get(value)
        op = made.get(value)
        if op is None or op in found or (form is not None and form.factors and not form.minus(root).factors):
            return
        for operand in op.operands:
            visit(operand)
        found.append(op)

    visit(index)
    return found


def _reading(kernel: Kernel, load: Op, copy: Value, places: Sequence[_Place | None]) -> Kernel:
    """The kernel with its load from the copy."""

    def read(b: Builder, op: Op) -> Sequence[Value] | None:
        if op.results != load.results:
            return None
        indices = [index if place is None else b.sub(place.root, b.index(place.low)) for place, index in zip(places, op.operands[1:], strict=False)]
        return [b.op("load", copy, *indices)]

    return eliminate_dead(rewrite(kernel, read))
