"""Phases of a sum that are the same but for numbers are lowered once, for CPUs. `Program -> Program`.

In: a program of loop-stage kernels, and their schedules. Out: the same, where the phases of one sum that have the same ops, parameters and schedule are calls of
one kernel, in which the numbers that tell them apart are sizes with names of their own:

    %1 = add %j, 0 … reduce %channels, 2          %1 = add %j, phase$0 … reduce %channels, phase$1 + 1
    %1 = add %j, 1 … reduce %channels, 1          phase$0 = 0, 1; phase$1 = 1, 0

`part_phases` puts the numbers in again after the last pass of kernels. What passes know of sizes holds for these: none is negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.analysis.ranges import surely_not_negative
from tilewright.base.record import record
from tilewright.base.sizes import ZERO, Size
from tilewright.base.target import Target
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Attr, Attrs, Block, Kernel, Op, Value
from tilewright.ir.program import KernelCall, Program, SharedKernel
from tilewright.ir.types import INDEX
from tilewright.passes.schedules.plans import Plan, Plans


@record
class Phase:
    """What tells a call of a joined kernel from others."""

    name: str
    attrs: Attrs
    numbers: Mapping[str, Size]


Phases = tuple[Phase | None, ...]
"""One for each call of a program; None for kernels that are as they were."""


def join_phases(program: Program, plans: Plans, target: Target) -> tuple[Program, Phases]:
    """The program, and what is to be put in for the numbers of each call."""
    calls = list(program.calls)
    phases: list[Phase | None] = [None] * len(calls)
    names: list[str] = []
    for alike in _alike(calls, plans) if not target.simt else ():
        kernels = [calls[position].kernel for position, _ in alike]
        joined = _joined(kernels, [numbers for _, numbers in alike], len(names))
        if joined is None:
            continue
        kernel, values = joined
        names += values
        for n, ((position, _), own) in enumerate(zip(alike, kernels, strict=True)):
            phases[position] = Phase(own.name, own.attrs, MappingProxyType({name: several[n] for name, several in values.items()}))
            calls[position] = replace(calls[position], kernel=kernel)
    if not names:
        return program, ()
    return replace(program, calls=tuple(calls), launch_sizes=(*program.launch_sizes, *names)), tuple(phases)


def part_phases(program: Program, phases: Phases) -> Program:
    """The program with kernels of their own for phases that were joined."""
    if not phases:
        return program
    names = {name for phase in phases if phase is not None for name in phase.numbers}
    calls = []
    for call, phase in zip(program.calls, phases, strict=True):
        if phase is not None:
            own = _with_numbers(call.kernel, phase)
            call = replace(call, kernel=own, shared=SharedKernel(call.kernel, phase.numbers, own))
        calls.append(call)
    return replace(program, calls=tuple(calls), launch_sizes=tuple(name for name in program.launch_sizes if name not in names))


# -- which are alike ------------------------------------------------------------------------------------------------------------------


def _alike(calls: Sequence[KernelCall], plans: Sequence[Plan]) -> Iterator[list[tuple[int, list[Size]]]]:
    """Positions of calls with the same kernel but for numbers, and these."""
    found: dict[object, list[tuple[int, list[Size]]]] = {}
    for position, (call, plan) in enumerate(zip(calls, plans or (None,) * len(calls), strict=True)):
        kernel = call.kernel
        if "phase_of" not in kernel.attrs or call.loops:
            continue
        form = _PhaseForm(kernel)
        others = tuple((name, value) for name, value in kernel.attrs.items() if name != "phase")
        key = (plan, others, tuple(p.type for p in kernel.params), tuple(sorted(kernel.facts.items())), tuple(form.ops))
        found.setdefault(key, []).append((position, form.numbers))
    yield from (several for several in found.values() if len(several) > 1)


class _PhaseForm:
    """A kernel's ops, with whole numbers that operands are left out."""

    def __init__(self, kernel: Kernel) -> None:
        self.ops: list[object] = []
        self.numbers: list[Size] = []
        self._known: dict[Value, tuple[Size, bool]] = {}
        self._places: dict[Value, int] = {}
        for param in kernel.params:
            self._place(param)
        self._block(kernel.body)

    def _place(self, value: Value) -> int:
        return self._places.setdefault(value, len(self._places))

    def _block(self, block: Block) -> None:
        self.ops.append(tuple(self._place(arg) for arg in block.args))
        for op in block.ops:
            number = _number(op)
            if number is not None:
                self._known[op.result] = number
                continue
            operands: list[object] = []
            for value in op.operands:
                number = self._known.get(value)
                operands.append(self._place(value) if number is None else f"number{number[1]}")
                if number is not None:
                    self.numbers.append(number[0])
            results = tuple((self._place(r), r.type) for r in op.results)
            self.ops.append((op.opcode, tuple(operands), results, tuple(sorted(op.attrs.items())), len(op.regions)))
            for region in op.regions:
                self._block(region)


def _number(op: Op) -> tuple[Size, bool] | None:
    """The whole number that an op is, and whether it is kept where it could be left out; None for other ops."""
    if op.opcode == "size":
        value = op.attrs["value"]
        assert isinstance(value, Size)
        return value, False
    if op.opcode == "const" and op.result.type == INDEX:
        value = op.attrs["value"]
        assert isinstance(value, int)
        return Size.of(value), bool(op.attrs.get("kept"))
    return None


# -- one kernel for them --------------------------------------------------------------------------------------------------------------


def _joined(kernels: Sequence[Kernel], numbers: Sequence[Sequence[Size]], first: int) -> tuple[Kernel, dict[str, tuple[Size, ...]]] | None:
    """The kernel that they all are, and the values of its names in each; None where some number may be negative. Names count from `first`."""
    names: dict[tuple[Size, ...], str] = {}
    wanted: list[Size | None] = []
    for alike in zip(*numbers, strict=True):
        if alike.count(alike[0]) == len(alike):
            wanted.append(None)
            continue
        parts = _apart(alike)
        if parts is None:
            return None
        base, rest = parts
        wanted.append(base + Size.of(names.setdefault(rest, f"phase${first + len(names)}")))
    left, numbered = iter(wanted), set[Value]()

    def block(old: Block) -> Block:
        b = Builder()
        for op in old.ops:
            if _number(op) is not None:
                numbered.add(op.result)
                b.append(op)
                continue
            operands = list(op.operands)
            for place, value in enumerate(op.operands):
                size = next(left) if value in numbered else None
                if size is not None:
                    with b.at(op.span):
                        operands[place] = b.op("size", value=size)
            b.append(replace(op, operands=tuple(operands), regions=tuple(block(region) for region in op.regions)))
        return Block(old.args, tuple(b.ops))

    return replace(kernels[0], body=block(kernels[0].body)), {name: values for values, name in names.items()}


def _apart(values: tuple[Size, ...]) -> tuple[Size, tuple[Size, ...]] | None:
    """What sizes have in common, and what each has besides, which is not negative."""
    steps = [(value - values[0]).constant for value in values]
    known = [step for step in steps if step is not None]
    if len(known) == len(values):
        least = min(known)
        return values[0] + least, tuple(Size.of(step - least) for step in known)
    return (ZERO, values) if all(surely_not_negative(value) for value in values) else None


# -- kernels of their own again -------------------------------------------------------------------------------------------------------


def _with_numbers(kernel: Kernel, phase: Phase) -> Kernel:
    known: dict[Size, Size] = {}

    def size(old: Size) -> Size:
        return old.substitute(phase.numbers, known)

    def attribute(old: Attr) -> Attr:
        if isinstance(old, Size):
            return size(old)
        return tuple(map(attribute, old)) if isinstance(old, tuple) else old

    def one(op: Op) -> Op:
        attrs = op.attrs
        if any(isinstance(value, (Size, tuple)) for value in attrs.values()):
            attrs = MappingProxyType({name: attribute(value) for name, value in attrs.items()})
        if not op.regions and attrs is op.attrs:
            return op
        return Op(op.opcode, op.operands, op.results, attrs, tuple(block(region) for region in op.regions), op.span)

    def block(old: Block) -> Block:
        return Block(old.args, tuple([one(op) for op in old.ops]))

    own = {name: attribute(value) for name, value in kernel.attrs.items()} | dict(phase.attrs)
    return replace(kernel, name=phase.name, body=block(kernel.body), grid=tuple(map(size, kernel.grid)), attrs=MappingProxyType(own))
