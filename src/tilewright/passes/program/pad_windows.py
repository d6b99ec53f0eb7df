"""Give arrays that are read past their borders a frame of zeros, for CPUs. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a sum whose terms are guarded by nothing but the bounds of one array,

    reduce r, s { y = i + r - 1; if 0 <= y < h { x[y] * w[r] } else { 0 } }

reads a padded copy of that array and has no guard: vectors need no masks then. The copy is scratch, made by a kernel of its own. Sits
before split_reductions. Where a contraction copies columns, all axes that its sum walks along are one in the copy. A term outside the
borders counts as zero times the other factor. Products keep the guard beside the frame (`framed`): their lowering leaves out steps of the sum that read nothing but
zeros (`panels/active_steps.py`).

Phases of a sum (`split_phases.py`) that read the same array share one copy, which has what any of them reads: it is made once, and their code differs in numbers
alone, such as how far from the frame's corner a phase begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis import ranges
from tilewright.analysis.affine import Forms, analyse, gap, lowest
from tilewright.analysis.contraction import find_contraction
from tilewright.analysis.guard_safety import is_safe_without
from tilewright.base.affine import AffineForm
from tilewright.base.dtypes import i64
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, SizeCall, contiguous_strides, maximum, product, without_clamp
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Attrs, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.schedules.matrix import CpuPanels
from tilewright.passes.schedules.plans import Plan, Plans
from tilewright.passes.to_tile.panels.frames import column_step, frame_of
from tilewright.passes.to_tile.panels.sides import order


@record
class _Window:
    """A guarded sum: `guarded` is the `if`, None where there is nothing to ask, `load` the access it protects, `low` and `size` the padded range of each axis."""

    reduction: Op
    guarded: Op | None
    load: Op
    low: tuple[Size, ...]
    size: tuple[Size, ...]
    phased: bool = False
    """Whether the kernel is one phase of a sum: all phases have copies of one form, so that their code is the same."""
    contracts: bool = False
    """Whether the kernel is a product of matrices, whose columns are copied in vectors."""
    joined: int | None = None
    """From which axis on all are one, so that a place along it is that of a result plus that of a term; None: a copy has all axes, but for rows."""
    stays: bool = False
    """Whether the array is read where it lies, since no term is outside."""
    shares: bool = False
    """Whether other phases of the sum read the same copy."""

    @property
    def flat(self) -> bool:
        """Whether rows follow one another in one axis: a vector may then run over the end of a row."""
        return len(self.size) > 1 and (self.joined is not None or self.phased or (self.contracts and self.low[-1] != ZERO and self.low[-2] != ZERO))

    @property
    def rows(self) -> tuple[Size, ...]:
        """How many rows the copy has, by axis. Where rows follow one another there is one more, for vectors that start in the last."""
        return (*self.size[:-2], self.size[-2] + 1) if self.flat else self.size[:-1]

    @property
    def shape(self) -> tuple[Size, ...]:
        """Of the copy."""
        if self.joined is not None:
            return (*self.size[: self.joined], product((*self.rows[self.joined :], self.size[-1])))
        return (*self.size[:-2], self.rows[-1] * self.size[-1]) if self.flat else self.size

    def place(self, b: Builder, indices: Sequence[Value]) -> list[Value]:
        """Where an element of the framed array lies in the copy."""
        if not self.flat:
            return list(indices)
        row = [*indices[:-2], b.add(b.mul(indices[-2], b.index(self.size[-1])), indices[-1])]
        if self.joined is None:
            return row
        *outer, total = row
        steps = contiguous_strides((*self.size[:-2], self.rows[-1] * self.size[-1]))
        for index, step in list(zip(outer, steps, strict=False))[self.joined :]:
            total = b.add(b.mul(index, b.index(step)), total)
        return [*outer[: self.joined], total]



def pad_windows(program: Program, plan: Plans, target: Target) -> tuple[Program, Plans]:
    """The program, and the schedule each call keeps."""
    if target.simt:
        return program, plan
    kept: list[Plan] = []
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    windows = [_read_by(call, schedule, target) for call, schedule in zip(program.calls, plan, strict=True)]
    shared = _shared(program.calls, windows)
    copies: dict[int, Value] = {}
    for number, (call, schedule, window) in enumerate(zip(program.calls, plan, windows, strict=True)):
        if number in shared:
            window, first = shared[number]
        else:
            first = number
        if window is None:
            kept.append(schedule)
            calls.append(call)
            continue
        memory = window.load.operands[0]
        if window.stays:
            kept.append(schedule)
            calls.append(replace(call, kernel=_without_guard(call.kernel, window, memory)))
            continue
        names = dict(zip(call.kernel.params, call.args, strict=True))
        if first not in copies:
            padded = Value(tensor(dtype_of(memory.type), *window.shape, align=16), f"{call.kernel.name}.padded{len(scratch)}")
            assert isinstance(padded.type, Tensor)
            copies[first] = padded
            scratch.append(ProgramArray(padded.name, padded.type, "scratch"))
            kept.append(None)
            calls.append(KernelCall(_copy_kernel(call.kernel, window, padded, target.has_lane_masks), (names[memory], padded.name), call.loops))
        padded = copies[first]
        kernel = _without_guard(call.kernel, window, padded, _skips_steps(schedule, window))
        used = {v for op in walk(kernel.body) for v in op.operands}
        params = tuple(p for p in call.kernel.params if p in used)
        kept.append(schedule)
        calls.append(KernelCall(replace(kernel, params=(*params, padded)), (*(names[p] for p in params), padded.name), call.loops))
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(kept)


def _read_by(call: KernelCall, schedule: Plan, target: Target) -> _Window | None:
    """What a call reads from a copy, or without a guard where it lies; None where it stays as it is."""
    window = None if call.varies or "seldom" in call.kernel.attrs else _find(call.kernel)
    if window is None:
        return None
    # Where pixels are columns, products copy them by their places in the copy, or in the array itself where that has as few rows to be merged.
    plain = target.has_lane_masks and isinstance(schedule, CpuPanels) and (schedule.keep == "b" or _lie_in_rows(call.kernel, window, target))
    if (schedule is None or plain) and _stays_inside(call.kernel, window):
        return replace(window, stays=True)
    if isinstance(schedule, CpuPanels) and schedule.keep == "a" and _reads_rows(call.kernel, window, target):
        return None
    window = replace(window, contracts=schedule is not None)
    return _joined(call.kernel, window) if isinstance(schedule, CpuPanels) and schedule.keep == "a" else window


def _shared(calls: Sequence[KernelCall], windows: Sequence[_Window | None]) -> dict[int, tuple[_Window, int]]:
    """Phases of a sum that read one copy, which has what all of them read: for each call its window, and the first of these calls. Code of such phases differs in
    numbers alone, and the copy is made once. What would read the array itself reads the copy, too, once there is one."""
    groups: dict[object, list[int]] = {}
    for number, (call, window) in enumerate(zip(calls, windows, strict=True)):
        if window is not None and window.phased and not window.stays:
            groups.setdefault(_sum_of(call, window), []).append(number)
    found: dict[int, tuple[_Window, int]] = {}
    for group, padded in groups.items():
        members: dict[int, _Window] = {}
        for number, (call, window) in enumerate(zip(calls, windows, strict=True)):
            own = _unguarded(call, calls[padded[0]], windows[padded[0]]) if window is None else window
            if own is not None and own.phased and _sum_of(call, own) == group:
                members[number] = own
        if len(members) < 2:
            continue
        low = [_least(*several) for several in zip(*(w.low for w in members.values()), strict=True)]
        ends = zip(*(tuple(low + size for low, size in zip(w.low, w.size, strict=True)) for w in members.values()), strict=True)
        size = tuple(-_least(*(-end for end in several)) - first for several, first in zip(ends, low, strict=True))
        for number, window in members.items():
            found[number] = replace(window, low=tuple(low), size=size, stays=False, shares=True), padded[0]
    return found


def _sum_of(call: KernelCall, window: _Window) -> object:
    """What phases have in common that read the same array for the same sum."""
    memory = window.load.operands[0]
    return call.kernel.attrs["phase_of"], call.args[call.kernel.params.index(memory)], memory.type, call.loops


def _unguarded(call: KernelCall, other: KernelCall, window: _Window | None) -> _Window | None:
    """What a phase reads that asks nothing, since all of its terms are inside, of the array that another one reads."""
    kernel = call.kernel
    assert window is not None
    if call.varies or "phase" not in kernel.attrs:
        return None
    name = other.args[other.kernel.params.index(window.load.operands[0])]
    loads = [op for op in walk(kernel.body) if op.opcode in ("load", "store", "accumulate", "atomic") and call.args[kernel.params.index(op.operands[0])] == name]
    sums = [op for op in walk(kernel.body) if op.opcode == "reduce" and any(inner in loads for inner in walk(op.regions[0]))]
    if len(loads) != 1 or len(sums) != 1 or loads[0].opcode != "load" or "watch" in loads[0].attrs:
        return None
    memory = loads[0].operands[0].type
    assert isinstance(memory, Tensor)
    return _Window(sums[0], None, loads[0], (ZERO,) * memory.rank, tuple(memory.shape), True)


def _least(first: Size, *others: Size) -> Size:
    """The least of several sizes."""
    for other in others:
        more = (other - first).constant
        first = -maximum(-first, -other) if more is None else first if more >= 0 else other
    return first


def _reads_rows(kernel: Kernel, window: _Window, target: Target) -> bool:
    """Whether a contraction reads the array where it lies: nothing but the ends of its rows is outside, so most vectors of columns are inside."""
    memory = window.load.operands[0].type
    assert isinstance(memory, Tensor)
    found = find_contraction(kernel)
    return found is not None and not window.phased and window.size[:-1] == memory.shape[:-1] and bool(frame_of(found, target))


def _stays_inside(kernel: Kernel, window: _Window) -> bool:
    """Whether the guard always holds: where there is a result at all, the last index of each loop is that of an extent without its clamp at 0."""
    if any(low != ZERO for low in window.low):
        return False
    forms, memory = analyse(kernel), window.load.operands[0].type
    assert isinstance(memory, Tensor)
    last = {
        arg: without_clamp(forms[extent].constant) - 1
        for op in walk(kernel.body) if op.opcode in ("parallel", "reduce")
        for extent, arg in zip(op.operands, op.regions[0].args, strict=True) if extent in forms and not forms[extent].factors
    }  # fmt: skip
    for index, extent, size in zip(window.load.operands[1:], memory.shape, window.size, strict=True):
        if size == extent:
            continue
        form = forms.get(index)
        if form is None or any(value not in last or not ranges.surely_not_negative(factor) for value, factor in form.factors):
            return False
        reach = sum((last[value] * factor for value, factor in form.factors), form.constant)
        if not ranges.surely_not_negative(extent - 1 - _at_most(reach)):
            return False
    return True


def _at_most(size: Size) -> Size:
    """A size that is not smaller, without quotients: `2 * (n // 2)` is at most n."""
    total = size
    for monomial, factor in size.terms:
        atom = monomial[0] if len(monomial) == 1 else None
        if isinstance(atom, SizeCall) and atom.op == "floordiv" and atom.b.constant and factor > 0 and factor % atom.b.constant == 0:
            total = total - Size(((monomial, factor),)) + atom.a * (factor // atom.b.constant)
    return total


def _lie_in_rows(kernel: Kernel, window: _Window, target: Target) -> bool:
    """Whether the columns of a contraction lie side by side in rows of a contiguous array, or a few elements apart: those of short rows are merged, wherever rows
    are."""
    memory, found = window.load.operands[0].type, find_contraction(kernel)
    assert isinstance(memory, Tensor)
    if found is None or found.b.load is not window.load or found.b.value is not window.load.result or not memory.is_contiguous:
        return False
    return column_step(found, found.indices[order(found, found.n, [found.b], stores=True)[-1]], target) > 0


def _joined(kernel: Kernel, window: _Window) -> _Window:
    """The window with one axis for all that its sum walks along: contractions copy columns by their places in it. Phases keep theirs: rows alone are joined."""
    forms, terms = analyse(kernel), window.reduction.regions[0].args
    walked = [axis for axis, v in enumerate(window.load.operands[1:]) if v not in forms or any(t in forms[v].values for t in terms)]
    if window.phased or len(walked) < 2:
        return window
    return replace(window, joined=walked[0])


def _find(kernel: Kernel) -> _Window | None:
    made = {result: op for op in walk(kernel.body) for result in op.results}
    known, forms = ranges.analyse(kernel), analyse(kernel)
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode == "store"}
    for reduction in walk(kernel.body):
        if reduction.opcode != "reduce" or reduction.attrs["kind"] != "add" or len(reduction.results) != 1:
            continue
        guarded = made.get(reduction.regions[0].yields[0])
        if guarded is None or guarded.opcode != "if" or len(guarded.results) != 1:
            continue
        zero = made.get(guarded.regions[1].yields[0])
        times = made.get(guarded.regions[0].yields[0])
        if zero is None or zero.opcode != "const" or zero.attrs["value"] != 0 or times is None or times.opcode != "mul":
            continue
        tests = _tests(guarded.operands[0], made)
        for factor in times.operands:
            op = made.get(factor)
            while op is not None and op.opcode == "cast":
                op = made.get(op.operands[0])
            if op is None or op.opcode != "load" or op.operands[0] in written or op not in guarded.regions[0].ops or "watch" in op.attrs:
                continue
            others = [o for o in walk(guarded.regions[0]) if o.opcode == "load" and o is not op]
            if not all(is_safe_without(o, guarded.operands[0], made, known) for o in others):
                continue
            window = _window(reduction, guarded, op, tests, known, forms, kernel.attrs)
            if window is not None:
                return window
    return None


def _tests(condition: Value, made: dict[Value, Op]) -> list[Op]:
    """The conjunction's members."""
    op = made.get(condition)
    if op is not None and op.opcode == "and":
        return [*_tests(op.operands[0], made), *_tests(op.operands[1], made)]
    return [] if op is None else [op]


def _window(
    reduction: Op, guarded: Op, load: Op, tests: list[Op], known: dict[Value, ranges.Range], forms: Forms, attrs: Attrs
) -> _Window | None:
    """The padded ranges, when every test is a bound of one of the load's own indices."""
    memory = load.operands[0].type
    assert isinstance(memory, Tensor)
    indices = load.operands[1:]
    low, size = [ZERO] * memory.rank, list(memory.shape)
    for test in tests:
        axes = [d for d, v in enumerate(indices) if _bounds(test, v, memory.shape[d], known, forms)]
        if not axes:
            return None
        for axis in axes:  # several, where two indices are the same
            reach = known.get(indices[axis])
            if reach is None:
                return None
            first = reach.low
            if not ranges.surely_not_negative(-first):
                if "phase" not in attrs:
                    return None
                first = -maximum(ZERO, -first)  # a phase may have no terms before the first element, or none at all
            low[axis], size[axis] = first, reach.high - first + 1
    return _Window(reduction, guarded, load, tuple(low), tuple(size), "phase" in attrs) if tests else None


def _bounds(test: Op, index: Value, extent: Size, known: dict[Value, ranges.Range], forms: Forms) -> bool:
    """Whether a test is a bound of an index: it is not before the first element, or not behind the last. Where all that the index moves by is a multiple of a
    number, the test may be on a part of it: `2 * i + 2 * k - 3 < 9` is `i + k <= 5`."""
    if test.opcode in ("ge", "lt") and test.operands[0] is index:
        bound, wanted = known.get(test.operands[1]), ZERO if test.opcode == "ge" else extent
        return bound is not None and bound.low == bound.high == wanted
    tested, moved = gap(test, forms), forms.get(index)
    if tested is None or moved is None or not moved.factors:
        return False
    found = lowest(tested)
    last: AffineForm[Value] = AffineForm((), extent - 1)
    behind = last.minus(moved)
    return any(not found.minus(lowest(side)).factors and found.constant == lowest(side).constant for side in (moved, behind))


def _copy_kernel(kernel: Kernel, window: _Window, padded: Value, masks: bool) -> Kernel:
    """Rows side by side: zeros, the row, zeros; a row outside is all zeros. With `masks`, vectors may have lanes of all of these."""
    window, memory, padded = _with_long_rows(window, padded)
    assert isinstance(memory.type, Tensor)
    shape = memory.type.shape
    b = Builder(kernel.span)

    def body(at: Builder, *row: Value) -> list[Value]:
        zero, one = at.index(0), at.index(1)
        place = [at.add(v, at.index(low)) for v, low in zip(row, window.low, strict=False)]
        start = at.index(-window.low[-1])
        length = at.op("max", at.op("min", at.index(shape[-1]), at.sub(at.index(window.size[-1]), start)), zero)
        for d, index in enumerate(place):
            if window.rows[d] != shape[d]:  # a row behind the last is one too
                inside = at.logical_and(at.op("ge", index, zero), at.op("lt", index, at.index(shape[d])))
                length = at.select(inside, length, zero)

        def nothing(inner: Builder, z: Value) -> list[Value]:
            return list(inner.multi("store", padded, *window.place(inner, (*row, z)), inner.const(0, dtype_of(memory.type))))

        def copy(inner: Builder, z: Value) -> list[Value]:
            value = inner.op("load", memory, *place, z)
            return list(inner.multi("store", padded, *window.place(inner, (*row, inner.add(z, start))), value))

        at.for_(zero, start, one, [], nothing, name="z", independent=True)
        at.for_(zero, length, one, [], copy, name="z", independent=True)
        at.for_(at.add(length, start), at.index(window.size[-1]), one, [], nothing, name="z", independent=True)
        return []

    def element(at: Builder, *index: Value) -> list[Value]:
        """One element, zero or copied: lanes of a vector are what they are by a mask."""
        place = [at.add(v, at.index(low)) for v, low in zip(index, window.low, strict=True)]
        inside = at.logical_and(at.op("ge", place[-1], at.index(0)), at.op("lt", place[-1], at.index(shape[-1])))
        for d, row in enumerate(place[:-1]):
            if window.rows[d] != shape[d]:
                inside = at.logical_and(inside, at.logical_and(at.op("ge", row, at.index(0)), at.op("lt", row, at.index(shape[d]))))
        (value,) = at.if_(inside, lambda inner: [inner.op("load", memory, *place)], lambda inner: [inner.const(0, dtype_of(memory.type))])
        return list(at.multi("store", padded, *window.place(at, index), value))

    if masks:
        b.parallel([b.index(e) for e in (*window.rows, window.size[-1])], element)
    else:
        b.parallel([b.index(e) for e in window.rows], body)
    phases = kernel.attrs.get("phase_of")
    attrs: dict[str, Attr] = {"phase_of": f"{phases}.pad"} if phases else {}
    if masks:
        attrs["frames"] = True
    return Kernel(f"{kernel.name}.pad", Stage.LOOP, (memory, padded), Block((), tuple(b.ops)), facts=kernel.facts, attrs=MappingProxyType(attrs), span=kernel.span)


def _with_long_rows(window: _Window, padded: Value) -> tuple[_Window, Value, Value]:
    """The window, the array and the copy as they are copied: axes without a frame belong to the axis before them, so that pixels with their channels are one row."""
    memory = window.load.operands[0]
    assert isinstance(memory.type, Tensor)
    shape = memory.type.shape
    framed = max((axis for axis, extent in enumerate(shape) if window.low[axis] != ZERO or window.size[axis] != extent), default=len(shape) - 1)
    inner = product(shape[framed + 1 :])
    # A row more, where rows follow one another, is of this axis too.
    follows = window.flat and window.joined is None and framed == len(shape) - 2
    if framed == len(shape) - 1 or not memory.type.is_contiguous or (window.flat and not follows):
        return window, memory, padded
    low = (*window.low[:framed], window.low[framed] * inner)
    size = (*window.size[:framed], (window.rows[framed] if follows else window.size[framed]) * inner)
    pixels = Value(tensor(memory.type.dtype, *shape[:framed], shape[framed] * inner, align=memory.type.align), memory.name)
    own = padded if follows else Value(tensor(memory.type.dtype, *size, align=16), padded.name)
    return replace(window, low=low, size=size, joined=None, phased=False, contracts=False), pixels, own


def _skips_steps(schedule: Plan, window: _Window) -> bool:
    """Whether the lowering asks which steps of the sum count for some columns."""
    return isinstance(schedule, CpuPanels) and schedule.to_tile == "lower_contraction_cpu" and not window.phased


def _without_guard(kernel: Kernel, window: _Window, padded: Value, framed: bool = False) -> Kernel:
    """The kernel that reads the copy. `framed`: the guard stays, as what is known of the terms (`panels/active_steps.py`)."""
    def block(old: Block, mapping: dict[Value, Value]) -> Block:
        b = Builder()
        rebuild(b, old.ops, mapping)
        return Block(old.args, tuple(b.ops))

    forms = analyse(kernel)
    made = {result: op for op in walk(kernel.body) for result in op.results}
    terms = window.reduction.regions[0].args

    def moved(b: Builder, index: Value, low: Size, mapping: dict[Value, Value]) -> Value:
        """An index counted from the frame's first element. What the index adds and the frame takes away is left out: phases of a sum differ in it alone."""
        own = mapping.get(index, index)
        if window.shares:
            return from_common(b, index, low, mapping)
        if low == ZERO:
            return own
        op = made.get(index)
        if op is not None and op.opcode == "add":
            for term, other in (op.operands, op.operands[::-1]):
                form = forms.get(other)
                if form is not None and not form.factors and form.constant == low:
                    return mapping.get(term, term)
        return b.sub(own, b.index(low))

    def from_common(b: Builder, index: Value, low: Size, mapping: dict[Value, Value]) -> Value:
        """The same in a frame of several phases. What it adds is written where it is 0, too: another phase adds something else."""
        op, form = made.get(index), forms.get(index)
        if form is None or len(form.factors) < 2 or not any(v in terms for v in form.values):
            return mapping.get(index, index) if low == ZERO else b.sub(mapping.get(index, index), b.index(low))
        term, more = index, ZERO
        if op is not None and op.opcode == "add":
            for one, other in (op.operands, op.operands[::-1]):
                known = forms.get(other)
                if known is not None and not known.factors:
                    term, more = one, known.constant
                    break
        far = (more - low).constant
        number = b.index(more - low) if far is None else b.op("const", value=far, dtype=i64, kept=True)
        return b.add(mapping.get(term, term), number)

    def rebuild(b: Builder, ops: tuple[Op, ...], mapping: dict[Value, Value]) -> None:
        for op in ops:
            if op is window.guarded and not framed:
                inner = op.regions[0]
                rebuild(b, inner.ops[:-1], mapping)
                mapping[op.results[0]] = mapping.get(inner.yields[0], inner.yields[0])
            elif op is window.load:
                with b.at(op.span):
                    where = [moved(b, v, low, mapping) for v, low in zip(op.operands[1:], window.low, strict=True)]
                    place = where if padded is op.operands[0] else window.place(b, where)
                    mapping[op.results[0]] = b.op("load", padded, *place, framed=True) if framed else b.op("load", padded, *place)
            elif op.regions:
                operands = tuple(mapping.get(v, v) for v in op.operands)
                b.append(replace(op, operands=operands, regions=tuple(block(r, mapping) for r in op.regions)))
            else:
                b.append(replace(op, operands=tuple(mapping.get(v, v) for v in op.operands)))

    return eliminate_dead(replace(kernel, body=block(kernel.body, {})))
