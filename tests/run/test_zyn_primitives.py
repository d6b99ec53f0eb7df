"""The kinds scan, sort, filter and histogram of ZynML: values that a block yields go through the device-wide primitives."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw

RNG = np.random.default_rng(1)
X = RNG.standard_normal(5000).astype(np.float32)
KEYS = RNG.integers(0, 50, 5000).astype(np.int32)
M = RNG.standard_normal((7, 33)).astype(np.float32)
M[0, 0] = np.inf


def run(inputs: str, kind: str, loops: str, device: str = "cpu", **given: object) -> object:
    return tw.load(f"let y = compute({inputs}) {{\n @kernel {kind}\n {loops}\n}}").run(device=device, **given)["y"]


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_scans(device: str) -> None:
    flat, square = "for i in 0..n: yield x[i] * 2", "for i in 0..n, j in 0..m: yield x[i, j]"
    np.testing.assert_allclose(run("x", "scan(+)", flat, device, x=X), np.cumsum(X.astype(np.float64) * 2), rtol=1e-3, atol=1e-2)
    np.testing.assert_array_equal(run("x", "scan(max)", flat, device, x=X), np.maximum.accumulate(X * 2))
    before = np.concatenate([[3], 3 + np.cumsum(2 * KEYS)[:-1]])
    np.testing.assert_array_equal(run("x", "scan(+, exclusive=true, init=first)", flat, device, x=KEYS, first=3), before)
    np.testing.assert_allclose(run("x", "scan(+, axis=0)", square, device, x=M), np.cumsum(M, 0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run("x", "scan(min)", square, device, x=M), np.minimum.accumulate(M, 1))
    shifted = np.cumsum(np.concatenate([np.zeros((7, 1), np.float32), M[:, :-1]], 1), 1)
    np.testing.assert_allclose(run("x", "scan(+, axis=-1, exclusive=true)", square, device, x=M), shifted, rtol=1e-4, atol=1e-4)
    back = np.cumsum(M[::-1], 0)[::-1]
    np.testing.assert_allclose(run("x", "scan(+, axis=0, reverse=true)", square, device, x=M), back, rtol=1e-4, atol=1e-4)
    smallest = np.concatenate([np.full((1, 33), np.inf, np.float32), np.minimum.accumulate(M, 0)[:-1]])
    np.testing.assert_array_equal(run("x", "scan(min, axis=0, exclusive=true)", square, device, x=M), smallest)


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_sorts_and_histograms_along_an_axis(device: str) -> None:
    square = "for i in 0..n, j in 0..m: yield x[i, j]"
    np.testing.assert_array_equal(run("x", "sort(axis=0)", square, device, x=M), np.sort(M, 0))
    table = KEYS[:60].reshape(20, 3)
    wanted = np.stack([np.bincount(column, minlength=50) for column in table.T], 1)
    np.testing.assert_array_equal(run("x", "histogram(bins=50, axis=0)", square, device, x=table), wanted)
    found = run("k, w", "histogram(bins=50)", "for i in 0..n: yield (k[i], w[i])", device, k=KEYS, w=np.arange(5000))
    np.testing.assert_array_equal(found, np.bincount(KEYS, np.arange(5000), 50))


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_sorts_filters_and_histograms(device: str) -> None:
    np.testing.assert_array_equal(run("x", "sort", "for i in 0..n: yield -x[i]", device, x=X), np.sort(-X))
    np.testing.assert_array_equal(run("x", "sort(descending=true)", "for i in 0..n, j in 0..m: yield x[i, j]", device, x=M), -np.sort(-M, 1))
    order = np.argsort(KEYS, kind="stable")
    keys, moved = run("x, k", "sort", "for i in 0..n: yield (k[i], x[i])", device, x=X, k=KEYS)  # type: ignore[misc]
    np.testing.assert_array_equal(keys, KEYS[order])
    np.testing.assert_array_equal(moved, X[order])
    loops = "for i in 0..n:\n  let v = x[i]\n  if v > limit: yield v * 2"
    np.testing.assert_array_equal(run("x", "filter", loops, device, x=X, limit=0.5), X[X > 0.5] * 2)
    np.testing.assert_array_equal(run("k", "histogram(bins=b)", "for i in 0..n: yield k[i]", device, k=KEYS, b=50), np.bincount(KEYS, minlength=50))
    np.testing.assert_array_equal(
        run("x", "histogram(bins=8, low=-1, high=1)", "for i in 0..n: yield x[i]", device, x=X), np.histogram(X, 8, (-1, 1))[0]
    )


def test_in_pipelines_and_repeated_runs() -> None:
    text = "pipeline f(x):\n    let a = x * 2\n    let s = compute(a) {\n        @kernel filter\n        for i in 0..n: if a[i] > 0: yield a[i]\n    }\n    return s + 1\nlet y = f(x)"
    program = tw.load(text)
    for start in (0, 10, 10, 20, 30):
        part = X[start : start + 40]
        np.testing.assert_array_equal(program.run(x=part, device="cpu")["y"], part[part > 0] * 2 + 1)


@pytest.mark.parametrize(
    ("kind", "loops", "message"),
    [
        ("scan(+)", "for i in 0..n: out[i] = x[i]", "TW012: @kernel scan, but the block yields nothing"),
        ("filter", "for i in 0..n: yield x[i]", "TW012: @kernel filter yields all values"),
        ("scan(+)", "for i in 1..n: yield x[i]", "TW012: a loop of @kernel scan begins at 0 and takes steps of 1"),
        ("sort", "for i in 0..n: if x[i] > 0: yield x[i]", "TW012: @kernel sort cannot yield under this condition"),
        ("scan(+)", "for i in 0..n: yield (x[i], i)", "TW012: @kernel scan takes one value, not 2"),
        ("histogram(bins=4, low=1)", "for i in 0..n: yield x[i]", "TW016: @kernel histogram takes low and high together"),
        ("scan(argmax)", "for i in 0..n: yield x[i]", "TW016: @kernel scan cannot combine by argmax"),
        ("scan(+, axis=3)", "for i in 0..n: yield x[i]", "TW016: 'axis' of @kernel scan is 3, and the block has 1 loop(s)"),
        ("sort(descnding=true)", "for i in 0..n: yield x[i]", "TW016: @kernel sort has no parameter 'descnding'"),
        ("sort @async", "for i in 0..n: yield x[i]", "TW012: @async on a block of kind sort, which runs at once"),
        ("sort(axis=2)", "for i in 0..n: yield x[i]", "TW016: 'axis' of @kernel sort is 2, and the block has 1 loop(s)"),
        ("histogram(axis=-2)", "for i in 0..n: yield x[i]", "TW016: 'axis' of @kernel histogram is -2, and the block has 1 loop(s)"),
    ],
)
def test_wrong_blocks(kind: str, loops: str, message: str) -> None:
    with pytest.raises(tw.UserError) as caught:
        run("x", kind, loops, x=X)
    first = caught.value.diagnostics[0]
    assert f"{first.code}: {first.message}".startswith(message)
    assert first.span.line
