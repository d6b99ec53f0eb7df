"""Independent parts of one kernel on several devices at once, and lists of kernel calls that share results.

In: a kernel whose loops depend on each other in part (or `task`s that name each other as arguments), devices, and, where the cost model
is not to decide, a placement by name. Out: the results, where the inputs are, and what ran where. Each device has a thread; a part begins when the
parts it needs are done, and arrays are copied to a device once, when something there first reads them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base.artifact import ArrayParam, Artifact
from tilewright.base.errors import UserError
from tilewright.base.target import host_cpu
from tilewright.compile.build import describe_program
from tilewright.compile.driver import Signature
from tilewright.compile.pieces import CutProgram, compile_part, cut_kernel
from tilewright.distributed.data_parallel import is_kernel, named_devices, read_value, without_gaps
from tilewright.distributed.placement import Placed, PlacedJob, place
from tilewright.execute.calls.arguments import element_strides, read_argument
from tilewright.execute.calls.callable_kernel import TunableKernel
from tilewright.execute.calls.checks import bind_sizes
from tilewright.execute.calls.outputs import converted, given_outputs, keep, result_of
from tilewright.execute.devices import Device, array_device, compute_devices, device_of, find_device
from tilewright.runtime.core import streams
from tilewright.runtime.core.device import LoadedProgram
from tilewright.runtime.core.device_threads import all_done, thread_of
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.tree.typed import ArgSpec, ArrayArg, ArrayInfo

if TYPE_CHECKING:
    from tilewright.runtime.core.futures import Future


@dataclass(frozen=True)
class Ran:
    """What ran where, and for how many seconds, copies to the device included."""

    name: str
    device: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} on {self.device} in {self.seconds * 1e3:.3f} ms"


class _Arrays:
    """The arrays of one call, each on the devices that have a copy. A device's copies are made by its own thread alone."""

    def __init__(self) -> None:
        self._copies: dict[str, dict[str, Any]] = {}

    def add(self, name: str, device: Device | None, array: Any) -> None:
        self._copies.setdefault(name, {})[_memory_of(device)] = array

    def on(self, name: str, device: Device | None) -> Any:
        """The array where the device (None: the host) reads it."""
        copies = self._copies[name]
        where = _memory_of(device)
        found = copies.get(where)
        if found is None:
            found = copies[where] = moved(next(iter(list(copies.values()))), device)
        return found


def _memory_of(device: Device | None) -> str:
    return device.id if device is not None and array_device(device) is not None else "host"


def moved(value: Any, device: Device | None) -> Any:
    """An array in the memory a device uses: of NumPy for the host, else of ours. The same one where it is there already."""
    gpu = array_device(device) if device is not None else None
    if gpu is None:
        return value.on_host() if isinstance(value, DeviceArray) else value
    if isinstance(value, np.ndarray):
        return gpu.from_numpy(without_gaps(value))
    if not isinstance(value, DeviceArray) or value.device is gpu:
        return value
    copy = gpu.empty(value.shape, value.dtype)
    gpu.copy(copy, value)
    return copy


def usable_devices(devices: object) -> list[Device]:
    """The devices to place work on: those that were named, else the CPU and every GPU that is not lost."""
    if devices is not None:
        return named_devices(devices)
    return [device for device in compute_devices() if not device.runtime.lost]


def _in_order(placed: Sequence[Placed]) -> list[int]:
    """Numbers by the model's start: none needs a later one."""
    return sorted(range(len(placed)), key=lambda number: (placed[number].start, number))


def _execute(placed: Sequence[Placed], after: Sequence[Sequence[int]], run: Callable[[int, Device], None]) -> tuple[Ran, ...]:
    """Run every job on its device's thread, once those it needs are done; waits for all of them."""
    futures: dict[int, Future[Any]] = {}
    for number in _in_order(placed):
        device = find_device(placed[number].device)
        one = functools.partial(_timed, placed[number].name, device, functools.partial(run, number, device))
        futures[number] = thread_of(device.id).submit(one, [futures[n] for n in after[number]])
    return tuple(all_done([futures[number] for number in range(len(placed))]))


def _timed(name: str, device: Device, run: Callable[[], None]) -> Ran:
    start = time.perf_counter()
    run()
    device.runtime.synchronize()
    return Ran(name, device.id, time.perf_counter() - start)


# -- one kernel -----------------------------------------------------------------------------------------------------


class HeterogeneousKernel:
    """A kernel whose independent parts run on several devices. `last` says what ran where in the latest call, `plan` what the model expects."""

    def __init__(self, kernel: TunableKernel, devices: object = None, placement: Mapping[str, str] | None = None) -> None:
        self.kernel = kernel
        self.devices = usable_devices(devices)
        self.placement = dict(placement or {})
        self.last: tuple[Ran, ...] = ()
        self._cuts: dict[tuple[Signature, bool], CutProgram] = {}
        self._programs: dict[tuple[object, ...], LoadedProgram] = {}
        self.__name__ = kernel.__name__

    def __repr__(self) -> str:
        return f"<{self.kernel!r} placed on {', '.join(device.id for device in self.devices)}>"

    def __call__(self, *args: object, **keywords: Any) -> Any:
        streams.refuse_in_capture(f"a call of {self.__name__} on several devices")
        if keywords.pop("asynchronous", self.kernel.asynchronous):
            from tilewright.runtime.core.host_queue import HostQueue

            after: list[Any] = [v for v in (*args, *keywords.values()) if isinstance(v, streams.FUTURES)]
            return HostQueue(f"{self.__name__} on several devices").submit(
                lambda: self(*args, asynchronous=False, **keywords), after
            )
        out = keywords.pop("out", None)
        call = _KernelCall(self, self.kernel.bound(*args, **keywords), out)
        result = call.run()
        self.last = self.kernel.ran = call.ran
        return result

    def plan(self, *args: object, **keywords: object) -> list[Placed]:
        """Where the parts of such a call would run and when, by the cost model."""
        return _KernelCall(self, self.kernel.bound(*args, **keywords), None).plan()

    def placement_of(self, jobs: Sequence[PlacedJob]) -> Mapping[str, str]:
        """Parts whose device is not for the cost model to choose."""
        return self.placement

    def cut(self, values: Mapping[str, object], gpu: bool) -> CutProgram:
        """The kernel in parts. Both kinds of device get the same parts; what is known of arrays in memory differs."""
        runner = self.kernel.runner
        signature = runner.signature(runner.arguments(values, gpu), gpu)
        found = self._cuts.get((signature, gpu))
        if found is None:
            found = cut_kernel(runner.function, signature)
            keep(self._cuts, (signature, gpu), found)
        return found

    def program(self, cut: CutProgram, number: int, device: Device, sizes: Mapping[str, int]) -> LoadedProgram:
        key = (cut.signature, number, device.id, tuple(sorted(sizes.items())))
        found = self._programs.get(key)
        if found is None:
            artifact = compile_part(cut, number, device.target, sizes)
            found = device.runtime.load(artifact)
            keep(self._programs, key, found)
        return found


class _KernelCall:
    """One call of a kernel in parts."""

    def __init__(self, owner: HeterogeneousKernel, bound: Mapping[str, object], out: object) -> None:
        self.owner, self.out = owner, out
        self.span = owner.kernel.function.span
        read = {name: read_value(name, value, self.span) for name, value in bound.items()}
        self.values = {name: _whole(value) for name, value in read.items()}
        home = device_of([*self.values.values()])
        self.home = find_device(home) if home is not None else find_device("cpu")
        self.cuts = {gpu: owner.cut(self.values, gpu) for gpu in {device.target.is_gpu for device in owner.devices}}
        self.some = next(iter(self.cuts.values()))
        self.artifact = describe_program(self.some.program, host_cpu())
        arrays = {n: v for n, v in self.values.items() if isinstance(v, np.ndarray | DeviceArray)}
        strides = {n: element_strides(v) for n, v in arrays.items()}
        numbers = {n: v for n, v in self.values.items() if not isinstance(v, np.ndarray | DeviceArray)}
        self.numbers: dict[str, Any] = {n: v.item() if isinstance(v, np.generic) else v for n, v in numbers.items()}
        self.sizes = bind_sizes(self.artifact, {n: v.shape for n, v in arrays.items()}, strides, self.span, self.numbers)
        self.arrays = _Arrays()
        self.ran: tuple[Ran, ...] = ()

    def plan(self) -> list[Placed]:
        jobs = [
            PlacedJob(
                p.name,
                p.operations.evaluate(self.sizes),
                p.bytes.evaluate(self.sizes),
                p.reads,
                p.writes,
                p.after,
                len(p.program.calls),
            )
            for p in self.some.parts
        ]
        nbytes = {a.name: self._shape_bytes(a) for a in (*self.artifact.outputs, *self.artifact.scratch)}
        nbytes |= {name: v.nbytes for name, v in self.values.items() if isinstance(v, np.ndarray | DeviceArray)}
        wanted = frozenset(param.name for param in self.artifact.outputs)
        return place(jobs, self.owner.devices, nbytes, self.home, wanted, self.owner.placement_of(jobs))

    def _shape_bytes(self, param: ArrayParam) -> int:
        count = 1
        for extent in param.shape:
            count *= extent.evaluate(self.sizes)
        return count * param.dtype.itemsize

    def run(self) -> object:
        given = given_outputs(self.artifact, self.out, self.span)
        self._check_given(given)
        placed = self.plan()
        for name, value in self.values.items():
            if isinstance(value, np.ndarray | DeviceArray):
                self.arrays.add(name, self.home if isinstance(value, DeviceArray) else None, value)
        self.home.runtime.synchronize()
        self.ran = _execute(placed, [part.after for part in self.some.parts], self._run_part)
        results: dict[str, object] = {}
        for param in self.artifact.outputs:
            found = self.arrays.on(param.name, self.home)
            target = given.get(param.name)
            if isinstance(target, np.ndarray):
                np.copyto(target, np.asarray(found), casting="no")
            elif isinstance(target, DeviceArray):
                target.assign(found)
            results[param.name] = found
        self.home.runtime.synchronize()
        return result_of(self.artifact, results, self.out)

    def _check_given(self, given: Mapping[str, object]) -> None:
        for param in self.artifact.outputs:
            target = given.get(param.name)
            if target is None:
                continue
            shape = tuple(extent.evaluate(self.sizes) for extent in param.shape)
            kind = DeviceArray if array_device(self.home) is not None else np.ndarray
            own = param.dtype if kind is DeviceArray else param.dtype.numpy
            if not isinstance(target, kind) or target.shape != shape or target.dtype != own:
                extents = ", ".join(map(str, shape))
                raise UserError.at(
                    "TW018", f"out= for '{param.name}' is no {param.dtype}[{extents}] on {self.home.id}", self.span
                )

    def _run_part(self, number: int, device: Device) -> None:
        cut, gpu = self.cuts[device.target.is_gpu], array_device(device)
        part = cut.parts[number]
        program = self.owner.program(cut, number, device, self.sizes)
        artifact: Artifact = program.artifact
        arrays = {name: self.arrays.on(name, device) for name in part.reads}
        for param in artifact.outputs:
            shape = tuple(extent.evaluate(self.sizes) for extent in param.shape)
            arrays[param.name] = gpu.empty(shape, param.dtype) if gpu is not None else np.empty(shape, param.dtype.numpy)
        numbers = converted(artifact, {**self.sizes, **self.numbers})
        program.run(arrays, numbers, self.sizes)
        for param in artifact.outputs:
            self.arrays.add(param.name, device, arrays[param.name])


def _whole(value: Any) -> Any:
    """An array without gaps."""
    if isinstance(value, DeviceArray):
        return value if value.is_contiguous else value.copy()
    return without_gaps(value) if isinstance(value, np.ndarray) else value


def call_placed(kernel: TunableKernel, args: tuple[object, ...], keywords: dict[str, Any]) -> object:
    """A call with `device="heterogeneous"`; `devices=` and `placement=` say more."""
    own = kernel.parameter_names
    devices = keywords.pop("devices", None) if "devices" not in own else None
    placement = keywords.pop("placement", None) if "placement" not in own else None
    names = tuple(device.id for device in usable_devices(devices))
    if placement is not None and not isinstance(placement, Mapping):
        raise UserError.at("TW016", f"placement= is {placement!r}", help="give a device for each part: {'name_1': 'cpu'}")
    key = ("heterogeneous", *names, *(f"{k}={v}" for k, v in sorted((placement or {}).items())))
    found = kernel.spreads.get(key)
    if found is None:
        found = kernel.spreads[key] = HeterogeneousKernel(kernel, list(names), placement)
    assert isinstance(found, HeterogeneousKernel)
    return found(*args, **keywords)


def heterogeneous(
    kernel: TunableKernel, devices: Sequence[str | Device] | None = None, placement: Mapping[str, str] | None = None
) -> HeterogeneousKernel:
    """The kernel with its independent parts on these devices (None: all of them), placed by the cost model or by name."""
    if not is_kernel(kernel):
        raise UserError.at(
            "TW009", f"{kernel!r} is no kernel", help="mark the function with @tw.kernel; schedule() runs several kernels"
        )
    return HeterogeneousKernel(kernel, devices, placement)


# -- several kernels ------------------------------------------------------------------------------------------------


class PlacedTask:
    """A call of a kernel that `schedule` makes. Its arguments may be other tasks: their results."""

    def __init__(
        self, kernel: TunableKernel, args: tuple[object, ...], keywords: dict[str, object], name: str, device: str | None
    ) -> None:
        self.kernel, self.name = kernel, name or kernel.__name__
        self.device = find_device(device).id if device is not None else None
        self.bound = kernel.bound(*args, **keywords)
        self.span = kernel.function.span

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    @property
    def needs(self) -> list[PlacedTask]:
        return [value for value in self.bound.values() if isinstance(value, PlacedTask)]


def task(kernel: TunableKernel, *args: object, name: str = "", device: str | None = None, **keywords: object) -> PlacedTask:
    """A call to be made by `schedule`, here or there. An argument that is another task stands for its (only) result."""
    return PlacedTask(kernel, args, keywords, name, device)


@dataclass(frozen=True)
class Scheduled:
    """What `schedule` did: the results of the tasks it was given, what ran where, and what the model expected."""

    results: tuple[Any, ...]
    ran: tuple[Ran, ...]
    plan: tuple[Placed, ...]


@dataclass(frozen=True)
class _PlacedForm:
    """What is known of a task's result before it ran."""

    shape: tuple[int, ...]
    info: ArrayInfo


def schedule(
    tasks: Iterable[PlacedTask], devices: Sequence[str | Device] | None = None, placement: Mapping[str, str] | None = None
) -> Scheduled:
    """Run tasks and all they need, those that are independent at once, on devices the cost model chooses, or `placement` by name."""
    asked = list(tasks)
    for item in asked:
        if not isinstance(item, PlacedTask):
            raise UserError.at("TW009", f"{item!r} is no task", help="make one with tw.task(kernel, …)")
    streams.refuse_in_capture("schedule()")
    ordered = _closure(asked)
    names = [item.name for item in ordered]
    named = {
        item: f"{item.name}.{names[:n].count(item.name)}" if names.count(item.name) > 1 else item.name
        for n, item in enumerate(ordered)
    }
    fixed = {named[item]: item.device for item in ordered if item.device is not None} | dict(placement or {})
    chosen = usable_devices(devices)
    numbers = {item: number for number, item in enumerate(ordered)}
    arrays = _Arrays()
    values: list[dict[str, Any]] = []
    shapes: dict[str, int] = {}
    homes: set[str] = set()
    for number, item in enumerate(ordered):
        own: dict[str, Any] = {}
        for name, value in item.bound.items():
            own[name] = value if isinstance(value, PlacedTask) else _whole(read_value(name, value, item.span))
            if isinstance(own[name], np.ndarray | DeviceArray):
                place_ = device_of([own[name]])
                homes |= {place_} if place_ is not None else set()
                arrays.add(f"{number}.{name}", find_device(place_) if place_ is not None else None, own[name])
                shapes[f"{number}.{name}"] = own[name].nbytes
        values.append(own)
    home = find_device(min(homes)) if homes else find_device("cpu")
    for place_ in homes:
        find_device(place_).runtime.synchronize()
    forms: dict[PlacedTask, _PlacedForm] = {}
    jobs: list[PlacedJob] = []
    for number, item in enumerate(ordered):
        jobs.append(_job(item, named[item], number, values[number], forms, numbers))
        form = forms[item]
        shapes[f"={number}"] = int(np.prod(form.shape, dtype=np.int64)) * form.info.dtype.itemsize
    wanted = frozenset(f"={numbers[item]}" for item in asked)
    placed = place(jobs, chosen, shapes, home, wanted, fixed)

    def run(number: int, device: Device) -> None:
        item, given = ordered[number], values[number]
        moved_in = {
            name: arrays.on(f"={numbers[value]}", device) if isinstance(value, PlacedTask)
            else arrays.on(f"{number}.{name}", device) if isinstance(value, np.ndarray | DeviceArray) else value
            for name, value in given.items()
        }  # fmt: skip
        made: Any = item.kernel.runner.run(moved_in, device)
        arrays.add(
            f"={number}",
            device if isinstance(made, DeviceArray) else None,
            np.asarray(made) if isinstance(made, np.generic) else made,
        )

    ran = _execute(placed, [job.after for job in jobs], run)
    results = tuple(arrays.on(f"={numbers[item]}", home) for item in asked)
    return Scheduled(tuple(r[()] if isinstance(r, np.ndarray) and not r.ndim else r for r in results), ran, tuple(placed))


def _closure(tasks: Sequence[PlacedTask]) -> list[PlacedTask]:
    """The tasks and all they need, each after what it needs. Tasks name only tasks made before them, so there is no circle."""
    found: dict[PlacedTask, None] = {}
    stack = [(item, False) for item in reversed(tasks)]
    while stack:
        item, ready = stack.pop()
        if ready:
            found[item] = None
        elif item not in found:
            stack.append((item, True))
            stack += [(other, False) for other in item.needs]
    return list(found)


def _job(
    item: PlacedTask, name: str, number: int, values: Mapping[str, Any], forms: dict[PlacedTask, _PlacedForm], numbers: Mapping[PlacedTask, int]
) -> PlacedJob:
    """What a task costs, and (in `forms`) what it will give."""
    specs: list[ArgSpec] = []
    extents: dict[str, tuple[int, ...]] = {}
    for key, value in values.items():
        if isinstance(value, PlacedTask):
            form = forms[value]
            specs.append(ArrayArg(form.info.dtype, len(form.shape)))
            extents[key] = form.shape
        else:
            argument = read_argument(key, value, item.span)
            specs.append(argument.spec)
            extents[key] = argument.shape
    cut = cut_kernel(item.kernel.function, Signature(tuple(specs)))
    shapes = {k: s for k, s in extents.items() if isinstance(dict(zip(values, specs, strict=True))[k], ArrayArg)}
    strides = {k: tuple(int(np.prod(s[axis + 1 :], dtype=np.int64)) for axis in range(len(s))) for k, s in shapes.items()}
    sizes = bind_sizes(describe_program(cut.program, host_cpu()), shapes, strides, item.span)
    if len(cut.typed.outputs) != 1:
        raise UserError.at(
            "TW009", f"{item.kernel.__name__} returns {len(cut.typed.outputs)} arrays; a task has one result", item.span
        )
    output = cut.typed.outputs[0]
    forms[item] = _PlacedForm(tuple(extent.evaluate(sizes) for extent in output.shape), output)
    reads = tuple(f"={numbers[v]}" if isinstance(v, PlacedTask) else f"{number}.{k}" for k, v in values.items() if k in shapes)
    after = tuple(sorted({numbers[other] for other in item.needs}))
    return PlacedJob(
        name, sum(p.operations.evaluate(sizes) for p in cut.parts), sum(p.bytes.evaluate(sizes) for p in cut.parts), reads, (f"={number}",),
        after, len(cut.program.calls),
    )  # fmt: skip
