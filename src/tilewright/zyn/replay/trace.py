"""A run of a ZynML program, recorded as the calls it makes.

In: a program and inputs it was run with before. Out: its results, and a `Recording`: kernels and host functions with where each argument comes
from (an input, an earlier call, or a value that the shapes of the inputs decide). What it says holds for all inputs of the same shapes and
element types: a run that depends on the values of elements, or that does more than compute (prints, waits, reads files), is not recorded
(`NotRecorded`, before anything of that kind has happened).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.base import dtypes
from tilewright.base.source import Span
from tilewright.execute.calls.complex_arrays import any_complex, makes_complex
from tilewright.runtime.core import streams
from tilewright.tree import syntax
from tilewright.tree.block_graph import AffineIndex
from tilewright.tree.metadata import KernelMetadata
from tilewright.zyn.host import functions as host_functions
from tilewright.zyn.host.block_runner import BlockRunner, RecordableBlocks
from tilewright.zyn.host.blocks import scalar
from tilewright.zyn.host.formulas import compiled
from tilewright.zyn.host.run import Run
from tilewright.zyn.host.values import Unread, ValueNeeded
from tilewright.zyn.lazy.lazy_array import LazyArray, viewed

if TYPE_CHECKING:
    from tilewright.execute.calls.run import Runner
    from tilewright.execute.devices import Device
    from tilewright.zyn.lazy.lazy_blocks import LazyBlocks
    from tilewright.zyn.module_check import ModuleCheck

Path = tuple[str | int, ...]
"""Where an input is: the name of an input, then keys and positions in records and lists."""

CONSTANTS = (bool, int, float, str, type(None), dtypes.DType, np.dtype, np.generic)
_VIEWS = frozenset({"reshape", "split", "transpose"})
_PURE = frozenset({*_VIEWS, "concat", "zeros", "ones", "full", "copy", "len", "str", "compute_devices", "allocate"})
_PURE_METHODS = frozenset({"to_device", "reshape", "transpose"})


class NotRecorded(Exception):
    """A run that has to be made statement by statement; the text says why."""


@dataclass(frozen=True, eq=False)
class TracedValue:
    """Something that differs from call to call: an array, or a number that a kernel computes."""

    number: int
    sample: object
    """What it was when the run was recorded; only as long as that lasts."""


Part = Any
"""A value as calls see it: a `TracedValue`, a constant, or a tuple, list or dictionary of such."""


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A call: what it takes by name, and what it gives. `function` takes the arguments in order."""

    label: str
    function: Callable[..., object]
    arguments: dict[str, Part]
    results: tuple[TracedValue, ...]
    several: bool
    """Whether it gives a tuple, of as many as there are results."""
    runner: Runner | None = None
    device: Device | None = None

    @property
    def is_view(self) -> bool:
        return self.label in _VIEWS or self.label in ("index", "T")


@dataclass
class Recording:
    """What a run did."""

    names: tuple[str, ...]
    inputs: dict[Path, TracedValue] = field(default_factory=dict)
    constants: dict[Path, object] = field(default_factory=dict)
    containers: dict[Path, tuple[type, int]] = field(default_factory=dict)
    """What lists and records there are among the inputs, and how long they are."""
    same: list[tuple[Path, Path]] = field(default_factory=list)
    """Inputs that are one object."""
    calls: list[TracedCall] = field(default_factory=list)
    result: Part = None

    def needed(self) -> list[TracedCall]:
        """The calls that the result needs; what others compute nobody sees."""
        wanted = set(values_in(self.result))
        found: list[TracedCall] = []
        for call in reversed(self.calls):
            if wanted & set(call.results):
                found.append(call)
                wanted.update(values_in(list(call.arguments.values())))
        return found[::-1]


def values_in(part: Part) -> list[TracedValue]:
    if isinstance(part, TracedValue):
        return [part]
    if isinstance(part, list | tuple):
        return [v for item in part for v in values_in(item)]
    return [v for item in part.values() for v in values_in(item)] if isinstance(part, dict) else []


class TraceRecorder(BlockRunner):
    """Runs the compute blocks of a program that is recorded, and notes them."""

    takes_futures = True

    def __init__(self, runners: RecordableBlocks, names: Sequence[str]) -> None:
        self._runners = runners
        self.recording = Recording(tuple(names))
        self._known: dict[int, TracedValue] = {}
        """By identity; the samples keep the objects."""
        self._paths: dict[int, Path] = {}
        """Where records and lists among the inputs are, by identity; whoever records has the inputs."""
        self._others: set[Path] = set()
        """Inputs that are the same object as another one."""
        self._count = 0

    # -- values -----------------------------------------------------------------------------------------------------

    def inputs(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            self._input((name,), value)

    def _input(self, path: Path, value: object) -> None:
        """An input, or a part of one that the run looks at: what is in records and lists counts only when it is taken out of them."""
        recording = self.recording
        if path in recording.containers or path in recording.constants or path in recording.inputs or path in self._others:
            return
        if type(value) in (dict, list, tuple):
            recording.containers[path] = type(value), len(value)  # type: ignore[arg-type]
            if id(value) in self._paths:
                recording.same.append((self._paths[id(value)], path))
            else:
                self._paths[id(value)] = path
        elif isinstance(value, CONSTANTS):
            if isinstance(value, float | np.floating) and value != value:
                raise NotRecorded("an input is NaN")
            recording.constants[path] = value
        elif is_array(value) and not (isinstance(value, np.ndarray) and value.ndim == 0):
            known = self._known.get(id(value))
            if known is not None:
                recording.same.append((next(p for p, v in recording.inputs.items() if v is known), path))
                self._others.add(path)
                return
            recording.inputs[path] = self._new(value)
        else:
            raise NotRecorded(f"an input is a {type(value).__name__}")

    def field(self, container: Any, key: object) -> object:
        """A part of a record or list; one of an input is an input from now on."""
        found: object = container[key]
        path = self._paths.get(id(container))
        if path is not None and isinstance(key, slice):
            self._all(container, path)
        elif path is not None and isinstance(key, int | str):
            self._input((*path, key), found)
        return found

    def _all(self, container: Any, path: Path) -> None:
        """All of a record or list is used."""
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            self._input((*path, key), item)
            if type(item) in (dict, list, tuple):
                self._all(item, (*path, key))

    def _new(self, value: object) -> TracedValue:
        made = TracedValue(self._count, value)
        self._count += 1
        self._known[id(value)] = made
        return made

    def part(self, value: object) -> Part:
        """A value of the program as something a later run finds again."""
        known = self._known.get(id(value))
        if known is not None:
            return known
        if isinstance(value, CONSTANTS):
            return value
        path = self._paths.get(id(value))
        if path is not None:
            self._all(value, path)
        if type(value) in (list, tuple):
            return type(value)(self.part(item) for item in value)  # type: ignore[call-arg, attr-defined]
        if type(value) is dict:
            return {key: self.part(item) for key, item in value.items()}
        raise NotRecorded(f"it has a {type(value).__name__} of unknown origin")

    def _result(self, value: object, from_kernel: bool) -> tuple[object, TracedValue]:
        """What the program goes on with, and how it is known from now on."""
        if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
            if not from_kernel:
                raise NotRecorded("an element of an array becomes a number")
            number: Any = value
            value = Unread(number[()])
        elif not is_array(value):
            raise NotRecorded(f"a call gives a {type(value).__name__}")
        return value, self._new(value)

    # -- calls ------------------------------------------------------------------------------------------------------

    def add(
        self, label: str, function: Callable[..., object], given: Mapping[str, object], runner: Runner | None = None, device: Device | None = None
    ) -> object:
        """Make a call, and note it."""
        parts = {name: self.part(value) for name, value in given.items()}
        numbers = [v for v in values_in(list(parts.values())) if isinstance(v.sample, Unread)]
        if numbers and runner is None:
            raise NotRecorded("a number that a kernel computes is used on the host")
        if any(not isinstance(v.sample.value, np.floating) for v in numbers if isinstance(v.sample, Unread)):
            # It may say how often a loop runs.
            raise NotRecorded("a whole number that a kernel computes goes to another")
        values = [v.value if isinstance(v, Unread) else v for v in given.values()]
        result = function(*values)
        if isinstance(result, streams.FUTURES):
            raise NotRecorded("a call gives a future")
        if not values_in(list(parts.values())) and _is_constant(result):
            return result
        if isinstance(result, tuple):
            found = [self._result(item, runner is not None) for item in result]
            self.recording.calls.append(TracedCall(label, function, parts, tuple(v for _, v in found), True, runner, device))
            return tuple(item for item, _ in found)
        if _is_constant(result) and not isinstance(result, np.generic) and label == "len":
            return result
        item, value = self._result(result, runner is not None)
        self.recording.calls.append(TracedCall(label, function, parts, (value,), False, runner, device))
        return item

    def waiting(self, pipeline: str) -> LazyBlocks | None:
        return self._runners.fuser.waiting(pipeline, self, self.view) if self._runners.joins_blocks else None

    def view(self, array: object, shape: tuple[int, ...], places: tuple[AffineIndex, ...]) -> object:
        return self.add("index", lambda x: viewed(x, shape, places), {"x": array})

    def add_arithmetic(self, formula: syntax.Expr, given: Mapping[str, object]) -> object:
        """Arithmetic on the host with numbers that kernels compute."""
        names = tuple(given)
        parts = {name: self.part(value) for name, value in given.items()}

        def compute(*values: object) -> object:
            return scalar(formula, dict(zip(names, values)))

        numbers = {name: v.value if isinstance(v, Unread) else v for name, v in given.items()}
        result = compute(*numbers.values())
        item, value = self._result(result, True)
        self.recording.calls.append(TracedCall("arithmetic", compiled(formula, numbers, compute) or compute, parts, (value,), False))
        return item

    def __call__(self, function: syntax.Function, arguments: Mapping[str, object], device: str) -> object:
        """Run a compute block."""
        if any(p.in_place for p in function.params):
            raise NotRecorded(f"the block '{function.name}' writes in place")
        if any_complex(arguments.values()) or makes_complex(function):
            raise NotRecorded(f"the block '{function.name}' has complex numbers")
        given = {n: v.value if isinstance(v, Unread) else v for n, v in arguments.items()}
        resolved = self._runners.resolve(function, given, device)
        if resolved is None:
            raise NotRecorded(f"the block '{function.name}' is asynchronous, or runs on several devices")
        runner, chosen = resolved
        names = tuple(arguments)
        return self.add(function.name, lambda *values: runner.run(dict(zip(names, values)), chosen), arguments, runner, chosen)


class RecordedRun(Run):
    """A run whose compute blocks a `TraceRecorder` runs; what else is done with arrays is told to it too."""

    _run_compute: TraceRecorder

    def _arithmetic(self, formula: syntax.Expr, values: dict[str, object]) -> object:
        if any(isinstance(value, Unread) for value in values.values()):
            return self._run_compute.add_arithmetic(formula, values)
        return super()._arithmetic(formula, values)

    def _primitive(self, metadata: KernelMetadata, values: Any, device: str, span: Span) -> object:
        raise NotRecorded(f"a block is @kernel {metadata.kind.value}")

    def _host_call(self, name: str, given: dict[str, object]) -> object:
        if name not in _PURE:
            raise NotRecorded(f"it calls {name}()")
        if name == "str" and not isinstance(given["x"], CONSTANTS):
            raise NotRecorded("it shows an array")
        if name == "allocate" and (given.get("pinned") or given.get("managed")):
            raise NotRecorded("it makes pinned or managed memory")
        if name == "compute_devices":
            return host_functions.call(name, given, self._chosen())
        names, device = tuple(given), self._chosen()
        return self._run_compute.add(name, lambda *values: host_functions.call(name, dict(zip(names, values)), device), given)

    def _host_method(self, name: str, receiver: object, given: dict[str, object]) -> object:
        if name not in _PURE_METHODS:
            raise NotRecorded(f"it calls .{name}()")
        names = tuple(given)
        return self._run_compute.add(
            name, lambda array, *values: host_functions.method(name, array, dict(zip(names, values))), {"x": receiver, **given}
        )

    def _array_part(self, array: object, name: str) -> object:
        if name != "T" or isinstance(array, LazyArray):
            return super()._array_part(array, name)
        return self._run_compute.add("T", lambda x: x.T, {"x": array})

    def _element(self, array: Any, indices: tuple[object, ...]) -> object:
        if isinstance(array, LazyArray):
            return super()._element(array, indices)
        if not any(isinstance(i, slice) for i in indices) and len(indices) == len(array.shape):
            raise NotRecorded("an element of an array becomes a number")
        return self._run_compute.add("index", lambda x: x[indices], {"x": array})

    def _field(self, container: Any, key: object) -> object:
        return self._run_compute.field(container, key)

    def _item(self, value: object) -> object:
        if getattr(value, "shape", None) == () and is_array(value):
            raise NotRecorded("the value of an array decides what is done")
        return value

    def _await(self, node: syntax.Await) -> object:
        raise NotRecorded("it waits")

    def _assign_part(self, target: syntax.Expr, value: object) -> None:
        raise NotRecorded("it assigns to parts of arrays or records")


def record(
    check: ModuleCheck, runners: RecordableBlocks, device: str | None, tree: syntax.Module, values: dict[str, object], only: frozenset[str] | None = None
) -> tuple[dict[str, object], TraceRecorder]:  # fmt: skip
    """Run a program and note what it does. Whatever goes wrong is `NotRecorded`: nothing of it stays, and it can be run anew."""
    recorder = TraceRecorder(runners, tuple(values))
    try:
        recorder.inputs(values)
        found = RecordedRun(check, recorder, device, dict(values)).run(tree, only)
        recorder.recording.result = {name: recorder.part(value) for name, value in found.items()}
    except NotRecorded:
        raise
    except ValueNeeded:
        raise NotRecorded("a number that a kernel computes decides what is done") from None
    except Exception as error:
        raise NotRecorded(f"{type(error).__name__}: {error}") from error
    return {name: _plain(value) for name, value in found.items()}, recorder


def is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic | Unread)


def form_of(value: Any) -> object:
    """All of an input that decides what a run does; TypeError for what is no array, number, string, list or record."""
    if isinstance(value, dict):
        return tuple((name, form_of(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(form_of, value))
    if isinstance(value, CONSTANTS):
        return type(value), str(value) if isinstance(value, float | np.floating) else value
    if not is_array(value):
        raise TypeError
    return type(value), tuple(value.shape), value.dtype, str(getattr(value, "device", ""))


def _is_constant(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_constant, value))
    return isinstance(value, CONSTANTS)


def _plain(value: Any) -> Any:
    """A result of a recorded run as the program gives it."""
    if isinstance(value, Unread):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value
