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
