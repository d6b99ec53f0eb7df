"""Kernels with complex numbers, each with its answer in NumPy: `CASES`. `tests/run` has them on the CPU and the emulator, `tests/gpu` on a GPU.

Errors are measured against the size of the number, both parts together, in units of the parts' last place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import tilewright as tw
from kernel_table import from_text

DTYPES = (np.complex64, np.complex128)
SIZES = (0, 1, 31, 33)


@dataclass(frozen=True)
class ComplexCase:
    """A kernel of vectors x, y and z, and what it computes, from complex128."""

    name: str
    kernel: tw.Kernel
    reference: Callable[..., object]
    units: float = 4.0
    scale: Callable[..., object] | None = None
    """What errors are relative to, where results can cancel."""

    def check(self, device: str, dtype: type, size: int) -> None:
        rng = np.random.default_rng(size)
        arrays = [draw(rng, size, dtype) for _ in self.kernel.parameter_names]
        wide = [a.astype(np.complex128) for a in arrays]
        want = np.asarray(self.reference(*wide))
        got = self.kernel(*arrays, device=device)
        parts = np.float32 if dtype is np.complex64 else np.float64
        wanted = dtype if want.dtype.kind == "c" else parts if want.dtype.kind == "f" else want.dtype
        assert got.dtype == wanted and got.shape == want.shape, (self.name, got.dtype, got.shape)
        if want.dtype == bool:
            assert (got == want).all(), self.name
            return
        size_of = np.abs(want) if self.scale is None else np.asarray(self.scale(*wide))
        wrong = np.abs(got - want) > self.units * np.finfo(parts).eps * size_of
        assert not wrong.any(), f"{self.name} of {size} {dtype.__name__} on {device}: {got[wrong][:1]} for {want[wrong][:1]}"


def draw(rng: np.random.Generator, size: int, dtype: type) -> np.ndarray:
    return (rng.standard_normal(size) + 1j * rng.standard_normal(size)).astype(dtype)


def _point(name: str, expression: str, count: int, reference: Callable[..., object], units: float = 4.0, result: str = "x.dtype", scale: Callable[..., object] | None = None) -> list[ComplexCase]:
    """The expression of elements in a loop, and of whole arrays."""
    names = "xyz"[:count]
    head = ", ".join(f"{n}: tw.Array" for n in names)
    body = expression
    for n in names:
        body = body.replace(f"${n}", f"{n}[i]")
    loop = f"def {name}({head}) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty(n, {result})\n    for i in tw.grid(n):\n        out[i] = {body}\n    return out\n"
    whole = f"def {name}({head}) -> tw.Array:\n    return {expression.replace('$', '')}\n"
    return [ComplexCase(f"{name}_{form}", from_text(text), reference, units, scale) for form, text in (("loop", loop), ("whole", whole))]


def _rows(text: str, reference: Callable[..., object], units: float = 8.0, scale: Callable[..., object] | None = None) -> ComplexCase:
    kernel = from_text(text)
    return ComplexCase(kernel.__name__, kernel, reference, units, scale)


def _length(x: np.ndarray) -> object:
    return np.abs(x).sum()


def _escapes(x: np.ndarray) -> np.ndarray:
    steps = np.zeros(x.shape, np.int32)
    for place, c in enumerate(x):
        z = 0j
        while abs(z) < 4.0 and steps[place] < 3:
            z = z * z + c
            steps[place] += 1
    return steps


CASES = [
    *_point("add", "$x + $y", 2, lambda x, y: x + y, 2),
    *_point("subtract", "$x - 2j + 1 - $y", 2, lambda x, y: x - 2j + 1 - y, 4, scale=lambda x, y: np.abs(x) + np.abs(y) + 3),
    *_point("multiply", "$x * $y", 2, lambda x, y: x * y),
    *_point("divide", "$x / $y", 2, lambda x, y: x / y, 6),
    *_point("real_operands", "2.0 * $x - $y / 3 + 1 / $x", 2, lambda x, y: 2 * x - y / 3 + 1 / x, 8, scale=lambda x, y: 2 * np.abs(x) + np.abs(y) + 1 / np.abs(x)),
    *_point("negate", "-$x", 1, lambda x: -x, 1),
    *_point("conjugate", "$x.conj() + tw.conj($y)", 2, lambda x, y: x.conj() + y.conj(), 2),
    *_point("parts", "tw.complex($x.imag, $x.real) + tw.real($y)", 2, lambda x, y: x.imag + 1j * x.real + y.real, 2, scale=lambda x, y: np.abs(x) + np.abs(y)),
    *_point("size", "abs($x)", 1, np.abs, 2)[1:],
    *_point("cube", "$x ** 3", 1, lambda x: x**3, 8),
    *_point("inverse_square", "$x ** -2", 1, lambda x: x**-2, 16),
    *_point("power", "$x ** $y", 2, lambda x, y: x**y, 8, scale=lambda x, y: np.abs(x**y) * (1 + np.abs(y * np.log(x)))),
    *_point("exponential", "tw.exp($x)", 1, np.exp),
    *_point("logarithm", "tw.log($x)", 1, np.log),
    *_point("root", "tw.sqrt($x)", 1, np.sqrt),
    *_point("choice", "$x if $x.real < 0 else $y * 1j", 2, lambda x, y: np.where(x.real < 0, x, y * 1j), 1)[:1],
    *_point("equal", "$x == $y", 2, lambda x, y: x == y, 0, "tw.bool_"),
    *_point("different", "$x != $x.real", 1, lambda x: x != x.real, 0, "tw.bool_"),
    *_point("finite", "tw.isfinite($x)", 1, np.isfinite, 0, "tw.bool_"),
    _rows("def total(x: tw.Array) -> tw.Array:\n    return x.sum()\n", np.sum, 16, _length),
    _rows("def mean(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    return (x / (n + 1)).sum()\n", lambda x: (x / (len(x) + 1)).sum(), 16, _length),
    _rows("def size_of_all(x: tw.Array) -> tw.Array:\n    return tw.norm(x)\n", lambda x: np.linalg.norm(x), 16),
    _rows("def product_of_all(x: tw.Array) -> tw.Array:\n    return x.prod()\n", np.prod, 256),
    _rows("def in_order(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty(n, x.dtype)\n    z = 1 + 0j\n    for i in range(n):\n        z = z * x[i] / abs(x[i])\n        out[i] = z\n    return out\n",
          lambda x: np.cumprod(x / np.abs(x)), 512),
    _rows("def running(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty(n, x.dtype)\n    total = 0j\n    for i in range(n):\n        total += x[i]\n        out[i] = total\n    return out\n",
          np.cumsum, 64, _length),
    _rows("def outer_sums(x: tw.Array, y: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty((n, n), x.dtype)\n    for i, j in tw.grid(n, n):\n        total = 0.0\n        for k in range(n):\n            total += x[(i + k) % n] * y[(j + k) % n]\n        out[i, j] = total\n    return out\n",
          lambda x, y: np.array([[np.sum(np.roll(x, -i) * np.roll(y, -j)) for j in range(len(x))] for i in range(len(x))], complex).reshape(len(x), len(x)), 32,
          lambda x, y: np.full((len(x), len(x)), np.linalg.norm(x) * np.linalg.norm(y))),
    _rows("def matrices(x: tw.Array, y: tw.Array) -> tw.Array:\n    return x[:, None] @ y[None, :]\n", lambda x, y: np.outer(x, y)),
    _rows("def transform(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty(n, x.dtype)\n    for k in tw.grid(n):\n        total = 0j\n        for i in range(n):\n            total += x[i] * tw.exp(-2j * tw.pi * ((i * k) % n) / n)\n        out[k] = total\n    return out\n",
          lambda x: np.fft.fft(x) if len(x) else x, 64, _length),
    _rows("def backwards(x: tw.Array) -> tw.Array:\n    return x[::-1] * 1j\n", lambda x: x[::-1] * 1j, 1),
    _rows("def escapes(x: tw.Array) -> tw.Array:\n    (n,) = x.shape\n    out = tw.empty(n, tw.i32)\n    for i in tw.grid(n):\n        z = 0j\n        k = 0\n        while abs(z) < 4.0 and k < 3:\n            z = z * z + x[i]\n            k += 1\n        out[i] = k\n    return out\n",
          _escapes, 0),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
