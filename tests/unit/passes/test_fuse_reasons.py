"""Why an array stays in memory: each reason that fusion gives, with the loops and lines it names, and what a block would have to keep."""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from tilewright.passes.common.fusion_report import Refused


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def kept(kernel: tw.Kernel[..., object], *args: np.ndarray) -> dict[str, Refused]:
    return {r.array: r for r in kernel.stages(*args, target="sm_90a").fusion.refused}


def counted(reason: str, kernel: tw.Kernel[..., object]) -> str:
    """The reason with lines counted from the decorator."""
    first = inspect.getsourcelines(kernel.__wrapped__)[1]
    return re.sub(r"line (\d+)", lambda found: f"line {int(found[1]) - first}", reason)


@tw.kernel
def written_twice(x, y):
    (n,) = x.shape
    t = tw.empty((2 * n,), tw.f32)
    out = tw.empty((2 * n,), tw.f32)
    for i in tw.grid(n):
        t[i] = x[i]
    for i in tw.grid(n):
        t[n + i] = y[i]
    for i in tw.grid(2 * n):
        out[i] = t[i] + 1
    return out


@tw.kernel
def two_places(x):
    (n,) = x.shape
    t = tw.empty((2 * n,), tw.f32)
    out = tw.empty((2 * n,), tw.f32)
    for i in tw.grid(n):
        t[2 * i] = x[i]
        t[2 * i + 1] = -x[i]
    for i in tw.grid(2 * n):
        out[i] = t[i] + 1
    return out


@tw.kernel
def in_part(x):
    (n,) = x.shape
    t = tw.empty((2 * n,), tw.f32)
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        t[i] = tw.exp(x[i])
    for i in tw.grid(n):
        out[i] = t[i + n // 2] + 1
    return out


@tw.kernel
def transposed_rows(x):
    rows, cols = x.shape
    t = tw.empty((rows, cols), tw.f32)
    out = tw.empty((rows, cols), tw.f32)
    for i in tw.grid(rows):
        s = 0.0
        for j in range(cols):
            s += x[i, j]
        for j in range(cols):
            t[i, j] = x[i, j] / s
    for j in tw.grid(cols):
        s = 0.0
        for i in range(rows):
            s += t[i, j]
        for i in range(rows):
            out[i, j] = t[i, j] / s
    return out


@tw.kernel
def other_rows(x):
    rows, cols = x.shape
    t = tw.empty((rows, cols), tw.f32)
    out = tw.empty((rows, cols), tw.f32)
    for i in tw.grid(rows):
        s = 0.0
        for j in range(cols):
            s += x[i, j]
        for j in range(cols):
            t[i, j] = x[i, j] / s
    for i in tw.grid(rows):
        s = 0.0
        for j in range(cols):
            s += t[rows - 1 - i, j]
        for j in range(cols):
            out[i, j] = t[rows - 1 - i, j] / s
    return out


@tw.kernel
def writes_more(x):
    rows, cols = x.shape
    t = tw.empty((rows, cols), tw.f32)
    u = tw.empty((rows, cols), tw.f32)
    out = tw.empty((rows, cols), tw.f32)
    for i in tw.grid(rows):
        s = 0.0
        for j in range(cols):
            s += x[i, j]
        for j in range(cols):
            t[i, j] = x[i, j] / s
            u[i, j] = x[i, j] * s
    for i in tw.grid(rows):
        s = 0.0
        for j in range(cols):
            s += t[i, j]
        for j in range(cols):
            out[i, j] = t[i, j] / s
    return out, u


@tw.kernel
def a_result(x):
    (n,) = x.shape
    t = tw.empty((n,), tw.f32)
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        t[i] = x[i] + 1
    for i in tw.grid(n):
        out[i] = t[n - 1 - i]
    return out, t


@tw.kernel
def twice_over(x):
    mean = tw.sum(x) / x.size
    return tw.sum((x - mean) * (x - mean))


MANY = 40
"""Arrays that the two maps below read: both keep them all until their last line."""


def many() -> tw.Kernel[..., object]:
    """Two maps that each fit in registers, and together do not."""
    lines = [f"def wide({', '.join(f'x{k}' for k in range(MANY))}):", "    (n,) = x0.shape"]
    lines += ["    t = tw.empty((n,), tw.f32)", "    out = tw.empty((n,), tw.f32)", "    for i in tw.grid(n):"]
    lines += [f"        a{k} = x{k}[i] * {k + 2}" for k in range(MANY)]
    lines += ["        t[i] = " + " + ".join(f"a{k}" for k in reversed(range(MANY))), "    for i in tw.grid(n):"]
    lines += [f"        b{k} = x{k}[i] + t[i]" for k in range(MANY)]
    lines += ["        out[i] = " + " * ".join(f"b{k}" for k in reversed(range(MANY))), "    return out"]
    text = "\n".join(lines) + "\n"
    linecache.cache["<wide>"] = (len(text), None, text.splitlines(keepends=True), "<wide>")
    space: dict[str, Callable[..., object]] = {"tw": tw}  # type: ignore[dict-item]
    exec(compile(text, "<wide>", "exec"), space)
    return tw.kernel(space["wide"])


X, M = random(40), random(16, 24)
REASONS: dict[str, tuple[tw.Kernel[..., object], tuple[np.ndarray, ...], str, str, str | None]] = {
    "several kernels": (written_twice, (X, X), "t", "'t' is written by 2 kernels", None),
    "several places": (two_places, (X,), "t", "'t' is written in 2 places", None),
    "a part": (in_part, (X,), "t", "the loops do not walk all of 't'", None),
    "launch shape": (transposed_rows, (M,), "t", "their launches have different shapes: rows (line 5) and cols (line 11)", "4*rows"),
    "other rows": (other_rows, (M,), "t", "'t' is needed in other rows than where it is made", "4*cols"),
    "more than one array": (writes_more, (M,), "t", "the loop that makes it writes other things too", "4*cols"),
    "a result": (a_result, (X,), "t", "'t' is a result, so it is written anyway", None),
    "one after the other": (
        twice_over, (X,), "add$0",
        "'add$0' is finished only after its sums over 'k0' (line 2), and the loop over 'k0' (line 3) begins with it", None,
    ),
    "registers": (many(), (X,) * MANY, "t", "together they keep 81 values in registers at once, and a thread has room for 64", None),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_reason(name: str) -> None:
    kernel, args, array, reason, needed = REASONS[name]
    found = kept(kernel, *args)[array]
    assert counted(found.reason, kernel) == reason
    assert (None if found.needed is None else str(found.needed)) == needed
