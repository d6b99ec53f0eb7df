"""`@kernel`: a Python function becomes a callable kernel.

The first call with new kinds of arguments compiles; later ones go straight to machine code. A kernel is an `Entry`, which
calls what it was given last: the general path at first and then the entry stub of the latest CPU program, or the launchers of
the GPU programs: builtin functions that check their arguments themselves and hand what they were not made for on, in the end
to the general path. No Python code runs in between.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from tilewright.base import registry
from tilewright.base.artifact import Artifact
from tilewright.base.dtypes import DType
from tilewright.base.errors import Diagnostics, UserError, public, public_methods
from tilewright.base.target import Target, parse_target
from tilewright.compile import tiers
from tilewright.compile.driver import Compilation, Signature, compile_kernel, compile_stages
from tilewright.execute.asynchronous import is_special, special_call
from tilewright.execute.calls.described import stand_in
from tilewright.execute.calls.index_checks import check_flags
from tilewright.execute.calls.run import Runner
from tilewright.execute.calls.struct_arrays import (
    CALL_WORDS,
    StructCalls,
    StructForm,
    any_struct,
    calls_of,
    form_of,
    names_structs,
)
from tilewright.execute.devices import (
    Device,
    array_device,
    default_device,
    device_of,
    find_device,
    when_default_changes,
)
from tilewright.execute.dispatch_devices import checked_spread, spans_devices, spread_call
from tilewright.execute.speed_warnings import strided_fields
from tilewright.frontend.python.defaults import wrong_signature
from tilewright.frontend.python.kernel_options import attributes_of, check_options
from tilewright.frontend.python.kernels import parse_function
from tilewright.frontend.python.options import reduction
from tilewright.frontend.python.sources import keep_source
from tilewright.runtime.core import observe
from tilewright.runtime.core.entry import Entry, arranger
from tilewright.runtime.core.streams import FAST_PATH_OFF, host_recorder, is_capturing
from tilewright.runtime.exchange.host_tensors import as_array, as_tensor, has_host_tensors
from tilewright.runtime.exchange.libraries import is_tensor
from tilewright.runtime.exchange.tensor_calls import tensor_call
from tilewright.runtime.memory.packed_array import PackedArray
from tilewright.tree.metadata import DeviceTarget, KernelMetadata, read_attributes
from tilewright.tree.syntax import Function, KernelAttribute

P = ParamSpec("P")
R = TypeVar("R")

if TYPE_CHECKING:
    import numpy as np

    from tilewright.frontend.words.objects import Array, ResultArray

    Q = ParamSpec("Q")
    T = TypeVar("T", bound=Array)

_direct: weakref.WeakSet[object] = weakref.WeakSet()
"""Kernels whose calls go straight to the CPU."""


def leave_direct_ways() -> None:
    """The default device changed, or a graph is recorded: calls have to be looked at again."""
    for known in list(_direct):
        assert isinstance(known, Kernel)
        if known._launch is not None:
            known._go_straight(known._launch)
        else:
            known.enter(known._general_function)
    _direct.clear()


def _leave_while_special() -> None:
    """Another thread may have begun to record since this one looked."""
    if FAST_PATH_OFF.value:
        leave_direct_ways()


when_default_changes(leave_direct_ways)


@public_methods("__init__")
class Kernel(Entry, Generic[P, R]):
    """A kernel written in Python. Call it like the function it was; `out=`, `device=`, `tune=`, `asynchronous=` and `stream=` are extra."""

    if TYPE_CHECKING:

        # Calls with arrays: what comes back is of the library of the first. Calls with `out=` and its like are not checked further:
        # a ParamSpec takes no keywords beside it.
        @overload  # type: ignore[override]
        def __call__(self: Kernel[P, Generator[Any, Any, Any]], *args: P.args, **keywords: P.kwargs) -> Any: ...
        @overload
        def __call__(self: Kernel[Concatenate[Array, Q], Array], first: np.ndarray[Any, Any], /, *args: Q.args, **keywords: Q.kwargs) -> ResultArray: ...
        @overload
        def __call__(self: Kernel[Concatenate[Array, Q], Array], first: T, /, *args: Q.args, **keywords: Q.kwargs) -> T: ...
        @overload
        def __call__(self: Kernel[P, Array], *args: P.args, **keywords: P.kwargs) -> ResultArray: ...
        @overload
        def __call__(self, *args: P.args, **keywords: P.kwargs) -> R: ...
        @overload
        def __call__(self, *args: Any, out: Any, **keywords: Any) -> Any: ...
        @overload
        def __call__(self, *args: Any, device: str | Sequence[str], **keywords: Any) -> Any: ...
        @overload
        def __call__(self, *args: Any, stream: Any, **keywords: Any) -> Any: ...
        @overload
        def __call__(self, *args: Any, tune: bool, **keywords: Any) -> Any: ...
        @overload
        def __call__(self, *args: Any, asynchronous: bool, **keywords: Any) -> Any: ...
        def __call__(self, *args: Any, **keywords: Any) -> Any:  # type: ignore[misc]
            """Run the kernel: arrays and numbers in, arrays out. Inside another kernel: what it computes, as part of that one."""

    def __init__(
        self,
        function: Callable[P, R],
        device: str | None = None,
        precision: str = "auto",
        schedule: str = "",
        asynchronous: bool = False,
        watchdog: float | None = None,
        reduce: str = "",
        axis: int | tuple[int, ...] | None = None,
        spread: tuple[str, ...] | None = None,
        launches: int | None = None,
        attributes: tuple[KernelAttribute, ...] | None = None,
        check: bool = False,
        packed: Mapping[str, DType] | None = None,
        tree: Function | None = None,
    ) -> None:
        """`tree`: the kernel, where it is not that of the function's source."""
        self._general_function = self._general
        self._in_order_function = self._in_order
        super().__init__(self._general_function)
        functools.update_wrapper(self, function)
        if tree is None:
            keep_source(inspect.unwrap(function))
        check_options({"device": device, "precision": precision, "schedule": schedule, "asynchronous": asynchronous, "launches": launches})
        self._attributes = reduction(reduce, axis) if attributes is None else attributes
        self.check = check
        """Whether all indices that nothing proves are checked, on every device."""
        self.launches = launches or 0
        self.python = function
        self.device, self.precision, self.schedule = device, precision, schedule
        self.asynchronous = asynchronous
        self.watchdog = watchdog
        self.spread = spread
        """The devices that share every call that names none."""
        self.spreads: dict[tuple[str, ...], object] = {}
        """What makes calls on several devices, by their names."""
        self.ran: tuple[object, ...] = ()
        """What ran where in the latest call on several devices."""
        signature = inspect.signature(function).parameters
        self._names = self.parameter_names = tuple(signature)
        self._defaults = {name: p.default for name, p in signature.items() if p.default is not p.empty}
        self._positional = sum(p.kind is not p.KEYWORD_ONLY for p in signature.values())
        """How many parameters may be given by position."""
        self._direct: list[object] = [None]
        """Machine code that takes all arguments in order, once there is some."""
        self._arranger: Callable[..., object] | None = None
        self._runner: Runner | None = None if tree is None else Runner(tree, precision, schedule, watchdog, launches or 0, check)
        message = wrong_signature(function)
        if message:
            raise UserError.at("TW009", message, self.function.span)  # unless reading it finds the very place
        self._takes_tensors = False
        """Whether a call had tensors in host memory."""
        self._launch: Callable[..., object] | None = None
        """Machine code for calls on GPUs, once there is some."""
        self.packed = packed or {}
        """Parameters that are given the bytes of packed blocks, and of which dtype those are."""
        self._with_packed: dict[tuple[tuple[str, str], ...], Kernel[P, R]] = {}
        """The kernels that take calls with packed blocks, by parameters and dtypes."""
        self._with_structs: dict[StructForm, tuple[Kernel[..., Any], StructCalls]] = {}
        """The kernels that take calls with structs, as their fields, by what those are."""
        self._names_structs: bool | None = None

    @property
    def function(self) -> Function:
        """The untyped tree; parsed at first use."""
        return self.runner.function

    @property
    def runner(self) -> Runner:
        if self._runner is None:
            tree = parse_function(self.python, self._attributes)
            self._runner = Runner(tree, self.precision, self.schedule, self.watchdog, self.launches, self.check, self.packed)
        return self._runner

    @property
    def metadata(self) -> KernelMetadata:
        """What the decorator says about the kernel: kind, device, schedule hints, constraints."""
        said = read_attributes(self._attributes, Diagnostics())
        places = self.spread or ((self.device,) if self.device else said.device.names)
        return replace(
            said, device=DeviceTarget(places), precision=self.precision if self.precision != "auto" else "", is_async=self.asynchronous, parallel="data" if self.spread else said.parallel
        )

    @property
    def last(self) -> Artifact | None:
        """What the latest call ran: its target says where, its launches which kernels."""
        return self.runner.last

    def _bind(self, args: tuple[object, ...], keywords: dict[str, object]) -> dict[str, object]:
        """Arguments by name; UserError with the names when they do not fit."""
        names, span = self._names, self.function.span
        if len(args) > len(names):
            raise UserError.at(
                "TW016", f"{self.__name__} takes {len(names)} argument(s) ({', '.join(names)}), got {len(args)}", span
            )
        if len(args) > self._positional:
            only = ", ".join(names[self._positional :])
            raise UserError.at(
                "TW016", f"{self.__name__} takes {self._positional} argument(s) by position ({', '.join(names[: self._positional])}), got {len(args)}", span,
                f"give {only} by keyword",
            )  # fmt: skip
        values = dict(zip(names, args, strict=False))
        for name, value in keywords.items():
            if name not in names:
                raise UserError.at("TW016", f"{self.__name__} has no argument '{name}'", span, f"its arguments are {', '.join(names)}")
            if name in values:
                raise UserError.at("TW016", f"{self.__name__} got '{name}' twice", span)
            values[name] = value
        values = {**self._defaults, **values}
        missing = [name for name in names if name not in values]
        if missing:
            raise UserError.at("TW008", f"{self.__name__} is missing {', '.join(map(repr, missing))}", span)
        return {name: values[name] for name in names}

    @public
    def _in_order(self, *args: object, **keywords: object) -> object:
        """The general path for a call that was arranged before."""
        return self._general(*args[: self._positional], **dict(zip(self._names[self._positional :], args[self._positional :], strict=False)), **keywords)

    def _go_straight(self, entry: Callable[..., object]) -> None:
        """Calls go to machine code that takes all arguments in order."""
        self._direct[0] = entry
        self.enter(entry if self._positional == len(self._names) else self._arranged())

    def _arranged(self) -> Callable[..., object]:
        """What takes calls with keywords and defaults, in machine code where there is some."""
        if self._arranger is None:
            self._arranger = arranger(self._direct, self._names, self._positional, self._defaults, self._general_function)
        return self._arranger or self._general_function

    def _rest(self) -> Callable[..., object]:
        """Where machine code hands on the calls that it does not take."""
        return self._arranged() if self._positional == len(self._names) else self._in_order_function

    def _packed_call(self, args: tuple[object, ...], keywords: dict[str, object]) -> object:
        """A call with packed blocks is one with their bytes, of a kernel for these dtypes. Machine code then takes it as any other."""
        asked = None if "device" in self._names else keywords.get("device")
        if self.spread or keywords.get("tune") or (spans_devices(asked) and not isinstance(asked, Device)):
            raise UserError.at("TW016", f"{self.__name__} has packed blocks among its arguments, and is to be tuned or spread over devices", self.function.span, "call it on one device")
        named = {**dict(zip(self._names, args, strict=False)), **keywords}
        packed = {name: value.dtype for name, value in named.items() if isinstance(value, PackedArray)}
        foreign = [name for name in packed if name not in self._names]
        if foreign:
            raise UserError.at("TW018", f"'{foreign[0]}=' of {self.__name__} holds packed blocks, which kernels do not write", self.function.span, "write to an array of f32, and pack that with tw.quantize")
        key = tuple((name, dtype.name) for name, dtype in packed.items())
        other = self._with_packed.get(key)
        if other is None:
            other = self._with_packed[key] = Kernel(
                self.python, self.device, self.precision, self.schedule, self.asynchronous, self.watchdog, launches=self.launches or None,
                attributes=self._attributes, check=self.check, packed=packed,
            )  # fmt: skip
        blocks = (value.blocks if isinstance(value, PackedArray) else value for value in args)
        result = other(*blocks, **{name: value.blocks if isinstance(value, PackedArray) else value for name, value in keywords.items()})
        self.runner.last = other.runner.last
        return result

    def _named_structs(self) -> bool:
        """Whether its text names structs: it is then never called without them."""
        if self._names_structs is None:
            self._names_structs = names_structs(self.function)
        return self._names_structs

    def _without_structs(self, args: tuple[object, ...], keywords: dict[str, object]) -> tuple[Kernel[..., Any], StructCalls, list[object]]:
        """The kernel of a call's fields, and its arguments in order."""
        values = self._bind(args, keywords)
        form = form_of(self.function, values)
        found = self._with_structs.get(form)
        if found is None:
            calls = calls_of(self.function, form)

            def stand_in() -> None:
                """Its text is `calls.split.function`."""

            stand_in.__name__, stand_in.__qualname__ = self.__name__, self.__qualname__
            stand_in.__signature__ = calls.signature()  # type: ignore[attr-defined]
            other: Kernel[..., Any] = Kernel(
                stand_in, self.device, self.precision, self.schedule, self.asynchronous, self.watchdog, launches=self.launches or None,
                attributes=self._attributes, check=self.check, tree=calls.split.function,
            )  # fmt: skip
            found = self._with_structs[form] = other, calls
        return *found, found[1].arguments(values)

    def _struct_call(self, args: tuple[object, ...], keywords: dict[str, object]) -> object:
        """A call with structs is one with their fields, of a kernel for these layouts."""
        words = {name: keywords[name] for name in CALL_WORDS if name in keywords and name not in self._names}
        if self.spread or spans_devices(words.get("device")):
            raise UserError.at("TW016", f"{self.__name__} has structs among its arguments, and is spread over devices", self.function.span, "call it on one device")
        other, calls, arguments = self._without_structs(args, {n: v for n, v in keywords.items() if n not in words})
        out = words.pop("out", None)
        makes = any(layout is not None for layout in calls.split.results)
        if makes and (self.asynchronous or words.get("asynchronous") or words.get("stream") is not None):
            raise UserError.at("TW016", f"{self.__name__} returns structs, which calls that do not wait cannot make", self.function.span, "write to arrays given as tw.InOut")
        given, copies = (None, []) if out is None else calls.given(out)
        with strided_fields():
            found = other(*arguments, **words) if out is None else other(*arguments, out=given, **words)
        if out is None:
            result: object = calls.gathered(found)
        else:
            for part, made in copies:
                part[...] = made
            result = out
        self.runner.last = other.runner.last
        return result

    @public
    def _general(self, *args: object, **keywords: object) -> object:
        if args and is_tensor(args[0]):
            result = self._quick_tensors(args, keywords)
            if result is not NotImplemented:
                return result
        if any(type(value) is PackedArray for value in (*args, *keywords.values())):
            return self._packed_call(args, keywords)
        if any_struct((*args, *keywords.values())) or self._named_structs():
            return self._struct_call(args, keywords)
        asked = keywords.get("device", self.spread)
        if asked is not None and "device" not in self._names and spans_devices(asked):
            return spread_call(self, asked, args, keywords)
        if self.asynchronous or is_special(args, keywords):
            result = special_call(self, args, keywords)
            if result is not NotImplemented:
                return result
        out = keywords.pop("out", None)
        asked = keywords.pop("device", None)
        if asked is not None and not isinstance(asked, str):
            raise UserError.at("TW009", f"device= is a {type(asked).__name__}, not a name such as {registry.examples()}", self.function.span)
        tune = keywords.pop("tune", False) if "tune" not in self._names else False
        if not isinstance(tune, bool):
            raise UserError.at("TW009", f"tune= is {tune!r}", self.function.span, "give True or False")
        if tune and (self.schedule or self.launches):
            fixed = f"schedule={self.schedule!r}" if self.schedule else "launches=1"
            raise UserError.at("TW016", f"tune=True has nothing to choose: {self.__name__} has {fixed}", self.function.span, "leave one of them out")
        values = self._bind(args, keywords)
        name = asked or self.device or device_of([*values.values(), out]) or default_device()
        device = find_device(name)
        if tune:
            from tilewright.execute.tune import ensure_tuned

            if ensure_tuned(self.function, values, device, self.precision):
                self.take_tuned(device)
        if (not FAST_PATH_OFF.value or not is_capturing() or host_recorder() is not None) and has_host_tensors([*values.values(), out]):
            result = self.runner.run({n: as_array(v) for n, v in values.items()}, device, as_array(out))
            self._takes_tensors = True
            if asked is None and not self.asynchronous and not FAST_PATH_OFF.value and array_device(device) is None:
                self._take_stub(device)
            return as_tensor(result) if out is None else out
        result = self.runner.run(values, device, out)
        if self.asynchronous or FAST_PATH_OFF.value:
            return result
        if array_device(device) is not None:
            # The arrays of a call say where it goes.
            if self.device is None or find_device(self.device).id == device.id:
                self._take_launches(device)
        elif asked is None:
            self._take_stub(device)
        return result

    def _take_stub(self, device: Device) -> None:
        """From now on calls like the latest go straight to the code that just ran, where its device is the usual one."""
        if self.device not in (None, device.id) or default_device() != device.id:
            return
        runner = self.runner
        calls = runner.calls(device)
        entry = calls.entry(device, self._launch or self._rest())
        if entry is None:
            return
        direct = calls.direct if self._takes_tensors else None
        lending = tensor_call(direct, entry) if direct is not None else None
        self._go_straight(lending or entry)
        _direct.add(self)
        _leave_while_special()
        if self._runner is not runner:
            self.enter(self._general_function)  # programs were forgotten meanwhile, by another thread

    def _quick_tensors(self, args: tuple[object, ...], keywords: dict[str, object]) -> object:
        """A call with tensors in host memory like those made before, on the CPU; `NotImplemented` when it is another one."""
        out = keywords.get("out")
        calls = None if self._runner is None else self._runner.by_kind.get("cpu")
        direct = None if calls is None else calls.direct
        if direct is None or len(args) != len(self._names) or len(keywords) != (out is not None) or "out" in self._names or FAST_PATH_OFF.value or observe.observer is not None:
            return NotImplemented
        if self.asynchronous or self.spread or self.device not in (None, "cpu") or default_device() != "cpu":
            return NotImplemented
        arrays = [as_array(value) for value in args]
        result = direct(*arrays) if out is None else direct(*arrays, out=as_array(out))
        if result is not NotImplemented and (not self._takes_tensors or self not in _direct):
            self._takes_tensors = True
            self._take_stub(find_device("cpu"))
        return result if result is NotImplemented else as_tensor(result) if out is None else out

    def _take_launches(self, device: Device) -> None:
        """From now on calls on such devices like those so far go straight to machine code."""
        launch = self.runner.entry(device, self._rest())
        if launch is not None and launch is not self._launch:
            self._launch = launch
            self._go_straight(launch)

    def bound(self, *args: object, **keywords: object) -> dict[str, object]:
        """The arguments of a call by name."""
        return self._bind(args, keywords)

    def forget_programs(self) -> None:
        """Choose code anew at the next call, and know nothing of those before."""
        self._choose_anew(None)

    def _choose_anew(self, last: Artifact | None) -> None:
        new = Runner(self.function, self.precision, self.schedule, self.watchdog, self.launches, self.check, self.packed)
        new.last = last
        self._runner = new
        self._launch = None
        self.enter(self._general_function)

    def take_tuned(self, device: Device) -> None:
        """Choose code anew, for what was measured on a device. In tiers, calls go on with the code they have until the background has made the new one."""

        def swap() -> None:
            self._choose_anew(None if self._runner is None else self._runner.last)

        calls = None if self._runner is None else self._runner.by_kind.get(device.kind)
        running = () if calls is None else calls.wanted
        if running and device.target.is_host and tiers.hold(self.function):
            tiers.add(tiers.TunedCode(self.function, running, device.target, swap))
        else:
            swap()

    # -- looking inside -----------------------------------------------------------------------------------------

    def _signature(self, args: tuple[object, ...], keywords: dict[str, object], target: Target) -> Signature:
        values = {name: stand_in(value) for name, value in self._bind(args, keywords).items()}
        return self.runner.signature(self.runner.arguments(values, target.is_gpu), target.is_gpu)

    def stages(self, *args: object, target: str = "cpu", **keywords: object) -> Compilation:
        """Every stage of compiling for these arguments. A text describes one: `"f32[64,*,128]"`."""
        if any_struct((*args, *keywords.values())) or self._named_structs():
            other, _, arguments = self._without_structs(args, keywords)
            return other.stages(*arguments, target=target)
        chosen = parse_target(target)
        return compile_stages(self.function, self._signature(args, keywords, chosen), chosen)

    def compile(self, *args: object, target: str = "cpu", **keywords: object) -> Artifact:
        """The artifact for these arguments: PTX for GPU targets, an object for CPUs. A text describes one: `"f32[64,*,128]"`."""
        if any_struct((*args, *keywords.values())) or self._named_structs():
            other, _, arguments = self._without_structs(args, keywords)
            return other.compile(*arguments, target=target)
        chosen = parse_target(target)
        return compile_kernel(self.function, self._signature(args, keywords, chosen), chosen)

    def __reduce__(self) -> str:
        """Copies are the kernel itself, and pickles its name, as with functions."""
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<kernel {self.__name__}({', '.join(self._names)})>"

    __name__: str
    __qualname__: str


@overload
def kernel(
    function: Callable[P, R],
    *,
    device: str | None = None,
    precision: str = "auto",
    optimize: str = "",
    schedule: str = "",
    asynchronous: bool = False,
    watchdog: float | None = None,
    reduce: str = "",
    axis: int | tuple[int, ...] | None = None,
    parallel: str = "",
    devices: Sequence[str] | None = None,
    launches: int | None = None,
    kind: str = "",
    tile: int | Sequence[int] | Mapping[str, int] | None = None,
    workgroup: int | Sequence[int] | None = None,
    shared: int | None = None,
    vector: int | None = None,
    unroll: int | None = None,
    max_registers: int | None = None,
    tensor_cores: bool = False,
    async_copy: bool = False,
    strict: bool = False,
    broadcast: Mapping[str, int] | None = None,
    vectorizable: bool = False,
    gpu_compute: bool = False,
    unchecked: bool = False,
    deterministic: bool = False,
    activations: str = "",
    check: bool = False,
) -> Kernel[P, R]: ...
@overload
def kernel(
    *,
    device: str | None = None,
    precision: str = "auto",
    optimize: str = "",
    schedule: str = "",
    asynchronous: bool = False,
    watchdog: float | None = None,
    reduce: str = "",
    axis: int | tuple[int, ...] | None = None,
    parallel: str = "",
    devices: Sequence[str] | None = None,
    launches: int | None = None,
    kind: str = "",
    tile: int | Sequence[int] | Mapping[str, int] | None = None,
    workgroup: int | Sequence[int] | None = None,
    shared: int | None = None,
    vector: int | None = None,
    unroll: int | None = None,
    max_registers: int | None = None,
    tensor_cores: bool = False,
    async_copy: bool = False,
    strict: bool = False,
    broadcast: Mapping[str, int] | None = None,
    vectorizable: bool = False,
    gpu_compute: bool = False,
    unchecked: bool = False,
    deterministic: bool = False,
    activations: str = "",
    check: bool = False,
) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
def kernel(
    function: Callable[P, R] | None = None,
    *,
    device: str | None = None,
    precision: str = "auto",
    optimize: str = "",
    schedule: str = "",
    asynchronous: bool = False,
    watchdog: float | None = None,
    reduce: str = "",
    axis: int | tuple[int, ...] | None = None,
    parallel: str = "",
    devices: Sequence[str] | None = None,
    launches: int | None = None,
    kind: str = "",
    tile: int | Sequence[int] | Mapping[str, int] | None = None,
    workgroup: int | Sequence[int] | None = None,
    shared: int | None = None,
    vector: int | None = None,
    unroll: int | None = None,
    max_registers: int | None = None,
    tensor_cores: bool = False,
    async_copy: bool = False,
    strict: bool = False,
    broadcast: Mapping[str, int] | None = None,
    vectorizable: bool = False,
    gpu_compute: bool = False,
    unchecked: bool = False,
    deterministic: bool = False,
    activations: str = "",
    check: bool = False,
) -> Kernel[P, R] | Callable[[Callable[P, R]], Kernel[P, R]]:
    """Mark a Python function as a kernel: `@tw.kernel`, or with options.

    `device="cuda"` fixes where it runs. `precision` says how contractions of f32 are multiplied: `auto` (the fastest way that errs no more than f32 does), `ieee`, or on tensor cores `tf32`
    (10 bits) or `3xtf32` (nearly all of f32's). `schedule` fixes how contractions are computed, as `tilewright tune` prints it.
    `optimize` says how much work goes into machine code: `O0` to `O3`, `Os` (small), `Olatency` (short calls), or `tiered`, which begins with quickly
    compiled code and exchanges it for that of the default level, `O2`, once that is compiled.
    `reduce="+"` (or `* min max and or argmin argmax`) combines what the kernel's loops yield, along `axis` or over all of them.
    With `asynchronous`, calls do not wait and give a future. `watchdog` is a number of seconds after which a GPU stops the kernel where
    loops that data decides turn, or threads wait for each other, for too long. `parallel="data"` with `devices` splits the batch of every
    call over these devices. `launches=1` makes all that the kernel does on a GPU one launch. On a CPU every index that is not proven to lie
    in its array is checked as the kernel runs; `unchecked=True` leaves that out. With `check=True` it is done on GPUs, too.
    `deterministic=True` makes scatters (`out[k[i]] += w[i]`) give the same bits on every run and for any number of threads.
    `activations="q8"` rounds what packed weights are multiplied with to eight bits, block by block, and multiplies integers.

    The others are the attributes of ZynML: `kind` holds the loops to a kind of kernel; `tile`, `workgroup`, `shared`, `vector`, `unroll`,
    `max_registers`, `tensor_cores` and `async_copy` are hints for the schedule, which `strict` makes binding; `broadcast`, `vectorizable` and
    `gpu_compute` are promises that are checked. docs/accepted-words.md has them all.
    """
    spread = checked_spread(parallel, devices, device)
    check_flags(unchecked, check)
    attributes = attributes_of({
        "reduce": reduce, "axis": axis, "kind": kind, "tile": tile, "workgroup": workgroup, "shared": shared, "vector": vector, "unroll": unroll,
        "max_registers": max_registers, "tensor_cores": tensor_cores, "async_copy": async_copy, "strict": strict, "broadcast": broadcast,
        "vectorizable": vectorizable, "gpu_compute": gpu_compute, "unchecked": unchecked, "deterministic": deterministic,
        "activations": activations, "optimize": optimize,
    })  # fmt: skip

    def made(wrapped: Callable[P, R]) -> Kernel[P, R]:
        return Kernel(wrapped, device, precision, schedule, asynchronous, watchdog, spread=spread, launches=launches, attributes=attributes, check=check)

    if function is None:
        return made
    if not callable(function):
        raise UserError.at("TW009", f"tw.kernel was given a {type(function).__name__}", help="give a function, or write @tw.kernel above one")
    return made(function)
