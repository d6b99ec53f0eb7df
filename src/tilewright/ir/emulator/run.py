"""Calling kernels and programs: arguments are checked against their types, sizes bound, outputs and scratch made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, takewhile

import numpy as np

from tilewright.base.artifact import FAILURE, FAILURE_EXTENT, FAILURE_FIELDS, FAILURE_INDEX, FAILURE_SITE, index_error
from tilewright.base.dtypes import from_numpy, u16, u32
from tilewright.base.errors import TargetLimit, UserError
from tilewright.base.target import DEFAULT_NVPTX, NVPTX, Target
from tilewright.ir.emulator.loop import LoopMachine
from tilewright.ir.emulator.memory.memory import new_array, restrided
from tilewright.ir.emulator.tile import TileMachine
from tilewright.ir.emulator.warps.scheduler import launch
from tilewright.ir.nodes import Kernel, Stage, Value
from tilewright.ir.program import KernelCall, OrderedCalls, OrderedLoop, Program, ProgramArray, call_tree
from tilewright.ir.types import Tensor

Argument = np.ndarray | int | float | bool


def run_kernel(
    kernel: Kernel, arguments: Sequence[Argument], sizes: Mapping[str, int], target: Target = NVPTX[DEFAULT_NVPTX]
) -> None:
    """Run one kernel of any stage; arrays come in parameter order and are written in place. The target says how large warps are."""
    if len(arguments) != len(kernel.params):
        raise UserError.at(
            "TW016", f"kernel {kernel.name} takes {len(kernel.params)} arguments, got {len(arguments)}", kernel.span
        )
    missing = [name for name in kernel.size_names if name not in sizes]
    if missing:
        raise UserError.at("TW014", f"kernel {kernel.name} needs the sizes {', '.join(missing)}", kernel.span)
    for param, argument in zip(kernel.params, arguments, strict=True):
        _check_argument(kernel, param, argument, sizes)
    grid = tuple(size.evaluate(sizes) for size in kernel.grid)
    if any(extent > most for extent, most in zip(grid, target.max_grid, strict=False)):
        raise TargetLimit.at("TW020", f"kernel '{kernel.name}' needs a grid of {grid}, but {target.name} allows {target.max_grid}", kernel.span)
    if kernel.stage is Stage.LOOP:
        LoopMachine(kernel, sizes).launch(arguments)
    elif kernel.stage is Stage.TILE:
        TileMachine(kernel, sizes).launch(arguments)
    else:
        launch(kernel, sizes, arguments, target.simt_warp)


def _check_argument(kernel: Kernel, param: Value, argument: Argument, sizes: Mapping[str, int]) -> None:
    name = f"argument '{param.name}' of kernel {kernel.name}"
    if not isinstance(param.type, Tensor):
        if isinstance(argument, np.ndarray) and argument.size != 1:
            raise UserError.at(
                "TW009", f"{name} is a number, got an array of shape {list(argument.shape)}", kernel.span
            )
        return
    if not isinstance(argument, np.ndarray):
        raise UserError.at("TW009", f"{name} is an array, got {argument!r}", kernel.span)
    dtype = param.type.dtype
    if argument.dtype != dtype.numpy:
        raise UserError.at(
            "TW009", f"{name} has dtype {dtype}, got {from_numpy(argument.dtype) or argument.dtype}", kernel.span
        )
    shape = tuple(s.evaluate(sizes) for s in param.type.shape)
    if argument.shape != shape:
        raise UserError.at("TW004", f"{name} has shape {list(shape)}, got {list(argument.shape)}", kernel.span)
    strides = tuple(s.evaluate(sizes) for s in param.type.strides)
    actual = tuple(s // argument.itemsize for s in argument.strides)
    # The stride of an axis of one element is never used.
    if argument.size and any(e > 1 and s != a for e, s, a in zip(shape, strides, actual, strict=True)):
        raise UserError.at("TW004", f"{name} has strides {list(strides)}, got {list(actual)}", kernel.span)


def run_program(
    program: Program, inputs: Mapping[str, Argument], outputs: Mapping[str, np.ndarray] | None = None, target: Target = NVPTX[DEFAULT_NVPTX]
) -> dict[str, np.ndarray]:
    """Run a program's calls in order; outputs not given are made. Gives all outputs by name."""
    values: dict[str, Argument] = {}
    for wanted in program.inputs:
        if wanted.name not in inputs:
            raise UserError.at("TW008", f"missing input '{wanted.name}' of {program.name}", program.span)
        value = inputs[wanted.name]
        if isinstance(wanted, ProgramArray):
            value = np.asarray(value)
            if value.ndim != wanted.type.rank:
                raise UserError.at(
                    "TW003", f"input '{wanted.name}' has rank {wanted.type.rank}, got {value.ndim}", program.span
                )
        values[wanted.name] = value
    sizes = _bind(program, values)
    for array in program.outputs:
        given = (outputs or {}).get(array.name)
        if given is not None and given.ndim != array.type.rank:
            raise UserError.at(
                "TW003", f"output '{array.name}' has rank {array.type.rank}, got {given.ndim}", program.span
            )
        values[array.name] = new_array(array.type, sizes) if given is None else given
    sizes = _bind(program, values)
    _check_sizes(program, values, sizes)
    for array in program.scratch:
        values[array.name] = np.zeros(FAILURE_FIELDS, np.int64) if array.name == FAILURE else new_array(array.type, sizes)
    for call, seen in calls_in_order(call_tree(program), values, sizes):
        run_kernel(call.kernel, [_viewed(values[name], param, seen) for name, param in zip(call.args, call.kernel.params, strict=True)], seen, target)
        _check_failure(program, values.get(FAILURE))
    results: dict[str, np.ndarray] = {}
    for array in program.outputs:
        result = values[array.name]
        assert isinstance(result, np.ndarray)
        results[array.name] = result
    return results


def calls_in_order(
    items: Sequence[KernelCall | OrderedCalls], values: Mapping[str, Argument], sizes: Mapping[str, int]
) -> Iterator[tuple[KernelCall, Mapping[str, int]]]:
    """Calls in order, those of an ordered loop once for each of its steps; with the sizes each sees. A loop may ask what its calls have left in `values`."""
    for item in items:
        if isinstance(item, KernelCall):
            yield item, sizes
            continue
        for step in _steps(item.loop, values, sizes):
            for turn, calls in item.turns:
                if step % turn.period == turn.turn:
                    yield from calls_in_order(calls, values, {**sizes, item.loop.name: step})


def _steps(loop: OrderedLoop, values: Mapping[str, Argument], sizes: Mapping[str, int]) -> Iterable[int]:
    if loop.count is not None:
        return range(loop.count.evaluate(sizes))
    cell = values[loop.cell]
    assert isinstance(cell, np.ndarray)
    return range(int(cell[()])) if cell.dtype != np.bool_ else takewhile(lambda _: bool(cell[()]), count())


def _check_failure(program: Program, cell: Argument | None) -> None:
    """Raise what a kernel with index checks left behind."""
    if program.sites and isinstance(cell, np.ndarray) and cell[FAILURE_SITE]:
        raise index_error(program.sites, int(cell[FAILURE_SITE]), int(cell[FAILURE_INDEX]), int(cell[FAILURE_EXTENT]))


def _viewed(value: Argument, param: Value, sizes: Mapping[str, int]) -> Argument:
    """The array as the kernel's parameter describes it: passes may merge axes."""
    if not isinstance(param.type, Tensor) or not isinstance(value, np.ndarray):
        return value
    shape = tuple(s.evaluate(sizes) for s in param.type.shape)
    if value.dtype == np.uint8 and param.type.dtype in (u16, u32):
        value = value.view(param.type.dtype.numpy)  # bytes that are read as words
    if shape == value.shape:
        return value
    strides = tuple(s.evaluate(sizes) * value.itemsize for s in param.type.strides)
    return restrided(value, shape, strides)


def _bind(program: Program, values: Mapping[str, Argument]) -> dict[str, int]:
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    shapes = {name: array.shape for name, array in arrays.items()}
    strides = {name: tuple(s // array.itemsize for s in array.strides) for name, array in arrays.items()}
    return program.sizes(shapes, strides, values)


def _check_sizes(program: Program, values: Mapping[str, Argument], sizes: Mapping[str, int]) -> None:
    for array, axis, extent in program.axis_checks():
        value = values[array.name]
        assert isinstance(value, np.ndarray)
        wanted = extent.evaluate(sizes)
        if value.shape[axis] != wanted:
            raise UserError.at(
                "TW004",
                f"'{array.name}' has extent {value.shape[axis]} on axis {axis}, expected {extent} = {wanted}",
                program.span,
            )
    for check in program.checks:
        left, right = check.left.evaluate(sizes), check.right.evaluate(sizes)
        holds = {"eq": left == right, "le": left <= right, "lt": left < right}[check.relation]
        if not holds:
            known = ", ".join(f"{name} = {sizes[name]}" for name in sorted(check.left.names | check.right.names))
            message = check.message.replace("{left}", str(left)).replace("{right}", str(right)).replace("{values}", known)
            raise UserError.at(check.code, message, check.span)
