"""The default device counts for every call made after it was set, also for kernels that have run before."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@tw.kernel
def doubled(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] + x[i]
    return out


def target() -> str:
    assert doubled.last is not None
    return doubled.last.target


def test_a_change_reaches_kernels_that_ran_before() -> None:
    x = np.arange(5, dtype=np.float32)
    try:
        for _ in range(3):
            np.testing.assert_array_equal(doubled(x), x + x)
        on_cpu = target()
        tw.set_default_device("emulator")
        np.testing.assert_array_equal(doubled(x), x + x)
        assert target() == "sm_90a"
    finally:
        tw.set_default_device("cpu")
    np.testing.assert_array_equal(doubled(x), x + x)
    assert target() == on_cpu


def test_an_unknown_default_changes_nothing() -> None:
    with pytest.raises(tw.UserError):
        tw.set_default_device("abacus")
    assert tw.default_device() == "cpu"
