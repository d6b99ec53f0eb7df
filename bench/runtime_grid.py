"""Grids that stay: a barrier of all blocks, and small kernels in one launch. In: the `Session` of `bench.runtime`; out: one
`Record` per row of `ROWS`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch

import tilewright as tw
from bench import grid_kernels
from bench.harness import OURS, Record, summarise
from bench.runtime import Session

BLOCKS = 132
BARRIERS = 1000
SIDE = 256
_COOPERATIVE_GROUPS = """
#include <cooperative_groups.h>
extern "C" __global__ void meet(float* out, int n) {
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    for (int i = 0; i < n; ++i) grid.sync();
    if (blockIdx.x == 0 && threadIdx.x == 0) out[0] = n;
}
"""


def _their_barriers(record: Record) -> Callable[[], object] | None:
    """The same loop with cooperative groups, compiled by CuPy; None where it has no headers of CUDA."""
    out = cupy.zeros(1, cupy.float32)
    kernel = cupy.RawKernel(_COOPERATIVE_GROUPS, "meet", enable_cooperative_groups=True)
    try:
        kernel((BLOCKS,), (grid_kernels.THREADS,), (out, np.int32(1)))
    except cupy.cuda.compiler.CompileException as error:
        record.notes.append(f"grid_sync: CuPy could not compile cooperative groups: {str(error).splitlines()[0][:200]}")
        return None
    return lambda: kernel((BLOCKS,), (grid_kernels.THREADS,), (out, np.int32(BARRIERS)))


def _device_times(session: Session, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Milliseconds on the device, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3 if session.quick else 10):
        for name, call in calls.items():
            call()
            samples[name] += session.gpu.time(call, 10)
    return samples


def grid_sync(session: Session) -> Record:
    """One barrier of 132 blocks, on the device: a thousand in a loop, divided."""
    program = session.gpu.load(grid_kernels.barrier_artifact(BLOCKS, session.gpu.target))
    x, out = session.gpu.from_numpy(np.zeros(BARRIERS, np.float32)), session.gpu.from_numpy(np.zeros(1, np.float32))
    record = session.record("grid_sync", BLOCKS)
    calls: dict[str, Callable[[], object]] = {OURS: lambda: program.run({"x": x, "out": out}, {}, {"n": BARRIERS})}
    theirs = _their_barriers(record)
    if theirs is not None:
        calls["cooperative groups"] = theirs
    samples = {name: [t / BARRIERS for t in times] for name, times in _device_times(session, calls).items()}
    summarise(record, samples, 0, None)
    record.bar_ms = 1.1e-3
    if float(out.numpy()[0]) != BARRIERS:
        record.error = f"the kernel says {out.numpy()[0]}, expected {BARRIERS}"
    return record


def _torch_chain(x: Any, v: Any) -> Any:
    for _ in range(grid_kernels.STEPS):
        v = torch.tanh(x @ v)
    return v


def _torch_graph(x: Any, v: Any) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _torch_chain(x, v)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _torch_chain(x, v)
    return graph


def _operands() -> tuple[np.ndarray, np.ndarray]:
    drawn = np.random.default_rng(0)
    return (drawn.standard_normal((SIDE, SIDE)) / SIDE**0.5).astype(np.float32), drawn.standard_normal(SIDE).astype(np.float32)


def persistent_kernel(session: Session) -> Record:
    """Ten products of a small matrix and a vector, each of the one before: called and waited for. As one launch, as ten, and as a graph
    of ten."""
    matrix, vector = _operands()
    x, v = session.gpu.from_numpy(matrix), session.gpu.from_numpy(vector)
    tx, tv = torch.from_numpy(matrix).cuda(), torch.from_numpy(vector).cuda()
    together, apart = grid_kernels.persistent_kernel, grid_kernels.ten_launches
    found, several = together(x, v).numpy(), apart(x, v).numpy()
    recorded, theirs = tw.graph(apart, x, v), _torch_graph(tx, tv)
    wait, synchronize = session.gpu.synchronize, torch.cuda.synchronize
    device_calls: dict[str, Callable[[], object]] = {
        OURS: lambda: together(x, v), f"{OURS}, ten launches": lambda: apart(x, v), f"{OURS}, graph": recorded.replay,
        "torch": lambda: _torch_chain(tx, tv), "torch, graph": theirs.replay,
    }  # fmt: skip

    def waited(name: str) -> Callable[[], None]:
        call, finish = device_calls[name], wait if name.startswith(OURS) else synchronize

        def run() -> None:
            call()
            finish()

        return run

    record = session.record("persistent_kernel", grid_kernels.STEPS)
    summarise(record, session.trips({name: waited(name) for name in device_calls}), 0, None)
    own = {name: call for name, call in device_calls.items() if name.startswith(OURS)}
    times = ", ".join(f"{name} {statistics.median(found) * 1e3:.1f}" for name, found in _device_times(session, own).items())
    record.notes.append(f"persistent_kernel: us on the device: {times}")
    wanted = vector.astype(np.float64)
    for _ in range(grid_kernels.STEPS):
        wanted = np.tanh(matrix.astype(np.float64) @ wanted)
    worst = max(float(np.abs(result - wanted).max()) for result in (found, several))
    if not worst < 1e-4:
        record.error = f"differs from float64 by {worst}"
    return record


ROWS: tuple[Callable[[Session], Record], ...] = (grid_sync, persistent_kernel)
