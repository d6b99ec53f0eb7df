"""Primitives through the CUDA runtime without a GPU: arrays and results of the device, programs kept, errors before anything is launched."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import tilewright as tw
from null_cuda.install import Programs, installed
from tilewright.base.errors import UserError


@pytest.fixture
def programs() -> Iterator[Programs]:
    with installed() as driver:
        yield driver.programs


def test_results_are_arrays_of_the_device(programs: Programs) -> None:
    x = np.random.default_rng(0).integers(-9, 9, 3000).astype(np.int32)
    given = tw.asarray(x, device="cuda")
    for found, wanted in (
        (tw.gpu_scan(given), np.cumsum(x, dtype=np.int32)),
        (tw.gpu_filter(given, lambda v: v > 2), x[x > 2]),
        (tw.gpu_sort(given), np.sort(x)),
        (tw.gpu_argsort(given), np.argsort(x, kind="stable")),
        (tw.gpu_map(given, lambda v: v * 2), x * 2),
        (tw.gpu_reduce(given, 1, lambda a, b: a + b), x.sum() + 1),
        (tw.gpu_transpose(given.reshape((50, 60))), x.reshape(50, 60).T),
        (tw.gpu_sort(given.reshape((50, 60))), np.sort(x.reshape(50, 60))),
        (tw.gpu_scan(given[1:]), np.cumsum(x[1:], dtype=np.int32)),
        (tw.scan(given.reshape((50, 60))), np.cumsum(x.reshape(50, 60), 1, np.int32)),
        (tw.scan(given.reshape((50, 60)), axis=0, reverse=True), np.cumsum(x.reshape(50, 60)[::-1], 0, np.int32)[::-1]),
        (tw.scan(given.reshape((10, 5, 60)), axis=1, exclusive=True), np.cumsum(x.reshape(10, 5, 60), 1, np.int32) - x.reshape(10, 5, 60)),
        (tw.scan(given, segments=given), _restarted(x)),
        (tw.filter(given.reshape((50, 60)), tw.asarray(x[:60] > 0, device="cuda"), axis=1), x.reshape(50, 60)[:, x[:60] > 0]),
        (tw.filter(given.reshape((50, 60)), x[:50] > 0, axis=0), x.reshape(50, 60)[x[:50] > 0]),
        (tw.unique(given.reshape((1500, 2)), axis=0), np.unique(x.reshape(1500, 2), axis=0)),
    ):
        assert type(found).__name__ == "DeviceArray"
        assert np.array_equal(found.numpy(), wanted)


def _restarted(x: np.ndarray) -> np.ndarray:
    """Running sums that begin anew where the number changes."""
    starts = np.flatnonzero(np.append(True, x[1:] != x[:-1]))
    before = np.cumsum(x) - x
    return np.cumsum(x) - np.repeat(before[starts], np.diff(np.append(starts, x.size)))


def test_host_arrays_come_back_as_host_arrays(programs: Programs) -> None:
    x = np.random.default_rng(0).integers(-9, 9, 3000).astype(np.int32)
    assert np.array_equal(tw.gpu_scan(x, device="cuda"), np.cumsum(x, dtype=np.int32))
    values, counts = tw.gpu_unique(x, return_counts=True, device="cuda")
    wanted, wanted_counts = np.unique(x, return_counts=True)
    assert np.array_equal(values, wanted) and np.array_equal(counts, wanted_counts)
    assert np.array_equal(tw.gpu_map(x, lambda v: v + 1, device="cuda"), x + 1)


def test_nothing_is_launched_for_what_is_refused(programs: Programs) -> None:
    given = tw.asarray(np.zeros((4, 5), np.float32), device="cuda")
    before = len(programs.launched)
    with pytest.raises(UserError, match="axis is 2"):
        tw.scan(given, axis=2)
    with pytest.raises(UserError, match="does not know"):
        tw.gpu_reduce(given, 0, "median")
    assert tw.gpu_sort(given[:0]).shape == (0, 5)
    assert len(programs.launched) == before


def test_filters_of_a_known_form(programs: Programs) -> None:
    """The second call of a form goes straight to the launch; other forms, named streams and empty arrays take the general path."""
    rng = np.random.default_rng(0)

    def positive(x: object) -> np.ndarray:
        found: np.ndarray = tw.filter(x, lambda v: v > 0).numpy()
        return found

    for dtype in (np.float32, np.int64):
        for shape in ((3000,), (1,), (31, 33), (4097,)):
            x = (rng.standard_normal(shape) * 9).astype(dtype)
            given = tw.asarray(x, device="cuda")
            for _ in range(3):
                assert np.array_equal(positive(given), x[x > 0])
    x = rng.standard_normal(500).astype(np.float32)
    given = tw.asarray(x, device="cuda")
    assert np.array_equal(positive(given[1:]), x[1:][x[1:] > 0])
    assert positive(given[:0]).size == 0
    kept = [tw.filter(given, lambda v: v > 0), tw.filter(given, lambda v: v < 0), tw.filter(given, lambda v: v > 0)]
    assert [len(k.numpy()) for k in kept] == [(x > 0).sum(), (x < 0).sum(), (x > 0).sum()], "results of calls do not share memory"
    for limit in (0.0, 1.0, 0.0):
        assert np.array_equal(tw.filter(given, lambda v: v > limit).numpy(), x[x > limit])  # noqa: B023
    with tw.Stream("cuda"):
        assert np.array_equal(positive(given), x[x > 0])
