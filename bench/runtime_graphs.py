"""Graphs, futures and events against their peers. In: the `Session` of `bench.runtime`; out: one `Record` per row of `ROWS`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch

import tilewright as tw
from bench.harness import OURS, Record, summarise
from bench.runtime import Session, _right

KERNELS = 100
ELEMENTS = 1024


@tw.kernel
def plus(x: tw.Array, a: float) -> tw.Array:
    """What a replay is made of: each launch depends on the one before."""
    out = tw.empty(x.shape, x.dtype)
    for i in range(x.shape[0]):
        out[i] = x[i] + a
    return out


def _ones(session: Session) -> Any:
    return session.gpu.from_numpy(np.ones(ELEMENTS, np.float32))


def _chain(x: Any) -> Any:
    for _ in range(KERNELS):
        x = plus(x, 1.0)
    return x


def _torch_graph() -> torch.cuda.CUDAGraph:
    x = torch.ones(ELEMENTS, device="cuda")
    x.add_(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            x.add_(1.0)
    return graph


def _cupy_graph() -> tuple[Any, Any]:
    x, stream = cupy.ones(ELEMENTS, cupy.float32), cupy.cuda.Stream(non_blocking=True)
    with stream:
        x += 1
        stream.begin_capture()
        for _ in range(KERNELS):
            x += 1
        return stream.end_capture(), stream


def _in_place(x: Any) -> Any:
    for _ in range(KERNELS):
        plus(x, 1.0, out=x)
    return x


def graph_replay(session: Session) -> Record:
    """A hundred small kernels, each after the one before and in place, replayed and waited for."""
    plus(_ones(session), 1.0)
    graph, theirs, (other, stream) = tw.graph(_in_place, _ones(session)), _torch_graph(), _cupy_graph()
    wait, synchronize = session.gpu.synchronize, torch.cuda.synchronize

    def ours() -> None:
        graph.replay()
        wait()

    def torch_replay() -> None:
        theirs.replay()
        synchronize()

    def cupy_replay() -> None:
        other.launch(stream)
        stream.synchronize()

    record = session.record("graph_replay", KERNELS)
    summarise(record, session.trips({OURS: ours, "torch": torch_replay, "cupy": cupy_replay}), 0, None)
    record.bar_ms = 117e-3
    samples = sorted(session.gpu.time(graph.replay, 50))
    record.notes.append(f"graph_replay: {samples[len(samples) // 2] * 1e3:.1f} us on the device")
    return _right(record, graph.replay(x=_ones(session)), 1.0 + KERNELS)


def graph_queue(session: Session) -> Record:
    """The same on the host alone: how long until the replay is queued."""
    plus(_ones(session), 1.0)
    graph, theirs = tw.graph(_chain, _ones(session)), _torch_graph()

    def sample(replay: Callable[[], object]) -> list[float]:
        found = []
        for _ in range(20 if session.quick else 100):
            torch.cuda.synchronize()
            start = time.perf_counter()
            replay()
            found.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        return found

    record = session.record("graph_queue", KERNELS)
    summarise(record, {OURS: sample(graph.replay), "torch": sample(theirs.replay)}, 0, None)
    return record


def graph_update(session: Session) -> Record:
    """Another array for a graph of a hundred kernels: two of its nodes change. PyTorch has to capture again."""
    plus(_ones(session), 1.0)
    arrays = [_ones(session), _ones(session)]
    with tw.capture("cuda", x=arrays[0]) as graph:
        y = _chain(graph["x"])
    turn = 0

    def ours() -> None:
        nonlocal turn
        turn += 1
        graph.update(x=arrays[turn % 2])

    record = session.record("graph_update", KERNELS)
    summarise(record, session.trips({OURS: ours, "torch, captured again": _torch_graph}), 0, None)
    graph.replay()
    return _right(record, y, 1.0 + KERNELS)


def future_trip(session: Session) -> Record:
    """An asynchronous call and its result, against a call of PyTorch with an event that is waited for."""
    x, t, event = _ones(session), torch.ones(ELEMENTS, device="cuda"), torch.cuda.Event()
    plus(x, 1.0)

    def ours() -> None:
        plus(x, 1.0, asynchronous=True).result()

    def theirs() -> None:
        t.add_(1.0)
        event.record()
        event.synchronize()

    record = session.record("future_trip", 1)
    summarise(record, session.trips({OURS: ours, "torch, event": theirs}), 0, None)
    return _right(record, plus(x, 1.0, asynchronous=True).result(), 2.0)


def await_trip(session: Session) -> Record:
    """The same, awaited in an event loop; others would hand the waiting to a thread."""
    x, t = _ones(session), torch.ones(ELEMENTS, device="cuda")
    plus(x, 1.0)
    loop = asyncio.new_event_loop()

    async def awaited() -> None:
        await plus(x, 1.0, asynchronous=True)

    async def handed() -> None:
        t.add_(1.0)
        await asyncio.to_thread(torch.cuda.synchronize)

    record = session.record("await_trip", 1)
    calls = {OURS: lambda: loop.run_until_complete(awaited()), "torch, to_thread": lambda: loop.run_until_complete(handed())}
    summarise(record, session.trips(calls), 0, None)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    return record


ROWS: tuple[Callable[[Session], Record], ...] = (graph_replay, graph_queue, graph_update, future_trip, await_trip)
