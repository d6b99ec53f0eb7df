"""The public API on null devices. In: a null driver; out: `tw.devices()` lists its devices, and kernels run on them without a GPU.

The compiler works as ever, down to PTX. What it built is remembered, so that a launch of one of its entries runs the program's own
kernel on the emulator, at the loop stage where that has the same kernels, else (or on request) at the thread stage, with the very
parameters the launch passed: addresses are looked up in the driver's memory, and grid, block and tensor maps must be those of the
launch rule. Nothing is read from the disk cache meanwhile, since it keeps no programs.

Kernels keep what they loaded for a device; use kernels of the test's own, not ones that another driver has seen. What was compiled
for them is kept from one driver to the next.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

from null_cuda.driver import NullCuda
from null_cuda.programs import Config, Function, Parameters
from null_cuda.state import Fault
from tilewright.base.artifact import FAILURE, FAILURE_FIELDS, FAILURE_FLAG, FAILURE_SITE, Artifact
from tilewright.base.errors import TilewrightError
from tilewright.compile import build, store
from tilewright.compile import driver as compile_driver
from tilewright.ir.emulator import run_kernel
from tilewright.ir.program import KernelCall, Program
from tilewright.ir.types import Tensor
from tilewright.runtime.cuda import device as cuda


@dataclass(frozen=True)
class _Built:
    """An artifact, the program it was made of, and the stages before that, where they are known."""

    artifact: Artifact
    thread: Program
    stages: Any


_built: dict[str, _Built] = {}
"""All that was compiled while a null driver was installed, by PTX; the compiler keeps it in memory as well."""


class _NoCache:
    """A disk cache that keeps nothing."""

    def get(self, key: str) -> None: ...
    def put(self, key: str, artifact: object) -> None: ...


class Programs:
    """What was compiled, by its PTX; runs the kernels of launches. `stage` is loop, tile or thread."""

    def __init__(self, driver: NullCuda, stage: str = "loop") -> None:
        self.driver, self.stage, self.exported = driver, stage, False
        self.launched: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Remember what the compiler builds."""
        original_finish, original_build = compile_driver.PreparedKernel.finish, build.build_artifact
        latest: dict[int, Any] = {}

        def finish(prepared: Any, *arguments: Any) -> Any:
            done = original_finish(prepared, *arguments)
            latest[id(done.stages.thread)] = done.stages
            return done

        def build_artifact(program: Program, *arguments: Any, **named: Any) -> Artifact:
            artifact = original_build(program, *arguments, **named)
            if artifact.kind == "ptx":
                _built[artifact.code.decode()] = _Built(artifact, program, latest.get(id(program)))
            return artifact

        store.STORE.forget(lambda artifact: artifact.kind == "ptx" and artifact.code.decode() not in _built)
        with (
            mock.patch.object(compile_driver.PreparedKernel, "finish", finish),
            mock.patch.object(build, "build_artifact", build_artifact),
            mock.patch.object(store, "disk_cache", _NoCache),
        ):
            yield

    def execute(self, function: Function, config: Config, parameters: Parameters) -> bool:
        """Run the kernel of a launch, if it is of a program that was built here."""
        built = _built.get(function.module.ptx)
        if built is None:
            return False
        entry = function.entry.name
        position = next(i for i, launch in enumerate(built.artifact.launches) if launch.entry == entry)
        self.launched.append(entry)
        values, sizes = self._values(built, position, parameters)
        self._check_rule(built, position, config, parameters, values, sizes)
        call = self._call(built, position, values, sizes)
        arguments = [self._argument(p.type, values[name], sizes) for p, name in zip(call.kernel.params, call.args, strict=True)]
        try:
            run_kernel(call.kernel, arguments, sizes)
        except TilewrightError as error:
            self.driver.kernel_errors.append(error)
            raise Fault from error
        if FAILURE in call.args and built.artifact.sites:  # explicit kernels leave a record of another form
            self._raise_flag(int.from_bytes(values[FAILURE], "little"))
        return True

    def _raise_flag(self, cell: int) -> None:
        """What a GPU does beside what the emulator does: who left a record sets the word that the record names."""
        fields = (ctypes.c_int64 * FAILURE_FIELDS).from_address(cell)
        if fields[FAILURE_SITE] and fields[FAILURE_FLAG]:
            ctypes.c_int64.from_address(fields[FAILURE_FLAG]).value = 1

    def _call(self, built: _Built, position: int, values: dict[str, bytes], sizes: dict[str, int]) -> KernelCall:
        # Index checks are made on the way to the tile stage.
        checked = built.artifact.sites and self.stage == "loop"
        other = None if checked else getattr(built.stages, self.stage, None)
        if other is not None and len(other.calls) == len(built.thread.calls):
            call: KernelCall = other.calls[position]
            if set(call.args) <= set(values) and set(call.kernel.size_names) <= set(sizes):
                return call
        return built.thread.calls[position]

    def _values(self, built: _Built, position: int, parameters: Parameters) -> tuple[dict[str, bytes], dict[str, int]]:
        call = built.thread.calls[position]
        raw = [parameters.value(index) for index in range(len(parameters.sizes))]
        values = dict(zip(call.args, raw))
        sizes = [int.from_bytes(item, "little", signed=True) for item in raw[len(call.args) : len(call.args) + len(call.kernel.size_names)]]
        return values, dict(zip(call.kernel.size_names, sizes, strict=True))

    def _check_rule(
        self, built: _Built, position: int, config: Config, parameters: Parameters, values: dict[str, bytes], sizes: dict[str, int]
    ) -> None:
        rule = built.artifact.launches[position]
        grid = (*(extent.evaluate(sizes) for extent in rule.grid), 1, 1, 1)[:3]
        if rule.persistent:
            assert 0 < config.grid[0] <= grid[0], f"{rule.entry} was launched with {config.grid[0]} blocks, its rule allows {grid[0]}"
            grid = (config.grid[0], *grid[1:])
        given, wanted = (config.grid, config.block, config.shared), (grid, (rule.threads, 1, 1), rule.shared_bytes)
        assert given == wanted, f"{rule.entry} was launched as {given}, its rule says {wanted}"
        assert config.dependent == (rule.dependent and not self.exported), f"{rule.entry}: dependent launch"
        assert config.cooperative == rule.cooperative, f"{rule.entry}: cooperative launch"
        first = len(parameters.sizes) - len(rule.maps)
        for index, map_ in enumerate(rule.maps, first):
            address = int.from_bytes(parameters.value(index)[:8], "little")
            empty = min((extent.evaluate(sizes) for extent in map_.shape), default=1) <= 0
            own = int.from_bytes(values[map_.array], "little") if map_.array in values else address
            assert empty or address == own, f"{rule.entry}: the map of '{map_.array}' is of {address:#x}, the array is at {own:#x}"

    def _argument(self, type_: object, raw: bytes, sizes: dict[str, int]) -> Any:
        if not isinstance(type_, Tensor):
            return np.frombuffer(raw, type_.dtype.numpy)[0]  # type: ignore[attr-defined]
        shape = tuple(extent.evaluate(sizes) for extent in type_.shape)
        strides = tuple(stride.evaluate(sizes) for stride in type_.strides)
        itemsize, pointer = type_.dtype.itemsize, int.from_bytes(raw, "little")
        if min(shape, default=1) <= 0:
            return np.empty(shape, type_.dtype.numpy)
        steps = [(extent - 1) * stride for extent, stride in zip(shape, strides)]
        low, high = sum(min(0, s) for s in steps), sum(max(0, s) for s in steps) + 1
        self.driver.reach(pointer + low * itemsize, (high - low) * itemsize)
        memory = (ctypes.c_char * ((high - low) * itemsize)).from_address(pointer + low * itemsize)
        return np.ndarray(shape, type_.dtype.numpy, memory, -low * itemsize, tuple(s * itemsize for s in strides))


@contextmanager
def _modules(names: dict[str, Any]) -> Iterator[None]:
    """These modules for a while. Others that are loaded meanwhile stay: a second copy would have classes of its own."""
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


@contextmanager
def installed(driver: NullCuda | None = None, stage: str = "loop", *, exported: bool = False, **options: Any) -> Iterator[NullCuda]:
    """`with installed(count=2, mode="random") as driver:` the process has null GPUs; options as `NullCuda` takes them. `exported`: what is launched
    was exported, whose loader launches in order, also kernels that could start early."""
    made = driver or NullCuda(**options)
    programs = Programs(made, stage)
    programs.exported = exported
    made.programs = programs
    made.executors.append(programs.execute)
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    bindings.driver = made  # type: ignore[attr-defined]
    package.bindings = bindings  # type: ignore[attr-defined]
    names = {"cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": made}
    with _modules(names), programs.watching():
        cuda._forget()
        gc.collect()  # arrays of GPUs that are gone give their memory back before new ones come
        try:
            yield made
        finally:
            cuda._forget()


_running: list[Any] = []


def install(driver: NullCuda | None = None, stage: str = "loop", **options: Any) -> NullCuda:
    """The same until `uninstall`, for a process that does nothing else."""
    context = installed(driver, stage, **options)
    made = context.__enter__()
    _running.append(context)
    return made


def uninstall() -> None:
    """Undo the latest `install`."""
    _running.pop().__exit__(None, None, None)
