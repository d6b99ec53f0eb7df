"""The CPU cases: our kernels, NumPy, Numba, PyTorch and torch.compile on the same NumPy arrays.

In: sizes. Out: `Case`s whose variants write into one shared output array where the library can. Sums are over whole numbers from
-127 to 127: every order of adding them in float32 is exact, so that a sum is checked to the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bench import kernels, peers, peers_numba
from bench.harness import OURS, Bar, Case, Prepared, Variant

N = 1 << 24
SIDE = 4096
UNIT = 2.0**-24
"""Half a unit in the last place of a float32 near one."""


@dataclass(frozen=True)
class Bound:
    """How far a result may be from float64: relative * |reference| + absolute."""

    relative: float
    absolute: float


EXACT = Bound(0.0, 0.0)
ONE_ROUNDING = Bound(1.01 * UNIT, 0.0)
TWO_ROUNDINGS = Bound(2.02 * UNIT, 3 * UNIT)
FUNCTION = Bound(16 * UNIT, 16 * UNIT)

_generator = np.random.default_rng()


def normal(*shape: int) -> np.ndarray:
    return _generator.standard_normal(shape, dtype=np.float32)


def whole(*shape: int) -> np.ndarray:
    return _generator.integers(-127, 128, shape, dtype=np.int8).astype(np.float32)


def difference(got: np.ndarray, reference: np.ndarray, bound: Bound) -> str:
    """What is wrong with a result, '' when it is within its bound."""
    if got.shape != reference.shape:
        return f"shape {got.shape}, expected {reference.shape}"
    error = np.abs(got.astype(np.float64) - reference)
    error -= bound.relative * np.abs(reference)
    # A poisoned NaN compares false, so it counts as wrong.
    wrong = ~(error <= bound.absolute)
    count = int(wrong.sum())
    if not count:
        return ""
    place = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), reference.shape))
    return f"{count} of {reference.size} wrong, first at {list(place)}: {got[place]!r}, expected {reference[place]!r}"


def elementwise(
    out: np.ndarray,
    reference: np.ndarray,
    bound: Bound,
    variants: Sequence[Variant],
    notes: tuple[str, ...] = (),
) -> Prepared:
    """A case whose variants fill `out`, or return the whole result."""

    def verify(slot: int, returned: object, variant: Variant) -> str:
        got = np.asarray(returned) if variant.returns else out
        return difference(got.reshape(reference.shape), reference, bound)

    poison_value = np.nan if out.dtype.kind == "f" else -1
    return Prepared(variants, lambda: out.fill(poison_value), verify, notes=notes)


def compiled(function: Callable[..., object], *arguments: torch.Tensor, quick: bool) -> tuple[list[Variant], tuple[str, ...]]:
    """torch.compile's variant, or the reason there is none."""
    if quick:
        return [], ("torch.compile left out of a quick run",)
    if peers.cpp_compiler() is None:
        return [], ("torch.compile left out: it needs a C++ compiler (install g++ or set CXX)",)
    torch._dynamo.reset()
    ready = torch.compile(function, dynamic=False)
    return [Variant("torch.compile", lambda _: ready(*arguments))], ()


def cases(quick: bool = False, n: int = N, side: int = SIDE) -> list[Case]:
    """Every CPU case. `n` is a multiple of 4096 times the number of threads."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    torch.set_grad_enabled(False)
    parity = Bar(0.95, ("torch out=", "torch", "numba"))
    matrix = (side, side)
    return [
        Case("relu", (n,), "f32", 8 * n, lambda: _relu(n, quick), parity),
        Case("multiply_add", (n,), "f32", 12 * n, lambda: _multiply_add(n, quick), parity),
        Case("gelu", (n,), "f32", 8 * n, lambda: _gelu(n, quick), Bar(1.4)),
        Case("exp", (n,), "f32", 8 * n, lambda: _exp(n, quick)),
        Case("sigmoid", (n,), "f32", 8 * n, lambda: _sigmoid(n, quick)),
        Case("scale", matrix, "f32", 8 * side * side + 4 * side, lambda: _scale(side, quick)),
        Case("sum", (n,), "f32", 4 * n, lambda: _total(n, quick), parity),
        Case("argmax", (n,), "f32", 4 * n, lambda: _argmax(n), Bar(3.0, ("numpy",))),
        Case("column_sums", matrix, "f32", 4 * side * (side + 1), lambda: _axis_sums(side, 0, quick), Bar(1.0)),
        Case("row_sums", matrix, "f32", 4 * side * (side + 1), lambda: _axis_sums(side, 1, quick), Bar(1.0)),
    ]


def _relu(n: int, quick: bool) -> Prepared:
    x, out = normal(n), np.empty(n, np.float32)
    tx, to = torch.from_numpy(x), torch.from_numpy(out)
    extra, notes = compiled(lambda x, o: o.copy_(torch.relu(x)), tx, to, quick=quick)
    return elementwise(out, np.maximum(x.astype(np.float64), 0), EXACT, [
        Variant(OURS, lambda _: kernels.relu(x, out=out)),
        Variant("numpy", lambda _: np.maximum(x, np.float32(0), out=out)),
        Variant("numba", lambda _: peers_numba.relu(x, out)),
        Variant("torch out=", lambda _: torch.clamp_min(tx, 0, out=to)),
        *extra,
    ], notes)  # fmt: skip


def _multiply_add(n: int, quick: bool) -> Prepared:
    x, y, out = normal(n), normal(n), np.empty(n, np.float32)
    tx, ty, to, one = torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(out), torch.ones(())

    def with_numpy(_: int) -> None:
        np.multiply(x, y, out=out)
        np.add(out, np.float32(1), out=out)

    extra, notes = compiled(lambda x, y, o: o.copy_(x * y + 1), tx, ty, to, quick=quick)
    return elementwise(out, x.astype(np.float64) * y + 1, TWO_ROUNDINGS, [
        Variant(OURS, lambda _: kernels.multiply_add(x, y, out=out)),
        Variant("numpy", with_numpy),
        Variant("numba", lambda _: peers_numba.multiply_add(x, y, out)),
        Variant("torch out=", lambda _: torch.addcmul(one, tx, ty, out=to)),
        *extra,
    ], notes)  # fmt: skip


def _gelu(n: int, quick: bool) -> Prepared:
    x, out, t = normal(n), np.empty(n, np.float32), np.empty(n, np.float32)
    tx, to = torch.from_numpy(x), torch.from_numpy(out)

    def with_numpy(_: int) -> None:
        np.multiply(x, x, out=t)
        np.multiply(t, x, out=t)
        np.multiply(t, np.float32(0.044715), out=t)
        np.add(t, x, out=t)
        np.multiply(t, np.float32(0.7978845608), out=t)
        np.tanh(t, out=t)
        np.add(t, np.float32(1), out=t)
        np.multiply(t, x, out=t)
        np.multiply(t, np.float32(0.5), out=out)

    def eager(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh")

    wide = x.astype(np.float64)
    reference = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    extra, notes = compiled(lambda x, o: o.copy_(eager(x)), tx, to, quick=quick)
    return elementwise(out, reference, FUNCTION, [
        Variant(OURS, lambda _: kernels.gelu(x, out=out)),
        Variant("numpy", with_numpy),
        Variant("numba", lambda _: peers_numba.gelu(x, out)),
        Variant("numba polynomial", lambda _: peers_numba.gelu_polynomial(x, out)),
        Variant("torch out=", lambda _: torch.ops.aten.gelu.out(tx, approximate="tanh", out=to)),
        *extra,
    ], notes)  # fmt: skip


def _exp(n: int, quick: bool) -> Prepared:
    x, out = normal(n), np.empty(n, np.float32)
    tx, to = torch.from_numpy(x), torch.from_numpy(out)
    extra, notes = compiled(lambda x, o: o.copy_(torch.exp(x)), tx, to, quick=quick)
    return elementwise(out, np.exp(x.astype(np.float64)), FUNCTION, [
        Variant(OURS, lambda _: kernels.exp(x, out=out)),
        Variant("numpy", lambda _: np.exp(x, out=out)),
        Variant("numba", lambda _: peers_numba.exp(x, out)),
        Variant("numba polynomial", lambda _: peers_numba.exp_polynomial(x, out)),
        Variant("torch out=", lambda _: torch.exp(tx, out=to)),
        *extra,
    ], notes)  # fmt: skip


def _sigmoid(n: int, quick: bool) -> Prepared:
    x, out = normal(n), np.empty(n, np.float32)
    tx, to = torch.from_numpy(x), torch.from_numpy(out)

    def with_numpy(_: int) -> None:
        np.negative(x, out=out)
        np.exp(out, out=out)
        np.add(out, np.float32(1), out=out)
        np.divide(np.float32(1), out, out=out)

    extra, notes = compiled(lambda x, o: o.copy_(torch.sigmoid(x)), tx, to, quick=quick)
    return elementwise(out, 1 / (1 + np.exp(-x.astype(np.float64))), FUNCTION, [
        Variant(OURS, lambda _: kernels.sigmoid(x, out=out)),
        Variant("numpy", with_numpy),
        Variant("numba", lambda _: peers_numba.sigmoid(x, out)),
        Variant("numba polynomial", lambda _: peers_numba.sigmoid_polynomial(x, out)),
        Variant("torch out=", lambda _: torch.sigmoid(tx, out=to)),
        *extra,
    ], notes)  # fmt: skip


def _scale(side: int, quick: bool) -> Prepared:
    m, v, out = normal(side, side), normal(side), np.empty((side, side), np.float32)
    tm, tv, to = torch.from_numpy(m), torch.from_numpy(v), torch.from_numpy(out)
    extra, notes = compiled(lambda m, v, o: o.copy_(m * v), tm, tv, to, quick=quick)
    return elementwise(out, m.astype(np.float64) * v, ONE_ROUNDING, [
        Variant(OURS, lambda _: kernels.scale(m, v, out=out)),
        Variant("numpy", lambda _: np.multiply(m, v, out=out)),
        Variant("numba", lambda _: peers_numba.scale(m, v, out)),
        Variant("torch out=", lambda _: torch.mul(tm, tv, out=to)),
        *extra,
    ], notes)  # fmt: skip


def _total(n: int, quick: bool) -> Prepared:
    x, out = whole(n), np.empty((), np.float32)
    tx, to = torch.from_numpy(x), torch.from_numpy(out)
    extra, notes = compiled(lambda x, o: o.copy_(x.sum()), tx, to, quick=quick)
    return elementwise(out, np.asarray(np.sum(x, dtype=np.float64)), EXACT, [
        Variant(OURS, lambda _: kernels.total(x, out=out)),
        Variant("numpy", lambda _: np.sum(x, out=out)),
        Variant("numba", lambda _: peers_numba.total(x), returns=True),
        Variant("torch", lambda _: torch.sum(tx, dim=0, out=to)),
        *extra,
    ], notes)  # fmt: skip


def _argmax(n: int) -> Prepared:
    x, out = normal(n), np.empty((), np.int64)
    tx, to = torch.from_numpy(x), torch.from_numpy(out)
    threads = torch.get_num_threads()
    best, where = np.empty(threads, np.float32), np.empty(threads, np.int64)
    top = x.max()
    first = int(np.flatnonzero(x == top)[0])

    def verify(slot: int, returned: object, variant: Variant) -> str:
        got = int(returned) if variant.returns else int(out)  # type: ignore[call-overload]
        # Ours promises the first place; of a peer any place of the maximum will do.
        right = got == first if variant.name == OURS else 0 <= got < n and x[got] == top
        return "" if right else f"index {got}, expected {first}"

    variants = [
        Variant(OURS, lambda _: kernels.argmax(x, out=out)),
        Variant("numpy", lambda _: np.argmax(x), returns=True),
        Variant("numba", lambda _: peers_numba.argmax(x, best, where), returns=True),
        Variant("torch", lambda _: torch.argmax(tx, 0, out=to)),
    ]
    return Prepared(variants, lambda: out.fill(-1), verify)


def _axis_sums(side: int, axis: int, quick: bool) -> Prepared:
    x, out = whole(side, side), np.empty(side, np.float32)
    tx, to = torch.from_numpy(x), torch.from_numpy(out)
    ours = kernels.row_sums if axis else kernels.column_sums
    partial = np.empty((torch.get_num_threads(), side), np.float32)

    def with_numba(_: int) -> None:
        if axis:
            peers_numba.row_sums(x, out)
        else:
            peers_numba.column_sums(x, partial, out)

    extra, notes = compiled(lambda x, o: o.copy_(x.sum(axis)), tx, to, quick=quick)
    return elementwise(out, np.asarray(np.sum(x, axis=axis, dtype=np.float64)), EXACT, [
        Variant(OURS, lambda _: ours(x, out=out)),
        Variant("numpy", lambda _: np.sum(x, axis=axis, out=out)),
        Variant("numba", with_numba),
        Variant("torch out=", lambda _: torch.sum(tx, dim=axis, out=to)),
        *extra,
    ], notes)  # fmt: skip
