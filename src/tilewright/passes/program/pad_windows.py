"""Give arrays that are read past their borders a frame of zeros, for CPUs. `Program -> Program`.

In: a program of loop-stage kernels. Out: the same, where a sum whose terms are guarded by nothing but the bounds of one array,

    reduce r, s { y = i + r - 1; if 0 <= y < h { x[y] * w[r] } else { 0 } }

reads a padded copy of that array and has no guard: vectors need no masks then. The copy is scratch, made by a kernel of its own. Sits
before split_reductions. A term outside the borders counts as zero times the other factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis import ranges
from tilewright.analysis.guard_safety import is_safe_without
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size, maximum
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attrs, Block, Kernel, Op, Stage, Value, walk
from tilewright.ir.program import KernelCall, Program, ProgramArray
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.types import Tensor, dtype_of, tensor
from tilewright.passes.schedules.plans import Plan, Plans


@record
class _Window:
    """A guarded sum: `guarded` is the `if`, `load` the access it protects, `low` and `size` the padded range of each axis."""

    reduction: Op
    guarded: Op
    load: Op
    low: tuple[Size, ...]
    size: tuple[Size, ...]

    @property
    def flat(self) -> bool:
        """Whether rows follow one another in one axis: a vector may then run over the end of a row."""
        return len(self.size) > 1 and self.low[-1] != ZERO and self.low[-2] != ZERO

    @property
    def shape(self) -> tuple[Size, ...]:
        """Of the copy. Where rows follow one another there is one more, for vectors that start in the last."""
        return (*self.size[:-2], (self.size[-2] + 1) * self.size[-1]) if self.flat else self.size

    def place(self, b: Builder, indices: Sequence[Value]) -> list[Value]:
        """Where an element of the framed array lies in the copy."""
        if not self.flat:
            return list(indices)
        return [*indices[:-2], b.add(b.mul(indices[-2], b.index(self.size[-1])), indices[-1])]



def pad_windows(program: Program, plan: Plans, target: Target) -> tuple[Program, Plans]:
    """The program, and the schedule each call keeps."""
    if target.simt:
        return program, plan
    kept: list[Plan] = []
    calls: list[KernelCall] = []
    scratch = list(program.scratch)
    for call, schedule in zip(program.calls, plan, strict=True):
        kept.append(schedule)
        window = None if call.varies else _find(call.kernel)
        if window is None:
            calls.append(call)
            continue
        memory = window.load.operands[0]
        padded = Value(tensor(dtype_of(memory.type), *window.shape, align=16), f"{call.kernel.name}.padded{len(scratch)}")
        assert isinstance(padded.type, Tensor)
        kept.insert(-1, None)
        names = dict(zip(call.kernel.params, call.args, strict=True))
        scratch.append(ProgramArray(padded.name, padded.type, "scratch"))
        calls.append(KernelCall(_copy_kernel(call.kernel, window, padded), (names[memory], padded.name), call.loops))
        kernel = _without_guard(call.kernel, window, padded)
        used = {v for op in walk(kernel.body) for v in op.operands}
        params = tuple(p for p in call.kernel.params if p in used)
        calls.append(KernelCall(replace(kernel, params=(*params, padded)), (*(names[p] for p in params), padded.name), call.loops))
    return replace(program, calls=tuple(calls), scratch=tuple(scratch)), tuple(kept)


def _find(kernel: Kernel) -> _Window | None:
    made = {result: op for op in walk(kernel.body) for result in op.results}
    known = ranges.analyse(kernel)
    written = {op.operands[0] for op in walk(kernel.body) if op.opcode == "store"}
    for reduction in walk(kernel.body):
        if reduction.opcode != "reduce" or reduction.attrs["kind"] != "add" or len(reduction.results) != 1:
            continue
        guarded = made.get(reduction.regions[0].yields[0])
        if guarded is None or guarded.opcode != "if" or len(guarded.results) != 1:
            continue
        zero = made.get(guarded.regions[1].yields[0])
        product = made.get(guarded.regions[0].yields[0])
        if zero is None or zero.opcode != "const" or zero.attrs["value"] != 0 or product is None or product.opcode != "mul":
            continue
        tests = _tests(guarded.operands[0], made)
        for factor in product.operands:
            op = made.get(factor)
            while op is not None and op.opcode == "cast":
                op = made.get(op.operands[0])
            if op is None or op.opcode != "load" or op.operands[0] in written or op not in guarded.regions[0].ops or "watch" in op.attrs:
                continue
            others = [o for o in walk(guarded.regions[0]) if o.opcode == "load" and o is not op]
            if not all(is_safe_without(o, guarded.operands[0], made, known) for o in others):
                continue
            window = _window(reduction, guarded, op, tests, made, known, kernel.attrs)
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
    reduction: Op, guarded: Op, load: Op, tests: list[Op], made: dict[Value, Op], known: dict[Value, ranges.Range], attrs: Attrs
) -> _Window | None:
    """The padded ranges, when every test is a bound of one of the load's own indices."""
    memory = load.operands[0].type
    assert isinstance(memory, Tensor)
    indices = load.operands[1:]
    low, size = [ZERO] * memory.rank, list(memory.shape)
    for test in tests:
        axis = next((d for d, v in enumerate(indices) if v is test.operands[0]), None) if test.opcode in ("ge", "lt") else None
        if axis is None:
            return None
        bound = known.get(test.operands[1])
        wanted = ZERO if test.opcode == "ge" else memory.shape[axis]
        reach = known.get(indices[axis])
        if bound is None or bound.low != wanted or bound.high != wanted or reach is None:
            return None
        first = reach.low
        if not ranges.surely_not_negative(-first):
            if "phase" not in attrs:
                return None
            first = -maximum(ZERO, -first)  # a phase may have no terms before the first element, or none at all
        low[axis], size[axis] = first, reach.high - first + 1
    return _Window(reduction, guarded, load, tuple(low), tuple(size)) if tests else None


def _copy_kernel(kernel: Kernel, window: _Window, padded: Value) -> Kernel:
    """Rows side by side: zeros, the row, zeros; a row outside is all zeros."""
    memory = window.load.operands[0]
    assert isinstance(memory.type, Tensor)
    shape = memory.type.shape
    b = Builder(kernel.span)

    def body(at: Builder, *row: Value) -> list[Value]:
        zero, one = at.index(0), at.index(1)
        place = [at.add(v, at.index(low)) for v, low in zip(row, window.low, strict=False)]
        start = at.index(-window.low[-1])
        length = at.op("max", at.op("min", at.index(shape[-1]), at.sub(at.index(window.size[-1]), start)), zero)
        for d, index in enumerate(place):
            if window.size[d] != shape[d]:
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

    rows = [*window.size[:-2], window.size[-2] + 1] if window.flat else window.size[:-1]
    b.parallel([b.index(e) for e in rows], body)
    phases = kernel.attrs.get("phase_of")
    attrs = MappingProxyType({"phase_of": f"{phases}.pad"} if phases else {})
    return Kernel(f"{kernel.name}.pad", Stage.LOOP, (memory, padded), Block((), tuple(b.ops)), facts=kernel.facts, attrs=attrs, span=kernel.span)


def _without_guard(kernel: Kernel, window: _Window, padded: Value) -> Kernel:
    def block(old: Block, mapping: dict[Value, Value]) -> Block:
        b = Builder()
        rebuild(b, old.ops, mapping)
        return Block(old.args, tuple(b.ops))

    def rebuild(b: Builder, ops: tuple[Op, ...], mapping: dict[Value, Value]) -> None:
        for op in ops:
            if op is window.guarded:
                inner = op.regions[0]
                rebuild(b, inner.ops[:-1], mapping)
                mapping[op.results[0]] = mapping.get(inner.yields[0], inner.yields[0])
            elif op is window.load:
                with b.at(op.span):
                    where = [mapping.get(v, v) for v in op.operands[1:]]
                    moved = [v if low == ZERO else b.sub(v, b.index(low)) for v, low in zip(where, window.low, strict=True)]
                    mapping[op.results[0]] = b.op("load", padded, *window.place(b, moved))
            elif op.regions:
                operands = tuple(mapping.get(v, v) for v in op.operands)
                b.append(replace(op, operands=operands, regions=tuple(block(r, mapping) for r in op.regions)))
            else:
                b.append(replace(op, operands=tuple(mapping.get(v, v) for v in op.operands)))

    return eliminate_dead(replace(kernel, body=block(kernel.body, {})))
