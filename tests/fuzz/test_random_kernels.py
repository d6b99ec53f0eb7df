"""Random kernels in the ordinary run: a fixed stretch of seeds, what was found before, and the generator itself.

`make fuzz SECONDS=600` tries many more.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from random_kernels import arithmetic, batches, cards
from random_kernels.draw import draw
from random_kernels.memory import Arena
from random_kernels.model import Accumulate, Kernel, Load, nests, walk_body
from random_kernels.shrink import dtypes_of, from_data, is_whole, read_case, shrink, to_data
from random_kernels.source import kernel_text
from random_kernels.trial import Outcome, trial

CASES = sorted((Path(__file__).parents[1] / "data" / "fuzz").glob("*.json"))
SEEDS = 60


def agree(outcome: Outcome, kernel: Kernel) -> None:
    assert outcome.kind != "failed", f"seed {kernel.seed} on {outcome.device}: {outcome.what}: {outcome.detail}\n{kernel_text(kernel)}"


@pytest.mark.requires("cpu")
@pytest.mark.parametrize("part", range(4))
def test_the_cpu_agrees_with_the_reference(part: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(part, SEEDS, 4):
        kernel = draw(seed)
        outcome = trial(kernel)
        agree(outcome, kernel)
        outcomes[outcome.kind] += 1
    assert outcomes["ok"] >= 0.8 * outcomes.total(), outcomes


def test_every_stage_of_the_emulator_agrees_with_the_reference() -> None:
    for seed in range(0, 50, 5):
        kernel = draw(seed)
        agree(trial(kernel, ("loop", "tile", "thread")), kernel)


@pytest.mark.requires("cpu")
@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_what_failed_before_agrees(path: Path) -> None:
    kernel, devices = read_case(path)
    outcome = trial(kernel, devices)
    agree(outcome, kernel)
    assert outcome.kind == "ok", outcome


# -- the generator ---------------------------------------------------------------------------------------------------


def test_a_seed_gives_one_kernel_and_the_mixture_is_as_promised() -> None:
    kernels = [draw(seed) for seed in range(1000)]
    assert kernels[:20] == [draw(seed) for seed in range(20)]
    features = Counter(tag for kernel in kernels for tag in kernel.tags)
    assert sum(nests(k) > 1 for k in kernels) >= 300
    assert features["hostile"] >= 300
    assert sum(bool(k.tags & {"gather", "scatter"}) for k in kernels) >= 200
    for tag in ("explicit", "while", "triangular", "stepped", "reduction", "whole arrays", "aliasing out", "in place", "scan", "empty"):
        assert features[tag] >= 5, tag
    for tag in ("ordered", "array in place", "running", "grid scatter"):
        assert features[tag] >= 50, tag
    assert all(features[f"dtype {d}"] >= 20 for d in arithmetic.KINDS)
    assert all(features[f"rank {r}"] >= 20 for r in range(5))


def test_cases_are_kept_as_data() -> None:
    for seed in range(40):
        kernel = draw(seed)
        assert kernel_text(from_data(to_data(kernel))) == kernel_text(kernel)
        assert is_whole(kernel)


def test_shrinking_keeps_what_is_asked_for() -> None:
    def reads_backwards(kernel: Kernel) -> bool:
        return any(isinstance(n, Load) and " - 1) - " in kernel_text(kernel) for n in walk_body(kernel.body))

    kernel = next(k for k in map(draw, range(300)) if not k.explicit and nests(k) > 1 and reads_backwards(k))
    small = shrink(kernel, reads_backwards, seconds=5.0)
    assert reads_backwards(small) and is_whole(small)
    assert len(kernel_text(small)) < len(kernel_text(kernel))


def test_shrinking_makes_dtypes_plain() -> None:
    def has_narrow_sum(kernel: Kernel) -> bool:
        return any(isinstance(n, Accumulate) and n.op == "+" for n in walk_body(kernel.body))

    narrow = {"bf16", "f8e4m3", "f8e5m2", "i8", "u16"}
    kernels = [k for k in map(draw, range(400)) if not k.explicit and has_narrow_sum(k) and len(dtypes_of(k) & narrow) > 1]
    for kernel in kernels[:3]:
        small = shrink(kernel, has_narrow_sum, seconds=5.0)
        assert is_whole(small) and has_narrow_sum(small)
        assert not dtypes_of(small) & narrow


# -- the reference ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [d for d, k in arithmetic.KINDS.items() if k.kind == "f"])
def test_rounding_is_that_of_the_types_themselves(dtype: str) -> None:
    rng = np.random.default_rng(3)
    numbers = np.concatenate([rng.standard_normal(500) * 2.0 ** rng.integers(-40, 40, 500), [0.0, -0.0, 1e-45, 448.0, 464.0, 465.0, 65520.0, 1e30]])
    numbers = numbers.astype(np.float32)
    for value, want in zip(numbers.tolist(), numbers.astype(arithmetic.KINDS[dtype].numpy).astype(np.float64).tolist(), strict=True):
        got = arithmetic.rounded(dtype, value)
        assert got == want or (math.isnan(got) and math.isnan(want)), value
        exact = arithmetic.rounded_exact(dtype, Fraction(value))
        assert exact == got or (math.isnan(exact) and math.isnan(got)), value


def test_a_product_may_be_fused_into_a_sum_but_one_rounding_is_exact() -> None:
    a, b = arithmetic.rounded("f32", 0.1), arithmetic.rounded("f32", 0.7)
    product = arithmetic.float_binary("*", "f32", a, b)
    assert arithmetic.parts(product) == (float(np.float32(a) * np.float32(b)), 0.0)
    total = arithmetic.float_binary("-", "f32", product, arithmetic.parts(product)[0])
    assert isinstance(total, arithmetic.Near) and total.err > 0
    assert arithmetic.any_order_sum("f32", [0.25, 0.5, -4.0]) == -3.25
    assert isinstance(arithmetic.any_order_sum("f32", [1e8, 0.25, -1e8]), arithmetic.Near)


# -- guards ----------------------------------------------------------------------------------------------------------

FALL = "from random_kernels.memory import Arena; a = Arena(1); import ctypes; print('before', flush=True); ctypes.string_at(a.bytes.ctypes.data + {}, 1)"


@pytest.mark.parametrize("offset", [-1, 4096 * 16])
def test_a_byte_outside_ends_the_process(offset: int) -> None:
    import mmap

    code = FALL.format(offset if offset < 0 else mmap.PAGESIZE)
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, timeout=600)
    assert done.stdout == b"before\n" and done.returncode < 0


def test_a_write_beside_an_array_is_seen() -> None:
    import random

    arena = Arena(1)
    arena.fill()
    view = arena.place((3, 2), np.dtype(np.int16), "padded", random.Random(0))
    arena.snapshot()
    view[...] = 7
    assert not arena.spoilt(view)
    arena.bytes[arena.size // 2] ^= 1
    assert arena.spoilt(view)


def test_a_child_that_ends_costs_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are asked for seeds; the one that ends the process is named, and the next one goes on."""

    class Scripted:
        def __init__(self, seeds: range, only: tuple[str, ...], more: dict[str, str]) -> None:
            self.left = list(seeds)
            self.process = self

        def wait(self) -> int:
            return -11

        stop = wait

        def lines(self, wait: float) -> list[dict[str, object]] | str:
            if not self.left:
                return "crash"
            seed = self.left.pop(0)
            if seed == 2:
                self.left.clear()
                return [{"begin": seed}]
            return [{"begin": seed}, {"end": seed, "kind": "ok", "device": "", "what": "", "detail": ""}]

    monkeypatch.setattr(batches, "Child", Scripted)
    outcomes = {seed: outcome.label for seed, outcome in batches.run(range(5))}
    assert outcomes == {0: "ok", 1: "ok", 2: "failed crash", 3: "ok", 4: "ok"}


# -- GPUs ------------------------------------------------------------------------------------------------------------


def test_a_null_gpu_agrees_with_the_reference() -> None:
    """What `replay` does with a card, on a driver that runs kernels in the emulator."""
    from null_cuda.install import installed

    with installed():
        for seed in (1, 2, 4, 9):
            kernel = draw(seed)
            agree(trial(kernel, ("cuda",)), kernel)


@pytest.mark.requires("ptxas")
def test_the_driver_is_given_the_cubin_that_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(cards.Driver, "attempt", lambda self, api, *values: given.append(values[0]))
    monkeypatch.setattr(cards.Driver, "__init__", lambda self: None)
    assert dict(cards.build(tmp_path, range(4, 6))) == {4: "built", 5: "built"}
    assert cards.built_seeds(tmp_path) == [4, 5]
    cards.load_cubins(tmp_path)
    code = cards.artifact(draw(4), "sm_90a").code
    cards.Driver().attempt("cuModuleLoadDataEx", code.rstrip(b"\0") + b"\0", 0)
    cards.Driver().attempt("cuModuleLoadDataEx", b"other", 0)
    assert isinstance(given[0], bytes) and given[0].startswith(b"\x7fELF")
    assert given[1] == b"other"
