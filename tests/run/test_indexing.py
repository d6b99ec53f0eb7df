"""Indices that make arrays: `None`, steps, `...`, arrays of indices and masks; and axes of extent 1 that repeat. Against NumPy in f64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import tilewright as tw
from kernel_table import from_text

DEVICES = ["cpu", "emulator"]
TARGETS = ["sm_90a", "gfx942", "wgsl", "msl", "spirv-vulkan", "spirv-opencl"]
RNG = np.random.default_rng(5)
X = RNG.normal(0, 2, (7, 5, 3))
ROWS = np.array([0, -1, 3, 2, 2])
COLUMNS = np.array([1, 0, 2, -3, 0], np.int32)


@tw.kernel
def distances(a: tw.Array, b: tw.Array) -> tw.Array:
    gap = a[:, None, :] - b[None, :, :]
    return (gap * gap).sum(axis=-1)


@tw.kernel
def newaxis(a: tw.Array, b: tw.Array) -> tw.Array:
    return a[..., np.newaxis] * b[None] + a[0, 0, None, None]


@tw.kernel
def backwards(x: tw.Array) -> tw.Array:
    return x[1::2, None, ..., ::-2] * 2


@tw.kernel
def between(x: tw.Array, rows: tw.Array, columns: tw.Array) -> tw.Array:
    return x[rows, :, columns] * 2


@tw.kernel
def beside(x: tw.Array, rows: tw.Array) -> tw.Array:
    return x[1:, rows % 5, 0].sum(axis=1)


@tw.kernel
def crossed(x: tw.Array, rows: tw.Array, columns: tw.Array) -> tw.Array:
    return x[rows[:, None], columns, 1] + x[rows][0, 0, 0]


@tw.kernel
def of_computed(x: tw.Array) -> tw.Array:
    y = x * 2
    return y[1:, None][0] + y[2] + y[::2][1]


@tw.kernel
def in_loops(x: tw.Array, rows: tw.Array) -> tw.Array:
    n, m, _ = x.shape
    out = tw.zeros((n, m, 5), x.dtype)
    for i in tw.grid(n):
        out[i, :, ::2] = x[i, :, ::-1]
        out[i, :, 1] = x[i, rows % 5, 0]
        out[i, 0] = x[i, :, 0] + x[i, :, 1][None, :][0]
    return out


@tw.kernel
def best(x: tw.Array) -> tw.Array:
    return x[tw.argmax(x[:, 0, 0]), tw.argmin(x[0], axis=0), 0]


@tw.kernel
def red_black(x: tw.Array) -> tw.Array:
    u = x * 1
    for _ in range(40):
        u[1:-1:2] = (u[:-2:2] + u[2::2]) / 2
        u[2:-1:2] = (u[1:-2:2] + u[3::2]) / 2
    return u


@tw.kernel
def statistics(x: tw.Array) -> tw.Array:
    out = tw.empty(7, x.dtype)
    m = x > 0
    out[0] = tw.sum(x[m])
    out[1] = (x[m] * 2 + 1).max()
    out[2] = tw.mean(x[x > 0])
    out[3] = tw.std(x[m])
    out[4] = x[m & (x < 1)].min()
    out[5] = tw.norm(x[m] * x[m])
    out[6] = tw.prod(x[x > 3])
    return out


@tw.kernel
def decaying(x: tw.Array, m: tw.Array) -> tw.Array:
    u = x * 1
    for _ in range(50):
        u[u > 1] *= 0.5
        u[m] = 0
    u[~m] += x[~m] * 3
    return u


@tw.kernel
def put(x: tw.Array, rows: tw.Array) -> tw.Array:
    out = tw.zeros((9, 5, 3), x.dtype)
    out[rows] = x[:5]
    return out


@tw.kernel
def added(x: tw.Array, rows: tw.Array) -> tw.Array:
    out = tw.ones((9, 5), x.dtype)
    out[rows] += x[:5, :, 0] * 2
    out[rows, 0] -= 1
    return out


@tw.kernel
def crossed_stores(x: tw.Array, rows: tw.Array, columns: tw.Array) -> tw.Array:
    out = tw.zeros((7, 3), x.dtype)
    out[rows, columns] = 5
    out[rows[:, None], columns] += 1
    out[2:6, columns] *= 3
    out[1, columns] = x[:5, 0, 0]
    return out


@tw.kernel
def turned_stores(x: tw.Array) -> tw.Array:
    out = tw.zeros_like(x)
    out[::-1] = x
    out[:, 0, ::-2] += x[:, 1, ::2]
    return out


@tw.kernel
def exchanged(x: tw.Array, rows: tw.Array) -> tw.Array:
    u = x * 1
    u[rows] = u[::-1][1:]
    u[::-1] = u
    return u


@tw.kernel
def stores_in_loops(x: tw.Array, rows: tw.Array) -> tw.Array:
    n, m, k = x.shape
    out = tw.zeros((n, m, k), x.dtype)
    for i in tw.grid(n):
        out[i, rows, ::-1] = x[i]
    return out


def _put(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = np.zeros((9, 5, 3))
    out[rows] = x[:5]
    return out


def _added(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = np.ones((9, 5))
    np.add.at(out, rows, x[:5, :, 0] * 2)
    np.subtract.at(out, (rows, 0), 1)
    return out


def _crossed_stores(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    out = np.zeros((7, 3))
    out[rows, columns] = 5
    np.add.at(out, (rows[:, None], columns), 1)
    np.multiply.at(out, (slice(2, 6), columns), 3)
    out[1, columns] = x[:5, 0, 0]
    return out


def _turned_stores(x: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    out[::-1] = x
    out[:, 0, ::-2] += x[:, 1, ::2]
    return out


def _exchanged(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    u = x.copy()
    u[rows] = u[::-1][1:].copy()
    return u[::-1]


def _stores_in_loops(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = np.zeros_like(x)
    out[:, rows, ::-1] = x
    return out


def _in_loops(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = np.zeros((*x.shape[:2], 5))
    out[:, :, ::2] = x[:, :, ::-1]
    out[:, :, 1] = x[:, rows % 5, 0]
    out[:, 0] = x[:, :, 0] + x[:, :, 1]
    return out


def _red_black(x: np.ndarray) -> np.ndarray:
    u = x.copy()
    for _ in range(40):
        u[1:-1:2] = (u[:-2:2] + u[2::2]) / 2
        u[2:-1:2] = (u[1:-2:2] + u[3::2]) / 2
    return u


def _statistics(x: np.ndarray) -> np.ndarray:
    v = x[x > 0]
    return np.array([v.sum(), (2 * v + 1).max(), v.mean(), v.std(), v[v < 1].min(), np.sqrt((v**4).sum()), x[x > 3].prod()])


def _decaying(x: np.ndarray, m: np.ndarray) -> np.ndarray:
    u = x.copy()
    for _ in range(50):
        u[u > 1] *= 0.5
        u[m] = 0
    u[~m] += x[~m] * 3
    return u


CASES: list[tuple[tw.Kernel, Callable[..., np.ndarray], tuple[np.ndarray, ...]]] = [
    (distances, lambda a, b: ((a[:, None] - b) ** 2).sum(-1), (X[:, :, 0], X[1:4, :, 1])),
    (newaxis, lambda a, b: a[..., None] * b + a[0, 0], (X[:, :, 0], X[0, 1])),
    (backwards, lambda x: x[1::2, None, ..., ::-2] * 2, (X,)),
    (between, lambda x, r, c: x[r, :, c] * 2, (X, ROWS, COLUMNS)),
    (beside, lambda x, r: x[1:, r % 5, 0].sum(1), (X, ROWS)),
    (crossed, lambda x, r, c: x[r[:, None], c, 1] + x[r][0, 0, 0], (X, ROWS, COLUMNS)),
    (of_computed, lambda x: 2 * (x[1:, None][0] + x[2] + x[2]), (X[:, 0, 0],)),
    (in_loops, _in_loops, (X, ROWS)),
    (best, lambda x: x[x[:, 0, 0].argmax(), x[0].argmin(0), 0], (X,)),
    (red_black, _red_black, (RNG.normal(0, 1, 33),)),
    (statistics, _statistics, (X,)),
    (statistics, _statistics, (RNG.normal(0, 2, 97),)),
    (decaying, _decaying, (X * 9, X < 0.3)),
    (put, _put, (X, ROWS)),
    (added, _added, (X, ROWS)),
    (crossed_stores, _crossed_stores, (X, ROWS, COLUMNS)),
    (turned_stores, _turned_stores, (X,)),
    (exchanged, _exchanged, (X[:5, 0, 0].copy(), np.array([3, 1, 0, 2]))),
    (stores_in_loops, _stores_in_loops, (X, np.array([4, 0, 1, 3, 2], np.uint8))),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kernel", "reference", "given"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_indices(kernel: tw.Kernel, reference: Callable[..., np.ndarray], given: tuple[np.ndarray, ...], device: str) -> None:
    got = kernel(*given, device=device)
    want = reference(*given)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
def test_places_outside_are_refused(device: str) -> None:
    for wrong in (9, -10):
        with pytest.raises(tw.TilewrightError, match=f"index {wrong + 9 if wrong < 0 else wrong}|outside"):
            put(X, np.array([0, 1, wrong, 2, 3]), device=device)
    with pytest.raises(tw.UserError, match="axis 0 of 'rows' is 2"):
        added(X[:5], np.array([0, 1]), device=device)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_code(target: str) -> None:
    single = X.astype(np.float32)
    assert distances.compile(single[:, :, 0].copy(), single[1:4, :, 1].copy(), target=target).launches
    assert between.compile(single, ROWS, COLUMNS, target=target).launches
    assert statistics.compile(single, target=target).launches
    assert added.compile(single, ROWS, target=target).launches
    assert put.compile(single, ROWS, target=target).launches
    assert turned_stores.compile(single, target=target).launches


# -- axes of extent 1 -------------------------------------------------------------------------------------------------


@tw.kernel
def summed(x: tw.Array, y: tw.Array) -> tw.Array:
    return x * 2 + y


@tw.kernel
def row_by_row(x: tw.Array, y: tw.Array) -> tw.Array:
    out = tw.empty_like(x)
    for i in tw.grid(x.shape[0]):
        out[i, :] = x[i, :] - y[i, :]
    return out


@tw.kernel
def in_a_loop(x: tw.Array, y: tw.Array) -> tw.Array:
    n = y.shape[0]
    out = tw.empty(n, x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] + y[i]
    return out


SHAPES = [
    ((3, 1), (3, 4)), ((3, 4), (3, 4)), ((3, 4), (1, 4)), ((3, 1), (1, 4)), ((1, 1), (3, 4)), ((1,), (5,)), ((5,), (1,)), ((1,), (1,)), ((3, 4), (1,)),
    ((1,), (0,)), ((3, 1), (3, 0)), ((4,), (3, 1)), ((2, 1, 5), (7, 1)),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_extents_of_one_repeat(device: str) -> None:
    for dtype in (np.float32, np.int32):
        for a, b in SHAPES if dtype is np.float32 else SHAPES[:2]:
            x, y = (RNG.normal(0, 9, shape).astype(dtype) for shape in (a, b))
            got = summed(x, y, device=device)
            assert got.shape == (x + y).shape
            np.testing.assert_allclose(got, x.astype(np.float64) * 2 + y, rtol=1e-6, atol=1e-5)
    wide = RNG.normal(0, 1, (33, 6))
    np.testing.assert_array_equal(summed(wide[:, ::2], wide[:, 3:4], device=device), wide[:, ::2] * 2 + wide[:, 3:4])
    np.testing.assert_array_equal(row_by_row(wide, wide[:, :1], device=device), wide - wide[:, :1])


def test_full_extents_keep_their_code() -> None:
    x, y = RNG.normal(0, 1, (2, 3, 4))
    summed(x, y)
    assert summed.last is not None
    before = summed.last.key
    summed(x, y[:, :1])
    assert summed.last.key != before
    assert [str(extent) for extent in summed.last.inputs[1].shape][1:] == ["1"]
    summed(x, y)
    assert summed.last.key == before


def test_other_extents_are_errors() -> None:
    for kernel, a, b, words in (
        (summed, (3, 4), (3, 5), "axis 1 of 'y' is 5, but its counterpart is 4 (axis 1 of 'x')"),
        (summed, (3, 1), (2, 4), "axis 0 of 'y' is 2, but its counterpart is 3 (axis 0 of 'x')"),
        (in_a_loop, (1,), (5,), "axis 0 of 'y' is 5, but 'n' is 1 (axis 0 of 'x')"),
    ):
        with pytest.raises(tw.UserError) as error:
            kernel(np.zeros(a), np.zeros(b))
        assert words in str(error.value)


# -- what is wrong ----------------------------------------------------------------------------------------------------

WRONG = {
    "return x[x > 0]": ("TW014", "how many elements the mask selects"),
    "return tw.sum(x[x > 0] + y)": ("TW004", "with the same mask"),
    "out = tw.zeros_like(x[x > 0])": ("TW016", "takes an array"),
    "z = x[x > 0]\n    out = tw.zeros_like(z)\n    return out": ("TW014", "how many elements"),
    "z = x[x > 0]\n    return z @ z": ("TW014", "how many elements"),
    "z = x[x > 0]\n    return z[0]": ("TW014", "how many elements"),
    "return tw.argmax(x[x > 0])": ("TW005", "argmax() of elements that a mask selects"),
    "out = x * 1\n    out[x > 0] = x[x > 1]\n    return out": ("TW004", "the same mask on both sides"),
    "out = x * 1\n    out[x > 0] = y\n    return out": ("TW004", "out[m] = x[m]"),
    "return x[m > 0]": ("TW003", "its mask has rank 2"),
    "return m[x > 0, 0]": ("TW005", "a mask is the only index"),
    "return x[y]": ("TW009", "must hold integers, got f64"),
    "out = x * 1\n    out[:, None] = 1\n    return out": ("TW005", "None in what is written"),
    "return x[::0]": ("TW016", "other than 0"),
    "return x[3:0:-1]": ("TW005", "x[a:b][::-1]"),
    "out = tw.zeros((5, 2), x.dtype)\n    out[x > 0, 0] = 1\n    return out": ("TW005", "a mask and something else"),
    "out = tw.zeros(5, x.dtype)\n    out[x] = 1\n    return out": ("TW009", "an array of indices must hold integers, got f64"),
    "out = tw.zeros(5, x.dtype)\n    out[rows] = m\n    return out": ("TW003", "the part of 'out' has rank 1, and the value has rank 2"),
    "return x[rows, 0]": ("TW003", "rank 1 but is indexed with 2"),
}


@pytest.mark.parametrize("body", WRONG)
def test_what_is_refused(body: str) -> None:
    code, words = WRONG[body]
    with pytest.raises(tw.TilewrightError) as error:
        from_text(f"def wrong(x: tw.Array, y: tw.Array, m: tw.Array, rows: tw.Array):\n    {body}\n")(np.ones(5), np.ones(5), np.ones((5, 2)), ROWS)
    assert code in str(error.value) and words in str(error.value), str(error.value)


@tw.kernel
def gathered(x: tw.Array, rows: tw.Array) -> tw.Array:
    return x[rows] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_out_of_range(device: str) -> None:
    for index in (7, 100, -8):
        with pytest.raises(tw.TilewrightError) as error:
            gathered(np.ones(7), np.array([0, index]), device=device)
        assert f"index {index if index > 0 else index + 7}" in str(error.value) and "test_indexing.py" in str(error.value)
