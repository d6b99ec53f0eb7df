"""Stopping a kernel at a line of its source in one chosen thread, with the values of its variables.

In: a kernel built with `step` ops, one before each statement, and a `Watcher` of stops that is set for the calls inside a
`with stepping(...)`. Out: a `Stop` for each statement the chosen thread comes to, handed over before it is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from tilewright.base.dtypes import DType
from tilewright.base.source import Span
from tilewright.ir.emulator.frames import BLOCK, LANE, SLOT, THREAD, Frame
from tilewright.ir.emulator.memory.memory import Memory, restrided
from tilewright.ir.emulator.warps.thread import ThreadMachine
from tilewright.ir.nodes import Op, Value
from tilewright.ir.places import block_extents, split_index
from tilewright.ir.types import Tensor, dtype_of

Array = np.ndarray


@dataclass(frozen=True)
class Stop:
    """A thread before a statement. `variables` are Python numbers, and arrays: global ones the very memory, others copies."""

    kernel: str
    function: str
    span: Span
    block: tuple[int, ...]
    thread: tuple[int, ...]
    variables: Mapping[str, object]
    everyone: Callable[[str], Array]
    """A variable in all threads of the block that are at this statement, NaN or 0 where they are not."""

    @property
    def line(self) -> int:
        return self.span.line


@dataclass(frozen=True)
class Steps:
    """Which thread is followed (by its number, or its index), and who is told."""

    told: Callable[[Stop], None]
    kernel: str = ""
    """Empty for every kernel."""
    block: int | tuple[int, ...] = 0
    thread: int | tuple[int, ...] = 0


_current: ContextVar[Steps | None] = ContextVar("steps", default=None)


@contextmanager
def stepping(steps: Steps) -> Iterator[None]:
    """Calls inside stop for `steps`."""
    token = _current.set(steps)
    try:
        yield
    finally:
        _current.reset(token)


def is_stepping(kernel: str) -> bool:
    """Whether calls of that kernel are to stop, so that it must be built with `step` ops."""
    steps = _current.get()
    return steps is not None and steps.kernel in ("", kernel)


class Stepping:
    """The `step` ops of one machine."""

    def __init__(self, machine: ThreadMachine) -> None:
        self.machine = machine
        self.steps = _current.get()
        machine.simple["step"] = self._step
        self.block = block_extents(machine.kernel)

    def _step(self, op: Op, frame: Frame) -> tuple[Array, ...]:
        steps = self.steps
        if steps is None or steps.kernel not in ("", self.machine.kernel.name):
            return ()
        blocks, threads = frame.full(BLOCK), frame.full(THREAD)
        wanted = np.flatnonzero(
            frame.active & (blocks == _linear(steps.block, self.machine.grid)) & (threads == _linear(steps.thread, self.block))
        )
        if wanted.size:
            steps.told(self._stop(op, frame, int(wanted[0])))
        return ()

    def _stop(self, op: Op, frame: Frame, lane: int) -> Stop:
        names = op.attrs.get("names", ())
        assert isinstance(names, tuple)
        values = dict(zip(map(str, names), op.operands, strict=True))
        here = frame.active & (frame.full(SLOT) == frame.full(SLOT)[lane])
        threads = frame.full(THREAD)[here]
        # Taken now: the frame goes on, and a stop may be kept.
        numbers = {name: frame.full(value) for name, value in values.items() if not isinstance(value.type, Tensor)}

        def everyone(name: str) -> Array:
            value = numbers[name]
            found = np.zeros((self.machine.kernel.threads, *value.shape[1:]), value.dtype)
            if dtype_of(values[name].type).is_float:
                found[...] = np.nan
            found[threads] = value[here]
            return found

        grid = self.machine.grid
        return Stop(
            self.machine.kernel.name, str(op.attrs.get("function", self.machine.kernel.name)), op.span,
            split_index(int(frame.full(BLOCK)[lane]), grid), split_index(int(frame.full(THREAD)[lane]), self.block),
            {name: self._value(value, frame, lane) for name, value in values.items()}, everyone,
        )  # fmt: skip

    def _value(self, value: Value, frame: Frame, lane: int) -> object:
        if isinstance(value.type, Tensor):
            return self._array(self.machine.memories[value], frame, lane)
        found = frame.full(value)[lane]
        return plain(found, dtype_of(value.type)) if found.ndim == 0 else np.array(found)

    @staticmethod
    def _array(memory: Memory, frame: Frame, lane: int) -> Array:
        if not memory.owners:
            if memory.flat.size == 0:
                return np.zeros(memory.shape, memory.dtype.numpy)
            size = memory.flat.itemsize
            return restrided(memory.flat[memory.base :], memory.shape, tuple(s * size for s in memory.strides))
        owner = int(frame.full(LANE if memory.space == "local" else SLOT)[lane])
        return np.array(memory.flat[owner * memory.size : (owner + 1) * memory.size].reshape(memory.shape))


def plain(value: object, dtype: DType) -> object:
    """A number as Python has it; what Python has not is a float."""
    number = value.item() if isinstance(value, np.generic) else value
    return number if isinstance(number, bool | int | float) else float(np.asarray(value).astype(np.float32)) if dtype.is_float else number


def _linear(index: int | tuple[int, ...], extents: tuple[int, ...]) -> int:
    """A linear number, x fastest, of an index; -1 where there is none such."""
    if isinstance(index, int):
        return index
    number, step = 0, 1
    for at, extent in zip(index, (*extents, *(1,) * len(index)), strict=False):
        if not 0 <= at < extent:
            return -1
        number, step = number + at * step, step * extent
    return number
