"""A loaded PTX artifact and the path that launches it. In: arrays, scalars and sizes by name; out: launches on a stream.

All kernels of a program read their parameters from one block of 8-byte slots, one per distinct name; each launch has a table of
pointers into it, made once. A run packs the block with a single `struct` call and then calls the driver once per launch. What
depends on sizes alone (grids, the plan of the scratch memory) is kept per combination of sizes. Tensor maps depend on addresses
too: for each combination of sizes and addresses seen lately there are tables of their own, which point to encoded maps.
"""

from __future__ import annotations

import ctypes
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, SupportsInt

import numpy as np

from tilewright.base.artifact import FAILURE, ArrayParam, Artifact, Launch, ScalarParam
from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug, TargetLimit, TilewrightError, UserError
from tilewright.runtime.core import observe
from tilewright.runtime.core.device import KernelResources, LoadedProgram, Number, Workspace
from tilewright.runtime.core.run_sizes import MOST_BYTES, no_scratch, scratch_bytes
from tilewright.runtime.core.streams import recorders
from tilewright.runtime.cuda.driver import UNSUPPORTED_PTX
from tilewright.runtime.cuda.grids import attribute, fitting_grid, resident_blocks
from tilewright.runtime.cuda.tensor_maps import MAP_ALIGN, MAP_BYTES, check_map, encode_map
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.memory.device_memory import stream_handle

if TYPE_CHECKING:
    from tilewright.runtime.cuda.context import CudaContext

_LOG_BYTES = 16 << 10
_FREE_SHARED = 48 << 10
"""Dynamic shared memory a kernel may have without asking for more."""
_SCRATCH_ALIGN = 256
_PLANS_KEPT = 256
_BOUND_KEPT = 512
"""Combinations of sizes and addresses whose maps stay encoded, a few hundred bytes each."""
_PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every device with clusters takes without being asked."""

_FORMATS = {
    "bool": "?7x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q", "u8": "B7x", "u16": "H6x", "u32": "I4x", "u64": "Q",
    "f16": "e6x", "f32": "f4x", "f64": "d", "bf16": "H6x", "f8e4m3": "B7x", "f8e5m2": "B7x",
}  # fmt: skip
_AS_BITS = ("bf16", "f8e4m3", "f8e5m2")
"""Scalars `struct` has no format for; packed as the integer with the same bits."""


@dataclass(frozen=True)
class _Kernel:
    """One launch, ready but for its grid."""

    launch: Launch
    function: SupportsInt
    parameters: int
    """Address of the table of pointers to its slots and maps."""
    pointers: tuple[int, ...]
    """The part of that table that is the same for all calls: all but the maps."""
    map_slots: tuple[int, ...]
    """For each map, the slot that holds its array's address."""
    memory: tuple[ctypes.Array[Any], ...]
    """What the table and the maps lie in."""


class _Extended:
    """A launch the driver takes as an object, with attributes. The object is slow to make, so it stays, and only its stream changes."""

    __slots__ = ("config", "stream")

    def __init__(self, config: Any) -> None:
        self.config = config
        self.stream = 0


Step = tuple[_Kernel, int, int, int, _Extended | None]


@dataclass(frozen=True)
class Plan:
    """What a combination of sizes decides."""

    key: tuple[int, ...]
    steps: tuple[Step, ...]
    """The launches that have blocks, with their grids."""
    scratch: tuple[int, ...]
    """Offset of each scratch array in the workspace."""
    scratch_bytes: int
    sizes: tuple[int, ...]


class CudaProgram(LoadedProgram):
    """An artifact on a device. The context must be active while it is made."""

    def __init__(self, device: CudaContext, artifact: Artifact) -> None:
        if artifact.kind != "ptx":
            raise CompilerBug.at("TW040", f"'{artifact.name}' is code of kind '{artifact.kind}', which {device.label} cannot run")
        self.device = device
        self.artifact = artifact
        self._driver_launch = device.driver.module.cuLaunchKernel
        self._driver_launch_extended = device.driver.module.cuLaunchKernelEx
        self._lock = threading.Lock()
        self._module = self._load_module()
        self._finalizer = weakref.finalize(self, device.retire, self._module)
        self._finalizer.atexit = False
        self._functions = {launch.entry: self._find(launch) for launch in artifact.launches}
        self._resident = {rule.entry: resident_blocks(device, self._functions[rule.entry], rule) for rule in artifact.launches}
        device.watch_module(self._module, artifact)
        self._failure = ctypes.c_uint64(device.index_record(artifact) if artifact.sites else 0)
        if artifact.sites:
            weakref.finalize(self, device.drop_index_record, self._failure.value).atexit = False

        self._arrays = tuple(p.name for p in (*artifact.inputs, *artifact.outputs) if isinstance(p, ArrayParam))
        self._scalars = {p.name: p.dtype for p in artifact.inputs if isinstance(p, ScalarParam)}
        self._scratch = tuple(array for array in artifact.scratch if array.name != FAILURE)
        slot_sizes = tuple(dict.fromkeys(name for launch in artifact.launches for name in launch.sizes))
        needed = {name for launch in artifact.launches for grid in launch.grid for name in grid.names}
        needed.update(name for array in self._scratch for extent in array.shape for name in extent.names)
        maps = [map_ for launch in artifact.launches for map_ in launch.maps]
        needed.update(name for m in maps for size in (*m.shape, *m.strides, *m.lower, *m.upper) for name in size.names)
        self._sizes = (*slot_sizes, *sorted(needed.difference(slot_sizes)))
        self._slot_sizes = len(slot_sizes)
        self._bit_scalars = any(dtype.name in _AS_BITS for dtype in self._scalars.values())
        self._make_block(slot_sizes)
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._bound: dict[tuple[Number, ...], tuple[Step, ...]] = {}

    # -- loading ------------------------------------------------------------------------------------------------

    def _load_module(self) -> SupportsInt:
        device = self.device
        log = bytearray(_LOG_BYTES)
        options = [
            device.driver.constant("CUjit_option", "CU_JIT_ERROR_LOG_BUFFER"),
            device.driver.constant("CUjit_option", "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES"),
        ]
        code = self.artifact.code.rstrip(b"\0") + b"\0"
        status, results = device.driver.attempt("cuModuleLoadDataEx", code, len(options), options, [log, len(log)])
        if not status:
            return results[0]
        if status == UNSUPPORTED_PTX:
            raise device.driver.too_old(_ptx_version(code), device.label)
        text = bytes(log).split(b"\0")[0].decode(errors="replace").strip()
        if not text:
            raise device.error("cuModuleLoadDataEx", status, f"program '{self.artifact.name}'")
        with tempfile.NamedTemporaryFile("wb", prefix="tilewright-", suffix=".ptx", delete=False) as file:
            file.write(self.artifact.code)
        name, _ = device.driver.describe(status)
        raise CompilerBug.at(
            "TW040",
            f"the PTX of '{self.artifact.name}' ({self.artifact.target}) was refused by {device.label} with {name} "
            f"({status}):\n{text}\nthe PTX is in {file.name}",
        )

    def _find(self, launch: Launch) -> SupportsInt:
        device = self.device
        (function,) = device.call("cuModuleGetFunction", self._module, launch.entry.encode())
        if launch.shared_bytes:
            self._allow_shared(function, launch)
        if launch.cluster > _PORTABLE_CLUSTER:
            attribute = device.driver.constant(
                "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED"
            )
            device.call("cuFuncSetAttribute", function, attribute, 1)
        most = self._function_attribute(function, "MAX_THREADS_PER_BLOCK")
        if launch.threads > most:
            raise TargetLimit.at(
                "TW020",
                f"kernel '{launch.entry}' wants {launch.threads} threads per block, but with its registers "
                f"{device.label} can run {most}",
                help="use fewer warps",
            )
        return function

    def _allow_shared(self, function: SupportsInt, launch: Launch) -> None:
        """Let the kernel have its dynamic shared memory, beside what it has by itself."""
        device = self.device
        total = launch.shared_bytes + self._function_attribute(function, "SHARED_SIZE_BYTES")
        if total > device.max_shared:
            raise TargetLimit.at(
                "TW020",
                f"kernel '{launch.entry}' needs {total} bytes of shared memory per block, "
                f"but {device.label} has {device.max_shared}",
                help="use smaller tiles or fewer pipeline stages",
            )
        if total > _FREE_SHARED:
            attribute = device.driver.constant(
                "CUfunction_attribute", "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
            )
            device.call("cuFuncSetAttribute", function, attribute, launch.shared_bytes)

    def _function_attribute(self, function: SupportsInt, name: str) -> int:
        attribute = self.device.driver.constant("CUfunction_attribute", f"CU_FUNC_ATTRIBUTE_{name}")
        return int(self.device.call("cuFuncGetAttribute", attribute, function)[0])

    def resources(self, entry: str) -> KernelResources:
        """Registers, spills and shared memory of one kernel."""
        function = self._functions[entry]
        with self.device.active():
            names = ("NUM_REGS", "LOCAL_SIZE_BYTES", "SHARED_SIZE_BYTES", "MAX_THREADS_PER_BLOCK")
            return KernelResources(*(self._function_attribute(function, name) for name in names))

    @property
    def failure(self) -> int:
        """The address of the record for an index outside its array; 0 where no index is checked."""
        return self._failure.value

    def function_address(self, entry: str) -> int:
        """The driver's handle of a kernel, for host code that launches it directly."""
        return int(self._functions[entry])

    def _make_block(self, slot_sizes: tuple[str, ...]) -> None:
        """The slots (arrays, scalars, scratch, sizes) and, per launch, the pointers to those it takes."""
        arguments = [*self._arrays, *self._scalars, *(array.name for array in self._scratch)]
        formats = ["Q"] * len(self._arrays) + [_FORMATS[dtype.name] for dtype in self._scalars.values()]
        formats += ["Q"] * len(self._scratch) + ["q"] * len(slot_sizes)
        self._packer = struct.Struct("<" + "".join(formats))
        self._slots = (ctypes.c_uint64 * max(1, len(formats)))()
        slot_of = self.slots = {name: index for index, name in enumerate(arguments)}
        size_slot = {name: len(arguments) + index for index, name in enumerate(slot_sizes)}
        base = ctypes.addressof(self._slots)
        kernels: list[_Kernel] = []
        for launch in self.artifact.launches:
            for map_ in launch.maps:
                check_map(map_, launch.entry)
            named = {*self._arrays, *(array.name for array in self._scratch)}
            missing = [name for name in launch.args if name not in slot_of and (name != FAILURE or not self.failure)]
            missing += [map_.array for map_ in launch.maps if map_.array not in named]
            if missing:
                raise CompilerBug.at("TW040", f"kernel '{launch.entry}' takes {missing}, which '{self.artifact.name}' lacks")
            own = {**slot_of, **({FAILURE: -1} if self.failure else {})}
            order = [*(own[name] for name in launch.args), *(size_slot[name] for name in launch.sizes)]
            pointers = tuple(base + 8 * index if index >= 0 else ctypes.addressof(self._failure) for index in order)
            table = _table(pointers)
            map_slots = tuple(slot_of[map_.array] for map_ in launch.maps)
            kernels.append(
                _Kernel(launch, self._functions[launch.entry], ctypes.addressof(table), pointers, map_slots, (table,))
            )
        self._kernels = tuple(kernels)
        self._map_slots = tuple(dict.fromkeys(slot for kernel in kernels for slot in kernel.map_slots))

    # -- running ------------------------------------------------------------------------------------------------

    def run(
        self,
        arrays: Mapping[str, DeviceArray | int],
        scalars: Mapping[str, Number],
        sizes: Mapping[str, int],
        stream: int = 0,
        on_error: Callable[[TilewrightError], None] | None = None,
        *,
        take: Callable[[int], Workspace] | None = None,
    ) -> None:
        """Queue every launch on `stream` and return. Arrays are device arrays or addresses, outputs included.

        `on_error` is called with the error if a kernel faults before the stream is next synchronised. `take` gives memory for
        scratch arrays, which must be good for work on the stream until it is dropped; without it, the device's pool does.
        """
        device = self.device
        if stream:
            stream = stream_handle(stream)
        try:
            values: list[Number] = []
            for name in self._arrays:
                array = arrays[name]
                values.append(array if type(array) is int else self._pointer(array, stream))
            values += [scalars[name] for name in self._scalars]
            plan = self.plan(sizes)
        except KeyError as error:
            raise UserError.at("TW008", f"'{self.artifact.name}' was not given '{error.args[0]}'") from None
        recorder = recorders.get(stream) if recorders else None
        entered = device.enter()
        try:
            if recorder is not None:
                take = recorder.workspace(stream)
            memory, workspace = (take or self.pool_memory(stream))(plan.scratch_bytes) if plan.scratch_bytes else (0, None)
            values += [memory + offset for offset in plan.scratch]
            with self._lock:
                self._pack(values, plan)
                steps = self._bind(values, plan) if self._map_slots else plan.steps
                if recorder is None:
                    self._launch(steps, stream)
                else:
                    recorder.launch(self, arrays, values, plan, steps, stream)
            # Stream order makes reuse safe while the kernels still run.
            del workspace
            if on_error is not None:
                device.watch(on_error, stream)
        finally:
            device.leave(entered)

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """What these sizes decide. Raises KeyError with the name of one that is missing."""
        key = tuple([sizes[name] for name in self._sizes])
        return self._plans.get(key) or self._make_plan(key)

    def pool_memory(self, stream: int) -> Callable[[int], Workspace]:
        """Memory for scratch arrays of work on `stream`, from the device's pool."""

        def take(nbytes: int) -> Workspace:
            block = self.device.pool.take(nbytes, stream)
            return block.pointer, block

        return take

    # -- for graphs ---------------------------------------------------------------------------------------------

    def array_names(self) -> tuple[str, ...]:
        """The arrays, in the order of their slots, which come first."""
        return self._arrays

    def scalar_slots(self) -> dict[str, int]:
        """The slot of each number."""
        return {name: index for index, name in enumerate(self._scalars, len(self._arrays))}

    def launch_steps(self, steps: Sequence[Step], stream: int) -> None:
        """Launch some steps of a plan; the caller has packed their values and holds the program."""
        self._launch(tuple(steps), stream)

    @contextmanager
    def bound(self, values: Sequence[Number], plan: Plan) -> Iterator[tuple[Step, ...]]:
        """The plan's launches with parameters that hold these values inside."""
        packed = list(values)
        with self._lock:
            self._pack(packed, plan)
            yield self._bind(packed, plan) if self._map_slots else plan.steps

    def _pointer(self, array: DeviceArray | int, stream: int) -> int:
        if isinstance(array, DeviceArray):
            if array.device is not self.device:
                raise UserError.at("TW009", f"an array on {array.device.label} was given to a program on {self.device.label}")
            if not array.pointer and array.size:
                raise UserError.at(
                    "TW009", f"an array of shape {list(array.shape)} has no memory", help="its storage was freed: pass one with values"
                )
            return array.launch_pointer(stream)
        return int(array)

    def _launch(self, steps: tuple[Step, ...], stream: int) -> None:
        launch, device = self._driver_launch, self.device
        handle = stream or None
        watcher = observe.observer
        for kernel, x, y, z, extended in steps:
            rule = kernel.launch
            token = None if watcher is None else watcher.before_launch(device, rule, (x, y, z), stream)
            if extended is None:
                status = launch(kernel.function, x, y, z, rule.threads, 1, 1, rule.shared_bytes, handle, kernel.parameters, 0)[0]
            else:
                if extended.stream != stream:
                    extended.config.hStream = stream
                    extended.stream = stream
                status = self._driver_launch_extended(extended.config, kernel.function, kernel.parameters, 0)[0]
            if status != 0:
                raise self.launch_error((kernel, x, y, z, extended), int(status))
            device.log.note(stream, rule.entry)
            if watcher is not None:
                watcher.after_launch(token)

    def launch_error(self, step: Step, status: int) -> TilewrightError:
        """The error for a launch the driver refused."""
        kernel, x, y, z, extended = step
        rule = kernel.launch
        detail = f"kernel '{rule.entry}', grid {(x, y, z)}, {rule.threads} threads, {rule.shared_bytes} bytes shared"
        if rule.cluster > 1:
            detail += f", clusters of {rule.cluster}"
        if rule.cooperative:
            detail += ", cooperative"
        return self.device.error("cuLaunchKernel" if extended is None else "cuLaunchKernelEx", status, detail)

    def scalar_bits(self, index: int, value: Number) -> int:
        """The 8 bytes of a scalar's slot, as a number."""
        name, dtype = list(self._scalars.items())[index]
        packed = struct.pack(f"<{_FORMATS[dtype.name]}", _scalar(name, value, dtype))
        return int.from_bytes(packed, "little")

    def _bind(self, values: list[Number], plan: Plan) -> tuple[Step, ...]:
        """The plan's launches with the maps of the arrays at these addresses."""
        key = (*plan.key, *[values[slot] for slot in self._map_slots])
        steps = self._bound.get(key)
        if steps is None:
            sizes = dict(zip(self._sizes, plan.key))
            steps = tuple((self._with_maps(step[0], values, sizes), *step[1:]) for step in plan.steps)
            while len(self._bound) >= _BOUND_KEPT:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = steps
        return steps

    def _with_maps(self, kernel: _Kernel, values: list[Number], sizes: Mapping[str, int]) -> _Kernel:
        maps = kernel.launch.maps
        if not maps:
            return kernel
        room = (ctypes.c_char * (len(maps) * MAP_BYTES + MAP_ALIGN))()
        start = -(-ctypes.addressof(room) // MAP_ALIGN) * MAP_ALIGN
        places = tuple(start + MAP_BYTES * index for index in range(len(maps)))
        for place, map_, slot in zip(places, maps, kernel.map_slots, strict=True):
            ctypes.memmove(place, encode_map(self.device, map_, int(values[slot]), sizes), MAP_BYTES)
        table = _table((*kernel.pointers, *places))
        return replace(kernel, parameters=ctypes.addressof(table), memory=(table, room))

    def _pack(self, values: list[Number], plan: Plan) -> None:
        if not self._bit_scalars:
            try:
                self._packer.pack_into(self._slots, 0, *values, *plan.sizes)
                return
            except (struct.error, OverflowError, TypeError):
                pass
        first = len(self._arrays)
        for index, (name, dtype) in enumerate(self._scalars.items(), first):
            values[index] = _scalar(name, values[index], dtype)
        self._packer.pack_into(self._slots, 0, *values, *plan.sizes)

    def _make_plan(self, key: tuple[int, ...]) -> Plan:
        sizes = dict(zip(self._sizes, key))
        steps: list[Step] = []
        for kernel in self._kernels:
            grid = [extent.evaluate(sizes) for extent in kernel.launch.grid]
            x, y, z = (*grid, 1, 1, 1)[:3]
            most = self.device.target.max_grid
            if x > most[0] or y > most[1] or z > most[2]:
                raise TargetLimit.at(
                    "TW020", f"kernel '{kernel.launch.entry}' needs a grid of {(x, y, z)}, but {self.device.label} allows {most}"
                )
            if x % kernel.launch.cluster:
                raise TargetLimit.at(
                    "TW020", f"kernel '{kernel.launch.entry}' has {x} blocks along x, which clusters of {kernel.launch.cluster} do not divide"
                )
            if x > 0 and y > 0 and z > 0:
                rule = kernel.launch
                x, y, z = fitting_grid(rule, (x, y, z), self._resident[rule.entry], self.device.label)
                steps.append((kernel, x, y, z, self._extended(rule, x, y, z) if attribute(rule) else None))
        offsets, total = [], 0
        for array in self._scratch:
            align = max(_SCRATCH_ALIGN, array.align)
            offset = -(-total // align) * align
            offsets.append(offset)
            total = offset + scratch_bytes(self.artifact, array, sizes, self.device.label)
            if total > MOST_BYTES:
                raise no_scratch(self.artifact, array, sizes, self.device.label)
        plan = Plan(key, tuple(steps), tuple(offsets), total, key[: self._slot_sizes])
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        self._plans[key] = plan
        return plan

    def _extended(self, rule: Launch, x: int, y: int, z: int) -> _Extended:
        """A launch that may begin before the one before it on the stream has ended, or one whose blocks all run at once."""
        driver = self.device.driver
        own = driver.module.CUlaunchAttribute()
        if rule.cooperative:
            own.id = driver.constant("CUlaunchAttributeID", "CU_LAUNCH_ATTRIBUTE_COOPERATIVE")
            own.value.cooperative = 1
        else:
            own.id = driver.constant("CUlaunchAttributeID", "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION")
            own.value.programmaticStreamSerializationAllowed = 1
        config = driver.module.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
        config.blockDimX, config.blockDimY, config.blockDimZ = rule.threads, 1, 1
        config.sharedMemBytes = rule.shared_bytes
        config.hStream = 0
        config.attrs = [own]
        config.numAttrs = 1
        return _Extended(config)


def _ptx_version(code: bytes) -> int:
    """What a PTX text says it is written in, times ten."""
    major, _, minor = code.partition(b".version")[2].split(maxsplit=1)[0].partition(b".")
    return int(major) * 10 + int(minor)


def _table(pointers: tuple[int, ...]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * max(1, len(pointers)))(*pointers)


def _scalar(name: str, value: Number, dtype: DType) -> Number:
    """What `struct` packs for a scalar, with an exact message when it cannot be held."""
    if dtype.is_float:
        with np.errstate(over="ignore"):
            rounded = np.asarray(value, np.float64).astype(dtype.numpy)
        if dtype.name in _AS_BITS:
            return int(rounded.view(f"u{dtype.itemsize}"))
        # An infinity is packed as such; a finite value out of range would be refused.
        return float(rounded)
    if isinstance(value, float | np.floating) or not isinstance(value, int | np.integer | np.bool_):
        raise UserError.at("TW009", f"'{name}' must be {dtype}, not {value!r}")
    number = int(value)
    if not dtype.is_bool and not dtype.min_value <= number <= dtype.max_value:
        raise UserError.at("TW006", f"'{name}' is {dtype}, which cannot hold {number}")
    return number
