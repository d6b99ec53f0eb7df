"""Kernels joined into one: which, with what result, and why not."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

import tilewright as tw
from tilewright.compile import driver, store
from tilewright.passes import routes
from tilewright.passes.common.fusion_report import FusionReport


@tw.kernel
def chain(x: tw.Array, y: tw.Array) -> tw.Array:
    n, m = x.shape
    a = tw.empty((n, m), tw.f16)
    for i, j in tw.grid(n, m):
        a[i, j] = x[i, j] * 1.25
    b = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        b[i, j] = a[i, j] + y[j]
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        out[i, j] = b[i, j] * b[i, j] - a[i, j]
    return out


@tw.kernel
def block(x: tw.Array, w: tw.Array, bias: tw.Array, res: tw.Array, gain: tw.Array) -> tw.Array:
    n, k = x.shape
    m = w.shape[1]
    h = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        acc = tw.f32(0)
        for p in range(k):
            acc += x[i, p] * w[p, j]
        h[i, j] = acc
    a = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        a[i, j] = h[i, j] + bias[j]
    t = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        t[i, j] = a[i, j] + res[i, j]
    out = tw.empty((n, m), x.dtype)
    for i in tw.grid(n):
        v = tw.f32(0)
        for j in range(m):
            v += t[i, j] * t[i, j]
        r = 1 / tw.sqrt(v / m + 1e-5)
        for j in range(m):
            out[i, j] = t[i, j] * r * gain[j]
    return out


@tw.kernel
def norm_then_gate(x: tw.Array, res: tw.Array, gate: tw.Array) -> tw.Array:
    n, m = x.shape
    t = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        t[i, j] = x[i, j] + res[i, j]
    y = tw.empty((n, m), tw.f32)
    for i in tw.grid(n):
        v = tw.f32(0)
        for j in range(m):
            v += t[i, j] * t[i, j]
        for j in range(m):
            y[i, j] = t[i, j] / tw.sqrt(v / m + 1e-5)
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        out[i, j] = y[i, j] * gate[i, j]
    return out


@tw.kernel
def norm_then_softmax(x: tw.Array) -> tw.Array:
    n, m = x.shape
    y = tw.empty((n, m), tw.f32)
    for i in tw.grid(n):
        v = tw.f32(0)
        for j in range(m):
            v += x[i, j] * x[i, j]
        for j in range(m):
            y[i, j] = x[i, j] / tw.sqrt(v / m + 1e-5)
    out = tw.empty((n, m), x.dtype)
    for i in tw.grid(n):
        big = -tw.inf
        for j in range(m):
            big = max(big, y[i, j])
        s = tw.f32(0)
        for j in range(m):
            s += tw.exp(y[i, j] - big)
        for j in range(m):
            out[i, j] = tw.exp(y[i, j] - big) / s
    return out


@tw.kernel
def scaled_product(x: tw.Array, scale: tw.Array, w: tw.Array) -> tw.Array:
    n, k = x.shape
    m = w.shape[1]
    a = tw.empty((n, k), tw.f32)
    for i, p in tw.grid(n, k):
        a[i, p] = x[i, p] * scale[i]
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[i, p] * w[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def costly_product(x: tw.Array, w: tw.Array) -> tw.Array:
    n, k = x.shape
    m = w.shape[1]
    a = tw.empty((n, k), tw.f32)
    for i, p in tw.grid(n, k):
        a[i, p] = tw.exp(x[i, p])
    out = tw.empty((n, m), tw.f32)
    for i, j in tw.grid(n, m):
        acc = tw.f32(0)
        for p in range(k):
            acc += a[i, p] * w[p, j]
        out[i, j] = acc
    return out


@tw.kernel
def neighbours(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    s = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        acc = tw.f32(0)
        for j in range(n):
            acc += x[j] * i
        s[i] = acc
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        out[i] = s[n - 1 - i]
    return out


@tw.kernel
def two_results(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    (n,) = x.shape
    a = tw.empty((n,), tw.f32)
    b = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        a[i] = x[i] + 1
    for i in tw.grid(n):
        b[i] = a[i] * 2
    return a, b


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


CASES = {
    "chain": (chain, (random(33, 17), random(17)), 1),
    "block": (block, (random(31, 19), random(19, 65), random(65), random(31, 65), random(65)), 2),
    "norm_then_gate": (norm_then_gate, (random(7, 129), random(7, 129), random(7, 129)), 1),
    "norm_then_softmax": (norm_then_softmax, (random(5, 100),), 1),
    "scaled_product": (scaled_product, (random(33, 20), random(33), random(20, 9)), 1),
    "costly_product": (costly_product, (random(33, 20), random(20, 9)), 2),
    "neighbours": (neighbours, (random(40),), 2),
    "two_results": (two_results, (random(40),), 1),
}


def report(kernel: tw.Kernel[..., object], *args: np.ndarray) -> FusionReport:
    return kernel.stages(*args, target="sm_90a").fusion


@pytest.mark.parametrize("name", CASES)
def test_how_many_kernels_are_left(name: str) -> None:
    kernel, args, kernels = CASES[name]
    assert report(kernel, *args).after == kernels


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_separate_kernels(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, args, _ = CASES[name]
    again = tw.kernel(kernel.python)
    joined = kernel(*args, device=device)
    monkeypatch.setattr(routes, "fuse_kernels", lambda program, trace: (program, FusionReport((), (), 0, 0)))
    monkeypatch.setattr(store, "STORE", store.ArtifactStore(store.disk_cache))
    monkeypatch.setattr(driver, "STORE", store.STORE)
    monkeypatch.setattr(driver, "_by_sizes", {})
    monkeypatch.setenv("TILEWRIGHT_CACHE", "0")
    apart = again(*args, device=device)
    for one, other in zip(*((r if isinstance(r, tuple) else (r,)) for r in (joined, apart)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)


def test_rounding_to_the_array_between_stays() -> None:
    x, y = random(9, 9), np.zeros(9, np.float32)
    a = (x * np.float32(1.25)).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(chain(x, y, device="cpu"), a * a - a)


def counted(reason: str, kernel: tw.Kernel[..., object]) -> str:
    """The reason with lines counted from the decorator."""
    first = inspect.getsourcelines(kernel.__wrapped__)[1]
    return re.sub(r"line (\d+)", lambda found: f"line {int(found[1]) - first}", reason)


def test_reasons() -> None:
    (kept,) = report(*CASES["costly_product"][:1], *CASES["costly_product"][1]).refused
    assert kept.reason == "every element would be computed many times over (1 operations)"
    (kept,) = report(neighbours, random(40)).refused
    expected = "'s' is finished only after its sums over 'j' (line 6), and line 11 reads other elements of it than are made there"
    assert counted(kept.reason, neighbours) == expected
    reasons = {r.array: r.reason for r in report(block, *CASES["block"][1]).refused}
    expected = "'t' is finished only after its sums over 'p' (line 7), and the loop over 'j' (line 19) needs many elements of it"
    assert {array: counted(reason, block) for array, reason in reasons.items()} == {"t": expected}


def test_bytes_saved() -> None:
    fused = {f.array: (f.how, str(f.saved)) for f in report(block, *CASES["block"][1]).fused}
    assert fused == {"h": ("merged", "8*m*n"), "a": ("merged", "8*m*n")}
    (only,) = report(two_results, random(40)).fused
    assert (only.how, str(only.saved)) == ("merged", "4*n")


def test_in_place_results_stay_right() -> None:
    x, w = random(12, 12), random(12, 12)
    scale = random(12)
    expected = (x * scale[:, None]) @ w
    given = x.copy()
    scaled_product(given, scale, w, out=given, device="cpu")
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)


@tw.kernel
def windows(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    a = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        v = x[i]
        a[i] = v * (2.5 * v + 0.5) * (v - 0.25) * (v + 0.125) * (v * v - 3.0) * (v - 7.0)
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        out[i] = a[max(i - 2, 0)] + a[max(i - 1, 0)] + a[i] + a[min(i + 1, n - 1)] + a[min(i + 2, n - 1)]
    return out


def test_a_window_does_not_compute_a_long_map_for_each_of_its_places() -> None:
    (kept,) = report(windows, np.zeros(100, np.float32)).refused
    assert re.fullmatch(r"every element would be computed 5 times over \(\d+ operations each\)", kept.reason)
    x = np.linspace(-1, 1, 33).astype(np.float32)
    a = x * (2.5 * x + 0.5) * (x - 0.25) * (x + 0.125) * (x * x - 3.0) * (x - 7.0)
    wanted = sum(a[np.clip(np.arange(33) + k, 0, 32)] for k in range(-2, 3))
    np.testing.assert_allclose(windows(x), wanted, rtol=1e-4, atol=1e-5)
