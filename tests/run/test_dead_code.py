"""Kernels of which nothing, or little, is left once known conditions and empty loops are gone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw

DEBUG = 0
NONE = 0
DEVICES = ("cpu", "emulator", "emulator:loop", "emulator:tile", "sm_90a", "sm_75")


@tw.kernel
def false_store(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        if DEBUG > 1:
            out[i] = x[i]
    return out


@tw.kernel
def false_store_nested(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.full((n,), 2.0, x.dtype)
    for i in tw.grid(n):
        for j in range(n):
            if 1 > 2:
                out[i] += x[j]
    return out


@tw.kernel
def false_then_true(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.ones((n,), x.dtype)
    for i in tw.grid(n):
        if DEBUG:
            out[i] = 5.0
    for i in tw.grid(n):
        out[i] = out[i] + x[i]
    return out


@tw.kernel
def zero_extent(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        for j in range(NONE):
            out[i] = x[i] + j
    return out


@tw.kernel
def zero_reduction(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        total = 1.5
        for j in range(0):
            total += x[j]
        out[i] = total
    return out


@tw.kernel
def backward_range(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        for j in range(3, 1):
            out[i] += x[j]
    return out


@tw.kernel
def pass_only(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):  # noqa: B007
        pass
    return out


@tw.kernel
def unused_value(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        y = x[i] * 2.0  # noqa: F841
    return out


@tw.kernel
def constant_output(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = 3.0
    return out


@tw.kernel
def only_zeros(x: tw.Array) -> tw.Array:
    out = tw.zeros((len(x),), x.dtype)
    return out  # noqa: RET504


@tw.kernel
def unused_array(x: tw.Array) -> tw.Array:
    n = len(x)
    t = tw.zeros((n,), x.dtype)
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        t[i] = x[i] * 3.0
    for i in tw.grid(n):
        out[i] = 7.0
    return out


@tw.kernel
def while_false(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        v = x[i]
        while False:
            v = v * 2.0
        out[i] = v
    return out


@tw.kernel
def after_return_like(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), x.dtype)
    for i in tw.grid(n):
        if i < 0:
            out[i] = x[i]
        elif i >= n:
            out[i] = -x[i]
    return out


@tw.kernel
def minus_itself(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n,), tw.i64)
    for i in tw.grid(n):
        out[i] = (i - i) * n
    return out


@tw.kernel
def dead_two_axes(x: tw.Array) -> tw.Array:
    n = len(x)
    out = tw.zeros((n, n), x.dtype)
    for i, j in tw.grid(n, n):
        if i + j < 0:
            out[i, j] = x[i] * x[j]
    return out


CASES: dict[tw.Kernel, Callable[[np.ndarray], object]] = {
    false_store: np.zeros_like,
    false_store_nested: lambda x: np.full_like(x, 2),
    false_then_true: lambda x: 1 + x,
    zero_extent: np.zeros_like,
    zero_reduction: lambda x: np.full_like(x, 1.5),
    backward_range: np.zeros_like,
    pass_only: np.zeros_like,
    unused_value: np.zeros_like,
    constant_output: lambda x: np.full_like(x, 3),
    only_zeros: np.zeros_like,
    unused_array: lambda x: np.full_like(x, 7),
    while_false: lambda x: x,
    after_return_like: np.zeros_like,
    minus_itself: lambda x: np.zeros(len(x), np.int64),
    dead_two_axes: lambda x: np.zeros((len(x), len(x)), x.dtype),
}


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.__name__)
def test_what_is_left_runs(kernel: tw.Kernel) -> None:
    """A refusal would have to be the user's error; here there is none to make."""
    for count in (5, 1, 0, 70):
        x = np.arange(count, dtype=np.float32)
        expected = CASES[kernel](x.copy())
        for device in DEVICES:
            if device.startswith("sm_"):
                kernel.compile(x, target=device)
                continue
            np.testing.assert_array_equal(kernel(x, device=device), expected)
