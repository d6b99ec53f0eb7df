"""Many launches and allocations on a null GPU leave everything where it was: the driver's objects, the pool, Python's objects."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
from test_null_devices import make_scale, make_share

import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.base import dtypes
from tilewright.runtime.cuda import device as cuda

M, V = np.ones((4, 64), np.float32), np.arange(64, dtype=np.float32)


def nothing(table: int, grid: tuple[int, int, int]) -> None: ...


def state(driver: NullCuda) -> tuple[object, ...]:
    """What must not grow."""
    for _ in range(2):
        gc.collect()
    device = cuda.devices()[0]
    device.synchronize()
    return driver.leaks(), len(driver.handles), device.pool.usage(), len(device.launched)


def objects() -> int:
    for _ in range(2):
        gc.collect()
    return len(gc.get_objects())


def no_growth(driver: NullCuda, work: Callable[[], object], count: int) -> None:
    """`work` done `count` times more leaves the state, and Python's objects but for a few, as they were."""
    for _ in range(50):
        work()
    before, counted = state(driver), objects()
    for _ in range(count):
        work()
    assert state(driver) == before
    assert objects() - counted < count // 20


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_launches(mode: str) -> None:
    with installed(mode=mode, record=False) as driver:
        scale, share = make_scale(), make_share()
        x, v = tw.to_device(M, "cuda"), tw.to_device(V, "cuda")
        out = scale(x, v, 1.0)
        share(v)
        # Computing is not what is tested.
        driver.kernels |= dict.fromkeys(dict.fromkeys(driver.programs.launched), nothing)
        no_growth(driver, lambda: scale(x, v, 2.0, out=out), 4000)
        no_growth(driver, lambda: scale(x, v, 2.0), 4000)
        no_growth(driver, lambda: share(v), 2000)
        no_growth(driver, lambda: scale(M, V, 2.0, device="cuda"), 200)
    assert driver.violations == []


def test_allocations() -> None:
    with installed(record=False) as driver:
        device = cuda.devices()[0]
        sizes = iter(range(10**9))
        for n in range(5000):
            device.empty((1 + n % 5000,), dtypes.f32)
        no_growth(driver, lambda: device.empty((1 + next(sizes) * 37 % 5000,), dtypes.f32), 10_000)
        no_growth(driver, lambda: tw.to_device(V, "cuda").numpy(), 500)
        no_growth(driver, lambda: device.empty((64, 64), dtypes.f32)[::2, 3:].T, 2000)
    assert driver.violations == []


def test_threads_that_come_and_go() -> None:
    count = 4
    with installed(record=False) as driver:
        share = make_share()
        v = tw.to_device(V + 1, "cuda")
        held = driver.leaks()["pool memory"]
        share(v).numpy()
        alone = driver.leaks()
        wrong: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(3):
                    share(v).numpy()
            except BaseException as error:
                wrong.append(error)

        for _ in range(25):
            threads = [threading.Thread(target=work) for _ in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert wrong == []
        # Calls at once hold memory at once; how many meet is the scheduler's choice. None holds more than one call alone.
        most = alone | {"pool memory": held + count * (alone["pool memory"] - held)}
        assert {kind: n for kind, n in driver.leaks().items() if n > most.get(kind, 0)} == {}
        cuda.devices()[0].release_memory()
        assert driver.leaks() == {"module": alone["module"], "pool memory": held}
    assert driver.violations == []
