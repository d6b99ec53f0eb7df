"""Loops of ordinary Python code on a GPU: `for i in tw.parallel_gpu(n, 256):` and `for i in tw.prange(n):`.

The loop's body becomes an explicit kernel with one thread for each number; arrays and numbers around it are its arguments, and arrays
are written in place. Python itself runs the body no times. `parallel_gpu` takes the programmer's word that iterations may run at the
same time; `prange` proves it (`analysis.dependence`) and refuses the loop with the two accesses that stand against it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.analysis.dependence import find_dependence, thread_number
from tilewright.base.errors import UserError
from tilewright.execute.devices import array_device
from tilewright.execute.simt.arguments import read_leaves, split_values
from tilewright.execute.simt.host import host_leaves
from tilewright.execute.simt.kernels import GpuKernel
from tilewright.frontend.simt.build import LaunchShape
from tilewright.frontend.simt.kernels import SimtArg, build_kernel
from tilewright.frontend.simt.regions import EXTENT, START, THREAD, RegionLoop, loop_of_frame, loop_of_function, outline
from tilewright.frontend.simt.source import read_source
from tilewright.frontend.words import gpu_thread_id
from tilewright.ir.types import INDEX
from tilewright.runtime.exchange.libraries import foreign_span, is_array, is_foreign
from tilewright.runtime.memory.device_array import DeviceArray

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

    def _run(self, key: object, loop: RegionLoop, names: Mapping[str, object]) -> None:
        if len(loop.targets) != len(self.extents):
            raise UserError.at(
                "TW016", f"the loop counts with {len(loop.targets)} name(s) over {len(self.extents)} extent(s)", loop.head,
                f"write: for {', '.join('ijklmn'[: len(self.extents)])} in {self.what}:",
            )  # fmt: skip
        captured = _captured(loop, names)
        region = _made.get(key)
        if region is None or not region.fits(captured):
            region = _Region(loop, captured, names, self.step)
            if len(_made) >= _MOST:
                _made.clear()
            _made[key] = region
        region.run(self, captured)


class _Region:
    """A loop made a kernel, for surroundings whose functions, constants and equal arrays are these."""

    def __init__(self, loop: RegionLoop, captured: Mapping[str, object], names: Mapping[str, object], step: int) -> None:
        self.loop = loop
        self._same = _equal_arrays(captured)
        self._kept = {name: value for name, value in captured.items() if not _is_argument(value)}
        self._proven: dict[object, frozenset[str]] = {}
        """What was shown to be parallel, with the arrays that are written."""
        self.arguments = tuple(name for name, value in captured.items() if _is_argument(value) and name not in self._same)
        counting = (START,) if len(loop.targets) == 1 else tuple(f"{EXTENT}{axis}" for axis in range(1, len(loop.targets)))
        source = outline(loop, (*counting, *self.arguments), self._same, {**names, THREAD: gpu_thread_id}, step)

        def region() -> None:
            """Stands for the loop, which is no function."""

        region.__name__ = region.__qualname__ = loop.name
        self.kernel: GpuKernel[...] = GpuKernel(region)
        self.kernel.__dict__["source"] = source

    def fits(self, captured: Mapping[str, object]) -> bool:
        kept = {name: value for name, value in captured.items() if not _is_argument(value)}
        alike = kept.keys() == self._kept.keys() and all(value is self._kept[name] for name, value in kept.items())
        return alike and _equal_arrays(captured) == self._same

    def run(self, region: Region, captured: Mapping[str, object]) -> None:
        counted = [region.first] if len(region.extents) == 1 else list(region.extents[1:])
        values = [*counted, *(captured[name] for name in self.arguments)]
        if region.proven:
            self._check(region, values)
        options = {} if region.device is None else {"device": region.device}
        self.kernel.over(prod(region.extents), region.block)(*values, **options)

    def _check(self, region: Region, values: list[object]) -> None:
        """Refuse what is not proven to be parallel."""
        args = self._types(values, region.device)
        negative = any(isinstance(v, int) and v < 0 for v in values)
        key = (region.block, tuple(args), negative)
        written = self._proven.get(key)
        if written is None:
            written = self._proven[key] = self._prove(args, region.block, negative)
        for one, other in _overlapping(self.arguments, values[-len(self.arguments) :]) if self.arguments else ():
            if one in written or other in written:
                raise UserError.at(
                    "TW012", f"the loop is not parallel as far as can be seen: '{one}' and '{other}' share memory, and one of them is written",
                    self.loop.head, "copy one of them, or use tw.parallel_gpu if no iteration touches what another one writes",
                )  # fmt: skip

    def _types(self, values: list[object], asked: str | None) -> list[SimtArg]:
        device = self.kernel.choose_device(values, asked)
        gpu = array_device(device)
        if gpu is None:
            return host_leaves(self.kernel.parameters, values)[1]
        moved = [gpu.wrap(v) if is_foreign(v) else v for v in values]
        return read_leaves(self.kernel.parameters, split_values(self.kernel.parameters, moved), gpu=device.target.is_gpu)[1]

    def _prove(self, args: Sequence[SimtArg], block: int, negative: bool) -> frozenset[str]:
        """The arrays that are written, if no iteration touches what another one writes. Nothing is concluded from negative numbers."""
        built = build_kernel(self.kernel.source, self.kernel.parameters, args, LaunchShape((block, 1, 1), 1))
        kernel = built.kernel
        number = thread_number(kernel)
        symbols = [] if negative else [p for p in kernel.params if p.type == INDEX]
        found = find_dependence(kernel, number, symbols) if number is not None else None
        if found is None:
            return built.written
        write, other = found.write.span, found.other.span
        verb = "reads" if found.other.opcode == "load" else "writes"
        where = f"line {write.line} writes it, line {other.line} {verb} it in another iteration"
        raise UserError.at(
            "TW012", f"the loop is not parallel as far as can be seen: iterations may touch the same element of '{found.array}': {where}",
            other, "use a plain loop, or tw.parallel_gpu if you know that no iteration touches what another one writes",
        )  # fmt: skip


def _captured(loop: RegionLoop, names: Mapping[str, object]) -> dict[str, object]:
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
    arrays = [(name, value) for name, value in zip(names, values, strict=True) if not isinstance(value, _Number) and is_array(value)]
    pairs = [(one, other) for number, one in enumerate(arrays) for other in arrays[number + 1 :]]
    return tuple((one[0], other[0]) for one, other in pairs if _meet(one[1], other[1]))


def _meet(one: object, other: object) -> bool:
    """Whether two arrays lie in the same memory in part."""
    if isinstance(one, DeviceArray) and isinstance(other, DeviceArray):
        return one.overlaps(other)
    first, second = _extent(one), _extent(other)
    if first is None or second is None:
        return False
    return first[0] == second[0] and first[1] < second[2] and second[1] < first[2]


def _extent(value: object) -> tuple[str, int, int] | None:
    """In which memory an array lies, its first byte and the one behind its last."""
    span, space = (None, "host") if isinstance(value, np.ndarray) else (foreign_span(value), "device")
    if span is None:
        interface, space = np.asarray(value).__array_interface__, "host"
        span = interface["data"][0], interface["shape"], interface.get("strides"), np.dtype(interface["typestr"]).itemsize
    first, shape, steps, size = span
    if 0 in shape:
        return None
    strides = steps or tuple(size * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape)))
    moves = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    return space, first + sum(m for m in moves if m < 0), first + sum(m for m in moves if m > 0) + size


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
