"""Phases of a sum whose thread-stage kernels are the same but for whole numbers are one function of the module, launched with numbers of each. `Program -> Program`.

In: a program after the last pass. Out: the same, where such calls say what kernel they have in common (`KernelCall.shared`), in which the numbers that tell
them apart are sizes with names of their own:

    %1 = add %i, -2 … store %y, 0, %j, %2        %3 = size phase$0; %1 = add %i, %3 - 2 … store %y, phase$1, %j, %2
    %1 = add %i, -1 … store %y, 1, %j, %2        phase$0 = 0, 1; phase$1 = 0, 1

Passes know every number, so that the code is what it would be for each phase alone. LLVM and the assembler see it once, however many phases there are.
Numbers stay part of the code where an instruction may depend on them: only offsets in sums and products, and indices, become sizes. Where a map of the copy
engine begins is no part of the code: each launch brings its own maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.base.dtypes import DType, i32, i64, u32, u64
from tilewright.base.sizes import Size
from tilewright.codegen.nvptx.emitter import kernel_needs, map_of
from tilewright.ir.build import Builder
from tilewright.ir.nodes import Block, Kernel, Op, Value
from tilewright.ir.program import KernelCall, Program, SharedKernel
from tilewright.ir.types import Scalar

_OPEN = frozenset({"add", "sub", "mul", "load", "store"})
"""Ops that may differ in numbers among their operands."""
_WHOLE = (i32, i64, u32, u64)


def share_alike(program: Program) -> Program:
    """The program whose phases know what they have in common."""
    found: dict[object, list[tuple[int, _KernelForm]]] = {}
    for position, call in enumerate(program.calls):
        if "phase_of" in call.kernel.attrs:
            form = _KernelForm(call.kernel)
            found.setdefault(form.key, []).append((position, form))
    calls, first = list(program.calls), 0
    for alike in found.values():
        if len(alike) > 1:
            first += _share(calls, [position for position, _ in alike], [form.numbers for _, form in alike], first)
    return replace(program, calls=tuple(calls))


def _share(calls: list[KernelCall], positions: Sequence[int], numbers: Sequence[Sequence[int]], first: int) -> int:
    """Let these calls share a kernel whose names count from `first`; returns how many it has."""
    names: dict[tuple[int, ...], str] = {}
    wanted: list[Size | None] = []
    for alike in zip(*numbers, strict=True):
        steps = tuple(number - min(alike) for number in alike)  # no size is negative
        name = names.setdefault(steps, f"phase${first + len(names)}") if any(steps) else ""
        wanted.append(Size.of(name) + min(alike) if name else None)
    common = _with_sizes(calls[positions[0]].kernel, wanted)
    for n, position in enumerate(positions):
        own = calls[position].kernel
        given = MappingProxyType({name: Size.of(steps[n]) for steps, name in names.items()})
        calls[position] = replace(calls[position], shared=SharedKernel(common, given, own))
    return len(names)


class _KernelForm:
    """What a kernel is but for its name, the number of its phase, and whole numbers; and these."""

    def __init__(self, kernel: Kernel) -> None:
        self.numbers: list[int] = []
        self._constants: dict[Value, Op] = {}
        self._places: dict[Value, int] = {}
        self._kernel, self._maps = kernel, kernel_needs(kernel).maps
        for param in kernel.params:
            self._place(param)
        attrs = tuple(sorted((name, value) for name, value in kernel.attrs.items() if name != "phase"))
        launch = (kernel.grid, kernel.threads, tuple(sorted(kernel.facts.items())))
        self.key = (tuple(param.type for param in kernel.params), attrs, launch, self._block(kernel.body))

    def _place(self, value: Value) -> int:
        return self._places.setdefault(value, len(self._places))

    def _block(self, block: Block) -> tuple[object, ...]:
        lines: list[object] = [tuple((self._place(arg), arg.type) for arg in block.args)]
        for op in block.ops:
            if _whole(op) is not None:
                self._constants[op.result] = op
                continue
            operands = tuple(self._operand(op, value) for value in op.operands)
            results = tuple((self._place(r), r.type) for r in op.results)
            lines.append((op.opcode, operands, results, self._attributes(op), tuple(self._block(region) for region in op.regions)))
        return tuple(lines)

    def _attributes(self, op: Op) -> tuple[object, ...]:
        if op.opcode != "tensor_map":
            return tuple(sorted(op.attrs.items()))
        return self._maps.index(map_of(self._kernel, op)), tuple(sorted((name, value) for name, value in op.attrs.items() if name not in ("lower", "upper")))

    def _operand(self, op: Op, value: Value) -> object:
        constant = self._constants.get(value)
        if constant is None:
            return self._place(value)
        number = constant.attrs["value"]
        assert isinstance(number, int)
        if op.opcode not in _OPEN:
            return value.type, number
        self.numbers.append(number)
        return value.type


def _whole(op: Op) -> DType | None:
    """The dtype of a constant that is a whole number; None for other ops."""
    type_ = op.results[0].type if op.opcode == "const" else None
    return type_.dtype if isinstance(type_, Scalar) and type_.dtype in _WHOLE else None


def _with_sizes(kernel: Kernel, wanted: Sequence[Size | None]) -> Kernel:
    """The kernel with sizes in place of some of the numbers that `_KernelForm` finds."""
    left, whole = iter(wanted), dict[Value, DType]()

    def block(old: Block) -> Block:
        b = Builder()
        for op in old.ops:
            dtype = _whole(op)
            if dtype is not None:
                whole[op.result] = dtype
                b.append(op)
                continue
            operands = list(op.operands)
            for place, value in enumerate(op.operands):
                size = next(left) if value in whole and op.opcode in _OPEN else None
                if size is not None:
                    with b.at(op.span):
                        operands[place] = b.cast(b.op("size", value=size), whole[value])
            b.append(replace(op, operands=tuple(operands), regions=tuple(block(region) for region in op.regions)))
        return Block(old.args, tuple(b.ops))

    return replace(kernel, body=block(kernel.body))
