"""An artifact's WGSL on a device: pipelines, and calls that are bound once. In: arrays, numbers, sizes; out: dispatches on the queue.

A **plan** holds what the sizes of a call decide: grids, the words of each kernel's uniform buffer, scratch arrays. A **bound call** is a plan with arrays:
its bind groups are made once, so that the next call with these arrays only encodes and submits. WebGPU lets a kernel write no buffer that it
is given twice: an array that shares its buffer with one that is written is copied first.
"""

from __future__ import annotations

import re
import struct
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from tilewright.base.artifact import FAILURE, ArrayParam, Artifact, Launch, ScalarParam, index_error
from tilewright.base.dtypes import DType
from tilewright.base.errors import CompilerBug, DeviceError, TargetLimit, UserError
from tilewright.base.record import record
from tilewright.base.sizes import product
from tilewright.runtime.core.device import LoadedProgram, Number, Workspace
from tilewright.runtime.memory.device_array import DeviceArray
from tilewright.runtime.portable.turns import TurnLimit
from tilewright.runtime.webgpu.memory import COPY_DST, UNIFORM, WebGpuBuffer
from tilewright.runtime.webgpu.queue import WebGpuQueue

_PLANS_KEPT, _BOUND_KEPT = 64, 64
_WRITTEN = re.compile(r"var<storage, (read|read_write)> k(\d+)_a(\d+):")
_NARROW = 1 << 31
_FORMATS = {"f32": "f", "i32": "i", "u32": "I", "i64": "q", "u64": "Q", "bool": "I", "i8": "i", "i16": "i", "u8": "I", "u16": "I"}


@record
class KernelPlan:
    """One launch for the sizes of a call."""

    launch: Launch
    position: int
    grid: tuple[int, int, int]
    blocks: int
    values: tuple[int, ...]


@record(identity=True)
class BoundDispatch:
    """The launches of a call with its arrays: pipeline, bind group, grid; and the uniform buffers, with what they hold."""

    steps: list[tuple[Any, Any, tuple[int, int, int]]]
    uniforms: list[tuple[Any, bytes]]
    kept: tuple[object, ...]
    copies: list[tuple[Any, int, Any, int]]
    again: list[Callable[[], str]] = field(default_factory=list)
    """What launches all of it once more, after the first time."""


class WebGpuProgram(LoadedProgram):
    """The kernels of an artifact."""

    def __init__(self, device: WebGpuQueue, artifact: Artifact) -> None:
        if artifact.kind != "wgsl":
            raise DeviceError.at("TW030", f"'{artifact.name}' is {artifact.kind} code, which {device.label} cannot run")
        self.device, self.artifact = device, artifact
        text = artifact.code.decode()
        self._written: dict[tuple[int, int], bool] = {(int(k), int(a)): access == "read_write" for access, k, a in _WRITTEN.findall(text)}
        entries = [one.entry for one in artifact.launches]
        self._kernels = [entries.index(entry) for entry in entries]
        """For each launch, the position of the first one of its kernel, by which the code calls arrays."""
        self._check_limits()
        self._turns = TurnLimit(artifact, device.target, device.label)
        try:
            module = device.gpu.create_shader_module(code=text)
            made: dict[str, Any] = {}
            for one in artifact.launches:
                if one.entry not in made:
                    made[one.entry] = device.gpu.create_compute_pipeline(layout="auto", compute={"module": module, "entry_point": one.entry})
            self._pipelines = [made[one.entry] for one in artifact.launches]
        except Exception as error:
            where = _saved(text)
            raise CompilerBug.at("TW040", f"{device.label} rejects the code of '{artifact.name}': {error}\nthe code is in {where}") from error
        self._scalars: dict[str, DType] = {p.name: p.dtype for p in artifact.inputs if isinstance(p, ScalarParam)}
        self._arrays = [p.name for p in (*artifact.inputs, *artifact.outputs) if isinstance(p, ArrayParam)]
        self._plans: dict[tuple[tuple[str, int], ...], list[KernelPlan]] = {}
        self._bound: dict[object, BoundDispatch] = {}

    def _check_limits(self) -> None:
        most = self.device.target.max_arrays
        for one in self.artifact.launches:
            count = sum(name not in {p.name for p in self.artifact.inputs if isinstance(p, ScalarParam)} for name in one.args)
            if most and count > most:
                raise TargetLimit.at("TW020", f"kernel '{one.entry}' of '{self.artifact.name}' has {count} arrays, but {self.device.label} gives a kernel {most}")

    # -- plans ----------------------------------------------------------------------------------------------------------

    def _plan(self, sizes: Mapping[str, int]) -> list[KernelPlan]:
        key = tuple(sizes.items())
        found = self._plans.get(key)
        if found is None:
            found = [plan for k, one in enumerate(self.artifact.launches) if (plan := self._kernel_plan(k, one, sizes)) is not None]
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = found
        return found

    def _kernel_plan(self, position: int, launch: Launch, sizes: Mapping[str, int]) -> KernelPlan | None:
        grid = [extent.evaluate(sizes) for extent in launch.grid]
        if any(extent <= 0 for extent in grid):
            return None
        for size in (*launch.values, *launch.narrow):
            if abs(size.evaluate(sizes)) >= _NARROW:
                raise TargetLimit.at(
                    "TW020", f"kernel '{launch.entry}' needs indices of 64 bits: {size} is {size.evaluate(sizes)}, and {self.device.target.name} computes indices in 32",
                    help="use smaller arrays, or another device",
                )  # fmt: skip
        self._turns.check(position, sizes)
        blocks, most = 1, self.device.target.max_grid[0]
        for extent in grid:
            blocks *= extent
        if len(grid) <= 1:
            folded = (min(blocks, most), -(-blocks // most), 1)
        else:
            x, y, z = (*grid, 1)[:3]
            folded = (x, y, z)
        if max(folded) > most:
            raise TargetLimit.at("TW020", f"kernel '{launch.entry}' needs a grid of {tuple(grid)}, but {self.device.label} allows {most} blocks along an axis")
        return KernelPlan(launch, position, folded, blocks, tuple(size.evaluate(sizes) for size in launch.values))

    # -- calls ----------------------------------------------------------------------------------------------------------

    def run(
        self, arrays: Mapping[str, Any], scalars: Mapping[str, Number], sizes: Mapping[str, int], stream: int = 0, *,
        take: Callable[[int], Workspace] | None = None,
    ) -> None:  # fmt: skip
        device = self.device
        with device.lock:
            device.raise_lost()
            plans = self._plan(sizes)
            if self._turns.by_numbers:
                self._turns.check_numbers(sizes, scalars)
            for name in self._arrays:
                self._check(name, arrays[name])
                arrays[name].owner.use_on(stream)
            key = (tuple(sizes.items()), tuple((id(a.owner.buffer), a.offset) for a in (arrays[name] for name in self._arrays)))
            bound = self._bound.get(key)
            if bound is None:
                self._turns.warn([plan.launch for plan in plans])
                bound = self._bind(plans, arrays, scalars, sizes, stream)
                while len(self._bound) >= _BOUND_KEPT:
                    self._bound.pop(next(iter(self._bound)))
                self._bound[key] = bound
            elif self._scalars:
                self._update(bound, plans, arrays, scalars)
            self._submit(bound)
            device.dispatched += len(bound.steps)
            if self.artifact.sites:
                self._watch(bound)

    def _submit(self, bound: BoundDispatch) -> None:
        if bound.again:
            self.device.submit_raw(bound.again[0])
            return
        encoder = self.device.gpu.create_command_encoder()
        for source, start, copy, nbytes in bound.copies:
            encoder.copy_buffer_to_buffer(source, start, copy, start, nbytes)
        if bound.steps:
            work = encoder.begin_compute_pass()
            for pipeline, group, (x, y, z) in bound.steps:
                work.set_pipeline(pipeline)
                work.set_bind_group(0, group)
                work.dispatch_workgroups(x, y, z)
            work.end()
        self.device.submit(encoder)
        raw = self.device.raw
        if raw is not None:
            bound.again.append(raw.bound(bound.steps, bound.copies))

    def _check(self, name: str, array: DeviceArray) -> None:
        array.check_usable()
        if array.device is not self.device:
            raise UserError.at("TW009", f"an array on {array.device.label} was given to a program on {self.device.label}")

    def _words(self, plan: KernelPlan, offsets: list[int], scalars: Mapping[str, Number]) -> bytes:
        """The uniform buffer of a launch."""
        parts = [struct.pack("<II", plan.blocks, 0), *(struct.pack("<i", o) for o in (*offsets, *plan.values))]
        parts += [_scalar(name, scalars[name], self._scalars[name]) for name in plan.launch.args if name in self._scalars]
        data = b"".join(parts)
        return data + b"\0" * (-len(data) % 16)

    def _update(self, bound: BoundDispatch, plans: list[KernelPlan], arrays: Mapping[str, Any], scalars: Mapping[str, Number]) -> None:
        """Other numbers for a bound call."""
        for k, plan in enumerate(plans):
            buffer, held = bound.uniforms[k]
            start = 8 + 4 * sum(name not in self._scalars for name in plan.launch.args) + 4 * len(plan.values)
            parts = b"".join(_scalar(name, scalars[name], self._scalars[name]) for name in plan.launch.args if name in self._scalars)
            data = held[:start] + parts
            data += b"\0" * (-len(data) % 16)
            if data != held:
                self.device.gpu.queue.write_buffer(buffer, 0, data)
                bound.uniforms[k] = (buffer, data)

    def _bind(self, plans: list[KernelPlan], arrays: Mapping[str, Any], scalars: Mapping[str, Number], sizes: Mapping[str, int], stream: int) -> BoundDispatch:
        device = self.device
        given: dict[str, tuple[Any, int, DType]] = {}
        kept: list[object] = []
        for name in self._arrays:
            array = arrays[name]
            given[name] = (array.owner.buffer, array.offset, array.dtype)
        for scratch in self.artifact.scratch:
            nbytes = product(scratch.shape).evaluate(sizes) * scratch.dtype.itemsize
            own = WebGpuBuffer(device.pool, max(nbytes, 4), stream)
            kept.append(own)
            given[scratch.name] = (own.buffer, 0, scratch.dtype)
            if scratch.name == FAILURE:
                device.gpu.queue.write_buffer(own.buffer, 0, b"\0" * nbytes)
        bound = BoundDispatch([], [], (), [])
        for plan in plans:
            names = [name for name in plan.launch.args if name not in self._scalars]
            written = {given[name][0] for k, name in enumerate(names) if self._written.get((self._kernels[plan.position], k))}
            entries, offsets = [], []
            for k, name in enumerate(names):
                buffer, offset, dtype = given[name]
                if buffer in written and not self._written.get((self._kernels[plan.position], k)):
                    copy = WebGpuBuffer(device.pool, buffer.size, stream)
                    kept.append(copy)
                    bound.copies.append((buffer, 0, copy.buffer, buffer.size))
                    buffer = copy.buffer
                offsets.append(offset // dtype.itemsize)
                entries.append({"binding": k + 1, "resource": {"buffer": buffer, "offset": 0, "size": buffer.size}})
            words = self._words(plan, offsets, scalars)
            uniform = device.gpu.create_buffer(size=len(words), usage=UNIFORM | COPY_DST)
            device.gpu.queue.write_buffer(uniform, 0, words)
            pipeline = self._pipelines[plan.position]
            entries.append({"binding": 0, "resource": {"buffer": uniform, "offset": 0, "size": len(words)}})
            group = device.gpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
            bound.steps.append((pipeline, group, plan.grid))
            bound.uniforms.append((uniform, words))
        return BoundDispatch(bound.steps, bound.uniforms, tuple(kept), bound.copies)

    def _watch(self, bound: BoundDispatch) -> None:
        """The first access outside an array, raised by the next call that waits."""
        cell = next(own for own, scratch in zip(bound.kept, self.artifact.scratch) if scratch.name == FAILURE)
        assert isinstance(cell, WebGpuBuffer)

        def check() -> None:
            site, index, extent = np.frombuffer(self.device.read_bytes(cell.buffer, 0, 24), np.int64)
            if site:
                self.device.gpu.queue.write_buffer(cell.buffer, 0, b"\0" * 24)
                raise index_error(self.artifact.sites, int(site), int(index), int(extent), self.device.label)

        self.device.watch(check)


def _saved(text: str) -> str:
    """A file with the code."""
    with tempfile.NamedTemporaryFile("w", prefix="tilewright-", suffix=".wgsl", delete=False) as file:
        file.write(text)
    return file.name


def _scalar(name: str, value: Number, dtype: DType) -> bytes:
    """The words of a number."""
    if dtype.name == "bool":
        return struct.pack("<I", bool(value))
    if dtype.is_float:
        with np.errstate(over="ignore"):
            rounded = np.asarray(value, np.float64).astype(dtype.numpy)
        return rounded.tobytes() if dtype.itemsize == 4 else int(rounded.view(f"u{dtype.itemsize}")).to_bytes(4, "little")
    if isinstance(value, float | np.floating) or not isinstance(value, int | np.integer | np.bool_):
        raise UserError.at("TW009", f"'{name}' must be {dtype}, not {value!r}")
    number = int(value)
    if not dtype.min_value <= number <= dtype.max_value:
        raise UserError.at("TW006", f"'{name}' is {dtype}, which cannot hold {number}")
    return struct.pack(f"<{_FORMATS[dtype.name]}", number)


