"""Families of the benchmark: a small draw of each is right on the CPU, the same seed draws the same, and the table says what is slow.

Inputs lie between pages that nobody may touch: an access beyond either end kills the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from bench.families.draw import Draw, Family, Problem
from bench.families.measure import FAMILIES, host_array
from bench.families.run import ranges, summary
from bench.harness import Record

import tilewright as tw
from fuzz.random_kernels.memory import PAGE, Arena

CALLS = {"sort", "filter"}
"""Primitives are not kernels: no stage of them is executed on its own."""


@pytest.fixture
def loop_stage() -> Iterator[None]:
    before = tw.default_device()
    yield
    tw.set_default_device(before)


def arrays_of(problem: Problem, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [host_array(spec, rng) for spec in problem.inputs]


def guarded(values: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy that begins or ends at a guard page."""
    arena = Arena(-(-values.nbytes // PAGE) or 1)
    start = arena.size - values.nbytes if at_end else 0
    found: np.ndarray = np.ndarray(values.shape, values.dtype, buffer=arena.bytes, offset=start)
    found[...] = values
    return found


def wide_result(problem: Problem, arrays: list[np.ndarray]) -> Any:
    """In float64: by the family's own function of NumPy, or by the loop stage executed step by step, before anything is scheduled."""
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays]
    if "torch" not in problem.peers:
        return problem.exact(*wide)
    tw.set_default_device("emulator:loop")
    return problem.ours(*wide)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name not in CALLS], ids=lambda f: f.name)
@pytest.mark.usefixtures("loop_stage")
def test_a_small_draw_is_right(family: Family) -> None:
    problem = family.build(Draw(3, family.name, 0, "cpu", small=True))
    arrays = arrays_of(problem, 3)
    tw.set_default_device("cpu")
    first = np.array(problem.ours(*(guarded(a, at_end=False) for a in arrays)))
    last = np.asarray(problem.ours(*(guarded(a, at_end=True) for a in arrays)))
    np.testing.assert_array_equal(first, last)
    found = last.astype(np.float64)
    wanted = np.asarray(wide_result(problem, arrays), np.float64)
    assert found.shape == wanted.shape, problem.title
    assert np.abs(found - wanted).max(initial=0.0) <= max(problem.tolerance, 1e-9) * np.abs(wanted).max(initial=1.0), problem.title


def test_the_same_seed_draws_the_same() -> None:
    for family in FAMILIES:
        for device in family.bars:
            one, two, other = (family.build(Draw(seed, family.name, index, device)) for seed, index in ((5, 1), (5, 1), (6, 1)))
            assert (one.title, one.inputs) == (two.title, two.inputs)
            assert one.inputs != other.inputs or one.title != other.title


def test_ranges_and_table() -> None:
    names = {family.name for family in FAMILIES}
    assert len(names) == len(FAMILIES)
    assert {line.split()[0] for line in (ranges("cpu") + "\n" + ranges("gpu")).splitlines()} == names
    slow = Record("sort", [9], "f32", "cpu", ours_ms=2.0, peer="numpy", peer_ms=1.0, ratio=0.5, bar=1.0, notes=["sort f32"])
    quick = Record("sort", [8], "f32", "cpu", ours_ms=1.0, peer="numpy", peer_ms=2.0, ratio=2.0, bar=1.0)
    lines = summary([slow, quick]).splitlines()
    assert lines[1].split() == ["sort", "2", "0.50", "1.25", "1.0", "1"]
    assert lines[2:] == ["  0.500 sort 9 f32: sort f32 (2 ms, numpy 1)"]
