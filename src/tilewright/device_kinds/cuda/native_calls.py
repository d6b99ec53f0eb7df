"""Calls that machine code takes: which launchers a kernel has, and what the general path tells them.

In: a call that the general path has just made, with what it used; out: functions that make such calls. For each kind of call
(`Pattern`) there is a launcher; their functions form a chain, the newest first, that ends at the general path. Before a
launcher is told of a call, it shows what it reads of it: unless that is just what the general path used, it is told nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tilewright.base import launch_abi as abi
from tilewright.base.artifact import Artifact
from tilewright.base.forks import fork_safe_rlock
from tilewright.base.launch_abi import Pattern, Slot
from tilewright.base.record import record
from tilewright.execute.calls.outputs import MOST_SPECIALISATIONS
from tilewright.runtime.exchange.libraries import Library, Torch, is_tensor
from tilewright.runtime.memory.device_array import ArrayForm, DeviceArray, array_form

if TYPE_CHECKING:
    from tilewright.base.dtypes import DType
    from tilewright.runtime.cuda.context import CudaContext
    from tilewright.runtime.cuda.launch_records import Helpers
    from tilewright.runtime.cuda.launcher import Launcher, Recent
    from tilewright.runtime.cuda.program import CudaProgram

MOST_PATTERNS = 8
"""Kinds of calls a kernel has launchers for; with more it starts anew."""
_NUMBERS: dict[type, str] = {float: abi.FLOAT, int: abi.INTEGER, bool: abi.BOOL}


@record
class ObservedCall:
    """A call that was made."""

    values: tuple[object, ...]
    out: object
    program: CudaProgram
    sizes: Mapping[str, int]
    shapes: tuple[tuple[int, ...], ...]
    library: Library | None
    arrays: Mapping[str, DeviceArray]
    outputs: Mapping[str, DeviceArray]
    apart: Sequence[tuple[str, str]]
    """Names of results and of what they must not overlap."""
    written: frozenset[str] | None = None
    """For kernels without results: the arguments they write to."""


class _Known:
    """A launcher and the keys it has forms for."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.keys: set[bytes] = set()


class NativeCalls:
    """The launchers of one kernel."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[tuple[int, Pattern], _Known] = {}
        self._recent: Recent | None = None
        self._lock = fork_safe_rlock()
        self._chains: dict[int, tuple[Callable[..., object], Callable[..., object]]] = {}
        """By the address of the function at its end: that function and the chain."""

    @property
    def launchers(self) -> list[Launcher]:
        return [known.launcher for known in self._known.values()]

    @property
    def last(self) -> Artifact | None:
        """What the latest call ran, where it was one of these."""
        form = self._recent.form() if self._recent is not None else None
        return form.program.artifact if form is not None else None

    def forget_last(self) -> None:
        """A call went another way."""
        if self._recent is not None:
            self._recent.forget()

    def chain(self, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """A function that takes every call there is a form for, and hands others to `fallback`; None where there is no form."""
        with self._lock:
            if not self._known:
                return None
            found = self._chains.get(id(fallback))
            if found is None or found[0] is not fallback:
                made = fallback
                for known in self._known.values():
                    made = known.launcher.function(made)
                found = self._chains[id(fallback)] = fallback, made
            return found[1]

    def learn(self, call: ObservedCall) -> None:
        """Have calls like this one taken from now on, where machine code can read their arguments."""
        from tilewright.codegen.host.interpreter import stubs_work

        pattern = _pattern(call)
        if pattern is not None and stubs_work():
            with self._lock:
                self._learn(call, pattern)

    def _learn(self, call: ObservedCall, pattern: Pattern) -> None:
        device = call.program.device
        known = self._known.get((device.ordinal, pattern))
        if known is None or len(known.keys) >= MOST_SPECIALISATIONS:
            known = self._launcher(device, pattern)
        if known is None:
            return
        keywords = {} if call.out is None else {"out": call.out}
        seen = known.launcher.probe(*call.values, **keywords)
        arrays, numbers = _used(call)
        count = sum(slot.kind != abi.NOTHING for slot in pattern.arguments) + len(pattern.results)
        made = 0 if pattern.given else len(pattern.results)
        if seen is None or not _agree(memoryview(seen)[: 8 * count].cast("Q").tolist(), arrays, numbers, made):
            return
        keys = seen[8 * count :]
        if keys in known.keys:
            return
        from tilewright.runtime.cuda.launch_records import LaunchRecord

        kinds = [slot.kind for slot in pattern.arguments if slot.is_number]
        form = LaunchRecord(call.program, call.sizes, keys, kinds, _pairs(call), _helpers(call, pattern))
        known.launcher.add(form)
        known.keys.add(keys)

    def _launcher(self, device: CudaContext, pattern: Pattern) -> _Known | None:
        """A new launcher, in place of the one there may be: that has had all the forms it may have."""
        from tilewright.codegen.host.launcher import engine_object, key_count, stub_object
        from tilewright.runtime.cuda import launcher as cuda_launcher

        tensors = any(slot.is_array and slot.kind != abi.OWN for slot in (*pattern.arguments, *pattern.results))
        cuda_launcher.load_engine(engine_object)
        layout = cuda_launcher.layout(tensors)
        if layout is None:
            return None
        if (device.ordinal, pattern) not in self._known and len(self._known) >= MOST_PATTERNS:
            self._known.clear()
        if self._recent is None:
            self._recent = cuda_launcher.Recent()
        launcher = cuda_launcher.Launcher(device, self._name, stub_object(pattern, layout), key_count(pattern), self._recent)
        self._chains.clear()
        self._known[device.ordinal, pattern] = made = _Known(launcher)
        return made


def _pattern(call: ObservedCall) -> Pattern | None:
    """What kind of call it is; None where machine code does not know an argument."""
    artifact = call.program.artifact
    places = [position for position in range(len(call.values)) if position not in artifact.absent]
    shapes = {position for position, param in zip(places, artifact.inputs, strict=False) if param.name in artifact.shaping}
    arguments = [_slot(value, position in shapes) for position, value in enumerate(call.values)]
    outputs = call.program.artifact.outputs
    if not outputs and call.written is None:
        return None
    if not outputs:
        results = []
    elif call.out is not None:
        items: Sequence[object] = [call.out] if len(outputs) == 1 else call.out if type(call.out) is tuple else ()
        results = [_slot(item) for item in items]
    elif call.library is not None and not isinstance(call.library, Torch):
        return None
    else:
        made = (call.outputs[p.name].base is not None for p in outputs)
        results = [Slot(abi.TENSOR if foreign else abi.OWN, len(p.shape)) for foreign, p in zip(made, outputs, strict=True)]
    known = [slot for slot in (*arguments, *results) if slot is not None]
    if len(known) != len(arguments) + len(results) or len(results) != len(outputs) or not any(s.is_array for s in known):
        return None
    written = tuple(i for i, p in enumerate(call.program.artifact.inputs) if p.name in (call.written or ()))
    return Pattern(tuple(known[: len(arguments)]), tuple(known[len(arguments) :]), call.out is not None, written)


def _slot(value: object, shapes: bool = False) -> Slot | None:
    if type(value) is DeviceArray:
        return Slot(abi.OWN, value.ndim)
    if value is None:
        return Slot(abi.NOTHING)
    if shapes:
        return Slot(abi.SHAPING) if type(value) is int else None
    if type(value) in _NUMBERS:
        return Slot(_NUMBERS[type(value)])
    if not is_tensor(value):
        return None
    shape, strides = value.shape, value.stride()  # type: ignore[attr-defined]
    # A negated view is one of the imaginary parts of something: its elements are an even number apart.
    plain = any(extent > 1 and stride % 2 for extent, stride in zip(shape, strides, strict=True))
    return Slot(abi.TENSOR if plain else abi.CHECKED_TENSOR, len(shape))


def _used(call: ObservedCall) -> tuple[list[int], list[int]]:
    """Addresses of inputs and given results, and the words of numbers, in the order of a call's values."""
    artifact = call.program.artifact
    inputs = [call.arrays[p.name].pointer for p in artifact.inputs if p.name in call.arrays]
    given = [call.outputs[p.name].pointer for p in artifact.outputs] if call.out is not None else []
    words = [_word(value) for value in call.values if type(value) in _NUMBERS]
    return [*inputs, *given], words


def _word(value: object) -> int:
    if isinstance(value, float):
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    assert isinstance(value, int)
    return value & ((1 << 64) - 1)


def _agree(seen: list[int], arrays: list[int], numbers: list[int], made: int) -> bool:
    return seen[: len(arrays)] == arrays and seen[len(arrays) + made :] == numbers


def _pairs(call: ObservedCall) -> list[tuple[int, int, int, int, int, int]]:
    slots, arrays = call.program.slots, {**call.arrays, **call.outputs}
    pairs = [(a, b) for a, b in call.apart if arrays[a].size and arrays[b].size]
    return [(slots[a], *arrays[a].reach(), slots[b], *arrays[b].reach()) for a, b in pairs]


def _helpers(call: ObservedCall, pattern: Pattern) -> Helpers:
    from tilewright.runtime.cuda.launch_records import Helpers

    # What is made here lives as long as the kernel and must not hold the arrays of the call.
    program, library = call.program, call.library
    device = program.device
    take = _library_memory(library, device.ordinal) if library is not None else _pool_memory(program)
    if pattern.given or not pattern.results:
        return Helpers(None, take)
    makers: list[Callable[[int], object]] = []
    for param, shape, slot in zip(call.program.artifact.outputs, call.shapes, pattern.results, strict=True):
        foreign = library.maker(shape, param.dtype, device.ordinal) if library is not None and slot.kind != abi.OWN else None
        makers.append(_ignoring(foreign) if foreign is not None else _maker(device, shape, param.dtype))
    if len(makers) == 1:
        return Helpers(makers[0], take)
    return Helpers(lambda stream: tuple(make(stream) for make in makers), take)


def _library_memory(library: Library, ordinal: int) -> Callable[[int, int], tuple[int, object]]:
    return lambda nbytes, stream: library.memory(nbytes, ordinal)


def _pool_memory(program: CudaProgram) -> Callable[[int, int], tuple[int, object]]:
    return lambda nbytes, stream: program.pool_memory(stream)(nbytes)


def _ignoring(make: Callable[[], object]) -> Callable[[int], object]:
    return lambda stream: make()


def _maker(device: CudaContext, shape: tuple[int, ...], dtype: DType) -> Callable[[int], DeviceArray]:
    """What makes device arrays of one form."""
    form: ArrayForm | None = None

    def make(stream: int) -> DeviceArray:
        nonlocal form
        made = device.empty(shape, dtype, stream)
        if form is None:
            form = array_form(made)
        made.form = form
        return made

    return make
