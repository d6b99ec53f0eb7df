"""Loops of ordinary Python code on the GPU: with arrays of NumPy, PyTorch and our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import tilewright as tw

pytestmark = pytest.mark.requires("cuda")


def random(n: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(n).astype(np.float32)


def axpy(a: float, x: Any, y: Any, n: int) -> None:
    for i in tw.parallel_gpu(n, 128):
        if x[i] < 0:
            continue
        y[i] = a * x[i] + y[i]


def expected(a: float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(x < 0, y, np.float32(a) * x + y)


@pytest.mark.parametrize("n", [1, 31, 1000, 100_003])
def test_every_kind_of_array(n: int) -> None:
    torch = pytest.importorskip("torch")
    x, y = random(n), random(n + 1)[:n]
    right = expected(2.5, x, y)
    plain = y.copy()
    axpy(2.5, x, plain, n)
    own_x, own_y = tw.to_device(x, "cuda"), tw.to_device(y, "cuda")
    axpy(2.5, own_x, own_y, n)
    tensors = torch.from_numpy(x).cuda(), torch.from_numpy(y).cuda()
    axpy(2.5, *tensors, n)
    for found in (plain, own_y.numpy(), tensors[1].cpu().numpy()):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6)


def test_points_and_proven_loops() -> None:
    out = tw.to_device(np.zeros((37, 53), np.float32), "cuda")
    for i, j in tw.parallel_gpu((37, 53)):
        out[i, j] = 100 * i + j
    i, j = np.indices((37, 53))
    np.testing.assert_array_equal(out.numpy(), 100 * i + j)
    sums = tw.to_device(np.zeros(37, np.float32), "cuda")
    for i in tw.prange(37):
        total = 0.0
        for j in range(53):
            total += out[i, j]
        sums[i] = total
    np.testing.assert_allclose(sums.numpy(), out.numpy().sum(1), rtol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 33, 1_000_003])
def test_reductions(n: int) -> None:
    torch = pytest.importorskip("torch")

    def measure(x: Any, out: Any) -> tuple[float, float, int, bool]:
        total, largest, positive, small = 0.5, -np.inf, 0, True
        for i in tw.prange(n, device="cuda"):
            total += x[i]
            largest = max(largest, x[i])
            if x[i] > 0:
                positive += 1
            small = small and x[i] < 100
            out[i] = 2 * x[i]
        return total, largest, positive, small

    x = random(n)
    results = [np.zeros(n, np.float32), tw.to_device(np.zeros(n, np.float32), "cuda"), torch.zeros(n, device="cuda")]
    for given, out in zip((x, tw.to_device(x, "cuda"), torch.from_numpy(x).cuda()), results, strict=True):
        total, largest, positive, small = measure(given, out)
        assert total == pytest.approx(0.5 + float(x.astype(np.float64).sum()), rel=1e-4, abs=1e-3)
        assert (largest, positive, small) == (float(x.max(initial=-np.inf)), int((x > 0).sum()), True)
    for found in (results[0], results[1].numpy(), results[2].cpu().numpy()):
        np.testing.assert_array_equal(found, 2 * x)


def test_what_is_not_parallel_runs_nothing() -> None:
    x = tw.to_device(random(100), "cuda")
    before = x.numpy()
    with pytest.raises(tw.UserError, match="not parallel"):
        running(x)
    with pytest.raises(tw.UserError, match="share memory"):
        copy_down(x[1:51], x[:50])
    np.testing.assert_array_equal(x.numpy(), before)


def running(x: Any) -> None:
    for i in tw.prange(1, 100):
        x[i] = x[i - 1]


def copy_down(out: Any, x: Any) -> None:
    for i in tw.prange(50):
        out[i] = x[i]
