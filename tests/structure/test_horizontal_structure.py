"""What products of the same rows become: one launch, one step that brings the rows once, instructions as wide as all of them; nothing is
spilled, and no waits are put between matrix instructions."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from assembled import assemble

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"joined_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


@tw.kernel
def heads(x: tw.Array, wq: tw.Array, wk: tw.Array, wv: tw.Array) -> tuple[tw.Array, tw.Array, tw.Array]:
    n, k = x.shape
    m = wq.shape[1]
    q = tw.empty((n, m), x.dtype)
    keys = tw.empty((n, m), x.dtype)
    v = tw.empty((n, m), x.dtype)
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wq[p, j]
        q[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wk[p, j]
        keys[i, j] = total
    for i, j in tw.grid(n, m):
        total = 0.0
        for p in range(k):
            total += x[i, p] * wv[p, j]
        v[i, j] = total
    return q, keys, v


SWIGLU = load("layers").swiglu
CASES: dict[str, tuple[tw.Kernel[..., Any], int, tuple[int, int, int]]] = {
    "gate and up": (SWIGLU, 2, (4096, 768, 3072)),
    "gate and up of a large model": (SWIGLU, 2, (4096, 4096, 11008)),
    "queries, keys, values": (heads, 3, (4096, 768, 768)),
}


def arguments(name: str, dtype: Any = ml_dtypes.bfloat16) -> tuple[np.ndarray, ...]:
    _, count, (n, k, m) = CASES[name]
    return (np.empty((n, k), dtype), *(np.empty((k, m), dtype) for _ in range(count)))


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", CASES)
def test_hopper_multiplies_all_of_them_in_one_instruction(name: str) -> None:
    kernel, count, _ = CASES[name]
    artifact = kernel.compile(*arguments(name), target="sm_90a")
    (launch,) = artifact.launches
    assert launch.dependent
    ptx = artifact.code.decode()
    columns = {int(found) for found in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx)}
    (width,) = {int(n) for n in re.findall(r" n=(\d+) ", artifact.schedule)}
    assert columns == {count * width}
    # The rows and one tile of each second factor in a step.
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)) == 1 + count
    done = assemble(ptx, "sm_90a")
    assert done.spills == 0 and done.local == 0, done.log
    assert not re.search(r"C75\d\d|serializ", done.log), done.log


@pytest.mark.requires("ptxas")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
def test_warps_multiply_all_of_them(name: str, target: str) -> None:
    kernel, count, _ = CASES[name]
    artifact = kernel.compile(*arguments(name), target=target)
    assert len(artifact.launches) == 1
    assert f"horizontal={count}" in artifact.schedule
    done = assemble(artifact.code.decode(), target)
    assert done.spills == 0 and done.local == 0, done.log


def test_nothing_but_results_is_written() -> None:
    """Neither product of SwiGLU exists in memory."""
    for target in ("sm_90a", "sm_80", "x86-64-avx512"):
        done = SWIGLU.stages(*arguments("gate and up", np.float16), target=target)
        assert not done.stages.thread.scratch, target
        assert {f.array: f.how for f in done.fusion.fused} == {"wide": "merged", "opened": "beside", "x": "shared"}
        assert done.fusion.refused == ()
