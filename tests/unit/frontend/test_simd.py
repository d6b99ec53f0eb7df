"""Explicit SIMD values: what each operation computes, on the CPU and on the emulator, the code it becomes, and every message."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import UserError
from tilewright.base.simd import TYPES

DEVICES = ("cpu", "emulator")


@tw.cpu
def arithmetic(x: tw.Array, y: tw.Array, out: tw.Array):
    a = tw.f32x4.load(x, 0)
    b = tw.f32x4.load(y, 0)
    (a + b).store(out, 0, 0)
    (a - 2.0).store(out, 1, 0)
    (3.0 * a).store(out, 2, 0)
    (a / b).store(out, 3, 0)
    (-a).store(out, 4, 0)
    tw.fma(a, b, 1.0).store(out, 5, 0)
    min(a, b).store(out, 6, 0)
    max(a, b, 0.0).store(out, 7, 0)
    tw.sqrt(b).store(out, 8, 0)
    abs(a).store(out, 9, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_arithmetic(device: str) -> None:
    x, y = np.array([1, -2, 3, -4], np.float32), np.array([5, 6, 7, 8], np.float32)
    out = np.zeros((10, 4), np.float32)
    arithmetic(x, y, out, device=device)
    wanted = [x + y, x - 2, 3 * x, x / y, -x, x * y + 1, np.minimum(x, y), np.maximum(x, y), np.sqrt(y), np.abs(x)]
    np.testing.assert_array_equal(out, np.stack(wanted))


@tw.cpu
def integers(x: tw.Array, y: tw.Array, out: tw.Array):
    a = tw.i32x4.load(x, 0)
    b = tw.i32x4.load(y, 0)
    (a // b).store(out, 0, 0)
    (a % b).store(out, 1, 0)
    (a & b).store(out, 2, 0)
    (a | 1).store(out, 3, 0)
    (a ^ b).store(out, 4, 0)
    (a << 2).store(out, 5, 0)
    (a >> 1).store(out, 6, 0)
    (~a).store(out, 7, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_integers(device: str) -> None:
    x, y = np.array([17, -18, 19, -20], np.int32), np.array([5, 3, -7, 2], np.int32)
    out = np.zeros((8, 4), np.int32)
    integers(x, y, out, device=device)
    np.testing.assert_array_equal(out, np.stack([x // y, x % y, x & y, x | 1, x ^ y, x << 2, x >> 1, ~x]))


@tw.cpu
def lanes(x: tw.Array, out: tw.Array, numbers: tw.Array):
    v = tw.f32x4.load(x, 4)
    v.shuffle(3, 2, 1, 0).store(out, 0, 0)
    v.shuffle((0, 4, 1, 5), other=tw.f32x4.load(x, 0)).store(out, 1, 0)
    v.insert(2, 9.5).store(out, 2, 0)
    tw.f32x4(1.0, 2.0, numbers[0], 4.0).store(out, 3, 0)
    w = tw.f32x8.load(x, 0)
    w.shuffle(0, 2, 4, 6).store(out, 4, 0)
    numbers[0] = v[1]
    numbers[1] = v[-1]
    numbers[2] = v.sum()
    numbers[3] = w.max()
    numbers[4] = w.min()
    numbers[5] = v.product()
    numbers[6] = w.width


@pytest.mark.parametrize("device", DEVICES)
def test_lanes(device: str) -> None:
    x, out, numbers = np.arange(1, 9, dtype=np.float32), np.zeros((5, 4), np.float32), np.zeros(7, np.float32)
    lanes(x, out, numbers, device=device)
    np.testing.assert_array_equal(out, [[8, 7, 6, 5], [5, 1, 6, 2], [5, 6, 9.5, 8], [1, 2, 0, 4], [1, 3, 5, 7]])
    np.testing.assert_array_equal(numbers, [6, 8, 26, 8, 1, 1680, 8])


@tw.cpu
def masks(x: tw.Array, out: tw.Array, found: tw.Array):
    v = tw.f64x4.load(x, 0)
    positive = v > 0.0
    tw.where(positive, v, -v).store(out, 0, 0)
    tw.where((v <= -1.0) | ~(v != 2.0), 1.0, v).store(out, 1, 0)
    tw.where(x[0] > 0, v, tw.f64x4(7.0)).store(out, 2, 0)
    found[0] = positive.any()
    found[1] = positive.all()
    found[2] = (v < 100.0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_masks(device: str) -> None:
    x, out, found = np.array([-1.0, 2.0, -0.5, 4.0]), np.zeros((3, 4)), np.zeros(3, np.bool_)
    masks(x, out, found, device=device)
    np.testing.assert_array_equal(out, [[1, 2, 0.5, 4], [1, 1, -0.5, 4], [7, 7, 7, 7]])
    assert found.tolist() == [True, False, True]


@tw.cpu
def conversions(x: tw.Array, integers: tw.Array, doubles: tw.Array, bits: tw.Array):
    v = tw.f32x4.load(x, 0)
    v.cast(tw.i32).store(integers, 0)
    v.cast(tw.f64).store(doubles, 0)
    tw.bitcast(v, tw.u32).store(bits, 0)


@pytest.mark.parametrize("device", DEVICES)
def test_conversions(device: str) -> None:
    x = np.array([1.5, -2.5, 3.0, 1e10], np.float32)
    integers, doubles, bits = np.zeros(4, np.int32), np.zeros(4), np.zeros(4, np.uint32)
    conversions(x, integers, doubles, bits, device=device)
    np.testing.assert_array_equal(integers, [1, -2, 3, 2**31 - 1])
    np.testing.assert_array_equal(doubles, x.astype(np.float64))
    np.testing.assert_array_equal(bits, x.view(np.uint32))


@tw.cpu
def carried(x: tw.Array, out: tw.Array):
    """Registers go through loops and branches, also ones that are first assigned inside."""
    total = tw.f32x4(0.0)
    i = 0
    while True:
        v = tw.f32x4.load(x, i)
        if v.sum() > 10.0:
            total += v
        elif v[0] < 0:
            total = total - v
        else:
            last = v * 2.0
            total = total + last
        i += 4
        if i >= len(x):
            break
    total.store(out, 0)
    v.store(out, 4)


@pytest.mark.parametrize("device", DEVICES)
def test_registers_through_control_flow(device: str) -> None:
    x = np.array([1, 2, 3, 5, -1, 2, 3, 4, 1, 1, 1, 1], np.float32)
    out = np.zeros(8, np.float32)
    carried(x, out, device=device)
    np.testing.assert_array_equal(out, [1 + 1 + 2, 2 - 2 + 2, 3 - 3 + 2, 5 - 4 + 2, 1, 1, 1, 1])


@tw.cpu
def squares(x: tw.Array, y: tw.Array):
    first = tw.block.x * 64
    for i in range(first, first + 64, 16):
        v = tw.f32x16.load(x, i)
        (v * v).store(y, i)


def test_several_runs_are_spread_over_the_cores() -> None:
    x, y = np.arange(640, dtype=np.float32), np.zeros(640, np.float32)
    squares[10](x, y)
    np.testing.assert_array_equal(y, x * x)
    with pytest.raises(UserError, match="takes how many times it runs, got -1"):
        squares[-1]


def _sums(kind: object, dtype: object) -> Callable[..., None]:
    @tw.cpu
    def total(x: tw.Array, out: tw.Array):
        sums = kind(0)
        for i in range(0, len(x), kind.width):
            sums += kind.load(x, i)
        sums.store(out, 0)

    return total


@pytest.mark.parametrize("name", sorted(TYPES))
def test_every_type(name: str) -> None:
    kind = TYPES[name]
    x = (np.arange(kind.width * 3) % 11).astype(kind.dtype.numpy)
    out = np.zeros(kind.width, kind.dtype.numpy)
    _sums(kind, kind.dtype)(x, out)
    np.testing.assert_array_equal(out, x.reshape(3, -1).sum(axis=0, dtype=kind.dtype.numpy))
    assert getattr(tw, name) is kind
    assert name in tw.__all__
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_registers_are_registers() -> None:
    x = np.zeros(64, np.float32)
    assembly = squares.assembly(x, x.copy())
    width = {64: "zmm", 32: "ymm", 16: "xmm"}[tw.devices()[0].target.vector_bytes]
    assert any("vmulps" in line and width in line for line in assembly.splitlines()) or width == "xmm"


def _bad(body: Callable[..., object]) -> str:
    kernel = tw.cpu(body)
    with pytest.raises(UserError) as caught:
        kernel(np.zeros(8, np.float32), np.zeros(8, np.int32))
    return str(caught.value)


def test_messages() -> None:
    def widths(x: tw.Array, n: tw.Array):
        a = tw.f32x4.load(x, 0) + tw.f32x8.load(x, 0)
        a.store(x, 0)

    assert "'+' of f32x4 and f32x8" in _bad(widths)

    def dtypes(x: tw.Array, n: tw.Array):
        tw.f32x4.load(n, 0).store(x, 0)

    assert "'n' holds i32, not f32" in _bad(dtypes)

    def outside(x: tw.Array, n: tw.Array):
        x[0] = tw.f32x4.load(x, 0)[4]

    assert "lane 4 is outside: f32x4 has 4" in _bad(outside)

    def unknown(x: tw.Array, n: tw.Array):
        x[0] = tw.f32x4.load(x, 0).mean()

    assert "a value of type f32x4 has no 'mean'" in _bad(unknown)

    def count(x: tw.Array, n: tw.Array):
        tw.f32x4(1.0, 2.0).store(x, 0)

    assert "f32x4 takes one number, or 4, got 2" in _bad(count)

    def condition(x: tw.Array, n: tw.Array):
        if tw.f32x4.load(x, 0) > 0.0:
            x[0] = 1.0

    assert "a value of type mask4, not a number" in _bad(condition)

    def division(x: tw.Array, n: tw.Array):
        (tw.i32x4.load(n, 0) / 2).store(n, 0)

    assert "'/' of i32x4 would give floats" in _bad(division)

    def element(x: tw.Array, n: tw.Array):
        x[0] = tw.f32x4(0.0)

    assert "the value is a value of type f32x4, not a number" in _bad(element)

    def forms(x: tw.Array, n: tw.Array):
        v = tw.f32x4(0.0)
        if x[0] > 0:
            v = tw.f32x8(0.0)
        v.store(x, 0)

    assert "is a value of type f32x8 on one way and a value of type f32x4 on the other" in _bad(forms)

    def strange(x: tw.Array, n: tw.Array):
        tw.f32x4.load(x, 0).shuffle(0, 1, 2, 9).store(x, 0)

    assert "lane 9 is outside: there are 4" in _bad(strange)


def test_strided_arrays_are_refused() -> None:
    with pytest.raises(UserError, match="'x' may not have its elements one after another"):
        squares(np.zeros((64, 2), np.float32)[:, 0], np.zeros(64, np.float32))


def test_outside_compiled_functions_they_say_so() -> None:
    for call in (lambda: tw.f32x4(0.0), lambda: tw.f32x4.load(np.zeros(4), 0)):
        with pytest.raises(UserError, match="only inside a function that Tilewright compiles"):
            call()
    assert repr(tw.f32x4) == "tilewright.f32x4"
    assert repr(squares) == "<CPU function squares(x, y)>"


def test_checks_find_registers_that_reach_outside() -> None:
    checked = tw.cpu(check=True)(squares.kernel.python)
    x = np.zeros(64, np.float32)
    checked(x, x.copy())
    with pytest.raises(tw.TilewrightError, match=r"load of 16 elements of 'x' from \[32\] on is out of bounds: it has 40 elements"):
        checked(np.zeros(40, np.float32), np.zeros(64, np.float32))
