"""Watchdogs: which loops get one, that code without is unchanged, and what a user is told when one bites."""

from __future__ import annotations

import ctypes
import re

import ml_dtypes
import numpy as np
import pytest
from test_null_devices import make_product, make_scale

import tilewright as tw
from assembled import assemble
from null_cuda import Fault
from null_cuda.install import installed
from tilewright.base.abi import WATCHDOG_MARK
from tilewright.base.errors import DeviceError, UserError
from tilewright.compile.serial import deserialise, serialise
from tilewright.execute.calls.watchdog import watchdog_nanoseconds

X = np.arange(8, dtype=np.int64)


def grow(x: tw.Array, count: tw.Array) -> tw.Array:
    out = tw.empty(x.shape, x.dtype)
    for i in tw.grid(x.shape[0]):
        v = x[i]
        for _ in range(count[i]):
            v = v * 2 + 1
        out[i] = v
    return out


LINE = grow.__code__.co_firstlineno + 4


def ptx(kernel: object, *arguments: object) -> str:
    return kernel.compile(*arguments, target="sm_90a").code.decode()  # type: ignore[attr-defined]


@pytest.mark.requires("ptxas")
def test_a_loop_that_data_decides_is_watched() -> None:
    plain, watched = tw.kernel(grow), tw.kernel(watchdog=0.5)(grow)
    without, with_ = ptx(plain, X, X), ptx(watched, X, X)
    assert "globaltimer" not in without
    assert "tilewright_watchdog" not in without
    # Once at the start, once where the loop turns.
    assert with_.count("%globaltimer") >= 2
    assert "trap;" in with_
    assert re.search(r"\.visible \.global .* tilewright_watchdog", with_)
    assert str(WATCHDOG_MARK | LINE) in with_
    assemble(with_, "sm_90a")
    assert watched.compile(X, X, target="sm_90a").launches[0].watchdog == 500_000_000


@pytest.mark.requires("ptxas")
def test_waits_of_a_pipeline_are_watched() -> None:
    a, b = (np.ones((256, 256), ml_dtypes.bfloat16) for _ in range(2))
    product = make_product().python  # type: ignore[attr-defined]
    with_ = ptx(tw.kernel(watchdog=2.0)(product), a, b)
    waits = len(re.findall(r"mbarrier\.try_wait", with_))
    assert waits >= 2
    assert with_.count("%globaltimer") > waits
    assemble(with_, "sm_90a")
    assert "globaltimer" not in ptx(tw.kernel(product), a, b)


def test_loops_over_sizes_are_not_watched() -> None:
    scale = make_scale().python  # type: ignore[attr-defined]
    arguments = np.ones((4, 64), np.float32), np.ones(64, np.float32), 2.0
    assert ptx(tw.kernel(watchdog=1)(scale), *arguments) == ptx(tw.kernel(scale), *arguments)


def test_the_cpu_has_none() -> None:
    np.testing.assert_array_equal(tw.kernel(watchdog=0.5)(grow)(X, X), tw.kernel(grow)(X, X))


def test_artifacts_keep_it() -> None:
    artifact = tw.kernel(watchdog=0.25)(grow).compile(X, X, target="sm_90a")
    again = deserialise(serialise(artifact))
    assert again == artifact
    assert again.launches[0].watchdog == 250_000_000
    assert again.launches[0].place.startswith(f"{__file__}:")


@pytest.mark.parametrize("seconds", [-1, 1e9, True, "2", float("nan")])
def test_what_is_no_time(seconds: object) -> None:
    with pytest.raises(UserError, match="watchdog= is"):
        watchdog_nanoseconds(seconds)  # type: ignore[arg-type]


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watchdog_nanoseconds(None) == 0
    monkeypatch.setenv("TILEWRIGHT_WATCHDOG", "1.5")
    assert watchdog_nanoseconds(None) == 1_500_000_000
    assert watchdog_nanoseconds(0) == 0  # a kernel's own word counts
    assert "globaltimer" in ptx(tw.kernel(grow), X, X)
    monkeypatch.setenv("TILEWRIGHT_WATCHDOG", "soon")
    with pytest.raises(UserError, match="TILEWRIGHT_WATCHDOG is 'soon'"):
        watchdog_nanoseconds(None)


def test_a_bite_is_told_with_kernel_and_line() -> None:
    """A stand-in for the kernel reports and traps as the compiled one does."""
    with installed(mode="lazy") as driver:
        kernel = tw.kernel(watchdog=0.5)(grow)
        x = tw.to_device(X, "cuda")
        np.testing.assert_array_equal(kernel(x, x).numpy(), tw.kernel(grow)(X, X))

        def bite(table: int, grid: tuple[int, int, int]) -> None:
            (module,) = (h for h in driver.handles.values() if h.kind == "module" and "tilewright_watchdog" in h.ptx)
            word = ctypes.c_uint64.from_buffer(module.variables["tilewright_watchdog"]).value
            ctypes.c_uint64.from_address(word).value = WATCHDOG_MARK | LINE
            raise Fault(719)

        driver.kernels["tw_grow_0"] = bite
        with pytest.raises(DeviceError) as caught:
            kernel(x, x).numpy()
        assert caught.value.code == "TW035"
        assert str(caught.value).startswith(
            f"error[TW035]: the watchdog stopped kernel tw_grow_0 at {__file__}:{LINE} after 0.5 s, on cuda:0 (Fake GPU)"
        )
        with pytest.raises(DeviceError, match=r"cuda:0 .* is lost to this process: the watchdog stopped kernel tw_grow_0"):
            x.numpy()
    assert driver.violations == []
