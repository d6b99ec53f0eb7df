"""Products with few rows on a GPU, in plain and packed weights: against a kernel that only reads the same bytes, PyTorch and Triton.

In: the setting of a run. Out: one `Record` per row. All calls of a row are captured in one CUDA graph, as in a decoder; they go round as many weights as
it takes to leave the level-2 cache cold. `packed-gemm` rows have many rows of x: their peers are the same product with weights of bf16, by our own kernel and by PyTorch. `chain` rows have 50 launches that depend on each other, x being what the launch before gave. The peer
`read` computes nothing: its time is what there is to reach.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import torch

import tilewright as tw
from bench.harness import OURS, Record, Setting

COLD_BYTES = 300_000_000
CHAIN = 50
REPEATS = 8
SEEDED = 16
"""Rows that are quantised; weights repeat them."""

READ = r"""
extern "C" __global__ void read_all(const uint4* p, unsigned* out, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = (long long)gridDim.x * blockDim.x;
  unsigned a = 0;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
    #pragma unroll
    for (int u = 0; u < 8; u++) v[u] = __ldg(p + i + u * step);
    #pragma unroll
    for (int u = 0; u < 8; u++) a ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  for (; i < n; i += step) { uint4 v = __ldg(p + i); a ^= v.x ^ v.y ^ v.z ^ v.w; }
  if (a == 0x12345u) out[0] = a;
}"""


@tw.kernel
def gemv(w: tw.Array, x: tw.Array) -> tw.Array:
    n, k = w.shape
    y = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        total = 0.0
        for j in range(k):
            total += w[i, j] * x[j]
        y[i] = total
    return y


@tw.kernel
def gemv_rows(w: tw.Array, x: tw.Array) -> tw.Array:
    n, k = w.shape
    m = x.shape[0]
    y = tw.empty((m, n), x.dtype)
    for b, i in tw.grid(m, n):
        total = 0.0
        for j in range(k):
            total += w[i, j] * x[b, j]
        y[b, i] = total
    return y


@dataclass(frozen=True)
class Row:
    op: str
    n: int
    k: int
    weights: str
    m: int = 1
    chain: bool = False
    bar: float | None = None
    """The part of the reading kernel's rate that is promised; of `packed-gemm`, that of the same product with weights of bf16."""

    @property
    def label(self) -> str:
        return f"{self.op} {self.m}x{self.n}x{self.k} {self.weights}{' chain' if self.chain else ''}"


def rows(quick: bool) -> list[Row]:
    qwen = [(1536, 1536), (256, 1536), (8960, 1536), (1536, 8960), (151936, 1536)]
    found = [Row("gemv", n, k, "bf16") for n, k in qwen]
    found += [Row("gemv", 8960, 1536, "bf16", m) for m in ((4,) if quick else (2, 4, 8))]
    found += [Row("gemv", 4096, 4096, w) for w in ("f32", "f16")]
    for weights in ("q4_k", "q6_k", "q8_0", "q4_0"):
        found.append(Row("gemv", 8192, 28672, weights, bar=0.8))
        found.append(Row("gemv", 4096, 4096, weights, chain=True, bar=0.8))
    found.append(Row("gemv", 4096, 4096, "bf16", chain=True, bar=0.8))
    for weights in ("q4_k",) if quick else ("q4_k", "q6_k", "q8_0", "q4_0"):
        found.append(Row("packed-gemm", 4096, 14336, weights, 4096, bar=0.85))
    found += [Row("packed-gemm", 4096, 14336, "q4_k", m) for m in ((64,) if quick else (16, 64, 256, 512, 1024))]
    found += [Row("packed-gemm", 8960, 1536, "q4_k", 511), Row("packed-gemm", 1536, 8960, "q6_k", 512)]
    return found


def graph_us(calls: list[Callable[[], object]]) -> tuple[float, float]:
    """Microseconds of one call, in the median replay and in the fastest: all of them are captured in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPEATS + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    times = sorted(times[1:])
    return times[len(times) // 2], times[0]


def reader() -> Callable[[torch.Tensor, int, int], None]:
    kernel, sink = cupy.RawKernel(READ, "read_all"), torch.zeros(1, dtype=torch.int32, device="cuda")

    def read(memory: torch.Tensor, blocks: int, threads: int) -> None:
        count = memory.numel() * memory.element_size() // 16
        grid = max(1, min(blocks, -(-count // (4 * threads))))
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            kernel((grid,), (threads,), (np.uint64(memory.data_ptr()), np.uint64(sink.data_ptr()), np.int64(count)))

    return read


def int4_peer(n: int, k: int, x: torch.Tensor, copies: int) -> list[Callable[[], object]] | None:
    """PyTorch's own product with 4-bit weights, groups of 128; None where this PyTorch has none."""
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack(torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda"), 8)
        scales = torch.randn(k // 128, n, 2, dtype=torch.bfloat16, device="cuda")
        all_of_them = [packed.clone() for _ in range(copies)]
        row = x.to(torch.bfloat16).reshape(1, k)
        torch.ops.aten._weight_int4pack_mm(row, packed, 128, scales)
    except (RuntimeError, AttributeError) as error:
        print(f"note: PyTorch's int4 product takes no part: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return [lambda w=w: torch.ops.aten._weight_int4pack_mm(row, w, 128, scales) for w in all_of_them]  # type: ignore[misc]


class Bench:
    """Makes the weights of a row, and measures it."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.read = setting, reader()

    def weights(self, row: Row) -> tuple[list[Any], list[torch.Tensor], torch.Tensor]:
        """Weights as our kernels take them, their memory, and the first rows of the first one as numbers."""
        generator = torch.Generator("cuda").manual_seed(1)
        if row.weights in ("bf16", "f16", "f32"):
            dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[row.weights]
            count = self.copies(row.n * row.k * dtype.itemsize)
            made = [(torch.randn(row.n, row.k, device="cuda", generator=generator) / row.k**0.5).to(dtype) for _ in range(count)]
            return list(made), made, made[0][:SEEDED].double()
        dtype_ = getattr(tw, row.weights)
        numbers = (np.random.default_rng(1).standard_normal((SEEDED, row.k)) / row.k**0.5).astype(np.float32)
        packed = tw.quantize(numbers, dtype_)
        blocks = torch.from_numpy(np.ascontiguousarray(packed.blocks)).cuda().repeat(-(-row.n // SEEDED), 1, 1)[: row.n].contiguous()
        memory = [blocks.clone() for _ in range(self.copies(blocks.numel()))]
        known = torch.from_numpy(np.asarray(tw.dequantize(packed))).cuda().double()
        return [tw.PackedArray(m, dtype_) for m in memory], memory, known

    def copies(self, nbytes: int) -> int:
        return max(2, min(CHAIN, -(-COLD_BYTES // nbytes)))

    def measure(self, row: Row, schedule: str = "") -> Record:
        record = Record(row.op, [row.m, row.n, row.k], row.weights + (" chain" if row.chain else ""), self.setting.device, commit=self.setting.commit, date=self.setting.date)
        weights, memory, known = self.weights(row)
        dtype = memory[0].dtype if memory[0].dtype.is_floating_point else torch.bfloat16
        x = torch.randn(*((row.m, row.k) if row.m > 1 else (row.k,)), device="cuda").to(dtype)
        function = gemv_rows if row.m > 1 else gemv
        ours = tw.kernel(schedule=schedule)(function.python) if schedule else function
        outs = [torch.zeros(*((row.m, row.n) if row.m > 1 else (row.n,)), device="cuda", dtype=dtype) for _ in range(max(len(weights), 2))]
        ours(weights[0], x, out=outs[0])
        wanted = x.double() @ known.T
        error = float((outs[0][..., : len(known)].double() - wanted).abs().max() / wanted.abs().max())
        if not error < 2 ** (-7 if dtype is torch.bfloat16 else -10 if dtype is torch.float16 else -18):
            record.error = f"relative error {error:.2g}"
        nbytes = memory[0].numel() * memory[0].element_size()
        peers: dict[str, list[Callable[[], object]]] = {}
        dense: list[torch.Tensor] = []
        if row.op == "packed-gemm":
            # The same product with weights of bf16, as our own kernel computes it: what unpacking is held against.
            count = self.copies(2 * row.n * row.k)
            dense = [known.to(dtype).repeat(-(-row.n // SEEDED), 1)[: row.n].contiguous() for _ in range(count)]
            peers["bf16"] = [lambda w=w: function(w, x, out=outs[0]) for w in dense]  # type: ignore[misc]
            peers["torch bf16"] = [lambda w=w: x @ w.T for w in dense]  # type: ignore[misc]
        if row.chain:
            calls: list[Callable[[], object]] = [
                lambda j=j: ours(weights[j % len(weights)], outs[j % 2] if j else x, out=outs[1 - j % 2]) for j in range(CHAIN)  # type: ignore[misc]
            ]
            memory = [memory[j % len(memory)] for j in range(CHAIN)]
        else:
            calls = [lambda w=w, out=out: ours(w, x, out=out) for w, out in zip(weights, outs, strict=False)]  # type: ignore[misc]
            if memory[0].dtype.is_floating_point:
                peers["torch"] = [lambda w=w: x @ w.T for w in memory]  # type: ignore[misc]
            elif not dense and row.weights in ("q4_k", "q4_0") and (other := int4_peer(row.n, row.k, x, self.copies(row.n * row.k // 2))):
                peers["torch int4"] = other
        median, best = graph_us(calls)
        record.ours_ms, record.ours_min_ms, record.GBps = median / 1e3, best / 1e3, nbytes / median / 1e3
        for name, others in peers.items():
            record.peers[name], record.peers_min[name] = (t / 1e3 for t in graph_us(others))
        reading = [graph_us([lambda m=m, s=s: self.read(m, *s) for m in memory]) for s in ((132 * 8, 256), (132 * 4, 512), (132 * 16, 128))]  # type: ignore[misc]
        record.peers["read"], record.peers_min["read"] = (t / 1e3 for t in min(reading))
        record.peer = min((name for name in record.peers if not dense or name != "read"), key=lambda name: record.peers[name])
        record.peer_ms = record.peers[record.peer]
        record.ratio = record.peer_ms / record.ours_ms
        record.of_copy = record.peers["read"] / record.ours_ms
        record.bar, record.bar_ratio = row.bar, record.peers["bf16"] / record.ours_ms if dense else record.of_copy
        record.notes = [f"{row.label}: " + ", ".join(f"{name} {1e3 * ms:.2f} us" for name, ms in {OURS: record.ours_ms, **record.peers}.items())]
        torch.cuda.empty_cache()
        return record


def records(setting: Setting, row: Row) -> Iterator[Record]:
    yield Bench(setting).measure(row)
