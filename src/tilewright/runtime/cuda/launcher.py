"""Launching CUDA kernels from machine code. In: the objects `codegen.host.launcher` makes; out: builtin functions that launch.

A `Launcher` is one stub of one kernel: a state, the forms added to it, and functions that run it. `Recent` is shared by all
launchers of a kernel and knows what they ran last. What stubs read of Python objects is found in this process, once, by
`layout`.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.base import launch_abi as abi
from tilewright.base.launch_abi import Layout
from tilewright.runtime.core import streams
from tilewright.runtime.core.builtin import (
    METH_FASTCALL_KEYWORDS,
    METH_NOARGS,
    MethodDefinition,
    bind_python,
    builtin_function,
)
from tilewright.runtime.core.entry import provide_front
from tilewright.runtime.core.launch_log import LaunchLog
from tilewright.runtime.core.objects import ObjectCode, bind_symbol
from tilewright.runtime.cuda.launch_records import LaunchRecord
from tilewright.runtime.exchange.torch_tensors import QUESTIONS, TensorAccess, tensor_access
from tilewright.runtime.memory.device_array import DeviceArray, array_form
from tilewright.runtime.memory.device_memory import MemoryBlock

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

_NAME_IS_NEG = sys.intern("is_neg")
_ZERO = 0
_RECENT_KEPT = 1024
"""Forms after which those that are gone are forgotten."""


class _Engine:
    """What all stubs share, loaded once."""

    def __init__(self, code: bytes) -> None:
        self.objects = ObjectCode(code)
        for name in (abi.FIND, abi.INSERT, abi.RUN, abi.SCALAR, abi.APART, abi.NAMED, abi.NOTE):
            bind_symbol(name, self.objects.address(name))
        self.insert = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(self.objects.address(abi.INSERT))


_engine: _Engine | None = None


def load_engine(code: Callable[[], bytes]) -> None:
    """Load what `codegen.host.launcher.engine_object` makes, unless it is."""
    global _engine
    if _engine is None:
        _bind()
        _engine = _Engine(code())


def _bind() -> None:
    bind_python()
    objects: dict[str, object] = {
        "tilewright_zero": _ZERO, "tilewright_current_stream": streams.current, "tilewright_note_use": MemoryBlock.use_on,
        "tilewright_device_array": DeviceArray, "tilewright_block": MemoryBlock, "tilewright_array_form": array_form,
        "tilewright_name_is_neg": _NAME_IS_NEG,
    }  # fmt: skip
    for name, value in objects.items():
        _kept.append(value)
        bind_symbol(name, id(value))
    bind_symbol("tilewright_streams_open", ctypes.addressof(streams.STREAM_NAMED))
    bind_symbol("tilewright_streams_special", ctypes.addressof(streams.FAST_PATH_OFF))
    # PyTorch may be known already: what it gave must stay.
    _bind_tensors(tensor_access())


_kept: list[object] = []


def _bind_tensors(access: TensorAccess | None) -> None:
    """Without PyTorch the names must mean something all the same; no stub that uses them is made then."""
    bind_symbol("tilewright_tensor", id(access.type if access else object))
    nothing = ctypes.cast(ctypes.pythonapi.PyErr_Occurred, ctypes.c_void_p).value or 0
    functions = access.functions if access else {}
    for name in (*(f"aoti_torch_get_{question}" for question in QUESTIONS), "tilewright_requires_grad"):
        bind_symbol(name, functions.get(name, nothing))


def layout(tensors: bool) -> Layout | None:
    """Where stubs find what they read; None where `tensors` are among it and PyTorch is not as expected."""
    own = _own_layout()
    if not tensors:
        return own
    access = tensor_access()
    if access is None or not access.stream:
        return None
    _bind_tensors(access)
    return replace(own, tensor=access.offset, tensor_gradient=access.gradient)


@functools.cache
def _own_layout() -> Layout:
    array, block = DeviceArray.__new__(DeviceArray), MemoryBlock.__new__(MemoryBlock)
    found = [_slot(array, name) for name in ("form", "_pointer", "owner", "readonly")]
    found += [_slot(block, name) for name in ("freed", "stream", "recent")]
    return Layout(*found)


def _slot(item: object, name: str) -> int:
    """The offset of a slot: where a mark set by name shows."""
    mark = object()
    setattr(item, name, mark)
    size = type(item).__basicsize__
    words = (ctypes.c_uint64 * (size // 8)).from_address(id(item))
    (index,) = [index for index, word in enumerate(words) if word == id(mark)]
    delattr(item, name)
    return 8 * index


class _Wait:
    """Waits for a device from machine code."""

    def __init__(self, device: CudaContext) -> None:
        assert _engine is not None
        record = (ctypes.c_uint64 * (abi.WAIT_BYTES // 8))()
        fields = {
            abi.WAIT_CURRENT: device.driver.address("cuCtxGetCurrent"), abi.WAIT_CONTEXT: device.context_address,
            abi.WAIT_SYNCHRONIZE: device.driver.address("cuCtxSynchronize"), abi.WAIT_LOG: ctypes.addressof(device.log.words),
        }  # fmt: skip
        for field, value in fields.items():
            record[field // 8] = value
        definition = MethodDefinition(b"wait", _engine.objects.address(abi.WAIT), METH_NOARGS, None)
        # The device keeps what the function reads: a builtin holds no more than its `self`.
        device.wait_memory = record, definition
        self.function: Callable[[], object] = builtin_function(definition, ctypes.addressof(record))


class Recent:
    """Which form the launchers of a kernel ran last."""

    def __init__(self) -> None:
        self.word = ctypes.c_uint64()
        self._forms: dict[int, weakref.ref[LaunchRecord]] = {}

    def add(self, form: LaunchRecord) -> None:
        if len(self._forms) >= _RECENT_KEPT:
            self._forms = {address: known for address, known in self._forms.items() if known() is not None}
        self._forms[form.address] = weakref.ref(form)

    def form(self) -> LaunchRecord | None:
        found = self._forms.get(self.word.value)
        return found() if found is not None else None

    def forget(self) -> None:
        """Something else ran."""
        self.word.value = 0


class Launcher:
    """One stub of one kernel, with the forms it knows."""

    def __init__(self, device: CudaContext, name: str, stub: bytes, words: int, recent: Recent) -> None:
        assert _engine is not None
        self.device = device
        self.forms: list[LaunchRecord] = []
        self.recent = recent
        self._objects = ObjectCode(stub)
        provide_front(self._objects)
        self.state = (ctypes.c_uint64 * (abi.STATE_BYTES // 8))()
        access = tensor_access()
        fields = {
            abi.STATE_RECENT: ctypes.addressof(recent.word), abi.STATE_WORDS: words,
            abi.STATE_EPOCH: ctypes.addressof(device.log.words),
            abi.STATE_TORCH_STREAM: access.stream if access else 0,
            **{field: device.driver.address(api) for field, api in (
                (abi.STATE_LAUNCH, "cuLaunchKernel"), (abi.STATE_LAUNCH_EX, "cuLaunchKernelEx"),
                (abi.STATE_CONTEXT, "cuCtxGetCurrent"),
            )},
        }  # fmt: skip
        for field, value in fields.items():
            self.state[field // 8] = value
        encoded = name.encode()
        self._call = MethodDefinition(encoded, self._objects.address(abi.CALL), METH_FASTCALL_KEYWORDS, None)
        self._probe = MethodDefinition(encoded, self._objects.address(abi.PROBE), METH_FASTCALL_KEYWORDS, None)
        device.log.launchers.add(self)
        if device.quick_wait is None:
            device.quick_wait = _Wait(device).function
        # What was launched stays known when the kernel is dropped before the device is waited for.
        weakref.finalize(self, _hand_over, device.log, self.forms).atexit = False

    @property
    def probe(self) -> Callable[..., bytes | None]:
        """A function that shows what a call with its arguments reads; None where the call is refused."""
        return builtin_function(self._probe, self)

    def add(self, form: LaunchRecord) -> None:
        """Calls with the keys of this form are for it from now on."""
        assert _engine is not None
        self.forms.append(form)
        self.recent.add(form)
        _engine.insert(ctypes.addressof(self.state), form.address)

    def function(self, fallback: Callable[..., object]) -> Callable[..., object]:
        """A builtin function that launches, or hands the call to `fallback`. It keeps this launcher."""
        return builtin_function(self._call, (self, fallback, ctypes.addressof(self.state)))

    def launches(self) -> list[tuple[int, str, int]]:
        """Stream, name and epoch of the kernels launched last."""
        return [launch for form in self.forms for launch in form.launches()]


def _hand_over(log: LaunchLog, forms: list[LaunchRecord]) -> None:
    """The launcher is gone, and with it whoever could use its forms."""
    for form in forms:
        for stream, entry, epoch in form.launches():
            log.note(stream, entry, epoch)
        form.release()
