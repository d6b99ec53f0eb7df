"""Running a compiled kernel: the general path, on any device.

In: the kernel's tree, the arguments of one call and a device. Out: NumPy arrays or device arrays, as the inputs were. Each kind of
device has the calls of the kernel on its devices (`execute/calls/kernel_calls.py`); fast paths are theirs, and what those refuse comes here and
either works (strided, overlapping, converted) or raises the exact error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace

import numpy as np

from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import DType
from tilewright.base.errors import DeviceError
from tilewright.compile.driver import Signature
from tilewright.execute.calls.arguments import ReadArgument, read_optional, signature
from tilewright.execute.calls.complex_arrays import any_complex, check_given, given_parts, makes_complex, results
from tilewright.execute.calls.in_place import check_in_place
from tilewright.execute.calls.index_checks import all_checked
from tilewright.execute.calls.kernel_calls import KernelCalls
from tilewright.execute.calls.repeated_axes import with_repeats
from tilewright.execute.calls.watchdog import watchdog_nanoseconds
from tilewright.execute.device import Device
from tilewright.execute.kinds import kind_of
from tilewright.runtime.core import observe, streams
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.packed_array import PackedArray
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.syntax import Function
from tilewright.tree.typed import ArgSpec


class Runner:
    """A kernel on its way through the devices: keeps what was compiled and loaded for it."""

    def __init__(
        self, function: Function, precision: str = "auto", schedule: str = "", watchdog: float | None = None, launches: int = 0,
        check: bool = False, packed: Mapping[str, DType] | None = None,
    ) -> None:  # fmt: skip
        self.function, self.launches = function, launches
        self.packed = packed or {}
        """Parameters that are given the bytes of packed blocks, and of which dtype those are."""
        self.indices = "all" if check or all_checked() else ""
        self.precision, self.schedule = precision, schedule
        self.watchdog = watchdog_nanoseconds(watchdog)
        self.spreads: dict[tuple[str, ...], object] = {}
        """What makes calls on several devices, by the names of their arguments."""
        self.by_kind: dict[str, KernelCalls] = {}
        """Its calls on the kinds of devices it ran on."""
        self.in_place = tuple(p.name for p in function.params if p.in_place)
        """Parameters that are written where they lie."""
        self._last: Artifact | None = None
        self._complex: Runner | None = None
        """Makes the calls with complex numbers, among arguments or results."""
        self._made: bool | None = None
        self._results: dict[tuple[ArgSpec, ...], tuple[DType, ...]] = {}
        """Of that one: dtypes of results by kinds of arguments."""
        self._with_packed: dict[tuple[tuple[str, str], ...], Runner] = {}
        """The runners of calls with packed blocks, by parameters and dtypes."""

    @property
    def last(self) -> Artifact | None:
        """The artifact of the latest call, for `inspect`-like questions."""
        kinds = tuple(self.by_kind.values())
        found = next((calls.latest for calls in kinds if calls.latest is not None), self._last)
        if found is None:
            # The first call has not returned, and another thread's went straight to its machine code.
            found = next((calls.loaded for calls in kinds if calls.loaded is not None), None)
        return found

    @last.setter
    def last(self, artifact: Artifact | None) -> None:
        for calls in self.by_kind.values():
            calls.forget_latest()
        self._last = artifact

    def calls(self, device: Device) -> KernelCalls:
        """The kernel on devices of that kind."""
        found = self.by_kind.get(device.kind)
        if found is None:
            if not device.target.is_gpu and any(a.name == "gpu_compute" for a in self.function.attributes):
                raise DeviceError.at(
                    "TW030", f"{self.function.name} is marked @gpu_compute, and would run on '{device.id}'", self.function.span,
                    "run it where there is a GPU, or with device=\"emulator\"",
                )  # fmt: skip
            found = self.by_kind[device.kind] = kind_of(device).calls(self)
        return found

    def arguments(self, values: Mapping[str, object], gpu: bool) -> list[ReadArgument]:
        blocks = {name: PackedArray(values[name], dtype) for name, dtype in self.packed.items()}
        found = [read_optional(name, blocks.get(name, value), self.function.span, gpu, with_complex=True) for name, value in values.items()]
        for name in self.in_place:
            argument = next(a for a in found if a.name == name)
            if values[name] is None:
                continue  # whether it may be left out is the kernel's to say
            check_in_place(name, values[name], argument.value if isinstance(argument.value, np.ndarray | DeviceArray) else None, self.function.span)
        return with_repeats(self.function, found)

    def signature(self, arguments: list[ReadArgument], gpu: bool) -> Signature:
        """What to compile for a call with these arguments."""
        found = signature(arguments, gpu)
        watchdog = self.watchdog if gpu else 0
        launches = self.launches if gpu else 0
        if self.precision == "auto" and not self.schedule and not watchdog and not launches and not self.indices:
            return found
        return replace(found, precision=self.precision, schedule=self.schedule, watchdog=watchdog, launches=launches, indices=self.indices)

    def with_packed(self, packed: Mapping[str, DType]) -> Runner:
        """The runner for calls with these parameters as the bytes of packed blocks."""
        key = tuple(sorted((name, dtype.name) for name, dtype in packed.items()))
        if key not in self._with_packed:
            other = self._with_packed[key] = copy(self)
            other.packed, other.spreads, other.by_kind, other._with_packed, other._last = dict(packed), {}, {}, {}, None
        return self._with_packed[key]

    def has_complex(self, values: Mapping[str, object], out: object) -> bool:
        """Whether a call may have complex numbers."""
        if self._made is None:
            self._made = makes_complex(self.function)
        return self._made or any_complex([*values.values(), out])

    def _run_complex(self, values: Mapping[str, object], device: Device, out: object) -> object:
        """Code takes and gives arrays of parts; machine code for calls with floats is kept apart from it."""
        if self._complex is None:
            self._complex = copy(self)
            self._complex.by_kind, self._complex.spreads, self._complex._last = {}, {}, None
        own = self._complex
        found = [argument.spec for argument in self.arguments(values, device.target.is_gpu)]
        key = tuple(found)
        if key not in self._results:
            self._results[key] = tuple(array.dtype for array in check_kernel(self.function, key).outputs)
        dtypes = self._results[key]
        check_given(self.function.name, out, dtypes, self.function.span)
        result = own._observed(values, device, given_parts(out))
        self.last = own.last
        return out if out is not None or not dtypes else results(result, dtypes, self.function.span)

    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> object:
        packed = {name: value.dtype for name, value in values.items() if isinstance(value, PackedArray)}
        if packed:
            runner = self.with_packed(packed)
            result = runner.run({n: v.blocks if isinstance(v, PackedArray) else v for n, v in values.items()}, device, out)
            self.last = runner.last
            return result
        if self.has_complex(values, out):
            return self._run_complex(values, device, out)
        return self._observed(values, device, out)

    def _observed(self, values: Mapping[str, object], device: Device, out: object) -> object:
        watcher = observe.observer
        if watcher is None:
            return self._run(values, device, out)
        with watcher.call(self.function, device.id) as record:
            result = self._run(values, device, out)
        if self.last is not None:
            watcher.count(record, self.function, self.last, values)
        return result

    def _run(self, values: Mapping[str, object], device: Device, out: object) -> object:
        if streams.FAST_PATH_OFF.value:
            streams.check_captured(device.id)
        result, self.last = self.calls(device).run(values, device, out)
        return result

    def entry(self, device: Device, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """Machine code for calls like those made so far on such devices, which hands others to `fallback`."""
        return self.calls(device).entry(device, fallback)

    def quick(self, device: Device, args: tuple[object, ...], out: object) -> object:
        """The short way for calls like those made before; `NotImplemented` when this one is not."""
        call = self.entry(device, _refuse)
        if call is None:
            return NotImplemented
        return call(*args) if out is None else call(*args, out=out)


def _refuse(*args: object, **keywords: object) -> object:
    return NotImplemented
