"""Memory of the CUDA runtime against its peers: allocation, copies, imports. Rows as in `bench.runtime`; `ROWS` lists them.

In: a `Session`; out: one `Record` per row. Allocation and imports are host times per call; copies are times of whole copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
import torch

import tilewright as tw
from bench.harness import OURS, Bar, Record, summarise
from bench.runtime import Loop, Session

COPIED = 256 << 20
"""Bytes of a copy."""
DRIVER = "cuMemcpy"
_TORCH = Bar(1.0, ("torch.empty",))


def _calls(session: Session, calls: dict[str, Callable[[], object]], batch: int = 2000) -> dict[str, list[float]]:
    """Milliseconds per call, in turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def loop(call: Callable[[], object]) -> Loop:
        def run(count: int) -> None:
            for _ in range(count):
                call()

        return run

    loops = {name: loop(call) for name, call in calls.items()}
    for turn in range(10 if session.quick else 40):
        for name, run in loops.items():
            if not turn:
                run(50)
            start = time.perf_counter()
            run(batch)
            samples[name].append((time.perf_counter() - start) * 1e3 / batch)
    torch.cuda.synchronize()
    return samples


def allocate(session: Session) -> Record:
    """An array made and dropped."""
    record = session.record("allocate_free", 1 << 18)
    shape, kind, place = (1 << 18,), tw.f32, f"cuda:{session.gpu.ordinal}"
    device = torch.device("cuda", session.gpu.ordinal)
    tw.allocate(shape, kind, place)
    samples = _calls(session, {
        OURS: lambda: tw.allocate(shape, kind, place),
        "torch.empty": lambda: torch.empty(1 << 18, device=device),
        "cupy.empty": lambda: cupy.empty(1 << 18, cupy.float32),
    })  # fmt: skip
    summarise(record, samples, 0, _TORCH)
    return record


def allocate_two_axes(session: Session) -> Record:
    """The same with two axes."""
    record = session.record("allocate_free_2d", 512)
    shape, kind, place = (512, 512), tw.bf16, f"cuda:{session.gpu.ordinal}"
    device = torch.device("cuda", session.gpu.ordinal)
    tw.allocate(shape, kind, place)
    samples = _calls(session, {
        OURS: lambda: tw.allocate(shape, kind, place),
        "torch.empty": lambda: torch.empty((512, 512), dtype=torch.bfloat16, device=device),
        "cupy.empty": lambda: cupy.empty((512, 512), cupy.float16),
    })  # fmt: skip
    summarise(record, samples, 0, _TORCH)
    return record


def import_tensor(session: Session) -> Record:
    """A tensor of PyTorch as an array of ours; the bar is one microsecond."""
    record = session.record("import_torch", 12)
    tensor = torch.zeros(3, 4, device="cuda")
    samples = _calls(session, {
        OURS: lambda: tw.from_dlpack(tensor),
        "torch.from_dlpack": lambda: torch.from_dlpack(tensor),
        "cupy.from_dlpack": lambda: cupy.from_dlpack(tensor),
    })  # fmt: skip
    summarise(record, samples, 0, None)
    record.bar_ms = 1e-3
    return record


def _copies(session: Session, op: str, calls: dict[str, Callable[[], object]], bar: str, share: float) -> Record:
    record = session.record(op, COPIED)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(6 if session.quick else 20):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            if turn:
                samples[name].append((time.perf_counter() - start) * 1e3)
    summarise(record, samples, COPIED, None)
    record.bar_ms = record.peers[bar] / share
    return record


def _host_and_device(session: Session) -> tuple[Any, Any, Any, Any]:
    pinned = tw.allocate((COPIED,), tw.u8, "cpu", pinned=True)
    pinned[...] = 1
    array = tw.allocate((COPIED,), tw.u8, f"cuda:{session.gpu.ordinal}")
    return pinned, array, torch.ones(COPIED, dtype=torch.uint8).pin_memory(), torch.zeros(COPIED, dtype=torch.uint8, device="cuda")


def pinned_in(session: Session) -> Record:
    """Page-locked memory to the device."""
    pinned, array, theirs, tensor = _host_and_device(session)
    address = pinned.__array_interface__["data"][0]
    return _copies(session, "pinned_to_device", {
        OURS: lambda: array.copy_from(pinned),
        DRIVER: lambda: session.gpu.call("cuMemcpyHtoD", array.pointer, address, COPIED),
        "torch": lambda: tensor.copy_(theirs),
    }, DRIVER, 0.98)  # fmt: skip


def pinned_out(session: Session) -> Record:
    """The device to page-locked memory."""
    pinned, array, theirs, tensor = _host_and_device(session)
    address = pinned.__array_interface__["data"][0]
    return _copies(session, "device_to_pinned", {
        OURS: lambda: array.to_host(pinned),
        DRIVER: lambda: session.gpu.call("cuMemcpyDtoH", address, array.pointer, COPIED),
        "torch": lambda: theirs.copy_(tensor),
    }, DRIVER, 0.98)  # fmt: skip


def plain_in(session: Session) -> Record:
    """Plain memory to the device."""
    array, values = tw.allocate((COPIED,), tw.u8, f"cuda:{session.gpu.ordinal}"), np.ones(COPIED, np.uint8)
    tensor, theirs = torch.zeros(COPIED, dtype=torch.uint8, device="cuda"), torch.ones(COPIED, dtype=torch.uint8)
    return _copies(session, "plain_to_device", {
        OURS: lambda: array.copy_from(values), "torch": lambda: tensor.copy_(theirs),
    }, "torch", 1.0)  # fmt: skip


def plain_out(session: Session) -> Record:
    """The device to plain memory."""
    array, values = tw.allocate((COPIED,), tw.u8, f"cuda:{session.gpu.ordinal}"), np.ones(COPIED, np.uint8)
    tensor, theirs = torch.zeros(COPIED, dtype=torch.uint8, device="cuda"), torch.ones(COPIED, dtype=torch.uint8)
    return _copies(session, "device_to_plain", {
        OURS: lambda: array.to_host(values), "torch": lambda: theirs.copy_(tensor),
    }, "torch", 1.0)  # fmt: skip


ROWS: tuple[Callable[[Session], Record], ...] = (
    allocate, allocate_two_axes, import_tensor, pinned_in, pinned_out, plain_in, plain_out,
)  # fmt: skip
