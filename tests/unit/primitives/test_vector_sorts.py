"""Sorts of keys of 32 and 64 bits: every spread of keys, on the CPU; and those by vectors, in the emulator and for a CPU that has them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.dtypes import by_name
from tilewright.base.target import host_cpu, parse_target
from tilewright.compile.build import build_artifact
from tilewright.compile.primitives import finished_program
from tilewright.ir.emulator import run_program
from tilewright.primitives.sort import SortPlan
from tilewright.primitives.vectors.buckets import quick_sort_program
from tilewright.primitives.vectors.network import batcher
from tilewright.primitives.vectors.rows import quick_rows_program, sorts_by_vectors

WIDE = [np.int32, np.uint32, np.float32, np.int64, np.uint64, np.float64]
"""Keys that CPUs with wide vectors sort by a quicksort."""


def spread(n: int, dtype: Any, seed: int) -> list[np.ndarray]:
    """Keys of all bits; few different ones; keys that rise, fall, and rise and fall; one of them; magnitudes of all sizes."""
    rng, kind = np.random.default_rng(seed), np.dtype(dtype)
    bits = rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8).view(kind)
    rising = np.sort(rng.integers(0, 1 << 30, n)).astype(kind)
    few = rng.choice(np.array([0, 1, 3, np.iinfo(np.int32).max], np.int64), n).astype(kind)
    sizes = np.exp2(rng.random(n) * 30).astype(kind)
    return [bits, few, rising, rising[::-1], np.concatenate([rising[::2], rising[::-2]])[:n], np.full(n, bits[0] if n else 0, kind), sizes]


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (31,), (33,), (255,), (257,), (1021,), (9973,), (3, 1), (5, 31), (3, 33), (2, 129), (2, 509), (2, 20_011)], ids=str)
def test_keys_of_every_spread(shape: tuple[int, ...], dtype: Any) -> None:
    for x in spread(int(np.prod(shape)), dtype, 11):
        for descending in (False, True):
            given = x.reshape(shape)
            before, wanted = given.copy(), np.sort(given)
            np.testing.assert_array_equal(tw.sort(given, descending=descending), wanted[..., ::-1] if descending else wanted)
            np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("n", [65_535, 65_536, 262_147, 1_000_003])
def test_many_keys_of_every_spread(n: int, dtype: Any) -> None:
    """More keys than one thread sorts: pieces of chunks that are empty, of some keys, and of all."""
    for x in spread(n, dtype, 12):
        np.testing.assert_array_equal(tw.sort(x), np.sort(x))
    bits = spread(n, dtype, 13)[0]
    np.testing.assert_array_equal(tw.sort(bits, descending=True), np.sort(bits)[::-1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=str)
@pytest.mark.parametrize("shape", [(50,), (3, 40), (700,), (70_001,), (2, 3000)], ids=str)
def test_zeros_and_nan(shape: tuple[int, ...], dtype: Any) -> None:
    """-0.0 comes before 0.0, and none is lost; NaN of either sign are last, or first."""
    x = (np.random.default_rng(1).standard_normal(shape) * 4).astype(dtype)
    flat = x.reshape(-1)
    for k, value in enumerate((np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0)):
        flat[k::7] = value
    flat[3::11] = -np.array(np.nan, dtype)
    zeros = flat == 0
    for descending in (False, True):
        found = tw.sort(flat, descending=descending)
        ordered = found[::-1] if descending else found
        np.testing.assert_array_equal(ordered, np.sort(flat))
        signs = np.signbit(ordered[ordered == 0])
        assert signs.sum() == np.signbit(flat[zeros]).sum() and np.array_equal(signs, np.sort(signs)[::-1])
        rows = tw.sort(x, descending=descending)
        np.testing.assert_array_equal(rows[..., ::-1] if descending else rows, np.sort(x))


def test_bad_pivots_end() -> None:
    """Keys whose samples are all alike: where pivots divide nothing, the middle of what keys are left may be does."""
    for dtype in (np.uint32, np.uint64):
        width = 64 // np.dtype(dtype).itemsize
        x = np.full(70_000, 5, dtype)
        x[::7] = np.arange(0, 977 * len(x[::7]), 977)
        for k in (1, 2, 3):
            x[len(x) // 4 * k - width : len(x) // 4 * k + width] = np.iinfo(dtype).max
        assert np.array_equal(tw.sort(x), np.sort(x)) and np.array_equal(tw.sort(x[:30_001]), np.sort(x[:30_001]))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_columns_are_sorted(count: int) -> None:
    """A network that sorts zeros and ones sorts everything."""
    keys = [np.arange(1 << count) >> k & 1 for k in range(count)]
    for a, b in batcher(count):
        keys[a], keys[b] = np.minimum(keys[a], keys[b]), np.maximum(keys[a], keys[b])
    assert all((a <= b).all() for a, b in itertools.pairwise(keys))


def plan(dtype: str, descending: bool = False) -> SortPlan:
    return SortPlan(by_name(dtype), descending=descending, aligned=False)


@pytest.mark.parametrize(("dtype", "shape", "descending"), [("f32", (2, 70), False), ("i64", (3, 33), True), ("u32", (1, 300), False), ("f64", (1, 230), True)], ids=str)
def test_rows_in_the_emulator(dtype: str, shape: tuple[int, int], descending: bool) -> None:
    """Rows of registers, and rows that are split: whatever this machine is."""
    target = parse_target("x86-64-avx512")
    x = np.random.default_rng(5).integers(0, 60, shape).astype(by_name(dtype).numpy)
    found = run_program(finished_program(quick_rows_program(plan(dtype, descending)), target), {"keys": x})["sorted"]
    wanted = np.sort(x)
    assert np.array_equal(found, wanted[:, ::-1] if descending else wanted)


@pytest.mark.parametrize("dtype", ["f32", "i64"])
def test_code_for_wide_vectors(dtype: str) -> None:
    target = parse_target("x86-64-avx512")
    for program in (quick_rows_program(plan(dtype)), quick_sort_program(plan(dtype))):
        assert build_artifact(finished_program(program, target), target, "key", entry=False)


def test_which_keys_are_sorted_by_vectors() -> None:
    wide, narrow = parse_target("x86-64-avx512"), [parse_target(name) for name in ("x86-64-avx2", "aarch64-neon", "sm_80")]
    assert sorts_by_vectors(plan("f32"), wide) and sorts_by_vectors(plan("u64"), wide)
    assert not sorts_by_vectors(plan("i16"), wide) and not sorts_by_vectors(SortPlan(by_name("f32"), by_name("i64"), True), wide)
    assert not any(sorts_by_vectors(plan("f32"), target) for target in narrow)
    assert sorts_by_vectors(plan("f32"), host_cpu()) == (host_cpu().vector_bytes >= 64)
