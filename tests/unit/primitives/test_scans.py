"""Scans along axes, on the CPU and in the emulator, against a loop in Python's or float64's numbers: order, dtypes, sizes, segments, several arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import bf16, f32
from tilewright.base.errors import UserError
from tilewright.base.target import parse_target
from tilewright.primitives.functions import Monoid
from tilewright.primitives.scan_plan import ScanPlan, StateFunction
from tilewright.primitives.scan_rows import rows_shape

DEVICES = ("cpu", "emulator")
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64, bf16.numpy]
SHAPES = [(1,), (31,), (33,), (1, 1), (3, 31), (33, 7), (2, 67, 3), (5, 1, 4), (0, 4), (4, 0), (2, 3, 129), (1, 200, 1)]

EMULATED = [(1,), (33, 7), (2, 3, 129), (4, 0)]
"""The emulator is slow."""


def lines(shape: tuple[int, ...], axis: int) -> list[tuple[Any, ...]]:
    """An index for each line along an axis."""
    around = [range(n) for k, n in enumerate(shape) if k != axis % len(shape)]
    found: list[tuple[Any, ...]] = [()]
    for extent in around:
        found = [(*index, i) for index in found for i in extent]
    at = axis % len(shape)
    return [(*index[:at], slice(None), *index[at:]) for index in found]


def expected(
    x: np.ndarray, join: Callable[[Any, Any], Any], axis: int, *, exclusive: bool = False, reverse: bool = False, init: Any = None, begins: Any = None
) -> np.ndarray:
    """The scan by a plain loop; `begins[t]` or `begins[index]` says where a segment begins, in the order of memory."""
    out = np.empty_like(x)
    size = x.shape[axis]
    for index in lines(x.shape, axis):
        line, result = x[index], np.empty_like(x[index])
        marks = np.zeros(size, bool) if begins is None else begins[index] if begins.shape == x.shape else begins
        order = range(size - 1, -1, -1) if reverse else range(size)
        state = init
        for t in order:
            first = t == size - 1 or marks[t + 1] if reverse else marks[t]
            state = init if first else state
            before = state
            state = line[t] if state is None else x.dtype.type(join(state, line[t]))
            result[t] = before if exclusive else state
        out[index] = result
    return out


def numbers(shape: tuple[int, ...], dtype: Any = np.int32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + math.prod(shape))
    return rng.integers(0 if np.dtype(dtype).kind == "u" else -4, 5, shape).astype(dtype)


@pytest.mark.parametrize(("device", "shape"), [*(("cpu", s) for s in SHAPES), *(("emulator", s) for s in EMULATED)], ids=str)
def test_every_axis_forward_and_back(device: str, shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    for axis in range(-len(shape) if device == "cpu" else 0, len(shape)):
        assert np.array_equal(tw.scan(x, axis=axis, device=device), np.cumsum(x, axis, np.int32))
        for exclusive in (False, True):
            for reverse in (False, True):
                found = tw.scan(x, "max", axis=axis, exclusive=exclusive, reverse=reverse, init=-3 if exclusive else None, device=device)
                wanted = expected(x, max, axis, exclusive=exclusive, reverse=reverse, init=-3 if exclusive else None)
                assert np.array_equal(found, wanted), (axis, exclusive, reverse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_every_dtype(device: str, dtype: Any) -> None:
    x = numbers((5, 70, 3), dtype)
    wide = x.astype(np.float64)
    for axis in (0, 1, 2):
        for reverse in (False, True):
            turned = np.flip(wide, axis) if reverse else wide
            wanted = np.cumsum(turned, axis)
            wanted = np.flip(wanted, axis) if reverse else wanted
            found = tw.scan(x, axis=axis, reverse=reverse, device=device)
            assert found.dtype == x.dtype
            exact = wanted.astype(np.int64).astype(dtype) if np.dtype(dtype).kind in "iu" else wanted.astype(dtype)
            assert np.array_equal(found.astype(np.float64), exact.astype(np.float64)), (axis, reverse)


@pytest.mark.parametrize("device", DEVICES)
def test_bools(device: str) -> None:
    x = np.random.default_rng(0).random((9, 35)) > 0.8
    for axis in (0, 1):
        assert np.array_equal(tw.scan(x, "or", axis=axis, device=device), np.logical_or.accumulate(x, axis))
        assert np.array_equal(tw.scan(x, "min", axis=axis, reverse=True, device=device), np.flip(np.logical_and.accumulate(np.flip(x, axis), axis), axis))
        assert np.array_equal(tw.scan(x, axis=axis, dtype=tw.i32, device=device), np.cumsum(x, axis))


def later(a: Any, b: Any) -> Any:
    return b


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(700,), (3, 90), (90, 3), (2, 90, 3)], ids=str)
def test_functions_keep_the_order(device: str, shape: tuple[int, ...]) -> None:
    """`a * 3 + b` on pairs would do as well; matrices do not commute."""
    x = numbers(shape, np.int64)
    for axis in range(len(shape)):
        assert np.array_equal(tw.scan(x, lambda a, b: b, axis=axis, device=device), x)
        assert np.array_equal(tw.scan(x, lambda a, b: a, axis=axis, device=device), expected(x, lambda a, b: a, axis))
        found = tw.scan(x, later, axis=axis, exclusive=True, reverse=True, init=9, device=device)
        assert np.array_equal(found, expected(x, later, axis, exclusive=True, reverse=True, init=9))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(500,), (4, 77), (77, 4), (2, 40, 5)], ids=str)
def test_segments(device: str, exclusive: bool, reverse: bool, shape: tuple[int, ...]) -> None:
    if device == "emulator" and shape in ((500,), (77, 4)):
        shape = tuple(min(n, 40) for n in shape)
    x = numbers(shape)
    rng = np.random.default_rng(3)
    for axis in range(len(shape)):
        size = shape[axis]
        flags, line = rng.random(shape) > 0.8, rng.random(size) > 0.7
        ids = np.cumsum(line).astype(np.int16)
        for init in (None, 5) if not exclusive else (5,):
            options = {"axis": axis, "exclusive": exclusive, "reverse": reverse, "init": init}
            wanted = expected(x, lambda a, b: a + b, begins=flags, **options)
            assert np.array_equal(tw.scan(x, segments=flags, device=device, **options), wanted)
            wanted = expected(x, lambda a, b: a + b, begins=line, **options)
            assert np.array_equal(tw.scan(x, segments=line, device=device, **options), wanted)
            assert np.array_equal(tw.scan(x, segments=ids, device=device, **options), wanted)
            assert np.array_equal(tw.scan(x, lambda a, b: a + b, segments=ids, device=device, **options), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(300,), (4, 60), (60, 4), (2, 40, 5)], ids=str)
def test_several_arrays(device: str, shape: tuple[int, ...]) -> None:
    """A linear recurrence h = a h + b, as a scan of pairs."""
    a, b = numbers(shape, np.int64), numbers(shape, np.int32, 1)
    for axis in range(len(shape)):
        for reverse in (False, True):
            calls: list[Callable[..., Any]] = [lambda a, b, c, d: (a * c, b * c + d), lambda s, e: (s[0] * e[0], s[1] * e[0] + e[1]), affine]
            for join in calls:
                products, values = tw.scan((a, b), join, axis=axis, reverse=reverse, device=device)
                assert products.dtype == np.int64 and values.dtype == np.int32
                for index in lines(shape, axis):
                    order = range(shape[axis] - 1, -1, -1) if reverse else range(shape[axis])
                    product, value = 1, 0
                    for t in order:
                        product, value = wrapped(product * int(a[index][t]), 64), wrapped(value * int(a[index][t]) + int(b[index][t]), 32)
                        assert products[index][t] == product and values[index][t] == value


def affine(s: Any, e: Any) -> Any:
    first, second = s
    scale, shift = e
    return first * scale, second * scale + shift


def wrapped(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


@pytest.mark.parametrize("device", DEVICES)
def test_several_arrays_exclusive_in_segments(device: str) -> None:
    a, b = numbers((3, 50)), numbers((3, 50), seed=1)
    flags = np.random.default_rng(1).random((3, 50)) > 0.8
    largest, total = tw.scan((a, b), lambda s, e: (tw.max(s[0], e[0]), s[1] + e[1]), exclusive=True, init=(-9, 2), segments=flags, device=device)
    assert np.array_equal(largest, expected(a, max, 1, exclusive=True, init=-9, begins=flags))
    assert np.array_equal(total, expected(b, lambda x, y: x + y, 1, exclusive=True, init=2, begins=flags))


@pytest.mark.parametrize("device", DEVICES)
def test_views(device: str) -> None:
    x = numbers((20, 30, 8))
    for view in (x[::2, ::-1], x.transpose(2, 0, 1), np.asfortranarray(x), x[..., 1]):
        for axis in range(view.ndim):
            assert np.array_equal(tw.scan(view, axis=axis, device=device), np.cumsum(view, axis, np.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_nan_infinity_and_zeros(device: str) -> None:
    x = np.array([1, -np.inf, 2, np.nan, 3, np.inf, -0.0] * 5, np.float32)
    for data in (x, x[:, None] * np.ones(3, np.float32)):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(tw.scan(data, axis=0, device=device), np.cumsum(data, 0))
        np.testing.assert_array_equal(tw.scan(data, "max", axis=0, device=device), np.maximum.accumulate(data, 0))
        np.testing.assert_array_equal(tw.scan(data, "min", axis=0, device=device), np.minimum.accumulate(data, 0))
    zeros = np.full(40, -0.0, np.float32)
    assert np.signbit(tw.scan(zeros, device=device)).all()
    assert not np.signbit(tw.scan(zeros, exclusive=True, device=device)).any()


def test_long_rows_and_columns_in_chunks() -> None:
    """More than a chunk of a few long lines on a CPU."""
    for shape in ((100_003,), (3, 70_001), (70_001, 3), (2, 5_000, 7)):
        x = numbers(shape, np.int64)
        for axis in range(len(shape)):
            assert np.array_equal(tw.scan(x, axis=axis), np.cumsum(x, axis))
            assert np.array_equal(tw.scan(x, lambda a, b: a + b, axis=axis, reverse=True), np.flip(np.cumsum(np.flip(x, axis), axis), axis))
            assert np.array_equal(tw.scan(x, later, axis=axis), x)
            flags = np.random.default_rng(0).random(shape) > 0.999
            found = tw.scan(x, axis=axis, segments=flags, exclusive=True)
            assert np.array_equal(found, _exclusive_in_segments(x, flags, axis))


def _exclusive_in_segments(x: np.ndarray, flags: np.ndarray, axis: int) -> np.ndarray:
    before = np.cumsum(x, axis) - x
    out = np.empty_like(x)
    for index in lines(x.shape, axis):
        line, marks = before[index], flags[index].copy()
        marks[0] = True
        starts = np.flatnonzero(marks)
        out[index] = line - np.repeat(line[starts], np.diff(np.append(starts, len(line))))
    return out


def test_sums_of_floats_are_close_to_those_in_float64() -> None:
    x = np.random.default_rng(0).random((33, 5000)).astype(np.float32)
    for axis in (0, 1):
        np.testing.assert_allclose(tw.scan(x, axis=axis), np.cumsum(x, axis, np.float64), rtol=2e-6)


def test_old_names_are_the_same_functions() -> None:
    for name in ("scan", "sort", "argsort", "filter", "histogram", "unique", "run_lengths", "map"):
        assert getattr(tw, name) is getattr(tw, f"gpu_{name}")


def _x() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tw.scan(_x(), axis=2), r"axis is 2, but the data have shape \[3, 4\]"),
        (lambda: tw.scan(_x(), axis=-3), r"axis is -3"),
        (lambda: tw.scan(_x(), axis=0.5), "axis is 0.5, not a whole number"),
        (lambda: tw.scan(_x(), "median"), "scan does not know 'median'"),
        (lambda: tw.scan(_x(), lambda a, b: a + b, exclusive=True), "needs init="),
        (lambda: tw.scan((_x(), _x()[:2]), lambda a, b, c, d: (a, b)), r"one shape, got \[3, 4\] and \[2, 4\]"),
        (lambda: tw.scan((_x(), _x()), "sum"), "by a function of two tuples"),
        (lambda: tw.scan((_x(), _x()), lambda a, b: a), "does not return 2 numbers"),
        (lambda: tw.scan((_x(), _x()), lambda a, b, c: (a, b)), r"takes 3 argument\(s\)"),
        (lambda: tw.scan((_x(), _x()), lambda a, b, c, d: (a, b), init=3), r"init is 3, but scan has 2 array"),
        (lambda: tw.scan((_x(), _x()), lambda a, b, c, d: (a, b), dtype=(tw.f32,)), r"2 array\(s\), but 1 dtypes"),
        (lambda: tw.scan(()), "empty tuple"),
        (lambda: tw.scan(_x(), segments=_x()), "segments are f32"),
        (lambda: tw.scan(_x(), segments=np.zeros(3, bool)), r"segments have shape \[3\], but the data have \[3, 4\]"),
        (lambda: tw.scan(_x(), init="a"), "init is 'a', which is no f32"),
        (lambda: tw.scan(np.float32(3)), "not an array"),
    ],
)
def test_errors(call: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        call()


ROW_SHAPES = [(70, 1), (9, 5), (5, 256), (3, 600), (2, 1031), (2, 2048), (1, 9000)]
"""Lanes of a warp, warps and blocks that have a row; rows of several tiles; widths of vectors that divide rows, and none."""


@pytest.mark.parametrize("shape", ROW_SHAPES, ids=str)
def test_rows_of_a_gpu(shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    flags = np.random.default_rng(1).random(shape) > 0.9
    for reverse in (False, True):
        assert np.array_equal(tw.scan(x, reverse=reverse, exclusive=True, init=2, device="emulator"), expected(x, np.add, 1, exclusive=True, reverse=reverse, init=2))
        assert np.array_equal(tw.scan(x, lambda a, b: b, reverse=reverse, device="emulator"), x)
        wanted = expected(x, np.add, 1, reverse=reverse, begins=flags)
        assert np.array_equal(tw.scan(x, segments=flags, reverse=reverse, device="emulator"), wanted)
    doubles = numbers(shape, np.float64)
    assert np.array_equal(tw.scan(doubles, device="emulator"), np.cumsum(doubles, 1))
    bytes_ = numbers(shape, np.uint8)
    assert np.array_equal(tw.scan(bytes_, "max", device="emulator"), np.maximum.accumulate(bytes_, 1))


@pytest.mark.parametrize("shape", [(1, 700), (3, 1100), (2, 8200)], ids=str)
def test_rows_that_blocks_share(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """A few long rows are one line for the look-back: here short ones, since the emulator is slow."""
    monkeypatch.setattr("tilewright.primitives.scan_rows.rows_shape", lambda *_: None)
    x = numbers(shape)
    flags = np.random.default_rng(1).random(shape) > 0.9
    for reverse in (False, True):
        assert np.array_equal(tw.scan(x, reverse=reverse, device="emulator"), expected(x, np.add, 1, reverse=reverse))
        options = {"reverse": reverse, "exclusive": True, "init": 3}
        assert np.array_equal(tw.scan(x, segments=flags, device="emulator", **options), expected(x, np.add, 1, begins=flags, **options))


def test_which_rows_have_threads_of_their_own() -> None:
    target = parse_target("sm_90a")
    plan = ScanPlan((f32,), (f32,), StateFunction(Monoid(f32, "add")))

    def lanes(rows: int, size: int, aligned: bool = True) -> int:
        shape = rows_shape(plan, target, rows, size, aligned)
        return 0 if shape is None else shape.lanes

    assert [lanes(1000, n) for n in (1, 4, 33, 256, 2048, 100_000)] == [1, 1, 8, 16, 128, 512]
    assert [lanes(4, n) for n in (2048, 16_384, 100_000)] == [128, 512, 0]
    assert rows_shape(plan, target, 1000, 256, False).width == 1  # type: ignore[union-attr]
    assert rows_shape(plan, target, 1000, 34, True).width == 2  # type: ignore[union-attr]
