"""Rows that stay in registers: how often memory is read, and no spills."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import tilewright as tw
from assembled import assemble
from kernels_rows import CASES
from tilewright.ir.nodes import walk

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


@pytest.mark.parametrize(("name", "arrays"), [("softmax", 1), ("layer_norm", 3), ("rms_norm", 2), ("residual_norm_gate", 4)])
@pytest.mark.parametrize("length", [2048, 4096, 16384])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_element_is_loaded_once_and_nothing_spills(name: str, arrays: int, length: int, dtype: str) -> None:
    inputs = CASES[name].inputs(np.random.default_rng(0), 2, length, DTYPES[dtype])
    ptx = CASES[name].kernel.compile(*inputs, target="sm_90a").code.decode()
    assert "whole=True" in CASES[name].kernel.stages(*inputs, target="sm_90a").stages.schedules[0].describe()
    assert assemble(ptx, "sm_90a").spills == 0
    together = threads_of(ptx) * 16 // np.dtype(DTYPES[dtype]).itemsize
    assert len(re.findall(r"ld\.global", ptx)) == arrays * -(-length // together)


def threads_of(ptx: str) -> int:
    """Threads that share a row."""
    threads = int(re.search(r"\.reqntid (\d+)", ptx).group(1))  # type: ignore[union-attr]
    cluster = re.search(r"\.reqnctapercluster (\d+)", ptx)
    return threads * (int(cluster.group(1)) if cluster else 1)


@pytest.mark.parametrize(
    ("name", "matrices", "vectors"), [("softmax", 1, 0), ("layer_norm", 1, 2), ("rms_norm", 1, 1), ("residual_norm_gate", 3, 1)]
)
@pytest.mark.parametrize("length", [2053, 7001, 50257])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_that_begin_anywhere_are_read_in_vectors(name: str, matrices: int, vectors: int, length: int, dtype: str) -> None:
    """Only the first and the last vector of a thread may be cut and have single elements besides; what rows share comes one by one."""
    inputs = CASES[name].inputs(np.random.default_rng(0), 2, length, DTYPES[dtype])
    ptx = CASES[name].kernel.compile(*inputs, target="sm_90a").code.decode()
    schedule = CASES[name].kernel.stages(*inputs, target="sm_90a").stages.schedules[0]
    assert "shifted=True" in schedule.describe()
    vector = schedule.vector
    assert vector * np.dtype(DTYPES[dtype]).itemsize in (8, 16)
    steps = -(-(length + vector - 1) // (threads_of(ptx) * vector))
    wide = len(re.findall(r"ld\.global[.\w]*\.v\d", ptx))
    assert wide == matrices * steps
    assert len(re.findall(r"ld\.global", ptx)) - wide <= matrices * 2 * vector + vectors * steps * vector
    assert len(re.findall(r"st\.global[.\w]*\.v\d", ptx)) == steps
    assert len(re.findall(r"st\.global", ptx)) <= steps + 2 * vector
    made = assemble(ptx, "sm_90a")
    assert made.spills == 0
    if matrices == 1:
        threads = int(re.search(r"\.reqntid (\d+)", ptx).group(1))  # type: ignore[union-attr]
        # Four blocks or more of a row each, or three of a cluster's, find room at once.
        together = 3 * threads if "cluster=" in schedule.describe() else max(1024, threads)
        assert made.registers[0] * together <= 65536


@tw.kernel
def from_another(x: tw.Array, y: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n, c), x.dtype)
    for i in tw.grid(n):
        s = tw.f32(0)
        for j in range(c):
            s += x[i, j]
        for j in range(c):
            out[i, j] = x[i, j] * s + y[i, j + 1]
    return out


def test_rows_of_arrays_that_begin_differently_are_not_shifted() -> None:
    """No shift serves both arrays."""
    x, y = np.zeros((4, 2053), np.float32), np.zeros((4, 2054), np.float32)
    (schedule,) = from_another.stages(x, y, target="sm_90a").stages.schedules
    assert "whole=True" in schedule.describe()
    assert "shifted" not in schedule.describe()


@pytest.mark.parametrize(("name", "arrays"), [("softmax", 1), ("layer_norm", 2), ("rms_norm", 2), ("residual_norm_gate", 4)])
def test_a_cpu_fetches_what_the_next_rows_need(name: str, arrays: int) -> None:
    """Inputs and the result, a prefetch for each line of memory; not softmax's result, which its sum has left something in."""
    inputs = CASES[name].inputs(np.random.default_rng(0), 2, 2048, np.float32)
    stages = CASES[name].kernel.stages(*inputs, target="x86-64-avx512").stages
    (call,) = stages.thread.calls
    # Lines that are asked for in order to write to them are others: a little ahead in the same row.
    fetched = [op for op in walk(call.kernel.body) if op.opcode == "prefetch" and not op.attrs.get("write")]
    assert len({op.operands[0] for op in fetched}) == arrays
    assert len(fetched) == arrays * stages.schedules[0].reduce_tile * 4 // 64


def test_blocks_of_a_cluster_say_early_that_they_have_read() -> None:
    """Before results are stored, so that nobody waits for another's stores at the end."""
    inputs = CASES["softmax"].inputs(np.random.default_rng(0), 2, 50257, np.float32)
    ptx = CASES["softmax"].kernel.compile(*inputs, target="sm_90a").code.decode()
    arrivals = [m.start() for m in re.finditer(r"barrier\.cluster\.arrive", ptx)]
    waits = [m.start() for m in re.finditer(r"barrier\.cluster\.wait", ptx)]
    assert len(arrivals) == len(waits) == 3
    assert ptx.rindex("ld.shared::cluster") < arrivals[-1] < ptx.index("st.global") < waits[-1]


@tw.kernel
def loss(x: tw.Array, y: tw.Array) -> tw.Array:
    n, c = x.shape
    out = tw.empty((n,), tw.f32)
    for i in tw.grid(n):
        total = tw.f32(0)
        for j in range(c):
            total += tw.log(1.0 + tw.exp(-abs(x[i, j]))) + max(x[i, j], 0.0) - x[i, j] * y[i, j]
        out[i] = total
    return out


@pytest.mark.parametrize("length", [1601, 29018])
def test_sums_along_rows_that_begin_anywhere_are_read_in_vectors(length: int) -> None:
    """In the middle of a row there are vectors alone, all of them before what is computed; at its ends single elements besides."""
    inputs = [np.empty((3446, length), np.float32)] * 2
    (schedule,) = loss.stages(*inputs, target="sm_90a").stages.schedules
    ptx = loss.compile(*inputs, target="sm_90a").code.decode()
    loads = [match.group(0) for match in re.finditer(r"ld\.global\.nc[.\w]*", ptx)]
    assert loads[: 2 * schedule.together] == ["ld.global.nc.v4.b32"] * 2 * schedule.together
    assert len(loads) == 2 * schedule.together + 2 * (1 + 4)
    assert ptx[: ptx.index("fma.rn.f32")].count("ld.global.nc.v4.b32") == 2 * schedule.together
    made = assemble(ptx, "sm_90a")
    assert made.spills == 0
    assert made.registers[0] <= 64
