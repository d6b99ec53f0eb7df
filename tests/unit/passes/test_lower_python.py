"""Kernels mean what Python says: each text is also executed by Python itself on NumPy arrays."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from tilewright.base import dtypes
from tilewright.frontend.python.kernels import parse_python_file
from tilewright.ir.emulator import run_program
from tilewright.ir.verify import verify_program
from tilewright.passes.from_tree.lower_tree import lower_kernel
from tilewright.tree.check.kernel import check_kernel
from tilewright.tree.typed import ArrayArg


def grid(*extents: int) -> Iterator[object]:
    return iter(range(extents[0])) if len(extents) == 1 else itertools.product(*map(range, extents))


TW = SimpleNamespace(
    kernel=lambda f: f, grid=grid, empty=lambda s, d: np.full(s, 99, d), zeros=np.zeros, full=lambda s, v, d: np.full(s, v, d),
    empty_like=np.empty_like, f32=np.float32, f64=np.float64, i64=np.int64, i32=np.int32, sqrt=np.sqrt, exp=np.exp, sum=np.sum,
    max=np.max, min=np.min, argmin=np.argmin, where=np.where, abs=abs, inf=math.inf,
)  # fmt: skip

KERNELS = {
    "locals carried through a nested loop that accumulates": """
        def k(x):
            rows, cols = x.shape
            total = 0.0
            for i in range(rows):
                t = 1.0
                for j in range(cols):
                    t = t * 0.5 + x[i, j]
                    total += t
            return total
        """,
    "two accumulators with a shared part, one guarded": """
        def k(x):
            rows, cols = x.shape
            out = tw.empty((rows, 3), tw.f64)
            for i in range(rows):
                a = 0.0
                b = 1.0
                c = -tw.inf
                for j in range(cols):
                    v = x[i, j] * 2 + 1
                    a += v
                    if v > 0:
                        b *= v
                    else:
                        c = max(c, v)
                out[i, 0] = a
                out[i, 1] = b
                out[i, 2] = c
            return out
        """,
    "value of the loop before is read": """
        def k(x):
            n = x.shape[0]
            out = tw.zeros((n,), tw.f64)
            previous = 0.0
            for i in range(n):
                out[i] = x[i, 0] - previous
                previous = x[i, 0]
            return out
        """,
    "in place over an own array": """
        def k(x):
            n = x.shape[0]
            out = tw.empty((n,), tw.f64)
            for i in range(n):
                out[i] = x[i, 0]
            for i in range(n):
                out[i] = out[i] * 2
            for i in range(n - 1):
                out[i + 1] = out[i + 1] + out[i]
            return out
        """,
    "reverse of an own array": """
        def k(x):
            n = x.shape[0]
            out = tw.zeros((n,), tw.f64)
            for i in range(n):
                out[i] = x[i, 0]
            for i in range(n):
                out[n - 1 - i] = out[i]
            return out
        """,
    "flattened output": """
        def k(x):
            rows, cols = x.shape
            out = tw.empty((rows * cols,), tw.f64)
            for i in range(rows):
                for j in range(cols):
                    out[i * cols + j] = x[i, j]
            return out
        """,
    "histogram": """
        def k(x):
            rows, cols = x.shape
            out = tw.zeros((4,), tw.i64)
            for i in range(rows):
                for j in range(cols):
                    out[(i * 7 + j * 3) % 4] += 1
            return out
        """,
    "variable chosen at the top": """
        def k(x):
            n = x.shape[0]
            scale = 1.0
            if x[0, 0] > 0:
                scale = 2.0
            out = tw.empty((n,), tw.f64)
            for i in range(n):
                out[i] = x[i, 0] * scale
            scale = scale + 1
            total = 0.0
            for i in range(n):
                total += x[i, 0] * scale
            return out, total, scale
        """,
    "serial at the top with two variables": """
        def k(x):
            a = 0.0
            b = 1.0
            for i in range(x.shape[0]):
                a = a + b * x[i, 0]
                b = b * 0.5 + a
            return a, b
        """,
    "triangular loops and steps": """
        def k(x):
            rows, cols = x.shape
            out = tw.zeros((rows, cols), tw.f64)
            for i in range(rows):
                for j in range(i, cols, 2):
                    s = 0.0
                    for p in range(j, i - 1, -1):
                        s += x[i, p]
                    out[i, j] = s
            return out
        """,
    "argmin by hand": """
        def k(x):
            best = x[0, 0]
            where = 0
            for i in range(x.shape[0]):
                if x[i, 0] < best:
                    best = x[i, 0]
                    where = i
            return best, where
        """,
    "count and mean": """
        def k(x):
            rows, cols = x.shape
            count = 0
            total = 0.0
            for i, j in tw.grid(rows, cols):
                if x[i, j] > 0:
                    count += 1
                    total += x[i, j]
            return total / count, count
        """,
    "conditions on both sides": """
        def k(x):
            rows, cols = x.shape
            out = tw.empty((rows, cols), tw.f64)
            for i, j in tw.grid(rows, cols):
                left = x[i, j - 1] if j > 0 else x[i, cols - 1]
                right = x[i, j + 1] if j + 1 < cols and x[i, j + 1] > 0 else -1.0
                out[i, j] = left * (2 if i % 2 == 0 else 3) + right
            return out
        """,
    "while inside": """
        def k(x):
            rows, cols = x.shape
            out = tw.empty((rows,), tw.i64)
            for i in range(rows):
                j = 0
                s = 0.0
                while j < cols and s < 1.0:
                    s += abs(x[i, j])
                    j += 1
                out[i] = j
            return out
        """,
    "inclusive of its own zero start": """
        def k(x):
            rows, cols = x.shape
            c = tw.full((cols, cols), 0.5, tw.f64)
            for i in range(cols):
                for j in range(cols):
                    for p in range(rows):
                        c[i, j] += x[p, i] * x[p, j]
            return c
        """,
    "same element twice in one iteration": """
        def k(x):
            n = x.shape[0]
            out = tw.empty((n,), tw.f64)
            for i in range(n):
                out[i] = x[i, 0]
                out[i] += 1.0
                if out[i] > 1:
                    out[i] = out[i] * 10
            return out
        """,
    "whole arrays": """
        def k(x):
            y = x * x + 1
            low = tw.min(y)
            sums = tw.sum(y, axis=0)
            out = tw.empty((x.shape[1],), tw.f64)
            for j in range(x.shape[1]):
                out[j] = sums[j] - low
            return out, tw.argmin(x, axis=1)
        """,
    "accumulate into a row while reading another array's rows": """
        def k(x):
            rows, cols = x.shape
            out = tw.zeros((rows, cols), tw.f64)
            for i in range(rows):
                for p in range(rows):
                    for j in range(cols):
                        out[i, j] += x[p, j] * (i + p)
            return out
        """,
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_as_python(name: str) -> None:
    text = "import tilewright as tw\n@tw.kernel\n" + textwrap.dedent(KERNELS[name]).lstrip()
    (function,) = parse_python_file(text, "k.py")
    program = lower_kernel(check_kernel(function, [ArrayArg(dtypes.f64, 2)]))
    verify_program(program)
    space: dict[str, object] = {"tw": TW, "abs": abs}
    exec(text.replace("import tilewright as tw\n", ""), space)
    kernel = space["k"]
    assert callable(kernel)
    for seed, shape in enumerate([(5, 6), (1, 1), (4, 9)]):
        x = np.random.default_rng(seed).standard_normal(shape)
        expected = kernel(x)
        found = list(run_program(program, {"x": x}).values())
        for want, got in zip(expected if isinstance(expected, tuple) else (expected,), found, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
