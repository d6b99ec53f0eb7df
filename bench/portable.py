"""Kernels on a WebGPU device against WGSL written by hand as tutorials have it, against tinygrad's WebGPU backend, and dispatches against the least that wgpu-py
needs.

In: whether to be quick. Out: cases for `harness.measure`. Both sides run on the same device of wgpu, on the same buffers, and each call waits for its result. tinygrad, where it is installed, runs its kernels through Dawn (dawn-python's library) on the first
adapter that finds; it compiles a call once (`TinyJit`). A third family times compilation, which has bars in milliseconds of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tilewright as tw
from bench.harness import OURS, Bar, Case, Prepared, Record, Setting, Variant
from tilewright.base.target import parse_target
from tilewright.compile.build import build_artifact
from tilewright.compile.driver import compile_stages
from tilewright.execute.devices import find_device, own_memory
from tilewright.runtime.portable.drivers import without_windows
from tilewright.runtime.webgpu.device import WebGpuDevice

COMPILE_TARGETS = ("wgsl", "msl", "spirv-vulkan", "spirv-opencl", "gfx942")
COMPILE_BARS = {f"compile {op} {target}": bar for target in COMPILE_TARGETS for op, bar in (("add", 60.0), ("matmul", 500.0))}
_MOST_BLOCKS = 65535
"""Blocks along one axis of a grid."""


@tw.kernel
def add(x: tw.Array, y: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((n,), x.dtype)
    for i in tw.grid(n):
        out[i] = x[i] + y[i]
    return out


@tw.kernel
def total(x: tw.Array) -> tw.Array:
    n = x.shape[0]
    out = tw.empty((1,), x.dtype)
    for r in tw.grid(1):
        s = 0.0
        for i in range(n):
            s += x[i]
        out[r] = s
    return out


@tw.kernel
def softmax(x: tw.Array) -> tw.Array:
    rows, columns = x.shape
    out = tw.empty((rows, columns), x.dtype)
    for i in tw.grid(rows):
        most = -tw.inf
        for j in range(columns):
            most = max(most, x[i, j])
        s = 0.0
        for j in range(columns):
            s += tw.exp(x[i, j] - most)
        for j in range(columns):
            out[i, j] = tw.exp(x[i, j] - most) / s
    return out


@tw.kernel
def matmul(a: tw.Array, b: tw.Array) -> tw.Array:
    m, k = a.shape
    n = b.shape[1]
    out = tw.empty((m, n), a.dtype)
    for i, j in tw.grid(m, n):
        s = 0.0
        for p in range(k):
            s += a[i, p] * b[p, j]
        out[i, j] = s
    return out


_BINDINGS = "@group(0) @binding(0) var<storage, read> a: array<f32>;\n"
_ADD = _BINDINGS + """@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  if (g.x < arrayLength(&c)) { c[g.x] = a[g.x] + b[g.x]; }
}"""
_SUM = _BINDINGS + """@group(0) @binding(1) var<storage, read_write> c: array<f32>;
var<workgroup> part: array<f32, 256>;
@compute @workgroup_size(256) fn main(@builtin(global_invocation_id) g: vec3<u32>, @builtin(local_invocation_index) t: u32, @builtin(workgroup_id) w: vec3<u32>) {
  part[t] = select(0.0, a[g.x], g.x < arrayLength(&a));
  workgroupBarrier();
  for (var s = 128u; s > 0u; s = s / 2u) {
    if (t < s) { part[t] = part[t] + part[t + s]; }
    workgroupBarrier();
  }
  if (t == 0u) { c[w.x] = part[0]; }
}"""
_SOFTMAX = _BINDINGS + """@group(0) @binding(1) var<storage, read_write> c: array<f32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let n = COLUMNSu;
  if (g.x >= ROWSu) { return; }
  var most = a[g.x * n];
  for (var j = 1u; j < n; j = j + 1u) { most = max(most, a[g.x * n + j]); }
  var s = 0.0;
  for (var j = 0u; j < n; j = j + 1u) { s = s + exp(a[g.x * n + j] - most); }
  for (var j = 0u; j < n; j = j + 1u) { c[g.x * n + j] = exp(a[g.x * n + j] - most) / s; }
}"""
_MATMUL = _BINDINGS + """@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
@compute @workgroup_size(8, 8) fn main(@builtin(global_invocation_id) g: vec3<u32>) {
  let n = COLUMNSu;
  if (g.x >= n || g.y >= n) { return; }
  var s = 0.0;
  for (var k = 0u; k < n; k = k + 1u) { s = s + a[g.y * n + k] * b[k * n + g.x]; }
  c[g.y * n + g.x] = s;
}"""


def device() -> WebGpuDevice:
    found = own_memory(find_device("webgpu"))
    assert isinstance(found, WebGpuDevice)
    return found


class ByHand:
    """Passes of hand-written WGSL over buffers, bound once."""

    def __init__(self, passes: Sequence[tuple[str, Sequence[Any], tuple[int, int]]]) -> None:
        self.device = device()
        gpu, self.steps = self.device.gpu, []
        for code, buffers, grid in passes:
            pipeline = gpu.create_compute_pipeline(layout="auto", compute={"module": gpu.create_shader_module(code=code), "entry_point": "main"})
            entries = [{"binding": k, "resource": {"buffer": b, "offset": 0, "size": size}} for k, (b, size) in enumerate(buffers)]
            self.steps.append((pipeline, gpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries), grid))

    def encode(self) -> None:
        gpu = self.device.gpu
        encoder = gpu.create_command_encoder()
        work = encoder.begin_compute_pass()
        for pipeline, group, (x, y) in self.steps:
            work.set_pipeline(pipeline)
            work.set_bind_group(0, group)
            work.dispatch_workgroups(x, y)
        work.end()
        gpu.queue.submit([encoder.finish()])
        self.device.submitted += 1

    def run(self, slot: int) -> None:
        self.encode()
        self.device.wait()


class Tinygrad:
    """One expression as tinygrad compiles it for WebGPU."""

    def __init__(self, expression: Callable[..., Any], inputs: Sequence[np.ndarray]) -> None:
        tinygrad: Any = importlib.import_module("tinygrad")
        with without_windows():
            self._device = tinygrad.Device["WEBGPU"]
        self._given = [tinygrad.Tensor(x, device="WEBGPU").realize() for x in inputs]
        self._call = tinygrad.TinyJit(lambda *given: expression(*given).realize())
        for _ in range(3):
            self.run(0)

    @staticmethod
    def found() -> bool:
        """Whether it and a library of Dawn for this machine are installed."""
        dawn = importlib.util.find_spec("pydawn")
        if importlib.util.find_spec("tinygrad") is None or dawn is None or dawn.origin is None:
            return False
        library = Path(dawn.origin).parent / "lib" / f"libwebgpu_dawn_{platform.machine()}.so"
        os.environ.setdefault("WEBGPU_PATH", str(library))
        return library.exists()

    def run(self, slot: int) -> Any:
        result = self._call(*self._given)
        self._device.synchronize()
        return result


def _bound(array: Any) -> tuple[Any, int]:
    return array.owner.buffer, array.nbytes


def _case(op: str, shape: tuple[int, ...], kernel: Any, inputs: Sequence[np.ndarray], want: np.ndarray, passes: Callable[..., Any], bar: float, nbytes: int, peer: Callable[..., Any] | None = None) -> Case:
    def prepare() -> Prepared:
        gpu = device()
        given = [tw.to_device(x, "webgpu") for x in inputs]
        ours, theirs = (gpu.empty(want.shape, tw.f32) for _ in range(2))
        hand = ByHand(passes(gpu, given, theirs))

        def run(slot: int) -> None:
            kernel(*given, out=ours)
            gpu.wait()

        def verify(slot: int, returned: object, variant: Variant) -> str:
            got = returned.numpy().reshape(want.shape) if variant.name == "tinygrad" else (ours if variant.name == OURS else theirs).numpy()  # type: ignore[attr-defined]
            error = float(np.abs(got - want).max() / max(1e-30, np.abs(want).max()))
            return "" if error < 1e-4 else f"off by {error}"

        def poison() -> None:
            ours.fill(float("nan"))
            theirs.fill(float("nan"))

        variants = [Variant(OURS, run), Variant("by hand", hand.run)]
        if peer is not None and Tinygrad.found():
            variants.append(Variant("tinygrad", Tinygrad(peer, inputs).run, returns=True))
        return Prepared(variants, poison, verify)

    return Case(op, shape, "f32", nbytes, prepare, Bar(bar))


def _sum_passes(gpu: WebGpuDevice, given: Sequence[Any], out: Any) -> list[Any]:
    steps, source, count = [], _bound(given[0]), given[0].size
    while count > 1:
        count = -(-count // 256)
        target = _bound(out) if count == 1 else (gpu.pool.take(4 * count), 4 * count)
        steps.append((_SUM, (source, target), (count, 1)))
        source = target
    return steps


def cases(quick: bool) -> list[Case]:
    random = np.random.default_rng(0)
    n, rows, side = 1 << 18 if quick else 64 * _MOST_BLOCKS, 256 if quick else 1024, 128 if quick else 512
    x, y = (random.standard_normal(n).astype(np.float32) for _ in range(2))
    m = random.standard_normal((rows, 1024)).astype(np.float32)
    a, b = (random.standard_normal((side, side)).astype(np.float32) for _ in range(2))
    e = np.exp(m.astype(np.float64) - m.max(1, keepdims=True))
    positive = np.abs(x)
    filled = {"COLUMNS": "1024", "ROWS": str(rows)}

    def text(code: str, **names: str) -> str:
        for name, value in names.items():
            code = code.replace(name, value)
        return code

    return [
        _case("dispatch", (64,), add, (x[:64].copy(), y[:64].copy()), x[:64] + y[:64], lambda gpu, g, o: [(_ADD, (*map(_bound, g), _bound(o)), (1, 1))], 1 / 1.3, 768),
        _case("add", (n,), add, (x, y), x + y, lambda gpu, g, o: [(_ADD, (*map(_bound, g), _bound(o)), (n // 64, 1))], 1.0, 12 * n, lambda a, b: a + b),
        _case("sum", (n,), total, (positive,), positive.sum(dtype=np.float64, keepdims=True), _sum_passes, 1.0, 4 * n, lambda a: a.sum()),
        _case("softmax", m.shape, softmax, (m,), e / e.sum(1, keepdims=True), lambda gpu, g, o: [(text(_SOFTMAX, **filled), (*map(_bound, g), _bound(o)), (-(-rows // 64), 1))], 1.0, 8 * m.size, lambda a: a.softmax(axis=1)),
        _case("matmul", (side,) * 3, matmul, (a, b), a.astype(np.float64) @ b, lambda gpu, g, o: [(text(_MATMUL, COLUMNS=str(side)), (*map(_bound, g), _bound(o)), (-(-side // 8),) * 2)], 1.0, 12 * side * side, lambda a, b: a @ b),
    ]  # fmt: skip


def compile_records(setting: Setting) -> Iterator[Record]:
    """Milliseconds from a checked kernel to code, nothing found in a cache."""
    given: dict[str, tuple[Any, tuple[np.ndarray, ...]]] = {"add": (add, (np.ones(999, np.float32),) * 2), "matmul": (matmul, (np.ones((512, 512), np.float32),) * 2)}
    for op in COMPILE_BARS:
        _, name, chip = op.split()
        (kernel, arguments), target, times = given[name], parse_target(chip), []
        runner = kernel.runner
        signature = runner.signature(runner.arguments(kernel.bound(*arguments), True), True)
        build_artifact(compile_stages(kernel.function, signature, target).stages.thread, target)  # what a process loads once
        for _ in range(5):
            start = time.perf_counter()
            build_artifact(compile_stages(kernel.function, signature, target).stages.thread, target)
            times.append((time.perf_counter() - start) * 1e3)
        yield Record(
            op, [], "f32", setting.device, ours_ms=sorted(times)[2], ours_min_ms=min(times), bar_ms=COMPILE_BARS[op], commit=setting.commit, date=setting.date
        )
