"""Loops of ordinary Python code on a GPU: `for i in tw.parallel_gpu(n, 256):` and `for i in tw.prange(n):`.

The loop's body becomes an explicit kernel with one thread for each number; arrays and numbers around it are its arguments, and arrays
are written in place. Python itself runs the body no times. `parallel_gpu` takes the programmer's word that iterations may run at the
same time; `prange` proves it (`analysis.dependence`) and refuses the loop with the two accesses that stand against it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.analysis.dependence import find_dependence, thread_number
from tilewright.api.cuda_calls import device_of
from tilewright.api.devices import Device, default_device, find_device
from tilewright.api.simt import Config
from tilewright.api.simt_language import gpu_thread_id
from tilewright.api.simt_run import Key, SimtRunner
from tilewright.base.errors import UserError
from tilewright.frontend.regions import EXTENT, START, THREAD, Loop, loop_of_frame, loop_of_function, outline
from tilewright.frontend.simt import NO_DEFAULT, BuiltKernel, Parameter, SimtArg
from tilewright.frontend.simt_source import FunctionSource, read_source
from tilewright.ir.types import INDEX
from tilewright.runtime.libraries import is_array

_Number = bool | int | float | np.generic
_MOST = 256
"""Loops whose kernels are remembered."""
_made: dict[object, _Region] = {}


class Region:
    """What a marked loop goes over. Iterating runs the loop's body as a kernel and gives nothing to Python's own loop."""

    def __init__(self, what: str, first: int, extents: tuple[int, ...], step: int, block: int, device: str | None, proven: bool) -> None:
        self.what, self.first, self.extents, self.step = what, first, extents, step
        self.block, self.device, self.proven = block, device, proven

    def __iter__(self) -> Iterator[Any]:
        frame = sys._getframe(1)
        try:
            key: object = (frame.f_code, frame.f_lasti, self.what)
            region = _made.get(key)
            loop = region.loop if region is not None else loop_of_frame(frame, self.what)
            self._run(key, loop, {**frame.f_globals, **frame.f_locals})
        finally:
            del frame
        return iter(())

    def __call__(self, function: Callable[..., object]) -> None:
        """As a decorator: run the function's body for every number, now."""
        source = read_source(function)
        self._run((function.__code__, self.what), loop_of_function(source), source.names)

    def __repr__(self) -> str:
        return self.what

    def _run(self, key: object, loop: Loop, names: Mapping[str, object]) -> None:
        if len(loop.targets) != len(self.extents):
            raise UserError.at(
                "TW016", f"the loop counts with {len(loop.targets)} name(s) over {len(self.extents)} extent(s)", loop.head,
                f"write: for {', '.join('ijklmn'[: len(self.extents)])} in {self.what}:",
            )  # fmt: skip
        captured = _captured(loop, names)
        region = _made.get(key)
        if region is None or not region.fits(captured):
            region = _Region(loop, captured, names, self.step, self.proven)
            if len(_made) >= _MOST:
                _made.clear()
            _made[key] = region
        region.run(self, captured)


class _Region:
    """A loop made a kernel, for surroundings whose functions, constants and equal arrays are these."""

    def __init__(self, loop: Loop, captured: Mapping[str, object], names: Mapping[str, object], step: int, proven: bool) -> None:
        self.loop, self.step = loop, step
        self._same = _equal_arrays(captured)
        self._kept = {name: value for name, value in captured.items() if not _is_argument(value)}
        self.arguments = tuple(name for name, value in captured.items() if _is_argument(value) and name not in self._same)
        counting = (START,) if len(loop.targets) == 1 else tuple(f"{EXTENT}{axis}" for axis in range(1, len(loop.targets)))
        self.counting = counting
        source = outline(loop, (*counting, *self.arguments), self._same, {**names, THREAD: gpu_thread_id}, step)
        parameters = [Parameter(name, "", None, None, NO_DEFAULT, loop.head) for name in (*counting, *self.arguments)]
        self.runner = LoopRunner(source, parameters) if proven else SimtRunner(source, parameters, {})

    def fits(self, captured: Mapping[str, object]) -> bool:
        kept = {name: value for name, value in captured.items() if not _is_argument(value)}
        alike = kept.keys() == self._kept.keys() and all(value is self._kept[name] for name, value in kept.items())
        return alike and _equal_arrays(captured) == self._same

    def run(self, region: Region, captured: Mapping[str, object]) -> None:
        count = 1
        for extent in region.extents:
            count *= extent
        counted = [region.first] if len(region.extents) == 1 else list(region.extents[1:])
        values = [*counted, *(captured[name] for name in self.arguments)]
        device = _device(values, region.device)
        blocks = -(-count // region.block)
        config = Config((blocks, 1, 1), (region.block, 1, 1), count=count if count % region.block else 0)
        if not isinstance(self.runner, LoopRunner):
            self.runner.run(values, config, device)
            return
        with self.runner.lock:
            self.runner.negative = any(isinstance(v, int) and v < 0 for v in values)
            self.runner.shared_memory = _overlapping(self.arguments, values[len(counted) :])
            self.runner.run(values, config, device)


class LoopRunner(SimtRunner):
    """Runs only what is proven to be parallel."""

    def __init__(self, source: FunctionSource, parameters: Sequence[Parameter]) -> None:
        super().__init__(source, parameters, {})
        self.lock = threading.Lock()
        """Of what is said here about the next run."""
        self.negative = False
        """Whether an integer of the next run is negative: then nothing can be concluded from its name."""
        self.shared_memory: tuple[tuple[str, str], ...] = ()
        """Arrays of the next run that overlap."""

    def key(self, args: Sequence[SimtArg], config: Config, aliased: bool = False) -> Key:
        return (*super().key(args, config, aliased), self.negative, self.shared_memory)

    def built(self, args: Sequence[SimtArg], config: Config, aliased: bool = False) -> BuiltKernel:
        known = self.key(args, config, aliased) in self._built
        found = super().built(args, config, aliased)
        if not known:
            try:
                self._check_memory(found)
                self._prove(found)
            except UserError:
                self._built.pop(self.key(args, config, aliased), None)
                raise
        return found

    def _check_memory(self, built: BuiltKernel) -> None:
        for one, other in self.shared_memory:
            if one in built.written or other in built.written:
                raise UserError.at(
                    "TW012", f"the loop is not parallel as far as can be seen: '{one}' and '{other}' share memory, and one of them is written",
                    self.source.head(), "copy one of them, or use tw.parallel_gpu if no iteration touches what another one writes",
                )  # fmt: skip

    def _prove(self, built: BuiltKernel) -> None:
        kernel = built.kernel
        number = thread_number(kernel)
        symbols = [] if self.negative else [p for p in kernel.params if p.type == INDEX]
        found = find_dependence(kernel, number, symbols) if number is not None else None
        if found is None:
            return
        write, other = found.write.span, found.other.span
        verb = "reads" if found.other.opcode == "load" else "writes"
        where = f"line {write.line} writes it, line {other.line} {verb} it in another iteration"
        raise UserError.at(
            "TW012", f"the loop is not parallel as far as can be seen: iterations may touch the same element of '{found.array}': {where}",
            other, "use a plain loop, or tw.parallel_gpu if you know that no iteration touches what another one writes",
        )  # fmt: skip


def _captured(loop: Loop, names: Mapping[str, object]) -> dict[str, object]:
    """What the names around the loop mean; what is missing the front end reports with its place."""
    return {name: names[name] for name in loop.reads if name in names}


def _is_argument(value: object) -> bool:
    return isinstance(value, _Number) or is_array(value)


def _equal_arrays(captured: Mapping[str, object]) -> dict[str, str]:
    """Names of arrays that another name before has too."""
    first: dict[int, str] = {}
    same: dict[str, str] = {}
    for name, value in captured.items():
        if not isinstance(value, _Number) and is_array(value):
            before = first.setdefault(id(value), name)
            if before != name:
                same[name] = before
    return same


def _overlapping(names: Sequence[str], values: Sequence[object]) -> tuple[tuple[str, str], ...]:
    spans = [(name, *extent) for name, value in zip(names, values, strict=True) if (extent := _extent(value)) is not None]
    return tuple(
        (one[0], other[0])
        for number, one in enumerate(spans)
        for other in spans[number + 1 :]
        if one[1] == other[1] and one[2] < other[3] and other[2] < one[3]
    )


def _extent(value: object) -> tuple[str, int, int] | None:
    """In which memory an array lies, its first byte and the one behind its last."""
    interface = getattr(value, "__cuda_array_interface__", None) if not isinstance(value, np.ndarray) else None
    space = "cuda"
    if interface is None:
        if isinstance(value, _Number) or not is_array(value):
            return None
        value = np.asarray(value)
        interface, space = value.__array_interface__, "host"
    shape = interface["shape"]
    if 0 in shape:
        return None
    size = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides") or tuple(size * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
    moves = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    first = interface["data"][0]
    return space, first + sum(m for m in moves if m < 0), first + sum(m for m in moves if m > 0) + size


def _device(values: Sequence[object], asked: str | None) -> Device:
    default = default_device()
    return find_device(asked or device_of(list(values)) or ("auto" if default == "cpu" else default))


def parallel_gpu(n: int | tuple[int, ...], block: int = 256, device: str | None = None) -> Region:
    """An inline region: `for i in tw.parallel_gpu(n, 256):`, or as a decorator of a function of `i`, which runs at once.

    The body runs once for each number below `n`, in blocks of `block` threads; with a tuple, for each point (`for i, j in …`).
    Arrays and numbers of the surrounding code are used as they are; arrays are written in place.
    """
    extents = n if isinstance(n, tuple) else (n,)
    what = f"tw.parallel_gpu({n}, {block})"
    for extent in extents:
        _check_count(what, extent)
    if not 1 <= len(extents) <= 6:
        raise UserError.at("TW009", f"{what}: a region has one to six axes")
    return Region(what, 0, tuple(int(e) for e in extents), 1, _check_block(what, block), device, proven=False)


def prange(start: int, stop: int | None = None, step: int = 1, *, block: int = 256, device: str | None = None) -> Region:
    """`for i in tw.prange(n):` is `for i in range(n):` with all iterations at the same time, if they are independent.

    That is proven before anything runs; otherwise the loop is an error that names the two accesses that may meet.
    """
    first, last = (0, start) if stop is None else (start, stop)
    what = f"tw.prange({first}, {last}, {step})" if stop is not None else f"tw.prange({last})"
    for number in (first, last, step):
        if isinstance(number, bool) or not hasattr(number, "__index__"):
            raise UserError.at("TW009", f"{what}: {number!r} is not an integer")
    if step == 0:
        raise UserError.at("TW009", f"{what}: the step is 0")
    return Region(what, int(first), (len(range(first, last, step)),), int(step), _check_block(what, block), device, proven=True)


def _check_count(what: str, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise UserError.at("TW009", f"{what}: {n!r} is not a number of iterations")


def _check_block(what: str, block: object) -> int:
    if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= 1024:
        raise UserError.at("TW009", f"{what}: the block is {block!r}", help="give a number of threads from 1 to 1024")
    return block


__all__ = ["Region", "parallel_gpu", "prange"]
