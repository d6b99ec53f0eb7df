"""Strided transposed convolutions as natural loops: every result asks which terms fall on it (`p % s == 0`). Against scattering in float64."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bench.families import convolutions

import tilewright as tw
from tilewright.base.target import Target
from tilewright.codegen.registry import Backend
from tilewright.compile import build, driver, store
from tilewright.passes.windows import place_taps

S, P = 2, 1
S1, S3 = 1, 3
D4 = 4


@tw.kernel
def joined(x: tw.Array, w: tw.Array, bias: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, k, kh, kw = w.shape
    rows, cols = (height - 1) * S3 - 2 * P + kh + 1, (width - 1) * S1 - 2 * P + kw
    out = tw.empty((n, k, rows, cols), x.dtype)
    for b, f, i, j in tw.grid(n, k, rows, cols):
        acc = tw.f32(0)
        for q in range(c):
            for r in range(kh):
                for s in range(kw):
                    y = i + P - r
                    z = j + P - s
                    if y % S3 == 0 and z % S1 == 0 and y // S3 >= 0 and y // S3 < height and z >= 0 and z // S1 < width:
                        acc += x[b, q, y // S3, z // S1] * w[q, f, r, s]
        out[b, f, i, j] = acc + bias[f]
    return out


@tw.kernel
def nested(x: tw.Array, w: tw.Array) -> tw.Array:
    """Channels last; conditions as they come; a step beyond the window in one axis, none in the other."""
    n, height, width, c = x.shape
    kh, kw, _, k = w.shape
    rows, cols = (height - 1) * D4 + kh, width - 1 + kw
    out = tw.empty((n, rows, cols, k), x.dtype)
    for b, i, j, f in tw.grid(n, rows, cols, k):
        acc = tw.f32(0)
        for r in range(kh):
            y = i - r
            if y % D4 == 0:  # noqa: SIM102
                if not (y < 0 or y // D4 > height - 1):
                    for s in range(kw):
                        z = j - s
                        if 0 <= z < width and z % 1 == 0:
                            for q in range(c):
                                acc += x[b, y // D4, z // 1, q] * w[r, s, q, f]
        out[b, i, j, f] = acc
    return out


@tw.kernel
def dilated(x: tw.Array, w: tw.Array) -> tw.Array:
    """The dilation and the step have a divisor in common, so that some results have no terms."""
    n, c, length = x.shape
    _, k, taps = w.shape
    extent = (length - 1) * D4 - 2 * P + 6 * (taps - 1) + 2
    out = tw.empty((n, k, extent), x.dtype)
    for b, f, o in tw.grid(n, k, extent):
        acc = tw.f32(0)
        for q in range(c):
            for r in range(taps):
                p = o + P - 6 * r
                i = p // D4
                acc += x[b, q, i] * w[q, f, r] if i * D4 == p and i >= 0 and i < length else 0.0
        out[b, f, o] = acc
    return out


@tw.kernel
def jumping(x: tw.Array, w: tw.Array) -> tw.Array:
    """Groups, three axes, `continue`."""
    n, groups, c, depth, height, width = x.shape
    k, kd, kh, kw = w.shape[2], w.shape[3], w.shape[4], w.shape[5]
    out = tw.empty((n, groups, k, (depth - 1) * S + kd, height - 1 + kh, (width - 1) * S + kw), x.dtype)
    for b, g, f, a, i, j in tw.grid(n, groups, k, (depth - 1) * S + kd, height - 1 + kh, (width - 1) * S + kw):
        acc = tw.f32(0)
        for t in range(kd):
            v = a - t
            if v % S != 0 or v < 0 or v // S >= depth:
                continue
            for r in range(kh):
                y = i - r
                if y < 0 or y >= height:
                    continue
                for s in range(kw):
                    z = j - s
                    if z % S != 0 or z < 0 or z // S >= width:
                        continue
                    for q in range(c):
                        acc += x[b, g, q, v // S, y, z // S] * w[g, q, f, t, r, s]
        out[b, g, f, a, i, j] = acc
    return out


def scattered(
    x: np.ndarray,
    w: np.ndarray,
    steps: tuple[int, ...],
    dilations: tuple[int, ...],
    before: tuple[int, ...],
    shape: tuple[int, ...],
) -> np.ndarray:
    """[n, c, …] and [c, k, …] in float64: each element is added where it falls; `before` is cut off."""
    n, axes = len(x), len(shape)
    full = [
        max((e - 1) * s + (t - 1) * d + 1, p + o)
        for e, s, t, d, p, o in zip(x.shape[2:], steps, w.shape[2:], dilations, before, shape, strict=True)
    ]
    out = np.zeros((n, w.shape[1], *full))
    for tap in np.ndindex(*w.shape[2:]):
        places = tuple(
            slice(t * d, t * d + (e - 1) * s + 1, s)
            for t, d, e, s in zip(tap, dilations, x.shape[2:], steps, strict=True)
        )
        out[(slice(None), slice(None), *places)] += np.einsum(
            "nc...,ck->nk...", x.astype(np.float64), w[(slice(None), slice(None), *tap)].astype(np.float64)
        )
    return out[(slice(None), slice(None), *(slice(before[a], before[a] + shape[a]) for a in range(axes)))]


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("shape", [(2, 5, 7, 3, 4, 3), (1, 17, 1, 5, 3, 2), (0, 3, 2, 2, 3, 3)])
def test_two_axes_with_bias(shape: tuple[int, ...]) -> None:
    n, c, height, width, kh, kw = shape
    x, w, bias = normal(n, c, height, width), normal(c, 9, kh, kw), normal(9)
    found = joined(x, w, bias)
    wanted = scattered(x, w, (3, 1), (1, 1), (1, 1), found.shape[2:]) + bias.astype(np.float64)[:, None, None]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_channels_last_with_a_step_beyond_the_window() -> None:
    x, w = normal(2, 3, 7, 33), normal(3, 2, 33, 5)
    found = nested(x, w)
    wanted = scattered(np.moveaxis(x, 3, 1), np.moveaxis(w, (2, 3), (0, 1)), (4, 1), (1, 1), (0, 0), found.shape[1:3])
    np.testing.assert_allclose(found, np.moveaxis(wanted, 1, 3), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("taps", [1, 3])
def test_dilation_and_step_with_a_common_divisor(taps: int) -> None:
    x, w = normal(2, 5, 11)[:, :, ::-1], normal(5, 4, taps)
    found = dilated(x, w)
    np.testing.assert_allclose(found, scattered(x, w, (4,), (6,), (1,), found.shape[2:]), rtol=1e-5, atol=1e-4)


def test_three_axes_and_groups() -> None:
    x, w = normal(1, 2, 3, 2, 3, 3), normal(2, 3, 4, 3, 1, 2)
    found = jumping(x, w)
    wanted = [scattered(x[:, g], w[g], (2, 1, 2), (1, 1, 1), (0, 0, 0), found.shape[3:]) for g in range(2)]
    np.testing.assert_allclose(found, np.stack(wanted, 1), rtol=1e-5, atol=1e-4)


def test_on_the_emulator_by_matrix_instructions() -> None:
    x, w, bias = (
        normal(1, 32, 5, 3, dtype=np.float16),
        normal(32, 32, 3, 2, dtype=np.float16),
        normal(32, dtype=np.float16),
    )
    found = joined(x, w, bias, device="emulator")
    wanted = scattered(x, w, (3, 1), (1, 1), (1, 1), found.shape[2:]) + bias.astype(np.float64)[:, None, None]
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-2)


def test_each_phase_is_a_product_of_tensor_cores() -> None:
    arguments = [np.empty(s, np.float16) for s in ((8, 64, 28, 28), (64, 64, 4, 3), (64,))]
    found = joined.stages(*arguments, target="sm_90a").stages
    phases = [
        s.describe()
        for c, s in zip(found.tile.calls, found.schedules, strict=True)
        if "phase" in c.kernel.name.split(".")[-1]
    ]
    assert len(phases) == 3 and all(text.startswith("family=wgmma") for text in phases), phases


@tw.kernel
def squares(x: tw.Array, w: tw.Array) -> tw.Array:
    n, c, height, width = x.shape
    _, k, kh, kw = w.shape
    rows, cols = (height - 1) * S - 2 * P + kh, (width - 1) * S - 2 * P + kw
    out = tw.empty((n, k, rows, cols), x.dtype)
    for b, f, i, j in tw.grid(n, k, rows, cols):
        acc = tw.f32(0)
        for q in range(c):
            for r in range(kh):
                for s in range(kw):
                    y = i + P - r
                    z = j + P - s
                    if y % S == 0 and z % S == 0 and y // S >= 0 and y // S < height and z // S >= 0 and z // S < width:
                        acc += x[b, q, y // S, z // S] * w[q, f, r, s]
        out[b, f, i, j] = acc
    return out


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The texts that machine code is made of, by an empty cache."""
    found: list[str] = []
    plain = build._generate

    def noted(backend: Backend, text: str, target: Target, proven: bool) -> bytes:
        found.append(text)
        return plain(backend, text, target, proven)

    monkeypatch.setattr(build, "_generate", noted)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    store.disk_cache.cache_clear()
    driver.forget()
    yield found
    store.disk_cache.cache_clear()


@pytest.mark.parametrize("length", [4, 6])
def test_phases_with_as_many_terms_share_machine_code(length: int, texts: list[str]) -> None:
    squares.forget_programs()
    rng = np.random.default_rng(length)
    # Few channels: one product for all taps would take longer.
    x, w = (
        rng.standard_normal((2, 8, 20, 21), dtype=np.float32),
        rng.standard_normal((8, 24, length, length), dtype=np.float32),
    )
    whole = np.zeros((2, 24, 19 * S + length, 20 * S + length))
    for i in range(20):
        for j in range(21):
            whole[:, :, i * S : i * S + length, j * S : j * S + length] += np.einsum(
                "nc,cfrs->nfrs", x[:, :, i, j], w.astype(np.float64)
            )
    np.testing.assert_allclose(squares(x, w), whole[:, :, P:-P, P:-P], rtol=1e-3, atol=1e-3)
    (text,) = (text for text in texts if "phase" in text)
    products = re.findall(r"define [^\n]*@tw_squares_phase\d_\d+\.body\(", text)
    assert len(products) == 1 and len(re.findall(r"define [^\n]*@tw_squares_phase\d_\d+\(", text)) == 4


ODD_PHASES = [
    ((5, 5), (2, 3), (0, 1), 1),  # three, two and one term along an axis
    ((3, 5), (3, 2), (1, 2), 1),  # results with one tap, which no other reads
    ((5, 6), (4, 2), (2, 2), 1),
    ((3, 3, 3), (2, 2, 2), (0, 0, 0), 1),  # a phase that reads nothing outside
    ((4, 4, 4), (2, 2, 2), (2, 2, 2), 1),  # no phase reads anything outside
    ((2, 5), (2, 2), (0, 1), 1),  # the first tap alone, and the second
    ((7,), (2,), (3,), 2),
]
"""Taps, steps, padding and dilation."""


def phased(taps: tuple[int, ...], s: tuple[int, ...], p: tuple[int, ...], d: int) -> tw.Kernel:
    if len(taps) == 2:
        return convolutions.transposed2d((s[0], s[1]), (p[0], p[1]), d, True)
    return convolutions.transposed1d(s[0], p[0], d, 0) if len(taps) == 1 else convolutions.transposed3d(s[0], p[0])


@pytest.mark.parametrize(("taps", "s", "p", "d"), ODD_PHASES)
def test_phases_of_windows_that_differ_share_a_copy_and_machine_code(
    taps: tuple[int, ...], s: tuple[int, ...], p: tuple[int, ...], d: int, texts: list[str]
) -> None:
    kernel = phased(taps, s, p, d)
    for images, far in ((2, 11), (1, 3), (0, 5), (3, 4)):
        extents = (far, far + 2, far - 1)[-len(taps) :]
        # Few channels and many filters: one product for all taps would take longer.
        x, w = normal(images, 2, *extents), normal(2, 65, *taps)
        found = kernel(x, w)
        np.testing.assert_allclose(found, scattered(x, w, s, (d,) * len(s), p, found.shape[2:]), rtol=1e-4, atol=1e-4)
        assert kernel.last is not None and sum("padded" in array.name for array in kernel.last.scratch) <= 1
    for text in texts:
        assert len(re.findall(r"define [^\n]*phase\d+_\d+\.body\(", text)) <= 1
    assert any("phase" in text for text in texts)


@pytest.mark.parametrize(("taps", "s", "p", "d"), ODD_PHASES)
def test_phases_that_share_a_copy_keep_what_is_no_number(taps: tuple[int, ...], s: tuple[int, ...], p: tuple[int, ...], d: int) -> None:
    x, w = normal(1, 2, *(6, 5, 7)[-len(taps) :]), normal(2, 65, *taps)
    x[(0, 1, *(0 for _ in taps))] = np.inf
    x[(0, 0, *(3 for _ in taps))] = np.nan
    found = phased(taps, s, p, d)(x, w)
    wanted = scattered(x, w, s, (d,) * len(s), p, found.shape[2:])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_phases_of_images_that_are_views() -> None:
    kernel = phased((5, 5), (2, 3), (0, 1), 1)
    x, w = normal(4, 2, 26, 19)[::2, :, ::2, ::-1], normal(5, 5, 65, 2).transpose(3, 2, 1, 0)
    out = np.full((4, 65, 29, 57), 7, np.float32)
    wanted = scattered(x, w, (2, 3), (1, 1), (0, 1), (29, 57))
    np.testing.assert_allclose(kernel(x, w, out=out[1:3]), wanted, rtol=1e-4, atol=1e-4)
    assert (out[0] == 7).all() and (out[3] == 7).all()


# -- one product for all taps ---------------------------------------------------------------------------------------------------------


def transposed2d(s: tuple[int, int], p: tuple[int, int], d: tuple[int, int], extra: int = 0) -> tw.Kernel:
    (s0, s1), (p0, p1), (d0, d1) = s, p, d

    @tw.kernel
    def spread(x: tw.Array, w: tw.Array, bias: tw.Array) -> tw.Array:
        n, c, height, width = x.shape
        _, k, kh, kw = w.shape
        rows, cols = (
            (height - 1) * s0 - 2 * p0 + d0 * (kh - 1) + 1 + extra,
            (width - 1) * s1 - 2 * p1 + d1 * (kw - 1) + 1 + extra,
        )
        out = tw.empty((n, k, rows, cols), x.dtype)
        for b, f, i, j in tw.grid(n, k, rows, cols):
            acc = tw.f32(0)
            for q in range(c):
                for r in range(kh):
                    for t in range(kw):
                        y = i + p0 - r * d0
                        z = j + p1 - t * d1
                        if y % s0 == 0 and z % s1 == 0 and 0 <= y // s0 < height and 0 <= z // s1 < width:
                            acc += x[b, q, y // s0, z // s1] * w[q, f, r, t]
            out[b, f, i, j] = tw.maximum(acc + bias[f], tw.f32(-1))
        return out

    return spread


@pytest.mark.parametrize(
    ("taps", "s", "p", "d", "extra"),
    [
        ((4, 4), (2, 2), (1, 1), (1, 1), 0),
        ((3, 3), (3, 3), (0, 0), (1, 1), 1),  # as many taps as steps
        ((5, 1), (4, 2), (2, 0), (2, 1), 0),  # results without terms along both axes
        ((3, 6), (2, 3), (1, 4), (2, 2), 0),
        ((2, 5), (1, 4), (0, 2), (3, 1), 2),  # a step of 1, and steps beyond the window
        ((1, 1), (2, 4), (0, 0), (1, 1), 3),
        ((2, 2), (3, 3), (1, 1), (1, 1), 0),
    ],
)  # fmt: skip
def test_one_product_for_all_taps(
    taps: tuple[int, int], s: tuple[int, int], p: tuple[int, int], d: tuple[int, int], extra: int
) -> None:
    kernel = transposed2d(s, p, d, extra)
    for images, width in ((2, 17), (2, 18), (2, 39), (17, 20)):
        # Few filters: phases would copy all channels for each tap of theirs.
        x, w, bias = normal(images, 19, 13, width), normal(19, 7, *taps), normal(7)
        found = kernel(x, w, bias)
        wanted = scattered(x, w, s, d, p, found.shape[2:]) + bias.astype(np.float64)[:, None, None]
        np.testing.assert_allclose(found, np.maximum(wanted, -1), rtol=1e-4, atol=1e-4)
        assert kernel.last is not None and any("products" in array.name for array in kernel.last.scratch), width


def test_images_that_are_views_and_results_that_are_given() -> None:
    kernel = transposed2d((2, 3), (1, 0), (1, 1))
    x, w, bias = normal(4, 19, 26, 19)[::2, :, ::2, ::-1], normal(3, 4, 18, 19).transpose(3, 2, 0, 1), normal(18)
    wanted = np.maximum(scattered(x, w, (2, 3), (1, 1), (1, 0), (25, 58)) + bias.astype(np.float64)[:, None, None], -1)
    out = np.full((4, 18, 25, 58), 7, np.float32)
    np.testing.assert_allclose(kernel(x, w, bias, out=out[1:3]), wanted, rtol=1e-4, atol=1e-4)
    assert (out[0] == 7).all() and (out[3] == 7).all()


def test_values_that_are_no_numbers_stay_where_they_fall() -> None:
    """Zeros of the frame are multiplied by weights, but their products are no terms of results inside."""
    x, w, bias = normal(1, 19, 9, 23), normal(19, 18, 3, 4), normal(18)
    x[0, 3, 4, 0] = np.inf
    found = transposed2d((3, 2), (0, 1), (1, 1))(x, w, bias)
    wanted = scattered(x, w, (3, 2), (1, 1), (0, 1), found.shape[2:])
    assert (np.isfinite(found) == (np.isfinite(wanted) | (wanted == -np.inf))).all()


def test_a_condition_that_leaves_out_more_than_borders_is_kept() -> None:
    @tw.kernel
    def shorter(x: tw.Array, w: tw.Array) -> tw.Array:
        n, c, length = x.shape
        _, k, taps = w.shape
        out = tw.empty((n, k, length * S + taps), x.dtype)
        for b, f, o in tw.grid(n, k, length * S + taps):
            acc = tw.f32(0)
            for q in range(c):
                for r in range(taps):
                    p = o - r
                    if p % S == 0 and p // S >= 1 and p // S < length - 1:
                        acc += x[b, q, p // S] * w[q, f, r]
            out[b, f, o] = acc
        return out

    x, w = normal(2, 19, 300), normal(19, 18, 3)
    found = shorter(x, w)
    x[:, :, 0] = x[:, :, -1] = 0
    np.testing.assert_allclose(found, scattered(x, w, (S,), (1,), (0,), found.shape[2:]), rtol=1e-4, atol=1e-4)


# -- one product on GPUs -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are few where an emulator computes them."""
    monkeypatch.setattr(place_taps, "SMALL", 0)


def placed(kernel: tw.Kernel) -> bool:
    """Whether the last call took its results from one product."""
    return kernel.last is not None and any("products" in array.name for array in kernel.last.scratch)


@pytest.mark.parametrize(
    ("taps", "s", "p", "d", "extra", "dtype"),
    [
        ((3, 3), (3, 3), (0, 0), (1, 1), 1, np.float32),
        ((2, 3), (4, 4), (0, 1), (1, 1), 0, np.float32),  # rows and columns without terms
        ((1, 1), (2, 4), (0, 0), (1, 1), 3, np.float32),
        ((2, 2), (4, 3), (1, 1), (2, 2), 0, np.float32),  # the dilation and the step have a divisor in common
        ((2, 2), (2, 2), (0, 0), (1, 1), 0, np.float16),  # rows of whole vectors
        ((4, 2), (4, 3), (1, 0), (1, 1), 0, np.float16),
        ((2, 3), (9, 4), (1, 0), (1, 1), 0, np.float32),  # too many rests of rows to be written apart
    ],
)  # fmt: skip
@pytest.mark.usefixtures("few_are_many")
def test_taps_that_never_meet_are_one_product_on_gpus(
    taps: tuple[int, int], s: tuple[int, int], p: tuple[int, int], d: tuple[int, int], extra: int, dtype: type
) -> None:
    kernel = transposed2d(s, p, d, extra)
    for images, height, width in ((2, 3, 17), (1, 1, 1), (0, 2, 5), (1, 4, 16)):
        x, w, bias = normal(images, 19, height, width, dtype=dtype), normal(19, 7, *taps, dtype=dtype), normal(7, dtype=dtype)
        found = kernel(x, w, bias, device="emulator")
        wanted = scattered(x, w, s, d, p, found.shape[2:]) + bias.astype(np.float64)[:, None, None]
        far = 1e-4 if dtype is np.float32 else 3e-2
        np.testing.assert_allclose(found.astype(np.float64), np.maximum(wanted, -1), rtol=far, atol=far)
        assert placed(kernel), width


@pytest.mark.parametrize(
    ("taps", "s", "p", "d", "extra", "dtype"),
    [
        ((3, 3), (2, 3), (1, 1), (1, 1), 0, np.float32),
        ((4, 4), (2, 2), (1, 1), (1, 1), 0, np.float32),
        ((5, 6), (3, 4), (0, 2), (1, 1), 1, np.float32),  # one term for some results, two for others
        ((3, 6), (2, 3), (1, 4), (2, 2), 0, np.float32),
        ((2, 5), (1, 4), (0, 2), (3, 1), 2, np.float32),  # a step of 1
        ((3, 4), (2, 4), (1, 0), (2, 2), 0, np.float32),  # results without terms along both axes
        ((4, 3), (3, 2), (1, 0), (1, 1), 0, np.float16),
        ((11, 5), (9, 4), (1, 0), (1, 1), 0, np.float32),  # too many rests of rows to be written apart
    ],
)  # fmt: skip
def test_taps_that_meet_are_added_up_on_gpus(
    taps: tuple[int, int], s: tuple[int, int], p: tuple[int, int], d: tuple[int, int], extra: int, dtype: type
) -> None:
    kernel = transposed2d(s, p, d, extra)
    for images, height, width in ((2, 3, 17), (1, 1, 2), (0, 2, 5), (1, 4, 16)):
        x, w, bias = normal(images, 19, height, width, dtype=dtype), normal(19, 7, *taps, dtype=dtype), normal(7, dtype=dtype)
        found = kernel(x, w, bias, device="emulator")
        wanted = scattered(x, w, s, d, p, found.shape[2:]) + bias.astype(np.float64)[:, None, None]
        far = 1e-4 if dtype is np.float32 else 3e-2
        np.testing.assert_allclose(found.astype(np.float64), np.maximum(wanted, -1), rtol=far, atol=far)
        assert placed(kernel), width


def test_sums_of_products_are_rounded_once() -> None:
    """Products of two-byte factors are kept as sums of four bytes where several make a result."""
    kernel = transposed2d((3, 3), (1, 1), (1, 1))
    found = kernel.stages(*(np.empty(s, np.float16) for s in ((1, 64, 8, 8), (64, 64, 4, 4), (64,))), target="sm_90a").stages
    (products,) = (array for array in found.tile.scratch if "products" in array.name)
    assert products.type.dtype.name == "f32"


def test_three_axes_and_one_that_meet() -> None:
    for kernel, shapes, s in (
        (convolutions.transposed3d(2, 1), ((1, 5, 3, 2, 4), (5, 3, 3, 4, 3)), (2, 2, 2)),
        (convolutions.transposed3d(4, 0), ((1, 3, 2, 2, 3), (3, 2, 5, 4, 6)), (4, 4, 4)),  # 64 phases
        (convolutions.transposed1d(4, 1, 1, 1), ((2, 9, 31), (9, 5, 9)), (4,)),
    ):
        x, w = normal(*shapes[0]), normal(*shapes[1])
        found = kernel(x, w, device="emulator")
        wanted = scattered(x, w, s, (1,) * len(s), (1,) * len(s) if s != (4, 4, 4) else (0, 0, 0), found.shape[2:])
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
        assert placed(kernel)


def test_values_that_are_no_numbers_stay_where_they_fall_on_gpus() -> None:
    x, w, bias = normal(1, 19, 4, 5), normal(19, 7, 3, 4), normal(7)
    x[0, 3, 2, 0] = np.inf
    kernel = transposed2d((3, 2), (0, 1), (1, 1))
    found = kernel(x, w, bias, device="emulator")
    wanted = scattered(x, w, (3, 2), (1, 1), (0, 1), found.shape[2:])
    assert placed(kernel) and (np.isfinite(found) == (np.isfinite(wanted) | (wanted == -np.inf))).all()


@pytest.mark.parametrize(
    ("shapes", "s", "one"),
    [
        (((2, 16, 20, 20), (16, 24, 4, 4)), (2, 2), True),  # launches alone count
        (((4, 512, 16, 16), (512, 256, 4, 4)), (2, 2), True),  # few tiles for each phase
        (((8, 32, 128, 128), (32, 8, 4, 4)), (2, 2), True),  # few filters
        (((16, 64, 64, 64), (64, 64, 5, 5)), (2, 2), False),  # many products for each result
        (((8, 12, 100, 100), (12, 128, 4, 4)), (2, 2), False),  # products take long to write and to read
        (((64, 32, 512, 512), (32, 8, 4, 4)), (2, 2), False),  # 8 GiB of products
    ],
)  # fmt: skip
def test_what_is_chosen_on_gpus(shapes: tuple[tuple[int, ...], tuple[int, ...]], s: tuple[int, int], one: bool) -> None:
    found = convolutions.transposed2d(s, (1, 1), 1, False).stages(*(f"f32[{','.join(map(str, shape))}]" for shape in shapes), target="sm_90a").stages
    assert any("products" in array.name for array in found.tile.scratch) == one


def test_two_phases_with_few_results_are_launched_together() -> None:
    x, w = np.empty((2, 16, 200), np.float32), np.empty((16, 24, 5), np.float32)
    assert len(convolutions.transposed1d(2, 1, 1, 0).compile(x, w, target="sm_90a").launches) == 1


def test_code_that_waits_for_numbers_is_made_for_larger_ones_too() -> None:
    """The second call's windows are longer than what becomes part of the code."""
    for device in ("cpu", "emulator"):
        kernel = transposed2d((2, 2), (1, 1), (1, 1))
        for taps in ((3, 3), (2, 40), (3, 3), (40, 2)):
            x, w, bias = normal(1, 3, 4, 5), normal(3, 2, *taps), normal(2)
            found = kernel(x, w, bias, device=device)
            wanted = scattered(x, w, (2, 2), (1, 1), (1, 1), found.shape[2:]) + bias.astype(np.float64)[:, None, None]
            np.testing.assert_allclose(found, np.maximum(wanted, -1), rtol=1e-4, atol=1e-4)


def test_sums_that_are_only_rounded_are_kept_rounded() -> None:
    found = squares.stages(*(np.empty(s, np.float16) for s in ((8, 64, 28, 28), (64, 64, 2, 2))), target="sm_90a").stages
    (products,) = (array for array in found.tile.scratch if "products" in array.name)
    assert products.type.dtype.name == "f16"


@pytest.mark.usefixtures("few_are_many")
def test_views_and_values_that_are_no_numbers_on_gpus() -> None:
    kernel = transposed2d((3, 2), (0, 1), (1, 1))
    x, w, bias = normal(2, 19, 6, 9)[:, :, ::2, ::-1].copy(), normal(2, 3, 7, 19).transpose(3, 2, 1, 0), normal(7)
    x[0, 3, 1, 0], x[1, 2, 2, 8] = np.inf, np.nan
    found = kernel(x[:, ::-1], w[::-1], bias, device="emulator")
    wanted = scattered(x, w, (3, 2), (1, 1), (0, 1), found.shape[2:]) + bias.astype(np.float64)[:, None, None]
    np.testing.assert_allclose(found, np.maximum(wanted, -1), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("few_are_many")
def test_groups_and_three_axes_that_never_meet() -> None:
    x, w = normal(1, 2, 3, 2, 3, 3), normal(2, 3, 4, 2, 1, 2)
    found = jumping(x, w, device="emulator")
    wanted = [scattered(x[:, g], w[g], (2, 1, 2), (1, 1, 1), (0, 0, 0), found.shape[3:]) for g in range(2)]
    np.testing.assert_allclose(found, np.stack(wanted, 1), rtol=1e-5, atol=1e-4)
