"""Loops in order, arrays in place and numbers that shape results.

In: whether the run is quick. Out: cases for `harness.measure`.

    heat_swap, heat_slices   a 5-point stencil in a time loop: two arrays that change places, and slices of one; GPU: against CUDA graphs of PyTorch's steps
    append                   one row into a cache of 32 MB, where the device says; GPU, on the device
    shaped_by_number         a call whose result a number shapes, against the same with an array; host time
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Variant

STEPS = 1000
SIDES = (256, 1024, 4096, 8192)
_CAPTURED = 100
"""Steps of a captured graph of PyTorch: even, so that it ends in the array it begins with."""
CACHE_ROWS, CACHE_COLS = 8192, 1024
APPEND_MS = 2e-3
"""What an append may take on the device."""
_CALLS = 200


@tw.kernel
def heat_swap(plate: tw.Array, steps: int) -> tw.Array:
    rows, cols = plate.shape
    now = plate * 1.0
    after = plate * 1.0
    for _ in range(steps):
        for i, j in tw.grid(range(1, rows - 1), range(1, cols - 1)):
            after[i, j] = (now[i - 1, j] + now[i + 1, j] + now[i, j - 1] + now[i, j + 1]) * 0.25
        now, after = after, now
    return now


@tw.kernel
def heat_slices(plate: tw.Array, steps: int) -> tw.Array:
    now = plate * 1.0
    for _ in range(steps):
        now[1:-1, 1:-1] = (now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:]) * 0.25
    return now


@tw.kernel
def append(cache: tw.InOut, row: tw.Array, position: tw.Array) -> None:
    for j in tw.grid(len(row)):
        cache[position[0], j] = row[j]


@tw.kernel
def outer_number(x: tw.Array, n: int) -> tw.Array:
    (m,) = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = x[j] * i
    return out


@tw.kernel
def outer_array(x: tw.Array, like: tw.Array) -> tw.Array:
    (m,) = x.shape
    (n,) = like.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = x[j] * i
    return out


def _step(now: Any, after: Any) -> None:
    """A step as one writes it with NumPy or PyTorch."""
    after[1:-1, 1:-1] = (now[:-2, 1:-1] + now[2:, 1:-1] + now[1:-1, :-2] + now[1:-1, 2:]) * 0.25


def _near(found: Any, wanted: Any) -> str:
    worst = float(abs(found - wanted).max())
    return "" if worst < 1e-4 else f"error {worst:.2g}"


# -- CPU --------------------------------------------------------------------------------------------------------------


def cpu_cases(quick: bool) -> list[Case]:
    sides, steps = ((256, 1024), 20) if quick else ((256, 1024, 4096), 100)
    heats = [_cpu_heat(name, kernel, side, steps) for side in sides for name, kernel in (("heat_swap", heat_swap), ("heat_slices", heat_slices))]
    return [*heats, _cpu_numbers()]


def _cpu_heat(name: str, kernel: Callable[..., Any], side: int, steps: int) -> Case:
    def prepare() -> Prepared:
        plate = np.random.default_rng(1).random((side, side), np.float32)

        def numpy_steps(start: np.ndarray) -> np.ndarray:
            now, after = start.copy(), start.copy()
            for _ in range(steps):
                _step(now, after)
                now, after = after, now
            return now

        wanted = numpy_steps(plate.astype(np.float64))
        variants = [Variant(OURS, lambda _: kernel(plate, steps), returns=True), Variant("numpy", lambda _: numpy_steps(plate), returns=True)]
        if importlib.util.find_spec("numba") is not None:
            compiled = _numba_steps()
            variants.append(Variant("numba", lambda _: compiled(plate, steps), returns=True))
        return Prepared(variants, lambda: None, lambda slot, found, variant: _near(np.asarray(found), wanted))

    return Case(name, (side, side, steps), "f32", 8 * side * side * steps, prepare, Bar(1.0))


def _numba_steps() -> Callable[..., Any]:
    numba: Any = importlib.import_module("numba")

    @numba.njit(cache=False, parallel=True, fastmath=False)  # type: ignore[untyped-decorator]
    def run(plate: Any, steps: int) -> Any:
        now, after = plate.copy(), plate.copy()
        for _ in range(steps):
            for i in numba.prange(1, plate.shape[0] - 1):
                for j in range(1, plate.shape[1] - 1):
                    after[i, j] = (now[i - 1, j] + now[i + 1, j] + now[i, j - 1] + now[i, j + 1]) * np.float32(0.25)
            now, after = after, now
        return now

    return run  # type: ignore[no-any-return]


def _numbers(x: Any, like: Any, wanted: Any, as_numpy: Callable[[Any], np.ndarray]) -> Prepared:
    n = len(like)
    variants = [Variant(OURS, lambda _: outer_number(x, n), returns=True), Variant("an array", lambda _: outer_array(x, like), returns=True)]
    return Prepared(variants, lambda: None, lambda slot, found, variant: _near(as_numpy(found), wanted), batch=_CALLS)


def _cpu_numbers() -> Case:
    def prepare() -> Prepared:
        x = np.arange(16, dtype=np.float32)
        return _numbers(x, np.empty(8, np.float32), np.arange(8)[:, None] * x, np.asarray)

    return Case("shaped_by_number", (8, 16), "f32", 0, prepare, Bar(0.9))


# -- GPU --------------------------------------------------------------------------------------------------------------


def gpu_cases(quick: bool, compiled: bool) -> list[Case]:
    """`compiled`: torch.compile takes part."""
    heats = [
        _gpu_heat(name, kernel, side, STEPS if side < 4096 or not quick else 200, compiled)
        for side in SIDES for name, kernel in (("heat_swap", heat_swap), ("heat_slices", heat_slices))
    ]  # fmt: skip
    return [*heats, append_case()]


def _gpu_heat(name: str, kernel: Callable[..., Any], side: int, steps: int, compiled: bool) -> Case:
    def prepare() -> Prepared:
        torch: Any = importlib.import_module("torch")
        plate = torch.rand((side, side), device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))

        def plain(start: Any) -> Any:
            now, after = start.clone(), start.clone()
            for _ in range(steps):
                _step(now, after)
                now, after = after, now
            return now

        wanted = plain(plate.double()).float()
        variants = [Variant(OURS, lambda _: kernel(plate, steps), returns=True)]
        variants.append(Variant("torch, graph", _captured(torch, _step, plate, steps), returns=True))
        if compiled:
            variants.append(Variant("torch.compile, graph", _captured(torch, _compiled_step(), plate, steps), returns=True))
        return Prepared(variants, lambda: None, lambda slot, found, variant: _near(found, wanted))

    return Case(name, (side, side, steps), "f32", 8 * side * side * steps, prepare, Bar(1.5))


@functools.cache
def _compiled_step() -> Callable[[Any, Any], None]:
    return importlib.import_module("torch").compile(_step, dynamic=False)  # type: ignore[no-any-return]


def _captured(torch: Any, step: Callable[[Any, Any], None], plate: Any, steps: int) -> Callable[[int], Any]:
    """Steps of PyTorch as a CUDA graph, replayed until all are done."""
    now, after = plate.clone(), plate.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(now, after)
            step(after, now)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CAPTURED // 2):
            step(now, after)
            step(after, now)

    def run(_: int) -> Any:
        now.copy_(plate)
        after.copy_(plate)
        for _ in range(steps // _CAPTURED):
            graph.replay()
        return now

    return run


def append_case() -> Case:
    def prepare() -> Prepared:
        torch: Any = importlib.import_module("torch")
        cache = torch.zeros((CACHE_ROWS, CACHE_COLS), device="cuda")
        row = torch.arange(1.0, CACHE_COLS + 1, device="cuda")
        place = CACHE_ROWS // 2 + 1
        position = torch.tensor([place], device="cuda")

        def poison() -> None:
            cache.zero_()
            cache[place] = float("nan")

        def verify(slot: int, returned: object, variant: Variant) -> str:
            right = torch.equal(cache[place], row) and int(torch.count_nonzero(cache)) == CACHE_COLS
            return "" if right else "the cache differs"

        variants = [
            Variant(OURS, lambda _: append(cache, row, position)),
            Variant("torch index_copy_", lambda _: cache.index_copy_(0, position, row[None])),
        ]
        return Prepared(variants, poison, verify, batch=20)

    return Case("append", (CACHE_ROWS, CACHE_COLS), "f32", 8 * CACHE_COLS, prepare)


def gpu_numbers() -> Case:
    """Host time of calls on a GPU."""

    def prepare() -> Prepared:
        torch: Any = importlib.import_module("torch")
        x, like = torch.arange(16.0, device="cuda"), torch.empty(8, device="cuda")
        return _numbers(x, like, np.arange(8)[:, None] * np.arange(16.0), lambda found: found.cpu().numpy())

    return Case("shaped_by_number", (8, 16), "f32", 0, prepare, Bar(0.9))
