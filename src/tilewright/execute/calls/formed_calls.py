"""The short way for calls like those made before, on devices with memory of their own whose launches are Python. In: the arguments of a call; out: its results.

A call that the general path made with all arrays on one device leaves its plan under the **form** of its arguments: shapes, strides, dtypes and types of numbers.
A later call of that form takes the plan and runs. All others go on to the general path, which makes every case right or says what is wrong.
"""

from __future__ import annotations

from tilewright.base.artifact import Artifact, ScalarParam
from tilewright.base.record import record
from tilewright.execute.calls.array_calls import ArrayCalls, CallPlan, MadeCall
from tilewright.execute.calls.kernel_calls import Entry, KernelSource
from tilewright.execute.calls.outputs import keep
from tilewright.execute.device import Device
from tilewright.runtime.core import streams
from tilewright.runtime.memory.device_array import ArrayDevice, DeviceArray

_NUMBERS = (int, float, bool)


@record
class FormedCall:
    """A call that was made, without its arrays."""

    plan: CallPlan
    device: ArrayDevice
    names: tuple[str, ...]
    floats: tuple[tuple[int, str, bool], ...]
    """Numbers: where they are among the arguments, their names, whether the kernel takes them as floats."""
    arrays: tuple[tuple[int, str], ...]


class FormedCalls(ArrayCalls):
    """A kernel on such devices."""

    def __init__(self, kernel: KernelSource) -> None:
        super().__init__(kernel)
        self._known: dict[tuple[object, ...], FormedCall] = {}
        self._ran: Artifact | None = None
        self._entry: tuple[Entry, Entry] | None = None

    @property
    def latest(self) -> Artifact | None:
        return self._ran

    def forget_latest(self) -> None:
        self._ran = None

    def learn(self, call: MadeCall) -> None:
        artifact, values = call.plan.program.artifact, tuple(call.values.values())
        form = _form(values)
        if form is None or call.place.library is not None or artifact.in_place or artifact.shaping or not artifact.outputs or isinstance(call.out, tuple | list):
            return
        scalars = {p.name: p.dtype.is_float for p in artifact.inputs if isinstance(p, ScalarParam)}
        names = tuple(call.values)
        given = {k for k, value in enumerate(values) if type(value) is not DeviceArray}
        if {names[k] for k in given} != {*scalars}:
            return
        keep(
            self._known, form,
            FormedCall(
                call.plan, call.place.device, names, tuple((k, names[k], scalars[names[k]]) for k in sorted(given)),
                tuple((k, name) for k, name in enumerate(names) if k not in given),
            ),
        )  # fmt: skip

    def entry(self, device: Device, fallback: Entry) -> Entry | None:
        if not self._known:
            return None
        if self._entry is None or self._entry[0] is not fallback:
            self._entry = fallback, self._quick(fallback)
        return self._entry[1]

    def _quick(self, fallback: Entry) -> Entry:
        known, off = self._known, streams.FAST_PATH_OFF

        def call(*args: object, **keywords: object) -> object:
            out = keywords.get("out")
            if off.value or len(keywords) != (out is not None):
                return fallback(*args, **keywords)
            form = _form(args)
            found = known.get(form) if form is not None else None
            if found is None or streams.current(found.device.ordinal) is not None:
                return fallback(*args, **keywords)
            plan, device = found.plan, found.device
            arrays = {name: args[k] for k, name in found.arrays}
            artifact = plan.program.artifact
            if out is None:
                made = [device.empty(shape, param.dtype) for param, shape in zip(artifact.outputs, plan.shapes, strict=True)]
                for param, array in zip(artifact.outputs, made, strict=True):
                    arrays[param.name] = array
                result: object = made[0] if len(made) == 1 else tuple(made)
            elif self._fits(out, plan, device, arrays):
                arrays[artifact.outputs[0].name] = result = out
            else:
                return fallback(*args, **keywords)
            numbers = {name: float(args[k]) if is_float else args[k] for k, name, is_float in found.floats}  # type: ignore[arg-type]
            plan.program.run(arrays, numbers, plan.sizes)  # type: ignore[arg-type]
            self._ran = artifact
            return result

        return call

    def _fits(self, out: object, plan: CallPlan, device: ArrayDevice, arrays: dict[str, object]) -> bool:
        """Whether the one result of a call can be written to that array, which shares no memory with the others."""
        outputs = plan.program.artifact.outputs
        if type(out) is not DeviceArray or len(outputs) != 1 or out.device is not device or out.shape != plan.shapes[0] or out.dtype is not outputs[0].dtype:
            return False
        if out.readonly or not out.is_contiguous or out._pointer % max(1, outputs[0].align):
            return False
        for other in arrays.values():
            assert isinstance(other, DeviceArray)
            if other.owner is out.owner or (out.owner.has_addresses and out.overlaps(other)):
                return False
        return True


def _form(values: tuple[object, ...]) -> tuple[object, ...] | None:
    """What decides which code runs for such arguments; None where some are neither arrays of devices nor numbers."""
    form: list[object] = []
    for value in values:
        if type(value) is DeviceArray:
            form.append((value.device.ordinal, value.shape, value.strides, value.dtype.name, value._pointer % 16 == 0))
        elif type(value) in _NUMBERS:
            form.append(type(value))
        else:
            return None
    return tuple(form) if form else None
