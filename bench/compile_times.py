"""Cold compiles: each row is compiled in fresh processes with empty caches, and held against a bar in milliseconds.

In: a setting. Out: one `Record` per row. `python -m bench.compile_times ROW` compiles one row in this process and prints its milliseconds, on the wall and
of the processor, without the import. `python -m bench.compile_times ROW profile` prints where they went.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import OURS, Record, Setting, summarise

ROOT = Path(__file__).resolve().parent.parent
WINDOW_MS = 1500.0
"""The bar of convolutions and pools."""
BLOCK = "examples/zyn/transformer_block.zyn"
Kernel = Callable[..., Any]
Work = Callable[[], object]


def _zeros(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(shape, np.float32) for shape in shapes)


def _elementwise() -> tuple[Kernel, tuple[np.ndarray, ...]]:
    from bench import kernels

    return kernels.multiply_add, _zeros((16,), (16,))


def _convolution(name: str, x: tuple[int, ...], w: tuple[int, ...], *args: Any) -> Callable[[], tuple[Kernel, tuple[np.ndarray, ...]]]:
    def make() -> tuple[Kernel, tuple[np.ndarray, ...]]:
        from bench.families import convolutions

        return getattr(convolutions, name)(*args), _zeros(x, w)

    return make


def _pool(name: str, x: tuple[int, ...], *args: Any) -> Callable[[], tuple[Kernel, tuple[np.ndarray, ...]]]:
    def make() -> tuple[Kernel, tuple[np.ndarray, ...]]:
        from bench.families import windows

        return getattr(windows, name)(*args), _zeros(x)

    return make


KERNELS: dict[str, Callable[[], tuple[Kernel, tuple[np.ndarray, ...]]]] = {
    "elementwise": _elementwise,
    "conv1d": _convolution("conv1d", (2, 16, 500), (24, 16, 5), 1, 2, 1),
    "conv1d_s2d2": _convolution("conv1d", (2, 16, 500), (24, 16, 11), 2, 5, 2),
    "conv2d": _convolution("conv2d", (2, 16, 20, 20), (24, 16, 3, 3), (1, 1), (1, 1), 1, False),
    "conv2d_nested": _convolution("conv2d", (2, 16, 30, 30), (24, 16, 5, 7), (2, 1), (2, 3), 1, True),
    "conv2d_11": _convolution("conv2d", (1, 3, 64, 64), (24, 3, 11, 11), (2, 2), (5, 5), 1, False),
    "conv2d_dilated": _convolution("conv2d", (2, 16, 30, 30), (24, 16, 3, 3), (1, 1), (2, 2), 2, False),
    "conv2d_last": _convolution("conv2d_last", (2, 20, 20, 16), (24, 3, 3, 16), (1, 1), (1, 1), 1),
    "conv3d": _convolution("conv3d", (1, 16, 8, 20, 20), (24, 16, 3, 3, 3), 1, 1),
    "conv3d_s2": _convolution("conv3d", (1, 3, 8, 20, 20), (24, 3, 3, 5, 5), 2, 1),
    "depthwise": _convolution("depthwise", (2, 32, 40, 40), (32, 3, 3), (1, 1)),
    "depthwise_11x7": _convolution("depthwise", (2, 32, 40, 40), (32, 11, 7), (5, 3)),
    "transposed1d": _convolution("transposed1d", (2, 16, 200), (16, 24, 5), 2, 1, 1, 0),
    "transposed1d_s4": _convolution("transposed1d", (2, 16, 200), (16, 24, 9), 4, 2, 1, 1),
    "transposed2d": _convolution("transposed2d", (2, 16, 20, 20), (16, 24, 4, 4), (2, 2), (1, 1), 1, False),
    "transposed2d_nested": _convolution("transposed2d", (2, 16, 20, 20), (16, 24, 3, 5), (2, 2), (1, 1), 1, True),
    "transposed2d_s3": _convolution("transposed2d", (2, 16, 20, 20), (16, 24, 5, 5), (3, 3), (1, 1), 1, False),
    "transposed2d_s4": _convolution("transposed2d", (2, 16, 20, 20), (16, 24, 6, 6), (4, 4), (1, 1), 1, False),
    "transposed3d": _convolution("transposed3d", (1, 16, 6, 10, 10), (16, 24, 3, 3, 3), 2, 1),
    "max1d": _pool("max1d", (2, 16, 1000), 5, 2, 2),
    "max2d": _pool("max2d", (2, 16, 40, 40), 3, 2, 1, False),
    "max2d_nested": _pool("max2d", (2, 16, 40, 40), 7, 1, 3, True),
    "max2d_11": _pool("max2d", (2, 16, 40, 40), 11, 1, 5, False),
    "mean2d": _pool("mean2d", (2, 16, 40, 40), 11, 1, 5),
    "max3d": _pool("pool3d", (1, 16, 12, 20, 20), 3, 2, 1, True),
    "mean3d_5": _pool("pool3d", (1, 16, 12, 20, 20), 5, 1, 2, False),
}
"""A kernel and its arguments."""


def _compiled(name: str, target: str) -> Work:
    kernel, arrays = KERNELS[name]()
    return (lambda: kernel(*arrays)) if target == "cpu" else (lambda: kernel.compile(*arrays, target="sm_90a"))  # type: ignore[attr-defined]


def _check_block() -> Work:
    """`tilewright check` of a transformer block, without the import."""
    from tilewright.cli.commands.check import check

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert check([str(ROOT / BLOCK)], "", False)

    return run


def _deep_nest() -> Work:
    """Eleven loops, one inside the other, around a statement."""
    import tilewright as tw

    indices = [f"i{level}" for level in range(11)]
    lines = ["let y = compute(x) {", "    @kernel custom"]
    lines += [f"{'    ' * (level + 1)}for {index} in 0..2:" for level, index in enumerate(indices)]
    lines += [f"{'    ' * 12}out[{', '.join(indices)}] = x[{', '.join(indices)}] * 2.0", "}", ""]
    module = tw.load("\n".join(lines))
    x = np.zeros((2,) * 11, np.float32)
    return lambda: module.run(x=x)


def bar_of(row: str) -> float:
    """A row's bar in milliseconds."""
    return {"elementwise-cpu": 100.0, "elementwise-ptx": 60.0, "check_block": 300.0, "deep_nest": 1100.0}.get(row, WINDOW_MS)


OTHERS: dict[str, Callable[[], Work]] = {"check_block": _check_block, "deep_nest": _deep_nest}
ROWS = (*OTHERS, *(f"{name}-{target}" for name in KERNELS for target in ("cpu", "ptx")))


def once(row: str) -> tuple[float, float]:
    """Milliseconds on the wall and of the processor, in this process."""
    work = _prepared(row)
    start, used = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - start) * 1e3, (time.process_time() - used) * 1e3


def _prepared(row: str) -> Work:
    name, _, target = row.partition("-")
    return OTHERS[row]() if row in OTHERS else _compiled(name, target)


def record(row: str, setting: Setting, rounds: int) -> Record:
    """The row's time in fresh processes."""
    result = Record(row, [], "f32", setting.device, commit=setting.commit, date=setting.date, bar_ms=bar_of(row))
    times: list[float] = []
    try:
        _child(row)  # modules are compiled to bytecode, and files are in memory, after the first
        for _ in range(rounds):
            times.append(_child(row))
    except subprocess.CalledProcessError as error:
        result.error = f"a fresh process failed: {str(error.stderr).strip()[-600:]}"
        return result
    summarise(result, {OURS: times}, 0, None)
    return result


def _child(row: str) -> float:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "bench.compile_times", row]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.split()[0])


def _profiled(row: str) -> None:
    import cProfile
    import pstats

    work, profile = _prepared(row), cProfile.Profile()
    profile.runcall(work)
    for order in ("cumtime", "tottime"):
        pstats.Stats(profile).sort_stats(order).print_stats(60)


if __name__ == "__main__":
    if sys.argv[2:] == ["profile"]:
        _profiled(sys.argv[1])
    else:
        print(*once(sys.argv[1]))
