"""Loading and calling CPU artifacts.

In: an `Artifact` of kind 'object'. Out: a `CpuProgram` with two ways in. `call` is the artifact's entry stub as a builtin
function: fast, and it returns `NotImplemented` for whatever it does not recognise. `run` takes every array by name, outputs
included, already checked by the caller, and launches the kernels. Both run on the pool of `runtime.cpu.pool`.

`call` owns its machine code: a caller may keep just the function. The code is freed with the last of function and program.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import platform
from collections.abc import Callable, Mapping

import numpy as np

from tilewright.base import abi, dtypes
from tilewright.base.artifact import (
    FAILURE,
    FAILURE_FIELDS,
    FAILURE_SITE,
    ArrayParam,
    Artifact,
    Launch,
    ScalarParam,
    index_error,
)
from tilewright.base.errors import DeviceError, TilewrightError
from tilewright.base.record import record
from tilewright.base.sizes import add_numbers
from tilewright.base.target import host_cpu
from tilewright.runtime.core.builtin import METH_FASTCALL_KEYWORDS, MethodDefinition, bind_python, builtin_function
from tilewright.runtime.core.entry import provide_front
from tilewright.runtime.core.objects import ObjectCode, bind_symbol
from tilewright.runtime.core.run_sizes import block_count, bounded, no_scratch, scratch_bytes
from tilewright.runtime.cpu import pool as cpu_pool

_LEVELS = ("scalar", "sse4.1", "avx2", "avx512", "amx")
_ARM_LEVELS = ("scalar", "neon")
"""What every such machine runs; code for SVE runs where registers have its length."""

@functools.cache
def _bind_interpreter() -> None:
    """Bind what entry stubs name: Python's C API, NumPy's function table, type and dtype objects."""
    bind_python()
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ctypes.cast(ctypes.pythonapi.PyCapsule_GetPointer, ctypes.c_void_p).value or 0
    )
    core = importlib.import_module("numpy._core._multiarray_umath")
    bind_symbol("tilewright_numpy_api", pointer(core._ARRAY_API, None))
    bind_symbol("tilewright_ndarray", id(np.ndarray))
    for dtype in dtypes.ALL:
        # `DType.numpy` keeps the object, so the address stays good.
        bind_symbol(f"tilewright_descr_{dtype.name}", id(dtype.numpy))
        bind_symbol(f"tilewright_number_{dtype.name}", id(dtype.numpy.type))


def _require_runnable(artifact: Artifact) -> None:
    """Refuse code for another machine; running it would end the process."""
    host = host_cpu().name
    base = "aarch64" if artifact.target.startswith("aarch64") else "x86-64"
    wanted = artifact.target.removeprefix(base).lstrip("-") or "scalar"
    have = host.removeprefix(base).lstrip("-")
    fits = host.startswith(base) and artifact.kind == "object"
    if fits and wanted in _LEVELS and have in _LEVELS:
        fits = _LEVELS.index(wanted) <= _LEVELS.index(have)
    elif base == "aarch64":
        fits = fits and (wanted in _ARM_LEVELS or wanted == have)
    if not fits:
        raise DeviceError.at(
            "TW030",
            f"'{artifact.name}' is {artifact.kind} code for {artifact.target}; this machine ({platform.machine()}) is {host}",
            help="compile for target 'cpu'",
        )


def _no_stub(*arguments: object, **keywords: object) -> object:
    """The entry of a program without a host part: every call takes the slow path."""
    return NotImplemented


class _ProgramCode:
    """The linked objects of one program and the method definition of its entry; what the builtin function keeps alive."""

    def __init__(self, artifact: Artifact) -> None:
        self.objects = ObjectCode(artifact.code, artifact.host) if artifact.host else ObjectCode(artifact.code)
        self.entries = {x.entry: self.objects.address(x.entry) for x in artifact.launches}
        self.sites, self.launches = artifact.sites, artifact.launches
        self.method = MethodDefinition()
        if artifact.host:
            provide_front(self.objects)
            self.method = MethodDefinition(
                artifact.name.encode(), self.objects.address(abi.STUB_ENTRY), METH_FASTCALL_KEYWORDS, None
            )

    def outside(self, site: int, index: int, extent: int) -> None:
        """An access of the program lay outside its array: the entry stub asks for the error. Site 0: launch `extent` reported `index`, that it had no memory."""
        if not site:
            raise _failed(self.launches[extent], index & (1 << 64) - 1)
        raise index_error(self.sites, site, index, extent)

    def function(self, fallback: Callable[..., object] | None = None) -> Callable[..., object]:
        """A builtin function that runs the stub. Its `__self__` holds this object, which CPython releases last.

        With a fallback, calls the stub refuses are handed on to it; without, they give `NotImplemented`.
        """
        return builtin_function(self.method, self if fallback is None else (self, fallback))


@record(identity=True)
class LaunchJob:
    """One launch with its arguments."""

    entry: int
    slots: ctypes.Array[ctypes.c_uint64]
    blocks: int
    work: int
    scratch: list[np.ndarray]
    """Memory the slots name."""
    launch: Launch
    report: ctypes.c_uint64 | None
    """Where a failure (an assertion, or no memory for local arrays) says which it was; None where nothing can fail."""
    failure: np.ndarray | None = None
    """Where an access outside its array says which it was; None where none is checked."""

    @property
    def can_fail(self) -> bool:
        return self.report is not None or self.failure is not None


class CpuProgram:
    """A loaded artifact."""

    def __init__(self, artifact: Artifact) -> None:
        _require_runnable(artifact)
        self.pool = cpu_pool.pool()
        _bind_interpreter()
        self.artifact = artifact
        self._code = _ProgramCode(artifact)
        self.call: Callable[..., object] = self._code.function() if artifact.host else _no_stub
        """The entry stub: inputs by position, `out=` optional; `NotImplemented` for anything it does not recognise."""
        self._scalars = {p.name: p for p in artifact.inputs if isinstance(p, ScalarParam)}
        self._whole = [name for name, p in self._scalars.items() if p.dtype.is_int]
        self._arrays = {p.name: p for p in (*artifact.inputs, *artifact.outputs) if isinstance(p, ArrayParam)}
        self.entries = self._code.entries
        self._rules: dict[tuple[object, ...], _Rules] = {}

    def entry(self, fallback: Callable[..., object]) -> Callable[..., object] | None:
        """The entry stub as a function that hands refused calls to `fallback`; None where there is no stub."""
        return self._code.function(fallback) if self.artifact.host else None

    def sizes(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, int | float | bool]) -> dict[str, int]:
        """The value of every size and stride name, read off the arrays. An axis of packed blocks counts elements."""
        whole = {name: int(scalars[name]) for name in self._whole}
        values = dict(whole)
        for binding in self.artifact.bindings:
            array, dtype = arrays[binding.array], self._arrays[binding.array].dtype
            if binding.stride:
                values[binding.name] = array.strides[binding.axis] // dtype.itemsize
            else:
                packed = dtype.block if binding.axis == array.ndim - 1 else 1
                values[binding.name] = array.shape[binding.axis] * packed
        add_numbers(values, whole, self.artifact.computed)
        return values

    def run(
        self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, int | float | bool], pool: cpu_pool.ThreadPool | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Launch the kernels on these arrays: inputs and outputs by name, already checked; scratch is made here. `sizes`: what no array binds."""
        for job in self.jobs(arrays, scalars, sizes):
            (pool or self.pool).launch(job.entry, ctypes.addressof(job.slots), job.blocks, job.work)
            raise_failed(job, self.artifact)

    def jobs(
        self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, int | float | bool], sizes: Mapping[str, int] | None = None
    ) -> list[LaunchJob]:
        """What a run launches."""
        rules = self._rules_of(arrays, scalars, sizes)
        words = {name: _word(scalars[name], param) for name, param in self._scalars.items()}
        for name in self._arrays:
            words[name] = _address(arrays[name])
        kept: list[np.ndarray] = []
        cell = np.zeros(FAILURE_FIELDS, np.int64) if self.artifact.sites else None
        if cell is not None:
            words[FAILURE] = _address(cell)
        for param, nbytes in rules.scratch:
            try:
                memory = np.empty(nbytes + abi.SCRATCH_ALIGN, np.uint8)
            except (MemoryError, ValueError) as error:
                raise no_scratch(self.artifact, param, rules.sizes) from error
            kept.append(memory)
            words[param.name] = (_address(memory) + abi.SCRATCH_ALIGN - 1) // abi.SCRATCH_ALIGN * abi.SCRATCH_ALIGN
        jobs: list[LaunchJob] = []
        for rule in rules.launches:
            launch = rule.launch
            report = ctypes.c_uint64() if launch.asserts else None
            own = () if report is None else (ctypes.addressof(report),)
            slots = rule.slots(*[words[name] for name in launch.args], *rule.words, *own)
            jobs.append(LaunchJob(rule.entry, slots, rule.blocks, rule.work, kept, launch, report, cell))
        return jobs

    def _rules_of(self, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, int | float | bool], sizes: Mapping[str, int] | None) -> _Rules:
        """What arrays of these sizes need. A few are remembered: to find them out takes longer than a small launch."""
        shapes = [(arrays[name].shape, arrays[name].strides) for name in self._arrays]
        key = (*shapes, *[int(scalars[name]) for name in self._whole], *(sizes.items() if sizes else ()))
        found = self._rules.get(key)
        if found is None:
            for name, param in self._arrays.items():
                assert arrays[name].dtype.itemsize == param.dtype.itemsize, name
                assert arrays[name].ndim == len(param.shape), name
            found = _Rules(self, {**self.sizes(arrays, scalars), **(sizes or {})})
            if len(self._rules) >= _MOST_RULES:
                self._rules.clear()
            self._rules[key] = found
        return found


_MOST_RULES = 8
"""Kinds of calls whose rules a program remembers."""


class _Rules:
    """What a run needs by its sizes: bytes of scratch, and of each launch its blocks, its work and the words that follow its arrays."""

    def __init__(self, program: CpuProgram, sizes: Mapping[str, int]) -> None:
        artifact = program.artifact
        self.sizes = sizes
        checked = bool(artifact.sites)
        self.scratch = [(p, scratch_bytes(artifact, p, sizes)) for p in artifact.scratch if not (checked and p.name == FAILURE)]
        self.launches = [_LaunchRule(program, launch, sizes) for launch in artifact.launches]


class _LaunchRule:
    def __init__(self, program: CpuProgram, launch: Launch, sizes: Mapping[str, int]) -> None:
        self.launch, self.entry = launch, program.entries[launch.entry]
        self.words = [sizes[name] & (2**64 - 1) for name in launch.sizes]
        self.slots = ctypes.c_uint64 * max(len(launch.args) + len(self.words) + bool(launch.asserts), 1)
        self.blocks, self.work = block_count(program.artifact, launch, sizes), bounded(launch.work.evaluate(sizes))


def raise_failed(job: LaunchJob, artifact: Artifact) -> None:
    """Raise what a launch that ran has reported, if anything, and forget it."""
    if job.report is not None and job.report.value:
        word, job.report.value = job.report.value, 0
        raise _failed(job.launch, word)
    if job.failure is not None and job.failure[FAILURE_SITE]:
        site, index, extent = (int(v) for v in job.failure[:3])
        job.failure[FAILURE_SITE] = 0
        raise index_error(artifact.sites, site, index, extent)


def _failed(launch: Launch, word: int) -> TilewrightError:
    """The error for an assertion that failed: `word` says which, and where."""
    blocks, threads, ordinals, _ = abi.ASSERT_BITS
    block, thread = word & (1 << blocks) - 1, word >> blocks & (1 << threads) - 1
    place, text = launch.asserts[word >> (blocks + threads) & (1 << ordinals) - 1]
    at = f" at {place}" if place else ""
    if text.startswith(abi.LOCAL_MEMORY):
        return DeviceError.at(
            "TW031", f"out of memory on cpu: {text.removeprefix(abi.LOCAL_MEMORY)} bytes for local and shared arrays of kernel {launch.entry}{at}, "
            "for each thread of the CPU",
            help="make the arrays smaller; what other blocks wrote until then is there",
        )  # fmt: skip
    return DeviceError.at(
        "TW037", f"assertion failed{at}: {text}, in kernel {launch.entry}, block {block}, thread {thread}, on cpu",
        help="what other threads wrote until then is there; run the kernel on the emulator to see more",
    )  # fmt: skip


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _word(value: int | float | bool, param: ScalarParam) -> int:
    """A scalar as the 8 bytes of its slot."""
    data = np.asarray(value, param.dtype.numpy).tobytes()
    return int.from_bytes(data.ljust(abi.SLOT_BYTES, b"\0"), "little")


def load(artifact: Artifact) -> CpuProgram:
    """Link the artifact's objects into the process."""
    return CpuProgram(artifact)
