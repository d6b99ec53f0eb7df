"""`hoist`: which reductions leave loops and which become one, and that the others stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.ir.nodes import Kernel, Op
from tilewright.passes.loop.hoist import hoist
from tilewright.passes.routes import prepare
from tilewright.passes.runner import Trace

X = np.random.default_rng(0).standard_normal((6, 13)).astype(np.float32)


def loop_stage(kernel: tw.Kernel[..., Any], *arguments: object) -> Kernel:
    (call,) = prepare(kernel.stages(*arguments, target="cpu").program, Trace()).calls
    return call.kernel


def shape(kernel: Kernel) -> list[str]:
    """Each reduction, with a mark for every loop or reduction around it."""

    def block(ops: Sequence[Op], depth: int) -> list[str]:
        found: list[str] = []
        for op in ops:
            found += ["." * depth + str(op.attrs["kind"])] if op.opcode == "reduce" else []
            for region in op.regions:
                found += block(region.ops, depth + (op.opcode in ("for", "reduce")))
        return found

    return block(kernel.body.ops, 0)


def check(kernel: tw.Kernel[..., Any], wanted: np.ndarray, *arguments: object) -> None:
    for device in ("cpu", "emulator:loop"):
        np.testing.assert_allclose(kernel(*arguments, device=device), wanted, rtol=1e-5, atol=1e-5)


@tw.kernel
def softmax(x):
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(range(0, rows, 4)):
        part = x[i : i + 4]
        weights = tw.exp(part - tw.row_max(part))
        out[i : i + 4] = weights / tw.row_sum(weights)
    return out


def test_a_softmax_of_tiles_is_that_of_plain_loops() -> None:
    kernel = loop_stage(softmax, X)
    assert shape(kernel) == ["max", "add"]
    assert hoist(kernel) is kernel
    weights = np.exp(X - X.max(-1, keepdims=True))
    check(softmax, weights / weights.sum(-1, keepdims=True), X)


@tw.kernel
def changing(x):
    """The sum is of what the loop before it wrote, and of what the loop writes."""
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        for j in range(columns):
            out[i, j] = x[i, j]
        for j in range(columns):
            total = tw.f32(0)
            for k in range(columns):
                total += out[i, k]
            out[i, j] = total
    return out


def test_sums_of_what_changes_stay() -> None:
    assert shape(loop_stage(changing, X)) == [".add"]
    wanted = X.astype(np.float64)
    for j in range(X.shape[1]):
        wanted[:, j] = wanted.sum(-1)
    check(changing, wanted, X)


@tw.kernel
def different(x):
    """Sums that differ in what they add, in how, and in how many."""
    rows = x.shape[0]
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        a = tw.sum(x[i]) + tw.max(x[i])
        b = tw.sum(x[i] * 2.0) + tw.sum(x[i, 1:])
        out[i] = a + b * tw.sum(x[i])
    return out


def test_only_equal_ones_become_one() -> None:
    assert sorted(shape(loop_stage(different, X))) == ["add", "add", "add", "max"]
    x = X.astype(np.float64)
    total = x.sum(-1)
    check(different, total + x.max(-1) + (2 * total + x[:, 1:].sum(-1)) * total, X)


@tw.kernel
def guarded(x):
    """A condition keeps what is inside it."""
    rows, columns = x.shape
    out = tw.empty((rows,), x.dtype)
    for i in tw.grid(rows):
        total = tw.f32(0)
        for j in range(columns):
            if x[i, j] > 0.0:
                total += tw.sum(x[i])
        out[i] = total
    return out


def test_conditions_keep_theirs() -> None:
    assert shape(loop_stage(guarded, X)) == ["add", ".add"]
    check(guarded, (X > 0).sum(-1) * X.sum(-1), X)


@tw.kernel
def beyond(x: tw.Array, y: tw.Array, z: tw.Array) -> tw.Array:
    """Two sums that the loop over steps does not change, over twice as many elements as z has."""
    rows, steps = y.shape
    m = z.shape[0]
    out = tw.empty((rows,), tw.f32)
    for i in tw.grid(rows):
        a = tw.f32(0)
        for t in range(steps):
            s = tw.f32(0)
            for j in range(2 * m):
                s += x[i, j]
            u = tw.f32(0)
            for j in range(2 * m):
                u = max(u, x[i, j])
            a = a * 0.5 + s * u * y[i, t]
        out[i] = a
    return out


@pytest.mark.parametrize("device", ["cpu", "emulator:loop", "emulator:thread"])
def test_what_no_iteration_reads_is_not_read(device: str) -> None:
    """Checks at the call leave out loops without iterations: nothing may be read there before them."""
    x = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(beyond(x, np.ones((3, 0), np.float32), np.ones(1 << 22, np.float32), device=device), 0)
    np.testing.assert_array_equal(beyond(x, np.ones((3, 2), np.float32), np.ones(2, np.float32), device=device), 6)
    with pytest.raises(tw.UserError, match="TW013"):
        beyond(x, np.ones((3, 2), np.float32), np.ones(9, np.float32), device=device)
