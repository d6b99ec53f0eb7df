"""One kernel on devices, compared with the reference.

Devices are `cpu`, and `loop`, `tile` and `thread` for the stages of the emulator. A trial ends as

    ok          every device gives what the reference gives
    refused     Tilewright refuses the kernel, with a code (a `UserError` or `TargetLimit`)
    undecided   its way depends on how a device may round, or it is too long for the reference
    failed      a difference, a compiler bug, an unexpected exception, memory beside an array written, an input changed

Crashes and hangs end the process; `batches` knows which kernel it was.
"""

from __future__ import annotations

import linecache
import random
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tilewright as tw

from .arithmetic import KINDS, Undecided
from .memory import Arena, Memory
from .model import Input, Kernel
from .reference import Cells, TooLong, difference, evaluate
from .source import kernel_text

STAGES = ("loop", "tile", "thread")
MEMORY = Memory()
FAULTS = ("TW013", "TW050")
"""Codes of accesses outside arrays, races and reads of what nobody wrote, which no kernel here makes."""


@dataclass
class Outcome:
    kind: str
    device: str = ""
    what: str = ""
    """The class of a failure, or the code of a refusal."""
    detail: str = ""

    @property
    def label(self) -> str:
        return self.kind if self.kind in ("ok", "undecided") else f"{self.kind} {self.what}"


def compiled(kernel: Kernel) -> Any:
    """The decorated function."""
    text = kernel_text(kernel)
    path = f"<random kernel {kernel.seed}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    names: dict[str, Any] = {"tw": tw}
    exec(compile(text, path, "exec"), names)
    return names["kernel"]


# -- inputs ----------------------------------------------------------------------------------------------------------


def fill(array: np.ndarray, given: Input, kernel: Kernel) -> None:
    """Values for an input; what the layout makes of them is what the kernel is given."""
    rng = np.random.default_rng([kernel.seed, zlib.crc32(given.name.encode())])
    kind, shape = KINDS[given.dtype], array.shape
    if given.values == "index":
        array[...] = rng.integers(0, given.below.value(kernel.extents), shape).astype(kind.numpy)
    elif given.values == "unique":
        array[...] = rng.permutation(given.below.value(kernel.extents))[: array.size].reshape(shape).astype(kind.numpy)
    elif kind.kind == "b":
        array[...] = rng.integers(0, 2, shape).astype(np.bool_)
    elif kind.kind in "iu":
        low, high = (kind.low, kind.high) if given.style != "small" else (max(kind.low, -9), 9)
        array[...] = rng.integers(low, high, shape, kind.numpy, endpoint=True)
    elif given.style == "small":
        array[...] = (rng.integers(-8, 9, shape) / 4).astype(kind.numpy)
    else:
        values = rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 5)
        if given.style == "special":
            special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 6e-5, -1e30, 448.0])
            values = np.where(rng.random(shape) < 0.25, special[rng.integers(0, len(special), shape)], values)
        array[...] = values.astype(kind.numpy)


@dataclass
class Arguments:
    """What a call is given, and where it lies."""

    arrays: dict[str, np.ndarray]
    arenas: dict[str, Arena]
    outs: list[np.ndarray]
    out_arenas: list[Arena]


def arguments(kernel: Kernel, results: Mapping[str, Cells] | None = None) -> Arguments:
    """Inputs in their layouts; with the expected results also arrays for `out=`."""
    MEMORY.reset()
    rng = random.Random(kernel.seed)
    arrays, arenas = {}, {}
    for given in kernel.inputs:
        arena = MEMORY.take()
        shape = [s.value(kernel.extents) for s in given.shape]
        array = arena.place(shape, np.dtype(KINDS[given.dtype].numpy), given.layout, rng)
        fill(array, given, kernel)
        arrays[given.name], arenas[given.name] = array, arena
    outs, out_arenas = [], []
    if kernel.out and results is not None:
        how, _, name = kernel.out.partition(":")
        for result in kernel.results:
            cells = results[result]
            dtype = np.dtype(KINDS[cells.dtype].numpy)
            if how == "alias":
                outs.append(arrays[name])
            elif how == "shifted":
                outs.append(_shifted(arrays[name], arenas[name]))
            else:
                arena = MEMORY.take()
                outs.append(arena.place(cells.shape, dtype, how, rng))
                out_arenas.append(arena)
    return Arguments(arrays, arenas, outs, out_arenas)


def _shifted(array: np.ndarray, arena: Arena) -> np.ndarray:
    """An array of the same shape that overlaps: one element further on, or back."""
    base, item = arena.bytes.__array_interface__["data"][0], array.dtype.itemsize
    offset = array.__array_interface__["data"][0] - base
    reach = [(e - 1) * s for e, s in zip(array.shape, array.strides, strict=True)]
    low, high = offset + sum(min(0, r) for r in reach), offset + sum(max(0, r) for r in reach) + item
    move = -item if low >= item else item if high + item <= arena.size else 0
    return np.ndarray(array.shape, array.dtype, buffer=arena.bytes, offset=offset + move, strides=array.strides)


# -- runs ------------------------------------------------------------------------------------------------------------


def expected(kernel: Kernel) -> dict[str, Cells]:
    given = arguments(kernel)
    return evaluate(kernel, {n: np.array(a) for n, a in given.arrays.items()})


def call(kernel: Kernel, function: Any, given: Arguments, device: str) -> dict[str, np.ndarray]:
    """The results by name."""
    numbers = [KINDS[n.dtype].numpy(n.value) if n.dtype != "bool" else bool(n.value) for n in kernel.numbers]
    numbers += [kernel.extents[dim] for dim in kernel.given]
    values = [*given.arrays.values(), *numbers]
    if kernel.explicit:
        function[kernel.grid, kernel.block](*values, device=device)
        return {i.name: given.arrays[i.name] for i in kernel.inputs if i.written}
    more: dict[str, Any] = {}
    if given.outs:
        more["out"] = given.outs[0] if len(given.outs) == 1 else tuple(given.outs)
    found = function(*values, device=device, **more)
    listed = () if found is None else found if isinstance(found, tuple) else (found,)
    written = {i.name: given.arrays[i.name] for i in kernel.inputs if i.written}
    return {name: np.asarray(value) for name, value in zip(kernel.results, listed, strict=True)} | written


def compare_call(kernel: Kernel, function: Any, want: Mapping[str, Cells], device: str) -> str:
    """What is wrong with a call; empty where nothing is."""
    given = arguments(kernel, want)
    for arena in (*given.arenas.values(), *given.out_arenas):
        arena.snapshot()
    found = call(kernel, function, given, device)
    for name, cells in want.items():
        wrong = difference(found[name], cells)
        if wrong:
            return f"difference: {name}: {wrong}"
    for index, arena in enumerate(given.out_arenas):
        if arena.spoilt(given.outs[index]):
            return f"write beside out= ({kernel.results[index]})"
    aliased = kernel.out.partition(":")[2]
    for given_input in kernel.inputs:
        if given_input.name == aliased:
            continue
        view = given.arrays[given_input.name] if given_input.written else None
        if given.arenas[given_input.name].spoilt(view):
            return f"an input was changed: {given_input.name}"
    return ""


def device_name(device: str) -> str:
    return {"loop": "emulator:loop", "tile": "emulator:tile", "thread": "emulator"}.get(device, device)


def trial(kernel: Kernel, devices: Sequence[str] = ("cpu",)) -> Outcome:
    """The kernel on every device, up to the first that fails."""
    try:
        want = expected(kernel)
    except (Undecided, TooLong) as reason:
        return Outcome("undecided", what=type(reason).__name__)
    function = compiled(kernel)
    for device in devices:
        if kernel.explicit and device in ("loop", "tile"):
            continue
        plain = kernel if device == "cpu" else replace(kernel, out="" if kernel.out.startswith("shifted") else kernel.out)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what is slow is no fault here
                wrong = compare_call(plain, function, want, device_name(device))
        except (tw.UserError, tw.TargetLimit) as refusal:
            # A fault that the emulator or a check finds in a legal kernel is no refusal.
            kind = "failed" if refusal.code in FAULTS else "refused"
            return Outcome(kind, device, refusal.code, str(refusal))
        except tw.TilewrightError as bug:
            return Outcome("failed", device, f"{type(bug).__name__} {bug.code}", str(bug))
        except Exception as error:
            return Outcome("failed", device, type(error).__name__, repr(error))
        if wrong:
            return Outcome("failed", device, wrong.partition(":")[0], wrong)
    return Outcome("ok")
