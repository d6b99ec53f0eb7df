"""Elements of `tw.empty` that nobody wrote: the emulator names the array, the first of them and the line."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def shorter(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n - 1):
        out[i] = x[i]  # shorter
    return out


@tw.kernel
def some(x: tw.Array) -> tw.Array:
    n, m = x.shape
    out = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        if x[i, j] > 3:
            out[i, j] = x[i, j]  # some
    return out


@tw.kernel
def scattered(x: tw.Array, places: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in range(n):
        out[places[i]] = x[i]  # scattered
    return out


@tw.kernel
def between(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    t = tw.empty(n, x.dtype)
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n - 1):
        t[i] = x[i] * 2
    for i in tw.grid(n):
        out[i] = t[i]  # between
    return out


@tw.kernel
def running(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in range(1, n):
        out[i] = out[i - 1] + x[i]  # running
    return out


@tw.kernel
def two(x: tw.Array) -> tuple[tw.Array, tw.Array]:
    (n,) = x.shape
    first = tw.empty(n, x.dtype)
    last = tw.empty(n + 1, x.dtype)
    for i in tw.grid(n):
        first[i] = x[i]
        last[i] = x[i]  # two
    return first, last


@tw.kernel
def zeroed(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.zeros(n, x.dtype)
    for i in tw.grid(n - 1):
        out[i] = x[i]
    return out


@tw.kernel
def in_pieces(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n // 2):
        out[2 * i] = x[2 * i]
    for i in tw.grid(n - n // 2 - 1):
        out[2 * i + 1] = x[2 * i + 1]
    out[n - 1] = x[n - 1]
    return out


@tw.kernel
def joined(x: tw.Array, y: tw.Array) -> tw.Array:
    (n,) = x.shape
    (m,) = y.shape
    out = tw.empty(n + m, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i]
    for i in tw.grid(m):
        out[n + i] = y[i]
    return out


SIX = np.arange(1, 7, dtype=np.float32)
CASES = [
    (shorter, (SIX,), "'out'[5] was never written: one of 6 elements of the result would have no value"),
    (shorter, (SIX.astype(np.int8),), "'out'[5] was never written"),
    (some, (SIX.reshape(2, 3),), "'out'[0, 0] was never written: 3 of 6 elements of the result would have no value"),
    (scattered, (SIX, np.array([0, 1, 1, 3, 4, 5])), "'out'[2] was never written: one of 6 elements"),
    (between, (SIX,), "load of uninitialised global memory: 't'[5] was never written"),
    (running, (SIX,), "load of uninitialised global memory: 'out'[0] was never written"),
    (two, (SIX,), "'last'[6] was never written: one of 7 elements"),
]  # fmt: skip


@pytest.mark.parametrize("stage", ["thread", "tile", "loop"])
@pytest.mark.parametrize(("kernel", "arguments", "text"), CASES, ids=[f"{case[0].__name__}-{case[1][0].dtype}" for case in CASES])
@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
def test_what_nobody_wrote_is_reported(kernel: tw.Kernel[...], arguments: tuple[np.ndarray, ...], text: str, stage: str) -> None:
    with pytest.raises(tw.UserError) as error:
        kernel(*arguments, device=f"emulator:{stage}")
    assert error.value.code == "TW050"
    assert text in str(error.value)
    assert f"# {kernel.__name__}" in str(error.value)


@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
def test_what_is_written_in_pieces_or_given_is_accepted() -> None:
    for stage in ("thread", "loop"):
        device = f"emulator:{stage}"
        np.testing.assert_array_equal(zeroed(SIX, device=device), [1, 2, 3, 4, 5, 0])
        np.testing.assert_array_equal(joined(SIX, SIX[:2], device=device), [*SIX, 1, 2])
        np.testing.assert_array_equal(in_pieces(SIX, device=device), SIX)
        np.testing.assert_array_equal(scattered(SIX, np.arange(6)[::-1].copy(), device=device), SIX[::-1])
        np.testing.assert_array_equal(some(SIX.reshape(2, 3) + 3, device=device), SIX.reshape(2, 3) + 3)
        np.testing.assert_array_equal(shorter(np.ones(0, np.float32), device=device), [])


def test_elements_of_out_keep_what_they_held() -> None:
    given = np.full(12, 9, np.float32)
    for device in ("emulator", "emulator:loop", "cpu"):
        for out in (np.full(6, 9, np.float32), given[::2]):
            assert shorter(SIX, out=out, device=device) is out
            np.testing.assert_array_equal(out, [1, 2, 3, 4, 5, 9])
            out[:] = 9
    np.testing.assert_array_equal(given, np.full(12, 9))


@pytest.mark.filterwarnings("ignore::tilewright.PerformanceWarning")
def test_another_fault_is_reported_as_ever() -> None:
    with pytest.raises(tw.UserError, match=r"store of 'out' at \[9\] is out of bounds: index 9, extent 6, in block"):
        scattered(SIX, np.array([0, 9, 1, 3, 4, 5]), device="emulator")


@tw.kernel
def stepped(x: tw.Array, steps: int) -> tw.Array:
    n = len(x)
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(range(0, n, 2)):
        out[i] = x[i]
    for t in range(steps):
        for i in tw.grid(range(t + 1, n)):
            out[i] = x[i] + t
    return out


def test_ordered_loops_run_step_by_step() -> None:
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(stepped(x, 2, device="emulator:loop"), [0, 1, 3, 4, 5])
    with pytest.raises(tw.UserError, match=r"TW050.*'out'\[1\] was never written: 2 of 5"):
        stepped(x, 0, device="emulator:loop")
