"""The public API on null GPUs: compiled down to PTX, launched with real parameter blocks, computed by the emulator."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import installed

MODES = ("eager", "lazy", "reverse", "random", "background")


def make_scale() -> Callable[..., object]:
    @tw.kernel
    def scale(m: tw.Array, v: tw.Array, factor: float) -> tw.Array:
        rows, cols = m.shape
        out = tw.empty((rows, cols), m.dtype)
        for i, j in tw.grid(rows, cols):
            out[i, j] = m[i, j] * v[j] * factor
        return out

    return scale


def make_share() -> Callable[..., object]:
    """Two launches with scratch between them."""

    @tw.kernel
    def share(x: tw.Array) -> tw.Array:
        n = x.shape[0]
        total = 0.0
        for i in tw.grid(n):
            total += x[i]
        out = tw.empty((n,), x.dtype)
        for i in tw.grid(n):
            out[i] = x[i] / total
        return out

    return share


def make_product() -> Callable[..., object]:
    """With tensor maps and much shared memory."""

    @tw.kernel
    def product(a: tw.Array, b: tw.Array) -> tw.Array:
        n, k = a.shape
        _, m = b.shape
        out = tw.empty((n, m), a.dtype)
        for i, j in tw.grid(n, m):
            total = 0.0
            for p in tw.grid(k):
                total += a[i, p] * b[p, j]
            out[i, j] = total
        return out

    return product


@pytest.mark.parametrize("mode", MODES)
def test_kernels(mode: str) -> None:
    generator = np.random.default_rng(1)
    m, v = generator.random((33, 64), np.float32), generator.random(64, np.float32)
    with installed(mode=mode, seed=7) as driver:
        scale, share = make_scale(), make_share()
        for _ in range(3):
            scaled = scale(tw.to_device(m, "cuda"), tw.to_device(v, "cuda"), 2.5)
            shared = share(tw.to_device(v, "cuda"))
            np.testing.assert_allclose(scaled.numpy(), m * v * np.float32(2.5), rtol=1e-6)
            np.testing.assert_allclose(shared.numpy(), v / v.sum(), rtol=1e-5)
        assert {entry.split("_")[1] for entry in driver.programs.launched} == {"scale", "share"}
        assert len(driver.programs.launched) >= 6
    assert driver.violations == []
    assert driver.kernel_errors == []


@pytest.mark.parametrize("stage", ["loop", "thread"])
def test_a_product_with_tensor_maps(stage: str) -> None:
    generator = np.random.default_rng(2)
    a = generator.random((128, 64), np.float32).astype(ml_dtypes.bfloat16)
    b = generator.random((64, 128), np.float32).astype(ml_dtypes.bfloat16)
    with installed(mode="lazy", stage=stage) as driver:
        product = make_product()
        found = product(tw.to_device(a, "cuda"), tw.to_device(b, "cuda")).numpy().astype(np.float32)
        np.testing.assert_allclose(found, a.astype(np.float32) @ b.astype(np.float32), rtol=2e-2)
        assert driver.calls("cuTensorMapEncodeTiled")
    assert driver.violations == []


def test_numpy_in_numpy_out() -> None:
    m, v = np.ones((5, 16), np.float32), np.arange(16, dtype=np.float32)
    with installed(mode="lazy"):
        found = make_scale()(m, v, 2.0, device="cuda")
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, m * v * 2)


def test_devices_are_independent() -> None:
    v = np.arange(1, 9, dtype=np.float32)
    with installed(count=3, mode="random") as driver:
        share = make_share()
        results = [share(tw.to_device(v * (i + 1), f"cuda:{i}")) for i in range(3)]
        assert [r.device.ordinal for r in results] == [0, 1, 2]
        for result in results:
            np.testing.assert_allclose(result.numpy(), v / v.sum(), rtol=1e-6)
    assert driver.violations == []


def test_a_name_never_means_a_device_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was asked for while no device was in use."""
    from tilewright.runtime.cuda import device as cuda

    v = np.arange(1, 9, dtype=np.float32)
    with installed(), monkeypatch.context() as patch:
        before = cuda.devices()
        patch.setattr(cuda, "devices", lambda: before)
        patch.setattr(cuda, "_found", None)
        assert tw.to_device(v, "cuda:0").device is before[0]
    with installed():
        assert tw.to_device(v, "cuda:0").device is cuda.devices()[0] is not before[0]


def test_memory_goes_back() -> None:
    v = np.arange(1, 1001, dtype=np.float32)
    with installed(mode="lazy") as driver:
        from tilewright.runtime.cuda import device as cuda

        share = make_share()
        share(tw.to_device(v, "cuda")).numpy()
        gc.collect()
        device = cuda.devices()[0]
        device.synchronize()
        before = device.pool.usage()
        for _ in range(50):
            share(tw.to_device(v, "cuda"))
        gc.collect()
        device.synchronize()
        assert device.pool.usage() == before
        del share
        for _ in range(2):  # what machine code holds goes with the function that holds it
            gc.collect()
        device.synchronize()
        device.pool.flush()
        device.release_idle()
        assert driver.leaks() in ({}, {"stream": 1})  # the device's own, for copies
    assert driver.violations == []


@pytest.mark.parametrize("mode", ["eager", "background"])
def test_threads(mode: str) -> None:
    """Sixteen threads, two kernels, their own arrays: nobody gets another's results."""
    with installed(mode=mode, record=False) as driver:
        scale, share = make_scale(), make_share()
        v = np.arange(1, 17, dtype=np.float32)
        wrong: list[object] = []

        def work(number: int) -> None:
            try:
                m = np.full((4, 16), number + 1, np.float32)
                x, y = tw.to_device(m, "cuda"), tw.to_device(v, "cuda")
                for _ in range(12):
                    if not np.array_equal(scale(x, y, 2.0).numpy(), m * v * 2):
                        wrong.append(number)
                    if not np.allclose(share(y).numpy(), v / v.sum(), rtol=1e-6):
                        wrong.append(number)
            except Exception as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len([e for e in driver.programs.launched if "scale" in e]) == 16 * 12
    assert driver.violations == []
