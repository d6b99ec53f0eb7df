"""Running a compiled kernel on one device: the general path, with every case handled.

In: the kernel's tree, the arguments of one call and a device. Out: NumPy arrays or device arrays, as the inputs were. The fast
path for CPU calls is the artifact's entry stub (`CpuProgram.call`); what it refuses comes here and either works (strided,
overlapping, converted) or raises the exact error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tilewright.api.arguments import Argument, Number, element_strides, numbers, read_argument, signature
from tilewright.api.checks import bind_sizes, check_output
from tilewright.api.devices import Device
from tilewright.base.artifact import ArrayParam, Artifact, ScalarParam
from tilewright.base.errors import DeviceError, UserError
from tilewright.base.source import NOWHERE, Span
from tilewright.base.target import host_cpu
from tilewright.compile.driver import Signature, compile_kernel, compile_stages
from tilewright.runtime import cpu
from tilewright.runtime.device_array import DeviceArray
from tilewright.tree.syntax import Function

if TYPE_CHECKING:
    from tilewright.runtime.cuda import CudaDevice
    from tilewright.runtime.cuda_program import CudaProgram

K = TypeVar("K")
V = TypeVar("V")
MOST_SPECIALISATIONS = 128
"""Loaded programs one kernel keeps per kind of device."""


class Runner:
    """A kernel on its way through the devices: keeps what was compiled and loaded for it."""

    def __init__(self, function: Function, precision: str = "ieee", schedule: str = "") -> None:
        self.function = function
        self.precision, self.schedule = precision, schedule
        self._cpu: dict[Signature, cpu.CpuProgram] = {}
        self._cuda: dict[tuple[str, str], CudaProgram] = {}
        self._plans: dict[tuple[object, ...], _CudaPlan] = {}
        self._ready: dict[tuple[object, ...], _Ready] = {}
        self._latest: cpu.CpuProgram | None = None
        self.last: Artifact | None = None
        """The artifact of the latest call, for `inspect`-like questions."""

    def arguments(self, values: Mapping[str, object], gpu: bool) -> list[Argument]:
        return [read_argument(name, value, self.function.span, gpu) for name, value in values.items()]

    def signature(self, arguments: list[Argument], gpu: bool) -> Signature:
        """What to compile for a call with these arguments."""
        found = signature(arguments, gpu)
        if self.precision == "ieee" and not self.schedule:
            return found
        return replace(found, precision=self.precision, schedule=self.schedule)

    def run(self, values: Mapping[str, object], device: Device, out: object = None) -> object:
        if device.kind == "cpu":
            return self.run_cpu(values, out)
        if device.kind == "cuda":
            return self.run_cuda(values, device, out)
        return self.run_emulator(values, device, out)

    # -- CPU ----------------------------------------------------------------------------------------------------

    def cpu_program(self, arguments: list[Argument]) -> cpu.CpuProgram:
        wanted = self.signature(arguments, gpu=False)
        program = self._cpu.get(wanted)
        if program is None:
            program = cpu.load(compile_kernel(self.function, wanted, host_cpu()))
            _keep(self._cpu, wanted, program)
        self.last = program.artifact
        self._latest = program
        return program

    def cpu_entry(self, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """The entry stub of the latest CPU program, which hands what it refuses to `fallback`."""
        return self._latest.entry(fallback) if self._latest is not None else None

    def run_cpu(self, values: Mapping[str, object], out: object = None) -> object:
        values = {name: v.on_host() if isinstance(v, DeviceArray) else v for name, v in values.items()}
        if isinstance(out, DeviceArray):
            self.run_cpu(values, out.host())
            return out
        arguments = self.arguments(values, gpu=False)
        program = self.cpu_program(arguments)
        keywords = {} if out is None else {"out": out}
        result = program.call(*(a.value for a in arguments), **keywords)
        if result is not NotImplemented:
            return result
        return self._general_cpu(program, arguments, out)

    def _general_cpu(self, program: cpu.CpuProgram, arguments: list[Argument], out: object) -> object:
        artifact = program.artifact
        arrays = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray)}
        sizes = bind_sizes(artifact, {n: a.shape for n, a in arrays.items()}, _strides(arrays), self.function.span)
        outputs, copies = self._outputs(artifact, sizes, out, arrays)
        program.run({**arrays, **outputs}, _converted(artifact, numbers(arguments)))
        for given, temporary in copies:
            given[...] = temporary
        return _result(artifact, outputs, out)

    def _outputs(
        self, artifact: Artifact, sizes: Mapping[str, int], out: object, arrays: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
        """Arrays to write to, and (given, temporary) pairs to copy back where the given one cannot be written directly."""
        given = _given_outputs(artifact, out, self.function.span)
        outputs: dict[str, np.ndarray] = {}
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        for param in artifact.outputs:
            shape = tuple(s.evaluate(sizes) for s in param.shape)
            if param.name not in given:
                outputs[param.name] = _allocate(shape, param)
                continue
            target = check_output(param, given[param.name], shape, self.function.span)
            others = [*arrays.values(), *(t for n, t in given.items() if n != param.name and isinstance(t, np.ndarray))]
            if target.flags.c_contiguous and not any(np.may_share_memory(target, o) for o in others):
                outputs[param.name] = target
            else:
                outputs[param.name] = _allocate(shape, param)
                copies.append((target, outputs[param.name]))
        return outputs, copies

    # -- CUDA ---------------------------------------------------------------------------------------------------

    def run_cuda(self, values: Mapping[str, object], device: Device, out: object = None) -> object:
        gpu = _gpu(device)
        on_host = not any(_is_on_device(v) for v in (*values.values(), out))
        moved: dict[str, object] = {}
        for name, value in values.items():
            wrap = not isinstance(value, DeviceArray) and _is_on_device(value)
            moved[name] = gpu.wrap(value) if wrap else value
        plan = self._plan(moved, device, gpu)
        artifact = self.last = plan.program.artifact
        arrays: dict[str, DeviceArray | int] = {}
        scalars: dict[str, Number] = {}
        for a in plan.arguments or self.arguments(moved, gpu=True):
            if isinstance(a.value, np.ndarray):
                arrays[a.name] = gpu.from_numpy(np.ascontiguousarray(a.value))
            elif isinstance(a.value, DeviceArray):
                arrays[a.name] = a.value
            else:
                scalars[a.name] = a.value
        given = _given_outputs(artifact, out, self.function.span)
        outputs: dict[str, DeviceArray] = {}
        copies: list[tuple[DeviceArray, DeviceArray]] = []
        for param, shape in zip(artifact.outputs, plan.shapes, strict=True):
            target = given.get(param.name)
            if target is None or isinstance(target, np.ndarray):
                if target is not None:
                    check_output(param, target, shape, self.function.span)
                outputs[param.name] = gpu.empty(shape, param.dtype)
                continue
            wrapped = gpu.wrap(target)
            if wrapped.shape != shape or wrapped.dtype is not param.dtype or not wrapped.is_contiguous or wrapped.readonly:
                raise UserError.at(
                    "TW018", f"out= for '{param.name}' is {wrapped!r}, but the result is a writable, contiguous "
                    f"{param.dtype}[{', '.join(map(str, shape))}]", self.function.span,
                )  # fmt: skip
            overlaps = not artifact.alias_safe and any(_overlap(wrapped, x) for x in arrays.values() if isinstance(x, DeviceArray))
            if overlaps or wrapped.pointer % max(1, param.align):
                outputs[param.name] = gpu.empty(shape, param.dtype)
                copies.append((wrapped, outputs[param.name]))
            else:
                outputs[param.name] = wrapped
        plan.program.run({**arrays, **outputs}, _converted(artifact, scalars), plan.sizes)
        if not on_host and not copies and len(outputs) == 1:
            self._remember(moved, given.get(artifact.outputs[0].name), plan, gpu)
        for wrapped, temporary in copies:
            gpu.copy(wrapped, temporary)
        if not on_host:
            return _result(artifact, outputs, out)
        host: dict[str, np.ndarray] = {}
        for name, array in outputs.items():
            host[name] = array.numpy()
            given_array = given.get(name)
            if isinstance(given_array, np.ndarray):
                given_array[...] = host[name]
        return _result(artifact, host, out)

    def quick_cuda(self, args: tuple[object, ...], out: object) -> object:
        """The short way for device arrays of forms seen before; `NotImplemented` when this call is not one."""
        forms: list[object] = []
        arrays: list[object] = []
        for value in args if out is None else (*args, out):
            if type(value) is not DeviceArray:
                if type(value) in (float, int, bool):
                    forms.append(type(value))
                    arrays.append(value)
                    continue
                if type(value).__module__ != "torch" or not _is_on_device(value):
                    return NotImplemented
                value = _torch_device(value).wrap(value)
            forms.append((value.device.ordinal, value.shape, value.strides, value.dtype, value.pointer % 16 == 0))
            arrays.append(value)
        known = self._ready.get((out is None, *forms))
        if known is None:
            return NotImplemented
        self.last = known.artifact
        values: dict[str, DeviceArray | int] = {}
        scalars: dict[str, Number] = {}
        for name, value in zip(known.names, arrays):
            if type(value) is DeviceArray:
                values[name] = value
            else:
                scalars[name] = float(value) if name in known.floats else value  # type: ignore[arg-type, assignment]
        if out is None:
            target = known.gpu.empty(known.shape, known.artifact.outputs[0].dtype)
        else:
            target = arrays[-1]  # type: ignore[assignment]
            if target.readonly or (not known.artifact.alias_safe and any(_overlap(target, x) for x in values.values())):  # type: ignore[arg-type]
                return NotImplemented
        values[known.artifact.outputs[0].name] = target
        known.program.run(values, scalars, known.sizes)
        return target if out is None else out

    def _remember(self, values: Mapping[str, object], out: object, plan: _CudaPlan, gpu: CudaDevice) -> None:
        """Let the next call like this one take the short way."""
        forms: list[object] = []
        for value in values.values() if out is None else (*values.values(), gpu.wrap(out)):
            if isinstance(value, DeviceArray):
                forms.append((value.device.ordinal, value.shape, value.strides, value.dtype, value.pointer % 16 == 0))
            elif type(value) in (float, int, bool):
                forms.append(type(value))
            else:
                return
        artifact = plan.program.artifact
        floats = frozenset(p.name for p in artifact.inputs if isinstance(p, ScalarParam) and p.dtype.is_float)
        ready = _Ready(plan.program, artifact, plan.sizes, tuple(values), floats, plan.shapes[0], gpu)
        _keep(self._ready, (out is None, *forms), ready)

    def _plan(self, values: Mapping[str, object], device: Device, gpu: CudaDevice) -> _CudaPlan:
        """What to run for arguments of these forms. Calls like an earlier one find it without being looked at in detail."""
        forms = (device.id, *(_form(v) for v in values.values()))
        plan = self._plans.get(forms)
        if plan is not None:
            return plan
        arguments = self.arguments(values, gpu=True)
        wanted = self.signature(arguments, gpu=True)
        artifact = compile_kernel(self.function, wanted, gpu.target)
        program = self._cuda.get((device.id, artifact.key))
        if program is None:
            program = gpu.load(artifact)
            _keep(self._cuda, (device.id, artifact.key), program)
        inputs = {a.name: a.value for a in arguments if isinstance(a.value, np.ndarray | DeviceArray)}
        shapes = {name: array.shape for name, array in inputs.items()}
        strides = {name: element_strides(array) for name, array in inputs.items()}
        sizes = bind_sizes(program.artifact, shapes, strides, self.function.span)
        results = tuple(tuple(s.evaluate(sizes) for s in p.shape) for p in program.artifact.outputs)
        _keep(self._plans, forms, _CudaPlan(program, sizes, results))
        return _CudaPlan(program, sizes, results, tuple(arguments))

    # -- emulator -----------------------------------------------------------------------------------------------

    def run_emulator(self, values: Mapping[str, object], device: Device, out: object = None) -> object:
        from tilewright.compile.build import describe_program
        from tilewright.ir.emulator import run_program

        values = {name: v.numpy() if isinstance(v, DeviceArray) else v for name, v in values.items()}
        arguments = self.arguments(values, gpu=True)
        wanted = self.signature(arguments, gpu=True)
        done = compile_stages(self.function, wanted, device.target)
        program = {"loop": done.stages.loop, "tile": done.stages.tile, "thread": done.stages.thread}[device.stage]
        inputs: dict[str, np.ndarray | Number] = {}
        for a in arguments:
            assert not isinstance(a.value, DeviceArray)
            inputs[a.name] = np.ascontiguousarray(a.value) if isinstance(a.value, np.ndarray) else a.value
        # The call-time checks of real devices: same errors, same texts.
        artifact = self.last = describe_program(program, device.target)
        arrays = {n: v for n, v in inputs.items() if isinstance(v, np.ndarray)}
        sizes = bind_sizes(artifact, {n: a.shape for n, a in arrays.items()}, _strides(arrays), self.function.span)
        given = _given_outputs(artifact, out, self.function.span)
        for param in artifact.outputs:
            if param.name in given:
                shape = tuple(s.evaluate(sizes) for s in param.shape)
                check_output(param, given[param.name], shape, self.function.span)
        outputs = run_program(program, {**inputs, **_converted(artifact, numbers(arguments))})
        for name, target in given.items():
            assert isinstance(target, np.ndarray)
            target[...] = outputs[name]
        return _result(artifact, outputs, out)


@dataclass(frozen=True)
class _CudaPlan:
    """A loaded program, the sizes of one kind of call and the shapes of its results."""

    program: CudaProgram
    sizes: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]
    arguments: tuple[Argument, ...] = ()
    """The call's arguments, where they were just read."""


@dataclass(frozen=True)
class _Ready:
    """All there is to know about calls of one form: what to run, under which names, with which sizes."""

    program: CudaProgram
    artifact: Artifact
    sizes: dict[str, int]
    names: tuple[str, ...]
    floats: frozenset[str]
    shape: tuple[int, ...]
    gpu: CudaDevice


def _torch_device(tensor: object) -> CudaDevice:
    from tilewright.runtime import cuda

    found: CudaDevice = cuda.devices()[tensor.get_device()]  # type: ignore[attr-defined]
    return found


def _form(value: object) -> object:
    """All of an argument that decides which code runs and with which sizes."""
    if isinstance(value, DeviceArray):
        return value.shape, value.strides, value.dtype, value.pointer % 16 == 0
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.flags.aligned, value.strides
    return type(value)


def _keep(programs: dict[K, V], key: K, program: V) -> None:
    """Remember a loaded program; the oldest goes when a kernel has been asked for too many kinds of arguments."""
    while len(programs) >= MOST_SPECIALISATIONS:
        programs.pop(next(iter(programs)))
    programs[key] = program


def _strides(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: element_strides(array) for name, array in arrays.items()}


def _allocate(shape: tuple[int, ...], param: ArrayParam) -> np.ndarray:
    try:
        return np.empty(shape, param.dtype.numpy)
    except (MemoryError, ValueError) as error:
        raise DeviceError.at("TW031", f"no memory for the result '{param.name}' of shape {list(shape)}: {error}") from error


def _converted(artifact: Artifact, given: Mapping[str, Number]) -> dict[str, Number]:
    """Numbers as their parameters want them; a float never silently becomes an integer."""
    values: dict[str, Number] = {}
    for param in artifact.inputs:
        if isinstance(param, ScalarParam):
            value = given[param.name]
            values[param.name] = float(value) if param.dtype.is_float else value
    return values


def _given_outputs(artifact: Artifact, out: object, span: Span = NOWHERE) -> dict[str, object]:
    if out is None:
        return {}
    several = list(out) if isinstance(out, tuple | list) else [out]
    if len(several) != len(artifact.outputs):
        raise UserError.at(
            "TW018", f"out= has {len(several)} array(s), but the kernel returns {len(artifact.outputs)}", span
        )
    return {p.name: o for p, o in zip(artifact.outputs, several, strict=True) if o is not None}


def _result(artifact: Artifact, outputs: Mapping[str, np.ndarray] | Mapping[str, DeviceArray], out: object) -> object:
    if out is not None:
        return out
    values = [outputs[p.name] for p in artifact.outputs]
    plain = [v[()] if isinstance(v, np.ndarray) and v.ndim == 0 else v for v in values]
    return plain[0] if len(plain) == 1 else tuple(plain)


def _is_on_device(value: object) -> bool:
    return isinstance(value, DeviceArray) or (not isinstance(value, np.ndarray) and hasattr(value, "__cuda_array_interface__"))


def device_of(values: list[object]) -> str | None:
    """The device the first device array of a call is on."""
    for value in values:
        if isinstance(value, DeviceArray):
            return f"cuda:{value.device.ordinal}"
        if _is_on_device(value):
            index = getattr(getattr(value, "device", None), "index", None)
            return f"cuda:{index if isinstance(index, int) else 0}"
    return None


def _gpu(device: Device) -> CudaDevice:
    from tilewright.runtime import cuda

    return cuda.devices()[int(device.id.split(':')[1])]


def _overlap(a: DeviceArray, b: DeviceArray) -> bool:
    return a.pointer < b.pointer + max(1, b.nbytes) and b.pointer < a.pointer + max(1, a.nbytes)

