"""The CUDA runtime against its peers: launches from Python, round trips, look-ups. Rows are independent; `ROWS` lists them.

In: a `Session` (a GPU that PyTorch, CuPy and Triton see too); out: one `Record` per row. Times are per call on the host.
Launches are queued in batches shorter than the driver's queue, with the device idle before each; all variants of a row take
turns.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import torch
import triton
import triton.language as tl

import tilewright as tw
from bench import runtime_kernels
from bench.harness import OURS, Record, Setting, summarise
from bench.runtime_floor import Floor
from tilewright.base import launch_abi as abi
from tilewright.runtime.cuda import device as cuda
from tilewright.runtime.cuda.device import CudaDevice
from tilewright.runtime.cuda.program import CudaProgram

BATCH = 200
"""Launches of one sample; the driver queues about a thousand."""
SMALL = 64
FLOOR = "cuLaunchKernel in a loop"

Loop = Callable[[int], object]
"""Makes so many calls."""


@dataclass(frozen=True)
class Session:
    setting: Setting
    quick: bool
    gpu: CudaDevice

    @classmethod
    def open(cls, setting: Setting, quick: bool) -> Session:
        torch.zeros(1, device="cuda")
        return cls(setting, quick, cuda.devices()[0])

    def own(self) -> Any:
        return self.gpu.from_numpy(np.ones(SMALL, np.float32))

    def record(self, op: str, count: int) -> Record:
        return Record(op, [count], "f32", self.setting.device, commit=self.setting.commit, date=self.setting.date)

    def queue(self, loops: Mapping[str, Loop]) -> dict[str, list[float]]:
        """Milliseconds per call of each loop, in turns, the device idle before each sample."""
        samples: dict[str, list[float]] = {name: [] for name in loops}
        for turn in range(15 if self.quick else 60):
            for name, loop in loops.items():
                if not turn:
                    loop(20)
                torch.cuda.synchronize()
                start = time.perf_counter()
                loop(BATCH)
                samples[name].append((time.perf_counter() - start) * 1e3 / BATCH)
        torch.cuda.synchronize()
        return samples

    def trips(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Milliseconds of single calls, in turns of some."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(10 if self.quick else 40):
            for name, call in calls.items():
                for _ in range(5):
                    call()
                for _ in range(50):
                    start = time.perf_counter()
                    call()
                    samples[name].append((time.perf_counter() - start) * 1e3)
        return samples


@triton.jit
def _triton_axpy(x, y, out, a, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(out + i, a * tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)


@triton.jit
def _triton_empty(x):  # type: ignore[no-untyped-def]
    pass


_CUPY_AXPY = """
extern "C" __global__ void axpy(const float* x, const float* y, float* out, float a, int n) {
    int i = threadIdx.x; if (i < n) out[i] = a * x[i] + y[i];
}
"""


def _program(kernel: tw.Kernel[..., object]) -> CudaProgram:
    return kernel.runner.by_kind["cuda"].programs[-1]


def _floor(session: Session, kernel: tw.Kernel[..., object], arrays: Sequence[Any], scalars: Sequence[float], out: Any) -> Floor:
    """The same kernel with the same arguments."""
    program = _program(kernel)
    numbers = [ctypes.c_uint64.from_buffer(ctypes.c_double(s)).value for s in scalars]
    words = [*(x.pointer for x in arrays), *numbers, out.pointer, SMALL]
    return Floor(program, words, 1)


def _held_to_floor(record: Record, samples: dict[str, list[float]], over_ms: float) -> Record:
    """The bar is so much over what the driver takes by itself in the same run."""
    floor = statistics.median(samples.pop(FLOOR))
    summarise(record, samples, 0, None)
    record.bar_ms = floor + over_ms
    record.peers[FLOOR] = floor
    if record.ours_ms is not None:
        others = ", ".join(f"{name} +{(t - floor) * 1e3:.2f}" for name, t in record.peers.items() if name != FLOOR)
        over = f"+{(record.ours_ms - floor) * 1e3:.2f} us over the driver's {floor * 1e3:.2f} us"
        record.notes.append(f"{record.op}: {over} ({others})" if others else f"{record.op}: {over}")
    return record


def _right(record: Record, out: Any, expected: float) -> Record:
    values = out.numpy() if hasattr(out, "numpy") and not isinstance(out, torch.Tensor) else out.cpu().numpy()
    if not np.all(values == expected):
        record.error = f"{values[:4]}, expected {expected}"
    return record


def _others() -> dict[str, Loop]:
    """CuPy, PyTorch and Triton with three arrays and a number."""
    cx, cy, cout = (cupy.ones(SMALL, cupy.float32) for _ in range(3))
    raw = cupy.RawKernel(_CUPY_AXPY, "axpy")
    tx, ty, tout = (torch.ones(SMALL, device="cuda") for _ in range(3))

    def cupy_loop(count: int) -> None:
        for _ in range(count):
            raw((1,), (SMALL,), (cx, cy, cout, cupy.float32(2.0), SMALL))

    def torch_loop(count: int) -> None:
        for _ in range(count):
            torch.add(ty, tx, alpha=2.0, out=tout)

    def torch_in_place(count: int) -> None:
        for _ in range(count):
            tout.add_(tx)

    def triton_loop(count: int) -> None:
        for _ in range(count):
            _triton_axpy[(1,)](tx, ty, tout, 2.0, SMALL, BLOCK=SMALL)

    return {"cupy RawKernel": cupy_loop, "torch.add": torch_loop, "torch add_": torch_in_place, "triton": triton_loop}


def launch_own(session: Session) -> Record:
    """Three arrays and a number, arrays of ours, against what other libraries take for as much."""
    kernel, x, y, out = runtime_kernels.axpy, session.own(), session.own(), session.own()
    kernel(x, y, 2.0, out=out)
    floor = _floor(session, kernel, (x, y), (2.0,), out)

    def ours(count: int) -> None:
        for _ in range(count):
            kernel(x, y, 2.0, out=out)

    samples = session.queue({OURS: ours, FLOOR: floor.run, **_others()})
    return _right(_held_to_floor(session.record("launch_own", 4), samples, 0.8e-3), out, 3.0)


def launch_torch(session: Session) -> Record:
    """The same with tensors of PyTorch."""
    kernel, x, y, out = runtime_kernels.axpy, *(torch.ones(SMALL, device="cuda") for _ in range(3))
    kernel(x, y, 2.0, out=out)
    mine = [session.gpu.wrap(t) for t in (x, y, out)]
    floor = _floor(session, kernel, mine[:2], (2.0,), mine[2])

    def ours(count: int) -> None:
        for _ in range(count):
            kernel(x, y, 2.0, out=out)

    samples = session.queue({OURS: ours, FLOOR: floor.run, **_others()})
    return _right(_held_to_floor(session.record("launch_torch", 4), samples, 0.8e-3), out, 3.0)


def launch_own_20(session: Session) -> Record:
    """Twenty arguments, arrays of ours."""
    return _twenty(session, "launch_own_20", session.own)


def launch_torch_20(session: Session) -> Record:
    """Twenty arguments, tensors of PyTorch."""
    return _twenty(session, "launch_torch_20", lambda: torch.ones(SMALL, device="cuda"))


def _twenty(session: Session, op: str, make: Callable[[], Any]) -> Record:
    kernel, out = runtime_kernels.sum17, make()
    a, b, c, d, e, f, g, h, i, j, k, r, m, n, o, p, q = arrays = [make() for _ in range(17)]
    kernel(*arrays, 2.0, 3.0, out=out)
    floor = _floor(session, kernel, [session.gpu.wrap(x) for x in arrays], (2.0, 3.0), session.gpu.wrap(out))

    def ours(count: int) -> None:
        for _ in range(count):
            kernel(a, b, c, d, e, f, g, h, i, j, k, r, m, n, o, p, q, 2.0, 3.0, out=out)

    samples = session.queue({OURS: ours, FLOOR: floor.run})
    return _right(_held_to_floor(session.record(op, 20), samples, 1.5e-3), out, 43.0)


def launch_new(session: Session) -> Record:
    """Without `out=`: the result is made too, against PyTorch's addition, which does the same."""
    kernel, x, y = runtime_kernels.axpy, *(torch.ones(SMALL, device="cuda") for _ in range(2))
    own_x, own_y = session.own(), session.own()
    kernel(x, y, 2.0)
    kernel(own_x, own_y, 2.0)

    def ours(count: int) -> None:
        for _ in range(count):
            kernel(own_x, own_y, 2.0)

    def tensors(count: int) -> None:
        for _ in range(count):
            kernel(x, y, 2.0)

    def theirs(count: int) -> None:
        for _ in range(count):
            torch.add(y, x, alpha=2.0)

    samples = session.queue({OURS: ours, f"{OURS}, tensors": tensors, "torch.add": theirs})
    record = session.record("launch_new", 4)
    summarise(record, samples, 0, None)
    return _right(record, kernel(x, y, 2.0), 3.0)


def launch_shapes(session: Session) -> Record:
    """Eight shapes in turn, tensors of PyTorch: every call looks for another form."""
    kernel = runtime_kernels.axpy
    calls = [tuple(torch.ones(64 * n, device="cuda") for _ in range(3)) for n in range(1, 9)]
    for x, y, out in calls:
        kernel(x, y, 2.0, out=out)

    def ours(count: int) -> None:
        for _ in range(count // 8):
            for x, y, out in calls:
                kernel(x, y, 2.0, out=out)

    def theirs(count: int) -> None:
        for _ in range(count // 8):
            for x, y, out in calls:
                torch.add(y, x, alpha=2.0, out=out)

    samples = session.queue({OURS: ours, "torch.add": theirs})
    record = session.record("launch_shapes", 4)
    summarise(record, samples, 0, None)
    return _right(record, calls[3][2], 3.0)


def round_trip(session: Session) -> Record:
    """An empty kernel, launched and waited for."""
    kernel, gpu, x, out = runtime_kernels.fill, session.gpu, session.own(), session.own()
    kernel(x, out=out)
    t = torch.ones(SMALL, device="cuda")
    wait, synchronize = gpu.synchronize, torch.cuda.synchronize

    def ours() -> None:
        kernel(x, out=out)
        wait()

    def torch_trip() -> None:
        t.add_(1.0)
        synchronize()

    def triton_trip() -> None:
        _triton_empty[(1,)](t)
        synchronize()

    record = session.record("round_trip", 1)
    summarise(record, session.trips({OURS: ours, "torch add_": torch_trip, "triton": triton_trip}), 0, None)
    record.bar_ms = 10e-3
    return _right(record, out, 1.0)


def look_up(session: Session) -> Record:
    """A call of which everything happens but the launch: the driver's function is replaced by one that returns at once."""
    kernel, x, y, out = tw.Kernel(runtime_kernels.axpy.python), session.own(), session.own(), session.own()
    kernel(x, y, 2.0, out=out)
    floor = _floor(session, kernel, (x, y), (2.0,), out)
    for launcher in kernel.runner.by_kind["cuda"].native.launchers:
        launcher.state[abi.STATE_LAUNCH // 8] = floor.no_launch

    def ours(count: int) -> None:
        for _ in range(count):
            kernel(x, y, 2.0, out=out)

    record = session.record("look_up", 4)
    summarise(record, session.queue({OURS: ours}), 0, None)
    record.bar_ms = 0.5e-3
    return record


ROWS: tuple[Callable[[Session], Record], ...] = (
    launch_own, launch_torch, launch_own_20, launch_torch_20, launch_new, launch_shapes, round_trip, look_up,
)  # fmt: skip


def records(session: Session, wanted: Callable[[str], bool]) -> Iterator[Record]:
    for row in ROWS:
        if wanted(row.__name__):
            yield row(session)
