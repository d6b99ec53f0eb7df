"""A call verifies its kernel after the last pass; where something is wrong, after every pass, so that the message names the right one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tilewright as tw
from tilewright.base.errors import CompilerBug
from tilewright.compile import driver, store
from tilewright.ir.nodes import Block, Kernel
from tilewright.ir.random_numbers import OPCODES
from tilewright.ir.rewrite import eliminate_dead
from tilewright.ir.verify import verify_kernel
from tilewright.passes import pipeline, runner
from tilewright.passes.late.expand_math import EXPANDED
from tilewright.passes.runner import Pass, Step

X = np.arange(6, dtype=np.float32)


@pytest.fixture(autouse=True)
def as_users_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "kernel")
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    store.disk_cache.cache_clear()
    driver.forget()


def doubled(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * 2.0
    return out


def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def verify(kernel: Kernel) -> None:
        seen.append(kernel.name)
        verify_kernel(kernel)

    monkeypatch.setattr(runner, "verify_kernel", verify)
    return seen


def test_passes_are_not_verified_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = verified(monkeypatch)
    np.testing.assert_array_equal(tw.kernel(doubled)(X), X * 2)
    assert not seen


def test_the_setting_verifies_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = verified(monkeypatch)
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "passes")
    np.testing.assert_array_equal(tw.kernel(doubled)(X), X * 2)
    assert len(seen) > 2


def without_first(kernel: Kernel) -> Kernel:
    """Illegal: what the rest uses is gone."""
    return replace(kernel, body=Block(kernel.body.args, kernel.body.ops[1:]))


@pytest.mark.parametrize("order", ["kernel", "loop", "thread"])
def test_a_pass_that_breaks_a_kernel_is_named(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(pipeline.SIMPLIFY, name="wrong_pass", function=without_first)
    steps = (*pipeline.ORDERS[order], Step(wrong, "Last."), Step(replace(wrong, name="later_pass", function=eliminate_dead), "After the wrong one."))
    monkeypatch.setattr(pipeline, "ORDERS", {**pipeline.ORDERS, order: steps})
    with pytest.raises(CompilerBug, match=r"pass wrong_pass failed on kernel doubled"):
        tw.kernel(doubled)(X)


# -- passes that are not loaded ---------------------------------------------------------------------------------------


def untouched(name: str) -> Pass:
    """A pass that says that it needs sums, and marks every kernel."""
    return Pass(name, "loop", "loop", lambda kernel: replace(kernel, name=f"{kernel.name}_marked"), "Marks kernels.", needs="reduce")


def test_a_pass_without_what_it_needs_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "ORDERS", {**pipeline.ORDERS, "loop": (*pipeline.ORDERS["loop"], Step(untouched("marks"), "Last."))})
    np.testing.assert_array_equal(tw.kernel(doubled)(X), X * 2)


def test_a_pass_for_gpus_is_left_out_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(untouched("marks"), needs="", gpu=True)
    monkeypatch.setattr(pipeline, "ORDERS", {**pipeline.ORDERS, "loop": (*pipeline.ORDERS["loop"], Step(one, "Last."))})
    assert tw.kernel(doubled).compile(X, target="x86-64-avx2").launches[0].entry == "tw_doubled_0"
    assert tw.kernel(doubled).compile(X, target="sm_90a").launches[0].entry == "tw_doubled_marked_0"
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "passes")
    driver.forget()
    with pytest.raises(CompilerBug, match=r"pass marks failed"):
        tw.kernel(doubled)(X)


def test_a_pass_that_does_more_than_it_says_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "passes")
    monkeypatch.setattr(pipeline, "ORDERS", {**pipeline.ORDERS, "loop": (*pipeline.ORDERS["loop"], Step(untouched("marks"), "Last."))})
    with pytest.raises(CompilerBug, match=r"pass marks failed.*needs 'reduce'"):
        tw.kernel(doubled)(X)


SCRIPT = """
import sys
import numpy as np
import tilewright as tw

@tw.kernel
def doubled(x: tw.Array) -> tw.Array:
    (n,) = x.shape
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] * 2.0
    return out

x = np.ones(3, np.float32)
if sys.argv[1] == "cpu":
    assert doubled(x).tolist() == [2, 2, 2]
else:
    doubled.compile(x, target=sys.argv[1])
print(*(name for name in sys.modules if name.startswith("tilewright.")))
"""

NEEDLESS = (
    "analysis.attention", "analysis.lookalikes", "analysis.recomputed", "analysis.serial_loops", "codegen.cpu.amx", "codegen.cpu.atomics", "codegen.cpu.avx512",
    "codegen.cpu.printing", "ir.printing", "ir.random_numbers", "ir.reference", "passes.choose.attention", "passes.choose.matrix", "passes.choose.small_sizes",
    "passes.from_tree.integer_powers", "passes.late.expand_random", "passes.late.interleave", "passes.launches", "passes.ordered", "passes.packed.dots",
    "passes.packed.expand_dots", "passes.portable", "passes.program.fuse", "passes.program.split_scans", "passes.rows.scan_rows", "passes.simt_to_simd",
    "passes.to_thread.attention", "passes.to_thread.cluster_softmax", "passes.to_thread.mma", "passes.to_thread.tile_scans", "passes.to_thread.warp_scatters",
    "passes.to_thread.wgmma", "passes.to_tile.check_indices", "passes.to_tile.loops.extreme_on_cpu", "passes.to_tile.loops.lower_while", "passes.to_tile.loops.ragged_rows",
    "passes.to_tile.loops.reductions", "passes.to_tile.loops.sweeps",
)  # fmt: skip
"""What a kernel of one loop and one product has nothing to do with."""
MOST = 290
"""Modules of the package that are loaded when such a kernel was compiled: each takes a third of a millisecond, or more."""


@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_a_kernel_loads_few_modules(target: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    environment = {**os.environ, "TILEWRIGHT_CACHE_DIR": str(tmp_path / "own")}
    done = subprocess.run([sys.executable, str(path), target], capture_output=True, text=True, check=True, timeout=600, env=environment)
    loaded = {name.removeprefix("tilewright.") for name in done.stdout.split()}
    assert "passes.to_tile.lower_loops" in loaded
    assert not sorted(name for name in loaded if name.startswith(NEEDLESS))
    assert len(loaded) <= MOST


def test_functions_that_become_arithmetic_are_those_that_their_passes_need() -> None:
    assert set(EXPANDED) == set(pipeline.EXPAND_MATH.needs.split())
    assert set(pipeline.EXPAND_RANDOM.needs.split()) == OPCODES
