"""Kernels that start before the one before them has ended read nothing before they have waited: neither LLVM nor the assembler may move their loads."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from kernels_rows import CASES
from tilewright.base.target import parse_target
from tilewright.codegen.llvm import native
from tilewright.codegen.nvptx.emitter import nvptx_function
from tilewright.compile.build import llvm_text

TARGET = parse_target("sm_90a")


@tw.kernel
def normed(x: tw.Array, g: tw.Array, w: tw.Array, v: tw.Array) -> tuple[tw.Array, tw.Array]:
    rows, depth = x.shape
    h = tw.empty((rows, depth), x.dtype)
    for i in tw.grid(rows):
        total = 0.0
        for p in range(depth):
            total += x[i, p] * x[i, p]
        for p in range(depth):
            h[i, p] = x[i, p] / tw.sqrt(total / depth + 1e-6) * g[p]
    a = tw.empty((rows, w.shape[0]), x.dtype)
    for i, j in tw.grid(rows, w.shape[0]):
        total = 0.0
        for p in range(depth):
            total += h[i, p] * w[j, p]
        a[i, j] = total
    b = tw.empty((rows, v.shape[0]), x.dtype)
    for i, j in tw.grid(rows, v.shape[0]):
        total = 0.0
        for p in range(w.shape[0]):
            total += a[i, p] * v[j, p]
        b[i, j] = total
    return a, b


def arrays() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((1, 512), (512,), (256, 512), (96, 256)))


def test_loads_stay_behind_the_wait() -> None:
    thread = normed.stages(*arrays(), target="sm_90a").stages.thread
    text = native.emit_assembly(llvm_text(thread, TARGET)[0], TARGET)
    entries = re.split(r"\.visible \.entry ", text)[1:]
    early = [e for e in entries if "griddepcontrol.wait" in e]
    assert len(early) == len(thread.calls) >= 2
    for entry in early:
        before, after = entry.split("griddepcontrol.wait", 1)
        assert "ld.global" not in before
        assert "ld.global" in after and "ld.global.nc" not in after  # the assembler moves non-coherent loads across the wait


def test_llvm_may_not_think_that_nobody_else_writes() -> None:
    thread = normed.stages(*arrays(), target="sm_90a").stages.thread
    text = nvptx_function(thread.calls[-1].kernel, "f", TARGET)[0]
    assert "noalias" not in text and "invariant.load" not in text
    assert '"griddepcontrol.wait;", "~{memory}"' in text


@pytest.mark.parametrize("length", [2053, 7001, 50257])
def test_loads_under_a_condition_stay_behind_the_wait(length: int) -> None:
    """They have no side effects where the kernel writes none of what they read, but come after the wait all the same, and are coherent."""
    case = CASES["layer_norm"]
    text = case.kernel.compile(*case.inputs(np.random.default_rng(0), 2, length, ml_dtypes.bfloat16), target="sm_90a").code.decode()
    before, after = text.split("griddepcontrol.wait", 1)
    assert "ld.global" not in before
    assert re.search(r"@%p\d+ ld\.global", after) and "ld.global.nc" not in after
