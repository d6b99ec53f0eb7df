"""One kernel on several devices: the batch is cut, the parts run at once, their results are gathered.

In: a kernel, the arguments of a call and devices; out: what the plain call gives, where the plain call would have it. Which arguments
are cut, and along which axis, comes from the kernel's loops (`tree/batch_axes.py`); the others are given to every device whole.
Results that accumulate over the batch are combined with the accumulation's own operation.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base import registry
from tilewright.base.dtypes import DType
from tilewright.base.errors import UserError
from tilewright.distributed.placement import speed
from tilewright.execute.calls.arguments import read_argument
from tilewright.execute.calls.callable_kernel import TunableKernel
from tilewright.execute.calls.run import Runner
from tilewright.execute.devices import Device, array_device, device_of, find_device
from tilewright.execute.stream_place import is_on_device
from tilewright.runtime.core import streams
from tilewright.runtime.core.device_threads import all_done, thread_of
from tilewright.runtime.core.entry import Entry
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray
from tilewright.tree.batch_axes import Split, find_splits
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArgSpec, ArrayInfo, TypedKernel

if TYPE_CHECKING:
    from tilewright.runtime.core.futures import Future

_COMBINE: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
_GRAIN = 16
"""Parts begin at multiples of this where that leaves every device some: code for aligned extents is faster."""


@dataclass(frozen=True)
class BatchPart:
    """What one device did of a call."""

    device: str
    start: int
    stop: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.device}: {self.start}..{self.stop} in {self.seconds * 1e3:.3f} ms"


def named_devices(devices: object, least: int = 1) -> list[Device]:
    """The devices a user listed, by name or as `Device`s."""
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise UserError.at("TW016", f"devices= is {devices!r}", help=f"give a list of names, such as {registry.accelerator_examples()}")
    found: list[Device] = []
    for item in devices:
        if not isinstance(item, str | Device):
            raise UserError.at("TW016", f"a device is {item!r}", help=f"give names such as {registry.examples()}, or what tw.devices() lists")
        found.append(find_device(item) if isinstance(item, str) else find_device(item.id))
    if len(found) < least:
        raise UserError.at("TW016", f"devices= names {len(found)} device(s)", help=f"give at least {least}")
    return found


def is_kernel(value: object) -> bool:
    return isinstance(value, Entry) and hasattr(value, "runner")


def ranges(extent: int, shares: Sequence[float]) -> list[tuple[int, int]]:
    """`extent` cut into parts that are to each other about as the shares; whole grains where there are enough of them."""
    total, count = sum(shares), len(shares)
    grain = _GRAIN if extent >= _GRAIN * count else 1
    ends = [0]
    for position in range(1, count):
        wanted = extent * sum(shares[:position]) / total
        ends.append(min(extent, max(ends[-1], round(wanted / grain) * grain)))
    return list(zip(ends, [*ends[1:], extent], strict=True))


def checked_shares(shares: Sequence[float] | None, devices: Sequence[Device]) -> list[float]:
    """What each device gets: as asked, else by how fast the devices are thought to be."""
    if shares is None:
        return [speed(device) for device in devices]
    numbers = list(shares)
    fine = all(isinstance(s, int | float) and not isinstance(s, bool) and 0 <= s < float("inf") for s in numbers)
    if len(numbers) != len(devices) or not fine or not sum(numbers) > 0:
        raise UserError.at(
            "TW016", f"shares={shares!r} for {len(devices)} device(s)", help="give a number for each device, not all 0"
        )
    return [float(s) for s in numbers]


class DataParallel:
    """A kernel whose calls are spread over devices. `last` says what ran where in the latest call."""

    def __init__(
        self,
        kernel: TunableKernel,
        devices: object,
        shares: Sequence[float] | None = None,
        along: tuple[str, int] | None = None,
    ) -> None:
        self.kernel, self.along = kernel, along
        self.devices = named_devices(devices)
        self.shares = checked_shares(shares, self.devices)
        self.last: tuple[BatchPart, ...] = ()
        self._splits: dict[tuple[ArgSpec, ...], tuple[TypedKernel, list[Split]]] = {}
        self.__name__ = kernel.__name__

    def __repr__(self) -> str:
        return f"<{self.kernel!r} on {', '.join(device.id for device in self.devices)}>"

    def __call__(self, *args: object, **keywords: Any) -> Any:
        span = self.kernel.function.span
        for option in ("device", "stream", "tune"):
            if option in keywords and option not in self.kernel.parameter_names:
                raise UserError.at("TW016", f"{option}= is not possible in a call on several devices", span)
        streams.refuse_in_capture(f"a call of {self.__name__} on several devices")
        if keywords.pop("asynchronous", self.kernel.asynchronous):
            return self._later(args, keywords)
        out = keywords.pop("out", None)
        bound = self.kernel.bound(*args, **keywords)
        values = {name: read_value(name, value, span) for name, value in bound.items()}
        return self._run(values, bound, out)

    def _later(self, args: tuple[object, ...], keywords: dict[str, Any]) -> Future[Any]:
        from tilewright.runtime.core.host_queue import HostQueue

        after: list[Any] = [v for v in (*args, *keywords.values()) if isinstance(v, streams.FUTURES)]
        queue = HostQueue(f"{self.__name__} on several devices")
        return queue.submit(lambda: self(*args, asynchronous=False, **keywords), after)

    def split(self, *args: object, **keywords: object) -> Split:
        """How a call with these arguments is cut."""
        span = self.kernel.function.span
        return self._split({n: read_value(n, v, span) for n, v in self.kernel.bound(*args, **keywords).items()})[1]

    def _split(self, values: Mapping[str, Any]) -> tuple[TypedKernel, Split]:
        specs = tuple(read_argument(n, v, self.kernel.function.span).spec for n, v in values.items())
        found = self._splits.get(specs)
        if found is None:
            typed = check_kernel(self.kernel.function, specs)
            found = self._splits[specs] = typed, find_splits(typed, self.along)
        typed, ways = found
        sizes = _sizes(typed, values)
        # A batch of one has nothing to share, but its heads or rows may have.
        enough = (way for way in ways if not way.combined and sizes[way.size] >= len(self.devices))
        return typed, next(enough, ways[0])

    def _run(self, values: dict[str, Any], given: Mapping[str, object], out: object) -> object:
        typed, split = self._split(values)
        sizes = _sizes(typed, values)
        _check_cut(typed, values, split, sizes)
        home = device_of([*values.values(), out])
        gpu = array_device(find_device(home)) if home is not None else None
        if gpu is not None:
            # Parts run on streams of other threads: what is queued for the arrays comes first.
            gpu.synchronize()
        shapes = [tuple(extent.evaluate(sizes) for extent in a.shape) for a in typed.outputs]
        results = self._results(typed, shapes, gpu, given, out)
        cut = ranges(sizes[split.size], self.shares)
        calls = [
            _SpreadCall(self.kernel, device, values, typed, split, start, stop, shapes, results, gpu)
            for device, (start, stop) in zip(self.devices, cut, strict=True)
            if stop > start
        ] or [_SpreadCall(self.kernel, self.devices[0], values, typed, split, 0, 0, shapes, results, gpu)]
        parts = all_done([thread_of(call.device.id).submit(call.run) for call in calls])
        _combine(typed, split, calls, results)
        self.last = tuple(parts)
        self.kernel.ran = self.last
        if out is not None:
            return out
        plain = [_outside(made) for made in results]
        return plain[0] if len(plain) == 1 else tuple(plain)

    def _results(
        self, typed: TypedKernel, shapes: list[tuple[int, ...]], gpu: ArrayDevice | None, given: Mapping[str, object], out: object
    ) -> list[_SpreadResult]:
        """The arrays of the whole call: given ones, else new ones of the library and on the device the inputs are of."""
        span = self.kernel.function.span
        targets = [None] * len(shapes) if out is None else list(out) if isinstance(out, tuple | list) else [out]
        if len(targets) != len(shapes):
            raise UserError.at("TW018", f"out= has {len(targets)} array(s), but the kernel returns {len(shapes)}", span)
        library = gpu.library(list(given.values())) if gpu is not None else None
        found: list[_SpreadResult] = []
        for array, shape, target in zip(typed.outputs, shapes, targets, strict=True):
            if target is not None:
                whole = read_value(array.name, target, span)
                dtype = whole.dtype if isinstance(whole, DeviceArray) else np.asarray(whole).dtype
                own = array.dtype if isinstance(whole, DeviceArray) else array.dtype.numpy
                if np.shape(whole) != shape or dtype != own:
                    extents = ", ".join(map(str, shape))
                    raise UserError.at("TW018", f"out= for '{array.name}' is no {array.dtype}[{extents}]", span)
                others = [v for v in given.values() if isinstance(v, np.ndarray)]
                if isinstance(whole, np.ndarray) and (
                    not whole.flags.writeable or any(np.may_share_memory(whole, v) for v in others)
                ):
                    raise UserError.at(
                        "TW018", f"out= for '{array.name}' cannot be written, or shares memory with an input", span
                    )
                found.append(_SpreadResult(whole, target))
                continue
            if gpu is None:
                made = np.empty(shape, array.dtype.numpy)
                found.append(_SpreadResult(made, made))
                continue
            make = library.maker(shape, array.dtype, gpu.ordinal) if library is not None else None
            item = make() if make is not None else gpu.empty(shape, array.dtype)
            found.append(_SpreadResult(gpu.wrap(item, 0), item))
        return found


@dataclass(frozen=True)
class _SpreadResult:
    array: Any
    """As an array of NumPy or of ours."""
    item: Any
    """As the caller gets it."""


def _outside(made: _SpreadResult) -> object:
    return made.item[()] if isinstance(made.item, np.ndarray) and made.item.ndim == 0 else made.item


class _SpreadCall:
    """One part of a call, on one device."""

    def __init__(
        self, kernel: TunableKernel, device: Device, values: Mapping[str, Any], typed: TypedKernel, split: Split, start: int, stop: int,
        shapes: list[tuple[int, ...]], results: list[_SpreadResult], home: ArrayDevice | None,
    ) -> None:  # fmt: skip
        self.kernel, self.device, self.typed, self.split, self.home = kernel, device, typed, split, home
        self.start, self.stop = start, stop
        self.values = {n: self._cut(n, v) if isinstance(v, np.ndarray | DeviceArray) else v for n, v in values.items()}
        self.shapes = shapes
        self.targets = [
            self._cut(a.name, r.array) if split.axis(a.name) is not None else None
            for a, r in zip(typed.outputs, results, strict=True)
        ]
        """Where the part's own share of each result goes; None where there is none."""
        self.whole: dict[str, Any] = {}
        """Results that are not cut, as this part has them."""

    def _cut(self, name: str, array: Any) -> Any:
        axis = self.split.axis(name)
        return array if axis is None else array[(slice(None),) * axis + (slice(self.start, self.stop),)]

    def run(self) -> BatchPart:
        begin = time.perf_counter()
        gpu = array_device(self.device)
        values = {name: self._moved(value, gpu) for name, value in self.values.items()}
        made: list[Any] = []
        late: list[tuple[Any, Any]] = []
        for array, shape, target in zip(self.typed.outputs, self.shapes, self.targets, strict=True):
            if target is not None and _is_direct(target, gpu):
                made.append(target)
                continue
            extents = shape if target is None else tuple(target.shape)
            # Arrays of the host stay there: the call itself copies them to a GPU and back.
            on_gpu = gpu is not None and self.home is not None
            own = gpu.empty(extents, array.dtype) if gpu is not None and on_gpu else np.empty(extents, array.dtype.numpy)
            made.append(own)
            if target is None:
                self.whole[array.name] = own
            else:
                late.append((target, own))
        self.kernel.runner.run(values, self.device, tuple(made) if len(made) > 1 else made[0])
        for target, own in late:
            _assign(target, own, self.home)
        if gpu is not None:
            gpu.synchronize()
        return BatchPart(self.device.id, self.start, self.stop, time.perf_counter() - begin)

    def _moved(self, value: Any, gpu: ArrayDevice | None) -> Any:
        """An input where the device reads it. Arrays of the host are copied by the call itself, unless others are on a GPU."""
        if isinstance(value, DeviceArray) and (gpu is None or value.device is not gpu):
            if gpu is None:
                return value.on_host()
            moved = gpu.empty(value.shape, value.dtype)
            gpu.copy(moved, value)
            return moved
        if isinstance(value, np.ndarray) and gpu is not None and self.home is not None:
            return gpu.from_numpy(without_gaps(value))
        return value


def _is_direct(target: Any, gpu: ArrayDevice | None) -> bool:
    """Whether a part's call can write its share in place."""
    if isinstance(target, DeviceArray):
        return target.device is gpu and target.is_contiguous
    return True


def _assign(target: Any, own: Any, home: ArrayDevice | None) -> None:
    if isinstance(own, np.ndarray):
        target.copy_from(own)
    else:
        assert home is not None
        home.copy(target, own)
        home.synchronize()


def _combine(typed: TypedKernel, split: Split, calls: Sequence[_SpreadCall], results: Sequence[_SpreadResult]) -> None:
    """Results that are not cut: combined where they accumulate, else every part has the same."""
    for array, result in zip(typed.outputs, results, strict=True):
        if split.axis(array.name) is not None:
            continue
        parts = [np.asarray(call.whole[array.name]) for call in calls]
        total = parts[0]
        operation = split.operation(array.name)
        for part in parts[1:] if operation is not None else ():
            total = _combined(operation or "", array.dtype, total, part)
        total = np.asarray(total, array.dtype.numpy)
        if isinstance(result.array, DeviceArray):
            result.array.copy_from(without_gaps(total))
        else:
            result.array[...] = total


def without_gaps(array: np.ndarray) -> np.ndarray:
    """A contiguous array of the same rank, which NumPy's own function does not keep where it is 0."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _combined(operation: str, dtype: DType, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if dtype.numpy.kind in "biuf":
        found: np.ndarray = _COMBINE[operation](left, right)
        return found
    made: Any = _narrow(operation).run({"a": left.reshape(-1), "b": right.reshape(-1)}, find_device("cpu"))
    return np.asarray(made).reshape(left.shape)


@functools.cache
def _narrow(operation: str) -> Runner:
    """Combines floats that NumPy does not know."""
    from tilewright.frontend import words as tw
    from tilewright.frontend.python.kernels import parse_function

    def add(a: tw.Array, b: tw.Array) -> tw.Array:
        out = tw.empty((a.shape[0],), a.dtype)
        for i in tw.grid(a.shape[0]):
            out[i] = a[i] + b[i]
        return out

    def mul(a: tw.Array, b: tw.Array) -> tw.Array:
        out = tw.empty((a.shape[0],), a.dtype)
        for i in tw.grid(a.shape[0]):
            out[i] = a[i] * b[i]
        return out

    def smaller(a: tw.Array, b: tw.Array) -> tw.Array:
        out = tw.empty((a.shape[0],), a.dtype)
        for i in tw.grid(a.shape[0]):
            out[i] = tw.minimum(a[i], b[i])
        return out

    def larger(a: tw.Array, b: tw.Array) -> tw.Array:
        out = tw.empty((a.shape[0],), a.dtype)
        for i in tw.grid(a.shape[0]):
            out[i] = tw.maximum(a[i], b[i])
        return out

    return Runner(parse_function({"add": add, "mul": mul, "min": smaller, "max": larger}[operation]))


def read_value(name: str, value: Any, span: Any) -> Any:
    """An argument as a number, a NumPy array or an array of ours."""
    if isinstance(value, streams.FUTURES):
        value = value.result()  # type: ignore[attr-defined]
    if isinstance(value, DeviceArray):
        return value
    if is_on_device(value):
        from tilewright.execute.arrays import asarray

        return asarray(value)
    if isinstance(value, bool | int | float | np.generic):
        return value
    return read_argument(name, value, span).value


def _sizes(typed: TypedKernel, values: Mapping[str, Any]) -> dict[str, int]:
    """The value of every extent, read off the inputs."""
    sizes: dict[str, int] = {}
    for array in typed.inputs:
        if isinstance(array, ArrayInfo):
            for axis, (extent, value) in enumerate(zip(array.shape, values[array.name].shape, strict=True)):
                if extent.name is not None:
                    sizes.setdefault(extent.name, value * _packed(array, axis))
    return sizes


def _packed(array: ArrayInfo, axis: int) -> int:
    """Elements that one item along the axis has."""
    return array.dtype.block if axis == array.rank - 1 else 1


def _check_cut(typed: TypedKernel, values: Mapping[str, Any], split: Split, sizes: Mapping[str, int]) -> None:
    """Axes that are cut must agree here: a part could not tell."""
    for array in typed.inputs:
        axis = split.axis(array.name) if isinstance(array, ArrayInfo) else None
        if axis is None or not isinstance(array, ArrayInfo):
            continue
        if _packed(array, axis) > 1:
            raise UserError.at(
                "TW012", f"axis {axis} of '{array.name}' is packed ({array.dtype}) and cannot be split", typed.span
            )
        extent = values[array.name].shape[axis]
        if extent != sizes[split.size]:
            raise UserError.at(
                "TW004", f"axis {axis} of '{array.name}' has extent {extent}, but other arrays have {sizes[split.size]} along the axis "
                f"that is split", typed.span,
            )  # fmt: skip


# -- making them ----------------------------------------------------------------------------------------------------


def spread_of(kernel: TunableKernel, devices: Sequence[object]) -> DataParallel:
    """The kernel on a list of devices, kept from one call to the next."""
    names = tuple(str(device) for device in devices)
    found = kernel.spreads.get(names)
    if found is None:
        found = kernel.spreads[names] = DataParallel(kernel, devices)
    assert isinstance(found, DataParallel)
    return found
