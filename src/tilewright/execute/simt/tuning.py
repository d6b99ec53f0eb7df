"""Tuning of explicit kernels: which of a kernel's choices (`execute/simt/choices.py`) is fastest for arguments like these.

In: a kernel with choices and the arguments of a call. Out: a `Tuning`, and measurements in the same tables as those of contractions
(`compile/tuning.py`), by the kernel's source, the dtypes of its arguments and the target; within a table by the shapes of its arrays. A call
takes the fastest choice of its shapes, else that of the nearest shapes measured, else the first.

Every trial sees the arguments as they were: what the kernel writes is put back before each launch, also between two that are timed, and at
the end. Results are compared with those of the first choice that worked. A choice that cannot be compiled or launched is passed over, with
its reason among the trials.
"""

from __future__ import annotations

import ast
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tilewright.base.dtypes import DType, from_numpy
from tilewright.base.errors import TilewrightError, UserError
from tilewright.base.source import Span
from tilewright.compile import tuning
from tilewright.compile.driver import compiler_version
from tilewright.compile.tuning import Extents
from tilewright.compile.tuning_folder import enabled
from tilewright.execute.arrays import to_device
from tilewright.execute.devices import Device, array_device, kind_of, own_memory
from tilewright.execute.simt.arguments import bind_parameters, read_leaves, split_values
from tilewright.execute.simt.choices import LaunchChoice
from tilewright.execute.simt.launches import vendor_of
from tilewright.execute.simt.run import SimtRunner
from tilewright.execute.tune_search import UNFINISHED, Report, TableLedger, Tuning, difference, search
from tilewright.frontend.simt.kernels import Parameter
from tilewright.frontend.simt.source import FunctionSource
from tilewright.runtime.exchange.imports import from_dlpack
from tilewright.runtime.exchange.libraries import is_tensor
from tilewright.runtime.memory.device_array import DeviceArray


class ChoiceKernel(Protocol):
    """An explicit kernel with choices, as its calls without a grid see it. `execute/simt/kernels.py` has the class."""

    __name__: str

    @property
    def choices(self) -> Mapping[str, LaunchChoice]: ...

    @property
    def source(self) -> FunctionSource: ...

    @property
    def parameters(self) -> tuple[Parameter, ...]: ...

    @property
    def span(self) -> Span: ...

    @property
    def runner(self) -> SimtRunner: ...

    def choice(self, text: str) -> Any:
        """The kernel that one of the choices launches."""

    def choose_device(self, values: list[object], asked: object = None) -> Device:
        """The device of a launch."""


def call_chosen(kernel: ChoiceKernel, args: tuple[object, ...], named: dict[str, object]) -> None:
    """A call without a grid: launch the choice that is best for these arguments. With `tune=True` the choices are measured first, once."""
    names = {p.name for p in kernel.parameters}
    extra = {n: named.pop(n) for n in ("device", "check", "tune") if n in named and n not in names}
    wanted, asked = extra.pop("tune", False), extra.get("device")
    if not isinstance(wanted, bool):
        raise UserError.at("TW009", f"tune= is {wanted!r}", kernel.span, "give True or False")
    if asked is not None and not isinstance(asked, str | Device):
        raise UserError.at("TW009", f"device= is a {type(asked).__name__}, not a name such as 'cpu'", kernel.span)
    values = _bound(kernel, args, named)
    device = kernel.choose_device(_arrays(kernel, values), asked)
    if wanted and enabled() and not kind_of(device).simulated and not _known(kernel, values, device):
        tune_choices(kernel, values, device)
    _configured(kernel, values, device)(**values, **extra)


def configured_choice(kernel: ChoiceKernel, args: tuple[object, ...], named: dict[str, object], device: str | None) -> Any:
    """The launch that a call with these arguments would make."""
    values = _bound(kernel, args, named)
    return _configured(kernel, values, kernel.choose_device(_arrays(kernel, values), device))


def _bound(kernel: ChoiceKernel, args: tuple[object, ...], named: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a call by name: constants of the choices are no arguments."""
    first = kernel.choice(next(iter(kernel.choices)))
    parameters = first.parameters
    return dict(zip((p.name for p in parameters), bind_parameters(kernel.__name__, parameters, args, named, kernel.span), strict=True))


def _arrays(kernel: ChoiceKernel, values: Mapping[str, object]) -> list[object]:
    parameters = [p for p in kernel.parameters if p.name in values]
    return [part.value for part in split_values(parameters, [values[p.name] for p in parameters])]


def _configured(kernel: ChoiceKernel, values: Mapping[str, object], device: Device) -> Any:
    table = tuning.look_up(_key(kernel, values, device))
    texts = tuple(kernel.choices)
    text = tuning.advise_listed(table, _extents(kernel, values), texts) if table is not None else ""
    return configure(kernel, text or texts[0], values)


def configure(kernel: ChoiceKernel, text: str, values: Mapping[str, object]) -> Any:
    """The launch of one choice for these arguments."""
    launch, own = kernel.choices[text], kernel.choice(text)
    shared = launch.size("shared", values, kernel.__name__, kernel.span)
    if launch.threads is not None:
        return own.over(launch.size("threads", values, kernel.__name__, kernel.span), launch.block, shared)
    return own[launch.size("grid", values, kernel.__name__, kernel.span), launch.block, shared]


# -- the table ------------------------------------------------------------------------------------------------------


def _key(kernel: ChoiceKernel, values: Mapping[str, object], device: Device) -> str:
    """The identity of a kernel in the tables: its source, the dtypes of what it is given and the target."""
    parts = (ast.dump(kernel.source.node), *(_form(value) for value in _arrays(kernel, values)), device.target.key())
    return hashlib.sha256("\0".join(("launches", *parts)).encode()).hexdigest()


def _form(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return type(value).__name__
    if isinstance(dtype, np.dtype):
        dtype = from_numpy(dtype) or dtype
    name = dtype.name if isinstance(dtype, DType) else str(dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}[{len(shape)}]"


_SHORT = {
    "float32": "f32", "float64": "f64", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
}  # fmt: skip
"""Names of dtypes of other libraries."""


def _extents(kernel: ChoiceKernel, values: Mapping[str, object]) -> Extents:
    parameters = [p for p in kernel.parameters if p.name in values]
    parts = split_values(parameters, [values[p.name] for p in parameters])
    return tuple((part.name, axis, int(extent)) for part in parts for axis, extent in enumerate(getattr(part.value, "shape", ())))


def _known(kernel: ChoiceKernel, values: Mapping[str, object], device: Device) -> bool:
    """Whether all choices were measured for these shapes before."""
    table = tuning.look_up(_key(kernel, values, device))
    if table is None:
        return False
    found = {m.schedule for m in table.at(_extents(kernel, values)) if m.version == compiler_version()}
    return found >= kernel.choices.keys()


# -- measuring ------------------------------------------------------------------------------------------------------


def tune_kernel(
    kernel: ChoiceKernel, args: tuple[object, ...], budget: float, device: str | None, progress: Report | None
) -> Tuning:
    """`tw.tune` of an explicit kernel."""
    if not kernel.choices:
        raise UserError.at(
            "TW016", f"{kernel.__name__} has no choices to measure", kernel.span, "give @tw.gpu(choices=[tw.LaunchChoice(block=128, threads=lambda x: x.size), ...])"
        )
    values = _bound(kernel, args, {})
    return tune_choices(kernel, values, kernel.choose_device(_arrays(kernel, values), device), budget, progress)


def tune_choices(
    kernel: ChoiceKernel, values: Mapping[str, object], device: Device, budget: float = 30.0, progress: Report | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:  # fmt: skip
    """Measure the choices for these arguments. The arguments are afterwards what they were."""
    if kind_of(device).simulated:
        raise UserError.at("TW030", "the emulator has no speed to tune", help="use device='cpu' or a GPU")
    bench: _Trials = (_HostLaunches if array_device(device) is None else _ArrayTrials)(kernel, values, device)
    ledger = _ChoiceLedger(_key(kernel, values, device), kernel.__name__, device.target.name, _extents(kernel, values))
    candidates = [_Choice(text) for text in kernel.choices]
    try:
        return search(candidates, lambda choice: [], bench, ledger, Tuning(kernel.__name__, device.id), budget, progress, clock)
    finally:
        bench.close()


class _Choice:
    """A candidate of the search."""

    def __init__(self, text: str) -> None:
        self.text = text

    def describe(self) -> str:
        return self.text


class _ChoiceLedger(TableLedger):
    """A choice that failed may work for other arguments, or after a change of what it calls: only what ended the process is not tried again."""

    def failed_before(self, schedule: str) -> str:
        error = super().failed_before(schedule)
        return error if error == UNFINISHED else ""


class _Trials(ABC):
    """The choices of a kernel, the arguments of a call, and what those were before."""

    def __init__(self, kernel: ChoiceKernel, values: Mapping[str, object], device: Device) -> None:
        self.kernel, self.device = kernel, device
        self.values = {name: self.placed(name, value) for name, value in values.items()}
        self.launches: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        """Arrays that some choice writes, as they were."""
        self.expected: list[np.ndarray] | None = None

    @abstractmethod
    def placed(self, name: str, value: object) -> object:
        """An argument where the device has it."""

    @abstractmethod
    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        """The median time of a launch of each, measured in turns."""

    def run(self, text: str) -> None:
        self.launches[text](**self.values, device=self.device.id)

    def prepare(self, text: str) -> None:
        """Compile a choice far enough to know what it writes, and keep that."""
        launch = configure(self.kernel, text, self.values)
        own, target = launch.kernel, self.device.target
        parts = split_values(own.parameters, [self.values[p.name] for p in own.parameters])
        _, args = read_leaves(own.parameters, parts, target.is_gpu)
        written = own.runner.built(args, launch.config, vendor=vendor_of(target), target=target).written
        for part in parts:
            if part.name in written and part.name not in self.before:
                self.before[part.name] = (part.value, self.copied(part.value))
        self.launches[text] = launch

    def copied(self, array: Any) -> Any:
        return array.copy()

    def restore(self) -> None:
        """Put back what was written."""
        for array, before in self.before.values():
            self.put(array, before)

    def put(self, array: Any, before: Any) -> None:
        array[...] = before

    def results(self) -> list[np.ndarray]:
        return [np.array(array) for array, _ in self.before.values()]

    def check(self, text: str) -> str:
        self.prepare(text)
        self.restore()
        self.run(text)
        found = self.results()
        if self.expected is None or len(self.expected) != len(found):
            self.expected = found
            return ""
        return next((d for d in (difference(a, b, "choice") for a, b in zip(found, self.expected, strict=True)) if d), "")

    def ahead(self, schedules: Sequence[str]) -> None:
        """Nothing is compiled ahead: it would disturb what is timed."""
        return

    def usable(self) -> bool:
        return True

    def close(self) -> None:
        self.restore()


class _HostLaunches(_Trials):
    """On the CPU. Arrays of other devices are copied once, so that copies are not timed."""

    _SECONDS = 0.3
    _MOST = 50

    def placed(self, name: str, value: object) -> object:
        if isinstance(value, DeviceArray):
            return value.numpy()
        return from_dlpack(value.detach().cpu()) if is_tensor(value) else value  # type: ignore[attr-defined]

    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        times: list[list[float]] = [[] for _ in schedules]
        end = time.perf_counter() + self._SECONDS * rounds
        while len(times[0]) < 3 or (len(times[0]) < self._MOST * rounds and time.perf_counter() < end):
            for text, own in zip(schedules, times, strict=True):
                self.restore()
                start = time.perf_counter()
                self.run(text)
                own.append(time.perf_counter() - start)
        return [float(np.median(own)) for own in times]


class _ArrayTrials(_Trials):
    """On a device with memory of its own. Host arrays are copied there, and so are never written."""

    _REPEATS = 9

    def __init__(self, kernel: ChoiceKernel, values: Mapping[str, object], device: Device) -> None:
        self.gpu = own_memory(device)
        super().__init__(kernel, values, device)

    def placed(self, name: str, value: object) -> object:
        if isinstance(value, np.ndarray):
            return to_device(value, self.device.id)
        kind = next(p for p in self.kernel.parameters if p.name == name).kind
        if kind is not None:
            fields = [getattr(value, f.name) for p in self.kernel.parameters if p.name == name for f in p.fields]
            if any(isinstance(f, np.ndarray) for f in fields):
                raise UserError.at("TW016", f"'{name}' is a struct with arrays on the host: their copies would be timed", self.kernel.span, "give arrays on the device to tune")
            return value
        return self.gpu.wrap(value) if hasattr(value, "shape") and not isinstance(value, np.generic) else value

    def put(self, array: Any, before: Any) -> None:
        self.gpu.copy(array, before)

    def results(self) -> list[np.ndarray]:
        self.gpu.synchronize()
        return [array.numpy() for array, _ in self.before.values()]

    def seconds(self, schedules: Sequence[str], rounds: int = 1) -> list[float]:
        times: list[list[float]] = [[] for _ in schedules]
        for _ in range(self._REPEATS * rounds):
            for text, own in zip(schedules, times, strict=True):
                # The copies keep the device busy while the launch is queued: the host's time does not show.
                self.restore()
                (milliseconds,) = self.gpu.time(lambda text=text: self.run(text), repeats=1, warmup=0)  # type: ignore[misc]
                own.append(milliseconds / 1e3)
        return [float(np.median(own)) for own in times]

    def usable(self) -> bool:
        try:
            self.gpu.synchronize()
        except TilewrightError:
            return False
        return True

    def close(self) -> None:
        if self.usable():
            super().close()
