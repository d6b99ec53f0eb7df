"""Every driver call of a program fails once: each failure is an error of ours, nothing leaks, and the program then runs as before.

The program is run once to see which functions of the driver it calls and how often; then again for each of these calls, which gives
a failure code. A failure either shows as a `DeviceError` or does not matter; what is left afterwards must be what a run without
failures leaves.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
from test_null_devices import make_product, make_scale, make_share

import tilewright as tw
from null_cuda import NullCuda
from null_cuda.install import installed
from tilewright.base.errors import DeviceError
from tilewright.runtime.cuda import device as cuda

OUT_OF_MEMORY, INVALID_VALUE = 2, 1
ALLOCATE = (
    "cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc", "cuMemAllocManaged", "cuMemHostRegister", "cuStreamCreate", "cuStreamCreateWithPriority",
    "cuEventCreate", "cuModuleLoadDataEx", "cuGraphInstantiate", "cuLaunchKernel", "cuLaunchKernelEx", "cuGraphLaunch", "cuDevicePrimaryCtxRetain",
    "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync", "cuStreamBeginCapture", "cuStreamEndCapture",
    "cuModuleGetFunction", "cuFuncSetAttribute", "cuEventRecord", "cuStreamWaitEvent", "cuTensorMapEncodeTiled",
)  # fmt: skip
"""Functions that can run out of something."""
V = np.arange(1, 65, dtype=np.float32)
M = np.ones((4, 64), np.float32)


def plain() -> None:
    """Copies both ways, a scalar, a kernel with scratch."""
    scale, share = make_scale(), make_share()
    x, v = tw.to_device(M, "cuda"), tw.to_device(V, "cuda")
    np.testing.assert_array_equal(scale(x, v, 2.0).numpy(), M * V * 2)
    np.testing.assert_array_equal(scale(x, v, 3.0).numpy(), M * V * 3)
    np.testing.assert_allclose(share(v).numpy(), V / V.sum(), rtol=1e-6)
    np.testing.assert_allclose(share(V, device="cuda"), V / V.sum(), rtol=1e-6)


def large() -> None:
    """Copies that go through pinned memory, in pieces, and views with gaps."""
    values = np.arange(3 << 19, dtype=np.float32).reshape(3, -1)
    x = tw.to_device(values, "cuda")
    np.testing.assert_array_equal(x.numpy(), values)
    np.testing.assert_array_equal(x[::2, 5:].numpy(), values[::2, 5:])


def product() -> None:
    """Tensor maps and much shared memory."""
    a, b = (np.ones(shape, ml_dtypes.bfloat16) for shape in ((128, 64), (64, 128)))
    found = make_product()(tw.to_device(a, "cuda"), tw.to_device(b, "cuda")).numpy()
    np.testing.assert_array_equal(found.astype(np.float32), np.full((128, 128), 64, np.float32))


def streams() -> None:
    """Streams, events, futures."""
    scale = make_scale()
    x, v = tw.to_device(M, "cuda"), tw.to_device(V, "cuda")
    stream = tw.Stream("cuda")
    with stream:
        first = scale(x, v, 2.0)
        event = stream.record()
    event.synchronize()
    future = scale(first, v, 1.0, asynchronous=True)
    np.testing.assert_array_equal(future.result().numpy(), M * V * 2 * V)
    stream.synchronize()


def graphs() -> None:
    """Captured and replayed."""
    scale, share = make_scale(), make_share()
    x, v = tw.to_device(M, "cuda"), tw.to_device(V, "cuda")
    with tw.capture("cuda") as graph:
        result = scale(x, share(v), 2.0)
    try:
        graph.replay()
        np.testing.assert_allclose(result.numpy(), M * (V / V.sum()) * 2, rtol=1e-6)
    finally:
        graph.close()


PROGRAMS: dict[str, Callable[[], None]] = {f.__name__: f for f in (plain, large, product, streams, graphs)}


def outcome(program: Callable[[], None]) -> tuple[str, str]:
    """Code and text of the device's error a program ended with; empty where it ended well. The error itself would hold its arrays."""
    try:
        program()
    except DeviceError as error:
        return error.code, str(error)
    return "", ""


def left_over(driver: NullCuda) -> dict[str, int]:
    """What is alive after all that can be given back was."""
    for _ in range(3):
        gc.collect()
    device = cuda.devices()[0]
    device.synchronize()
    device.pool.flush(wait=True)
    device.release_idle()
    # Kept by the device for good: what copies go through, and its own stream.
    return {kind: count for kind, count in driver.leaks().items() if kind not in ("host memory", "stream", "memory pool")}


def points(program: Callable[[], None]) -> Iterator[tuple[str, int]]:
    """Each call of a function that can run out of something, by its name and number."""
    with installed(mode="lazy") as driver:
        program()
        counts = Counter(driver.counts)
    for name in ALLOCATE:
        total = counts[name]
        # The first calls, the last, and some between.
        chosen = range(1, total + 1) if total <= 6 else [1, 2, 3, total // 2, total - 1, total]
        yield from ((name, number) for number in chosen)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_fails_once(name: str) -> None:
    program = PROGRAMS[name]
    with installed(mode="lazy", record=False) as driver:
        program()
        kept = left_over(driver)
    tried = raised = 0
    for function, number in points(program):
        with installed(mode="lazy", record=False) as driver:
            driver.inject[function] = {number: OUT_OF_MEMORY}
            where = f"call {number} of {function}"
            code, text = outcome(program)
            assert code in ("", "TW030", "TW031", "TW032", "TW036"), f"{where}: {text}"
            raised += bool(code)
            tried += 1
            driver.inject.clear()
            assert all(count <= kept.get(kind, 0) for kind, count in left_over(driver).items()), f"{where}: {left_over(driver)}"
            program()
            assert left_over(driver) == kept, where
            assert driver.violations == [], where
            assert driver.kernel_errors == [], where
    assert tried > 5
    assert raised > tried // 3


def test_memory_that_stays_exhausted() -> None:
    """Less and less memory: first it works, then it is an error with the numbers; either way all goes back."""
    outcomes: list[str] = []
    for total in (1 << 22, 1 << 14, 1 << 12, 1 << 10):
        with installed(memory=total, mode="lazy") as driver:
            code, text = outcome(plain)
            outcomes.append(code)
            assert not code or f"of {total}" in text
            for _ in range(2):
                gc.collect()
            cuda.devices()[0].synchronize()
            cuda.devices()[0].pool.flush()
            assert driver.used() == 0
        assert driver.violations == []
    assert outcomes[0] == ""
    assert outcomes[-1] == "TW031"
