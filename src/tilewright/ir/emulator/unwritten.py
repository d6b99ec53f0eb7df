"""Elements of arrays of a program that nobody wrote: read by a later statement, or handed out as part of a result.

In: a loop-stage program as its author wrote it, before kernels are fused and arrays padded, and its inputs. Out: nothing, or the `UserError`
(TW050) with the array and the first such element. Programs that write all of every array before they read it, as most do, are not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from tilewright.base.errors import UserError
from tilewright.base.sizes import Size
from tilewright.ir.emulator.frames import Frame
from tilewright.ir.emulator.loop import LoopMachine
from tilewright.ir.emulator.machine import drain
from tilewright.ir.emulator.memory.memory import Memory, fault, new_array
from tilewright.ir.emulator.run import calls_in_order
from tilewright.ir.nodes import Block, Kernel, Op, Value, walk
from tilewright.ir.program import Program, ProgramArray, call_tree
from tilewright.ir.types import Tensor

Array = np.ndarray
Argument = Array | int | float | bool


class _ReadUnwritten(Exception):
    """A load of an element that nobody wrote."""

    def __init__(self, error: UserError) -> None:
        super().__init__()
        self.error = error


class _WatchedMachine(LoopMachine):
    """The loop stage; tells this fault from others."""

    def check_written(self, op: Op, frame: Frame, memory: Memory, places: Array, active: Array | None) -> None:
        try:
            super().check_written(op, frame, memory, places, active)
        except UserError as error:
            raise _ReadUnwritten(error) from None


def check_all_written(program: Program, inputs: Mapping[str, Argument], given: Mapping[str, Array]) -> None:
    """Raise the error of an element that is read or returned though nobody wrote it. `given` are the outputs that the caller made."""
    watched = [a for a in (*program.outputs, *program.scratch) if a.name not in given]
    if all(_is_filled(program, array) for array in watched):
        return
    values = dict(inputs)
    for name in {**inputs, **given}:
        value = given.get(name, inputs.get(name))
        assert value is not None
        written = any(_writes(op, param) for kernel, param in _uses(program, name) for op in walk(kernel.body))
        values[name] = value.copy() if written and isinstance(value, np.ndarray) else value
    arrays = {name: v for name, v in values.items() if isinstance(v, np.ndarray)}
    strides = {name: tuple(s // a.itemsize for s in a.strides) for name, a in arrays.items()}
    sizes = program.sizes({name: a.shape for name, a in arrays.items()}, strides, values)
    marks: dict[str, Array] = {}
    for array in watched:
        made = values[array.name] = new_array(array.type, sizes)
        marks[array.name] = np.zeros(made.shape, np.bool_)
    try:
        for call, seen in calls_in_order(call_tree(program), values, sizes):
            _run_marked(call.kernel, [values[name] for name in call.args], [marks.get(name) for name in call.args], seen)
    except _ReadUnwritten as found:
        raise found.error from None
    except UserError:
        return  # another fault, which the run of the program itself reports
    for array in program.outputs:
        mark = marks.get(array.name)
        if mark is not None and not mark.all():
            _refuse(program, array, mark)


def _run_marked(kernel: Kernel, values: list[Argument], marks: list[Array | None], sizes: Mapping[str, int]) -> None:
    machine, frame = _WatchedMachine(kernel, sizes), Frame(1)
    for param, value, mark in zip(kernel.params, values, marks, strict=True):
        machine.bind(param, value, frame)
        if mark is not None:
            machine.memories[param] = replace(machine.memories[param], written=mark.reshape(-1))
    drain(machine.run(kernel.body, frame))


def _refuse(program: Program, array: ProgramArray, mark: Array) -> None:
    missing = int(mark.size - mark.sum())
    first = [int(i) for i in np.argwhere(~mark)[0]]
    stores = [op for kernel, param in _uses(program, array.name) for op in walk(kernel.body) if _writes(op, param)]
    what = f"{missing} of {mark.size} elements of the result" if missing > 1 else f"one of {mark.size} elements of the result"
    raise fault(
        f"'{array.name}'{first} was never written: {what} would have no value", stores[-1].span if stores else program.span,
        "write every element, or make the array with tw.zeros",
    )  # fmt: skip


def _uses(program: Program, name: str) -> Iterator[tuple[Kernel, Value]]:
    """The kernels that are given an array, and as which parameter."""
    for call in program.calls:
        for param, given in zip(call.kernel.params, call.args, strict=True):
            if given == name:
                yield call.kernel, param


def _writes(op: Op, param: Value) -> bool:
    return op.opcode in ("store", "atomic", "accumulate") and op.operands[0] is param


def _is_filled(program: Program, array: ProgramArray) -> bool:
    """Whether the first kernel that has to do with the array only writes it, and all of it, as the text shows."""
    if any(call.loops for call in program.calls if array.name in call.args):
        return False  # a loop may have no steps
    for kernel, param in _uses(program, array.name):
        uses = [op for op in walk(kernel.body) if param in op.operands]
        return all(op.opcode == "store" for op in uses) and _fills(kernel, kernel.body, param, {})
    return False


def _fills(kernel: Kernel, block: Block, param: Value, known: dict[Value, Size | None]) -> bool:
    """Whether a store in loops over the whole of each axis, under no condition, writes the array. `known`: extents of the indices around."""
    made = {op.result: op for op in walk(kernel.body) if op.opcode in ("size", "const")}
    for op in block.ops:
        if _writes(op, param) and not op.attrs.get("masked") and _is_whole(param, op, known):
            return True
        if op.opcode == "parallel":
            inner = known | {arg: _extent(made.get(v)) for arg, v in zip(op.regions[0].args, op.operands, strict=True)}
            if _fills(kernel, op.regions[0], param, inner):
                return True
        elif op.opcode == "for":
            low, high, step = (_extent(made.get(v)) for v in op.operands[:3])
            whole = low is not None and step is not None and low.constant == 0 and step.constant == 1
            if _fills(kernel, op.regions[0], param, known | {op.regions[0].args[0]: high if whole else None}):
                return True
    return False


def _is_whole(param: Value, store: Op, known: Mapping[Value, Size | None]) -> bool:
    assert isinstance(param.type, Tensor)
    indices = store.operands[1 : 1 + param.type.rank]
    if set(indices) != known.keys() or len(indices) != len(known):
        return False
    return all(known[index] == extent for index, extent in zip(indices, param.type.shape, strict=True))


def _extent(op: Op | None) -> Size | None:
    value = None if op is None else op.attrs["value"]
    return value if isinstance(value, Size) else Size.of(value) if isinstance(value, int) else None
