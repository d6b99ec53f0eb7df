"""Kernels one after another on devices of their own, with parts of a batch under way in all of them at once.

In: stages (a kernel and what it takes besides the batch), a device for each, and a batch; out: what the last stage gives for it. The
batch is cut into microbatches along its first axis; while one is in the second stage the next is in the first. Results go from GPU
to GPU by peer copies. What a stage takes besides the batch is copied to its device when the pipeline is made.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tilewright.base import dtypes
from tilewright.base.errors import UserError, public_methods
from tilewright.distributed.data_parallel import (
    DataParallel,
    is_kernel,
    named_devices,
    ranges,
    read_value,
    without_gaps,
)
from tilewright.distributed.heterogeneous import moved
from tilewright.execute.calls.arguments import read_argument
from tilewright.execute.calls.callable_kernel import TunableKernel
from tilewright.execute.devices import Device, array_device, device_of, find_device, kind_of, own_memory
from tilewright.runtime.core import streams
from tilewright.runtime.core.device_threads import all_done, thread_of
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree.batch_axes import find_split
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArgSpec, ArrayArg

if TYPE_CHECKING:
    from tilewright.runtime.core.futures import Future


class PipelineStage:
    """A kernel, with all its arguments but the first, which is the batch."""

    def __init__(
        self, kernel: TunableKernel, args: tuple[object, ...] = (), keywords: dict[str, object] | None = None
    ) -> None:
        names = kernel.parameter_names
        if not names:
            raise UserError.at("TW016", f"{kernel.__name__} takes no batch", kernel.function.span)
        self.kernel, self.batch = kernel, names[0]
        bound = kernel.bound(None, *args, **(keywords or {}))
        span = kernel.function.span
        self.constants = {name: read_value(name, value, span) for name, value in bound.items() if name != self.batch}

    def on(self, device: Device) -> PipelineStage:
        """The same with its constants there."""
        found = PipelineStage.__new__(PipelineStage)
        found.kernel, found.batch = self.kernel, self.batch
        found.constants = {
            n: moved(v, device) if isinstance(v, np.ndarray | DeviceArray) else v for n, v in self.constants.items()
        }
        return found

    def specs(self, batch: ArgSpec) -> tuple[ArgSpec, ...]:
        span = self.kernel.function.span
        given = {name: read_argument(name, value, span).spec for name, value in self.constants.items()}
        return tuple(batch if name == self.batch else given[name] for name in self.kernel.parameter_names)


def stage(kernel: TunableKernel, *args: object, **keywords: object) -> PipelineStage:
    """A stage of a pipeline: a kernel whose first argument is the batch, and its other arguments."""
    return PipelineStage(kernel, args, keywords)


@dataclass(frozen=True)
class PipelineStep:
    """One microbatch in one stage: its part of the batch, and when it ran, in seconds from the call."""

    stage: str
    device: str
    start: int
    stop: int
    begin: float
    end: float

    def __str__(self) -> str:
        return f"{self.stage} on {self.device}: {self.start}..{self.stop}, {self.begin * 1e3:.3f}..{self.end * 1e3:.3f} ms"


@public_methods("__init__", "__call__")
class Pipeline:
    """Stages on devices. `last` says what ran where and when in the latest call."""

    def __init__(self, stages: Sequence[object], devices: object, microbatches: int | None = None) -> None:
        made = [_stage(item) for item in stages]
        self.devices = named_devices(devices)
        if not made or len(made) != len(self.devices):
            raise UserError.at(
                "TW016", f"a pipeline has {len(made)} stage(s) and {len(self.devices)} device(s)", help="give one for each stage"
            )
        wanted = microbatches if microbatches is not None else 2 * len(made) if len(made) > 1 else 1
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise UserError.at("TW016", f"microbatches is {microbatches!r}", help="give a whole number from 1 on")
        self.microbatches = wanted
        self.stages = [item.on(device) for item, device in zip(made, self.devices, strict=True)]
        self.last: tuple[PipelineStep, ...] = ()
        self._checked: set[ArgSpec] = set()

    def __repr__(self) -> str:
        parts = (f"{s.kernel.__name__} on {d.id}" for s, d in zip(self.stages, self.devices, strict=True))
        return f"<pipeline {', '.join(parts)}; {self.microbatches} microbatches>"

    def __call__(self, batch: object, *, asynchronous: bool = False) -> Any:
        streams.refuse_in_capture("a call of a pipeline")
        if asynchronous:
            from tilewright.runtime.core.host_queue import HostQueue

            after: list[Any] = [batch] if isinstance(batch, streams.FUTURES) else []
            return HostQueue("pipeline").submit(lambda: self(batch), after)
        first = self.stages[0]
        span = first.kernel.function.span
        values = read_value(first.batch, batch, span)
        if not isinstance(values, np.ndarray | DeviceArray) or not values.ndim:
            raise UserError.at(
                "TW009", f"the batch of a pipeline is {batch!r}", span, "give an array whose first axis is that of the batch"
            )
        count = max(1, min(self.microbatches, values.shape[0]))
        if count > 1:
            self._check(read_argument(first.batch, values, span).spec)
        home = device_of([values])
        if home is not None:
            find_device(home).runtime.synchronize()
        cut = ranges(values.shape[0], [1.0] * count)
        cut = [(start, stop) for start, stop in cut if stop > start] or [(0, 0)]
        result = _PipelineResult(find_device(home) if home is not None else None, cut)
        state: list[Any] = [values[start:stop] for start, stop in cut]
        self.last = self._run(state, cut, result)
        return result.array

    def _run(self, state: list[Any], cut: Sequence[tuple[int, int]], result: _PipelineResult) -> tuple[PipelineStep, ...]:
        """Every microbatch through every stage; `state` has what each microbatch is by now."""
        began = time.perf_counter()
        latest: dict[int, Future[Any]] = {}
        futures: list[Future[Any]] = []
        # Handed in as they can run: no step waits for a later one, also where stages share a device.
        for number, position in sorted(
            ((n, p) for n in range(len(cut)) for p in range(len(self.stages))), key=lambda step: (step[0] + step[1], step[1])
        ):
            device = self.devices[position]
            run = functools.partial(self._step, state, number, position, result, began)
            latest[number] = thread_of(device.id).submit(run, [latest[number]] if position else [])
            futures.append(latest[number])
        return tuple(all_done(futures))

    def _step(self, state: list[Any], number: int, position: int, result: _PipelineResult, began: float) -> PipelineStep:
        begin = time.perf_counter()
        is_last = position == len(self.stages) - 1
        item, device = self.stages[position], self.devices[position]
        values = {item.batch: moved(state[number], device), **item.constants}
        out = result.place(number, device) if is_last else None
        made = item.kernel.runner.run({name: values[name] for name in item.kernel.parameter_names}, device, out)
        if isinstance(made, tuple):
            raise UserError.at(
                "TW009", f"{item.kernel.__name__} gives {len(made)} results; a stage has one", item.kernel.function.span
            )
        device.runtime.synchronize()
        state[number] = None if is_last else made
        if is_last:
            result.take(number, made)
        end = time.perf_counter()
        return PipelineStep(item.kernel.__name__, device.id, *result.cut[number], begin - began, end - began)

    def _check(self, batch: ArgSpec) -> None:
        """Every stage must do the same for a part of the batch as for all of it."""
        if batch in self._checked:
            return
        spec = batch
        for item in self.stages:
            typed = check_kernel(item.kernel.function, item.specs(spec))
            split = find_split(typed, (item.batch, 0))
            span = item.kernel.function.span
            shared = [name for name, _ in split.axes if name in item.constants]
            if shared:
                raise UserError.at(
                    "TW012",
                    f"'{shared[0]}' of {item.kernel.__name__} has the axis of the batch, which is cut",
                    span,
                    "use microbatches=1",
                )
            if len(typed.outputs) != 1 or split.axis(typed.outputs[0].name) != 0:
                raise UserError.at(
                    "TW012",
                    f"the result of {item.kernel.__name__} does not have the batch as its first axis",
                    span,
                    "use microbatches=1",
                )
            spec = ArrayArg(typed.outputs[0].dtype, typed.outputs[0].rank)
        self._checked.add(batch)


def _stage(item: object) -> PipelineStage:
    if isinstance(item, PipelineStage):
        return item
    if is_kernel(item):
        return PipelineStage(cast("TunableKernel", item))
    raise UserError.at(
        "TW009", f"{item!r} is no stage of a pipeline", help="give kernels, or tw.stage(kernel, …) with its other arguments"
    )


class _PipelineResult:
    """What comes out of a pipeline, where the batch was. Only the thread of the last stage touches it until all is done."""

    def __init__(self, home: Device | None, cut: Sequence[tuple[int, int]]) -> None:
        self.home, self.cut = home, cut
        self.array: Any = None

    def place(self, number: int, device: Device) -> Any:
        """Where a microbatch's result can be written at once; None where it has to be copied."""
        if self.array is None or kind_of(device).simulated:
            return None
        own = self.array[self.cut[number][0] : self.cut[number][1]]
        if isinstance(own, np.ndarray):
            return own if array_device(device) is None else None
        return own if self.home is not None and device.id == self.home.id else None

    def take(self, number: int, made: Any) -> None:
        """A microbatch's result. The first one says what the whole is like."""
        if len(self.cut) == 1:
            self.array = moved(np.asarray(made) if isinstance(made, np.generic) else made, self.home)
            return
        if self.array is None:
            shape = (self.cut[-1][1], *made.shape[1:])
            if self.home is None:
                self.array = np.empty(shape, made.dtype.numpy if isinstance(made, DeviceArray) else made.dtype)
            else:
                dtype = made.dtype if isinstance(made, DeviceArray) else dtypes.from_numpy(made.dtype)
                assert dtype is not None
                self.array = own_memory(self.home).empty(shape, dtype)
        own = self.array[self.cut[number][0] : self.cut[number][1]]
        if isinstance(own, np.ndarray):
            values = made.on_host() if isinstance(made, DeviceArray) else made
            if not np.may_share_memory(own, values):
                own[...] = values
        elif isinstance(made, np.ndarray):
            own.copy_from(without_gaps(made))
        elif not made.is_same(own):
            assert self.home is not None
            gpu = own_memory(self.home)
            gpu.copy(own, made)
            gpu.synchronize()


def parallel(
    what: Any,
    devices: Sequence[str | Device],
    *,
    data: bool = False,
    model: bool = False,
    shares: Sequence[float] | None = None,
    along: tuple[str, int] | None = None,
    microbatches: int | None = None,
) -> Any:
    """A kernel whose batch is split over devices (`data`), or stages that are placed on them one by one (`model`).

    Without either, a kernel is split and a list of stages is placed. `shares` says how much of the batch each device gets, `along` which
    axis of which array is the batch's where the compiler should not choose; `microbatches` into how many parts a pipeline cuts it.
    """
    several = isinstance(what, list | tuple)
    if (data and model) or (data and several) or (model and not several):
        raise UserError.at("TW016", "parallel() splits one kernel with data=True, or places a list of stages with model=True")
    if several:
        if shares is not None or along is not None:
            raise UserError.at("TW016", "shares= and along= are for data=True", help="a pipeline has microbatches=")
        return Pipeline(what, devices, microbatches)
    if not is_kernel(what):
        raise UserError.at("TW009", f"{what!r} is no kernel", help="mark the function with @tw.kernel")
    if microbatches is not None:
        raise UserError.at("TW016", "microbatches= is for model=True", help="data=True has shares=")
    return DataParallel(what, devices, shares, along)
