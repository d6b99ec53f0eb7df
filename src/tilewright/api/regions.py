"""Loops of ordinary Python code on a GPU: `for i in tw.parallel_gpu(n, 256):` and `for i in tw.prange(n):`.

The loop's body becomes an explicit kernel with one thread for each number; arrays and numbers around it are its arguments, and arrays
are written in place. Python itself runs the body no times. `parallel_gpu` takes the programmer's word that iterations may run at the
same time; `prange` proves it (`analysis.dependence`) and refuses the loop with the two accesses that stand against it.

A name of the surroundings that iterations only combine something into (`total += x[i]`) is a reduction: each thread leaves a part in an
array, the parts are combined as `gpu_reduce` does it, and the name holds the result after the loop (`api.region_reductions`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tilewright.analysis.dependence import find_dependence, thread_number
from tilewright.api.region_reductions import (
    LoopAccumulator,
    check_functions,
    choose_accumulators,
    combine,
    is_negative,
    old_values,
    stand_ins,
)
from tilewright.api.surroundings import FrameSurroundings, FunctionSurroundings, Surroundings
from tilewright.base.errors import UserError
from tilewright.execute.devices import array_device, kind_of
from tilewright.execute.places import Number
from tilewright.execute.simt.arguments import read_leaves, split_values
from tilewright.execute.simt.host import host_leaves
from tilewright.execute.simt.kernels import GpuKernel
from tilewright.frontend.simt.build import LaunchShape
from tilewright.frontend.simt.kernels import Parameter, SimtArg, build_kernel, read_parameters
from tilewright.frontend.simt.regions import (
    BLOCK,
    CHUNK,
    COUNT,
    EXTENT,
    FIRST,
    PARTS,
    START,
    THREAD,
    RegionLoop,
    loop_of_frame,
    loop_of_function,
    outline,
    outline_parts,
)
from tilewright.frontend.simt.source import FunctionSource, read_source
from tilewright.frontend.words import gpu_thread_id
from tilewright.ir.types import INDEX
from tilewright.runtime.core import streams
from tilewright.runtime.exchange.libraries import foreign_span, is_array, is_foreign
from tilewright.runtime.memory.device_array import DeviceArray

_Number = bool | int | float | np.generic
_MOST = 256
"""Loops whose kernels are remembered."""
_MOST_BLOCKS = 1024
"""Blocks of a loop with reductions: each thread has a part."""
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
            self._run(key, loop, FrameSurroundings(frame))
        finally:
            del frame
        return iter(())

    def __call__(self, function: Callable[..., object]) -> None:
        """As a decorator: run the function's body for every number, now."""
        source = read_source(function)
        self._run((function.__code__, self.what), loop_of_function(source), FunctionSurroundings(function, source.names))

    def __repr__(self) -> str:
        return self.what

    def _run(self, key: object, loop: RegionLoop, around: Surroundings) -> None:
        if len(loop.targets) != len(self.extents):
            raise UserError.at(
                "TW016", f"the loop counts with {len(loop.targets)} name(s) over {len(self.extents)} extent(s)", loop.head,
                f"write: for {', '.join('ijklmn'[: len(self.extents)])} in {self.what}:",
            )  # fmt: skip
        captured = _captured(loop, around.names)
        old = old_values(loop, around)
        region = _made.get(key)
        if region is None or not region.fits(captured):
            region = _Region(loop, captured, around.names, self.step)
            if len(_made) >= _MOST:
                _made.clear()
            _made[key] = region
        if not old:
            region.run(self, captured)
        elif values := region.reduce(self, captured, old):
            around.assign(values)


class _Region:
    """A loop made a kernel, for surroundings whose functions, constants and equal arrays are these."""

    def __init__(self, loop: RegionLoop, captured: Mapping[str, object], names: Mapping[str, object], step: int) -> None:
        self.loop = loop
        self._same = _equal_arrays(captured)
        self._kept = {name: value for name, value in captured.items() if not _is_argument(value)}
        self._proven: dict[object, frozenset[str]] = {}
        """What was shown to be parallel, with the arrays that are written."""
        self._carried: dict[object, tuple[LoopAccumulator, ...]] = {}
        """How reductions are carried."""
        self.arguments = tuple(name for name, value in captured.items() if _is_argument(value) and name not in self._same)
        check_functions(loop, names)
        counting = (START,) if len(loop.targets) == 1 else tuple(f"{EXTENT}{axis}" for axis in range(1, len(loop.targets)))
        self._names, self._step = {**names, THREAD: gpu_thread_id}, step
        self._parameters = (*counting, *self.arguments)
        firsts = tuple(FIRST + r.name for r in loop.reductions)
        self._one = outline(loop, (*self._parameters, *firsts), self._same, self._names, step)
        """One thread for each number: what is run if there are no reductions, and what is looked at."""
        self._one_parameters = read_parameters(self._one)
        self.kernel = _kernel(self._one)
        if firsts:
            parts = tuple(PARTS + r.name for r in loop.reductions)
            self.kernel = _kernel(outline_parts(loop, (COUNT, CHUNK, BLOCK, *self._parameters, *firsts, *parts), self._same, self._names, step))

    def fits(self, captured: Mapping[str, object]) -> bool:
        kept = {name: value for name, value in captured.items() if not _is_argument(value)}
        alike = kept.keys() == self._kept.keys() and all(value is self._kept[name] for name, value in kept.items())
        return alike and _equal_arrays(captured) == self._same

    def run(self, region: Region, captured: Mapping[str, object]) -> None:
        values = self._values(region, captured)
        if region.proven:
            self._check(region, values, ())
        options = {} if region.device is None else {"device": region.device}
        self.kernel.over(prod(region.extents), region.block)(*values, **options)

    def reduce(self, region: Region, captured: Mapping[str, object], old: Mapping[str, Number | np.generic]) -> dict[str, object]:
        """Run a loop with reductions; gives what their names hold after it."""
        values, count = self._values(region, captured), prod(region.extents)
        accumulators = self._accumulators(region, values, old)
        firsts = [a.first for a in accumulators]
        if region.proven:
            self._check(region, values, firsts)
        if not count:
            return {}
        # A thread of `parallel_gpu` is one iteration: its body may ask for the thread's number.
        chunk = region.block * (-(-count // (region.block * _MOST_BLOCKS)) if region.proven else 1)
        threads = min(count, -(-count // chunk) * region.block)
        device = self.kernel.choose_device(values, region.device)
        streams.refuse_in_capture(f"the value that '{accumulators[0].name}' has after a loop")
        place = kind_of(device).place(device, values)
        parts = [place.new((threads,), a.dtype) for a in accumulators]
        self.kernel.over(threads, region.block)(count, chunk, region.block, *values, *firsts, *parts, device=device.id)
        return combine(accumulators, place, parts, old)

    def _values(self, region: Region, captured: Mapping[str, object]) -> list[object]:
        counted = [region.first] if len(region.extents) == 1 else list(region.extents[1:])
        return [*counted, *(captured[name] for name in self.arguments)]

    def _accumulators(self, region: Region, values: list[object], old: Mapping[str, Number | np.generic]) -> tuple[LoopAccumulator, ...]:
        """How reductions are carried for values of these types."""
        typed = {FIRST + name: value for name, value in old.items() if isinstance(value, np.generic)}
        parameters = [p for p in self._one_parameters if p.name in typed or p.name in self._parameters]
        args = self._types(parameters, [*values, *typed.values()], region.device)
        key = tuple(args), tuple((type(v), is_negative(v)) for v in old.values()), region.block
        carried = self._carried.get(key)
        if carried is None:
            source = outline(self.loop, (*self._parameters, *typed), self._same, {**self._names, **stand_ins(old)}, self._step)
            built = build_kernel(source, parameters, args, LaunchShape((region.block, 1, 1), 1))
            if built.cooperative:
                name, place = self.loop.reductions[0].name, self.loop.reductions[0].place
                raise UserError.at(
                    "TW012", f"'{name}' is carried from one iteration to the next, in a loop whose threads work together through shared memory or barriers",
                    self.loop.place.span(place), "combine it into an array with an atomic, or keep a value for each iteration in an array",
                )  # fmt: skip
            carried = self._carried[key] = choose_accumulators(self.loop, built.variables, old)
        for accumulator in carried:
            accumulator.check(old[accumulator.name])
        return carried

    def _check(self, region: Region, values: list[object], firsts: Sequence[np.generic]) -> None:
        """Refuse what is not proven to be parallel."""
        args = self._types(self._one_parameters, [*values, *firsts], region.device)
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

    def _types(self, parameters: Sequence[Parameter], values: list[object], asked: str | None) -> list[SimtArg]:
        device = self.kernel.choose_device(values, asked)
        gpu = array_device(device)
        if gpu is None:
            return host_leaves(parameters, values)[1]
        moved = [gpu.wrap(v) if is_foreign(v) else v for v in values]
        return read_leaves(parameters, split_values(parameters, moved), gpu=device.target.is_gpu)[1]

    def _prove(self, args: Sequence[SimtArg], block: int, negative: bool) -> frozenset[str]:
        """The arrays that are written, if no iteration touches what another one writes. Nothing is concluded from negative numbers."""
        built = build_kernel(self._one, self._one_parameters, args, LaunchShape((block, 1, 1), 1))
        kernel = built.kernel
        number = thread_number(kernel)
        symbols = [] if negative else [p for p in kernel.params if p.type == INDEX and not p.name.startswith(FIRST)]
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


def _kernel(source: FunctionSource) -> GpuKernel[...]:
    def region() -> None:
        """Stands for the loop, which is no function."""

    region.__name__ = region.__qualname__ = source.name
    kernel: GpuKernel[...] = GpuKernel(region)
    kernel.__dict__["source"] = source
    return kernel


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
    Arrays and numbers of the surrounding code are used as they are; arrays are written in place. A name outside that iterations only combine
    something into (`total += x[i]`, `max`, `and`, …) holds the result after the loop.
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

    That is proven before anything runs; otherwise the loop is an error that names the two accesses that may meet. A name outside
    that iterations only combine something into (`total += x[i]`, `max`, `and`, …) holds the result after the loop.
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
